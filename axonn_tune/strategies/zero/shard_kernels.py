"""The kernels of torch's FSDP around its messages, by the bytes that they read and write.

`fully_shard` (FSDP2) keeps each weight as a tensor of its own, so that weights are copied into and
out of each message. `FullyShardedDataParallel` (FSDP1) keeps all weights of a unit in one flat
tensor, of which each weight is a view: nothing is copied, but the views' gradients are joined, and
kernels divide these by the number of ranks before and after they are reduced. FSDP2 leaves that to
the collective unless gradients are reduced in fp16. (torch 2.13, distributed/fsdp/_fully_shard/
_fsdp_collectives.py, foreach_all_gather and foreach_reduce, and distributed/fsdp/_flat_param.py and
_runtime_utils.py, _use_low_precision_shard and _reduce_grad.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.plan import Size


@dataclass(frozen=True)
class ShardKernels:
    """States the bytes that kernels around messages of torch's FSDP move, for each element.

    Attributes
    ----------
    stored, gathered, reduced
        Bytes of an element of a trained weight's shard, of a gathered weight, and of a gradient in
        a message.
    is_flat
        Whether the weights of a unit are views of one tensor.
    divides
        Whether kernels divide gradients by the number of ranks.
    """

    stored: float
    gathered: float
    reduced: float
    is_flat: bool
    divides: bool

    @property
    def of_cast(self) -> float:
        """The bytes for each trained element of a shard that is cast before it is gathered."""
        return _cast(self.stored, self.gathered)

    def of_low_cast(self, operand_bytes: float) -> float:
        """Return the bytes for each element of a shard that is cast to a low format instead.

        The hooks of FSDP2 are not compiled: three kernels scale, clamp and cast (pytorch/ao at
        0afa4c1b, float8/fsdp_utils.py, fsdp_pre_all_gather, and to_fp8_saturated).
        """
        return 5.0 * self.stored + operand_bytes

    @property
    def copies(self) -> float:
        """How often each byte of a message is moved to copy it in, or out."""
        return 0.0 if self.is_flat else 2.0

    def of_pack(self, is_sum: np.ndarray) -> Size:
        """Return the bytes for each gradient until it is sent; FSDP2 casts it as it copies it.

        Sums of several micro-steps already have the type of the message.
        """
        if self.is_flat:
            cast = _cast(self.gathered, self.reduced)
            return 2.0 * self.gathered + cast + self._of_division
        return np.where(is_sum, self.reduced, self.gathered) + self.reduced + self._of_division

    @property
    def of_receipt(self) -> float:
        """The bytes for each element of a shard of gradients that has been reduced."""
        return self._of_division + _cast(self.reduced, self.stored)

    @property
    def of_sum(self) -> float:
        """The bytes for each element of a shard that is added to those of earlier micro-steps."""
        return 3.0 * self.stored

    @property
    def _of_division(self) -> float:
        """The bytes for each gradient that a kernel divides."""
        return 2.0 * self.reduced if self.divides else 0.0


def _cast(before: float, after: float) -> float:
    """Return the bytes of a cast of one element, if its type changes."""
    return before + after if before != after else 0.0
