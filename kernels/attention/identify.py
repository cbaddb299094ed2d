"""Name a sealed call: run it at settings that separate the candidates, and keep those whose arithmetic agrees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
from threadpoolctl import threadpool_limits

from kernels.attention import golden
from kernels.attention.blas import Gemm, GemmRejectedError
from kernels.attention.calls import Call
from kernels.attention.faulty import Suspect
from kernels.attention.problem import Inputs, Sizes, index_coded, uniform
from labkit import Weighing, weigh
from labkit.numerics.bounds import Bound

PRIMES = (29, 37, 53)


class RefusedError(Exception):
    """BLAS refused the call; the text is the argument that it names, which is all that a caller sees."""


@dataclass(frozen=True)
class Setting:
    """Inputs, and what lies around the operands: ``poison`` or ``adjacent``."""

    inputs: Inputs
    mode: str


def separating_settings(sizes: Sizes, seed: int = 0) -> dict[str, Setting]:
    """Settings that tell calls apart: the given sizes, index-coded at the same, and small sizes in every order.

    Three different primes undo what N = M hides; where they make BLAS refuse a call, two equal sizes let it run. At
    the small sizes the operands are adjacent, so that a call which reads outside one still gives numbers. One head
    each: an investigation of the call needs no more.
    """
    one = Sizes(1, sizes.n, sizes.m, sizes.d_k)
    found = {
        f"{mode} {one.n} x {one.m} x {one.d_k}": Setting(uniform(one, np.random.default_rng([seed, 2])), mode)
        for mode in ("poison", "adjacent")
    }
    found[f"index-coded {one.n} x {one.m} x {one.d_k}"] = Setting(index_coded(one), "adjacent")
    small, _, large = PRIMES
    orders = list(permutations(PRIMES))
    for a, b in ((small, large), (large, small)):
        orders += [(a, a, b), (a, b, a), (b, a, a)]
    for i, order in enumerate(orders):
        inputs = uniform(Sizes(1, *order), np.random.default_rng([seed, 3, i]))
        found["{} x {} x {}".format(*order)] = Setting(inputs, "adjacent")
    return found


class Candidates:
    """Counterfactuals of many calls at fixed settings, each computed once however many suspects are tried."""

    def __init__(self, calls: Iterable[Call], settings: dict[str, Setting]) -> None:
        self.settings = settings
        self._cache: dict[tuple[str, tuple[Gemm, ...]], tuple[np.ndarray, Bound] | str] = {}
        self.calls = {str(call): call for call in calls}

    def counterfactual(self, call: Call, setting: str) -> tuple[np.ndarray, Bound]:
        """The scores that `call` gives in exact arithmetic at `setting`. Raises RefusedError."""
        here = self.settings[setting]
        sizes = here.inputs.sizes
        key = (setting, tuple(call.gemms(sizes, golden.plan(sizes))))
        if key not in self._cache:
            try:
                self._cache[key] = golden.called(call, here.inputs, here.mode)
            except GemmRejectedError as error:
                self._cache[key] = error.argument
        found = self._cache[key]
        if isinstance(found, str):
            raise RefusedError(found)
        return found

    def identify(self, suspect: Suspect) -> Weighing:
        """Weigh every candidate against what the suspect really gives, setting by setting."""

        def observe(setting: str) -> np.ndarray:
            try:
                return suspect.scores(self.settings[setting].inputs, mode=self.settings[setting].mode)
            except GemmRejectedError as error:
                raise RefusedError(error.argument) from None

        hypotheses = {name: partial(self.counterfactual, call) for name, call in self.calls.items()}
        names = {setting: setting for setting in self.settings}
        with threadpool_limits(1):
            return weigh(observe, hypotheses, names, outcomes=(RefusedError,), thorough=False)
