"""sgemm and its buffer: right numbers, named rejections, and every step outside an operand found."""

import numpy as np
import pytest
import torch

from kernels.attention import golden
from kernels.attention.blas import Gemm, GemmRejectedError, blas_for, check, scalars
from kernels.attention.memory import Layout, allocate, escapes, poison
from kernels.attention.problem import Sizes
from whywrong import compare
from whywrong.comparing.bounds import sum_of_products
from whywrong.errors import UsageError


def random_gemm(rng, transa, transb, m, n, k, pad=0):
    """A call on padded column-major operands lying one after another, its buffer, and the result in float64."""
    lda, ldb, ldc = (m if transa == "N" else k) + pad, (k if transb == "N" else n) + pad, m + pad
    sizes = [lda * (k if transa == "N" else m), ldb * (n if transb == "N" else k), ldc * n]
    starts = np.cumsum([0, *sizes])
    memory = torch.from_numpy(rng.standard_normal(starts[-1]).astype(np.float32))
    g = Gemm(transa, transb, m, n, k, int(starts[0]), lda, int(starts[1]), ldb, int(starts[2]), ldc)

    def column_major(start, rows, columns, leading):
        return memory.numpy()[start : start + leading * columns].reshape(columns, leading).T[:rows].astype(np.float64)

    a, b = column_major(g.a, *g.a_shape, lda), column_major(g.b, *g.b_shape, ldb)
    a, b = (a if transa == "N" else a.T), (b if transb == "N" else b.T)
    return g, memory, a, b


@pytest.mark.parametrize("transb", "NT")
@pytest.mark.parametrize("transa", "NT")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 7, 3), (37, 53, 29), (128, 64, 96)])
@pytest.mark.parametrize("pad", [0, 3])
def test_sgemm_means_what_blas_says(device, rng, transa, transb, m, n, k, pad):
    g, memory, a, b = random_gemm(rng, transa, transb, m, n, k, pad)
    memory = memory.to(device)
    blas_for(device).sgemm(memory, g)
    got = memory[g.c : g.c + g.ldc * n].view(n, g.ldc)[:, :m].T.cpu()
    assert compare(got, a @ b, bound=sum_of_products(abs(a) @ abs(b), k)).ok


def test_alpha_and_beta_are_used(device, rng):
    g, memory, a, b = random_gemm(rng, "N", "N", 8, 9, 10)
    g = Gemm(**{**g.__dict__, "alpha": 0.5, "beta": -2.0})
    before = memory[g.c :].view(9, 8).T.double()
    memory = memory.to(device)
    blas_for(device).sgemm(memory, g)
    expected = 0.5 * (a @ b) - 2.0 * before.numpy()
    bound = sum_of_products(0.5 * abs(a) @ abs(b) + 2.0 * abs(before.numpy()), 11)  # ten products and beta's term
    assert compare(memory[g.c :].view(9, 8).T.cpu(), expected, bound=bound).ok


REJECTED = [
    ({"transa": "X"}, "transa", 1),
    ({"transb": "n"}, "transb", 2),
    ({"m": -1}, "m", 3),
    ({"n": -1}, "n", 4),
    ({"k": -1}, "k", 5),
    ({"lda": 3}, "lda", 8),
    ({"transa": "T", "lda": 5}, "lda", 8),
    ({"ldb": 5}, "ldb", 10),
    ({"transb": "T", "ldb": 4}, "ldb", 10),
    ({"ldc": 3}, "ldc", 13),
]
RIGHT = {
    "transa": "N",
    "transb": "N",
    "m": 4,
    "n": 5,
    "k": 6,
    "a": 0,
    "lda": 4,
    "b": 24,
    "ldb": 6,
    "c": 64,
    "ldc": 4,
}


@pytest.mark.parametrize(("change", "argument", "position"), REJECTED)
def test_what_blas_rejects_is_named_before_the_call(device, change, argument, position):
    memory = torch.zeros(128, device=device)
    with pytest.raises(GemmRejectedError, match=f"{argument} \\(argument {position}\\)") as caught:
        blas_for(device).sgemm(memory, Gemm(**(RIGHT | change)))
    assert (caught.value.argument, caught.value.position) == (argument, position)
    assert not memory.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("change", "argument", "position"), [r for r in REJECTED if r[1] not in ("transa", "transb")])
def test_cublas_rejects_just_what_the_check_does(change, argument, position):
    blas, memory = blas_for("cuda"), torch.zeros(128, device="cuda")
    g = Gemm(**(RIGHT | change))
    alpha, beta = scalars(1.0, 0.0)
    base = memory.data_ptr()
    with pytest.raises(Exception, match="INVALID_VALUE"):
        blas._api.sgemm(
            blas.handle(memory.device),
            blas._op[g.transa],
            blas._op[g.transb],
            g.m,
            g.n,
            g.k,
            alpha,
            base,
            g.lda,
            base + 96,
            g.ldb,
            beta,
            base + 256,
            g.ldc,
        )


def test_a_call_that_would_leave_the_buffer_is_never_made(device):
    memory = torch.zeros(80, device=device)
    with pytest.raises(IndexError, match=r"C spans \[64, 84\) of a buffer of 80"):
        blas_for(device).sgemm(memory, Gemm(**RIGHT))


def test_tf32_is_an_error_on_a_cpu_and_never_silently_float32():
    with pytest.raises(ValueError, match="'tf32' needs a GPU"):
        blas_for("cpu", "tf32")
    with pytest.raises(ValueError, match="got 'fp8'"):
        blas_for("cpu", "fp8")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (128, 64), (97, 131)])
def test_transpose_moves_every_value(device, rng, rows, columns):
    layout = Layout.plan({"K": (rows, columns), "KT": (columns, rows)}, 1, "poison", 64)
    memory = allocate(layout, device, unwritten=("KT",))
    k = torch.from_numpy(rng.random((rows, columns), np.float32))
    layout.view(memory, "K").copy_(k)
    blas_for(device).transpose(memory, layout.offset("K", 0), rows, columns, layout.offset("KT", 0))
    assert torch.equal(layout.view(memory, "KT")[0].cpu(), k.T)
    assert not escapes(layout, memory, "KT").any


def test_a_transposed_matrix_has_the_shape_that_the_arguments_give():
    assert Gemm(**(RIGHT | {"transa": "T"})).a_shape == (6, 4)
    with pytest.raises(GemmRejectedError, match=r"lda \(argument 8\) is 4; expected at least 6, the rows stored"):
        check(Gemm(**(RIGHT | {"transa": "T"})))


@pytest.mark.parametrize("mode", ["poison", "adjacent"])
def test_operands_do_not_overlap_and_guards_are_what_is_between(mode):
    layout = golden.plan(Sizes(3, 5, 7, 3), mode)
    owner = np.zeros(layout.size, int)
    for name in layout.shapes:
        for head in range(3):
            start = layout.offset(name, head)
            owner[start : start + layout.length(name)] += 1
    assert owner.max() == 1
    assert ((owner == 0) == layout.guards()).all()


def test_adjacent_operands_lie_on_256_byte_boundaries_one_after_another():
    layout = golden.plan(Sizes(2, 128, 128, 64), "adjacent")
    starts = [layout.offset(name, 0) for name in ("Q", "K", "KT", "QK")]
    assert np.diff(starts).tolist() == [8192, 8192, 8192]
    assert layout.offset("Q", 1) == layout.offset("QK", 0) + 128 * 128
    assert all(start % 64 == 0 for start in starts)


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match=r"mode: expected one of poison, adjacent.*got 'loose'"):
        golden.plan(Sizes(1, 2, 2, 2), "loose")


def test_poison_finds_a_write_outside(device):
    layout = Layout.plan({"A": (2, 2), "C": (2, 2)}, 1, "poison", 64)
    memory = allocate(layout, device, unwritten=("C",))
    memory[layout.offset("C", 0) : layout.offset("C", 0) + 5] = 1.0
    assert escapes(layout, memory, "C").guards_written == 1


def test_poison_tells_unwritten_from_computed_nan(device):
    layout = Layout.plan({"C": (2, 2)}, 1, "poison", 64)
    memory = allocate(layout, device, unwritten=("C",))
    memory[layout.offset("C", 0)] = float("nan")
    memory[layout.offset("C", 0) + 1] = 2.0
    found = escapes(layout, memory, "C")
    assert (found.nan_results, found.unwritten, found.guards_written) == (1, 2, 0)


def test_no_two_neighbouring_poisons_are_alike_and_all_are_nan(device):
    bits = poison(10_000, device)
    assert bits.view(torch.float32).isnan().all()
    assert len(bits.unique()) == len(bits)
    assert (bits != 0x7FFFFFFF).all()


def test_a_poison_that_is_read_and_written_elsewhere_is_found(device):
    layout = Layout.plan({"A": (2, 2), "C": (2, 2)}, 1, "poison", 64)
    memory = allocate(layout, device, unwritten=("C",))
    memory[0] = memory[1]
    assert escapes(layout, memory, "C").guards_written == 1
