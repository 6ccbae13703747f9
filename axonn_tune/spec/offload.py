"""Which activations move to the host's memory, as text: modules of a block whose inputs move.

These are modules of Megatron-Core's fine-grained activation offloading (``--offload-modules``), and
whole layers that are recomputed, or all that some layers save (``--cpu-offloading-num-layers``).
"""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import whole_number
from axonn_tune.spec.model import Model

# The modules of Megatron-LM at d98e8a64 (docs/user-guide/features/
# fine_grained_activation_offloading.md), but for those that fuse others.
OFFLOAD_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)
# The inputs of whole layers, which are all that full recomputation keeps.
LAYER_INPUTS = "layer_inputs"
# All that some layers save, written ``layers:40``.
LAYERS = "layers"
_LAYERS_PREFIX = f"{LAYERS}:"
_OF_EXPERTS = ("expert_fc1", "moe_act")


def offloaded_modules(text: str) -> frozenset[str]:
    """Return the modules whose inputs move; there are none in an empty text.

    Raises
    ------
    InputError
        There is no such module, or one needs another; the message says which there are.
    """
    if text.startswith(_LAYERS_PREFIX):
        offloaded_layers(text)
        return frozenset((LAYERS,))
    names = text.split(",") if text else []
    for name in names:
        if name not in (*OFFLOAD_MODULES, LAYER_INPUTS):
            raise InputError(
                f"job: offload_modules is '{text}'; there is no module '{name}'; allowed: "
                f"{', '.join(OFFLOAD_MODULES)}, or {LAYER_INPUTS} or {LAYERS}:N alone"
            )
    if LAYER_INPUTS in names and len(names) > 1:
        raise InputError(
            f"job: offload_modules is '{text}'; nothing else is kept of layers whose inputs move; "
            f"allowed: {LAYER_INPUTS} alone"
        )
    if "attn_proj" in names and "core_attn" not in names:
        raise InputError(
            f"job: offload_modules is '{text}'; attn_proj shares its input with core_attn; "
            "allowed: both"
        )
    return frozenset(names)


def offloaded_layers(text: str) -> int:
    """Return of how many layers everything that they save moves; 0 unless the text says so.

    Raises
    ------
    InputError
        The number is none, or not a positive one.
    """
    if not text.startswith(_LAYERS_PREFIX):
        return 0
    number = whole_number(text.removeprefix(_LAYERS_PREFIX))
    if not number:
        raise InputError(
            f"job: offload_modules is '{text}'; allowed: {_LAYERS_PREFIX}N with N at least 1"
        )
    return number


def require_offload(model: Model, strategy: str, allowed: Sequence[str], text: str) -> None:
    """Raise InputError if the strategy or the model does not have the modules."""
    modules = offloaded_modules(text)
    if modules - set(allowed):
        does = f"moves only {', '.join(allowed)}" if allowed else "keeps activations on the GPU"
        raise InputError(f"--offload-modules {text}: strategy {strategy} with its engine {does}")
    if offloaded_layers(text) >= model.n_layers:
        raise InputError(
            f"--offload-modules {text}: model {model.name} has {model.n_layers} layers, of which "
            f"the last one keeps what it saves; allowed: at most {LAYERS}:{model.n_layers - 1}"
        )
    missing = sorted(modules & set(_OF_EXPERTS))
    if model.is_dense and missing:
        raise InputError(
            f"model {model.name} has no experts, and so no {' and '.join(missing)} to offload"
        )
