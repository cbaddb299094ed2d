"""The workbook's own CUDA C++ under AddressSanitizer on a CPU, and what compute-sanitizer says on a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import build
from kernels.tinyllm.tinyllm import FOLDER, HOST
from labkit.session.catalogue import ROOT
from labkit.session.device import Device, decide
from tools.sanitize import findings, sanitized

STEP = """
import numpy as np
from kernels.tinyllm import experiments, tinyllm
from labkit.session.device import Device
config = tinyllm.Config(vocabulary=61, context=17, width=48, layers=2, heads=4, sequences=3)
rng = np.random.default_rng(0)
for engine in tinyllm.ENGINES:
    model = tinyllm.TinyLLM(config, Device("cpu", "X"), engine)
    model.write(experiments.perturbed(config, rng))
    tokens, targets = rng.integers(0, 61, (2, 2, 16))
    model.forward(tokens)
    print(float(model.score(targets)))
    model.backward()
    model.step(1e-3)
"""
SOURCE = """
#include <cuda_runtime.h>
__global__ void shift_kernel(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i + 1];
}
__global__ void reverse_kernel(float* x) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = held[63 - threadIdx.x];
}
#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, ...) kernel<<<grid, block>>>(__VA_ARGS__)
#endif
extern "C" void* room(int n) {
    void* pointer = nullptr;
    cudaMalloc(&pointer, n * sizeof(float));
    return pointer;
}
extern "C" void shift(const float* x, float* out, int n) { LAUNCH(shift_kernel, dim3(1), dim3(64), x, out, n); }
extern "C" void reverse(float* x) { LAUNCH(reverse_kernel, dim3(1), dim3(64), x); }
"""
CALLS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.room.restype = ctypes.c_void_p
p = ctypes.c_void_p
"""
ON_GPU = """
import torch
from tools.sanitize import announce
x, out, wide = torch.ones(5, device="cuda"), torch.ones(5, device="cuda"), torch.ones(64, device="cuda")
announce(x=x, out=out)
{}
torch.cuda.synchronize()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs Python code with AddressSanitizer's library, on what was built for it."""
    library = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    if not os.path.isabs(library.strip()):
        pytest.skip("the compiler has no AddressSanitizer")
    monkeypatch.setenv("LABKIT_SANITIZE", "1")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))

    def run(*words):
        environment = os.environ | {"LD_PRELOAD": library.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
        return subprocess.run(
            [sys.executable, "-c", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.mark.long
def test_a_training_step_touches_nothing_outside_of_its_memory(run):
    build(FOLDER / "api.cu", HOST, Device("cpu", "X"))
    done = run(STEP)
    assert (done.returncode, len(done.stdout.split())) == (0, 3), done.stderr


@pytest.fixture
def source(tmp_path):
    (tmp_path / "shift.cu").write_text(SOURCE)
    return tmp_path / "shift.cu"


@pytest.mark.long
def test_a_kernel_that_reads_one_element_too_many_is_ended_and_its_line_is_named(run, source):
    library = build(source, HOST, Device("cpu", "X"))
    done = run(CALLS + "library.shift(p(library.room(5)), p(library.room(5)), 5)", str(library))
    assert done.returncode != 0
    assert "use-after-poison" in done.stderr
    assert "shift.cu:5" in done.stderr
    assert run(CALLS + "library.shift(p(library.room(6)), p(library.room(5)), 5)", str(library)).returncode == 0


def test_findings_name_the_kernel_the_argument_and_the_element():
    lines = findings(Path(__file__).with_name("compute_sanitizer.txt").read_text())
    kernel = "shift_kernel(const float *, float *, int)+0x90 in /home/me/shift.cu:6"
    race = "reverse_kernel(float *)+0x70 in /home/me/shift.cu:12 and Read access at reverse_kernel(float *)+0xa0"
    assert lines == [
        f"Invalid __global__ read of size 4 bytes, {kernel}: element 5 of 'x', which has 5",
        "Invalid __global__ write of size 8 bytes, /home/me/shift.cu:11:other_kernel(double *): "
        "byte 1040 of 1,024 allocated",
        f"Uninitialized __global__ memory read of size 4 bytes, {kernel}: element 2 of 'x', which has 5",
        f"Error: Race reported between Write access at {race} in /home/me/shift.cu:13 [32 hazards]",
    ]
    assert findings("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "call", "words"),
    [
        ("memcheck", "library.shift(p(x.data_ptr()), p(out.data_ptr()), 5)", "element 5 of 'x', which has 5"),
        ("memcheck", "library.shift(p(x.data_ptr()), p(out.data_ptr()), 4)", ""),
        ("initcheck", "library.shift(p(library.room(64)), p(out.data_ptr()), 5)", "Uninitialized __global__ memory"),
        ("racecheck", "library.reverse(p(wide.data_ptr()))", "reverse_kernel"),
    ],
)
def test_compute_sanitizer_finds_what_it_is_for(tool, call, words, source, monkeypatch):
    if not shutil.which("compute-sanitizer") and not shutil.which("/usr/local/cuda/bin/compute-sanitizer"):
        pytest.skip("needs compute-sanitizer")
    monkeypatch.setenv("LABKIT_SANITIZE", "1")
    monkeypatch.setenv("LABKIT_CACHE", str(source.parent / "cache"))
    library = build(source, HOST, decide("cuda"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lines = sanitized(tool, [sys.executable, "-c", CALLS + ON_GPU.format(call), str(library)])
    assert bool(lines) == bool(words), lines
    assert not words or any("_kernel" in line and words in line for line in lines), lines
