"""The investigation of dalpha: likelihoods, faults drawn blind, and reasons that follow from what was measured."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import labkit
from kernels.mhc import blind, counterfactual, evidence, faulty, figures, identify, likelihood
from kernels.mhc.faulty import RIGHT, Problem
from kernels.mhc.likelihood import ORDER
from kernels.mhc.problem import Constants, draw
from labkit import plots
from labkit.session.catalogue import ROOT
from labkit.session.record import records

C = Constants()
TILE = 32
RIVALS = faulty.rivals(4, 40, 16)


@pytest.mark.parametrize("name", ["right", *RIVALS])
def test_dalpha_pre_is_linear_in_dx_in_with_these_weights(name):
    p = Problem.draw(9, 4, 40, 3, C, "cpu")
    access = RIVALS.get(name, RIGHT)
    found = likelihood.weights(p, access) @ p.dx_in.double().flatten()
    torch.testing.assert_close(found, counterfactual.dalpha(p, access)[0], rtol=1e-12, atol=1e-12)


def test_a_ratios_density_is_that_of_draws_of_dx_in():
    """For one x, phi, b and alpha: 20 000 draws of dx_in against the Cauchy distribution's own quantiles."""
    p, access = Problem.draw(6, 4, 40, 1, C, "cpu"), RIVALS["dx_in one element late"]
    wrong, right = likelihood.weights(p, access), likelihood.weights(p, RIGHT)
    dx_in = torch.randn(20_000, wrong.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = ((dx_in @ wrong) / (dx_in @ right)).numpy()
    one = likelihood.ratios(6, 4, 40, [1], {"it": access}, C)["it"]
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        quantile = one.centre[0] + one.width[0] * math.tan(math.pi * (share - 0.5))
        assert abs(np.mean(drawn <= quantile) - share) <= 5.0 * math.sqrt(share * (1.0 - share) / len(drawn))
    edges = np.array([-0.5, 0.5])
    assert abs(np.mean((drawn > edges[0]) & (drawn < edges[1])) - one.share(*edges)) < 0.02
    middle, step = 0.3, 1e-5
    assert one.share(middle - step, middle + step) == pytest.approx(2.0 * step * one.density(middle)[0], rel=1e-6)


@pytest.fixture(scope="module")
def ratios():
    return likelihood.ratios(24, 4, 64, range(60), faulty.rivals(4, 64, 16), C)


@pytest.mark.parametrize("name", ["first tile of 16 columns only", "dx_in one element late", "mix from post's columns"])
def test_one_test_names_no_fault_and_many_name_the_right_one(ratios, name):
    access = faulty.rivals(4, 64, 16)[name]
    drawn = likelihood.ratios(24, 4, 64, range(1000, 1200), {name: access}, C)[name].drawn
    for ratio in drawn[:20]:
        assert len(likelihood.compare(ratios, [ratio]).left) > 1
    strangers = {
        "x as [T, D, n]",
        "x without its stream in the token's stride",
        "dx_in one element late",
        "mix from post's columns",
    }  # wrong and right are uncorrelated for each of these, so ratios are alike
    left = likelihood.compare(ratios, drawn).left
    assert name in left
    assert set(left) <= (strangers if name in strangers else {name})


def test_a_likelihood_ratio_is_that_of_the_densities_and_its_interval_shrinks_with_draws(ratios):
    few = {name: likelihood.Ratios(*(getattr(one, f)[:15] for f in ("centre", "width", "drawn", "right")))
           for name, one in ratios.items()}  # fmt: skip
    found, less = (likelihood.compare(given, [evidence.RATIO]) for given in (ratios, few))
    means = {name: one.density(evidence.RATIO).mean() for name, one in ratios.items()}
    for name, ratio in found.ratio.items():
        assert ratio == pytest.approx(means[found.best] / means[name])
        assert found.low[name] <= ratio <= found.high[name]
    assert sum(found.share.values()) == pytest.approx(1.0)
    wide = "pre one element late"
    assert found.high[wide] / found.low[wide] < less.high[wide] / less.low[wide]


def test_what_keeps_the_ratio_at_one_is_refuted_and_the_order_of_additions_with_it(ratios):
    found = likelihood.compare(ratios, [evidence.RATIO])
    assert {ORDER, "hc_eps not taken off"} <= set(found.share) - set(found.left)
    assert likelihood.compare(ratios, [1.00001]).best in (ORDER, "hc_eps not taken off")


def settled(case, n, d, tile, tokens, seed):
    """The listed faults that compute, in float64, exactly what the case's does at every setting."""
    problems = identify.settings(n, d, tokens, seed, "cpu").values()

    def same(name):
        for p in problems:
            width = p.x.shape[2]
            access = RIGHT if name == identify.NO_FAULT else faulty.rivals(n, width, tile)[name]
            one, other = counterfactual.steps(p, access), counterfactual.steps(p, case.access(n, width))
            if not all(torch.equal(one[step], other[step]) for step in one):
                return False
        return True

    return {name for name in (*faulty.rivals(n, d, tile), identify.NO_FAULT) if same(name)}


@pytest.mark.parametrize("first", range(0, 50, 5))
def test_blind_faults_are_named_or_none_of_these_or_undecidable_between_equals(device, first):
    """Fifty seeds, a fifth of them not on the list; the streams too are drawn, and with one some faults are equal."""
    for seed in range(first, first + 5):
        n = int(np.random.default_rng([7, seed]).choice([4, 1, 2, 8], p=[0.4, 0.2, 0.2, 0.2]))
        d, case = (48, 72, 96, 128)[seed % 4], blind.draw(seed, TILE)
        found = identify.identify(case.kernel, n, d, TILE, 2, seed, device)
        alike = settled(case, n, d, TILE, 2, seed)
        assert set(found.left) == alike, (seed, case.name)
        wanted = {0: "none of these", 1: next(iter(alike), "")}.get(len(alike), "undecidable")
        assert found.cause == wanted
        assert case.listed or found.cause == "none of these"


def test_a_fifth_of_blind_faults_is_not_on_the_list_and_some_are_equal_to_others():
    cases = [blind.draw(seed, TILE) for seed in range(50)]
    assert sum(not case.listed for case in cases) == 10
    assert not set(blind.outside(4, 128)) & set(faulty.rivals(4, 128, TILE))
    equal = blind.Case("x as [T, D, n]", True, TILE)
    assert {identify.NO_FAULT, "x as [T, D, n]"} <= settled(equal, 1, 48, TILE, 2, 0)


def test_what_identifies_does_not_import_what_draws():
    for path in ("identify", "faulty", "counterfactual", "likelihood", "evidence"):
        assert "blind" not in (ROOT / "kernels" / "mhc" / f"{path}.py").read_text().replace("BLIND", "")


def test_one_column_at_a_time_shows_the_tiles_edge(device):
    case = blind.Case("first tile of 8 columns only", True, TILE)
    found = evidence.response(case.kernel, 2, 24, 0, device)
    assert (found[:8] == 1.0).all()
    assert (found[8:] == 0.0).all()
    assert evidence.answered(found) == "0 to 7"
    late = blind.Case("dx_in one element late", True, TILE)
    assert evidence.answered(evidence.response(late.kernel, 2, 24, 0, device)) == "none"


OUTCOME = evidence.Outcome(
    first="dpre", g_pre_off=3.0, g_pre_right=False, raw_off=0, products_off=0, elements=512, spread=1e-4, missing=5.0,
    compensated=0.9, ranges={"dh_pre2": (1e-5, 3.0), "dh_post2": (1e-3, 1.0), "dh_res1": (1e-4, 4.0)},
    sums={"dalpha_pre": 0.1, "dalpha_post": 0.2, "dalpha_res": 0.3}, moved=["dalpha_pre"],
    isolated={"as its author did": True, "with the kernel's tile": False}, repaired={"one": (1e-6, 1e-7)},
)  # fmt: skip
FLIPS = [
    ("h1_dh_pre2_wrong", {"g_pre_right": True, "g_pre_off": 1e-7}, "confirmed", "beyond its bound", "within its bound"),
    ("h2_hmix_load", {"raw_off": 7}, "refuted", "bit for bit", "7 of 512 elements that it loads are not"),
    ("h3_atomic_order", {"spread": 6.0}, "refuted", "too little", "enough"),
    ("h4_inv_rms", {"products_off": 3}, "refuted", "bit for bit", "3 of 512 products are not"),
    ("h5_range", {"ranges": {"dh_pre2": (math.nan, math.nan)}}, "refuted", "far from", "limits, or Inf or NaN"),
    ("h5_range", {"ranges": {"dh_pre2": (1e-40, 1.0)}}, "refuted", "far from", "limits, or Inf or NaN"),
    ("kahan_fixes", {"compensated": 1e-5}, "refuted", "still give", "to within 1.0e-05"),
    (
        "same_structure",
        {"sums": {"dalpha_res": 2.0}},
        "confirmed",
        "all three are right",
        "dalpha_res is not their sum",
    ),
    ("fed_alike", {"moved": list(evidence.PARTS)}, "refuted", "dalpha_pre moves", "all three move"),
    ("isolated_kernel_finds_it", {"isolated": {"as its author did": False}}, "refuted", "but the main", "and the main"),
    ("fixed_below_1e-3", {"repaired": {"one": (2e-3, 1e-7)}}, "confirmed", "at most 1.0e-06", "not below 0.001"),
    ("fixed_below_1e-3", {"repaired": {"one": (1e-9, 2e-3)}}, "confirmed", "at most 1.0e-06", "not below 0.001"),
]


def verdict(settlements, claim):
    """The verdict that a ledger gives, and its reason."""
    ledger = labkit.claims("dalpha_atomics")
    evidence.settle(ledger, {claim: settlements[claim]})
    return ledger.settled[claim].verdict, ledger.settled[claim].because


@pytest.mark.parametrize(("claim", "change", "first", "phrase", "flipped"), FLIPS)
def test_a_stages_outcome_flips_its_verdict_and_its_reason(claim, change, first, phrase, flipped):
    found, why = verdict(evidence.of_stages(OUTCOME, "it"), claim)
    assert (found, phrase in why, flipped in why) == (first, True, False)
    found, why = verdict(evidence.of_stages(replace(OUTCOME, **change), "it"), claim)
    assert (found, phrase in why, flipped in why) == (({"confirmed", "refuted"} - {first}).pop(), False, True)


BETTER, ALIKE = (0.2, 0.1, 0.3), (1.0, 0.9, 1.1)


def of_res(small, near):
    """Ten draws of a hundredth of the report's size and ten of its size, a thousand pairs of each; `small` pairs of
    the former and `near` pairs of the latter are apart.
    """
    relative = np.zeros((20, 100))
    relative[:10].flat[:small] = relative[10:].flat[:near] = 1e-3
    return relative, np.repeat([2.19307, 219.307], 10)


ROUNDED = of_res(20, 20)
FAR_OFF = (ROUNDED[0], ROUNDED[1] / 100.0)


@pytest.mark.parametrize(
    ("claim", "given", "wanted", "phrase"),
    [
        ("kahan_if_precision", (BETTER, BETTER, ROUNDED, 2, None), "confirmed", "wherever it is put, it improves"),
        ("kahan_if_precision", (BETTER, ALIKE, ROUNDED, 2, None), "undecidable", "depends on where"),
        ("kahan_if_precision", (ALIKE, ALIKE, ROUNDED, 2, None), "refuted", "no improvement is shown"),
        (
            "res_difference_is_rounding",
            (BETTER, ALIKE, of_res(20, 20), 2, None),
            "confirmed",
            "in 2.00% of pairs of all",
        ),
        (
            "res_difference_is_rounding",
            (BETTER, ALIKE, of_res(3, 3), 2, None),
            "undecidable",
            "in 0.30% of pairs of the 10",
        ),
        (
            "res_difference_is_rounding",
            (BETTER, ALIKE, of_res(100, 3), 2, None),
            "undecidable",
            "by both, which would be nothing unusual",
        ),
        (
            "res_difference_is_rounding",
            (BETTER, ALIKE, of_res(100, 0), 2, None),
            "undecidable",
            "by both, which would be nothing unusual",
        ),
        ("res_difference_is_rounding", (BETTER, ALIKE, of_res(0, 0), 2, None), "refuted", "no mere rounding"),
        ("res_difference_is_rounding", (BETTER, ALIKE, FAR_OFF, 2, None), "undecidable", "of the 0 draws"),
        ("atomics_nondeterministic", (BETTER, ALIKE, ROUNDED, 9, None), "confirmed", "9 different results"),
        ("atomics_nondeterministic", (BETTER, ALIKE, ROUNDED, 1, 54), "confirmed", "54 of 200 runs by atomics"),
        ("atomics_nondeterministic", (BETTER, ALIKE, ROUNDED, 1, None), "refuted", "one result of 200 orders"),
    ],
)
def test_what_additions_give_decides_verdict_and_reason(claim, given, wanted, phrase):
    found, why = verdict(evidence.of_sums(*given), claim)
    assert (found, phrase in why) == (wanted, True), why


def test_pairs_of_right_sums_are_apart_by_rounding_alone():
    relative, sizes = evidence.apart(16, 4, 64, range(3), np.random.default_rng(0))
    assert relative.shape == (3, 20)
    for seed, size in enumerate(sizes):
        p = Problem.draw(16, 4, 64, seed, C, "cpu")
        terms = (p.dz.flatten(-2) * p.raw[:, 8:] * p.r[:, None]).double()
        assert size == pytest.approx(abs(float(terms.sum())), rel=1e-3)
        assert 0.0 < relative[seed].max() * size <= 256 * 2.0**-24 * float(terms.abs().sum())


def cauchy(centre, width, right=-19.0):
    return likelihood.Ratios(*(np.full(50, float(value)) for value in (centre, width, centre, right)))


@pytest.mark.parametrize(
    ("claim", "fault", "eps", "wanted", "phrase"),
    [
        ("ratio_is_signature", cauchy(0.0487, 1e-6), cauchy(1, 1e-9), "confirmed", "with a probability of 99.99%"),
        ("ratio_is_signature", cauchy(0.25, 0.4), cauchy(1, 1e-9), "refuted", "where a mark would have 95%"),
        ("hc_eps_matters", cauchy(0.25, 0.4), cauchy(2, 1e-3), "confirmed", "in 99."),
        ("hc_eps_matters", cauchy(0.25, 0.4), cauchy(1, 1e-9), "refuted", "in most draws it does not"),
        ("reported_value_reproduced", cauchy(0.25, 1, -19.465603), cauchy(1, 1e-9), "confirmed", "arrives at it"),
        ("reported_value_reproduced", cauchy(0.25, 1, -19.4657), cauchy(1, 1e-9), "untestable", "neither the distrib"),
    ],
)
def test_what_ratios_give_decides_verdict_and_reason(claim, fault, eps, wanted, phrase):
    found = {"it": fault, "other": cauchy(0.5, 0.5)}
    verdicts = evidence.of_ratios(found, "it", {1e-6: eps, 1e-2: cauchy(3, 1.0)}, "it")
    found, why = verdict(verdicts, claim)
    assert (found, phrase in why) == (wanted, True), why


@pytest.mark.parametrize(
    ("claim", "given", "wanted", "phrase"),
    [
        (
            "golden_dalpha_is_right",
            ([1e-15], 1e-9, {"a": {"dx": 0.1}}, {"a": {"dx": 1e-16}}),
            "confirmed",
            "no more than",
        ),
        (
            "golden_dalpha_is_right",
            ([1e-3], 1e-9, {"a": {"dx": 0.1}}, {"a": {"dx": 1e-16}}),
            "refuted",
            "more than they leave",
        ),
        (
            "golden_dalpha_is_right",
            ([1e-15], 1e-3, {"a": {"dx": 0.1}}, {"a": {"dx": 1e-16}}),
            "refuted",
            "more than they leave",
        ),
        (
            "golden_is_the_gradient",
            ([0.0], 0.0, {"a": {"dx": 0.1}, "b": {"dphi": 0.1}}, {"a": {"dx": 0.0}}),
            "refuted",
            "a: dx; in b",
        ),
        (
            "golden_is_the_gradient",
            ([0.0], 0.0, {"a": {"dx": 0.1}, "b": {"dx": 0.0}}, {"a": {"dx": 0.0}}),
            "undecidable",
            "depends",
        ),
        (
            "golden_is_the_gradient",
            ([0.0], 0.0, {"a": {"dx": 0.0}}, {"a": {"dx": 0.0}}),
            "confirmed",
            "no gradient is off",
        ),
        (
            "golden_is_the_gradient",
            ([0.0], 0.0, {"a": {"dx": 0.0}}, {"a": {"dx": 0.5}}),
            "refuted",
            "by at most 5.0e-01",
        ),
    ],
)
def test_what_gradients_give_decides_verdict_and_reason(claim, given, wanted, phrase):
    found, why = verdict(evidence.of_gradients(*given), claim)
    assert (found, phrase in why) == (wanted, True), why


def test_the_reports_numbers_name_a_fault_only_where_every_rival_is_far_less_likely():
    def compared(low):
        return likelihood.Comparison("a", {"b": 2e3, "c": low}, {"b": 1e3, "c": low}, {"b": 3e3, "c": low}, {
            "a": 0.9, "b": 0.05, "c": 0.05})  # fmt: skip

    kept = dict.fromkeys("abc", True)
    assert evidence.report_alone(compared(100.0), kept).cause == "a"
    weighing = evidence.report_alone(compared(2.0), kept)  # its interval excludes 1, and it is not refuted by that
    assert (weighing.cause, weighing.left, list(weighing.refuted)) == ("undecidable", ["a", "c"], ["b"])
    assert evidence.report_alone(compared(2.0), kept | {"c": False}).cause == "a"
    assert evidence.report_alone(compared(100.0), kept | {"a": False}).cause == "none of these"


def test_gamma_spoils_dphi_and_dx_wherever_it_stands_and_not_where_it_is_one(rng):
    inputs = draw(6, 4, 5, rng).double()
    exact = evidence.by_autograd(inputs, C)
    for place in evidence.PLACES:
        found = evidence.with_gamma(inputs, torch.linspace(0.5, 1.5, 20, dtype=torch.float64), C, place)
        off = {name for name, one in evidence.relative(found, exact).items() if one > evidence.ROUNDED}
        assert off == {"dx", "dphi"}
        same = evidence.with_gamma(inputs, torch.ones(20, dtype=torch.float64), C, place)
        assert max(evidence.relative(same, exact).values()) <= evidence.ROUNDED


def test_the_golden_formulas_that_the_report_shows_are_the_gradient(rng):
    inputs = draw(6, 4, 5, rng).double()
    shown = evidence.dalpha_as_shown(inputs, C)
    torch.testing.assert_close(shown, evidence.by_autograd(inputs, C)["dalpha"], rtol=1e-10, atol=1e-12)


def test_kahans_sum_is_exact_where_a_plain_one_is_not(rng):
    terms = rng.standard_normal((3, 2000)).astype(np.float32)
    exact = terms.astype(np.float64).sum(1)
    errors = [np.abs(way - exact).max() for way in (evidence.compensated(terms), np.cumsum(terms, 1)[:, -1])]
    assert errors[0] <= np.spacing(np.abs(exact).max().astype(np.float32)) < errors[1]


RECORDS = [one for one in records() if one.result["notebook"] == "dalpha_atomics"]


def test_an_answer_follows_its_record():
    (kept,) = (one for one in RECORDS if one.path.name == "dalpha_atomics.cpu.json")
    assert "which the report's ratio does not favour" in evidence.answer(kept.result)
    likeliest = kept.result["metrics"] | {"likeliest": kept.result["metrics"]["given"]}
    assert "which the report's ratio favours" in evidence.answer(kept.result | {"metrics": likeliest})
    named = kept.result | {"verdict": kept.result["verdict"] | {"cause": "none of these"}}
    assert evidence.answer(named).startswith("None of these")
    tiles = kept.result["verdict"] | {"explains": list(faulty.tiles(TILE))}
    assert evidence.answer(kept.result | {"verdict": tiles}).endswith("tells 4 of those 4 explanations from the rest.")


def test_one_column_at_a_time_tells_faults_of_dpre_and_no_others():
    names = [*faulty.rivals(4, 80, 16), ORDER]
    right = {
        "pre without its stride over tokens", "pre one element late", "mix from post's columns", "mix not normalised",
        "hc_eps not taken off", ORDER,
    }  # fmt: skip
    told, silent = len(names) - len(right), len(right)
    found = evidence.by_columns(names, 4, 80, 16, 0)
    assert f"tells {told} of those {len(names)} explanations from the rest; {silent} leave dpre right" in found
    both = evidence.by_columns(["x as [T, D, n]", "pre one element late"], 4, 80, 16, 0)
    assert "tells 2 of those 2 explanations from the rest; 1 leave" in both


def test_every_fault_of_the_list_is_explained():
    explained = {name.replace("...", str(width)) for name in evidence.FAULTS for width in faulty.TILES}
    assert set(faulty.rivals(4, 128, TILE)) | {ORDER} == explained
    assert [row[0] for row in evidence.faults().rows] == list(evidence.FAULTS)


def test_how_many_tests_name_a_fault_is_counted_over_sequences(ratios):
    name, access = "first tile of 16 columns only", faulty.rivals(4, 64, 16)
    drawn = likelihood.ratios(24, 4, 64, range(1000, 1200), {name: access[name]}, C)[name].drawn
    assert evidence.named_after(ratios, drawn, [1, 200], name) == 200
    assert evidence.named_after(ratios, drawn, [1, 2], name) is None
    assert evidence.after_how_many([118, None, 134], 200) == "median 134, from 118 to more than 200, over 3 sequences"
    assert (
        evidence.after_how_many([None, None, 9], 200)
        == "median more than 200, from 9 to more than 200, over 3 sequences"
    )


def test_other_priors_have_a_row_each_and_what_they_name(ratios):
    rows = evidence.sensitivity(24, 4, 64, range(30), 16, "first tile of 16 columns only").rows
    assert [row[0] for row in rows] == list(evidence.OTHER_PRIORS)
    stated = likelihood.compare(likelihood.ratios(24, 4, 64, range(30), faulty.rivals(4, 64, 16), C), [evidence.RATIO])
    assert rows[0][1:3] == (stated.best, stated.share["first tile of 16 columns only"])
    assert len({row[2] for row in rows}) == len(rows)  # each prior has draws of its own


def test_the_picture_of_speed_says_what_its_floors_are():
    rows = [
        {"kernel_provider": name, "kernel_operation_mode": "forward", "metric_name": "time", "x_value": "8 x 8",
         "y_value_50": str(took)}
        for name, took in (("ours", 200.0), (figures.SCHEDULE, 180.0))
    ]  # fmt: skip
    _, axes = plots.figure()
    figures.draw_speed(axes, rows, "8 x 8", "forward")
    assert axes.get_xlabel() == "us a call; floors: compulsory 140, our schedule's 180"
