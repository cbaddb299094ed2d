"""Clean products by the thousand, and the smallest fault that each instrument sees, as functions of the length K."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whywrong.comparing.bounds import Bound, roundings, sum_of_products
from whywrong.comparing.comparison import compare
from whywrong.comparing.structure import structure
from whywrong.tables import Table

LENGTHS = tuple(2**k for k in range(17))
DATA = ("mixed signs", "positive", "cancelling", "denormal products")
ORDERS = ("sequential", "blocked", "shuffled")
ROWS = COLUMNS = 12
ERROR_FACTORS = (1.01, 2.0, 10.0)
"""How many bounds an element is set off, one after the other."""


@dataclass(frozen=True)
class Tally:
    """Clean cases of one kind, how many have bits that no case before had, and the alarms of each instrument."""

    kind: str
    cases: int
    different: int
    elementwise: int
    structure: int
    used: dict[int, float]
    """By the length K the largest share of the bound that an element used."""
    missed: tuple[int, ...]
    """For each of BEYOND, of how many cases compare() did not report the one element that was set so far off."""


def operands(data: str, length: int, cases: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """float32 factors [cases, ROWS, K] and [cases, K, COLUMNS]."""
    a = rng.standard_normal((cases, ROWS, length), dtype=np.float32)
    b = rng.standard_normal((cases, length, COLUMNS), dtype=np.float32)
    if data == "positive":
        a, b = abs(a), abs(b)
    elif data == "cancelling" and length > 1:
        half = length // 2
        a[..., half : 2 * half] = -a[..., :half] * (1 + np.float32(2.0**-12) * a[..., half : 2 * half])
        b[:, half : 2 * half] = b[:, :half]
    elif data == "denormal products":
        a, b = a * np.float32(1e-20), b * np.float32(1e-19)
    return a, b


def _sum(a: np.ndarray, b: np.ndarray, order: str, rng: np.random.Generator) -> np.ndarray:
    length = a.shape[-1]
    if order == "blocked":
        return a @ b
    places = rng.permutation(length) if order == "shuffled" else np.arange(length)
    total = np.zeros((a.shape[0], ROWS, COLUMNS), np.float32)
    for k in places:
        total += a[:, :, k, None] * b[:, None, k, :]
    return total


def reference(a: torch.Tensor, b: torch.Tensor, compute: str) -> tuple[torch.Tensor, Bound]:
    """The product in float64, and what it may be off, noise included."""
    x, y = a.double(), b.double()
    value = x @ y
    magnitude, squares = x.abs() @ y.abs(), (x * x) @ (y * y)
    return value, sum_of_products(magnitude, x.shape[-1], compute, value=value, squares=squares)


def _part(bound: Bound, i: int) -> Bound:
    """The bound of one product of several."""
    shared = bound.shared[i] if isinstance(bound.shared, torch.Tensor) else bound.shared
    return Bound(bound.absolute[i], bound.why, bound.noise[i], shared)


def cpu_cases(
    lengths: Sequence[int], cases: int, rng: np.random.Generator
) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor, Bound]]:
    """(kind, K, observed, golden, bound): float32 on the CPU in each order, on each kind of data."""
    for length in lengths:
        for data in DATA:
            a, b = operands(data, length, cases, rng)
            value, bound = reference(torch.from_numpy(a), torch.from_numpy(b), "float32")
            for order in ORDERS:
                result = torch.from_numpy(_sum(a, b, order, rng))
                for i in range(cases):
                    yield f"float32, {order}, {data}", length, result[i], value[i], _part(bound, i)


def gpu_cases(
    lengths: Sequence[int], cases: int, rng: np.random.Generator
) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor, Bound]]:
    """The GPU's own products: float32, TF32, and bfloat16 and float16 inputs and results."""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for length in lengths:
            for data in DATA[:3]:
                a, b = (torch.from_numpy(x).cuda() for x in operands(data, length, cases, rng))
                for compute in ("float32", "tf32", "bfloat16", "float16"):
                    torch.backends.cuda.matmul.allow_tf32 = compute == "tf32"
                    x, y = (a, b) if compute in ("float32", "tf32") else (t.to(getattr(torch, compute)) for t in (a, b))
                    result = (x @ y).cpu()
                    value, bound = reference(x.cpu(), y.cpu(), "tf32" if compute == "tf32" else "float32")
                    if compute in ("bfloat16", "float16"):  # tensor cores may truncate as they add, so the worst case
                        value, bound = _tensor_cores(x.cpu(), y.cpu(), compute)
                    for i in range(cases):
                        yield f"{compute} on the GPU, {data}", length, result[i], value[i], _part(bound, i)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _tensor_cores(a: torch.Tensor, b: torch.Tensor, dtype: str) -> tuple[torch.Tensor, Bound]:
    x, y = a.double(), b.double()
    value, k, v = x @ y, a.shape[-1], 2.0**-23
    magnitude = x.abs() @ y.abs()
    squares = (x * x) @ (y * y)
    drift = magnitude * (k * v / (1.0 - k * v))
    noise = v * math.sqrt(k) * (value.abs() + squares.sqrt())
    return value, Bound(drift, "K v sum|a||b|", noise, k * v * value.abs()) + roundings(value.abs() + drift, 1, dtype)


def tally(cases: Iterable[tuple[str, int, torch.Tensor, torch.Tensor, Bound]], rng: np.random.Generator) -> list[Tally]:
    """Both instruments on every clean case; then one element of each, at a drawn place, is set beyond its bound."""
    kinds: dict[str, list[tuple[int, bool, bool, bool, float, list[bool]]]] = {}
    bits: set[bytes] = set()
    for kind, length, observed, golden, bound in cases:
        elements = compare(observed, golden, bound=bound)
        below = structure(observed.double() - golden, golden, bound)
        before = len(bits)
        bits.add(observed.view(torch.uint8).numpy().tobytes())
        missed = [not _caught(observed, golden, bound, times, rng) for times in ERROR_FACTORS]
        row = (length, len(bits) > before, not elements.ok, not below.ok, elements.bound_used, missed)
        kinds.setdefault(kind, []).append(row)
    return [_summary(kind, rows) for kind, rows in kinds.items()]


def _caught(observed: torch.Tensor, golden: torch.Tensor, bound: Bound, times: float, rng: np.random.Generator) -> bool:
    """Whether compare() reports, by its place, one element that is `times` its bound off, and no other."""
    spoilt = observed.double()
    place = tuple(int(rng.integers(n)) for n in golden.shape)
    spoilt[place] = golden[place] + float(rng.choice([-1.0, 1.0])) * times * bound.absolute[place]
    comparison = compare(spoilt, golden, bound=bound)
    return comparison.mismatches == 1 and comparison.first_index == place


def _summary(kind: str, rows: Sequence[tuple[int, bool, bool, bool, float, list[bool]]]) -> Tally:
    lengths, different, elementwise, below, used, missed = zip(*rows, strict=True)
    most = {k: max(u for length, u in zip(lengths, used, strict=True) if length == k) for k in sorted(set(lengths))}
    return Tally(
        kind, len(rows), sum(different), sum(elementwise), sum(below), most, tuple(map(sum, zip(*missed, strict=True)))
    )


def alarms(tallies: Sequence[Tally]) -> int:
    """How many clean products are flagged, by either instrument."""
    return sum(t.elementwise + t.structure for t in tallies)


def missed(tallies: Sequence[Tally]) -> dict[float, int]:
    """For each of BEYOND, how many of the elements that were set so far off were not reported."""
    return {times: sum(t.missed[i] for t in tallies) for i, times in enumerate(ERROR_FACTORS)}


def largest_shares(tallies: Sequence[Tally]) -> dict[str, dict[int, float]]:
    """For each way to compute a product, over all kinds of data: the largest share of the bound used, by length K."""
    ways: dict[str, dict[int, float]] = {}
    for t in tallies:
        way = ways.setdefault(t.kind.rpartition(", ")[0], dict.fromkeys(t.used, 0.0))
        way |= {length: max(way[length], share) for length, share in t.used.items()}
    return ways


def tally_table(tallies: Sequence[Tally]) -> Table:
    """A row a kind: products, false positives, the largest share of the bound used, and elements missed."""
    names = (
        "correct products",
        "cases",
        "different from all before",
        "flagged, by elements",
        "flagged, by structure",
        "largest error / tolerance",
        *(f"missed at {times:g} times that" for times in ERROR_FACTORS),
    )
    rows = [
        (t.kind, t.cases, t.different, t.elementwise, t.structure, max(t.used.values()), *t.missed) for t in tallies
    ]
    return Table(names, rows)


INSTRUMENTS = ("one element", "elements, all scaled", "slope", "one row scaled")


def smallest_faults(length: int, dtype: str, rng: np.random.Generator, rows: int = 64) -> dict[str, float]:
    """The smallest relative error that each instrument reports at one length, by bisection.

    A product [rows, K] x [K, rows] of standard normal factors, summed in float32 and stored in `dtype`.
    """
    storage = getattr(torch, dtype)
    a = torch.from_numpy(rng.standard_normal((rows, length), dtype=np.float32)).to(storage)
    b = torch.from_numpy(rng.standard_normal((length, rows), dtype=np.float32)).to(storage)
    value, bound = reference(a, b, "float32")
    if dtype != "float32":
        bound = bound + roundings(value.abs() + bound.absolute, 1, dtype)
    clean = (a.float() @ b.float()).to(storage).double()
    size = float(value.pow(2).mean().sqrt())
    middle = int((value[0].abs() - size).abs().argmin())

    def scaled(error: float) -> torch.Tensor:
        return clean * (1.0 + error)

    def element(error: float) -> torch.Tensor:
        changed = clean.clone()
        changed[0, middle] += error * size
        return changed

    def row(error: float) -> torch.Tensor:
        changed = clean.clone()
        changed[3] *= 1.0 + error
        return changed

    def beyond(x: torch.Tensor) -> bool:
        return not compare(x, value, bound=bound).ok

    def systematic(x: torch.Tensor) -> bool:
        return not structure(x - value, value, bound).ok

    trials = ((element, beyond), (scaled, beyond), (scaled, systematic), (row, systematic))
    return {name: _bisect(make, sees) for name, (make, sees) in zip(INSTRUMENTS, trials, strict=True)}


def _bisect(make: object, sees: object) -> float:
    low, high = -30.0, 10.0  # powers of two
    for _ in range(14):
        middle = 0.5 * (low + high)
        if sees(make(2.0**middle)):  # type: ignore[operator]
            high = middle
        else:
            low = middle
    return 2.0**high
