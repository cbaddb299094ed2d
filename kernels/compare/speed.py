"""How long a comparison takes on a GPU, measured now, and what every recorded benchmark gave."""

from __future__ import annotations

import csv
from dataclasses import dataclass

import torch

from kernels.compare.bench import ALLOWED, assert_close, kernels_alone, read
from labkit.bench import cuda_times, extra_memory
from labkit.session.catalogue import ROOT
from labkit.session.device import Device
from whywrong import Table
from whywrong.comparing.comparison import compare

RECORDS = ROOT / "data" / "results" / "compare_hosts.csv"
"""The first case of every record of `labkit bench compare`, none left out: us of a pair of 1 GiB each."""


@dataclass(frozen=True)
class Speed:
    """Microseconds of a whole call, of labkit's kernels alone, of a read; and GiB beside the pair."""

    labkit: float
    kernels: float
    assert_close: float
    read: float
    labkit_memory: float
    assert_close_memory: float
    """Of its default call, with relative and absolute tolerance."""


def measure_speed(device: Device) -> Speed:
    """A pair of float32 of 1 GiB each, on a GPU."""
    golden = torch.randn(1 << 28, device=device.kind)
    observed = golden * (1.0 + 1e-7)
    calls = {
        "labkit": lambda: compare(observed, golden, bound=ALLOWED),
        "kernels": lambda: kernels_alone(observed, golden),
        "assert_close": lambda: assert_close(observed, golden),
        "read": lambda: read(observed, golden),
    }
    times = {name: cuda_times(call)[0] for name, call in calls.items()}
    calls["assert_close"] = lambda: torch.testing.assert_close(observed, golden)
    memory = {name: extra_memory(calls[name], device) / 1024 for name in ("labkit", "assert_close")}
    return Speed(**times, labkit_memory=memory["labkit"], assert_close_memory=memory["assert_close"])


def records() -> list[dict[str, str]]:
    """A row a record of the benchmark: date, GPU, us of each provider."""
    with RECORDS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name.replace("labkit.compare", "whywrong.compare"): value for name, value in row.items()} for row in rows]


def recorded_ratios() -> list[float]:
    """How many times as fast as assert_close a whole call of whywrong.compare was, in every record."""
    return [float(row["torch.testing.assert_close"]) / float(row["ours: whywrong.compare"]) for row in records()]


def records_table() -> Table:
    """Every record: a whole call depends on its host, the kernels do not."""
    rows = records()
    names = list(rows[0])
    return Table(names, [[row[name] for name in names] for row in rows], title="us, a pair of 1 GiB each, every record")
