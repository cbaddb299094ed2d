"""Correct programs without end, and broken ones: how often does the check flag right code, and what does it find?

    python -m tools.correct_programs 2000 [--seed S] [--storage bfloat16] [--jobs N] [--faults] [--out FILE]
    python -m tools.correct_programs --show SEED [--reduce] [--storage bfloat16] [--faults]

A program is a list of instructions over named values. The reference is made of it in PyTorch, with
:func:`whywrong.step` for the named ones. The port runs the same list by other means, in the precision that it
declares: in NumPy with orders of sums, cuts of factors and formulas of its own; by PyTorch in float32; or eagerly on
narrow tensors. Steps that it keeps are rounded to storage; what reads them has them as stored or from registers, and
what it does not keep stays in float32. The same port in float64, without any rounding, has to agree with the reference
(:meth:`Case.differs`).
"""

# ruff: noqa: N801, N805, N812 - classes named _ hold the functions of one operation
from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import whywrong
from whywrong.comparing.precision import UNIT_ROUNDOFF, dtype_of, stored
from whywrong.recording.golden import GRADIENT, Golden

Array = np.ndarray
Tensor = torch.Tensor
STORAGES = ("float32", "bfloat16", "float16")
GRADES = (1.0, 4.0, 32.0, 1000.0)
"""How large a fault is: the RMS of the error that it adds, in round-offs of the storage times the step's RMS."""
LARGEST = {"float16": 2e4, "bfloat16": 1e15, "float32": 1e15}
ELEMENTS = 1 << 14
EXACT = "float64"


# Arithmetic of a port


def narrowed(x: Array, storage: str) -> Array:
    """Rounded to a storage format and back; float64 is no rounding."""
    if storage in (EXACT, str(x.dtype)) or x.dtype.kind != "f":
        return x
    return torch.from_numpy(np.array(x)).to(dtype_of(storage)).to(dtype_of(str(x.dtype))).numpy()


def tf32(x: Array, truncate: bool) -> Array:
    bits = x.astype(np.float32).view(np.int32) + (0 if truncate else 0x1000)
    return (bits & ~0x1FFF).view(np.float32)


def by_torch(function: Callable[[Tensor], Tensor]) -> Callable[[Array], Array]:
    return lambda x: function(torch.from_numpy(np.array(x))).numpy()


class Ways:
    """The arithmetic of one instruction of a port: how it sums, divides, calls functions; `exact` is float64."""

    def __init__(self, style: Mapping[str, Any], dtype: Any, products: str = "ieee") -> None:
        self.style, self.dtype, self.products = style, dtype, products

    def sum(self, x: Array, axis: int = -1, keepdims: bool = False) -> Array:
        """A sum in float32, in the order of the style."""
        how = self.style["sum"]
        if how == "pairwise":
            return np.asarray(x.sum(axis, keepdims=keepdims))
        if how == "wide":
            return np.asarray(x.astype(np.float64).sum(axis, keepdims=keepdims)).astype(x.dtype)
        x = np.moveaxis(x, axis, 0)
        x = x[::-1] if how == "reversed" else x
        if how == "blocked":
            parts = [np.add.accumulate(x[i : i + 32], 0)[-1] for i in range(0, len(x), 32)]
            x = np.stack(parts) if parts else x
        total = np.add.accumulate(x, 0)[-1]
        return np.asarray(np.expand_dims(total, axis) if keepdims else total)

    def mean(self, x: Array, axis: int = -1, keepdims: bool = False) -> Array:
        return self.div(self.sum(x, axis, keepdims), x.dtype.type(x.shape[axis]))

    def cut(self, x: Array) -> list[Array]:
        """A factor as the products' format has it: one part, or two; as it is where that would underflow."""
        small = np.abs(x[x != 0]).min(initial=1.0) < 2.0**-100
        if self.dtype == np.float64 or self.products == "ieee" or small:
            return [x]
        if self.products in ("tf32", "tf32x3"):
            one = partial(tf32, truncate=self.style["truncate"])
        else:
            one = partial(narrowed, storage="bfloat16")
        high = one(x)
        return [high, one(x - high)] if self.products in ("tf32x3", "bfloat16x2") else [high]

    def mm(self, a: Array, b: Array) -> Array:
        """A product of matrices, its factors cut and its sum in float32."""
        (a, *a_low), (b, *b_low) = self.cut(a), self.cut(b)
        low = [self._mm(a, x) for x in b_low] + [self._mm(x, b) for x in a_low]
        if self.products == "bfloat16x2":  # all digits of both; tf32x3 leaves the product of the low parts out
            low += [self._mm(x, z) for x in a_low for z in b_low]
        return self._mm(a, b) + sum(low[1:], low[0]) if low else self._mm(a, b)

    def _mm(self, a: Array, b: Array) -> Array:
        how, k = self.style["mm"], a.shape[-1]
        if how == "blas" or k == 1:
            return a @ b
        if how == "wide":
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype)
        tile = {"tiles": 16, "reversed": 32, "split": -(-k // 3)}[how]
        parts = [a[..., s : s + tile] @ b[..., s : s + tile, :] for s in range(0, k, tile)]
        total = parts.pop() if how == "reversed" else parts.pop(0)
        for part in reversed(parts) if how == "reversed" else parts:
            total = total + part
        return total

    def exp(self, x: Array) -> Array:
        if self.style["exp"] == "exp2":
            return np.exp2(x * x.dtype.type(1.4426950408889634))
        return by_torch(torch.exp)(x)

    def div(self, a: Array, b: Array) -> Array:
        return a * (b.dtype.type(1.0) / b) if self.style["div"] == "reciprocal" else a / b

    def rsqrt(self, x: Array) -> Array:
        return by_torch(torch.rsqrt)(x) if self.style["rsqrt"] == "rsqrt" else 1 / np.sqrt(x)

    def fma(self, a: Array, b: Array, c: Array) -> Array:
        if self.style["fma"]:
            return (a.astype(np.float64) * b.astype(np.float64) + c).astype(a.dtype)
        return a * b + c

    def sigmoid(self, x: Array) -> Array:
        if self.style["sigmoid"] == "tanh" and x.size and x.min() > -1.5:  # further down it cancels
            return 0.5 * (1 + by_torch(torch.tanh)(0.5 * x))
        return (
            by_torch(torch.sigmoid)(x)
            if self.style["sigmoid"] == "library"
            else self.div(np.ones_like(x), 1 + self.exp(-x))
        )

    def softmax(self, x: Array, axis: int = -1) -> Array:
        if self.style["softmax"] == "online":
            return np.moveaxis(self._online(np.moveaxis(x, axis, -1)), -1, axis)
        e = self.exp(x - x.max(axis, keepdims=True))
        return self.div(e, self.sum(e, axis, True))

    def _online(self, x: Array) -> Array:
        top, total = np.full_like(x[..., :1], -np.inf), np.zeros_like(x[..., :1])
        for s in range(0, x.shape[-1], 16):
            part = x[..., s : s + 16]
            new = np.maximum(top, part.max(-1, keepdims=True))
            base = np.where(np.isinf(new), 0, new)
            total = total * self.exp(top - base) + self.sum(self.exp(part - base), -1, True)
            top = new
        return self.div(self.exp(x - top), total)

    def moments(self, x: Array, axis: int = -1, ddof: int = 0) -> tuple[Array, Array]:
        """Mean and variance along an axis, which is kept; in one pass only where that does not cancel."""
        how, n = self.style["var"], x.shape[axis]
        if how == "updates":
            x = np.moveaxis(x, axis, 0)
            mean, squares = np.zeros_like(x[0]), np.zeros_like(x[0])
            for i, one in enumerate(x, 1):
                off = one - mean
                mean = mean + off / x.dtype.type(i)
                squares = squares + off * (one - mean)
            return np.expand_dims(mean, axis), np.expand_dims(squares / x.dtype.type(max(1, n - ddof)), axis)
        mean = self.mean(x, axis, True)
        var = self.sum(np.square(x - mean), axis, True) / x.dtype.type(max(1, n - ddof))
        if how == "one pass" and ddof == 0 and n > 1 and (np.square(mean) < var).all():
            return mean, self.mean(np.square(x), axis, True) - np.square(mean)
        return mean, var


STYLES: dict[str, tuple[Any, ...]] = {
    "sum": ("pairwise", "sequential", "reversed", "blocked", "wide"),
    "mm": ("blas", "tiles", "reversed", "split", "wide"),
    "exp": ("exp", "exp2"),
    "div": ("division", "reciprocal"),
    "rsqrt": ("rsqrt", "1/sqrt"),
    "fma": (False, True),
    "sigmoid": ("formula", "library", "tanh"),
    "softmax": ("two passes", "online"),
    "var": ("two passes", "one pass", "updates"),
    "truncate": (False, True),
    "form": (0, 1),
}
FIRST = {name: choices[0] for name, choices in STYLES.items()}


# Operations: a reference in PyTorch, a port, for some a backward by hand


@dataclass(frozen=True)
class Operation:
    """`reference(*tensors, **params)`, `port(ways, *arrays, **params)`, `backward(ways, dy, y, *arrays, **params)`.

    `domain(*tensors)` says where the port is as good as the reference. `masked` operations take -inf too.
    """

    reference: Callable[..., Tensor]
    port: Callable[..., Array]
    draw: Callable[[Draft], tuple[list[str], dict[str, Any]] | None]
    backward: Callable[..., tuple[Any, ...]] | None = None
    domain: Callable[..., Any] = lambda *tensors: True
    masked: bool = False
    weight: int = 2


def alone(d: Draft) -> Any:
    return [d.pick()], {}


def summed_to(w: Ways, g: Array, shape: tuple[int, ...]) -> Array:
    """A gradient of what was broadcast."""
    while g.ndim > len(shape):
        g = w.sum(g, 0)
    for axis, n in enumerate(shape):
        if n == 1 and g.shape[axis] > 1:
            g = w.sum(g, axis, True)
    return g.reshape(shape)


def below(limit: float) -> Callable[..., bool]:
    return lambda *tensors: all(bool((x.abs() < limit).all()) for x in tensors)


def unary(reference: Any, port: Any, slope: Any = None, domain: Any = None, **more: Any) -> Operation:
    """`slope(w, x, y)` is the derivative, from what was read and what was given."""
    backward = None if slope is None else (lambda w, dy, y, x: (dy * slope(w, x, y),))
    return Operation(reference, port, alone, backward, domain or (lambda x: True), **more)


def phi(w: Ways, x: Array) -> Array:
    """The normal distribution function; erfc does not cancel where 1 + erf does."""
    z = x * x.dtype.type(0.5**0.5)
    return 0.5 * by_torch(torch.erfc)(-z) if w.style["form"] else 0.5 * (1 + by_torch(torch.erf)(z))


def gelu_slope(w: Ways, x: Array, y: Array) -> Array:
    return phi(w, x) + x * w.exp(-0.5 * np.square(x)) * x.dtype.type((2 * math.pi) ** -0.5)


def gelu_tanh(w: Ways, x: Array) -> Array:
    inner = x.dtype.type((2 / math.pi) ** 0.5) * (x + x.dtype.type(0.044715) * x * x * x)
    return x * w.sigmoid(2 * inner) if w.style["form"] else 0.5 * x * (1 + by_torch(torch.tanh)(inner))


def softplus(w: Ways, x: Array) -> Array:
    if w.style["form"]:
        return np.maximum(x, 0) + by_torch(torch.log1p)(w.exp(-np.abs(x)))
    return by_torch(torch.log1p)(w.exp(x))


def silu_slope(w: Ways, x: Array, y: Array) -> Array:
    s = w.sigmoid(x)
    return s * (1 + x * (1 - s))


def positive(x: Tensor) -> bool:
    return bool((x > 1e-3).all())


OPERATIONS: dict[str, Operation] = {
    "exp": unary(torch.exp, Ways.exp, lambda w, x, y: y, lambda x: bool((x.abs() < 9).all())),
    "tanh": unary(torch.tanh, lambda w, x: by_torch(torch.tanh)(x), lambda w, x, y: 1 - y * y),
    "sigmoid": unary(torch.sigmoid, Ways.sigmoid, lambda w, x, y: y * (1 - y), below(60)),
    "silu": unary(F.silu, lambda w, x: x * w.sigmoid(x), silu_slope, below(60)),
    "gelu": unary(F.gelu, lambda w, x: x * phi(w, x), gelu_slope, below(3)),
    "gelu_tanh": unary(partial(F.gelu, approximate="tanh"), gelu_tanh, None, below(3)),
    "relu": unary(torch.relu, lambda w, x: np.maximum(x, 0), lambda w, x, y: x > 0),
    "abs": unary(torch.abs, lambda w, x: np.abs(x), lambda w, x, y: np.sign(x), weight=1),
    "neg": unary(torch.neg, lambda w, x: -x, lambda w, x, y: x.dtype.type(-1), weight=1),
    "square": unary(torch.square, lambda w, x: x * x, lambda w, x, y: 2 * x, below(100)),
    "sin": unary(torch.sin, lambda w, x: by_torch(torch.sin)(x), lambda w, x, y: by_torch(torch.cos)(x), below(100)),
    "erf": unary(torch.erf, lambda w, x: by_torch(torch.erf)(x), weight=1),
    "softplus": unary(F.softplus, softplus, lambda w, x, y: w.sigmoid(x), below(15)),
    "log": unary(torch.log, lambda w, x: by_torch(torch.log)(x), lambda w, x, y: 1 / x, positive, weight=4),
    "sqrt": unary(torch.sqrt, lambda w, x: np.sqrt(x), lambda w, x, y: 0.5 / y, positive, weight=4),
    "rsqrt": unary(torch.rsqrt, Ways.rsqrt, lambda w, x, y: -0.5 * y * y * y, positive, weight=4),
    "reciprocal": unary(lambda x: 1 / x, lambda w, x: 1 / x, lambda w, x, y: -y * y, positive, weight=3),
    "expm1": unary(torch.expm1, lambda w, x: by_torch(torch.expm1)(x), lambda w, x, y: y + 1, below(9), weight=1),
    "round": unary(lambda x: torch.round(x * 4) / 4, lambda w, x: np.round(x * 4) / 4, domain=below(1e4), weight=1),
}


def operation(name: str, **settings: Any) -> Callable[[type], type]:
    """A class with reference, port, draw and perhaps backward becomes an operation."""

    def add(cls: type) -> type:
        OPERATIONS[name] = Operation(cls.reference, cls.port, cls.draw, getattr(cls, "backward", None), **settings)
        return cls

    return add


def scaled(d: Draft) -> Any:
    return [d.pick()], {"number": d.source.choice((0.1, 1 / 3, -0.7, 1.5, 2.0, 0.125, 3.14159))}


@operation("scale")
class _:
    reference = staticmethod(lambda x, number: x * number)
    port = staticmethod(
        lambda w, x, number: w.div(x, x.dtype.type(1 / number)) if w.style["form"] else x * x.dtype.type(number)
    )
    draw = scaled
    backward = staticmethod(lambda w, dy, y, x, number: (dy * x.dtype.type(number),))


@operation("add_number", weight=1)
class _:
    reference = staticmethod(lambda x, number: x + number)
    port = staticmethod(lambda w, x, number: x + x.dtype.type(number))
    draw = scaled
    backward = staticmethod(lambda w, dy, y, x, number: (dy,))


def two(d: Draft) -> Any:
    a = d.pick()
    shape = d.shape(a)
    like = [n for n in d.floats() if d.shape(n) == shape]
    if len(like) > 1 and d.source.chance(70):
        return [a, d.source.choice(like)], {}
    row, column = shape[-1:], (*shape[:-1], 1)
    return [a, d.fresh(d.source.choice((shape, row, column)) if shape else ())], {}


def broadcast(gradients: Any) -> Any:
    def backward(w: Ways, dy: Array, y: Array, *args: Array) -> tuple[Any, ...]:
        return tuple(summed_to(w, g, a.shape) for g, a in zip(gradients(dy, *args), args, strict=True))

    return backward


def pair(name: str, reference: Any, port: Any, gradients: Any = None, **settings: Any) -> None:
    OPERATIONS[name] = Operation(reference, port, two, broadcast(gradients) if gradients else None, **settings)


pair("add", torch.add, lambda w, a, b: a + b, lambda dy, a, b: (dy, dy), weight=6)
pair("sub", torch.sub, lambda w, a, b: a - b, lambda dy, a, b: (dy, -dy), weight=4)
pair("mul", torch.mul, lambda w, a, b: a * b, lambda dy, a, b: (dy * b, dy * a), weight=5)
pair("div", torch.div, Ways.div, lambda dy, a, b: (dy / b, -dy * a / b / b), domain=lambda a, b: positive(b.abs()))
pair("maximum", torch.maximum, lambda w, a, b: np.maximum(a, b), weight=1)
pair("where", lambda a, b: torch.where(a > 0.25, a, b), lambda w, a, b: np.where(a > 0.25, a, b), weight=1)


@operation("addcmul")
class _:
    reference = staticmethod(lambda a, b, c: a * b + c)
    port = staticmethod(lambda w, a, b, c: w.fma(*np.broadcast_arrays(a, b, c)))
    backward = staticmethod(broadcast(lambda dy, a, b, c: (dy * b, dy * a, dy)))

    def draw(d):
        (a, b), _ = two(d)
        return [a, b, d.fresh(d.shape(a))], {}


def matrix(d: Draft) -> str | None:
    return d.pick(ndim=2)


@operation("matmul", weight=7, domain=below(1e6))
class _:
    reference = staticmethod(lambda a, b: a @ b)
    port = staticmethod(lambda w, a, b: w.mm(a, b))
    backward = staticmethod(lambda w, dy, y, a, b: (w.mm(dy, b.T), w.mm(a.T, dy)))

    def draw(d):
        if (a := matrix(d)) is None:
            return None
        k = d.shape(a)[1]
        like = [n for n in d.floats(2) if d.shape(n)[0] == k]
        if like and d.source.chance(30):
            return [a, d.source.choice(like)], {}
        return [a, d.fresh((k, d.size()), scale=k**-0.5)], {}


@operation("linear", weight=6, domain=below(1e6))
class _:
    reference = staticmethod(lambda x, weight, bias: F.linear(x, weight, bias))
    port = staticmethod(lambda w, x, weight, bias: w.mm(x, weight.T) + bias)
    backward = staticmethod(lambda w, dy, y, x, weight, bias: (w.mm(dy, weight), w.mm(dy.T, x), w.sum(dy, 0)))

    def draw(d):
        if (x := matrix(d)) is None:
            return None
        k, n = d.shape(x)[1], d.size()
        return [x, d.fresh((n, k), scale=k**-0.5), d.fresh((n,))], {}


@operation("conv1d", domain=below(1e6))
class _:
    reference = staticmethod(lambda x, weight: F.conv1d(x[None], weight, padding=weight.shape[-1] // 2)[0])

    def port(w, x, weight):
        width = weight.shape[-1]
        x = np.pad(x, ((0, 0), (width // 2, width // 2)))
        columns = np.lib.stride_tricks.sliding_window_view(x, width, 1)  # channels, places, width
        return w.mm(
            weight.reshape(len(weight), -1),
            np.ascontiguousarray(columns.transpose(0, 2, 1).reshape(-1, columns.shape[1])),
        )

    def draw(d):
        if (x := matrix(d)) is None:
            return None
        c, width = d.shape(x)[0], d.source.choice((1, 3, 5))
        return [x, d.fresh((d.source.choice((1, 4, 9)), c, width), scale=(c * width) ** -0.5)], {}


def along(d: Draft, **more: Any) -> Any:
    a = d.pick()
    if not d.shape(a):
        return None
    return [a], {"axis": d.source.choice((-1, 0))} | more


def reduced(d: Draft) -> Any:
    return along(d, keep=d.source.chance(40))


def spread(w: Ways, dy: Array, x: Array, axis: int, keep: bool) -> Array:
    return np.broadcast_to(dy if keep else np.expand_dims(dy, axis), x.shape)


def reduction(name: str, reference: Any, port: Any, gradient: Any = None, **settings: Any) -> None:
    def back(w: Ways, dy: Array, y: Array, x: Array, axis: int, keep: bool) -> Any:
        dy, y = (spread(w, z, x, axis, keep) for z in (dy, y))
        return (gradient(w, dy, y, x, axis),)

    OPERATIONS[name] = Operation(
        lambda x, axis, keep: reference(x, axis, keep),
        lambda w, x, axis, keep: np.asarray(port(w, x, axis, keep)),
        reduced,
        back if gradient else None,
        **settings,
    )


def logsumexp(w: Ways, x: Array, axis: int, keep: bool) -> Array:
    top = x.max(axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0).astype(x.dtype)
    out = top + by_torch(torch.log)(w.sum(w.exp(x - top), axis, True))
    return out if keep else out.squeeze(axis)


def variance(w: Ways, x: Array, axis: int, keep: bool) -> Array:
    out = w.moments(x, axis, 0)[1]
    return out if keep else out.squeeze(axis)


reduction("sum", torch.sum, Ways.sum, lambda w, dy, y, x, axis: dy, weight=4)
reduction("mean", torch.mean, Ways.mean, lambda w, dy, y, x, axis: w.div(dy, x.dtype.type(x.shape[axis])), weight=3)
reduction("amax", torch.amax, lambda w, x, axis, keep: x.max(axis, keepdims=keep), masked=True, weight=1)
reduction("logsumexp", torch.logsumexp, logsumexp, lambda w, dy, y, x, axis: dy * w.exp(x - y), masked=True)
reduction(
    "var", lambda x, axis, keep: x.var(axis, correction=0, keepdim=keep), variance,
    lambda w, dy, y, x, axis: w.div(2 * dy * (x - w.mean(x, axis, True)), x.dtype.type(x.shape[axis])),
)  # fmt: skip
reduction(
    "norm", lambda x, axis, keep: torch.linalg.vector_norm(x, 2, axis, keep),
    lambda w, x, axis, keep: np.sqrt(w.sum(x * x, axis, keep)), lambda w, dy, y, x, axis: dy * w.div(x, y),
    domain=lambda x: positive(x.norm(dim=-1)) and positive(x.norm(dim=0)),
)  # fmt: skip


@operation("cumsum")
class _:
    reference = staticmethod(lambda x, axis: x.cumsum(axis))

    def port(w, x, axis):
        if not w.style["form"]:
            return np.add.accumulate(x, axis)
        x, total, parts = np.moveaxis(x, axis, 0), 0, []
        for s in range(0, len(x), 8):
            parts.append(np.add.accumulate(x[s : s + 8], 0) + total)
            total = parts[-1][-1]
        return np.moveaxis(np.concatenate(parts), 0, axis).astype(x.dtype)

    draw = along

    def backward(w, dy, y, x, axis):
        return (np.flip(np.add.accumulate(np.flip(dy, axis), axis), axis),)


@operation("softmax", weight=6, masked=True, domain=lambda x: bool((x < 1e4).all()))
class _:
    reference = staticmethod(lambda x, axis: torch.softmax(x, axis))
    port = staticmethod(lambda w, x, axis: w.softmax(x, axis))
    backward = staticmethod(lambda w, dy, y, x, axis: (y * (dy - w.sum(dy * y, axis, True)),))
    draw = along


@operation("log_softmax", weight=3)
class _:
    reference = staticmethod(lambda x, axis: torch.log_softmax(x, axis))

    def port(w, x, axis):
        z = x - x.max(axis, keepdims=True)
        return z - by_torch(torch.log)(w.sum(w.exp(z), axis, True))

    backward = staticmethod(lambda w, dy, y, x, axis: (dy - w.exp(y) * w.sum(dy, axis, True),))
    draw = along


def varies(x: Tensor, *_: Tensor) -> bool:
    """Rows whose variance is not rounding alone."""
    return bool((x.var(-1, correction=0) > 1e-4 * (1 + x.square().mean(-1))).all())


@operation("layer_norm", weight=5, domain=varies)
class _:
    reference = staticmethod(lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps))

    def port(w, x, weight, bias, eps):
        mean, var = w.moments(x)
        return w.fma(*np.broadcast_arrays((x - mean) * w.rsqrt(var + x.dtype.type(eps)), weight, bias))

    def backward(w, dy, y, x, weight, bias, eps):
        mean, var = w.moments(x)
        r = w.rsqrt(var + x.dtype.type(eps))
        h, dh = (x - mean) * r, dy * weight
        dx = r * (dh - w.mean(dh, -1, True) - h * w.mean(dh * h, -1, True))
        return dx, summed_to(w, dy * h, weight.shape), summed_to(w, dy, bias.shape)

    def draw(d):
        x = d.pick()
        if not d.shape(x) or d.shape(x)[-1] < 2:
            return None
        n = d.shape(x)[-1:]
        return [x, d.fresh(n), d.fresh(n)], {"eps": d.source.choice((1e-5, 1e-3))}


@operation("rms_norm", weight=4, domain=lambda x, _: positive(x.square().mean(-1)))
class _:
    reference = staticmethod(lambda x, weight, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)
    port = staticmethod(lambda w, x, weight, eps: x * w.rsqrt(w.mean(x * x, -1, True) + x.dtype.type(eps)) * weight)

    def backward(w, dy, y, x, weight, eps):
        r = w.rsqrt(w.mean(x * x, -1, True) + x.dtype.type(eps))
        dh, h = dy * weight, x * r
        return r * (dh - h * w.mean(dh * h, -1, True)), summed_to(w, dy * h, weight.shape)

    def draw(d):
        x = d.pick()
        return ([x, d.fresh(d.shape(x)[-1:])], {"eps": d.source.choice((1e-5, 1e-6))}) if d.shape(x) else None


@operation("unit", weight=3, domain=lambda x: positive(x.norm(dim=-1)))
class _:
    reference = staticmethod(lambda x: x / x.norm(dim=-1, keepdim=True))
    port = staticmethod(lambda w, x: w.div(x, np.sqrt(w.sum(x * x, -1, True))))
    draw = staticmethod(lambda d: ([x], {}) if d.shape(x := d.pick()) else None)

    def backward(w, dy, y, x):
        return (w.div(dy - y * w.sum(dy * y, -1, True), np.sqrt(w.sum(x * x, -1, True))),)


def moved(name: str, reference: Any, port: Any, backward: Any, draw: Any, **settings: Any) -> None:
    OPERATIONS[name] = Operation(reference, lambda w, *a, **k: port(*a, **k), draw, backward, masked=True, **settings)


def two_axes(d: Draft) -> Any:
    x = d.pick(ndim=2, finite=False)
    return ([x], {}) if x else None


def rolled(d: Draft) -> Any:
    found = along(d)
    return found and (found[0], {"axis": -1, "shift": d.source.integer(1, 3)})


def indices(d: Draft) -> Any:
    x = d.pick(ndim=2)
    return ([x, d.indices((d.size(),), d.shape(x)[0])], {}) if x else None


def added_at(w: Ways, shape: tuple[int, ...], index: Array, source: Array) -> Array:
    """Rows of a source added up at their index: one after the other, or as a product with ones and zeros."""
    if w.style["form"]:
        return (index == np.arange(shape[0])[:, None]).astype(source.dtype) @ source
    out = np.zeros(shape, source.dtype)
    np.add.at(out, index, source)
    return out


moved("transpose", lambda x: x.T, lambda x: x.T, lambda w, dy, y, x: (dy.T,), two_axes)
moved(
    "flip",
    lambda x, axis: x.flip(axis),
    lambda x, axis: np.flip(x, axis),
    lambda w, dy, y, x, axis: (np.flip(dy, axis),),
    along,
    weight=1,
)
moved(
    "roll",
    lambda x, axis, shift: x.roll(shift, axis),
    lambda x, axis, shift: np.roll(x, shift, axis),
    lambda w, dy, y, x, axis, shift: (np.roll(dy, -shift, axis),),
    rolled,
    weight=1,
)
moved("rows", lambda x, i: x[i], lambda x, i: x[i], lambda w, dy, y, x, i: (added_at(w, x.shape, i, dy), None), indices)
moved(
    "cat",
    lambda a, b: torch.cat([a, b], 0),
    lambda a, b: np.concatenate([a, b]),
    lambda w, dy, y, a, b: (dy[: len(a)], dy[len(a) :]),
    lambda d: two(d) if d.shape(d.names()[-1]) else None,
    domain=lambda a, b: a.shape == b.shape and a.ndim > 0,
    weight=1,
)
moved(
    "half",
    lambda x: x[: (len(x) + 1) // 2],
    lambda x: x[: (len(x) + 1) // 2],
    None,
    lambda d: ([x], {}) if d.shape(x := d.pick()) else None,
    weight=1,
)
moved(
    "argmax",
    lambda x: x.argmax(-1),
    lambda x: x.argmax(-1),
    None,
    lambda d: ([x], {}) if d.shape(x := d.pick()) else None,
    weight=1,
)
moved(
    "sort",
    lambda x: x.sort(-1).values,
    lambda x: np.sort(x, -1),
    None,
    lambda d: ([x], {}) if d.shape(x := d.pick()) else None,
    weight=1,
)


@operation("mask", weight=3)
class _:
    """Causal; the reference's value is -inf, or the lowest finite number of the storage."""

    reference = staticmethod(lambda x, low: x.masked_fill(torch.ones(x.shape, dtype=torch.bool).triu(1), low))
    port = staticmethod(lambda w, x, low: np.where(np.triu(np.ones(x.shape, bool), 1), x.dtype.type(low), x))
    backward = staticmethod(lambda w, dy, y, x, low: (np.tril(dy),))

    def draw(d):
        x = matrix(d)
        low = -math.inf if d.source.chance(70) else float(torch.finfo(dtype_of(d.storage)).min)
        return ([x], {"low": low}) if x else None


@operation("index_add", weight=3)
class _:
    reference = staticmethod(lambda base, index, source: base.index_add(0, index, source))
    port = staticmethod(lambda w, base, index, source: base + added_at(w, base.shape, index, source))
    backward = staticmethod(lambda w, dy, y, base, index, source: (dy, None, dy[index]))

    def draw(d):
        if (source := matrix(d)) is None:
            return None
        rows, n = d.shape(source)[0], d.source.choice((1, 2, 7, 20))
        return [d.fresh((n, d.shape(source)[1])), d.indices((rows,), n), source], {}


@operation("cross_entropy")
class _:
    reference = staticmethod(lambda x, labels: F.cross_entropy(x, labels, reduction="none"))

    def port(w, x, labels):
        x = x - x.max(-1, keepdims=True)  # first, since logsumexp(x) - x cancels
        return by_torch(torch.log)(w.sum(w.exp(x), -1)) - np.take_along_axis(x, labels[:, None], -1)[:, 0]

    def backward(w, dy, y, x, labels):
        hot = (labels[:, None] == np.arange(x.shape[1])).astype(x.dtype)
        return dy[:, None] * (w.softmax(x) - hot), None

    def draw(d):
        x = matrix(d)
        return ([x, d.indices(d.shape(x)[:1], d.shape(x)[1])], {}) if x else None


@operation("attention", weight=5, domain=lambda q, k, v: bool((q @ k.T).abs().max() < 100))
class _:
    def reference(q, k, v, number, causal):
        scores = q @ k.T * number
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape, dtype=torch.bool).triu(1), -math.inf)
        return torch.softmax(scores, -1) @ v

    def scores(w, q, k, number, causal):
        early = w.style["form"] and w.products == "ieee"  # else q would be cut once more
        scores = w.mm(q * q.dtype.type(number), k.T) if early else w.mm(q, k.T) * q.dtype.type(number)
        return np.where(np.triu(np.ones(scores.shape, bool), 1), -np.inf, scores).astype(q.dtype) if causal else scores

    def port(w, q, k, v, number, causal):
        scores = _Attention.scores(w, q, k, number, causal)
        if w.style["softmax"] != "online":
            return w.mm(w.softmax(scores), v)
        e = w.exp(scores - scores.max(-1, keepdims=True))
        return w.div(w.mm(e, v), w.sum(e, -1, True))

    def backward(w, dy, y, q, k, v, number, causal):
        p, number = w.softmax(_Attention.scores(w, q, k, number, causal)), q.dtype.type(number)
        delta = w.sum(dy * y, -1, True)  # from the stored result, as flash attention has it
        ds = p * (w.mm(dy, v.T) - delta) * number
        return w.mm(ds, k), w.mm(ds.T, q), w.mm(p.T, dy)

    def draw(d):
        if (q := matrix(d)) is None:
            return None
        (rows, width), keys = d.shape(q), d.size()
        causal = d.source.chance(40)
        keys = rows if causal else keys
        return [q, d.fresh((keys, width)), d.fresh((keys, d.size()))], {"number": width**-0.5, "causal": causal}


class _Attention:
    scores = staticmethod(_.scores)


# Programs


class Source:
    """What is sampled, from a seed. A subclass may draw from elsewhere, as hypothesis does: all comes from integers."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def choice(self, options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**31 - 1))


@dataclass
class Instruction:
    """One operation, and how the port runs it: its style, whether it is named and kept, and in which kernel it is."""

    name: str
    op: str
    args: list[str]
    params: dict[str, Any]
    style: dict[str, Any] = field(default_factory=dict)
    named: bool = True
    kept: bool = True
    kernel: int = 0


VALUES = ("normal", "normal", "normal", "zeros", "denormal", "mean", "rows", "twins", "whole", "tails")


def values(source: Source, shape: tuple[int, ...], storage: str, scale: float) -> Array:
    """Numbers of a kind that real data have too, as the storage has them."""
    rng, kind = source.rng(), source.choice(VALUES)
    x = rng.standard_normal(shape) * scale
    if kind == "zeros":
        x = np.where(rng.random(shape) < 0.4, 0.0, x)
    elif kind == "denormal":
        x = np.where(rng.random(shape) < 0.3, x * (1e-6 if storage == "float16" else 1e-40), x)
    elif kind == "mean":
        x = x + scale * source.choice((3.0, 30.0))
    elif kind == "rows":
        x = x * np.exp2(rng.integers(-6, 3, (*shape[:-1], 1)) if shape else 1.0)
    elif kind == "twins" and shape:
        x = np.repeat(x[..., ::2], 2, -1)[..., : shape[-1]] * np.where(np.arange(shape[-1]) % 2, -1.0, 1.0)
        x = x + scale * 1e-3 * rng.standard_normal(shape)
    elif kind == "whole":
        x = np.round(x / scale * 3) * (scale / 4)
    elif kind == "tails":
        x = x * np.exp(0.7 * rng.standard_normal(shape))
    return stored(torch.from_numpy(np.asarray(x)), storage).numpy()


class Draft:
    """A program while it is sampled: what its values are so far, in float64."""

    def __init__(self, source: Source, storage: str, wide: int) -> None:
        self.source, self.storage, self._wide = source, storage, wide
        self.inputs: dict[str, Array] = {}
        self.stored: dict[str, str] = {}
        self.known: dict[str, Tensor] = {}
        self.instructions: list[Instruction] = []

    def size(self) -> int:
        return self.source.choice((1, 2, 3, 5, 8, 13, 16, 24, 31, 48, 64, 100))

    def names(self) -> list[str]:
        return [name for name, x in self.known.items() if x.is_floating_point()]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.known[name].shape)

    def floats(self, ndim: int | None = None) -> list[str]:
        return [n for n in self.names() if ndim is None or self.known[n].ndim == ndim]

    def pick(self, ndim: int | None = None, finite: bool = True) -> Any:
        found = self.floats(ndim)
        return None if not found else found[-1] if self.source.chance(60) else self.source.choice(found)

    def store(self) -> str:
        return "float32" if self.source.chance(self._wide) else self.storage

    def fresh(self, shape: tuple[int, ...], scale: float = 1.0) -> str:
        name = f"x{len(self.inputs)}"
        self.stored[name] = self.store()
        self.inputs[name] = values(self.source, shape, self.stored[name], scale)
        self.known[name] = torch.from_numpy(self.inputs[name])
        return name

    def indices(self, shape: tuple[int, ...], high: int) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs[name] = self.source.rng().integers(0, high, shape)
        self.known[name] = torch.from_numpy(self.inputs[name])
        return name

    def extend(self, backward: bool) -> None:
        """Draw one more instruction that is defined on what there is; a try that is not leaves nothing behind."""
        names = [n for n, op in OPERATIONS.items() for _ in range(op.weight) if op.backward or not backward]
        before = dict(self.inputs), dict(self.stored), dict(self.known)
        for _ in range(20):
            op = OPERATIONS[self.source.choice(names)]
            name = next(n for n, one in OPERATIONS.items() if one is op)
            found = op.draw(self)
            if found is not None and (y := self._value(op, *found)) is not None:
                label = f"{name}_{len(self.instructions)}"
                self.known[label] = y
                self.instructions.append(Instruction(label, name, *found))
                used = set(found[0])
                for n in set(self.inputs) - set(before[0]) - used:
                    del self.inputs[n], self.known[n]
                return
            self.inputs, self.stored, self.known = (dict(b) for b in before)

    def _value(self, op: Operation, args: list[str], params: dict[str, Any]) -> Tensor | None:
        x = [self.known[a] for a in args]
        real = [a for a in x if a.is_floating_point()]
        huge = any(bool((a.abs() > LARGEST[self.storage]).any()) for a in real)
        if (huge and not op.masked) or not op.domain(*x):
            return None
        y = op.reference(*x, **params)
        if y.numel() > ELEMENTS or not y.numel():
            return None
        if op is OPERATIONS["mask"] or not y.is_floating_point():
            return y
        huge = not bool((y.abs() < LARGEST[self.storage]).all())
        hidden = op.masked and any(bool((a.abs() > LARGEST[self.storage]).any()) for a in real)
        return None if bool(y.isnan().any()) or (huge and not hidden) else y


@dataclass
class Case:
    """A program, its port, and what the port declares."""

    seed: Any
    storage: str
    inputs: dict[str, Array]
    instructions: list[Instruction]
    output: str
    weights: Array | None
    """What the result is multiplied with and summed up to the loss; None without a backward."""
    stores: dict[str, str]
    """The storage of inputs and kept steps."""
    kind: str
    reads: str
    saved: str
    products: str
    accumulate: str
    eager: bool
    shown: bool
    """Whether the inputs are among what is observed."""

    def reference(self, put: Callable[[str, Any], Any] = whywrong.step, **inputs: Tensor) -> Tensor:
        """The program in PyTorch; `put` is called with each named step."""
        known: dict[str, Any] = dict(inputs)
        for one in self.instructions:
            y = OPERATIONS[one.op].reference(*(known[a] for a in one.args), **one.params)
            known[one.name] = put(one.name, y) if one.named else y
        return known[self.output]

    def loss(self, output: Tensor) -> Tensor:
        return (output * torch.from_numpy(self.weights).to(output.dtype)).sum()

    @cached_property
    def golden(self) -> Golden:
        loss = self.loss if self.weights is not None else None
        return whywrong.golden(self.reference, loss=loss, **{k: torch.from_numpy(x) for k, x in self.inputs.items()})

    @property
    def precision(self) -> whywrong.Precision:
        """What the port declares."""
        there = set(self.golden.names)
        odd = {k: {"storage": s} for k, s in self.stores.items() if s != self.storage and s != "int64" and k in there}
        for k in there & set(self.stores) if self.kind == "eager" else ():
            if k.startswith(GRADIENT) and self.stores[k] != "float32":  # as torch's CPU kernels of norms and indices do
                odd[k] = odd.get(k, {}) | {"accumulate": self.stores[k]}
        return whywrong.Precision(self.storage, self.products, self.accumulate, self.eager, steps=odd)

    def observed(self, fault: Fault | None = None, exact: bool = False) -> dict[str, Tensor]:
        """What the port gives; with a fault in one step; `exact`: in float64 and nothing rounded."""
        stores = dict.fromkeys(self.stores, EXACT) if exact else self.stores
        if self.kind == "numpy" or exact:
            with np.errstate(all="ignore"):
                found = self._by_numpy(stores, np.float64 if exact else np.dtype(self.accumulate).type, fault)
        else:
            found = self._by_torch()
        given = {k: torch.from_numpy(x) for k, x in self.inputs.items()} if self.shown else {}
        found = given | found
        return {k: x.to(dtype_of(stores[k])) if x.is_floating_point() else x for k, x in found.items()}

    def _by_numpy(self, stores: Mapping[str, str], dtype: Any, fault: Fault | None) -> dict[str, Tensor]:
        registers = {k: x.astype(dtype) if x.dtype.kind == "f" else x for k, x in self.inputs.items()}
        kept: dict[str, Array] = {}
        kernels = {one.name: one.kernel for one in self.instructions}

        def read(name: str, kernel: int) -> Array:
            fused = self.reads == "registers" or (self.reads == "kernels" and kernels.get(name) == kernel)
            return registers[name] if fused or name not in kept else kept[name]

        for i, one in enumerate(self.instructions):
            ways, args = Ways(one.style, dtype, self.products), [read(a, one.kernel) for a in one.args]
            y = np.asarray(OPERATIONS[one.op].port(ways, *args, **one.params))
            if fault is not None and fault.at == i:
                y = fault.mutated(self, ways, one, args, y)
            registers[one.name] = y
            if one.kept:
                kept[one.name] = narrowed(y, stores[one.name])
        found = kept | {"output": kept[self.output]}
        if self.weights is not None:
            found |= self._backward(registers, kept, dtype)
        return {k: torch.from_numpy(np.array(x)) for k, x in found.items()}

    def _backward(self, registers: dict[str, Array], kept: dict[str, Array], dtype: Any) -> dict[str, Array]:
        """By hand, from what the forward has stored, or had in registers."""
        had = registers | (kept if self.saved == "stored" else {})
        slopes = {self.output: self.weights.astype(dtype)}
        for one in reversed(self.instructions):
            if one.name not in slopes:
                continue
            args, ways = [had[a] for a in one.args], Ways(one.style, dtype, self.products)
            parts = OPERATIONS[one.op].backward(ways, slopes[one.name], had[one.name], *args, **one.params)
            for name, part in zip(one.args, parts, strict=True):
                if part is not None:
                    slopes[name] = slopes[name] + part if name in slopes else np.asarray(part)
        return {GRADIENT + k: slopes[k] for k, x in self.inputs.items() if k in slopes and x.dtype.kind == "f"}

    def _by_torch(self) -> dict[str, Tensor]:
        """By PyTorch's own kernels: eagerly on narrow tensors, or in float32 with steps rounded as they are kept."""
        found: dict[str, Tensor] = {}
        kept = {one.name: one for one in self.instructions if one.kept}
        narrow = self.kind == "eager"

        def put(name: str, y: Tensor) -> Tensor:
            if name not in kept:
                return y
            found[name] = y.detach().clone()
            stays = narrow or not y.is_floating_point() or self.reads == "registers"
            stays = stays or (self.reads == "kernels" and kept[name].kernel % 2)
            return y if stays else AsStored.apply(y, self.stores[name])

        leaves = {}
        for k, x in self.inputs.items():
            x = torch.from_numpy(x)
            if x.is_floating_point():
                x = x.to(dtype_of(self.stores[k] if narrow else "float32"), copy=True).requires_grad_(
                    self.weights is not None
                )
            leaves[k] = x
        output = self.reference(put, **leaves)
        found["output"] = output.detach()
        if self.weights is not None:
            real = {k: x for k, x in leaves.items() if x.is_floating_point()}
            parts = torch.autograd.grad(self.loss(output), list(real.values()), allow_unused=True)
            found |= {GRADIENT + k: g for k, g in zip(real, parts, strict=True) if g is not None}
        return found

    def differs(self) -> dict[str, float]:
        """Where the port in float64 is not the reference: by how much of the step's largest element."""
        found = {}
        for name, x in self.observed(exact=True).items():
            g = self.golden[name]
            if not g.is_floating_point():
                continue
            gap = torch.where(x == g, 0.0, (x - g).abs())
            size = g[g.isfinite()].abs().max() if bool(g.isfinite().any()) else 1.0
            if not float(gap.max()) <= 1e-9 * max(float(size), 1e-3):
                found[name] = float(gap.max() / size)
        return found

    @property
    def ties(self) -> bool:
        """Whether a value is chosen or rounded, which may fall either way in another order of sums."""
        return any(one.op in ("round", "where", "argmax") for one in self.instructions)

    @property
    def facts(self) -> dict[str, Any]:
        """What may make a difference, in a word each."""
        by_hand = f"by hand, {self.saved}" if self.kind == "numpy" else "autograd"
        return {
            "storage": self.storage, "port": self.kind, "reads": self.reads, "products": self.products,
            "accumulate": self.accumulate, "eager": self.eager, "inputs observed": self.shown,
            "backward": "none" if self.weights is None else by_hand,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: " + ", ".join(f"{k} {v}" for k, v in self.facts.items())]
        for k, x in self.inputs.items():
            lines.append(f"  {k} = input{list(x.shape)}, {self.stores.get(k, x.dtype)}, largest {np.abs(x).max():.3g}")
        for one in self.instructions:
            params = "".join(f", {k}={v:g}" if isinstance(v, float) else f", {k}={v}" for k, v in one.params.items())
            where = f"kept as {self.stores[one.name]}" if one.kept else "named" if one.named else "inside"
            odd = {k: v for k, v in one.style.items() if v != FIRST[k]}
            lines.append(
                f"  {one.name} = {one.op}({', '.join(one.args)}{params})  # {where}, kernel {one.kernel}, {odd}"
            )
        return "\n".join([*lines, f"  output = {self.output}"])


class AsStored(torch.autograd.Function):
    """Rounded to storage; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, storage: str) -> Tensor:
        return x.to(dtype_of(storage)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


PRODUCTS = ("ieee", "ieee", "ieee", "tf32", "bfloat16", "bfloat16x2", "tf32x3")


def drawn(
    source: Source, storage: str, seed: Any = None, kind: str | None = None, backward: bool | None = None
) -> Case:
    """A correct program and its port."""
    kind = kind or source.choice(("numpy",) * 6 + ("torch",) + ("eager",) * 2)
    backward = source.chance(30) if backward is None else backward
    d = Draft(source, storage, 0 if kind == "eager" or source.chance(70) else 30)
    first = (d.size(), d.size())
    if source.chance(6):
        first = (source.choice((1, 3, 8)), source.choice((512, 1024, 2048, 4096)))
    d.fresh(
        first if source.chance(85) else source.choice((first[:1], (2, 3, d.size()))),
        source.choice((1.0, 1.0, 0.1, 4.0)),
    )
    for _ in range(source.integer(1, 6)):
        d.extend(backward)
    reals = [one.name for one in d.instructions if d.known[one.name].is_floating_point()]
    output = reals[-1] if reals else None
    if output is None or (backward and not bool(d.known[output].isfinite().all())):
        return drawn(source, storage, seed, kind, backward)
    _styled(source, d.instructions, output)
    stores = dict(d.stored) | {one.name: d.store() for one in d.instructions if one.kept}
    stores |= {one.name: str(d.known[one.name].dtype)[6:] for one in d.instructions if one.name not in reals}
    stores |= {"output": stores[output]} | {GRADIENT + k: s for k, s in d.stored.items()}
    weights = None
    if backward:
        weights = np.asarray(source.rng().integers(-12, 13, d.shape(output)) / 8.0)
    used = {a for one in d.instructions for a in one.args}
    single = set(stores.values()) <= {"float32", "int64"}  # float64 would be rounded twice to a narrow type
    accumulate = "float64" if single and kind == "numpy" and source.chance(10) else "float32"
    case = Case(
        seed, storage, {k: x for k, x in d.inputs.items() if k in used}, d.instructions, output, weights, stores, kind,
        source.choice(("stored", "registers", "kernels")), source.choice(("stored", "registers")),
        source.choice(PRODUCTS) if kind == "numpy" and accumulate == "float32" else "ieee",
        accumulate, kind == "eager" or (single and kind == "torch" and source.chance(20)), source.chance(85),
    )  # fmt: skip
    return case if _usable(case) else drawn(source, storage, seed, kind, backward)


def _styled(source: Source, instructions: list[Instruction], output: str) -> None:
    """How the port runs each instruction, which steps are named and kept, and which are in one kernel."""
    few, kernel, after = source.choice((0, 0, 30, 60)), 0, False
    for one in instructions:
        kernel += source.chance(40)
        one.kernel = kernel
        one.style = {name: source.choice(choices) for name, choices in STYLES.items()}
        must = one.name == output or after
        after = after or one.name == output
        one.named = must or not source.chance(few)
        one.kept = one.named and (must or not source.chance(few))


def _usable(case: Case) -> bool:
    """float16 must hold what an eager program puts between, gradients must be finite and no larger than storage."""
    golden, largest = case.golden, LARGEST[case.storage]
    for name in golden.names:
        g = golden[name]
        if name.startswith(GRADIENT) and not bool((g.abs() < largest).all()):
            return False
    if not case.eager:
        return True
    return all(bool((x.isfinite() == golden[k].isfinite()).all()) for k, x in case.observed().items())


def program(seed: int, storage: str | None = None, to_break: bool = False) -> Case:
    """The program of a seed: always the same. Three neighbours have the three storages.

    A port that is to be broken is one in NumPy that cuts no factors, since faults are measured in roundings of storage.
    """
    case = drawn(Source(seed), storage or STORAGES[seed % 3], seed, "numpy" if to_break else None)
    return replace(case, products="ieee") if to_break else case


# Faults


@dataclass
class Fault:
    """One step of the port broken: `right + s (wrong - right)`, s so that the effect is `grade` round-offs, or 1."""

    at: int
    kind: str
    grade: float | None = None

    def mutated(self, case: Case, ways: Ways, one: Instruction, args: list[Array], right: Array) -> Array:
        wrong = np.broadcast_to(np.asarray(FAULTS[self.kind](Place(ways, one, args, right))), right.shape)
        difference = wrong.astype(np.float64) - right
        difference = np.where(np.isfinite(difference), difference, 0.0)
        size = np.sqrt(np.square(right[np.isfinite(right)], dtype=np.float64).mean())
        rms = np.sqrt(np.square(difference).mean())
        if not rms > 1e-12 * size:
            raise LookupError("nothing is broken")
        share = 1.0 if self.grade is None else self.grade * UNIT_ROUNDOFF[case.stores[one.name]] * size / rms
        return np.where(np.isfinite(right), right + share * difference, right).astype(right.dtype)


@dataclass
class Place:
    """Where a fault is: the instruction, what it read, what it gave."""

    ways: Ways
    one: Instruction
    args: list[Array]
    right: Array

    def again(self, args: list[Array] | None = None, op: str | None = None, **params: Any) -> Array:
        """The instruction with something else."""
        if not set(params) <= set(self.one.params):
            raise LookupError("no such parameter")
        port = OPERATIONS[op or self.one.op].port
        return port(self.ways, *(args or self.args), **({} if op else self.one.params | params))

    def changed(self, name: str, change: Callable[[Any], Any]) -> Array:
        return self.again(**{name: change(self.one.params[name])}) if name in self.one.params else self.again(none=0)

    def with_arg(self, i: int, change: Callable[[Array], Array]) -> Array:
        args = list(self.args)
        args[i] = change(args[i])
        if args[i].dtype.kind != "f":
            raise LookupError("an index")
        return self.again(args)


def tail(x: Array, axis: int = -1) -> Array:
    """The last quarter along an axis is zero."""
    x = np.moveaxis(x.copy(), axis, 0) if x.ndim else x.copy()
    x[-max(1, len(x) // 4) :] = 0
    return np.moveaxis(x, 0, axis)


def stale(x: Array) -> Array:
    out = x.copy()
    half = len(x) // 2
    out[half : 2 * half] = x[:half]
    return out


LIKE = dict(
    pair.split(">")
    for pair in [
        "gelu>gelu_tanh",
        "gelu_tanh>silu",
        "silu>gelu",
        "sigmoid>tanh",
        "tanh>erf",
        "erf>tanh",
        "relu>softplus",
        "softplus>relu",
        "exp>expm1",
        "expm1>exp",
        "sin>tanh",
        "sqrt>log",
        "rsqrt>reciprocal",
        "maximum>add",
    ]
)
"""What is taken for a function by mistake."""

FAULTS: dict[str, Callable[[Place], Array]] = {
    "transpose": lambda p: p.with_arg(-1, np.transpose),
    "permute": lambda p: np.roll(p.right, p.right.shape[-1] // 2, -1),
    "axis": lambda p: p.changed("axis", lambda axis: -1 - axis),
    "shift": lambda p: np.roll(p.right, 1, -1),
    "truncate": lambda p: p.with_arg(0, tail),
    "zero": lambda p: tail(p.right, 0),
    "stale": lambda p: stale(p.right),
    "drop_term": lambda p: p.with_arg(-1, np.zeros_like),
    "factor": lambda p: p.right * p.right.dtype.type(1 + 1 / max(2, p.right.size)),
    "scale": lambda p: p.right * p.right.dtype.type(1.25),
    "constant": lambda p: p.changed("number", lambda x: x * 1.1),
    "eps": lambda p: p.changed("eps", lambda x: 10 * x),
    "ddof": lambda p: (
        p.right * p.right.dtype.type(p.args[0].shape[-1] / max(1, p.args[0].shape[-1] - 1))
        if p.one.op in ("var", "mean")
        else p.again(none=0)
    ),
    "sign": lambda p: p.with_arg(-1, np.negative),
    "flip": lambda p: np.flip(p.right, 0),
    "function": lambda p: p.again(op=LIKE[p.one.op]),
    "other": lambda p: p.again(p.args[::-1]),
}
"""By kind, what the step gives instead. LookupError and ValueError: there is no such fault here."""


def faults(
    case: Case, seed: int, grades: tuple[Any, ...] = (*GRADES, None)
) -> Iterator[tuple[Fault, dict[str, Tensor]]]:
    """One fault of a port in NumPy, in each grade, with what is then observed; grade None is the fault as it is."""
    source, right = Source(seed + 10**9), case.observed()
    places = [i for i, one in enumerate(case.instructions) if one.kept and right[one.name].is_floating_point()]
    for _ in range(30):
        fault = Fault(source.choice(places), source.choice(list(FAULTS)))
        try:
            found = [(f, case.observed(f)) for f in (Fault(fault.at, fault.kind, g) for g in grades)]
        except (LookupError, ValueError, TypeError, AttributeError):
            continue
        name = case.instructions[fault.at].name
        yield from ((f, seen) for f, seen in found if not torch.equal(seen[name], right[name]))
        return


# What is measured


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    p, zz = count / total, z * z / total
    half = z * math.sqrt(p * (1 - p) / total + zz / (4 * total))
    return max(0.0, (p + zz / 2 - half) / (1 + zz)), (p + zz / 2 + half) / (1 + zz)


def beyond(count: int, total: int, rate: float) -> float:
    """The probability of `count` or more of `total` at a rate."""
    from scipy.special import bdtrc

    return float(bdtrc(count - 1, total, rate)) if count else 1.0


def judged(case: Case, observed: dict[str, Tensor] | None = None) -> whywrong.checking.findings.Localisation:
    return whywrong.localise(observed or case.observed(), case.golden, precision=case.precision)


def measured(seed: int, storage: str | None = None, grades: tuple[Any, ...] = ()) -> dict[str, Any]:
    """What the check says of one draw, and of a fault in it in each of the grades, if any; a crash is a finding too."""
    record: dict[str, Any] = {"seed": seed}
    begun = time.perf_counter()
    try:
        case = program(seed, storage, bool(grades))
        record |= {"facts": case.facts, "ops": [one.op for one in case.instructions]}
        if not case.ties and (different := case.differs()):
            return record | {"dishonest": different}
        made = time.perf_counter()
        found = judged(case)
        record |= {"drawn_s": made - begun, "judged_s": time.perf_counter() - made, "first": found.first}
        if found.first is not None:
            record["words"] = {n: f.words for n, f in found.findings.items() if f.diverges}
        elif grades:
            record["faults"] = [_power(case, fault, seen) for fault, seen in faults(case, seed, grades)]
    except Exception as error:
        return record | {"crash": f"{type(error).__name__}: {error}"[:200]}
    return record


def _power(case: Case, fault: Fault, seen: dict[str, Tensor]) -> dict[str, Any]:
    name, steps = case.instructions[fault.at].name, case.golden.steps
    first = judged(case, seen).first
    right = first is not None and steps[first] == steps[name]
    about = {"storage": case.stores[name], "kind": fault.kind, "grade": fault.grade, "step": name}
    return about | {"first": first, "found": first is not None, "right": right}


def run(seeds: range, storage: str | None = None, grades: tuple[Any, ...] = (), jobs: int = 1) -> list[dict[str, Any]]:
    """:func:`measured` for each seed, in processes."""
    one = partial(measured, storage=storage, grades=grades)
    torch.set_num_threads(1)
    if jobs == 1:
        return [one(seed) for seed in seeds]
    with get_context("fork").Pool(jobs) as pool:
        return pool.map(one, seeds, chunksize=20)


def share(count: int, total: int) -> dict[str, Any]:
    return {"count": count, "of": total, "interval": [round(x, 6) for x in wilson(count, total)]}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates of false positives by fact, power by grade and storage, and who was flagged."""
    draws = [r for r in records if "dishonest" not in r and "crash" not in r]
    total = Counter((k, str(v)) for r in draws for k, v in r["facts"].items())
    accused = Counter((k, str(v)) for r in draws if r["first"] for k, v in r["facts"].items())
    by: dict[str, dict[str, Any]] = {}
    for (k, v), n in sorted(total.items()):
        by.setdefault(k, {})[v] = share(accused[k, v], n)
    power: dict[str, dict[str, Any]] = {}
    every = [f for r in draws for f in r.get("faults", ())]
    for grade, storage in sorted({(f["grade"] or math.inf, f["storage"]) for f in every}):
        of = [f for f in every if (f["grade"] or math.inf, f["storage"]) == (grade, storage)]
        words = "as it is" if math.isinf(grade) else f"{grade:g} roundings"
        power.setdefault(storage, {})[words] = {
            "found": share(sum(f["found"] for f in of), len(of)),
            "right first step": share(sum(f["right"] for f in of), len(of)),
        }
    return {
        "accused": share(sum(bool(r["first"]) for r in draws), len(draws)),
        "accused by": by,
        "power": power,
        "who": [{k: r[k] for k in ("seed", "first", "words", "facts", "ops")} for r in draws if r["first"]],
        "dishonest": [r for r in records if "dishonest" in r],
        "crashes": [r for r in records if "crash" in r],
        "seconds a draw": sum(r["drawn_s"] + r["judged_s"] for r in draws) / max(1, len(draws)),
        "seconds of localise": sum(r["judged_s"] for r in draws) / max(1, len(draws)),
    }


def printed(found: dict[str, Any]) -> Iterator[str]:
    """The summary as lines."""

    def words(s: dict[str, Any]) -> str:
        low, high = s["interval"]
        return f"{s['count']:6d} of {s['of']:6d} = {s['count'] / max(1, s['of']):7.2%} [{low:.2%}, {high:.2%}]"

    yield f"{'accused':40s}{words(found['accused'])}"
    for k, values in found["accused by"].items():
        yield from (f"  {k + ' ' + v:38s}{words(s)}" for v, s in values.items())
    for storage, grades in found["power"].items():
        for grade, both in grades.items():
            yield from (f"{storage + ', ' + grade + ', ' + k:44s}{words(s)}" for k, s in both.items())
    for who in found["who"]:
        yield f"seed {who['seed']}: {who['first']}: {who['words'][who['first']]}"
    for one in found["dishonest"]:
        yield f"seed {one['seed']}: THE PORT IS NOT THE REFERENCE: {one['dishonest']}"
    for one in found["crashes"]:
        yield f"seed {one['seed']}: crash: {one['crash']}"
    yield f"{found['seconds a draw'] * 1e3:.0f} ms a draw, {found['seconds of localise'] * 1e3:.0f} ms of them localise"


def simpler(case: Case) -> Iterator[Case]:
    """The case with something less."""
    every = case.instructions
    used = {a for one in every for a in one.args} | {case.output}
    plain = [replace(one, style=FIRST) for one in every]
    if case.weights is None:
        for i, one in enumerate(every[:-1]):
            if one.kept and not case.stores[one.name].startswith("int"):
                stores = case.stores | {"output": case.stores[one.name]}
                yield replace(case, instructions=every[: i + 1], output=one.name, stores=stores)
    else:
        yield replace(case, weights=None)
    yield from (replace(case, instructions=[o for o in every if o is not one]) for one in every if one.name not in used)
    yield from (replace(case, **{k: v}) for k, v in PLAIN.items() if getattr(case, k) != v)
    if any(one.style != FIRST for one in every):
        yield replace(case, instructions=plain)
    for i, one in enumerate(every):
        if one.style != FIRST:
            yield replace(case, instructions=[*every[:i], plain[i], *every[i + 1 :]])
        if one.kept and one.name != case.output:
            yield replace(case, instructions=[*every[:i], replace(one, named=False, kept=False), *every[i + 1 :]])


PLAIN = {"products": "ieee", "reads": "stored", "saved": "registers", "shown": True, "eager": False}


def minimal(case: Case) -> Case:
    """What is left of a flagged program when what is not needed for the false positives is gone."""
    for one in simpler(case):
        used = {a for instruction in one.instructions for a in instruction.args}
        one.inputs = {k: x for k, x in one.inputs.items() if k in used}
        if not one.differs() and judged(one).first is not None:
            return minimal(one)
    return case


def show(case: Case, broken: bool = False) -> None:
    print(case)
    print("in float64 the port differs from the reference:", case.differs() or "nowhere")
    print(judged(case))
    for fault, seen in faults(case, case.seed) if broken else ():
        print(fault, judged(case, seen).verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draws", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--storage", choices=STORAGES)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--faults", action="store_true", help="ports in NumPy only, each broken too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--reduce", action="store_true", help="show what is left of it that is still flagged")
    said = parser.parse_args()
    if said.show is not None:
        case = program(said.show, said.storage, said.faults)
        show(minimal(case) if said.reduce else case, said.faults)
        return
    grades = (*GRADES, None) if said.faults else ()
    found = summary(run(range(said.seed, said.seed + said.draws), said.storage, grades, said.jobs))
    print("\n".join(printed(found)))
    if said.out:
        said.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
