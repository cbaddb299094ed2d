"""The pass in Triton and the pass in numba give the same statistics, for every dtype, bound and layout."""

import math

import numpy as np
import pytest
import torch

from labkit.session.device import decide
from whywrong import compare
from whywrong.comparing.comparison import described
from whywrong.comparing.cpu import RUN
from whywrong.comparing.cpu import measure as on_cpu
from whywrong.comparing.gpu import measure as on_gpu

FLOATS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
PAIRS = [(o, g) for o in FLOATS for g in (torch.float32, torch.float64) if torch.finfo(g).eps <= torch.finfo(o).eps]
VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every second": lambda x: x[::2, :, 1:],
}


def on_device(t):
    """The same strides on the device where Triton runs."""
    if not decide().is_cuda:
        return t
    return torch.empty(0, dtype=t.dtype, device="cuda").set_(
        t.untyped_storage().cuda(), t.storage_offset(), t.shape, t.stride()
    )


def agree(o, g, allowed):
    there = [on_device(x) if isinstance(x, torch.Tensor) else x for x in (o, g, allowed)]
    expected, found = (described(s, o, ("", ""), "") for s in (on_cpu(o, g, allowed), on_gpu(*there)))
    for name, value in expected.__dict__.items():
        close = pytest.approx(value, rel=1e-5, abs=1e-300, nan_ok=True) if isinstance(value, float) else value
        assert getattr(found, name) == close, name


def spoilt(o, g):
    """NaN, Inf and zeros on one side and on both."""
    o = o.float()
    o[1, 2, 3], o[3, 3, 3] = float("nan"), float("inf")
    g = g.clone()
    g[1, 2, 3], g[2, 2, 2], g[0, 0, 0], g[6, 1, 1] = float("nan"), float("-inf"), 0.0, 1e5
    return o, g


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("special", "view"), [(False, "transposed"), (True, "contiguous"), (True, "every second")])
@pytest.mark.parametrize(("observed", "golden"), PAIRS, ids=lambda d: str(d).removeprefix("torch."))
def test_both_passes_agree(observed, golden, special, view):
    torch.manual_seed(0)
    g = torch.randn(7, 33, 5).to(golden)
    o = (g.double() * (1 + 1e-3 * torch.randn(7, 33, 5))).to(observed)
    if special:
        o, g = spoilt(o, g)
        o = o.to(observed)
    bound = torch.rand(7, 33, 5, dtype=torch.float64)
    bound[4, 4, 4] = math.inf
    o, g, bound = (VIEWS[view](t) for t in (o, g, bound))
    for allowed in {"transposed": (None, bound), "contiguous": (1e-3, bound), "every second": (None, math.inf)}[view]:
        agree(o, g, allowed)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_both_passes_agree_on_integers(dtype):
    g = torch.randint(0, 2, (50, 40)).to(dtype)
    o = g.clone()
    o[3, 4] = 1 - o[3, 4].int()
    for a, b in ((o, g), (o.T, g.T)):
        agree(a, b, None)
        agree(a, b, 1.5)
    agree(o, g.double(), 0.5)


def test_denormal_and_huge_values_are_counted_exactly():
    g = torch.tensor([1e-40, 1e-44, 3e38, -3e38, 1e-30, 0.0] * 100)
    o = g.clone()
    o[0], o[2], o[5] = 2e-40, -3e38, 1e-42
    agree(o, g, 1e-41)
    found = compare(o, g, bound=1e-41)
    assert (found.mismatches, found.first_index) == (2, (0,))


def test_the_result_is_the_same_bits_each_time(device):
    torch.manual_seed(1)
    g = torch.randn(300, 1000, device=device)
    o = g + 1e-7 * torch.randn_like(g)
    assert len({str(compare(o, g, bound=1e-6).__dict__) for _ in range(5)}) == 1


def test_no_elements_are_right_on_any_device(device):
    empty = torch.zeros(0, 3, device=device)
    found = compare(empty, empty.double(), bound=torch.ones(3))
    assert (found.ok, found.count, found.worst_index) == (True, 0, None)


def test_the_largest_quotient_is_exact_below_the_normal_numbers_too():
    golden = 1e-310 * np.random.default_rng(0).standard_normal(1000)
    observed = golden * (1.0 + 1e-9)
    assert compare(observed, golden, bound=1.0).max_rel == (abs(observed - golden) / abs(golden)).max()


def test_threads_do_not_change_the_result():
    torch.manual_seed(2)
    g = torch.randn(3 << 20)
    o = g * (1 + 1e-7)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = compare(o, g, bound=1e-6)
    finally:
        torch.set_num_threads(before)
    assert alone == compare(o, g, bound=1e-6)


@pytest.mark.parametrize("shape", [(RUN // 8, 2, 7), (1, 3, RUN + 5), (5, RUN // 3)], ids=str)
def test_places_and_counts_hold_over_pieces_of_any_shape(shape):
    g = torch.zeros(shape)
    o = g.clone()
    wrong = {tuple(int(x) for x in np.unravel_index(k, shape)) for k in (o.numel() // 3, o.numel() - 1)}
    for k, place in enumerate(sorted(wrong)):
        o[place] = 1.0 + k
    for axes in ((0, 1, 2), (2, 1, 0)):
        a, b = (x.permute(axes) if x.ndim == 3 else x for x in (o, g))
        places = sorted(tuple(place[axis] for axis in axes) if o.ndim == 3 else place for place in wrong)
        found = compare(a, b, bound=0.5)
        assert (found.mismatches, found.first_index, found.max_abs) == (2, places[0], 2.0)
        assert float(a[found.worst_index]) == found.worst_observed == 2.0
        assert found.observed_zero == o.numel() - 2


def test_many_dimensions_and_broadcast_bounds():
    o = np.arange(2**8, dtype=np.float32).reshape((2,) * 8).transpose(0, 2, 4, 6, 1, 3, 5, 7)
    assert compare(o, o.astype(float), bound=0.0).ok
    agree(torch.from_numpy(o), torch.from_numpy(o[::-1].copy()), 0.5)
    changed = o.copy()
    changed[1, 0, 1, 0, 1, 0, 1, 0] += 1.0
    assert compare(changed, o.astype(float), bound=0.5).first_index == (1, 0, 1, 0, 1, 0, 1, 0)
    row = np.array([0.5, 2.0])
    assert compare(np.ones((3, 2)), np.zeros((3, 2)), bound=row).mismatches == 3


def test_the_cosine_keeps_its_digits_near_one():
    g = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d = 1e-9 * torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert compare(g + d, g, bound=1.0).cosine == pytest.approx(
        1.0 - 0.5e-18 * float((d @ d) / (g @ g)) * 1e18, abs=1e-15
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_more_elements_than_32_bits_can_count(dtype):
    count = 2**31 + 4097
    g = torch.zeros(count, dtype=dtype, device="cuda")
    o = g.clone()
    o[count - 2] = 3
    found = compare(o, g, bound=0.5)
    assert (found.mismatches, found.first_index, found.worst_index) == (1, (count - 2,), (count - 2,))
    assert found.observed_zero == count - 1
    strided = compare(o[1::2], g[1::2], bound=0.5)
    assert strided.mismatches == (count - 2) % 2
    square = compare(o[: 2**31].view(2**16, 2**15).T, g[: 2**31].view(2**16, 2**15).T)
    assert square.ok


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (torch.float64, 1e-200), (torch.float64, 1e200)])
def test_nothing_of_the_datas_size_is_allocated(dtype, scale):
    """Nor where squares vanish or overflow."""
    g = torch.randn(1 << 26, device="cuda", dtype=dtype) * scale
    o = g + 1e-7 * scale
    compare(o, g, bound=1e-5 * scale)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compare(o, g, bound=1e-5 * scale)
    assert torch.cuda.max_memory_allocated() - before <= g.nbytes // 8
