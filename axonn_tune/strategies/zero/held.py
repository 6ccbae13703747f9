"""What a rank of DeepSpeed's ZeRO-3 holds of whole weights and gradients at once.

Gathered weights are those of the `Trace`. The gradient of a matrix waits in a bucket until the next
one does not fit (0.9.5 to 0.19, runtime/zero/stage3.py,
reduce_independent_p_g_buckets_and_remove_grads). Those that fit are copied to a buffer, which is
there from the beginning, and copied again where several of them are reduced together
(runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.strategies.zero.fetches import FetchRules, Trace, Use

# The positions of the ends beside blocks, which count from 0.
_EMBEDDING, _HEAD = -1, -2


@dataclass(frozen=True)
class BucketRules:
    """How gradients wait for their reduction.

    Attributes
    ----------
    elements
        Number of elements that a bucket holds, unless one matrix has more.
    message_share
        Ratio of the bytes of a gradient as it is reduced to those of the weight.
    exchanged_share
        The same ratio where each matrix is quantised and exchanged for itself; 0 for reductions.
    """

    elements: float
    message_share: float = 1.0
    exchanged_share: float = 0.0


@dataclass(frozen=True)
class HeldModel:
    """The matrices of a model whose weights are gathered.

    Attributes
    ----------
    sizes
        Numbers of elements of the matrices of a block's modules, in the order of their use; 0 for a
        norm and for an activation.
    has_vectors
        Which of these modules are norms or have a bias, whose gradient follows that of the matrix.
    n_blocks
        Number of blocks.
    embedding, head
        Numbers of elements of the ends; the head has none of its own where it shares the
        embedding's weight, which is then gathered all the time.
    recomputes
        Whether a block is recomputed before its backward pass.
    trained_of_block, trained_embedding, trained_head
        Shares of these elements that are trained.
    """

    sizes: tuple[float, ...]
    has_vectors: tuple[bool, ...]
    n_blocks: int
    embedding: float
    head: float
    recomputes: bool
    trained_of_block: float = 1.0
    trained_embedding: float = 1.0
    trained_head: float = 1.0

    def uses(self, n_blocks: int) -> Iterator[Use]:
        """Yield the uses of the modules of some blocks and of the ends in a micro-step."""
        modules = range(len(self.sizes))
        embedding = Use(_EMBEDDING, 0, FORWARD, self.embedding if self.head else 0.0)
        yield embedding
        for block in range(n_blocks):
            yield from (Use(block, module, FORWARD, self.sizes[module]) for module in modules)
        yield Use(_HEAD, 0, FORWARD, self.head)
        yield Use(_HEAD, 0, BACKWARD, self.head)
        for block in reversed(range(n_blocks)):
            if self.recomputes:
                yield from (Use(block, module, RECOMPUTE, self.sizes[module]) for module in modules)
            for module in reversed(modules):
                yield Use(block, module, BACKWARD, self.sizes[module])
        yield Use(_EMBEDDING, 0, BACKWARD, embedding.elements)

    @property
    def shared(self) -> float:
        """The number of elements of a weight of both ends, which is gathered all the time."""
        return 0.0 if self.head else self.embedding

    def rules_beside_shared(self, rules: FetchRules) -> FetchRules:
        """Return the rules for what is gathered beside a weight of both ends."""
        return replace(rules, live_elements=max(rules.live_elements - self.shared, 0.0))

    def trained(self, use: Use) -> float:
        """Return the number of elements of the gradient that a use forms."""
        if use.chain != BACKWARD:
            return 0.0
        of_ends = {_EMBEDDING: self.trained_embedding, _HEAD: self.trained_head}
        return use.elements * of_ends.get(use.block, self.trained_of_block)

    def has_vector(self, use: Use) -> bool:
        """Return whether a vector's gradient follows; after the head it is the final norm's."""
        is_vector = use.block == _HEAD or (use.block >= 0 and self.has_vectors[use.module])
        return use.chain == BACKWARD and is_vector


@dataclass(frozen=True)
class Held:
    """What a rank holds at most, in elements of the weights.

    Attributes
    ----------
    gradients
        Whole gradients, the bucket's buffer and copies.
    weights_and_gradients
        These and gathered weights, at the moment at which both together are most.
    """

    gradients: float
    weights_and_gradients: float


@lru_cache
def held(
    model: HeldModel, rules: FetchRules, bucket_rules: BucketRules, gathered_share: float
) -> Held:
    """Return what a rank holds at most in the backward pass of a micro-step.

    Parameters
    ----------
    gathered_share
        Ratio of the bytes of a message that gathers weights to those of the weights.
    """
    shared = model.shared
    bucket = _Bucket(bucket_rules)
    rules = model.rules_beside_shared(rules)
    trace = Trace(list(model.uses(_n_blocks(model, rules))), rules, gathered_share)
    most_gradients = most = 0.0
    for use in trace.play():
        # The head's gradient of a shared weight waits until the embedding's is added to it.
        kept = shared * model.trained_embedding * (use.chain != FORWARD)
        gradients = bucket.buffer + kept + bucket.add(model.trained(use))
        if model.has_vector(use):
            bucket.add_vector()
        most_gradients = max(most_gradients, gradients)
        most = max(most, shared + trace.held_elements + gradients)
    return Held(most_gradients, most)


def _n_blocks(model: HeldModel, rules: FetchRules) -> int:
    """Return as many blocks as a rank may hold, or may use before a reuse, and a few more."""
    within = max(rules.live_elements, rules.reuse_elements)
    return min(model.n_blocks, 6 + int(within / sum(model.sizes)))


class _Bucket:
    """Holds the gradients that wait for their reduction."""

    def __init__(self, rules: BucketRules) -> None:
        self._rules = rules
        self._n_waiting = self._apart = self._largest = 0.0

    @property
    def buffer(self) -> float:
        """The elements of the buffer."""
        return self._rules.elements * self._rules.message_share

    def add(self, size: float) -> float:
        """Let a gradient wait, and return what is held beside the buffer meanwhile."""
        if not size:
            return self._apart
        held = size + self._apart
        if self._n_waiting + size > self._rules.elements:
            held += self._copied
            self._clear()
        if self._n_waiting + size > self._rules.elements:
            self._apart = size
        self._n_waiting += size
        self._largest = max(self._largest, size)
        return held

    def add_vector(self) -> None:
        """Reduce a gradient that is larger than the buffer, since no other one joins it."""
        if self._apart:
            self._clear()

    @property
    def _copied(self) -> float:
        """The elements of the copies that a reduction needs."""
        rules = self._rules
        if rules.exchanged_share:
            # What is sent and what is received.
            return 2.0 * rules.exchanged_share * self._largest
        converted = rules.message_share * self._apart if rules.message_share != 1.0 else 0.0
        return converted if self._apart else rules.message_share * self._n_waiting

    def _clear(self) -> None:
        self._n_waiting = self._apart = self._largest = 0.0
