"""Every fault, whole and at graded strengths, and every clean difference, at every size before every judge.

A strength says how large a fault is beside the noise that rounding makes. An observer who knows the fault's shape and
tests for it alone adds up d = |change / sigma|, the norm over all elements of the change in units of each element's
noise, and sees the fault in half of all cases, at one false alarm in a thousand, where d is SMALLEST. A fault of
strength m has d = m SMALLEST. Nobody sees every fault of strength 1, since its shape is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from kernels.compare.clean import CLEAN, FP32, Difference
from kernels.compare.faulty import FAULTS, Fault
from kernels.compare.judges import OURS, SCORES, graded, verdict
from kernels.compare.systems import SIZES, SYSTEMS, Size, Tensor, golden, inputs, run
from labkit import Golden, Precision, Table, Trace, localise
from labkit.trace.localise import few_threads

SMALLEST = NormalDist().inv_cdf(1.0 - 1e-3 / 2.0)
"""3.29: what d has to be for a test of one known shape, two-sided, at a false-alarm rate of 1e-3."""

STRENGTHS = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Trial:
    """One case: ours name the first wrong step, the others give each step a number.

    `truth` is the step of the fault, None for a clean difference; `strength` that of a graded fault, None for a whole
    one; `shape` says whether it changes a few elements or many.
    """

    kind: str
    system: str
    size: Size
    truth: str | None
    strength: float | None
    shape: str
    said: dict[str, str | None]
    numbers: dict[str, dict[str, float]]

    def first(self, judge: str, threshold: float | None = None) -> str | None:
        """The first step that a judge calls wrong; `threshold` in place of the one in use."""
        if judge in self.said:
            return self.said[judge]
        return verdict(self.numbers[judge], SCORES[judge][1] if threshold is None else threshold)


JUDGES = (*OURS, *SCORES)

ALONE = {
    "elements": ("one Inf", None),
    "slope": ("1% scale", 4.8),
    "mean": ("a constant added", 3.0),
    "rows": ("dead row", 6.0),
    "columns": ("one column scaled", 4.8),
    "tiles": ("one tile of 64 rows scaled", 8.0),
    "rms": ("row taken from the row before", 8.0),
}
"""For the elementwise bound and each test of structure a fault, whole or of a strength at which no other sees it."""


def observed_fault(fault: Fault, x: dict[str, Tensor]) -> Trace:
    """The system in float32 with the fault planted, whole."""

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        return fault.change(value, steps) if name == fault.step else value

    return run(fault.system, x, at)


def noise(system: str, step: str, x: dict[str, Tensor]) -> Tensor:
    """The standard deviation of the error that a float32 step adds by itself to each element, from what it does here.

    That of storing the element, ulp / sqrt(12); and what the step's measured error has beyond that, alike for all.
    """
    observed = run(system, x)
    exact: dict[str, Tensor] = {}

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        exact[name] = value
        return observed[name].double()

    SYSTEMS[system](at, **{name: v.double() if v.is_floating_point() else v for name, v in x.items()})
    value = torch.where(exact[step].isfinite(), exact[step], 0.0)
    error = torch.where(exact[step].isfinite(), observed[step].double() - exact[step], 0.0)
    stored = torch.ldexp(torch.ones_like(value), value.frexp().exponent - 24).square() / 12.0
    return (stored + (error.square() - stored).mean().clamp(min=0.0)).sqrt()


def observed_graded(fault: Fault, x: dict[str, Tensor], strength: float) -> tuple[Trace, str] | None:
    """The same with its change scaled to a strength, and the change's shape in words.

    The change is added before the result is rounded, at random to one of its two neighbours, so that what is less than
    a unit in the last place is there on average. None for a fault that has no strength: one that is not finite, or that
    is smaller as a whole.
    """
    sigma = noise(fault.system, fault.step, x)
    shape: list[str] = []

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        if name != fault.step:
            return value
        right, change = value.double(), _changed(fault, value, steps)
        units = change / sigma
        size = float(units.norm())
        if not strength * SMALLEST < size < float("inf"):
            return value
        count = float(1.0 / (units / size).pow(4).sum())  # as many equal changes would spread as far
        shape.append(next(words for words, most in SHAPES.items() if count <= most * change.numel()))
        return _rounded(right + change * (strength * SMALLEST / size))

    trace = run(fault.system, x, at)
    return (trace, shape[0]) if shape else None


def _changed(fault: Fault, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
    """What a fault adds to its step where the right value is finite, float64."""
    right = value.double()
    return torch.where(right.isfinite(), fault.change(value, steps).double() - right, 0.0)


def whole_strengths(size: Size, seed: int, device: str) -> dict[str, float]:
    """The strength of each fault as it is planted whole; those without one, since they are not finite, are left out."""
    found = {fault.name: _whole_strength(fault, drawn(fault.system, size, seed, device)) for fault in FAULTS}
    return {name: strength for name, strength in found.items() if 0.0 < strength < float("inf")}


def _whole_strength(fault: Fault, x: dict[str, Tensor]) -> float:
    steps = run(fault.system, x)
    changed = _changed(fault, steps[fault.step], {step.name: step.value for step in steps})
    return float((changed / noise(fault.system, fault.step, x)).norm()) / SMALLEST


def _rounded(x: Tensor) -> Tensor:
    """float64 to float32, up or down with the probability that keeps the mean."""
    near = x.float()
    rest = x - near
    other = torch.nextafter(near, torch.where(rest > 0.0, torch.inf, -torch.inf).float())
    step = (other - near).double()
    taken = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    return torch.where(taken * step.abs() < rest.abs(), other, near)


SHAPES = {"in few elements (up to 1 in 100)": 0.01, "in a part (up to 1 in 10)": 0.1, "nearly everywhere": 1.0}
"""How much of a step a fault changes, at most, as a share of its elements."""


def observed_alone(instrument: str) -> tuple[Fault, dict[str, Tensor], Trace]:
    """The fault of ALONE that only this instrument sees, the inputs, and the run in which it is planted; on the CPU."""
    name, strength = ALONE[instrument]
    fault = next(fault for fault in FAULTS if fault.name == name)
    x = drawn(fault.system, SIZES[1], 0, "cpu")
    planted = (observed_fault(fault, x),) if strength is None else observed_graded(fault, x, strength)
    assert planted is not None, "the strengths of ALONE are below those of the whole faults"
    return fault, x, planted[0]


def alone() -> Table:
    """Each fault of ALONE, and which instruments report it at its step."""
    rows = []
    for instrument, (name, strength) in ALONE.items():
        fault, x, observed = observed_alone(instrument)
        found = localise(observed, golden(fault.system, x), FP32).findings[fault.step]
        assert found.own is not None
        tests = found.structure.tests if found.structure else ()  # not asked where elements are beyond their bound
        said = ["elements"] * (not found.own.ok) + [test.name for test in tests if not test.ok]
        rows.append((name, "whole" if strength is None else strength, found.own.bound_used, " and ".join(said)))
    return Table(("fault", "strength", "most of the elementwise bound used", "reported by"), rows)


def observed_clean(way: Difference, x: dict[str, Tensor]) -> Trace:
    """The system taken another right way."""

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        return way.ways[name](value, steps).to(value.dtype) if name in way.ways else value

    return run(way.system, x, at)


def trials(
    sizes: Sequence[Size], seeds: Sequence[int], device: str, strengths: Sequence[float] = STRENGTHS
) -> Iterator[Trial]:
    """Every whole fault and every clean difference at each size and seed; graded faults at the first size."""
    for size in sizes:
        for seed in seeds:
            for fault in FAULTS:
                x = drawn(fault.system, size, seed, device)
                reference = golden(fault.system, x)
                cases = [(None, observed_fault(fault, x), "")]
                for strength in strengths if size == sizes[0] else ():
                    planted = observed_graded(fault, x, strength)
                    cases += [(strength, *planted)] if planted else []
                for strength, observed, shape in cases:
                    said = _said(observed, reference, FP32)
                    yield Trial(fault.name, fault.system, size, fault.step, strength, shape, *said)
            for way in CLEAN:
                x = drawn(way.system, size, seed, device, way)
                said = _said(observed_clean(way, x), golden(way.system, x), way.promised)
                yield Trial(way.name, way.system, size, None, None, "", *said)


def drawn(system: str, size: Size, seed: int, device: str, way: Difference | None = None) -> dict[str, Tensor]:
    """Inputs of a system, scaled and moved as a clean difference has it."""
    generator = torch.Generator().manual_seed(seed)
    x = inputs(system, size, generator, way.dtype if way else torch.float32)
    if way:
        x = {n: (v.double() * way.scale + way.offset).to(v.dtype) if v.is_floating_point() else v for n, v in x.items()}
    return {name: v.to(device) for name, v in x.items()}


def _said(
    observed: Trace, reference: Golden, promised: Precision
) -> tuple[dict[str, str | None], dict[str, dict[str, float]]]:
    with few_threads(0):  # whatever the machine: the steps are small
        ours = {name: judge(observed, reference, promised) for name, judge in OURS.items()}
        return ours, graded(observed, reference, promised)


@dataclass(frozen=True)
class Score:
    """How a judge did: of faults found, of those at the right step, of clean cases called wrong."""

    found: int
    right_step: int
    faults: int
    false_alarms: int
    clean: int


def score(done: Sequence[Trial], judge: str, threshold: float | None = None) -> Score:
    """The score of one judge, at the threshold in use unless another is given."""
    faults = [(t.first(judge, threshold), t.truth) for t in done if t.truth is not None]
    clean = [t.first(judge, threshold) for t in done if t.truth is None]
    found, right = (sum(map(rule, faults)) for rule in (lambda f: f[0] is not None, lambda f: f[0] == f[1]))
    return Score(found, right, len(faults), sum(said is not None for said in clean), len(clean))


def tried(done: Sequence[Trial]) -> str:
    """How many sizes, and how many draws of each fault at each, in words."""
    whole = [(t.kind, t.size) for t in done if t.truth and t.strength is None]
    sizes, draws = len({size for _, size in whole}), len(whole) // len(set(whole))
    return f"{sizes} size{'s' * (sizes > 1)}, {draws} draw{'s' * (draws > 1)}"


def called_wrong(done: Sequence[Trial], judge: str) -> list[str]:
    """The clean differences that a judge calls wrong, by system and name, each once."""
    return sorted({f"{t.system}: {t.kind}" for t in done if t.truth is None and t.first(judge)})


def as_good(done: Sequence[Trial], judge: str) -> list[str]:
    """The checks in use that at some tolerance call no more clean runs wrong than a judge and name as many faults."""
    own = score(done, judge)
    wrong, named = own.false_alarms / own.clean, own.right_step / own.faults
    return [other for other in SCORES if any(x <= wrong and y >= named for x, y in roc(done, other))]


def score_table(done: Sequence[Trial]) -> Table:
    """A row a judge, at the tolerance in use: whole faults, graded ones, clean differences."""
    parts = {
        "whole faults, at their step": [t for t in done if t.truth and t.strength is None],
        "graded faults, at their step": [t for t in done if t.strength is not None],
    }
    rows = []
    for judge in JUDGES:
        found = [score(part, judge) for part in parts.values()]
        clean = score(done, judge)
        shares = [f"{one.right_step} of {one.faults}" for one in found]
        rows.append((judge, *shares, f"{clean.false_alarms} of {clean.clean}"))
    return Table(("judge", *parts, "clean called wrong"), rows)


def roc(done: Sequence[Trial], judge: str) -> list[tuple[float, float]]:
    """(share of clean cases called wrong, share of faults named at their step) over every tolerance that matters."""
    clean = sorted({max(t.numbers[judge].values()) for t in done if t.truth is None})
    found = [score(done, judge, threshold) for threshold in (-1.0, *clean)]
    return [(s.false_alarms / s.clean, s.right_step / s.faults) for s in found]


def detection(done: Sequence[Trial], judge: str, shape: str | None = None) -> list[tuple[float, float]]:
    """(strength, share of faults of that strength and shape that a judge names at their step), strengths that occur."""
    cases = [t for t in done if t.strength is not None and shape in (None, t.shape)]
    strengths = sorted({t.strength for t in cases if t.strength is not None})
    return [(m, _share(cases, m, lambda t: t.first(judge) == t.truth)) for m in strengths]


def _share(cases: Sequence[Trial], strength: float, holds: Callable[[Trial], bool]) -> float:
    there = [t for t in cases if t.strength == strength]
    return sum(map(holds, there)) / len(there)


def mistakes(done: Sequence[Trial]) -> Table:
    """Whole faults and clean differences that a judge gets wrong at the tolerance in use: a row a case, how often."""
    rows: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for t in (t for t in done if t.strength is None):
        row = rows.setdefault(("fault" if t.truth else "clean", t.system, t.kind), {judge: [0, 0] for judge in JUDGES})
        for judge, count in row.items():
            count[0] += t.first(judge) != t.truth
            count[1] += 1
    cells = [(*key, *(f"{n} of {total}" if n else "" for n, total in row.values())) for key, row in rows.items()]
    return Table(("", "system", "case", *JUDGES), [row for row in cells if any(row[3:])], title="cases judged wrongly")
