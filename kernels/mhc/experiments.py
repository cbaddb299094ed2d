"""What the notebook dalpha_atomics runs: the plan's comparisons, one column at a time, sums in many orders, gradients.

Sizes: T tokens, n streams, D columns, M = n^2 + 2 n. A :data:`~kernels.mhc.identify.Kernel` takes a
:class:`~kernels.mhc.faulty.Problem` and gives a trace of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.mhc import counterfactual, faulty, golden, likelihood
from kernels.mhc.faulty import CORRECT_ACCESS, PRIORS, Access, Problem
from kernels.mhc.identify import Kernel
from kernels.mhc.likelihood import Comparison, Ratios
from kernels.mhc.problem import Constants, Inputs
from labkit.session.wording import digits
from whywrong import Trace, Weighing
from whywrong.comparing.bounds import sum_of_products
from whywrong.comparing.comparison import compare
from whywrong.explaining.hypotheses import Fit
from whywrong.tables import Table

Tensor = torch.Tensor
PARTS = ("dalpha_pre", "dalpha_post", "dalpha_res")
REPORTED = {PARTS[0]: (-19.465603, -0.948053), PARTS[1]: (7.037663, 7.037663), PARTS[2]: (-219.307068, -219.307373)}
"""The report's golden value and its kernel's, of each part."""
RATIO = 0.948053 / 19.465603
"""The report's wrong dalpha_pre over its right one."""
LIMIT = 1e-3
"""The report's own criterion for a repaired kernel, absolute for dalpha_pre and relative for all."""
ORDERS = 200
"""Orders in which a sum is added."""

# The report's plan: the two factors of the sum, and the sum ----------------------------------------------------------


def dh_pre2_error(p: Problem, observed: Trace) -> float:
    """Largest difference of the kernel's dh_pre2 [T, n] from float64; whether it is wrong, `localise` says."""
    return float((observed["g_pre"].double() - counterfactual.steps(p)["g_pre"]).abs().max())


def wrong_loads(p: Problem, observed: Trace) -> int:
    """How many elements loaded for h_pre1_hmix [T, n] are not those of the projection's first n columns."""
    return int((observed["raw_pre"] != p.raw[:, : p.x.shape[1]]).sum())


def wrong_products(p: Problem, observed: Trace) -> int:
    """How many of h_pre1_hmix [T, n] are not the IEEE product of what was loaded and the token's inverse RMS."""
    return int((observed["mix_pre"] != observed["raw_pre"] * p.r[:, None]).sum())


def value_ranges(observed: Trace) -> dict[str, list[float] | None]:
    """Smallest and largest size, but for zeros, of dh_pre2, dh_post2 and dh_res1; None where one is not finite."""
    ranges: dict[str, list[float] | None] = {}
    for name, step in (("dh_pre2", "g_pre"), ("dh_post2", "g_post"), ("dh_res1", "g_res")):
        sizes = observed[step].abs()
        finite, sizes = bool(torch.isfinite(sizes).all()), sizes[sizes != 0]
        ends = [float(sizes.min()), float(sizes.max())] if sizes.numel() else [0.0, 0.0]
        ranges[name] = ends if finite else None
    return ranges


def debug_kernel_is_correct(p: Problem, tile: int) -> bool:
    """Whether the plan's debug kernel, launched with a tile of `tile` columns, finds the dh_pre2 that is right."""
    right = counterfactual.backward(p).step("g_pre")
    return compare(faulty.isolated(p, tile), right.value, bound=right.bound).ok


def sum_errors(p: Problem, observed: Trace) -> dict[str, float]:
    """Each part of dalpha against the exact sum of the kernel's own dh times its columns of h, over its tolerance.

    So a part that takes other columns, or does not normalise them, is not computed as the two others are.
    """
    h = p.raw.double() * p.r.double()[:, None]
    value, bound = counterfactual.dalpha_of(p, observed["g_pre"].double(), h[:, : p.x.shape[1]])
    times = (observed["dalpha"].double() - value).abs() / bound.absolute
    return dict(zip(PARTS, times.tolist(), strict=True))


def manual_sum(products: Tensor) -> tuple[float, int]:
    """The sum of `products` [B, S, n] by the plan's own loops (stage 3.2), and how many products they add.

    The innermost loop is `for n in range(n)`: it takes the name of its own limit, which is one less for each token.
    """
    total, added, n = 0.0, 0, products.shape[2]
    for b in range(products.shape[0]):
        for s in range(products.shape[1]):
            for n in range(n):  # noqa: B020  (as the report has it)
                total, added = total + float(products[b, s, n]), added + 1
    return total, added


def wrong_db(p: Problem, observed: Trace) -> int:
    """How many of db's first n numbers, the sums of dh_pre2 over tokens, are wrong by more than rounding."""
    right = counterfactual.backward(p).step("g_pre")
    terms = right.value.abs()
    bound = right.bound.absolute.sum(0) + sum_of_products(terms.sum(0), len(terms)).absolute
    return int(((observed["g_pre"].double() - right.value).sum(0).abs() > bound).sum())


def users_of_dh_pre2(inputs: Inputs, c: Constants) -> list[str]:
    """The gradients of the golden backward that change when dh_pre2 does, and nothing else."""
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    d = golden.backward(inputs, s, c)
    changed = d["g"].clone()
    changed[:, : inputs.x.shape[1]] += 1.0
    both = [golden.parameter_gradients(inputs, s, g, inputs.dx_in) for g in (d["g"], changed)]
    return [name for name in ("dalpha", "db", "dphi", "dx") if not torch.equal(both[0][name], both[1][name])]


def moved_by_one_column(p: Problem) -> list[str]:
    """The parts of dalpha that change when column 0 of the operand x does, and nothing computed from x."""
    changed = replace(p, x=p.x.clone())
    changed.x[..., 0] += 1.0
    moved = (counterfactual.dalpha(changed) != counterfactual.dalpha(p)).tolist()
    return [name for name, differs in zip(PARTS, moved, strict=True) if differs]


def try_block(block: Callable[[int, int], int], n: int, device: str) -> Table:
    """The kernel with a tile of `block(D, n)` columns, at several D: how many columns it leaves out of dalpha_pre."""
    rows = []
    for d in (16, 24, 32, 33, 64, 100, 128):
        width = int(block(d, n))
        p = Problem.sample(8, n, d, d, Constants(), device)
        read = right_columns(
            one_column_at_a_time(lambda q, w=width: faulty.backward(q, Access(tile=w)), n, d, d, device)
        )
        error, _ = error_of(faulty.backward(p, Access(tile=width))["dalpha"], counterfactual.dalpha(p))
        rows.append((d, width, d - len(read), error, "right" if len(read) == d and error < LIMIT else "WRONG"))
    return Table(("D", "tile", "columns left out", "error of dalpha_pre", ""), rows)


def error_of(dalpha: Tensor, exact: Tensor) -> tuple[float, float]:
    """Absolute error of dalpha_pre, and the largest relative error of the three."""
    difference = (dalpha.double().cpu() - exact.double().cpu()).abs()
    return float(difference[0]), float((difference / exact.double().cpu().abs()).max())


# One column of dx_in at a time ---------------------------------------------------------------------------------------


def one_column_at_a_time(kernel: Kernel, n: int, d: int, seed: int, device: str) -> np.ndarray:
    """dpre [D, n] over its right value, where token t's dx_in is one in column t and zero elsewhere.

    Each right value is one element of x, added to zeros, so that a correct kernel gives exactly 1.
    """
    p = Problem.sample(d, n, d, seed, Constants(), device, "columns")
    p = replace(p, x=p.x.sign() + (p.x == 0) + p.x)  # no element is near zero
    right = counterfactual.steps(p, CORRECT_ACCESS)["dpre"]
    return (kernel(p)["dpre"].double() / right).cpu().numpy()


def right_columns(response: np.ndarray) -> np.ndarray:
    """The columns of :func:`one_column_at_a_time` at which every stream is right."""
    return np.flatnonzero(np.all(response == 1.0, axis=1))


def in_words(columns: np.ndarray) -> str:
    """Column numbers in ascending order, as their runs: "0 to 31, 40"."""
    if not columns.size:
        return "none"
    runs = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if run.size > 1 else f"{run[0]}" for run in runs)


def distinguished(names: Sequence[str], n: int, d: int, tile: int, seed: int) -> tuple[list[str], list[str]]:
    """Of the explanations `names`: those whose response to one column at a time no other has, and those that leave dpre
    right. In float64, where a product with one is exact.
    """
    known = faulty.rivals(n, d, tile)

    def response(access: Access) -> np.ndarray:
        return one_column_at_a_time(lambda p: counterfactual.steps(p, access), n, d, seed, "cpu")

    responses = {name: response(known.get(name, CORRECT_ACCESS)) for name in names}
    alike = {name: [o for o in names if np.array_equal(responses[name], responses[o])] for name in names}
    return [name for name in names if alike[name] == [name]], [name for name in names if (responses[name] == 1.0).all()]


# Sums in many orders, and with compensation --------------------------------------------------------------------------


def sums_in_orders(products: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Float32 sums [ORDERS] of the same `products`, each in an order sampled at random."""
    terms = products.flatten().cpu().numpy().astype(np.float32)
    return np.array([np.cumsum(rng.permutation(terms), dtype=np.float32)[-1] for _ in range(ORDERS)])


def kahan_sum(terms: np.ndarray) -> np.ndarray:
    """Kahan's sum of float32 `terms` along their last axis."""
    total = np.zeros(terms.shape[:-1], np.float32)
    lost = np.zeros_like(total)
    for i in range(terms.shape[-1]):
        y = terms[..., i] - lost
        grown = total + y
        lost = (grown - total) - y
        total = grown
    return total


def products_of_tokens(tokens: int, n: int, d: int, seeds: Sequence[int]) -> np.ndarray:
    """The correct products [draw, T, n] whose sum is dalpha_pre, rounded to float32, of a draw of the inputs a seed."""
    sampled = []
    for seed in seeds:
        s = counterfactual.steps(Problem.sample(tokens, n, d, seed, Constants(), "cpu"))
        sampled.append((s["g_pre"] * s["mix_pre"]).numpy().astype(np.float32))
    return np.stack(sampled)


def kahan_errors(products: np.ndarray, rng: np.random.Generator, orders: int = 16) -> dict[str, np.ndarray]:
    """Errors [draw, order] of float32 sums of `products` [draw, T, n], relative to the sum of their sizes, by where
    Kahan's summation is: nowhere, inside each program (a token's products; tokens are added plainly, as atomics add
    them), over all products. The tokens come in `orders` orders sampled at random.
    """
    exact, size = products.astype(np.float64).sum((1, 2)), np.abs(products).astype(np.float64).sum((1, 2))

    def in_turn(by_token: np.ndarray) -> np.ndarray:
        return np.cumsum(by_token, axis=1, dtype=np.float32)[:, -1]

    errors: dict[str, list[np.ndarray]] = {}
    for _ in range(orders):
        shuffled = np.stack([rng.permutation(of_draw) for of_draw in products])
        sums = {
            "nowhere": in_turn(shuffled.sum(-1)),
            "inside each program": in_turn(kahan_sum(shuffled)),
            "over all products": kahan_sum(shuffled.reshape(len(products), -1)),
        }
        for place, total in sums.items():
            errors.setdefault(place, []).append((total.astype(np.float64) - exact) / size)
    return {place: np.stack(of_orders, 1) for place, of_orders in errors.items()}


def rms_ratio(before: np.ndarray, after: np.ndarray, rng: np.random.Generator) -> list[float]:
    """RMS error after over before [draw, order], and the ends of its 97.5% interval (95% over two such), which is over
    resampled draws.
    """
    squares = [(errors**2).mean(1) for errors in (before, after)]
    picks = rng.integers(0, len(before), (2000, len(before)))
    resampled = np.sqrt(squares[1][picks].mean(1) / squares[0][picks].mean(1))
    return [
        float(np.sqrt(squares[1].mean() / squares[0].mean())),
        *map(float, np.quantile(resampled, [0.0125, 0.9875])),
    ]


def pairs_of_correct_sums(
    tokens: int, n: int, d: int, seeds: Sequence[int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distances of right float32 sums for dalpha_res, relative: the kernel's order against torch's, 20 orders a draw.

    Returns the distances [draw, 20], the sizes [draw] of dalpha_res, and the tolerance [draw] of a sum of that length,
    relative to it.
    """
    distances, sizes, allowed = [], [], []
    for seed in seeds:
        p = Problem.sample(tokens, n, d, seed, Constants(), "cpu")
        products = p.dz.flatten(-2) * (p.raw[:, 2 * n :] * p.r[:, None])
        by_torch, by_token = float(products.sum()), products.sum(-1).numpy()
        orders = [float(np.cumsum(rng.permutation(by_token), dtype=np.float32)[-1]) for _ in range(20)]
        distances.append([abs(total / by_torch - 1.0) for total in orders])
        sizes.append(abs(by_torch))
        bound = sum_of_products(products.double().abs().sum(), products.numel()).absolute
        allowed.append(float(bound) / abs(by_torch))
    return np.array(distances), np.array(sizes), np.array(allowed)


# What the report's numbers leave, and what experiments do ------------------------------------------------------------

EXPLANATIONS = {
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


def table_of_explanations() -> Table:
    """A row a fault on the list: its name, and what a kernel with it does."""
    return Table(("explanation", "what the kernel does"), list(EXPLANATIONS.items()))


def leaves_the_others(p: Problem, accesses: Mapping[str, Access]) -> dict[str, bool]:
    """Whether each fault leaves dalpha_post and dalpha_res as they are; another order of additions does."""
    right = counterfactual.dalpha(p)[1:]
    same = {name: torch.equal(counterfactual.dalpha(p, access)[1:], right) for name, access in accesses.items()}
    return same | {likelihood.ORDER: True}


def weigh_the_report(comparison: Comparison, others_right: Mapping[str, bool]) -> Weighing:
    """What the report's own numbers leave: not what changes the other parts, and not what is far less likely."""
    at_ratio = f"dalpha_pre is {RATIO:.4f} of the right value"
    result = Weighing(["dalpha_post and dalpha_res are right", at_ratio])
    for name in comparison.share:
        fits = {result.settings[0]: others_right[name], at_ratio: name in comparison.left}
        result.fits[name] = {s: Fit(ok, math.nan, "fits" if ok else "REFUTED") for s, ok in fits.items()}
    return result


def table_of_residuals(weighing: Weighing) -> Table:
    """A row a hypothesis: the smallest and the largest of its residuals over the settings, what is left first."""
    rows = []
    for name in sorted(weighing.fits, key=lambda name: name not in weighing.left):
        residuals = [fit.residual for fit in weighing.fits[name].values()]
        beyond = sum(not fit.ok for fit in weighing.fits[name].values())
        ends = [digits(edge) if edge < 1e6 else "over a million" for edge in (min(residuals), max(residuals))]
        verdict = f"refuted at {beyond} of {len(residuals)} settings" if beyond else "left"
        rows.append((name, verdict, *ends))
    columns = ("hypothesis", "verdict", "smallest residual", "largest residual")
    return Table(columns, rows, "residuals are times the tolerance")


def tests_until_identified(
    ratios: Mapping[str, Ratios], sampled: np.ndarray, counts: Sequence[int], name: str
) -> int | None:
    """The first of `counts` tests after which `name` alone is not refuted, by their ratios `sampled`; None if none."""
    return next((k for k in counts if likelihood.compare(ratios, sampled[:k]).left == [name]), None)


def median_and_range(tests: Sequence[int | None], most: int) -> str:
    """Median and range of :func:`tests_until_identified` over sequences of `most` tests, in words."""
    in_order = sorted(math.inf if count is None else count for count in tests)
    low, middle, high = (
        f"more than {most}" if math.isinf(count) else f"{count}"
        for count in (in_order[0], in_order[len(in_order) // 2], in_order[-1])
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


def table_of_priors(tokens: int, n: int, d: int, seeds: Sequence[int], tile: int, name: str) -> Table:
    """A row a prior: the likeliest explanation, the share of the explanation `name`, and how many are not refuted."""
    rows, accesses = [], faulty.rivals(n, d, tile)
    for words, priors in OTHER_PRIORS.items():
        ratios = likelihood.ratios(tokens, n, d, seeds, accesses, Constants(), priors)
        comparison = likelihood.compare(ratios, [RATIO])
        left = f"{len(comparison.left)} of {len(comparison.share)}"
        rows.append((words, comparison.best, comparison.share[name], left))
    return Table(("priors", "the likeliest", f"share of {name}", "not refuted"), rows)


# Is the golden reference the gradient? -------------------------------------------------------------------------------

Gradients = dict[str, Tensor]
PLACES: dict[str, tuple[bool, bool]] = {
    "dphi, and dz phi^T in dx": (True, False),
    "dphi, and x r^2 sum(dmix mix) / K in dx": (False, True),
    "dphi, and both of these in dx": (True, True),
}
"""Where gamma may stand in the source's backward: on x in dphi, and on either or both of dx's terms with a product."""


def backward_with_gamma(inputs: Inputs, gamma: Tensor, c: Constants, place: str) -> Gradients:
    """The backward with a norm weight gamma [n D] that the forward does not apply, standing at `place`."""
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    d = golden.backward(inputs, s, c)
    weight = gamma.view(inputs.x.shape[1:]) - 1.0
    through, shrink = PLACES[place]
    dx = d["dx"] + through * weight * (d["dprojection"] @ inputs.phi.T).view_as(inputs.x)
    return d | {"dphi": gamma[:, None] * d["dphi"], "dx": dx - shrink * weight * d["shrink"][:, None, None] * inputs.x}


def by_autograd(inputs: Inputs, c: Constants) -> Gradients:
    """The gradients dx, dphi, db and dalpha of the forward, by autograd in float64."""
    x, phi, b, alpha = (getattr(inputs, name).clone().requires_grad_() for name in ("x", "phi", "b", "alpha"))
    s = golden.forward(x, phi, b, alpha, inputs.y, c)
    torch.autograd.backward([s["out"], s["x_in"]], [inputs.dout, inputs.dx_in])
    return {"dx": x.grad, "dphi": phi.grad, "db": b.grad, "dalpha": alpha.grad}


def relative_errors(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """|gradient - exact| / |exact|, a number a gradient of `exact`."""
    return {name: float((gradients[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}


def errors_with_gamma(inputs: Inputs, gamma: Tensor, c: Constants, exact: Gradients) -> dict[str, dict[str, float]]:
    """The relative error of each gradient with `gamma` [n D] at each of `PLACES`."""
    return {place: relative_errors(backward_with_gamma(inputs, gamma, c, place), exact) for place in PLACES}


def along_a_direction(inputs: Inputs, gradients: Gradients, c: Constants, seed: int, step: float = 1e-5) -> Table:
    """Each gradient along a random direction, beside the forward's difference quotient, which needs no autograd."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for name in ("x", "phi", "b", "alpha"):
        value = getattr(inputs, name)
        direction = torch.randn(value.shape, generator=rng, dtype=torch.float64)
        ends = [_objective(replace(inputs, **{name: value + sign * step * direction}), c) for sign in (1.0, -1.0)]
        quotient = (ends[0] - ends[1]) / (2.0 * step)
        along = float((gradients[f"d{name}"] * direction).sum())
        rows.append((f"d{name}", along, quotient, abs(along - quotient) / max(abs(quotient), 1e-300)))
    return Table(("gradient", "along a direction", "difference quotient", "relative difference"), rows)


def _objective(inputs: Inputs, c: Constants) -> float:
    """What has dout and dx_in for gradients."""
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
