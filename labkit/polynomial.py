"""Steps that are polynomials of their inputs, with constants that no text gives: ``0.0208*a + 0.0208*c*a - 0.0208*b``.

A least-squares fit to some elements suggests the constants; whether the polynomial gives the whole step is for
:func:`labkit.formula.of_letters` to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from labkit.expression import LETTERS

Tensor = torch.Tensor
Monomial = tuple[int, ...]
"""The places of its factors; none for the constant."""

HIGHEST = 3
MOST_TERMS = 8
"""Of what is still taken for a formula; a number a channel and few channels fit many more."""
OVERDETERMINED = 2
"""Elements that each constant is fitted to, at least."""
REFINED = 3
"""Times that constants are fitted, each to what the last left, by how large the terms are in a sample: once leaves a
few digits of a term that is small, or small where others cancel."""
SIMPLEST = 64
"""The largest denominator of a constant that is taken for a fraction."""
LARGEST_WIDTH = 4096
"""Of which a factor may be one over the root."""


@dataclass(frozen=True)
class Polynomial:
    """A text in which the inputs at `places` are a, b, .. in this order."""

    places: tuple[int, ...]
    text: str
    fitted: bool
    """Whether it has constants that are neither fractions nor decimals: they may be numbers of the data."""


def polynomial(table: Tensor, y: Tensor, tolerance: float) -> Polynomial | None:
    """What of the rows of `table` [inputs, samples] gives y [samples], float64 both; None if no polynomial does.

    The lowest degree that does is taken, with as few terms as it can do with. `tolerance` is relative to the terms.
    """
    inputs = len(table)
    if not 1 <= inputs <= len(LETTERS):
        return None
    for degree in range(1, HIGHEST + 1):
        terms = [one for d in range(degree + 1) for one in itertools.combinations_with_replacement(range(inputs), d)]
        if OVERDETERMINED * len(terms) > len(y):
            return None
        constants = _fit(terms, table, y, tolerance)
        if constants is not None:
            kept, fewest = _fewest(terms, constants, table, y, tolerance)
            if len(kept) > MOST_TERMS:
                return None
            used = tuple(sorted({i for term in kept for i in term}))
            written = [simple(c, tolerance) or c for c in fewest]
            fitted = any(simple(c, tolerance) is None for c in fewest)
            return Polynomial(used, _text(kept, written, used), fitted) if used else None
    return None


def _fit(terms: Sequence[Monomial], table: Tensor, y: Tensor, tolerance: float) -> list[float] | None:
    """The constants of a polynomial of these terms; None if none gives y."""
    if not terms:
        return None
    columns = torch.stack([table[list(term)].prod(0) if term else torch.ones_like(y) for term in terms], -1)
    scale = columns.abs().amax(0)
    scale = torch.where(scale > 0.0, scale, 1.0)
    constants, size = torch.zeros_like(scale), torch.ones_like(y)
    for _ in range(REFINED):
        left, weighted = (y - columns @ constants) / size, columns / scale / size[:, None]
        constants = constants + torch.linalg.lstsq(weighted, left[:, None], driver="gelsd").solution[:, 0] / scale
        size = (columns * constants).abs().sum(-1) + y.abs().mean()
    off = (columns @ constants - y).abs() <= tolerance * size
    return [float(c) for c in constants] if bool(off.all()) else None


def _fewest(
    terms: Sequence[Monomial], constants: Sequence[float], table: Tensor, y: Tensor, tolerance: float
) -> tuple[list[Monomial], list[float]]:
    """As few of the terms as still give y: the smallest and the highest are tried to do without first."""
    kept, found = list(terms), list(constants)
    size = {
        term: abs(c) * float(table[list(term)].prod(0).abs().max() if term else 1.0)
        for term, c in zip(terms, constants, strict=True)
    }
    for term in sorted(terms, key=lambda one: (size[one] > tolerance * float(y.abs().max()), -len(one), size[one])):
        without = [one for one in kept if one != term]
        fewer = _fit(without, table, y, tolerance)
        if fewer is not None:
            kept, found = without, fewer
    return kept, found


def _text(terms: Sequence[Monomial], constants: Sequence[float], used: Sequence[int]) -> str:
    return "+".join(
        "*".join([f"({c!r})", *(LETTERS[used.index(i)] for i in term)])
        for term, c in zip(terms, constants, strict=True)
    )


def usual(c: float, tolerance: float) -> bool:
    """Whether a factor is such a number, or one over the root of a whole one, as attention's scale is."""
    if simple(c, tolerance) is not None:
        return True
    width = 1.0 / (c * c) if c * c * LARGEST_WIDTH >= 1.0 else 0.0
    return width >= 1.0 and abs(width - round(width)) <= 2.0 * tolerance * width


def simple(c: float, tolerance: float) -> float | None:
    """The fraction, or the decimal of three digits, that a constant was fitted to be; None if it is none to a relative
    tolerance."""
    for near in (float(Fraction(c).limit_denominator(SIMPLEST)), float(f"{c:.3g}")):
        if near and abs(near - c) <= tolerance * abs(c):
            return near
    return None
