"""Numbers that no machine and no model can have are refused where a file is read."""

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.errors import FileError
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.io.yaml_files import dump_yaml, parse_yaml, save_yaml

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "hardware_profiles" / "frontier.yaml"


def changed(tmp_path, source, keys, value):
    """Write a copy of a preset with one value changed."""
    data = parse_yaml(source.read_text(), source)
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = tmp_path / "changed.yaml"
    path.write_text(dump_yaml(data))
    return path


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("gemm", "sustained_fraction", "value"), 1.001),
        (("gemm", "sustained_fraction", "value"), 82.9),
        (("gemm", "mode_fraction", "NT", "value"), 10),
        (("gemm", "k_overhead", "value"), -1e9),
        (("gemm", "k_overhead", "value"), 1e300),
        (("kernels", "flash_forward_fraction", "value"), 1.5),
        (("kernels", "memory_fraction", "value"), 1.5),
        (
            ("kernels", "strided_bytes_per_s"),
            {"value": 1e-300, "origin": "assumed", "source": "x"},
        ),
        (("kernels", "slowdown_fraction", "value"), 1e300),
        (("kernels", "launch_seconds", "value"), 1e308),
        (("kernels", "gap_seconds"), {"value": 1e308, "origin": "assumed", "source": "x"}),
        (("links", 0, "latency_seconds", "value"), 1e308),
        (("links", 0, "latency_seconds", "value"), -1),
        (("links", 1, "bandwidth_bytes_per_s", "value"), 1e-300),
        (("links", 1, "bandwidth_bytes_per_s", "value"), 1e300),
        (("gpu", "memory_bandwidth_bytes_per_s", "value"), 1e-300),
        (("gpu", "memory_bytes", "value"), 0.5),
        (("host", "link_bandwidth_bytes_per_s", "value"), 1e-300),
        (("host", "memory_bytes", "value"), 0.5),
        (("host", "memory_bandwidth_bytes_per_s", "value"), 1e300),
        (("host", "update_fraction"), {"value": 1.5, "origin": "assumed", "source": "x"}),
        (("gpu", "peak_flops_per_s", "bf16", "value"), 1e-300),
        (("memory_reserve", "reserved_bytes", "value"), -1),
        (("jitter_fraction", "value"), 1.5),
        (("ranks_per_node",), 3),
        (("ranks_per_node",), 6),
        (("links", 0, "name"), "a\x1b[31m"),
        (("gpu", "name"), "a\nb"),
        (("name",), "a\x07"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_its_field(tmp_path, keys, value):
    path = changed(tmp_path, PROFILE, keys, value)
    field = next(key for key in reversed(keys) if key not in ("value", 0, 1))
    with pytest.raises(
        FileError, match=rf"changed\.yaml, line \d+: \S*{field}: .*allowed: "
    ) as caught:
        load_machine(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("parameters", [-1, 0, 1e6, 1e14])
def test_a_published_count_that_contradicts_the_sizes_is_refused(tmp_path, parameters):
    path = changed(tmp_path, ROOT / "models" / "gpt-5b.yaml", ["published_parameters"], parameters)
    with pytest.raises(FileError, match=r"line \d+: published_parameters: .*the sizes give"):
        load_model(path)


def test_a_published_count_of_active_parameters_that_contradicts_the_sizes_is_refused(tmp_path):
    changes = ["published_active_parameters"], 300e9
    path = changed(tmp_path, ROOT / "models" / "deepseek-v3.yaml", *changes)
    with pytest.raises(FileError, match=r"line \d+: published_active_parameters: .*3\.755e\+10"):
        load_model(path)


def test_a_model_with_more_layers_than_any_is_refused(tmp_path):
    path = changed(tmp_path, ROOT / "models" / "gpt-5b.yaml", ["n_layers"], 10_001)
    with pytest.raises(FileError, match=r"n_layers: is 10001; allowed: at most 10000"):
        load_model(path)


@pytest.mark.parametrize(
    ("keys", "value", "allowed"),
    [
        (["experts", "top_k"], 257, "at most n_experts"),
        (["experts", "first_layer"], 61, "less than n_layers"),
        (["experts", "every"], 0, "a whole number"),
        (["latent_attention", "kv_rank"], 0, "a whole number"),
        (["qk_norm"], "both", "head, all"),
        (["window"], -1, "a whole number"),
    ],
)
def test_parts_of_a_model_that_cannot_be_are_refused_by_their_field(tmp_path, keys, value, allowed):
    path = changed(tmp_path, ROOT / "models" / "deepseek-v3.yaml", keys, value)
    with pytest.raises(FileError, match=rf"line \d+: {'.'.join(keys)}: .*allowed: .*{allowed}"):
        load_model(path)


@pytest.mark.parametrize(
    ("key", "allowed"),
    [("scaled_rotary", "position: rotary"), ("clamped_gate", "gated_mlp: true")],
)
def test_what_a_model_has_no_place_for_is_refused(tmp_path, key, allowed):
    path = changed(tmp_path, ROOT / "models" / "gpt-5b.yaml", [key], True)
    with pytest.raises(
        FileError, match=rf"line \d+: {key}: is true; allowed: only with .*{allowed}"
    ):
        load_model(path)


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\x07", "a\nb", "x" * 1000, "a\u202eb"])
def test_a_name_that_cannot_be_printed_is_refused(tmp_path, name):
    path = changed(tmp_path, ROOT / "models" / "gpt-5b.yaml", ["name"], name)
    with pytest.raises(FileError, match=r"name: is .*allowed: .*printed"):
        load_model(path)


def test_the_largest_jitter_is_accepted(capsys, tmp_path):
    path = changed(tmp_path, PROFILE, ["jitter_fraction", "value"], 1.0)
    assert run_cli(capsys, "suggest", "--gpus", 8, "--model", "tiny", "--machine", path)[0] == 0


@pytest.mark.parametrize("setting", ["inter_node.latency=1e308 s", "gpu.compute=1e200 FLOP/s"])
def test_a_setting_that_leads_nowhere_is_refused(capsys, setting):
    command = ["whatif", "--gpus", 64, "--model", "tiny", "--machine", "frontier", "--set", setting]
    assert_refused(capsys, *command, culprit=f"--set {setting}: allowed: within a factor of 1e+09")


def test_what_is_no_time_is_not_ranked(capsys):
    """The gap is 0 in the profile, so that no factor bounds it."""
    command = ["whatif", "--gpus", 64, "--model", "tiny", "--set", "host.gap=1e308 s"]
    assert_refused(capsys, *command, culprit="no time follows from its numbers")


def test_messages_may_be_larger_than_any_count(tmp_path):
    """nccl-tests are usually run up to 8 GiB."""
    profile = load_machine("dgx-h200")
    point = replace(profile.link_points[0], nbytes=2**33)
    save_yaml(tmp_path / "a.yaml", replace(profile, link_points=(point,)))
    assert load_machine(tmp_path / "a.yaml").link_points == (point,)
    text = (tmp_path / "a.yaml").read_text().replace(str(2**33), str(2**51))
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(FileError, match="nbytes: got 2251799813685248; allowed: a whole number"):
        load_machine(tmp_path / "b.yaml")
