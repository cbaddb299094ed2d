"""A step whose text is a formula of its inputs, such as ``0.9*m + (1-0.9)*g``: its value, and a running error bound.

A reading of the text (:mod:`labkit.expression`) counts only if, on the golden's inputs, it gives the golden's step.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from labkit.expression import ASSIGNED, FAILURES, LETTERS, Expression, Pair, evaluate, number, parse
from labkit.magnitude import finite
from labkit.named import EPSILONS, meanings
from labkit.views import View, views_of

Tensor = torch.Tensor
Reading = tuple[dict[str, int], tuple[View, ...]]
MOST_READINGS = 48
MOST_LAYOUTS = 12
TELLING = 1e-4
"""A reading's own error relative to the golden's size up to which agreement says something."""
_ARITHMETIC = {
    2: ("a*b", "a-b", "a/b"),
    3: ("a*(b-c)", "a*b+c", "(a-b)*c", "a*b*c", "(a-b)/c"),
    4: ("a*(b-c*d)", "a*b+c*d", "a*(b-c)*d", "(a-b)*c*d"),
}
"""By the number of inputs: what a text that is no formula, such as `softmax_bwd`, may stand for."""
_WORD = re.compile(
    r"[a-z_ ]*(bwd|backward|grad|mul|sub|div|dequant|scale|rope|rotate|update|combine)[a-z_ ]*", re.IGNORECASE
)
_EXCEPT = re.compile(r"\b(0|zero) (where|if|for)\b|ignored", re.IGNORECASE)


@dataclass(frozen=True)
class Formula:
    """One reading of a text. `names` are its variables, each an input's place or a number."""

    tree: ast.expr
    names: dict[str, int | float]
    views: tuple[View, ...]
    """How each input is laid out, so that all of them broadcast."""
    zeros: Tensor | None = None
    """Where the text says that the result is zero whatever the formula gives, as for ignored targets."""
    shape: torch.Size | None = None
    """Of the step, which may have dropped the dimension that a row function keeps."""
    stored: int = 0
    """How many results before the last one an implementation may have rounded to the stored type."""

    @property
    def steps(self) -> int:
        """How many operations it is made of."""
        return sum(isinstance(node, (ast.BinOp, ast.Call)) for node in ast.walk(self.tree))

    def off(self, inputs: Sequence[Tensor], golden: Tensor) -> float:
        """How far from the golden it is at most."""
        return float(self.misfit(inputs, golden).max())

    def misfit(self, inputs: Sequence[Tensor], golden: Tensor) -> Tensor:
        """How far from the golden it is."""
        return finite(self.value(inputs, [torch.zeros_like(x) for x in inputs], 0.0)[0] - golden).abs()

    def value(self, inputs: Sequence[Tensor], errors: Sequence[Tensor], unit: float, sums: float | None = None) -> Pair:
        """The formula in float64 on `inputs` that are `errors` off, and what arithmetic of `unit` round-off may add.

        `sums` is the round-off of sums and means where that is another.
        """
        given = {
            name: (
                (self.views[at](inputs[at]), self.views[at](errors[at])) if isinstance(at, int) else number(at, unit)
            )
            for name, at in self.names.items()
        }
        value, error = evaluate(self.tree, given, unit, unit if sums is None else sums)
        for axis, kept in ((-1, (*self.shape, 1)), (0, (1, *self.shape))) if self.shape is not None else ():
            if value.shape == kept != self.shape:
                value, error = value.squeeze(axis), error.expand(value.shape).squeeze(axis)
        if self.zeros is not None and value.shape == self.zeros.shape:
            value, error = value.masked_fill(self.zeros, 0.0), error.expand(value.shape).masked_fill(self.zeros, 0.0)
        return value, error


def formula(
    op: str, names: Sequence[str], inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor
) -> Formula | None:
    """The reading of `op` that gives `golden` from `inputs`, float64 both, of step names `names`; None if none does.

    `unit` is the golden's own round-off, and `grid` what rounding to the promised type may move its elements.
    """
    if not inputs:
        return None
    written = parse(op)
    excepted = bool(_EXCEPT.search(op))
    found = None if written is None else _read(written, names, inputs, golden, unit, grid, excepted)
    for text in _ARITHMETIC.get(len(inputs), ()) if found is None and _WORD.fullmatch(op.strip()) else ():
        if found is None and (arithmetic := parse(text)) is not None:
            found = _read(arithmetic, LETTERS[: len(inputs)], inputs, golden, unit, grid, False)
    return found


def named(op: str, inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor) -> Formula | None:
    """The formula that a name such as `rmsnorm eps=1e-6` stands for, if it gives `golden` from `inputs`.

    As :func:`formula`; of a step without a name every known meaning is tried.
    """
    said = {name.lower(): float(value) for name, value in ASSIGNED.findall(op)}
    for meaning in meanings(op, len(inputs)):
        written = parse(meaning.text)
        assert written is not None
        epsilons = [said["eps"]] if "eps" in said else [float(one) for one in EPSILONS]
        fitting: list[tuple[float, int, Formula]] = []
        for epsilon in epsilons if "eps" in meaning.text else [0.0]:
            given = replace(written, numbers=written.numbers | said | {"eps": epsilon})
            names = LETTERS[: len(inputs)]
            found = _read(given, names, inputs, golden, unit, grid, bool(_EXCEPT.search(op)))
            if found is not None:
                fitting.append((found.off(inputs, golden), len(fitting), replace(found, stored=meaning.stored)))
        if fitting:  # a golden in float32 does not tell every epsilon from the next
            return min(fitting)[2]
    return None


def of_letters(text: str, inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor) -> Formula | None:
    """`text` of the letters a, b, .., one for each of `inputs`, if it gives `golden`; as :func:`formula`."""
    places = {letter: at for at, letter in enumerate(LETTERS[: len(inputs)])}
    readings = [(places, laid_out) for laid_out in _layouts([x.shape for x in inputs], golden.shape)]
    written = parse(text)
    return None if written is None else _read(written, list(places), inputs, golden, unit, grid, False, readings)


def _read(
    written: Expression, names: Sequence[str], inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor,
    excepted: bool, readings: Iterable[Reading] | None = None,
) -> Formula | None:  # fmt: skip
    wanted = written.variables
    if not wanted:
        return None
    least = 2.0**-126 if unit > 2.0**-53 else 1e-300  # denormal numbers of a golden in float32 have few digits
    if readings is None:
        readings = itertools.islice(_readings(wanted, names, inputs, golden), MOST_READINGS)
    for places, laid_out in readings:
        zeros = golden == 0.0 if excepted else None
        candidate = Formula(written.tree, {**written.numbers, **places}, laid_out, zeros, golden.shape)
        try:
            value, error = candidate.value(inputs, [unit * x.abs() for x in inputs], unit)
        except FAILURES:
            continue
        if value.shape != golden.shape:
            continue
        if not float(error.median()) <= TELLING * float(finite(golden).abs().mean()):
            continue  # whatever the numbers are, they would do
        close = ((value - golden).abs() <= 4.0 * error + grid + least) & error.isfinite()
        if bool((close | (value.isnan() & golden.isnan()) | (value == golden)).all()):
            return candidate
    return None


def _readings(
    wanted: Sequence[str], names: Sequence[str], inputs: Sequence[Tensor], golden: Tensor
) -> Iterator[Reading]:
    """Which input each name may mean, the likeliest first, and how the inputs may be viewed."""
    tails = [re.split(r"[._/:]", name.lower())[-1] for name in names]
    whole = [name.lower() for name in names]

    def likeness(word: str, at: int) -> int:
        if word in (whole[at], tails[at]):
            return 0
        spelled = whole[at].replace(".", "_")
        if spelled.endswith("_" + word) or tails[at].rstrip("0123456789") == word:
            return 1
        return 2 if spelled.endswith(word) or word in spelled else 3

    options = [sorted(range(len(names)), key=partial(likeness, word)) for word in wanted]
    orders = sorted(
        (chosen for chosen in itertools.islice(itertools.product(*options), 4096) if len(set(chosen)) == len(chosen)),
        key=lambda chosen: sum(likeness(word, at) for word, at in zip(wanted, chosen, strict=True)),
    )
    layouts = _layouts([x.shape for x in inputs], golden.shape)
    for chosen in orders[:12]:
        for laid_out in layouts:
            yield dict(zip(wanted, chosen, strict=True)), laid_out


def _layouts(shapes: Sequence[torch.Size], target: torch.Size) -> list[tuple[View, ...]]:
    """How inputs of these shapes may be viewed, first those in which equal shapes are viewed alike."""
    different = list(dict.fromkeys(shapes))
    views = [list(views_of(shape, target)) for shape in different]
    alike = (tuple(each[different.index(shape)] for shape in shapes) for each in itertools.product(*views))
    few = [views[different.index(shape)] for shape in shapes]
    each_its_own = itertools.product(*few) if len(different) < len(shapes) else ()
    first = itertools.islice(alike, MOST_LAYOUTS)
    return list(itertools.islice(itertools.chain(first, each_its_own), 2 * MOST_LAYOUTS))
