"""What a calibration measures: rates near published ones, kernels without their launches."""

import pytest

torch = pytest.importorskip("torch")

from gpu.training import WIDE, Training  # noqa: E402

from axonn_tune.calibration.fit.rates import known_gpu  # noqa: E402
from axonn_tune.calibration.measure.kernels import (  # noqa: E402
    Workload,
    time_copy,
    time_step,
    time_strided,
)
from axonn_tune.calibration.measure.shapes import GemmShape, time_gemm  # noqa: E402
from axonn_tune.calibration.measure.timing import QUICK  # noqa: E402
from axonn_tune.calibration.selection import GPT_LIKE, _one_block_like  # noqa: E402
from axonn_tune.io.presets import preset_machines  # noqa: E402
from axonn_tune.runtime.ranks.device_stream import recorded_event  # noqa: E402
from axonn_tune.runtime.run import software  # noqa: E402
from axonn_tune.spec.candidates import CandidateTable  # noqa: E402
from axonn_tune.spec.configuration import Configuration  # noqa: E402
from axonn_tune.spec.job import Job  # noqa: E402
from axonn_tune.spec.layout import grid_layout  # noqa: E402
from axonn_tune.strategies.axonn.axonn4d import AXONN  # noqa: E402

pytestmark = pytest.mark.gpu_only
N_IN_GRAPH = 20


@pytest.fixture
def published(device):
    """The published figures of this GPU."""
    seen = torch.cuda.get_device_properties(device)
    known = known_gpu(seen.name, seen.total_memory, seen.multi_processor_count, preset_machines())
    if known is None:
        pytest.skip(f"no preset has the published figures of {seen.name}")
    return known


def test_the_machine_and_its_software(device, note):
    seen = torch.cuda.get_device_properties(device)
    note(
        device=seen.name,
        memory_bytes=seen.total_memory,
        n_multiprocessors=seen.multi_processor_count,
        **software(device),
    )


@pytest.mark.parametrize("mode", ["NN", "NT", "TN"])
def test_large_products_come_near_the_published_peak(device, published, mode, note):
    shape = GemmShape(8192, 8192, 8192, mode, "bf16")
    rate = shape.flops / time_gemm(shape, device, QUICK).seconds
    fraction = rate / published.peak_flops_per_s("bf16")
    note(mode=mode, tflops=1e-12 * rate, share_of_peak=fraction, machine=published.name)
    assert 0.5 < fraction <= 1.0


@pytest.mark.parametrize("edge", [256, 1024, 4096, 8192])
def test_products_take_as_long_as_in_a_graph(device, edge, note):
    seconds = time_gemm(GemmShape(edge, edge, edge, "NN", "bf16"), device, QUICK).seconds
    a, b = (torch.randn(edge, edge, device=device).bfloat16() for _ in range(2))
    out = torch.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(N_IN_GRAPH):
            torch.mm(a, b, out=out)
    graph.replay()
    begin = recorded_event()
    graph.replay()
    end = recorded_event()
    end.synchronize()
    in_graph = 1e-3 * begin.elapsed_time(end) / N_IN_GRAPH
    note(edge=edge, timed_us=1e6 * seconds, in_graph_us=1e6 * in_graph)
    if edge >= 4096:  # Smaller ones are in the cache in the graph, and not in the calibration.
        assert seconds == pytest.approx(in_graph, rel=0.1)


def test_a_large_copy_comes_near_the_published_bandwidth(device, published, note):
    rates = {n: n / time_copy(n, device, QUICK).seconds for n in (2**24, 2**26, 2**28, 2**30)}
    fraction = rates[2**30] / published.gpu.memory_bandwidth_bytes_per_s.value
    note(share_of_bandwidth=fraction, **{f"gb_per_s_{n}": r * 1e-9 for n, r in rates.items()})
    assert 0.6 < fraction <= 1.0


def test_a_product_with_one_row_is_slower_than_a_copy(device, published, note):
    """One element at a time: its rate hangs on the multiprocessors, and hardly on the size."""
    rates = {n: n / time_strided(n, device, QUICK).seconds for n in (2**26, 2**28, 2**30)}
    stated = published.kernels.strided_bytes_per_s
    note(stated=stated and stated.value, **{f"gb_per_s_{n}": r * 1e-9 for n, r in rates.items()})
    assert rates[2**30] <= published.gpu.memory_bandwidth_bytes_per_s.value
    assert rates[2**28] == pytest.approx(rates[2**30], rel=0.3)


def test_short_kernels_are_timed_without_their_launches(device, alone, monkeypatch, note):
    """Few tokens make kernels of a few microseconds; a host that is late adds ten to each."""
    from axonn_tune.calibration.measure import kernels

    workload = Workload(_one_block_like(GPT_LIKE, 1024), 1024, 1, "bf16")
    ahead = time_step(workload, device, 5, share_cores=False)
    monkeypatch.setattr(kernels, "LEAD_SECONDS", 1e-9)
    late = time_step(workload, device, 5, share_cores=False)
    sums = [sum(point.seconds for point in step.points) for step in (ahead, late)]
    note(ahead_us=1e6 * sums[0], late_us=1e6 * sums[1], gap_us=1e6 * ahead.gap_seconds)
    assert sums[0] <= 1.02 * sums[1]


def predicted_bytes(spec, batch, seq_len):
    job = Job(1, batch, seq_len, dtype="bf16")
    one = CandidateTable.single(Configuration(grid_layout(1, 1, 1, 1), micro_batch=batch))
    return float(sum(term[0] for term in AXONN.memory(spec, job, one).values()))


@pytest.mark.parametrize("batch", [1, 4])
def test_tensors_take_the_memory_that_the_model_predicts(device, alone, batch, note):
    training = Training(WIDE, device, "bf16", batch, 2048, record=False)
    training.trainer.step(0)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    training.trainer.step(1)
    peak = torch.cuda.max_memory_allocated(device)
    predicted = predicted_bytes(WIDE, batch, 2048)
    note(
        batch=batch,
        peak_gib=peak / 2**30,
        between_steps_gib=before / 2**30,
        predicted_gib=predicted / 2**30,
    )
    assert predicted == pytest.approx(peak, rel=0.15)
