"""Thousands of damaged files: each is read, or refused in one line that names it.

The mutations are those of fuzzers: bytes are flipped, cut out, doubled and replaced by what
parsers have stumbled over. They come from a seed, so that a failure can be repeated.
"""

import os
import random
from pathlib import Path

import pytest
from command_line import run_cli

from axonn_tune.errors import AxonnTuneError, FileError
from axonn_tune.io.journal import Journal, MeasurementJournal
from axonn_tune.io.json_files import load_json
from axonn_tune.io.logs import LogOptions, read_logs
from axonn_tune.io.presets import load_cluster, load_engine, load_machine, load_model
from axonn_tune.io.tables import load_table
from axonn_tune.spec.measurement import Measurement
from axonn_tune.spec.validation import Validation

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
PERLMUTTER = load_machine("perlmutter")
LOG_OPTIONS = LogOptions(n_ranks=8, ranks_per_node=4)

HF_CONFIG = """{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
"max_position_embeddings": 4096, "intermediate_size": 11008, "_name_or_path": "a/b",
"tie_word_embeddings": false, "head_dim": 128, "mlp_bias": false}"""
JOURNAL = """{"owner": {"device": "CPU", "nodes": ["a", "a"]}}
{"key": "2x1x1x1", "result": {"attempts": 1}}
{"key": "2x1x1x1", "result": {"failure": "out of memory"}}
{"key": "1x2x1x1", "result": {"attempts": 2}}
"""
RUNS = """# mine
model,gpus,layout,step_seconds,status,engine
tiny,8,1x1x8x1,0.01,ok,bundled
tiny,8,"x=2,z=4",0.02,,axonn
"""
OWNER = {"device": "CPU", "nodes": ["a", "a"]}


def read_journal(path):
    Journal(str(path)).read(OWNER)
    runs = MeasurementJournal(Journal(str(path)))
    runs.ended()
    runs.under_way()


def read_runs(path):
    load_table(str(path), ("model", "gpus", "layout", "step_seconds"), ("status", "engine"))


def text_of(path, most=20_000):
    """Return the text of a file that is short enough to be read a thousand times."""
    text = path.read_text()
    assert len(text) < most, path
    return text


VALIDATION = text_of(ROOT / "docs" / "emulated" / "flat-8-hsdp.json")
# The name of a file, its content, and what reads it.
READERS = {
    "machine": ("a.yaml", text_of(ROOT / "hardware_profiles" / "perlmutter.yaml"), load_machine),
    "model": ("a.yaml", text_of(ROOT / "models" / "llama3-8b.yaml"), load_model),
    "cluster": (
        "a.yaml",
        text_of(ROOT / "axonn_tune/emulate/clusters/uneven-8.yaml"),
        load_cluster,
    ),
    "engine": ("a.yaml", text_of(ROOT / "axonn_tune/engines/nanotron.yaml"), load_engine),
    "runs": ("runs.csv", RUNS, read_runs),
    "config": ("config.json", HF_CONFIG, load_model),
    "validation": ("a.json", VALIDATION, lambda path: load_json(path, Validation)),
    "record": ("a.json", VALIDATION, lambda path: load_json(path, Measurement)),
    "journal": ("a.partial", JOURNAL, read_journal),
    **{
        name: (
            name,
            text_of(DATA / name),
            lambda path: read_logs([str(path)], PERLMUTTER, LOG_OPTIONS),
        )
        for name in ("nccl_all_reduce_2x4.log", "osu_allgather_2x4.log", "gemm.csv")
    },
}
# What parsers stumble over: special numbers, deep nesting, tags, anchors, controls, separators.
WORDS = (
    "nan NaN .inf -1 0 1e308 1e-308 1e999 -0.0 ² ٣ [[]] {} null ~ true '' [1,2] !!timestamp "
    "!!python/object:os.system &a *a <<: : - ? | > # ' , ; % @ ` \\ $x$ { } \x00 \x1b[31m \x07"
)
SNIPPETS = [
    *WORDS.split(" "),
    *("9" * 5000, "[" * 2000, "{a: " * 2000, '"', '""', "!!bool maybe", "!!int ''", "<<: *a"),
    *("\u2028", "\u202e", "\r", "\n", "\t", "\n\n  ", "\ufeff", "\xa0", ": ", "- ", "? "),
]


def mutated(content, chance):
    """Return the content after one to four mutations, as bytes."""
    data = bytearray(content, "utf-8")
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice([0, 1, 2, 8, 60]))
        match chance.randrange(6):
            case 0:
                data[start:end] = bytes(chance.randrange(256) for _ in range(end - start))
            case 1:
                data[start:end] = b""
            case 2:
                data[start:end] = chance.choice(SNIPPETS).encode()
            case 3:
                data[start:start] = data[end : end + 80]
            case 4:
                data = data[:start] or data
            case 5:  # A whole word, such as a value or a key.
                word = bytes(data[start : start + 200]).split()[1:2]
                if word:
                    at = data.find(word[0], start)
                    data[at : at + len(word[0])] = chance.choice(SNIPPETS).encode()
    return bytes(data)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, kind):
    name, content, read = READERS[kind]
    path = tmp_path / name
    chance = random.Random(kind)
    refused = 0
    for number in range(1500):
        path.write_bytes(mutated(content, chance))
        try:
            read(path)
        except AxonnTuneError as error:
            refused += 1
            message = str(error)
            assert message.isprintable() and message, f"case {number}: {message!r}"
            assert str(path) in message, f"case {number}: {message}"
        except Exception as error:
            kept = path.read_bytes()[:300]
            raise AssertionError(f"case {number} of {kind}: {error!r}: {kept!r}") from error
    assert refused > 150


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["machine", "model", "config"])
def test_what_is_read_of_a_damaged_file_is_ranked_or_refused(capsys, tmp_path, kind):
    """What a damaged number still means is a time, and never NaN."""
    name, content, read = READERS[kind]
    path = tmp_path / name
    chance = random.Random(kind)
    options = {"machine": ("--model", "tiny", "--machine", path)}.get(kind, ("--model", path))
    ranked = 0
    while ranked < 5:
        path.write_bytes(mutated(content, chance))
        try:
            read(path)
        except AxonnTuneError:
            continue
        ranked += 1
        code, out, err = run_cli(capsys, "suggest", "--gpus", 16, *options)
        assert code in (0, 2) and err.count("\n") <= 1
        assert "nan" not in out.lower().split() and "Traceback" not in err


def test_a_refusal_names_the_file_even_where_the_disk_has_none(tmp_path):
    for read in (load_machine, load_model, load_cluster):
        with pytest.raises(FileError, match="none"):
            read(os.fspath(tmp_path / "none.yaml"))
