"""What a script trains otherwise than the model says, in whole sentences."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.spec.model import SQUARED_RELU, XIELU, Model

_OF_MEGATRON = ("megatron", "megatron-fsdp")


def model_differences(model: Model, framework: str, train: str | None) -> list[str]:
    """Return a sentence on each thing that is not predicted, or that a script trains differently.

    Parameters
    ----------
    framework : str
        The framework that is started.
    train : str or None
        A program of the user, whose model is not known unless it is Megatron-LM's.
    """
    left_out = [model.left_out_sentence] if model.not_modelled else []
    if framework in _OF_MEGATRON:
        return [*left_out, *_in_megatron(model)]
    return [*left_out, *([] if train else _in_own_programs(model))]


def _in_megatron(model: Model) -> Iterator[str]:
    """Yield what the flags of Megatron-LM cannot say (NVIDIA/Megatron-LM at d98e8a64)."""
    if model.activation == XIELU:
        yield (
            f"Megatron-LM trains {model.name} with GELU, since it has no xIELU; "
            "swiss-ai/Megatron-LM has it (--xielu, at 81d44dbe)."
        )
    if model.qk_norm == "all":
        yield "Megatron-LM normalises each head's query and key; the model all heads at once."
    if model.latent_attention is None and model.proj_bias != model.bias:
        yield (
            "Megatron-LM gives attention's last product a bias if and only if the MLP has biases; "
            "the model does not."
        )
    if model.bias and not model.qkv_bias:
        yield "Megatron-LM gives queries, keys and values biases, since the MLP has some."


def _in_own_programs(model: Model) -> Iterator[str]:
    """Yield what the training programs of this package do not build."""
    if model.activation:
        name = {SQUARED_RELU: "the squared ReLU", XIELU: "xIELU"}[model.activation]
        yield f"The program trains {model.name} with GELU in the place of {name}."
