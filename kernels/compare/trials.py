"""Every fault, whole and scaled down, and every clean difference, at every size, before whywrong.localise and the
checks.

A strength says how large a fault is beside the noise that rounding makes. An observer who knows the fault's shape and
tests for it alone adds up d = |change / sigma|, the norm over all elements of the change in units of each element's
noise, and sees the fault in half of all cases, at one false positive in a thousand, where d is SMALLEST. A fault of
strength m has d = m SMALLEST. Nobody sees every fault of strength 1, since its shape is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from scipy.stats import binomtest

from kernels.compare.checks import (
    CHECKS,
    LABKIT,
    REFERENCES,
    RERUN,
    STORED,
    differences,
    first_above,
    first_wrong,
    rerun,
)
from kernels.compare.clean import CLEAN, FP32, Difference
from kernels.compare.faulty import FAULTS, Fault
from kernels.compare.systems import SIZES, SYSTEMS, Size, Tensor, golden, inputs, run
from whywrong import Golden, Precision, Table, Trace, localise
from whywrong.checking.localise import few_threads

SMALLEST = NormalDist().inv_cdf(1.0 - 1e-3 / 2.0)
"""3.29: what d has to be for a test of one known shape, two-sided, at a false-alarm rate of 1e-3."""

STRENGTHS = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Trial:
    """One case. whywrong.localise reports the first wrong step, the checks give each step a number.

    `truth` is the step of the fault, None for a clean difference; `strength` that of a fault which is scaled down, None
    for a whole one; `shape` says whether it changes a few elements or many. What labkit reports, `localised`, and the
    `numbers` of the checks are by reference: stored, or re-run.
    """

    kind: str
    system: str
    size: Size
    truth: str | None
    strength: float | None
    shape: str
    localised: dict[str, str | None]
    numbers: dict[str, dict[str, dict[str, float]]]

    def first(self, check: str, reference: str = RERUN, threshold: float | None = None) -> str | None:
        """The first step that labkit or a check flags; `threshold` in place of the one in use."""
        if check == LABKIT:
            return self.localised[reference]
        return first_above(self.numbers[reference][check], CHECKS[check][1] if threshold is None else threshold)


ALL_CHECKS = (LABKIT, *CHECKS)

FAULT_FOR = {
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


def rounding_noise(system: str, step: str, x: dict[str, Tensor]) -> Tensor:
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


def observed_scaled(fault: Fault, x: dict[str, Tensor], strength: float) -> tuple[Trace, str] | None:
    """The same with its change scaled to a strength, and the change's shape in words.

    The change is added before the result is rounded, at random to one of its two neighbours, so that what is less than
    a unit in the last place is there on average. None for a fault that has no strength: one that is not finite, or that
    is smaller as a whole.
    """
    sigma = rounding_noise(fault.system, fault.step, x)
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
    strengths = {
        fault.name: _whole_strength(fault, sample_inputs(fault.system, size, seed, device)) for fault in FAULTS
    }
    return {name: strength for name, strength in strengths.items() if 0.0 < strength < float("inf")}


def _whole_strength(fault: Fault, x: dict[str, Tensor]) -> float:
    steps = run(fault.system, x)
    changed = _changed(fault, steps[fault.step], {step.name: step.value for step in steps})
    return float((changed / rounding_noise(fault.system, fault.step, x)).norm()) / SMALLEST


def _rounded(x: Tensor) -> Tensor:
    """float64 to float32, up or down with the probability that keeps the mean."""
    near = x.float()
    rest = x - near
    other = torch.nextafter(near, torch.where(rest > 0.0, torch.inf, -torch.inf).float())
    step = (other - near).double()
    taken = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    return torch.where(taken * step.abs() < rest.abs(), other, near)


SHAPES = {"in few elements (up to 1%)": 0.01, "in a part (up to 10%)": 0.1, "nearly everywhere": 1.0}
"""How much of a step a fault changes, at most, as a share of its elements."""


def observed_for(instrument: str) -> tuple[Fault, dict[str, Tensor], Trace]:
    """The fault that only this instrument sees, the inputs, and the run in which it is planted; on the CPU."""
    name, strength = FAULT_FOR[instrument]
    fault = next(fault for fault in FAULTS if fault.name == name)
    x = sample_inputs(fault.system, SIZES[1], 0, "cpu")
    planted = (observed_fault(fault, x),) if strength is None else observed_scaled(fault, x, strength)
    assert planted is not None, "the strengths of FAULT_FOR are below those of the whole faults"
    return fault, x, planted[0]


def faults_by_instrument() -> Table:
    """Each fault of FAULT_FOR, and which instruments report it at its step."""
    rows = []
    for instrument, (name, strength) in FAULT_FOR.items():
        fault, x, observed = observed_for(instrument)
        finding = localise(observed, golden(fault.system, x), precision=FP32).findings[fault.step]
        assert finding.own is not None
        tests = finding.structure.tests if finding.structure else ()  # not asked where elements are beyond their bound
        reported_by = ["elements"] * (not finding.own.ok) + [test.name for test in tests if not test.ok]
        rows.append(
            (name, "whole" if strength is None else strength, finding.own.bound_used, " and ".join(reported_by))
        )
    return Table(("fault", "strength", "largest error / tolerance", "reported by"), rows)


def observed_clean(way: Difference, x: dict[str, Tensor]) -> Trace:
    """The system taken another right way."""

    def at(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
        return way.ways[name](value, steps).to(value.dtype) if name in way.ways else value

    return run(way.system, x, at)


def trials(
    sizes: Sequence[Size], seeds: Sequence[int], device: str, strengths: Sequence[float] = STRENGTHS
) -> Iterator[Trial]:
    """Every whole fault and every clean difference at each size and seed; faults scaled down at the first size.

    The systems run on `device`. They are checked on the CPU, where steps of this size take a fraction of the time.
    """
    for size in sizes:
        for seed in seeds:
            for fault in FAULTS:
                x = sample_inputs(fault.system, size, seed, device)
                reference = golden(fault.system, sample_inputs(fault.system, size, seed, "cpu"))
                cases = [(None, observed_fault(fault, x), "")]
                for strength in strengths if size == sizes[0] else ():
                    planted = observed_scaled(fault, x, strength)
                    cases += [(strength, *planted)] if planted else []
                for strength, observed, shape in cases:
                    checked = _checked(observed, reference, FP32)
                    yield Trial(fault.name, fault.system, size, fault.step, strength, shape, *checked)
            for way in CLEAN:
                x = sample_inputs(way.system, size, seed, device, way)
                reference = golden(way.system, sample_inputs(way.system, size, seed, "cpu", way))
                checked = _checked(observed_clean(way, x), reference, way.declared)
                yield Trial(way.name, way.system, size, None, None, "", *checked)


def sample_inputs(system: str, size: Size, seed: int, device: str, way: Difference | None = None) -> dict[str, Tensor]:
    """Inputs of a system, scaled and moved as a clean difference has it."""
    generator = torch.Generator().manual_seed(seed)
    x = inputs(system, size, generator, way.dtype if way else torch.float32)
    if way:
        x = {n: (v.double() * way.scale + way.offset).to(v.dtype) if v.is_floating_point() else v for n, v in x.items()}
    return {name: v.to(device) for name, v in x.items()}


def _checked(
    observed: Trace, reference: Golden, declared: Precision
) -> tuple[dict[str, str | None], dict[str, dict[str, dict[str, float]]]]:
    """What labkit reports and the numbers of the checks, each against both references."""
    observed = Trace({name: observed[name].cpu() for name in observed.names})
    with few_threads(0):  # whatever the machine: the steps are small
        localised = {which: first_wrong(observed, reference, declared, which) for which in REFERENCES}
        again = rerun(reference, observed)
        values = {STORED: {name: reference[name] for name in again}, RERUN: again}
        return localised, {which: differences(observed, values[which], declared) for which in REFERENCES}


def counted(cases: Iterable[Any], every: int = 10) -> list[Any]:
    """All cases as a list; below the notebook's cell stands meanwhile how many there are so far."""
    from IPython.display import display

    def shown() -> dict[str, str]:
        return {"text/plain": f"{len(done)} cases"}

    done: list[Any] = []
    line = display(shown(), raw=True, display_id=True)
    for case in cases:
        done.append(case)
        if line is not None and len(done) % every == 0:
            line.update(shown(), raw=True)
    if line is not None:
        line.update(shown(), raw=True)
    return done


@dataclass(frozen=True)
class Score:
    """Of `faults`, how many were reported at some step and at the right one; of `clean` runs, how many were flagged."""

    reported: int
    right_step: int
    faults: int
    flagged: int
    clean: int


def score(done: Sequence[Trial], check: str, reference: str = RERUN, threshold: float | None = None) -> Score:
    """The score of labkit or of a check, at the threshold in use unless another is given."""
    faults = [(t.first(check, reference, threshold), t.truth) for t in done if t.truth is not None]
    clean = [t.first(check, reference, threshold) for t in done if t.truth is None]
    reported = sum(first is not None for first, _ in faults)
    right_step = sum(first == truth for first, truth in faults)
    return Score(reported, right_step, len(faults), sum(first is not None for first in clean), len(clean))


def at_full_strength(done: Sequence[Trial]) -> list[Trial]:
    """The trials of whole faults and of clean differences."""
    return [t for t in done if t.strength is None]


def sizes_and_draws(done: Sequence[Trial]) -> tuple[int, int]:
    """How many sizes, and how many draws of each fault at each."""
    tried = [(t.kind, t.size) for t in done if t.truth and t.strength is None]
    return len({size for _, size in tried}), len(tried) // len(set(tried))


def flagged(done: Sequence[Trial], check: str, reference: str = RERUN) -> list[str]:
    """The clean differences that labkit or a check flags, by system and name, each once."""
    return sorted({f"{t.system}: {t.kind}" for t in done if t.truth is None and t.first(check, reference)})


def score_table(done: Sequence[Trial]) -> Table:
    """A row a check, at the tolerance in use: faults identified and correct runs flagged, by reference."""
    parts = {
        "whole faults": at_full_strength(done),
        "faults scaled down": [t for t in done if t.strength is not None],
    }
    rows = []
    for check in ALL_CHECKS:
        row = [check]
        for part in parts.values():
            row += [f"{s.right_step} of {s.faults}" for s in (score(part, check, which) for which in REFERENCES)]
        row += [
            f"{s.flagged} of {s.clean}" for s in (score(at_full_strength(done), check, which) for which in REFERENCES)
        ]
        rows.append(row)
    names = [f"{what}, {which}" for what in (*parts, "correct runs flagged") for which in REFERENCES]
    return Table(("check", *names), rows)


def roc(done: Sequence[Trial], check: str, reference: str = RERUN) -> list[tuple[float, float]]:
    """(share of clean runs flagged, share of faults identified at their step) over every tolerance that matters.

    From the smallest tolerance to the largest; the last flags no clean run.
    """
    clean = sorted({max(t.numbers[reference][check].values()) for t in done if t.truth is None})
    scores = [score(done, check, reference, threshold) for threshold in (-1.0, *clean)]
    return [(s.flagged / s.clean, s.right_step / s.faults) for s in scores]


def without_false_positives(done: Sequence[Trial], reference: str) -> dict[str, float | None]:
    """The share of faults that each identifies at the smallest tolerance at which it flags no clean run.

    labkit has no tolerance to choose: its share is as it is, and None if it flags a clean run.
    """
    own = score(done, LABKIT, reference)
    shares = {LABKIT: None if own.flagged else own.right_step / own.faults}
    return shares | {check: roc(done, check, reference)[-1][1] for check in CHECKS}


def as_good_as_labkit(done: Sequence[Trial]) -> list[str]:
    """The checks that at some tolerance flag no more clean runs than labkit and identify as many faults.

    labkit has the re-run reference, and so has the check, or the stored one.
    """
    own = score(done, LABKIT)
    positives, identified = own.flagged / own.clean, own.right_step / own.faults

    def reached(check: str, reference: str) -> bool:
        return any(x <= positives and y >= identified for x, y in roc(done, check, reference))

    return [f"{check}, {which}" for which in REFERENCES for check in CHECKS if reached(check, which)]


def detection(
    done: Sequence[Trial], check: str, reference: str = RERUN, shape: str | None = None
) -> list[tuple[float, float]]:
    """(strength, share of faults of that strength and shape identified at their step), strengths that occur."""
    cases = [t for t in done if t.strength is not None and shape in (None, t.shape)]
    strengths = sorted({t.strength for t in cases if t.strength is not None})
    return [(m, _share(cases, m, lambda t: t.first(check, reference) == t.truth)) for m in strengths]


def interval_by_fault(cases: Sequence[Trial], check: str, reference: str = RERUN) -> tuple[float, float]:
    """The 95% interval of the share identified, over faults (Clopper and Pearson).

    Cases of one fault, at other sizes or on other samples, are not independent: together they count as one.
    """
    faults = {(t.system, t.kind) for t in cases}
    if not faults:
        return 0.0, 1.0
    share = sum(t.first(check, reference) == t.truth for t in cases) / len(cases)
    found = binomtest(round(share * len(faults)), len(faults)).proportion_ci(0.95)
    return float(found.low), float(found.high)


def lamps(
    change: Callable[[Tensor, dict[str, Tensor]], Tensor], step: str, strengths: Sequence[float], seed: int = 0
) -> dict[float, dict[str, bool]]:
    """For each strength at which `change` of that step of the attention can be put in: which checks flag it first.

    Strength 0 is the correct run: a check that flags the step there flags it whatever is wrong.

    `change` gets the right value of the step and the steps before it, by name, and gives the wrong one.
    """
    fault = Fault("yours", "attention", step, change)
    x = sample_inputs("attention", SIZES[0], seed, "cpu")
    reference, lit = golden("attention", x), {}
    correct = Trial("", "", SIZES[0], None, 0.0, "", *_checked(run("attention", x), reference, FP32))
    lit[0.0] = {check: correct.first(check) == step for check in ALL_CHECKS}
    for strength in strengths:
        if planted := observed_scaled(fault, x, strength):
            case = Trial("", "", SIZES[0], step, strength, planted[1], *_checked(planted[0], reference, FP32))
            lit[strength] = {check: case.first(check) == step for check in ALL_CHECKS}
    return lit


def _share(cases: Sequence[Trial], strength: float, holds: Callable[[Trial], bool]) -> float:
    there = [t for t in cases if t.strength == strength]
    return sum(map(holds, there)) / len(there)


def mistakes(done: Sequence[Trial], reference: str = RERUN) -> Table:
    """Whole faults and clean differences that are checked wrongly at the tolerance in use: a row a case, how often."""
    rows: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for t in at_full_strength(done):
        row = rows.setdefault(
            ("fault" if t.truth else "clean", t.system, t.kind), {check: [0, 0] for check in ALL_CHECKS}
        )
        for check, count in row.items():
            count[0] += t.first(check, reference) != t.truth
            count[1] += 1
    cells = [(*key, *(f"{n} of {total}" if n else "" for n, total in row.values())) for key, row in rows.items()]
    title = f"cases checked wrongly, reference {reference}"
    return Table(("", "system", "case", *ALL_CHECKS), [row for row in cells if any(row[3:])], title=title)
