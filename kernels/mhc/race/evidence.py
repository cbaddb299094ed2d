"""What the notebook on the race shows and concludes: hypotheses on what it takes, reasons of verdicts, pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

import labkit
from kernels.mhc.race.emitted import STEPS, Emitted
from kernels.mhc.race.variants import ANOTHER_STORE, AS_IT_WAS, VARIANTS, Seen, Variant
from labkit import plots
from labkit.session.record import recorded

Settlement = dict[str, Any]
CAUSE = "a copy into a buffer that a pending product still reads"
HYPOTHESES: dict[str, Callable[[Variant, Emitted], bool]] = {
    CAUSE: lambda variant, text: bool(text.overwrites),
    "any pipeline of two stages or more": lambda variant, text: variant.stages > 1,
    "any asynchronous product": lambda variant, text: text.asynchronous,
    "any product left pending from step to step": lambda variant, text: text.pending > 0,
    "any pipelined tile with two readers": lambda variant, text: variant.readers == 2 and variant.stages > 1,
    "the sum of squares itself": lambda variant, text: variant.readers == 2,
}
"""What it takes for a variant's repeats to differ: each hypothesis predicts it for every variant."""

BY_TEXT = ("text_has_the_overwrite", "needs_both", "own_kernels_are_free")
"""The claims that the compiled text settles, on any machine."""

TOLERANCE = 2.0**-8
"""Relative RMS error that `bench.py` allows a result that is stored as bfloat16."""
SLOWER = 1.05
"""The guard costs nothing that shows while the guarded kernel takes at most this many times as long."""


def weigh(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> labkit.Weighing | None:
    """Each hypothesis against what was seen, a variant each: do repeats differ (1) or not (0)?

    Only variants on which the hypotheses disagree can tell them apart. None where the kernel as it was gave the same
    bits each time: then there is nothing to explain.
    """
    if not seen[AS_IT_WAS].differ:
        return None
    told = [name for name in seen if len({rule(VARIANTS[name], texts[name]) for rule in HYPOTHESES.values()}) > 1]

    def predicted(rule: Callable[[Variant, Emitted], bool]) -> Callable[[str], Any]:
        return lambda name: (torch.tensor([float(rule(VARIANTS[name], texts[name]))]), labkit.Bound(0.5, "yes or no"))

    return labkit.weigh(
        lambda name: torch.tensor([float(seen[name].differ > 0)]),
        {name: predicted(rule) for name, rule in HYPOTHESES.items()},
        {name: name for name in told},
    )


def predictions(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> labkit.Table:
    """A row a variant: whether its repeats differ by each hypothesis, and what was seen, where there is a run."""

    def word(differ: bool) -> str:
        return "differ" if differ else "same"

    rows = []
    for name, variant in VARIANTS.items():
        each = (word(rule(variant, texts[name])) for rule in HYPOTHESES.values())
        rows.append((name, *each, word(seen[name].differ > 0) if name in seen else "no run"))
    return labkit.Table(("variant", *HYPOTHESES, "seen on a GPU"), rows)


def of_texts(texts: Mapping[str, Emitted], ours: Mapping[str, Emitted], triton: str) -> dict[str, Settlement]:
    """The claims that the compiler's text settles; `texts` of the variants, `ours` of the operator's kernels."""
    was, alone, guarded = (texts[name] for name in (AS_IT_WAS, "one reader, 4 stages", "guarded, 4 stages"))
    free = not alone.overwrites and not guarded.overwrites
    wrong = [name for name, text in ours.items() if text.overwrites]
    counts = f"one reader {len(alone.overwrites)}, product waited for {len(guarded.overwrites)}"
    return {
        "text_has_the_overwrite": {
            "truth": bool(was.overwrites),
            "measured": len(was.overwrites),
            "because": {
                "confirmed": f"{_first(was)} (Triton {triton}, compute capability 9.0)",
                "refuted": f"no copy of Triton {triton}'s text goes into a buffer that a pending product reads",
            },
        },
        "needs_both": {
            "truth": bool(was.overwrites) and free,
            "measured": [len(was.overwrites), len(alone.overwrites), len(guarded.overwrites)],
            "because": {
                "confirmed": f"copies over what is read, of {STEPS} steps: as it was {len(was.overwrites)}, {counts}",
                "refuted": f"copies over what is read do not follow that: as it was {len(was.overwrites)}, {counts}",
            },
        },
        "own_kernels_are_free": {
            "truth": not wrong,
            "measured": len(wrong),
            "because": {
                "confirmed": f"all {len(ours)} compiled kernels were run step by step, and none has such a copy",
                "refuted": f"such a copy is in {', '.join(wrong)}",
            },
        },
    }


def _first(text: Emitted) -> str:
    if not text.overwrites:
        return "there is none"
    one = text.overwrites[0]
    return (
        f"the copy at the end of step {one.step} goes into slot {one.slot} of {text.buffers[one.buffer]}, which the "
        f"product of step {one.read_by} may still read; {text.pending} is left pending"
    )


def of_runs(
    texts: Mapping[str, Emitted], seen: Mapping[str, Seen], operator: Mapping[str, Seen], slower: float
) -> dict[str, Settlement]:
    """The claims that need a GPU; `operator` by type of x, `slower` the guarded kernel's time over the other's."""
    was = seen[AS_IT_WAS]
    racing = [name for name, one in seen.items() if one.differ]
    allowed = [name for name in seen if texts[name].overwrites]
    spared, unforeseen = _without(allowed, racing), _without(racing, allowed)
    unlike = [name for name, one in operator.items() if one.differ or one.error > one.bound]
    each = "; ".join(
        f"{name}, {one.differ} of {one.times} runs differ, {one.error:.2g} of the bound"
        for name, one in operator.items()
    )
    low, high = was.rms
    return {
        "repeats_differ": {
            "truth": was.differ > 0,
            "measured": was.differ,
            "because": {
                "confirmed": f"{was.differ} of {was.times} runs differ from the first",
                "refuted": f"all {was.times} runs gave the same bits",
            },
        },
        "beyond_rounding": {
            "truth": was.error > was.bound,
            "measured": was.error,
            "because": {
                "confirmed": f"an element is {was.error:.1e} off, where a float32 sum may be {was.bound:.1e}",
                "refuted": f"no element is more than {was.error:.1e} off, and a float32 sum may be {was.bound:.1e}",
            },
        },
        "tolerance_passes": {
            "truth": high <= TOLERANCE,
            "measured": [low, high],
            "because": {
                "confirmed": f"its RMS error is {low:.2e} to {high:.2e} over the runs, and {TOLERANCE:.1e} is allowed",
                "refuted": f"its RMS error reaches {high:.2e}, and {TOLERANCE:.1e} is allowed",
            },
        },
        "only_where_the_text_has_it": {
            "truth": "undecidable" if not racing else not unforeseen,
            "measured": f"{len(racing)} of {len(allowed)}",
            "because": {
                "confirmed": f"repeats of {len(racing)} variants differ, all of them among the {len(allowed)} whose "
                f"text has such a copy; none of the other {len(seen) - len(allowed)} does",
                "refuted": f"repeats differ without such a copy in {', '.join(unforeseen)}",
                "undecidable": f"no repeats differ, with such a copy ({len(allowed)} variants) or without it",
            },
        },
        "text_predicts_the_runs": {
            "truth": bool(racing) and not spared and not unforeseen,
            "measured": len(spared) + len(unforeseen),
            "because": {
                "confirmed": f"repeats of {len(racing)} of {len(seen)} variants differ: those with such a copy",
                "refuted": f"with such a copy, repeats are all alike in {', '.join(spared) or 'none'}; without one, "
                f"they differ in {', '.join(unforeseen) or 'none'}",
            },
        },
        "guarded_repeats_are_identical": {
            "truth": not unlike,
            "measured": {name: one.differ for name, one in operator.items()},
            "because": {
                "confirmed": f"the same bits, and within the bound: {each}",
                "refuted": f"not so in {', '.join(unlike) or 'any'}: {each}",
            },
        },
        "guard_costs_nothing": {
            "truth": slower <= SLOWER,
            "measured": slower,
            "because": {
                "confirmed": f"it takes {slower:.3f} times as long, and up to {SLOWER} counts as nothing",
                "refuted": f"it takes {slower:.3f} times as long, more than {SLOWER}",
            },
        },
    }  # fmt: skip


def _without(some: Sequence[str], others: Sequence[str]) -> list[str]:
    return [name for name in some if name not in others]


def counted(text: Emitted) -> str:
    """Buffers and overwrites in words."""
    return f"{', '.join(map(str, text.buffers.values()))} buffers of x and phi, {len(text.overwrites)} overwrites"


def draw_slots(axes: Axes, text: Emitted, steps: int, title: str) -> None:
    """Slots of the shared tile (rows) by steps (columns): the product that reads one, the copy that writes one.

    A product stays pending for `text.pending` steps after its own. A copy into a slot that is still read is red.
    """
    if not text.overwrites and not text.reads:
        raise ValueError("text: no asynchronous product reads a pipelined tile, so that there is nothing to draw")
    tile = text.overwrites[0].buffer if text.overwrites else next(iter(text.buffers))
    at = {(one.step, one.slot) for one in text.overwrites if one.buffer == tile}
    for step, slot in ((s, n) for s, name, n in text.reads if name == tile and s < steps):
        axes.barh(slot, 0.55 + text.pending, left=step, height=0.62, color=plots.BLUE, alpha=0.45, lw=0)
        axes.text(step + 0.06, slot, f"product {step}", va="center", fontsize=7)
    for step, slot in ((s, n) for s, name, n in text.writes if name == tile and s < steps):
        colour = plots.RED if (step, slot) in at else plots.GREEN
        axes.barh(slot, 0.35, left=step + 0.6, height=0.62, fill=False, edgecolor=colour, lw=2.0)
    axes.set_yticks(range(text.buffers[tile]), [f"buffer {slot}" for slot in range(text.buffers[tile])])
    axes.set_xlim(0, steps)
    axes.set_xticks(range(steps))
    axes.invert_yaxis()
    axes.set_xlabel("step of the loop")
    axes.set_title(title)


def draw_runs(axes: Axes, seen: Mapping[str, Seen]) -> None:
    """The largest error of each variant's runs over what a float32 sum may be off; red where repeats differ."""
    names = list(seen)
    for row, one in enumerate(seen.values()):
        colour = plots.RED if one.differ else plots.BLUE
        axes.plot(one.error / one.bound, row, "o", color=colour, ms=6)
        axes.text(one.error / one.bound * 1.25, row, f"{one.differ} of {one.times} differ", va="center", fontsize=7)
    axes.axvline(1.0, color=plots.GREY, ls="--", lw=1.2)
    axes.set_xscale("log")
    axes.set_xlim(right=10.0 * max(1.0, *(one.error / one.bound for one in seen.values())))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("largest error, of what a float32 sum may be off (broken line: 1)")


def answer(result: Mapping[str, Any]) -> str:
    """The notebook's answer, from a result.json of a GPU."""
    claims, runs = result["claims"], result["metrics"]["runs"]
    was, other = runs[AS_IT_WAS], runs[ANOTHER_STORE]
    if not was["differ"]:
        return f"Not shown: all {was['times']} runs gave the same bits, and a race need not strike."
    cause = result["verdict"]["cause"]
    named = f"It takes {cause}" if cause in HYPOTHESES else f"Of the explanations that were tried: {cause}"
    words = [
        f"{was['differ']} of {was['times']} runs differ from the first. {named}: the compiler's intermediate text "
        "copies the next tile into shared memory without a wait for the matrix product that was started on it.",
    ]
    if claims["text_predicts_the_runs"]["verdict"] == "refuted":
        why = (
            "some variants have such a copy, and all of their runs give the same bits"
            if other["differ"]
            else "where results are stored by another address after the loop, the text has the same copy, and all "
            f"{other['times']} runs give the same bits, so that the order of the machine code decides too"
        )
        words.append(f"That text does not suffice: {why}.")
    if claims["guarded_repeats_are_identical"]["verdict"] == "confirmed":
        words.append("A multiplication by a number that is 1 makes the compiler wait, and the differences end.")
    return " ".join(words)


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record on a GPU, as README and notebook have it; none without a record."""
    kept = recorded("pipeliner_race", "cuda")
    return {"pipeliner_race": answer(kept.result)} if kept and ANOTHER_STORE in kept.result["metrics"]["runs"] else {}
