"""Tables of the notebook: counts on both devices, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import whywrong
from kernels.tinyllm import faulty
from kernels.tinyllm.tinyllm import Config
from labkit.session.record import Record

Counts = Mapping[str, Mapping[str, Any]]


def counts_beside(here: Counts, device: str, other: Record | None) -> whywrong.Table:
    """How all sets end in each kind of memory, each counted once: in this run, and in another device's record.

    `here` as :func:`kernels.tinyllm.fault_sets.counts_by_memory` gives it.
    """
    there = other.result["metrics"]["facts"]["memory"] if other else {}
    rows = [
        (memory, what, here_counts[what], there_counts.get(what, "not recorded"))
        for memory in here
        for here_counts, there_counts in [(_in_words(here[memory]), _in_words(there.get(memory)))]
        for what in here_counts
    ]
    where = other.where if other else "no other device"
    return whywrong.Table(("fresh memory", "how the sets end", device, where), rows)


def _in_words(counts: Mapping[str, Any] | None) -> dict[str, Any]:
    if not counts:
        return {}
    zero, has_suspected_line, cured = counts["zero"]
    return {
        "right": counts["right"],
        "stopped": sum(counts["ends"].get(faulty.ENDS[status], 0) for status in faulty.STOPS),
        "wrong": counts["ends"][faulty.ENDS[faulty.FINISHED]] - counts["right"] - zero,
        "otherwise when run again": counts["ends"].get(faulty.ENDS[faulty.UNSTEADY], 0),
        "logits all 0 (with the suspected line; cured)": f"{zero} ({has_suspected_line}; {cured})",
    }


def speeds(times: Sequence[Mapping[str, str]]) -> whywrong.Table:
    """The benchmark's file: what, provider, time, rate, and how many times the first baseline's rate that is."""
    taken = {
        (row["kernel_operation_mode"], row["kernel_provider"]): float(row["y_value_50"])
        for row in times
        if row["metric_name"] == "time" and not row["kernel_provider"].startswith("traffic")
    }
    tokens = Config().sequences * Config().context
    rows = []
    for (mode, provider), us in taken.items():
        step = "step" in mode
        rate = f"{tokens / us:.2f} million tokens/s" if step else f"{2**28 / us / 1e3:.1f} GB/s"
        rows.append((mode, provider, us / 1e3, rate, taken[mode, "torch eager" if step else "torch, pinned"] / us))
    return whywrong.Table(("what", "provider", "ms", "rate", "times the first baseline's rate"), rows)
