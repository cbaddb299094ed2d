"""Reads outside of an input: by other values there where a result shows them, by guard pages where none does."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import whywrong
from whywrong import child
from whywrong.checking.guarded import Memory, extent, rounded, span_in_words
from whywrong.fuzzing.fuzz import check

isolated = pytest.mark.skipif(not child.available(), reason="guard pages are for a child, on Linux without a GPU")
compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
EXAMPLE = {"x": torch.randn(40)}
QUICK = {"examples": 30, "layouts": "contiguous", "progress": str}
HERE = {"isolate": False}


@triton.jit
def twice_kernel(x_ptr, out_ptr, n, MASKED: tl.constexpr):
    i = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + i, mask=(i < n) | (not MASKED))
    tl.store(out_ptr + i, 2.0 * x, mask=i < n)


@triton.jit
def total_kernel(x_ptr, out_ptr, n, MASKED: tl.constexpr):
    total = 0.0
    for start in range(0, n, 16):
        i = start + tl.arange(0, 16)
        total += tl.sum(tl.load(x_ptr + i, mask=(i < n) | (not MASKED), other=0.0), 0)
    tl.store(out_ptr, total)


def twice(x, masked=False):
    out = torch.empty_like(x)
    twice_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), masked)
    return out


def total(x, masked=False):
    out = torch.empty((), dtype=x.dtype, device=x.device)
    total_kernel[(1,)](x, out, x.numel(), masked)
    return out


def exact_twice(x):
    return 2.0 * x


@pytest.mark.long
@isolated
def test_a_read_without_an_effect_is_found_and_the_input_the_element_and_the_line_are_named():
    found = whywrong.fuzz(twice, exact_twice, EXAMPLE, **QUICK)
    assert re.fullmatch(
        r"touches memory outside of 'x': element 1, where its last is 0, in line \d+ of test_memory.py",
        found.failure.words,
    )
    line = int(re.search(r"line (\d+)", found.failure.words)[1])
    assert "tl.load(x_ptr + i" in Path(__file__).read_text().splitlines()[line - 1]
    assert whywrong.fuzz(twice, exact_twice, EXAMPLE, **QUICK, **HERE).passed, "without a child nothing shows it"


@pytest.mark.long
@pytest.mark.parametrize("how", [HERE, pytest.param({}, marks=isolated)])
def test_a_read_with_an_effect_says_how_much_and_why_what_was_rounded_up(how):
    found = whywrong.fuzz(total, torch.sum, EXAMPLE, **QUICK, **how)
    assert found.failure.words.endswith("; reads 15 elements past the end of 'x'")
    assert ("touches memory outside of 'x': element 1" in found.failure.words) == (how != HERE)
    (cause,) = found.failure.explain().causes
    says = "reads 8 elements past the end of 'x', as if dimension 0 were rounded up to a multiple of 16"
    assert (cause.kind, cause.says) == ("memory", says)


@pytest.mark.long
def test_masked_kernels_touch_nothing():
    for kernel, reference in ((twice, exact_twice), (total, torch.sum)):
        found = whywrong.fuzz(lambda x, kernel=kernel: kernel(x, True), reference, EXAMPLE, **QUICK)
        assert found.passed, found


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("layout", ["contiguous", "offset", "rows apart", "gaps", "first axis fastest"])
def test_a_strided_input_may_be_read_to_its_end_and_not_between_its_rows(layout):
    found = whywrong.fuzz(torch.sum, torch.sum, {"x": torch.randn(5, 7)}, examples=20, layouts=("contiguous", layout))
    assert found.failure is None, found


SOURCE = """
extern "C" void doubled(const float* x, float* out, long n) {
    for (volatile long i = 0; i <= n; ++i) { volatile float read = x[i]; if (i < n) out[i] = 2.0f * read; }
}
extern "C" float largest(const float* x, long n) {
    float most = x[0];
    for (long i = 0; i < (n + 7) / 8 * 8; ++i) most = x[i] > most ? x[i] : most;
    return most;
}
extern "C" float summed(const float* x, long n) {
    float sum = 0.0f;
    for (volatile long i = -1; i < n; ++i) { volatile float read = x[i]; sum += i < 0 ? 0.0f : read; }
    return sum;
}
extern "C" long counted(const long* x, long n) {
    long sum = 0;
    for (long i = 0; i <= n; ++i) sum += x[i];
    return sum;
}
extern "C" float aligned(const float* x, long n) {
    if ((unsigned long)x % 64) __builtin_trap();
    float sum = 0.0f;
    for (long i = 0; i < n; ++i) sum += x[i];
    return sum;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    (folder / "reading.cpp").write_text(SOURCE)
    command = ["c++", "-shared", "-fPIC", "-O1", str(folder / "reading.cpp"), "-o", str(folder / "reading.so")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "reading.so"))


def host(library, name, result=ctypes.c_float):
    function = getattr(library, name)
    function.restype = result

    def kernel(x):
        return torch.tensor(function(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.numel())), dtype=x.dtype)

    return kernel


@compiled
@isolated
def test_a_kernel_in_cpp_that_reads_one_too_many_is_found_and_named(library):
    def kernel(x):
        out = torch.empty_like(x)
        library.doubled(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_long(x.numel()))
        return out

    failure = check(kernel, exact_twice, EXAMPLE)
    assert "touches memory outside of 'x': element 40, where its last is 39, in line" in failure.words
    failure = check(host(library, "summed"), torch.sum, EXAMPLE)
    assert "touches memory outside of 'x': element -1, where its first is 0" in failure.words


@compiled
def test_a_maximum_that_ignores_nan_is_seen_by_large_numbers(library):
    """NaN is greater than nothing, so that a maximum over too many is right where NaN lies behind its input."""
    found = whywrong.fuzz(host(library, "largest"), torch.max, EXAMPLE, **QUICK, **HERE)
    assert "; two calls on the same inputs differ in 1 of 1 elements; reads 7 elements past" in found.failure.words
    (cause,) = (
        whywrong.fuzz(host(library, "largest"), torch.max, {"x": torch.randn(37)}, **QUICK, **HERE)
        .failure.explain()
        .causes
    )
    assert cause.says == "reads 3 elements past the end of 'x', as if dimension 0 were rounded up to a multiple of 8"


@compiled
def test_whole_numbers_outside_are_the_least_and_then_the_largest(library):
    """A sum of one number too many is right where that is 0."""
    failure = check(host(library, "counted", ctypes.c_long), torch.sum, {"x": torch.tensor([0, 1, 2])}, **HERE)
    assert "two calls on the same inputs differ" in failure.words


@pytest.mark.long
@compiled
@isolated
def test_a_kernel_that_takes_aligned_inputs_alone_is_right(library):
    found = whywrong.fuzz(host(library, "aligned"), torch.sum, EXAMPLE, **QUICK)
    assert found.passed, found


def test_a_span_is_counted_in_memory():
    x = torch.zeros(4, 10)
    assert extent(x) == 40
    assert extent(torch.zeros(4, 10)[:, :7]) == 37
    assert span_in_words("x", x, (40, 47)) == "reads 8 elements past the end of 'x'"
    assert span_in_words("x", x, (-2, -1)) == "reads 2 elements before 'x'"
    assert span_in_words("x", x, (-2, 40)) == "reads -2 to 40 in memory of 'x'"
    assert rounded(x, (40, 45)) == {(1, 8), (1, 16)}
    assert rounded(x, (40, 79)) == {(0, 8)}
    assert rounded(x, (40, 40)) == set()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("pages", ["", "before", "behind"])
def test_a_memory_holds_any_dtype_and_its_inputs_are_as_they_were(dtype, pages):
    x = (torch.arange(24) % 2).to(dtype).view(4, 6)[:, 1:5]
    memory = Memory({"x": x}, (), pages)
    for start in (memory.start, memory.again):
        view = memory.views(memory.copies(start))["x"]
        assert torch.equal(view.float(), x.float())
        assert memory.whole(start)
    place = memory.views(memory.copies(memory.start))["x"].data_ptr()
    assert "'x': element -2, where its first is 0" in memory.touched(place - 2 * x.element_size())
    assert memory.touched(place + (1 << 30)) == ""
