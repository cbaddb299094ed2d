"""Every derived figure of a run recomputed: from a metrics.jsonl, ours or Meta Lingua's, or from what a report prints.

A figure that is printed is known to half a unit of its last digit, and a figure derived from it to what that leaves: an
interval. Two figures agree where their intervals meet.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kernels.lm import metrics
from kernels.lm.config import Model, count, flops_per_token
from labkit.errors import UsageError
from labkit.session.secrets import refuse_secrets
from labkit.tables import Table

Interval = tuple[float, float]
LINGUA = {
    "global_step": "step",
    "loss/out": "loss",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
    "speed/wps": "tokens_per_second",
    "speed/FLOPS": "flops_per_second_lingua",
    "speed/curr_iter_time": "iteration_seconds",
    "optim/total_tokens": "total_tokens",
}
"""Meta Lingua's names of what we have, as its training loop flattens them."""
HEADERS = {
    "step": r"step|ステップ",
    "loss": r"loss|損失",
    "grad_norm": r"grad|勾配",
    "lr": r"\blr\b|learning|学習率",
    "change": r"change|改善",
}


@dataclass(frozen=True)
class Figure:
    """One figure: as stated, as it follows from others, how, and whether the two agree (None: nothing was stated)."""

    name: str
    stated: Interval | None
    derived: Interval
    how: str

    @property
    def agrees(self) -> bool | None:
        """Whether the intervals meet."""
        if self.stated is None:
            return None
        return self.stated[0] <= self.derived[1] and self.derived[0] <= self.stated[1]


def printed(text: str) -> Interval:
    """The numbers that print as `text`: half a unit of its last digit to either side."""
    plain = _plain(text)
    match = re.fullmatch(r"([+-]?\d+)(?:\.(\d*))?(?:[eE]([+-]?\d+))?", plain)
    if not match:
        raise UsageError(f"{text!r} is no number; wanted one as it is printed, such as 1.35e-06 or 1,000")
    half = 0.5 * 10.0 ** (int(match[3] or 0) - len(match[2] or ""))
    return float(plain) - half, float(plain) + half


def _plain(text: str) -> str:
    """A number without what parts its thousands."""
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.strip())


def to_digits(value: str, digits: int) -> Interval:
    """The numbers that print as `value` where only its first digits are meant: 460000 with 2 is 455,000 to 465,000."""
    number = float(_plain(value))
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(number))) + 1 - digits)
    return number - half, number + half


def exact(value: float) -> Interval:
    """A number that is known, to float64's rounding."""
    return value - 1e-12 * abs(value), value + 1e-12 * abs(value)


def over(a: Interval, b: Interval) -> Interval:
    """a / b for intervals above 0."""
    return a[0] / b[1], a[1] / b[0]


def times(a: Interval, factor: float) -> Interval:
    """a x factor, above 0."""
    return a[0] * factor, a[1] * factor


def minus(a: Interval, b: Interval) -> Interval:
    """a - b."""
    return a[0] - b[1], a[1] - b[0]


def analyse(path: Path) -> list[Figure]:
    """The figures of a metrics.jsonl, of a report's figures in YAML, or of the first such table in a report.

    Raises UsageError for a file that is none of these, or that holds a secret.
    """
    try:
        return _analyse(path)
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError, yaml.YAMLError) as error:
        said = (str(error).splitlines() or [""])[0][:80]
        raise UsageError(
            f"{path}: cannot be analysed ({type(error).__name__}: {said}); wanted the fields that "
            "kernels/lm/metrics.py or kernels/lm/reported.yaml shows"
        ) from None


def _analyse(path: Path) -> list[Figure]:
    if path.suffix in (".yaml", ".yml", ".md"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UsageError(f"{path}: cannot be read; wanted a report") from None
        refuse_secrets(str(path), text)
        return of_report({"steps": steps_of(path, text)} if path.suffix == ".md" else yaml.safe_load(text))
    lines = [{LINGUA.get(key, key): value for key, value in line.items()} for line in metrics.read(path)]
    beside = path.with_name("config.json")
    return of_metrics(path, lines, json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {})


def steps_of(path: Path, text: str) -> list[dict[str, Any]]:
    """The rows of the first table with a column each for steps and losses, known by their headers."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    for i, header in enumerate(rows):
        names = [next((n for n, word in HEADERS.items() if re.search(word, cell, re.I)), "") for cell in header]
        if not {"step", "loss"} <= set(names):
            continue
        found = []
        for row in rows[i + 2 :]:
            entry: dict[str, Any] = {
                n: v for n, v in zip(names, row, strict=False) if n and re.search(r"\d|nan|inf", v, re.I)
            }
            step = _plain(entry.get("step", ""))
            if not step.isdigit():
                break
            found.append(entry | {"step": int(step)})
        if found:
            return found
    raise UsageError(f"{path}: holds no table of steps and losses; wanted one with such columns")


def of_report(report: dict[str, Any]) -> list[Figure]:
    """The figures of a report: those of its steps, and those that it prints where `facts` has what they follow from."""
    improvement = report.get("printed", {}).get("improvement")
    steps = of_steps(report.get("steps", []), printed(improvement) if improvement else None)
    return [*steps, *(of_figures(report) if "facts" in report else [])]


def of_steps(steps: Sequence[dict[str, Any]], improvement: Interval | None = None) -> list[Figure]:
    """What follows from a table of steps: changes, improvement, bits, and the learning rate's line.

    `improvement` is the one that a report states, if it does.
    """
    losses = [printed(row["loss"]) for row in steps]
    found = []
    for i, row in enumerate(steps):
        if "change" in row and i:  # the first one's is from a row that is not there
            how = f"loss at {row['step']} - loss at {steps[i - 1]['step']}"
            found.append(
                Figure(f"change to step {row['step']}", printed(row["change"]), minus(losses[i], losses[i - 1]), how)
            )
    share = 1 - losses[-1][1] / losses[0][0], 1 - losses[-1][0] / losses[0][1]
    found.append(Figure("loss improvement", improvement, share, "1 - last loss / first"))
    found.append(Figure("bits per token, last", None, times(losses[-1], 1 / math.log(2)), "loss / ln 2"))
    if all("lr" in row for row in steps):
        found += schedule([(row["step"], printed(row["lr"])) for row in steps])
    return found


def schedule(rates: Sequence[tuple[int, Interval]]) -> list[Figure]:
    """Whether one line, rate = slope x step + start, goes through all the intervals, by linear programming."""
    from scipy.optimize import linprog

    unit = max(abs(high) for _, (_, high) in rates) or 1.0
    rows = [[sign * step, sign] for step, _ in rates for sign in (1.0, -1.0)]
    ends = [end for _, (low, high) in rates for end in (high / unit + 1e-12, -low / unit + 1e-12)]
    free = [(None, None), (None, None)]
    ways = [linprog([sign, 0.0], A_ub=rows, b_ub=ends, bounds=free) for sign in (1.0, -1.0)]
    name, all_of_them = "learning rates on one line", exact(len(rates))
    if not all(way.success for way in ways):
        return [Figure(name, all_of_them, (0.0, len(rates) - 1.0), "entries that one line passes")]
    slopes = tuple(float(way.x[0]) * unit for way in ways)
    shifts = sorted(-float(way.x[1] / way.x[0]) if way.x[0] else 0.0 for way in ways)
    how = f"per step; the line is 0 at step {span((shifts[0], shifts[1]), 3)}"
    return [
        Figure(name, all_of_them, all_of_them, "entries that one line passes"),
        Figure("learning rate, slope", None, (min(slopes), max(slopes)), how),
    ]


def of_figures(report: dict[str, Any]) -> list[Figure]:
    """The figures that a report prints, each from the others and the facts."""
    facts, given = report["facts"], report["printed"]
    sizes, length = Model(**facts["model"]), facts["length"]
    tokens, peak = facts["batch"] * length, facts["peak_flops_per_second"]
    speed = tuple(to_digits(value, given["words_per_second_digits"]) for value in given["words_per_second"])
    speeds = speed[0][0], speed[1][1]
    flops = printed(given["flops_per_second"][0])[0], printed(given["flops_per_second"][1])[1]
    iteration, mean = printed(given["iteration_seconds"]), to_digits(given["words_per_second_mean"], 2)
    per_token = flops_per_token(sizes, length, recomputed=True)
    capacity = printed(given["gpu_capacity_gib"])
    built = [share / 2**30 for share in while_built(sizes)]
    own = times(flops, flops_per_token(sizes, length, recomputed=False) / per_token / peak)
    return [
        Figure("parameters", printed(given["parameters"]), exact(count(sizes)), "counted from the sizes"),
        Figure(
            "FLOP/s, Lingua's formula",
            flops,
            times(speeds, per_token),
            f"{per_token / 1e6:.1f} MFLOP per token x words per second",
        ),
        Figure(
            "words per second, from the iteration",
            mean,
            over(exact(tokens), iteration),
            f"{tokens:,} tokens over the iteration's seconds",
        ),
        Figure(
            "GPU utilisation",
            printed(given["gpu_utilisation"]),
            (own[0], math.inf),
            "the least MFU: a GPU cannot exceed its peak",
        ),
        Figure(
            "memory while the model is built",
            printed(given["gpu_memory_largest_share"]),
            (built[0] / capacity[1], built[1] / capacity[0]),
            "the weights alone, to the segments reserved for them",
        ),
        Figure("MFU", None, own, "the model's own FLOP/s (nothing computed twice) over the peak"),
    ]


def while_built(sizes: Model) -> Interval:
    """Bytes on the GPU while a model of these sizes is built, in float32: the least and the most.

    The least are the weights. PyTorch reserves memory in segments: a matrix of 10 MiB or more has one of its own, a
    multiple of 2 MiB; smaller ones share segments of 20 MiB; and what is smaller still or temporary may take one more.
    """
    dim, mib = sizes.dim, 2**20
    matrices = [dim * dim] * 4 * sizes.layers + [dim * sizes.inner] * 3 * sizes.layers + [sizes.vocabulary * dim] * 2
    large = [4 * n for n in matrices if 4 * n >= 10 * mib]
    shared = [4 * n for n in matrices if 4 * n < 10 * mib]
    segments = -(-len(shared) // (20 * mib // max(shared))) if shared else 0
    most = sum(-(-n // (2 * mib)) * 2 * mib for n in large) + 20 * mib * (segments + 1)
    return 4.0 * count(sizes), float(most)


def of_metrics(path: Path, lines: Sequence[dict[str, Any]], config: dict[str, Any]) -> list[Figure]:
    """The figures of a metrics.jsonl, held to the configuration beside it where there is one."""
    steps = [line.get("step") for line in lines]
    numbers = [[line.get("loss"), line.get("lr", 0.0)] for line in lines]
    if None in steps or not all(isinstance(x, (int, float)) and math.isfinite(x) for pair in numbers for x in pair):
        raise UsageError(f"{path}: has lines without step, or whose loss or lr is not finite; wanted numbers on each")
    first, last = lines[0], lines[-1]
    gaps = {b - a for a, b in itertools.pairwise(steps)}
    found = [
        Figure("steps between lines", exact(min(gaps, default=1)), exact(max(gaps, default=1)), "the same throughout"),
        Figure("loss improvement", None, exact(1 - last["loss"] / first["loss"]), "1 - last loss / first"),
        Figure("bits per token, last", None, exact(last["loss"] / math.log(2)), "loss / ln 2"),
    ]
    warm = int(config["optimizer"]["warmup"]) if config else math.inf
    rates = [(line["step"], exact(line["lr"])) for line in lines if line.get("lr") and line["step"] <= warm]
    if len(rates) > 2:
        found += schedule([(step, (a - 1e-9 * a, b + 1e-9 * b)) for step, (a, b) in rates])
    if "tokens" in first:
        worst = max(lines, key=lambda n: abs(n["tokens_per_second"] * n["seconds"]["all"] / n["tokens"] - 1))
        found.append(
            Figure(
                "tokens a step",
                exact(worst["tokens"]),
                exact(worst["tokens_per_second"] * worst["seconds"]["all"]),
                "speed x seconds, the worst line",
            )
        )
    elif "total_tokens" in first and len(lines) > 1:
        per_step = (last["total_tokens"] - first["total_tokens"]) / (last["step"] - first["step"])
        found.append(Figure("tokens a step", None, exact(per_step), "growth of all tokens over steps"))
        seconds = sorted(line["iteration_seconds"] for line in lines)[len(lines) // 2]
        speed = sorted(line["tokens_per_second"] for line in lines)[len(lines) // 2]
        found.append(
            Figure(
                "tokens a second",
                (0.97 * speed, 1.03 * speed),
                exact(per_step / seconds),
                "tokens a step over the iteration, medians, within 3%",
            )
        )
        keys = ("flops_per_second_lingua", "tokens_per_second")
        work = [line[keys[0]] / line[keys[1]] for line in lines if all(key in line for key in keys)]
        if work:
            how = "FLOP/s over tokens a second, the line with most; within 1% of the line with least"
            found.append(Figure("FLOP a token", (0.99 * min(work), 1.01 * min(work)), exact(max(work)), how))
    if config:
        found += _held_to(config, lines)
    return found


def _held_to(config: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[Figure]:
    sizes, data, last = Model(**config["model"]), config["data"], lines[-1]
    found = [
        Figure(
            "tokens a step, of the configuration",
            exact(data["batch"] * data["length"]),
            exact(last["tokens"]),
            "batch x length",
        )
    ]
    for key, recomputed in (("flops_per_second", False), ("flops_per_second_lingua", True)):
        per_token = flops_per_token(sizes, data["length"], recomputed)
        found.append(
            Figure(
                key,
                exact(last[key]),
                exact(last["tokens_per_second"] * per_token),
                f"{per_token / 1e6:.4g} MFLOP per token x speed",
            )
        )
    return found


def table(figures: Sequence[Figure], digits: int = 5) -> Table:
    """A row a figure, its numbers to so many significant digits, contradictions last."""
    words = {True: "agrees", False: "CONTRADICTS", None: "derived"}
    rows = [
        (words[f.agrees], f.name, span(f.stated, digits), span(f.derived, digits), f.how)
        for f in sorted(figures, key=lambda f: f.agrees is False)
    ]
    return Table(("", "figure", "stated", "derived", "how"), rows)


def span(interval: Interval | None, digits: int = 5) -> str:
    """An interval to so many significant digits; one number up to 999,999,999, where it is one, in full."""
    if interval is None:
        return ""
    whole = [f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else "" for value in interval]
    if whole[0] and whole[0] == whole[1]:
        return whole[0]
    rounded = (float(f"{value:.{digits}g}") for value in interval)
    low, high = (f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.{digits}g}" for value in rounded)
    if math.isinf(interval[1]):
        return f"at least {low}"
    return low if low == high else f"{low} to {high}"
