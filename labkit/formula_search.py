"""Which text of letters gives a golden, of which steps: tried on a few elements or rows of all of them first."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator

import torch

from labkit.expression import LETTERS, sampled, uses_rows
from labkit.found import ROUNDINGS, Found, formula_of
from labkit.named import EPSILONS, REDUCTIONS, everything
from labkit.polynomial import polynomial, usual
from labkit.replay import replay
from labkit.samples import Laid, Sources, rows, spread_elements

Tensor = torch.Tensor

FEWEST = 8
"""Elements of a sum, or a norm, that are tried first."""
FEW_ROUNDINGS = 4.0
"""Likewise of a golden that was rounded once: more would hide a small term of one in float32."""
MOST_TABLE = 1 << 22
"""Numbers that one text is evaluated on at a time."""
NEIGHBOURS = 8
"""Of the nearest steps, how many are taken together for polynomials."""
SCALED = "1.0*a"
ARITHMETIC = (
    SCALED, "a*a", "1/a", "a*b", "a+b", "a-b", "a/b",
    "a*b+c", "(a-b)*c", "a*b*c", "a+b+c", "a-b*c", "(a-b)/c", "a/(b+c)", "a/(b*c)",
)  # fmt: skip
TEXTS = tuple(sorted({*(one.text for one in everything() if not one.text.startswith("(1-beta")), *ARITHMETIC}, key=len))
"""A factor is fitted to each, so none of them needs one."""


def formulas(
    sources: Sources, g: Tensor, unit: float, grid: Tensor, suggest: Callable[..., Laid], letters: int
) -> Iterator[Found]:
    """Texts of so many inputs that give the sampled elements, or rows where they have functions of rows."""
    names, table, y = suggest(sources, g)
    tolerance = ROUNDINGS * unit
    for text in TEXTS if names else ():
        if uses_rows(text) != (suggest is rows) or len(_letters(text)) != letters:
            continue
        # A golden in float32 does not tell every epsilon from the next.
        fitting: list[tuple[bool, float, int, Found]] = []
        for numbers in [{"eps": float(e)} for e in EPSILONS] if "eps" in text else [{}]:
            for chosen, factor in _matching(text, numbers, table, y, tolerance):
                whole = text.replace("eps", repr(numbers["eps"])) if numbers else text
                if factor != 1.0:
                    whole = f"{factor!r}*a" if text == SCALED else f"{factor!r}*({whole})"
                given = [names[i] for i in chosen]
                found = formula_of(whole, given, sources, g, unit, grid)
                if found is not None:
                    off = found.off([sources[one] for one in given], g) if numbers else 0.0
                    fitted = not usual(factor, tolerance)
                    fitting.append((fitted, off, len(fitting), Found(given, written=found, fitted=fitted)))
        if fitting:
            yield min(fitting)[3]


def polynomials(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    """Polynomials of all of a few sources, or of up to three of the nearest."""
    alike = {name: x for name, x in sources.items() if x.numel() == g.numel()}
    names, table, y = spread_elements(alike | dict(sources), g)
    sizes = sorted({2, 3} if len(names) > len(LETTERS) else {len(names), 2, 3}, reverse=len(names) <= len(LETTERS))
    few = [one for size in sizes for one in itertools.combinations(range(min(len(names), NEIGHBOURS)), size)]
    for roundings, chosen in itertools.product((FEW_ROUNDINGS, ROUNDINGS), few):
        found = polynomial(table[list(chosen)], y, roundings * unit)
        if found is not None:
            given = [names[chosen[place]] for place in found.places]
            written = formula_of(found.text, given, sources, g, unit, grid)
            if written is not None:
                yield Found(given, written=written, fitted=found.fitted)


def reductions(sources: Sources, g: Tensor, unit: float, grid: Tensor) -> Iterator[Found]:
    """Sums, means and other statistics of rows, or of all tokens, and of all of a step."""
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
                if (written := formula_of(whole, given, sources, g, unit, grid)) is not None:
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
