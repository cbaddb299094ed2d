"""Identify a sealed call: run it at settings that separate the candidates, and keep those whose arithmetic agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import permutations
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from kernels.attention import golden
from kernels.attention.blas import Gemm, GemmRejectedError
from kernels.attention.calls import Call, other_forms
from kernels.attention.problem import Inputs, Sizes, index_coded, uniform
from kernels.attention.survey import survey
from labkit.session.wording import digits
from whywrong import Weighing, weigh
from whywrong.comparing.bounds import Bound
from whywrong.explaining.hypotheses import Fit
from whywrong.tables import Table

PRIMES = (29, 37, 53)

FRESH = (Sizes(1, 31, 41, 23), Sizes(1, 41, 23, 31), Sizes(1, 23, 31, 41), Sizes(1, 23, 23, 41), Sizes(1, 41, 41, 23))
"""Sizes at which calls that are left are held against each other; no setting of the search has them."""


class Sealed(Protocol):
    """All that is known of the call in question: it can be run."""

    def scores(self, inputs: Inputs, *, mode: str) -> np.ndarray:
        """QK on these inputs, [heads, n, m]. Raises GemmRejectedError where BLAS rejects the arguments."""


class RefusedError(Exception):
    """BLAS refused the call; the text is the argument that it names, which is all that a caller sees."""


Expected = tuple[np.ndarray, Bound] | RefusedError
"""Scores with their bound, or how BLAS refuses the call."""

Hypotheses = dict[str, Callable[[str], tuple[np.ndarray, Bound]]]


@dataclass(frozen=True)
class Setting:
    """Inputs, and what lies around the operands: ``poison`` or ``adjacent``."""

    inputs: Inputs
    mode: str


def separating_settings(sizes: Sizes, seed: int = 0) -> dict[str, Setting]:
    """Settings that distinguish calls: small sizes in every order, then the given ones, index-coded too.

    Three different primes undo what N = M hides; where they make BLAS refuse a call, two equal sizes let it run. At
    the small sizes the operands are adjacent, so that a call which reads outside one still gives numbers. One head
    each: an investigation of the call needs no more.
    """
    small, _, large = PRIMES
    orders = list(permutations(PRIMES))
    for a, b in ((small, large), (large, small)):
        orders += [(a, a, b), (a, b, a), (b, a, a)]
    found = {}
    for i, order in enumerate(orders):
        inputs = uniform(Sizes(1, *order), np.random.default_rng([seed, 3, i]))
        found["{} x {} x {}".format(*order)] = Setting(inputs, "adjacent")
    one = replace(sizes, heads=1)
    found[f"index-coded {one.n} x {one.m} x {one.d_k}"] = Setting(index_coded(one), "adjacent")
    for mode in ("adjacent", "poison"):
        inputs = uniform(one, np.random.default_rng([seed, 2]))
        found[f"{mode} {one.n} x {one.m} x {one.d_k}"] = Setting(inputs, mode)
    return found


class Candidates:
    """Counterfactuals of many calls at fixed settings, each computed once however many suspects are tried."""

    def __init__(self, calls: Iterable[Call], settings: dict[str, Setting], block: int) -> None:
        self.settings = settings
        self.listed = {str(call): call for call in calls}
        self.calls = dict(self.listed)
        """The listed calls, and the other ways to write some of them that were tried."""
        self._block = block
        self._layouts = {name: golden.plan(here.inputs.sizes) for name, here in settings.items()}
        self._computed: dict[tuple[str, tuple[Gemm, ...]], Expected] = {}
        self._known: dict[tuple[str, str], Expected] = {}
        self._hypotheses = {name: partial(self.counterfactual, name) for name in self.listed}

    def counterfactual(self, name: str, setting: str) -> tuple[np.ndarray, Bound]:
        """The scores that a call gives in exact arithmetic at `setting`, and how far float32 may be from them.

        Of a call that reads what it is writing nothing is held against the observed: the bound is infinite
        throughout. Raises RefusedError.
        """
        found = self._known.get((setting, name))
        if found is None:
            call, here = self.calls[name], self.settings[setting]
            key = setting, tuple(call.gemms(here.inputs.sizes, self._layouts[setting]))
            if key not in self._computed:
                self._computed[key] = _expected(call, here.inputs, here.mode)
            found = self._known[setting, name] = self._computed[key]
        if isinstance(found, RefusedError):
            raise found
        return found

    def identify(self, suspect: Sealed) -> Weighing:
        """Weigh every listed call against what the suspect gives, setting by setting.

        A list holds some ways to write a call and not others. So the listed calls that are left are also weighed in
        other words: with blocks, with other blocks, with K for K^T. One call is left only where none of these fits.
        """

        @cache
        def observe(setting: str) -> np.ndarray | RefusedError:
            try:
                return suspect.scores(self.settings[setting].inputs, mode=self.settings[setting].mode)
            except GemmRejectedError as error:
                return RefusedError(error.argument)

        with threadpool_limits(1):
            found = self._weigh(observe, self._hypotheses)
            others = {str(other): other for name in found.left for other in other_forms(self.calls[name], self._block)}
            self.calls |= others
            new = {name: partial(self.counterfactual, name) for name in others if name not in self.listed}
            found.fits |= self._weigh(observe, new).fits
        return found

    def _weigh(self, observe: Callable[[str], np.ndarray | RefusedError], hypotheses: Hypotheses) -> Weighing:
        """As :func:`whywrong.weigh`; a setting that cannot test a call does not count where others tested its
        numbers."""

        def ran(setting: str) -> np.ndarray:
            if isinstance(seen := observe(setting), RefusedError):
                raise seen
            return seen

        names = {setting: setting for setting in self.settings}
        found = weigh(ran, hypotheses, settings=names, outcomes=(RefusedError,), thorough=False)
        numbers = [
            s for s, here in self.settings.items() if here.mode == "adjacent" and isinstance(observe(s), np.ndarray)
        ]
        for name, fits in found.fits.items():
            if any(s in fits and fits[s].ok for s in numbers):
                found.fits[name] = {s: fit for s, fit in fits.items() if fit.tested}
        return found

    def again(self, found: Weighing, suspect: Sealed, fresh: dict[str, Inputs], rivals: int = 5) -> Weighing:
        """Weigh what is not ruled out, and the `rivals` that held out longest, at settings that had no part in it."""

        def observe(inputs: Inputs) -> np.ndarray:
            try:
                return suspect.scores(inputs, mode="poison")
            except GemmRejectedError as error:
                raise RefusedError(error.argument) from None

        def expected(call: Call, inputs: Inputs) -> tuple[np.ndarray, Bound]:
            if isinstance(found := _expected(call, inputs, "poison"), RefusedError):
                raise found
            return found

        longest = sorted(found.refuted, key=lambda name: -len(found.fits[name]))[:rivals]
        names = [*found.left, *found.untested, *longest]
        with threadpool_limits(1):
            calls = {name: partial(expected, self.calls[name]) for name in names}
            return weigh(observe, calls, settings=fresh, outcomes=(RefusedError,))

    def check(self, guess: Call, suspect: Sealed) -> Table:
        """At how many settings a guess gives, in exact arithmetic, what the sealed call gives to within rounding."""
        name = str(guess)
        self.calls[name] = guess

        def observe(setting: str) -> np.ndarray:
            try:
                return suspect.scores(self.settings[setting].inputs, mode=self.settings[setting].mode)
            except GemmRejectedError as error:
                raise RefusedError(error.argument) from None

        names = {setting: setting for setting in self.settings}
        hypotheses = {name: partial(self.counterfactual, name)}
        fits = weigh(observe, hypotheses, settings=names, outcomes=(RefusedError,)).fits[name]
        agree = [setting for setting, fit in fits.items() if fit.ok]
        return Table(("your guess", "agrees at", "of settings"), [(name, len(agree), len(fits))])

    def computations(self, names: Iterable[str]) -> int:
        """How many different computations some calls are: their exact results at fresh sizes are compared."""
        calls = [self.calls[name] for name in names]
        fates = [{call: i for i, outcome in enumerate(survey(s, calls)) for call in outcome.calls} for s in FRESH]
        return len({tuple(fate[call] for fate in fates) for call in calls})


def _expected(call: Call, inputs: Inputs, mode: str) -> Expected:
    """What a call gives in exact arithmetic, with an infinite bound throughout where it reads what it is writing."""
    try:
        value, bound = golden.called(call, inputs, mode)
    except GemmRejectedError as error:
        return RefusedError(error.argument)
    return value, replace(bound, absolute=np.full_like(value, np.inf)) if np.isinf(bound.absolute).any() else bound


def remaining(found: Weighing) -> Table:
    """How many calls are left after each setting: the search at a glance."""
    left = list(found.fits.values())
    rows = []
    for setting in found.settings:
        left = [fits for fits in left if setting in fits and fits[setting].ok]
        rows.append((setting, len(left)))
    return Table(("setting (N x M x d_k)", "calls left after it"), rows, title=f"{len(found.fits)} calls weighed")


def distinguishing(search: Weighing, proof: Weighing, hidden: bool = False) -> Table:
    """What the `search` left and refuted, by those settings of the `proof` at which these differ.

    A cell is the largest error over the largest rounding error allowed. The title names the settings that are the same
    in every row. With `hidden`, calls have numbers for names.
    """
    rows = {name: [_cell(fits.get(setting)) for setting in proof.settings] for name, fits in proof.fits.items()}
    same = [i for i in range(len(proof.settings)) if len({_kind(row[i]) for row in rows.values()}) <= 1]
    shown = [i for i in range(len(proof.settings)) if i not in same] or same
    title = "error / tolerance"
    if same and shown != same:
        title += f"; the same in every row, so no test: {', '.join(proof.settings[i] for i in same)}"
    table = [
        (
            f"call {i}" if hidden else name,
            "refuted" if name in search.refuted else "left",
            *(row[column] for column in shown),
        )
        for i, (name, row) in enumerate(rows.items(), start=1)
    ]
    return Table(("call", "by the search", *(proof.settings[i] for i in shown)), table, title, wrap=50)


def _cell(fit: Fit | None) -> str:
    """A fit in words: a multiple, or how BLAS rejects one of the two calls or both."""
    if fit is None or not fit.tested:
        return "not tested"
    if np.isnan(fit.residual):
        argument = fit.words.rpartition(" ")[2]
        if fit.ok:
            return f"rejected for {argument}, as observed"
        return "rejected, and the observed is not" if argument == "ran" else f"not rejected for {argument}"
    return digits(fit.residual) if np.isfinite(fit.residual) else "not finite"


def _kind(cell: str) -> str:
    """What a cell of :func:`distinguishing` says of a hypothesis, without the number."""
    try:
        return "within" if float(cell) <= 1.0 else "beyond"
    except ValueError:
        return "beyond" if cell in ("over a million", "not finite") else cell


def upheld(before: Weighing, after: Weighing) -> tuple[Weighing, str]:
    """Two weighings in a row as one, and in a sentence whether the second upholds the first.

    A hypothesis is left where it fits at every setting of both: what one setting has refuted, no later one brings
    back. The second contradicts the first where it refutes a hypothesis that the first had not ruled out.
    """
    settings = list(dict.fromkeys([*before.settings, *after.settings]))
    both = Weighing(settings, {name: fits | after.fits.get(name, {}) for name, fits in before.fits.items()})
    kept = [*before.left, *before.untested]
    overturned = {name: after.refuted[name] for name in kept if name in after.refuted}
    skipped = [name for name in kept if name not in after.fits]
    back = [name for name in after.left if name in before.refuted]
    told = f"; {len(back)} ruled out before would fit these settings alone, and stay ruled out" if back else ""
    if overturned:
        where = ", ".join(dict.fromkeys(overturned.values()))
        return both, f"CONTRADICTED: {len(overturned)} of the {len(kept)} not ruled out before fail at {where}{told}"
    if skipped:
        return both, f"NOT TESTED AGAIN: {len(skipped)} of the {len(kept)} not ruled out before{told}"
    if not kept:
        return both, f"nothing was left to test again{told}"
    return both, f"upheld: of the {len(kept)} not ruled out before, none fails at a later setting{told}"
