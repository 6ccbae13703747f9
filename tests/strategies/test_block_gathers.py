"""How often DeepSpeed gathers the matrices of blocks, by hand."""

from dataclasses import replace

import pytest

from axonn_tune.strategies.zero.block_gathers import PassGathers, block_gathers
from axonn_tune.strategies.zero.fetches import FetchRules
from axonn_tune.strategies.zero.held import HeldModel

# Of 7B: qkv, proj, up and down between norms, in squares of its width. Proj has 17 million
# elements, which is less than DeepSpeed gathers at once, and the others have 50 and more.
SQUARE = 4096.0**2
SIZES = (0.0, 3 * SQUARE, SQUARE, 0.0, 4 * SQUARE, 4 * SQUARE)
HEAD = 50304.0 * 4096
GPT = HeldModel(SIZES, (True,) * 6, 32, HEAD, HEAD, recomputes=True)
WITH_ACTIVATION = replace(GPT, sizes=(*SIZES[:-1], 0.0, SIZES[-1]), has_vectors=(True,) * 7)
DEFAULTS = FetchRules(live_elements=1e9, reuse_elements=1e9, prefetch_elements=5e7)
JOINED = PassGathers(3.0, pytest.approx(5 / 12))


@pytest.mark.parametrize("recomputes", [True, False])
def test_with_enough_room_proj_comes_with_up(recomputes):
    model = replace(GPT, recomputes=recomputes)
    rules = replace(DEFAULTS, live_elements=1e12, reuse_elements=1.0)
    gathers = block_gathers(model, rules)
    assert gathers.forward == JOINED


def test_proj_comes_alone_where_only_qkv_makes_room():
    """The first nine blocks come before a billion elements are gathered."""
    forward = block_gathers(GPT, DEFAULTS).forward
    assert forward.n_calls == (9 * 3 + 23 * 4) / 32
    assert forward.joined_share == pytest.approx(9 / 32 * 5 / 12)


def test_in_the_backward_pass_two_matrices_make_room_unless_there_is_an_activation_between():
    """Down and up are then released between two modules at which matrices are gathered ahead."""
    apart, together = (block_gathers(model, DEFAULTS) for model in (WITH_ACTIVATION, GPT))
    assert together.again.n_calls == pytest.approx(3.0, abs=0.1)
    assert apart.again.n_calls == pytest.approx(4.0, abs=0.1)
    assert together.again.joined_share > 0.35
    assert apart.again.joined_share < 0.05


def test_a_weight_of_both_ends_takes_room_all_the_time():
    tied = replace(GPT, head=0.0)
    room = replace(DEFAULTS, live_elements=DEFAULTS.live_elements - HEAD)
    assert block_gathers(tied, DEFAULTS) == block_gathers(replace(tied, embedding=0.0), room)


def test_blocks_that_all_stay_gathered_count_as_in_the_forward_pass():
    model = replace(GPT, n_blocks=4)
    rules = replace(DEFAULTS, live_elements=1e12, reuse_elements=1e12)
    gathers = block_gathers(model, rules)
    assert gathers.again == gathers.forward == JOINED
