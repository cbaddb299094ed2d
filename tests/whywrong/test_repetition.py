"""Runs repeated: bit-identical, order noise, or beyond the bound. Poisoned memory."""

import numpy as np
import pytest
import torch

import whywrong
from kernels.compare import nondeterminism
from whywrong import Trace, poisoned, repeat
from whywrong.checking.repetition import BEYOND_BOUND, UNWRITTEN, distance
from whywrong.comparing.bits import same_bits
from whywrong.errors import UsageError


def test_the_same_bits_each_time_are_said_to_be():
    found = repeat(lambda: torch.arange(5.0), times=4)
    assert found.identical
    assert found.steps["result"].finding == "bit-identical"
    assert found.ok


def test_the_order_of_atomic_additions_is_noise_within_the_bound(rng):
    run, bound = nondeterminism.atomic_additions(rng)
    found = repeat(run, times=12, golden=bound)
    step = found.steps["result"]
    assert step.distinct > 6
    assert 0 < step.of_bound <= 1
    assert (found.ok, step.finding) == (True, "order noise, within the bound")


def test_a_lost_update_is_beyond_it(rng):
    run, bound = nondeterminism.lost_update(rng)
    found = repeat(run, times=12, golden=bound)
    assert (found.ok, found.steps["result"].finding) == (False, "beyond the bound: a race or an uninitialised read")


def test_a_recorded_golden_says_what_a_changed_step_may_be_off():
    x, noise = torch.arange(1.0, 65.0), torch.Generator().manual_seed(0)

    def run(off):
        y = x * 1.1 * (1.0 + off * torch.randn(64, generator=noise))
        return Trace({"x": x, "y": y, "z": torch.sqrt(y)})

    def reference(x):
        y = whywrong.step("y", x * 1.1)
        return whywrong.step("z", torch.sqrt(y))

    recorded = whywrong.golden(reference, x=x)
    within = repeat(lambda: run(2e-8), times=6, golden=recorded).steps["y"]
    beyond = repeat(lambda: run(1e-3), times=6, golden=recorded)
    assert (within.of_bound <= 1.0, within.finding) == (True, "order noise, within the bound")
    assert (beyond.steps["x"].distinct, beyond.steps["y"].distinct > 1) == (1, True)
    assert beyond.steps["z"].of_bound <= 1.0


def test_what_nobody_wrote_shows_when_memory_is_poisoned(rng):
    run, bound = nondeterminism.unwritten_tail(rng)
    with poisoned():
        assert run()[-1].isnan()
        found = repeat(run, times=12, golden=bound)
    assert not found.ok
    assert found.steps["result"].spread == np.inf


def test_what_is_half_written_shows_too():
    def run():
        out = torch.empty(16)
        out[:8] = 1.0
        return out

    with poisoned():
        found = repeat(run, times=3)
    assert found.steps["result"].finding == UNWRITTEN
    assert not found.ok


def test_poison_covers_every_kind_of_empty_and_ends_with_the_block():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, 2)).isnan().all()
        assert torch.empty(4, dtype=torch.int16).tolist() == [32767] * 4
    assert torch.are_deterministic_algorithms_enabled() == before


def test_steps_of_a_trace_are_told_apart_and_bounds_come_from_the_golden():
    count = iter(range(100))

    def run():
        n = next(count)
        return Trace({"a": torch.ones(3), "b": torch.full((3,), 1.0 + n * 2.0**-23)})

    golden = Trace()
    from whywrong.comparing.bounds import Bound

    golden.add("a", torch.ones(3), bound=Bound(0.0, "exact"))
    golden.add("b", torch.ones(3), bound=Bound(1e-5, "t"))
    found = repeat(run, times=3, golden=golden)
    assert found.steps["a"].distinct == 1
    assert found.steps["b"].distinct == 3
    assert found.ok
    assert not np.isfinite(repeat(run, times=3).steps["b"].of_bound)


@pytest.mark.parametrize("times", [0, 1])
def test_once_is_no_repetition(times):
    with pytest.raises(UsageError, match=f"times: .*got {times}"):
        repeat(lambda: torch.ones(1), times=times)


def test_runs_that_give_other_steps_or_shapes_are_told():
    names = iter(("x", "y"))
    with pytest.raises(UsageError, match=r"gave steps \['y'\], then \['x'\]"):
        repeat(lambda: Trace({next(names): torch.ones(2)}), times=2)
    sizes = iter((2, 3))
    found = repeat(lambda: torch.ones(next(sizes)), times=2)
    assert (found.identical, found.steps["result"].spread) == (False, np.inf)
    ends = iter((2.0, np.nan))
    assert repeat(lambda: torch.tensor([1.0, next(ends)]), times=2).steps["result"].finding == BEYOND_BOUND


def test_results_are_the_same_if_their_bits_shapes_and_types_are():
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert repeat(lambda: torch.ones(0, 3), times=2).identical
    assert not same_bits(torch.zeros(2), torch.tensor([0.0, -0.0]))
    assert not same_bits(torch.zeros(2, 3), torch.zeros(3, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_results_are_as_far_apart_as_their_worst_element():
    assert distance(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])) == 0.5
    assert distance(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == np.inf
    assert distance(torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 2.0])) == np.inf
    assert distance(torch.tensor([float("nan")]), torch.tensor([float("inf")])) == np.inf
    assert distance(torch.tensor([float("-inf")]), torch.tensor([float("inf")])) == np.inf
    assert distance(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 3.0])) == 2.0
    assert distance(torch.ones(2), torch.ones(3)) == np.inf


def test_what_was_found_is_a_table():
    found = repeat(lambda: torch.ones(2), times=3)
    assert "distinct of 3" in str(found)
    assert "<table" in found._repr_html_()
