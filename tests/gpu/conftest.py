"""What the tests on a GPU share; without a GPU all of them are skipped.

GPU_TESTS_ON=cpu runs what does not need a GPU on a CPU, to see that the tests themselves work.
Facts that tests measure go to the file that GPU_FACTS names, a line of JSON for each.
"""

import json
import os

import pytest

ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"


def sees_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_runtest_setup(item):
    """Skip a test where there is no GPU, before its fixtures are made."""
    on_cpu = ON_CPU and "gpu_only" not in item.keywords
    if not (on_cpu or sees_gpu()):
        pytest.skip("torch sees no GPU here")


@pytest.fixture(scope="session")
def device():
    import torch

    if ON_CPU:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def alone(device):
    """A group of this process only: NCCL's on a GPU."""
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if on_gpu else None,
    )
    yield device
    dist.destroy_process_group()


@pytest.fixture
def note(request):
    """Keeps a fact that the test measured, for the page of `accept`."""

    def keep(**facts):
        print(facts)
        path = os.environ.get("GPU_FACTS")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps({"test": request.node.name, **facts}) + "\n")

    return keep
