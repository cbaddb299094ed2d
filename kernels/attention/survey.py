"""Every plausible call at given sizes: what BLAS does with it, and how large its largest differences are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from kernels.attention import faulty, golden
from kernels.attention.arena import Layout
from kernels.attention.blas import Gemm, GemmRejectedError, blas_for, check
from kernels.attention.calls import Call, blocked_calls, single_calls
from kernels.attention.problem import Inputs, Sizes, uniform

LEVEL = 1e-3
"""A call is ruled out where the range that was seen has less than this chance under it (the false-refutation rate)."""


class Fate(Enum):
    """What becomes of a call at given sizes."""

    REJECTED = "rejected by BLAS"
    WRITES_OUTSIDE = "writes outside its operand"
    READS_OUTSIDE = "reads outside an operand"
    WRONG = "stays in bounds and is wrong"
    RIGHT = "stays in bounds and is right"


@dataclass
class Outcome:
    """Calls that do the same arithmetic at given sizes: one result, whatever the inputs."""

    fate: Fate
    calls: list[Call] = field(default_factory=list)
    rejected: str = ""
    """For a rejected call, the argument that BLAS names."""

    @property
    def example(self) -> Call:
        """The call of this outcome with the fewest arguments wrong, single before blocked."""
        return min(self.calls, key=lambda call: (len(call.departures), call.block, str(call)))


def every_call(block: int) -> list[Call]:
    """All single calls, and the blocked ones with blocks of `block`."""
    return [*single_calls(), *blocked_calls(block)]


def leaves(g: Gemm, call: Call, layout: Layout, head: int = 0) -> set[str]:
    """Which of A, B and C reach outside their operand, by arithmetic on the arguments alone."""
    operands = {"A": call.a, "B": call.b, "C": "QK"}
    found = set()
    for name, (first, end) in g.extents().items():
        start = layout.offset(operands[name], head)
        if first < start or end > start + layout.length(operands[name]):
            found.add(name)
    return found


def survey(sizes: Sizes, calls: Iterable[Call]) -> list[Outcome]:
    """Sort calls into outcomes at `sizes`.

    Two calls share an outcome when they are rejected for the same argument, or when their exact results on inputs of
    random integers agree element for element: those results are exact in float64, so equality is no accident.
    """
    one = Sizes(1, sizes.n, sizes.m, sizes.d_k)
    inputs = integers(one)
    layout = golden.plan(one)
    right = inputs.q.astype(np.float64) @ inputs.k.astype(np.float64).swapaxes(-1, -2)
    by_arguments: dict[tuple[Gemm, ...], bytes] = {}
    found: dict[bytes, Outcome] = {}
    for call in calls:
        gemms = call.gemms(one, layout)
        arguments = tuple(gemms)
        if arguments not in by_arguments:
            key, outcome = _outcome(call, gemms, inputs, layout, right)
            by_arguments[arguments] = key
            found.setdefault(key, outcome)
        found[by_arguments[arguments]].calls.append(call)
    return list(found.values())


def integers(sizes: Sizes, seed: int = 0) -> Inputs:
    """Random integers from 1 to 63: their sums of products are exact in float32 up to K = 4096."""
    rng = np.random.default_rng([seed, 63])
    shapes = [(sizes.heads, rows, sizes.d_k) for rows in (sizes.n, sizes.m, sizes.m)]
    return Inputs(*(rng.integers(1, 64, shape).astype(np.float32) for shape in shapes))


def _outcome(call: Call, gemms: list[Gemm], inputs: Inputs, layout: Layout, right: np.ndarray) -> tuple[bytes, Outcome]:
    try:
        for g in gemms:
            check(g)
    except GemmRejectedError as error:
        return error.argument.encode(), Outcome(Fate.REJECTED, rejected=error.argument)
    outside = set().union(*(leaves(g, call, layout) for g in gemms))
    result = golden.called(call, inputs)[0]
    if "C" in outside:
        fate = Fate.WRITES_OUTSIDE
    elif outside:
        fate = Fate.READS_OUTSIDE
    else:
        fate = Fate.RIGHT if np.array_equal(result, right) else Fate.WRONG
    return fate.name.encode() + result.tobytes(), Outcome(fate)


def count(outcomes: list[Outcome]) -> dict[Fate, tuple[int, int]]:
    """For each fate, how many calls meet it and how many different outcomes they make."""
    calls: Counter[Fate] = Counter()
    distinct: Counter[Fate] = Counter()
    for outcome in outcomes:
        calls[outcome.fate] += len(outcome.calls)
        distinct[outcome.fate] += 1
    return {fate: (calls[fate], distinct[fate]) for fate in Fate}


def largest_differences(
    calls: Sequence[Call], sizes: Sizes, seeds: int, device: str = "cpu", mode: str = "adjacent"
) -> dict[Call, np.ndarray]:
    """Make each call for real on fresh uniform inputs: max |QK - golden| in each head, [seeds, heads].

    Nothing of an earlier call is left when the next is made. NaN stands for a result with a NaN in it.
    """
    layout, blas = golden.plan(sizes, mode), blas_for(device)
    found = {call: np.empty((seeds, sizes.heads)) for call in calls}
    with threadpool_limits(1):  # thousands of small products: two thread pools would only wait for each other
        for seed in range(seeds):
            inputs = uniform(sizes, np.random.default_rng([seed, 1]))
            fresh = faulty.prepare(inputs, layout, device)
            q, k = layout.view(fresh, "Q").double(), layout.view(fresh, "K").double()
            right = q @ k.transpose(1, 2)
            for call in calls:
                memory = fresh.clone()
                faulty.multiply(call, inputs, memory, layout, blas)
                difference = (layout.view(memory, "QK") - right).abs()
                found[call][seed] = difference.amax(dim=(1, 2)).cpu().numpy()
    return found


@dataclass(frozen=True)
class Likelihood:
    """How well one outcome goes with a reported range of the largest difference over heads."""

    outcome: Outcome
    differences: np.ndarray
    """[seeds, heads]."""
    inside: float
    """The probability that every head falls into the reported range, widened by half its last digit."""
    ends: float
    """The probability that the smallest and the largest of the heads round to the range's two ends."""

    @property
    def mean(self) -> float:
        """Mean over seeds and heads."""
        return float(self.differences.mean())

    @property
    def standard_error(self) -> float:
        """Of that mean: heads and seeds are independent draws."""
        return float(self.differences.std() / np.sqrt(self.differences.size))


def likelihood(outcome: Outcome, differences: np.ndarray, low: float, high: float, digit: float = 0.1) -> Likelihood:
    """Judge a reported range [low, high], printed to `digit`, under one outcome.

    The largest difference of a head is the maximum of many, so a generalised extreme-value law is fitted to all heads
    and seeds; heads are independent. An outcome with NaN cannot have given numbers: probability 0.
    """
    heads, h = differences.shape[1], digit / 2.0
    if not np.isfinite(differences).all():
        return Likelihood(outcome, differences, 0.0, 0.0)
    sample = differences.ravel()
    spread = sample.std() * np.sqrt(6.0) / np.pi
    law = stats.genextreme(
        *stats.genextreme.fit(sample, 0.1, loc=sample.mean() - np.euler_gamma * spread, scale=spread)
    )

    def all_in(a: float, b: float) -> float:
        return float((law.cdf(b) - law.cdf(a)) ** heads)

    inside = all_in(low - h, high + h)
    ends = inside - all_in(low + h, high + h) - all_in(low - h, high - h) + all_in(low + h, high - h)
    return Likelihood(outcome, differences, inside, ends)
