"""The names of operations, which the step plan and the runtime share.

A prediction and a measurement are compared operation by operation under these names, so each is
written here once. An operation of a layer has the name ``<chain>.<layer>.<action>``, such as
``forward.qkv.gemm``; one that happens once per step has a fixed name, such as ``optimizer.step``.
"""

from __future__ import annotations

# The passes over a block: the forward pass, the forward pass that recomputation repeats, and the
# backward pass.
FORWARD = "forward"
RECOMPUTE = "recompute"
BACKWARD = "backward"

# What a pass over a mixture of experts exchanges: copies of tokens, the experts' results for them,
# and the probabilities of the copies.
DISPATCH = "dispatch"
COMBINE = "combine"
PROBABILITIES = "probabilities"

# The ends of the names of operations that serve only the gradient of a weight.
_OF_WEIGHT_GRADIENT = (".gemm_weight", ".bias", ".cast_again", ".transposed", ".scatter_add")
# What happens once per step, or once per micro-step, outside the layers.
LOSS_LOGITS = "loss.logits.all_gather"
LOSS_SOFTMAX = "loss.softmax"
LOSS_MAXIMUM = "loss.maximum.all_reduce"
LOSS_SUM = "loss.sum.all_reduce"
LOSS_GRADIENT = "loss.gradient"
GRADIENT_ACCUMULATE = "gradient.accumulate"
GRADIENT_TIED = "gradient.tied"
GRADIENT_VECTORS = "gradient.vectors.all_reduce"
GRADIENT_VOCABULARY = "gradient.vocabulary.all_reduce"
GRADIENT_EMBEDDING = "gradient.embedding.send_recv"
GRADIENT_ALL_REDUCE = "gradient.all_reduce"
GRADIENT_VECTORS_OVER_DATA = "gradient.vectors.data.all_reduce"
GRADIENT_REDUCE_SCATTER = "gradient.reduce_scatter"
GRADIENT_REDUCE = "gradient.reduce"
GRADIENT_MAIN = "gradient.main"
GRADIENT_UNSCALE = "gradient.unscale"
GRADIENT_NORM = "gradient.norm"
GRADIENT_SLICES = "gradient.slices"
GRADIENT_CLIP = "gradient.clip"
GRADIENT_CLEAR = "gradient.clear"
GRADIENT_TO_HOST = "gradient.to_host"
OPTIMIZER_STEP = "optimizer.step"
WEIGHTS_FROM_HOST = "weights.from_host"
WEIGHTS_MAIN = "weights.main"
WEIGHTS_CAST = "weights.cast"
WEIGHTS_CAST_ELSEWHERE = "weights.cast.of_other_stages"
WEIGHT_SCALES = "weights.scales"
WEIGHTS_ALL_GATHER = "weights.all_gather"
VECTORS_ALL_GATHER = "weights.vectors.all_gather"


def of_layer(chain: str, layer: str) -> str:
    """Return the name of a layer, a norm or another part of a block within a chain."""
    return f"{chain}.{layer}"


def gemm(owner: str) -> str:
    """Return the name of the product that forms a layer's output; `owner` is the layer's name."""
    return f"{owner}.gemm"


def gemm_input(owner: str) -> str:
    """Return the name of the product that forms the gradient of a layer's input."""
    return f"{owner}.gemm_input"


def input_gradient(owner: str) -> str:
    """Return the name of the kernel that sums the gradients of an input of several products."""
    return f"{owner}.input_gradient"


def adapter_in(owner: str) -> str:
    """Return the name of the first product of a layer's adapter, as a layer of its own."""
    return f"{owner}.adapter_in"


def adapter_out(owner: str) -> str:
    """Return the name of the second product of a layer's adapter, as a layer of its own."""
    return f"{owner}.adapter_out"


def adapter_sum(owner: str) -> str:
    """Return the name of the kernel that adds an adapter's output to that of its layer."""
    return f"{owner}.adapter_sum"


def joined(owner: str) -> str:
    """Return the name of the kernel that joins columns which came from several ranks."""
    return f"{owner}.joined"


def parted(owner: str) -> str:
    """Return the name of the kernels that copy the columns of one rank out of a gradient."""
    return f"{owner}.parted"


def scaled(owner: str) -> str:
    """Return the name of the kernel that scales an adapter's output, or its gradient."""
    return f"{owner}.scale"


def dropped(owner: str) -> str:
    """Return the name of the kernel that drops elements of an adapter's input, or its gradient."""
    return f"{owner}.dropout"


def gemm_weight(owner: str) -> str:
    """Return the name of the product that forms the gradient of a layer's weight."""
    return f"{owner}.gemm_weight"


def forms_weight_gradient(name: str) -> bool:
    """Return whether an operation of the backward pass serves the gradient of a weight only."""
    return name.startswith(f"{BACKWARD}.") and name.endswith(_OF_WEIGHT_GRADIENT)


def bias(owner: str) -> str:
    """Return the name of the kernel that adds a layer's bias, or sums its gradient."""
    return f"{owner}.bias"


def sums(owner: str) -> str:
    """Return the name of a split norm's first kernel, which forms the sums over its columns."""
    return f"{owner}.sums"


def convert(owner: str) -> str:
    """Return the name of the kernel that converts a tensor of another format to the job's type."""
    return f"{owner}.convert"


def join(owner: str) -> str:
    """Return the name of the copies that join a weight which came as a list of shards."""
    return f"{owner}.join"


def cast(owner: str) -> str:
    """Return the name of the kernel that casts a layer's input, or the gradient of its output."""
    return f"{owner}.cast"


def cast_again(owner: str) -> str:
    """Return the name of the kernel that casts an input, which was saved uncast, for dW."""
    return f"{owner}.cast_again"


def cast_weight(owner: str) -> str:
    """Return the name of the kernel that casts a layer's gathered weight."""
    return f"{owner}.cast_weight"


def transposed(owner: str) -> str:
    """Return the name of the kernel that transposes what was gathered in a low format for dW."""
    return f"{owner}.transposed"


def transposed_weight(owner: str) -> str:
    """Return the name of the kernel that transposes a weight which was gathered for dI."""
    return f"{owner}.transposed_weight"


def views(owner: str) -> str:
    """Return the name of the host's work on the views into which a unit is gathered."""
    return f"{owner}.views"


def lookup(owner: str) -> str:
    """Return the name of the kernel that looks up the rows of an embedding."""
    return f"{owner}.lookup"


def scatter_add(owner: str) -> str:
    """Return the name of the kernel that adds rows to the gradient of an embedding."""
    return f"{owner}.scatter_add"


def over(name: str, axis: str) -> str:
    """Return the name of a collective that continues an earlier one over another axis."""
    return f"{name}.{axis}"


def collective(owner: str, kind: str) -> str:
    """Return the name of the collective of the given kind that serves `owner`."""
    return f"{owner}.{kind}"


def all_gather(owner: str) -> str:
    """Return the name of the all-gather that brings what `owner` needs."""
    return collective(owner, "all_gather")


def all_to_all(owner: str) -> str:
    """Return the name of the exchange of `owner` between the ranks of a group."""
    return collective(owner, "all_to_all")


def send_recv(owner: str) -> str:
    """Return the name of the message to the next rank that travels while `owner` runs."""
    return collective(owner, "send_recv")


def to_host(owner: str) -> str:
    """Return the name of the copy of what `owner` has formed to the host."""
    return f"{owner}.to_host"


def from_host(owner: str) -> str:
    """Return the name of the copy that brings what `owner` needs from the host."""
    return f"{owner}.from_host"


def awaited(owner: str) -> str:
    """Return the name of the host's wait for the copy that brings what `owner` needs."""
    return f"{owner}.await"


def last_part(owner: str) -> str:
    """Return the name of the part of an output that is summed once its product has ended."""
    return f"{owner}.last_part"


def reduce_scatter(owner: str) -> str:
    """Return the name of the reduce-scatter of what `owner` has formed."""
    return collective(owner, "reduce_scatter")


def all_reduce(owner: str) -> str:
    """Return the name of the all-reduce of what `owner` has formed."""
    return collective(owner, "all_reduce")


def unit_gradient(unit: str, group: str) -> str:
    """Return the owner's name for operations on a unit's gradients over a group (ZeRO, FSDP)."""
    return f"gradient.{unit}.{group}"


def gradient(unit: str) -> str:
    """Return the owner's name for operations on a unit's gradients."""
    return f"gradient.{unit}"


def accumulate(owner: str) -> str:
    """Return the name of the kernel that adds a micro-step's gradients of `owner` to their sums."""
    return f"{owner}.accumulate"


def reduce(owner: str) -> str:
    """Return the name of the collective, of any kind, that reduces the gradients of `owner`."""
    return collective(owner, "reduce")


def norm_all_reduce(axis: str) -> str:
    """Return the name of the all-reduce of the gradients' norm over one axis."""
    return f"{GRADIENT_NORM}.all_reduce_{axis}"


def over_axis(kind: str, axis: str) -> str:
    """Return the name under which a collective is recorded whose role in the plan is unknown."""
    return f"{kind} over {axis}"
