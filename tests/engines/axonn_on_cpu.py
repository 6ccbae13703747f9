"""AxoNN on CPUs over gloo, as its own functions of torch.distributed run it."""

from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from programs import imported, settings_in

from axonn_tune.job_scripts.axonn import start
from axonn_tune.runtime.released import axonn as released


def replace_cuda_calls():
    """Prepare this process for AxoNN, which must not have been imported before."""
    released.replace_cuda_calls()
    dist.all_gather_into_tensor = partial(detached, dist.all_gather_into_tensor)


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


def detached(all_gather_into_tensor, full, shard, **options):
    """Gather without autograd, which follows what gloo copies in a thread of its own."""
    return all_gather_into_tensor(full, shard.detach(), **options)
