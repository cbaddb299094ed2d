"""Which fault a kernel has, by experiments: settings that separate, and every fault of the list held against each."""

from __future__ import annotations

from collections.abc import Callable

import whywrong
from kernels.mhc import counterfactual
from kernels.mhc.faulty import CORRECT_ACCESS, Problem, rivals
from kernels.mhc.problem import Constants
from whywrong import Trace

Kernel = Callable[[Problem], Trace]
NO_FAULT = "no fault"
PRIME = 67
"""A width that is no multiple of anything, and wider than any tile of the list."""


def settings(n: int, d: int, tokens: int, seed: int, device: str) -> dict[str, Problem]:
    """Problems at which faults that look alike elsewhere part."""

    def sampled(kind: str = "normal", width: int = d, of: int = seed, eps: float = Constants().hc_eps) -> Problem:
        return Problem.sample(tokens, n, width, of, Constants(hc_eps=eps), device, kind)

    return {
        "as given": sampled(),
        "fresh draw": sampled(of=seed + 1),
        "D prime": sampled(width=PRIME),
        "one column of dx_in": sampled("one-hot"),
        "index-coded x": sampled("index"),
        "larger hc_eps": sampled(eps=0.01),
    }


def identify(kernel: Kernel, n: int, d: int, tile: int, tokens: int, seed: int, device: str) -> whywrong.Weighing:
    """Hold `kernel` against each fault of the list and the correct kernel, element by element, at each setting."""

    def counterfactually(name: str) -> Kernel:
        if name == NO_FAULT:
            return lambda p: counterfactual.backward(p, CORRECT_ACCESS)
        return lambda p: counterfactual.backward(p, rivals(n, p.x.shape[2], tile)[name])

    hypotheses = {name: counterfactually(name) for name in (*rivals(n, d, tile), NO_FAULT)}
    return whywrong.weigh(kernel, hypotheses, settings=settings(n, d, tokens, seed, device))
