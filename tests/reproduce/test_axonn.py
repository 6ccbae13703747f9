"""AxoNN's published runs, beside what its authors compare them with."""

from dataclasses import replace

import pytest
from reproduced import LOADERS

from axonn_tune.io.package_data import load_published, note_on_validation
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce.axonn import compare_runs
from axonn_tune.reproduce.runs import Loaders
from axonn_tune.spec.programs import MegatronProgram


def speedup_over_megatron(loaders):
    """The predicted speedup of the row that states one."""
    rows = [row for row in load_published("axonn") if row["metric"] == "speedup_over_megatron_lm"]
    (comparison,) = compare_runs(rows, loaders)
    return comparison.predicted


def test_axonn_is_compared_with_the_megatron_lm_that_its_authors_keep():
    """Its single kernels and copies of heads take time; its attention is the second one."""

    def ideal(name):
        engine = load_engine(name)
        if name != "megatron-2023":
            return engine
        return replace(engine, kernels={}, megatron=MegatronProgram())

    def with_first_attention(name):
        engine = load_engine(name)
        return engine if name != "megatron-2023" else replace(engine, attention_rate=None)

    published = speedup_over_megatron(LOADERS)
    assert published > speedup_over_megatron(Loaders(load_model, load_machine, ideal))
    of_second = Loaders(load_model, load_machine, with_first_attention)
    assert published == speedup_over_megatron(of_second)


@pytest.mark.slow
def test_other_batches_on_alps_are_met_as_the_page_says(monkeypatch):
    """6,144 GPUs cannot share these batches as the rows of the table are held to do."""
    monkeypatch.setattr("axonn_tune.reproduce.axonn.nearest_shared_batch", lambda batch, _: batch)
    loaders = Loaders(load_model, load_machine, load_engine)
    rows = [row for row in load_published("axonn") if row["machine"] == "alps"]
    (run,) = [row for row in rows if row["metric"] == "pflops"]
    (efficiency,) = [float(row["value"]) for row in rows if row["metric"] != "pflops"]
    of_base = str(float(run["value"]) * 1024 / 6144 / efficiency)
    smaller, larger, base = (
        100.0 * comparison.error_fraction
        for comparison in compare_runs(
            [
                run | {"global_batch": "6144"},
                run | {"global_batch": "12288"},
                run | {"gpus": "1024", "model": "10b", "value": of_base},
            ],
            loaders,
        )
    )
    note = " ".join(note_on_validation("axonn").split())
    assert f"With 6,144 the run is predicted {-smaller:.0f} % too slow" in note
    assert f"With 12,288 it is predicted {larger:.0f} % too fast" in note
    assert f"with 8,192 ({base:.0f} %)" in note
    assert abs((100.0 + larger) / (100.0 + base) - 1.0) < 0.04
