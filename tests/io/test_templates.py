"""The files with which a user begins a model or a machine."""

import re
from dataclasses import MISSING, fields

import pytest
from command_line import run_cli

from axonn_tune.io.package_data import template
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.io.yaml_files import parse_yaml
from axonn_tune.spec.blocks import Experts, LatentAttention
from axonn_tune.spec.gpu import Gpu
from axonn_tune.spec.model import Model

# What is filled in when a config is read, not by people.
_FROM_CONFIGS = {"seq_len_key", "not_modelled"}


@pytest.mark.parametrize("plural", ["models", "machines"])
def test_a_template_can_be_used_as_it_is(capsys, tmp_path, plural):
    path = tmp_path / "mine.yaml"
    assert run_cli(capsys, plural, "template", "--output", path)[0] == 0
    assert run_cli(capsys, plural, "show", path)[0] == 0
    code, out, _ = run_cli(capsys, plural, "template")
    assert (code, out) == (0, path.read_text())


def test_a_model_and_a_machine_from_templates_give_a_suggestion(capsys, tmp_path):
    for noun in ("model", "machine"):
        (tmp_path / f"{noun}.yaml").write_text(template(noun))
    files = ["--model", tmp_path / "model.yaml", "--machine", tmp_path / "machine.yaml"]
    code, out, _ = run_cli(capsys, "suggest", "--gpus", 64, *files)
    assert code == 0
    assert "my-model" in out and "my-cluster" in out
    assert load_machine(tmp_path / "machine.yaml").node_level == 1


def test_the_template_of_a_machine_names_the_clock_in_training_and_changes_no_step(tmp_path):
    """Nobody would look for it, and without it steps on GH200 come out too fast by a quarter."""
    assert "  training_clock_fraction:" in template("machine")
    (tmp_path / "machine.yaml").write_text(template("machine"))
    stated = load_machine(tmp_path / "machine.yaml").gpu.training_clock_fraction
    assert stated == next(f.default for f in fields(Gpu) if f.name == "training_clock_fraction")


def test_the_template_of_a_model_states_the_defaults_and_names_every_key(tmp_path):
    text = template("model")
    defaults = {item.name: item.default for item in fields(Model) if item.default is not MISSING}
    stated = parse_yaml(text, "template")
    assert all(
        stated[name] == defaults[name] for name in stated.keys() & defaults.keys() - {"source"}
    )
    everything = re.sub(r"^# ( *\w+:)", r"\1", text, flags=re.MULTILINE)
    named = parse_yaml(everything, "template")
    assert named.keys() == {item.name for item in fields(Model)} - _FROM_CONFIGS
    assert named["latent_attention"].keys() == {item.name for item in fields(LatentAttention)}
    assert named["experts"].keys() == {item.name for item in fields(Experts)}
    optional = {item.name: item.default for item in fields(Experts) if item.default is not MISSING}
    assert {name: named["experts"][name] for name in optional} == optional
    (tmp_path / "all.yaml").write_text(everything)
    model = load_model(tmp_path / "all.yaml")
    assert (model.n_kv_heads, model.experts.top_k, model.latent_attention.q_rank) == (8, 2, 1536)
