"""What structure() reports below the elementwise bound, and what it leaves alone."""

import numpy as np
import pytest
import torch

from labkit import structure

NOISE = 1e-3


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(5)
    golden = torch.randn(256, 192, generator=generator, dtype=torch.float64)
    noise = NOISE * (2 * torch.rand(256, 192, generator=generator, dtype=torch.float64) - 1)
    return golden, noise


def test_rounding_noise_is_left_alone(pair):
    golden, noise = pair
    found = structure(noise, golden, NOISE)
    assert found.ok, str(found)
    assert {test.name for test in found.tests} == {"slope", "mean", "rows", "columns", "tiles", "rms"}


def faults(golden):
    row, column = torch.zeros_like(golden), torch.zeros_like(golden)
    row[17] = 0.9 * NOISE
    column[:, 30] = 0.9 * NOISE
    tile = torch.zeros_like(golden)
    tile[64:128, 128:] = 0.5 * NOISE
    loud = torch.zeros_like(golden)
    loud[::2] = 1.5 * NOISE * torch.sign(torch.sin(1e4 * golden[::2]))
    return {
        "slope": 0.1 * NOISE * golden,
        "mean": torch.full_like(golden, 0.1 * NOISE),
        "rows": row,
        "columns": column,
        "tiles": tile,
        "rms": loud,
    }


@pytest.mark.parametrize(
    ("kind", "at"), [("slope", None), ("mean", None), ("rows", 17), ("columns", 30), ("tiles", 5), ("rms", None)]
)
def test_each_test_sees_its_own_fault_below_the_noise(pair, kind, at):
    golden, noise = pair
    found = structure(noise + faults(golden)[kind], golden, NOISE)
    one = next(test for test in found.tests if test.name == kind)
    assert not one.ok
    if at is not None:
        assert one.at == at


def test_what_is_shared_may_add_up(pair):
    golden, noise = pair
    tilted = noise + 0.5 * NOISE * golden
    assert not structure(tilted, golden, NOISE).ok
    assert structure(tilted, golden, NOISE, 0.5 * NOISE * golden.abs()).ok


def test_the_false_alarm_rate_is_kept_at_a_rate_that_can_be_seen():
    """At a stated 10% a thousand clean tensors may give 100 alarms; the bounds are upper bounds, so fewer."""
    rng = np.random.default_rng(1)
    golden = torch.from_numpy(rng.standard_normal((40, 50)))
    alarms = sum(
        not structure(torch.from_numpy(rng.uniform(-1, 1, (40, 50))), golden, 1.0, false_alarm=0.1).ok
        for _ in range(1000)
    )
    assert alarms < 100


def test_what_is_not_finite_is_left_out_and_nothing_is_no_structure(pair):
    golden, noise = pair
    noise[3, 4] = torch.nan
    golden[7] = torch.inf
    assert structure(noise, golden, NOISE).ok
    assert structure(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, 4, dtype=torch.float64), NOISE).ok
    assert structure(torch.tensor(0.0), torch.tensor(1.0), 0.0).ok


def test_an_exact_step_has_no_noise_to_hide_behind():
    golden = torch.ones(8, 8, dtype=torch.float64)
    off = torch.zeros(8, 8, dtype=torch.float64)
    off[2, 2] = 1e-300
    assert not structure(off, golden, 0.0).ok
