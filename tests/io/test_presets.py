"""Presets: every shipped model, and how names and paths are resolved."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.presets import (
    as_found,
    list_clusters,
    list_engines,
    list_machines,
    list_models,
    load_cluster,
    load_engine,
    load_machine,
    load_model,
)

pytestmark = pytest.mark.usefixtures("no_user_folders")

PUBLISHED = {
    "gpt-neox-20b": 20.55e9,
    "llama2-7b": 6.74e9,
    "llama2-13b": 13.02e9,
    "llama2-70b": 68.98e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.85e9,
    "gpt3-175b": 174.6e9,
    "megatron-22b": 22e9,
    "megatron-530b": 529.6e9,
    "megatron-1t": 1008e9,
}
# Their parameters are held against the makers' in test_published_models.py.
MODERN = {
    *("deepseek-v2", "deepseek-v3", "gemma3-27b", "gpt-oss-20b", "gpt-oss-120b"),
    *(
        "kimi-k2",
        "llama4-maverick",
        "llama4-scout",
        "mixtral-8x7b",
        "mixtral-8x22b",
        "olmoe-1b-7b",
        "qwen2.5-7b",
        "qwen2.5-72b",
    ),
    *("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"),
    *("apertus-8b", "apertus-70b", "glm-4.5", "minimax-m2"),
}
# The name of an AxoNN model is rounded: 42 layers of 12288 are 76.8e9, called 80B.
NOMINAL = {f"gpt-{size}b": size * 1e9 for size in (5, 10, 20, 40, 60, 80, 160, 320, 640)}

MACHINE = """\
name: testbox
ranks_per_node: 4
gpu:
  name: A100
  n_multiprocessors: 108
  memory_bytes: {value: 40 GB, origin: published, source: vendor}
  memory_bandwidth_bytes_per_s: {value: 1.555 TB/s, origin: published, source: vendor}
  peak_flops_per_s:
    bf16: {value: 312 TFLOP/s, origin: published, source: vendor}
gemm:
  sustained_fraction: {value: 87%, origin: measured, source: me}
  k_overhead: {value: 200, origin: assumed, source: me}
  tiles:
    - {rows: 256, columns: 128, speed_fraction: 1.0}
  mode_fraction:
    NN: {value: 1.0, origin: measured, source: me}
    NT: {value: 0.98, origin: measured, source: me}
    TN: {value: 0.97, origin: measured, source: me}
kernels:
  flash_forward_fraction: {value: 0.6, origin: measured, source: me}
  flash_backward_fraction: {value: 0.5, origin: measured, source: me}
  memory_fraction: {value: 0.85, origin: measured, source: me}
  launch_seconds: {value: 4 us, origin: measured, source: me}
  slowdown_fraction: {value: 0.1, origin: assumed, source: test}
links:
  - name: nvlink
    unit_ranks: 1
    bandwidth_bytes_per_s: {value: 300 GB/s, origin: published, source: vendor}
    latency_seconds: {value: 2 us, origin: assumed, source: me}
  - name: slingshot
    unit_ranks: 4
    bandwidth_bytes_per_s: {value: 2e11, origin: published, source: vendor}
    latency_seconds: {value: 5 us, origin: assumed, source: me}
memory_reserve:
  reserved_bytes: {value: 1.5 GB, origin: assumed, source: me}
  fragmentation_fraction: {value: 0.05, origin: assumed, source: me}
jitter_fraction: {value: 0.01, origin: assumed, source: me}
"""
MODEL = "name: mine\nn_layers: 2\nhidden_size: 64\nn_heads: 8\nvocab_size: 512\nseq_len: 32\n"
HF = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 32,
    "vocab_size": 512,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_match_the_published_count(name: str) -> None:
    model = load_model(name)
    assert model.parameters == pytest.approx(PUBLISHED[name], rel=0.01)
    assert model.published_parameters == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(NOMINAL))
def test_parameters_of_axonn_models_are_near_their_names(name: str) -> None:
    model = load_model(name)
    assert model.parameters == pytest.approx(NOMINAL[name], rel=0.05)
    assert model.published_parameters == NOMINAL[name]
    assert (model.seq_len, model.vocab_size) == (2048, 51200)


def test_the_presets_are_complete_and_named_as_their_files() -> None:
    names = list_models()
    assert set(names) == {*PUBLISHED, *NOMINAL, *MODERN, "tiny"}
    assert names.index("gpt-5b") < names.index("gpt-10b") < names.index("gpt-640b")
    for name in names:
        assert load_model(name).name == name
        assert load_model(name).source


def test_the_tiny_model_divides_over_eight_ranks() -> None:
    tiny = load_model("tiny")
    sizes = (tiny.hidden_size, tiny.n_heads, tiny.n_kv_heads, tiny.vocab_size, tiny.ffn_hidden_size)
    assert all(size % 8 == 0 for size in sizes)
    assert tiny.parameters < 2e6


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("80b", "gpt-80b"),
        ("80B", "gpt-80b"),
        ("GPT-80b", "gpt-80b"),
        ("20b", "gpt-20b"),
        ("neox-20b", "gpt-neox-20b"),
        ("gpt-neox", "gpt-neox-20b"),
        ("175b", "gpt3-175b"),
        ("gpt3", "gpt3-175b"),
        ("1t", "megatron-1t"),
        ("405b", "llama3-405b"),
        ("DeepSeek-V3", "deepseek-v3"),
        ("qwen3-30b", "qwen3-30b-a3b"),
        ("scout", "llama4-scout"),
        ("tiny", "tiny"),
    ],
)
def test_names_are_found_by_their_parts(asked: str, found: str) -> None:
    assert load_model(asked).name == found


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ("70b", ["ambiguous", "llama2-70b", "llama3-70b"]),
        ("7b", ["ambiguous", "llama2-7b, qwen2.5-7b"]),
        ("llama2", ["ambiguous", "llama2-7b, llama2-13b, llama2-70b"]),
        ("gpt-8b", ["unknown model 'gpt-8b'", "did you mean", "gpt-80b"]),
        ("0b", ["unknown"]),
        ("", ["unknown"]),
        ("-", ["unknown"]),
        ("zzzzzzzz", ["unknown", "known: "]),
    ],
)
def test_names_that_do_not_resolve(asked: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_model(asked)
    for part in parts:
        assert part in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_exact_name_wins_over_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hardware_profiles"
    folder.mkdir()
    for name in ("quartz", "quartz-80gb"):
        (folder / f"{name}.yaml").write_text(MACHINE.replace("testbox", name))
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    assert load_machine("quartz").name == "quartz"
    assert load_machine("Quartz-80GB").name == "quartz-80gb"
    assert {"quartz", "quartz-80gb"} <= set(list_machines())
    assert "quartz" not in list_models()


def test_user_folders_come_first_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "models").mkdir(parents=True)
    second.mkdir()
    (first / "models" / "gpt-80b.yml").write_text(MODEL.replace("mine", "first"))
    (second / "gpt-80b.yaml").write_text(MODEL.replace("mine", "second"))
    (second / "other.yaml").write_text(MODEL.replace("mine", "other"))
    monkeypatch.setenv("AXONN_TUNE_PATH", os.pathsep.join([str(first), "", str(second)]))
    assert load_model("80b").name == "first"
    assert load_model("other").name == "other"
    assert list_models().count("gpt-80b") == 1


def test_a_mixed_folder_tells_models_from_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.yaml").write_text(MODEL)
    (tmp_path / "box.yaml").write_text(MACHINE)
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    (tmp_path / ".hidden.yaml").write_text(MODEL)
    (tmp_path / "broken.yaml").write_bytes(b"\xff\xff")
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    assert {"small", "box", "compose", "broken", ".hidden"} & set(list_models()) == {"small"}
    assert {"small", "box", "compose", "broken", ".hidden"} & set(list_machines()) == {"box"}
    assert load_machine("box").name == "testbox"
    with pytest.raises(FileError, match=r"compose\.yaml.*services: unknown key"):
        load_model("compose")
    with pytest.raises(FileError, match=r"broken\.yaml.*UTF-8"):
        load_model("broken")
    with pytest.raises(InputError, match="unknown model 'box'"):
        load_model("box")


def test_a_user_folder_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXONN_TUNE_PATH", "/nowhere/at/all")
    assert load_model("80b").name == "gpt-80b"
    with pytest.raises(InputError, match="AXONN_TUNE_PATH names no folder: /nowhere/at/all"):
        load_model("mine")


def test_only_the_file_of_the_name_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "broken.yaml").write_text("name: [")
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    assert load_model("80b").name == "gpt-80b"
    assert "broken" in list_models()
    with pytest.raises(FileError, match=r"broken\.yaml, line [12]"):
        load_model("broken")


def test_models_are_loaded_by_path(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MODEL)
    (tmp_path / "plain").write_text(MODEL)
    for given in ("a.yaml", "./a.yaml", str(tmp_path / "a.yaml"), tmp_path / "a.yaml", "plain"):
        assert load_model(given).name == "mine"


def test_hugging_face_configs_are_loaded_by_file_or_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    for given in ("my-gpt", "my-gpt/", "my-gpt/config.json", str(folder)):
        model = load_model(given)
        assert (model.name, model.n_layers, model.hidden_size) == ("my-gpt", 2, 64)
        assert "config.json" in model.source


@pytest.mark.parametrize("given", ["missing.yaml", "no/such/model.yaml", "x.json", "./"])
def test_paths_that_cannot_be_read(given: str) -> None:
    with pytest.raises(FileError):
        load_model(given)
    with pytest.raises(FileError):
        load_machine(given)


def test_a_name_of_a_hub_is_not_downloaded() -> None:
    with pytest.raises(FileError, match="nothing is downloaded"):
        load_model("meta-llama/Llama-2-7b")


def test_machines_are_loaded_by_path(tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text(MACHINE)
    machine = load_machine("box.yaml")
    assert machine.peak_flops_per_s("bf16") == 312e12
    assert machine.links[1].bandwidth_bytes_per_s.value == 2e11
    assert machine.gemm.sustained_fraction.value == 0.87


def test_a_model_is_no_machine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MODEL)
    with pytest.raises(FileError, match="line 2: n_layers: unknown key") as caught:
        load_machine("a.yaml")
    assert "gpu, ranks_per_node, gemm, kernels, links" in str(caught.value)


def test_a_model_and_a_machine_load_in_milliseconds(tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text(MACHINE)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        load_model("80b")
        load_machine("box.yaml")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02  # about 1 ms with libyaml, 10 ms without


def test_a_profile_for_a_newer_version_is_refused_before_its_unknown_keys(tmp_path):
    path = tmp_path / "future.yaml"
    path.write_text("profile_version: 99\nranks_per_node: 4\nwarp_drive: true\n")
    with pytest.raises(FileError, match=r"profile_version 99 is newer .* up to 8; upgrade"):
        load_machine(path)


@pytest.mark.parametrize("folder", ["~nosuchuser/x", "~/x", "\t", "a b"])
def test_folders_that_do_not_exist_are_named(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("AXONN_TUNE_PATH", folder)
    with pytest.raises(InputError, match="AXONN_TUNE_PATH names no folder"):
        load_model("no-such")


@pytest.mark.timeout(10)
def test_a_pipe_in_a_folder_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    os.mkfifo(tmp_path / "gpt-80b.yaml")
    assert load_model("gpt-80b").n_layers == 42


@pytest.mark.parametrize(
    ("load", "names", "preset"),
    [
        (load_engine, list_engines, "fsdp2"),
        (load_cluster, list_clusters, "flat-8"),
        (load_machine, list_machines, "frontier"),
        (load_model, list_models, "tiny"),
    ],
)
def test_copies_are_listed_by_the_names_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, names, preset
) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: {preset}\nbase: {preset}\n")
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    listed = [each.name for each in as_found(load, names())]
    assert sorted(listed) == sorted(names())
    assert {"mine", preset} <= set(listed)
