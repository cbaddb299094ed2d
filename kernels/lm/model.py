"""The decoder: RMSNorm before each part, rotary positions, causal attention, SwiGLU, an output matrix of its own.

Parameters stay in float32; a layer casts them to the type that it computes in, so that FSDP's own cast, a GPU's
bfloat16 and a float64 reference need no other code. The vocabulary is padded to a multiple of 8 inside the two products
that have it, and the embedding is a product with one-hot rows: 65,536 tokens of 258 kinds would add to the same rows
again and again, in an order that differs from run to run.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from kernels.lm.config import Config, Model

Tensor = torch.Tensor
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
IGNORED = -100
"""A label that counts for nothing."""


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times gain [D]; computed in float32 at least, given back in x's type."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * gain.to(wide.dtype)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [B, S, H, d]: pairs (2i, 2i + 1) of columns turned by cos, sin [S, d / 2]."""
    first, second = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        d, f = sizes.dim, sizes.inner
        self.heads, self.eps = sizes.heads, sizes.eps
        self.attention_norm, self.ffn_norm = (nn.Parameter(torch.empty(d)) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Parameter(torch.empty(d, d)) for _ in range(4))
        self.gate, self.up, self.down = (nn.Parameter(torch.empty(*shape)) for shape in ((f, d), (f, d), (d, f)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, D] and the tables of rotary positions [S, d / 2]; gives [B, S, D]."""

        def product(a: Tensor, weights: Tensor) -> Tensor:
            return functional.linear(a, weights.to(x.dtype))

        h = rms_norm(x, self.attention_norm, self.eps)
        q, k, v = (product(h, weights).unflatten(-1, (self.heads, -1)) for weights in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + product(mixed.transpose(1, 2).flatten(2), self.out)
        h = rms_norm(x, self.ffn_norm, self.eps)
        return x + product(functional.silu(product(h, self.gate)) * product(h, self.up), self.down)


class Head(nn.Module):
    """The last norm and the output matrix."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.eps, self.vocabulary = sizes.eps, sizes.vocabulary
        self.norm = nn.Parameter(torch.empty(sizes.dim))
        self.output = nn.Parameter(torch.empty(sizes.vocabulary, sizes.dim))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of x [B, S, D]; with labels [B, S] the loss of each token in nats, [B, S], 0 where
        ignored."""
        weights = functional.pad(self.output.to(x.dtype), (0, 0, 0, -self.vocabulary % 8))
        logits = functional.linear(rms_norm(x, self.norm, self.eps), weights)[..., : self.vocabulary]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if labels is None:
            return logits
        flat = logits.flatten(0, 1), labels.flatten()
        return functional.cross_entropy(*flat, reduction="none", ignore_index=IGNORED).view_as(labels)


class Embedding(nn.Module):
    """Rows of a table, by a product with one-hot rows."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(sizes.vocabulary, sizes.dim))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids [B, S], int64; gives [B, S, D] of `dtype`."""
        count = self.table.shape[0]
        padded = count + -count % 8
        return functional.one_hot(ids, padded).to(dtype) @ functional.pad(
            self.table.to(dtype), (0, 0, 0, padded - count)
        )


class Decoder(nn.Module):
    """The language model. `precision` names the type that products and activations have."""

    def __init__(self, sizes: Model, precision: str = "float32") -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, DTYPES[precision]
        self.embedding = Embedding(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = Head(sizes)

    def forward(self, ids: Tensor, labels: Tensor | None = None, each: bool = False) -> Tensor:
        """ids [B, S] int64. Logits [B, S, V]; with labels [B, S] the mean loss in nats over those that count.

        With `each` the loss of each token, [B, S], 0 where it does not count.
        """
        cos, sin = positions(self.sizes, ids.shape[1], self.dtype, ids.device)
        x = self.embedding(ids, self.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        found = self.head(x, labels)
        return found if labels is None or each else found.sum() / (labels != IGNORED).sum()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Truncated normal of deviation 1 / sqrt(columns), gains 1; drawn on the CPU, so the same everywhere."""
        rng = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            if p.ndim < 2:
                p.fill_(1.0)
                continue
            std = 1.0 / math.sqrt(p.shape[1])
            drawn = torch.empty(p.shape, dtype=torch.float32)
            p.copy_(nn.init.trunc_normal_(drawn, std=std, a=-3 * std, b=3 * std, generator=rng))

    def compile_layers(self) -> None:
        """Compile layer by layer: one compilation serves all layers, and the whole model starts in seconds."""
        for part in (self.embedding, *self.blocks, self.head):
            part.compile(dynamic=False)


def positions(sizes: Model, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary positions, [S, d / 2], in float32 at least."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    half = sizes.dim // sizes.heads // 2
    rates = sizes.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * rates
    return angles.cos().to(wide), angles.sin().to(wide)


def build(config: Config, device: torch.device | str) -> Decoder:
    """The configuration's model with its initial weights, float32 (float64 where that is the precision), on
    `device`."""
    model = Decoder(config.model, config.precision)
    if config.precision == "float64":
        model.double()
    model.initialise(config.seed)
    return model.to(device)
