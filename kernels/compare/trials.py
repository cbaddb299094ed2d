"""Every fault and every clean difference at every size, before every judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.compare.clean import CLEAN, FP32, Difference
from kernels.compare.faulty import FAULTS, Fault
from kernels.compare.judges import JUDGES
from kernels.compare.systems import Size, Tensor, golden, inputs, run
from labkit import Precision, Table, Trace


@dataclass(frozen=True)
class Trial:
    """One case, and the first wrong step that each judge names (None: nothing wrong)."""

    kind: str
    system: str
    size: Size
    truth: str | None
    said: dict[str, str | None]


def observed_fault(fault: Fault, x: dict[str, Tensor]) -> Trace:
    """The system in float32 with the fault planted."""

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        return fault.change(value, steps) if name == fault.step else value

    return run(fault.system, x, at)


def observed_clean(way: Difference, x: dict[str, Tensor]) -> Trace:
    """The system taken another right way."""

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        return way.ways[name](value, steps).to(value.dtype) if name in way.ways else value

    return run(way.system, x, at)


def trials(sizes: Sequence[Size], seeds: Sequence[int], device: str) -> Iterator[Trial]:
    """Every fault, then every clean difference, at each size and seed; kernels run on `device`."""
    for size in sizes:
        for seed in seeds:
            for fault in FAULTS:
                x = _drawn(fault.system, size, seed, device)
                yield _trial(fault.name, fault.system, size, fault.step, observed_fault(fault, x), x, FP32)
            for way in CLEAN:
                x = _drawn(way.system, size, seed, device, way)
                yield _trial(way.name, way.system, size, None, observed_clean(way, x), x, way.promised)


def _drawn(system: str, size: Size, seed: int, device: str, way: Difference | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = inputs(system, size, generator, way.dtype if way else torch.float32)
    if way:
        x = {n: (v.double() * way.scale + way.offset).to(v.dtype) if v.is_floating_point() else v for n, v in x.items()}
    return {name: v.to(device) for name, v in x.items()}


def _trial(
    kind: str, system: str, size: Size, truth: str | None, observed: Trace, x: dict[str, Tensor], promised: Precision
) -> Trial:
    reference = golden(system, x)
    said = {name: judge(observed, reference, promised) for name, judge in JUDGES.items()}
    return Trial(kind, system, size, truth, said)


@dataclass(frozen=True)
class Score:
    """How a judge did: of the faults found, of those at the right step, of the clean ones called wrong."""

    found: int
    right_step: int
    faults: int
    false_alarms: int
    clean: int


def scores(done: Sequence[Trial]) -> dict[str, Score]:
    """A score a judge."""
    faults = [t for t in done if t.truth is not None]
    clean = [t for t in done if t.truth is None]
    return {
        name: Score(
            sum(t.said[name] is not None for t in faults),
            sum(t.said[name] == t.truth for t in faults),
            len(faults),
            sum(t.said[name] is not None for t in clean),
            len(clean),
        )
        for name in JUDGES
    }


def score_table(found: dict[str, Score]) -> Table:
    """A row a judge."""
    rows = [
        (name, f"{s.found / s.faults:.0%}", f"{s.right_step / s.faults:.0%}", f"{s.false_alarms / s.clean:.0%}")
        for name, s in found.items()
    ]
    return Table(("judge", "faults found", "at the right step", "clean called wrong"), rows)


def hard_cases(done: Sequence[Trial], judge: str) -> Table:
    """What a judge got wrong: a row a kind, with how often."""
    missed: dict[tuple[str, str, str], int] = {}
    for t in done:
        if t.truth is not None and t.said[judge] is None:
            missed[t.system, t.kind, "missed"] = missed.get((t.system, t.kind, "missed"), 0) + 1
        elif t.truth is None and t.said[judge] is not None:
            key = (t.system, t.kind, "called wrong")
            missed[key] = missed.get(key, 0) + 1
    return Table(("system", "case", "verdict", "times"), [(*key, count) for key, count in missed.items()])


def disagreements(done: Sequence[Trial]) -> Table:
    """A row a kind: how many of its cases each judge missed or called wrong; kinds that all get right are left out."""
    kinds: dict[tuple[str, str, str], dict[str, int]] = {}
    totals: dict[tuple[str, str, str], int] = {}
    for t in done:
        key = ("fault" if t.truth else "clean", t.system, t.kind)
        row = kinds.setdefault(key, dict.fromkeys(JUDGES, 0))
        totals[key] = totals.get(key, 0) + 1
        for name, said in t.said.items():
            row[name] += (said is None) == (t.truth is not None)
    rows = [
        (*key, *(f"{n} of {totals[key]}" if n else "" for n in row.values()))
        for key, row in kinds.items()
        if any(row.values())
    ]
    return Table(("", "system", "case", *JUDGES), rows, title="cases judged wrongly")
