"""Which wrong call is sealed: one with a name, or a blind draw that may come from outside the survey's list.

`identify.py`, which has to name the sealed call, imports nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from kernels.attention import calls, faulty
from kernels.attention.blas import Gemm, GemmRejectedError
from kernels.attention.calls import Call
from kernels.attention.faulty import Suspect
from kernels.attention.golden import plan
from kernels.attention.memory import Layout
from kernels.attention.problem import REPORT, Inputs, Sizes
from kernels.attention.survey import every_call, exceeded_operands
from whywrong.explaining.hypotheses import UNDECIDABLE, Weighing

NONE = "none of these"
"""What a weighing's cause is where no hypothesis is left."""

OUTSIDE = 0.2
"""The share of blind draws that come from outside the list."""

SYMBOLS = ("M", "N", "d_k")


def named(block: int = 32) -> dict[str, Call]:
    """Wrong calls with a name of their own: what a notebook's `defect` may ask for, besides ``blind``."""
    return {
        "column_major": Call(a="Q", b="K", transa="T", m="N", n="M", lda="d_k", ldc="N"),
        "k_not_transposed": Call(a="K"),
        "tile_offset": replace(calls.blocked(block), c_offset="j*M + i"),
        "q_leading_dimension": Call(ldb="N"),
        "diagnosis": calls.diagnosis(block)["in one call"],
    }


@dataclass(frozen=True)
class Altered:
    """A call with what no listed call has: another factor `alpha`, or the product made in `panels` of columns."""

    call: Call
    alpha: float = 1.0
    panel: int = 0

    def gemms(self, sizes: Sizes, layout: Layout, head: int = 0) -> list[Gemm]:
        """The concrete calls for one head."""
        found = [replace(g, alpha=self.alpha) for g in self.call.gemms(sizes, layout, head)]
        return [part for g in found for part in self._panels(g)]

    def _panels(self, g: Gemm) -> list[Gemm]:
        width = self.panel or g.n
        step = g.ldb if g.transb == "N" else 1
        return [
            replace(g, n=min(width, g.n - at), b=g.b + at * step, c=g.c + at * g.ldc) for at in range(0, g.n, width)
        ]

    def __str__(self) -> str:
        added = f"alpha={self.alpha:g}" if self.alpha != 1.0 else f"in panels of {self.panel} columns"
        return f"{self.call}, {added}"


def suspect(defect: str, seed: int, pool: Sequence[Call], device: str = "cpu", block: int = 32) -> Suspect:
    """Seal a wrong call: one of :func:`named`, or with ``blind`` one that the seed draws.

    A blind draw is a call of `pool`, the listed calls that run and are wrong, or with probability `OUTSIDE` one that
    :func:`outside` makes.
    """
    if defect == "blind":
        rng = np.random.default_rng([seed, 4])
        if rng.random() < OUTSIDE:
            return Suspect(outside(rng, pool, block), device)
        return Suspect(pool[int(rng.integers(len(pool)))], device)
    if defect not in named(block):
        raise ValueError(f"defect: expected blind or one of {', '.join(named(block))}, got {defect!r}")
    return Suspect(named(block)[defect], device)


def ended_rightly(found: Weighing, opened: str, listed: bool) -> bool:
    """Whether a weighing is right of the sealed call `opened`: a listed one is not ruled out, and no other is named."""
    if listed:
        return opened in [*found.left, *found.untested] and found.cause in (opened, UNDECIDABLE)
    return found.cause in (NONE, UNDECIDABLE)


def outside(rng: np.random.Generator, pool: Sequence[Call], block: int) -> Call | Altered:
    """A program that no list of calls holds, that BLAS accepts at the report's sizes and that is wrong there."""
    kinds: tuple[Callable[..., Call | Altered], ...] = (
        _blocks_of_another_size,
        _three_aspects,
        _a_dimension_twice,
        _a_factor,
        _panels,
    )
    listed = set(every_call(block))
    kind = kinds[int(rng.integers(len(kinds)))]
    while True:
        program = kind(rng, pool, block)
        if program not in listed and _wrong(program):
            return program


def _pick(rng: np.random.Generator, options: Sequence[Call]) -> Call:
    return options[int(rng.integers(len(options)))]


def _blocks_of_another_size(rng: np.random.Generator, pool: Sequence[Call], block: int) -> Call:
    call = _pick(rng, [call for call in pool if call.block])
    return replace(call, block=int(rng.choice([block // 2, block + 16, 2 * block])))


def _three_aspects(rng: np.random.Generator, pool: Sequence[Call], block: int) -> Call:
    chosen = rng.choice(len(calls.ASPECTS), 3, replace=False)
    changes = [calls.ASPECTS[aspect][int(rng.integers(len(calls.ASPECTS[aspect])))] for aspect in chosen]
    return replace(calls.blocked(block), **{name: value for change in changes for name, value in change.items()})


def _a_dimension_twice(rng: np.random.Generator, pool: Sequence[Call], block: int) -> Call:
    call = _pick(rng, [call for call in pool if not call.block])
    dimensions = rng.choice(SYMBOLS, 3)
    while tuple(dimensions) in set(permutations(SYMBOLS)):
        dimensions = rng.choice(SYMBOLS, 3)
    m, n, k = map(str, dimensions)
    return replace(call, m=m, n=n, k=k)


def _a_factor(rng: np.random.Generator, pool: Sequence[Call], block: int) -> Altered:
    call = Call() if rng.random() < 0.5 else _pick(rng, pool)
    return Altered(call, alpha=float(rng.choice([0.125, 2.0, -1.0])))


def _panels(rng: np.random.Generator, pool: Sequence[Call], block: int) -> Altered:
    """The same arithmetic as a listed call: panels are whole columns of B, and it reads nothing that it writes."""
    layout = plan(REPORT)
    same = [call for call in pool if not call.block and call.transb == "N"]
    inside = [call for call in same if not exceeded_operands(call.gemms(REPORT, layout)[0], call, layout)]
    return Altered(_pick(rng, inside), panel=int(rng.integers(16, 64)))


def _wrong(program: Call | Altered) -> bool:
    """Whether BLAS makes the program, on inputs of ones and twos, and the scores are not Q K^T."""
    sizes = replace(REPORT, heads=1)
    rng = np.random.default_rng(0)
    q, k = (rng.integers(1, 3, (1, rows, sizes.d_k)).astype(np.float32) for rows in (sizes.n, sizes.m))
    try:
        found = faulty.scores(program, Inputs(q, k, k), mode="adjacent")
    except (GemmRejectedError, IndexError):  # rejected, or beyond the buffer
        return False
    return not np.array_equal(found, q @ k.swapaxes(1, 2))
