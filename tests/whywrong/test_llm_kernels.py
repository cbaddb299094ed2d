"""Twenty-six kernels as a language model writes them, fuzzed with derived tolerances alone.

After "The Correctness Illusion in LLM-Generated GPU Kernels" (arXiv 2606.20128), whose fuzzing found 10 of 10 faulty
kernels and flagged none of 16 right ones, with tolerances set by hand for each operation.
"""

import pytest

import whywrong
from tools import llm_kernels as kernels
from whywrong import Precision

SHORT = ("variance over n - 1", "the last tile left out", "the stride of another axis", "its scale missing")
"""Faulty kernels that are found and made small within a second or two of the interpreter."""


def hunt(case, name, device, examples, most):
    kernel, reference, inputs = case
    inputs = {key: x.to(device) for key, x in inputs.items()}
    how = {"sizes": kernels.SIZES.get(name), "examples": examples, "most": most}
    return whywrong.fuzz(kernel, reference, inputs, precision=Precision(), **how)


def test_there_are_16_right_ones_and_10_faulty_ones():
    assert (len(kernels.RIGHT), len(kernels.FAULTY)) == (16, 10)


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("name", kernels.RIGHT)
def test_a_right_kernel_is_not_flagged(name, device):
    found = hunt(kernels.RIGHT[name], name, device, 3, 1 << 7)
    assert found.examples == 3
    assert not found.found, found


@pytest.mark.slow
@pytest.mark.parametrize("name", kernels.RIGHT)
def test_a_right_kernel_is_not_flagged_in_50_examples(name, device):
    found = hunt(kernels.RIGHT[name], name, device, 50, 1 << 9)
    assert found.examples >= 30
    assert not found.found, found


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_a_faulty_kernel_is_found_soon(name, device):
    assert hunt(kernels.FAULTY[name], name, device, 30, 1 << 7).found


@pytest.mark.slow
@pytest.mark.parametrize("name", kernels.FAULTY)
def test_a_faulty_kernel_is_found(name, device):
    assert hunt(kernels.FAULTY[name], name, device, 50, 1 << 9).found


@pytest.mark.long
def test_what_does_not_compute_at_all_is_found(device):
    words = {name: hunt(case, name, device, 10, 1 << 6).failure.words for name, case in kernels.STATEFUL.items()}
    assert "the call before, on other inputs, gave the same" in words["an earlier call's result"]
    assert "NaN" in words["the output untouched"]
