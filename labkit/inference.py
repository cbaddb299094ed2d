"""What a step is made of, found in the golden's own numbers, where the metadata does not say it.

A golden gives itself away: a step that is the product, the sum or the softmax of steps before it is that to its last
digits. A few elements or rows of all of them at a time suggest candidates; one counts only if it gives the whole step,
as a text of the metadata must too (:mod:`labkit.replay`, :mod:`labkit.formula`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from labkit.attention import unnamed
from labkit.convolution import convolutions
from labkit.formula_search import formulas, polynomials, reductions
from labkit.found import ROUNDINGS, Found, formula_of
from labkit.planes import by_statistics, normalised
from labkit.polynomial import usual
from labkit.replay import replay
from labkit.samples import Sources, elements, rows
from labkit.scaled import scaled_products
from labkit.totals import scales, sums, sums_of_parts

Tensor = torch.Tensor

FEWEST = 8
"""Elements of a step from which it is searched: fewer may agree by chance."""
CAST = 2.0**-6
"""How much coarser than its elements a golden's grid is, relatively, where it has 8 bits."""
LARGEST_FILTER = 121
"""Elements of a channel of a convolution's weights: 11 x 11."""
MOST_MULTIPLICATIONS = 1e9
"""Of the products that are tried for one step."""


def infer(g: Tensor, sources: Sources, unit: float, grid: Tensor) -> Found | None:
    """The likeliest of :func:`inferred`, or None."""
    return next(inferred(g, sources, unit, grid), None)


def inferred(g: Tensor, sources: Sources, unit: float, grid: Tensor, parts: Sources | None = None) -> Iterator[Found]:
    """What gives `g` (float64) from some of `sources`, or from one of `parts` of them, the likeliest first.

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
    of_texts = partial(formulas, sources, g, unit, grid)
    searches = (
        _casts(sources, g, unit, grid),
        _moved(sources, g, unit), of_texts(elements, 1), _of_one(sources, g, unit), of_texts(rows, 1),
        of_texts(elements, 2), _products(sources, g, unit), _attentions(sources, g, unit),
        _convolutions(sources, g, unit), of_texts(elements, 3), of_texts(rows, 2), of_texts(rows, 3),
        _of_part(parts or {}, g, unit, grid), _planes(sources, g, unit, grid), reductions(sources, g, unit, grid),
    )  # fmt: skip
    fitted = []
    for found in itertools.chain.from_iterable(searches):
        if found.fitted:
            fitted.append(found)  # a number of the data explains less than a step that holds it
        else:
            yield found
    yield from fitted
    yield from polynomials(sources, g, unit, grid)


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
            if (written := formula_of(text, [x, scale], sources, g, unit, grid)) is not None:
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


def _of_one(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    """What is made of one step and has its shape, or is its windows as columns, or these added up."""
    softmax = g.ndim > 1 and bool((g >= 0.0).all()) and bool(((g.sum(-1) - 1.0).abs() <= ROUNDINGS * unit).all())
    of_same_shape = [*(["softmax axis=-1", "causal softmax axis=-1"] if softmax else []), "sinkhorn"]
    for name, x in sources.items():
        texts = of_same_shape if x.shape == g.shape else ["col2im" if g.ndim == 4 else "im2col"]
        for text in texts if x.ndim > 1 else ():
            way = replay(text, [x], g, unit)
            if way is not None:
                yield Found([name], way)


def _of_part(parts: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    """What is made of some columns of a step alone."""
    yield from formulas(parts, g, unit, grid, elements, 1)
    yield from _of_one(parts, g, unit)
    yield from formulas(parts, g, unit, grid, rows, 1)


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
                yield Found([a, b], way, fitted=not usual(way.factor, ROUNDINGS * unit))
    for names, way in scaled_products(sources, g, unit):
        yield Found(names, way)


def _attentions(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    for names in unnamed(sources, g):
        for text in ("attention", "causal attention"):
            way = replay(text, [sources[one] for one in names], g, unit)
            if way is not None:
                yield Found(names, way)


def _convolutions(sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    """A convolution of two steps of g's number of dimensions, perhaps with a bias, or a gradient of one."""
    left = MOST_MULTIPLICATIONS
    biases = {name: x for name, x in sources.items() if g.ndim > 1 and x.shape == g.shape[1:2]}
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
        elif biases:
            yield from _biased(a, b, biases, sources, g, unit)


def _biased(a: str, b: str, biases: Sources, sources: Sources, g: Tensor, unit: float) -> Iterator[Found]:
    """A convolution of these two and what is left of g, which is one number a channel."""
    for one in convolutions("", [sources[a], sources[b]], g):
        rest = (g - one.run(sources[a], sources[b])).transpose(0, 1).flatten(1)
        size = float(g.abs().max())
        if not bool(((rest - rest[:, :1]).abs() <= ROUNDINGS * unit * size * one.length).all()):
            continue
        for name, bias in biases.items():
            if bool(((rest[:, 0] - bias).abs() <= ROUNDINGS * unit * size * one.length).all()):
                way = replay("conv", [sources[a], sources[b], bias], g, unit)
                if way is not None:
                    yield Found([a, b, name], way)


def _planes(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    for names, text in by_statistics(sources, g, unit):
        written = formula_of(text, names, sources, g, unit, grid)
        if written is not None:
            yield Found(names, written=written)
    for names, way in normalised(sources, g, unit):
        yield Found(names, way)
