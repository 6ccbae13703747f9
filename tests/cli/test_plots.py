"""``--plot``: figures of every command that draws one."""

import sys

import pytest
from command_line import assert_refused, run_cli
from figures import amount_drawn, assert_drawn, svg_texts

from axonn_tune.report.figure import FORMATS, figure_bytes, new_figure

JOB = ["--gpus", "64", "--model", "5b", "--global-batch", "128", "--recompute", "full"]
COMMANDS = {
    "suggest": [*JOB, "--top-n", "4"],
    "explain": [*JOB, "--grid", "1x4x8x2"],
    "scale": ["--model", "tiny", "--gpus", "4..16", "--global-batch", "16"],
    "machines": ["show", "frontier"],
    "reproduce": [],
}
# Texts that stand on each figure, among others.
TEXTS = {
    "suggest": {"gpt-5b on 64 NVIDIA A100-SXM4-40GB", "Time and memory", "Pareto front"},
    "explain": {"exposed, y", "optimizer_states", "reduce_scatter", "all_gather"},
    "scale": {"4", "8", "16", "ideal", "efficiency"},
    "machines": {"bf16 roofline", "all_reduce (8, 2)", "Products"},
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_figure_is_drawn_beside_what_is_printed(capsys, tmp_path, name):
    path = tmp_path / "figure.svg"
    code, with_figure, _ = run_cli(capsys, name, *COMMANDS[name], "--plot", path)
    _, without, _ = run_cli(capsys, name, *COMMANDS[name])
    assert code == 0 and with_figure == without
    assert_drawn(path)
    assert set(svg_texts(path)) >= TEXTS[name]


@pytest.mark.parametrize("ending", FORMATS)
def test_the_ending_chooses_the_format(capsys, tmp_path, ending):
    path = tmp_path / f"figure.{ending}"
    code, _, _ = run_cli(capsys, "machines", "show", "frontier", "--plot", path)
    assert code == 0
    assert_drawn(path)


@pytest.mark.parametrize("ending", FORMATS)
def test_empty_axes_and_other_formats_are_not_taken_for_a_figure(tmp_path, ending):
    empty, _ = new_figure(1, 2)
    path = tmp_path / f"figure.{ending}"
    path.write_bytes(figure_bytes(empty, f"empty.{ending}"))
    with pytest.raises(AssertionError):
        assert_drawn(path)
    other = FORMATS[FORMATS.index(ending) - 1]
    with pytest.raises((AssertionError, SyntaxError)):
        amount_drawn(figure_bytes(empty, f"empty.{other}"), ending)


def test_a_plot_of_a_pipeline_draws_its_ranks(capsys, tmp_path):
    path = tmp_path / "step.svg"
    layout = ["--strategy", "megatron", "--grid", "tensor=4,data=4,pipeline=4"]
    code, _, _ = run_cli(capsys, "explain", *JOB, *layout, "--plot", path)
    assert code == 0 and {f"pipeline rank {rank}" for rank in range(4)} <= set(svg_texts(path))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plot_that_cannot_be_drawn_says_so_before_the_work(capsys, monkeypatch, name, tmp_path):
    command = [name, *COMMANDS[name], "--plot"]
    assert_refused(capsys, *command, tmp_path / "figure.gif", culprit=".png, .svg, .pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    needed = "pip install 'axonn-tune[plot]'"
    assert_refused(capsys, *command, tmp_path / "figure.png", culprit=needed)


def test_one_strategy_is_drawn_at_a_time(capsys, tmp_path):
    path = tmp_path / "figure.svg"
    assert_refused(capsys, "suggest", *JOB, "--strategy", "all", "--plot", path, culprit="--plot")
    assert not path.exists()
