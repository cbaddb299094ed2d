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
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from whywrong.checking.findings import UNKNOWN, Finding, absent, reason
from whywrong.checking.masks import unmasked
from whywrong.checking.residuals import MASK, Groups, Pair, Residuals, Tolerance, change_sums, float64, plain
from whywrong.checking.updates import SAMPLE, apart, earlier
from whywrong.comparing.bounds import quantile
from whywrong.comparing.comparison import compare, described, in_range, measure
from whywrong.comparing.elements import Block, Elements
from whywrong.comparing.precision import UNIT_ROUNDOFF, Precision, half_ulp, name_of, stored
from whywrong.comparing.statistics import Statistics, combine
from whywrong.comparing.structure import Structure, Test
from whywrong.comparing.touched import MOST, rearranged, touched
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
"""Elements that a thread checks at a time, with averages of their own."""

NEGLIGIBLE = 1e-6
"""Part of a round-off that what underflow explains may be of any unit, to be looked at no further."""

SAMPLED_ELEMENTS = 1 << 10
"""Elements of a piece of a long row."""


class Off(NamedTuple):
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
    _relative: dict[str, list[float]] = field(default_factory=dict, init=False)

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
            for name in with_progress(there):
                self._relative[name] = [off.relative for off in _measured(observed.read(name), golden.read(name))]
            there = sorted(there, key=lambda name: max(self._relative[name], default=0.0))
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
                if self.ordered and not tainted:
                    finding = replace(finding, touched=self._touched(finding, before, terms))
                if not tainted.isdisjoint(sources):
                    finding = replace(finding, wrong=False, words=f"after a wrong step, {UNKNOWN}: {finding.words}")
                tainted.add(name)
            length = max(1, length, *golden.read(name).shape[-1:])
            findings[name] = finding
        return {name: findings[name] for name in names}

    def _touched(self, finding: Finding, before: Off, length: int) -> tuple[str, ...]:
        """Which elements of a step are wrong, and what they hold; nothing where no element is, or there are many."""
        name, total = finding.name, finding.total
        if total is not None and total.count < 0:
            return rearranged(self.observed.read(name), self.golden.read(name))
        if total is None or not total.mismatches or not 0 < total.count <= MOST:
            return ()
        every = finding.elements or replace(self, elements=True)._step(name, before, length)[0].elements
        o, g = float64(self.observed.read(name)), float64(self.golden.read(name))
        return touched(o, g, ((o - g).abs() / every.share).nan_to_num(0.0, 0.0, 0.0), {}) if every else ()

    def _step(self, name: str, before: Off, length: int) -> tuple[Finding, Off]:
        o, g = self.observed.read(name), self.golden.read(name)
        if o.shape != g.shape or not (o.is_floating_point() and g.is_floating_point()) or not o.numel():
            return self._discrete(name, o, g, before), _worst(_measured(o, g))
        return self._real(name, before, length)

    def _one_shape(self, name: str, base: str) -> bool:
        """Whether two steps have numbers, of one shape."""
        steps = [side.read(step) for side in (self.golden, self.observed) for step in (name, base)]
        return all(x.is_floating_point() and x.numel() and x.shape == steps[0].shape for x in steps)

    def _change(self, name: str, base: str, before: Off, off: Off, length: int) -> tuple[Finding | None, Off]:
        """A step checked as what the observed `base`, which is `off`, is after the golden's change, in its size.

        What a change is computed from may have been stored in bfloat16, and nothing shows it. What the step errs by
        itself is a part of the step, not of the change: it need not be a sum, and is none where steps converge.
        """
        o, golden, size, far = self.observed.read(name), self.golden.read(name), 0.0, 0.0
        for pair in _blocks(self.golden.read(base), golden):
            most, squares, changed = change_sums(*(x.flatten().numpy() for x in _plain(*pair)))
            if most > -MASK:
                return None, Off()
            size, far = math.hypot(size, math.sqrt(squares)), math.hypot(far, math.sqrt(changed))
        rounded = UNIT_ROUNDOFF[name_of(golden.dtype)] * size
        if not rounded < far < size:  # no small change, or one that the golden's own type hides
            return None, Off()
        rule, grown = self.rules.of(name), size / far
        own = max(rule.unit, UNIT_ROUNDOFF[name_of(o.dtype)] * rule.eager)
        most = max(before.most, HIDDEN * UNIT_ROUNDOFF["bfloat16"], rounded / far, HIDDEN * own * grown)
        before = before._replace(most=most, coherent=before.coherent + (off.coherent + own) * grown)
        finding, off = self._real(name, before, length, base)
        if not finding.diverges:
            return None, off
        worst = finding.structure.worst if finding.structure else None
        words = finding.words
        if worst and worst.name == "slope":
            old, new = (float64(self.golden.read(step)).nan_to_num(0.0, 0.0, 0.0) for step in (base, name))
            seen, start, made = float64(o), float64(self.observed.read(base)), new - old
            usual = stored(start + made, name_of(o.dtype)) - start
            factor = float(((seen - start) * made).sum() / (usual * made).sum())
            words = f"{number(factor)} times the golden's, as {name_of(o.dtype)} holds it"
        return replace(finding, words=f"the change from {base}: {words}"), Off()

    def _real(self, name: str, before: Off, length: int, base: str = "") -> tuple[Finding, Off]:
        """Real numbers, checked for their own value, or from `base` on: for how they differ from it."""
        o, g, rule = self.observed.read(name), self.golden.read(name), self.rules.of(name)
        others = (side.read(base) for side in (self.observed, self.golden) if base)
        own, bound = name_of(o.dtype), self.golden.step(name).bound
        dtype = rule.storage if rule.storage in UNIT_ROUNDOFF else own
        dtype = max(dtype, name_of(g.dtype), key=UNIT_ROUNDOFF.__getitem__)  # a golden has no more digits
        roundoff = UNIT_ROUNDOFF[dtype]
        underflow = 4.0 * float(_halves(dtype, rule.flush)[0])  # half a unit in a few operations
        half = _halves(dtype, rule.flush, 1.0 + rule.eager, underflow)
        between = max(before.unit, roundoff * rule.eager)
        most = max(before.most, between, HIDDEN * rule.unit)
        coherent = max(CARRIED * (before.coherent + before.most**2 + rule.unit), between * rule.eager)
        bounds = [torch.as_tensor(bound.absolute, dtype=torch.float64).expand(o.shape)] if bound else []
        blocks = [*_blocks(o, g, *others, *bounds)]
        chance = self.chance / len(blocks)
        noise = MAGNIFIED * (rule.unit * math.sqrt(length) + rule.cut)

        def check(
            tensors: tuple[Tensor, ...], relative: float
        ) -> tuple[Statistics, Off, list[Test], Block | None, str]:
            numbers = [*_alike(o.dtype, *tensors[:2]), *(_alike(o.dtype, *tensors[2:4]) if base else ())]
            widest = max((x.dtype for x in numbers), key=lambda one: one.itemsize)
            seen, golden, *start = (x.to(widest) for x in numbers)
            pair = Pair(seen, golden, (start[0], start[1]), dtype) if base else Pair(seen, golden)
            large, groups = tensors[0].numel() > SAMPLE, _like_values(pair)
            prior = max(most, relative)
            t = quantile(chance / tensors[0].numel(), math.inf)
            tolerance = Tolerance(half, t * (noise + MAGNIFIED * prior), MAGNIFIED * t * pair.sizes[2])
            again = partial(pair.measured, tolerance)
            residual = again(groups, fill=not large or self.elements)
            off, part, allowed = _off(residual, roundoff), residual.statistics, residual.allowed
            why = f"{t:.3g} sigma of a sum of {length} terms, steps before {prior:.3g} off, and half a unit of {dtype}"
            if bound or not in_range(part):
                allowed = float64(tensors[-1]) if bound else again().allowed
                part = measure(seen.double(), pair.expected, allowed)
            tests: list[Test] = []
            if part.mismatches == 0 and not bound:
                if underflow > NEGLIGIBLE * roundoff * residual.sums.least:  # 0 where underflow explains it
                    again = partial(again, shrink=underflow)
                    residual = again(groups, fill=not large)
                relative = residual.relative
                tests.append(Test("rms", relative / (MAGNIFIED * most + noise + roundoff), relative))
                if self.ordered and residual.sums.largest != 0.0:  # or there is nothing to average
                    whole = cache(lambda: again(groups._replace(apart=1)) if large else residual)
                    halves = cache(lambda: tolerance.halves(pair.expected))
                    tests += _averages(pair, residual, whole, groups, halves, noise, coherent, chance)
            return part, off, tests, Block.of(seen, pair.expected, allowed) if self.elements else None, why

        parts, offs, several, shown, whys = zip(
            *_in_threads(check, blocks, self._relative.get(name, [0.0] * len(blocks))), strict=True
        )
        starts = accumulate((block[0].numel() for block in blocks[:-1]), initial=0)
        tests = [test for some in several for test in some]
        worst = Structure(tuple(tests)) if tests else None
        why = bound.why if bound else whys[-1]
        total = described(combine([*map(_moved, parts, starts)]), o, (own, name_of(g.dtype)), why)
        wrong = not total.ok or (worst is not None and not worst.ok)
        words = reason(total, worst) if wrong else "ok"
        elements = Elements.of(o, g, shown) if self.elements else None
        return Finding(name, total, None, None, worst, wrong, wrong, words, elements=elements), _worst(offs)

    def _discrete(self, name: str, o: Tensor, g: Tensor, before: Off) -> Finding:
        """Whole numbers, truth values and choices, which are equal or not; after an inexact step a tie may fall either
        way.

        Choices cover a range of n values. With a relative error e before them, a share of about n e is close enough to
        a boundary to fall on its other side: so many mismatches, and a quantile of their number, are allowed.
        """
        sigmas, few, bound = quantile(self.chance, math.inf), False, self.golden.step(name).bound
        a, b, allowed = o, g, torch.zeros((), device="cpu")
        if bound:
            total, allowed = compare(o, g, bound=bound), torch.as_tensor(bound.absolute, dtype=torch.float64)
        elif o.shape == g.shape and o.is_floating_point() != g.is_floating_point():
            a, b = float64(o), float64(g)
            tolerance = Tolerance(_halves("float64"), sigmas * MAGNIFIED * before.most, 0.0)
            allowed = Pair(a, b).measured(tolerance).allowed if b.numel() else allowed
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


def _measured(o: Tensor, g: Tensor) -> list[Off]:
    """How far each block of a step is off; nothing where the shapes differ or there is no element."""
    if o.shape != g.shape or not o.numel():
        return []
    dtype = o.dtype if o.is_floating_point() else torch.float64
    return _in_threads(lambda pair: _off(Pair(*_alike(dtype, *pair)).measured(fill=False)), [*_blocks(o, g)])


def _off(residual: Residuals, roundoff: float = 0.0) -> Off:
    """In numbers. The mean of n independent errors is expected to be sqrt(n) times smaller than one."""
    n, relative = residual.count, residual.relative
    coherent = max(abs(residual.sums.z) / n, relative / math.sqrt(n))
    return Off(relative, max(relative, residual.absolute), coherent, roundoff)


@cache
def _halves(dtype: str, flush: bool = False, factor: float = 1.0, least: float = 0.0) -> np.ndarray:
    """`factor` times half a unit in the last place, `least` at least, by the exponent of a float64's bits."""
    powers = torch.ldexp(torch.ones(2048, dtype=torch.float64, device="cpu"), torch.arange(2048, device="cpu") - 1023)
    powers[-1] = 0.0  # of what is not finite
    return half_ulp(powers, dtype, flush=flush).mul(factor).clamp(min=least).numpy()


def _in_threads(check: Callable[..., Any], blocks: list[Any], *about: list[Any]) -> list[Any]:
    """What `check` gives of each block and what is known about it, in order; torch's number of them at a time."""
    if len(blocks) == 1:
        return [*map(check, blocks, *about)]
    with ThreadPoolExecutor(min(torch.get_num_threads(), os.cpu_count() or 1)) as pool:
        return list(pool.map(check, blocks, *about))


def _worst(several: Iterable[Off]) -> Off:
    """The largest of each."""
    return Off(*map(max, zip(*[Off(), *several], strict=True)))


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


def _plain(*tensors: Tensor) -> list[Tensor]:
    """All in float32, or in float64 where one is wider or has no real numbers; contiguous on the CPU."""
    narrow = all(x.is_floating_point() and x.dtype.itemsize <= 4 for x in tensors)
    return [plain(x, torch.float32 if narrow else torch.float64) for x in tensors]


def _alike(dtype: torch.dtype, o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both of one dtype; values beyond the range of the observed's are infinite on both sides, and so are masks."""
    observed, exact = _plain(o, g)
    most = torch.finfo(dtype).max
    least, largest = map(float, exact.aminmax())
    if max(MASK, -most) < least <= largest < most:  # no mask, nothing beyond
        return observed, exact
    observed, exact = observed.double(), exact.double()
    beyond = (exact.abs() >= most) & (observed.abs() >= most)
    exact = torch.where(beyond, exact.sign() * math.inf, exact)
    return unmasked(torch.where(beyond, observed.sign() * math.inf, observed), exact)


def _moved(part: Statistics, start: int) -> Statistics:
    """Statistics of a block, with its places counted from the start of the step."""
    places = {key: getattr(part, key) for key in ("first", "worst", "one_sided")}
    return part._replace(**{key: at + start if at >= 0 else at for key, at in places.items()})


def _like_values(pair: Pair) -> Groups:
    """Groups of like values, and how far elements are apart that show whether one is off; all of few elements."""
    values = pair.sampled_scale(SAMPLE // 16 if pair.golden.numel() > SAMPLE else SAMPLE)  # all would take ten passes
    values = np.sort(values[~np.isnan(values)])
    borders = [values[len(values) * k // DISTINCT_VALUES] for k in range(1, DISTINCT_VALUES) if len(values)]
    return Groups(np.array(borders), apart(pair.golden))


def _near_zero(count: np.ndarray, total: np.ndarray, squares: np.ndarray, most: float) -> bool:
    """Whether the mean of each group is below `most` by 6 of its standard errors."""
    count, total, squares = (x[count > 0.0] for x in (count, total, squares))
    mean = total / count
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # of one element nothing is known
        error = np.sqrt(np.maximum(squares / count - mean**2, 0.0) / (count - 1.0))
    return bool((np.abs(mean) + 6.0 * error <= most).all())


def _averages(
    pair: Pair,
    residual: Residuals,
    whole: Callable[[], Residuals],
    groups: Groups,
    halves: Callable[[], Tensor],
    noise: float,
    coherent: float,
    chance: float,
) -> list[Test]:
    """Means of z = residual / size, weighted: times the golden (slope), plain (mean), and for groups of like values.

    Each may reach `coherent` and a quantile of its standard error. A wrong function errs by a function of its value.
    Inherited errors are equal along some dimensions, a weight's in a column and a sum's in a row, so the standard error
    is taken from sums along each dimension, and the largest counts. Where observed values repeat, rounding errors,
    half a unit of storage in `halves` and `noise` of a size, count once for each distinct value. The standard error is
    taken only where `coherent` is exceeded, and repeated values are counted only where that does not suffice: only then
    is `whole` called, which measures the pair with a tensor of each element's numbers.
    """
    sums, chance = residual.sums, 0.5 * chance
    shape = (*pair.golden.shape, 1)
    along = [k for k, count in enumerate(shape) if count >= FEWEST]
    others = [tuple(i for i in range(len(shape)) if i != k) for k in along]
    others += [(-2, -1) if along else (-1,)] * (len(shape) > 3 or not along)  # rows; where all are short, elements

    @cache
    def counted() -> Tensor:
        return whole().size.isfinite().double().unsqueeze(-1)

    @cache
    def rounding() -> tuple[float, Tensor]:
        seen = torch.where(whole().z == 0.0, pair.scale, pair.observed.double())
        repeats = residual.count / len(seen.unique())
        return repeats, ((halves() / whole().size).square() / 3.0 + noise**2).unsqueeze(-1)

    def test(
        name: str, value: float, total: float, weights: Callable[[], Tensor], parts: int = 1, at: int | None = None
    ) -> Test:
        """Of the mean `value`, where `total` is the sum of the squares of `weights`."""
        spread = 0.0
        if abs(value) > coherent:
            weight = weights()
            products, squares = whole().z.unsqueeze(-1) * weight, weight.square()
            for dims in others:
                scatter, of_each = products.sum(dims), squares.sum(dims)
                scatter -= value * of_each
                # Kish's effective sample size: terms of equal weight that would scatter as much
                count = total**2 / max(float(of_each.square().sum()), 1e-300)
                if count < FEWEST:
                    spread = math.inf
                    break
                error = math.sqrt(float(scatter.square().sum()) * count / (count - 1.0))
                spread = max(spread, quantile(chance / parts, count - 1.0) * error)
        if abs(value) > coherent + spread / total:
            repeats, variance = rounding()
            error = math.sqrt(repeats * float((variance * squares).sum()))
            spread = max(spread, (repeats > 1.0) * quantile(chance / parts, math.inf) * error)
        return Test(name, abs(value) / max(coherent + spread / total, 1e-300), value, at)

    weighted = [
        ("slope", sums.zh, sums.hh, lambda: (pair.scale.nan_to_num(0.0, 0.0, 0.0) / whole().size).unsqueeze(-1))
    ]
    weighted += [("mean", sums.z, sums.counted, counted)]
    tests = [test(name, part / max(of, 1e-300), max(of, 1e-300), weight) for name, part, of, weight in weighted]
    if _near_zero(*residual.groups, coherent):
        return tests
    counts, totals, _ = whole().groups
    means = np.divide(totals, counts, out=np.zeros_like(totals), where=counts > 0.0).tolist()
    group = torch.bucketize(pair.scale, torch.from_numpy(groups.borders), right=True).unsqueeze(-1)
    masks = [(k, partial(_of_group, counted(), group, k)) for k, mean in enumerate(means) if abs(mean) > coherent]
    return tests + [test("values", means[k], max(float(counts[k]), 1e-300), of, DISTINCT_VALUES, k) for k, of in masks]


def _of_group(counted: Tensor, group: Tensor, k: int) -> Tensor:
    """1 for what counts and is in group k, 0 for the rest."""
    return counted * (group == k)
