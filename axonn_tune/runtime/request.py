"""What to run: a model, a job, a configuration and how long to train."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.engine import DTYPES
from axonn_tune.runtime.ranks.session import DEVICES
from axonn_tune.runtime.released.packages import installed_package
from axonn_tune.spec.checks import require_choice, require_count
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import PAPER_ORDER
from axonn_tune.spec.model import RECOMPUTES, Model

# Strategies that the runtime executes: AxoNN's own, and two through torch's own parallelism.
RUNNABLE = ("axonn", "zero3", "megatron")


@dataclass(frozen=True)
class RunRequest:
    """What to run: a model and a job, in which configuration, and how to train.

    Attributes
    ----------
    n_steps
        Number of training steps, the warm-up included.
    goldfish
        k for a loss that drops one in k tokens; None for the plain loss.
    timeout_seconds
        How long a collective may take before the run counts as hung.
    quiet
        Whether to print no progress.
    strategy
        One of `RUNNABLE`.
    engine
        The engine that carries it out; one with a package trains through this package.

    Raises
    ------
    InputError
        The runtime does not execute this.
    """

    model: Model
    job: Job
    configuration: Configuration
    n_steps: int
    device: str = "auto"
    seed: int = 0
    goldfish: int | None = None
    timeout_seconds: float = 300.0
    quiet: bool = False
    strategy: str = "axonn"
    engine: Engine = IDEAL

    def __post_init__(self) -> None:
        require_choice("run", "dtype", self.job.dtype, DTYPES)
        require_choice("run", "device", self.device, DEVICES)
        require_choice("run", "recompute", self.configuration.recompute, RECOMPUTES)
        require_choice("run", "strategy", self.strategy, RUNNABLE)
        if self.job.dropout:
            raise InputError("run: dropout is not executed; allowed: a job without it")
        if self.engine.package:
            self._check_engine()
        if self.strategy != "axonn" or self.engine.package:
            self._check_native()
        if self.goldfish is not None:
            require_count("run", "goldfish", self.goldfish, least=2)
        model, seq_len = self.model, self.job.seq_len
        require_built(model, seq_len, self.engine)
        if model.position == "learned" and seq_len > model.seq_len:
            raise InputError(
                f"run: seq_len is {seq_len}; allowed: at most {model.seq_len}, the learned "
                f"positions of model '{model.name}'"
            )

    def _check_engine(self) -> None:
        """Refuse an engine that is not installed, and what is not run through it."""
        owner = f"run: engine {self.engine.name}"
        package = installed_package(self.engine)
        require_choice(owner, "dtype", self.job.dtype, package.dtypes)
        require_choice(owner, "attention", self.job.attention, package.attentions)
        require_choice(owner, "recompute", self.configuration.recompute, package.recomputes)
        require_choice(owner, "order", self.configuration.order, (PAPER_ORDER,))

    def _check_native(self) -> None:
        """Refuse what the runtime does not do through torch's own parallelism or an engine."""
        owner = f"engine {self.engine.name}" if self.engine.package else self.strategy
        if self.configuration.recompute == "selective":
            raise InputError(f"run: recompute is 'selective'; allowed with {owner}: none, full")
        if self.model.parallel_block:
            raise InputError(f"run: {owner} does not run models with parallel blocks")
        if self.goldfish is not None:
            raise InputError(f"run: goldfish is given, which {owner} does not have; allowed: axonn")
        if self.job.overlap.grad_reduce:
            raise InputError(
                f"run: overlap_grad_reduce is true, which {owner} does not have; allowed: axonn"
            )


def require_built(model: Model, seq_len: int | None, engine: Engine = IDEAL) -> None:
    """Raise InputError if nothing here builds a model for sequences of a length.

    Without a length, it is the model's. An engine with a package builds more than the runtime.
    """
    more = installed_package(engine).parts if engine.package else ()
    parts = [p for p in model.special_parts(seq_len or model.seq_len) if p not in more]
    if parts:
        raise InputError(
            f"run: model '{model.name}' has {' and '.join(parts)}, which the runtime does not "
            "build; allowed: a model without"
        )
    if model.norms_per_block != 2:
        raise InputError(
            f"run: model '{model.name}' has norms_per_block {model.norms_per_block}; allowed: 2"
        )
