"""How often correct programs are flagged, sampled at random by the thousand, and how small a fault is found; a
record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scipy.stats import binom

from labkit.session.catalogue import ROOT
from whywrong.checking.localise import TRACE_FALSE_POSITIVES

RECORD = ROOT / "data" / "results" / "right_programs.json"
STATED = TRACE_FALSE_POSITIVES
"""The rate of false positives that whywrong.localise states, a run."""


def read_record() -> dict[str, Any]:
    """What `tools/correct_programs.py` measured last in its long form."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def flagged(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For float32, float16 and bfloat16 storage: `count` flagged `of` correct programs, and the 95% `interval`."""
    rates = record["accused by"]["storage"]
    return {storage: rates[storage] for storage in ("float32", "float16", "bfloat16")}


def by_chance(record: Mapping[str, Any]) -> float:
    """The p-value of the difference between the storage types flagged most and least, two-sided and conditional."""
    rates = sorted(flagged(record).values(), key=lambda rate: rate["count"] / rate["of"])
    least, most = rates[0], rates[-1]
    total = least["count"] + most["count"]
    share = most["of"] / (least["of"] + most["of"])
    return min(1.0, 2.0 * float(binom.sf(most["count"] - 1, total, share)))


def identified(record: Mapping[str, Any]) -> dict[str, dict[float, float]]:
    """For each storage the share of faults at their step, by the fault's size in roundings of the storage type."""
    by_storage = {}
    for storage in flagged(record):
        sizes = {name: both["right first step"] for name, both in record["power"][storage].items()}
        shares = {float(name.split()[0]): s["count"] / s["of"] for name, s in sizes.items() if "roundings" in name}
        by_storage[storage] = dict(sorted(shares.items()))
    return by_storage
