"""The job: what the user wants to run, apart from the layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_between, require_choice, require_count
from axonn_tune.spec.model import MOST_LAYERS
from axonn_tune.spec.offload import offloaded_modules
from axonn_tune.spec.precision import (
    BYTES_PER_ELEMENT,
    FULL,
    PRECISIONS,
    RECIPES,
    Recipe,
    operand_bytes,
)
from axonn_tune.spec.tuning import NOTHING_FROZEN, Adapters, Frozen

ATTENTIONS = ("flash", "unfused")
# Optimizers, the usual one first.
ADAMW, MUON, ADEMAMIX = OPTIMIZERS = ("adamw", "muon", "ademamix")
# How the ranks of a tensor group make a matrix that they split orthogonal, the usual one first: all
# of them the whole matrix, each its own part by itself, or all of them together.
DUPLICATED, BLOCKWISE, DISTRIBUTED = MUON_MODES = ("duplicated", "blockwise", "distributed")
# Bytes of each of the optimizer's two moments of a parameter, by its type.
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
# What may move to the host's memory.
OFFLOADS = ("none", "optimizer")
# No rank takes more than all tokens, and no layer is spread over more ranks than this.
LARGEST_IMBALANCE = 1000.0


@dataclass(frozen=True)
class Overlap:
    """The choice of collectives that run while the rank computes.

    The first three are AxoNN's overlaps.

    oar
        The backward all-reduce of dI runs during the dW product.
    ors
        The reduce-scatter of dW runs during the rest of the backward pass.
    oag
        The all-gather of the next weight runs during the present layer.
    grad_reduce
        The reduction of gradients over data runs during the last backward pass of a step. Only the
        bundled runtime's AxoNN takes this from here; other strategies have a switch of their own.
    """

    oar: bool = True
    ors: bool = True
    oag: bool = True
    grad_reduce: bool = False

    def __str__(self) -> str:
        active = [name.upper() for name in ("oar", "ors", "oag") if getattr(self, name)]
        active += ["grad-reduce"] * self.grad_reduce
        return "+".join(active) if active else "none"


@dataclass(frozen=True)
class Job:
    """One training step: the GPUs, the global batch and the numerical choices.

    n_gpus
        Number of GPUs.
    global_batch
        Number of sequences per optimizer step.
    seq_len
        Number of tokens of a sequence.
    dtype
        Type of weights and activations, a key of `BYTES_PER_ELEMENT`.
    attention
        Implementation of softmax attention, one of `ATTENTIONS`.
    overlap
        Collectives that run while the rank computes.
    kernel_tuning
        Whether each product runs in the fastest of its three modes.
    keep_gathered_weights
        Whether the backward pass reuses the weights that the forward pass gathered.
    dropout
        Whether dropout follows attention's softmax and precedes both additions of a block.
    offload
        What moves to the host's memory, one of `OFFLOADS`.
    offload_modules
        Modules whose inputs move there between forward and backward pass, some of
        `OFFLOAD_MODULES` with commas between them.
    expert_imbalance
        Tokens that the busiest rank's experts take, over the mean of all ranks; 1 where every
        expert takes as many tokens as any other.
    precision
        Recipe of the products of blocks, one of `PRECISIONS`; "bf16" runs them in `dtype`.
    one_queue
        Whether the GPU lets kernels of all streams wait in one queue where ranks split tensors or
        sequences (`Gpu.one_queue`).
    transposes_operands
        Whether the GPU reads the operands of low products along their rows only, so that the
        backward pass needs transposed copies. The scenario takes this from its machine.
    moments
        Type in which the optimizer's two moments are stored, a key of `MOMENT_BYTES`.
    adapters
        What is trained where all weights are frozen; None where weights are trained.
    frozen
        Parts of the model whose weights are frozen while others are trained.
    mtp_modules
        Number of modules of multi-token prediction, each of which predicts one further token.
    samples_per_sequence
        Mean number of samples that are packed into a sequence; tokens attend to their own sample.
    optimizer
        What updates the weights, one of `OPTIMIZERS`.
    muon_mode
        How Muon treats matrices that a tensor group splits, one of `MUON_MODES`.
    """

    n_gpus: int
    global_batch: int
    seq_len: int
    dtype: str = "bf16"
    attention: str = "flash"
    overlap: Overlap = field(default_factory=Overlap)
    kernel_tuning: bool = True
    keep_gathered_weights: bool = False
    dropout: bool = False
    offload: str = "none"
    offload_modules: str = ""
    expert_imbalance: float = 1.0
    precision: str = FULL
    transposes_operands: bool = False
    one_queue: bool = True
    moments: str = "fp32"
    adapters: Adapters | None = None
    frozen: Frozen = NOTHING_FROZEN
    mtp_modules: int = 0
    samples_per_sequence: float = 1.0
    optimizer: str = ADAMW
    muon_mode: str = DUPLICATED

    def __post_init__(self) -> None:
        for name in ("n_gpus", "global_batch", "seq_len"):
            require_count("job", name, getattr(self, name))
        require_choice("job", "dtype", self.dtype, BYTES_PER_ELEMENT)
        require_choice("job", "precision", self.precision, PRECISIONS)
        if self.recipe is not None and self.dtype == "fp32":
            raise InputError(
                f"job: dtype is fp32; allowed with precision {self.precision}: bf16, fp16"
            )
        require_choice("job", "attention", self.attention, ATTENTIONS)
        require_choice("job", "moments", self.moments, MOMENT_BYTES)
        require_choice("job", "offload", self.offload, OFFLOADS)
        offloaded_modules(self.offload_modules)
        if self.offloads_optimizer and self.moments != "fp32":
            raise InputError(f"job: moments is {self.moments}; allowed with offload: fp32")
        self._require_optimizer()
        most = LARGEST_IMBALANCE
        require_between("job", "expert_imbalance", self.expert_imbalance, 1.0, most)
        require_count("job", "mtp_modules", self.mtp_modules, least=0, most=MOST_LAYERS)
        if self.mtp_modules and self.adapters is not None:
            raise InputError(f"job: mtp_modules is {self.mtp_modules}; allowed with adapters: 0")
        self._require_trainable()
        n_samples = self.samples_per_sequence
        require_between("job", "samples_per_sequence", n_samples, 1.0, self.seq_len)
        if n_samples > 1.0 and self.attention == "unfused":
            raise InputError(
                f"job: samples_per_sequence is {n_samples:g}; allowed with unfused attention: 1"
            )

    def _require_optimizer(self) -> None:
        """Raise InputError if the optimizer comes with what only AdamW is predicted with.

        Megatron-LM asserts the same: moments of other types and offload with Adam alone
        (core/optimizer/optimizer_config.py at d98e8a64), and no fp16 with Muon (__init__.py there).
        Muon's products run in bf16 whatever the job's type, and are predicted in that type.
        """
        require_choice("job", "optimizer", self.optimizer, OPTIMIZERS)
        require_choice("job", "muon_mode", self.muon_mode, MUON_MODES)
        allowed = {"muon_mode": DUPLICATED}
        if self.optimizer == MUON:
            allowed = {"dtype": "bf16"}
        if self.optimizer != ADAMW:
            allowed |= {"moments": "fp32", "offload": "none"}
        for name in allowed:
            value = getattr(self, name)
            if value != allowed[name]:
                raise InputError(
                    f"job: {name} is {value}; allowed with optimizer {self.optimizer}: "
                    f"{allowed[name]}"
                )
        if self.optimizer != ADAMW and self.adapters is not None:
            raise InputError(f"job: optimizer is {self.optimizer}; allowed with adapters: {ADAMW}")

    def _require_trainable(self) -> None:
        """Raise InputError if frozen parts come with options that cannot be predicted with them."""
        if not self.frozen:
            return
        beside = {
            "adapters": self.adapters is not None,
            "mtp_modules": self.mtp_modules > 0,
            "offload": self.uses_host,
        }
        for name, is_given in beside.items():
            if is_given:
                raise InputError(f"job: frozen is '{self.frozen}'; allowed with {name}: no part")

    @property
    def element_bytes(self) -> float:
        """The number of bytes of a weight or activation element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def recipe(self) -> Recipe | None:
        """How operands of low products are cast; None where all products have the job's type."""
        return RECIPES.get(self.precision)

    @property
    def product_format(self) -> str:
        """The number format of the operands of the products of blocks."""
        recipe = self.recipe
        return self.dtype if recipe is None else recipe.number_format

    @property
    def operand_bytes(self) -> float:
        """The number of bytes of an element of an operand of the products of blocks."""
        return operand_bytes(self.product_format)

    @property
    def saves_attention_cast(self) -> bool:
        """Whether proj saves a cast copy of what attention saves, too (see `Recipe`)."""
        return self.recipe is not None and self.recipe.saves_attention_cast

    @property
    def drops_scores_within_attention(self) -> bool:
        """Whether fused attention drops scores itself; unfused attention has a kernel for that."""
        return self.dropout and self.attention == "flash"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer states are in the host's memory."""
        return self.offload == "optimizer"

    @property
    def trains_weights(self) -> bool:
        """Whether the model's own weights are trained, and not only adapters beside them."""
        return self.adapters is None

    def has_adapter(self, layer: str) -> bool:
        """Return whether an adapter stands beside the weight of a layer of a block."""
        return self.adapters is not None and self.adapters.are_beside(layer)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding is trained."""
        return self.trains_weights and not self.frozen.embedding

    @property
    def trains_head(self) -> bool:
        """Whether the final norm and the head are trained."""
        return self.trains_weights and not self.frozen.head

    def trains(self, layer: str) -> bool:
        """Return whether the weight of a layer has a gradient where it has a backward pass."""
        return self.trains_head if layer == "head" else self.trains_weights

    @property
    def trains_all_weights(self) -> bool:
        """Whether neither adapters are trained in their place, nor parts of them frozen."""
        return self.adapters is None and not self.frozen

    @property
    def special_parts(self) -> list[str]:
        """The names of what is trained besides the model's own layers and their adapters."""
        return ["multi-token prediction"] * (self.mtp_modules > 0)

    @property
    def sample_len(self) -> float:
        """The mean number of tokens of a sample, which are those that attend to one another."""
        return self.seq_len / self.samples_per_sequence

    @property
    def uses_host(self) -> bool:
        """Whether anything is in the host's memory."""
        return self.offloads_optimizer or bool(self.offload_modules)

    @property
    def tokens(self) -> float:
        """The number of tokens of one global batch."""
        return float(self.global_batch) * self.seq_len
