"""Timing that refuses to time what was not checked.

`labkit bench NAME` asks kernels.NAME.bench for its cases, checks every provider against the golden, times those that
are right, and writes one CSV: a row a provider, case and metric. Of a time, `y_value_50` is the median of some rounds
in drawn orders, `y_value_20` and `y_value_80` are the least and the largest.
"""

from __future__ import annotations

import csv
import random
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
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
RENAMED = {" floor": " lower bound", "labkit.compare": "whywrong.compare"}
"""Parts of providers' names in CSVs of before, and what they are called today."""


@dataclass(frozen=True)
class Provider:
    """One implementation: `poison()` makes stale results show, `run()` computes, `check()` holds that to float64."""

    name: str
    run: Callable[[], None]
    poison: Callable[[], None]
    check: Callable[[], Comparison]
    facts: Callable[[], Mapping[str, float]] = dict
    """Further numbers without a unit that `check` found, by name: a row of the CSV each."""
    alone: Callable[[], Mapping[str, float]] | None = None
    """Its times by metric, microseconds, each call in a process of its own; None: `run` is timed in this one."""


@dataclass(frozen=True)
class Case:
    """Providers of the same result on the same inputs, and the fewest bytes and operations that it takes."""

    kernel: str
    mode: str
    x_name: str
    x_value: str
    providers: Sequence[Provider]
    bytes: int
    operations: int
    graph: bool = True
    """Whether the calls can be captured in a CUDA graph; one that waits for its result cannot."""
    memory: bool = False
    """Whether the memory that a call takes beyond its operands is of interest."""
    lower_bounds: Mapping[str, int] = field(default_factory=dict)
    """Other lower bounds by name: bytes that must be moved at the rate of a copy."""


def measure(case: Case, device: devices.Device) -> Iterator[dict[str, Any]]:
    """Rows of one case: for each provider its error, and its times if it is right.

    What ran before changes how long a call takes as made from Python, so all that are right are timed in ROUNDS rounds,
    each in an order sampled anew. A time's row holds the median of the rounds' medians, and the least and the largest.
    """
    least, right = lower_bounds(case, device), []  # the lower bounds before any capture, which a provider may spoil
    for provider in case.providers:
        provider.poison()
        provider.run()
        found = provider.check()
        for name, value in {"max_abs_error": found.max_abs, "of_bound": found.bound_used, **provider.facts()}.items():
            yield _row(case, provider.name, name, "1", [value] * 3)
        if not found.ok:
            print(f"  not timed, since it is wrong: {provider.name}: {found}")
            continue
        right.append(provider)
        if case.memory:
            yield _row(case, provider.name, "extra_memory", "MiB", [extra_memory(provider.run, device)] * 3)
    timers = {"time": cuda_times if device.is_cuda else host_times}
    if device.is_cuda and case.graph:
        timers["time_in_graph"] = graph_times
    order = random.Random(case.x_value)
    times = defaultdict[tuple[str, str], list[float]](list)
    for provider in [provider for _ in range(ROUNDS) for provider in order.sample(right, len(right))]:
        for metric, took in _times(provider, timers):
            times[provider.name, metric].append(took)
    for (name, metric), found_times in times.items():
        yield _row(case, name, metric, "us", (statistics.median(found_times), min(found_times), max(found_times)))
    for name, microseconds in least.items():
        yield _row(case, name, "time", "us", [microseconds] * 3)


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


def _row(case: Case, provider: str, metric: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    row = {"kernel_name": case.kernel, "kernel_provider": provider, "kernel_operation_mode": case.mode}
    row |= {"metric_name": metric, "metric_unit": unit, "x_name": case.x_name, "x_value": case.x_value}
    return row | {f"y_value_{k}": f"{value:.6g}" for k, value in zip((50, 20, 80), values, strict=True)}


def extra_memory(run: Callable[[], Any], device: devices.Device) -> float:
    """MiB that one call takes at its peak beyond what was there before: of the GPU, or of this process (Linux)."""
    if device.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    resident = _kibibytes("VmRSS")
    run()
    return (_kibibytes("VmHWM") - resident) / 1024


def _kibibytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def cuda_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of one call as made from Python, by events, the L2 cache flushed before each; 10 calls or more."""
    from triton.testing import do_bench

    once = do_bench(run, warmup=0, rep=0)  # milliseconds of a single call
    return [1e3 * t for t in do_bench(run, warmup=25, rep=max(80, 11 * once), quantiles=list(QUANTILES))]


def graph_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of one call inside a CUDA graph of some 20 ms of them, caches warm: the device's own time."""
    from triton.testing import do_bench_cudagraph

    return [1e3 * t for t in do_bench_cudagraph(run, quantiles=list(QUANTILES))]


def host_times(run: Callable[[], None], seconds: float = 1.0) -> list[float]:
    """Microseconds of one call on the CPU, after a warm-up, for about `seconds`."""
    run()
    times = timeit.repeat(run, number=1, repeat=max(5, int(seconds / timeit.timeit(run, number=1))))
    return (1e6 * np.quantile(times, QUANTILES)).tolist()


def lower_bounds(case: Case, device: devices.Device) -> dict[str, float]:
    """Microseconds that a case takes at the least when its operands come from memory.

    Bytes at the measured copy rate, and operations at peak float32: multiprocessors x 128 fused multiply-adds x the
    highest clock (the CUDA programming guide's figure for compute capability 9.0; no floor on a GPU of another). A
    small case whose operands stay in the L2 cache from call to call, as in a graph, may beat the first; TF32 beats the
    second. Empty on a CPU, where neither is known.
    """
    if not device.is_cuda:
        return {}
    found = {
        name: 1e6 * count / copy_rate()
        for name, count in {"traffic lower bound": case.bytes, **case.lower_bounds}.items()
    }
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if case.operations and (gpu.major, gpu.minor) == (9, 0):  # the lanes of other generations are not entered here
        peak = gpu.multi_processor_count * 128 * 2 * 1e3 * float(gpu.clock_rate)
        found["arithmetic lower bound, fp32"] = 1e6 * case.operations / peak
    return found


@cache
def copy_rate() -> float:
    """Bytes a second that a copy of 2 GiB from device to device moves, read and written, measured once a process."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2.0 * source.numel() / (1e-6 * cuda_times(lambda: target.copy_(source))[0])


def bench(name: str, request: str, out: Path) -> Path:
    """Measure every case of kernels.`name`.bench and write OUT/<name>.csv (on a CPU OUT/<name>_cpu.csv).

    `name` is a folder under kernels/, which may lie deeper: `mhc/reductions` writes reductions.csv.
    """
    if not (ROOT / "kernels" / name / "bench.py").is_file():
        raise UsageError(f"NAME: kernels/{name} has no bench.py; expected a folder under kernels/ that has one")
    device = devices.choose(request)
    writable(out, "--out")
    module = f"kernels.{name.replace('/', '.')}.bench"
    cases: Iterable[Case] = import_module(module).cases(device)
    version, timestamp = " ".join(map("-".join, versions().items())), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    common = {"gpu_name": device.name, "timestamp": timestamp, "version": version}
    common["kernels_hash"] = made_by(f"import {module}")
    path, rows = out / f"{Path(name).name}{'' if device.is_cuda else '_cpu'}.csv", list[dict[str, Any]]()
    for case in cases:
        measured = [row | common for row in measure(case, device)]
        print(table(measured), flush=True)
        rows += measured
        with complete_file(path) as whole, whole.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)  # what there is, should the next case be cut off
    return path


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a benchmark's CSV, with the names of providers as they are today."""
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    for row in rows:
        for old, new in RENAMED.items():
            row["kernel_provider"] = row["kernel_provider"].replace(old, new)
    return rows


def recorded_where(rows: Sequence[Mapping[str, str]], name: str) -> str:
    """The GPU and the date of a benchmark of kernels/`name`, and whether what it measures has changed since."""
    changed = " (kernels changed since)" * (rows[0]["kernels_hash"] != made_by(f"import kernels.{name}.bench"))
    return f"recorded on {rows[0]['gpu_name']}, {rows[0]['timestamp']} UTC{changed}"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians of one or more cases: a row a provider, a column a metric."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    metrics: dict[str, None] = {}
    for row in rows:
        unit = {"us": "µs"}.get(row["metric_unit"], row["metric_unit"])
        name, value = (
            {"of_bound": "error / tolerance"}.get(row["metric_name"], row["metric_name"]),
            float(row["y_value_50"]),
        )
        metric = f"{name} ({unit})".removesuffix(" (1)")
        metrics[metric] = None
        key = (str(row["x_value"]), str(row["kernel_provider"]))
        cells.setdefault(key, {})[metric] = f"{value:.4g}" if value < 1000.0 else f"{value:,.0f}"
    names = [str(rows[0]["x_name"]), "provider", *metrics] if rows else ["provider"]
    return Table(names, [(*key, *(found.get(metric, "") for metric in metrics)) for key, found in cells.items()])
