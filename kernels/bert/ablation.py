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
from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError

PLAN = Path(__file__).with_suffix(".yaml")
RECORDED_ROWS = ROOT / "data" / "results" / "bert_ablation.jsonl"
"""The rows that are kept in the repository."""
PARTS = ("pilot", "first", "then")
BETTER, WORSE, SAME, OPEN, MISSING = "better", "worse", "same", "open", "missing"
WORDS = {
    BETTER: "a gain",
    WORSE: "a loss",
    SAME: "inside the margin",
    OPEN: "not decided",
    MISSING: "not on record",
}
DIFFERENCES = ("embedding_norm", "token_types", "scaling", "activation", "attention_dropout", "eps", "norm")
"""The report's seven differences, in its order."""
STRETCHES = 50
"""Whole stretches of a training's curve, each the mean of as many steps, in its row; what is left over is one more."""
PLATEAU = 5.5
"""Nats: a training loss at which a fall from the plateau near 6 has begun; chosen after the curves were seen."""
LATE = 0.5
"""A training that is above :data:`PLATEAU` for more than this share of its tokens is on the plateau too long for its
final loss to be compared; chosen after the curves were seen. It withholds verdicts, and gives none."""
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
            raise UsageError(f"parts: expected some of {', '.join(PARTS)}, got {part!r}")
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
    def interval(self) -> list[float] | None:
        """Its two ends, where they are numbers."""
        return [self.low, self.high] if math.isfinite(self.low) and math.isfinite(self.high) else None

    @property
    def gains_enough(self) -> bool | None:
        """True for a gain; False where the whole interval is below the margin; None where neither is shown."""
        if self.outcome in (MISSING, OPEN) and not self.high < self.margin:
            return None
        return self.outcome == BETTER

    @property
    def equal(self) -> bool | None:
        """True inside the margin; False where the whole interval is beyond it; None where neither is shown."""
        beyond = self.low > self.margin or self.high < -self.margin
        return True if self.outcome == SAME else False if beyond else None

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

    def within(self, size: float) -> bool:
        """Whether the whole interval is smaller than `size`, gain or loss."""
        return -size < self.low and self.high < size

    def __str__(self) -> str:
        first, second = self.pair
        if self.outcome == MISSING:
            return f"{first} against {second}: {len(self.gains)} seeds on record"
        if self.diverged:
            return f"{first} over {second}: a training diverged, not decided"
        what = WORDS[self.outcome]
        return f"{first} over {second}: {self.mean:+.3f} nats ({self.low:+.3f} to {self.high:+.3f}), {what}"


def keep(rows: Iterable[Row], path: Path = RECORDED_ROWS) -> list[Row]:
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


def corrected(name: str) -> Pair:
    """The contrast of the report's model with one difference corrected, over it as it is."""
    return f"report+{name}", "report"


def tokens_seen(row: Row) -> np.ndarray:
    """Millions of tokens that a training has seen at the end of each stretch of its curve."""
    every = max(1, row["steps"] // STRETCHES)
    ends = np.minimum(every * np.arange(1, len(row["curve"]) + 1), row["steps"])
    return ends / row["steps"] * row["tokens"] / 1e6


def plateau_left(row: Row) -> float:
    """Millions of tokens after which the training loss is below :data:`PLATEAU`; infinite where it never is."""
    below = np.flatnonzero(np.array(row["curve"]) < PLATEAU)
    return float(tokens_seen(row)[below[0]]) if len(below) else math.inf


def _late(row: Row) -> bool:
    return plateau_left(row) > LATE * row["tokens"] / 1e6 or not math.isfinite(row["validation_loss"])


@dataclass(frozen=True)
class Trainings:
    """The rows on record, and every contrast of the plan, on the held-out loss and on the mean loss of all steps."""

    plan: Plan
    rows: Sequence[Row]
    gains: Mapping[Pair, Contrast]
    dynamics: Mapping[Pair, Contrast]

    @classmethod
    def of(cls, rows: Sequence[Row], settings: Plan) -> Trainings:
        """Check rows by a plan."""
        now = [row for row in current(rows, settings) if row["seed"] not in settings.pilot["seeds"]]
        return cls(settings, now, contrasts(now, settings), contrasts(now, settings, "loss_all_steps"))

    def of_preset(self, name: str) -> list[Row]:
        """The rows of a configuration, a row a seed."""
        return [row for row in self.rows if row["preset"] == name]

    def missing(self, *pairs: Pair) -> list[str]:
        """The configurations of these contrasts that have too few seeds, and how many each has."""
        seeds = {name: len({row["seed"] for row in self.of_preset(name)}) for pair in pairs for name in pair}
        few = [f"{name} ({count})" for name, count in seeds.items() if count < self.plan.least]
        return few or [" over ".join(pair) for pair in pairs if self.gains[pair].outcome == MISSING]

    def stalled(self, *pairs: Pair) -> list[str]:
        """The configurations of these contrasts of which a seed is on the plateau for too long (:data:`LATE`), or ends
        without a finite loss."""
        names = dict.fromkeys(name for pair in pairs for name in pair)
        return [name for name in names if any(map(_late, self.of_preset(name)))]

    def ranks(self, name: str) -> list[int]:
        """The right word's rank in the report's sentence, a number a seed; 1 is the likeliest word."""
        return [row["predictions"][0]["rank"] for row in self.of_preset(name)]

    def conditions(self) -> dict[str, Any]:
        """The sizes of the trainings, as the texts of claims name them: layers, columns, millions of tokens, rate."""
        run = self.plan.run
        tokens = run["steps"] * run["batch"] * run["length"] / 1e6
        return {"layers": run["layers"], "columns": run["hidden"], "tokens": tokens, "rate": run["rate"]}

    def compared(self) -> list[tuple[str, Any, Any]]:
        """Condition by condition, what the trainings on record had and what those of the report's source had."""
        run, row = self.plan.run, self.rows[0]
        return [
            ("text", f"{row['text']['training'] / 1e6:.0f} MB of English prose", "200,000 documents of C4"),
            ("passes over it", round(run["steps"] / row["epoch_steps"], 1), 3),
            ("steps x batch x length", f"{run['steps']} x {run['batch']} x {run['length']}", "18750 x 32 x 128"),
            ("layers x columns", f"{run['layers']} x {run['hidden']}", "12 x 768"),
            ("vocabulary", row["vocabulary"], 30522),
            ("peak learning rate", f"{run['rate']:.0e}, for all models", "1e-04, for both"),
            ("seeds", f"{len(self.plan.first['seeds'])}, of some models {len(self.plan.then['seeds'])}", 1),
            ("contrasts planned", f"{len(self.plan.contrasts)}, with a margin of {self.plan.margin} nats", "none"),
        ]
