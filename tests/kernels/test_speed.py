"""What notebook speed says of the benchmarks on record."""

import pytest

import labkit
from kernels.speed import claims, figures, records


@pytest.fixture(scope="module")
def cases():
    return [case for name in records.NAMES for case in records.cases(name)]


def case(ours=1.0, other=2.0, error=0.5):
    return records.Case("mhc", "mhc", "s", {}, {"ours": ours}, {"torch": other}, 0.5, {"ours": error})


def test_every_benchmark_has_cases_with_a_time_of_ours_and_one_of_a_baseline(cases):
    assert {one.benchmark for one in cases} == set(records.NAMES)
    assert all(min(one.ours.values()) > 0.0 < min(one.others.values()) for one in cases)


def test_tf32_products_are_compared_with_tf32_products(cases):
    for one in cases:
        providers = [*one.ours, *one.others]
        assert len({name.endswith(", TF32") for name in providers}) == 1, providers


def test_a_read_of_both_is_no_baseline_and_kernels_alone_are_no_call(cases):
    compared = [one for one in cases if one.benchmark == "compare"]
    assert compared
    assert not any({"read both", "ours, kernels only"} & {*one.ours, *one.others} for one in compared)


def test_no_kernel_of_others_counts_as_ours(cases):
    theirs = {name for one in cases for name in one.others}
    assert theirs >= {"TileKernels, products by torch", "FlexAttention", "the same, attention by its formula"}
    assert not any("torch" in name or "CUTLASS" in name for one in cases for name in one.ours)


@pytest.mark.parametrize(
    ("claim", "some", "verdict"),
    [
        ("ours_is_fastest", [case()], "confirmed"),
        ("ours_is_fastest", [case(), case(ours=3.0)], "refuted"),
        ("timed_is_checked", [case()], "confirmed"),
        ("timed_is_checked", [case(error=1.5)], "refuted"),
    ],
)
def test_the_claims_are_settled_both_ways(claim, some, verdict):
    ledger = labkit.claims("speed")
    claims.settle_all(ledger, some)
    assert ledger.settled[claim].verdict == verdict


def test_the_picture_counts_the_cases_in_which_ours_is_faster():
    (axes,) = figures.plot_all([case(), case(ours=3.0)]).axes
    assert axes.get_title(loc="left") == "Ours is the faster one in 1 of 2 cases"
