"""Every plausible call at given sizes: what BLAS does with it, and how large its largest differences are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from scipy import stats
from threadpoolctl import threadpool_limits

from kernels.attention import faulty, golden
from kernels.attention.blas import CuBlas, Gemm, GemmRejectedError, HostBlas, blas_for, check
from kernels.attention.calls import Call, blocked_calls, diagnosis, single_calls
from kernels.attention.memory import Layout
from kernels.attention.problem import Inputs, Sizes, uniform
from whywrong.explaining.hypotheses import Fit, Weighing

MOST = {"cuda": 1 << 24, "cpu": 1 << 19}
"""By device: elements of the buffer that holds several draws at a time. Few on a CPU, whose caches are small."""


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
    """All single calls, the blocked ones with blocks of `block`, and the report's diagnosis as a whole."""
    found = [*single_calls(), *blocked_calls(block), *diagnosis(block).values()]
    return list(dict.fromkeys(found))


def exceeded_operands(g: Gemm, call: Call, layout: Layout, head: int = 0) -> set[str]:
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
    with threadpool_limits(1):  # thousands of small products: several threads would wait for each other
        for call in calls:
            gemms = call.gemms(one, layout)
            arguments = tuple(gemms)
            if arguments not in by_arguments:
                key, outcome = _outcome(call, gemms, inputs, layout, right)
                by_arguments[arguments] = key
                found.setdefault(key, outcome)
            found[by_arguments[arguments]].calls.append(call)
    return list(found.values())


def suspects(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that run and are wrong: any of them may have given a report's numbers."""
    return [o for o in outcomes if o.fate not in (Fate.REJECTED, Fate.RIGHT)]


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
    outside = set().union(*(exceeded_operands(g, call, layout) for g in gemms))
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


def sample_inputs(sizes: Sizes, number: int) -> Inputs:
    """Fresh uniform inputs: the same on every machine for one `number`."""
    return uniform(sizes, np.random.default_rng([number, 1]))


def largest_differences(
    calls: Sequence[Call], sizes: Sizes, draws: range, device: str = "cpu", mode: str = "adjacent"
) -> dict[Call, np.ndarray]:
    """Make each call for real on fresh uniform inputs: max |QK - golden| in each head, [draws, heads].

    Nothing of an earlier call is left when the next is made. NaN stands for a result with a NaN in it. Draws lie in
    one buffer, head after head, where no head of a call sees what another wrote; else each has a buffer of its own.
    """
    one = golden.plan(sizes, mode)
    independent = [call for call in calls if faulty.heads_are_independent(call.gemms(sizes, one), one)]
    others = [call for call in calls if call not in set(independent)]
    found: dict[Call, list[np.ndarray]] = {call: [] for call in calls}
    with threadpool_limits(1):
        for some, together in ((independent, max(1, MOST[device] // one.size)), (others, 1)):
            for first in draws[::together] if some else ():
                numbers = range(first, min(first + together, draws.stop))
                for call, largest in _largest(some, sizes, numbers, device, mode).items():
                    found[call].append(largest)
    return {call: np.concatenate(parts) for call, parts in found.items()}


def _largest(calls: Sequence[Call], sizes: Sizes, draws: range, device: str, mode: str) -> dict[Call, np.ndarray]:
    """max |QK - golden|, [draws, heads], with all draws in one buffer."""
    inputs = joined([sample_inputs(sizes, number) for number in draws])
    layout, blas = golden.plan(inputs.sizes, mode), blas_for(device)
    fresh = faulty.prepare(inputs, layout, device)
    exact = layout.view(fresh, "Q").double() @ layout.view(fresh, "KT").double()
    right = exact.float()  # a millionth off, where differences of ones and tens are looked for
    memory = torch.empty_like(fresh)
    found = [_one_call(call, inputs, fresh, memory, layout, blas, right) for call in calls]
    largest = torch.stack(found).cpu().numpy().reshape(len(calls), len(draws), sizes.heads)
    return dict(zip(calls, largest, strict=True))


def _one_call(
    call: Call,
    inputs: Inputs,
    fresh: torch.Tensor,
    memory: torch.Tensor,
    layout: Layout,
    blas: HostBlas | CuBlas,
    right: torch.Tensor,
) -> torch.Tensor:
    """max |QK - golden| of each head, on the device."""
    memory.copy_(fresh)
    faulty.multiply(call, inputs, memory, layout, blas)
    return (layout.view(memory, "QK") - right).abs_().amax(dim=(1, 2))


def joined(inputs: Sequence[Inputs]) -> Inputs:
    """Several draws as one with all of their heads."""
    return Inputs(*(np.concatenate([getattr(one, name) for one in inputs]) for name in ("q", "k", "v")))


def chance_of_range(head: float, heads: int) -> float:
    """How often so many heads of one call have a range that holds a share of at most `head` of the call's heads.

    That share, of any continuous law, follows Beta(heads - 1, 2) (Wilks, "Determination of sample sizes for setting
    tolerance limits", Annals of Mathematical Statistics 12, 1941). A range that lies elsewhere holds little of the law,
    and so does one that is too narrow: both are improbable. Ruling out what is below a level rules out the true call at
    that rate, or more seldom, since the printed range is widened by the digits that it lacks.
    """
    return heads * head ** (heads - 1) - (heads - 1) * head**heads


@dataclass(frozen=True)
class Likelihood:
    """How well one outcome goes with a reported range of the largest difference over heads."""

    outcome: Outcome
    differences: np.ndarray
    """[draws, heads]."""
    head: float
    """The probability that one head falls into the reported range, widened by half its last digit."""
    ends: float
    """The probability that the smallest and the largest of the heads round to the range's two ends."""
    largest: float
    """How often the largest of the heads is at least as far out, on either side, as the range's upper end."""

    @property
    def chance(self) -> float:
        """:func:`chance_of_range`, of the heads of a draw."""
        return chance_of_range(self.head, self.differences.shape[1])

    @property
    def all_inside(self) -> float:
        """The probability that all heads of a draw fall into the range."""
        return self.head ** self.differences.shape[1]

    @property
    def mean(self) -> float:
        """Mean over draws and heads."""
        return float(self.differences.mean())

    @property
    def name(self) -> str:
        """The simplest call of the outcome, by what is wrong in it."""
        return self.outcome.example.difference


def likelihood(outcome: Outcome, differences: np.ndarray, low: float, high: float, digit: float = 0.1) -> Likelihood:
    """Check a reported range [low, high], printed to `digit`, under one outcome.

    The largest difference of a head is the maximum of many, so a generalised extreme-value law is fitted to all heads
    and draws; heads are independent. An outcome with NaN cannot have given numbers, nor one of which all heads lie
    on one side of the range: probability 0.
    """
    heads, h = differences.shape[1], digit / 2.0
    sample = differences.ravel()
    if not np.isfinite(sample).all() or sample.max() < low - h or sample.min() > high + h:
        return Likelihood(outcome, differences, 0.0, 0.0, 0.0)
    spread = sample.std() * np.sqrt(6.0) / np.pi
    law = stats.genextreme(
        *stats.genextreme.fit(sample, 0.1, loc=sample.mean() - np.euler_gamma * spread, scale=spread)
    )

    def between(a: float, b: float) -> float:
        return float(law.cdf(b) - law.cdf(a))

    head = between(low - h, high + h)
    ends = (
        head**heads
        - between(low + h, high + h) ** heads
        - between(low - h, high - h) ** heads
        + between(low + h, high - h) ** heads
    )
    below, above = float(law.cdf(high + h)) ** heads, 1.0 - float(law.cdf(high - h)) ** heads
    return Likelihood(outcome, differences, head, ends, min(1.0, 2.0 * min(below, above)))


def measure_likelihoods(
    outcomes: Sequence[Outcome], sizes: Sizes, seeds: int, reported: tuple[float, float], device: str
) -> list[Likelihood]:
    """Run one call of each outcome on `seeds` fresh draws and check the reported range under it, likeliest first."""
    found = largest_differences([o.example for o in outcomes], sizes, range(seeds), device)
    likelihoods = [likelihood(o, found[o.example], *reported) for o in outcomes]
    return sorted(likelihoods, key=lambda item: -item.chance)


def fitting(likelihoods: Iterable[Likelihood], level: float, heads: int | None = None) -> list[Likelihood]:
    """The outcomes that the reported range does not rule out: its :func:`chance_of_range` is at least `level`.

    `level` is the rate at which the true call would be ruled out. `heads` is how many the range was read off, all of
    the draws' unless said.
    """
    return [i for i in likelihoods if (i.chance if heads is None else chance_of_range(i.head, heads)) >= level]


STATISTICS: dict[str, Callable[[Likelihood], float]] = {
    "how much of the call's distribution the range holds": lambda item: item.chance,
    "whether all heads lie in the range": lambda item: item.all_inside,
    "the largest head alone": lambda item: item.largest,
}
"""By what a reported range may be compared with a call: what is held against the level."""


def false_alarms(statistic: str, level: float, heads: int) -> float:
    """How often the true call would be ruled out, where a call is whose statistic is below `level`.

    That is the level itself, except for the probability that all heads lie in the range, which is no error rate.
    """
    return chance_of_range(level ** (1.0 / heads), heads) if statistic.startswith("whether all") else level


def count_by_statistic(
    likelihoods: Sequence[Likelihood], level: float, calls: set[Call]
) -> dict[str, tuple[int, bool]]:
    """For each of STATISTICS how many outcomes fit at `level`, and whether one that some of `calls` give does."""
    fit = {name: [i.outcome for i in likelihoods if value(i) >= level] for name, value in STATISTICS.items()}
    return {name: (len(some), any(calls & set(o.calls) for o in some)) for name, some in fit.items()}


def most_alike(likelihoods: Iterable[Likelihood], reported: tuple[float, float]) -> tuple[Likelihood, int]:
    """The outcome and the number of its draw whose smallest and largest head come closest to the reported ends."""
    distances = []
    for item in likelihoods:
        if np.isfinite(item.differences).all():
            low, high = item.differences.min(axis=1), item.differences.max(axis=1)
            distance = abs(low - reported[0]) + abs(high - reported[1])
            distances.append((float(distance.min()), int(distance.argmin()), item))
    _, number, item = min(distances, key=lambda entry: entry[0])
    return item, number


def of_call(likelihoods: Iterable[Likelihood], call: Call) -> Likelihood:
    """The check of the outcome that `call` gives."""
    return next(item for item in likelihoods if call in item.outcome.calls)


def weighed(likelihoods: Iterable[Likelihood], level: float) -> Weighing:
    """The survey as a weighing: an outcome is left where :func:`chance_of_range` is at least `level`."""
    setting = f"the reported range, at a level of {level:g}"
    found = Weighing([setting])
    for item in likelihoods:
        ok = item.chance >= level
        words = f"chance {item.chance:.2g}"
        found.fits[item.name] = {setting: Fit(ok, level / item.chance if item.chance else float("inf"), words)}
    return found
