"""Published training runs of other systems, each as a search that is held to what was run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TypeAlias

from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import CONTEXT, EXPERT, PIPELINE, TENSOR
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.scenario import Scenario

# The kernels of the loss, forward and backward.
LOSS_KERNELS = ("softmax", "softmax_backward")
# A row of a published table: texts by name of their column.
Row: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Loaders:
    """Holds the functions that find a preset by its name; this room itself touches no files.

    Each is asked once for a name, since hundreds of rows name a few dozen presets.
    """

    model: Callable[[str], Model]
    machine: Callable[[str], Machine]
    engine: Callable[[str], Engine]

    def __post_init__(self) -> None:
        for kind in fields(self):
            object.__setattr__(self, kind.name, cache(getattr(self, kind.name)))


@dataclass(frozen=True)
class Run:
    """One published configuration: what was run and what was measured.

    system
        System whose measurement it is.
    group
        Name that is shared by the runs that their paper compares with each other.
    search
        Search for the best configuration that fits, in which everything that the paper says is
        fixed.
    published
        Numbers that were measured, by metric.
    certainty
        Part of the source that has the numbers: a table, a figure or the abstract. Numbers that are
        `recalled` were written down from memory.
    assumed
        Facts, of those that a prediction needs, that the source does not state.
    is_fitted
        Whether a number was fitted to the run.
    is_set_apart
        Whether a stated rule, which looks at no prediction, calls the run broken.
    """

    system: str
    group: str
    subject: str
    search: Search
    published: Mapping[str, float]
    certainty: str
    source: str
    assumed: tuple[str, ...] = ()
    is_fitted: bool = False
    is_set_apart: bool = False

    def __hash__(self) -> int:
        return hash((self.system, self.group, self.subject, self.source))


@dataclass(frozen=True)
class Paper:
    """Holds the fields that all runs of one table share."""

    system: str
    source: str
    machine: Machine
    certainty: str = "table"
    assumed: tuple[str, ...] = ()
    is_fitted: bool = False

    def run(self, group: str, subject: str, search: Search, published: Mapping[str, float]) -> Run:
        """Return a run of the table."""
        return Run(
            self.system,
            group,
            subject,
            search,
            published,
            self.certainty,
            self.source,
            self.assumed,
            self.is_fitted,
        )


def numbers(row: Row, *columns: str) -> dict[str, float]:
    """Return the numbers in some columns of a row, by column."""
    return {column: float(row[column]) for column in columns}


def job_sizes(row: Row) -> tuple[int, int, int]:
    """Return a row's numbers of GPUs, of sequences in a step, and of tokens in a sequence."""
    return int(row["gpus"]), int(row["global_batch"]), int(row["seq_len"])


def fp16_job(row: Row, seq_len: int, attention: str = "unfused") -> Job:
    """Return the job of a row in fp16 and with dropout."""
    gpus, batch = int(row["gpus"]), int(row["global_batch"])
    return Job(gpus, batch, seq_len, "fp16", attention=attention, dropout=True)


def held_to(
    scenario: Scenario, axes: Mapping[str, int], micro_batch: int | None, recompute: str = "none"
) -> Search:
    """Return the search that is held to sizes of axes, a micro-batch and a recomputation.

    Without a micro-batch, the best one that fits is taken.
    """
    constraints = Constraints(axes, micro_batch=micro_batch)
    return Search(scenario, constraints, (recompute,), include_oom=micro_batch is not None)


def held_to_row(scenario: Scenario, row: Row, recompute: str = "none") -> Search:
    """Return the search of Megatron-LM that is held to the layout and micro-batch of a row."""
    axes = (TENSOR, CONTEXT, PIPELINE, *(() if scenario.model.is_dense else (EXPERT,)))
    sizes = {axis: int(row[axis]) for axis in axes}
    return held_to(scenario, sizes, int(row["micro_batch"]), recompute)


def by_maker(group: str, machine: Machine) -> str:
    """Return the name of a group of steps; those on AMD's GPUs have one of their own."""
    return f"{group} on AMD" if machine.gpu.name.startswith("AMD") else group


def with_kernels(program: MegatronProgram, row: Row) -> MegatronProgram:
    """Return a program with the kernels that a submission to MLPerf says it has."""
    return replace(
        program,
        casts_in_activations=row["casts"] == "yes",
        copies_heads=row["copies"] == "yes",
        low_attention=row["low_attention"] == "yes",
        low_sums=named(row["low_sums"]),
    )


def with_fused_loss(engine: Engine) -> Engine:
    """Return an engine whose loss is Transformer Engine's, one kernel in each direction."""
    others = {name: form for name, form in engine.kernels.items() if name not in LOSS_KERNELS}
    return replace(engine, kernels=others)


def with_buckets(program: MegatronProgram, row: Row) -> MegatronProgram:
    """Return a program with the least size of a bucket that a submission to MLPerf says it has."""
    if not row["bucket_elements"]:
        return program
    n_elements = float(row["bucket_elements"])
    return replace(program, bucket_elements=n_elements, bucket_elements_per_replica=0.0)


def named(cell: str) -> tuple[str, ...]:
    """Return the names in a cell of a table, between which stand plus signs."""
    return tuple(cell.split("+")) if cell else ()


def gpt(row: Row, seq_len: int, vocabulary: int = 51200) -> Model:
    """Return a GPT of the sizes that a table states."""
    layers, hidden, heads = (int(row[column]) for column in ("layers", "hidden", "heads"))
    return Model(f"gpt-{layers}x{hidden}", layers, hidden, heads, vocabulary, seq_len)
