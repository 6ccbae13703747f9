"""A validation against an earlier one: what counts as worse."""

from dataclasses import replace

from validations import GRIDS, noisy, outcome, validation

from axonn_tune.validation.regression import check_regressions


def series(scale=1.0, predicted=1.0, seed=0, slow=None):
    """Six configurations; one may be slower than the others."""
    return validation(
        *(
            outcome(
                grid,
                i + 1,
                predicted * (1.0 + i),
                noisy((1.0 + i) * (scale if slow is None or i == slow else 1.0), seed=seed + i),
            )
            for i, grid in enumerate(GRIDS)
        )
    )


def failed(before, after, least_change=0.05):
    return [check for check in check_regressions(before, after, least_change) if not check.holds]


def test_an_unchanged_machine_passes():
    alarms = sum(bool(failed(series(), series(seed=100 * i))) for i in range(1, 41))
    assert alarms == 0


def test_one_slower_configuration_is_found():
    (check,) = failed(series(), series(1.2, seed=50, slow=2))
    assert check.text.startswith("FAILED  1x8x1x1 xyzd") and "% slower" in check.text


def test_a_slower_machine_is_found_even_if_each_configuration_is_noisy():
    def noisier(scale, seed):
        outcomes = [
            replace(o, step_seconds=tuple(noisy(scale * o.measured_seconds, 0.1, 9, seed + i)))
            for i, o in enumerate(series().outcomes)
        ]
        return validation(*outcomes)

    names = [check.name for check in failed(noisier(1.0, 0), noisier(1.3, 60))]
    assert "steps on average" in names


def test_small_changes_are_none_however_sure():
    assert failed(series(), series(1.04, seed=0)) == []
    assert failed(series(), series(1.04, seed=0), least_change=0.01)


def test_a_worse_prediction_is_found_though_the_steps_are_the_same():
    assert [check.name for check in failed(series(), series(predicted=1.3))] == ["prediction"]
    assert failed(series(predicted=1.3), series()) == []


def test_a_faster_machine_fails_by_its_prediction_only():
    assert [check.name for check in failed(series(), series(0.7, seed=9))] == ["prediction"]


def test_what_ran_before_and_fails_now_is_found():
    after = series()
    broken = replace(after.outcomes[1], step_seconds=(), failure="killed")
    found = failed(series(), validation(after.outcomes[0], broken, *after.outcomes[2:]))
    assert len(found) == 1 and "fails now" in found[0].text


def test_few_configurations_leave_two_checks_out_and_say_so():
    few = validation(*series().outcomes[:3])
    texts = [check.text for check in check_regressions(few, few, 0.05)]
    assert texts[-1].startswith("not checked  the mean of all steps and the prediction")
    assert "need 4 configurations in common and have 3" in texts[-1]
    assert not any("not checked" in c.text for c in check_regressions(series(), series(), 0.05))


def test_another_engine_is_no_baseline():
    (check,) = failed(series(), replace(series(), engine="deepspeed"))
    assert "has engine , this validation deepspeed" in check.text


def test_another_job_is_no_baseline():
    (check,) = failed(series(), replace(series(), global_batch=16))
    assert "baseline has global_batch 8, this validation 16" in check.text
    other = validation(outcome("4x2x1x1", 1, 1.0, [1.0]))
    (check,) = failed(series(), other)
    assert "no configuration" in check.text
