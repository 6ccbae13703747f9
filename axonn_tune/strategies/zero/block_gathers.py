"""How many gathers bring the matrices of DeepSpeed's blocks in a micro-step.

Matrices that come next join a gather until it has `prefetch_elements`, unless a rank holds as many
gathered elements as it may: then each matrix that is released makes room for the next one alone
(0.9.5 to 0.19, runtime/zero/partitioned_param_coordinator.py, fetch_sub_module). How the sizes of
matrices follow one another thus decides whether a small one ever comes with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.strategies.zero.fetches import FetchRules, Gather, Trace, brought
from axonn_tune.strategies.zero.held import HeldModel


@dataclass(frozen=True)
class PassGathers:
    """How the matrices of a block are gathered for a pass, averaged over equal blocks.

    n_calls
        Number of gathers.
    joined_share
        Share of the elements whose gathers bring several matrices.
    """

    n_calls: float
    joined_share: float


@dataclass(frozen=True)
class BlockGathers:
    """How the matrices of a block are gathered for a forward pass, and for the pass after it.

    That pass is recomputation or the backward pass. It counts blocks that were not kept gathered.
    """

    forward: PassGathers
    again: PassGathers


@lru_cache(maxsize=1024)
def block_gathers(model: HeldModel, rules: FetchRules) -> BlockGathers:
    """Return how the matrices of a model's blocks are gathered."""
    rules = model.rules_beside_shared(rules)
    gathers = Trace(list(model.uses(model.n_blocks)), rules).gathers()
    of_blocks = [gather for gather in gathers if gather[0].block >= 0]
    forward = _gathers_for(FORWARD, of_blocks, sum(model.sizes))
    later = RECOMPUTE if model.recomputes else BACKWARD
    again = _gathers_for(later, of_blocks, sum(model.sizes))
    return BlockGathers(forward, again if again.n_calls else forward)


def _gathers_for(chain: str, gathers: Sequence[Gather], block_elements: float) -> PassGathers:
    """Return how the matrices of blocks are gathered for a pass."""
    elements, n_calls, joined_share = brought([each for each in gathers if each[0].chain == chain])
    if not elements:
        return PassGathers(0.0, 0.0)
    return PassGathers(n_calls * block_elements / elements, joined_share)
