"""The investigation of dalpha: likelihoods, faults drawn blind, and what confirms and refutes each claim."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

import labkit
import whywrong
from kernels.mhc import blind, claims, counterfactual, experiments, faulty, figures, identify, likelihood
from kernels.mhc.faulty import CORRECT_ACCESS, Access, Problem
from kernels.mhc.likelihood import ORDER
from kernels.mhc.problem import Constants, sample
from labkit.session.catalogue import ROOT
from whywrong.drawing import plots

C = Constants()
TILE = 32
RIVALS = faulty.rivals(4, 40, 16)


@pytest.mark.parametrize("name", ["right", *RIVALS])
def test_dalpha_pre_is_linear_in_dx_in_with_these_weights(name):
    p = Problem.sample(9, 4, 40, 3, C, "cpu")
    access = RIVALS.get(name, CORRECT_ACCESS)
    found = likelihood.weights(p, access) @ p.dx_in.double().flatten()
    torch.testing.assert_close(found, counterfactual.dalpha(p, access)[0], rtol=1e-12, atol=1e-12)


def test_a_ratios_density_is_that_of_draws_of_dx_in():
    """For one x, phi, b and alpha: 20 000 draws of dx_in against the Cauchy distribution's own quantiles."""
    p, access = Problem.sample(6, 4, 40, 1, C, "cpu"), RIVALS["dx_in one element late"]
    wrong, right = likelihood.weights(p, access), likelihood.weights(p, CORRECT_ACCESS)
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


@pytest.mark.long(cases=1)
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
    found, less = (likelihood.compare(given, [experiments.RATIO]) for given in (ratios, few))
    means = {name: one.density(experiments.RATIO).mean() for name, one in ratios.items()}
    for name, ratio in found.ratio.items():
        assert ratio == pytest.approx(means[found.best] / means[name])
        assert found.low[name] <= ratio <= found.high[name]
    assert sum(found.share.values()) == pytest.approx(1.0)
    wide = "pre one element late"
    assert found.high[wide] / found.low[wide] < less.high[wide] / less.low[wide]


def test_what_keeps_the_ratio_at_one_is_refuted_and_the_order_of_additions_with_it(ratios):
    found = likelihood.compare(ratios, [experiments.RATIO])
    assert {ORDER, "hc_eps not taken off"} <= set(found.share) - set(found.left)
    assert likelihood.compare(ratios, [1.00001]).best in (ORDER, "hc_eps not taken off")


def settled(case, n, d, tile, tokens, seed):
    """The listed faults that compute, in float64, exactly what the case's does at every setting."""
    problems = identify.settings(n, d, tokens, seed, "cpu").values()

    def same(name):
        for p in problems:
            width = p.x.shape[2]
            access = CORRECT_ACCESS if name == identify.NO_FAULT else faulty.rivals(n, width, tile)[name]
            one, other = counterfactual.steps(p, access), counterfactual.steps(p, case.access(n, width))
            if not all(torch.equal(one[step], other[step]) for step in one):
                return False
        return True

    return {name for name in (*faulty.rivals(n, d, tile), identify.NO_FAULT) if same(name)}


@pytest.mark.long
@pytest.mark.parametrize(
    "first", [0, 25, *(pytest.param(n, marks=pytest.mark.slow) for n in range(50) if n % 25 and not n % 5)]
)
def test_blind_faults_are_named_or_none_of_these_or_undecidable_between_equals(device, first):
    """Fifty seeds, a fifth of them not on the list; the streams too are sampled, and with one some faults are equal."""
    for seed in range(first, first + 5):
        n = int(np.random.default_rng([7, seed]).choice([4, 1, 2, 8], p=[0.4, 0.2, 0.2, 0.2]))
        d, case = (48, 72, 96, 128)[seed % 4], blind.sample(seed, TILE)
        found = identify.identify(case.kernel, n, d, TILE, 2, seed, device)
        alike = settled(case, n, d, TILE, 2, seed)
        assert set(found.left) == alike, (seed, case.name)
        wanted = {0: "none of these", 1: next(iter(alike), "")}.get(len(alike), "undecidable")
        assert found.cause == wanted
        assert case.listed or found.cause == "none of these"


def test_a_fifth_of_blind_faults_is_not_on_the_list_and_some_are_equal_to_others():
    cases = [blind.sample(seed, TILE) for seed in range(50)]
    assert sum(not case.listed for case in cases) == 10
    assert not set(blind.outside(4, 128)) & set(faulty.rivals(4, 128, TILE))
    equal = blind.Case("x as [T, D, n]", True, TILE)
    assert {identify.NO_FAULT, "x as [T, D, n]"} <= settled(equal, 1, 48, TILE, 2, 0)


def test_what_identifies_does_not_import_what_draws():
    for path in ("identify", "faulty", "counterfactual", "likelihood", "experiments", "claims"):
        text = (ROOT / "kernels" / "mhc" / f"{path}.py").read_text()
        assert not any("import" in line and "blind" in line for line in text.splitlines())


def test_one_column_at_a_time_shows_the_tiles_edge(device):
    case = blind.Case("first tile of 8 columns only", True, TILE)
    response = experiments.one_column_at_a_time(case.kernel, 2, 24, 0, device)
    assert (response[:8] == 1.0).all()
    assert (response[8:] == 0.0).all()
    assert list(experiments.right_columns(response)) == list(range(8))
    late = blind.Case("dx_in one element late", True, TILE)
    assert not experiments.right_columns(experiments.one_column_at_a_time(late.kernel, 2, 24, 0, device)).size


@pytest.mark.parametrize(("columns", "words"), [([], "none"), ([3], "3"), ([0, 1, 2, 7, 9, 10], "0 to 2, 7, 9 to 10")])
def test_columns_in_words(columns, words):
    assert experiments.in_words(np.array(columns, int)) == words


def verdict(claim, settle, *given, **rests_on):
    """The verdict that a settlement gives one claim."""
    ledger = labkit.claims("dalpha_atomics")
    settle(ledger, *given, **rests_on)
    assert ledger.settled[claim].because
    return ledger.settled[claim].verdict


GIVEN = {"blind": False, "tile": 16}


def factors(access, device, size=1.0):
    """What :func:`claims.settle_factors` takes of a kernel with this access, dx_in so many times as large."""
    p = Problem.sample(9, 4, 40, 3, C, device)
    p = replace(p, dx_in=p.dx_in * size)
    observed = faulty.backward(p, access)
    return p, observed, whywrong.localise(observed, counterfactual.recorded(p), precision=whywrong.Precision())


@pytest.mark.long(cases=1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of an overflow that is meant
@pytest.mark.parametrize(
    ("claim", "confirmed", "refuted"),
    [
        ("h1_dh_pre2_wrong", (Access(tile=16),), (CORRECT_ACCESS,)),
        ("h1_dh_pre2_wrong", (Access(eps=False),), (Access(mix=4),)),
        ("h2_hmix_load", (Access(mix=4),), (CORRECT_ACCESS,)),
        ("h4_inv_rms", (Access(r=False),), (CORRECT_ACCESS,)),
        ("h5_range", (CORRECT_ACCESS, 2.0**126), (CORRECT_ACCESS,)),
        ("h5_range", (CORRECT_ACCESS, 2.0**-122), (Access(tile=16),)),
    ],
)
def test_hypotheses_on_the_factors_by_kernels_that_have_the_fault_and_that_have_not(device, claim, confirmed, refuted):
    for word, (access, *size) in (("confirmed", confirmed), ("refuted", refuted)):
        assert verdict(claim, claims.settle_factors, *factors(access, device, *size), **GIVEN) == word


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("claim", "access", "wanted"),
    [
        ("h3_atomic_order", CORRECT_ACCESS, "undecidable"),  # nothing is missing but what another order changes
        ("h3_atomic_order", Access(eps=False), "refuted"),  # of few products, which hide less
        ("h3_atomic_order", Access(tile=16), "refuted"),
        ("kahan_fixes", CORRECT_ACCESS, "undecidable"),
        ("kahan_fixes", Access(eps=False), "undecidable"),
        ("kahan_fixes", Access(tile=16), "refuted"),
        ("same_structure", CORRECT_ACCESS, "confirmed"),
        ("same_structure", Access(tile=16), "confirmed"),
        ("same_structure", Access(mix=4), "refuted"),
        ("same_structure", Access(r=False), "refuted"),
    ],
)
def test_claims_on_the_sums_by_kernels_that_are_right_and_that_are_not(device, rng, claim, access, wanted):
    p, observed, _ = factors(access, device)
    right = counterfactual.steps(p)
    orders = experiments.sums_in_orders(right["g_pre"] * right["mix_pre"], rng)
    assert verdict(claim, claims.settle_sums, p, observed, orders, **GIVEN) == wanted


def test_a_sum_that_is_not_that_of_its_factors_refutes_that_the_three_are_alike(device):
    p, observed, _ = factors(CORRECT_ACCESS, device)
    observed["dalpha"][2] += 1.0
    assert verdict("same_structure", claims.settle_sums, p, observed, np.zeros(2), **GIVEN) == "refuted"
    assert experiments.sum_errors(p, observed)["dalpha_res"] > 1.0


def test_an_error_of_the_additions_alone_is_what_kahans_sum_fixes(device):
    p, observed, _ = factors(CORRECT_ACCESS, device)
    observed["dalpha"][0] *= 1.01
    assert verdict("kahan_fixes", claims.settle_sums, p, observed, np.zeros(2), **GIVEN) == "confirmed"


def test_dh_pre2_goes_into_every_gradient_and_db_shows_whether_it_is_wrong(device, rng):
    users = experiments.users_of_dh_pre2(sample(6, 4, 5, rng).double(), C)
    assert users == ["dalpha", "db", "dphi", "dx"]
    for access, wrong in ((Access(tile=16), 4), (Access(mix=4), 0), (CORRECT_ACCESS, 0)):
        p, observed, _ = factors(access, device)
        assert experiments.wrong_db(p, observed) == wrong
    assert verdict("only_user_of_dh_pre2", claims.settle_use, users, 4, 4, **GIVEN) == "refuted"
    assert verdict("only_user_of_dh_pre2", claims.settle_use, ["dalpha"], 4, 4, **GIVEN) == "confirmed"


def test_the_plans_loops_add_ten_products_at_four_streams(rng):
    products = torch.from_numpy(rng.standard_normal((2, 64, 4)))
    total, added = experiments.manual_sum(products)
    by_hand = sum(products[0, s, : 4 - s].sum() for s in range(4))
    assert (added, total) == (10, pytest.approx(float(by_hand)))
    assert verdict("manual_sum_equals", claims.settle_manual_sum, products) == "refuted"
    assert verdict("manual_sum_equals", claims.settle_manual_sum, products[:1, :1]) == "confirmed"


@pytest.mark.long
def test_a_line_for_the_tile_is_right_where_it_covers_every_column(device):
    rows = experiments.try_block(lambda columns, streams: 32, 4, device).rows
    assert [row[-1] for row in rows] == ["right"] * 3 + ["WRONG"] * 4
    assert [row[2] for row in rows] == [0, 0, 0, 1, 32, 68, 96]
    assert {row[-1] for row in experiments.try_block(lambda columns, streams: columns, 4, device).rows} == {"right"}


def test_the_debug_kernel_finds_what_its_own_tile_reads(device):
    p = Problem.sample(9, 4, 40, 3, C, device)
    assert experiments.debug_kernel_is_correct(p, 64)
    assert not experiments.debug_kernel_is_correct(p, 16)


def test_one_column_of_x_moves_dalpha_pre_alone():
    assert experiments.moved_by_one_column(Problem.sample(9, 4, 40, 3, C, "cpu")) == ["dalpha_pre"]


def cauchy(centre, width, right=-19.0):
    return likelihood.Ratios(*(np.full(50, float(value)) for value in (centre, width, centre, right)))


def kahan(inside, over_all=(0.2, 0.1, 0.3)):
    return {"inside each program": inside, "over all products": over_all}, 600


def pairs(near, allowed=1e-2):
    """Ten draws of a hundredth of the report's size and ten of its size, a hundred pairs of each; so many pairs of the
    latter are apart, and `allowed` is what rounding allows.
    """
    distances = np.zeros((20, 100))
    distances[10:].flat[:near] = 1e-3
    return distances, np.repeat([2.19307, 219.307], 10), np.full(20, allowed)


SEEN = {"a tile": cauchy(0.25, 0.4), "another": cauchy(0.5, 0.5)}
EXACT, OFF = {"dx": 0.0}, {"dx": 0.1}
CASES = [
    ("fed_alike", claims.settle_feeding, (experiments.PARTS,), "confirmed"),
    ("fed_alike", claims.settle_feeding, (["dalpha_pre"],), "refuted"),
    ("isolated_kernel_finds_it", claims.settle_debug_kernel, (False, {"one": False, "other": False}), "confirmed"),
    ("isolated_kernel_finds_it", claims.settle_debug_kernel, (False, {"one": True, "other": False}), "refuted"),
    ("kahan_if_precision", claims.settle_additions, (*kahan((0.5, 0.4, 0.6)), 2, None), "confirmed"),
    ("kahan_if_precision", claims.settle_additions, (*kahan((1.0, 0.95, 1.05)), 2, None), "refuted"),
    ("kahan_if_precision", claims.settle_additions, (*kahan((0.9, 0.8, 1.0)), 2, None), "undecidable"),
    ("atomics_nondeterministic", claims.settle_additions, (*kahan((1.0, 0.9, 1.1)), 9, None), "confirmed"),
    ("atomics_nondeterministic", claims.settle_additions, (*kahan((1.0, 0.9, 1.1)), 1, 54), "confirmed"),
    ("atomics_nondeterministic", claims.settle_additions, (*kahan((1.0, 0.9, 1.1)), 1, None), "refuted"),
    ("res_difference_is_rounding", claims.settle_res, pairs(3), "confirmed"),
    ("res_difference_is_rounding", claims.settle_res, pairs(0), "undecidable"),
    ("res_difference_is_rounding", claims.settle_res, pairs(0, 1e-7), "refuted"),
    ("ratio_is_signature", claims.settle_ratios, (SEEN | {"a tile": cauchy(0.0487, 1e-6)}, "a tile", 32), "confirmed"),
    ("ratio_is_signature", claims.settle_ratios, (SEEN, "a tile", 32), "refuted"),
    (
        "reported_value_reproduced",
        claims.settle_ratios,
        (SEEN | {"a tile": cauchy(0.25, 1, -19.465603)}, "a tile", 32),
        "confirmed",
    ),
    ("reported_value_reproduced", claims.settle_ratios, (SEEN, "a tile", 32), "untestable"),
    ("hc_eps_matters", claims.settle_eps, ({1e-6: cauchy(2, 1e-3), 1e-2: cauchy(3, 1)},), "confirmed"),
    ("hc_eps_matters", claims.settle_eps, ({1e-6: cauchy(1, 1e-9), 1e-2: cauchy(1, 1e-3)},), "refuted"),
    ("hc_eps_matters", claims.settle_eps, ({1e-6: cauchy(1, 1e-9), 1e-2: cauchy(3, 1)},), "undecidable"),
    ("fixed_below_1e-3", claims.settle_repair, ([(1e-6, 1e-7)],), "confirmed"),
    ("fixed_below_1e-3", claims.settle_repair, ([(2e-3, 1e-7)],), "refuted"),
    ("fixed_below_1e-3", claims.settle_repair, ([(1e-9, 1e-9), (1e-9, 2e-3)],), "refuted"),
    ("golden_dalpha_is_right", claims.settle_golden, (1e-15, 1e-9, {"a": OFF}, 1e-16), "confirmed"),
    ("golden_dalpha_is_right", claims.settle_golden, (1e-3, 1e-9, {"a": OFF}, 1e-16), "refuted"),
    ("golden_dalpha_is_right", claims.settle_golden, (1e-15, 1e-3, {"a": OFF}, 1e-16), "refuted"),
    ("golden_is_the_gradient", claims.settle_golden, (0.0, 0.0, {"a": EXACT}, 0.0), "confirmed"),
    ("golden_is_the_gradient", claims.settle_golden, (0.0, 0.0, {"a": OFF, "b": OFF}, 0.0), "refuted"),
    ("golden_is_the_gradient", claims.settle_golden, (0.0, 0.0, {"a": OFF, "b": EXACT}, 0.0), "undecidable"),
    ("golden_is_the_gradient", claims.settle_golden, (0.0, 0.0, {"a": EXACT}, 0.5), "refuted"),
]


@pytest.mark.parametrize(("claim", "settle", "given", "wanted"), CASES)
def test_what_is_measured_decides_the_verdict(claim, settle, given, wanted):
    rests_on = GIVEN if settle is claims.settle_debug_kernel else {}
    assert verdict(claim, settle, *given, **rests_on) == wanted


def test_a_size_that_no_draw_has_by_itself_leaves_the_difference_of_dalpha_res_open():
    distances, sizes, allowed = pairs(20)
    assert verdict("res_difference_is_rounding", claims.settle_res, distances, sizes / 100.0, allowed) == "undecidable"


def test_pairs_of_right_sums_differ_by_no_more_than_rounding_allows():
    distances, sizes, allowed = experiments.pairs_of_correct_sums(16, 4, 64, range(3), np.random.default_rng(0))
    assert distances.shape == (3, 20)
    for seed, size in enumerate(sizes):
        p = Problem.sample(16, 4, 64, seed, C, "cpu")
        terms = (p.dz.flatten(-2) * p.raw[:, 8:] * p.r[:, None]).double()
        assert size == pytest.approx(abs(float(terms.sum())), rel=1e-3)
        assert 0.0 < distances[seed].max() <= 2.0 * allowed[seed]


def test_the_reports_numbers_identify_a_fault_only_where_every_rival_is_far_less_likely():
    def compared(low):
        ratio, interval, share = {"b": 2e3, "c": low}, [{"b": e, "c": low} for e in (1e3, 3e3)], {"a": 0.9, "b": 0.05}
        return likelihood.Comparison("a", ratio, *interval, share | {"c": 0.05})

    right = dict.fromkeys("abc", True)
    assert experiments.weigh_the_report(compared(100.0), right).cause == "a"
    weighing = experiments.weigh_the_report(compared(2.0), right)  # its interval excludes 1, which refutes nothing
    assert (weighing.cause, weighing.left, list(weighing.refuted)) == ("undecidable", ["a", "c"], ["b"])
    assert experiments.weigh_the_report(compared(2.0), right | {"c": False}).cause == "a"
    assert experiments.weigh_the_report(compared(100.0), right | {"a": False}).cause == "none of these"


def test_gamma_spoils_dphi_and_dx_wherever_it_stands_and_not_where_it_is_one(rng):
    inputs = sample(6, 4, 5, rng).double()
    exact = experiments.by_autograd(inputs, C)
    with_gamma = experiments.errors_with_gamma(inputs, torch.linspace(0.5, 1.5, 20, dtype=torch.float64), C, exact)
    for errors in with_gamma.values():
        assert {name for name, error in errors.items() if error > claims.ROUNDED} == {"dx", "dphi"}
    for errors in experiments.errors_with_gamma(inputs, torch.ones(20, dtype=torch.float64), C, exact).values():
        assert max(errors.values()) <= claims.ROUNDED


def test_the_golden_formulas_that_the_report_shows_are_the_gradient(rng):
    inputs = sample(6, 4, 5, rng).double()
    shown = experiments.dalpha_as_shown(inputs, C)
    torch.testing.assert_close(shown, experiments.by_autograd(inputs, C)["dalpha"], rtol=1e-10, atol=1e-12)


def test_kahans_sum_is_exact_where_a_plain_one_is_not(rng):
    terms = rng.standard_normal((3, 2000)).astype(np.float32)
    exact = terms.astype(np.float64).sum(1)
    errors = [np.abs(way - exact).max() for way in (experiments.kahan_sum(terms), np.cumsum(terms, 1)[:, -1])]
    assert errors[0] <= np.spacing(np.abs(exact).max().astype(np.float32)) < errors[1]


def test_kahan_reduces_the_error_over_all_products_and_not_inside_each_program():
    errors = experiments.kahan_errors(experiments.products_of_tokens(64, 4, 32, range(100)), np.random.default_rng(0))
    ratio = {
        place: experiments.rms_ratio(errors["nowhere"], e, np.random.default_rng(0)) for place, e in errors.items()
    }
    assert ratio["nowhere"] == [1.0, 1.0, 1.0]
    assert ratio["over all products"][2] < claims.IMPROVED
    assert ratio["inside each program"][1] > claims.IMPROVED


def test_one_column_at_a_time_distinguishes_faults_of_dpre_and_no_others():
    names = [*faulty.rivals(4, 80, 16), ORDER]
    right = {
        "pre without its stride over tokens",
        "pre one element late",
        "mix from post's columns",
        "mix not normalised",
        "hc_eps not taken off",
        ORDER,
    }
    by_columns, silent = experiments.distinguished(names, 4, 80, 16, 0)
    assert (set(by_columns), set(silent)) == (set(names) - right, right)
    both = ["x as [T, D, n]", "pre one element late"]
    assert experiments.distinguished(both, 4, 80, 16, 0) == (both, both[1:])


def test_every_fault_of_the_list_is_explained():
    explained = {name.replace("...", str(width)) for name in experiments.EXPLANATIONS for width in faulty.TILES}
    assert set(faulty.rivals(4, 128, TILE)) | {ORDER} == explained


def test_residuals_are_in_times_the_largest_rounding_error_allowed(device):
    weighing = identify.identify(blind.Case("mix not normalised", True, TILE).kernel, 4, 48, TILE, 2, 0, device)
    first, *others = experiments.table_of_residuals(weighing).rows
    assert first[:2] == ("mix not normalised", "left")
    assert float(first[3]) <= 1.0
    assert all(row[1].startswith("refuted at") for row in others)


def test_how_many_tests_identify_a_fault_is_counted_over_sequences(ratios):
    name, access = "first tile of 16 columns only", faulty.rivals(4, 64, 16)
    drawn = likelihood.ratios(24, 4, 64, range(1000, 1200), {name: access[name]}, C)[name].drawn
    assert experiments.tests_until_identified(ratios, drawn, [1, 200], name) == 200
    assert experiments.tests_until_identified(ratios, drawn, [1, 2], name) is None
    assert experiments.median_and_range([118, None, 134], 200) == (
        "median 134, from 118 to more than 200, over 3 sequences"
    )


def test_other_priors_have_a_row_each_and_the_likeliest_under_them(ratios):
    name = "first tile of 16 columns only"
    rows = experiments.table_of_priors(24, 4, 64, range(30), 16, name).rows
    assert [row[0] for row in rows] == list(experiments.OTHER_PRIORS)
    by_draw = likelihood.ratios(24, 4, 64, range(30), faulty.rivals(4, 64, 16), C)
    stated = likelihood.compare(by_draw, [experiments.RATIO])
    assert rows[0][1:3] == (stated.best, stated.share[name])
    assert len({row[2] for row in rows}) == len(rows)  # each prior has draws of its own


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("first tile of 8 columns only", "The kernel adds up 8 of 24 columns and leaves out the rest"),
        ("dx_in one element late", "dpre is right at 0 of 24 columns"),
        ("mix not normalised", "dpre is right at 24 of 24 columns"),
    ],
)
def test_the_picture_of_columns_says_which_are_right(device, name, title):
    response = experiments.one_column_at_a_time(blind.Case(name, True, TILE).kernel, 2, 24, 0, device)
    _, axes = plots.figure()
    figures.draw_columns(axes, response)
    assert axes.get_title(loc="left") == title


def test_the_picture_of_speed_says_what_its_lower_bounds_are():
    times = {"ours": 200.0, "torch eager": 700.0, figures.SCHEDULE: 180.0}
    same = {"kernel_operation_mode": "forward", "metric_name": "time", "x_value": "8 x 8"}
    rows = [same | {"kernel_provider": name, "y_value_50": str(took)} for name, took in times.items()]
    _, axes = plots.figure()
    figures.draw_speed(axes, rows, "8 x 8", "forward")
    assert axes.get_xlabel() == "time over the compulsory lower bound, 140 \u00b5s"
    assert axes.get_title(loc="left") == "Forward: ours takes 1.4 times the compulsory lower bound"


@pytest.mark.parametrize(("flagged", "words"), [(0.9, "never slower than"), (1.5, "at most 1.5 times as slow as")])
def test_the_picture_of_sums_says_whether_a_fixed_order_is_slower(flagged, words):
    best = {name: {1024: 2.0, 4096: 2.0} for name in figures.FIXED}
    best |= {figures.ATOMIC: dict.fromkeys((1024, 4096), 1.0), "flagged": dict.fromkeys((1024, 4096), flagged)}
    _, axes = plots.figure()
    figures.draw_sums(axes, best)
    assert axes.get_title(loc="left") == f"The best fixed order is {words} atomics"


KEY = yaml.safe_load((ROOT / "tests/keys/dalpha_atomics.yaml").read_text(encoding="utf-8"))["faults"]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("name", "n"), [(name, 4) for name in KEY] + [(f, 1) for f in KEY if isinstance(KEY[f], list)])
def test_no_verdict_on_a_kernel_is_against_the_key_of_its_fault(device, rng, name, n):
    """Of the claims that need no more than one run of the kernel; tests/test_keys.py runs the whole notebook."""
    tile, d = 16, 96
    listed = name in faulty.rivals(n, d, tile)
    case = blind.Case(
        name if name != "repository" else "first tile of 16 columns only", listed or name == "repository", tile
    )
    p = Problem.sample(16, n, d, 3, C, device)
    observed = case.kernel(p)
    report = whywrong.localise(observed, counterfactual.recorded(p), precision=whywrong.Precision())
    ledger, right = labkit.claims("dalpha_atomics"), counterfactual.steps(p)
    claims.settle_factors(ledger, p, observed, report, **GIVEN)
    claims.settle_sums(ledger, p, observed, experiments.sums_in_orders(right["g_pre"] * right["mix_pre"], rng), **GIVEN)
    debug = {f"{width}": experiments.debug_kernel_is_correct(p, width) for width in (128, tile)}
    claims.settle_debug_kernel(ledger, "g_pre" not in report.divergent, debug, **GIVEN)
    claims.settle_feeding(ledger, experiments.moved_by_one_column(p))
    settles = KEY[name][n == 1] if isinstance(KEY[name], list) else KEY[name]
    reached = {claim: settled.verdict for claim, settled in ledger.settled.items()}
    assert {claim: reached[claim] for claim in settles if reached.get(claim) not in (*settles[claim], None)} == {}
