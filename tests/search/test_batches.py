"""Global batches: those that GPUs can share, those that are tried, and those that messages name."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.batches import (
    BatchRule,
    batches_near,
    nearest_multiples,
    nearest_shared_batch,
)
from axonn_tune.search.one_layout import best_of_layout, why_not
from axonn_tune.search.rank import best_of, rank_candidates, with_best_batch
from axonn_tune.strategies.axonn.axonn4d import AXONN
from axonn_tune.strategies.zero.zero import zero3

COUNTS = st.integers(1, 20000)
TARGETS = st.integers(1, 20000)


def has_a_choice(share):
    """Whether there are three micro-batches of up to eight sequences, or the share is one."""
    return share <= 8 or len({size for size in range(1, 9) if share % size == 0}) >= 3


@given(TARGETS, COUNTS)
def test_no_nearer_batch_can_be_shared_by_all_gpus(target, n_gpus):
    batch = nearest_shared_batch(target, n_gpus, can_split_sequences=False)
    shared = [n_gpus * share for share in range(1, 2 * target // n_gpus + 10)]
    distances = {b: abs(b - target) for b in shared if has_a_choice(b // n_gpus)}
    assert distances[batch] == min(distances.values())


@given(TARGETS, COUNTS, st.integers(1, 40))
def test_no_nearer_batch_can_be_cut_into_the_micro_batches_of_all_gpus(target, n_gpus, size):
    batch = nearest_shared_batch(target, n_gpus, False, size)
    shares = range(size, 2 * target // n_gpus + 24 * size, size)
    distances = {n_gpus * s: abs(n_gpus * s - target) for s in shares if has_a_choice(s)}
    assert distances[batch] == min(distances.values())


@given(TARGETS, COUNTS)
def test_as_few_gpus_as_possible_share_a_batch_near_the_target(target, n_gpus):
    batch = nearest_shared_batch(target, n_gpus)
    groups = [2**k for k in range(20) if n_gpus % 2**k == 0]
    batches = [nearest_shared_batch(target, n_gpus // n, can_split_sequences=False) for n in groups]
    near = [b for b in batches if abs(b - target) <= target / 8]
    assert batch == (near[0] if near else min(batches, key=lambda b: abs(b - target)))


@given(st.integers(0, 17), st.integers(0, 24))
def test_powers_of_two_share_the_default(count, target):
    assert nearest_shared_batch(2**target, 2**count) == 2**target


@pytest.mark.parametrize(
    ("n_gpus", "batch"),
    [
        *((96, 8064), (384, 8064), (1000, 8000), (3072, 9216), (6144, 9216), (192, 8064)),
        *((768, 7680), (640, 7680), (12288, 9216), (24576, 9216), (32768, 8192), (32769, 32769)),
    ],
)
def test_the_default_for_counts_that_do_not_divide_it(n_gpus, batch):
    assert nearest_shared_batch(8192, n_gpus) == batch


@given(TARGETS, st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_nearest_multiples_lie_on_both_sides(target, counts):
    multiples = [n for n in range(target + 3000) if any(n % count == 0 for count in counts)]
    below = max(n for n in multiples if n <= target)
    above = min(n for n in multiples if n >= target)
    assert nearest_multiples(target, np.array(counts)) == (below, above)


@given(TARGETS, st.floats(0.001, 0.5), st.integers(1, 3000))
def test_the_batches_that_are_tried_are_those_that_most_gpus_share(target, within, n_gpus):
    low, high = target * (1 - within), target * (1 + within)
    near = range(math.ceil(low), math.floor(high) + 1)
    odd = max(n for n in range(1, n_gpus + 1, 2) if n_gpus % n == 0)
    wanted = sorted(near, key=lambda b: (b % odd != 0, -math.gcd(b, n_gpus), abs(b - target)))[:8]
    assert batches_near(target, within, n_gpus) == wanted


def test_a_rule_takes_what_was_given_or_the_nearest_or_tries_several():
    assert BatchRule(8192, is_given=True).batches(384, AXONN.axes) == [8192]
    assert BatchRule(8192, is_given=False).batches(384, AXONN.axes) == [8064]
    assert BatchRule(8192, is_given=False).batches(16384, AXONN.axes) == [8192]
    assert BatchRule(8192, is_given=False).batches(16384, zero3().axes) == [16384]
    assert BatchRule(2048, False, None, 3).batches(64, AXONN.axes) == [1920]
    assert BatchRule(8192, False, None, 16).batches(1024, AXONN.axes) == [8192]
    assert len(BatchRule(8192, True, 0.05).batches(384, AXONN.axes)) == 8


@pytest.mark.parametrize("strategy", ["axonn", "megatron", "zero3", "zeropp"])
def test_every_strategy_takes_a_batch_that_its_gpus_share(strategy):
    search = build_search("5b", 96, strategy=strategy, recompute="full")
    best = rank_candidates(search).prediction(0)
    assert best.scenario.job.global_batch == 8064


def test_a_batch_that_was_given_stays():
    assert build_search("5b", 96, global_batch=8190).batches == [8190]
    assert build_search("5b", 96, global_batch_tokens="96k", seq_len=1000).batches == [96]
    assert build_search("5b", 96, global_batch=8190).on_gpus(192).batches == [8190]


def test_another_number_of_gpus_has_a_batch_of_its_own():
    search = build_search("5b", 96)
    assert search.batches == [8064]
    assert search.on_gpus(128).batches == [8192]
    assert len(build_search("5b", 96, within=0.1).on_gpus(128).batches) == 8


@pytest.fixture(scope="module")
def several():
    """A search that tries eight batches near one that no layout can share."""
    return build_search("5b", 96, global_batch=1000, within="5%", recompute="full")


@pytest.mark.slow
def test_the_fastest_batch_for_each_sequence_is_found(several):
    ranking = rank_candidates(several)
    alone = {
        batch: best_of(build_search("5b", 96, global_batch=batch, recompute="full")).prediction
        for batch in several.batches
    }
    seconds = {batch: best.step_seconds for batch, best in alone.items() if best is not None}
    assert ranking.batch_seconds == seconds and 1 < len(seconds) <= len(alone)
    fastest = min(seconds, key=lambda batch: seconds[batch] / batch)
    assert ranking.search.batches == [fastest]
    assert ranking.top(1)[0] == alone[fastest]
    assert best_of(several).search == with_best_batch(several) == ranking.search


@pytest.mark.slow
def test_a_layout_takes_the_best_batch_that_it_can_share(several):
    prediction = best_of_layout(several, "1x1x32x3")
    assert prediction.scenario.job.global_batch == 960
    with pytest.raises(InputError, match="attention heads"):
        best_of_layout(several, "1x96x1x1")
    assert "ranks 1 of" in why_not(several, rank_candidates(several).prediction(0).layout)


def test_a_batch_that_nothing_can_share_names_the_nearest_that_do():
    with pytest.raises(NoCandidateError, match="no grid for 96 GPUs") as caught:
        rank_candidates(build_search("5b", 96, global_batch=8192))
    named = re.search(
        r"that do: (\d+), (\d+) sequences, and all 96 GPUs can share (\d+)", str(caught.value)
    )
    below, above, shared = map(int, named.groups())
    assert below < 8192 < above and shared == 8064
    for batch in range(below, above + 1):
        reason = best_of(build_search("5b", 96, global_batch=batch)).reason
        assert ("no grid" in reason) == (below < batch < above)


def test_the_batches_that_are_named_suit_the_micro_batch():
    with pytest.raises(NoCandidateError, match="batches that do: 8184, 8196 sequences"):
        rank_candidates(build_search("5b", 96, global_batch=8190, micro_batch=4))


def test_a_layout_that_cannot_share_the_batch_names_the_nearest_that_it_can():
    with pytest.raises(InputError, match="batches that do: 8064, 8448 sequences"):
        best_of_layout(build_search("80b", 384, global_batch=8192), "1x1x192x2")
    with pytest.raises(InputError) as caught:
        best_of_layout(build_search("80b", 384, global_batch=8192), "1x5x1x1")
    assert "batches" not in str(caught.value)
