"""Kernels in a process that imports them, as on a GPU, and what an error of CUDA leaves behind."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

import whywrong
from labkit.session.catalogue import ROOT
from tests.whywrong.test_child import descendants
from whywrong import child
from whywrong.errors import UsageError
from whywrong.fuzzing.running import LOST

QUICK = {"examples": 30, "most": 1 << 10, "isolate": True, "progress": str, "seconds": 120.0}
EXAMPLE = {"x": torch.arange(12.0).view(4, 3)}


def twice(x, how=None):
    return 2.0 * x


def twice_in_place_of(x, out):
    out.copy_(2.0 * x)


def segfaults(x):
    return ctypes.string_at(0) if len(x) > 3 else 2.0 * x


def out_of_range(x):
    """An index that the GPU refuses, after which CUDA does not work in its process."""
    if len(x) > 3:
        torch.zeros(3, device=x.device)[torch.full((5,), 7, device=x.device)] += 1
    return 2.0 * x


def waits_for_ever(x):
    if len(x) > 3:
        torch.cuda._sleep(1 << 45)
    return 2.0 * x


@pytest.fixture
def imported(monkeypatch):
    """A process that imports the kernel, without a GPU too."""
    monkeypatch.setattr(child, "available", lambda: False)
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="children are for Linux")
def test_a_kernel_runs_in_a_process_that_imports_it(imported):
    assert whywrong.fuzz(twice, twice, EXAMPLE, **QUICK).passed
    out = EXAMPLE | {"out": torch.empty(4, 3)}
    assert whywrong.fuzz(twice_in_place_of, twice, out, out="out", **QUICK).passed
    found = whywrong.fuzz(segfaults, twice, EXAMPLE, **(QUICK | {"most": 16}))
    assert found.failure.words == "died: Segmentation fault (signal 11)"
    assert list(found.failure.inputs["x"].shape) == [4, 1]
    with pytest.raises(UsageError, match=r"isolate: kernel: .*<lambda> cannot be imported; expected a function"):
        whywrong.fuzz(lambda x: 2.0 * x, twice, EXAMPLE, **QUICK)
    with pytest.raises(UsageError, match="isolate: expected inputs that can be pickled, got"):
        whywrong.fuzz(twice, twice, EXAMPLE | {"how": threading.Lock()}, **QUICK)


@pytest.mark.gpu
@pytest.mark.first
@pytest.mark.parametrize(
    ("kernel", "words", "shrinking", "seconds", "rows"),
    [
        (out_of_range, "CUDA error: device-side assert triggered", 90.0, 120.0, 4),
        (waits_for_ever, "hangs: it had not ended after", 5.0, 40.0, None),  # a case waits for a quarter of that
        (segfaults, "died: Segmentation fault", 5.0, 120.0, None),
    ],
)
def test_a_gpu_kernel_that_ends_or_hangs_is_a_failure_and_cuda_works_afterwards(
    kernel, words, shrinking, seconds, rows, monkeypatch
):
    """A context of CUDA is made for each case, and for each smaller failure; hence the seconds."""
    monkeypatch.setattr("whywrong.fuzzing.fuzz.HANGING_SECONDS", 15.0)
    monkeypatch.setattr("whywrong.fuzzing.fuzz.SHRINKING_SECONDS", shrinking)
    given = {"x": EXAMPLE["x"].cuda()}
    failure = whywrong.fuzz(kernel, twice, given, **(QUICK | {"most": 16, "seconds": seconds})).failure
    assert words in failure.words
    assert failure.words.endswith(LOST) == (kernel is out_of_range)
    assert rows is None or len(failure.inputs["x"]) == rows
    assert float((torch.ones(3, device="cuda") * 2).sum()) == 6.0
    assert whywrong.fuzz(twice, twice, given, **QUICK).passed


@pytest.mark.gpu
def test_an_error_that_ends_cuda_in_this_process_is_said_for_what_it_is():
    code = "import torch, whywrong; from tests.whywrong import test_isolated as t; "
    code += "print(whywrong.fuzz(t.out_of_range, t.twice, {'x': torch.ones(4, 3, device='cuda')}, progress=str))"
    words = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "CUDA error: device-side assert triggered" in words.stdout, words.stderr
    assert f"{LOST}\n" in words.stdout
    assert "so nothing smaller was tried; isolate=True gives the kernel a process of its own" in words.stdout


@pytest.mark.gpu
def test_an_error_of_cuda_that_leaves_it_usable_is_not_called_its_end():
    def kernel(x):
        raise RuntimeError("CUDA error: invalid configuration argument")

    found = whywrong.fuzz(kernel, twice, {"x": EXAMPLE["x"].cuda()}, progress=str)
    assert found.failure.words == "raised RuntimeError: CUDA error: invalid configuration argument"
