"""Kernels that wait for each other are refused where they would not all run at once."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import gpu
from kernels.mhc.reductions import reduction_kernels, sums
from labkit.session.catalogue import ROOT
from whywrong import compare
from whywrong.comparing.bounds import sum_of_products
from whywrong.errors import UsageError


@pytest.fixture
def small_gpu(monkeypatch):
    """A GPU of ten multiprocessors that hold two programs each."""
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 10)
    monkeypatch.setattr(gpu, "blocks_per_multiprocessor", lambda kernel, device: 2)
    return torch.device("cuda", 0)


def test_a_gpu_holds_what_each_multiprocessor_holds(small_gpu):
    assert gpu.programs_at_once(None, small_gpu) == 20


def test_programs_that_fit_are_let_through_and_one_more_is_refused(small_gpu):
    gpu.refuse_unless_resident("flagged", 20, None, small_gpu)
    with pytest.raises(
        UsageError, match="flagged: its 21 programs wait for each other, and this GPU holds 20"
    ) as error:
        gpu.refuse_unless_resident("flagged", 21, None, small_gpu)
    assert "\n" not in str(error.value)


def test_flagged_sums_ask_before_they_launch_and_others_do_not(small_gpu, monkeypatch):
    """With a kernel that only notes what is asked of it, and tensors that say they are on a GPU."""
    asked = []
    kernel = SimpleNamespace(warmup=lambda *given, **options: asked.append(options["grid"]))
    monkeypatch.setattr(reduction_kernels, "sum_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: torch.no_grad())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    a = torch.ones(100_000)
    for way in sums.WAYS:
        if way != "flagged":
            sums.prepared(way, a, a, torch.zeros(1))
    assert not asked
    sums.prepared("flagged", a, a, torch.zeros(1), programs=2)
    with pytest.raises(UsageError, match="holds 20 of them at once"):
        sums.prepared("flagged", a, a, torch.zeros(1), programs=3)
    assert [programs <= 20 for (programs,) in asked] == [True, False]


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.mhc.reductions.reduction_kernels import FLAGGED, sum_kernel

pointers = {f"{name}_ptr": f"*{kind}" for name, kind in
            {"a": "fp32", "b": "fp32", "out": "fp32", "partial": "i64", "counter": "i32"}.items()}
for programs, block, warps in ((2, 2048, 32), (4, 1024, 16), (1056, 2048, 8)):
    power = triton.next_power_of_2(programs)
    fixed = {"PROGRAMS": programs, "STEPS": 1, "BLOCK": block, "BLOCK_P": power, "WAY": FLAGGED}
    source = ASTSource(sum_kernel, {**pointers, "COUNT": "i32", **dict.fromkeys(fixed, "constexpr")}, fixed)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    after = text.rsplit("ld.volatile", 1)[1]
    print("bar.sync" in after.partition("st.global.b64")[0], "st.global.b64" in after)
"""


def test_no_warp_that_waits_for_flags_may_find_them_cleared():
    """Where each warp polls by itself, one that was late waited for ever on an H100: all meet before flags are zero."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.split() == ["True"] * 6, ran.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("programs", "block", "warps"), [(2, 2048, 32), (4, 1024, 16), (2, 2048, 8)])
def test_few_programs_that_wait_for_each_other_end(programs, block, warps):
    count = programs * block
    a, out = torch.ones(count, device="cuda"), torch.zeros(1, device="cuda")
    evict = torch.empty(1 << 26, device="cuda")
    run = sums.prepared("flagged", a, a, out, programs, block, warps)
    for _ in range(2000):
        evict.zero_()  # as benchmarks do, so that words come from memory and warps see them at different times
        run()
    torch.cuda.synchronize()
    assert float(out) == count


@pytest.mark.gpu
def test_the_driver_knows_how_many_programs_a_gpu_holds():
    a, out = torch.ones(1 << 22, device="cuda"), torch.zeros(1, device="cuda")
    multiprocessors = gpu.multiprocessors(a.device)
    assert multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    total = torch.tensor([2.0**22], dtype=torch.float64, device="cuda")
    for programs in (1, 2):  # of 8 warps: any GPU's multiprocessor holds that many
        sums.prepared("flagged", a, a, out, programs=programs)()
        assert compare(out, total, bound=sum_of_products(total, 1 << 22)).ok
    a = torch.ones(33 * multiprocessors * 128, device="cuda")
    with pytest.raises(UsageError, match="wait for each other"):  # no GPU's multiprocessor holds 33 programs
        sums.prepared("flagged", a, a, out, programs=33, block=128, warps=1)


@pytest.mark.gpu
def test_kernels_run_on_the_device_of_their_tensors_when_another_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a = torch.ones(5000, device="cuda:1")
    with torch.cuda.device(0):
        assert sums.total("two-stage", a, a).tolist() == [5000.0]
