"""What torch's profiler sees of a program that `launch` writes is what the plan says."""

import warnings

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.io.kineto import load_trace
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.step.explain import explain
from axonn_tune.step.traced import beside_trace

torch = pytest.importorskip("torch")

from programs import arguments, imported, settings_in  # noqa: E402
from runtime.ranks import on_ranks  # noqa: E402


def profile_fsdp2(rank, cases):
    """Train with FSDP2 under the profiler, which would hold on to what is made before."""
    warnings.filterwarnings("ignore")
    program = imported("train_fsdp2")
    train = program.train
    for settings, path in cases:
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )

        def profiled(*given, profiler=profiler):
            with profiler:
                return train(*given)

        program.train = profiled
        program.run(settings, arguments(steps=1), torch.device("cpu"))
        if rank == 0:
            profiler.export_chrome_trace(path)


@pytest.mark.slow
def test_products_gathers_and_attention_of_fsdp2_are_as_planned(tmp_path):
    options = {"strategy": "zero3", "engine": "fsdp2", "global_batch": 8, "micro_batch": 2}
    predictions = {
        recompute: best_of_layout(
            build_search("tiny", 2, recompute=recompute, **options), "shard=2"
        )
        for recompute in ("none", "full")
    }
    cases = [
        (settings_in(launch_files(prediction)), str(tmp_path / f"{recompute}.json"))
        for recompute, prediction in predictions.items()
    ]
    on_ranks(2, profile_fsdp2, cases)
    for (recompute, prediction), (_, path) in zip(predictions.items(), cases, strict=True):
        lines = beside_trace(explain(prediction, with_sensitivities=False), load_trace(path))
        kinds = ("product", "attention", "attention, backward", "all_gather")
        compared = [line for line in lines if line.kind in kinds]
        assert {line.kind for line in compared} == set(kinds), recompute
        model, n_microsteps = prediction.scenario.model, prediction.n_microsteps
        for line in compared:
            # Torch's checkpoint stops inside the last product of each block: a profiler of the CPU
            # counts it as begun, after a thousandth of its time.
            is_last = recompute == "full" and "forward.down.gemm" in line.predicted_names
            begun = is_last * model.n_layers * n_microsteps
            assert line.traced_calls == line.predicted_calls + begun, (recompute, line)
