"""AxoNN on CPUs over gloo: what it asks of CUDA and NCCL is replaced, and nothing else."""

import warnings
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from programs import imported, settings_in

from axonn_tune.job_scripts.axonn import start


def replace_cuda_calls():
    """Prepare this process for AxoNN, which must not have been imported before."""
    # AxoNN calls collectives by names that torch has replaced since.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = await_collectives
    torch.amp.custom_fwd = partial(for_cpu, torch.amp.custom_fwd)
    torch.amp.custom_bwd = partial(for_cpu, torch.amp.custom_bwd)
    dist.new_group = partial(over_gloo, dist.new_group)
    dist.all_gather_into_tensor = partial(detached, dist.all_gather_into_tensor)
    from axonn.intra_layer import fully_connected

    fully_connected.initialize_params = partial(
        fully_connected.initialize_params, init_device="cpu"
    )


def launched(prediction):
    """What the program that `launch` writes for AxoNN does to the groups and to a model."""
    program = imported("train_axonn")
    settings = settings_in(start(prediction, None).files)
    return {
        "initialise": partial(program.initialise, settings),
        "overlapped": partial(program.overlapped, settings),
    }


@contextmanager
def groups_of(module):
    """Form the groups of ranks that such a module asks for, and destroy them at the end."""
    module["initialise"]()
    yield
    destroy_groups()


def destroy_groups():
    """Destroy the groups of ranks that AxoNN has formed last."""
    from axonn import axonn

    groups = vars(axonn.comm_handle).values()
    for group in {group for group in groups if isinstance(group, dist.ProcessGroup)}:
        dist.destroy_process_group(group)


def await_collectives():
    """Wait for the collectives that AxoNN leaves to the synchronisation of the device."""
    from axonn.intra_layer import overlap_communication

    for handle in overlap_communication.handles:
        handle.wait()


def for_cpu(decorator, *functions, device_type):
    return decorator(*functions, device_type="cpu")


def over_gloo(new_group, ranks, backend):
    return new_group(ranks=ranks, backend="gloo")


def detached(all_gather_into_tensor, full, shard, **options):
    """Gather without autograd, which follows what gloo copies in a thread of its own."""
    return all_gather_into_tensor(full, shard.detach(), **options)
