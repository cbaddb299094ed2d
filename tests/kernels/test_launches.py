"""The keys of compiled kernels: all that Triton compiles for, and no more, so that new lengths leave no new entries."""

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from kernels.attention import fused, scores
from kernels.bert import embedding
from kernels.mhc import launch as mhc
from kernels.mhc.problem import Constants
from whywrong.comparing import gpu
from whywrong.comparing.launching import launch, specialised

INTEGERS = (1, 2, 15, 16, 17, 32, 0, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1)


@pytest.fixture
def keys(monkeypatch):
    """The keys of all launches, none of which runs."""
    seen = set()
    for module in (fused, scores, embedding, mhc, gpu):
        monkeypatch.setattr(module, "launch", lambda _, key, kernel, *rest, **options: seen.add((kernel.__name__, key)))
    return seen


def call_mhc(t):
    n, d, m = 4, 8, 24
    x, phi = torch.empty(t, n, d), torch.empty(n * d, m)
    b, alpha, constants = torch.empty(m), torch.empty(3), Constants()
    steps = mhc.forward(x, phi, b, alpha, constants)
    y = steps.pop("x_in")
    mhc.expand(x, y, steps["post"], steps["p"])
    dy, dpost, dp = mhc.expand_backward(x, y, steps["post"], x)
    mhc.backward(x, phi, b, alpha, steps, dy, dpost, dp, x, constants)


def call_scores(t):
    scores.scores(torch.empty(2, t, 8), torch.empty(2, t, 8), torch.empty(2, t, t))


def call_attention(t):
    q = torch.empty(2, t, 8)
    fused.attention(q, q, q, torch.empty_like(q))


def call_embedding(t):
    ids = torch.zeros(1, t, dtype=torch.int64)
    tokens, positions, kinds = torch.empty(5, 16), torch.empty(1000, 16), torch.empty(2, 16)
    embedding.embed(ids, None, tokens, positions, kinds, torch.empty(16), torch.empty(16))
    rows = torch.empty(t)
    out = torch.empty(1, t, 16)
    embedding.embedding_backward(out, ids, None, tokens, positions, kinds, kinds[0], rows, rows, None, 0, -1)


def call_comparison(t):
    gpu.one_pass(torch.empty(t, 8), torch.empty(8, t).T, None)


@pytest.mark.parametrize(
    ("call", "most"),
    [(call_mhc, 200), (call_scores, 30), (call_attention, 60), (call_embedding, 30), (call_comparison, 60)],
)
def test_a_thousand_lengths_leave_a_bounded_number_of_compiled_forms(keys, call, most):
    for t in range(1, 501):
        call(t)
    half = len(keys)
    for t in range(501, 1001):
        call(t)
    assert 0 < half <= len(keys) <= most


@pytest.mark.parametrize("second", INTEGERS)
def test_integers_are_of_one_key_exactly_where_triton_compiles_them_alike(second):
    for first in INTEGERS:
        forms = [native_specialize_impl(BaseBackend, value, False, True, True) for value in (first, second)]
        assert (specialised(first) == specialised(second)) == (forms[0] == forms[1])


def test_a_compiled_form_is_launched_again_with_the_constants_that_it_was_compiled_for():
    calls = []

    class Kernel:
        __name__ = "kernel"
        arg_names = ("x_ptr", "T", "BLOCK")

        def __getitem__(self, grid):
            return lambda *given, **options: calls.append((grid, given, options)) or self

    compiled, kernel = {}, Kernel()
    for t in (3, 5):
        launch(compiled, specialised(t), kernel, (t, 1, 1), None, t, BLOCK=16, num_warps=4)
    assert len(compiled) == 1
    assert calls == [
        ((3, 1, 1), (None, 3), {"BLOCK": 16, "num_warps": 4}),
        ((5, 1, 1), (None, 5, 16), {}),
    ]
