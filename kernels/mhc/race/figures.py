"""Pictures and tables of the race: buffers over time, errors of the variants, what each text and its runs are like."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import whywrong
from kernels.mhc.race.claims import TOLERANCE
from kernels.mhc.race.emitted import Emitted
from kernels.mhc.race.spare_buffer import Pair
from kernels.mhc.race.variants import AS_IT_WAS, STREAMS, VARIANTS, Measured, Repeats
from whywrong.drawing import plots

ROWS = 12
"""Variants that :func:`draw_errors` shows."""


def film(kernels: Mapping[str, Emitted], steps: int = 5) -> Figure:
    """The buffers of the shared tile at the end of each step, a row a kernel: which product may still read, what is
    written.

    A product stays pending for `pending` steps after its own. A copy over what is read is orange. Raises ValueError if
    no asynchronous product reads a tile.
    """
    figure, axes = plots.figure(len(kernels), steps, width=9.0, height=1.9 * len(kernels) + 0.7)
    for row, (name, text) in zip(axes, kernels.items(), strict=True):
        if not text.reads or not text.buffers:
            raise ValueError(f"{name}: no asynchronous product reads a pipelined tile, so that nothing can be drawn")
        tile = text.overwrites[0].buffer if text.overwrites else next(iter(text.buffers))
        overwritten = {(copy.step, copy.slot) for copy in text.overwrites if copy.buffer == tile}
        for step, axis in enumerate(row):
            reading = {slot: at for at, of, slot in text.reads if of == tile and step - text.pending < at <= step}
            writing = {slot for at, of, slot in text.writes if of == tile and at == step}
            for slot in range(text.buffers[tile]):
                colour = plots.BLUE if slot in reading else "white"
                axis.barh(slot, 1.0, height=0.8, color=colour, alpha=0.45, edgecolor=plots.GREY, lw=0.8)
                if slot in reading:
                    axis.text(0.08, slot, f"read by {reading[slot]}", va="center", fontsize=8)
                if slot in writing:
                    hit = (step, slot) in overwritten
                    axis.barh(slot, 0.98, left=0.01, height=0.74, fill=False, lw=2.5,
                              edgecolor=plots.RED if hit else plots.GREEN)  # fmt: skip
            axis.set(xlim=(-0.02, 1.02), ylim=(max(4, text.buffers[tile]) - 0.5, -0.5), xticks=[])
            axis.set_yticks([] if step else range(text.buffers[tile]))
            axis.set_title(f"end of step {step}", fontsize=9)
            axis.spines[:].set_visible(False)
        row[0].set_ylabel(f"{name}\nbuffer", fontsize=8)
    words = {"a product may still read": (plots.BLUE, True), "a copy, over what is read": (plots.RED, False)}
    words["a copy, into a free buffer"] = (plots.GREEN, False)
    handles = [Patch(fill=fill, alpha=0.45 if fill else 1.0, color=colour, lw=2.5, label=label)
               for label, (colour, fill) in words.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return figure


def draw_errors(axes: Axes, repeats: Mapping[str, Repeats]) -> None:
    """The largest error of each variant's runs over the tolerance; orange where repeats differ.

    Those that differ come first; of the others as many as there is room for, :data:`ROWS` in all.
    """
    shown = sorted(repeats, key=lambda name: not repeats[name].differ)[:ROWS]
    errors = [repeats[name].error / repeats[name].bound for name in shown]
    for row, (name, error) in enumerate(zip(shown, errors, strict=True)):
        axes.plot(error, row, "o", color=plots.RED if repeats[name].differ else plots.BLUE, ms=6)
        axes.text(error * 1.3, row, f"{repeats[name].counted} repeats differ", va="center", fontsize=7)
    axes.axvline(1.0, color=plots.GREY, ls="--", lw=1.2)
    axes.set(xscale="log", xlim=(min(errors) / 3.0, 60.0 * max(1.0, *errors)))
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("largest error, times the tolerance (broken line: 1)")
    beyond = [error > 1.0 for error in errors]
    differ = [repeats[name].differ > 0 for name in shown]
    words = "The variants whose repeats differ are wrong by more than rounding; the others are not"
    if beyond != differ or not any(differ):
        words = f"Repeats of {sum(differ)} variants differ, and {sum(beyond)} are wrong by more than rounding"
    axes.set_title(words)


def errors(made: Measured) -> Figure:
    """:func:`draw_errors` as a figure, whose caption says how many runs of what size made it."""
    figure, axes = plots.figure(width=8.5, height=3.6)
    draw_errors(axes, made.repeats)
    drawn = (
        f"{min(ROWS, len(made.repeats))} of {len(made.repeats)} variants, {made.repeats[AS_IT_WAS].times} runs of each"
    )
    sizes = f"T = {made.sizes['tokens']}, K = {STREAMS * made.sizes['d']}"
    plots.caption(figure, f"{drawn}; {sizes}; Triton {made.triton}; {made.where}")
    return figure


def checks(repeats: Mapping[str, Repeats]) -> whywrong.Table:
    """A row a variant whose repeats differ: which of three checks sees it."""
    rows = [
        (
            name,
            "sees it",
            "sees it" if runs.error > runs.bound else "does not",
            "sees it" if runs.rms[1] > TOLERANCE else "does not",
            list(runs.rms),
        )
        for name, runs in repeats.items()
        if runs.differ
    ]
    layer = f"RMS error of the layer's input, at most {TOLERANCE:.1e}"
    checks = ("two runs, bit for bit", "each element of the projection", layer)
    return whywrong.Table(("variant", *checks, "that RMS error"), rows)


def properties(texts: Mapping[str, Emitted], repeats: Mapping[str, Repeats]) -> whywrong.Table:
    """A row a variant: what its source and its text have that may matter, and how many repeats differ."""
    rows = [
        (
            name,
            variant.readers,
            ", ".join(map(str, texts[name].buffers.values())) or "none",
            texts[name].pending,
            "yes" if texts[name].overwrites else "no",
            repeats[name].counted if name in repeats else "no run",
        )
        for name, variant in VARIANTS.items()
    ]
    columns = ("readers of x", "buffers of x, phi", "products left pending", "copy over what is read")
    return whywrong.Table(("variant", *columns, "repeats that differ"), rows)


def spare_runs(pairs: Mapping[str, Pair]) -> whywrong.Table:
    """A row a text with a spare buffer: how many runs differ from its most common result, and its largest error."""
    rows = [
        (name, side, f"{runs.uncommon} of {runs.times}", runs.error / runs.bound)
        for name, pair in pairs.items()
        for side, runs in pair._asdict().items()
    ]
    columns = ("kernel", "spare buffer", "runs unlike the most common", "error, times the tolerance")
    return whywrong.Table(columns, rows)
