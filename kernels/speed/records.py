"""Every benchmark on record: the times of our kernels, of the baselines, and the lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit import bench
from labkit.session.catalogue import ROOT
from whywrong import Table

NAMES = {
    "attention": "Q K^T and attention",
    "bert": "BERT's embedding",
    "training_step": "a training step of BERT",
    "lm": "a training step of the language model",
    "mhc": "hyper-connections, forward and backward",
    "reductions": "a sum over 2^20 to 2^26 numbers",
    "tinyllm": "TinyLLM: a training step, copies",
    "compare": "comparison of two tensors",
}
"""The benchmarks under data/benchmarks that were recorded on a GPU, and what each times."""
BOUND = "lower bound"


@dataclass
class Case:
    """One size of one benchmark: microseconds by provider, the largest lower bound, and errors by the tolerance."""

    benchmark: str
    kernel: str
    size: str
    row: dict[str, str]
    """Its first row, which says card and date."""
    ours: dict[str, float] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    bound: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def slower_by(self) -> float:
        """The fastest of ours over the fastest baseline: below 1 where ours is faster."""
        return min(self.ours.values()) / min(self.others.values())


OURS = ("ours", "kernels.", "atomic_add", "two-stage", "flagged", "Kahan", "pairwise", "float64")
"""How the names of our kernels begin; what has another name is others'."""
YARDSTICKS = ("read both", "ours, kernels only")
"""What is timed beside them, and computes something else or no more than a part of a call."""


def cases(name: str) -> list[Case]:
    """The cases of one benchmark that have a time of ours and one of a baseline; in a CUDA graph where it has any.

    A time is the median, in microseconds. TF32 products are a case of their own.
    """
    rows = bench.read(ROOT / "data" / "benchmarks" / f"{name}.csv")
    found: dict[tuple[str, ...], Case] = {}
    in_graph = {bench.case_of(row) for row in rows if row["metric_name"] == "time_in_graph"}
    for row in rows:
        provider, value = row["kernel_provider"], float(row["y_value_50"])
        tf32 = ", TF32" if provider.endswith(", TF32") else ""
        case = found.setdefault((*bench.case_of(row), tf32), Case(
            name, row["kernel_name"], f"{row['x_value']}{mode(row)}{tf32}", row
        ))  # fmt: skip
        if BOUND in provider:
            case.bound = max(case.bound, value)
        elif row["metric_name"] == "of_bound":
            case.errors[provider] = value
        elif provider in YARDSTICKS:
            continue
        elif row["metric_name"] == ("time_in_graph" if bench.case_of(row) in in_graph else "time"):
            (case.ours if provider.startswith(OURS) else case.others)[provider] = value
    return [case for case in found.values() if case.ours and case.others]


def mode(row: dict[str, str]) -> str:
    """The mode of a row, to be said behind its size; nothing for a forward pass."""
    return "" if row["kernel_operation_mode"] == "forward" else f", {row['kernel_operation_mode']}"


def table(all_cases: Sequence[Case]) -> Table:
    """A row a benchmark: cards and dates, cases, and how often ours is the fastest."""
    rows = []
    for name, words in NAMES.items():
        some = [case for case in all_cases if case.benchmark == name]
        if some:
            faster = sum(case.slower_by < 1.0 for case in some)
            worst, best = max(case.slower_by for case in some), min(case.slower_by for case in some)
            where = bench.recorded_on([case.row for case in some])
            rows.append((words, where, f"{faster} of {len(some)}", f"{best:.2f} to {worst:.2f}"))
    columns = ("benchmark", "recorded on", "ours is fastest in", "time of ours over the fastest baseline's")
    return Table(columns, rows)
