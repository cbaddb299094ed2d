"""What is measured for each claim of notebook dalpha_atomics, and its truth. The words are in data/claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kernels.mhc import counterfactual, experiments
from kernels.mhc.experiments import LIMIT, ORDERS, PARTS, RATIO, REPORTED
from kernels.mhc.faulty import Problem
from kernels.mhc.likelihood import Ratios
from labkit import Ledger
from whywrong import Localisation, Trace
from whywrong.tables import Table

APART = 3.05e-4
"""Between the report's two values of dalpha_res."""
NEAR = 1.5
"""A draw's dalpha_res is of the report's size if it is so many times as large or as small at most."""
IMPROVED = 0.9
"""Of the plain sum's RMS error: what a better way of adding has at most."""
QUOTIENT = 1e-6
"""What a central difference with a step of 1e-5 in float64 leaves open, relative to the derivative."""
ROUNDED = 1e6 * 2.0**-53
"""What a million roundings in float64 may make of a relative difference."""
SMALLEST, LARGEST = 1e-37, 1e37
"""A decade within the limits of float32."""


def shown(ledger: Ledger, *names: str) -> Table:
    """The verdicts that were reached so far on these claims, and why."""
    return Table(("claim", "verdict", "because"), [(n, (s := ledger.settled[n]).verdict, s.because) for n in names])


def settle_factors(ledger: Ledger, p: Problem, observed: Trace, report: Localisation, **rests_on: Any) -> None:
    """Settle hypotheses 1, 2, 4 and 5 on the kernel that gave `observed`; `report` is what `localise` says of it.

    `rests_on`, here and below: `blind`, whether the fault was sampled at random, and `tile`.
    """
    error, wrong = experiments.dh_pre2_error(p, observed), "g_pre" in report.divergent
    ledger.settle("h1_dh_pre2_wrong", wrong, error=error, first=report.first, **rests_on)
    loads, products = experiments.wrong_loads(p, observed), experiments.wrong_products(p, observed)
    elements = observed["raw_pre"].numel()
    ledger.settle("h2_hmix_load", loads > 0, wrong=loads, elements=elements, **rests_on)
    ledger.settle("h4_inv_rms", products > 0, wrong=products, elements=elements, **rests_on)
    ranges = experiments.value_ranges(observed)
    not_finite = [name for name, ends in ranges.items() if ends is None]
    at_limits = [name for name, ends in ranges.items() if ends and (0.0 < ends[0] < SMALLEST or ends[1] > LARGEST)]
    beyond = {"not_finite": not_finite, "at_limits": at_limits, "ranges": ranges}
    ledger.settle("h5_range", bool(not_finite or at_limits), **beyond, **rests_on)


def settle_sums(ledger: Ledger, p: Problem, observed: Trace, sums: np.ndarray, **rests_on: Any) -> None:
    """Settle the claims on the three sums; `sums` are those of the correct products in `ORDERS` orders.

    An order that moves the sum as far as what is missing may be the cause, and so may a fault as small: undecidable.
    """
    exact = float(counterfactual.dalpha(p)[0])
    moved, missing = float(np.abs(sums - exact).max()), abs(float(observed["dalpha"][0]) - exact)
    measured = {"orders": len(sums), "moved": moved, "missing": missing}
    ledger.settle("h3_atomic_order", None if moved >= missing else False, **measured, **rests_on)
    products = (observed["g_pre"].double() * observed["mix_pre"].double()).cpu().numpy().astype(np.float32)
    before = missing / abs(exact)
    after = abs(float(experiments.kahan_sum(products.ravel())) / exact - 1.0)
    fixes = after <= LIMIT if before > LIMIT else None
    ledger.settle("kahan_fixes", fixes, before=before, after=after, criterion=LIMIT, **rests_on)
    errors = experiments.sum_errors(p, observed)
    worst = max(errors, key=lambda name: errors[name])
    ledger.settle("same_structure", errors[worst] <= 1.0, worst=errors[worst], worst_part=worst, **rests_on)


def settle_use(ledger: Ledger, users: Sequence[str], wrong_db: int, n: int, **rests_on: Any) -> None:
    """Settle whether dalpha alone uses dh_pre2: `users` do; `wrong_db` of db's first n numbers are wrong."""
    others = [name for name in users if name != "dalpha"]
    ledger.settle("only_user_of_dh_pre2", not others, others=others, wrong=wrong_db, n=n, **rests_on)


def settle_manual_sum(ledger: Ledger, products: Tensor) -> None:
    """Settle whether the plan's loops give the sum of `products` [B, S, n], float64."""
    total, added = experiments.manual_sum(products)
    whole, allowed = float(products.sum()), ROUNDED * float(products.abs().sum())
    measured = {"manual": total, "whole": whole, "added": added, "count": products.numel()}
    ledger.settle("manual_sum_equals", abs(total - whole) <= allowed, **measured)


def settle_feeding(ledger: Ledger, moved: Sequence[str]) -> None:
    """Settle whether the three are fed alike: `moved` are the parts that change with one column of x."""
    ledger.settle("fed_alike", list(moved) == list(PARTS), moved=list(moved))


def settle_debug_kernel(ledger: Ledger, main: bool, debug: Mapping[str, bool], **rests_on: Any) -> None:
    """Settle the claim on the debug kernel: whether dh_pre2 is right in `main`, and in `debug` by launch."""
    misleading = [launch for launch, right in debug.items() if right != main]
    words = "right" if main else "wrong"
    ledger.settle("isolated_kernel_finds_it", not misleading, misleading=misleading, main=words, **rests_on)


def settle_additions(
    ledger: Ledger, kahan: Mapping[str, Sequence[float]], draws: int, distinct: int, by_atomics: int | None
) -> None:
    """Settle the claims on Kahan's summation and on orders.

    `kahan`: RMS error over the plain sum's and its interval, by where the summation is; `distinct`: different results
    of `ORDERS` orders, and `by_atomics` of as many runs on a GPU, None without one.
    """
    inside, over_all = (list(kahan[place]) for place in ("inside each program", "over all products"))
    improves = True if inside[2] <= IMPROVED else False if inside[1] > IMPROVED else None
    ledger.settle("kahan_if_precision", improves, inside=inside, over_all=over_all, draws=draws)
    differ = distinct > 1 or (by_atomics or 0) > 1
    ledger.settle("atomics_nondeterministic", differ, distinct=distinct, orders=ORDERS, by_atomics=by_atomics)


def settle_res(ledger: Ledger, distances: np.ndarray, sizes: np.ndarray, allowed: np.ndarray) -> None:
    """Settle whether dalpha_res's two values are right, by :func:`~kernels.mhc.experiments.pairs_of_correct_sums`."""
    size = abs(REPORTED[PARTS[2]][0])
    beyond = distances * size >= APART
    near = (sizes >= size / NEAR) & (sizes <= size * NEAR)
    share = float(beyond[near].mean()) if near.any() else 0.0
    bounds = (allowed[near] if near.any() else allowed) * size
    measured = {"apart": APART, "scaled": float(beyond.mean()), "near": share, "pairs": int(beyond[near].size)}
    measured |= {"relative": APART / size, "criterion": LIMIT}
    truth = False if bounds.max() < APART else True if share > 0.0 else None
    ends = [float(bounds.min()), float(bounds.max())]
    ledger.settle("res_difference_is_rounding", truth, allowed=ends, **measured)


def settle_ratios(ledger: Ledger, ratios: Mapping[str, Ratios], fault: str, tile: int) -> None:
    """Settle the claims on the report's numbers; `fault` is the explanation that its author's repository gives."""
    shares = {name: by_draw.share(RATIO * 0.9, RATIO * 1.1) for name, by_draw in ratios.items()}
    own, rivals = shares[fault], max(share for name, share in shares.items() if name != fault)
    middle = np.quantile(ratios[fault].drawn, [0.1, 0.9])
    ledger.settle("ratio_is_signature", own >= 0.95, ratio=RATIO, share=own, rivals=rivals, middle=middle, tile=tile)
    value, drawn = REPORTED[PARTS[0]][0], ratios[fault].right
    nearest = float(drawn[np.argmin(np.abs(drawn - value))])
    truth = True if abs(nearest - value) < 5e-7 else "untestable"  # half of the last digit that is reported
    span = [drawn.min(), drawn.max()]
    ledger.settle("reported_value_reproduced", truth, nearest=nearest, draws=len(drawn), drawn=span)


def settle_eps(ledger: Ledger, ratios: Mapping[float, Ratios]) -> None:
    """Settle whether hc_eps matters, by the ratios of the fault that leaves it on, at each value of hc_eps."""
    changed = [1.0 - by_draw.share(0.9, 1.1) for by_draw in ratios.values()]
    most = {share > 0.5 for share in changed}
    ledger.settle("hc_eps_matters", most.pop() if len(most) == 1 else None, changed=changed, eps=list(ratios))


def settle_repair(ledger: Ledger, errors: Sequence[tuple[float, float]]) -> None:
    """Settle whether the repair meets the report's criterion: dalpha_pre's absolute error, and the relative, by run."""
    absolute, relative = (max(run[i] for run in errors) for i in (0, 1))
    right = absolute < LIMIT and relative < LIMIT
    ledger.settle("fixed_below_1e-3", right, absolute=absolute, relative=relative, runs=len(errors))


def settle_golden(
    ledger: Ledger, autograd: float, quotient: float, gamma: Mapping[str, Mapping[str, float]], ones: float
) -> None:
    """Settle whether the golden reference is the gradient.

    `autograd` and `quotient`: the largest relative difference of dalpha from each. `gamma`: relative errors by place
    and gradient with a gamma that is not one; `ones`: the largest with a gamma of ones.
    """
    right, allowed = autograd <= ROUNDED and quotient <= QUOTIENT, [ROUNDED, QUOTIENT]
    ledger.settle("golden_dalpha_is_right", right, autograd=autograd, quotient=quotient, allowed=allowed)
    wrong = {place: [name for name, error in errors.items() if error > ROUNDED] for place, errors in gamma.items()}
    sides = {not names for names in wrong.values()} if ones <= ROUNDED else {False}
    truth = sides.pop() if len(sides) == 1 else None
    spoiled = sorted({name for names in wrong.values() for name in names})
    ledger.settle("golden_is_the_gradient", truth, wrong=wrong, spoiled=spoiled, ones=ones)
