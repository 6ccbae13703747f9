"""Ranks of a test; they are started once, meet over a file, and run one grid after another."""

import itertools
import multiprocessing
import tempfile
import traceback
import warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.optimizer import Optimizer
from axonn_tune.runtime.axonn.weights import Matrix, Vector
from axonn_tune.runtime.ranks.session import run_as_batch
from axonn_tune.spec.layout import grid_layout

# Ranks are forked from one server, which has imported the modules that take long: on 2 cores, eight
# ranks start in 0.2 s instead of 25 s.
PRELOADED = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "axonn_tune.runtime.axonn.checkpoint",
    "axonn_tune.runtime.axonn.trainer",
)
multiprocessing.set_forkserver_preload(list(PRELOADED))


def grids(n_ranks):
    """Every grid G_x x G_y x G_z x G_data of `n_ranks` ranks."""
    sizes = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
    return [
        grid_layout(x, y, z, n_ranks // (x * y * z))
        for x, y, z in itertools.product(sizes, repeat=3)
        if n_ranks % (x * y * z) == 0
    ]


def on_ranks(n_ranks, function, *arguments):
    """Call ``function(rank, *arguments)`` on every rank; the first failure is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        failure = Path(folder, "failure")
        task = (n_ranks, f"{folder}/meet", failure, function, arguments)
        try:
            mp.start_processes(_rank, task, n_ranks, start_method="forkserver")
        except mp.ProcessRaisedException:
            raise AssertionError(failure.read_text()) from None


def _rank(rank, n_ranks, meeting, failure, function, arguments):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    run_as_batch()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=n_ranks,
            timeout=timedelta(seconds=60),
        )
        function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # The others fail too, since they lose this rank; the first one says why.
        with suppress(FileExistsError), failure.open("x") as file:
            file.write(f"rank {rank} of {n_ranks}: {traceback.format_exc()}")
        raise


@contextmanager
def on_grid(grid, order="xyzd"):
    """A mesh whose groups are destroyed at the end; a failure names the grid."""
    mesh = Mesh(grid, order)
    try:
        yield mesh
    except Exception as error:
        raise AssertionError(f"on grid {grid}, order {order}: {error}") from error
    mesh.close()


class Trained:
    """A model with its optimizer on one mesh."""

    def __init__(self, spec, mesh, model=(), optimizer=(), **engine):
        self.mesh, self.engine = mesh, Engine(mesh, **engine)
        self.model = GPT(self.engine, spec, **dict(model))
        self.optimizer = Optimizer(self.model, self.engine, **dict(optimizer))
        self.owners = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, Matrix | Vector)
        }

    def take(self, whole):
        """Set the parameters to what this rank stores of whole ones."""
        for name, owner in self.owners.items():
            owner.shard.data.copy_(owner.layout.take(whole[name], self.mesh))
        if self.optimizer.has_master_copy:
            self.optimizer.master.copy_(self.optimizer.weights)

    def share(self, batch):
        """This rank's rows of a global batch."""
        n_rows = len(batch) // (self.mesh.size("z") * self.mesh.size("data"))
        return batch[n_rows * self.mesh.batch_index :][:n_rows]

    def gradients(self):
        """The gradients that the optimizer would apply, by name."""
        self.optimizer.sums.reduce()
        sizes = [owner.shard.numel() for owner in self.optimizer.owners]
        names = {owner: name for name, owner in self.owners.items()}
        pieces = self.optimizer.gradients.split(sizes)
        owners = self.optimizer.owners
        return {names[o]: piece for o, piece in zip(owners, pieces, strict=True)}

    def summed(self, loss):
        """The sum of the losses of all ranks along Z and data."""
        total = loss.detach().clone()
        for axis in ("z", "data"):
            dist.all_reduce(total, group=self.mesh.group(axis))
        return total.item()


def assert_close(got, wanted, tolerance, what, scale=None):
    """Check the largest difference over `scale`, which is the largest element by default."""
    scale = wanted.abs().max() if scale is None else scale
    error = float((got.float() - wanted).abs().max() / scale)
    assert error <= tolerance, f"rank {dist.get_rank()}, {what}: off by {error:.2e}"
