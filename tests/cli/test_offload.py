"""What commands say where optimizer states are offloaded."""

import json

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.io.yaml_files import dump_yaml, parse_yaml

JOB = ["--gpus", "8", "--model", "5b", "--strategy", "zero3", "--global-batch", "64"]
OFFLOAD = [*JOB, "--offload", "optimizer"]
LARGE = ["--gpus", "16", "--model", "80b", *OFFLOAD[4:]]


@pytest.fixture
def said(capsys):
    """A function that returns what a command prints."""

    def run(*words):
        code, out, err = run_cli(capsys, *words)
        assert code == 0, err
        return out

    return run


def test_a_ranking_says_what_is_in_the_host_s_memory(said):
    text = said("suggest", *OFFLOAD)
    assert "in the host's memory: optimizer_states, gradients, weights." in text
    assert "its host took 4 to 8 s longer than predicted" in text
    without = said("suggest", *JOB)
    assert "host" not in without and "offload" not in without


def test_json_states_offload_and_the_memory_of_the_host(said):
    """16 bytes of 5.05 billion parameters, over the two nodes that share them."""
    document = json.loads(said("suggest", *OFFLOAD, "--fix", "shard=8", "--format", "json"))
    assert document["assumptions"]["offload"] == "optimizer"
    (best,) = document["results"]
    assert best["host_memory_bytes"] == pytest.approx(16 * 5.05e9 / 2, rel=1e-3)
    assert best["memory_terms_bytes"]["optimizer_states"] == 0.0
    assert "host_copies" not in best["memory_terms_bytes"]


def test_an_explanation_names_the_host_s_part(said):
    text = said("explain", *OFFLOAD, "--grid", "shard=8")
    assert "Offloaded: optimizer_states, gradients, weights; 37.6 GiB of the 238.4 GiB" in text
    assert "host memory bandwidth" in text and "to_host 0." in text


def test_what_a_node_s_memory_cannot_hold_is_marked_and_explained(said):
    table = said("suggest", *LARGE, "--include-oom")
    assert "OOM: host memory" in table
    text = said("explain", *LARGE, "--grid", "shard=16")
    shortage = "286.0 GiB of the 238.4 GiB of a node's host: out of the host's memory"
    assert f"{shortage}; the times are those of a host with enough memory" in text
    assert "GiB per GPU: fits" in text


def test_a_script_warns_of_a_host_without_enough_memory(said, tmp_path):
    said("launch", *LARGE, "--grid", "shard=16", "--output", str(tmp_path / "run"))
    script = (tmp_path / "run" / "launch.sbatch").read_text()
    needed = "Predicted to run out of the host's memory: 286.0 GiB of 238.4 GiB per node."
    assert needed in " ".join(script.replace("\n#", "").split())


def test_engines_that_offload_are_listed(said):
    rows = {line.split()[0]: line for line in said("engines", "list").splitlines()[2:]}
    offloading = {name for name, line in rows.items() if line.split()[-2] == "yes"}
    torchtitan = {f"torchtitan{end}" for end in ("", "-2025", "-2024", "-2024-eager")}
    others = {
        "deepspeed",
        "deepspeed-2023",
        "deepspeed-alst",
        "deepspeed-eager",
        "fsdp2",
        "fsdp2-eager",
        "megatron-core",
    }
    assert offloading == others | torchtitan
    assert "offload = optimizer_states, gradients\n" in said("engines", "show", "deepspeed")


def test_a_host_without_its_memory_is_refused(said, capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    document = parse_yaml(said("machines", "template"), path)
    del document["host"]["memory_bytes"]
    path.write_text(dump_yaml(document))
    assert_refused(capsys, "machines", "show", path, culprit="host.memory_bytes: missing")


def test_a_machine_without_a_host_is_refused_in_one_line(capsys):
    culprit = "machine 'jean-zay' has no facts for --offload"
    assert_refused(capsys, "suggest", *OFFLOAD, "--machine", "jean-zay", culprit=culprit)
