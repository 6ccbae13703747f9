"""Put all published numbers next to their predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from axonn_tune.reproduce import fsdp, megatron, sharded
from axonn_tune.reproduce.alps import megatron_on_alps, steps_of_cscs
from axonn_tune.reproduce.alst import arctic_long_sequences
from axonn_tune.reproduce.automodel import automodel
from axonn_tune.reproduce.axonn import compare_links, compare_runs
from axonn_tune.reproduce.bridge import megatron_bridge
from axonn_tune.reproduce.collectives import TimedCollective, timed_collectives
from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.fine_tuning import fine_tuning
from axonn_tune.reproduce.kempnerforge import kempnerforge
from axonn_tune.reproduce.long_sequences import long_sequences
from axonn_tune.reproduce.megatron_fsdp import megatron_fsdp
from axonn_tune.reproduce.mlperf_experts import mlperf_experts
from axonn_tune.reproduce.model_zoo import model_zoo
from axonn_tune.reproduce.nanotron import nanotron
from axonn_tune.reproduce.nemo import mlperf, nemo, nemo_releases
from axonn_tune.reproduce.ratios import compare_ratios
from axonn_tune.reproduce.results import compare_published, predict_runs
from axonn_tune.reproduce.runs import Loaders, Row, Run
from axonn_tune.reproduce.simumax import simumax
from axonn_tune.reproduce.steps import TimedRun, time_runs
from axonn_tune.reproduce.torchtitan import torchtitan
from axonn_tune.search.rank import Each


@dataclass(frozen=True)
class Reproduction:
    """Comparisons of end results, of measured steps by table, of rings, of collectives by table."""

    results: Sequence[Comparison]
    steps: Mapping[str, Sequence[TimedRun]]
    links: Sequence[Comparison]
    collectives: Mapping[str, Sequence[TimedCollective]]


def reproduce(
    load: Callable[[str], Sequence[Row]], loaders: Loaders, each: Each = iter
) -> Reproduction:
    """Predict everything; `load` finds a published table by name.

    The runs of all tables are predicted at once, so that processes that share them start once.
    """
    published = published_runs(load, loaders)
    measured = measured_steps(load, loaders)
    predictions = iter(predict_runs([*published, *chain(*measured.values())], each))
    results = [
        *compare_runs(load("axonn"), loaders, each),
        *compare_published(published, list(islice(predictions, len(published)))),
        *compare_ratios(load("frontier"), loaders),
    ]
    steps = {
        name: time_runs(runs, list(islice(predictions, len(runs))))
        for name, runs in measured.items()
    }
    links = compare_links(load("axonn_links"), loaders)
    return Reproduction(results, steps, links, timed_collectives(load, loaders))


def published_runs(load: Callable[[str], Sequence[Row]], loaders: Loaders) -> list[Run]:
    """Return the runs of all tables of end results except AxoNN's."""
    layouts = load("korthikanti22_table5")
    return [
        *megatron.weak_scaling(load("megatron_sc21_table1"), loaders),
        *sharded.against_zero3(load("megatron_sc21_zero3"), loaders),
        *megatron.sequence_parallelism(layouts, loaders),
        *megatron.activation_memory(load("korthikanti22_memory"), layouts, loaders),
        *megatron.bigscience(load("bigscience_176b"), loaders),
        *megatron.megascale(load("megascale_table"), loaders),
        *megatron.llama3(load("llama3"), loaders),
        *sharded.zero_plus_plus(load("zeropp"), loaders),
        *sharded.zeropp_tutorial(load("zeropp_tutorial"), loaders),
        *sharded.pccl_training(load("training_pccl"), loaders),
        *torchtitan(load("torchtitan"), loaders),
        *fsdp.fms_fsdp(load("fms_fsdp"), loaders),
        *megatron.on_frontier(load("frontier_megatron"), loaders),
    ]


def measured_steps(
    load: Callable[[str], Sequence[Row]], loaders: Loaders
) -> dict[str, Sequence[Run]]:
    """Return the runs of the large tables of measured steps, by what the table holds."""
    return {
        "several nodes": list(megatron.vtrain(load("vtrain_a100_multi"), loaders)),
        "FSDP": list(fsdp.llm_foundry(load("llm_foundry"), loaders)),
        "B200": list(simumax(load("simumax_b200"), loaders)),
        "Megatron-Bridge": list(megatron_bridge(load("megatron_bridge"), loaders)),
        "Megatron-FSDP": list(megatron_fsdp(load("megatron_fsdp"), loaders)),
        "Model Zoo": list(model_zoo(load("moe_model_zoo"), loaders)),
        "Alps": list(megatron_on_alps(load("alps_megatron"), loaders)),
        "Alps tests": list(steps_of_cscs(load("alps_tests"), loaders)),
        "NeMo": list(nemo(load("dgxc_h100"), loaders)),
        "NeMo releases": list(nemo_releases(load("nemo_releases"), loaders)),
        "AutoModel": list(automodel(load("nemo_automodel"), loaders)),
        "KempnerForge": list(kempnerforge(load("kempnerforge"), loaders)),
        "MLPerf": list(mlperf(load("mlperf"), loaders)),
        "MLPerf experts": list(mlperf_experts(load("mlperf_experts"), loaders)),
        "long sequences": list(long_sequences(load("nemo_long"), loaders)),
        "DeepSpeed": list(arctic_long_sequences(load("alst"), loaders)),
        "LoRA": list(fine_tuning(load("lora"), loaders)),
        "nanotron": list(nanotron(load("nanotron_h100"), loaders)),
    }
