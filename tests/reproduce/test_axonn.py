"""AxoNN's published runs, beside what its authors compare them with."""

from dataclasses import replace

from reproduced import LOADERS

from axonn_tune.io.package_data import load_published
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
