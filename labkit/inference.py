"""What a step is made of, found in the golden's own numbers, where the metadata does not say it.

A golden gives itself away: a step that is the product, the sum or the softmax of steps before it is that to its last
digits. A few elements or rows of all of them at a time suggest candidates; one counts only if it gives the whole step,
as a text of the metadata must too (:mod:`labkit.replay`, :mod:`labkit.formula`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from labkit.attention import unnamed
from labkit.convolution import convolutions
from labkit.expression import LETTERS, sampled, uses_rows
from labkit.formula import Formula, of_letters
from labkit.named import EPSILONS, REDUCTIONS, everything
from labkit.planes import by_statistics, normalised
from labkit.polynomial import polynomial, simple
from labkit.replay import replay
from labkit.replayed import Replay
from labkit.samples import SOFTMAX, Laid, Sources, elements, rows, spread_elements
from labkit.scaled import scaled_products
from labkit.totals import scales, sums, sums_of_parts

Tensor = torch.Tensor

FEWEST = 8
"""Elements of a step from which it is searched: fewer may agree by chance."""
MOST_TABLE = 1 << 22
"""Numbers that one text is evaluated on at a time."""
ROUNDINGS = 256.0
"""How many of the golden's round-offs a sample, or a sum, may be off where a candidate is suggested; whether one holds
is decided on the whole step."""
FEW_ROUNDINGS = 4.0
"""Likewise of a golden that was rounded once: more would hide a small term of one in float32."""
SOFTENED = 16.0
"""How many round-offs two softmaxes of the same numbers may be apart, each in a golden's precision."""
CAST = 2.0**-6
"""How much coarser than its elements a golden's grid is, relatively, where it has 8 bits."""
LARGEST_FILTER = 121
"""Elements of a channel of a convolution's weights: 11 x 11."""
NEIGHBOURS = 8
"""Of the nearest steps, how many are taken together for polynomials."""
SCALED = "1.0*a"
ARITHMETIC = (
    SCALED, "a*a", "1/a", "a*b", "a+b", "a-b", "a/b",
    "a*b+c", "(a-b)*c", "a*b*c", "a+b+c", "a-b*c", "(a-b)/c", "a/(b+c)",
)  # fmt: skip
TEXTS = tuple(sorted({*(one.text for one in everything() if "(1-beta" not in one.text[:6]), *ARITHMETIC}, key=len))
"""A factor is fitted to each, so none of them needs one."""
MOST_MULTIPLICATIONS = 1e9
"""Of the products that are tried for one step."""


@dataclass(frozen=True)
class Found:
    """What a step was found to be, of which inputs."""

    names: list[str]
    way: Replay | None = None
    written: Formula | None = None
    fitted: bool = False
    """Whether the formula has a constant that was fitted, and so may be a number of the data."""

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """What it gives of these, in float64."""
        if self.way is not None:
            return self.way.run(*inputs)
        assert self.written is not None
        return self.written.value(inputs, [torch.zeros_like(x) for x in inputs], 0.0)[0]


def infer(g: Tensor, sources: Sources, unit: float, grid: Tensor) -> Found | None:
    """The likeliest of :func:`inferred`, or None."""
    return next(inferred(g, sources, unit, grid), None)


def inferred(g: Tensor, sources: Sources, unit: float, grid: Tensor) -> Iterator[Found]:
    """What gives `g` (float64) from some of `sources`, the likeliest first.

    `unit` is the golden's round-off, and `grid` what rounding to the promised type may move its elements.
    """
    sources = {name: x for name, x in sources.items() if bool((x != 0.0).any()) and not _same(x, g, unit)}
    telling = g.numel() >= FEWEST and bool(g.isfinite().any()) and len(g.flatten()[:4096].unique()) >= FEWEST // 2
    if not sources:
        return
    of_whole_steps = (sums(sources, g, unit), sums_of_parts(sources, g, unit), scales(sources, g, unit))
    for names, way in itertools.chain.from_iterable(of_whole_steps):
        yield Found(names, way)
    if not telling:
        return
    formulas = partial(_formulas, sources, g, unit, grid)
    searches = (
        _casts(sources, g, unit, grid),
        _moved(sources, g, unit), formulas(elements, 1), _softmaxes(sources, g, unit), formulas(rows, 1),
        formulas(elements, 2), _products(sources, g, unit), _attentions(sources, g, unit),
        _convolutions(sources, g, unit), formulas(elements, 3), formulas(rows, 2), formulas(rows, 3),
        _planes(sources, g, unit, grid), _reductions(sources, g, unit, grid), _polynomials(sources, g, unit, grid),
    )  # fmt: skip
    yield from itertools.chain.from_iterable(searches)


def _written(text: str, names: Sequence[str], sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Formula | None:
    """`text` of these sources, if it gives all of g."""
    softened = any(name.endswith(SOFTMAX) for name in names)
    return of_letters(text, [sources[one] for one in names], g, SOFTENED * unit if softened else unit, grid)


def _same(x: Tensor, g: Tensor, unit: float) -> bool:
    """Whether one step is another: that is not taken for a copy, since in a golden rounding to fewer digits is none."""
    return x.shape == g.shape and torch.allclose(x, g, rtol=ROUNDINGS * unit, atol=0.0)


def _casts(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    """A step over its scale, or times it, in a golden that is itself rounded to 8 bits."""
    if not bool((grid > CAST * g.abs()).any()):
        return
    of_all = [name for name, x in sources.items() if x.shape == g.shape]
    few = [name for name, x in sources.items() if 2 * x.numel() <= g.numel() and bool((x != 0.0).all())]
    for text, x in itertools.product(("a/b", "a*b"), of_all):
        for scale in few:
            if (written := _written(text, [x, scale], sources, g, unit, grid)) is not None:
                yield Found([x, scale], written=written)


def _moved(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    """The same numbers in another order."""
    for name, x in sources.items():
        if x.numel() == g.numel() and 1 < x.ndim <= 4 and x.shape != g.shape:
            if not torch.equal(x.flatten().sort().values, g.flatten().sort().values):
                continue
            way = replay("transpose", [x], g, unit)
            if way is not None:
                yield Found([name], way)


def _softmaxes(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    if g.ndim < 2 or bool((g < 0.0).any()) or not bool(((g.sum(-1) - 1.0).abs() <= ROUNDINGS * unit).all()):
        return
    for name, x in sources.items():
        if x.shape == g.shape:
            for text in ("softmax axis=-1", "causal softmax axis=-1"):
                way = replay(text, [x], g, unit)
                if way is not None:
                    yield Found([name], way)


def _reductions(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    at = torch.arange(0, g.numel(), max(1, g.numel() // FEWEST))
    of_rows = {name: x.flatten(0, -2)[at] for name, x in sources.items() if _shape_of_sum(x, -1, g)}
    of_columns = {name: x.flatten(0, -2)[:, at] for name, x in sources.items() if _shape_of_sum(x, 0, g)}
    y = g.flatten()[at]
    for text in REDUCTIONS:
        few = of_columns if "tokens(" in text else of_rows
        for given in itertools.combinations(list(few)[:NEIGHBOURS], len(_letters(text))):
            inputs, fitting = [sources[one] for one in given], []
            for eps in EPSILONS if "eps" in text else ("",):
                whole = text.replace("eps", eps)
                value = sampled(whole, dict(zip(LETTERS, (few[one] for one in given), strict=False)))
                if value is None or value.numel() != y.numel():
                    continue
                off = (value.flatten() - y).abs()
                if not bool((off <= ROUNDINGS * unit * max(x.numel() for x in few.values()) * y.abs().mean()).all()):
                    continue
                if (written := _written(whole, given, sources, g, unit, grid)) is not None:
                    fitting.append(written)
            if fitting:
                yield Found(list(given), written=min(fitting, key=lambda one: one.off(inputs, g)))
    for name, x in sources.items():
        if x.numel() > g.numel() and x.numel() % g.numel() == 0:
            for text in ("sum", "mean", "max", "variance"):
                way = replay(text, [x], g, unit)
                if way is not None:
                    yield Found([name], way)


def _shape_of_sum(x: Tensor, axis: int, g: Tensor) -> bool:
    """Whether g has the shape of a sum of x, over its last axis or over all but that."""
    kept = x.shape[:-1] if axis == -1 else x.shape[-1:]
    return x.ndim > 1 and g.shape in (kept, (*kept, 1) if axis == -1 else (1, *kept))


def _products(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    """Two matrices whose product has g's last rows and columns, to a factor; seen in three elements first."""
    if g.ndim < 2:
        return
    left = MOST_MULTIPLICATIONS
    at = [tuple(int(i) for i in torch.unravel_index(torch.tensor(k * (g.numel() - 1) // 2), g.shape)) for k in range(3)]
    y = torch.stack([g[one] for one in at])
    matrices = [(name, x, x) for name, x in sources.items() if x.ndim >= 2]
    matrices += [(name, x, x.flatten(1)) for name, x in sources.items() if x.ndim > g.ndim == 2]
    for (a, whole, x), (b, other, z) in itertools.permutations(matrices, 2):
        for left_turned, right_turned in ((False, False), (False, True), (True, False)):
            p, q = x.mT if left_turned else x, z.mT if right_turned else z
            if p.shape[-2] != g.shape[-2] or q.shape[-1] != g.shape[-1] or p.shape[-1] != q.shape[-2]:
                continue
            try:
                lead = torch.broadcast_shapes(p.shape[:-2], q.shape[:-2])
            except RuntimeError:
                continue
            cost = float(g.numel()) * p.shape[-1]
            if lead != g.shape[:-2] or cost > left:
                continue
            p, q = p.expand(*lead, *p.shape[-2:]), q.expand(*lead, *q.shape[-2:])
            pairs = [(p[(*one[:-2], one[-2])], q.mT[(*one[:-2], one[-1])]) for one in at]
            tried = torch.stack([row @ column for row, column in pairs])
            largest = int(tried.abs().argmax())
            factor = y[largest] / tried[largest]
            size = max(float(row.abs() @ column.abs()) for row, column in pairs)
            if not bool(((y - factor * tried).abs() <= ROUNDINGS * unit * factor.abs() * size).all()):
                continue
            left -= cost
            way = replay("matmul", [whole, other], g, unit)
            if way is not None:
                yield Found([a, b], way)
    for names, way in scaled_products(sources, g, unit):
        yield Found(names, way)


def _attentions(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    for names in unnamed(sources, g):
        for text in ("attention", "causal attention"):
            way = replay(text, [sources[one] for one in names], g, unit)
            if way is not None:
                yield Found(names, way)


def _convolutions(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    """A convolution of two steps of g's number of dimensions, or a gradient of one."""
    left = MOST_MULTIPLICATIONS
    like = [(name, x) for name, x in sources.items() if x.ndim == g.ndim > 2]
    for (a, x), (b, z) in itertools.permutations(like, 2):
        if min(t.shape[2:].numel() for t in (x, z, g)) > LARGEST_FILTER:
            continue
        one = next(convolutions("", [x, z], g), None)
        if one is None or (cost := float(g.numel()) * one.length) > left:
            continue
        left -= cost
        way = replay("conv", [x, z], g, unit)
        if way is not None:
            yield Found([a, b], way)


def _planes(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    for names, text in by_statistics(sources, g, unit):
        written = _written(text, names, sources, g, unit, grid)
        if written is not None:
            yield Found(names, written=written)
    for names, way in normalised(sources, g, unit):
        yield Found(names, way)


def _formulas(
    sources: Sources, g: Tensor, unit: float, grid: Tensor, suggest: Callable[..., Laid], letters: int
) -> Iterator[Found]:
    """Texts of so many inputs that give the sampled elements, or rows where they have functions of rows."""
    names, table, y = suggest(sources, g)
    tolerance = ROUNDINGS * unit
    for text in TEXTS if names else ():
        if uses_rows(text) != (suggest is rows) or len(_letters(text)) != letters:
            continue
        fitting: list[tuple[float, int, Found]] = []  # a golden in float32 does not tell every epsilon from the next
        for numbers in [{"eps": float(e)} for e in EPSILONS] if "eps" in text else [{}]:
            for chosen, factor in _matching(text, numbers, table, y, tolerance):
                whole = text.replace("eps", repr(numbers["eps"])) if numbers else text
                if factor != 1.0:
                    whole = f"{factor!r}*a" if text == SCALED else f"{factor!r}*({whole})"
                given = [names[i] for i in chosen]
                found = _written(whole, given, sources, g, unit, grid)
                if found is not None:
                    off = found.off([sources[one] for one in given], g) if numbers else 0.0
                    fitted = simple(factor, tolerance) is None
                    fitting.append((off, len(fitting), Found(given, written=found, fitted=fitted)))
        if fitting:
            yield min(fitting)[2]


def _polynomials(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    """Polynomials of all of a few sources, or of up to three of the nearest."""
    alike = {name: x for name, x in sources.items() if x.numel() == g.numel()}
    names, table, y = spread_elements(alike | dict(sources), g)
    sizes = sorted({2, 3} if len(names) > len(LETTERS) else {len(names), 2, 3}, reverse=len(names) <= len(LETTERS))
    few = [one for size in sizes for one in itertools.combinations(range(min(len(names), NEIGHBOURS)), size)]
    for roundings, chosen in itertools.product((FEW_ROUNDINGS, ROUNDINGS), few):
        found = polynomial(table[list(chosen)], y, roundings * unit)
        if found is not None:
            given = [names[chosen[place]] for place in found.places]
            written = _written(found.text, given, sources, g, unit, grid)
            if written is not None:
                yield Found(given, written=written, fitted=found.fitted)


def _matching(
    text: str, numbers: dict[str, float], table: Tensor, y: Tensor, tolerance: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Which sources in the places of a, b and c give y to a factor, and the factor."""
    used = sorted({letter for letter in "abc" if letter in _letters(text)})
    n = len(table)
    if n ** len(used) * y.numel() > MOST_TABLE:
        n = int((MOST_TABLE / y.numel()) ** (1.0 / len(used)))
    given = {}
    for place, letter in enumerate(used):
        shape = [1] * len(used)
        shape[place] = n
        given[letter] = table[:n].reshape(*shape, *y.shape)
    value = sampled(text, given | {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()})
    if value is None:
        return
    value = value.expand(*[n] * len(used), *y.shape).reshape(-1, y.numel())
    flat = y.flatten()
    factor = (value * flat).sum(-1) / (value * value).sum(-1)
    off = (factor[:, None] * value - flat).abs() <= tolerance * (flat.abs() + flat.abs().mean())
    for index in torch.nonzero(off.all(-1) & factor.isfinite() & (factor != 0.0)).flatten().tolist():
        chosen = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), [n] * len(used)))
        if len(set(chosen)) == len(chosen):
            c = float(factor[index])
            yield chosen, 1.0 if math.isclose(c, 1.0, rel_tol=tolerance) else c


def _letters(text: str) -> set[str]:
    return set(re.findall(r"\b[abc]\b", text))
