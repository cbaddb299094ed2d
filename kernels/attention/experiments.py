"""The experiments that settle the claims: each runs real kernels and returns what was measured, without a verdict."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernels.attention import elementwise, faulty, golden, verification
from kernels.attention.attention import attention, transpose, upload
from kernels.attention.blas import blas_for
from kernels.attention.calls import ASPECTS, Call, blocked, diagnosis, exchanged
from kernels.attention.memory import Layout, allocate
from kernels.attention.problem import REPORT, Inputs, Sizes, index_coded, uniform
from kernels.attention.product import loop, strided
from kernels.attention.survey import (
    Likelihood,
    Outcome,
    chance_of_range,
    joined,
    largest_differences,
    likelihood,
    measure_likelihoods,
    sample_inputs,
    survey,
    suspects,
)
from whywrong import compare

Range = tuple[float, float]

HALF_DIGIT = 0.05
"""The report prints its differences with one decimal."""

SCALINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "left out": lambda s: s,
    "1/d_k": lambda s: s / 64,
    "1/sqrt(M)": lambda s: s / 128**0.5,
    "sqrt(d_k)": lambda s: s * 8,
    "1/sqrt(d_k / 2)": lambda s: s / 32**0.5,
    "a factor 4% too large": lambda s: s * 1.04 / 8,
    "a factor 1% too large": lambda s: s * 1.01 / 8,
    "a factor 1% too small": lambda s: s * 0.99 / 8,
    "written transposed": lambda s: s.swapaxes(1, 2) / 8,
    "each row from the row before": lambda s: np.roll(s, 1, axis=1) / 8,
    "each head from the head before": lambda s: np.roll(s, 1, axis=0) / 8,
}
"""Wrong ways to scale scores, [heads, n, m], at the report's d_k = 64 and M = 128: wrong factors, then wrong places."""


def printed_within(values: np.ndarray, reported: Range) -> np.ndarray:
    """Which values, printed with one decimal, lie in a reported range."""
    return (values >= reported[0] - HALF_DIGIT) & (values <= reported[1] + HALF_DIGIT)


@dataclass(frozen=True)
class Counted:
    """How often the heads of one wrong call fall into a reported range, by counting."""

    hits: int
    """Draws of which every head falls into the range."""
    draws: int
    share: float
    """The share of single heads that do."""
    typical: Range
    """The smallest and the largest head of a draw, medians over the draws."""

    @property
    def chance(self) -> float:
        """:func:`kernels.attention.survey.chance_of_range` of the share."""
        return chance_of_range(self.share, REPORT.heads)


def _count(largest: np.ndarray, reported: Range) -> Counted:
    """Of the largest difference of each head, [draws, heads]."""
    ok = printed_within(largest, reported)
    ends = (float(np.median(largest.min(axis=1))), float(np.median(largest.max(axis=1))))
    return Counted(int(ok.all(axis=1).sum()), len(largest), float(ok.mean()), ends)


COUNTED = range(1000, 1200)
"""Draws for what is counted; none of them is one that the survey has used."""


UNRELATED = ("other queries, other keys", "the right queries, other keys", "other queries, the right keys")


def count_described_calls(block: int, reported: Range, device: str, draws: range = COUNTED) -> dict[str, Counted]:
    """The wrong calls that the report describes, by name."""
    described = {f"the diagnosis {name}": call for name, call in diagnosis(block).items()}
    described["Q's leading dimension alone"] = Call(ldb="N")
    largest = largest_differences(list(described.values()), REPORT, draws, device)
    return {name: _count(largest[call], reported) for name, call in described.items()}


def unrelated_products(reported: Range, draws: range = range(3000, 3100)) -> dict[str, Counted]:
    """How far Q K^T is from products of which one operand or both are those of another draw."""
    largest: dict[str, list[np.ndarray]] = {name: [] for name in UNRELATED}
    for number in draws:
        inputs, other = sample_inputs(REPORT, number), sample_inputs(REPORT, number + len(draws))
        right = inputs.q @ inputs.k.swapaxes(1, 2)
        operands = ((other.q, other.k), (inputs.q, other.k), (other.q, inputs.k))
        for name, (q, k) in zip(UNRELATED, operands, strict=True):
            largest[name].append(abs(q @ k.swapaxes(1, 2) - right).max(axis=(1, 2)))
    return {name: _count(np.array(values), reported) for name, values in largest.items()}


def fill_behind_q(reported: Range, device: str, draws: range = COUNTED) -> dict[str, Counted]:
    """Q's leading dimension N and the rest right, with different things behind Q in memory."""
    call = Call(ldb="N")
    fillings: dict[str, Callable[[Inputs, Inputs], np.ndarray | float]] = {
        "K, as allocated": lambda inputs, other: inputs.k,
        "other inputs": lambda inputs, other: other.k,
        "zeros": lambda inputs, other: 0.0,
        "NaN": lambda inputs, other: math.nan,
    }
    inputs = joined([sample_inputs(REPORT, number) for number in draws])
    other = joined([sample_inputs(REPORT, number + len(draws)) for number in draws])
    plain = golden.plan(inputs.sizes, "adjacent")
    shapes = {"Q": plain.shapes["Q"], "behind": plain.shapes["K"], "KT": plain.shapes["KT"], "QK": plain.shapes["QK"]}
    layout = Layout.plan(shapes, inputs.sizes.heads, "adjacent", plain.guard)
    right = (inputs.q.astype(np.float64) @ inputs.k.swapaxes(1, 2)).astype(np.float32)
    counts = {}
    for name, fill in fillings.items():
        memory = allocate(layout, device)
        behind = fill(inputs, other)
        for operand, value in (("Q", inputs.q), ("KT", inputs.k.swapaxes(1, 2)), ("behind", behind)):
            layout.view(memory, operand)[...] = torch.as_tensor(np.asarray(value, np.float32), device=device)
        faulty.multiply(call, inputs, memory, layout, blas_for(device))
        largest = abs(layout.view(memory, "QK").cpu().numpy() - right).max(axis=(1, 2))
        counts[name] = _count(largest.reshape(len(draws), REPORT.heads), reported)
    return counts


@dataclass(frozen=True)
class Exchange:
    """What the exchange of the first two dimensions does to the calls that run at the report's sizes."""

    pairs: int
    """Calls with the dimensions M and N, or those of a block, each beside the same call with them exchanged."""
    changed_at_equal: int
    """Pairs whose two calls hand BLAS different numbers at N = M = 128."""
    changed_at_unequal: int
    """Pairs whose two calls give different scores, or are refused differently, at 37 x 53 x 29."""
    fit_exchanged: int
    """Fitting outcomes of the survey that a call with the exchange gives."""
    fit_straight: int
    """Fitting outcomes that a call without it gives."""
    ragged: int
    """Different wrong outcomes of the exchange in blocks that do not divide 128, alone or with one other change."""
    ragged_fit: int
    """Those of them that fit."""


def exchange_dimensions(
    outcomes: Sequence[Outcome], fits: Sequence[Likelihood], reported: Range, level: float, seeds: int, device: str
) -> Exchange:
    """Exchange the first two dimensions in every call that BLAS accepts, and in blocks of 48 with any one change."""
    straight = {("M", "N"), ("block_M", "block_N")}
    back = {(n, m) for m, n in straight}
    ran = [call for o in outcomes if not o.rejected for call in o.calls if (call.m, call.n) in straight]
    layout = golden.plan(REPORT)
    changed = sum(call.gemms(REPORT, layout) != exchanged(call).gemms(REPORT, layout) for call in ran)
    elsewhere = survey(Sizes(1, 37, 53, 29), {*ran, *map(exchanged, ran)})
    where = {call: i for i, outcome in enumerate(elsewhere) for call in outcome.calls}
    in_blocks = exchanged(blocked(48))
    ragged = [
        in_blocks,
        *(replace(in_blocks, **change) for aspect in ASPECTS for change in aspect if "m" not in change),
    ]
    likelihoods = measure_likelihoods(suspects(survey(REPORT, ragged)), REPORT, seeds, reported, device)
    return Exchange(
        pairs=len(ran),
        changed_at_equal=changed,
        changed_at_unequal=sum(where[call] != where[exchanged(call)] for call in ran),
        fit_exchanged=sum(any((c.m, c.n) in back for c in i.outcome.calls) for i in fits),
        fit_straight=sum(any((c.m, c.n) in straight for c in i.outcome.calls) for i in fits),
        ragged=len(likelihoods),
        ragged_fit=sum(i.chance >= level for i in likelihoods),
    )


def scale_wrongly(
    call: Call, unscaled: Range, scaled: Range, device: str, draws: int = 20
) -> tuple[dict[str, float], dict[str, bool]]:
    """Scale a wrong product wrongly.

    For each of SCALINGS: of the heads whose difference before scaling lies in its reported range, the share whose
    difference after it lies in the other one; and whether the correct product, so scaled, passes the report's check.
    """
    inputs = joined([sample_inputs(REPORT, number) for number in range(2000, 2000 + draws)])
    right = (inputs.q.astype(np.float64) @ inputs.k.swapaxes(1, 2)).astype(np.float32)
    wrong = faulty.scores(call, inputs, device, mode="adjacent")
    chosen = printed_within(abs(wrong - right).max(axis=(1, 2)), unscaled)
    shown, passes = {}, {}
    for name, scale in SCALINGS.items():
        after = abs(scale(wrong) - right / 8).max(axis=(1, 2))
        shown[name] = float(printed_within(after[chosen], scaled).mean()) if chosen.any() else 0.0
        draw_of_12 = right[: REPORT.heads]
        passes[name] = bool(np.allclose(scale(draw_of_12), draw_of_12 / 8, atol=1e-5))
    return shown, passes


def scaling_errors(call: Call, device: str, rng: np.random.Generator) -> dict[str, float]:
    """The scaling step by itself on right and wrong products: how much of its own two roundings its error uses."""
    errors = {}
    for sizes in (REPORT, Sizes(2, 37, 53, 61)):
        inputs = uniform(sizes, rng)
        for name, made in (("right", Call()), ("wrong", call)):
            product = torch.from_numpy(faulty.scores(made, inputs, device, mode="adjacent")).to(device)
            exact = product.double() / math.sqrt(sizes.d_k)
            scaled = elementwise.scale(product, 1.0 / math.sqrt(sizes.d_k))
            errors[f"{name} product at {sizes}"] = compare(scaled, exact, bound=exact.abs() * 2.0**-23).bound_used
    return errors


def allowed_ratios(unscaled: Range, scaled: Range) -> Range:
    """The ratios that two reported ranges allow, each figure off by up to half its last digit."""
    h = HALF_DIGIT
    pairs = list(zip(unscaled, scaled, strict=True))
    return max((u - h) / (s + h) for u, s in pairs), min((u + h) / (s - h) for u, s in pairs)


def rerun_ratio(call: Call, device: str, rng: np.random.Generator) -> float:
    """Largest difference before scaling over that after it, with a wrong product and the real scaling step."""
    inputs = uniform(REPORT, rng)
    run = faulty.attention(call, inputs, device, mode="adjacent")
    right = inputs.q.astype(np.float64) @ inputs.k.swapaxes(1, 2)
    before, after = (run[name].cpu().numpy().astype(np.float64) for name in ("qk", "scaled"))
    return float(abs(before - right).max() / abs(after - right / math.sqrt(REPORT.d_k)).max())


def errors_in_blocks(device: str, rng: np.random.Generator) -> dict[str, float]:
    """Right blocks of sizes that divide the scores and that do not: the share of the product's bound that each uses."""
    errors = {}
    for sizes in (REPORT, Sizes(2, 37, 53, 29)):
        inputs = uniform(sizes, rng)
        exact = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))
        for block in (8, 24, 32, 100):
            scores = faulty.scores(blocked(block), inputs, device)
            errors[f"{sizes}, blocks of {block}"] = compare(scores, exact[0], bound=exact[1]).bound_used
    return errors


def index_coded_order(device: str) -> dict[str, bool]:
    """Whether the repaired call puts every score into its row-major place, by inputs that name their element."""
    in_order = {}
    for sizes in (REPORT, Sizes(2, 37, 53, 29), Sizes(2, 53, 29, 37)):
        coded = index_coded(sizes)
        in_order[str(sizes)] = bool(
            np.array_equal(faulty.scores(Call(), coded, device), coded.q @ coded.k.swapaxes(1, 2))
        )
    return in_order


def transposes_exactly(sizes: Iterable[Sizes], device: str, rng: np.random.Generator) -> dict[str, bool]:
    """Whether the transpose on `device` moves every value of K into its place, bit for bit."""
    equal = {}
    for size in sizes:
        inputs = uniform(size, rng)
        layout = golden.plan(size)
        memory = upload(inputs, layout, device)
        transpose(memory, layout, blas_for(device))
        equal[str(size)] = bool(np.array_equal(layout.view(memory, "KT").cpu().numpy(), inputs.k.swapaxes(1, 2)))
    return equal


@dataclass(frozen=True)
class Final:
    """The repaired pipeline against NumPy in float32, in memory and through text files, step by step."""

    in_memory: Mapping[str, float]
    """Largest difference of each step."""
    in_files: Mapping[str, float]
    passes: Mapping[str, bool]
    """Whether np.allclose(atol=1e-5) takes each step, read back from files."""
    text: float
    """The largest difference that six digits of text make of the unscaled product by themselves."""
    of_bound: float
    """The largest difference through files over what two float32 sums of d_k products may be apart, of all scores."""


def check_as_the_report(inputs: Inputs, device: str) -> Final:
    """Run the repaired pipeline as the report does, loop over heads and text files included."""
    run = attention(inputs, device, multiply=loop)
    theirs = {step.name: np.asarray(step.value) for step in verification.numpy_float32(inputs)}
    ours = {name: run[name].cpu().numpy() for name in theirs}
    with tempfile.TemporaryDirectory() as folder:
        read = {name: verification.through_files(ours[name], Path(folder), name) for name in theirs}
    bound = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))[1]
    return Final(
        {name: float(abs(ours[name] - value).max()) for name, value in theirs.items()},
        {name: float(abs(read[name] - value).max()) for name, value in theirs.items()},
        {name: bool(np.allclose(read[name], value, atol=1e-5)) for name, value in theirs.items()},
        float(abs(read["qk"] - ours["qk"]).max()),
        float((abs(read["qk"].astype(np.float64) - theirs["qk"]) / (2.0 * bound.absolute)).max()),
    )


def early_check(inputs: Inputs) -> dict[str, str]:
    """How the report's comparison of Q ends, by the shape of the file with the test's Q: what NumPy raises, or not.

    As in its first script, without a check of shapes: both matrices are written by `savetxt`, read, and compared.
    """
    q, ends = inputs.q[0], {}
    rows, columns = q.shape
    given = {f"{rows} x {columns}": q, f"{rows} x {rows}": np.resize(q, (rows, rows)), f"{rows} x 1": q[:, :1]}
    with tempfile.TemporaryDirectory() as folder:
        for shape, made in given.items():
            for name, matrix in (("cuda", q), ("test", made)):
                np.savetxt(Path(folder) / f"{name}.txt", matrix, fmt="%.6f")
            ours, theirs = (np.loadtxt(Path(folder) / f"{n}.txt", dtype=np.float32, ndmin=2) for n in ("cuda", "test"))
            try:
                ends[shape] = "agrees" if np.allclose(ours, theirs, atol=1e-5) else "differs"
            except ValueError as error:
                ends[shape] = f"ValueError: {' '.join(str(error).split())}"
    return ends


def batch_difference(inputs: Inputs, device: str) -> float:
    """The largest difference of Q K^T by one strided batch from NumPy in float32."""
    batch = attention(inputs, device, multiply=strided)["qk"].cpu().numpy()
    return float(abs(batch - np.asarray(verification.numpy_float32(inputs)["qk"])).max())


def shifts_taken(scores: np.ndarray) -> dict[float, bool]:
    """By how much every score is shifted -> whether np.allclose with atol=1e-5 still takes it."""
    return {
        shift: bool(np.allclose(scores.astype(np.float64) + shift, scores.astype(np.float64), atol=1e-5))
        for shift in (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4)
    }


def shifts_within(inputs: Inputs, scores: np.ndarray, shifts: Iterable[float]) -> dict[float, bool]:
    """Whether `scores` [heads, N, M] of the inputs, all of them shifted by each amount, are within the tolerance."""
    value, bound = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))
    return {shift: compare(scores.astype(np.float64) + shift, value, bound=bound).ok for shift in shifts}


def diagnosis_and_rival(
    rivals: Sequence[Likelihood], block: int, reported: Range, device: str, draws: range
) -> tuple[dict[str, Likelihood], Likelihood]:
    """The diagnosis in each form, and of the rivals that by which both ends of the range are likeliest; all of them on
    the same new inputs."""
    described, rival = diagnosis(block), max(rivals, key=lambda item: item.ends)
    differences = largest_differences([*described.values(), rival.outcome.example], REPORT, draws, device)
    laws = {call: likelihood(rival.outcome, of_call, *reported) for call, of_call in differences.items()}
    return {name: laws[call] for name, call in described.items()}, laws[rival.outcome.example]
