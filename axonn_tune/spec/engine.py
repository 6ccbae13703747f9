"""Engines: the released software that carries out an algorithm, and what it does in its own way.

A strategy emits the ideal operations of its algorithm. An engine's facts turn them into what is
really launched and moved, in one place and before they are priced: `Engine.as_run`. The facts of
its programs, which say how it communicates, are in `programs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import LONGEST_WAIT_SECONDS, require_choice, require_count, require_name
from axonn_tune.spec.facts import LARGEST_FACTOR, require_facts, value_or
from axonn_tune.spec.job import ADAMW, MOMENT_BYTES, OPTIMIZERS, Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import (
    ATTENTION_LIBRARIES,
    FLASH_ATTENTION,
    MEMORY_KERNELS,
    Attention,
    Collective,
    GroupedGemm,
    MemoryBound,
    Operation,
    StepPlan,
)
from axonn_tune.spec.precision import FULL, PRECISIONS, USUAL_LOW
from axonn_tune.spec.programs import AxonnProgram, MegatronProgram, ZeroProgram
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.rewritten import rewritten

# The term of a rank's memory that only offload adds: copies that the host holds.
HOST_COPIES = "host_copies"
# The term of the host's memory that a rank's activations take.
HOST_ACTIVATIONS = "host_activations"
# The term of cuBLAS's workspaces.
WORKSPACES = "workspaces"
# The term of freed memory that the allocator cannot give to other tensors yet.
HELD_BACK = "held_back"
# The part of that term which is there only if the host of a pipeline's stage runs ahead of its GPU.
QUEUED = "queued"
# The packages on PyPI with which engines are run.
PACKAGES = ("axonn", "deepspeed", "megatron-core")
# The key of the form of all kernels that an engine does not name.
EVERY_KERNEL = "every"


@dataclass(frozen=True)
class OffloadProgram:
    """What an implementation keeps in the host's memory besides offloaded optimizer states.

    gradients
        Whether it sums gradients there, and not in the GPU's memory: they are copied in every
        micro-step.
    weights
        Whether the optimizer's fp32 weights are the only ones: every gather copies a rank's shard
        to the GPU first. It keeps gradients in the host's memory, too.
    """

    gradients: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        if self.weights and not self.gradients:
            raise InputError("offload: gradients is false; allowed: true where weights is true")

    @property
    def moved(self) -> tuple[str, ...]:
        """The terms of a rank's memory that leave the GPU."""
        moved = {"optimizer_states": True, "gradients": self.gradients, "weights": self.weights}
        return tuple(term for term, is_moved in moved.items() if is_moved)

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of a rank's memory that are in the host's memory."""
        return (*self.moved, HOST_COPIES)


@dataclass(frozen=True)
class KernelForm:
    """How an engine carries out a kernel that memory bandwidth limits.

    traffic
        Ratio of the bytes that its kernels move to those of the one fused kernel.
    strided
        Ratio of the bytes that are moved one element at a time (`MemoryBound.strided_bytes`) to
        those of the one fused kernel.
    launches
        Number of kernels that share these bytes.
    """

    traffic: Quantity | None = None
    strided: Quantity | None = None
    launches: Quantity | None = None

    def __post_init__(self) -> None:
        owner = "kernel form"
        require_facts(owner, self, ("traffic",), 0.1, LARGEST_FACTOR)
        require_facts(owner, self, ("strided",), 0.0, value_or(self.traffic, 1.0))
        require_facts(owner, self, ("launches",), 1.0, LARGEST_FACTOR)

    def of(self, kernel: MemoryBound) -> MemoryBound:
        """Return a fused kernel as the engine carries it out."""
        return replace(
            kernel,
            nbytes=kernel.nbytes * value_or(self.traffic, 1.0),
            n_launches=kernel.n_launches * value_or(self.launches, 1.0),
            strided_bytes=kernel.nbytes * value_or(self.strided, 0.0),
        )


@dataclass(frozen=True)
class MemoryForm:
    """What an engine holds in memory more or less than the ideal program.

    attention_factor, mlp_factor
        Ratio of the bytes that attention, or the MLP after its first product, saves for the
        backward pass to those that fused kernels save.
    grouped_attention_factor
        The first of these ratios where query heads share keys and values; None for the same.
    logit_bytes
        Bytes for each logit at the loss; None for the logits and their copy in fp32.
    split_logit_bytes
        The same under ZeRO-3 where a tensor group splits the logits; None for `logit_bytes`.
    unsummed_bytes
        Bytes per parameter of the gradients of a pass, which are held beside their sums where there
        are replicas or stages: other micro-batches' activations, or buckets, keep their memory.
    dummy_gradient_bytes
        Bytes, per element of a block's matrices and of the head, of empty tensors that stand for
        gradients which the product has already added: one tensor for each shape.
    attention_output_bytes, activation_input_bytes
        Bytes for each element of attention's output, and of what experts form before their
        activation, as they are saved where products are low; None for the job's type.
    saves_unclamped
        Whether the inputs of a clamped gate are saved before and after they are clamped.
    saves_uncast
        Whether inputs of low products are saved in the job's type, and cast again for dW.
    saves_frozen_inputs
        Whether a layer with a norm saves what its product reads although its weight is frozen, if
        an adapter reads the norm's output, too.
    keeps_remainders
        Whether an optimizer whose moments have a type of their own keeps of each fp32 master weight
        only the 16 bits that the weight in bf16 lacks.
    tiles_logits
        Whether the logits exist for a few tokens at a time, with their gradient.
    tiles_mlp
        Whether the MLP's activations exist for a few tokens at a time. The backward pass forms
        those of each piece again.
    overwrites_gates
        Whether the gradients of a gated MLP take the memory of what its activation has read.
    held_back_tensors
        Tensors of the whole residual stream that have been reduced and scattered in a tensor group,
        and whose memory PyTorch's allocator holds back, because the GPU is so far behind the host
        that the collectives have not read them.
    finished_passes
        Forward passes that the GPU of a stage has finished when its host has issued all that come
        before the first backward pass; None for all of them.
    awaits_messages
        Whether the host of a stage waits until each message between stages has passed, so that its
        GPU is never a queue of launches behind.
    keeps_transfers
        Whether a stage keeps what it has sent of a micro-batch until that comes back (DeepSpeed at
        2151c787, runtime/pipe/engine.py, pipe_buffers["outputs"]).
    workspaces, expert_workspaces
        Number of cuBLAS's workspaces that it holds for products besides torch's own, and the number
        that it adds for the grouped products of experts (`Gpu.workspace_bytes`).
    counts_segments
        Whether the terms count what the allocator reserves, so that the machine's share of
        fragmentation is not added.
    logit_block_bytes
        Bytes for each logit of the largest tensor at the loss, whose memory is of no use to the
        next one once another tensor is cut out of it.
    kept_streams
        Tensors of the whole residual stream that a tensor group gathers in and keeps.
    rotation_bytes
        Bytes, for each feature of a head and each position of a whole sequence, of a table of the
        angles by which positions rotate queries and keys.
    """

    attention_factor: Quantity | None = None
    grouped_attention_factor: Quantity | None = None
    mlp_factor: Quantity | None = None
    logit_bytes: Quantity | None = None
    split_logit_bytes: Quantity | None = None
    unsummed_bytes: Quantity | None = None
    dummy_gradient_bytes: Quantity | None = None
    attention_output_bytes: Quantity | None = None
    activation_input_bytes: Quantity | None = None
    saves_unclamped: bool = False
    saves_uncast: bool = False
    saves_frozen_inputs: bool = False
    keeps_remainders: bool = False
    tiles_logits: bool = False
    tiles_mlp: bool = False
    overwrites_gates: bool = False
    held_back_tensors: Quantity | None = None
    finished_passes: Quantity | None = None
    awaits_messages: bool = False
    keeps_transfers: bool = False
    workspaces: int = 0
    expert_workspaces: int = 0
    counts_segments: bool = False
    logit_block_bytes: Quantity | None = None
    kept_streams: Quantity | None = None
    rotation_bytes: Quantity | None = None

    def __post_init__(self) -> None:
        for name in ("workspaces", "expert_workspaces"):
            require_count("memory", name, getattr(self, name), least=0)
        for smallest, names in (
            (0.1, ("attention_factor", "grouped_attention_factor", "mlp_factor")),
            (0.5, ("attention_output_bytes", "activation_input_bytes")),
            (0.0, ("logit_bytes", "split_logit_bytes", "unsummed_bytes")),
            (0.0, ("dummy_gradient_bytes", "held_back_tensors", "finished_passes")),
            (0.0, ("logit_block_bytes", "kept_streams", "rotation_bytes")),
        ):
            require_facts("memory", self, names, smallest, LARGEST_FACTOR)


@dataclass(frozen=True)
class Engine:
    """The facts of one engine; without any, it carries out the ideal operations.

    name
        Name under which users choose it.
    title
        Name and version for people.
    strategies
        Names of the strategies that it carries out.
    description
        Text for people.
    counts_as
        Title of the engine under which its published runs are counted; empty for its own title.
    package
        Package with which `run` and `validate` train, one of `PACKAGES`; empty for none.
    precisions
        Precisions of products that it has, of `PRECISIONS`; of the low ones the usual comes first.
    moments
        Types in which its optimizer stores moments, of `MOMENT_BYTES`.
    optimizers
        Optimizers that it has, of `OPTIMIZERS`.
    low_states
        Whether the optimizer updates weights in the job's type, without copies in fp32, and its
        moments are in that type, too.
    recomputes_last_product
        Whether full recomputation forms the output of a block's last product, too, which no
        backward pass reads.
    recomputes_combine
        Whether full recomputation sends the experts' results back to their tokens, too, which no
        backward pass reads.
    adds_expert_biases
        Whether kernels add the biases of the experts' first products, and not the products.
    kernels
        Forms of kernels by name, one of `MEMORY_KERNELS`, or `EVERY_KERNEL` for all others.
    attention_library
        Library that has its fused attention, one of `ATTENTION_LIBRARIES`.
    attention_rate
        Ratio of the rate of its fused attention to that of the library on the machine; None for 1.
    attention_widths
        Sizes of heads for which its fused attention has kernels, ascending. Smaller heads take as
        long as those of the next size. Empty if it has kernels for all.
    issue_seconds
        Time in which its host issues one operation; None for the machine's.
    mixture_issue_seconds
        The same in models with experts, where each product of an expert counts; None for the
        former.
    expert_issue_seconds
        Time in which its host issues a forward product of an expert, if the host cannot run ahead
        of the device there; None if it issues them like any other operation.
    collective_gap_seconds
        Time for which its host keeps the device idle around each collective within a pass or at
        the end of a step, since it waits for it (CUDA_LAUNCH_BLOCKING); None for none.
    stage_wait_seconds
        Time for which the host waits in each collective of a stage, for each rank of the group,
        where the pipeline spans several nodes; None for none.
    spanning_wait_seconds
        The same time for a group that itself spans several nodes; None for no other time.
    waits_without_stages
        Whether its host waits as long where there is no pipeline and a job spans several nodes.
    awaits_device
        Whether the host waits for the device before each micro-step or pass, and so issues nothing
        of it ahead.
    memory
        Ways in which it holds other amounts of memory than an engine of fused kernels would.
    offload
        How it offloads optimizer states; None if it cannot.
    axonn, megatron, zero
        How it communicates, if it carries out AxoNN's algorithm, Megatron-LM's, or a member of
        ZeRO's family.
    """

    name: str = ""
    title: str = ""
    strategies: tuple[str, ...] = ()
    description: str = ""
    counts_as: str = ""
    package: str = ""
    precisions: tuple[str, ...] = (FULL,)
    moments: tuple[str, ...] = ("fp32",)
    optimizers: tuple[str, ...] = (ADAMW,)
    low_states: bool = False
    recomputes_last_product: bool = True
    recomputes_combine: bool = True
    adds_expert_biases: bool = False
    kernels: Mapping[str, KernelForm] = field(default_factory=dict)
    attention_library: str = FLASH_ATTENTION
    attention_rate: Quantity | None = None
    attention_widths: tuple[int, ...] = ()
    issue_seconds: Quantity | None = None
    mixture_issue_seconds: Quantity | None = None
    expert_issue_seconds: Quantity | None = None
    collective_gap_seconds: Quantity | None = None
    stage_wait_seconds: Quantity | None = None
    spanning_wait_seconds: Quantity | None = None
    waits_without_stages: bool = False
    awaits_device: bool = False
    memory: MemoryForm = MemoryForm()
    offload: OffloadProgram | None = None
    axonn: AxonnProgram = field(default_factory=AxonnProgram)
    megatron: MegatronProgram = field(default_factory=MegatronProgram)
    zero: ZeroProgram = field(default_factory=ZeroProgram)

    def __hash__(self) -> int:
        return hash(self.name)

    def __post_init__(self) -> None:
        require_name("engine", self.name)
        require_name("engine", self.title)
        owner = f"engine '{self.name}'"
        if self.package:
            require_choice(owner, "package", self.package, PACKAGES)
        for precision in self.precisions:
            require_choice(owner, "precisions", precision, PRECISIONS)
        for moment in self.moments:
            require_choice(owner, "moments", moment, MOMENT_BYTES)
        for optimizer in self.optimizers:
            require_choice(owner, "optimizers", optimizer, OPTIMIZERS)
        for kernel in self.kernels:
            require_choice(owner, "kernel", kernel, (EVERY_KERNEL, *MEMORY_KERNELS))
        require_choice(owner, "attention_library", self.attention_library, ATTENTION_LIBRARIES)
        require_facts(owner, self, ("attention_rate",), 0.01, 10.0)
        for width in self.attention_widths:
            require_count(owner, "attention_widths", width)
        issues = ("issue_seconds", "mixture_issue_seconds", "expert_issue_seconds")
        waits = ("collective_gap_seconds", "stage_wait_seconds", "spanning_wait_seconds")
        require_facts(owner, self, (*issues, *waits), 0.0, LONGEST_WAIT_SECONDS)
        if self.spanning_wait_seconds is not None and self.stage_wait_seconds is None:
            raise InputError(
                f"{owner}: spanning_wait_seconds is given; allowed: only with stage_wait_seconds"
            )
        if self.name and not self.strategies:
            raise InputError(f"{owner}: strategies is empty; name at least one")

    @property
    def record_title(self) -> str:
        """The title under which published runs are counted."""
        return self.counts_as or self.title

    def precision_named(self, name: str) -> str:
        """Return the precision that a user's word means, such as the usual one of 8 bits.

        Raises
        ------
        InputError
            The engine does not have it.
        """
        if not self.has_precision(name):
            alias = (USUAL_LOW,) if self.has_precision(USUAL_LOW) else ()
            raise InputError(
                f"job: precision is '{name[:40]}'; allowed with engine {self.name or 'ideal'}: "
                f"{', '.join((*self.precisions, *alias))}"
            )
        return self.low_precisions[0] if name == USUAL_LOW else name

    def has_precision(self, name: str) -> bool:
        """Return whether the engine has the precision that a user's word means."""
        return name in self.precisions or (name == USUAL_LOW and bool(self.low_precisions))

    @property
    def low_precisions(self) -> list[str]:
        """The precisions that cast operands, the usual one first."""
        return [precision for precision in self.precisions if precision != FULL]

    def leaves_out_last_product(self, model: Model, job: Job) -> bool:
        """Return whether full recomputation leaves out a block's last product.

        Experts, an adapter, or a norm or dropout after it need its output in the backward pass.
        """
        ends_block = model.is_dense and not model.normalises_outputs
        is_read = job.adapters is not None or job.dropout or not ends_block
        return not (self.recomputes_last_product or is_read)

    def offload_in(self, job: Job) -> OffloadProgram | None:
        """Return how the engine offloads a job's optimizer states; None if they stay on the GPU."""
        return self.offload if job.offloads_optimizer else None

    def host_terms(self, job: Job) -> tuple[str, ...]:
        """Return the terms of a rank's memory that are in the host's memory."""
        offload = self.offload_in(job)
        of_optimizer = () if offload is None else offload.terms
        return (*of_optimizer, HOST_ACTIVATIONS) if job.offload_modules else of_optimizer

    def as_run(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the kernels that the engine really launches."""
        of_machine = self.attention_library == FLASH_ATTENTION and not self.attention_rate
        has_its_attention = of_machine and not self.attention_widths
        holds_up = self._holds_experts_up(plan) or self.collective_gap_seconds is not None
        if not self.kernels and has_its_attention and not holds_up:
            return plan
        return rewritten(plan, self._operation)

    def _holds_experts_up(self, plan: StepPlan) -> bool:
        """Return whether the host issues products of experts one by one while the device waits."""
        return self.expert_issue_seconds is not None and any(
            isinstance(operation, GroupedGemm) for operation in plan.operations
        )

    def _operation(self, operation: Operation) -> Operation:
        if isinstance(operation, MemoryBound):
            form = self.kernels.get(operation.kernel) or self.kernels.get(EVERY_KERNEL)
            return form.of(operation) if form else operation
        if isinstance(operation, Collective) and self.collective_gap_seconds is not None:
            return replace(operation, gap_seconds=self.collective_gap_seconds.value)
        if isinstance(operation, GroupedGemm) and operation.mode == "NN":
            # The host has just waited for the numbers of tokens that the experts take.
            return replace(operation, issue_seconds=value_or(self.expert_issue_seconds, 0.0))
        if isinstance(operation, Attention) and operation.fused:
            rate = operation.rate * value_or(self.attention_rate, 1.0)
            rate *= self._used_width(operation.head_dim)
            return replace(operation, rate=rate, library=self.attention_library)
        return operation

    def _used_width(self, head_dim: int) -> float:
        """Return the share of the width of an attention kernel that a head fills."""
        wider = [width for width in self.attention_widths if width >= head_dim]
        return head_dim / wider[0] if wider else 1.0


# The engine of a prediction where none is named: it runs the ideal operations.
IDEAL = Engine(precisions=PRECISIONS, moments=tuple(MOMENT_BYTES))
