"""The right pipeline against float64, step by step, and its two Triton kernels."""

import math

import numpy as np
import pytest
import torch

import whywrong
from kernels.attention import attention, elementwise, golden, product, verification
from kernels.attention.problem import REPORT, Inputs, Sizes, decode, index_coded, uniform
from whywrong import compare, localise, poisoned, repeat
from whywrong.errors import UsageError

FLOAT32 = golden.DECLARED["float32"]
SIZES = [REPORT, Sizes(3, 37, 53, 29), Sizes(2, 1, 7, 3), Sizes(1, 1, 1, 1), Sizes(1, 257, 509, 64), Sizes(2, 5, 1, 61)]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_step_is_within_its_bound(device, sizes):
    inputs = uniform(sizes, np.random.default_rng(1))
    recorded = golden.attention(inputs.q, inputs.k, inputs.v)
    likelihoods = []
    for multiply in product.PRODUCTS.values():
        observed = attention.attention(inputs, device, multiply=multiply)
        if any(all(torch.equal(observed[name], other[name]) for name in observed.names) for other in likelihoods):
            continue  # equal in every step to what was checked, as all products are on a CPU
        found = localise(observed, recorded, precision=FLOAT32)
        assert found.first is None, str(found)
        assert found.own == []
        likelihoods.append(observed)


@pytest.mark.parametrize("how", product.PRODUCTS)
def test_every_run_gives_the_same_bits_on_poisoned_memory(device, how):
    inputs = uniform(Sizes(3, 37, 53, 29), np.random.default_rng(2))
    reference = golden.attention(inputs.q, inputs.k, inputs.v)
    with poisoned():
        runs = repeat(lambda: attention.attention(inputs, device, multiply=product.PRODUCTS[how]), times=5)
        assert runs.identical, str(runs)
        assert (
            localise(
                attention.attention(inputs, device, multiply=product.PRODUCTS[how]), reference, precision=FLOAT32
            ).first
            is None
        )


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_signed_and_large_inputs_stay_within_their_bounds(device, rng, scale):
    draws = [(scale * rng.standard_normal((2, rows, 40))).astype(np.float32) for rows in (33, 65, 65)]
    inputs = Inputs(*draws)
    found = localise(attention.attention(inputs, device), golden.attention(*draws), precision=FLOAT32)
    assert found.first is None, str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [REPORT, Sizes(3, 37, 53, 29), Sizes(2, 512, 1024, 128)], ids=str)
def test_tf32_is_within_its_own_bound_and_not_within_float32s(sizes):
    assert verification.worst_share(verification.shares_of_bound(sizes, "cuda", compute="tf32").values()) <= 1
    if sizes.d_k % 4 == 0:  # elsewhere cuBLAS does without tensor cores
        inputs = uniform(sizes, np.random.default_rng(0))
        observed = attention.attention(inputs, "cuda", compute="tf32")
        assert localise(observed, golden.attention(inputs.q, inputs.k, inputs.v), precision=FLOAT32).first == "qk"


@pytest.mark.gpu
def test_the_bounds_hold_at_96_heads_of_4096_by_4096():
    assert verification.worst_share(verification.shares_of_bound(Sizes(96, 4096, 4096, 64), "cuda").values()) <= 1


@pytest.mark.parametrize("columns", [1, 2, 31, 128, 4096, 4097, 10_000])
def test_softmax_takes_any_width(device, rng, columns):
    x = (4 * rng.standard_normal((2, 3, columns))).astype(np.float32)
    recorded = whywrong.golden(lambda x: {"softmax": torch.softmax(x, -1)}, x=x)
    found = localise(
        {"x": x, "softmax": elementwise.softmax(torch.from_numpy(x).to(device)).cpu()}, recorded, precision=FLOAT32
    )
    assert found.first is None, str(found)


def test_softmax_of_minus_infinity_is_zero_beside_numbers_and_nan_alone(device):
    x = torch.tensor([[[0.0, -math.inf, 0.0], [-math.inf] * 3, [1.0, 2.0, -math.inf]]], device=device)
    assert torch.equal(elementwise.softmax(x).isnan(), torch.softmax(x, -1).isnan())
    assert elementwise.softmax(x)[0, 0].tolist() == [0.5, 0.0, 0.5]


def test_softmax_does_not_overflow(device):
    x = torch.tensor([[[1e30, 1e30, -1e30]]], device=device)
    assert elementwise.softmax(x).flatten().tolist() == [0.5, 0.5, 0.0]


def test_outputs_are_written_everywhere_and_nowhere_else(device, rng):
    x = torch.from_numpy(rng.random((2, 5, 7), np.float32)).to(device)
    memory = torch.full((2, 50), float("nan"), device=device)
    for kernel in (elementwise.softmax, lambda x, out: elementwise.scale(x, 2.0, out)):
        memory.fill_(float("nan"))
        out = memory.as_strided((2, 5, 7), (50, 7, 1))
        kernel(x, out=out)
        assert not out.isnan().any()
        assert memory[:, 35:].isnan().all()


@pytest.mark.parametrize(
    "bad", [torch.zeros(2, 3), torch.zeros(1, 2, 3).double(), torch.zeros(1, 3, 2).transpose(1, 2)]
)
def test_operands_of_another_kind_are_refused(bad):
    with pytest.raises(ValueError, match=r"^x: expected float32 \[heads, rows, columns\] .*, got torch\.float"):
        elementwise.softmax(bad)


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"out: expected \(1, 2, 3\).*got shape \(1, 2, 4\)"):
        elementwise.scale(torch.zeros(1, 2, 3), 1.0, torch.zeros(1, 2, 4))


def test_the_golden_agrees_with_torch_in_float64():
    inputs = uniform(Sizes(2, 9, 11, 5), np.random.default_rng(3))
    q, k, v = (torch.from_numpy(x).double() for x in (inputs.q, inputs.k, inputs.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert compare(golden.attention(inputs.q, inputs.k, inputs.v)["pv"], expected, bound=1e-14).ok  # float64, K <= 11


def test_index_coded_scores_say_which_element_of_k_was_read(device):
    for sizes in (REPORT, Sizes(2, 37, 53, 29), Sizes(1, 53, 29, 37)):
        coded = index_coded(sizes)
        qk = attention.attention(coded, device)["qk"].cpu().numpy()
        for i in range(0, sizes.n, 5):
            for j in range(0, sizes.m, 7):
                assert decode(qk[0, i, j], sizes) == f"K[{j}, {i % sizes.d_k}]"
    assert decode(float("nan"), sizes).startswith("NaN")
    assert decode(1.5, sizes) == "1.5: no element of K"
    assert decode(0.0, sizes) == "0: no element of K"


def test_sizes_below_one_and_beyond_memory_are_refused():
    with pytest.raises(UsageError, match=r"d_k: .*got 0"):
        Sizes(1, 1, 1, 0)
    with pytest.raises(UsageError, match="GiB of host memory"):
        Sizes(128, 10**6, 10**6, 64).check_memory()


def test_inputs_have_six_decimals_as_the_reports_files():
    q = uniform(Sizes(1, 50, 5, 8), np.random.default_rng(0)).q.astype(np.float64)
    assert abs(q * 1e6 - np.round(q * 1e6)).max() < 0.04  # half an ULP of float32 at one, times 1e6
    assert q.min() >= 0.0


def test_six_digits_lose_half_a_unit_of_the_fourth_decimal(tmp_path):
    scores = np.array([[[16.123456, 9.8765432]]], np.float32)
    assert verification.through_files(scores, tmp_path, "QK").ravel().tolist() == [
        pytest.approx(16.1235, abs=1e-6),
        pytest.approx(9.87654, abs=1e-6),
    ]


def test_shares_of_bound_are_found_for_all_heads_however_many_at_a_time(device, monkeypatch):
    sizes = Sizes(3, 37, 53, 29)
    whole = verification.shares_of_bound(sizes, device, product.PRODUCTS)
    monkeypatch.setitem(verification.AT_ONCE, device, sizes.n * sizes.m)
    one_by_one = verification.shares_of_bound(sizes, device, product.PRODUCTS)
    assert set(whole) == set(product.PRODUCTS)
    for how, shares in whole.items():
        assert max(shares.values()) <= 1
        assert one_by_one[how] == pytest.approx(shares, rel=0.5)  # simulated rounding: other draws
