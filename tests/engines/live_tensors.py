"""What tensors of a program exist at once, as torch's allocator would count them."""

import time

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Gloo's threads let go of a tensor a moment after the program has waited for its collective.
RELEASE_SECONDS = 0.1


class LiveTensors(TorchDispatchMode):
    """Notes the most bytes of storages that exist at once and were made while it is active.

    Storages of less than `least_bytes` do not count.
    """

    def __init__(self, least_bytes):
        super().__init__()
        self.most_bytes = 0
        self._least_bytes = least_bytes
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count its results unless they are views of what it was given."""
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        self._forget_expired()
        for storage in storages(result):
            if storage._cdata not in given and storage.nbytes() >= self._least_bytes:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._live_bytes > self.most_bytes:
            time.sleep(RELEASE_SECONDS)
            self._forget_expired()
            self.most_bytes = max(self.most_bytes, self._live_bytes)
        return result

    @property
    def _live_bytes(self):
        return sum(nbytes for _, nbytes in self._live.values())

    def _forget_expired(self):
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
