"""Six explanations of why repeats differ, what each allows, and which of them the runs refute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import whywrong
from kernels.mhc.race.emitted import Emitted
from kernels.mhc.race.spare_buffer import KERNELS, Pair, chance_without_effect
from kernels.mhc.race.variants import AS_IT_WAS, VARIANTS, Repeats, Variant
from whywrong.explaining.hypotheses import Fit

CAUSE = "a copy into a buffer that a pending product still reads"
EXPLANATIONS: dict[str, Callable[[Variant, Emitted], bool]] = {
    CAUSE: lambda variant, text: bool(text.overwrites),
    "any pipeline of two stages or more": lambda variant, text: variant.stages > 1,
    "any asynchronous product": lambda variant, text: text.asynchronous,
    "any product left pending from step to step": lambda variant, text: text.pending > 0,
    "any pipelined tile with two readers": lambda variant, text: variant.readers == 2 and variant.stages > 1,
    "the sum of squares itself": lambda variant, text: variant.readers == 2,
}
"""What it takes for a variant's repeats to differ: each explanation says of every variant whether they can."""

CHANCE = 1e-3
"""The spare buffer's use has an effect where its result has a smaller chance without one."""
PAIRS = "the spare buffer, used and unused"
"""The setting of :func:`weigh` that compares the two texts with a spare buffer."""


def weigh(
    texts: Mapping[str, Emitted],
    repeats: Mapping[str, Repeats],
    spare_texts: Mapping[str, Pair],
    spare_repeats: Mapping[str, Pair],
) -> whywrong.Weighing | None:
    """Compare each explanation with what was observed: every variant of `repeats`, and the spare buffer.

    A race need not strike, so a variant's repeats that are alike refute nothing; an explanation is refuted where
    repeats differ and it says that they cannot. The two texts of a pair differ in one number, so an explanation that
    holds of both says that both differ equally often: it is refuted where that has a chance below :data:`CHANCE`.
    None where the kernel as it was gave the same bits each time: then there is nothing to explain.
    """
    if not repeats or not repeats[AS_IT_WAS].differ:
        return None
    weighing = whywrong.Weighing([*repeats, *([PAIRS] if spare_repeats else [])])
    for name, rule in EXPLANATIONS.items():
        fits = {v: _fit(runs.differ > 0, rule(VARIANTS[v], texts[v])) for v, runs in repeats.items()}
        if spare_repeats:
            may = [Pair(*(rule(KERNELS[k], text) for text in spare_texts[k])) for k in spare_repeats]
            fits[PAIRS] = _fit_pairs(may, spare_repeats)
        weighing.fits[name] = fits
    return weighing


def _fit(differ: bool, may: bool) -> Fit:
    if not differ:
        return Fit(True, math.nan, "alike: says nothing", tested=False)
    return Fit(may, math.nan, "differ, as they may" if may else "REFUTED: differ, and cannot")


def _fit_pairs(may: list[Pair], repeats: Mapping[str, Pair]) -> Fit:
    """`may`: whether the runs of each pair can differ, by an explanation."""
    if any(pair.used.uncommon for pair in repeats.values()):
        return _fit(True, all(allowed.used for allowed in may))
    if chance_without_effect(repeats) >= CHANCE:
        return _fit(False, True)
    separated = all(allowed.unused and not allowed.used for allowed in may)
    return Fit(separated, math.nan, "as it says" if separated else "REFUTED: holds of both, and one never differs")


def predictions(texts: Mapping[str, Emitted], spare_texts: Mapping[str, Pair]) -> whywrong.Table:
    """A row an explanation: how many variants' repeats may differ, and those of the spare buffer, unused and used."""
    rows = []
    for name, rule in EXPLANATIONS.items():
        variants = [rule(VARIANTS[v], texts[v]) for v in VARIANTS]
        may = [[rule(KERNELS[k], text) for k, text in zip(KERNELS, side, strict=True)] for side in _sides(spare_texts)]
        rows.append((name, f"{sum(variants)} of {len(variants)}", *("may differ" if any(m) else "cannot" for m in may)))
    return whywrong.Table(("repeats differ by", "variants that may differ", "buffer unused", "buffer used"), rows)


def _sides(pairs: Mapping[str, Pair]) -> list[list[Emitted]]:
    return [[pairs[name][side] for name in KERNELS] for side in (0, 1)]


def outcome(weighing: whywrong.Weighing) -> whywrong.Table:
    """A row an explanation: whether it is left, or the first setting that refutes it."""
    refuted = weighing.refuted
    rows = [(name, "refuted by " + refuted[name] if name in refuted else "is left") for name in weighing.fits]
    return whywrong.Table(("explanation", "outcome"), rows)
