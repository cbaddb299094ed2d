"""Pictures of how often right programs are accused, and how small a fault is found; from the record of both."""

import json
from typing import Any

from matplotlib.figure import Figure

from labkit import plots
from labkit.session.catalogue import ROOT

RECORD = ROOT / "data" / "results" / "right_programs.json"
STATED = 1.0 / 1000.0
"""The stated rate of false alarms, a trace."""


def recorded() -> dict[str, Any]:
    """What `tests/labkit/right_programs.py` found last in its long form."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def both_curves(record: dict[str, Any]) -> Figure:
    """Left, the share of right programs that are accused, by storage; right, of faults that are found, by size."""
    figure, (left, right) = plots.figure(1, 2, width=8.5, height=3.2)
    rates = record["accused by"]["storage"]
    for y, rate in enumerate(rates.values()):
        share, (low, high) = rate["count"] / rate["of"], rate["interval"]
        left.plot([1e2 * low, 1e2 * high], [y, y], color=plots.COLOURS[y], linewidth=2)
        left.plot(1e2 * share, y, "o", color=plots.COLOURS[y])
    left.axvline(1e2 * STATED, color="0.5", linestyle=":")
    left.text(1e2 * STATED, len(rates) - 0.55, " stated rate", fontsize=7, color="0.4")
    left.set(yticks=range(len(rates)), yticklabels=list(rates), xlim=(0.0, None), ylim=(-0.6, len(rates) - 0.4))
    left.set(
        xlabel="right programs accused (%), with 95% intervals", title="About one right program in 1000 is accused"
    )
    for colour, (storage, grades) in zip(plots.COLOURS, sorted(record["power"].items()), strict=False):
        sizes = {name: both["found"] for name, both in grades.items() if name.endswith("roundings")}
        points = sorted((float(name.split()[0]), s["count"] / s["of"]) for name, s in sizes.items())
        right.plot(*zip(*points, strict=True), marker="o", color=colour, label=storage)
    right.set(xscale="log", ylim=(0.0, 1.03), xlabel="size of the fault, in roundings of its step's type")
    right.set(ylabel="faults found (share)", title="Nearly all faults of 32 roundings are found")
    right.legend(fontsize=7, loc="lower right")
    total = record["accused"]["of"]
    plots.caption(
        figure, f"{total} right programs drawn at random; recorded on {record['date']}, torch {record['torch']}"
    )
    return figure
