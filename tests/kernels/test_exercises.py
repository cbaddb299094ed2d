"""What a reader of a notebook may write into a kernel is checked as it should be."""

import numpy as np
import pytest
import torch

import whywrong
from kernels.bert import exercise, layer_norm
from kernels.tinyllm import exercise as resizing
from labkit.session.device import choose
from whywrong.errors import UsageError

DEVICE = choose("auto")
ROWS = 1.0 + 0.059 * torch.randn(15, 48, generator=torch.Generator().manual_seed(3))
VARIANCES = {
    "variance = tl.sum(tl.where(mask, (x - mean) * (x - mean), 0.0), 0) / columns": None,
    "variance = tl.sum((x - mean) * (x - mean), 0) / columns": "variance",  # masked columns hold 0, and not the mean
    "variance = tl.sum(x * x, 0) / columns - mean * mean": "variance",  # cancels
    "variance = mean * 0.0": "variance",
}


@pytest.mark.parametrize("line", VARIANCES)
def test_a_line_for_the_variance_is_right_or_the_step_is_wrong(line, device, tmp_path):
    rows = ROWS.to(device)
    recorded = whywrong.golden(exercise.reference, x=rows)
    steps = exercise.with_variance(tmp_path, line)(rows)
    assert whywrong.localise(steps, recorded, precision=whywrong.Precision("float32")).first == VARIANCES[line]


def test_the_reference_of_the_exercise_is_torchs_layer_norm():
    steps = whywrong.golden(exercise.reference, x=ROWS)
    expected = torch.nn.functional.layer_norm(ROWS.double(), ROWS.shape[1:], eps=layer_norm.EPS)
    assert np.allclose(steps["y"], expected, rtol=1e-12)


def test_a_line_that_is_not_python_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"line: expected a line of Python, got 'variance = tl\.sum\(x'"):
        exercise.with_variance(tmp_path, "variance = tl.sum(x")


RESIZES = {
    "h_data.resize(size / sizeof(float));": (12, 12),
    "h_data.resize(size);": (48, 0),  # the upload is as long as the vector, and rejected
    "h_data.resize(size / 8);": (6, 0),  # too short for the download
}


@pytest.mark.parametrize("line", RESIZES)
def test_a_line_for_the_resize_gives_a_vector_and_an_upload_of_its_length(line, tmp_path):
    values = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    host, back = resizing.round_trip_with(tmp_path, line, values, -values, DEVICE)
    assert (len(host), int((back == values).sum())) == RESIZES[line]


def test_a_line_that_does_not_compile_is_refused(tmp_path):
    values = np.ones((3, 4), np.float32)
    with pytest.raises(UsageError, match=r"could not build it: .*error"):
        resizing.round_trip_with(tmp_path, "h_data.resize(size", values, -values, DEVICE)
