"""Faults that people make, planted at one step of a system; every later step is computed from the wrong values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.compare.systems import Tensor

Change = Callable[[Tensor, "dict[str, Tensor]"], Tensor]


@dataclass(frozen=True)
class Fault:
    """What is done to step `step` of `system`."""

    name: str
    system: str
    step: str
    change: Change


def _set(value: Tensor, index: object, to: object) -> Tensor:
    changed = value.clone()
    changed[index] = to  # type: ignore[index]
    return changed


def _tail(value: Tensor, to: float) -> Tensor:
    flat = value.clone().reshape(-1)
    flat[-(flat.numel() // 7) :] = to
    return flat.reshape(value.shape)


def _tile(value: Tensor) -> Tensor:
    rows = value.clone().reshape(-1, value.shape[-1])
    rows[:64] *= 1.01
    return rows.reshape(value.shape)


def _quarter(value: Tensor, s: dict[str, Tensor]) -> Tensor:
    part = max(1, s["q"].shape[-1] // 4)
    return s["q"][..., :part] @ s["kt"][..., :part, :]


def _last_tile_twice(value: Tensor, s: dict[str, Tensor]) -> Tensor:
    tile = max(1, s["q"].shape[-1] // 8)
    return value + s["q"][..., -tile:] @ s["kt"][..., -tile:, :]


def _half_sum(value: Tensor, s: dict[str, Tensor]) -> Tensor:
    """An accumulator in float16: rounded after each of the terms."""
    total = torch.zeros_like(value, dtype=torch.float16)
    for k in range(s["probs"].shape[-1]):
        total = (total.float() + s["probs"][..., :, k : k + 1].float() * s["v"][..., k : k + 1, :].float()).half()
    return total.to(value.dtype)


def _middle(value: Tensor) -> Tensor:
    return value.bfloat16().to(value.dtype)


def _normal(value: Tensor, s: dict[str, Tensor], eps: float, correction: int) -> Tensor:
    x = s["x"]
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=correction) + eps)


FAULTS = (
    Fault("dead row", "attention", "qk", lambda x, s: _set(x, (0, 5), 0.0)),
    Fault("one flipped sign", "attention", "qk", lambda x, s: _set(x, (1, 9, 3), -x[1, 9, 3])),
    Fault("one row with its sign flipped", "attention", "pv", lambda x, s: _set(x, (1, 7), -x[1, 7])),
    Fault("transposed", "attention", "qk", lambda x, s: x.mT.contiguous()),
    Fault("permuted heads", "attention", "pv", lambda x, s: x.roll(1, 0)),
    Fault("off by one row", "attention", "pv", lambda x, s: x.roll(1, 1)),
    Fault("row taken from the row before", "attention", "qk", lambda x, s: _set(x, (0, 6), x[0, 5])),
    Fault("stale buffer in one head", "attention", "qk", lambda x, s: _set(x, 1, x[0])),
    Fault("tail not written: zeros", "attention", "pv", lambda x, s: _tail(x, 0.0)),
    Fault("tail not written: garbage denormals", "attention", "pv", lambda x, s: _tail(x, 3e-41)),
    Fault("tail not written: NaN", "attention", "pv", lambda x, s: _tail(x, float("nan"))),
    Fault("all zero", "attention", "pv", lambda x, s: torch.zeros_like(x)),
    Fault("first quarter of K only", "attention", "qk", _quarter),
    Fault("last tile summed twice", "attention", "qk", _last_tile_twice),
    Fault("4% scale", "attention", "scaled", lambda x, s: 1.04 * x),
    Fault("1% scale", "attention", "qk", lambda x, s: 1.01 * x),
    Fault("missing 1/sqrt(d)", "attention", "scaled", lambda x, s: s["qk"].clone()),
    Fault("mask off by one", "attention", "masked", lambda x, s: _unmasked_next(s["scaled"])),
    Fault(
        "softmax over the wrong axis", "attention", "probs", lambda x, s: torch.softmax(s["masked"], -2).nan_to_num()
    ),
    Fault("bf16 in the middle", "attention", "probs", lambda x, s: _middle(x)),
    Fault("fp16 accumulator", "attention", "pv", _half_sum),
    Fault("wrong epsilon", "layernorm", "normal", lambda x, s: _normal(x, s, 1e-3, 0)),
    Fault("wrong epsilon, 1e-6 for 1e-5", "layernorm", "normal", lambda x, s: _normal(x, s, 1e-6, 0)),
    Fault("variance over n - 1", "layernorm", "normal", lambda x, s: _normal(x, s, 1e-5, 1)),
    Fault("one Inf", "layernorm", "weighted", lambda x, s: _set(x, (3, 2), float("inf"))),
    Fault("weight added, not multiplied", "layernorm", "weighted", lambda x, s: s["normal"] + s["weight"]),
    Fault("one element off by 1e-3", "layernorm", "shifted", lambda x, s: _set(x, (2, 4), x[2, 4] + 1e-3)),
    Fault("one column scaled", "layernorm", "weighted", lambda x, s: _set(x, (..., 7), 1.01 * x[..., 7])),
    Fault("a constant added", "attention", "qk", lambda x, s: x + 0.01),
    Fault("one tile of 64 rows scaled", "attention", "pv", lambda x, s: _tile(x)),
    Fault("labels shifted by one", "cross_entropy", "loss", lambda x, s: _shifted_loss(s)),
    Fault("sum for mean", "cross_entropy", "dlogits", lambda x, s: x * len(x)),
    Fault("one-hot term missing", "cross_entropy", "dlogits", lambda x, s: torch.softmax(s["logits"], -1) / len(x)),
    Fault("one token's gradient lost", "cross_entropy", "dw", lambda x, s: x - s["dlogits"][3:4].T @ s["h"][3:4]),
    Fault("bias correction missing", "adam", "t1.update", lambda x, s: s["t1.m"] / (s["t1.v"].sqrt() + 1e-8)),
    Fault("epsilon inside the root", "adam", "t2.update", lambda x, s: _eps_inside(s, 2)),
    Fault("stale moment", "adam", "t2.m", lambda x, s: s["t1.m"].clone()),
    Fault("learning rate 1% off", "adam", "t3.p", lambda x, s: s["t2.p"] - 1.01e-3 * s["t3.update"]),
)


def _unmasked_next(scaled: Tensor) -> Tensor:
    n = scaled.shape[-1]
    return scaled.masked_fill(torch.ones(n, n, dtype=torch.bool, device=scaled.device).triu(2), -torch.inf)


def _shifted_loss(s: dict[str, Tensor]) -> Tensor:
    return s["lse"] - s["logits"].gather(-1, s["labels"].roll(1)[:, None])[:, 0]


def _eps_inside(s: dict[str, Tensor], t: int) -> Tensor:
    return (s[f"t{t}.m"] / (1 - 0.9**t)) / (s[f"t{t}.v"] / (1 - 0.999**t) + 1e-8).sqrt()
