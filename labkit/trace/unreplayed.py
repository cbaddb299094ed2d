"""Steps against numbers alone. A step may differ by its own rounding and by what the steps before were off.

Own and inherited cannot be told apart here. Large steps are judged in blocks of rows, so that memory does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from labkit.numerics.bounds import Bound, quantile
from labkit.numerics.compare import as_tensor, compare, described, measure
from labkit.numerics.precision import UNIT_ROUNDOFF, Precision, half_ulp, name_of
from labkit.numerics.statistics import Statistics, combine
from labkit.numerics.structure import Structure, structure
from labkit.trace.findings import INHERITED, UNKNOWN, Finding, absent, reason
from labkit.trace.masks import unmasked
from labkit.trace.steps import Trace

Tensor = torch.Tensor

AMPLIFICATION = 4.0
"""How many times a step may magnify the relative error of the steps before. A guess, since a step's condition is not
known; a layer norm or a softmax in a network rarely does more."""

TERMS = 4.0
"""By how much sum|a||b| may exceed sqrt(K) times the result's size. A guess, since the terms are not known."""

BLOCK = 3 << 18
"""Elements that are judged at a time: 6 MiB of float64, and some forty arrays of that size are needed."""

PIECE = 1 << 10
"""Elements of a piece of a long row."""


def judge(golden: Any, seen: Any, rules: Precision, chance: float, known: Mapping[str, Finding]) -> dict[str, Finding]:
    """A finding for every step, in the golden's order. `known` are findings of steps that say what they compute."""
    found: dict[str, Finding] = {}
    off, length = 0.0, 1
    tainted: list[str] = []
    names = list(golden.names)
    last = max(k for k, name in enumerate(names) if name in seen)
    for k, name in enumerate(names):
        if name not in seen:
            found[name] = absent(name, gone=k > last)
            continue
        o, g = seen.read(name), as_tensor(f"step {name!r}", golden[name])
        inputs = golden.inputs(name) if hasattr(golden, "inputs") else []
        after = [x for x in (inputs or tainted) if x in tainted]
        if name in known:
            one = known[name]
            if after and not one.wrong and one.total is not None and not one.total.ok:
                one = replace(one, diverges=True, words=INHERITED)
        else:
            terms = golden.length(name) if hasattr(golden, "length") else None
            bound = golden.step(name).bound if isinstance(golden, Trace) else None
            one = _step(name, o, g, bound, rules.of(name), off, terms or length, chance)
            if one.diverges and after:
                one = replace(one, wrong=False, words=f"after a wrong step, {UNKNOWN}: {one.words}")
        if one.diverges:
            tainted.append(name)
        elif g.is_floating_point() and one.total is not None and math.isfinite(one.total.rms_ratio):
            off = max(off, one.total.rms_ratio)
        length = max(length, g.shape[-1] if g.ndim else 1)
        found[name] = one
    return found


def _step(
    name: str, o: Tensor, g: Tensor, bound: Bound | None, rule: Precision, off: float, length: int, chance: float
) -> Finding:
    if o.shape != g.shape or not (o.is_floating_point() and g.is_floating_point()) or not o.numel():
        mixed = o.is_floating_point() != g.is_floating_point()
        total = compare(o.double(), g.double()) if mixed else compare(o, g)
        words = "ok" if total.ok else reason(total, None)
        return Finding(name, total, wrong=not total.ok, diverges=not total.ok, words=words)
    own = name_of(o.dtype)
    storage = rule.storage if rule.storage in UNIT_ROUNDOFF else own
    parts: list[Statistics] = []
    worst: Structure | None = None
    why, start = "", 0
    count = -(-o.numel() // BLOCK)
    for a, b in _blocks(o, g.to(o.device)):
        wide, exact = unmasked(a.double(), b.double())
        allowed = bound or _bound(exact, storage, rule, off, length, chance / count)
        part = measure(wide, exact, torch.as_tensor(allowed.absolute).expand(exact.shape).double())
        parts.append(_moved(part, start))
        if part.mismatches == 0 and allowed.noise is not None:
            below = structure(wide - exact, exact, allowed, chance / count)
            worst = below if worst is None or below.worst.share > worst.worst.share else worst
        why, start = allowed.why, start + a.numel()
    whole = combine([np.array(part) for part in parts])
    total = described(whole, o, (own, name_of(g.dtype)), why)
    wrong = not total.ok or (worst is not None and not worst.ok)
    words = reason(total, worst) if wrong else "ok"
    return Finding(name, total, None, None, worst, wrong, wrong, words)


def _blocks(o: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of both, as many as make a block. What is longer than a block is cut into pieces, which count as rows."""
    if o.numel() <= BLOCK:
        yield o, g
        return
    width = o.shape[-1] if o.shape[-1] <= BLOCK else PIECE
    whole = o.numel() // width * width
    o, g = o.reshape(-1), g.reshape(-1)
    for first in range(0, whole, rows := BLOCK // width * width):
        last = min(first + rows, whole)
        yield o[first:last].view(-1, width), g[first:last].view(-1, width)
    if whole < o.numel():
        yield o[whole:], g[whole:]


def _moved(part: Statistics, start: int) -> Statistics:
    """Statistics of a block, with places as in the whole."""
    places = {key: getattr(part, key) for key in ("first", "worst", "one_sided")}
    return part._replace(**{key: at + start if at >= 0 else at for key, at in places.items()})


def _bound(g: Tensor, storage: str, rule: Precision, off: float, length: int, chance: float) -> Bound:
    """Half a unit of storage, a sum of `length` terms, cut factors; and what came before, magnified."""
    half = half_ulp(g, storage, flush=rule.flush) * (2.0 if rule.eager else 1.0)
    size = _size(g)
    spread = (TERMS * rule.unit * math.sqrt(length) + 2.0 * rule.cut) * size
    inherited = AMPLIFICATION * off * size
    t = quantile(chance / max(1, g.numel()), math.inf)
    why = f"{t:.3g} sigma of a sum of {length} terms, steps before {off:.3g} off, and half a unit of {storage}"
    noise = (half.square() / 3.0 + spread.square()).sqrt()
    return Bound(torch.nan_to_num(half + t * (spread + inherited), 0.0), why, noise, inherited)


def _size(g: Tensor) -> Tensor:
    """The size that errors of an element go with: its own, or the RMS of its row or its column."""
    g = torch.where(g.isfinite(), g, 0.0)
    if not g.ndim:
        return g.abs()
    largest = g.abs().max().clamp(min=1e-300)
    scaled = g / largest  # squares may overflow
    rows = scaled.square().mean(-1, keepdim=True).sqrt()
    columns = scaled.reshape(-1, g.shape[-1]).square().mean(0).sqrt()
    return largest * torch.maximum(torch.maximum(rows, columns), scaled.abs())
