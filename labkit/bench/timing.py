"""Timing that refuses to time what was not checked.

`labkit bench NAME` asks kernels.NAME.bench for its cases, checks every provider against the golden, times the correct
ones, and adds a row for each provider, case and metric to one CSV, which keeps all runs. For a time, `y_value_50` is
the median of ROUNDS rounds in random order, `y_value_20` and `y_value_80` are the smallest and the largest.
"""

from __future__ import annotations

import csv
import itertools
import random
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.session import device as devices
from labkit.session.catalogue import ROOT
from labkit.session.record import made_by, versions
from whywrong.comparing.comparison import Comparison
from whywrong.errors import UsageError
from whywrong.files import complete_file, writable
from whywrong.tables import Table

QUANTILES = (0.5, 0.2, 0.8)
ROUNDS = 3
COLUMNS = [
    *("kernel_name", "kernel_provider", "kernel_operation_mode", "metric_name", "metric_unit", "x_name", "x_value"),
    *("y_value_50", "y_value_20", "y_value_80", "gpu_name", "timestamp", "version", "kernels_hash"),
]
case_of = itemgetter("kernel_name", "kernel_operation_mode", "x_value")
"""Which case a row of a CSV is of."""


@dataclass(frozen=True)
class Provider:
    """One implementation: `poison()` overwrites its outputs, `run()` computes them, `check()` compares with float64."""

    name: str
    run: Callable[[], None]
    poison: Callable[[], None]
    check: Callable[[], Comparison]
    facts: Callable[[], Mapping[str, float]] = dict
    """Further dimensionless numbers from `check`, by name: each is a row of the CSV."""
    alone: Callable[[], Mapping[str, float]] | None = None
    """Measures times in processes of its own: microseconds by metric. None: `run` is timed in this process."""


@dataclass(frozen=True)
class Case:
    """Providers of the same result on the same inputs, and the least bytes and operations that it needs."""

    kernel: str
    mode: str
    x_name: str
    x_value: str
    providers: Sequence[Provider]
    bytes: int
    operations: int
    graph: bool = True
    """Whether the calls can be captured in a CUDA graph; a call that waits for its result cannot."""
    memory: bool = False
    """Whether to measure the memory that a call takes in addition to its operands."""
    further_bounds: Mapping[str, int] = field(default_factory=dict)
    """Further lower bounds by name, as bytes that are moved at the rate of a copy."""


def measure(case: Case, device: devices.Device) -> Iterator[dict[str, Any]]:
    """Rows of one case: for each provider its error, and its times if it is correct.

    Earlier calls change how long a call from Python takes, so all correct providers are timed in ROUNDS rounds, each in
    a new random order. The row of a time holds the median of the rounds' medians, their minimum and their maximum.
    """
    bounds, correct = lower_bounds(case, device), []  # measured before any capture, which a provider may spoil
    for provider in case.providers:
        provider.poison()
        provider.run()
        error = provider.check()
        for name, value in {"max_abs_error": error.max_abs, "of_bound": error.bound_used, **provider.facts()}.items():
            yield _row(case, provider.name, name, "1", value)
        if not error.ok:
            print(f"  not timed, since it is wrong: {provider.name}: {error}")
            continue
        correct.append(provider)
        if case.memory:
            yield _row(case, provider.name, "extra_memory", "MiB", extra_memory(provider.run, device))
    timers = {"time": cuda_times if device.is_cuda else host_times}
    if device.is_cuda and case.graph:
        timers["time_in_graph"] = graph_times
    order, times = random.Random(case.x_value), defaultdict[tuple[str, str], list[float]](list)
    for provider in itertools.chain.from_iterable(order.sample(correct, len(correct)) for _ in range(ROUNDS)):
        for metric, microseconds in _times(provider, timers):
            times[provider.name, metric].append(microseconds)
    for (name, metric), rounds in times.items():
        yield _row(case, name, metric, "us", statistics.median(rounds), min(rounds), max(rounds))
    for name, microseconds in bounds.items():
        yield _row(case, name, "time", "us", microseconds)


def _times(provider: Provider, timers: Mapping[str, Callable[..., list[float]]]) -> Iterator[tuple[str, float]]:
    if provider.alone:
        yield from provider.alone().items()
        return
    for metric, timer in timers.items():
        try:
            yield metric, timer(provider.run)[0]
        except RuntimeError as error:
            if metric == "time":
                raise
            print(f"  cannot be captured in a graph: {provider.name}: {str(error).splitlines()[0]}")


def _row(case: Case, provider: str, metric: str, unit: str, median: float, *limits: float) -> dict[str, Any]:
    row = {"kernel_name": case.kernel, "kernel_provider": provider, "kernel_operation_mode": case.mode}
    row |= {"metric_name": metric, "metric_unit": unit, "x_name": case.x_name, "x_value": case.x_value}
    low, high = limits or (median, median)
    return row | {f"y_value_{k}": f"{value:.6g}" for k, value in {50: median, 20: low, 80: high}.items()}


def extra_memory(run: Callable[[], Any], device: devices.Device) -> float:
    """MiB by which one call raises the peak of allocated memory: of the GPU, or of this process (Linux)."""
    if device.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    resident = _kibibytes("VmRSS")
    run()
    return (_kibibytes("VmHWM") - resident) / 1024


def _kibibytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def cuda_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of a call from Python, by CUDA events, the L2 cache flushed before each; 10 calls or more."""
    from triton.testing import do_bench

    once = do_bench(run, warmup=0, rep=0)  # milliseconds of a single call
    return [1e3 * t for t in do_bench(run, warmup=25, rep=max(80, 11 * once), quantiles=list(QUANTILES))]


def graph_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of a call inside a CUDA graph of about 20 ms, caches warm: the device's own time."""
    from triton.testing import do_bench_cudagraph

    return [1e3 * t for t in do_bench_cudagraph(run, quantiles=list(QUANTILES))]


def host_times(run: Callable[[], None], seconds: float = 1.0) -> list[float]:
    """Microseconds of one call on the CPU, after a warm-up, for about `seconds`."""
    run()
    times = timeit.repeat(run, number=1, repeat=max(5, int(seconds / timeit.timeit(run, number=1))))
    return (1e6 * np.quantile(times, QUANTILES)).tolist()


def lower_bounds(case: Case, device: devices.Device) -> dict[str, float]:
    """Microseconds that a case takes at least when its operands come from memory.

    Bytes at the measured copy rate, and operations at peak float32: multiprocessors x 128 fused multiply-adds x the
    highest clock (the CUDA programming guide's figure for compute capability 9.0; none for other GPUs). A small case
    whose operands stay in the L2 cache from call to call, as in a graph, may be faster than the first; TF32 may be
    faster than the second. Empty on a CPU, where neither is known.
    """
    if not device.is_cuda:
        return {}
    traffic = {"traffic lower bound": case.bytes, **case.further_bounds}
    bounds = {name: 1e6 * count / copy_rate() for name, count in traffic.items()}
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if case.operations and (gpu.major, gpu.minor) == (9, 0):
        peak = gpu.multi_processor_count * 128 * 2 * 1e3 * float(gpu.clock_rate)
        bounds["arithmetic lower bound, fp32"] = 1e6 * case.operations / peak
    return bounds


@cache
def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB on the device; measured once in a process."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2.0 * source.numel() / (1e-6 * cuda_times(lambda: target.copy_(source))[0])


def bench(name: str, request: str, out: Path) -> Path:
    """Measure every case of kernels.`name`.bench and add it to OUT/<name>.csv (on a CPU OUT/<name>_cpu.csv).

    `name` is a folder under kernels/, which may lie deeper: `mhc/reductions` writes reductions.csv. Earlier runs stay
    in the file, of cases that the bench.py has no longer too. Raises UsageError for a file of other columns.
    """
    if not (ROOT / "kernels" / name / "bench.py").is_file():
        raise UsageError(f"NAME: expected a folder under kernels/ with a bench.py, got kernels/{name}")
    device = devices.choose(request)
    writable(out, "--out")
    module = f"kernels.{name.replace('/', '.')}.bench"
    path = out / f"{Path(name).name}{'_cpu' * (not device.is_cuda)}.csv"
    if path.exists():
        _rows(path)  # or it is refused, before hours of measuring
    version, timestamp = " ".join(map("-".join, versions().items())), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    common = {"gpu_name": device.name, "timestamp": timestamp, "version": version}
    common["kernels_hash"] = made_by(f"import {module}")
    for case in import_module(module).cases(device):
        measured = [row | common for row in measure(case, device)]
        print(table(measured), flush=True)
        earlier = _rows(path) if path.exists() else []  # read each time: another run may have added to it
        with complete_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(earlier + measured)  # after each case, in case the next is cut off
    return path


def read(path: Path) -> list[dict[str, str]]:
    """Of each case in a benchmark's CSV the newest run; cases as they first appear there.

    Raises UsageError for a file that :func:`bench` has not written.
    """
    runs = defaultdict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, str]]]](dict)
    for row in _rows(path):
        runs[case_of(row)].setdefault((row["timestamp"], row["gpu_name"]), []).append(row)
    return [row for some in runs.values() for row in some[max(some)]]


def recorded_on(rows: Sequence[dict[str, str]]) -> str:
    """The cards of rows, each with its dates in UTC: the first and the last where they differ."""
    days = defaultdict[str, list[str]](list)
    for row in sorted(rows, key=itemgetter("timestamp")):
        days[row["gpu_name"]].append(row["timestamp"][:10])
    return "; ".join(f"{card}, {' to '.join(dict.fromkeys((some[0], some[-1])))}" for card, some in days.items())


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = [*csv.reader(file)] or [[]]
    if header != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise UsageError(f"{path}: expected rows of {', '.join(COLUMNS)}, got other ones, or fewer or more in a row")
    return [dict(zip(header, row, strict=True)) for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians of one or more cases: a row for each provider, a column for each metric."""
    cells, metrics = defaultdict[tuple[str, str], dict[str, str]](dict), dict[str, None]()
    for row in rows:
        unit, name = {"us": "µs"}.get(row["metric_unit"], row["metric_unit"]), row["metric_name"]
        metric = f"{'error / tolerance' if name == 'of_bound' else name} ({unit})".removesuffix(" (1)")
        value, metrics[metric] = float(row["y_value_50"]), None
        text = f"{value:.4g}" if value < 1000.0 else f"{value:,.0f}"
        cells[str(row["x_value"]), str(row["kernel_provider"])][metric] = text
    names = [str(rows[0]["x_name"]), "provider", *metrics] if rows else ["provider"]
    return Table(names, [(*key, *(texts.get(metric, "") for metric in metrics)) for key, texts in cells.items()])
