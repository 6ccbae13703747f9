"""The same transformers in plain torch on one process: what the runtime must agree with."""

import math
import zlib

import torch
import torch.nn.functional as F


def whole_parameters(layouts):
    """Random values for every parameter, by name; the same on every rank and grid."""
    whole = {}
    for name, layout in layouts.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = 0.1 * torch.randn(layout.shape, generator=generator)
        whole[name] = 1.0 + values if name.endswith("gain") else values
    return whole


class Reference:
    """Logits of a model (`spec.Model`) from whole parameters."""

    def __init__(self, spec, whole):
        self.spec = spec
        self.parameters = {n: p.clone().requires_grad_() for n, p in whole.items()}

    def logits(self, tokens):
        p, spec = self.parameters, self.spec
        stream = F.embedding(tokens, p["embedding.matrix"])
        if spec.position == "learned":
            stream = stream + p["embedding.position"][: tokens.shape[1]]
        for layer in range(spec.n_layers):
            name = f"blocks.{layer}"
            attended = self._attention(name, self._norm(f"{name}.norm1", stream))
            if spec.parallel_block:
                stream = stream + attended + self._mlp(name, self._norm(f"{name}.norm2", stream))
            else:
                stream = stream + attended
                stream = stream + self._mlp(name, self._norm(f"{name}.norm2", stream))
        stream = self._norm("norm", stream)
        if spec.tied_embeddings:
            return stream @ p["embedding.matrix"].T
        return stream @ p["head.matrix"].flatten(1)

    def loss(self, tokens, targets):
        """Mean over the targets that count (not -1)."""
        return F.cross_entropy(
            self.logits(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1
        )

    def _norm(self, name, x):
        gain = self.parameters[f"{name}.gain"]
        if self.spec.norm == "rms":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain
        return F.layer_norm(x, gain.shape, gain, self.parameters[f"{name}.shift"], 1e-5)

    def _linear(self, name, x):
        y = x @ self.parameters[f"{name}.matrix"].flatten(1)
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias.flatten()

    def _attention(self, name, x):
        spec = self.spec
        n_queries = spec.n_heads // spec.n_kv_heads
        qkv = self._linear(f"{name}.qkv", x)
        groups = qkv.view(*x.shape[:2], spec.n_kv_heads, n_queries + 2, spec.head_dim)
        q, k, v = (
            groups[..., :n_queries, :],
            groups[..., n_queries, :],
            groups[..., n_queries + 1, :],
        )
        q = q.flatten(2, 3)
        k, v = (t.repeat_interleave(n_queries, dim=2) for t in (k, v))
        if spec.position == "rotary":
            q, k = rotated(q), rotated(k)
        scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(spec.head_dim)
        s = x.shape[1]
        scores = scores + torch.full((s, s), -math.inf).triu(1)
        out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)
        return self._linear(f"{name}.proj", out.flatten(2))

    def _mlp(self, name, x):
        hidden = self._linear(f"{name}.up", x)
        if self.spec.gated_mlp:
            gate, value = hidden.chunk(2, -1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return self._linear(f"{name}.down", hidden)


def rotated(x):
    """Pairs (i, i + d/2) of each head turned by position * 10000^(-2i/d)."""
    s, d = x.shape[1], x.shape[3]
    turned = torch.empty_like(x)
    for i in range(d // 2):
        angle = torch.arange(s, dtype=torch.float64) * 10000.0 ** (-2 * i / d)
        cos, sin = (t.float()[None, :, None] for t in (angle.cos(), angle.sin()))
        first, second = x[..., i], x[..., i + d // 2]
        turned[..., i] = first * cos - second * sin
        turned[..., i + d // 2] = first * sin + second * cos
    return turned
