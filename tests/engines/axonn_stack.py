"""Transformer blocks of AxoNN's linear layers; import this where CUDA calls have been replaced."""

import torch
import torch.nn.functional as F
from axonn.intra_layer import Linear, overlap_all_gathers_for_checkpointed_forward
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A block as AxoNN's users build it: the projection and the second MLP layer are transposed.

    AxoNN has no norm for a split hidden dimension. A gain stands for it, so that the block has the
    parameters of a norm.
    """

    def __init__(self, spec, grid, keep_gathered_weights):
        super().__init__()
        self.n_heads = spec.n_heads // grid.size("y")
        self.keep = keep_gathered_weights
        self.gains = nn.ParameterList(
            torch.ones(spec.hidden_size // grid.size("x")) for _ in range(2)
        )
        for linear in spec.block_linears:
            layer = Linear(
                linear.n_in,
                linear.n_out,
                transpose=linear.transposed,
                bias=linear.bias,
                expert_mode=True,
            )
            self.add_module(linear.name, layer)

    def forward(self, stream):
        """Map the residual stream, shape (b, s, d / G_x)."""
        qkv = self._apply_linear("qkv", stream * self.gains[0])
        stream = stream + self._apply_linear("proj", self._attention(qkv))
        hidden = self._apply_linear("up", stream * self.gains[1])
        return stream + self._apply_linear("down", F.gelu(hidden))

    def _apply_linear(self, name, input):
        return getattr(self, name)(input, cache_weights_in_all_gather=self.keep)

    def _attention(self, qkv):
        b, s, _ = qkv.shape
        heads = qkv.view(b, s, self.n_heads, 3, -1).permute(3, 0, 2, 1, 4)
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """The blocks of a model without its embedding and its head.

    `ahead_in_recompute` gathers weights ahead within each block that is formed again, as
    Megatron-AxoNN's checkpoint function does.
    """

    def __init__(self, spec, grid, recompute, keep_gathered_weights, ahead_in_recompute):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(spec, grid, keep_gathered_weights) for _ in range(spec.n_layers)
        )
        self.recompute = recompute
        self.ahead_in_recompute = ahead_in_recompute

    def forward(self, stream):
        for block in self.blocks:
            stream = self._recomputed(block, stream) if self.recompute == "full" else block(stream)
        return stream

    def _recomputed(self, block, stream):
        # AxoNN needs the reentrant kind: the other one hands detached copies of weights to the
        # backward pass, and AxoNN then leaves gradients on the copies.
        return checkpoint(self._run, block, stream, use_reentrant=True)

    def _run(self, block, stream):
        is_formed_again = torch.is_grad_enabled()
        if not (is_formed_again and self.ahead_in_recompute):
            return block(stream)
        with overlap_all_gathers_for_checkpointed_forward(block):
            return block(stream)
