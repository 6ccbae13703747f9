"""Named options become a search: model and machine are loaded, and every option is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from axonn_tune.api.contenders import (
    require_predicted,
    require_trained,
    strategies_of,
    with_precision,
)
from axonn_tune.errors import InputError
from axonn_tune.io.package_data import load_track_records
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.options import SEARCH, SearchOptions, defaults, with_options
from axonn_tune.search.batches import BatchRule
from axonn_tune.search.search import COST_MODELS, Constraints, Search
from axonn_tune.spec.checks import LARGEST_COUNT, require_choice, require_count, whole_number
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import ALIASES, AXES, ORDERS, PAPER_ORDER, check_order
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import RECOMPUTES, Model
from axonn_tune.spec.offload import LAYER_INPUTS, LAYERS, offloaded_layers, require_offload
from axonn_tune.spec.precision import BYTES_PER_ELEMENT
from axonn_tune.spec.recomputation import broken_module_rules, recompute_code
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.stage_layout import require_stage_layout
from axonn_tune.spec.strategy import Strategy
from axonn_tune.spec.tuning import Adapters, Frozen
from axonn_tune.strategies.named import (
    STRATEGIES,
    USUAL_ENGINES,
    names_of_all,
    strategy_named,
    with_caveat,
)
from axonn_tune.strategies.switches import (
    Switches,
    foreign_switches,
    require_own,
    require_without_experts,
)
from axonn_tune.units import gib, parse_count, parse_quantity, parse_size

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_MACHINE = "perlmutter"
# Tokens of a global batch in AxoNN's weak-scaling runs (arXiv 2502.08145): 2**24.
DEFAULT_GLOBAL_BATCH_TOKENS = 2**24

ModelLike: TypeAlias = Model | str | Path
MachineLike: TypeAlias = Machine | str | Path


@with_options(SEARCH)
def build_search(
    model: ModelLike,
    gpus: int,
    machine: MachineLike | None = None,
    **options: Unpack[SearchOptions],
) -> Search:
    """Check the options and put them together as a search.

    Parameters
    ----------
    {options}

    Raises
    ------
    AxonnTuneError
        An option is wrong; the message names it, its value and what is allowed.
    """
    given: dict[str, Any] = {**defaults(SEARCH), **options}
    require_count("job", "n_gpus", gpus)
    loaded_model = loaded(model)
    given_machine = loaded_machine(machine)
    seq_len = loaded_model.seq_len if given["seq_len"] is None else given["seq_len"]
    require_count("job", "seq_len", seq_len)
    strategy = _strategy(given, loaded_model)
    constraints = _constraints(given, strategy)
    batch_rule = _batch_rule(given, seq_len)
    batches = batch_rule.batches(gpus, strategy.axes)
    dtype = given["dtype"] or _default_dtype(given_machine)
    job = _job(given, gpus, batches[0], seq_len, dtype, strategy.engine)
    _require_carried_out(job, loaded_model, given_machine, strategy)
    if given["low_weights"]:
        _require_low_products(job, strategy.engine)
    search = Search(
        Scenario(
            loaded_model,
            job,
            given_machine,
            strategy,
            load_track_records(),
            _memory_margin_bytes(given["memory_margin"], given_machine),
        ),
        constraints,
        batch_rule=batch_rule,
        recomputes=_recomputes(given["recompute"], job),
        partial_recompute=given["recompute"] == "auto" and not job.offload_modules,
        cost_model=given["cost_model"],
        include_oom=given["include_oom"],
        every_configuration=given["every_configuration"],
        exhaustive=given["exhaustive"],
    )
    return search.on_batches(batches)


def _strategy(given: Mapping[str, Any], model: Model) -> Strategy:
    """Return the strategy, which predicts the model with the stages and recomputation given."""
    if given["recompute"] != "auto":
        recompute_code(given["recompute"])
    strategy: str | Strategy | None = given["strategy"]
    if strategy is None or isinstance(strategy, str):
        name, engine = _strategy_and_engine(strategy, given["engine"], model)
        named = strategy_named(name, _switches(given), engine, not model.is_dense)
        strategy = with_caveat(named, given["lora_rank"] is not None)
        require_own(_switches(given), [name])
    if model.experts is None:
        require_without_experts(model.name, _switches(given), given["expert_imbalance"])
    require_predicted(model, strategy.name)
    require_stage_layout(model, given["mtp_modules"], given["stage_layout"])
    broken = broken_module_rules(model, strategy.recomputed_modules, given["recompute"])
    if broken:
        raise InputError(f"strategy {strategy.name}: {'; '.join(broken)}")
    return strategy


def _constraints(given: Mapping[str, Any], strategy: Strategy) -> Constraints:
    """Return what the options fix of a configuration, if the strategy has it."""
    require_choice("search", "cost_model", given["cost_model"], COST_MODELS)
    axes = _fixed_axes(given)
    for axis in axes:
        require_choice(f"strategy {strategy.name}", "axis", axis, strategy.axes.sized)
    counts = {**axes, "micro_batch": given["micro_batch"], "max_tp": given["max_tp"]}
    for name, count in counts.items():
        if count is not None:
            require_count("search", name, count)
    order = given["order"]
    if order != PAPER_ORDER and not strategy.axes.has_orders:
        raise InputError(
            f"--order {order}: strategy {strategy.name} has one rank order with the axes "
            f"{', '.join(strategy.axes.names)}; allowed: no --order, or grids of x, y, z and data"
        )
    if given["cost_model"] != "full" and not strategy.axes.is_grid:
        raise InputError(
            f"--cost-model {given['cost_model']}: strategy {strategy.name} has one cost model with "
            f"the axes {', '.join(strategy.axes.names)}; allowed: no --cost-model, or AxoNN's grids"
        )
    orders = ORDERS if order == "all" else (check_order(order),)
    return Constraints(axes, given["max_tp"], orders, given["micro_batch"])


def _job(
    given: Mapping[str, Any],
    n_gpus: int,
    global_batch: int,
    seq_len: int,
    dtype: str,
    engine: Engine,
) -> Job:
    """Return the job that the options describe."""
    return Job(
        n_gpus=n_gpus,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        precision=engine.precision_named(given["precision"]),
        attention=given["attention"],
        overlap=_overlap(given),
        kernel_tuning=given["kernel_tuning"],
        keep_gathered_weights=given["keep_gathered_weights"],
        dropout=given["dropout"],
        moments=given["moments"],
        offload=given["offload"],
        offload_modules=given["offload_modules"],
        expert_imbalance=given["expert_imbalance"],
        adapters=_adapters(given),
        frozen=Frozen.of_text(given["frozen"]),
        mtp_modules=given["mtp_modules"],
        samples_per_sequence=given["samples_per_sequence"],
        optimizer=given["optimizer"],
        muon_mode=given["muon_mode"],
    )


def _require_carried_out(job: Job, model: Model, machine: Machine, strategy: Strategy) -> None:
    """Check that the strategy, its engine and the machine have what a job asks for."""
    engine = strategy.engine
    require_trained(job, model, strategy.name)
    require_choice(f"engine {engine.name}", "moments", job.moments, engine.moments)
    require_choice(f"engine {engine.name}", "optimizer", job.optimizer, engine.optimizers)
    require_offload(model, strategy.name, strategy.offload_modules, job.offload_modules)
    if job.uses_host:
        machine.require_host()
    machine.peak_flops_per_s(job.dtype)
    machine.require_precision(job.precision)


def _require_low_products(job: Job, engine: Engine) -> None:
    """Raise InputError if no product of a job reads weights in a low format."""
    if job.recipe is not None:
        return
    if not engine.low_precisions:
        raise InputError(
            f"--low-weights: engine {engine.name or 'ideal'} has no precision with weights in a "
            "low format; leave out --low-weights"
        )
    raise InputError(
        f"--low-weights: precision is {job.precision}, in which no weight has a low format; "
        f"allowed with engine {engine.name or 'ideal'}: --precision "
        f"{', '.join(engine.low_precisions)}"
    )


def _recomputes(recompute: str, job: Job) -> tuple[str, ...]:
    """Return the recomputations that are tried; layers whose activations move keep them."""
    if job.offload_modules == LAYER_INPUTS:
        if recompute not in ("auto", "full"):
            raise InputError(
                f"recompute is '{recompute}'; allowed with --offload-modules {LAYER_INPUTS}: full"
            )
        return ("full",)
    if offloaded_layers(job.offload_modules):
        if recompute not in ("auto", "none"):
            raise InputError(
                f"recompute is '{recompute}'; allowed with --offload-modules {LAYERS}:N: none"
            )
        return ("none",)
    if job.offload_modules and recompute.startswith("full"):
        raise InputError(
            f"recompute is '{recompute}'; allowed with --offload-modules: none, selective, modules"
        )
    if recompute != "auto":
        return (recompute,)
    return ("none", "selective") if job.offload_modules else RECOMPUTES


def loaded(model: ModelLike) -> Model:
    """Return a model that may be given by its name or its file."""
    return model if isinstance(model, Model) else load_model(model)


def loaded_machine(machine: MachineLike | None) -> Machine:
    """Return a machine that may be given by its name or its file; None for the usual one."""
    machine = DEFAULT_MACHINE if machine is None else machine
    return machine if isinstance(machine, Machine) else load_machine(machine)


def is_special(given: Mapping[str, Any]) -> bool:
    """Return whether options ask for training that few strategies predict."""
    return bool(given.get("mtp_modules"))


def _adapters(given: Mapping[str, Any]) -> Adapters | None:
    """Return the adapters of a job, if it trains them."""
    if given["lora_rank"] is None:
        usual = defaults(SEARCH)
        for name in ("lora_targets", "lora_dropout"):
            if given[name] != usual[name]:
                raise InputError(
                    f"{name} is {given[name]}, and no adapters are trained; allowed with it: "
                    "lora_rank"
                )
        return None
    targets = tuple(target.strip() for target in given["lora_targets"].split(","))
    return Adapters(given["lora_rank"], targets, given["lora_dropout"])


def _strategy_and_engine(
    strategy: str | None, name: str | None, model: Model
) -> tuple[str, Engine]:
    """Return the name of the strategy, and the engine; either is chosen where it is not named."""
    engine = None if name is None else load_engine(name)
    if strategy is None:
        strategy = usual_strategy(model, engine)
    require_choice("search", "strategy", strategy, tuple(STRATEGIES))
    return strategy, engine or load_engine(USUAL_ENGINES[strategy])


def usual_strategy(model: Model, engine: Engine | None) -> str:
    """Return the strategy that is searched where none is named.

    It is the first one of the engine, or of all, that predicts the model.
    """
    carried_out = list(STRATEGIES if engine is None else engine.strategies)
    return (strategies_of(model, carried_out) or carried_out)[0]


def _default_dtype(machine: Machine) -> str:
    """Return the first number type in which the machine's GPU has a peak: bf16, fp16, fp32."""
    known = [name for name in BYTES_PER_ELEMENT if name in machine.gpu.peak_flops_per_s]
    return known[0] if known else "bf16"


def names_of_all_strategies(model: ModelLike, **options: Unpack[SearchOptions]) -> list[str]:
    """Return the names of the strategies that are compared where the user names none.

    These are the ones that predict the model and whose usual engine has the precision, if there
    are any.
    """
    given = {**defaults(SEARCH), **options}
    has_adapters = given["lora_rank"] is not None
    names = names_of_all(_switches(given), given["every_strategy"], has_adapters)
    able = strategies_of(loaded(model), names, is_special(given))
    return with_precision(given["precision"], able) or able


def options_of_each(
    strategies: Sequence[str], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options with which each of several strategies is searched.

    A strategy leaves out the switches that only others have.

    Raises
    ------
    InputError
        None of them has a switch that the options set.
    """
    switches = _switches({**defaults(SEARCH), **options})
    require_own(switches, strategies)
    foreign = {name: foreign_switches(switches, name) for name in strategies}
    return {
        name: {option: value for option, value in options.items() if option not in left_out}
        for name, left_out in foreign.items()
    }


def _switches(given: Mapping[str, Any]) -> Switches:
    """Return the switches of strategies."""
    return Switches(**{field.name: given[field.name] for field in fields(Switches)})


def _overlap(given: Mapping[str, Any]) -> Overlap:
    """Return the overlaps: AxoNN's three as their options say, or else as `overlap` says."""
    default = given["overlap"] is not False
    oar, ors, oag = (
        default if given[name] is None else given[name] for name in ("oar", "ors", "oag")
    )
    return Overlap(oar, ors, oag, grad_reduce=bool(given["overlap_grad_reduce"]))


def _fixed_axes(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the axes whose size the options gx, gy, gz, gdata and fix give, with the size."""
    sizes = (given["gx"], given["gy"], given["gz"], given["gdata"])
    axes = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size}
    for axis, size in _fixes(given["fix"]):
        name = ALIASES.get(axis, axis)
        if axes.setdefault(name, size) != size:
            raise InputError(f"axis {name} is fixed to {axes[name]} and to {size}; give one size")
    return axes


def _fixes(fix: Mapping[str, int] | Sequence[str]) -> Iterable[tuple[str, int]]:
    """Return the axes and sizes of the option fix."""
    if isinstance(fix, Mapping):
        return fix.items()
    return [_fixed(text) for text in fix]


def _fixed(text: str) -> tuple[str, int]:
    """Read an axis and its size from a text such as ``tensor=8``."""
    axis, _, digits = text.partition("=")
    size = whole_number(digits)
    if not axis or not size:
        raise InputError(f"--fix: '{text[:40]}' is not AXIS=SIZE, such as tensor=8")
    return axis.strip(), size


def _memory_margin_bytes(text: str | None, machine: Machine) -> float:
    """Return the memory of a GPU that is to stay free, given in bytes or as a share."""
    if text is None:
        return 0.0
    whole = machine.gpu.memory_bytes.value
    owner = "--memory-margin"
    if isinstance(text, str) and text.rstrip().endswith("%"):
        margin = whole * parse_quantity(text, "memory_margin_fraction")
    else:
        margin = float(parse_size(text.removeprefix("-"), owner, needs_unit=True))
        margin = -margin if text.startswith("-") else margin
    if not abs(margin) < whole:
        raise InputError(f"{owner} {text}: allowed: less than the GPU's {gib(whole):.0f} GiB")
    return margin


def _batch_rule(given: Mapping[str, Any], seq_len: int) -> BatchRule:
    """Return the rule for the global batch, which is given in sequences, in tokens, or not."""
    sequences, tokens = given["global_batch"], given["global_batch_tokens"]
    if sequences is not None and tokens is not None:
        raise InputError(
            f"global_batch is {sequences} and global_batch_tokens {tokens}; allowed: one of the two"
        )
    within = given["within"]
    fraction = None if within is None else parse_quantity(within, "within_fraction")
    if fraction is not None and not 0 < fraction < 1:
        raise InputError(f"job: within is {within}; allowed: above 0 and below 1, such as 5%")
    if tokens is not None:
        sequences = _sequences(tokens, seq_len, is_exact=fraction is None)
    target = max(DEFAULT_GLOBAL_BATCH_TOKENS // seq_len, 1) if sequences is None else sequences
    require_count("job", "global_batch", target)
    return BatchRule(target, sequences is not None, fraction, given["micro_batch"] or 1)


def _whole(text: str, owner: str) -> int:
    """Return the whole number that a text such as ``"16M"`` means, if it is a possible count."""
    number = parse_count(text, owner)
    if number > LARGEST_COUNT:
        raise InputError(f"{owner} is {text}; allowed: at most {LARGEST_COUNT}")
    return round(number)


def _sequences(given: int | str, seq_len: int, is_exact: bool) -> int:
    """Return the number of sequences with that many tokens, or the nearest to it."""
    tokens = _whole(given, "job: global_batch_tokens") if isinstance(given, str) else given
    require_count("job", "global_batch_tokens", tokens)
    if is_exact and tokens % seq_len:
        low = tokens // seq_len * seq_len
        example = f"{low} or {low + seq_len}" if low else str(seq_len)
        raise InputError(
            f"job: global_batch_tokens is {given}; allowed: a multiple of the sequence length "
            f"{seq_len}, such as {example}; --within 5% tries what is near"
        )
    return max(round(tokens / seq_len), 1)
