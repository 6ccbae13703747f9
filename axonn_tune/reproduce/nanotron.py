"""Measured steps of nanotron on H100."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.comparison import grouped
from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

_SEQ_LEN = 4096
_VOCABULARY = 131072
# On so many nodes the same layout was measured up to ten times slower than its neighbours.
_SCATTERING_GPUS = 512
# A revision of nanotron that has the script of these runs (67c5ebb6, December 2024) sleeps 0.1 s
# between looks at whether a message of shapes has passed (pipeline_parallel/p2p.py). There are two
# for each tensor, and a forward pass hands on two tensors.
_SLEEPING_SECONDS = 2 * 2 * 0.1
# A run without stages waited if it took so much longer than another one with no less to do in a
# slot. No run lies between 1.24 and 1.33.
_WAITING_RATIO = 1.3
# With so many tensor ranks no run is awake to be compared with: its slots are about as long with 4
# or 8 stages as with 2, as those of runs that slept. Without sleep they are half as long.
_ALWAYS_SLEEPING_RANKS = 32
_SLEEPING_REVISION = "nanotron-2024-12"


def nanotron(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; the profile describes the machine on which they ran.

    The steps of 1B on up to 16 nodes are those on which the engine's times of the host were
    fitted. Which revision of the engine made a run is not stated. Runs with stages on 64 nodes or
    with 32 tensor ranks are assumed to be of one that sleeps, as all but two of them seem to be.
    Other runs that slept between their stages are set apart, and their hosts wait for each message,
    as in that revision. So are runs without stages whose hosts waited in each collective as hosts
    of stages do. Their own time chose that wait, so that it counts as fitted to them.

    Only rank 0, which is in the first stage, wrote down its memory (nanotron 67c5ebb6, helpers.py,
    write_to_csv): what its allocator has reserved at the end of the third step (trainer.py,
    train_step_logs). What it has allocated would not depend on the micro-batch, since each step
    resets the peak after its passes (logging.py, log_memory).
    """
    engine = loaders.engine("nanotron")
    sleeping = loaders.engine(_SLEEPING_REVISION)
    awake = replace(sleeping, megatron=replace(sleeping.megatron, poll_seconds=None))
    waiting = replace(engine, waits_without_stages=True)
    machine = loaders.machine("aws-p5-2024")
    paper = Paper("nanotron", "Ultra-Scale Playbook of Hugging Face (Apache-2.0)", machine)
    fitting = replace(paper, is_fitted=True)
    for row, has_slept, has_waited in zip(rows, slept(rows), waited(rows), strict=True):
        layout = f"TP {row['tensor']}, PP {row['pipeline']}, DP {row['data']}"
        subject = f"{row['model']}, {layout}, micro-batch {row['micro_batch']}"
        is_scattering = _is_scattering(row)
        nodes = "64 nodes" if is_scattering else "up to 16 nodes"
        is_fitted = (row["model"] == "1B" and not is_scattering) or has_waited
        published = {
            "step_seconds": float(row["step_seconds"]),
            "first_stage_gib": float(row["memory_gib"]),
        }
        sleeps = _is_assumed_to_sleep(row)
        used = sleeping if sleeps else awake if has_slept else waiting if has_waited else engine
        search = _search(row, machine, used)
        run = (fitting if is_fitted else paper).run(
            f"{row['model']}, {nodes}", subject, search, published
        )
        assumed = ("software",) if sleeps or has_slept or has_waited else ()
        is_set_apart = (has_slept and not sleeps) or has_waited
        yield replace(run, assumed=assumed, is_set_apart=is_set_apart)


def slept(rows: Sequence[Row]) -> list[bool]:
    """Return for each run whether its hosts slept over the messages between stages.

    Such a run takes longer, by all that sleep in each slot of its pipeline, than another one of the
    same model and tensor group that has no less to do in a slot: it has at most as many stages, and
    at least its micro-batch. Without stages nothing is handed on.
    """
    groups = grouped(filter(_has_stages, rows), lambda row: (row["model"], row["tensor"]))
    return [
        _has_stages(row)
        and (
            int(row["tensor"]) == _ALWAYS_SLEEPING_RANKS
            or _slot_seconds(row) - _least_seconds(row, groups[row["model"], row["tensor"]])
            >= _SLEEPING_SECONDS
        )
        for row in rows
    ]


def waited(rows: Sequence[Row]) -> list[bool]:
    """Return for each run whether it has no stages and its host waited in collectives.

    Such a run took longer for each slot than another one of the same model and tensor group that
    has no less to do in a slot: at least its micro-batch, and at most as many slots, since the end
    of a step counts in each of them.
    """
    alone = [row for row in rows if not _has_stages(row) and int(row["tensor"]) > 1]
    groups = grouped(alone, lambda row: (row["model"], row["tensor"]))
    return [
        not _has_stages(row)
        and int(row["tensor"]) > 1
        and _slot_seconds(row)
        >= _WAITING_RATIO
        * min(
            _slot_seconds(other)
            for other in groups[row["model"], row["tensor"]]
            if int(other["micro_batch"]) >= int(row["micro_batch"])
            and _n_slots(other) <= _n_slots(row)
        )
        for row in rows
    ]


def _has_stages(row: Row) -> bool:
    """Return whether a run has a pipeline."""
    return int(row["pipeline"]) > 1


def _least_seconds(row: Row, group: Iterable[Row]) -> float:
    """Return the least time of a slot among those runs of a group that do no less in a slot."""
    return min(
        _slot_seconds(other)
        for other in group
        if int(other["pipeline"]) <= int(row["pipeline"])
        and int(other["micro_batch"]) >= int(row["micro_batch"])
    )


def _is_assumed_to_sleep(row: Row) -> bool:
    """Return whether a run is of a kind that the sleeping revision is assumed to have made."""
    has_many_ranks = int(row["tensor"]) == _ALWAYS_SLEEPING_RANKS
    return _has_stages(row) and (has_many_ranks or _is_scattering(row))


def _is_scattering(row: Row) -> bool:
    """Return whether a run is on so many nodes that its time says little."""
    return int(row["gpus"]) >= _SCATTERING_GPUS


def _slot_seconds(row: Row) -> float:
    """Return the time of a step over its slots."""
    return float(row["step_seconds"]) / _n_slots(row)


def _n_slots(row: Row) -> int:
    """Return the number of micro-batches and of the slots that fill the pipeline."""
    sequences = int(row["data"]) * int(row["micro_batch"])
    return int(row["global_batch"]) // sequences + int(row["pipeline"]) - 1


def _search(row: Row, machine: Machine, engine: Engine) -> Search:
    """Return the search that is held to a row's layout."""
    strategy = megatron_of(engine, n_virtual=(1,), distributed_optimizer=row["sharded"] == "yes")
    job = Job(int(row["gpus"]), int(row["global_batch"]), _SEQ_LEN)
    axes = {axis: int(row[axis]) for axis in ("tensor", "data", "pipeline")}
    scenario = Scenario(_model(row), job, machine, strategy)
    return held_to(scenario, {**axes, "context": 1}, int(row["micro_batch"]))


def _model(row: Row) -> Model:
    """Return the Llama of a row's sizes."""
    return Model(
        f"llama-{row['model'].lower()}",
        n_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        n_heads=int(row["heads"]),
        vocab_size=_VOCABULARY,
        seq_len=_SEQ_LEN,
        ffn_hidden_size=int(row["ffn"]),
        gated_mlp=True,
        norm="rms",
        position="rotary",
        bias=False,
        tied_embeddings=row["tied"] == "yes",
    )
