"""Layers cut into the stages of a pipeline: rules, the layers of each stage, and its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, starmap

import numpy as np

from axonn_tune.spec.blocks import Block
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B, ZB_H1
from axonn_tune.strategies.shapes import Shapes


def can_be_cut(n_layers: int, n_chunks: np.ndarray | int) -> np.ndarray:
    """Return whether layers can be cut: evenly, embedding and head counted as layers or not.

    An odd number of layers is cut evenly but for the last part, which takes what remains.
    """
    layers = np.asarray(n_layers)
    is_even = (layers % n_chunks == 0) & (layers >= n_chunks)
    leaves_a_rest = (n_layers % 2 == 1) & (-(-layers // n_chunks) * (n_chunks - 1) < layers)
    return is_even | ((layers + 2) % n_chunks == 0) | leaves_a_rest


def cut_layers(n_layers: int, n_chunks: int) -> list[int]:
    """Return the number of layers of each part into which layers can be cut.

    Where embedding and head count as layers, the first and the last part have one layer less.
    """
    most = math.ceil(n_layers / n_chunks)
    layers = [most] * n_chunks
    if n_layers % n_chunks == 0:
        return layers
    if (n_layers + 2) % n_chunks == 0:
        layers[0] -= 1
        layers[-1] -= 1
    else:
        layers[-1] = n_layers - most * (n_chunks - 1)
    return layers


def broken_pipeline_rules(
    model: Model,
    placements: Placements,
    balances_stages: bool = False,
    stage_layout: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """Return the placements whose stages cannot have the same number of layers, if they need it.

    The stages of a layout (`stage_layout`) are spread over all ranks of a pipeline.
    """
    if PIPELINE not in placements.axes.names or balances_stages:
        return {}
    stages = placements.size(PIPELINE)
    if stage_layout:
        reason = f"the stage layout's {len(stage_layout)} stages not divisible by pipeline"
        return {reason: (stages == 1) | (len(stage_layout) % stages != 0)}
    reason = "layers (or layers + 2, embedding and head counted) not divisible by the stages"
    return {reason: ~can_be_cut(model.n_layers, stages)}


def broken_frozen_rules(job: Job, placements: Placements) -> dict[str, np.ndarray]:
    """Return the placements that cannot freeze parts, since they have a pipeline.

    Its stages would differ in their passes, and in what they store.
    """
    if not job.frozen or PIPELINE not in placements.axes.names:
        return {}
    return {"frozen parts in a pipeline": placements.size(PIPELINE) > 1}


def broken_gradient_rules(placements: Placements) -> dict[str, np.ndarray]:
    """Return the placements that cannot shard gradients, since they have a pipeline.

    A stage would reduce the gradients of every micro-batch between its passes; DeepSpeed refuses
    it, too (0.19, runtime/pipe/engine.py).
    """
    if PIPELINE not in placements.axes.names:
        return {}
    return {"sharded gradients in a pipeline": placements.size(PIPELINE) > 1}


def admits_virtual(
    model: Model, job: Job, table: CandidateTable, stage_layout: Sequence[int] = ()
) -> np.ndarray:
    """Return whether a rank's layers can be cut into their virtual stages, shape (C,).

    Interleaving needs a pipeline, and micro-batches in multiples of the stages (Narayanan et
    al., SC21, section 2.2).
    """
    n_virtual = table.common_n_virtual
    n_stages = table.n_stages
    n_chunks = n_stages * n_virtual
    if stage_layout:
        are_cut = n_chunks == len(stage_layout)
    else:
        are_cut = n_virtual == 1 or bool(can_be_cut(model.n_layers, n_chunks).all())
    if not are_cut or (n_virtual > 1 and n_stages == 1):
        return np.zeros(len(table), dtype=bool)
    if n_virtual == 1:
        return np.ones(len(table), dtype=bool)
    return table.n_microsteps(job.global_batch) % n_stages == 0


def admits_schedule(schedule: str, job: Job, table: CandidateTable) -> np.ndarray:
    """Return whether a schedule can be run, shape (C,).

    Only 1F1B has virtual stages. DualPipe needs at least as many micro-batches from each end as
    there are stages (deepseek-ai/DualPipe at bb214e8, dualpipe.py).
    """
    admitted = np.ones(len(table), dtype=bool)
    if schedule == ONE_F_ONE_B or table.n_stages == 1:
        return admitted
    if table.common_n_virtual > 1:
        return np.zeros(len(table), dtype=bool)
    if schedule == DUALPIPE:
        n_micro = table.n_microsteps(job.global_batch)
        admitted = (n_micro % 2 == 0) & (n_micro >= 2 * table.n_stages)
    return admitted


def copies_of_model(schedule: str, table: CandidateTable) -> int:
    """Return the copies of the model that one pipeline holds: two where it has two directions."""
    return 2 if schedule == DUALPIPE and table.n_stages > 1 else 1


def _chunks(shapes: Shapes, table: CandidateTable) -> list[int]:
    """Return the number of layers of each virtual stage, in the order of the layers.

    `table` holds candidates with equal stages.
    """
    model = shapes.model
    if shapes.stage_layout:
        return list(shapes.stage_layout)
    if shapes.balances_stages:
        return _balanced_layers(model, table.n_stages, shapes.exceeds_shares)
    return cut_layers(model.n_layers, table.n_chunks)


def _layers_of_chunks(shapes: Shapes, table: CandidateTable) -> list[range]:
    """Return the layers of each virtual stage, counted from 0; see `_chunks`."""
    return list(starmap(range, pairwise([0, *accumulate(_chunks(shapes, table))])))


def layers_of_stage(shapes: Shapes, stage: int, table: CandidateTable) -> list[int]:
    """Return all layers of one rank; see `_chunks`."""
    chunks = _layers_of_chunks(shapes, table)[stage :: table.n_stages]
    return [layer for layers in chunks for layer in layers]


def _balanced_layers(model: Model, n_stages: int, exceeds_shares: bool) -> list[int]:
    """Return the number of layers of each stage where stages are to have equal products.

    The head counts with its product, and the embedding with none. A stage takes layers until it
    has its share (nanotron e24d2483, models/base.py, build_model). That code takes one more where
    the layers are exactly the share, but most measured runs did not: a micro-batch of 1B, whose
    shares with 2 and 4 stages are 10 and 5 layers, takes 10.2 and 5.2 times a layer's time. Runs
    that slept between stages did, by their memory (reproduce/nanotron.py). The head belongs to the
    last stage that has anything.
    """
    layer = float(model.block_matmul_parameters)
    share = (model.n_layers * layer + model.head.parameters) / n_stages
    n_layers = [0] * n_stages
    stage = 0
    for number in range(1, model.n_layers + 1):
        n_layers[stage] += 1
        beyond = number * layer - share * (stage + 1)
        if beyond > 0.0 or (beyond == 0.0 and not exceeds_shares):
            stage += 1
    return n_layers


def stages_of(shapes: Shapes, table: CandidateTable) -> tuple[list[Sequence[int]], tuple[int, ...]]:
    """Return the layers of the first, a middle and the last virtual stage, and of further ones.

    The second result is `Pipeline.places`. Without a pipeline there is one stage with all layers.
    `table` holds candidates with equal stages.
    """
    model = shapes.model
    if not table.is_pipelined:
        return [range(model.n_layers)], ()
    chunks = _layers_of_chunks(shapes, table)
    if shapes.stage_layout or shapes.balances_stages:
        (middle, *others), places = _kinds_of_stages(model, chunks)
        return [chunks[0], middle, chunks[-1], *others], places
    n_middle = math.ceil(model.n_layers / table.n_chunks)
    return [chunks[0], _middle_layers(model, n_middle, chunks[0]), chunks[-1]], ()


def _kinds_of_stages(
    model: Model, chunks: Sequence[range]
) -> tuple[list[Sequence[int]], tuple[int, ...]]:
    """Return the layers of each kind of virtual stage in the middle, and `Pipeline.places`.

    Virtual stages that have equally many layers of each kind of block are of one kind.
    """
    kinds: dict[tuple[tuple[Block, int], ...], Sequence[int]] = {}
    numbers = []
    for layers in chunks[1:-1]:
        counts = tuple(model.counts(layers).items())
        kinds.setdefault(counts, layers)
        numbers.append(list(kinds).index(counts))
    places = (0, *(1 if number == 0 else number + 2 for number in numbers), 2)
    return list(kinds.values()) or [chunks[-1]], places


def _middle_layers(model: Model, n_layers: int, first_layers: range) -> range:
    """Return layers that represent any virtual stage but the first and the last.

    They follow the layers of the first virtual stage if the model has enough of them.
    """
    start = min(first_layers.stop, model.n_layers - n_layers)
    return range(start, start + n_layers)


# A function from a stage's layers, whether it is the first and the last, and the number of layers
# whose activations are held at once, to the stage's bytes by term.
StageMemory = Callable[[Sequence[int], bool, bool, Array], dict[str, Array]]


def memory_of_stages(
    shapes: Shapes, memory_of: StageMemory, schedule: str = ONE_F_ONE_B
) -> Iterator[dict[str, Array]]:
    """Yield the bytes by term of a rank in each stage that may need most, the first one leading.

    These are the first and the last stage, and those in the middle that may need more than both.

    The first of p stages holds the activations of p micro-batches (1F1B); with v virtual stages it
    holds 1 + (p - 1) / (p v) times as many (Korthikanti et al., arXiv 2205.05198, section 4.2.3).
    The second stage holds the activations of one micro-batch less, or, with virtual stages, of two
    virtual stages less. The last stage holds the activations of one micro-batch, or of (v - 1) p +
    1 of them in one virtual stage; with ZB-H1 every stage but the first postpones gradients of
    weights, and holds the inputs of p micro-batches, which count here as all of their activations.
    With DualPipe the ranks of both ends hold the first and the last stage, and the activations of
    p + 1 micro-batches (arXiv 2412.19437, table 2).
    """
    table = shapes.table
    model = shapes.model
    n_stages = table.n_stages
    n_virtual = shapes.n_virtual
    if n_stages == 1:
        n_held = np.full(len(table), float(model.n_layers))
        yield memory_of(range(model.n_layers), True, True, n_held)
        return
    n_micro = table.n_microsteps(shapes.job.global_batch)

    def terms_of(stage: int, in_flight: float) -> dict[str, Array]:
        layers = layers_of_stage(shapes, stage, table)
        n_held = len(layers) * np.minimum(n_micro, in_flight)
        return memory_of(layers, stage == 0, stage == n_stages - 1, n_held)

    def terms_of_pair(stage: int) -> dict[str, Array]:
        ends = stage, n_stages - 1 - stage
        layers = [layer for each in ends for layer in layers_of_stage(shapes, each, table)]
        n_held = len(layers) / 2.0 * np.minimum(n_micro, n_stages + 1.0)
        return memory_of(layers, stage == 0, stage == 0, n_held)

    middle = _needy_middle_stages(shapes, table)
    if schedule == DUALPIPE:
        yield from map(terms_of_pair, [0, *(stage for stage in middle if 2 * stage < n_stages)])
        return
    in_first = float(n_stages)
    in_last = in_first if schedule == ZB_H1 else 1.0
    if n_virtual > 1:
        in_first *= 1.0 + (n_stages - 1) / (n_stages * n_virtual)
        in_last = ((n_virtual - 1) * n_stages + 1) / n_virtual
    yield terms_of(0, in_first)
    yield terms_of(n_stages - 1, in_last)
    fewer = 0.0 if schedule == ZB_H1 else min(2.0 / n_virtual, 1.0)
    for stage in middle:
        yield terms_of(stage, in_first - stage * fewer)


def memory_of_stage(shapes: Shapes, memory_of: StageMemory, stage: int) -> dict[str, Array]:
    """Return the bytes by term of a rank in one of several stages without virtual ones, in 1F1B.

    Stage s of p holds the activations of p - s micro-batches.
    """
    table = shapes.table
    layers = layers_of_stage(shapes, stage, table)
    n_micro = table.n_microsteps(shapes.job.global_batch)
    n_held = len(layers) * np.minimum(n_micro, table.n_stages - stage)
    return memory_of(layers, stage == 0, stage == table.n_stages - 1, n_held)


def _needy_middle_stages(shapes: Shapes, table: CandidateTable) -> list[int]:
    """Return the stages between the first and the last one that may need more memory than these.

    A stage with more layers than the first one may need more. Of several with equally many layers,
    only the earliest counts, since it holds the activations of most micro-batches. Where layers
    differ, the second stage may need more, too, and where the user gives a layout of stages, any
    may.
    """
    n_stages = table.n_stages
    if shapes.stage_layout:
        return list(range(1, n_stages - 1))
    chunks = _chunks(shapes, table)
    n_layers = [sum(chunks[stage::n_stages]) for stage in range(n_stages - 1)]
    needy = {n_layers.index(number) for number in set(n_layers) if number > n_layers[0]}
    if n_stages > 2 and len(shapes.model.counts(range(shapes.model.n_layers))) > 1:
        needy.add(1)
    return sorted(needy)


def neediest(
    of_stages: Iterable[dict[str, Array]], spare_terms: Collection[str] = ()
) -> dict[str, Array]:
    """Return the bytes by term of the rank that needs most (`memory_of_stages`).

    Terms that no GPU must have room for (`spare_terms`) do not count when the largest is chosen.
    """
    stages = list(of_stages)
    if len(stages) == 1:
        return stages[0]
    kept = [term for term in stages[0] if term not in spare_terms]
    needed = np.array([np.sum([terms[term] for term in kept], axis=0) for terms in stages])
    place = needed.argmax(axis=0)
    return {term: np.choose(place, [terms[term] for terms in stages]) for term in stages[0]}
