"""Plans, memory, searches and tables of candidates from plain sizes, for tests of all rooms."""

from dataclasses import replace

import numpy as np

from axonn_tune.search.candidates import legal_placements, with_micro_batches
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_candidates
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.plan import Attention, Collective
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator

# A layout of 64 GPUs for each of these strategies.
LAYOUTS_OF_64 = {
    "axonn": "1x4x8x2",
    "axonn-pipeline": "1x2x2x4x4",
    "megatron": "tensor=4,data=4,pipeline=4",
    "zero3": "shard=16,replica=4",
    "zeropp": "secondary=4,across=16",
    "zero-topo": "weights=8,gradients=2,states=4",
}


def number(value):
    """The first entry of a size."""
    return float(np.ravel(np.asarray(value, dtype=np.float64))[0])


# One configuration --------------------------------------------------------------------------


def layout_of(strategy, **sizes):
    """Sizes of a strategy's axes, those left out 1."""
    whole = {axis: sizes.pop(axis, 1) for axis in strategy.axes.sized}
    assert not sizes, f"{strategy.name} has no axes {sorted(sizes)}"
    return Layout(whole)


def table_of(strategy, micro_batch=1, recompute="none", n_virtual=1, **sizes):
    """The table that holds one configuration."""
    layout = layout_of(strategy, **sizes)
    configuration = Configuration(layout, "xyzd", micro_batch, recompute, n_virtual)
    return CandidateTable.single(configuration, strategy.axes)


def plan_of(strategy, model, job, micro_batch=1, recompute="none", n_virtual=1, **sizes):
    """The step plan of one configuration."""
    return strategy.plan(model, job, table_of(strategy, micro_batch, recompute, n_virtual, **sizes))


def memory_terms(strategy, model, job, micro_batch=1, recompute="none", n_virtual=1, **sizes):
    """Peak bytes of a rank by term, of one configuration."""
    table = table_of(strategy, micro_batch, recompute, n_virtual, **sizes)
    terms = strategy.memory(model, job, table)
    return {term: number(value) for term, value in terms.items()}


def can_run(strategy, model, job, micro_batch=1, n_virtual=1, **sizes):
    """Whether a layout can be cut into the virtual stages."""
    table = table_of(strategy, micro_batch, "none", n_virtual, **sizes)
    return bool(strategy.admits(model, job, table).all())


def operations(*parts):
    """Every operation of parts of a plan in order of issue, all repeats."""
    phases = [phase for part in parts for phase in part.phases]
    return [op for phase in phases for _ in range(phase.repeats) for op in phase.operations]


def group_size(plan, group):
    """Ranks of a group in the plan of one configuration."""
    return int(number(plan.candidates.size(group)))


def collectives(plan, *parts):
    """Collectives over more than one rank."""
    return [
        op
        for op in operations(*parts)
        if isinstance(op, Collective) and group_size(plan, op.axis) > 1
    ]


def attentions(plan, chain):
    """The kernels of attention of one block that run at all."""
    ops = [op for op in operations(plan.microstep) if isinstance(op, Attention)]
    ops = {op.name: op for op in ops if op.name.startswith(chain) and number(op.n_launches)}
    return list(ops.values())


def sent_bytes(plan, chain, axis):
    """Bytes that a rank sends over an axis in a chain of a micro-step."""
    total = 0.0
    for op in collectives(plan, plan.microstep):
        if op.axis == axis and op.name.startswith(chain):
            n_ranks = number(plan.candidates.size(axis))
            moved = 1.0 if op.kind == "send_recv" else (n_ranks - 1.0) / n_ranks
            total += moved * number(op.nbytes)
    return total


# Searches -----------------------------------------------------------------------------------


def search_of(model, job, machine, strategy, *, fixed=None, micro_batch=None, **options):
    """A search with axes and micro-batch fixed or free; `options` are those of `Search`."""
    constraints = Constraints(axes=dict(fixed or {}), micro_batch=micro_batch)
    return Search(Scenario(model, job, machine, strategy), constraints, **options)


def ranking_of(search):
    """Return all candidates of a search, ranked."""
    return rank_candidates(search)


def prediction_of(search, layout):
    """The best configuration of one layout."""
    return best_of_layout(search, layout)


def times_of(search, table, recompute="none", n_virtual=1):
    """Seconds of a step, of exposed communication and of the bubble, of each candidate."""
    times = Evaluator.of(search.scenario, table.executed(recompute, n_virtual)).evaluate()
    return np.stack([times.step_seconds, times.exposed_communication_seconds, times.bubble_seconds])


def every_table(search):
    """Every candidate of a search without recomputation, in tables that are alike."""
    placements, _ = legal_placements(search)
    table, _ = with_micro_batches(search, placements)
    usual = table.executed("none", 1)
    return [usual.take(rows) for rows in usual.alike()]


def alone(table, row):
    """One candidate of a table in a table of its own."""
    placement = int(table.placement[row])
    placements = table.placements.take(slice(placement, placement + 1))
    return CandidateTable(placements, np.zeros(1, np.int64), table.micro_batch[row : row + 1])


def every_configuration_of(search):
    """Predictions of every micro-batch, recomputation and virtual stage, also without room."""
    ranking = rank_candidates(replace(search, include_oom=True, every_configuration=True))
    return [ranking.prediction(row) for row in range(len(ranking))]


def play_at_once(monkeypatch, n_candidates):
    """Let no more candidates than these be played at once."""
    monkeypatch.setattr("axonn_tune.step.evaluate.CHUNK_ROWS", n_candidates)


def times_on(search, table, machine):
    """Return `times_of` on another machine, from what was prepared on the search's own."""
    evaluator = Evaluator.of(search.scenario, table.executed("none", 1))
    times = evaluator.on(machine).evaluate()
    return np.stack([times.step_seconds, times.exposed_communication_seconds, times.bubble_seconds])
