"""What is measured for each claim of notebook training_run, and its truth. The words are in data/claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernels.lm import analyse
from kernels.lm.analyse import Figure
from kernels.lm.config import Model, count, flops_per_token
from kernels.lm.experiments import WRITTEN, LoopRun, Search
from kernels.lm.model import Decoder
from labkit import Ledger

NO_FILE = "ZeroDivisionError: integer modulo by zero"
SAME_SPEED = 0.03
"""Two figures of speed are the same within this."""
PERFORMANCE = ("FLOP/s", "words", "GPU", "memory")
"""How the names of performance figures begin."""


def figures_of(report: Mapping[str, Any]) -> dict[str, Figure]:
    """The derived figures of a report, by name."""
    return {figure.name: figure for figure in analyse.of_report(dict(report))}


def settle_losses(ledger: Ledger, report: Mapping[str, Any]) -> None:
    """Settle what rests on the table of steps: improvement, learning rates, convergence and bits per byte.

    `report` holds facts, printed figures and steps, as kernels/lm/reported.yaml.
    """
    facts, printed, steps, figures = report["facts"], report["printed"], report["steps"], figures_of(report)
    before, after = (float(loss) for loss in printed["loss"])
    stated, improved = float(printed["improvement"]), figures["loss improvement"]
    measured = {"before": before, "after": after, "stated": stated, "needed": after / (1 - stated)}
    ledger.settle("loss_improved_54", bool(improved.agrees), share=sum(improved.derived) / 2, **measured)

    slope = figures["learning rate, slope"].derived if "learning rate, slope" in figures else None
    as_printed = [f"{facts['rate'] * ((row['step'] - 1) / facts['warmup']):.2e}" == row["lr"] for row in steps]
    ledger.settle(
        "learning_rate_column",
        bool(figures["learning rates on one line"].agrees),
        entries=len(steps),
        slope=slope,
        known_to=slope and slope[1] / slope[0] - 1,
        rate=facts["rate"],
        warmup=facts["warmup"],
        as_printed=sum(as_printed),
    )

    losses = [float(row["loss"]) for row in steps]
    falls = sum(later < earlier for earlier, later in itertools.pairwise(losses))
    ledger.settle(
        "converges_well",
        falls == len(losses) - 1,
        falls=falls,
        readings=len(losses),
        warmed_up=steps[-1]["step"] / facts["warmup"],
        norms=[float(row["grad_norm"]) for row in steps],
    )
    ledger.settle("below_3_bits", after / math.log(2) < 3.0, nats=after, bits=after / math.log(2))


def settle_sizes(ledger: Ledger, report: Mapping[str, Any]) -> None:
    """Settle the numbers of parameters and of bytes. A model of the report's sizes is made, without its values."""
    sizes, printed = Model(**report["facts"]["model"]), report["printed"]
    with torch.device("meta"):
        counted = sum(p.numel() for p in Decoder(sizes).parameters())
    right = counted == count(sizes) == int(printed["parameters"])
    ledger.settle("parameters", right, counted=counted, arithmetic=count(sizes))

    built = figures_of(report)["memory while the model is built"]
    trained = 8 * count(sizes) / (float(printed["gpu_capacity_gib"]) * 2**30)
    stated = float(printed["gpu_memory_largest_share"])
    truth = None if built.agrees else False
    ledger.settle("memory_047", truth, stated=stated, built=built.derived, trained_at_least=trained)


def settle_speeds(ledger: Ledger, report: Mapping[str, Any], tokens_per_word: float) -> None:
    """Settle the figures of speed: FLOP/s, words per second, iteration, utilisation; and whether all figures agree."""
    facts, printed, figures = report["facts"], report["printed"], figures_of(report)
    sizes, length, tokens = Model(**facts["model"]), facts["length"], facts["batch"] * facts["length"]
    per_token = [flops_per_token(sizes, length, recomputed) for recomputed in (True, False)]
    lingua, stated_words = figures["FLOP/s, Lingua's formula"], float(printed["words_per_second_mean"])
    ledger.settle(
        "flops",
        bool(lingua.agrees),
        million_per_token=per_token[0] / 1e6,
        derived=[value / 1e12 for value in lingua.derived],
        stated=[float(value) / 1e12 for value in printed["flops_per_second"]],
        computed_twice=1 - per_token[1] / per_token[0],
        length=length,
    )

    low, high = (float(value) for value in printed["words_per_second"])
    words = round(stated_words / tokens_per_word, -3)  # as exact as the report's own figure, two digits
    ledger.settle("words_per_second", low <= words <= high, words=words, per_word=tokens_per_word, stated=stated_words)

    seconds, iteration = float(printed["iteration_seconds"]), figures["words per second, from the iteration"]
    stated = iteration.stated or (math.nan, math.nan)
    difference = max(iteration.derived[0] / stated[1], stated[0] / iteration.derived[1], 1.0) - 1.0
    ledger.settle(
        "iteration_time",
        difference <= SAME_SPEED,
        tokens=tokens,
        seconds=seconds,
        stated=stated_words,
        difference=difference,
        allowed=SAME_SPEED,
        batch=facts["batch"],
        other_batch=round(stated_words * seconds / length),
        lengths=possible_lengths(report),
    )

    busy = figures["GPU utilisation"]
    peak, used = facts["peak_flops_per_second"] / 1e12, float(printed["gpu_utilisation"])
    ledger.settle("gpu_utilisation_20", bool(busy.agrees), least=busy.derived[0], stated=used, peak=peak)

    compared = [f for f in figures.values() if f.agrees is not None and f.name.startswith(PERFORMANCE)]
    wrong = [figure.name for figure in compared if not figure.agrees]
    ledger.settle("figures_consistent", not wrong, wrong=wrong, compared=len(compared), batch=facts["batch"])


def possible_lengths(report: Mapping[str, Any]) -> tuple[float, float]:
    """The lengths of a sequence for which Lingua's formula leads from the report's words to its FLOP/s."""
    printed, sizes = report["printed"], Model(**report["facts"]["model"])
    flops = [analyse.printed(value) for value in printed["flops_per_second"]]
    words = [analyse.to_digits(value, printed["words_per_second_digits"]) for value in printed["words_per_second"]]
    without = flops_per_token(sizes, 0, recomputed=True)
    each = flops_per_token(sizes, 1, recomputed=True) - without
    return (flops[0][0] / words[1][1] - without) / each, (flops[1][1] / words[0][0] - without) / each


def settle_tasks(ledger: Ledger, report: Mapping[str, Any]) -> None:
    """Settle what is said of the tasks: their requests by public sizes, their speeds by the time they take."""
    facts, printed = report["facts"], report["printed"]
    counts = {task: int(count) for task, (count, _) in printed["requests_built"].items()}
    wrong = [task for task, count in counts.items() if count != facts["tasks"][task]]
    ledger.settle("task_counts", not wrong, counts=counts, wrong=wrong, public=facts["tasks"])
    built = sum(int(count) / float(rate) for count, rate in printed["requests_built"].values())
    trained = report["steps"][-1]["step"] * float(printed["iteration_seconds"])
    answered = 60.0 * float(printed["evaluation_minutes"])
    spent, whole = float(printed["build_seconds"]) + trained + built + answered, 60.0 * float(printed["minutes"])
    truth = "untestable" if spent <= whole else False
    ledger.settle("task_speeds", truth, built=built, spent=spent / 60.0, whole=whole / 60.0)


def settle_error(ledger: Ledger, searches: Sequence[Search]) -> None:
    """Settle the cause: the error exactly where no validation file is, among folders a training can have run on."""
    trained = [search for search in searches if search.trained]
    right = [(search.for_validation == NO_FILE) is not search.has_validation_file for search in trained]
    failed = [search.folder for search in trained if search.for_validation == NO_FILE]
    not_counted = [search.folder for search in searches if not search.trained]
    measured = {"failed": failed, "folders": len(trained), "not_counted": not_counted}
    ledger.settle("zero_division_cause", bool(trained) and all(right), **measured)


def settle_training(ledger: Ledger, once: LoopRun, again: LoopRun, apart: LoopRun, short: LoopRun) -> None:
    """Settle whether the training succeeds: `once` as configured, `again` from there, `apart` with async_eval_gpus,
    `short` where no more steps are asked for than the report names. Left open where `once` and `short` differ."""
    complete = [loop.last == loop.steps for loop in (once, short)]
    ledger.settle(
        "training_succeeded",
        complete[0] if len(set(complete)) == 1 else None,
        steps=once.steps,
        made=once.last,
        saved=once.saved,
        error=once.ended,
        made_again=again.last - again.first + 1,
        apart_made=apart.last,
        apart_evaluations=len(apart.evaluations),
        apart_results=apart.results,
    )


def settle_fixes(ledger: Ledger, ends: Mapping[str, str]) -> None:
    """Settle the three fixes by how the evaluation ends with each (:func:`~kernels.lm.experiments.try_fixes`)."""
    commented, null = ends["validation commented out"], ends["validation: null"]
    ledger.settle("fix_comment_out", commented == WRITTEN, end=commented, null=null)
    end, as_source = ends["files in data/validation"], ends["files in data/validation, named as a source"]
    own = ends["a file in the training's own folder"]
    ledger.settle("fix_data_folder", end == WRITTEN, end=end, as_source=as_source, own=own)
    checks = {name.partition(": ")[2]: end for name, end in ends.items() if name.startswith("check for zero")}
    finish = [name for name, end in checks.items() if end == WRITTEN]
    clearer = [name for name, end in checks.items() if not end.startswith(("ZeroDivisionError", WRITTEN))]
    truth = True if finish else None if clearer else False
    ledger.settle("fix_zero_check", truth, checks=checks, finish=finish, clearer=clearer)


def settle_key(ledger: Ledger, scans: Mapping[str, Sequence[tuple[int, str]]]) -> None:
    """Settle whether the report could be shared, by what the scanner finds in its line on the key."""
    first = scans["as first written"]
    kinds = [kind for _, kind in first]
    ledger.settle("report_is_safe_to_share", not first, kinds=kinds)
