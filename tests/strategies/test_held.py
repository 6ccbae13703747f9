"""What a rank of DeepSpeed holds of weights and gradients, by hand."""

from dataclasses import replace

import pytest

from axonn_tune.strategies.zero.fetches import FetchRules
from axonn_tune.strategies.zero.held import BucketRules, HeldModel, held

# qkv, proj, up and down between norms, in squares of the width of GPT-3 175B, whose biases count
# among a module's vectors.
SQUARE = 12288.0**2
SIZES = (0.0, 3 * SQUARE, SQUARE, 0.0, 4 * SQUARE, 4 * SQUARE)
GPT = HeldModel(SIZES, (True,) * 6, 96, 4 * SQUARE, 0.0, recomputes=True)
LLAMA = replace(GPT, has_vectors=(True, False, False) * 2, head=4 * SQUARE)
RULES = FetchRules(live_elements=1e9, reuse_elements=1e9, prefetch_elements=5e7)


def test_of_175b_one_matrix_is_gathered_beside_an_embedding_of_its_size():
    """Beside both there is no room, nor beside two matrices; less is held while others are used."""
    most = held(GPT, RULES, BucketRules(1e7), 1.0)
    assert most.gradients == 1e7 + (4 + 4) * SQUARE
    assert most.weights_and_gradients == most.gradients + (4 + 4) * SQUARE
    untied = held(replace(GPT, head=4 * SQUARE), RULES, BucketRules(1e7), 1.0)
    assert untied.weights_and_gradients == 1e7 + (8 + 4) * SQUARE


def test_without_biases_a_gradient_waits_while_the_next_one_is_formed():
    """Down waits for up; with biases it would be reduced before."""
    untied = replace(GPT, head=4 * SQUARE)
    assert held(untied, RULES, BucketRules(1e7), 1.0).gradients == 1e7 + 4 * SQUARE
    assert held(LLAMA, RULES, BucketRules(1e7), 1.0).gradients == 1e7 + 8 * SQUARE


@pytest.mark.parametrize(("elements", "copied"), [(5 * SQUARE, 4), (8 * SQUARE, 8), (1e12, 0)])
def test_a_full_bucket_is_copied_while_the_gradient_is_there_that_no_longer_fits(elements, copied):
    """One of 4 squares, or two, or none; then come 4 squares."""
    untied = replace(GPT, head=4 * SQUARE)
    most = held(untied, RULES, BucketRules(elements), 1.0)
    assert most.gradients == elements + (copied + 4) * SQUARE


def test_gradients_in_fp32_have_buckets_of_twice_the_bytes():
    untied = replace(GPT, head=4 * SQUARE)
    most = held(untied, RULES, BucketRules(8 * SQUARE, message_share=2.0), 1.0)
    assert most.gradients == (2 * 8 + 2 * 8 + 4) * SQUARE


def test_an_exchange_in_4_bits_copies_a_quarter_twice():
    untied = replace(GPT, head=4 * SQUARE)
    most = held(untied, RULES, BucketRules(8 * SQUARE, exchanged_share=0.25), 1.0)
    assert most.gradients == (8 + 2 * 0.25 * 4 + 4) * SQUARE


def test_what_is_under_way_in_8_bits_takes_half():
    """The message of two matrices stays beside its dequantised form until both are used."""
    small = tuple(size / 400 for size in SIZES)
    model = replace(GPT, sizes=small, embedding=0.0, trained_of_block=0.0)
    rules = replace(RULES, live_elements=1.0, prefetch_elements=1.0)
    alone = [held(model, rules, BucketRules(0.0), share) for share in (1.0, 0.5)]
    assert alone[0] == alone[1], "nothing is gathered ahead"
    ahead = replace(rules, live_elements=1e9, prefetch_elements=1e7)
    whole, half = (held(model, ahead, BucketRules(0.0), share) for share in (1.0, 0.5))
    assert 0.5 < half.weights_and_gradients / whole.weights_and_gradients < 1.0


def test_frozen_weights_have_no_gradients():
    frozen = replace(LLAMA, trained_of_block=0.0, trained_embedding=0.0, trained_head=0.0)
    assert held(frozen, RULES, BucketRules(5e8), 1.0).gradients == 5e8
