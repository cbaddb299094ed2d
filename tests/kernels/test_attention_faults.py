"""The wrong calls: counted, told apart, and the same on every BLAS."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.attention import calls, faulty, golden, identify, survey
from kernels.attention.blas import GemmRejectedError
from kernels.attention.calls import Call
from kernels.attention.problem import REPORT, Sizes, uniform
from kernels.attention.survey import Fate
from labkit import compare

BLOCK = 32


@pytest.fixture(scope="module")
def listed():
    return survey.every_call(BLOCK)


@pytest.fixture(scope="module")
def outcomes(listed):
    return survey.survey(REPORT, listed)


@pytest.fixture(scope="module")
def pool(outcomes):
    return [call for o in outcomes if o.fate not in (Fate.REJECTED, Fate.RIGHT) for call in o.calls]


def small(sizes, seed=0):
    return uniform(sizes, np.random.default_rng(seed))


def test_the_list_holds_the_right_calls_and_every_named_one(listed):
    assert len(listed) == len(set(listed))
    assert {Call(), calls.blocked(BLOCK), *faulty.named(BLOCK).values()} <= set(listed)


def test_every_call_meets_one_fate(listed, outcomes):
    assert sum(n for n, _ in survey.count(outcomes).values()) == len(listed)
    fate = {call: o.fate for o in outcomes for call in o.calls}
    assert fate[Call()] is Fate.RIGHT
    assert fate[calls.blocked(BLOCK)] is Fate.RIGHT
    assert fate[Call(m="N", n="M")] is Fate.RIGHT  # the same call at N = M
    assert fate[Call(ldb="N")] is Fate.READS_OUTSIDE
    assert fate[Call(lda="d_k")] is Fate.REJECTED
    assert fate[Call(a="K")] is Fate.WRONG


def test_most_calls_that_are_right_at_equal_sizes_are_wrong_at_unequal_ones(outcomes):
    (right,) = [o for o in outcomes if o.fate is Fate.RIGHT]
    elsewhere = [o for o in survey.survey(Sizes(1, 37, 53, 29), right.calls) if o.fate is Fate.RIGHT]
    assert len(elsewhere[0].calls) < len(right.calls) / 2


@pytest.mark.parametrize("sizes", [REPORT, Sizes(1, 37, 53, 29), Sizes(1, 53, 29, 29)], ids=str)
def test_poison_finds_just_the_calls_that_arithmetic_says_leave_their_operands(device, listed, sizes):
    one = replace(sizes, heads=1)
    layout, inputs = golden.plan(one), small(one)
    for call in listed[:: 7 if sizes is REPORT else 3]:
        try:
            found = faulty.scores(call, inputs, device)[1]
        except GemmRejectedError:
            continue
        outside = set().union(*(survey.leaves(g, call, layout) for g in call.gemms(one, layout)))
        # A result element of a call that reads outside may still come from inside alone: extents are necessary.
        assert found.any <= bool(outside), call
        assert bool(found.guards_written) == ("C" in outside), call
        if outside & {"A", "B"} and "C" not in outside and not call.block:
            assert found.nan_results, call


@pytest.mark.parametrize("mode", ["poison", "adjacent"])
@pytest.mark.parametrize("sizes", [Sizes(2, 128, 128, 64), Sizes(2, 37, 53, 29), Sizes(2, 53, 53, 29)], ids=str)
def test_the_counterfactual_is_what_the_real_blas_gives(device, listed, sizes, mode):
    inputs = small(sizes)
    ran = 0
    for call in [*faulty.named(BLOCK).values(), *listed[::31]]:
        try:
            value, bound = golden.called(call, inputs, mode)
        except GemmRejectedError:
            with pytest.raises(GemmRejectedError):
                faulty.scores(call, inputs, device, mode=mode)
            continue
        found = compare(faulty.scores(call, inputs, device, mode=mode)[0], value, bound)
        assert found.ok, f"{call}: {found}"
        ran += 1
    assert ran >= 10


def test_right_blocks_are_right_at_every_block_size(device):
    for sizes in (Sizes(2, 37, 53, 29), Sizes(1, 128, 128, 64)):
        inputs = small(sizes)
        exact = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))
        for block in (1, 8, 32, 100):
            got = faulty.scores(calls.blocked(block), inputs, device)[0]
            assert compare(got, *exact).ok


def test_a_rejected_call_ends_the_trace_before_the_scores(device):
    inputs = small(Sizes(2, 20, 53, 29))
    trace = faulty.attention(Call(ldb="N"), inputs, device)
    assert trace.names == ["q", "k", "kt"]
    assert faulty.Suspect(Call(ldb="N"), device).rejected(inputs.sizes) == "ldb"


def test_blind_is_named_for_fifty_seeds(device, listed, pool):
    candidates = identify.Candidates(listed, identify.separating_settings(REPORT))
    alone = 0
    for seed in range(50):
        suspect = faulty.suspect("blind", seed, pool, device)
        left = candidates.identify(suspect).left
        assert str(suspect.reveal()) in left, f"seed {seed}"
        assert len(left) <= 4, f"seed {seed}: {left}"
        alone += len(left) == 1
    assert alone >= 35


def test_calls_that_are_not_told_apart_do_the_same_arithmetic(device, listed, pool):
    candidates = identify.Candidates(listed, identify.separating_settings(REPORT))
    together = 0
    for seed in range(12):
        left = candidates.identify(faulty.suspect("blind", seed, pool, device)).left
        for order in ((31, 41, 23), (23, 31, 41), (41, 23, 31), (23, 23, 41), (41, 41, 23)):
            found = survey.survey(Sizes(1, *order), [candidates.calls[name] for name in left])
            assert len(found) == 1, (seed, order, left)
        together += len(left) > 1
    assert together


def test_an_unknown_defect_is_refused():
    with pytest.raises(ValueError, match="defect: 'none' is not right; wanted blind or one of column_major_result"):
        faulty.suspect("none", 0, [])


def test_heads_of_the_survey_are_independent_draws(device):
    found = survey.largest_differences([Call(a="K")], Sizes(6, 64, 64, 32), 3, device)[Call(a="K")]
    assert found.shape == (3, 6)
    assert len(np.unique(found)) == 18


def test_the_likelihood_is_the_share_of_draws_that_fall_into_the_range(outcomes):
    rng = np.random.default_rng(0)
    draws = rng.gumbel(9.0, 0.7, (20, 12))
    judged = survey.likelihood(outcomes[0], draws, 8.8, 10.4)
    fresh = rng.gumbel(9.0, 0.7, (200_000, 12))
    inside = ((fresh >= 8.75) & (fresh <= 10.45)).all(axis=1).mean()
    ends = ((abs(fresh.min(1) - 8.8) <= 0.05) & (abs(fresh.max(1) - 10.4) <= 0.05)).mean()
    assert judged.inside == pytest.approx(inside, rel=0.6)  # the law is fitted to 240 draws
    assert judged.ends == pytest.approx(ends, rel=0.6)


def test_a_result_with_nan_cannot_have_given_numbers(outcomes):
    assert survey.likelihood(outcomes[0], np.full((2, 12), np.nan), 8.8, 10.4).inside == 0.0
