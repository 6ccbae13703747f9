"""Read the logs of torchtitan.

A line of a step has the tokens per second of one GPU and the peak of the memory that the allocator
reserved (components/metrics.py). The lines before say the mesh, the batch and the model. Since
August 2026 they count tokens in place of sequences (trainer.py at b5bcd76).
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from axonn_tune.io.runs.logged_run import (
    NUMBER,
    LoggedRun,
    first_count,
    largest,
    layout_text,
    logged_run,
)
from axonn_tune.units import GIB_BYTES

_STEP = re.compile(
    r"step:\s*(\d+)\s[^\n]{0,200}?memory:\s*[\d.]+GiB[^\n]{0,40}?(?:tps|wps):\s*([\d,]+)"
)
_MEMORY = r"memory:\s*" + NUMBER + r"GiB"
_MESH = re.compile(r"Building \d+-D device mesh with [\[(]([^\])]*)[\])], \[([\d, ]+)\]")
_DEGREES = re.compile(r"Building device mesh with parallelism: ([^\n]*)")
# What begins with a repetition begins where nothing before it could: otherwise a long line of
# digits or letters would be read once for each of its characters.
_TOKENS = r"(?<!\d)(\d+) tokens per train step"
_TOKENS_OF_RANK = r"(?<!\d)(\d+) tokens per DP rank"
_DEGREE = re.compile(r"\b(\w+)=(\d+)")
_AXES = {
    "dp": "shard",
    "dp_shard": "shard",
    "dp_replicate": "replica",
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
}
_YEAR = re.compile(r"(20\d\d)-\d\d-\d\d \d\d:\d\d:\d\d,\d+ - root")


def is_torchtitan(text: str) -> bool:
    """Return whether a log has a step of torchtitan."""
    return _STEP.search(text) is not None or "[titan]" in text


def parse_torchtitan(text: str) -> LoggedRun:
    """Return the run; a step lasts as long as its tokens take at the rate of one GPU."""
    mesh = _mesh(text)
    n_gpus = prod(mesh.values())
    seq_len = first_count(r"(?:sequence|maximum context) length (\d+)", text)
    batch = _sequences(r"global batch size (\d+)", _TOKENS, seq_len, text)
    tokens = first_count(_TOKENS, text) or (batch or 0) * (seq_len or 0)
    tokens_per_gpu = tokens / n_gpus
    steps: dict[int, float] = {}
    for step, rate in _STEP.findall(text):
        tokens_per_second = float(rate.replace(",", "") or 0)
        if tokens_per_second:
            steps.setdefault(int(step), tokens_per_gpu / tokens_per_second)
    facts = {
        "engine": _engine(text),
        "gpus": n_gpus if mesh else None,
        "layout": layout_text(mesh) if mesh else None,
        "global_batch": batch,
        **_micro_batches(text, mesh.get("pipeline", 1), seq_len),
        "seq_len": seq_len,
        "precision": "fp8-current" if re.search(r"Float8 .*training active", text) else None,
        "recompute": _recompute(text),
    }
    return logged_run(
        text, facts, steps, memory_bytes=largest(_MEMORY, text) * GIB_BYTES, sizes=_sizes(text)
    )


def _mesh(text: str) -> dict[str, int]:
    """Return the sizes of the axes of the mesh, under the names of this tool."""
    if match := _DEGREES.search(text):
        named = {axis: int(size) for axis, size in _DEGREE.findall(match[1])}
    elif match := _MESH.search(text):
        names = re.findall(r"\w+", match[1])
        named = dict(zip(names, map(int, re.findall(r"\d+", match[2])), strict=False))
    else:
        named = {}
    return {_AXES[axis]: size for axis, size in named.items() if axis in _AXES and size > 0}


def _sequences(of_sequences: str, of_tokens: str, seq_len: int | None, text: str) -> int | None:
    """Return a number of sequences, which the log states as such or as tokens."""
    tokens = first_count(of_tokens, text)
    if tokens is None:
        return first_count(of_sequences, text)
    return tokens // seq_len if seq_len and tokens % seq_len == 0 else None


def _micro_batches(text: str, n_stages: int, seq_len: int | None) -> dict[str, int | None]:
    """Return the micro-batch, and the virtual stages of a rank of a pipeline.

    A pipeline cuts the local batch into micro-batches. In 2024 no line said how many, and there
    were as many as stages unless they were given (pipelining_utils.py at 9dec370).
    """
    local_batch = _sequences(r"local batch size (\d+)", _TOKENS_OF_RANK, seq_len, text)
    if n_stages == 1 or local_batch is None:
        return {"micro_batch": local_batch}
    match = re.search(r"Using pipeline schedule \w+ with (\d+) microbatches and (\d+) stages", text)
    n_micro, n_chunks = map(int, match.groups()) if match else (n_stages, None)
    micro_batch = max(local_batch // max(n_micro, 1), 1)
    return {"micro_batch": micro_batch, "virtual_stages": n_chunks and n_chunks // n_stages}


def _engine(text: str) -> str:
    """Return the version of torchtitan by the date of the log and by whether it compiles."""
    if "with torch.compile" not in text:
        return "torchtitan-2024-eager"
    year = first_count(_YEAR.pattern, text)
    if year is None or year > 2025:
        return "torchtitan"
    return "torchtitan-2024" if year < 2025 else "torchtitan-2025"


def _recompute(text: str) -> str | None:
    """Return the recomputation; None where the compiler chooses it by a budget of memory.

    Since June 2026 the name of a class is printed, such as FullAC.
    """
    if match := re.search(r"Applied (full|selective)(?:AC)? activation checkpointing", text, re.I):
        return match[1].lower()
    return None if "budget option" in text else "none"


def _sizes(text: str) -> dict[str, Any]:
    """Return the fields of a Llama, whose arguments torchtitan prints."""
    match = re.search(r"Building llama3? \S+ with \w+\(([^\n]*)\)", text)
    if not match:
        return {}
    arguments = dict(re.findall(r"\b(\w+)=([\w.+-]+)", match[1]))
    names = ("dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "max_seq_len")
    if not all(arguments.get(name, "").isdecimal() for name in names):
        return {}
    hidden, layers, heads, vocabulary, multiple, seq_len = (int(arguments[name]) for name in names)
    kv_heads = arguments.get("n_kv_heads", "")
    return {
        "n_layers": layers,
        "hidden_size": hidden,
        "n_heads": heads,
        "n_kv_heads": int(kv_heads) if kv_heads.isdecimal() else heads,
        "ffn_hidden_size": _ffn_width(hidden, arguments.get("ffn_dim_multiplier", ""), multiple),
        "vocab_size": vocabulary,
        "seq_len": seq_len,
        "gated_mlp": True,
        "norm": "rms",
        "position": "rotary",
        "bias": False,
        "tied_embeddings": False,
    }


def _ffn_width(hidden: int, factor: str, multiple: int) -> int:
    """Return the width of the MLP as models/llama3/model.py (FeedForward) computes it."""
    width = int(2 * 4 * hidden / 3)
    if re.fullmatch(NUMBER, factor):
        width = int(float(factor) * width)
    return multiple * -(-width // multiple)
