"""Tables of what was measured on a GPU: the report's run beside ours, a training step beside others, several GPUs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.lm import config as configs
from kernels.lm import metrics, preflight
from kernels.lm.analyse import of_report
from kernels.lm.report import PEAK, PRINTED, REPORT, STEPS, as_the_report
from labkit import bench
from labkit.session.record import stale
from whywrong.tables import Table

FIRST_STEPS = 20
"""Steps at a run's begin that its speed leaves out: compilation, and clocks that rise."""
LM_GPUS = "NVIDIA H200s of one machine, 2026-11-23"
"""What data/results/lm_gpus was recorded on."""


def beside_the_report(run: Mapping[str, Any]) -> Table:
    """The report's run and ours (as :func:`~kernels.lm.experiments.repeat_on_gpu` gives it): what both have."""
    printed, losses = PRINTED, {line["step"]: line["loss"] for line in run["lines"]}
    used = next(figure for figure in of_report(REPORT) if figure.name == "MFU").derived
    config, _ = configs.parse(as_the_report(Path("run"), Path("text")))
    least = preflight.memory(config) / 2**30 if config else math.nan
    share, capacity = float(printed["gpu_memory_share"]), float(printed["gpu_capacity_gib"])
    rows = [
        ("loss at step 1, nats per byte", "not given", f"{run['first_loss']:.2f}"),
        *(
            (f"loss at step {row['step']}", f"{float(row['loss']):.2f}", f"{losses[row['step']]:.2f}")
            for row in STEPS
            if row["step"] in losses and row["step"] % 50 == 0
        ),
        ("tokens per second", " to ".join(printed["words_per_second"]), f"{run['tokens_per_second']:,.0f}"),
        ("seconds per step", printed["iteration_seconds"], f"{run['step_seconds']:.3f}"),
        ("FLOP/s, Lingua's formula", " to ".join(printed["flops_per_second"]), f"{run['flops_per_second_lingua']:.3g}"),
        ("FLOP/s, nothing counted twice", "", f"{run['flops_per_second']:.3g}"),
        (
            f"the same as a share of {PEAK / 1e12:.0f} TFLOP/s",
            " to ".join(f"{end:.0%}" for end in used),
            f"{run['flops_per_second'] / PEAK:.0%}",
        ),
        ("power, W", " to ".join(printed["power_watts"]), f"{run['power_watts']:.0f}"),
        (
            "largest active memory, share",
            f"{share:.0%} of {capacity:.0f} GiB",
            f"{run['memory_share']:.0%} of {run['capacity_gib']:.0f} GiB",
        ),
        ("the same in GiB", f"{share * capacity:.0f}", f"{run['memory_active_gib']:.1f}"),
        ("the least by the preflight's arithmetic, GiB", "", f"{least:.1f}"),
        ("pause for one checkpoint, s", "", f"{run['checkpoint_pause']:.1f}"),
    ]
    return Table(("", "report, H100", f"here, {run['gpu']}"), rows)


def step_times(path: Path) -> Table | None:
    """What was recorded of a training step in a benchmark's CSV, a row a provider; None where nothing was."""
    if not path.exists():
        return None
    rows = bench.read(path)
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        key = row["kernel_operation_mode"], row["kernel_provider"]
        values.setdefault(key, {})[row["metric_name"]] = float(row["y_value_50"])
    names = ("step_ms", "bytes_per_second", "share_of_peak", "share_of_peak_lingua")
    shown = [(key[1], *(value.get(name) for name in names)) for key, value in values.items() if "step_ms" in value]
    age = ", by an earlier version of the code" if f"data/benchmarks/{path.name}" in stale() else ""
    title = f"A training step, recorded on {bench.recorded_on(rows)} UTC{age}"
    columns = ("provider", "ms", "bytes a second", f"share of {PEAK / 1e12:.0f} TFLOP/s", "the same, Lingua's count")
    return Table(columns, shown, title=title)


def speed_by_gpus(folder: Path) -> Table:
    """Runs that differ in their GPUs alone, the same batch a GPU: bytes a second, and times the first one's.

    A row for each .jsonl file of metrics in `folder`, the median after :data:`FIRST_STEPS`.
    """
    rates = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = metrics.read(path)[FIRST_STEPS:]
        rate = statistics.median(line["tokens_per_second"] for line in lines)
        rates[path.stem] = (lines[0]["ranks"], lines[0]["tokens"], rate)
    alone = next((rate for ranks, _, rate in rates.values() if ranks == 1), math.nan)
    rows = [(name.replace("_", ", "), *found, found[-1] / alone) for name, found in rates.items()]
    title = f"kernels.lm train, median after {FIRST_STEPS} steps, recorded on {LM_GPUS}"
    return Table(("GPUs", "processes", "bytes a step", "bytes a second", "times one"), rows, title)
