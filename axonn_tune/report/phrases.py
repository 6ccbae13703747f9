"""Phrases that the texts of several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from axonn_tune.search.batches import can_share, nearest_shared_batch
from axonn_tune.search.search import Search
from axonn_tune.spec.job import ADAMW, MUON, Job
from axonn_tune.spec.layout import AXES, PIPELINE, Axes
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.offload import LAYER_INPUTS
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import counted, format_count


def assumption_line(*searches: Search) -> str:
    """Say in one line what one search assumes, or several that differ in little but the batch."""
    scenario = searches[0].scenario
    job = scenario.job
    dropout = ", dropout" if job.dropout else ""
    tuning = "on" if job.kernel_tuning else "off"
    overlap = _by_strategy(searches, lambda own: str(own.strategy.overlap_of(own.job)))
    remarks = [
        batch_remark(*searches),
        scenario.model.left_out_sentence,
        _untrained_remark(scenario),
        _size_remark([search.scenario for search in searches]),
        _optimizer_remark(job),
    ]
    line = (
        f"Assumed: machine {scenario.machine.name}, {batches_text(searches)}, "
        f"{_sequences_text(searches)}{_seq_len_remark(scenario)}, {types_text(job)}, "
        f"{job.attention} attention{dropout}, overlap {overlap}, kernel tuning {tuning}"
        f"{_engine_text(searches)}{_sharding_text(scenario)}{_experts_text(scenario)}{_tuning_text(job)}"
        f"{_offload_text(scenario)}."
    )
    return " ".join([line, *(remark for remark in remarks if remark)])


def _engine_text(searches: Sequence[Search]) -> str:
    """Name the engine, or each with its strategy, as the end of a sentence, if there is any."""
    titles = {search.scenario.strategy.engine.title for search in searches}
    if len(titles) > 1:
        return f", engines {_by_strategy(searches, lambda own: own.strategy.engine.name)}"
    (title,) = titles
    return f", engine {title}" if title else ""


def _by_strategy(searches: Sequence[Search], text_of: Callable[[Scenario], str]) -> str:
    """Return the text of all searches if it is one, or else each with its strategies."""
    strategies: dict[str, dict[str, None]] = {}
    for search in searches:
        scenario = search.scenario
        strategies.setdefault(text_of(scenario), {})[scenario.strategy.name] = None
    if len(strategies) == 1:
        return next(iter(strategies))
    return ", ".join(f"{text} for {' and '.join(names)}" for text, names in strategies.items())


def _tuning_text(job: Job) -> str:
    """Say what is trained besides or in the place of the model's layers, and what is packed."""
    n_modules = job.mtp_modules
    modules = f", {counted(n_modules, 'module')} of multi-token prediction" if n_modules else ""
    adapters = "" if job.adapters is None else f", frozen weights with {job.adapters}"
    frozen = f", frozen {str(job.frozen).replace(',', ', ')}" if job.frozen else ""
    n_samples = job.samples_per_sequence
    samples = "" if n_samples == 1.0 else f", {n_samples:g} samples in each sequence"
    return modules + adapters + frozen + samples


def _sharding_text(scenario: Scenario) -> str:
    """Name what replicas share at the user's wish, as the end of a sentence, if it is anything."""
    sharded = scenario.strategy.sharded_by_choice
    return f", {sharded} sharded over replicas" if sharded else ""


def _experts_text(scenario: Scenario) -> str:
    """Say how busy experts are, as the end of a sentence, if the model has experts."""
    if scenario.model.is_dense:
        return ""
    imbalance = scenario.job.expert_imbalance
    if imbalance == 1.0:
        return ", experts equally busy"
    return f", the busiest experts take {imbalance:g} times the mean"


def types_text(job: Job) -> str:
    """Name the type of weights and activations, and what has another one."""
    others = [
        *([] if job.recipe is None else [f"products in {job.precision}"]),
        *([] if job.moments == "fp32" else [f"moments in {job.moments}"]),
        *([] if job.optimizer == ADAMW else [_optimizer_text(job)]),
    ]
    return f"{job.dtype} with {' and '.join(others)}" if others else job.dtype


def _optimizer_text(job: Job) -> str:
    """Name the optimizer, and how it treats what ranks split, if that is its choice."""
    return f"optimizer {job.optimizer}" + f" ({job.muon_mode})" * (job.optimizer == MUON)


def _optimizer_remark(job: Job) -> str | None:
    """Say in a sentence how few measured steps had a job's optimizer, if that is not AdamW."""
    if job.optimizer == ADAMW:
        return None
    known = "Few measured steps" if job.optimizer == MUON else "No measured step"
    return f"{known} had optimizer {job.optimizer}."


def in_host_memory(scenario: Scenario) -> list[str]:
    """Return the names of what is in the host's memory."""
    job = scenario.job
    offload = scenario.strategy.engine.offload_in(job)
    moved = [] if offload is None else list(offload.moved)
    if job.offload_modules == LAYER_INPUTS:
        moved.append("inputs of layers")
    elif job.offload_modules:
        moved.append(f"inputs of {job.offload_modules.replace(',', ' and ')}")
    return moved


def _offload_text(scenario: Scenario) -> str:
    """Name what is in the host's memory, as the end of a sentence, if anything is."""
    moved = in_host_memory(scenario)
    return f", in the host's memory: {', '.join(moved)}" if moved else ""


def _seq_len_remark(scenario: Scenario) -> str:
    """Say of a sequence length that it is the longest which a config allows, if it is."""
    model = scenario.model
    if not model.seq_len_key or scenario.job.seq_len != model.seq_len:
        return ""
    return f" ({model.seq_len_key} of the config; choose with --seq-len)"


def _size_remark(scenarios: Sequence[Scenario]) -> str | None:
    """Say in a sentence how many nodes the machine has, if a job needs more; else return None."""
    return size_remark(scenarios[0].machine, max(scenario.n_nodes for scenario in scenarios))


def size_remark(machine: Machine, n_nodes: int) -> str | None:
    """Say in a sentence how many nodes a machine has, if more are asked for; else return None."""
    nodes = machine.facility.n_nodes
    if nodes is None or n_nodes <= nodes.value:
        return None
    n_gpus = int(nodes.value) * machine.ranks_per_node
    return (
        f"{machine.name} has no more than {counted(int(nodes.value), 'node')} "
        f"({counted(n_gpus, 'GPU')})."
    )


def _untrained_remark(scenario: Scenario) -> str | None:
    """Say in a sentence that the modules of a model's config are not trained, if it is so."""
    n_modules = scenario.model.mtp_modules
    if not n_modules or scenario.job.mtp_modules or scenario.job.adapters is not None:
        return None
    return f"Multi-token prediction is not trained; --mtp-modules {n_modules} is the model's."


def batches_text(searches: Sequence[Search]) -> str:
    """Name the global batch of some searches, or the smallest and the largest."""
    jobs = sorted((search.scenario.job for search in searches), key=lambda job: job.global_batch)
    sequences = dict.fromkeys(str(job.global_batch) for job in (jobs[0], jobs[-1]))
    tokens = dict.fromkeys(format_count(job.tokens) for job in (jobs[0], jobs[-1]))
    noun = "global batch" if len(sequences) == 1 else "global batches from"
    unit = "sequence" if list(sequences) == ["1"] else "sequences"
    return f"{noun} {' to '.join(sequences)} {unit} ({' to '.join(tokens)} tokens)"


def _sequences_text(searches: Sequence[Search]) -> str:
    """Name the sequence length of some searches, or all of several."""
    lengths = sorted({search.scenario.job.seq_len for search in searches})
    noun = "sequence length" if len(lengths) == 1 else "sequence lengths"
    return f"{noun} {', '.join(map(str, lengths))}"


def batch_remark(*searches: Search) -> str | None:
    """Say in a sentence why searches took their global batches, or what a given one lacks.

    There is nothing to say where the GPUs can share the default batch, or the one that was given.
    """
    rule = searches[0].batch_rule
    if rule is None:
        return None
    if rule.within_fraction is not None:
        return (
            f"Of several global batches within {100 * rule.within_fraction:g} % of {rule.target} "
            "sequences, the fastest for each token is taken."
        )
    jobs = [search.scenario.job for search in searches]
    if rule.is_given:
        return _uneven_remark([job for job in jobs if not can_share(job.global_batch, job.n_gpus)])
    moved = [job for job in jobs if job.global_batch != rule.target]
    if not moved:
        return None
    choice = (
        f"micro-batches of {rule.micro_batch}"
        if rule.micro_batch > 1
        else "a choice of micro-batches"
    )
    return (
        f"Instead of the default batch of {rule.target} sequences, {_counts_text(moved)} GPUs take "
        f"the nearest that they can share evenly, with {choice}."
    )


def _uneven_remark(jobs: Sequence[Job]) -> str | None:
    """Say which batches would suit jobs whose GPUs cannot share theirs; return None for no job."""
    if not jobs:
        return None
    shared = {str(nearest_shared_batch(job.global_batch, job.n_gpus)): None for job in jobs}
    return (
        f"{_counts_text(jobs)} GPUs cannot share this global batch evenly, but they can share "
        f"{', '.join(shared)} sequences."
    )


def _counts_text(jobs: Sequence[Job]) -> str:
    """Return the numbers of GPUs of some jobs, each once."""
    return ", ".join(dict.fromkeys(str(job.n_gpus) for job in jobs))


def model_on_gpus(scenario: Scenario, with_parameters: bool = False) -> str:
    """Name the model, on request its number of parameters, and the GPUs that train it."""
    model = scenario.model
    job = scenario.job
    parameters = f" ({format_count(model.parameters)} parameters)" if with_parameters else ""
    return f"{model.name}{parameters} on {job.n_gpus} {scenario.machine.gpu.name}"


def mfu_remarks(predictions: Sequence[Prediction]) -> list[str]:
    """Say why some prediction has an MFU above 100 %, if one has."""
    if all(prediction.mfu <= 1.0 for prediction in predictions):
        return []
    causes = "attention counts without its mask, by convention"
    if predictions[0].scenario.job.recipe is not None:
        causes += ", and the peak is that of the job's type, not of its low precision"
    return [f"MFU above 100 %: {causes}."]


def grid_form(axes: Axes) -> str:
    """Say which sizes the text of a grid holds, in order."""
    stages = " x stages" if PIPELINE in axes.names else ""
    return " x ".join(f"G_{axis}" for axis in AXES) + stages


def tokens_per_second_text(prediction: Prediction) -> str:
    """Return the tokens of all GPUs for each second."""
    n_gpus = prediction.scenario.job.n_gpus
    return format_count(prediction.tokens_per_second_per_gpu * n_gpus)


def interval_text(prediction: Prediction) -> str:
    """Return the ends of the 90 % interval, or a dash where it is not known."""
    interval = prediction.step_seconds_interval
    return "-" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}"


def signed_percent(fraction: float) -> str:
    """Return a fraction in percent, with its sign in front and without that of percent.

    A fraction that is rounded to zero has a plus, whatever its sign.
    """
    return f"{round(100 * fraction, 1) + 0.0:+.1f}"


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction in percent, without the sign of percent."""
    return f"{100 * fraction:.{digits}f}"
