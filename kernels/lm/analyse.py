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

import numpy as np
import yaml

from kernels.lm import metrics
from kernels.lm.config import Config, Model, count, flops_per_token, learning_rate, parse
from labkit.session.secrets import refuse_secrets
from whywrong.errors import UsageError
from whywrong.tables import Table

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
SPEEDS = (
    "tokens",
    "tokens_per_second",
    "iteration_seconds",
    "total_tokens",
    *(f"flops_per_second{x}" for x in ("", "_lingua")),
)
HEADERS = {
    "step": r"step|ステップ",
    "loss": r"loss|損失",
    "grad_norm": r"grad|勾配",
    "lr": r"\blr\b|learning|学習率",
    "change": r"change|改善",
}


@dataclass(frozen=True)
class Figure:
    """One figure: as stated, as it follows from others, how, and whether the two agree (None: nothing was stated).

    `missing` is what would decide it, where nothing here does; neither agreement nor contradiction is said then.
    """

    name: str
    stated: Interval | None
    derived: Interval
    how: str
    missing: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether the intervals meet."""
        if self.stated is None or self.missing:
            return None
        return self.stated[0] <= self.derived[1] and self.derived[0] <= self.stated[1]


def printed(text: str) -> Interval:
    """The numbers that print as `text`: half a unit of its last digit to either side."""
    plain = _plain(text)
    match = re.fullmatch(r"([+-]?\d+)(?:\.(\d*))?(?:[eE]([+-]?\d+))?", plain)
    if not match:
        raise UsageError(f"{text!r} is no number; expected one as it is printed, such as 1.35e-06 or 1,000")
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
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        said = (str(error).splitlines() or [""])[0][:80]
        raise UsageError(
            f"{path}: cannot be analysed ({type(error).__name__}: {said}); expected the fields that "
            "kernels/lm/metrics.py or kernels/lm/reported.yaml shows"
        ) from None


def _analyse(path: Path) -> list[Figure]:
    if path.suffix in (".yaml", ".yml", ".md"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UsageError(f"{path}: cannot be read; expected a report") from None
        refuse_secrets(str(path), _words(text))
        return of_report({"steps": steps_of(path, text)} if path.suffix == ".md" else yaml.safe_load(text))
    lines = [{LINGUA.get(key, key): value for key, value in line.items()} for line in metrics.read(path)]
    beside = path.with_name("config.json")
    if not beside.exists():
        return of_metrics(path, lines, None)
    try:
        config, findings = parse(json.loads(beside.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        config, findings = None, []
    if config is None or findings:
        raise UsageError(f"{beside}: is not the configuration of a run; expected it as the run wrote it, or removed")
    return of_metrics(path, lines, config)


def _words(text: str) -> str:
    """The lines of a text as far as they can hold secrets: without numbers in cells of tables, each line once.

    A scan takes milliseconds a line, and a table may have very many.
    """
    seen, lines = {""}, []
    for line in text.splitlines():
        bare = re.sub(r"(?:^|(?<=\|))\s*[+-]?\d[\d.,]{0,15}(?:[eE][+-]?\d{1,4})?\s*(?=\||$)", "", line)
        lines.append("" if bare in seen else bare)
        seen.add(bare)
    return "\n".join(lines)


def steps_of(path: Path, text: str) -> list[dict[str, Any]]:
    """The rows of the first table with a column each for steps and losses, known by their headers."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    for i, header in enumerate(rows):
        names = [next((n for n, word in HEADERS.items() if re.search(word, cell, re.I)), "") for cell in header]
        if not {"step", "loss"} <= set(names):
            continue
        found = []
        for j in range(i + 2, len(rows)):
            row = rows[j]
            entry: dict[str, Any] = {
                n: v for n, v in zip(names, row, strict=False) if n and re.search(r"\d|nan|inf", v, re.I)
            }
            step = _plain(entry.get("step", ""))
            if not step.isdigit():
                break
            found.append(entry | {"step": int(step)})
        if found:
            return found
    raise UsageError(f"{path}: holds no table of steps and losses; expected one with such columns")


def of_report(report: dict[str, Any]) -> list[Figure]:
    """The figures of a report: those of its steps, and those that it prints where `facts` has what they follow from."""
    improvement = report.get("printed", {}).get("improvement")
    warmup = report.get("facts", {}).get("warmup")
    steps = of_steps(report.get("steps", []), printed(improvement) if improvement else None, warmup)
    return [*steps, *(of_figures(report) if "facts" in report else [])]


def of_steps(
    steps: Sequence[dict[str, Any]], improvement: Interval | None = None, warmup: int | None = None
) -> list[Figure]:
    """What follows from a table of steps: changes, improvement, bits, and the learning rate's line.

    `improvement` and `warmup`, in steps, are those that a report states, if it does: the line is that of the warm-up.
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
        rates = [(row["step"], printed(row["lr"])) for row in steps if warmup is None or row["step"] <= warmup]
        found += schedule(rates, warmup is not None)
    return found


def schedule(rates: Sequence[tuple[int, Interval]], rising: bool = True) -> list[Figure]:
    """Whether one line, rate = slope x step + start, goes through all the intervals.

    `rising` is whether all of them are known to be of the warm-up. Where they are not, rates off a line contradict
    nothing: they may follow a schedule.
    """
    name, all_of_them, how = "learning rates on one line", exact(len(rates)), "entries that one line passes"
    if len({step for step, _ in rates}) < 2:
        return [Figure(name, all_of_them, all_of_them, how, "two entries of the warm-up or more")]
    lines = _lines(rates)
    if lines is None:
        missing = "" if rising else "the warm-up's steps: config.json beside the file, or a report's facts"
        return [Figure(name, all_of_them, (0.0, len(rates) - 1.0), how, missing)]
    slopes = tuple(slope for slope, _ in lines)
    shifts = sorted(-start / slope if slope else 0.0 for slope, start in lines)
    how = f"per step; the line is 0 at step {span((shifts[0], shifts[1]), 3)}"
    return [
        Figure(name, all_of_them, all_of_them, "entries that one line passes"),
        Figure("learning rate, slope", None, (min(slopes), max(slopes)), how),
    ]


def _lines(rates: Sequence[tuple[int, Interval]]) -> list[tuple[float, float]] | None:
    """Slope and start of the lines through all the intervals that rise least and most; None where there is none.

    By linear programming over some of the intervals, those that a line misses most being added until it misses none.
    """
    from scipy.optimize import linprog

    steps = np.array([step for step, _ in rates], dtype=np.float64)
    low, high = np.array([interval for _, interval in rates]).T
    unit = float(np.abs(high).max()) or 1.0
    low, high = low / unit - 1e-12, high / unit + 1e-12
    some = [int(steps.argmin()), int(steps.argmax())]
    while True:
        rows = [[sign * steps[i], sign] for i in some for sign in (1.0, -1.0)]
        ends = [end for i in some for end in (high[i], -low[i])]
        ways = [linprog([sign, 0.0], A_ub=rows, b_ub=ends, bounds=[(None, None)] * 2) for sign in (1.0, -1.0)]
        if not all(way.success for way in ways):
            return None
        missed = [np.maximum(line - high, low - line) for line in (steps * way.x[0] + way.x[1] for way in ways)]
        more = {int(one.argmax()) for one in missed if one.max() > 1e-9} - set(some)
        if not more:
            return [(float(way.x[0]) * unit, float(way.x[1]) * unit) for way in ways]
        some += more


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


def of_metrics(path: Path, lines: Sequence[dict[str, Any]], config: Config | None) -> list[Figure]:
    """The figures of a metrics.jsonl, held to the configuration beside it where there is one."""
    steps = [line.get("step") for line in lines]
    numbers = [x for line in lines for x in (line.get("step"), line.get("loss"), line.get("lr", 0.0))]
    numbers += [line[key] for line in lines for key in SPEEDS if key in line]
    if not all(isinstance(x, (int, float)) and abs(x) < 1e300 for x in numbers):
        raise UsageError(f"{path}: has lines whose step, loss, lr or speed is no finite number; expected one on each")
    first, last = lines[0], lines[-1]
    gaps = {b - a for a, b in itertools.pairwise(steps)}
    found = [
        Figure("steps between lines", exact(min(gaps, default=1)), exact(max(gaps, default=1)), "the same throughout"),
        Figure("loss improvement", None, exact(1 - last["loss"] / first["loss"]), "1 - last loss / first"),
        Figure("bits per token, last", None, exact(last["loss"] / math.log(2)), "loss / ln 2"),
    ]
    warm = config.optimizer.warmup if config else math.inf
    rates = [(line["step"], exact(line["lr"])) for line in lines if line.get("lr") and line["step"] <= warm]
    if len(rates) > 2:
        found += schedule([(step, (a - 1e-9 * a, b + 1e-9 * b)) for step, (a, b) in rates], config is not None)
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


def _held_to(config: Config, lines: Sequence[dict[str, Any]]) -> list[Figure]:
    last = lines[-1]
    asked = [(learning_rate(config, line["step"] - 1), line["lr"]) for line in lines if "lr" in line]
    right = sum(abs(rate - lr) <= 1e-9 * rate for rate, lr in asked)
    how = f"entries that the {config.optimizer.schedule} schedule gives"
    found = [
        Figure("learning rates, of the configuration", exact(len(asked)), exact(right), how),
        Figure("tokens a step, of the configuration", exact(config.tokens), exact(last["tokens"]), "batch x length"),
    ]
    for key, recomputed in (("flops_per_second", False), ("flops_per_second_lingua", True)):
        per_token = flops_per_token(config.model, config.data.length, recomputed)
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
        (
            "undecidable" if f.missing else words[f.agrees],
            f.name,
            span(f.stated, digits),
            span(f.derived, digits),
            f.how + (f"; expected {f.missing}" if f.missing else ""),
        )
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
