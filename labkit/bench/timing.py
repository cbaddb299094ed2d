"""Timing that refuses to time what was not checked.

`labkit bench NAME` asks kernels.NAME.bench for its cases, checks every provider against the golden, times those that
are right, and writes one CSV: a row a provider, case and metric, with the quantiles 0.5, 0.2 and 0.8.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.numerics.compare import Comparison
from labkit.session import device as devices
from labkit.session.catalogue import ROOT
from labkit.session.record import hash_folder, versions
from labkit.tables import Table

COLUMNS = (
    "kernel_name", "kernel_provider", "kernel_operation_mode", "metric_name", "metric_unit", "x_name", "x_value",
    "y_value_50", "y_value_20", "y_value_80", "gpu_name", "timestamp", "version", "kernels_hash",
)  # fmt: skip
QUANTILES = (0.5, 0.2, 0.8)


@dataclass(frozen=True)
class Provider:
    """One implementation: `poison()` makes stale results show, `run()` computes, `check()` holds that to float64."""

    name: str
    run: Callable[[], None]
    poison: Callable[[], None]
    check: Callable[[], Comparison]
    facts: Callable[[], Mapping[str, float]] = dict
    """Further numbers without a unit that `check` found, by name: a row of the CSV each."""


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
    floors: Mapping[str, int] = field(default_factory=dict)
    """Other floors by name: bytes that must be moved at the rate of a copy."""


def measure(case: Case, device: devices.Device) -> Iterator[dict[str, Any]]:
    """Rows of one case: for each provider its error, and its times if it is right."""
    least = floors(case, device)  # before any capture, which a provider may spoil
    for provider in case.providers:
        provider.poison()
        provider.run()
        found = provider.check()
        yield _row(case, provider.name, "max_abs_error", "1", [found.max_abs] * 3)
        yield _row(case, provider.name, "of_bound", "1", [found.bound_used] * 3)
        for name, value in provider.facts().items():
            yield _row(case, provider.name, name, "1", [value] * 3)
        if not found.ok:
            print(f"  not timed, since it is wrong: {provider.name}: {found}")
            continue
        if case.memory:
            yield _row(case, provider.name, "extra_memory", "MiB", [extra_memory(provider.run, device)] * 3)
        timers: dict[str, Callable[..., list[float]]] = {"time": cuda_times} if device.is_cuda else {"time": host_times}
        if device.is_cuda and case.graph:
            timers["time_in_graph"] = graph_times
        for metric, timer in timers.items():
            try:
                yield _row(case, provider.name, metric, "us", timer(provider.run))
            except RuntimeError as error:
                if metric != "time_in_graph":
                    raise
                print(f"  cannot be captured in a graph: {provider.name}: {str(error).splitlines()[0]}")
    for name, microseconds in least.items():
        yield _row(case, name, "time", "us", [microseconds] * 3)


def _row(case: Case, provider: str, metric: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    keys = (
        "kernel_name",
        "kernel_provider",
        "kernel_operation_mode",
        "metric_name",
        "metric_unit",
        "x_name",
        "x_value",
    )
    row: dict[str, Any] = dict(
        zip(keys, (case.kernel, provider, case.mode, metric, unit, case.x_name, case.x_value), strict=True)
    )
    row.update(zip(("y_value_50", "y_value_20", "y_value_80"), (f"{v:.6g}" for v in values), strict=True))
    return row


def extra_memory(run: Callable[[], Any], device: devices.Device) -> float:
    """MiB that one call takes at its peak beyond what was there before: of the GPU, or of this process (Linux)."""
    if device.is_cuda:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    resident = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - resident) / 1024


def _resident(field: str) -> float:
    """KiB, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def cuda_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of one call as made from Python, by events, the L2 cache flushed before each."""
    from triton.testing import do_bench

    return [1e3 * t for t in do_bench(run, warmup=25, rep=200, quantiles=list(QUANTILES))]


def graph_times(run: Callable[[], None], calls: int = 20, replays: int = 50) -> list[float]:
    """Microseconds of one call inside a CUDA graph of at most `calls` of them, caches warm: the device's own time.

    A call that takes milliseconds fills a graph by itself, and is replayed less often.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    once = time.perf_counter()
    run()
    torch.cuda.synchronize()
    took = 1e6 * (time.perf_counter() - once)
    calls = max(1, min(calls, int(4e3 / took)))
    replays = max(7, min(replays, int(5e5 / (took * calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            run()
    times = []
    for _ in range(3):
        graph.replay()
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return _quantiles(times)


def host_times(run: Callable[[], None], seconds: float = 1.0) -> list[float]:
    """Microseconds of one call on the CPU, after a warm-up, for about `seconds`."""
    run()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < stop:
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin))
    return _quantiles(times)


def _quantiles(times: Sequence[float]) -> list[float]:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return [cuts[4], cuts[1], cuts[7]]


def floors(case: Case, device: devices.Device) -> dict[str, float]:
    """Microseconds that a case takes at the least when its operands come from memory.

    Bytes at the measured copy rate, and operations at peak float32: multiprocessors x 128 fused multiply-adds x the
    highest clock (the CUDA programming guide's figure for compute capability 9.0; no floor on a GPU of another). A
    small case whose operands stay in the L2 cache from call to call, as in a graph, may beat the first; TF32 beats the
    second. Empty on a CPU, where neither is known.
    """
    if not device.is_cuda:
        return {}
    traffic = {"traffic floor": case.bytes, **case.floors}
    found = {name: 1e6 * count / copy_rate() for name, count in traffic.items()}
    peak = _peak_float32() if case.operations else None
    return found | ({"arithmetic floor, fp32": 1e6 * case.operations / peak} if peak else {})


_rates: dict[str, float] = {}


def copy_rate(size: int = 1 << 31) -> float:
    """Bytes a second that a large device-to-device copy moves, read and written, measured once in this process."""
    if "copy" not in _rates:
        import torch

        source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        _rates["copy"] = 2.0 * size / (1e-6 * cuda_times(lambda: target.copy_(source))[0])
    return _rates["copy"]


def _peak_float32() -> float | None:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (properties.major, properties.minor) != (9, 0):
        return None  # the lanes of other generations are not entered here, so no floor is claimed
    return properties.multi_processor_count * 128 * 2 * 1e3 * float(properties.clock_rate)


def bench(name: str, request: str, out: Path) -> Path:
    """Measure every case of kernels.`name`.bench and write OUT/<name>.csv (on a CPU OUT/<name>_cpu.csv).

    `name` is a folder under kernels/, which may lie deeper: `mhc/reductions` writes reductions.csv.
    """
    if not (ROOT / "kernels" / name / "bench.py").exists():
        raise UsageError(f"NAME: kernels/{name} has no bench.py; wanted a folder under kernels/ that has one")
    device = devices.choose(request)
    cases: Iterable[Case] = import_module(f"kernels.{name.replace('/', '.')}.bench").cases(device)
    common = {
        "gpu_name": device.name,
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        "version": " ".join(f"{key}-{value}" for key, value in versions().items()),
        "kernels_hash": hash_folder(ROOT / "kernels" / name),
    }
    rows = []
    for case in cases:
        found = [row | common for row in measure(case, device)]
        print(table(found), flush=True)
        rows += found
    stem = Path(name).name
    path = out / (f"{stem}.csv" if device.is_cuda else f"{stem}_cpu.csv")
    out.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
    return path


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a benchmark's CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians of one or more cases: a row a provider, a column a metric."""
    metrics = list(dict.fromkeys(f"{row['metric_name']} ({row['metric_unit']})" for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = (str(row["x_value"]), str(row["kernel_provider"]))
        cells.setdefault(key, {})[f"{row['metric_name']} ({row['metric_unit']})"] = f"{float(row['y_value_50']):.4g}"
    names = [str(rows[0]["x_name"]), "provider", *metrics] if rows else ["provider"]
    return Table(names, [(*key, *(found.get(metric, "") for metric in metrics)) for key, found in cells.items()])
