"""What the notebook measures, and the reason that each measurement gives for each verdict that can come out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import labkit
from kernels.mhc import counterfactual, faulty, golden, likelihood
from kernels.mhc.faulty import PRIORS, RIGHT, Access, Problem
from kernels.mhc.identify import Kernel
from kernels.mhc.likelihood import Comparison, Ratios
from kernels.mhc.problem import Constants, Inputs
from labkit import Localisation, Trace
from labkit.causes.hypotheses import Fit, Weighing
from labkit.numerics.compare import within
from labkit.session.record import recorded
from labkit.tables import Table, number

Tensor = torch.Tensor
Settlement = dict[str, Any]
PARTS = ("dalpha_pre", "dalpha_post", "dalpha_res")
REPORTED = {PARTS[0]: (-19.465603, -0.948053), PARTS[1]: (7.037663, 7.037663), PARTS[2]: (-219.307068, -219.307373)}
"""The report's golden value and its kernel's, of each part."""
RATIO = 0.948053 / 19.465603
LIMIT = 1e-3
"""The report's own criterion for a repaired kernel, absolute for dalpha_pre and relative for all."""
GIVEN = (
    "a tile of 32 columns and no loop, from the author's repository, around which the kernel was built again; with "
    "that tile it follows, and on the author's kernel it was not tested"
)
BLIND = "a fault that was drawn at random, in place of the author's"
"""What the kernel under investigation rests on."""
ORDERS = 200
NO_ERROR, CHANCE = 0.01, 0.001
"""What right sums do in at least one case of 100 is no error; what they do in less than one of 1000 is one."""
APART = 3.05e-4
"""Between the report's two values of dalpha_res."""
NEAR = 1.5
"""A draw's dalpha_res is of the report's size if it is so many times as large or as small at most."""
QUOTIENT = 1e-6
"""What a central difference with a step of 1e-5 in float64 leaves open, relative to the derivative."""
ROUNDED = 1e6 * 2.0**-53
"""What a million roundings in float64 may make of a relative difference."""


@dataclass(frozen=True)
class Outcome:
    """What the report's five stages measure on one kernel; every reason is made of these numbers."""

    first: str | None
    """The first wrong step."""
    g_pre_off: float
    g_pre_right: bool
    raw_off: int
    """Elements of pre's columns of the projection that are not those that should be loaded."""
    products_off: int
    """Elements that are not the IEEE product of what was loaded and the token's inverse RMS."""
    elements: int
    spread: float
    """The largest distance between sums of the same products in `ORDERS` orders."""
    missing: float
    compensated: float
    """Relative error of dalpha_pre with the kernel's own products added with compensation."""
    ranges: Mapping[str, tuple[float, float]]
    """Smallest and largest size, but for zeros, of dh_pre2, dh_post2 and dh_res1; NaN where one is not finite."""
    sums: Mapping[str, float]
    """Each sum's error, from the factors that the kernel itself has, over its bound."""
    moved: Sequence[str]
    """The parts that change when one column of x does."""
    isolated: Mapping[str, bool]
    """Whether the isolated kernel finds dh_pre2 right, by how it was launched."""
    repaired: Mapping[str, tuple[float, float]]
    """Largest absolute error of dalpha_pre and relative error of all parts, by what was run."""


def run_stages(kernel: Kernel, p: Problem, tile: int, rng: np.random.Generator) -> tuple[Outcome, Localisation]:
    """Run the report's stages on a kernel whose tile has `tile` columns; what is repaired is run later."""
    observed, right = kernel(p), counterfactual.backward(p)
    found = labkit.localise(observed, counterfactual.recorded(p), labkit.Precision())
    n, d = p.x.shape[1:]
    raw = observed["raw_pre"]
    products = (observed["g_pre"].double() * observed["mix_pre"].double()).cpu()
    exact = right["dalpha"].double().cpu()
    column = replace(p, x=p.x.clone())
    column.x[..., 0] += 1.0
    moved = (counterfactual.dalpha(column) != counterfactual.dalpha(p)).tolist()
    launches = {"as its author did": 1 << (d - 1).bit_length(), "with the kernel's tile": tile}
    g_pre = right.step("g_pre")
    outcome = Outcome(
        first=found.first,
        g_pre_off=float((observed["g_pre"].double() - g_pre.value).abs().max()),
        g_pre_right=within(observed["g_pre"], g_pre.value, g_pre.bound),
        raw_off=int((raw != p.raw[:, :n]).sum()),
        products_off=int((observed["mix_pre"] != raw * p.r[:, None]).sum()),
        elements=raw.numel(),
        spread=spread(right["g_pre"] * right["mix_pre"], rng),
        missing=abs(float(observed["dalpha"][0]) - float(exact[0])),
        compensated=abs(float(compensated(products.numpy().astype(np.float32).ravel())) / float(exact[0]) - 1.0),
        ranges={name: _range(observed[step]) for name, step in
            (("dh_pre2", "g_pre"), ("dh_post2", "g_post"), ("dh_res1", "g_res"))},
        sums=_own_sums(p, observed),
        moved=[name for name, yes in zip(PARTS, moved, strict=True) if yes],
        isolated={how: within(faulty.isolated(p, block), g_pre.value, g_pre.bound) for how, block in launches.items()},
        repaired={},
    )  # fmt: skip
    return outcome, found


def _range(values: Tensor) -> tuple[float, float]:
    if not torch.isfinite(values).all():
        return math.nan, math.nan
    sizes = values.abs()[values != 0]
    return (float(sizes.min()), float(sizes.max())) if sizes.numel() else (0.0, 0.0)


def _own_sums(p: Problem, observed: Trace) -> dict[str, float]:
    """Each part of dalpha against the exact sum of the factors that the kernel itself has, over the sum's bound."""
    value, bound = counterfactual.dalpha_of(p, observed["g_pre"].double(), observed["mix_pre"].double())
    off = (observed["dalpha"].double() - value).abs() / bound.absolute
    return dict(zip(PARTS, off.tolist(), strict=True))


def spread(products: Tensor, rng: np.random.Generator) -> float:
    """The largest distance between float32 sums of `products` in `ORDERS` orders."""
    terms = products.flatten().cpu().numpy().astype(np.float32)
    sums = [np.cumsum(rng.permutation(terms), dtype=np.float32)[-1] for _ in range(ORDERS)]
    return float(max(sums) - min(sums))


def compensated(terms: np.ndarray) -> np.ndarray:
    """Kahan's sum of float32 `terms` along their last axis."""
    total = np.zeros(terms.shape[:-1], np.float32)
    lost = np.zeros_like(total)
    for i in range(terms.shape[-1]):
        y = terms[..., i] - lost
        grown = total + y
        lost = (grown - total) - y
        total = grown
    return total


def judged(truth: str | bool, measured: Any, *, given: str = "", **because: str) -> Settlement:
    """What :meth:`labkit.Ledger.settle` takes: a reason for each verdict that can come out, by the verdict's word."""
    because = {word: f"{reason}." for word, reason in because.items()}
    return {"truth": truth, "measured": measured, "because": because, "given": given}


def stages(o: Outcome, element: Sequence[float]) -> Table:
    """What the five stages found; `element` is token 0, stream 0, of the kernel and in float64."""
    found = [
        ("1: dh_pre2, largest difference", o.g_pre_off),
        ("1: dh_pre2, within its bound everywhere", o.g_pre_right),
        *((f"1: the debug kernel finds dh_pre2 right, launched {how}", right) for how, right in o.isolated.items()),
        (f"2: h_pre1_hmix, elements of {o.elements} that are not those to be loaded", o.raw_off),
        ("2: and that are not the product of what was loaded and inv_rms", o.products_off),
        ("3: token 0, stream 0: dh_pre2 times h_pre1_hmix", f"{element[0]:.6f}, in float64 {element[1]:.6f}"),
        (f"4: {ORDERS} orders of the right products, largest distance of two sums", o.spread),
        ("4: what is missing of dalpha_pre", o.missing),
        ("4: the kernel's own products by Kahan's sum, relative error", o.compensated),
        ("hypothesis 5: sizes of dh_pre2, smallest and largest", list(o.ranges["dh_pre2"])),
    ]
    return Table(("stage, and what is compared", "found"), found)


def of_stages(o: Outcome, given: str) -> dict[str, Settlement]:
    """Verdicts and reasons of the claims that the five stages settle; `given` is what the kernel rests on."""
    low, high = (pick(edge) for pick, edge in zip((min, max), zip(*o.ranges.values(), strict=True), strict=True))
    finite = not any(math.isnan(edge) for pair in o.ranges.values() for edge in pair)
    in_range = finite and (low > 1e-37 or low == 0.0) and high < 1e37
    sizes = ", ".join(f"{name} {a:.1e} to {b:.1e}" for name, (a, b) in o.ranges.items())
    worst = max(o.sums, key=lambda name: o.sums[name])
    own = "from the factors that the kernel itself has"
    findings = ", ".join(f"launched {how} it says {'right' if yes else 'wrong'}" for how, yes in o.isolated.items())
    truly = f"the main kernel's dh_pre2 is {'right' if o.g_pre_right else 'wrong'}"
    orders = f"{ORDERS} orders of the right products differ by {o.spread:.1e}, and {o.missing:.2g} is missing"
    ieee = "the IEEE product of what was loaded and the inverse RMS"
    absolute, relative = (max(pair[i] for pair in o.repaired.values()) for i in (0, 1))
    repaired = (
        f"dalpha_pre is off by at most {absolute:.1e}, and any part by {relative:.1e} of it, in {len(o.repaired)} runs"
    )
    on_kernel = {
        "h1_dh_pre2_wrong": judged(
            not o.g_pre_right, o.g_pre_off,
            confirmed=f"it is off by up to {o.g_pre_off:.2g}, beyond its bound; first wrong step: {o.first}",
            refuted=f"every element is within its bound; the largest difference is {o.g_pre_off:.1e}",
        ),
        "h2_hmix_load": judged(
            o.raw_off > 0, o.raw_off,
            confirmed=f"{o.raw_off} of {o.elements} elements that it loads are not pre's",
            refuted=f"all {o.elements} elements that it loads are pre's, bit for bit",
        ),
        "h3_atomic_order": judged(
            o.spread >= o.missing, o.spread, confirmed=f"{orders}: enough", refuted=f"{orders}: too little"
        ),
        "h4_inv_rms": judged(
            o.products_off > 0, o.products_off,
            confirmed=f"{o.products_off} of {o.elements} products are not {ieee}",
            refuted=f"all {o.elements} products are {ieee}, bit for bit",
        ),
        "h5_range": judged(
            not in_range, [low, high],
            confirmed=f"there are sizes at float32's limits, or Inf or NaN: {sizes}",
            refuted=f"all are finite and far from float32's limits, 1e-38 and 3e38: {sizes}",
        ),
        "kahan_fixes": judged(
            o.compensated <= LIMIT, o.compensated,
            confirmed=f"added with compensation its products give dalpha_pre to within {o.compensated:.1e} of it",
            refuted=f"added with compensation its products still give a dalpha_pre {o.compensated:.2g} of it off",
        ),
        "same_structure": judged(
            o.sums[worst] <= 1.0, o.sums[worst],
            confirmed="each is a sum of products of two tensors over a token's n, n or n^2 columns, with one atomic "
            f"addition a token; {own}, all three are right (at most {o.sums[worst]:.2g} of the bound)",
            refuted=f"{own}, {worst} is not their sum ({o.sums[worst]:.2g} of the bound)",
        ),
        "isolated_kernel_finds_it": judged(
            all(yes == o.g_pre_right for yes in o.isolated.values()), dict(o.isolated),
            confirmed=f"{findings}, and {truly}",
            refuted=f"{findings}, but {truly}",
        ),
    }  # fmt: skip
    return {name: one | {"given": given} for name, one in on_kernel.items()} | {
        "fed_alike": judged(
            len(o.moved) == 3, ", ".join(o.moved),
            confirmed="when one column of the operand x changes, all three move",
            refuted=f"when one column of the operand x changes, and nothing that the forward made of x, of the three "
            f"{', '.join(o.moved) or 'none'} moves: dh_post2 and dh_res1 come from gradients that this function is "
            "given, dh_pre2 from a sum over D of its own",
            given="that the backward is that of the report's mhc_forward_pre, which gets x beside what the forward "
            "made of it, and the gradients of post and P",
        ),
        "fixed_below_1e-3": judged(
            absolute < LIMIT and relative < LIMIT, [absolute, relative],
            confirmed=repaired, refuted=f"{repaired}, which is not below {LIMIT:g}",
            given="the repair of the author's repository, a tile of all D columns, and kernels/mhc beside it",
        ),
    }  # fmt: skip


def error_of(dalpha: Tensor, exact: Tensor) -> tuple[float, float]:
    """Absolute error of dalpha_pre, and the largest relative error of the three."""
    off = (dalpha.double().cpu() - exact.double().cpu()).abs()
    return float(off[0]), float((off / exact.double().cpu().abs()).max())


def response(kernel: Kernel, n: int, d: int, seed: int, device: str) -> np.ndarray:
    """What dpre [D, n] answers to one column of dx_in at a time, over what it should: 1 where it is right."""
    p = Problem.draw(d, n, d, seed, Constants(), device, "columns")
    p = replace(p, x=p.x.sign() + (p.x == 0) + p.x)  # no element is near zero
    right = counterfactual.steps(p, RIGHT)["dpre"]
    return (kernel(p)["dpre"].double() / right).cpu().numpy()


def answered(found: np.ndarray) -> str:
    """The columns to which dpre answers as it should, in words."""
    columns = np.flatnonzero(np.all(np.abs(found - 1.0) < 1e-3, axis=1))
    if not columns.size:
        return "none"
    runs = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if run.size > 1 else f"{run[0]}" for run in runs)


@dataclass(frozen=True)
class Sums:
    """Errors of dalpha_pre from right products against float64, a draw each, relative to the sum of their sizes."""

    plain: np.ndarray
    inside: np.ndarray
    """Compensated over a token's products, and the tokens' sums added plainly, as atomics add them."""
    all_over: np.ndarray
    distinct: int
    """Different results of `ORDERS` orders of one draw's tokens."""


def sums(tokens: int, n: int, d: int, seeds: Sequence[int], rng: np.random.Generator) -> Sums:
    """Add right products in every way that a claim speaks of, on draws of the inputs."""
    pre, distinct = [], 0
    for seed in seeds:
        p = Problem.draw(tokens, n, d, seed, Constants(), "cpu")
        s = counterfactual.steps(p)
        pre.append((s["g_pre"] * s["mix_pre"]).numpy().astype(np.float32))
        if not distinct:
            by_token = pre[0].sum(-1)
            found = {float(np.cumsum(rng.permutation(by_token), dtype=np.float32)[-1]) for _ in range(ORDERS)}
            distinct = len(found)
    terms = np.stack(pre)  # [draw, T, n]
    exact, size = terms.astype(np.float64).sum((1, 2)), np.abs(terms).astype(np.float64).sum((1, 2))

    def in_turn(of_tokens: np.ndarray) -> np.ndarray:
        return np.cumsum(of_tokens, axis=1, dtype=np.float32)[:, -1]

    ways = (in_turn(terms.sum(-1)), in_turn(compensated(terms)), compensated(terms.reshape(len(terms), -1)))
    return Sums(*((way.astype(np.float64) - exact) / size for way in ways), distinct)


def apart(tokens: int, n: int, d: int, seeds: Sequence[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """By draw: |dalpha_res in the kernel's order - by torch| of 20 orders [draw, 20], relative; and |dalpha_res|."""
    relative, sizes = [], []
    for seed in seeds:
        p = Problem.draw(tokens, n, d, seed, Constants(), "cpu")
        res = p.dz.flatten(-2) * (p.raw[:, 2 * n :] * p.r[:, None])
        by_torch, by_token = float(res.sum()), res.sum(-1).numpy()
        orders = [float(np.cumsum(rng.permutation(by_token), dtype=np.float32)[-1]) for _ in range(20)]
        relative.append([abs(one / by_torch - 1.0) for one in orders])
        sizes.append(abs(by_torch))
    return np.array(relative), np.array(sizes)


def gain(before: np.ndarray, after: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """RMS error after over before, and its 97.5% interval over resampled draws (two such: 95% over both)."""
    picks = rng.integers(0, len(before), (2000, len(before)))
    many = np.sqrt((after[picks] ** 2).mean(1) / (before[picks] ** 2).mean(1))
    low, high = np.quantile(many, [0.0125, 0.9875])
    return float(np.sqrt((after**2).mean() / (before**2).mean())), float(low), float(high)


def of_sums(
    all_over: tuple[float, float, float], inside: tuple[float, float, float], of_res: tuple[np.ndarray, np.ndarray],
    distinct: int, by_atomics: int | None,
) -> dict[str, Settlement]:  # fmt: skip
    """Verdicts of the claims on additions.

    The first two are :func:`gain`s, `of_res` is :func:`apart`'s, and `by_atomics` is None without a GPU.
    """
    better = [gained[2] < 1.0 for gained in (all_over, inside)]
    places = ("over all products", "inside each program, with atomics after it")
    kahan = "; ".join(
        f"{place} {ratio:.3g} times the plain error ({low:.3g} to {high:.3g})"
        for place, (ratio, low, high) in zip(places, (all_over, inside), strict=True)
    )
    size = abs(REPORTED[PARTS[2]][0])
    beyond = of_res[0] * size >= APART
    near = (of_res[1] >= size / NEAR) & (of_res[1] <= size * NEAR)
    shares = [float(beyond.mean()), float(beyond[near].mean()) if near.any() else math.nan]
    words = {_by_chance(share) for share in shares}
    shown = (
        f"right float32 sums, scaled to {size:.0f}, are {APART:.2e} or more apart in {shares[0]:.2%} of pairs of all "
        f"{near.size} draws, some of which nearly cancel, and in {shares[1]:.2%} of pairs of the {near.sum()} draws of "
        f"that size already (within a factor of {NEAR:g})"
    )
    gpu = "" if by_atomics is None else f", and {by_atomics} of {ORDERS} runs by atomics on this GPU"
    results = f"of {ORDERS} orders of the same tokens' sums{gpu}"
    return {
        "kahan_if_precision": judged(
            "confirmed" if all(better) else "undecidable" if any(better) else "refuted", [all_over[0], inside[0]],
            confirmed=f"wherever it is put, it improves the sum: {kahan}",
            undecidable=f"it depends on where it is put, which the plan leaves open: {kahan}",
            refuted=f"wherever it is put, no improvement is shown: {kahan}",
        ),
        "res_difference_is_rounding": judged(
            words.pop() if len(words) == 1 else "undecidable", [share for share in shares if not math.isnan(share)],
            confirmed=f"{shown}: nothing unusual (from {NO_ERROR:.0%}) by both",
            undecidable=f"{shown}: not {NO_ERROR:.0%} or more by both, which would be nothing unusual, and not below "
            f"{CHANCE:.1%} by both, which would be no mere rounding",
            refuted=f"{shown}: by both below {CHANCE:.1%}, which is no mere rounding",
        ),
        "atomics_nondeterministic": judged(
            distinct > 1 or (by_atomics or 0) > 1, distinct if by_atomics is None else [distinct, by_atomics],
            confirmed=f"{distinct} different results {results}",
            refuted=f"one result {results}",
        ),
    }  # fmt: skip


def _by_chance(share: float) -> str:
    return "confirmed" if share >= NO_ERROR else "refuted" if share < CHANCE else "undecidable"


def of_ratios(
    found: Mapping[str, Ratios], cause: str, eps: Mapping[float, Ratios], given: str
) -> dict[str, Settlement]:
    """Verdicts on the report's numbers; `eps` are the ratios without hc_eps, by its value, the source's first."""
    near = {name: one.share(RATIO * 0.9, RATIO * 1.1) for name, one in found.items()}
    own, drawn = near[cause], found[cause].drawn
    others = [share for name, share in near.items() if name != cause]
    within_it = f"a draw's ratio is within 10% of {RATIO:.4f} with a probability of {own:.2%}"
    tail = f"10 to 90% of draws give {np.quantile(drawn, 0.1):.2g} to {np.quantile(drawn, 0.9):.2g}"
    rivals = f"those of other faults with one of up to {max(others):.2%}"
    changed = {value: 1.0 - one.share(0.9, 1.1) for value, one in eps.items()}
    source = next(iter(changed))
    larger = ", ".join(f"{share:.1%} at {value:g}" for value, share in changed.items() if value != source)
    draws = f"of draws at {source:g}, the source's value; {larger}"
    golden_value, values = REPORTED[PARTS[0]][0], found[cause].right
    nearest = float(values[np.argmin(np.abs(values - golden_value))])
    span = f"{len(values)} draws from the priors stated here give {values.min():.4g} to {values.max():.4g}"
    return {
        "ratio_is_signature": judged(
            own >= 0.95, own, given=given,
            confirmed=f"{within_it}; {rivals}",
            refuted=f"{within_it}, where a mark would have 95%; {tail}; {rivals}",
        ),
        "hc_eps_matters": judged(
            changed[source] > 0.5, changed[source],
            confirmed=f"it changes by more than 10% in {changed[source]:.2%} {draws}",
            refuted=f"it changes by more than 10% in {changed[source]:.2%} {draws}: in most draws it does not",
            given=f"hc_eps = {source:g}, as the public kernels of mHC have it",
        ),
        "reported_value_reproduced": judged(
            "confirmed" if abs(nearest - golden_value) < 5e-7 else "untestable", nearest,
            confirmed=f"a draw arrives at it, {nearest:.6f}; {span}",
            untestable="neither the distribution of the inputs nor their seed is on record, and the kernel is not "
            f"either; {span}, the nearest is {nearest:.6f}",
        ),
    }  # fmt: skip


UNCHANGED, AT_RATIO = "dalpha_post and dalpha_res are right", f"dalpha_pre is {RATIO:.4f} of the right value"


def report_alone(comparison: Comparison, unchanged: Mapping[str, bool]) -> Weighing:
    """What the report's own numbers leave: not what changes the other parts, and not what is far less likely."""
    result = Weighing([UNCHANGED, AT_RATIO])
    for name in comparison.share:
        words = "the likeliest"
        if name != comparison.best:
            edges = f"{number(comparison.low[name])} to {number(comparison.high[name])}"
            words = f"the likeliest is {number(comparison.ratio[name])} times as likely ({edges})"
        same, left = unchanged[name], name in comparison.left
        result.fits[name] = {
            UNCHANGED: Fit(same, math.nan, "fits" if same else "REFUTED: they change"),
            AT_RATIO: Fit(left, math.nan, ("fits: " if left else "REFUTED: ") + words),
        }
    return result


def shares(comparison: Comparison, weighed: Weighing, given: str) -> Table:
    """A row an explanation, the likeliest first; `given` names the one that the author's repository gives."""
    rows = []
    for name in sorted(comparison.share, key=lambda name: -comparison.share[name]):
        interval = [comparison.low.get(name, 1.0), comparison.high.get(name, 1.0)]
        source = "given: the repository" if name == given else "this workbook"
        verdict = "not refuted" if name in weighed.left else "refuted"
        rows.append((name, source, comparison.share[name], comparison.ratio.get(name, 1.0), interval, verdict))
    titles = ("from", "share of the likelihood", "the likeliest is so many times as likely", "interval", "verdict")
    return Table(("explanation", *titles), rows)


FAULTS = {
    likelihood.ORDER: "nothing is read wrongly; only the order of additions differs",
    "first tile of ... columns only": "x and dx_in are read up to that column, and the rest is left out of dpre",
    "pre without its stride over tokens": "token t reads the n gates that begin at element t of pre, and not at t n",
    "pre one element late": "each gate is the next element of pre",
    "x as [T, D, n]": "within a token x is read as if the n streams of a column lay side by side",
    "x without its stream in the token's stride": "token t begins at element t D of x, and not at t n D",
    "dx_in one element late": "each element of dx_in is the next one",
    "mix from post's columns": "h of post stands where h of pre (h_pre1_hmix) should",
    "mix not normalised": "h of pre is used without the token's inverse RMS r",
    "hc_eps not taken off": "the sigmoid's slope is taken at pre, which has epsilon in it",
}
"""What a kernel with each fault on the list does."""


def faults() -> Table:
    """A row a fault on the list: its name, and what a kernel with it does."""
    return Table(("explanation", "what the kernel does"), list(FAULTS.items()))


def by_columns(names: Sequence[str], n: int, d: int, tile: int, seed: int) -> str:
    """What one column of dx_in at a time would tell of the explanations `names`, counted in float64."""
    known = faulty.rivals(n, d, tile)

    def answers(access: Access) -> np.ndarray:
        return response(lambda p: counterfactual.steps(p, access), n, d, seed, "cpu")

    found = {name: answers(known.get(name, RIGHT)) for name in names}
    told = [
        name for name in names if not any(np.allclose(found[name], found[o], atol=1e-3) for o in names if o != name)
    ]
    silent = sum(np.allclose(one, 1.0, atol=1e-3) for one in found.values())
    words = f"One column of dx_in at a time tells {len(told)} of those {len(names)} explanations from the rest"
    if not silent:
        return f"{words}."
    return f"{words}; {silent} leave dpre right, and for them dh_pre2 and h_pre1_hmix have to be compared too."


def named_after(found: Mapping[str, Ratios], drawn: np.ndarray, counts: Sequence[int], name: str) -> int | None:
    """The first of `counts` tests after which `name` alone is not refuted, by their ratios `drawn`; None if none."""
    return next((k for k in counts if likelihood.compare(found, drawn[:k]).left == [name]), None)


def after_how_many(several: Sequence[int | None], most: int) -> str:
    """Median and range of :func:`named_after` over sequences of `most` tests, in words."""
    in_order = sorted(math.inf if one is None else one for one in several)
    low, middle, high = (
        f"more than {most}" if math.isinf(one) else f"{one}"
        for one in (in_order[0], in_order[len(in_order) // 2], in_order[-1])
    )
    return f"median {middle}, from {low} to {high}, over {len(in_order)} sequences"


OTHER_PRIORS = {
    "as stated": PRIORS,
    "phi's standard deviation 0.02": replace(PRIORS, phi=(0.02, 0.02)),
    "phi's standard deviation 1": replace(PRIORS, phi=(1.0, 1.0)),
    "each alpha 0.01": replace(PRIORS, alpha=(0.01, 0.01)),
    "each alpha 1": replace(PRIORS, alpha=(1.0, 1.0)),
    "b zero": replace(PRIORS, b=0.0),
}
"""The priors, and others within what they hold."""


def sensitivity(tokens: int, n: int, d: int, seeds: Sequence[int], tile: int, given: str) -> Table:
    """A row a prior: the likeliest explanation, the share of the one that is `given`, and how many are not refuted."""
    rows, access = [], faulty.rivals(n, d, tile)
    for name, priors in OTHER_PRIORS.items():
        found = likelihood.compare(likelihood.ratios(tokens, n, d, seeds, access, Constants(), priors), [RATIO])
        rows.append((name, found.best, found.share[given], f"{len(found.left)} of {len(found.share)}"))
    return Table(("priors", "the likeliest", f"share of {given}", "not refuted"), rows)


def unchanged(p: Problem, accesses: Mapping[str, Access]) -> dict[str, bool]:
    """Whether each fault leaves dalpha_post and dalpha_res as they are."""
    right = counterfactual.dalpha(p)[1:]
    return {name: torch.equal(counterfactual.dalpha(p, access)[1:], right) for name, access in accesses.items()}


PLACES: dict[str, tuple[bool, bool]] = {
    "dphi, and dz phi^T in dx": (True, False),
    "dphi, and x r^2 sum(dmix mix) / K in dx": (False, True),
    "dphi, and both of these in dx": (True, True),
}
"""Where gamma may stand in the source's backward: on x in dphi, and on either or both of dx's terms with a product."""


def with_gamma(inputs: Inputs, gamma: Tensor, c: Constants, place: str) -> dict[str, Tensor]:
    """The backward with a norm weight gamma [n D] that the forward does not apply, standing at `place`."""
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    d = golden.backward(inputs, s, c)
    weight = gamma.view(inputs.x.shape[1:]) - 1.0
    through, shrink = PLACES[place]
    dx = d["dx"] + through * weight * (d["dprojection"] @ inputs.phi.T).view_as(inputs.x)
    return d | {"dphi": gamma[:, None] * d["dphi"], "dx": dx - shrink * weight * d["shrink"][:, None, None] * inputs.x}


def by_autograd(inputs: Inputs, c: Constants) -> dict[str, Tensor]:
    """The gradients of the forward, by autograd in float64."""
    x, phi, b, alpha = (getattr(inputs, name).clone().requires_grad_() for name in ("x", "phi", "b", "alpha"))
    s = golden.forward(x, phi, b, alpha, inputs.y, c)
    torch.autograd.backward([s["out"], s["x_in"]], [inputs.dout, inputs.dx_in])
    return {"dx": x.grad, "dphi": phi.grad, "db": b.grad, "dalpha": alpha.grad}


def relative(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """|found - exact| / |exact|, a number a gradient."""
    return {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}


def off_by_gamma(
    inputs: Inputs, gamma: Tensor, c: Constants, exact: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """How far each gradient is off, relative, with `gamma` at each of `PLACES`."""
    return {place: relative(with_gamma(inputs, gamma, c, place), exact) for place in PLACES}


def directional(inputs: Inputs, gradients: dict[str, Tensor], c: Constants, seed: int, step: float = 1e-5) -> Table:
    """Each gradient along a random direction, beside the forward's difference quotient, which needs no autograd."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for name in ("x", "phi", "b", "alpha"):
        value = getattr(inputs, name)
        direction = torch.randn(value.shape, generator=rng, dtype=torch.float64)
        ends = [_pull(replace(inputs, **{name: value + sign * step * direction}), c) for sign in (1.0, -1.0)]
        quotient = (ends[0] - ends[1]) / (2.0 * step)
        along = float((gradients[f"d{name}"] * direction).sum())
        rows.append((f"d{name}", along, quotient, abs(along - quotient) / max(abs(quotient), 1e-300)))
    return Table(("gradient", "along a direction", "difference quotient", "relative difference"), rows)


def _pull(inputs: Inputs, c: Constants) -> float:
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    return float((s["out"] * inputs.dout).sum() + (s["x_in"] * inputs.dx_in).sum())


def dalpha_as_shown(inputs: Inputs, c: Constants) -> Tensor:
    """dalpha [3] by the golden formulas that the report shows: sums of dh h, dh_pre2 from x, dx_in and pre - hc_eps."""
    n = inputs.x.shape[1]
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    g = golden.backward(inputs, s, c)["g"].clone()
    gate = s["pre"] - c.hc_eps
    g[:, :n] = (inputs.x * inputs.dx_in[:, None, :]).sum(-1) * gate * (1.0 - gate)
    return golden.alpha_gradient(g, s["mix"], n)


def of_gradients(
    shown: Sequence[float], quotient: float, off: Mapping[str, Mapping[str, float]],
    ones: Mapping[str, Mapping[str, float]],
) -> dict[str, Settlement]:  # fmt: skip
    """Verdicts on the golden reference.

    `shown` and `quotient`: relative errors of dalpha's parts against autograd, and of dalpha along a direction. `off`:
    those of each gradient with a gamma that is not one, by place; `ones`: with a gamma of ones.
    """
    wrong = {place: [name for name, one in found.items() if one > ROUNDED] for place, found in off.items()}
    places = "; ".join(f"in {place}: {', '.join(names) or 'none'}" for place, names in wrong.items())
    largest = max(max(found.values()) for found in ones.values())
    sides = {bool(names) for names in wrong.values()} if largest <= ROUNDED else {True}
    size = f"largest relative difference against autograd {max(shown):.1e}, against difference quotients {quotient:.1e}"
    with_ones = f"with a gamma of ones all of it is off by at most {largest:.1e}"
    return {
        "golden_dalpha_is_right": judged(
            max(shown) <= ROUNDED and quotient <= QUOTIENT, [max(shown), quotient],
            confirmed=f"{size}: no more than they leave open",
            refuted=f"{size}: more than they leave open ({ROUNDED:.0e} and {QUOTIENT:.0e})",
            given="the forward of Xie et al. 2026, which the report's repository computes too",
        ),
        "golden_is_the_gradient": judged(
            "undecidable" if len(sides) > 1 else "refuted" if True in sides else "confirmed",
            {place: max(found.values()) for place, found in off.items()},
            confirmed=f"wherever gamma stands, no gradient is off by more than rounding; {with_ones}",
            undecidable=f"it depends on where gamma stands. Not the gradient, if it is not one: {places}; {with_ones}",
            refuted=f"wherever gamma stands, where it is not one, some are not the gradient: {places}; {with_ones}",
            given="that gamma stands on x in dphi and on a product term of dx, and that the forward applies none (the "
            "author's repository); which product term it is, is not on record",
        ),
    }  # fmt: skip


def settle(ledger: labkit.Ledger, settlements: Mapping[str, Settlement]) -> None:
    """Give each claim its verdict."""
    for claim, one in settlements.items():
        ledger.settle(claim, one["truth"], measured=one["measured"], because=one["because"], given=one.get("given", ""))


def answer(result: Mapping[str, Any]) -> str:
    """The notebook's answer in a few sentences, from a result.json of it."""
    verdict, metrics, given = result["verdict"], result["metrics"], result["parameters"]
    of_order = result["claims"]["h3_atomic_order"]["verdict"]
    order = {"refuted": "is not among these", "confirmed": "is among these"}[of_order]
    if verdict["cause"] != "undecidable":
        return f"{verdict['cause'].capitalize()}; the order of atomic additions is {of_order}."
    favours = "favours" if metrics["likeliest"] == metrics["given"] else "does not favour"
    count = f"{len(verdict['explains'])} of {metrics['faults']}"
    columns = by_columns(verdict["explains"], given["n"], given["d"], given["tile"], given["seed"])
    return (
        f"Undecidable from the report's three numbers: they do not refute {count} explanations, and the order of "
        f"atomic additions {order}. Its author's repository names one, a tile too narrow, which the report's ratio "
        f"{favours}. {columns}"
    )


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record, as README and notebook have it; none without a record."""
    kept = recorded("dalpha_atomics", "cpu")
    return {"dalpha_atomics": answer(kept.result)} if kept else {}
