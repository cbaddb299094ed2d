"""The picture of all benchmarks: every case's time, over its lower bound."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from kernels.speed.records import NAMES, Case
from whywrong.drawing import plots


def plot_all(cases: Sequence[Case]) -> Figure:
    """A row a benchmark, a pair of dots a case: our fastest and the fastest baseline, each over the lower bound."""
    shown = [case for case in cases if case.bound]
    names = [name for name in NAMES if any(case.benchmark == name for case in shown)]
    figure, axes = plots.figure(width=9.0, height=0.62 * len(names) + 1.2)
    for row, name in enumerate(names):
        some = [case for case in shown if case.benchmark == name]
        for place, case in enumerate(some):
            y = row - 0.3 + 0.6 * (place + 0.5) / len(some)
            ours, other = (min(times.values()) / case.bound for times in (case.ours, case.others))
            axes.plot([ours, other], [y, y], color="0.8", lw=0.8, zorder=1)
            axes.plot(other, y, "s", ms=3.5, color=plots.ORANGE)
            axes.plot(ours, y, "o", ms=3.5, color=plots.BLUE)
    axes.axvline(1.0, color=plots.GREY, ls="--")
    axes.set(xscale="log", xlabel="time over the lower bound (broken line: 1)", ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), [NAMES[name] for name in names])
    axes.plot([], [], "o", color=plots.BLUE, label="ours")
    axes.plot([], [], "s", color=plots.ORANGE, label="the fastest baseline")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    faster = sum(case.slower_by < 1.0 for case in cases)
    axes.set_title(f"Ours is the faster one in {faster} of {len(cases)} cases")
    below = "below 1: the operands stay in the L2 cache, or TF32 passes float32's bound"
    plots.caption(figure, f"recorded; card and date of each in the table; {below}")
    return figure
