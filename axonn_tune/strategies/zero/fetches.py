"""What DeepSpeed gathers in the backward pass of blocks that are recomputed.

DeepSpeed releases a matrix after its use unless it comes again soon, and gathers ahead as long as
few enough elements are gathered (0.9.5 to 0.19, runtime/zero/partitioned_param_coordinator.py). If
a block is large, recomputation has released some of its matrices by the time at which their
gradients are formed, and they are gathered again. Checkpoints are reentrant, as those of
Megatron-DeepSpeed: a block is recomputed before the backward pass enters it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from axonn_tune.spec.names import BACKWARD, RECOMPUTE

# In a model of this many blocks, the middle one is gathered like all blocks far from both ends.
_N_BLOCKS = 9


@dataclass(frozen=True)
class BackwardFetches:
    """How the matrices of a recomputed block are gathered: all once, and some of them again.

    Attributes
    ----------
    early_share
        Share of the block whose gather for recomputation starts while a block is recomputed; the
        others start while gradients are formed.
    again_elements, n_again
        Number of elements that are gathered again for gradients, and number of these gathers.
    early_again_share
        Share of these elements whose gather starts while a block is recomputed.
    joined_again_share
        Share of these elements whose gathers bring several matrices.
    of_matrices
        What is gathered again of each matrix, in the order of their use; empty where it is not
        told apart.
    """

    early_share: float = 0.0
    again_elements: float = 0.0
    n_again: float = 0.0
    early_again_share: float = 0.0
    joined_again_share: float = 0.0
    of_matrices: tuple[BackwardFetches, ...] = ()


# The whole block is gathered once, while its gradients are formed.
FETCHED_ONCE = BackwardFetches()


def fetched_each_time(sizes: Sequence[float]) -> BackwardFetches:
    """Return the gathers of a block each of whose matrices is gathered again for its gradient.

    Parameters
    ----------
    sizes
        Numbers of elements of the matrices.
    """
    return BackwardFetches(
        again_elements=sum(sizes), n_again=float(len(sizes)), joined_again_share=1.0
    )


@dataclass(frozen=True)
class FetchRules:
    """States when gathered matrices are released, and when further ones are gathered.

    Attributes
    ----------
    live_elements
        Number of gathered elements from which nothing is gathered ahead.
    reuse_elements
        Number of elements that are used between two uses of a matrix from which it is released.
    prefetch_elements
        Number of elements up to which matrices are gathered ahead at each use of one.
    """

    live_elements: float
    reuse_elements: float
    prefetch_elements: float


@lru_cache
def backward_fetches(sizes: tuple[float, ...], rules: FetchRules) -> BackwardFetches:
    """Return what is gathered of a block that is recomputed, among many equal ones.

    A block that is used twice within the distance stays gathered; then a rank holds as much as it
    may, so that it gathers ahead where matrices are released, which is where gradients are formed.

    Parameters
    ----------
    sizes
        Numbers of elements of the matrices of the block's modules, in the order of their use; 0 for
        a norm and for an activation, at which matrices are gathered ahead, too.
    """
    if 2.0 * sum(sizes) <= rules.reuse_elements:
        return FETCHED_ONCE
    uses = [
        Use(block, module, chain, sizes[module])
        for block in range(_N_BLOCKS)
        for chain, order in ((RECOMPUTE, 1), (BACKWARD, -1))
        for module in range(len(sizes))[::order]
    ]
    gathers = [
        gather for gather in Trace(uses, rules).gathers() if gather[0].block == _N_BLOCKS // 2
    ]
    again = [gather for gather in gathers if gather[0].chain == BACKWARD]
    modules = [module for module, size in enumerate(sizes) if size]
    return replace(
        _gathered_again(again),
        early_share=_early_elements(gathers, RECOMPUTE) / sum(sizes),
        of_matrices=tuple(
            _gathered_again([gather for gather in again if gather[0].module == module])
            for module in modules
        ),
    )


@dataclass(frozen=True)
class Use:
    """One use of a module, with its matrix unless it has no elements."""

    block: int
    module: int
    chain: str
    elements: float

    @property
    def key(self) -> tuple[int, int]:
        """What two uses of the same module share."""
        return self.block, self.module


# A matrix's use, the use at which its gather starts, and the number of matrices in that gather.
Gather = tuple[Use, Use, int]


class Brought(NamedTuple):
    """What some gathers bring: elements, in how many gathers, and the share that comes joined."""

    elements: float
    n_gathers: float
    joined_share: float


def brought(gathers: Sequence[Gather]) -> Brought:
    """Return what some gathers bring; a gather of several matrices is cut into equal parts."""
    elements = sum(use.elements for use, _, _ in gathers)
    joined = sum(use.elements for use, _, n_joined in gathers if n_joined > 1)
    n_gathers = sum(1.0 / n_joined for _, _, n_joined in gathers)
    return Brought(elements, n_gathers, joined / elements if elements else 0.0)


def _gathered_again(again: Sequence[Gather]) -> BackwardFetches:
    """Add up the gathers that bring matrices again for their gradients."""
    elements, n_again, joined_share = brought(again)
    return BackwardFetches(
        again_elements=elements,
        n_again=n_again,
        early_again_share=_early_elements(again, BACKWARD) / elements if again else 0.0,
        joined_again_share=joined_share,
    )


def _early_elements(gathers: Sequence[Gather], chain: str) -> float:
    """Return the elements that a chain uses and whose gathers start during recomputation."""
    return sum(
        use.elements for use, start, _ in gathers if use.chain == chain and start.chain == RECOMPUTE
    )


@dataclass(eq=False)
class _Message:
    """A gather of some elements, and whether it was awaited."""

    elements: float
    is_received: bool = False


class Trace:
    """A pass over the uses of matrices, which gathers and releases them.

    Parameters
    ----------
    uses
        The uses of modules, in order.
    rules
        When matrices are gathered and released.
    message_share
        Ratio of the bytes of a message to those of its matrices.
    """

    def __init__(self, uses: Sequence[Use], rules: FetchRules, message_share: float = 1.0) -> None:
        self._uses = uses
        self._rules = rules
        self._message_share = message_share
        self._coming = deque((n, use) for n, use in enumerate(uses) if use.elements)
        self._gathered: set[tuple[int, int]] = set()
        self._seen_until: dict[tuple[int, int], int] = {}
        self._n_live = 0.0
        self._messages: dict[tuple[int, int], _Message] = {}
        self._gathers: list[Gather] = []

    def gathers(self) -> list[Gather]:
        """Return the gathers of the whole pass."""
        for _ in self.play():
            pass
        return self._gathers

    @property
    def held_elements(self) -> float:
        """The elements of gathered weights that a rank holds now, in bytes of the weights.

        A message of several matrices is there until the last of them is used, beside the copies of
        all, which exist from the use of the first one; if it is quantised, so is its whole form
        (0.19, runtime/zero/partition_parameters.py, AllGatherCoalescedHandle).
        """
        share = self._message_share
        whole = 1.0 if share < 1.0 else 0.0
        held = self._n_live
        for message in set(self._messages.values()):
            held += message.elements * (whole + share if message.is_received else share - 1.0)
        return held

    def play(self) -> Iterator[Use]:
        """Yield each use once its matrix has been gathered and gathers ahead of it have started."""
        for position, use in enumerate(self._uses):
            if use.elements:
                self._gather([use], use)
                self._await(use)
                if self._seen_until.get(use.key, -1) < position:
                    self._pass_over()
            self._gather(self._ahead(), use)
            yield use
            if use.elements and not self._stays(position, use):
                self._gathered.discard(use.key)
                self._n_live -= use.elements

    def _pass_over(self) -> Use:
        """Take the next use that lies ahead, and note that it is provided for."""
        position, use = self._coming.popleft()
        self._seen_until[use.key] = position
        return use

    def _gather(self, wanted: Sequence[Use], start: Use) -> None:
        """Gather what is not gathered yet."""
        missing = [use for use in wanted if use.key not in self._gathered]
        message = _Message(sum(use.elements for use in missing))
        for use in missing:
            self._gathered.add(use.key)
            self._n_live += use.elements
            self._messages[use.key] = message
            self._gathers.append((use, start, len(missing)))

    def _await(self, use: Use) -> None:
        """Wait for the message that brings a matrix, unless it was used since it was gathered."""
        message = self._messages.pop(use.key, None)
        if message is not None:
            message.is_received = True

    def _ahead(self) -> list[Use]:
        """Return what is gathered ahead; uses of gathered matrices are passed over."""
        room = min(self._rules.live_elements - self._n_live, self._rules.prefetch_elements)
        ahead: list[Use] = []
        while self._coming and sum(use.elements for use in ahead) < room:
            use = self._pass_over()
            if use.key not in self._gathered and use.key not in {each.key for each in ahead}:
                ahead.append(use)
        return ahead

    def _stays(self, position: int, use: Use) -> bool:
        """Return whether a matrix stays: a later use was passed over, or is not far."""
        if self._seen_until[use.key] > position:
            return True
        n_between = 0.0
        for later in self._uses[position + 1 :]:
            if n_between >= self._rules.reuse_elements:
                return False
            if later.key == use.key:
                return True
            n_between += later.elements
        return False
