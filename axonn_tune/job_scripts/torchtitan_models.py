"""The models that torchtitan builds, which a model has to equal in its sizes, whatever its name."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.errors import InputError
from axonn_tune.spec.model import Model


@dataclass(frozen=True)
class Flavor:
    """A model in torchtitan, with its sizes.

    module, name
        The folder in torchtitan/models, and the key of the model in it.
    recipe
        Function in config_registry.py whose optimizer and data suit the model: its own, or that of
        a model with the same vocabulary, as llama3_405b needs torchao for its 8 bits, and three
        others have none. Empty if torchtitan has the model no longer.
    longest
        Tokens of the longest sequence that it trains with since 0.3.0; earlier ones only warn.
    """

    module: str
    name: str
    recipe: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    parameters: int
    longest: int

    def equals(self, model: Model) -> bool:
        """Return whether a model has these sizes, and full attention."""
        sizes = (model.n_layers, model.n_heads, model.n_kv_heads, int(model.parameters))
        own = (self.n_layers, self.n_heads, self.n_kv_heads, self.parameters)
        return sizes == own and not model.window


# Measured by building each on meta tensors with torchtitan 0.2.2, 0.3.0 and b5bcd76c, which agree
# in the sizes; the Llama 4 are those of 0.2.2, and the longest sequences those of the others.
FLAVORS = {
    "deepseek-v3": Flavor(
        "deepseek_v3", "671B", "deepseek_v3_671b", 61, 128, 128, 671_026_404_352, 16_384
    ),
    "llama3-8b": Flavor("llama3", "8B", "llama3_8b", 32, 32, 8, 8_030_261_248, 131_072),
    "llama3-70b": Flavor("llama3", "70B", "llama3_70b", 80, 64, 8, 70_553_706_496, 131_072),
    "llama3-405b": Flavor("llama3", "405B", "llama3_70b", 126, 128, 8, 405_853_388_800, 131_072),
    "llama4-scout": Flavor("llama4", "17bx16e", "", 48, 40, 8, 107_769_861_120, 10_485_760),
    "llama4-maverick": Flavor("llama4", "17bx128e", "", 48, 40, 8, 400_711_848_960, 1_048_576),
    "qwen3-8b": Flavor("qwen3", "8B", "qwen3_14b", 36, 32, 8, 8_190_735_360, 40_960),
    "qwen3-32b": Flavor("qwen3", "32B", "qwen3_32b", 64, 64, 8, 32_762_123_264, 40_960),
    "qwen3-30b-a3b": Flavor("qwen3", "30B-A3B", "qwen3_30b_a3b", 48, 32, 4, 30_532_122_624, 40_960),
    "qwen3-235b-a22b": Flavor(
        "qwen3", "235B-A22B", "qwen3_30b_a3b", 94, 64, 4, 235_093_634_560, 40_960
    ),
}


def flavor_of(model: Model, release: str, flavors: dict[str, Flavor]) -> Flavor:
    """Return the flavor with the sizes of a model.

    Raises
    ------
    InputError
        There is none; the message names `release` and the models of `flavors`.
    """
    for flavor in flavors.values():
        if flavor.equals(model):
            return flavor
    raise InputError(
        f"model is '{model.name}'; allowed with torchtitan {release}: models with the sizes of "
        f"{', '.join(flavors)}"
    )
