"""The pictures of notebook training_run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whywrong.drawing import plots


def draw_losses(axes: Any, report: Mapping[str, Any]) -> None:
    """On the left of two axes the report's losses, on the right how far its learning rates are into the warm-up."""
    facts, rows = report["facts"], report["steps"]
    left, right = axes
    steps, last = [row["step"] for row in rows], rows[-1]["step"]
    left.plot(steps, [float(row["loss"]) for row in rows], "o-", color=plots.BLUE, ms=3)
    vocabulary = facts["model"]["vocabulary"]
    for height, words, colour in (
        (math.log(vocabulary), f"all {vocabulary} tokens equally likely: ln {vocabulary}", plots.GREY),
        (3 * math.log(2), "3 bits per byte", plots.RED),
    ):
        left.axhline(height, color=colour, ls="--", lw=0.8)
        left.text(last, height, words, color=colour, fontsize=7, ha="right", va="bottom")
    left.set(xlabel="step", ylabel="loss, nats per byte", title="The loss falls at every reading ...")
    left.set_ylim(top=math.log(vocabulary) + 0.5)
    warmup, peak = facts["warmup"], facts["rate"]
    right.plot([0, warmup], [0.0, peak], "--", color=plots.GREY, lw=1)
    right.text(0.68 * warmup, 0.7 * peak, "warm-up of debug.yaml", color=plots.GREY, fontsize=7, ha="right")
    end = facts["steps"]
    right.plot([end, end], [0, end / warmup * peak], color=plots.GREY, ls=":", lw=1)
    right.text(end + 0.02 * warmup, 0.2 * peak, f"{end} steps, the run\nof debug.yaml", color=plots.GREY, fontsize=7)
    right.plot(steps, [float(row["lr"]) for row in rows], "o", color=plots.BLUE, ms=3)
    right.text(1.5 * last, 0.01 * peak, f"ten readings, to step {last}", color=plots.BLUE, fontsize=7, va="center")
    title = f"... within the first {last / warmup:.0%} of the warm-up"
    right.set(xlabel="step", ylabel="learning rate", title=title, ylim=(-0.04 * peak, 1.05 * peak))
    right.set_yticks([0, peak / 3, 2 * peak / 3, peak], [f"{k * peak / 3:.0e}" for k in range(4)])


def spans(report: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float, float]:
    """The parts of the report's run before texts are generated, with their minutes; when that begins; and the end."""
    printed = report["printed"]
    trained = report["steps"][-1]["step"] * float(printed["iteration_seconds"])
    asked = sum(float(number) / float(rate) for number, rate in printed["requests_built"].values())
    parts = (
        ("model built", float(printed["build_seconds"])),
        ("100 training steps", trained),
        ("requests built", asked),
    )
    end = float(printed["minutes"])
    return [(name, seconds / 60) for name, seconds in parts], end - float(printed["evaluation_minutes"]), end


def draw_time_axis(axes: Any, report: Mapping[str, Any], steps: int) -> None:
    """The report's twenty minutes on an axis of time, in the order of Lingua's loop, a row a part.

    A part is sampled where it can begin at the earliest; a thin line goes to where it can end at the latest, since the
    report leaves some of the time before the generated texts without a name. `steps` is what the training was to make.
    """
    parts, generated, end = spans(report)
    slack = generated - sum(length for _, length in parts)
    made = report["steps"][-1]["step"]
    rows: list[tuple[str, float, float, float, str]] = []
    start = 0.0
    for name, length in parts:
        rows.append((name, start, length, slack, plots.GREEN if "training" in name else plots.BLUE))
        start += length
    rows.append(("texts generated", generated, end - generated, 0.0, plots.BLUE))
    for row, (_, begin, length, spare, colour) in enumerate(rows, 1):
        axes.barh(row, length, left=begin, color=colour, height=0.55)
        axes.plot([begin, begin + length + spare], [row, row], color=colour, lw=0.8)
        words = f"{60 * length:.0f} s" if length < 2 else f"{length:g} min"
        place, side = (begin + length + spare + 0.15, "left") if length < 2 else (begin + length / 2, "center")
        axes.text(place, row, words, fontsize=7, ha=side, va="center", color="white" if side == "center" else colour)
    rest = (steps - made) * float(report["printed"]["iteration_seconds"]) / 60
    axes.plot(0, 0, "v", color="black", ms=8, clip_on=False)
    axes.text(0.3, 0, "names the missing file and the long warm-up", fontsize=7, va="center")
    axes.plot(end, 5, "X", color=plots.RED, ms=8)
    axes.text(
        end - 0.3, 5, "ends the evaluation, and the training", color=plots.RED, fontsize=7, ha="right", va="center"
    )
    axes.barh(6, rest, left=end, color="none", edgecolor=plots.GREEN, ls="--", height=0.55)
    axes.text(end - 0.15, 6, f"{60 * rest:.0f} s", color=plots.GREEN, fontsize=7, ha="right", va="center")
    labels = ["a preflight", *(row[0] for row in rows), "ZeroDivisionError", f"{steps - made} steps never made"]
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="minutes", xticks=range(0, round(end) + 1, 5), xlim=(0, end + rest + 0.3))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title(f"The missing file shows after {end:.0f} minutes; a preflight shows it before the first step")


def draw_runs(axes: Any, report: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """The report's losses, and those of a run of its sizes on a GPU of ours (`run` as repeat_on_gpu gives it): at the
    report's steps, and at the first."""
    stated = {row["step"]: float(row["loss"]) for row in report["steps"]}
    repeated = {line["step"]: line["loss"] for line in run["lines"] if line["step"] in {1, *stated}}
    series: Sequence[tuple[str, Mapping[int, float], str, str]] = (
        ("the report, H100", stated, "o-", plots.BLUE),
        (f"here, {run['gpu']}, another text", repeated, "s--", plots.ORANGE),
    )
    for name, losses, style, colour in series:
        axes.plot(list(losses), list(losses.values()), style, color=colour, ms=3, label=name)
    axes.legend(fontsize=8, loc="upper right")
    differences = [abs(repeated[step] - loss) for step, loss in stated.items() if step in repeated]
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    if differences:
        most = math.ceil(10 * max(differences)) / 10
        axes.set_title(f"On another text the losses are within {most:g} nats of the report's")


CALLS = {
    "train": "update, save,\nevaluate",
    "evaluate": "harness, validation,\nresults.json",
    "distribute_chunks": "a file for\neach process",
    "find_chunks": "ranks % number\nof files",
}
"""What calls what, and what each does, in that order."""


def draw_calls(axes: Any, last: int, steps: int) -> None:
    """The chain of calls that ends in the error, and what the error, on its way back, keeps from being done."""
    never = {"train": f"never run:\nsteps {last + 1} to {steps}", "evaluate": "never written:\nresults.json"}
    ends = len(CALLS) - 1
    for at, (name, does) in enumerate(CALLS.items()):
        colour = plots.RED if at == ends else plots.BLUE
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": colour, "lw": 1.6}
        axes.text(at, 0.0, name, ha="center", va="center", fontsize=9, color=colour, bbox=box)
        axes.text(at, 0.42, does, ha="center", va="bottom", fontsize=8)
        axes.text(at, -0.42, never.get(name, ""), ha="center", va="top", fontsize=8, color=plots.RED)
    beside = [10.0 + 2.8 * len(name) for name in CALLS]  # points, so that no arrow is under a box
    for at in range(ends):
        for height, tail, head, colour in ((0.1, at, at + 1, plots.BLUE), (-0.1, at + 1, at, plots.RED)):
            arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": beside[tail], "shrinkB": beside[head]}
            axes.annotate("", (head, height), (tail, height), arrowprops=arrow)
    axes.text(ends, -0.42, "ZeroDivisionError", ha="center", va="top", fontsize=8, color=plots.RED)
    axes.set(xlim=(-0.5, ends + 0.5), ylim=(-0.95, 0.95))
    axes.axis("off")
    axes.set_title("Calls go right; the error comes back through all of them, and nothing catches it")
