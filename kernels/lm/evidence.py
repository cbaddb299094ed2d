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
import statistics
import time
from collections.abc import Mapping, Sequence
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
from kernels.lm.report import FACTS, PEAK, PRINTED, REPORT, STEPS, as_the_report, sample
from labkit import bench, plots
from labkit.errors import UsageError
from labkit.session.record import recorded
from labkit.session.secrets import secrets
from labkit.tables import Table

Settled = dict[str, Any]
FOUND = "a file is found"
SIZES = Model(**FACTS["model"])
PERFORMANCE = ("FLOP/s", "words", "GPU", "memory")
"""How the names of performance figures begin."""


def figures() -> list[Figure]:
    """Every derived figure of the report."""
    return analyse.of_report(REPORT)


def the(name: str, among: Sequence[Figure]) -> Figure:
    """The figure of a name."""
    return next(one for one in among if one.name == name)


def draw_report(axes: Any) -> None:
    """Loss and gradient norm over the report's steps, beside ln V and the loss that is 3 bits per byte."""
    left, right = axes
    steps = [row["step"] for row in STEPS]
    left.plot(steps, [float(row["loss"]) for row in STEPS], "o-", color=plots.BLUE, ms=3)
    left.axhline(math.log(SIZES.vocabulary), color=plots.GREY, ls="--", lw=0.8, label=f"ln {SIZES.vocabulary}")
    left.axhline(3 * math.log(2), color=plots.RED, ls=":", lw=1, label="3 bits per byte")
    left.set_ylabel("loss, nats per byte")
    left.legend(fontsize=7)
    right.plot(steps, [float(row["grad_norm"]) for row in STEPS], "s-", color=plots.GREEN, ms=3)
    right.set(yscale="log", ylabel="gradient norm (logarithmic)", yticks=[2, 5, 10, 20], yticklabels=[2, 5, 10, 20])
    right.minorticks_off()
    for one in axes:
        one.set_xlabel("step")


def draw_timeline(axes: Any) -> None:
    """How long the parts of the report's twenty minutes were. Everything else is spread over the run."""
    trained = 100 * float(PRINTED["iteration_seconds"]) / 60
    whole, judged = float(PRINTED["minutes"]), float(PRINTED["evaluation_minutes"])
    parts = (
        ("everything else", 0.0, whole - judged - trained, plots.GREY),
        ("100 steps", whole - judged - trained, trained, plots.GREEN),
        ("generate_until requests", whole - judged, judged, plots.BLUE),
    )
    for name, start, length, colour in parts:
        axes.barh(0, length, left=start, color=colour, height=0.5, label=name)
    axes.plot(whole, 0, "X", color=plots.RED, ms=9, label="ZeroDivisionError; no result was written")
    axes.plot(0, 0, "v", color="black", ms=9, clip_on=False, label="a preflight")
    axes.set(yticks=[], xlim=(-0.4, whole + 0.4), xlabel="minutes (bars show lengths only, not an order)")
    axes.spines["left"].set_visible(False)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.6))


# The report's configuration, and small runs of our own


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
    """A run of a tiny model on a CPU, in float32, with at most 119 steps dumped."""
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
        "dumps": {"every": max(1, steps // 60)},
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
    """Bits per byte of held-out text, the last that was written."""
    lines = metrics.read(Path(config.folder) / metrics.VALIDATION)
    return float(lines[-1]["bits_per_byte"])


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
    mfu = " to ".join(f"{share:.0%}" for share in the("MFU", figures()).derived)
    config, _ = configs.parse(as_the_report(Path("run"), Path("text")))
    least = preflight.memory(config) if config else math.nan
    rows = [
        ("loss at step 1, nats per byte", "not given", f"{run['first_loss']:.3f}"),
        *(
            (f"loss at step {row['step']}", row["loss"], f"{losses[row['step']]:.4f}")
            for row in STEPS
            if row["step"] in losses
        ),
        ("tokens per second", printed["words_per_second"], f"{run['tokens_per_second']:,.0f}"),
        ("seconds per step", printed["iteration_seconds"], f"{run['step_seconds']:.4f}"),
        ("FLOP/s, Lingua's formula", printed["flops_per_second"], f"{run['flops_per_second_lingua']:.3g}"),
        ("FLOP/s, without recomputation", "", f"{run['flops_per_second']:.3g}"),
        (f"the same as a share of {PEAK / 1e12:.0f} TFLOP/s", mfu, f"{run['flops_per_second'] / PEAK:.1%}"),
        ("power, W", printed["power_watts"], f"{run['power_watts']:.0f}"),
        (
            "active memory in a step, share",
            f"{float(printed['gpu_memory_share']):.0%}",
            f"{run['memory_share']:.1%} of {run['capacity_gib']:.0f} GiB",
        ),
        (
            "the same in GiB",
            f"{float(printed['gpu_memory_share']) * float(printed['gpu_capacity_gib']):.1f}",
            f"{run['memory_active_gib']:.1f}",
        ),
        ("the least by the preflight's arithmetic, GiB", "", f"{least / 2**30:.1f}"),
        ("pause for one checkpoint, s", "", f"{run['checkpoint_pause']:.2f}"),
    ]
    return Table(("", "report, H100", f"here, {run['gpu']}"), rows)


def draw_runs(axes: Any, run: Mapping[str, Any]) -> None:
    """The report's losses, and ours."""
    axes.plot(
        [row["step"] for row in STEPS],
        [float(row["loss"]) for row in STEPS],
        "o-",
        color=plots.BLUE,
        ms=3,
        label="report, H100",
    )
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
    axes.set_ylabel("loss, nats per byte")
    axes.legend(fontsize=7)


# The crash and its fixes


def world(folder: Path) -> tuple[Path, list[str]]:
    """A training source as the report has it: chunks, and no validation file."""
    source = folder / "data" / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "source.chunk.00.jsonl").write_text('{"text": "training"}\n')
    return folder / "data", ["source"]


def crash(folder: Path) -> list[tuple[str, bool, str, str]]:
    """Folders with and without validation files: whether they hold one, how each search by the rule ends."""
    rows = []

    def end(where: Path, pattern: str) -> str:
        try:
            faulty.dealt(where, 0, 1, pattern)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return FOUND

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
    rows.append(("cannot be listed", True, *ends))
    return rows


def fixes(folder: Path) -> dict[str, str]:
    """How the evaluation ends with each proposed fix, and with variants that might have been meant."""
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
    line = "- **Wandb APIキー**: 設定済み (`'WANDB_API_KEY': '{}'`)"
    return {"as first written": secrets(line.format(stand_in)), "as it is here": secrets(line.format("<redacted>"))}


# The claims


def loss_improved(among: Sequence[Figure]) -> Settled:
    """5.3926 to 2.706."""
    one = the("loss improvement", among)
    before, after = PRINTED["loss"]
    first = float(after) / (1 - float(PRINTED["improvement"]))
    share = f"1 - {after} / {before} is {sum(one.derived) / 2:.1%}"
    return {
        "truth": bool(one.agrees),
        "measured": sum(one.derived) / 2,
        "because": {
            "confirmed": f"{share}, which is about 54%",
            "refuted": (
                f"{share}; 54% would need a first loss of {first:.2f}. That may be the loss of step 1, which the report"
                " does not give"
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
        "given": (
            "the sizes of Lingua's debug.yaml: dim 1024, 8 layers, SwiGLU 2816, 258 tokens, and an output matrix of its"
            " own beside the embedding's"
        ),
    }


def learning_rates(among: Sequence[Figure]) -> Settled:
    """One line through ten intervals."""
    one = the("learning rates on one line", among)
    known = next((figure.derived for figure in among if figure.name == "learning rate, slope"), (math.nan, math.nan))
    rate, warmup = FACTS["rate"], FACTS["warmup"]
    printed = [f"{rate * ((row['step'] - 1) / warmup):.2e}" == row["lr"] for row in STEPS]
    slope = f"{known[0]:.4e} to {known[1]:.4e} per step"
    return {
        "truth": bool(one.agrees),
        "measured": slope,
        "because": {
            "confirmed": (
                f"one line passes all ten; its slope is {slope}, known to {known[1] / known[0] - 1:.2%}. A warm-up to"
                f" {rate:g} in {warmup} steps, counted from 0, prints {sum(printed)} of the 10 as they stand; any other"
                " warm-up of this slope fits too"
            ),
            "refuted": "no line passes the ten entries",
        },
    }


def flops(among: Sequence[Figure]) -> Settled:
    """Lingua's formula."""
    one = the("FLOP/s, Lingua's formula", among)
    each = [flops_per_token(SIZES, FACTS["length"], recomputed) / 1e6 for recomputed in (True, False)]
    words = f"{each[0]:.1f} MFLOP per token times the words per second is {span(one.derived)}"
    return {
        "truth": bool(one.agrees),
        "measured": list(one.derived),
        "because": {
            "confirmed": (
                f"{words}, and the report's range lies within it. Lingua does not count operations, it prints this"
                " product; that is what is confirmed. Without what flash attention computes a second time it is"
                f" {each[1]:.1f} MFLOP, {1 - each[1] / each[0]:.1%} less"
            ),
            "refuted": f"{words}, which the report's range does not meet",
        },
        "given": (
            f"Lingua's formula, {FACTS['length']} tokens in a sequence, and the report's words per second, which are"
            " tokens"
        ),
    }


def words_per_second() -> Settled:
    """A token of this configuration is a byte."""
    text = corpus().text
    tokens, words = len(jsonl.encode(text.decode("utf-8", errors="replace"))), len(re.findall(rb"\w+", text))
    stated = float(PRINTED["words_per_second_mean"])
    rate = round(stated * words / tokens, -3)  # as exact as the report's own figure, two digits
    low, high = (float(value) for value in PRINTED["words_per_second"])
    shown = (
        f"the tokenizer makes {tokens / words:.1f} tokens of a word of English, so {stated:,.0f} tokens are about"
        f" {rate:,.0f} words"
    )
    return {
        "truth": low <= rate <= high,
        "measured": f"about {rate:,.0f} words of text per second",
        "because": {
            "confirmed": f"{shown}: tokens are words",
            "refuted": (
                f"Lingua's wps counts tokens, and here these are bytes: {shown}. If 'words' is only Lingua's name for"
                " tokens, the figure holds: it fits the FLOP/s, whose verdict uses that reading"
            ),
        },
        "given": (
            "the tokenizer is that of debug.yaml, bytes; a word is a run of letters and digits; the text is Python's"
            " documentation, not the run's text"
        ),
    }


def iteration_time(among: Sequence[Figure], margin: float = 0.03) -> Settled:
    """Two figures of speed."""
    one = the("words per second, from the iteration", among)
    stated = one.stated or (math.nan, math.nan)
    nearest = max(one.derived[0] / stated[1], stated[0] / one.derived[1], 1.0) - 1.0
    tokens = FACTS["batch"] * FACTS["length"]
    speed, seconds = float(PRINTED["words_per_second_mean"]), float(PRINTED["iteration_seconds"])
    batch = round(speed * seconds / FACTS["length"])
    words = (
        f"{tokens:,} tokens in {seconds} s are {span(one.derived)} per second, at least {nearest:.1%} from the stated"
    )
    return {
        "truth": nearest <= margin,
        "measured": f"at least {nearest:.1%} apart",
        "because": {
            "confirmed": f"{words} {speed:,.0f}: within 3%",
            "refuted": (
                f"{words} {speed:,.0f}. Lingua's source gives an explanation, which was not measured here: it has two"
                " clocks. An iteration is the forward pass, backward pass and update of the last step, timed on the"
                " GPU; its wps divides by all the time since the last line was printed. With a batch of"
                f" {batch} the two would be within 3% ({batch * FACTS['length'] / seconds:,.0f} per second)"
            ),
        },
        "given": (
            f"{FACTS['batch']} x {FACTS['length']} tokens per step, from debug.yaml. The report gives no batch, and its"
            f" FLOP/s and words per second fix only the length, to {' to '.join(f'{n:,.0f}' for n in lengths())} tokens"
        ),
    }


def lengths() -> tuple[float, float]:
    """The lengths of a sequence for which Lingua's formula leads from the report's words to its FLOP/s."""
    done = [analyse.printed(value) for value in PRINTED["flops_per_second"]]
    words = [analyse.to_digits(value, PRINTED["words_per_second_digits"]) for value in PRINTED["words_per_second"]]
    fixed = flops_per_token(SIZES, 0, recomputed=True)
    each = flops_per_token(SIZES, 1, recomputed=True) - fixed
    return (done[0][0] / words[1][1] - fixed) / each, (done[1][1] / words[0][0] - fixed) / each


def utilisation(among: Sequence[Figure]) -> Settled:
    """The least that the FLOP/s need."""
    one = the("GPU utilisation", among)
    least = f"at least {one.derived[0]:.1%}"
    words = f"the FLOP/s take {least} of the peak, so the GPU was busy for at least that share of the time"
    return {
        "truth": bool(one.agrees),
        "measured": least,
        "because": {
            "confirmed": f"{words}, which leaves room for 20%",
            "refuted": (
                f"{words}. Lingua's console prints its percentage after `mem:`, and it is another thing: the largest"
                " active memory as a share of the GPU's"
            ),
        },
        "given": (
            f"{PEAK / 1e12:.0f} TFLOP/s, the peak of an H100 SXM; 620 W rule out the cards of 350 and 400 W, whose peak"
            " is lower still"
        ),
    }


def memory(among: Sequence[Figure]) -> Settled:
    """The weights alone, to the segments that PyTorch reserves for them."""
    one = the("memory while the model is built", among)
    held = " to ".join(f"{share:.2%}" for share in one.derived)
    trained = 8 * count(SIZES) / (float(PRINTED["gpu_capacity_gib"]) * 2**30)
    words = (
        f"the weights alone are {one.derived[0]:.2%} of the memory, and the segments that PyTorch reserves for them and"
        f" for temporary values are at most {one.derived[1]:.2%}"
    )
    return {
        "truth": "undecidable" if one.agrees else "refuted",
        "measured": held,
        "because": {
            "undecidable": (
                f"{words}; 0.47% fits that, with one segment for temporary values and not without it, and what was"
                " reserved was not measured. If the largest share of the whole run is meant, the claim is refuted:"
                f" weights, gradients and the optimizer's two moments are at least {trained:.2%}, even in two bytes"
                " each, and the report's own 20% is the active memory of a training step"
            ),
            "refuted": f"{words}; 0.47% does not fit that",
        },
        "given": (
            "the figure stands under the report's heading on building the model, and Lingua prints such a line there,"
            " before there is an optimizer; what it prints is reserved memory. Weights are float32, and temporary"
            " values need no more than one segment of 20 MiB"
        ),
    }


def below_3_bits() -> Settled:
    """Nats to bits."""
    last = float(PRINTED["loss"][1])
    words = f"{last} nats are {last / math.log(2):.2f} bits per byte"
    return {
        "truth": last / math.log(2) < 3.0,
        "measured": f"{last / math.log(2):.2f} bits per byte",
        "because": {"confirmed": words, "refuted": f"{words}; 3 bits are {3 * math.log(2):.2f} nats"},
        "given": "a token is a byte; the loss is that of the last step's batch",
    }


def consistent(among: Sequence[Figure]) -> Settled:
    """The performance figures."""
    held = [one for one in among if one.agrees is not None and one.name.startswith(PERFORMANCE)]
    wrong = [one.name for one in held if not one.agrees]
    return {
        "truth": not wrong,
        "measured": f"{len(wrong)} of {len(held)} contradict",
        "because": {
            "confirmed": f"all {len(held)} that can be compared with others agree with them",
            "refuted": f"{len(wrong)} of {len(held)} that can be compared with others contradict them: "
            f"{'; '.join(wrong)}",
        },
        "given": "32 x 2048 tokens per step and an H100 SXM, as for the claims on the iteration and the utilisation",
    }


def converges() -> Settled:
    """Whether the loss falls, and whether the readings reach beyond the warm-up."""
    losses, norms, rates = ([float(row[key]) for row in STEPS] for key in ("loss", "grad_norm", "lr"))
    falls, rises = [b < a for a, b in itertools.pairwise(losses)], [b > a for a, b in itertools.pairwise(rates)]
    steps, warmup = STEPS[-1]["step"], FACTS["warmup"]
    told = (
        f"the loss fell: yes, at all {len(falls)} readings after the first (the gradient norm fell from {norms[0]:g}"
        f" too, but not steadily: its last five readings are {', '.join(f'{norm:g}' for norm in norms[-5:])})"
    )
    return {
        "truth": "refuted" if not all(falls) else "undecidable" if all(rises) else "confirmed",
        "measured": f"{sum(falls)} of {len(falls)} readings fall",
        "because": {
            "confirmed": "the loss fell at each reading, and the readings reach beyond the warm-up",
            "refuted": f"the loss fell at {sum(falls)} of the {len(falls)} readings after the first only",
            "undecidable": (
                f"there are two readings of good convergence. Reading 1, {told}. Reading 2, the run will reach a good"
                f" loss: {steps} steps, the first {steps / warmup:.0%} of debug.yaml's warm-up, cannot show it, since"
                " the learning rate still rises at the last of them"
            ),
        },
        "given": f"the warm-up has the {warmup} steps of debug.yaml; the report itself only shows rates that rise",
    }


def zero_division(rows: Sequence[tuple[str, bool, str, str]]) -> Settled:
    """The error exactly where no validation file is found, among the folders that a training can have run on."""
    error = "ZeroDivisionError: integer modulo by zero"
    trained = [row for row in rows if row[3] == FOUND]
    right = bool(trained) and all((end == error) is not there for _, there, end, _ in trained)
    failed = sum(row[2] == error for row in trained)
    others = " and ".join(name for name, *_, end in rows if end != FOUND)
    return {
        "truth": right,
        "measured": f"{failed} of {len(trained)} folders",
        "because": {
            "confirmed": (
                f"in {failed} of {len(trained)} folders the rule gives that error: in those without a *.val.jsonl file,"
                f" and in no other. Folders where the search for training files fails too ({others}) are not counted:"
                " the training did run"
            ),
            "refuted": (
                f"in {failed} of {len(trained)} folders the rule gives that error, and these are not those without a"
                " *.val.jsonl file"
            ),
        },
        "given": (
            "the validation searched the training's folders alone, as with the configuration that the report shows;"
            " line and caller are taken from the report's traceback"
        ),
    }


def commented_out(ends: Mapping[str, str]) -> Settled:
    """The first fix."""
    end, null = ends["validation commented out"], ends["validation: null"]
    return {
        "truth": end == faulty.WRITTEN,
        "measured": end,
        "because": {
            "confirmed": "without that section there is no validation, and results.json is written",
            "refuted": (
                f"the default of that field is a validation, so it runs all the same and ends in {end}. The harness's"
                f" results, which are written after it, are lost again. With `validation: null`: {null}"
            ),
        },
        "given": (
            "to end normally is to write the results; the harness's requests were answered before, with the section too"
        ),
    }


def data_folder(ends: Mapping[str, str]) -> Settled:
    """The second fix."""
    end, named = ends["files in data/validation"], ends["files in data/validation, named as a source"]
    own = ends["a file in the training's own folder"]
    return {
        "truth": end == faulty.WRITTEN,
        "measured": end,
        "because": {
            "confirmed": "the validation finds the files there, and results.json is written",
            "refuted": (
                f"no code looks for files in that folder: {end}. Where it is named as a source of the validation, the"
                f" end is the same ({named}), because the training's folders are always searched too. With a file in"
                f" the training's own folder: {own}"
            ),
        },
        "given": (
            "the training's sources are other folders, as in debug.yaml (the report does not show them); and, as in"
            " Meta's repository, no code reads `use_val_from_train_src` (some copies derived from it do)"
        ),
    }


def zero_check(ends: Mapping[str, str]) -> Settled:
    """The third fix, in three ways."""
    guarded = {name.partition(": ")[2]: end for name, end in ends.items() if name.startswith("check for zero")}
    told = "; ".join(f"one that {name} ends in {end}" for name, end in guarded.items())
    let = [name for name, end in guarded.items() if end == faulty.WRITTEN]
    clear = [name for name, end in guarded.items() if not end.startswith(("ZeroDivisionError", faulty.WRITTEN))]
    return {
        "truth": "confirmed" if let else "undecidable" if clear else "refuted",
        "measured": f"{len(let) or 'none'} of {len(guarded)} lets the evaluation end",
        "because": {
            "confirmed": f"with such a check the evaluation ends: {told}",
            "refuted": f"none of the {len(guarded)} checks tried lets the evaluation end or changes the error: {told}",
            "undecidable": (
                "there are two readings of a fix. Reading 1, it lets the evaluation end: none of the"
                f" {len(guarded)} checks tried does ({told}). Reading 2, it gives a clearer message, which the report's"
                f" long-term list calls better error handling: {len(clear)} of them do, though only after the harness's"
                " requests"
            ),
        },
        "given": (
            "the check stands in that function alone, and it is one of the three tried; one that takes the training's"
            " files instead would let the evaluation end"
        ),
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
                f"with a stand-in for the key the scanner finds secrets in the line ({kinds}), and with the key taken"
                " out it finds none"
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
    """The first step and tensor in which two runs' dumps differ in any bit."""
    from labkit.trace.dumps import open_dump

    a, b = open_dump(one), open_dump(other)
    return next((name for name in a.names if name in b and not torch.equal(a.read(name), b.read(name))), None)


def forget_last(config: Config) -> int:
    """Throw away a run's last checkpoint, as if it had been killed before; the step of the one that is left."""
    *_, (kept, _), (_, last) = sorted(checkpoints.complete(Path(config.folder) / "checkpoints").items())
    shutil.rmtree(last)
    return kept


def speed(path: Path) -> Table | None:
    """What was recorded of a training step, a row a provider; None where nothing was."""
    if not path.exists():
        return None
    rows = bench.read(path)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        key = row["kernel_operation_mode"], row["kernel_provider"]
        found.setdefault(key, {})[row["metric_name"]] = float(row["y_value_50"])
    names = ("step_ms", "bytes_per_second", "share_of_peak", "share_of_peak_lingua")
    shown = [(*key, *(value.get(name) for name in names)) for key, value in found.items() if "step_ms" in value]
    title = (
        f"recorded on {rows[0]['gpu_name']}, {rows[0]['timestamp']} UTC; shares of {PEAK / 1e12:.0f} TFLOP/s, without"
        " and with recomputation"
    )
    return Table(("what", "provider", *names), shown, title=title)


SETTLED = 20
"""Steps at a run's begin that its speed leaves out: compilation, and clocks that rise."""


def gpus(folder: Path) -> Table:
    """Runs that differ in their GPUs alone, the same batch a GPU: bytes a second, and times the first one's."""
    rates = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = metrics.read(path)[SETTLED:]
        rate = statistics.median(line["tokens_per_second"] for line in lines)
        rates[path.stem] = (lines[0]["ranks"], lines[0]["tokens"], rate)
    alone = next((rate for ranks, _, rate in rates.values() if ranks == 1), math.nan)
    rows = [(name.replace("_", ", "), *found, found[-1] / alone) for name, found in rates.items()]
    title = f"kernels.lm train, median after {SETTLED} steps"
    return Table(("GPUs", "processes", "bytes a step", "bytes a second", "times one"), rows, title)


FIGURES = {
    "parameters": "the parameters", "flops": "the FLOP/s", "memory_047": "the largest share of memory",
    "loss_improved_54": "the improvement", "gpu_utilisation_20": "the utilisation",
    "words_per_second": "the words per second",
}  # fmt: skip
"""The claims on the report's figures, in words."""
FIXES = ("fix_comment_out", "fix_data_folder", "fix_zero_check")
PREFLIGHT = {
    "validation.folder": "the missing validation file",
    "optimizer.warmup": "a warm-up longer than the run",
}
"""Findings in words, by their key."""


def listed(words: Sequence[str]) -> str:
    """`a, b and c`; `none` for nothing."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part) or "none"


def answer(result: Mapping[str, Any]) -> str:
    """The notebook's answer, from a result.json of it."""
    claims = {name: one["verdict"] for name, one in result["claims"].items()}
    holds = claims["zero_division_cause"] == "confirmed"
    good = [name for name in FIXES if claims[name] == "confirmed"]
    clear = " (the third can give a clearer message)" if claims["fix_zero_check"] == "undecidable" else ""
    right, wrong = (
        listed([words for name, words in FIGURES.items() if claims[name] == verdict])
        for verdict in ("confirmed", "refuted")
    )
    counted = result["claims"]["words_per_second"]["reported"]
    tokens = f" ({counted:,} are tokens, that is bytes, not words)" if claims["words_per_second"] == "refuted" else ""
    converges = {"confirmed": "The convergence is good", "refuted": "The convergence is not good"}.get(
        claims["converges_well"], "Whether the convergence is good is undecidable"
    )
    open_ones = [words for name, words in FIGURES.items() if claims[name] == "undecidable"]
    unsettled = f"; {listed(open_ones)} cannot be settled" if open_ones else ""
    named = [
        words for key, words in PREFLIGHT.items() if any(f"{key}:" in one for one in result["metrics"]["preflight"])
    ]
    return (
        f"The cause {'holds' if holds else 'does not hold'}: Lingua's rule gives this error "
        f"{'exactly' if holds else 'not only'} where no validation file is found. Of the three fixes "
        f"{len(good) or 'none'} {'let' if len(good) > 1 else 'lets'} the evaluation end{clear}. Of the report's "
        f"figures {right} hold; {wrong} do not{tokens}{unsettled}. {converges}. "
        f"A preflight, a check before the first step, names {listed(named)}."
    )


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record, as README and notebook have it; none without a record."""
    kept = recorded("training_run", "cpu")
    return {"training_run": answer(kept.result)} if kept else {}
