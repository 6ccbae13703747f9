"""Prints what torch.compile makes of attention of a shared sequence, with full recomputation.

It compiles for the last rank of a group that sends nothing, on fake tensors, up to the order of
kernels that inductor's scheduler decides on. For each pass it prints this order, and the bytes that
inductor's own kernels read and write for each element of the queries.
"""

import json
import sys
from unittest.mock import MagicMock

import torch
import torch._functorch.partitioners as partitioners
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

HEADS, SEQ_LEN, HEAD_DIM = 4, 256, 128
N_ELEMENTS = HEADS * SEQ_LEN * HEAD_DIM
KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "send_recv",
    "wait_tensor": "wait",
    "_scaled_dot_product_flash_attention": "forward",
    "_scaled_dot_product_flash_attention_backward": "backward",
}
recorded = {}


def recorder(chain):
    """Return a compiler that records the kernels of a pass, and then runs the pass as it is."""

    def compiler(module, inputs):
        mode = torch._guards.detect_fake_mode(inputs)
        graph = GraphLowering(module, example_inputs=inputs, is_backward=chain == "backward")
        with V.set_fake_mode(mode), V.set_graph_handler(graph), V.set_debug_handler(MagicMock()):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            order, nbytes = [], 0
            for node in graph.scheduler.nodes:
                if node.is_extern():
                    called = getattr(node.node, "op_overload", None)
                    name = called.overloadpacket.__name__ if called is not None else ""
                    order += [KINDS[name]] if name in KINDS else []
                elif not node.is_template():
                    nbytes += node.get_read_write_buffers_sizes()
        recorded[chain] = {"order": order, "kernels": nbytes / N_ELEMENTS}
        return make_boxed_func(module.forward)

    return compiler


def main():
    n_ranks = int(sys.argv[1])
    dist.init_process_group("fake", store=FakeStore(), rank=n_ranks - 1, world_size=n_ranks)
    mesh = DeviceMesh("cpu", list(range(n_ranks)))
    _attention._enable_cp_dtensor_dispatcher()
    # Kernels of CUDA that use no random numbers need no state of their generator either.
    partitioners.functionalize_rng_ops = lambda _, forward, backward, *args, **kwargs: (
        forward,
        backward,
    )

    def block(streams, weights):
        products = [stream @ weight for stream, weight in zip(streams, weights[:3], strict=True)]
        heads = [
            DTensor.from_local(product.view(1, HEADS, SEQ_LEN, HEAD_DIM), mesh, [Shard(2)])
            for product in products
        ]
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        output = attend(*heads, 0.0, True)[0].to_local()
        return output.view(SEQ_LEN, -1) @ weights[3]

    def recomputed(streams, weights):
        return checkpoint(block, streams, weights, use_reentrant=False, preserve_rng_state=False)

    backend = aot_autograd(
        fw_compiler=recorder("forward"),
        bw_compiler=recorder("backward"),
        partition_fn=partitioners.min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    width = HEADS * HEAD_DIM
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind = {"dtype": torch.bfloat16, "requires_grad": True}
        streams = [torch.empty(SEQ_LEN, width, **kind) for _ in range(3)]
        weights = [torch.empty(width, width, **kind) for _ in range(4)]
        compiled = torch.compile(recomputed, backend=backend, fullgraph=True)
        compiled(streams, weights).sum().backward()
    print(json.dumps(recorded))


if __name__ == "__main__":
    main()
