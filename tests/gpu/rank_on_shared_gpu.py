"""``axonn-tune`` as one rank of several that share a GPU, over gloo or NCCL.

Run: python rank_on_shared_gpu.py gloo|nccl COMMAND ... (with the variables of torchrun)

NCCL refuses two ranks on one GPU unless they seem to run on different hosts, so each rank gets a
host of its own by NCCL_HOSTID and sends over sockets. That is slow: it shows that the same program
trains, waits and fails rightly, and nothing about speed.
"""

import os
import sys
from functools import partial

HOST_OF_ITS_OWN = {
    "NCCL_HOSTID": f"host-of-rank-{os.environ['RANK']}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def over_gloo():
    """Let gloo move tensors of the GPU, in streams as NCCL's."""
    import torch.distributed as dist

    from axonn_tune.runtime.ranks import collectives

    join = dist.init_process_group
    dist.init_process_group = lambda backend, device_id=None, **more: join("gloo", **more)
    collectives.issuer_of = partial(collectives._OnDevice)


def main():
    backend, *arguments = sys.argv[1:]
    if backend == "nccl":
        os.environ.update(HOST_OF_ITS_OWN)
    else:
        over_gloo()
    from axonn_tune.cli.main import main as command

    command(arguments)


if __name__ == "__main__":
    main()
