"""What a run reports as its memory and its software, with stand-ins for a GPU."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from axonn_tune.runtime.ranks import memory  # noqa: E402
from axonn_tune.runtime.run import software  # noqa: E402

CPU = torch.device("cpu")


class Allocator:
    """Counts as torch's allocator does: the peak since it was last forgotten."""

    def __init__(self):
        self.peak = 0.0

    def use(self, nbytes):
        self.peak = max(self.peak, nbytes)


def test_the_first_steps_do_not_make_the_peak_of_the_timed_ones(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda device: allocator.peak)
    monkeypatch.setattr(memory.MemoryWatch, "_forget", lambda self: setattr(allocator, "peak", 0.0))
    monkeypatch.setattr(memory.dist, "all_reduce", lambda tensor, op: None)
    watch = memory.MemoryWatch(CPU)
    for index, nbytes in enumerate([7.0, 9.0, 4.0, 5.0]):
        watch.before_step(index)
        allocator.use(nbytes)
    assert watch.of_all_ranks() == memory.Peaks(5.0, 9.0, None)
    short = memory.MemoryWatch(CPU)
    short.before_step(0)
    allocator.use(3.0)
    assert short.of_all_ranks() == memory.Peaks(3.0, 3.0, None)


@pytest.mark.parametrize(("precision", "word"), [("tf32", "on"), ("ieee", "off"), ("none", "off")])
def test_the_new_setting_of_tf32_is_told(precision, word):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only the old setting")
    before = matmul.fp32_precision
    with mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 30, 7)):
        try:
            matmul.fp32_precision = precision
            assert software(torch.device("cuda"))["tf32"] == word
        finally:
            matmul.fp32_precision = before
