"""Collectives made of gloo's sends and receives, and the thread that does them in order."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from runtime.ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_tune.runtime.ranks import gloo
from axonn_tune.runtime.ranks.gloo import GlooGroup
from axonn_tune.runtime.ranks.host_stream import HostStream

# Numbers of elements: fewer than ranks, not divisible by them, and enough for every way to
# exchange them.
SIZES = (1, 5, 64, 4097, 30011, 300_007)


def values(rank, size, dtype=torch.float32):
    """Small whole numbers, whose sums are exact; their maximum is at another rank each time."""
    return ((torch.arange(size) * 7 + 13 * rank) % 11).to(dtype)


def each_reduces(rank, n_ranks):
    group = GlooGroup(dist.group.WORLD)
    for size in SIZES:
        everyone = torch.stack([values(r, size) for r in range(n_ranks)])
        for op, expected in (
            (dist.ReduceOp.SUM, everyone.sum(0)),
            (dist.ReduceOp.MAX, everyone.amax(0)),
        ):
            tensor = values(rank, size)
            group.all_reduce(tensor, op)
            assert torch.equal(tensor, expected), (size, op)


def each_gathers_and_scatters(rank, n_ranks):
    group = GlooGroup(dist.group.WORLD)
    for size in SIZES:
        gathered = torch.full((n_ranks * size,), -1.0)
        group.all_gather(gathered, values(rank, size))
        assert torch.equal(gathered, torch.cat([values(r, size) for r in range(n_ranks)])), size
        shard = torch.empty(size)
        group.reduce_scatter(shard, torch.cat([values(rank + r, size) for r in range(n_ranks)]))
        expected = sum(values(other + rank, size) for other in range(n_ranks))
        assert torch.equal(shard, expected), size


def all_get_the_same_bits(rank, n_ranks):
    group = GlooGroup(dist.group.WORLD)
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(rank)
            tensor = torch.randn(size).to(dtype)
            group.all_reduce(tensor, dist.ReduceOp.SUM)
            everyone = [torch.empty_like(tensor) for _ in range(n_ranks)]
            dist.all_gather(everyone, tensor)
            assert all(torch.equal(tensor, other) for other in everyone), (size, dtype)


def shapes_are_kept(rank, n_ranks):
    group = GlooGroup(dist.group.WORLD)
    scalar = torch.tensor(float(rank))
    group.all_reduce(scalar, dist.ReduceOp.SUM)
    assert scalar.item() == sum(range(n_ranks)) and scalar.shape == ()
    gathered = torch.empty(2 * n_ranks, 3)
    group.all_gather(gathered, torch.full((2, 3), float(rank)))
    assert gathered[:, 0].tolist() == [float(r) for r in range(n_ranks) for _ in range(2)]


class Allocations(TorchDispatchMode):
    """Counts operators that take memory which nobody has written."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += "empty" in str(function)
        return function(*args, **(kwargs or {}))


def memory_is_taken_again(rank, n_ranks):
    """Shorter messages, which follow on longer ones, take the memory of these."""
    group = GlooGroup(dist.group.WORLD)
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        group.all_reduce(values(rank, SIZES[-1], dtype), dist.ReduceOp.SUM)
    for size in reversed(SIZES):
        for dtype in dtypes:
            tensor, full = values(rank, size, dtype), values(rank, size, dtype).repeat(n_ranks)
            shard = torch.empty_like(tensor)
            with Allocations() as allocations:
                group.all_reduce(tensor, dist.ReduceOp.SUM)
            expected = sum(values(other, size) for other in range(n_ranks)).to(dtype)
            assert torch.equal(tensor, expected) and allocations.n == 0, (size, dtype)
            group.reduce_scatter(shard, full)
            assert torch.equal(shard, expected), (size, dtype)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, pytest.param(8, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "check",
    [
        each_reduces,
        each_gathers_and_scatters,
        all_get_the_same_bits,
        shapes_are_kept,
        memory_is_taken_again,
    ],
)
def test_collectives(check, n_ranks):
    on_ranks(n_ranks, check, n_ranks)


def ways_of(n_ranks):
    """Whether a group of that size exchanges a message directly, for each of SIZES."""
    group = GlooGroup.__new__(GlooGroup)
    group._n = n_ranks
    return [group._is_short(4 * size * n_ranks) for size in SIZES]


def test_sizes_above_take_every_way():
    assert ways_of(8) == sorted(ways_of(8), reverse=True) and set(ways_of(8)) == {True, False}
    assert all(ways_of(2)), "two ranks have nothing to gain from a ring"
    on_ring = 2 * 7 / 8
    bounds = [gloo.EXTRA_BYTES / (share - on_ring) for share in (8 * 8 / 4, 8 / 2)]
    assert 4 * SIZES[2] < bounds[0] < 4 * SIZES[3] < bounds[1] < 4 * SIZES[4]


# The stream ------------------------------------------------------------------------------


def test_tasks_are_done_in_order_beside_the_host():
    stream, done = HostStream(), []

    def slow():
        time.sleep(0.05)
        done.append("slow")

    first, second = stream.issue(slow), stream.issue(lambda: done.append("quick"))
    assert done == []
    second.wait()
    assert done == ["slow", "quick"] and first.get_future().done()


def test_a_work_tells_when_it_was_done():
    stream = HostStream()
    begin = time.perf_counter()
    work = stream.issue(lambda: time.sleep(0.02))
    work.wait()
    assert begin + 0.02 <= work.get_future().value() <= time.perf_counter()


def test_what_a_task_raises_whoever_waits_hears_and_the_next_one_is_done():
    stream, done = HostStream(), []

    def broken():
        raise ValueError("no such peer")

    failing, following = stream.issue(broken), stream.issue(lambda: done.append(1))
    with pytest.raises(ValueError, match="no such peer"):
        failing.wait()
    following.wait()
    assert done == [1]


def test_the_thread_starts_with_the_first_task_and_ends_with_the_stream():
    before = set(threading.enumerate())
    stream = HostStream()
    assert set(threading.enumerate()) <= before
    stream.issue(lambda: None).wait()
    (thread,) = set(threading.enumerate()) - before
    del stream
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_tasks_run_without_autograd():
    parameter, seen = torch.ones(2, requires_grad=True), []
    HostStream().issue(lambda: seen.append((2 * parameter).requires_grad)).wait()
    assert seen == [False]
