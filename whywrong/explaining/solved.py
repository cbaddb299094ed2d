"""What the program's own numbers would have had to be for a step to be as it was observed.

Numbers in a line, and tables that no input goes into (a window, slopes of heads, weights of a filter), come from code
that was not recorded. Whatever is wrong there, in however many of them, shows in the numbers that it gave: these are
solved for, by steps of Gauss and Newton, and those that need not differ are put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from whywrong.explaining.mutations import Context, again, edit_results
from whywrong.explaining.part import Edit
from whywrong.recording.operations import MOVES
from whywrong.recording.program import CONSTANT

Tensor = torch.Tensor

MOST_UNKNOWNS, STEPS, HALVINGS = 64, 10, 4
"""Numbers that are solved for at once; steps, and how often one of these is halved."""
MOVED = 1e-6
"""Share of a number by which it is moved for a derivative: in float64 half of the digits are left."""
HOPEFUL, FORCED = 0.5, 0.1
"""What a first step has to leave at most, as a share of the error, and one after a number was put back."""
SOLVED, NEAR = 0.5, 1.0
"""What a solution leaves at most, in tolerances: root mean square, and at its worst."""
PER_NUMBER, PER_DIGIT = 25.0, math.log2(10.0)
"""Bits that a fitted number costs, and each of its digits."""
EXACT = 1e-3
"""What is as good as nothing, in tolerances."""
DIGITS, WORDS = 7, 4
"""Digits of numbers that are not shortened; numbers that a sentence names."""

Literals = list[tuple[tuple[str, int, Any], list[int]]]


class Unknowns(NamedTuple):
    """Numbers that are solved for together, the edits for others, and the words for those that differ."""

    numbers: Tensor
    edits: Callable[[Tensor], dict[int, Edit]]
    says: Callable[[Tensor], str]


def unknowns(c: Context, operations: Iterable[str]) -> Iterator[Unknowns]:
    """The numbers that stand in `operations` of a line, those of all, and each table that no input goes into."""
    nodes, values, program = c.part.nodes, c.part.values, c.part.golden.program
    literals = [(key, ids) for key, ids in c.numbered().items() if key[0] in operations and key[2]]
    literals = sorted(literals, key=lambda each: -max(each[1]))[:MOST_UNKNOWNS]
    lines: dict[str, Literals] = {}
    for each in literals:
        lines.setdefault(nodes[each[1][0]].site, []).append(each)
    yield from (_of_lines(c, some) for some in lines.values() if len(some) > 1)
    if len(lines) > 1:
        yield _of_lines(c, literals)
    own = {i for i in c.part.given if program.nodes[c.part.origin[i]].func == CONSTANT}
    for i in c.computed:
        own |= {i} if own.issuperset(nodes[i].parents) else set()
    moved = {node.id: node.op in MOVES and len(node.parents) == 1 and node.id in own for node in nodes}
    for i in sorted(own):
        n, users = values[i].numel() if c.real(i) else 0, list(c.part.users.get(i, ()))
        for k in users:  # which grows meanwhile
            users += c.part.users.get(k, ()) if moved[k] else ()
        last = any(k not in own or values[k].numel() > n for k in users)  # not one of which another is made in place
        if 1 < n <= MOST_UNKNOWNS and last and not moved[i]:
            table = values[i].flatten().cpu()
            yield Unknowns(table, partial(_held, i, values[i].shape), partial(_say_table, c.called(i), table))


def _of_lines(c: Context, literals: Literals) -> Unknowns:
    numbers = torch.tensor([old for (*_, old), _ in literals], dtype=torch.float64)
    return Unknowns(numbers, partial(_other_numbers, c, literals), partial(_say_numbers, literals))


def _other_numbers(c: Context, literals: Literals, x: Tensor) -> dict[int, Edit]:
    others: dict[int, dict[int, float]] = {}
    for ((_, j, old), ids), new in zip(literals, x.tolist(), strict=True):
        for i in ids if new != old else ():
            others.setdefault(i, {})[j] = new

    def run(*args: Any, i: int) -> Any:
        return again(c.part.nodes[i], *(others[i].get(j, a) for j, a in enumerate(args)))

    return {i: Edit(partial(run, i=i)) for i in others}


def _say_numbers(literals: Literals, x: Tensor) -> str:
    pairs = ((op, new, old) for ((op, _, old), _), new in zip(literals, x.tolist(), strict=True) if new != old)
    return _few([f"{op} has {a} where the reference has {b}" for op, new, old in pairs for a, b in [_apart(new, old)]])


def _held(i: int, shape: torch.Size, x: Tensor) -> dict[int, Edit]:
    return edit_results([i], lambda own: x.view(shape).to(own))


def _say_table(called: str, table: Tensor, x: Tensor) -> str:
    pairs = ((k, a, b) for k, (a, b) in enumerate(zip(x.tolist(), table.tolist(), strict=True)) if a != b)
    said = [f"{new} at {k}, not {old}" for k, a, b in pairs for new, old in [_apart(a, b)]]
    return f"{called} holds other numbers: " + _few(said)


def _apart(new: float, old: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to tell them apart, six at least."""
    both = ((f"{new:.{n}g}", f"{old:.{n}g}") for n in range(6, 17))
    return next((pair for pair in both if pair[0] != pair[1]), (repr(new), repr(old)))


def _few(some: list[str]) -> str:
    return "; ".join(some[:WORDS]) + f"; and {len(some) - WORDS} more" * (len(some) > WORDS)


class Equation(NamedTuple):
    """What numbers are to give, `wanted`, and what they give, in tolerances; None where it cannot be run."""

    run: Callable[[Tensor], Tensor | None]
    wanted: Tensor
    late: Callable[[], bool]

    def left(self, x: Tensor) -> Tensor | None:
        """What numbers leave of what is wanted."""
        value = self.run(x)
        return self.wanted - value if value is not None else None

    def columns(self, x: Tensor, off: Tensor, free: Tensor) -> Tensor:
        """What changes if each of the free numbers were twice as large, by its derivative; x leaves `off`."""
        size = _size(x)
        left = [self.left(x.index_add(0, k, MOVED * size[k])) for k in free.nonzero()]
        return torch.stack([(off - y) / MOVED if y is not None else torch.zeros_like(off) for y in left], 1)

    def solve(self, x: Tensor, free: Tensor, hopeful: float = math.inf) -> tuple[Tensor, Tensor] | None:
        """Numbers near those given, of which the free ones may differ, and what they leave; None if there are none."""
        off = self.left(x)
        for _ in range(STEPS):
            if off is None or self.late() or not bool(off.any()):
                break
            columns = self.columns(x, off, free)
            share = torch.linalg.lstsq(columns, off[:, None], driver="gelsd", rcond=MOVED).solution[:, 0]
            if float((off - columns @ share).norm()) > hopeful * float(off.norm()):
                return None
            hopeful = math.inf
            step = torch.zeros_like(x)
            step[free] = _size(x)[free] * share * columns.any(0)
            for halved in range(HALVINGS + 1):
                left = self.left(x + step * 0.5**halved)
                if left is not None and float(left.norm()) < 0.9 * float(off.norm()):
                    x, off = x + step * 0.5**halved, left
                    break
            else:
                break
        return (x, off) if off is not None and _within(off) else None

    def fewest(self, start: Tensor) -> Tensor | None:
        """A solution in which what need not differ from the start does not; None without one, or without the time."""
        free = torch.ones(len(start), dtype=torch.bool)
        if (found := self.solve(start, free, HOPEFUL)) is None:
            return None
        x, left = found
        for hopeful in (FORCED, math.inf):  # the second time what took a longer way
            for k in ((x - start) / _size(start)).abs().argsort()[:, None]:
                fewer, back = free.index_fill(0, k, False), x.index_copy(0, k, start[k])
                off = self.left(back) if bool(free[k]) else None
                if off is not None and not _as_good(off, left, PER_NUMBER) and bool(fewer.any()):
                    back, off = self.solve(back, fewer, hopeful) or (back, None)
                if off is not None and _as_good(off, left, PER_NUMBER):
                    x, left, free = back, off, fewer
            if hopeful == FORCED and self.late():
                return None
        return x

    def polished(self, x: Tensor, free: Tensor) -> Tensor:
        """A solution that is known roughly, as good as may be; its free numbers are short, or such as float32 has."""
        x, left = self.solve(x, free) or (x, self.wanted)
        for k in free.nonzero():
            digits = (float(f"{float(x[k]):.{n}g}") for n in range(1, DIGITS))
            for number in (0.0, *digits, float(x[k].float())):
                shorter = x.index_fill(0, k, number)
                if (off := self.left(shorter)) is not None and _as_good(off, left, PER_DIGIT):
                    x = shorter
                    break
        return x


def _size(x: Tensor) -> Tensor:
    """By how much numbers may be moved, as a whole: themselves, or a share of the largest."""
    return x.abs().clamp(min=float(x.abs().max()) * MOVED)


def _within(off: Tensor) -> bool:
    """Whether what is left is within the tolerance."""
    return bool(off.square().mean() <= SOLVED**2) and bool(off.abs().max() <= NEAR)


def _as_good(off: Tensor, best: Tensor, bits: float) -> bool:
    """Whether what is left is within the tolerance, and takes at most so many bits more than what the best leaves."""
    noise = best.square().mean() + EXACT**2
    return _within(off) and bool((off.square() - best.square()).sum() <= 2.0 * math.log(2.0) * bits * noise)
