"""What structure() reports below the elementwise bound, and what it leaves alone."""

import numpy as np
import pytest
import torch

from whywrong import Bound, structure
from whywrong.comparing.structure import Null

NOISE = 1e-3


def known(noise, shared=0.0):
    """A bound that says what noise looks like, and nothing else."""
    return Bound(1.0, "given", noise, shared)


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(5)
    golden = torch.randn(256, 192, generator=generator, dtype=torch.float64)
    noise = NOISE * (2 * torch.rand(256, 192, generator=generator, dtype=torch.float64) - 1)
    return golden, noise


def test_rounding_noise_is_left_alone(pair):
    golden, noise = pair
    found = structure(noise, golden, known(NOISE))
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
    found = structure(noise + faults(golden)[kind], golden, known(NOISE))
    one = next(test for test in found.tests if test.name == kind)
    assert not one.ok
    if at is not None:
        assert one.at == at


def test_what_is_shared_may_add_up(pair):
    golden, noise = pair
    tilted = noise + 0.5 * NOISE * golden
    assert not structure(tilted, golden, known(NOISE)).ok
    assert structure(tilted, golden, known(NOISE, 0.5 * NOISE * golden.abs())).ok


def test_the_false_alarm_rate_is_kept_at_a_rate_that_can_be_seen():
    """At a stated 10% a thousand clean tensors may give 100 alarms; the bounds are upper bounds, so fewer."""
    rng = np.random.default_rng(1)
    golden = torch.from_numpy(rng.standard_normal((40, 50)))
    alarms = sum(
        not structure(torch.from_numpy(rng.uniform(-1, 1, (40, 50))), golden, known(1.0), false_alarm=0.1).ok
        for _ in range(1000)
    )
    assert alarms < 100


def test_what_is_not_finite_is_left_out_and_nothing_is_no_structure(pair):
    golden, noise = pair
    noise[3, 4] = torch.nan
    golden[7] = torch.inf
    assert structure(noise, golden, known(NOISE)).ok
    assert structure(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, 4, dtype=torch.float64), known(NOISE)).ok
    assert structure(torch.tensor(0.0), torch.tensor(1.0), known(0.0)).ok


def test_a_null_keeps_one_vector_of_sums_however_many_runs_it_hears(rng):
    golden, noise = torch.from_numpy(rng.standard_normal(500)), torch.full((500,), 0.1, dtype=torch.float64)
    errors = torch.from_numpy(0.1 * rng.standard_normal((24, 500)))
    parts, whole = Null(golden, noise), Null(golden, noise)
    whole.add(errors)
    for error in errors:
        parts.add(error[None])
    assert parts._kinds[False][0].shape == whole._kinds[False][0].shape
    residual = torch.from_numpy(0.1 * rng.standard_normal(500))
    for a, b in zip(parts.tests(residual, 1e-6), whole.tests(residual, 1e-6), strict=True):
        assert (a.name, a.at) == (b.name, b.at)
        assert a.share == pytest.approx(b.share)
