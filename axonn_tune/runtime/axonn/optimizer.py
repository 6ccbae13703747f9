"""AdamW over what the rank stores: gradients summed over the grid, clipped, applied in fp32."""

from __future__ import annotations

import torch
from torch import nn

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.gradients import GradientSums
from axonn_tune.runtime.axonn.weights import Matrix, Vector
from axonn_tune.runtime.ranks.collectives import wait
from axonn_tune.spec import names

# The numbers of AdamW, unless a caller asks for others.
LR = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


class Optimizer:
    """Owns the memory of a model's weights and gradients, each in one flat buffer.

    `step` reduces the sums of gradients over the grid, clips them, applies them and clears them.

    Parameters
    ----------
    model : Module
        A model that is built of the runtime's layers.
    engine : Engine
    lr, betas, eps, weight_decay : float
        Numbers of AdamW; norms, biases and positions are not decayed.
    clip_norm : float or None
        Largest norm of the whole gradient; None for no clipping.
    one_microstep : bool
        Whether each step has one micro-step only, which saves passes over the gradients in fp32.

    Attributes
    ----------
    adamw : torch.optim.AdamW
        The optimizer that torch's learning rate schedulers need.
    owners : list of Matrix and Vector
        The model's parameters in the order in which they lie in the buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        lr: float = LR,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
        weight_decay: float = WEIGHT_DECAY,
        clip_norm: float | None = CLIP_NORM,
        one_microstep: bool = False,
    ) -> None:
        self.mesh = engine.mesh
        self._engine = engine
        self._clip_norm = clip_norm
        vectors = [m for m in model.modules() if isinstance(m, Vector)]
        self.owners: list[Matrix | Vector] = [
            *sorted(vectors, key=lambda vector: vector.axis, reverse=True),
            *(m for m in model.modules() if isinstance(m, Matrix)),
        ]
        self._n_over_y = sum(v.shard.numel() for v in vectors if v.axis == "y")
        self.weights = torch.cat([owner.shard.detach() for owner in self.owners])
        sizes = [owner.shard.numel() for owner in self.owners]
        for owner, weight in zip(self.owners, self.weights.split(sizes), strict=True):
            owner.shard.data = weight
        self.sums = GradientSums(engine, self.owners, one_microstep)
        self.gradients = self.sums.flat
        self.has_master_copy = self.weights.dtype != torch.float32
        self.master = self.weights.float() if self.has_master_copy else self.weights
        self.adamw = self._adamw(lr, betas, eps, weight_decay)

    def _adamw(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> torch.optim.AdamW:
        self._moments = {
            name: torch.zeros_like(self.gradients) for name in ("exp_avg", "exp_avg_sq")
        }
        self._update_counts: list[torch.Tensor] = []
        flats = []
        groups = []
        for part, decay in (
            (slice(0, self.sums.n_in_vectors), 0.0),
            (slice(self.sums.n_in_vectors, None), weight_decay),
        ):
            flat = nn.Parameter(self.master[part])
            flat.grad = self.gradients[part]
            flats.append((flat, part))
            groups.append({"params": [flat], "weight_decay": decay})
        adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        for flat, part in flats:
            count = torch.zeros((), device=flat.device)
            self._update_counts.append(count)
            adamw.state[flat] = {
                "step": count,
                **{name: moment[part] for name, moment in self._moments.items()},
            }
        return adamw

    def states(self) -> dict[str, list[torch.Tensor]]:
        """Return what training needs to go on: the fp32 weights and AdamW's moments.

        Each list holds a flat view for each of `owners`; to write to a view changes the state.
        """
        sizes = [owner.shard.numel() for owner in self.owners]
        flat = {"weight": self.master, **self._moments}
        return {name: list(tensor.split(sizes)) for name, tensor in flat.items()}

    @property
    def n_updates(self) -> int:
        """The number of updates so far."""
        return int(self._update_counts[0].item())

    @torch.no_grad()
    def restored(self, n_updates: int) -> None:
        """Take over `states` that somebody has written, after `n_updates` updates."""
        for count in self._update_counts:
            count.fill_(n_updates)
        self.weights.copy_(self.master)

    @torch.no_grad()
    def step(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Update the weights.

        Parameters
        ----------
        scale : Tensor, optional
            Factor on the gradient, for a loss whose mean was taken over too many tokens.

        Returns
        -------
        Tensor
            The norm of the whole gradient before clipping, shape ().
        """
        recorder = self._engine.recorder
        self.sums.reduce()
        norm = self._norm()
        factor = torch.ones_like(norm) if scale is None else scale
        norm = norm * factor
        if self._clip_norm is not None:
            factor = factor * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        # AdamW's kernel divides by this as it reads the gradient, and writes what it gets.
        self.adamw.grad_scale = 1.0 / factor
        moments_bytes = 2.0 * self.gradients.nbytes
        nbytes = 2.0 * (moments_bytes + self.master.nbytes)
        nbytes += 2.0 * self.gradients.nbytes + self.sums.added_to.nbytes
        nbytes += self.weights.nbytes if self.has_master_copy else 0.0
        with recorder.memory_bound(names.OPTIMIZER_STEP, nbytes):
            self.adamw.step()
            if self.has_master_copy:
                self.weights.copy_(self.master)
            self.sums.added_to.zero_()
        return norm

    def _norm(self) -> torch.Tensor:
        """Return the norm over the grid, in which each element counts once."""
        mesh = self._engine.mesh
        with self._engine.recorder.memory_bound(names.GRADIENT_NORM, self.gradients.nbytes):
            parts = self.gradients.tensor_split((self._n_over_y, self.sums.n_in_vectors))
            over_y, over_x, total = (torch.linalg.vector_norm(part).square() for part in parts)
        is_first = {axis: mesh.coordinate(axis) == 0 for axis in ("x", "y", "z")}
        if is_first["z"] and is_first["x"]:
            total += over_y
        if is_first["z"] and is_first["y"]:
            total += over_x
        for axis in ("x", "y", "z"):
            wait(self._engine.collectives.all_reduce(names.norm_all_reduce(axis), total, axis))
        return total.sqrt()
