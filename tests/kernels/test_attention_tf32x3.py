"""Products and attention on tensor cores at float32's accuracy."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.attention import fused, scores, tf32x3
from kernels.attention.memory import Layout, allocate, escapes
from kernels.attention.problem import Sizes, uniform
from whywrong import compare, poisoned, repeat
from whywrong.errors import UsageError

SIZES = [
    Sizes(3, 37, 53, 29),
    Sizes(2, 1, 7, 3),
    Sizes(1, 1, 1, 1),
    Sizes(1, 130, 65, 64),
    Sizes(2, 5, 1, 61),
    Sizes(1, 9, 70, 128),
]
LARGE = [Sizes(12, 1024, 1024, 64), Sizes(2, 513, 1025, 128), Sizes(12, 127, 131, 61), Sizes(3, 4096, 4096, 64)]


def sampled(sizes, rng, device, kind="uniform"):
    """q, k, v on `device`: uniform on [0, 1) as the report's, or normal and scaled so that weights are uneven."""
    if kind == "uniform":
        inputs = uniform(sizes, rng)
        return [torch.from_numpy(x).to(device) for x in (inputs.q, inputs.k, inputs.v)]
    shapes = [(sizes.heads, rows, sizes.d_k) for rows in (sizes.n, sizes.m, sizes.m)]
    return [torch.from_numpy(3.0 * rng.standard_normal(shape, np.float32)).to(device) for shape in shapes]


@triton.jit
def split_kernel(x_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    high, low = tf32x3.split(tl.load(x_ptr + at))
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


def test_a_number_is_split_into_eleven_bits_and_an_exact_rest(device, rng):
    x = torch.from_numpy((rng.standard_normal(4096) * 2.0 ** rng.integers(-60, 60, 4096)).astype(np.float32)).to(device)
    x[:5] = torch.tensor([0.0, -0.0, 1.0 + 2.0**-11, 1.0 - 2.0**-24, 1.0 + 3.0 * 2.0**-11])
    high, low = torch.empty_like(x), torch.empty_like(x)
    split_kernel[(1,)](x, high, low, SIZE=4096)
    assert torch.equal(high.double() + low.double(), x.double())
    assert not (high.view(torch.int32) & 0x1FFF).any()
    assert (low.double().abs() <= 2.0**-11 * x.double().abs()).all()


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scores_are_within_their_bound(device, rng, sizes, kind):
    q, k, _ = sampled(sizes, rng, device, kind)
    value, bound = scores.bound(q.double(), k.double())
    found = compare(scores.scores(q, k), value, bound=bound)
    assert found.ok, str(found)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_is_within_its_bound(device, rng, sizes, kind):
    q, k, v = sampled(sizes, rng, device, kind)
    value, bound = fused.bound(q.double(), k.double(), v.double())
    found = compare(fused.attention(q, k, v), value, bound=bound)
    assert found.ok, str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_both_are_within_their_bounds_on_tensor_cores(rng, sizes, kind):
    q, k, v = sampled(sizes, rng, "cuda", kind)
    for found, exact in ((scores.scores(q, k), scores.bound), (fused.attention(q, k, v), fused.bound)):
        for head in range(sizes.heads):
            given = [x[head : head + 1].double() for x in ((q, k) if exact is scores.bound else (q, k, v))]
            value, bound = exact(*given)
            result = compare(found[head : head + 1], value, bound=bound)
            assert result.ok, f"{exact.__module__}: {result}"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1024, 4096])
def test_scores_are_no_further_from_float64_than_cublas(rng, size):
    q, k, _ = sampled(Sizes(12, size, size, 64), rng, "cuda")
    baseline = torch.bmm(q, k.transpose(1, 2))
    exact = [a.double() @ b.double().T for a, b in zip(q, k, strict=True)]
    assert largest(scores.scores(q, k), exact) <= largest(baseline, exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [Sizes(12, 1024, 1024, 64), Sizes(12, 4096, 4096, 64), Sizes(4, 513, 1025, 128)], ids=str
)
def test_attention_is_no_further_from_float64_than_torch(rng, sizes):
    q, k, v = sampled(sizes, rng, "cuda")
    baseline = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    exact = [
        torch.softmax(a.double() @ b.double().T / math.sqrt(sizes.d_k), -1) @ c.double()
        for a, b, c in zip(q, k, v, strict=True)
    ]
    assert largest(fused.attention(q, k, v), exact) <= largest(baseline, exact)


def largest(found, exact):
    return max(float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True))


def test_one_tf32_product_is_not_within_the_bound_of_three(rng):
    """What kernels that forgot the low parts would give, by rounding the factors themselves."""
    q, k, v = sampled(Sizes(2, 40, 40, 16), rng, "cpu", "normal")
    cut = [((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double() for x in (q, k, v)]
    value, bound = scores.bound(q.double(), k.double())
    assert not compare(cut[0] @ cut[1].transpose(1, 2), value, bound=bound).ok
    value, bound = fused.bound(q.double(), k.double(), v.double())
    assert not compare(torch.softmax(cut[0] @ cut[1].transpose(1, 2) / 4.0, -1) @ v.double(), value, bound=bound).ok
    weights = torch.softmax(q.double() @ k.double().transpose(1, 2) / 4.0, -1)
    assert not compare(weights @ cut[2], value, bound=bound).ok


@pytest.mark.long
def test_every_run_gives_the_same_bits_on_poisoned_memory(device, rng):
    q, k, v = sampled(Sizes(3, 70, 133, 29), rng, device)
    for run in (lambda: scores.scores(q, k), lambda: fused.attention(q, k, v)):
        with poisoned():
            assert repeat(run, times=3).identical


@pytest.mark.gpu
def test_every_run_gives_the_same_bits_at_full_size(rng):
    q, k, v = sampled(Sizes(12, 4096, 4096, 64), rng, "cuda")
    for run in (lambda: scores.scores(q, k), lambda: fused.attention(q, k, v)):
        assert repeat(run, times=20).identical


def test_operands_may_lie_in_one_buffer_and_nothing_outside_is_touched(device, rng):
    sizes = Sizes(2, 37, 53, 29)
    shapes = {"Q": (37, 29), "K": (53, 29), "V": (53, 29), "QK": (37, 53), "PV": (37, 29)}
    layout = Layout.plan(shapes, 2, "poison", 64)
    memory = allocate(layout, device, unwritten=("QK", "PV"))
    q, k, v = (layout.view(memory, name) for name in ("Q", "K", "V"))
    for view, given in zip((q, k, v), sampled(sizes, rng, device), strict=True):
        view.copy_(given)
    scores.scores(q, k, out=layout.view(memory, "QK"))
    fused.attention(q, k, v, out=layout.view(memory, "PV"))
    for name in ("QK", "PV"):
        found = escapes(layout, memory, name)
        assert (found.nan_results, found.unwritten, found.guards_written) == (0, 0, 0)


def test_an_infinite_number_gives_nan_and_never_a_finite_one(device, rng):
    q, k, v = sampled(Sizes(1, 5, 9, 8), rng, device)
    q[0, 2, 3] = math.inf
    assert scores.scores(q, k)[0, 2].isnan().all()
    assert fused.attention(q, k, v)[0, 2].isnan().all()
    others = [0, 1, 3, 4]
    assert fused.attention(q, k, v)[0, others].isfinite().all()


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((1, 2, 3), (1, 4, 2), (1, 4, 2), r"got .*\(1, 2, 3\).*\(1, 4, 2\)"),
        ((1, 2, 129), (1, 4, 129), (1, 4, 129), "d_k from 1 to 128"),
        ((2, 2, 3), (1, 4, 3), (1, 4, 3), r"expected \[heads, N, d_k\]"),
    ],
)
def test_operands_that_do_not_go_together_are_refused(q, k, v, message):
    with pytest.raises(UsageError, match=message):
        scores.scores(torch.zeros(q), torch.zeros(k))
    with pytest.raises(UsageError, match="q, k, v: expected"):
        fused.attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_other_types_are_refused():
    x = torch.zeros(1, 2, 3)
    for given in ((x.double(), x), (x, x.half())):
        with pytest.raises(ValueError, match="expected float32"):
            scores.scores(*given)
    with pytest.raises(UsageError, match=r"out: .*got shape \(1, 2, 2\)"):
        fused.attention(x, x, x, out=torch.zeros(1, 2, 2))


def test_a_gpu_with_many_multiprocessors_gets_programs_enough():
    assert scores._steps(heads=12, n=4096, m=4096, multiprocessors=132) == scores.MOST_STEPS
    assert scores._steps(heads=1, n=64, m=64, multiprocessors=132) == 1
    assert scores._steps(heads=1, n=4096, m=64, multiprocessors=8) == 4
