"""The bytes that torch moves in a function and its backward pass, counted kernel by kernel."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axonn_tune.runtime.rehearsal.kernels import is_strided

# torch's log-softmax reads rows that no block of threads can hold three times forward, and its
# backward kernel the gradient twice; the loss itself touches one logit of a row, and clears the
# others' gradients.
READ_AGAIN = {
    "_log_softmax": 2,
    "nll_loss_forward": -1,
    "nll_loss_backward": -1,
    "_log_softmax_backward_data": 1,
}


class Traffic(TorchDispatchMode):
    """Counts the bytes that kernels read and write; views move none.

    Pointwise kernels that broadcast an operand or read a slice handle one element at a time. Copies
    of these elements would move `strided_bytes`; with these instead, all move `priced_bytes`, and
    the kernel of each of `names` as many as `each` says.
    """

    def __init__(self):
        super().__init__()
        self.nbytes = 0
        self.priced_bytes = 0
        self.strided_bytes = 0
        self.names = []
        self.each = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read, written = tensors((args, kwargs)), tensors(out)
        storages = {id_of_storage(tensor) for tensor in read}
        if all(id_of_storage(tensor) in storages for tensor in written):
            return out
        nbytes = sum(map(stored_bytes, read + written))
        self.nbytes += nbytes
        if torch.Tag.pointwise in func.tags and is_strided(read + written):
            nbytes = 2 * written[0].numel() * max(tensor.element_size() for tensor in read)
            self.strided_bytes += nbytes
        self.priced_bytes += nbytes
        self.names.append(func.overloadpacket.__name__)
        self.each.append(nbytes)
        return out


class Copies(TorchDispatchMode):
    """Counts the bytes that copies into another tensor, or into another type, read and write.

    Kernels of `others`, which join or divide tensors, count with them.
    """

    def __init__(self, *others):
        super().__init__()
        self.nbytes = 0
        self._names = ("copy_", "_to_copy", *others)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self._names:
            source = args[1] if name == "copy_" else args[0]
            of_source = out.element_size() if name == "cat" else source.element_size()
            self.nbytes += out.numel() * (of_source + out.element_size())
        return out


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def id_of_storage(tensor):
    return tensor.untyped_storage()._cdata


def stored_bytes(tensor):
    """Bytes of a tensor's distinct elements; those of an expanded dimension count once."""
    distinct = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(distinct).numel() * tensor.element_size()


def bf16(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def moved(function, *inputs):
    """Bytes that a function and its backward pass move, and the names of their kernels."""
    with Traffic() as forward:
        outputs = function(*inputs)
    gradients = [torch.empty_like(output) for output in tensors(outputs)]
    with Traffic() as backward:
        torch.autograd.backward(tensors(outputs), gradients)
    return forward, backward


def rms_norm(x, weight):
    """A norm whose steps are kernels of their own, in fp32 between two casts."""
    exact = x.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (exact * scale).type_as(x) * weight


def loss_bytes(counted, n_logits, element_bytes):
    """Bytes of each logit that a pass of torch's cross entropy moves."""
    again = element_bytes * sum(READ_AGAIN.get(name, 0) for name in counted.names)
    return counted.nbytes / n_logits + again
