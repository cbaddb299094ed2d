"""Steps checked without a program: is a step off by more than its dtype and its inputs explain?

Own and inherited errors cannot be separated here. What a step may inherit is the measured error of the steps before
it, or of those that the file calls its inputs, magnified; values between them may be stored too. Two instruments:

- no element, and not the RMS of all, is off by more than its own rounding and :data:`MAGNIFIED` times the inherited
  error. Errors scale with the size of a row, a column or an element, whichever is largest;
- the slope, the mean and the mean at like values of the whole tensor: inherited errors average out in them, as far as
  those before do (:data:`CARRIED`). How far is estimated from the tensor itself.

A step that passes is not proven to be correct: errors that may be inherited are not reported. Large steps are checked
in blocks of rows, so that memory does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from whywrong.checking.findings import UNKNOWN, Finding, absent, reason
from whywrong.checking.masks import LOWEST, unmasked
from whywrong.checking.updates import SAMPLE, earlier, sample
from whywrong.comparing.bounds import quantile
from whywrong.comparing.comparison import compare, described, measure
from whywrong.comparing.elements import Block, Elements
from whywrong.comparing.precision import UNIT_ROUNDOFF, Precision, half_ulp, name_of, stored
from whywrong.comparing.statistics import Statistics, combine
from whywrong.comparing.structure import Structure, Test
from whywrong.console import with_progress
from whywrong.recording.steps import Trace
from whywrong.tables import number

MAGNIFIED = 8.0
"""How many times a step may magnify the RMS of the errors before it: its condition is not known. The larger of the
relative and the absolute error counts, since exponentials and angles turn one into the other. Of 12,000 steps of
correct programs and models, 33 magnified that more than twice, and one 8 times: a gradient that nearly cancels."""

HIDDEN = 16.0
"""Round-offs of the format between operations that a step may lose inside it, where nothing is recorded, before they
are magnified: an angle at position 1000 is off by 1000 round-offs, and a rotated row by a part of them."""

CARRIED = 4.0
"""How many times a mean or a slope may be magnified. What averages out before a step does so after it: in the same
12,000 steps such a part was never larger than the one before, the square of the errors, or a round-off."""

FEWEST = 8
"""Entries along a dimension from which their scatter can be estimated: with fewer, Student's quantile exceeds 10."""

DISTINCT_VALUES = 16
"""Groups of like values, about as many in each."""

BLOCK_ELEMENTS = 1 << 18
"""Elements that are checked at a time: 2 MiB of float64. Of 6 MiB, the system clears twice as many pages anew."""

GPU_ELEMENTS, ROOM = 1 << 27, 4
"""Elements of a dump from which it is checked on a GPU, and how many times its free memory has to have a step in
float64; chosen. In blocks of 2^20 an H200 took 1.05 s for 84 million elements and 6 s to begin, the host 6 to 8 s."""

NEGLIGIBLE = 1e-6
"""Part of a round-off that what underflow explains may be of any unit, to be looked at no further."""

SAMPLED_ELEMENTS = 1 << 10
"""Elements of a piece of a long row."""


@dataclass(frozen=True)
class Off:
    """How far a step is from the golden, for whatever reason; of several steps, the largest of each."""

    relative: float = 0.0
    """RMS of the error, in units of the size that errors scale with."""
    most: float = 0.0
    """That, or the RMS in the step's own units if it is larger: after an exponential or an angle it is relative."""
    coherent: float = 0.0
    """The part that does not average out: the mean or the slope of the whole, relative."""
    unit: float = 0.0
    """The unit round-off of the dtype that it is stored in."""


@dataclass(frozen=True)
class Values:
    """A golden without a program, the observed ones of its steps, and how they are checked.

    `chance` is the false positive rate of one step and instrument, `ordered` whether the golden's order is known; with
    `elements` each finding keeps error / tolerance of every element.
    """

    golden: Trace
    observed: Trace
    rules: Precision
    chance: float
    ordered: bool
    elements: bool

    def check(self) -> dict[str, Finding]:
        """A finding for every step, in the golden's order.

        Where no order is known, steps are checked from the least to the most wrong: in whatever order they were
        computed, the first beyond a gap that no step could have magnified has only steps below the gap before it.
        """
        golden, names, observed = self.golden, self.golden.names, self.observed
        there = observed.names
        after_last = set(names[names.index(there[-1]) :]) if self.ordered else ()
        findings = {name: absent(name, after_all=name in after_last) for name in names if name not in observed}
        if not self.ordered:
            errors = {
                name: _measured(self._observed(name), golden.read(name)).relative for name in with_progress(there)
            }
            there = sorted(there, key=errors.__getitem__)
        off: dict[str, Off] = {}
        changed = earlier(golden, names) if self.ordered else {}
        changes = Off()
        length, tainted = 1, set[str]()
        for name in with_progress(there):
            about, known = golden.step_metadata(name), off.keys() | tainted
            inputs = about.get("inputs", known) if self.ordered else known
            sources = inputs if known.issuperset(inputs) else known  # a fused one is not recorded
            before = _worst(off[x] for x in sources if x in off)
            terms = about.get("K", length)
            finding, off[name] = self._step(name, before, terms)
            base = changed.get(name)
            if not finding.diverges and base in off and self._one_shape(name, base):
                change, of_change = self._change(name, base, _worst([before, changes]), off[base], terms)
                finding, changes = change or finding, _worst([changes, of_change])
            if finding.diverges:
                del off[name]
                if not tainted.isdisjoint(sources):
                    finding = replace(finding, wrong=False, words=f"after a wrong step, {UNKNOWN}: {finding.words}")
                tainted.add(name)
            length = max(1, length, *golden.read(name).shape[-1:])
            findings[name] = finding
        return {name: findings[name] for name in names}

    def _step(self, name: str, before: Off, length: int) -> tuple[Finding, Off]:
        o, g = self.observed.read(name), self.golden.read(name)
        if o.shape != g.shape or not (o.is_floating_point() and g.is_floating_point()) or not o.numel():
            return self._discrete(name, o, g, before), _measured(o, g)
        return self._real(name, before, length)

    @cached_property
    def _on_gpu(self) -> bool:
        """Whether there is a GPU, and so much to check that it pays to begin there."""
        usable = torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled()  # bincount is not
        names = self.observed.names if usable else []
        return sum(self.observed.read(name).numel() for name in names) >= GPU_ELEMENTS

    def _observed(self, name: str) -> Tensor:
        """An observed step, on a GPU if it is large and there is one with room for it."""
        o = self.observed.read(name)
        large = o.numel() > BLOCK_ELEMENTS and o.device.type == "cpu" and self._on_gpu
        return o.cuda() if large and torch.cuda.mem_get_info()[0] > ROOM * 8 * o.numel() else o

    def _one_shape(self, name: str, base: str) -> bool:
        """Whether two steps have numbers, of one shape."""
        steps = [side.read(step) for side in (self.golden, self.observed) for step in (name, base)]
        return all(x.is_floating_point() and x.numel() and x.shape == steps[0].shape for x in steps)

    def _change(self, name: str, base: str, before: Off, off: Off, length: int) -> tuple[Finding | None, Off]:
        """A step checked as what the observed `base`, which is `off`, is after the golden's change, in its size.

        What a change is computed from may have been stored in bfloat16, and nothing shows it. What the step errs by
        itself is a part of the step, not of the change: it need not be a sum, and is none where steps converge.
        """
        o, golden, size, far = self._observed(name), self.golden.read(name), 0.0, 0.0
        for pair in _blocks(*(self.golden.read(step).to(o.device) for step in (base, name))):
            (old, _, most), (new, _, more) = (_finite(x.double()) for x in pair)
            if max(most, more) > -0.5 * LOWEST:  # a mask
                return None, Off()
            norms = (float(torch.linalg.vector_norm(x)) for x in (old, new - old))
            size, far = map(math.hypot, (size, far), norms)
        rounded = UNIT_ROUNDOFF[name_of(golden.dtype)] * size
        if not rounded < far < size:  # no small change, or one that the golden's own type hides
            return None, Off()
        rule, grown = self.rules.of(name), size / far
        own = max(rule.unit, UNIT_ROUNDOFF[name_of(o.dtype)] * rule.eager)
        most = max(before.most, HIDDEN * UNIT_ROUNDOFF["bfloat16"], rounded / far, HIDDEN * own * grown)
        before = replace(before, most=most, coherent=before.coherent + (off.coherent + own) * grown)
        finding, off = self._real(name, before, length, base)
        if not finding.diverges:
            return None, off
        worst = finding.structure.worst if finding.structure else None
        words = finding.words
        if worst and worst.name == "slope":
            old, new = (_finite(self.golden.read(step).to(o.device).double())[0] for step in (base, name))
            start, change = self.observed.read(base).to(o.device).double(), new - old
            usual = stored(start + change, name_of(o.dtype)) - start
            factor = float(((o - start) * change).sum() / (usual * change).sum())
            words = f"{number(factor)} times the golden's, as {name_of(o.dtype)} holds it"
        return replace(finding, words=f"the change from {base}: {words}"), Off()

    def _real(self, name: str, before: Off, length: int, base: str = "") -> tuple[Finding, Off]:
        """Real numbers, checked for their own value, or from `base` on: for how they differ from it."""
        o, g, rule = self._observed(name), self.golden.read(name), self.rules.of(name)
        others = (side.read(base).to(o.device) for side in (self.observed, self.golden) if base)
        own, bound = name_of(o.dtype), self.golden.step(name).bound
        dtype = rule.storage if rule.storage in UNIT_ROUNDOFF else own
        dtype = max(dtype, name_of(g.dtype), key=UNIT_ROUNDOFF.__getitem__)  # a golden has no more digits
        roundoff = UNIT_ROUNDOFF[dtype]
        underflow = 4.0 * float(half_ulp(torch.zeros(()), dtype, flush=rule.flush))  # half a unit in a few operations
        between = max(before.unit, roundoff * rule.eager)
        most = max(before.most, between, HIDDEN * rule.unit)
        coherent = max(CARRIED * (before.coherent + before.most**2 + rule.unit), between * rule.eager)
        several, start = [*_blocks(o, g.to(o.device), *others)], 0
        chance = self.chance / len(several)
        parts: list[Statistics] = []
        offs: list[Off] = []
        tests: list[Test] = []
        blocks: list[Block] = []
        noise = MAGNIFIED * (rule.unit * math.sqrt(length) + rule.cut)
        for seen, exact, *pair in several:
            seen, exact = _alike(seen, exact)
            scale, drift = exact, 0.0
            if base:
                start_seen, start_exact = _alike(*pair)
                scale = exact - start_exact
                drift = float(torch.linalg.vector_norm(start_seen - start_exact)) / math.sqrt(exact.numel())
                exact = stored(start_seen + scale, dtype)
            size = _size(scale)
            residual = _Residual.of(seen - exact, size)
            offs.append(residual.off(roundoff))
            prior = most if self.ordered else max(most, offs[-1].relative)
            half = half_ulp(exact, dtype, flush=rule.flush).mul_(1.0 + rule.eager).clamp_(min=underflow)
            t = quantile(chance / exact.numel(), math.inf)
            why = f"{t:.3g} sigma of a sum of {length} terms, steps before {prior:.3g} off, and half a unit of {dtype}"
            allowed = (
                half.add(size, alpha=t * noise + MAGNIFIED * t * prior).add_(MAGNIFIED * t * drift).nan_to_num_(0.0)
            )
            if bound:
                allowed, why = torch.as_tensor(bound.absolute).expand(exact.shape).double(), bound.why
            part = measure(seen, exact, allowed)
            parts.append(_moved(part, start))
            blocks += [Block.of(seen, exact, allowed)] if self.elements else []
            if part.mismatches == 0 and not bound:
                relative = offs[-1].relative
                if underflow > NEGLIGIBLE * roundoff * residual.least:  # 0 where underflow explains it
                    residual = _Residual.of(hardshrink(residual.r, underflow), residual.unit)
                    relative = residual.off().relative
                tests.append(Test("rms", relative / (MAGNIFIED * most + noise + roundoff), relative))
                if self.ordered and residual.largest != 0.0:  # or there is nothing to average
                    tests += _averages(seen, residual, scale, (half, noise), coherent, chance)
            start += exact.numel()
        worst = Structure(tuple(tests)) if tests else None
        total = described(combine(parts), o, (own, name_of(g.dtype)), why)
        wrong = not total.ok or (worst is not None and not worst.ok)
        words = reason(total, worst) if wrong else "ok"
        elements = Elements.of(self.observed.read(name), g, blocks) if self.elements else None
        return Finding(name, total, None, None, worst, wrong, wrong, words, elements=elements), _worst(offs)

    def _discrete(self, name: str, o: Tensor, g: Tensor, before: Off) -> Finding:
        """Whole numbers, truth values and choices, which are equal or not; after an inexact step a tie may fall either
        way.

        Choices cover a range of n values. With a relative error e before them, a share of about n e is close enough to
        a boundary to fall on its other side: so many mismatches, and a quantile of their number, are allowed.
        """
        sigmas, few = quantile(self.chance, math.inf), False
        a, b, allowed = o, g, torch.zeros(())
        if o.shape == g.shape and o.is_floating_point() != g.is_floating_point():
            a, b = o.double(), g.double()
            allowed = sigmas * MAGNIFIED * before.most * _size(b) + half_ulp(b, "float64")
            total = compare(a, b, bound=allowed)
        else:
            total = compare(o, g)
            if o.shape == g.shape and g.numel():
                choices = float(g.double().max() - g.double().min()) + 1.0
                ties = total.count * min(1.0, choices * MAGNIFIED * before.most)
                few = before.most > 0.0 and 0 < total.mismatches <= ties + sigmas * (1.0 + math.sqrt(ties))
        ok = total.ok or few
        words = f"ok: {total.mismatches} of {total.count} may be ties that fell the other way" if few else "ok"
        words = words if ok else reason(total, None)
        elements = Elements.of(o, g, [Block.of(a, b, allowed)]) if self.elements and o.shape == g.shape else None
        return Finding(name, total, wrong=not ok, diverges=not ok, words=words, elements=elements)


def _measured(o: Tensor, g: Tensor) -> Off:
    """How far a step is off; nothing where the shapes differ or there is no element."""
    if o.shape != g.shape or not o.numel():
        return Off()
    o, g = (x if x.is_floating_point() else x.double() for x in (o, g.to(o.device)))
    pairs = (_alike(*pair) for pair in _blocks(o, g))
    return _worst(_Residual.of(a - b, _size(b)).off() for a, b in pairs)


def _worst(several: Iterable[Off]) -> Off:
    """The largest of each."""
    return Off(*(max(values) for values in zip(*map(astuple, [Off(), *several]), strict=True)))


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of each. A row that is longer than a block is cut into pieces, which count as rows."""
    o = tensors[0]
    if o.numel() <= BLOCK_ELEMENTS:
        yield tensors
        return
    width = o.shape[-1] if o.shape[-1] <= BLOCK_ELEMENTS else SAMPLED_ELEMENTS
    end = o.numel() // width * width
    flat = [x.reshape(-1) for x in tensors]
    yield from zip(*(x[:end].view(-1, width).split(BLOCK_ELEMENTS // width) for x in flat), strict=True)
    if end < o.numel():
        yield tuple(x[end:] for x in flat)


def _alike(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64; values beyond the range of the observed dtype are infinite on both sides, and so are masks."""
    observed, exact, most = o.double(), g.double(), torch.finfo(o.dtype).max
    least, largest = map(float, exact.aminmax())
    if max(0.5 * LOWEST, -most) < least <= largest < most:  # no mask, nothing beyond
        return observed, exact
    beyond = (exact.abs() >= most) & (observed.abs() >= most)
    exact = torch.where(beyond, exact.sign() * math.inf, exact)
    return unmasked(torch.where(beyond, observed.sign() * math.inf, observed), exact)


def _moved(part: Statistics, start: int) -> Statistics:
    """Statistics of a block, with its places counted from the start of the step."""
    places = {key: getattr(part, key) for key in ("first", "worst", "one_sided")}
    return part._replace(**{key: at + start if at >= 0 else at for key, at in places.items()})


def _size(g: Tensor) -> Tensor:
    """The size that errors of an element scale with: its own, or the RMS of its row or its column. Masks have none."""
    own, least, largest = _finite(g)
    counted = own
    if least <= 0.5 * LOWEST:
        counted, _, largest = _finite(torch.where(own > 0.5 * LOWEST, own, 0.0))
    scale = _scale(largest)
    counted = counted if scale == 1.0 else counted / scale
    width = g.shape[-1] if g.ndim else 1
    rows = torch.linalg.vector_norm(counted, dim=-1, keepdim=True).mul_(scale / math.sqrt(width))
    columns = torch.linalg.vector_norm(counted.reshape(-1, width), dim=0).mul_(scale / math.sqrt(g.numel() / width))
    size = own.abs()
    return torch.maximum(torch.maximum(size, rows, out=size), columns.view(g.shape[-1:]), out=size)


def _scale(largest: float) -> float:
    """What numbers up to `largest` are divided by, so that float64 has their squares; 1 as a rule."""
    return 1.0 if 1e-150 < largest < 1e150 else largest or 1.0


def _finite(x: Tensor) -> tuple[Tensor, float, float]:
    """x with 0 for what is not finite, itself where all is; its least number, and its largest absolute one."""
    least, most = map(float, x.aminmax())
    if not math.isfinite(least) or not math.isfinite(most):  # NaN where there is one
        x = torch.where(x.isfinite(), x, 0.0)
        least, most = map(float, x.aminmax())
    return x, least, max(-least, most)


@dataclass(frozen=True)
class _Residual:
    """Residuals `r`, 0 for what is not finite, the largest of them, and z = r / unit; `unit` is their size, Inf where
    they are not counted, and `least` the smallest size, 0 where there is one."""

    r: Tensor
    largest: float
    unit: Tensor
    least: float
    z: Tensor

    @staticmethod
    def of(residual: Tensor, size: Tensor) -> _Residual:
        """Residuals, and what they scale with, from 0 to Inf."""
        (r, _, largest), least = _finite(residual), float(size.min())
        if r is not residual or least <= 1e-300:
            size = torch.where((size > 0.0) & residual.isfinite(), size.clamp(min=1e-300), math.inf)
        return _Residual(r, largest, size, least, r / size)

    def off(self, roundoff: float = 0.0) -> Off:
        """In numbers. The mean of n independent errors is expected to be sqrt(n) times smaller than one."""
        n, scale = math.sqrt(self.r.numel()), _scale(self.largest)
        relative, absolute = (
            float(torch.linalg.vector_norm(x)) / n for x in (self.z, self.r if scale == 1.0 else self.r / scale)
        )
        coherent = max(abs(float(self.z.mean())), relative / n)
        return Off(relative, max(relative, scale * absolute), coherent, roundoff)


def _near_zero(z: Tensor, group: Tensor, most: float) -> bool:
    """Whether the mean of each group is below `most` by 6 of its standard errors."""
    count, total, squares = (torch.bincount(group, x, DISTINCT_VALUES).double() for x in (None, z, z.square()))
    mean = total / count
    error = ((squares / count - mean.square()).clamp(min=0.0) / (count - 1.0)).sqrt()
    return bool((mean.abs() + 6.0 * error <= most)[count > 0.0].all())


def _averages(
    o: Tensor, residual: _Residual, g: Tensor, noise: tuple[Tensor, float], coherent: float, chance: float
) -> list[Test]:
    """Means of z = residual / unit, weighted: times the golden (slope), plain (mean), and for groups of like values.

    Each may reach `coherent` and a quantile of its standard error. A wrong function errs by a function of its value.
    Inherited errors are equal along some dimensions, a weight's in a column and a sum's in a row, so the standard error
    is taken from sums along each dimension, and the largest counts. Where observed values repeat, rounding errors,
    half a unit of storage and a part of `unit` in `noise`, count once for each distinct value. Of more than SAMPLE
    elements the standard error is taken only where `coherent` is exceeded, and repeated values are counted only where
    that does not suffice.
    """
    r, unit = residual.r, residual.unit
    large, chance = r.numel() > SAMPLE, 0.5 * chance
    z, h = residual.z.unsqueeze(-1), (_finite(g)[0] / unit).unsqueeze(-1)
    along = [k for k, count in enumerate(z.shape) if count >= FEWEST]
    others = [tuple(i for i in range(z.ndim) if i != k) for k in along]
    others += [(-2, -1) if along else (-1,)] * (z.ndim > 3 or not along)  # rows; where all are short, elements

    @cache
    def counted() -> Tensor:
        return unit.isfinite().double().unsqueeze(-1)

    @cache
    def rounding() -> tuple[float, Tensor]:
        repeats = r.numel() / len(torch.where(r == 0.0, g, o).unique())
        return repeats, ((noise[0] / unit).square() / 3.0 + noise[1] ** 2).unsqueeze(-1)

    def test(name: str, weight: Tensor, parts: int = 1, at: int | None = None) -> Test:
        total = max(float(weight.flatten().dot(weight.flatten())), 1e-300)
        value, spread = float(z.flatten().dot(weight.flatten())) / total, 0.0
        if not large or abs(value) > coherent:
            products, squares = z * weight, weight.square()
            for dims in others:
                scatter, weights = products.sum(dims), squares.sum(dims)
                scatter -= value * weights
                # Kish's effective sample size: terms of equal weight that would scatter as much
                count = total**2 / max(float(weights.square().sum()), 1e-300)
                if count < FEWEST:
                    spread = math.inf
                    break
                error = math.sqrt(float(scatter.square().sum()) * count / (count - 1.0))
                spread = max(spread, quantile(chance / parts, count - 1.0) * error)
        if not large or abs(value) > coherent + spread / total:
            repeats, variance = rounding()
            error = math.sqrt(repeats * float((variance * weight.square()).sum()))
            spread = max(spread, (repeats > 1.0) * quantile(chance / parts, math.inf) * error)
        return Test(name, abs(value) / max(coherent + spread / total, 1e-300), value, at)

    mean = float(z.mean())
    small = large and abs(mean) <= coherent and math.isfinite(float(unit.max()))  # and all are counted
    plain = Test("mean", abs(mean) / max(coherent, 1e-300), mean) if small else test("mean", counted())
    tests = [test("slope", h), plain]
    if large and _finite(z)[2] <= coherent:  # and so is each mean
        return tests
    some = sample(g).contiguous()
    values = (sample(g, SAMPLE // 16) if large else some).sort().values  # all would take as long as ten passes
    borders = values[[len(values) * k // DISTINCT_VALUES for k in range(1, DISTINCT_VALUES)]]
    if large and _near_zero(sample(residual.z), torch.bucketize(some, borders, right=True), coherent):
        return tests
    group = torch.bucketize(g.contiguous(), borders, right=True).unsqueeze(-1)
    sums = (torch.bincount(group.flatten(), x.flatten(), DISTINCT_VALUES) for x in (z, counted()))
    means = enumerate(torch.div(*sums).nan_to_num().tolist())
    masks = ((k, group == k) for k, mean in means if not large or abs(mean) > coherent)
    return tests + [test("values", counted() * mask, DISTINCT_VALUES, k) for k, mask in masks]
