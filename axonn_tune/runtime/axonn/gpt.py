"""A decoder-only transformer (GPT, Llama and their kin) on a 4D grid."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.activation import activation
from axonn_tune.runtime.axonn.attention import CausalAttention, RotaryAngles
from axonn_tune.runtime.axonn.embedding import Embedding
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.layer import Layer
from axonn_tune.runtime.axonn.linear import Linear4D
from axonn_tune.runtime.axonn.loss import cross_entropy
from axonn_tune.runtime.axonn.norm import Norm
from axonn_tune.runtime.axonn.weights import Matrix, Vector
from axonn_tune.spec import names
from axonn_tune.spec.blocks import Linear
from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.job import ATTENTIONS
from axonn_tune.spec.model import RECOMPUTES, Model

# GPT-2's (Radford et al., 2019); weights whose output is added to the residual stream get less.
INITIAL_STD = 0.02


class Block(Layer):
    """Attention and MLP, each a branch of the residual stream that begins with a norm."""

    def __init__(
        self,
        engine: Engine,
        spec: Model,
        attention: str,
        recompute: str,
        rotary: RotaryAngles | None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.is_gated = spec.gated_mlp
        self.is_parallel = spec.parallel_block
        self.recomputes_inputs = recompute == "selective"
        qkv, proj, up, down = spec.block_linears
        self.norm1 = Norm(engine, spec.hidden_size, spec.norm, "norm1")
        self.qkv = self._linear(qkv)
        self.attention = CausalAttention(
            engine,
            spec.head_dim,
            spec.n_heads // spec.n_kv_heads,
            fused=attention == "flash",
            rotary=rotary,
            recompute=self.recomputes_inputs,
        )
        self.proj = self._linear(proj)
        self.norm2 = Norm(engine, spec.hidden_size, spec.norm, "norm2")
        self.up = self._linear(up, n_out_parts=2 if spec.gated_mlp else 1)
        self.down = self._linear(down, ends_block=True)

    def _linear(self, linear: Linear, n_out_parts: int = 1, ends_block: bool = False) -> Linear4D:
        return Linear4D(
            self.engine,
            linear.n_in,
            linear.n_out,
            linear.name,
            bias=linear.bias,
            transposed=linear.transposed,
            n_out_parts=n_out_parts,
            ends_block=ends_block,
        )

    def forward(self, stream: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Map the residual stream, shape (t, d / G_x), to the stream behind the block."""
        engine = self.engine
        before, branch = fork(engine, stream, "residual1")
        attended = self._attention_branch(branch, seq_len)
        if self.is_parallel:
            before, branch = fork(engine, before, "residual2")
            stream = join(engine, before, attended, "residual1")
        else:
            stream = join(engine, before, attended, "residual1")
            stream, branch = fork(engine, stream, "residual2")
        return join(engine, stream, self._mlp_branch(branch), "residual2")

    def _attention_branch(self, branch: torch.Tensor, seq_len: int) -> torch.Tensor:
        normed, recipe = self.norm1(branch)
        qkv = self.qkv(normed, recipe if self.recomputes_inputs else None)
        return self.proj(self.attention(qkv, seq_len))

    def _mlp_branch(self, branch: torch.Tensor) -> torch.Tensor:
        normed, recipe = self.norm2(branch)
        hidden = self.up(normed, recipe if self.recomputes_inputs else None)
        activated, recipe = activation(self.engine, hidden, self.is_gated)
        return self.down(activated, recipe if self.recomputes_inputs else None)


def fork(engine: Engine, stream: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual stream twice, for itself and for a branch, shape (t, d / G_x).

    The backward pass adds their gradients; `name` is that of the addition in the record. Without a
    record, autograd itself adds them.
    """
    if not engine.recorder.active:
        return stream, stream
    return _Fork.apply(stream, engine, name)


def join(engine: Engine, stream: torch.Tensor, branch: torch.Tensor, name: str) -> torch.Tensor:
    """Return the sum of the residual stream and a branch, shape (t, d / G_x)."""
    if not engine.recorder.active:
        return stream + branch
    with engine.recorder.memory_bound(names.of_layer(engine.chain, name), 3.0 * stream.nbytes):
        return stream + branch


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: torch.Tensor, engine: Engine, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.engine, ctx.name = engine, name
        return stream.view_as(stream), stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_stream, d_branch = gradients
        name = names.of_layer(names.BACKWARD, ctx.name)
        with ctx.engine.recorder.memory_bound(name, 3.0 * d_stream.nbytes):
            return d_stream + d_branch, None, None


class GPT(Layer):
    """A whole model.

    Parameters
    ----------
    engine : Engine
    spec : Model
        The sizes of the model and the variants of its layers.
    attention : str
        ``"flash"`` (torch's fused kernel) or ``"unfused"``.
    recompute : str
        What the backward pass forms again: ``"none"``, ``"selective"`` (norms, the activation, the
        scores of unfused attention) or ``"full"`` (each block from its input).
    seed : int
        Seed of the initial weights, which are the same on every grid.

    Raises
    ------
    InputError
        A choice does not exist, or the sizes do not divide over the grid.
    """

    def __init__(
        self,
        engine: Engine,
        spec: Model,
        *,
        attention: str = "flash",
        recompute: str = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_choice("job", "attention", attention, ATTENTIONS)
        require_choice("job", "recompute", recompute, RECOMPUTES)
        self.engine = engine
        self.spec = spec
        self.recompute = recompute
        n_positions = spec.seq_len if spec.position == "learned" else 0
        self.embedding = Embedding(engine, spec.padded_vocab_size, spec.hidden_size, n_positions)
        rotary = RotaryAngles(spec.head_dim) if spec.position == "rotary" else None
        self.blocks = nn.ModuleList(
            Block(engine, spec, attention, recompute, rotary) for _ in range(spec.n_layers)
        )
        self.norm = Norm(engine, spec.hidden_size, spec.norm, "norm")
        self.head = Linear4D(
            engine,
            spec.head.n_in,
            spec.head.n_out,
            "head",
            bias=False,
            matrix=self.embedding.matrix if spec.tied_embeddings else None,
        )
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        mesh = self.engine.mesh
        for name, module in self.named_modules():
            owner = name.split(".")[-2] if "." in name else ""
            if isinstance(module, Matrix):
                into_stream = owner in ("proj", "down")
                std = INITIAL_STD / (math.sqrt(2 * self.spec.n_layers) if into_stream else 1.0)
                module.layout.initialise(module.shard.data, mesh, name, seed, std)
            elif isinstance(module, Vector) and name.endswith("position"):
                module.layout.initialise(module.shard.data, mesh, name, seed, INITIAL_STD)
            elif isinstance(module, Vector):
                module.shard.data.fill_(1.0 if name.endswith("gain") else 0.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rank's part of the vocabulary.

        Parameters
        ----------
        tokens : int, shape (b, s)
            The rank's share of the batch, the same on all ranks along X and Y.

        Returns
        -------
        shape (b, s, v / G_y)
        """
        seq_len = tokens.shape[1]
        if self.spec.position == "learned" and seq_len > self.spec.seq_len:
            raise InputError(
                f"sequence length is {seq_len}; allowed: at most {self.spec.seq_len}, the learned "
                f"positions of model '{self.spec.name}'"
            )
        stream = self.embedding(tokens)
        for block in self.blocks:
            self._tell_of(stream, "block", block.qkv)
            stream = self._run_block(block, stream, seq_len)
        if not self.spec.tied_embeddings:
            self._tell_of(stream, "head", self.head)
        normed, _ = self.norm(stream)
        return self.head(normed).unflatten(0, tokens.shape)

    def _tell_of(self, stream: torch.Tensor, unit: str, first: nn.Module) -> None:
        """Let the backward pass tell when it has formed the gradients of the unit behind `stream`.

        `first` is the layer of the unit's first matrix.
        """
        tell = self.engine.unit_formed
        if tell is not None and stream.requires_grad:
            stream.register_hook(lambda _: tell(unit, first.matrix))

    def _run_block(self, block: nn.Module, stream: torch.Tensor, seq_len: int) -> torch.Tensor:
        if self.recompute != "full" or not torch.is_grad_enabled():
            return block(stream, seq_len)
        return checkpoint(
            block,
            stream,
            seq_len,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self.engine.recompute_contexts,
        )

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, n_counted: float) -> torch.Tensor:
        """Return the rank's share of the mean loss over `n_counted` tokens; see `cross_entropy`."""
        return cross_entropy(self.engine, self(tokens), targets, n_counted)
