"""What the notebook on the race shows and concludes: hypotheses on what it takes, reasons of verdicts, pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from matplotlib.axes import Axes

import labkit
from kernels.mhc.race.emitted import STEPS, Emitted, compiled, read
from kernels.mhc.race.variants import ANOTHER_STORE, AS_IT_WAS, VARIANTS, Seen, Variant, from_json
from labkit import plots
from labkit.causes.hypotheses import Fit
from labkit.session.record import Record, recorded

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
"""What it takes for a variant's repeats to differ: each hypothesis says of every variant whether they can."""

BY_TEXT = ("text_has_the_overwrite", "needs_both", "own_kernels_are_free")
"""The claims that the compiled text settles, on any machine."""

TOLERANCE = 2.0**-8
"""Relative RMS error that `bench.py` allows a result that is stored as bfloat16."""
LAYER_TOKENS = 1024
"""Tokens over which :func:`~kernels.mhc.race.variants.observe` takes the RMS error of the layer's input."""
SLOWER = 1.05
"""The guard costs nothing that shows while the guarded kernel takes at most this many times as long."""


def allowed(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> dict[str, list[str]]:
    """The variants that were run and whose repeats can differ, by each hypothesis."""
    return {rule: [name for name in seen if says(VARIANTS[name], texts[name])] for rule, says in HYPOTHESES.items()}


def weigh(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> labkit.Weighing | None:
    """Each hypothesis against what was seen, a variant each: can its repeats differ where they did?

    A race need not strike, so repeats that are alike refute nothing: a hypothesis is refuted only where repeats differ
    and it says that they cannot. None where the kernel as it was gave the same bits each time: then there is nothing
    to explain.
    """
    if not seen[AS_IT_WAS].differ:
        return None
    result = labkit.Weighing(list(seen))
    for rule, may in allowed(texts, seen).items():
        result.fits[rule] = {name: _fit(bool(one.differ), name in may) for name, one in seen.items()}
    return result


def _fit(differ: bool, may: bool) -> Fit:
    if not differ:
        return Fit(True, math.nan, "alike: says nothing", tested=False)
    return Fit(may, math.nan, "differ, as they may" if may else "REFUTED: differ, and cannot")


def weighed(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> str:
    """What the weighing leaves, in words; where several explanations are left, also what would decide."""
    weighing, may = weigh(texts, seen), allowed(texts, seen)
    if weighing is None:
        return "not weighed: there is no difference to explain"
    left = sorted(weighing.left, key=lambda rule: len(may[rule]))
    if len(left) < 2:
        return f"{weighing.cause}; the other explanations say of a variant that differs that it cannot"
    narrowest = [rule for rule in left if len(may[rule]) == len(may[left[0]])]
    lines = [
        f"undecidable: {len(left)} of {len(may)} explanations allow every difference that was seen",
        *(f"  {rule}: {len(may[rule])} of {len(seen)} variants may differ" for rule in left),
        f"The narrowest, which lets the fewest variants differ: {' and '.join(narrowest)}.",
    ]
    return "\n".join([*lines, _experiment(seen)] if CAUSE in left else lines)


def _experiment(seen: Mapping[str, Seen]) -> str:
    rarest = min((one for one in seen.values() if one.differ), key=lambda one: one.differ / one.times)
    return (
        "What would decide: a variant with a product left pending and two readers, with one buffer to spare, so that\n"
        "no copy goes into what is read. If its repeats differ, the copy is refuted. If they do not, it counts how\n"
        f"often it was run: one variant with such a copy differs in {_repeats(rarest)} only."
    )


def _repeats(one: Seen) -> str:
    """The first run is what the others are held against, so that it is no repeat."""
    return f"{one.differ} of {one.times - 1} repeats"


def predictions(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> labkit.Table:
    """A row a variant: whether its repeats can differ by each hypothesis, and what was seen, where there is a run."""
    rows = []
    for name, variant in VARIANTS.items():
        each = ("may differ" if rule(variant, texts[name]) else "cannot" for rule in HYPOTHESES.values())
        rows.append((name, *each, _repeats(seen[name]) if name in seen else "no run"))
    return labkit.Table(("variant", *HYPOTHESES, "seen to differ on a GPU"), rows)


def racing(seen: Mapping[str, Seen]) -> labkit.Table:
    """A row a variant that differs: its largest error, and whether a check of the layer's input would see it."""
    rows = [
        (name, _repeats(one), one.error / one.bound, list(one.rms), "passes" if one.rms[1] <= TOLERANCE else "fails")
        for name, one in seen.items()
        if one.differ
    ]
    check = f"a check at {TOLERANCE:.1e}"
    titles = ("repeats that differ", "largest error, of its bound", "RMS of the layer's input", check)
    return labkit.Table(("variant", *titles), rows)


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


def of_runs(texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> dict[str, Settlement]:
    """The claims that the variants' runs on a GPU settle."""
    was = seen[AS_IT_WAS]
    struck = [name for name, one in seen.items() if one.differ]
    copied = [name for name in seen if texts[name].overwrites]
    spared, unforeseen = _without(copied, struck), _without(struck, copied)
    low, high = was.rms
    layer = f"the RMS error of the layer's input, over its first {LAYER_TOKENS:,} tokens,"
    return {
        "repeats_differ": {
            "truth": was.differ > 0,
            "measured": was.differ,
            "because": {
                "confirmed": f"{_differ(was)} from the first run",
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
                "confirmed": f"{layer} is {low:.2e} to {high:.2e} over the runs, and {TOLERANCE:.1e} is allowed",
                "refuted": f"{layer} reaches {high:.2e}, and {TOLERANCE:.1e} is allowed",
            },
        },
        "only_where_the_text_has_it": {
            "truth": "undecidable" if not struck else not unforeseen,
            "measured": f"{len(struck)} of {len(copied)}",
            "because": {
                "confirmed": f"repeats of {len(struck)} variants differ, all of them among the {len(copied)} whose "
                f"text has such a copy; in {was.times} runs each, none of the other {len(seen) - len(copied)} does",
                "refuted": f"repeats differ without such a copy in {', '.join(unforeseen)}",
                "undecidable": f"no repeats differ, with such a copy ({len(copied)} variants) or without it",
            },
        },
        "text_predicts_the_runs": {
            "truth": bool(struck) and not spared and not unforeseen,
            "measured": len(spared) + len(unforeseen),
            "because": {
                "confirmed": f"repeats of {len(struck)} of {len(seen)} variants differ: those with such a copy",
                "refuted": f"with such a copy, all {was.times} runs are alike in {', '.join(spared) or 'none'}; "
                f"without one, repeats differ in {', '.join(unforeseen) or 'none'}",
            },
        },
    }


def of_guard(operator: Mapping[str, Seen], slower: float) -> dict[str, Settlement]:
    """The claims on the guard's cost and effect; `operator` by type of x, `slower` the guarded time over the other."""
    unlike = [name for name, one in operator.items() if one.differ or one.error > one.bound]
    each = "; ".join(f"{name}, {_repeats(one)} differ, {one.error:.2g} of the bound" for name, one in operator.items())
    return {
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
    }


def judged_again(record: Record | None, texts: Mapping[str, Emitted]) -> Record | None:
    """A record whose claims on the variants' runs have the verdicts and reasons that its runs give by this code."""
    if record is None:
        return None
    ledger = labkit.claims("pipeliner_race")
    for claim, one in of_runs(texts, from_json(record.result["metrics"]["runs"])).items():
        ledger.settle(claim, **one)
    claims = record.result["claims"] | {name: asdict(one) for name, one in ledger.settled.items()}
    return replace(record, result=record.result | {"claims": claims})


def _differ(one: Seen) -> str:
    others = one.times - 1
    return f"all {others} repeats differ" if one.differ == others else f"{_repeats(one)} differ"


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
    """The largest error of each variant's runs over what its sums may be off; red where repeats differ."""
    names = list(seen)
    for row, one in enumerate(seen.values()):
        colour = plots.RED if one.differ else plots.BLUE
        axes.plot(one.error / one.bound, row, "o", color=colour, ms=6)
        axes.text(one.error / one.bound * 1.25, row, f"{one.differ} of {one.times - 1}", va="center", fontsize=7)
    axes.axvline(1.0, color=plots.GREY, ls="--", lw=1.2)
    axes.set_xscale("log")
    axes.set_xlim(right=10.0 * max(1.0, *(one.error / one.bound for one in seen.values())))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("largest error, of what its products and a float32 sum may be off (broken line: 1)")


def answer(record: Record, texts: Mapping[str, Emitted]) -> str:
    """The notebook's answer, from the runs on a GPU that a record holds; `texts` of the variants."""
    claims, seen = judged_again(record, texts).result["claims"], from_json(record.result["metrics"]["runs"])
    was, other, weighing = seen[AS_IT_WAS], seen[ANOTHER_STORE], weigh(texts, seen)
    if weighing is None:
        return f"Not shown: all {was.times} runs gave the same bits, and a race need not strike."
    words = [f"{_differ(was).capitalize()} from the first run."]
    only = claims["only_where_the_text_has_it"]["verdict"] == "confirmed"
    if only:
        words.append(
            "The differences appear only where the compiler's intermediate text copies the next tile into shared "
            "memory without a wait for the matrix product that was started on it."
        )
    words.append(_cause(weighing, allowed(texts, seen)))
    if only and claims["text_predicts_the_runs"]["verdict"] == "refuted":
        why = (
            "some variants have such a copy, and all of their runs give the same bits"
            if other.differ
            else "where results are stored by another address after the loop, the text has the same copy, and all "
            f"{other.times} runs give the same bits, so something that the text does not show decides too; the machine "
            "code orders its instructions differently there, and whether that is the reason was not tested"
        )
        words.append(f"That text does not suffice: {why}.")
    if claims["guarded_repeats_are_identical"]["verdict"] == "confirmed":
        words.append(
            "A multiplication by a factor of 1 that the compiler does not know makes it wait, and all repeats of the "
            "guarded kernel are alike."
        )
    return " ".join(words)


def _cause(weighing: labkit.Weighing, may: Mapping[str, Sequence[str]]) -> str:
    left = weighing.left
    if len(left) < 2:
        return f"Of the explanations that were tried, the differences leave: {weighing.cause}."
    narrow = CAUSE in left and all(len(may[CAUSE]) < len(may[rule]) for rule in left if rule != CAUSE)
    which = ", of which that copy is the narrowest" if narrow else ""
    return (
        "The cause is undecidable: a race need not strike, so runs that are alike refute nothing, and the "
        f"differences that were seen allow {len(left)} of {len(may)} explanations{which}."
    )


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record on a GPU, as README and notebook have it; none without a record."""
    kept = recorded("pipeliner_race", "cuda")
    if kept is None or ANOTHER_STORE not in kept.result["metrics"]["runs"]:
        return {}
    orders = {name: variant.order(4 * kept.result["parameters"]["d"]) for name, variant in VARIANTS.items()}
    return {"pipeliner_race": answer(kept, {name: read(text) for name, text in compiled(orders).items()})}
