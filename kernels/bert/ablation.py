"""The comparison of trainings: its plan, which was written down beforehand, and what the rows of results say.

A contrast is the gain in nats of held-out loss of one configuration over another, seed by seed. Its interval is
Student's, at a level that holds for all contrasts of the plan together (Bonferroni), and decides alone. Holm's
procedure over the same family rejects more, but all that it adds are gains whose interval holds both 0 and the margin,
and such a gain is open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kernels.bert import training
from labkit.errors import UsageError
from labkit.session.catalogue import ROOT

PLAN = Path(__file__).with_suffix(".yaml")
KEPT = ROOT / "data" / "results" / "bert_ablation.jsonl"
"""The rows that are kept in the repository."""
PARTS = ("pilot", "first", "then")
BETTER, WORSE, SAME, OPEN, MISSING = "better", "worse", "same", "open", "missing"
WORDS = {
    BETTER: "a gain", WORSE: "a loss", SAME: "inside the margin", OPEN: "not decided", MISSING: "not on record",
}  # fmt: skip
Row = Mapping[str, Any]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Plan:
    """What is in ablation.yaml."""

    run: dict[str, Any]
    margin: float
    great: float
    level: float
    least: int
    pilot: dict[str, list[Any]]
    first: dict[str, list[Any]]
    then: dict[str, list[Any]]
    contrasts: list[Pair]

    def runs(self, part: str, device: str) -> list[training.Run]:
        """The trainings of a part of :data:`PARTS`, in the order in which they are made."""
        if part not in PARTS:
            raise UsageError(f"parts: {part!r} is not right; wanted some of {', '.join(PARTS)}")
        listed = getattr(self, part)
        return training.grid(training.Run(**self.run, device=device), listed["presets"], listed["seeds"])


def plan(path: Path = PLAN) -> Plan:
    """Read the plan."""
    import yaml

    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Plan(**(found | {"contrasts": [tuple(pair) for pair in found["contrasts"]]}))


@dataclass(frozen=True)
class Contrast:
    """What one configuration gains over another, in nats; NaN where nothing is known."""

    pair: Pair
    gains: tuple[float, ...]
    """Seed by seed."""
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.gains)) if self.gains else math.nan

    @property
    def diverged(self) -> bool:
        """Whether a training has no finite loss."""
        return not all(map(math.isfinite, self.gains))

    @property
    def outcome(self) -> str:
        """`same`: the interval is inside the margin. `better`, `worse`: it is not, and does not hold 0. Else `open`;
        `missing` where there are too few seeds."""
        if self.diverged:
            return OPEN
        if math.isnan(self.low):
            return MISSING
        if -self.margin < self.low and self.high < self.margin:
            return SAME
        return BETTER if self.low > 0.0 else WORSE if self.high < 0.0 else OPEN

    def beyond(self, size: float) -> bool:
        """Whether the gain or loss is larger than `size` with the whole interval."""
        return self.outcome in (BETTER, WORSE) and min(abs(self.low), abs(self.high)) > size

    def __str__(self) -> str:
        first, second = self.pair
        if self.outcome == MISSING:
            return f"{first} against {second}: {len(self.gains)} seeds on record"
        if self.diverged:
            return f"{first} over {second}: a training diverged, not decided"
        what = WORDS[self.outcome]
        return f"{first} over {second}: {self.mean:+.3f} nats ({self.low:+.3f} to {self.high:+.3f}), {what}"


def keep(rows: Iterable[Row], path: Path = KEPT) -> list[Row]:
    """Put rows beside those that are kept already, each key once, by preset and seed; the file's rows then."""
    found = {row["key"]: row for row in [*training.rows(path), *rows]}
    ordered = sorted(found.values(), key=lambda row: (row["sources"]["training"], row["preset"], row["seed"]))
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in ordered), encoding="utf-8")
    part.replace(path)
    return ordered


def current(rows: Iterable[Row], settings: Plan) -> list[Row]:
    """The rows of the plan's sizes, by one state of the training code and on one kind of device: the most there are.

    So that a configuration is never held against one that was trained otherwise.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if all(row[name] == value for name, value in settings.run.items()):
            groups.setdefault((row["sources"]["training"], row["device"], row["gpu"], row["torch"]), []).append(row)
    return max(groups.values(), key=len, default=[])


def contrasts(rows: Sequence[Row], settings: Plan, value: str = "validation_loss") -> dict[Pair, Contrast]:
    """Every contrast of the plan, on the rows that there are; the family is the plan's, however few these are."""
    losses = {
        (row["preset"], row["seed"]): float(row[value]) for row in rows if row["seed"] not in settings.pilot["seeds"]
    }
    seeds = sorted({seed for _, seed in losses})
    found = {}
    for pair in settings.contrasts:
        better, worse = pair
        both = [seed for seed in seeds if (better, seed) in losses and (worse, seed) in losses]
        gains = tuple(losses[worse, seed] - losses[better, seed] for seed in both)
        found[pair] = Contrast(pair, gains, *_interval(gains, settings), settings.margin)
    return found


def _interval(gains: Sequence[float], settings: Plan) -> tuple[float, float]:
    if len(gains) < settings.least:
        return math.nan, math.nan
    one_sided = (1.0 - settings.level) / (2.0 * len(settings.contrasts))
    half = float(stats.t.isf(one_sided, len(gains) - 1)) * float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
    mean = float(np.mean(gains))
    return mean - half, mean + half
