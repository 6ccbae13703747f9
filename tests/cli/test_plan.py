"""``axonn-tune plan``: time, energy and money of a whole run."""

import csv
import io
import json

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.io.presets import load_model
from axonn_tune.units import format_count


def test_a_plan_in_every_format(capsys):
    arguments = ["plan", "--model", "5b", "--tokens", "100B", "--gpus", "64"]
    arguments += ["--global-batch", "512", "--recompute", "full"]
    _, text, _ = run_cli(capsys, *arguments, "--node-hour-price", "10EUR", "--node-power", "2kW")
    document = json.loads(run_cli(capsys, *arguments, "--format", "json")[1])
    (run,) = document["runs"]
    assert f"{10 * run['node_hours']:,.0f} EUR" in text
    assert f"{run['node_hours'] * 2e-3:.3g} MWh" in text
    assert run["tokens"] == 100e9 and run["cost"] is None
    (row,) = csv.DictReader(io.StringIO(run_cli(capsys, *arguments, "--format", "csv")[1]))
    assert float(row["wall_seconds"]) == pytest.approx(run["wall_seconds"])
    assert int(row["g_z"]) == run["prediction"]["grid"]["z"]
    for column in ("step_seconds", "memory_bytes", "mfu"):  # The table has them, too.
        assert float(row[column]) == pytest.approx(run["prediction"][column])


def test_a_plan_finds_the_gpus_for_a_deadline_and_hints_at_tokens(capsys):
    _, text, _ = run_cli(capsys, "plan", "--model", "5b", "--deadline", "10d")
    assert "20 for each parameter" in text
    days = float(next(line for line in text.splitlines() if line.startswith("time")).split()[1])
    assert days <= 10
    _, text, _ = run_cli(capsys, "plan", "--model", "5b", "--gpus", "16384")
    assert "perlmutter has no more than 1536 nodes" in text


def test_named_gpus_say_whether_they_meet_a_deadline_and_a_budget(capsys):
    arguments = ["plan", "--model", "5b", "--gpus", "64", "--tokens", "100B"]
    (run,) = _document(capsys, *arguments)["runs"]
    assert run["deadline_probability"] is None and run["budget_probability"] is None
    hours = run["node_hours"]
    limits = ["--deadline", f"{run['wall_seconds']}s", "--node-hours", f"{1.1 * hours:.6f}"]
    (limited,) = _document(capsys, *arguments, *limits)["runs"]
    assert limited["deadline_probability"] == pytest.approx(0.5, abs=1e-6)
    assert limited["budget_used_fraction"] == pytest.approx(1 / 1.1, rel=1e-6)
    assert 0.6 < limited["budget_probability"] < 0.9
    _, text, _ = run_cli(capsys, *arguments, "--deadline", "1d", "--gpu-hours", f"{hours:.3f}")
    assert "1 day: the run ends" in text and "later, and in time with a probability of <1 %" in text
    assert "the run takes 400.0 % of it" in text


def test_a_budget_takes_the_gpus_that_finish_soonest_within_it(capsys):
    arguments = ["plan", "--model", "5b", "--tokens", "100B"]
    document = _document(capsys, *arguments, "--node-hours", "1.2k")
    *dearer, plan = document["runs"]
    assert plan["node_hours"] <= 1200 and plan["tokens"] == document["asked_tokens"] == 100e9
    assert dearer and all(run["node_hours"] > 1200 for run in dearer)
    assert plan["budget_probability"] > 0.5 > max(run["budget_probability"] for run in dearer)
    _, text, _ = run_cli(capsys, *arguments, "--node-hours", "1.2k", "--machine", "dgx-h100")
    assert "has no facility.n_nodes" in text
    in_gpu_hours = _document(capsys, *arguments, "--gpu-hours", "4.8k")
    assert in_gpu_hours["runs"][-1]["gpus"] == plan["gpus"]


def test_a_budget_that_is_too_small_buys_as_many_tokens_as_it_can(capsys):
    arguments = ["plan", "--model", "5b", "--node-hours", "300", "--deadline", "3d"]
    _, text, _ = run_cli(capsys, *arguments, "--tokens", "100B")
    assert "No number of GPUs trains 100B tokens within 300 node-hours and 3 days" in text
    plan = _document(capsys, *arguments)["runs"][-1]
    assert f"tokens       {plan['tokens'] / 1e9:.4g}B" in text
    assert plan["node_hours"] <= 300 and plan["wall_seconds"] <= 3 * 86400
    assert plan["tokens_within_limits_low"] < plan["tokens"] < plan["tokens_within_limits_high"]
    alone = _document(capsys, *arguments, "--gpus", "128")["runs"][0]
    assert alone["gpus"] == 128 and alone["tokens"] <= plan["tokens"]


def test_a_budget_of_less_than_an_hour_is_not_shown_as_none(capsys):
    arguments = ["plan", "--model", "tiny", "--gpus", "4", "--node-hours", "0.25"]
    _, text, _ = run_cli(capsys, *arguments)
    assert "budget       0.25 node-hours: the run takes" in text
    (row,) = _document(capsys, *arguments)["runs"]
    assert f" {row['node_hours']:.3g}" in text.split("GPUs  ")[1].splitlines()[2]


def test_the_rule_of_dense_models_is_said_to_be_theirs(capsys):
    arguments = ["--gpus", "64", "--machine", "dgx-h100"]
    _, text, _ = run_cli(capsys, "plan", "--model", "qwen3-30b-a3b", *arguments)
    model = load_model("qwen3-30b-a3b")
    ratio = 20 * model.parameters / model.active_parameters
    assert f"20 for each parameter, {ratio:.3g} for each active one" in text
    of_active = format_count(20 * model.active_parameters)
    assert f"20 are of dense models: {format_count(20 * model.parameters)} by all" in text
    assert f"{of_active} by the active ones" in text
    _, text, _ = run_cli(capsys, "plan", "--model", "llama3-8b", *arguments)
    assert "compute-optimal" in text and "dense" not in text


def _document(capsys, *arguments):
    return json.loads(run_cli(capsys, *arguments, "--format", "json")[1])


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ([], "--deadline"),
        (["--gpus", "64", "--node-hours", "1k", "--gpu-hours", "4k"], "--gpu-hours"),
        (["--node-hours", "0"], "--node-hours"),
        (["--node-hours", "1e400"], "--node-hours"),
        (["--node-hours", "1e300"], "node_hours is 1e+300; allowed: 0 to 1e+12"),
        (["--gpus", "64", "--gpu-hours", "2e12"], "gpu_hours is 2000000000000.0"),
        (["--gpu-hours", "30d"], "--gpu-hours"),
        (["--gpus", "64", "--node-hours", "1e-9"], "--node-hours"),
        (["--gpus", "64", "--node-hours", "0.001"], "before the first step"),
        (["--gpus", "64", "--tokens", "many"], "--tokens"),
        (["--gpus", "64", "--tokens", "0"], "--tokens"),
        (["--gpus", "64", "--tokens", "1e400"], "--tokens"),
        (["--gpus", "64", "--gpu-mtbf", "1s"], "so that it never ends"),
        (["--node-hours", "9k", "--gpu-mtbf", "1s"], "so that it never ends"),
        (["--deadline", "90d", "--gpu-mtbf", "1s"], "so that it never ends"),
        (["--gpus", "64", "--gpu-hours", "0.001"], "--gpu-hours end before the first step"),
        (["--deadline", "soon"], "--deadline"),
        (["--deadline", "1ms"], "--deadline"),
        (["--gpus", "64", "--gpu-mtbf", "-1d"], "--gpu-mtbf"),
        (["--gpus", "64", "--node-hour-price", "20"], "--node-hour-price"),
        (["--gpus", "64", "--node-power", "2 km"], "--node-power"),
    ],
)
def test_bad_plans_are_one_line(capsys, arguments, culprit):
    assert_refused(capsys, "plan", "--model", "5b", *arguments, culprit=culprit)


def test_a_plan_names_virtual_stages_and_the_energy_of_a_short_run(capsys):
    arguments = ["plan", "--model", "llama3-70b", "--machine", "alps", "--strategy", "megatron"]
    arguments += ["--gpus", "512", "--virtual-stages", "4", "--tokens", "10B"]
    (run,) = _document(capsys, *arguments)["runs"]
    assert run["prediction"]["n_virtual"] == 4
    _, text, _ = run_cli(capsys, *arguments)
    assert ", 4 virtual stages, micro-batch" in text and "order xyzd" not in text
    assert 1.0 < run["energy_joules"] / 3.6e9 < 10.0
    assert f"energy       {run['energy_joules'] / 3.6e9:.2f} MWh" in text


@pytest.mark.parametrize("part", [["--lora-rank", "16"], ["--frozen", "embedding,layers:0-29"]])
def test_fine_tuning_has_no_compute_optimal_number_of_tokens(capsys, part):
    job = ["plan", "--model", "llama3-8b", "--machine", "dgx-h100", "--gpus", "8", *part]
    job += ["--strategy", "zero3", "--global-batch", "64"]
    assert_refused(capsys, *job, culprit="give --tokens: the default")
    code, text, _ = run_cli(capsys, *job, "--tokens", "10M")
    assert code == 0 and "Chinchilla" not in text


def test_a_budget_with_a_deadline_takes_the_fewest_node_hours_in_time(capsys):
    """It took the most GPUs that the budget allows, for a run that had ten days."""
    arguments = ["plan", "--model", "5b", "--tokens", "100B", "--node-hours", "1.2k"]
    soonest = _document(capsys, *arguments)["runs"][-1]
    both = [*arguments, "--deadline", "10d"]
    *dearer, cheapest = _document(capsys, *both)["runs"]
    assert cheapest["wall_seconds"] <= 10 * 86400
    assert cheapest["node_hours"] < soonest["node_hours"]
    assert cheapest["gpus"] < soonest["gpus"] <= max(run["gpus"] for run in dearer)
    assert all(run["node_hours"] > cheapest["node_hours"] for run in dearer)
    _, text, _ = run_cli(capsys, *both)
    assert "These GPUs take the fewest node-hours within both limits" in text
    _, text, _ = run_cli(capsys, *arguments)
    assert "finish soonest within the budget: with --deadline, such as 60d" in text


def test_a_budget_alone_says_that_a_deadline_can_be_given(capsys):
    _, text, _ = run_cli(capsys, "plan", "--model", "5b", "--node-hours", "1k")
    assert (
        "Few GPUs train most for a budget, however long it takes: with --deadline, such as" in text
    )


def test_a_run_of_less_than_a_day_has_its_time_in_hours(capsys):
    arguments = ["plan", "--model", "5b", "--tokens", "5B", "--gpus", "64", "--deadline", "12h"]
    (run,) = _document(capsys, *arguments)["runs"]
    _, text, _ = run_cli(capsys, *arguments)
    hours = f"{run['wall_seconds'] / 3600:.1f}"
    assert f"time         {hours} h (" in text and f" {hours} h " in text.split("GPUs  ")[1]
    assert "deadline     12 hours: the run ends" in text
