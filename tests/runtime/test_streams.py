"""Which stream waits for which on a GPU, and what is recorded, in simulated time."""

import weakref
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from runtime.streams import Gpu  # noqa: E402

from axonn_tune.runtime.axonn import gemm  # noqa: E402
from axonn_tune.runtime.native.fsdp2 import _Communication  # noqa: E402
from axonn_tune.runtime.ranks.device_stream import DeviceStream  # noqa: E402
from axonn_tune.runtime.ranks.recorder import Recorder  # noqa: E402
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder  # noqa: E402
from axonn_tune.spec.measurement import COMPUTATION  # noqa: E402

CUDA = torch.device("cuda")
MESSAGE = torch.zeros(1)


class Issuer:
    """Collectives of one axis, each of which takes three seconds."""

    def __init__(self, gpu):
        self.gpu, self.stream = gpu, DeviceStream()

    def all_gather(self, *_):
        return self.stream.issue(lambda: self.gpu.run(3.0))

    reduce_scatter = all_reduce = all_gather


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def spans(operations):
    return [(op.name, op.start_seconds, op.end_seconds) for op in operations]


def test_a_collective_follows_its_message_and_runs_beside_what_is_issued_after_it(gpu):
    issuer = Issuer(gpu)
    recorder = Recorder(CUDA)
    recorder.start_step()
    with recorder.kernel("before", "gemm"):
        gpu.run(2.0)
    first = recorder.collective("first", "all_reduce", 4.0, "x", issuer.all_reduce)
    second = recorder.collective("second", "all_reduce", 4.0, "x", issuer.all_reduce)
    with recorder.kernel("beside", "gemm"):
        gpu.run(1.0)
    first.wait()
    with recorder.kernel("after", "gemm"):
        gpu.run(1.0)
    second.wait()
    assert gpu.current.free == 8.0
    assert spans(recorder.take_step()) == [
        ("before", 0.0, 2.0),
        ("first", 2.0, 5.0),
        ("second", 5.0, 8.0),
        ("beside", 2.0, 3.0),
        ("after", 5.0, 6.0),
    ]


def test_no_stream_but_that_of_the_axis_waits_for_a_collective(gpu, monkeypatch):
    """A waiting stream holds up kernels of others where streams share a hardware queue."""
    streams = []
    make = torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: streams.append(1) or make())
    issuer = Issuer(gpu)
    recorder = Recorder(CUDA)
    recorder.start_step()
    for _ in range(3):
        recorder.collective("first", "all_reduce", 4.0, "x", issuer.all_reduce).wait()
    assert len(streams) == 1


def test_a_message_lives_until_somebody_has_waited_for_it(gpu):
    message = torch.zeros(1)
    alive = weakref.ref(message)
    work = DeviceStream().issue(partial(gpu_sums, message))
    del message
    assert alive() is not None
    work.wait()
    assert alive() is None


def gpu_sums(message):
    message += 1


def communication(gpu, gathers_ahead):
    recorder = WaitRecorder(CUDA)
    recorder.start_step()
    comm = _Communication(recorder, None, 1, gathers_ahead)
    comm._issuer = Issuer(gpu)
    return recorder, comm


def of_computation(operations):
    return [(op.start_seconds, op.end_seconds) for op in operations if op.name == COMPUTATION]


def test_what_fsdp2_computes_is_what_does_not_wait(gpu):
    recorder, comm = communication(gpu, gathers_ahead=True)
    gathering = torch.cuda.Stream()
    gpu.run(1.0)
    with torch.cuda.stream(gathering):
        work = comm.gather("block", MESSAGE, MESSAGE)  # from 0 to 3
    gpu.run(1.0)
    work.wait()
    gpu.run(1.0)
    assert of_computation(recorder.take_step(4.0)) == [(0.0, 2.0), (3.0, 4.0)]


def test_without_gathers_ahead_computation_waits_at_once(gpu):
    recorder, comm = communication(gpu, gathers_ahead=False)
    gathering = torch.cuda.Stream()
    with torch.cuda.stream(gathering):
        assert comm.gather("block", MESSAGE, MESSAGE) is None
    assert gathering.free == 3.0
    gpu.run(1.0)
    assert gpu.current.free == 4.0
    assert of_computation(recorder.take_step(4.0)) == [(3.0, 4.0)]


def test_a_scatter_keeps_its_own_stream_waiting_and_not_computation(gpu):
    recorder, comm = communication(gpu, gathers_ahead=True)
    gpu.run(1.0)
    reducing = torch.cuda.Stream()
    with torch.cuda.stream(reducing):
        comm.scatter("block", MESSAGE, MESSAGE, None)
    assert reducing.free == 3.0
    gpu.run(1.0)
    assert of_computation(recorder.take_step(2.0)) == [(0.0, 2.0)]


def test_the_wait_at_the_end_of_a_backward_pass_counts(gpu):
    """FSDP2 queues its end while the gradient of the logits is computed."""
    recorder, comm = communication(gpu, gathers_ahead=True)
    reducing = torch.cuda.Stream()
    weight = torch.ones(2, requires_grad=True)
    logits = 2 * weight

    def fsdp2_begins(gradient):
        with torch.cuda.stream(reducing):
            comm.scatter("block", MESSAGE, MESSAGE, None)
        gpu.run(1.0)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: gpu.current.wait_stream(reducing))

    logits.register_hook(fsdp2_begins)
    loss = logits.sum()
    recorder.wait_ends_backward(loss)
    loss.backward()
    recorder.end_wait()
    gpu.run(1.0)
    assert of_computation(recorder.take_step(4.0)) == [(0.0, 1.0), (3.0, 4.0)]


def test_a_short_kernel_late_in_a_step_keeps_its_time(gpu):
    recorder = Recorder(CUDA)
    recorder.start_step()
    gpu.run(100.0)
    with recorder.kernel("short", "gemm"):
        gpu.run(2e-6)
    (short,) = recorder.take_step()
    assert short.end_seconds - short.start_seconds == pytest.approx(2e-6, rel=1e-3)


def test_a_lead_of_the_host_is_no_part_of_a_step(gpu, monkeypatch):
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (slept.append(cycles), gpu.run(5.0)))
    recorder = Recorder(CUDA)
    recorder.lead_seconds = 0.02
    recorder.start_step()
    with recorder.kernel("kernel", "memory_bound"):
        gpu.run(1.0)
    assert spans(recorder.take_step()) == [("kernel", 0.0, 1.0)]
    assert slept == [4e7]


def test_a_product_is_timed_on_the_gpu_once_the_host_is_ahead(gpu, monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("lead"))

    def multiply():
        order.append("product")
        gpu.run(0.25)

    assert gemm._seconds_of(multiply, CUDA) == pytest.approx(0.25)
    assert order == ["lead", *["product"] * gemm.N_IN_A_ROW]
