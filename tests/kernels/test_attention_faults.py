"""The wrong calls: counted, told apart, and the same on every BLAS."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.attention import blind, calls, faulty, golden, survey
from kernels.attention.blas import GemmRejectedError, blas_for
from kernels.attention.calls import Call
from kernels.attention.problem import REPORT, Sizes, uniform
from kernels.attention.survey import Fate
from whywrong import compare

BLOCK = 32


@pytest.fixture(scope="module")
def listed():
    return survey.every_call(BLOCK)


@pytest.fixture(scope="module")
def outcomes(listed):
    return survey.survey(REPORT, listed)


def small(sizes, seed=0):
    return uniform(sizes, np.random.default_rng(seed))


def test_the_list_holds_the_right_calls_and_every_named_one(listed):
    assert len(listed) == len(set(listed))
    assert {Call(), calls.blocked(BLOCK), *blind.named(BLOCK).values()} <= set(listed)


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


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("sizes", [REPORT, Sizes(1, 37, 53, 29), Sizes(1, 53, 29, 29)], ids=str)
def test_poison_finds_just_the_calls_that_arithmetic_says_leave_their_operands(device, listed, sizes):
    one = replace(sizes, heads=1)
    layout, inputs = golden.plan(one), small(one)
    for call in listed[:: 7 if sizes is REPORT else 3]:
        try:
            found = faulty.poisoned(call, inputs, device)
        except GemmRejectedError:
            continue
        outside = set().union(*(survey.exceeded_operands(g, call, layout) for g in call.gemms(one, layout)))
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
    for call in [*blind.named(BLOCK).values(), *listed[::31]]:
        try:
            value, bound = golden.called(call, inputs, mode)
        except GemmRejectedError:
            with pytest.raises(GemmRejectedError):
                faulty.scores(call, inputs, device, mode=mode)
            continue
        found = compare(faulty.scores(call, inputs, device, mode=mode), value, bound=bound)
        assert found.ok, f"{call}: {found}"
        ran += 1
    assert ran >= 10


def test_right_blocks_are_right_at_every_block_size(device):
    for sizes in (Sizes(2, 37, 53, 29), Sizes(1, 128, 128, 64)):
        inputs = small(sizes)
        exact = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))
        for block in (1, 8, 32, 100):
            got = faulty.scores(calls.blocked(block), inputs, device)
            assert compare(got, exact[0], bound=exact[1]).ok


def test_a_rejected_call_ends_the_trace_before_the_scores(device):
    inputs = small(Sizes(2, 20, 53, 29))
    trace = faulty.attention(Call(ldb="N"), inputs, device)
    assert trace.names == ["q", "k", "kt"]
    assert faulty.Suspect(Call(ldb="N"), device).rejected(inputs.sizes) == "ldb"


def test_heads_in_one_batch_give_what_heads_one_after_another_give(device, listed):
    inputs = small(Sizes(3, 37, 53, 29))
    layout, blas = golden.plan(inputs.sizes, "adjacent"), blas_for(device)
    apart = 0
    for call in listed[::17]:
        gemms = call.gemms(inputs.sizes, layout)
        try:
            together = faulty.prepare(inputs, layout, device)
            faulty.multiply(call, inputs, together, layout, blas)
        except GemmRejectedError:
            continue
        one_by_one = faulty.prepare(inputs, layout, device)
        for head in range(layout.heads):
            for g in gemms:
                blas.sgemm(one_by_one[head * layout.stride :], g)
        value, bound = golden.called(call, inputs, "adjacent")
        for memory in (together, one_by_one):
            assert compare(layout.view(memory, "QK").cpu().numpy(), value, bound=bound).ok, call
        apart += faulty.heads_are_independent(gemms, layout)
    assert apart >= 20


def test_a_head_that_another_one_writes_to_does_not_go_in_one_batch():
    layout = golden.plan(REPORT, "adjacent")
    assert faulty.heads_are_independent(Call().gemms(REPORT, layout), layout)
    assert faulty.heads_are_independent(Call(ldb="N").gemms(REPORT, layout), layout)  # it reads K, which nobody writes
    spilling = replace(calls.blocked(BLOCK), m="M", n="N")
    assert not faulty.heads_are_independent(spilling.gemms(REPORT, layout), layout)


def test_draws_of_the_survey_do_not_depend_on_how_many_lie_in_one_buffer(device, monkeypatch):
    some = [Call(a="K"), Call(ldb="N"), replace(calls.blocked(BLOCK), m="M", n="N", a_offset="0")]
    sizes = Sizes(2, 64, 64, 32)
    one_by_one = survey.largest_differences(some, sizes, range(5), device)
    monkeypatch.setitem(survey.MOST, device, 1 << 24)
    together = survey.largest_differences(some, sizes, range(5), device)
    for call in some:
        assert together[call] == pytest.approx(one_by_one[call], rel=1e-5, nan_ok=True), call


def test_the_reports_diagnosis_is_on_the_list_in_every_form_and_wrong(listed, outcomes):
    fate = {call: o.fate for o in outcomes for call in o.calls}
    forms = calls.diagnosis(BLOCK)
    assert set(forms.values()) <= set(listed)
    assert all(fate[call] in (Fate.WRONG, Fate.READS_OUTSIDE) for call in forms.values())


def test_an_unknown_defect_is_refused():
    with pytest.raises(ValueError, match=r"defect: expected blind or one of column_major.*got 'none'"):
        blind.suspect("none", 0, [])


def test_heads_of_the_survey_are_independent_draws(device):
    found = survey.largest_differences([Call(a="K")], Sizes(6, 64, 64, 32), range(3), device)[Call(a="K")]
    assert found.shape == (3, 6)
    assert len(np.unique(found)) == 18


def test_the_likelihood_is_the_share_of_draws_that_fall_into_the_range(outcomes):
    rng = np.random.default_rng(0)
    draws = rng.gumbel(9.0, 0.7, (20, 12))
    likelihoods = survey.likelihood(outcomes[0], draws, 8.8, 10.4)
    fresh = rng.gumbel(9.0, 0.7, (200_000, 12))
    head = ((fresh >= 8.75) & (fresh <= 10.45)).mean()
    ends = ((abs(fresh.min(1) - 8.8) <= 0.05) & (abs(fresh.max(1) - 10.4) <= 0.05)).mean()
    assert likelihoods.head == pytest.approx(head, abs=0.08)  # the law is fitted to 240 draws
    assert likelihoods.ends == pytest.approx(ends, rel=0.6)


@pytest.mark.parametrize("heads", [3, 12])
def test_the_true_call_is_ruled_out_as_often_as_the_level_says(heads):
    draws = np.random.default_rng(2).gumbel(9.0, 0.7, (20_000, heads))
    held = np.exp(-np.exp(-(draws - 9.0) / 0.7))  # the law's own distribution function
    chance = survey.chance_of_range(held.max(axis=1) - held.min(axis=1), heads)
    for level in (0.01, 0.05, 0.2):
        assert (chance < level).mean() == pytest.approx(level, abs=4 * (level / 20_000) ** 0.5)


def test_a_result_with_nan_cannot_have_given_numbers(outcomes):
    assert survey.likelihood(outcomes[0], np.full((2, 12), np.nan), 8.8, 10.4).chance == 0.0


def test_a_level_between_two_chances_lets_one_outcome_fit_and_a_higher_one_none(outcomes):
    draws = np.random.default_rng(1)
    likelihoods = [
        survey.likelihood(outcomes[i], draws.normal(9.6, s, (50, 12)), 8.8, 10.4) for i, s in ((0, 0.4), (1, 0.6))
    ]
    near, far = (item.chance for item in likelihoods)
    assert near > far > 0
    assert survey.fitting(likelihoods, 0.5 * (near + far)) == likelihoods[:1]
    assert survey.fitting(likelihoods, 1.1 * near) == []
    assert survey.fitting(likelihoods, 0.5 * (near + far), heads=3) == likelihoods  # three heads say less than twelve


def test_a_survey_in_which_nothing_fits_ends_in_none_of_these(outcomes):
    likelihoods = [survey.likelihood(o, np.full((3, 12), 20.0) + i, 8.8, 10.4) for i, o in enumerate(outcomes[:3])]
    weighing = survey.weighed(likelihoods, 1e-3)
    assert weighing.cause == "none of these"
    assert len(weighing.refuted) == 3
