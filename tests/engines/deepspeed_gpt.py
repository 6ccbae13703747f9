"""A GPT of plain torch modules, as DeepSpeed's users have it: DeepSpeed sees each of its layers."""

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """The linear layers of a model's block with its two norms, each a module of its own.

    The activation, GELU, is a module if `has_activation` says so.
    """

    def __init__(self, spec, has_activation):
        super().__init__()
        self.n_heads = spec.n_heads
        self.is_gated = spec.gated_mlp
        self.norms = nn.ModuleList(norm_of(spec) for _ in range(2))
        self.linears = nn.ModuleDict(
            {each.name: nn.Linear(each.n_in, each.n_out, each.bias) for each in spec.block_linears}
        )
        self.activation = nn.GELU() if has_activation else F.gelu

    def forward(self, stream):
        """Map the residual stream, shape (b, s, d)."""
        qkv = self.linears["qkv"](self.norms[0](stream))
        stream = stream + self.linears["proj"](self._attention(qkv))
        hidden = self.linears["up"](self.norms[1](stream))
        if self.is_gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = self.activation(hidden)
        return stream + self.linears["down"](hidden)

    def _attention(self, qkv):
        b, s, _ = qkv.shape
        heads = qkv.view(b, s, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """A whole model without positions.

    A head that shares the embedding's weight is no module, as in Megatron-DeepSpeed.
    """

    def __init__(self, spec, recompute, reentrant=False, has_activation=False):
        super().__init__()
        self.recompute, self.reentrant = recompute, reentrant
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec, has_activation) for _ in range(spec.n_layers))
        self.norm = norm_of(spec)
        if not spec.tied_embeddings:
            self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, ids):
        """Return the loss of tokens, shape (b, s), that stand for their own successors."""
        stream = self.embedding(ids)
        for block in self.blocks:
            if self.recompute == "full":
                stream = checkpoint(block, stream, use_reentrant=self.reentrant)
            else:
                stream = block(stream)
        logits = self._logits(self.norm(stream))
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    def _logits(self, stream):
        if hasattr(self, "head"):
            return self.head(stream)
        return F.linear(stream, self.embedding.weight)


def norm_of(spec):
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    return kinds[spec.norm](spec.hidden_size)
