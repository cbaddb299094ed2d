"""All runs below a folder as one page: a card for each setting, or a grid for a notebook with many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from labkit.cli.pages import ANSWERS, Card, card, render
from whywrong.files import write_text, writing

CARDS = 12
"""Settings of one notebook that have a card each; more are shown as a sweep."""
ALONG, FACETS = 48, 8
"""Places along an axis of a sweep, and its tables; with more values, neighbours share a place."""
CAUSES = "●▲■◆▼★"
"""Marks of the commonest causes."""


def gallery(out: Path) -> Path:
    """Write OUT/index.html with every run below OUT, and return it. Raises UsageError if it cannot be written."""
    files = [path for name in ("result.json", "log.txt", "notebook.ipynb") for path in out.glob(f"*/*/{name}")]
    return index(map(card, sorted({path.parent for path in files})), out)


def index(cards: Iterable[Card], out: Path, title: str = "Runs") -> Path:
    """Write OUT/index.html: a card for each setting that was run, or a grid where a notebook has many."""
    by_setting, by_notebook = defaultdict(list), defaultdict(list)
    for run in sorted(cards, key=lambda run: -run.when):
        setting = repr(sorted(run.parameters.items())) if run.parameters else str(run.notebook)
        by_setting[run.name, run.interactive, setting].append(run)
    for run, *run.earlier in by_setting.values():
        by_notebook[run.name].append(run)
    shown = [run.compare() for run, *_ in by_setting.values() if len(by_notebook[run.name]) <= CARDS]
    sweeps = [_sweep(runs) for runs in by_notebook.values() if len(runs) > CARDS]
    path = out / "index.html"
    with writing(path, "--out"):
        write_text(path, render("index.html", title=title, cards=shown, sweeps=sweeps))
    return path


def _sweep(runs: list[Card]) -> dict[str, Any]:
    """Runs of one notebook by the two parameters that vary most, a table for each value of the third."""
    names = dict.fromkeys([*(name for run in runs for name in run.parameters), ""])
    values = {name: {run.parameters[name] for run in runs if name in run.parameters} for name in names}
    varying = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))
    axes = [*varying, "", "", ""][:3]
    axes[2] = axes[2] if len(values[axes[2]]) <= FACETS else ""
    places, cells = [_places(values[name]) for name in axes], defaultdict(list)
    for run in runs:
        labels = (place.get(run.parameters.get(name), "") for place, name in zip(places, axes, strict=True))
        cells[tuple(labels)].append(run)
    used = [set(labels) for labels in zip(*cells, strict=True)]
    ordered = [[label for label in [*place.values(), ""] if label in u] for place, u in zip(places, used, strict=True)]
    ends, reasons = Counter(run.ends for run in runs), Counter(run.reason for run in runs if run.reason)
    causes = [end for end, _ in ends.most_common() if end not in ANSWERS]
    marks = ANSWERS | dict.fromkeys(causes, "✚") | dict(zip(causes, CAUSES, strict=False))
    sweep = {"runs": runs, "first": runs[0].compare(), "axes": axes, "cells": cells, "marks": marks}
    sweep |= {"labels": map(dict.fromkeys, ordered), "counts": sum((run.counts for run in runs), Counter[str]())}
    return sweep | {"ends": ends.most_common(12), "reasons": reasons.most_common(8)}


def _places(values: Collection[Any]) -> dict[Any, str]:
    """The label of each value's place along an axis."""
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    step = -(-len(ordered) // ALONG) or 1
    parts = [ordered[k : k + step] for k in range(0, len(ordered), step)]
    return {value: f"{part[0]} to {part[-1]}" if len(part) > 1 else str(value) for part in parts for value in part}
