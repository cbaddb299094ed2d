"""What the notebook measures and draws, and for each claim its verdict's truth, figure and reasons.

A function of a claim gives the arguments of `ledger.settle`: the truth comes from what was measured, and there is a
reason for each verdict that can come out.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets as random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from kernels.corpus import corpus
from kernels.lm import analyse, checkpoints, faulty, jsonl, metrics, preflight, training
from kernels.lm import config as configs
from kernels.lm.analyse import Figure, span
from kernels.lm.config import Config, Model, count, flops_per_token
from kernels.lm.model import Decoder
from labkit import bench, plots
from labkit.errors import UsageError
from labkit.session.record import recorded
from labkit.session.secrets import secrets
from labkit.tables import Table

Settled = dict[str, Any]
REPORT = yaml.safe_load((Path(__file__).parent / "reported.yaml").read_text(encoding="utf-8"))
FACTS, PRINTED, STEPS = REPORT["facts"], REPORT["printed"], REPORT["steps"]
SIZES = Model(**FACTS["model"])
PEAK = FACTS["peak_flops_per_second"]
PERFORMANCE = ("FLOP/s", "words", "seconds", "GPU", "memory")
"""How the names of performance figures begin."""


def figures() -> list[Figure]:
    """Every derived figure of the report."""
    return analyse.of_report(REPORT)


def the(name: str, among: Sequence[Figure]) -> Figure:
    """The figure of a name."""
    return next(one for one in among if one.name == name)


def draw_report(axes: Any) -> None:
    """Loss and gradient norm over the report's steps, beside ln V and the loss that 3 bits a byte are."""
    left, right = axes
    steps = [row["step"] for row in STEPS]
    left.plot(steps, [float(row["loss"]) for row in STEPS], "o-", color=plots.BLUE, ms=3)
    left.axhline(math.log(SIZES.vocabulary), color=plots.GREY, ls="--", lw=0.8, label=f"ln {SIZES.vocabulary}")
    left.axhline(3 * math.log(2), color=plots.RED, ls=":", lw=1, label="3 bits a byte")
    left.set_ylabel("loss, nats a byte")
    left.legend(fontsize=7)
    right.plot(steps, [float(row["grad_norm"]) for row in STEPS], "s-", color=plots.ORANGE, ms=3)
    right.set_yscale("log")
    right.set_ylabel("gradient norm")
    for one in axes:
        one.set_xlabel("step")


def draw_timeline(axes: Any) -> None:
    """Where the report's twenty minutes went. Only the training's and the evaluation's length are known."""
    trained = 100 * float(PRINTED["iteration_seconds"]) / 60
    whole, judged = float(PRINTED["minutes"]), float(PRINTED["evaluation_minutes"])
    parts = (
        ("start, model, checkpoint, contexts", 0.0, whole - judged - trained, plots.GREY),
        ("100 steps", whole - judged - trained, trained, plots.GREEN),
        ("evaluation", whole - judged, judged, plots.BLUE),
    )
    for name, start, length, colour in parts:
        axes.barh(0, length, left=start, color=colour, height=0.5, label=name)
    axes.plot(whole, 0, "X", color=plots.RED, ms=9, label="ZeroDivisionError; no result was written")
    axes.plot(0, 0, "v", color=plots.ORANGE, ms=9, label="a preflight")
    axes.set_yticks([])
    axes.set_xlabel("minutes (the order of the parts is the program's; the grey part's place is not known)")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.6))


# The report's configuration, and small runs of our own


def sample(folder: Path, size: int = 600_000) -> Path:
    """Training and validation files of Python's own documentation, at most so many bytes of it."""
    if not folder.is_dir():
        texts = corpus().text[:size].decode("utf-8", errors="replace").split("\n\n")
        jsonl.write(folder, [text for text in texts if len(text) > 20])
    return folder


def as_the_report(folder: Path, text: Path) -> dict[str, Any]:
    """The report's configuration in our words: validation wanted, from a folder that has no such file."""
    return {
        "folder": str(folder),
        "data": {"folder": str(text), "batch": FACTS["batch"], "length": FACTS["length"]},
        "validation": {"folder": str(text), "every": 100, "batches": 100},
        "steps": 1000,
        "stop": 100,
        "evaluation": {"tasks": ["hellaswag", "piqa", "nq_open"]},
        "optimizer": {"rate": 3e-4, "warmup": 2000},
        "model": FACTS["model"],
        "device": "cpu",
        "seed": 777,
    }


def preflighted(folder: Path, text: Path) -> tuple[list[str], float]:
    """What the preflight says of the report's configuration, with the training's files alone; and its seconds."""
    bare = folder / "training_only"
    bare.mkdir(parents=True, exist_ok=True)
    for path in text.glob("*.chunk.*.jsonl"):
        (bare / path.name).write_bytes(path.read_bytes())
    began = time.perf_counter()
    _, found = preflight.check(as_the_report(folder / "run", bare))
    return [str(one).replace(str(bare), "training_only") for one in found], time.perf_counter() - began


def small(folder: Path, text: Path, steps: int, seed: int = 0, **optimizer: Any) -> Config:
    """A run of a tiny model on a CPU, in float32, with dumps every tenth step."""
    raw = {
        "folder": str(folder),
        "data": {"folder": str(text), "batch": 8, "length": 64},
        "evaluation": "none",
        "validation": {"folder": str(text), "batches": 20},
        "steps": max(steps, 21),
        "seed": seed,
        "device": "cpu",
        "precision": "float32",
        "compile": False,
        "checkpoints": {"every": max(1, steps // 2)},
        "model": {"dim": 64, "layers": 2, "heads": 2, "hidden": 128},
        "dumps": {"every": 10},
        "optimizer": {"rate": 4e-3, "warmup": 20, "clip": 0.0} | optimizer,
    }
    found, wrong = configs.parse(raw)
    if found is None or wrong:
        raise UsageError("; ".join(map(str, wrong)))
    return found


def trained(config: Config) -> list[float]:
    """The losses of a run, after it was made or finished. On one thread: its products are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [line["loss"] for line in metrics.read(training.train(config))]
    finally:
        torch.set_num_threads(threads)


def bits(config: Config) -> float:
    """Bits a byte of held-out text, the last that was written."""
    lines = metrics.read(Path(config.folder) / "validation.jsonl")
    return float(lines[-1]["bits_per_byte"])


def parted(folder: Path, text: Path, shared: int = 20, steps: int = 160) -> dict[str, list[float]]:
    """Two runs whose rates rise alike for the first `shared` steps: one then decays, one's warm-up goes on."""
    rate = 2e-2
    short = small(folder / "decays", text, steps, rate=rate, warmup=shared)
    long = small(folder / "goes on", text, 100 * steps, rate=rate * 500, warmup=shared * 500)
    runs = {"warm-up ends": short, "warm-up goes on": replace(long, stop=steps)}
    plain = replace(short.checkpoints, every=0)
    return {name: trained(replace(run, checkpoints=plain, validation=None)) for name, run in runs.items()}


def draw_parted(axes: Any, runs: Mapping[str, Sequence[float]], shared: int = 20) -> None:
    """The two runs, smoothed over ten steps."""
    for (name, losses), colour in zip(runs.items(), (plots.BLUE, plots.RED), strict=True):
        smooth = [sum(losses[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(losses))]
        axes.plot(range(1, len(losses) + 1), smooth, color=colour, label=name)
    axes.axvspan(1, shared, color=plots.GREY, alpha=0.2, lw=0, label="the same rates")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte, mean of 10 steps")
    axes.legend(fontsize=7)


# The report's run on a GPU


def on_gpu(folder: Path, steps: int, kept: Path) -> dict[str, Any]:
    """The report's run again, on Python's documentation, and what it measured; its metrics.jsonl is put into `kept`."""
    text = sample(folder / "whole", 1 << 30)
    raw = as_the_report(folder / "h200", text) | {"device": "cuda", "evaluation": "none", "steps": 4000, "stop": steps}
    raw |= {"validation": {"folder": str(text), "batches": 8}, "checkpoints": {"every": max(1, steps // 2), "keep": 1}}
    config, wrong = preflight.check(raw)
    if config is None or wrong:
        raise UsageError("; ".join(map(str, wrong)))
    path = training.train(config)
    lines = metrics.read(path)
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, kept / metrics.FILE)
    quiet = [line for line in lines[20:] if line["seconds"]["checkpoint"] == 0.0] or lines[-1:]

    def median(of: Any) -> float:
        values = sorted(of(line) for line in quiet)
        return float(values[len(values) // 2])

    capacity = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {
        "lines": [
            {key: line[key] for key in ("step", "loss", "grad_norm", "lr")}
            for line in lines
            if line["step"] % 10 in (0, 1)
        ],
        "first_loss": lines[0]["loss"],
        "tokens_per_second": median(lambda n: n["tokens_per_second"]),
        "step_seconds": median(lambda n: n["seconds"]["all"]),
        "data_seconds": median(lambda n: n["seconds"]["data"]),
        "flops_per_second": median(lambda n: n["flops_per_second"]),
        "flops_per_second_lingua": median(lambda n: n["flops_per_second_lingua"]),
        "power_watts": median(lambda n: n["power_watts"] or 0.0),
        "memory_share": max(n["memory_active_gib"] for n in lines) / capacity,
        "memory_estimated_gib": preflight.memory(config) / 2**30,
        "memory_active_gib": max(n["memory_active_gib"] for n in lines),
        "capacity_gib": capacity,
        "checkpoint_pause": max(n["seconds"]["checkpoint"] for n in lines),
        "bits_per_byte": bits(config),
        "text": corpus().facts,
        "gpu": torch.cuda.get_device_name(),
    }


def side_by_side(run: Mapping[str, Any]) -> Table:
    """The report's run and ours: what both have."""
    printed, losses = PRINTED, {line["step"]: line["loss"] for line in run["lines"]}
    rows = [
        ("loss at step 1, nats a byte", "not given", f"{run['first_loss']:.3f}"),
        *(
            (f"loss at step {row['step']}", row["loss"], f"{losses[row['step']]:.4f}")
            for row in STEPS
            if row["step"] in losses
        ),
        ("tokens a second", "460,000 to 480,000", f"{run['tokens_per_second']:,.0f}"),
        ("seconds a step", printed["iteration_seconds"], f"{run['step_seconds']:.4f}"),
        ("FLOP/s, Lingua's formula", "3.40e14 to 3.56e14", f"{run['flops_per_second_lingua']:.3g}"),
        ("FLOP/s, without recomputation", "", f"{run['flops_per_second']:.3g}"),
        ("share of 989 TFLOP/s", "34% to 36%", f"{run['flops_per_second'] / PEAK:.1%}"),
        ("power, W", "620 to 635", f"{run['power_watts']:.0f}"),
        (
            "memory in use, largest share",
            "20% (and 0.47%)",
            f"{run['memory_share']:.1%} of {run['capacity_gib']:.0f} GiB",
        ),
        (
            "the same in GiB; as the preflight estimated",
            f"{0.2 * float(printed['gpu_capacity_gib']):.1f}",
            f"{run['memory_active_gib']:.1f}; {run['memory_estimated_gib']:.1f}",
        ),
        ("checkpoint's pause, s", "", f"{run['checkpoint_pause']:.2f}"),
    ]
    return Table(("", "report, H100", f"here, {run['gpu']}"), rows)


def draw_runs(axes: Any, run: Mapping[str, Any] | None) -> None:
    """The report's losses, and ours where there is a run."""
    axes.plot(
        [row["step"] for row in STEPS],
        [float(row["loss"]) for row in STEPS],
        "o-",
        color=plots.BLUE,
        ms=3,
        label="report",
    )
    if run:
        lines = run["lines"]
        axes.plot(
            [n["step"] for n in lines],
            [n["loss"] for n in lines],
            "s--",
            color=plots.ORANGE,
            ms=3,
            label=f"here, {run['gpu']}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend(fontsize=7)


# The crash and its cures


def world(folder: Path) -> tuple[Path, list[str]]:
    """A training source as the report has it: chunks, and no validation file."""
    source = folder / "data" / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "source.chunk.00.jsonl").write_text('{"text": "training"}\n')
    return folder / "data", ["source"]


def crash(folder: Path) -> list[tuple[str, bool, str, str]]:
    """Folders with and without validation files: whether one can be found, how each search of the rule ends."""
    rows = []

    def end(where: Path, pattern: str) -> str:
        try:
            faulty.dealt(where, 0, 1, pattern)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ends normally"

    for name, files in (
        ("training files alone", ()),
        ("named .jsonl.val", ("a.jsonl.val",)),
        ("named val.jsonl", ("val.jsonl",)),
        ("one validation file", ("a.val.jsonl",)),
        ("three of them", ("a.val.jsonl", "b.val.jsonl", "c.val.jsonl")),
        ("an empty validation file", ("empty.val.jsonl",)),
    ):
        root, (source,) = world(folder / name.replace(" ", "_"))
        for file in files:
            (root / source / file).write_text("" if "empty" in file else '{"text": "held out"}\n')
        there = any(file.endswith(".val.jsonl") for file in files)
        rows.append((name, there, end(root / source, "*.val.jsonl"), end(root / source, "*.chunk.*.jsonl")))
    rows.append(("no such folder", False, *(end(folder / "nowhere", p) for p in ("*.val.jsonl", "*.chunk.*.jsonl"))))
    root, (source,) = world(folder / "unreadable")
    (root / source / "a.val.jsonl").write_text('{"text": "held out"}\n')
    with faulty.unreadable(root / source):
        ends = [end(root / source, pattern) for pattern in ("*.val.jsonl", "*.chunk.*.jsonl")]
    rows.append(("cannot be listed, file there", True, *ends))
    return rows


def cures(folder: Path) -> dict[str, str]:
    """How the evaluation ends with each proposed cure, and with variants that might have been meant."""
    root, sources = world(folder)
    section = yaml.safe_load(faulty.SHOWN)
    commented = {key: value for key, value in section.items() if key != "validation"}

    def run(name: str, given: dict[str, Any], guard: str = "none") -> str:
        return faulty.evaluate(faulty.settings(yaml.safe_dump(given)), root, sources, folder / "out" / name, guard)

    ends = {"as the report ran it": run("as_is", section), "validation commented out": run("commented", commented)}
    ends["validation: null"] = run("null", commented | {"validation": None})
    for guard in faulty.GUARDS[1:]:
        ends[f"check for zero: {guard}"] = run(guard.replace(" ", "_"), section, guard)
    held = root / "validation"
    held.mkdir(exist_ok=True)
    (held / "a.val.jsonl").write_text('{"text": "held out"}\n')
    ends["files in data/validation"] = run("folder", section)
    named = {"max_steps": 100, "root_dir": str(root), "sources": ["validation"]}
    ends["files in data/validation, named as a source"] = run("named", section | {"validation": named})
    (root / sources[0] / "a.val.jsonl").write_text('{"text": "held out"}\n')
    ends["a file in the training's own folder"] = run("own", section)
    return ends


def scanned() -> dict[str, Any]:
    """What the scanner finds in the report's line on the key: with a stand-in of a key's form, and as it is here."""
    stand_in = random.token_hex(20)
    line = "- **Wandb API**: set (`'WANDB_API_KEY': '{}'`)"
    return {"as first written": secrets(line.format(stand_in)), "as it is here": secrets(line.format("<redacted>"))}


# The claims


def loss_improved(among: Sequence[Figure]) -> Settled:
    """5.3926 to 2.706."""
    one = the("loss improvement", among)
    first = float(PRINTED["loss"][1]) / (1 - float(PRINTED["improvement"]))
    share = f"1 - 2.706 / 5.3926 is {sum(one.derived) / 2:.1%}"
    return {
        "truth": bool(one.agrees),
        "measured": sum(one.derived) / 2,
        "because": {
            "confirmed": f"{share}, which is about 54%",
            "refuted": (
                f"{share}; 54% would need a first loss of {first:.2f}, which may be that of step 1 and is not given"
            ),
        },
    }


def parameters() -> Settled:
    """By arithmetic, and of the model."""
    with torch.device("meta"):
        model = Decoder(SIZES)
    counted = sum(p.numel() for p in model.parameters())
    words = f"arithmetic gives {count(SIZES):,} and the model has {counted:,}"
    return {
        "truth": counted == count(SIZES) == int(PRINTED["parameters"]),
        "measured": counted,
        "because": {"confirmed": f"{words}, the report's number", "refuted": f"{words}, another number"},
        "given": "Lingua's debug.yaml: dim 1024, 8 layers, SwiGLU 2816, 258 tokens, the output matrix not tied",
    }


def learning_rates(among: Sequence[Figure]) -> Settled:
    """One line through ten intervals."""
    one = the("learning rate, one line", among)
    printed = [f"{3e-4 * ((row['step'] - 1) / 2000):.2e}" == row["lr"] for row in STEPS]
    slope = f"{one.derived[0]:.5g} to {one.derived[1]:.5g} a step"
    return {
        "truth": bool(one.agrees),
        "measured": list(one.derived),
        "because": {
            "confirmed": (
                f"one line passes all ten, of slope {slope}; 3e-4 over 2000 steps, counted from 0, prints"
                f" {sum(printed)} of the 10 as they stand"
            ),
            "refuted": "no line passes the ten entries",
        },
    }


def flops(among: Sequence[Figure]) -> Settled:
    """Lingua's formula."""
    one = the("FLOP/s, Lingua's formula", among)
    each = [flops_per_token(SIZES, FACTS["length"], recomputed) / 1e6 for recomputed in (True, False)]
    words = f"{each[0]:.1f} MFLOP a token times the words a second is {span(one.derived)}"
    return {
        "truth": bool(one.agrees),
        "measured": list(one.derived),
        "because": {
            "confirmed": (
                f"{words}, which holds the report's range; without what flash attention computes again it is"
                f" {each[1]:.1f} MFLOP, 2.3% less"
            ),
            "refuted": f"{words}, which the report's range does not meet",
        },
        "given": "Lingua's formula, 2048 tokens a sequence, and the report's words a second, which are tokens",
    }


def words_per_second() -> Settled:
    """A token of this configuration is a byte."""
    text = corpus().text
    tokens, words = len(jsonl.encode(text.decode("utf-8", errors="replace"))), len(re.findall(rb"\w+", text))
    rate = float(PRINTED["words_per_second_mean"]) * words / tokens
    low, high = (float(value) for value in PRINTED["words_per_second"])
    shown = (
        f"the tokenizer makes {tokens / words:.1f} tokens of a word of English here, so 470,000 tokens are {rate:,.0f}"
        " words"
    )
    return {
        "truth": low <= rate <= high,
        "measured": rate,
        "because": {
            "confirmed": f"{shown}: tokens are words",
            "refuted": (
                f"Lingua's wps counts tokens, which are bytes: {shown}. Read as Lingua's own name for tokens, the"
                " figure fits the FLOP/s"
            ),
        },
        "given": "the tokenizer is that of debug.yaml, bytes; a word is a run of letters and digits",
    }


def iteration_time(among: Sequence[Figure], margin: float = 0.03) -> Settled:
    """Two figures of speed."""
    one = the("words a second, from the iteration", among)
    stated = one.stated or (math.nan, math.nan)
    nearest = max(one.derived[0] / stated[1], stated[0] / one.derived[1], 1.0) - 1.0
    words = f"65,536 tokens in 0.124 s are {span(one.derived)} a second, at least {nearest:.0%} from the 470,000"
    return {
        "truth": nearest <= margin,
        "measured": nearest,
        "because": {
            "confirmed": f"{words}: within 3%",
            "refuted": (
                f"{words}. Lingua's iteration is forward, backward and update of the last step, on the GPU; its wps"
                " divides by all the time since the last line"
            ),
        },
        "given": "65,536 tokens a step, which the FLOP/s and the words a second of the report confirm together",
    }


def utilisation() -> Settled:
    """The least that the FLOP/s need."""
    low = analyse.printed(PRINTED["flops_per_second"][0])[0]
    ratio = flops_per_token(SIZES, FACTS["length"], False) / flops_per_token(SIZES, FACTS["length"], True)
    least, stated = low * ratio / PEAK, analyse.printed(PRINTED["gpu_utilisation"])[1]
    words = f"the FLOP/s alone take {least:.0%} of the peak, so the GPU was busy at least as long"
    return {
        "truth": least <= stated,
        "measured": least,
        "because": {
            "confirmed": f"{words}, which leaves room for 20%",
            "refuted": (
                f"{words}. The console's percentage stands after `mem`: it is the peak of active memory as a share of"
                " the card"
            ),
        },
        "given": (
            "989 TFLOP/s, the peak of an H100 SXM; 620 W rule out the cards of 350 and 400 W, whose peak is lower still"
        ),
    }


def memory(least_bytes: int = 8) -> Settled:
    """Weights, gradients and two moments, were they all of two bytes."""
    capacity = analyse.printed(PRINTED["gpu_capacity_gib"])[1] * 2**30
    least, weights = least_bytes * count(SIZES) / capacity, 4 * count(SIZES) / capacity
    stated = analyse.printed(PRINTED["gpu_memory_largest_share"])[1]
    words = f"weights, gradients and moments take {least:.2%} even in two bytes each, {2 * least:.2%} in four"
    return {
        "truth": least <= stated,
        "measured": least,
        "because": {
            "confirmed": f"{words}, which 0.47% can hold",
            "refuted": (
                f"{words}, and the report's own 20% is the peak of a step. Before there is an optimizer, the weights"
                f" alone take {weights:.2%}: Lingua prints its first figure there"
            ),
        },
    }


def below_3_bits() -> Settled:
    """Nats to bits."""
    value = float(PRINTED["loss"][1]) / math.log(2)
    words = f"2.706 nats are {value:.2f} bits a byte"
    return {
        "truth": value < 3.0,
        "measured": value,
        "because": {"confirmed": words, "refuted": f"{words}; 3 bits are {3 * math.log(2):.2f} nats"},
        "given": "a token is a byte; the loss is that of the last step's batch",
    }


def consistent(among: Sequence[Figure]) -> Settled:
    """The performance figures."""
    held = [one for one in among if one.agrees is not None and one.name.startswith(PERFORMANCE)]
    wrong = [one.name for one in held if not one.agrees]
    return {
        "truth": not wrong,
        "measured": {"compared": len(held), "contradict": len(wrong)},
        "because": {
            "confirmed": f"all {len(held)} that follow from others agree with them",
            "refuted": f"{len(wrong)} of {len(held)} that follow from others contradict them: {'; '.join(wrong)}",
        },
    }


def converges(runs: Mapping[str, Sequence[float]], shared: int = 20) -> Settled:
    """Runs that the shared steps do not tell apart."""
    losses = [float(row["loss"]) for row in STEPS]
    falls = all(b < a for a, b in itertools.pairwise(losses))
    one, other = runs.values()
    same = list(one[:shared]) == list(other[:shared])
    ends = [sum(run[-20:]) / 20 - sum(run[shared : shared + 20]) / 20 for run in (one, other)]
    told = f"the loss falls at each of the nine readings after the first ({falls})"
    verdict = "undecidable" if falls and same and ends[0] < 0 < ends[1] else falls
    return {
        "truth": verdict,
        "measured": {"falls": falls, "same_steps": shared if same else 0, "change_after": ends},
        "because": {
            "confirmed": f"{told}, and runs with such first steps went the same way after them",
            "refuted": f"{told}",
            "undecidable": (
                f"{told}, all within the first twentieth of a warm-up. That fits a run that converges and one that does"
                f" not: two small runs with {shared} identical first steps ended {ends[0]:+.2f} and {ends[1]:+.2f} nats"
                " from there. If good convergence means no more than a falling loss, it is so"
            ),
        },
        "given": "the steps of a warm-up tell of later steps no more in a large model than in a small one",
    }


def zero_division(rows: Sequence[tuple[str, bool, str, str]]) -> Settled:
    """The error where no file is found, and only there."""
    error = "ZeroDivisionError: integer modulo by zero"
    readable = [row for row in rows if row[0] != "cannot be listed, file there"]
    right = all((end == error) is not there for _, there, end, _ in readable)
    rival = next(row for row in rows if row not in readable)
    excluded = rival[2] != error or rival[3] == error
    seen = f"in {sum(row[2] == error for row in readable)} of {len(readable)} folders the rule gives that error"
    return {
        "truth": right and excluded,
        "measured": sum(row[2] == error for row in readable),
        "because": {
            "confirmed": (
                f"{seen}: those without a *.val.jsonl, and no other. A folder that cannot be listed gives it too, but"
                " would have stopped the training, which searches the same folder by the same rule"
            ),
            "refuted": f"{seen}, and these are not those without a *.val.jsonl",
        },
        "given": (
            "the validation searched the training's folders alone, as with the configuration that the report shows"
        ),
    }


def commented_out(ends: Mapping[str, str]) -> Settled:
    """The first cure."""
    end, null = ends["validation commented out"], ends["validation: null"]
    return {
        "truth": end == "ends normally",
        "measured": end,
        "because": {
            "confirmed": "without that section there is no validation, and the evaluation ends",
            "refuted": (
                f"the default of that field is a validation, so it runs all the same: {end}; the harness's results,"
                f" written after it, are lost again. `validation: null` {null}"
            ),
        },
        "given": (
            "to end normally is to write the results; the harness's requests were answered before, with the section too"
        ),
    }


def data_folder(ends: Mapping[str, str]) -> Settled:
    """The second cure."""
    end, named = ends["files in data/validation"], ends["files in data/validation, named as a source"]
    return {
        "truth": end == "ends normally",
        "measured": end,
        "because": {
            "confirmed": "the validation finds the files there, and the evaluation ends",
            "refuted": (
                f"nothing points there: {end}. Named as a source of the validation it is the same ({named}), since the"
                " training's folders are always searched too; with a file in the training's own folder it"
                f" {ends['a file in the training' + chr(39) + 's own folder']}"
            ),
        },
        "given": "the training's sources are other folders, as in debug.yaml; the report does not show them",
    }


def zero_check(ends: Mapping[str, str]) -> Settled:
    """The third cure, in each way."""
    guarded = {name.partition(": ")[2]: end for name, end in ends.items() if name.startswith("check for zero")}
    told = "; ".join(f"one that {name} ends in {end}" for name, end in guarded.items())
    return {
        "truth": any(end == "ends normally" for end in guarded.values()),
        "measured": guarded,
        "because": {
            "confirmed": f"with such a check the evaluation ends: {told}",
            "refuted": (
                f"no check in that function lets the evaluation end: {told}. An empty list is divided by in the next"
                " line. If a clear message is remedy enough, the one that raises gives it, after 17 minutes"
            ),
        },
        "given": "a remedy is what lets the evaluation end; the check stands in that function alone",
    }


def safe_to_share(found: Mapping[str, Any]) -> Settled:
    """The scanner's word."""
    seen = found["as first written"]
    kinds = ", ".join(kind for _, kind in seen or ())
    return {
        "truth": "untestable" if seen is None else not seen,
        "measured": kinds or None,
        "because": {
            "confirmed": "the scanner finds nothing in the line with a stand-in of a key's form",
            "refuted": (
                f"with a stand-in for the key the scanner stops at the line ({kinds}), and with the key taken out it is"
                " silent"
            ),
            "untestable": "detect-secrets is not installed here",
        },
        "given": "what was taken out had the form of such a key, 40 hexadecimal digits",
    }


def derived_table(among: Sequence[Figure], agrees: bool | None) -> Table:
    """Figures that agree, that contradict, or that nobody stated."""
    rows = [(f.name, span(f.stated), span(f.derived), f.how) for f in among if f.agrees is agrees]
    title = {True: "agree", False: "contradict", None: "follow, and are not in the report"}[agrees]
    return Table(("figure", "stated", "derived", "how"), rows, title=f"Figures that {title}")


def last_recorded(run: Any) -> dict[str, Any] | None:
    """The GPU's figures of a recorded notebook, where there is one."""
    return run.result["metrics"].get("on_gpu") if run is not None else None


def first_difference(one: Path, other: Path) -> str | None:
    """The first step and tensor in which two runs' dumps differ, as `labkit diff` names it."""
    from labkit.trace.diff import report

    return report(one, [other]).shown.first


def forget_last(config: Config) -> None:
    """Throw away a run's last checkpoint, as if it had been killed before."""
    shutil.rmtree(max(checkpoints.complete(Path(config.folder) / "checkpoints").items())[1])


def speed(path: Path) -> Table | str:
    """What was recorded of a training step: a row a provider."""
    if not path.exists():
        return "no benchmark is on record"
    rows = bench.read(path)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        key = row["kernel_operation_mode"], row["kernel_provider"]
        found.setdefault(key, {})[row["metric_name"]] = float(row["y_value_50"])
    names = ("step_ms", "bytes_per_second", "share_of_peak", "share_of_peak_lingua")
    shown = [(*key, *(value.get(name) for name in names)) for key, value in found.items() if "step_ms" in value]
    title = (
        f"recorded on {rows[0]['gpu_name']}, {rows[0]['timestamp']} UTC; a share of 989 TFLOP/s, without and with"
        " recomputation"
    )
    return Table(("what", "provider", *names), shown, title=title)


FIGURES = {
    "parameters": "the parameters", "flops": "the FLOP/s", "learning_rate_column": "the learning rates",
    "loss_improved_54": "the improvement", "words_per_second": "the words a second",
    "gpu_utilisation_20": "the utilisation", "memory_047": "the memory",
}  # fmt: skip
"""The claims on figures, in words."""


def answer(result: Mapping[str, Any]) -> str:
    """The notebook's answer, from a result.json of it."""
    claims = {name: one["verdict"] for name, one in result["claims"].items()}
    holds = claims["zero_division_cause"] == "confirmed"
    cures = [name for name in ("fix_comment_out", "fix_data_folder", "fix_zero_check") if claims[name] == "confirmed"]
    right, wrong = (
        ", ".join(words for name, words in FIGURES.items() if claims[name] == verdict) or "none"
        for verdict in ("confirmed", "refuted")
    )
    return (
        f"The cause {'holds' if holds else 'does not hold'}: Lingua's rule fails where no validation file is found"
        f"{', and only there' if holds else ', and not there alone'}. Of the three cures {len(cures) or 'none'} "
        f"{'let' if len(cures) > 1 else 'lets'} the evaluation end. Of the figures {right} hold, and {wrong} do not. "
        f"A preflight had {len(result['metrics']['preflight'])} findings before the first step."
    )


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record, as README and notebook have it; none without a record."""
    kept = recorded("training_run", "cpu")
    return {"training_run": answer(kept.result)} if kept else {}
