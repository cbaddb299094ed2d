"""Pictures of the self-test: what each check identifies, how weak a fault may be, how often correct programs are
flagged.

Each returns a figure whose titles are made from the data that it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import fisher_exact

from kernels.compare.calibration import INSTRUMENTS, Tally, alarms, largest_shares
from kernels.compare.checks import CHECKS, LABKIT, REFERENCES, RERUN, STORED
from kernels.compare.correct_programs import STATED, flagged, identified
from kernels.compare.trials import (
    ALL_CHECKS,
    SHAPES,
    Trial,
    detection,
    interval_by_fault,
    lamps,
    without_false_positives,
)
from labkit.session.wording import count, digits, percent
from whywrong.drawing import plots

TENFOLD = 10.0
"""The strength that titles speak of."""


def plot_identified(done: Sequence[Trial], where: str) -> Figure:
    """For labkit and each check the share of faults identified with no correct run flagged; by reference."""
    shares = {
        which: {
            name: math.nan if share is None else share for name, share in without_false_positives(done, which).items()
        }
        for which in REFERENCES
    }
    names = [LABKIT, *sorted(CHECKS, key=lambda check: shares[RERUN][check], reverse=True)]
    figure, axes = plots.figure(width=8.5, height=3.0)
    for y, name in enumerate(names):
        stored, rerun = (100.0 * shares[which][name] for which in (STORED, RERUN))
        colour = plots.RED if name == LABKIT else plots.BLUE
        axes.plot([stored, rerun], [y, y], color="0.8", zorder=1)
        axes.plot(stored, y, "o", color=colour, markerfacecolor="white")
        axes.plot(rerun, y, "o", color=colour)
        if math.isfinite(rerun):
            x = max(rerun, stored)  # the first where the second is nan
            axes.annotate(f"{rerun:.0f}%", (x, y), (8, -3), textcoords="offset points", fontsize=8)
    best = max(shares[which][check] for which in REFERENCES for check in CHECKS)
    finite = [share for by_check in shares.values() for share in by_check.values() if math.isfinite(share)]
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0.0, 130.0 * max(finite, default=1.0) or 1.0))
    axes.set_title(f"With no correct run flagged, the other checks identify {percent(best)} of the faults at most")
    axes.set_xlabel("faults identified at their step, whole and scaled down (%)")
    axes.invert_yaxis()
    axes.plot([], [], "o", color=plots.GREY, markerfacecolor="white", label="stored values")
    axes.plot([], [], "o", color=plots.GREY, label="re-run on what was observed")
    axes.legend(title="reference", fontsize=8, title_fontsize=8, loc="lower right")
    plots.caption(figure, f"{len(done)} cases; each check at the smallest tolerance that flags no correct run; {where}")
    return _finished(figure)


def plot_detection(done: Sequence[Trial], where: str) -> Figure:
    """The share of faults identified at their step by strength: left by check, right by how far the fault spreads."""
    figure, (left, right) = plots.figure(1, 2, width=9.5, height=3.4)
    curves = {
        "whywrong, re-run": detection(done, LABKIT),
        "whywrong, stored values": detection(done, LABKIT, STORED),
        "assert_close, re-run": detection(done, "torch.testing.assert_close"),
    }
    faults = [sum(t.shape == shape and t.strength == TENFOLD for t in done) for shape in SHAPES]
    by_shape = {
        f"{shape}: {n} faults": detection(done, LABKIT, shape=shape) for shape, n in zip(SHAPES, faults, strict=True)
    }
    looks = (curves, plots.COLOURS[:3], "os^"), (by_shape, plots.COLOURS[3:], "vDx")
    for axes, (series, colours, marks) in zip((left, right), looks, strict=True):
        for (name, points), colour, mark in zip(series.items(), colours, marks, strict=False):
            axes.plot(*zip(*points, strict=True), marker=mark, color=colour, label=name)
        axes.axvline(1.0, color="0.5", linestyle=":", linewidth=1)
    for strength, _ in curves["whywrong, re-run"]:
        low, high = interval_by_fault([t for t in done if t.strength == strength], LABKIT)
        left.plot([strength, strength], [low, high], color=plots.COLOURS[0], lw=1.2, alpha=0.6)
    for axes in (left, right):
        axes.text(1.05, 0.97, "a test that knows\nthe shape sees half", fontsize=7, color="0.4", va="top")
        axes.set(xscale="log", ylim=(-0.03, 1.03), xlabel="strength of the fault")
    at = {name: dict(points).get(TENFOLD, math.nan) for name, points in (curves | by_shape).items()}
    left.set(ylabel="faults identified at their step (share)")
    tenfold = [t for t in done if t.strength == TENFOLD]
    low, high = interval_by_fault(tenfold, LABKIT)
    seen = sum(t.first(LABKIT) == t.truth for t in tenfold)
    left.set_title(f"At strength 10: {seen} of {len(tenfold)} ({percent(low)} to {percent(high)} of such faults)")
    few, _, many = (at[name] for name in by_shape)
    differ = differ_by_chance(few, faults[0], many, faults[-1]) < 0.05
    message = f"In few elements it identifies {percent(few)}, nearly everywhere {percent(many)}"
    right.set_title(message if differ else "Spread makes no difference that can be shown")
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0.2, 0.85))
    right.legend(fontsize=7, loc="lower right")
    plots.caption(figure, f"{sum(t.strength is not None for t in done)} faults scaled down; {where}")
    return _finished(figure)


def plot_lamps(change: Callable[..., Any], step: str, power: int = 1, powers: Sequence[int] = range(-1, 7)) -> Figure:
    """A lamp for each check and strength 10^power: lit where the check flags the step that `change` spoils first.

    The re-run reference; the strength of `power` is framed. Strengths beyond that of the whole change are left out.
    """
    lit = lamps(change, step, [10.0**p for p in powers])
    figure, axes = plots.figure(width=8.0, height=3.0)
    for column, by_check in enumerate(lit.values()):
        for row, check in enumerate(ALL_CHECKS):
            colour = plots.ORANGE if by_check[check] else "0.88"
            axes.plot(column, row, "o", ms=15, color=colour, markeredgecolor="0.5")
    strengths = [f"{strength:g}" if strength else "correct\nrun" for strength in lit]
    if f"{10.0**power:g}" in strengths:
        axes.axvspan(
            *(strengths.index(f"{10.0**power:g}") + half for half in (-0.5, 0.5)), color=plots.BLUE, alpha=0.12
        )
    axes.set_xticks(range(len(lit)), strengths)
    axes.set_yticks(range(len(ALL_CHECKS)), ALL_CHECKS)
    axes.set(xlim=(-0.6, max(len(lit), 1) - 0.4), ylim=(len(ALL_CHECKS) - 0.4, -0.6), xlabel="strength of the fault")
    shown = lit.get(10.0**power, {})
    names = [check for check, on in shown.items() if on]
    axes.set_title(f"At strength {10.0**power:g}, {len(names)} of {len(ALL_CHECKS)} lamps are lit" if shown else
                   f"This change cannot be put in at strength {10.0**power:g}")  # fmt: skip
    return figure


def differ_by_chance(first: float, of_first: int, second: float, of_second: int) -> float:
    """Fisher's exact test: how probable two shares, `first` of `of_first` and so on, are so far apart by chance."""
    hits = [(round(share * n), n) for share, n in ((first, of_first), (second, of_second)) if n]
    return float(fisher_exact([[k, n - k] for k, n in hits]).pvalue) if len(hits) == 2 else 1.0


def plot_correct_programs(record: Mapping[str, Any]) -> Figure:
    """Left, the share of correct programs that are flagged, by storage; right, of faults identified, by size."""
    figure, (left, right) = plots.figure(1, 2, width=9.5, height=3.2)
    rates = flagged(record)
    for y, (colour, rate) in enumerate(zip(plots.COLOURS, rates.values(), strict=False)):
        share, (low, high) = rate["count"] / rate["of"], rate["interval"]
        left.plot([1e2 * low, 1e2 * high], [y, y], color=colour, linewidth=2)
        left.plot(1e2 * share, y, "o", color=colour)
        left.text(1e2 * share, y + 0.15, f"{rate['count']} of {count(rate['of'])}", fontsize=8, color=colour)
    left.axvline(1e2 * STATED, color="0.5", linestyle=":")
    left.text(1e2 * STATED, len(rates) - 0.55, " stated rate", fontsize=7, color="0.4")
    left.set(yticks=range(len(rates)), yticklabels=list(rates), xlim=(0.0, None), ylim=(-0.6, len(rates) - 0.4))
    total = record["accused"]
    left.set_title(f"Of {count(total['of'])} correct programs {total['count']} are flagged")
    left.set_xlabel("correct programs flagged (%), with 95% intervals")
    curves = identified(record)
    for (storage, shares), colour, mark in zip(curves.items(), plots.COLOURS, "os^", strict=False):
        right.plot(list(shares), list(shares.values()), marker=mark, color=colour, label=storage)
    size = sorted(next(iter(curves.values())))[-2]
    least = min(shares[size] for shares in curves.values())
    right.set(xscale="log", ylim=(0.0, 1.03), xlabel="size of the fault, in roundings of its storage type")
    right.set(ylabel="faults identified at their step (share)")
    right.set_title(f"Of faults of {size:g} roundings at least {percent(least)} are identified")
    right.legend(fontsize=8, loc="lower right")
    made = f"torch {record['torch']}, {record['machine']}"
    plots.caption(figure, f"{count(total['of'])} programs sampled at random; recorded on {record['date']}, {made}")
    return _finished(figure)


def plot_largest_shares(tallies: Sequence[Tally], where: str) -> Figure:
    """The largest error of a correct product, as a share of the tolerance, against its length K."""
    figure, axes = plots.figure(width=7.0, height=3.0)
    shares = largest_shares(tallies)
    plots.lines(axes, list(tallies[0].used), {way: list(by_length.values()) for way, by_length in shares.items()})
    axes.axhline(1.0, color=plots.RED, linewidth=1.2)
    axes.text(1.0, 1.05, "tolerance", color=plots.RED, fontsize=8, va="bottom")
    longest = list(tallies[0].used)[-1]
    used = [by_length[longest] for by_length in shares.values()]
    false_positives = alarms(tallies)
    message = f"The longest sums use {percent(min(used))} to {percent(max(used))} of the tolerance"
    axes.set_title(f"{false_positives} correct products are flagged" if false_positives else message)
    axes.set(xlabel="length K of the sums", ylabel="largest error (share of the tolerance)", ylim=(None, 2.0))
    axes.legend(fontsize=7, loc="lower left")
    plots.caption(figure, f"{count(sum(t.cases for t in tallies))} correct products; {where}")
    return _finished(figure)


def plot_smallest_faults(
    lengths: Sequence[int], smallest: Mapping[str, Sequence[Mapping[str, float]]], where: str
) -> Figure:
    """The smallest relative error that each instrument reports against the length K; a panel a storage type."""
    figure, axes = plots.figure(1, len(smallest), width=9.5, height=3.2)
    best = []
    for panel, (dtype, by_length) in zip(axes, smallest.items(), strict=True):
        plots.lines(panel, lengths, {name: [errors[name] for errors in by_length] for name in INSTRUMENTS})
        gains = [errors["elements, all scaled"] / errors["slope"] for errors in by_length]
        most = max(gains)
        behind = max((i for i, gain in enumerate(gains) if gain <= 1.0), default=-1)
        always = behind + 1 < len(gains)
        sees = (
            f"a smaller scale from K = {count(lengths[behind + 1])} on" if always else "no smaller scale at the longest"
        )
        panel.set_title(f"In {dtype} the slope sees\n{sees}")
        best.append(f"{digits(most)} times smaller at K = {count(lengths[gains.index(most)])} in {dtype}")
        panel.set_xlabel("length K of the sums")
    _same_limits(axes)
    axes[0].set_ylabel("smallest relative error reported")
    axes[0].legend(fontsize=7)
    plots.caption(
        figure,
        f"slope against elements, at most {', '.join(best)}\nproducts [64, K] x [K, 64], summed in float32; {where}",
    )
    return _finished(figure)


def _finished(figure: Figure) -> Figure:
    """Out of pyplot's hands, so that a notebook shows it once: as the result of its cell."""
    plt.close(figure)
    return figure


def _same_limits(axes: Sequence[Axes]) -> None:
    limits = [panel.get_ylim() for panel in axes]
    for panel in axes:
        panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
