"""The fused embedding: result and gradients against torch's in float64, determinism, dropout, what is refused."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

import whywrong
from kernels.bert import embedding
from labkit.session.catalogue import ROOT
from whywrong import poisoned
from whywrong.comparing.bounds import confidence
from whywrong.errors import UsageError

TABLES = ("tokens", "positions", "kinds", "gain", "shift")
SIZES = [
    (3, 5, 7, 11, 2), (2, 23, 100, 50, 2), (2, 5, 768, 40, 1), (3, 7, 4, 33000, 4), (1, 1, 1, 1, 1),
    (2, 2, 1500, 40, 3),
    *(pytest.param(shape, marks=pytest.mark.gpu) for shape in ((1, 200, 16, 3, 2), (1, 1100, 2, 1, 1))),
]  # fmt: skip
"""B, S, H, V, T; the last have runs of one id over many chunks, and one has ids beyond 15 bits."""
TYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def draw(shape, rng, dtype=torch.float32, typed=True):
    b, s, h, v, t = shape

    def normal(*size):
        return torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).to(dtype)

    ids = torch.from_numpy(rng.integers(0, v, (b, s)))
    types = torch.from_numpy(rng.integers(0, t, (b, s))) if typed else None
    return ids, types, [normal(v, h), normal(s + 2, h), normal(t, h), normal(h), normal(h)], normal(b, s, h)


def computed(ids, types, tables, dout, **options):
    """The result and the five gradients, where the inputs are."""
    leaves = [table.clone().requires_grad_() for table in tables]
    out = embedding.embed(ids, types, *leaves, **options)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def ours(ids, types, tables, dout, device, **options):
    """The same on a device, brought to the CPU."""
    return [x.cpu() for x in computed(*moved(device, ids, types, tables, dout), **options)]


def moved(device, ids, types, tables, dout):
    types = None if types is None else types.to(device)
    return ids.to(device), types, [table.to(device) for table in tables], dout.to(device)


def wrong(found, ids, types, tables, dout, eps=1e-6, padding=-1, keep=None):
    """What :func:`ours` gave, held against torch's formula recorded in float64: the steps that diverge.

    The formula is recorded on a GPU where there is one, since a CPU takes a quarter of a minute for some.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, types, tables, dout = moved(device, ids, types, tables, dout)
    kinds_of = torch.zeros_like(ids) if types is None else types
    keep = torch.ones_like(dout) if keep is None else keep.to(device)

    def formula(tokens, positions, kinds, gain, shift, keep):
        x = functional.embedding(ids, tokens, padding_idx=padding if padding >= 0 else None)
        x = x + positions[: ids.shape[1]] + functional.embedding(kinds_of, kinds)
        return {"out": functional.layer_norm(x, (tokens.shape[1],), gain, shift, eps) * keep}

    given = dict(zip(TABLES, tables, strict=True)) | {"keep": keep}
    golden = whywrong.golden(formula, loss=lambda result: (result["out"] * dout.double()).sum(), **given)
    named = dict(zip(("out", *(f"grad:{name}" for name in TABLES)), found, strict=True))
    storage = str(dout.dtype).removeprefix("torch.")
    report = whywrong.localise(given | named, golden, precision=whywrong.Precision(storage=storage))
    assert {name for name, finding in report.findings.items() if finding.own is not None} >= set(named)
    return report.divergent


@pytest.mark.long
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_result_and_gradients_are_torchs(device, rng, shape, dtype):
    ids, types, tables, dout = draw(shape, rng, dtype)
    with poisoned():
        found = ours(ids, types, tables, dout, device, eps=1e-6)
    assert wrong(found, ids, types, tables, dout) == []


@pytest.fixture
def few_programs(monkeypatch):
    """A program takes two rows, so that few rows are several steps in several groups, and runs of many programs."""
    for name, value in {"PROGRAMS": 1, "MOST_STEPS": 2, "MOST_ROWS": 2}.items():
        monkeypatch.setattr(embedding, name, value)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 23, 16, 3, 2), (1, 69, 2, 1, 1), (5, 3, 20, 7, 3)], ids=str)
def test_several_steps_and_runs_of_one_id_over_many_programs_are_summed(device, rng, few_programs, shape):
    """The second has more parts of one id than are added up at a time, which is 32."""
    ids, types, tables, dout = draw(shape, rng)
    with poisoned():
        found = ours(ids, types, tables, dout, device, eps=1e-6)
    assert wrong(found, ids, types, tables, dout) == []


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("padding", [-1, 3])
def test_without_types_all_are_of_the_first(device, rng, padding):
    ids, _, tables, dout = draw((2, 17, 40, 13, 2), rng, typed=False)
    found = ours(ids, None, tables, dout, device, eps=1e-6, padding=padding)
    assert wrong(found, ids, None, tables, dout, padding=padding) == []
    assert not found[3][1].any()
    assert padding < 0 or not found[1][padding].any()


@pytest.mark.long
def test_an_error_of_one_part_in_a_thousand_is_beyond_the_bound(device, rng):
    ids, types, tables, dout = draw((2, 9, 40, 13, 2), rng)
    found = ours(ids, types, tables, dout, device, eps=1e-6)
    for at in range(6):
        spoilt = [x * 1.001 if at == i else x for i, x in enumerate(found)]
        assert len(wrong(spoilt, ids, types, tables, dout)) == 1


@pytest.mark.long
def test_rows_that_no_id_asks_for_have_no_gradient(device, rng):
    ids, types, tables, dout = draw((2, 8, 12, 50, 2), rng)
    with poisoned():
        _, tokens, positions, *_ = ours(ids, types, tables, dout, device)
    absent = torch.ones(50, dtype=torch.bool)
    absent[ids.unique()] = False
    assert not tokens[absent].any()
    assert not positions[8:].any()


@pytest.mark.long
@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_dropout_keeps_a_share_and_the_backward_knows_which(device, rng, drop):
    ids, types, tables, dout = draw((2, 12, 200, 30, 2), rng)
    found = ours(ids, types, tables, dout, device, eps=1e-6, dropout=drop, seed=11)
    rate = embedding.rounded(drop)
    kept = (found[0] != 0).double()
    trials = kept.numel()
    assert abs(float(kept.sum()) - trials * (1 - rate)) < confidence(1, 1) * (trials * rate * (1 - rate)) ** 0.5
    assert wrong(found, ids, types, tables, dout, keep=kept / (1 - rate)) == []


@pytest.mark.long
def test_dropout_is_independent_of_row_column_and_part(device, rng):
    """The correlation of the mask with itself, one row, one column and one part on, is that of independent draws."""
    ids, types, tables, _ = draw((2, 17, 512, 30, 2), rng)
    given = (ids.to(device), types.to(device), *(table.to(device) for table in tables))
    kept = (embedding.embed(*given, dropout=0.5, seed=3).cpu() != 0).double().flatten(0, 1) * 2 - 1
    for rows, columns in ((1, 0), (0, 1), (0, 128), (0, 256), (1, 1)):
        a, b = kept[rows:, columns:], kept[: kept.shape[0] - rows, : kept.shape[1] - columns]
        assert abs(float((a * b).mean())) < confidence(1, 5) / a.numel() ** 0.5


@pytest.mark.long
def test_a_seed_gives_one_mask_and_another_seed_another(device, rng):
    ids, types, tables, _ = draw((2, 6, 64, 30, 2), rng)
    given = (ids.to(device), types.to(device), *(table.to(device) for table in tables))
    one, same, other = (embedding.embed(*given, dropout=0.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    torch.manual_seed(0)
    first = embedding.embed(*given, dropout=0.5)
    assert not torch.equal(first, embedding.embed(*given, dropout=0.5))
    torch.manual_seed(0)
    assert torch.equal(first, embedding.embed(*given, dropout=0.5))


@pytest.mark.long
def test_gradients_of_repeats_are_bit_identical_though_ids_repeat(device, rng, few_programs):
    ids, types, tables, dout = draw((2, 10, 40, 3, 2), rng)
    first = ours(ids, types, tables, dout, device, dropout=0.1, seed=5)
    for _ in range(2):
        again = ours(ids, types, tables, dout, device, dropout=0.1, seed=5)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 512, 768, 30522, 2), (64, 128, 1000, 40, 2), (3, 511, 4096, 70000, 1)], ids=str)
def test_gradients_of_20_repeats_are_bit_identical(rng, shape, dtype):
    given = moved("cuda", *draw(shape, rng, dtype))
    first = computed(*given, dropout=0.1, seed=1)
    for _ in range(19):
        again = computed(*given, dropout=0.1, seed=1)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 64, 1000, 40, 2), (3, 37, 4096, 300, 1), (40, 33, 768, 100, 3)], ids=str)
def test_wide_rows_and_long_runs_are_within_the_bound_on_a_gpu(rng, shape, dtype):
    ids, types, tables, dout = draw(shape, rng, dtype)
    found = ours(ids, types, tables, dout, "cuda", eps=1e-6)
    assert wrong(found, ids, types, tables, dout) == []


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.bert import embedding_kernels as kernels

WORDS = dict.fromkeys(("ids_ptr", "types_ptr", "order_ptr", "seed_ptr"), "i64")
WORDS |= {"sorted_ptr": "i16", "narrow_ptr": "i16"}
FLOATS = ("mean_ptr", "inverse_ptr", "sums_ptr", "norm_ptr", "partial_ptr")

def type_of(name, table):
    if name.endswith("_ptr"):
        return "*" + (WORDS.get(name) or ("fp32" if name in FLOATS else table))
    return "fp32" if name == "eps" else "i32"

ROW = {"H": 768, "PART": 128, "PARTS": 6, "TYPED": True, "DROP": 6554}
OWN = {
    "forward_kernel": ROW, "position_kernel": ROW | {"T": 2}, "token_kernel": ROW,
    "finish_kernel": {"H": 768, "T": 2, "KINDS": 2, "ROWS": 64, "BLOCK": 256, "BLOCK_H": 16},
    "join_kernel": {"H": 768, "BLOCK": 32, "BLOCK_H": 128},
}
for name, constants in OWN.items():
    for table in ("bf16", "fp32")[: 2 if name == "forward_kernel" else 1]:
        kernel = getattr(kernels, name)
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else type_of(n, table) for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
        print(name, table)
"""


@pytest.mark.long
def test_kernels_compile_for_compute_capability_9_without_a_gpu(tmp_path):
    """Triton's compiler takes less Python than its interpreter does."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 6


@pytest.mark.gpu
def test_on_a_gpu_a_row_of_a_bad_id_is_nan_and_no_other(rng):
    ids, types, tables, _ = draw((2, 8, 100, 30, 2), rng)
    ids[0, 3], ids[1, 5], types[1, 1] = 30, -1, 2
    out = embedding.embed(ids.cuda(), types.cuda(), *(table.cuda() for table in tables))
    assert out.isnan().all(-1).nonzero().tolist() == [[0, 3], [1, 1], [1, 5]]
    assert int(out.isnan().any(-1).sum()) == 3


def test_bfloat16_is_refused_where_kernels_are_interpreted(rng):
    ids, types, tables, _ = draw((2, 8, 100, 30, 2), rng, torch.bfloat16)
    with pytest.raises(UsageError, match=r"tokens: torch\.bfloat16 needs a GPU"):
        embedding.embed(ids, types, *tables)


def test_no_tokens_give_nothing_and_zero_gradients(device, rng):
    ids, types, tables, dout = draw((0, 4, 8, 5, 2), rng)
    out, *gradients = ours(ids, types, tables, dout, device)
    assert out.shape == (0, 4, 8)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("hidden", [1, 2, 16, 100, 768, 1024, 1025, 5000, 65536])
def test_a_row_is_eight_parts_at_most_and_covers_every_column(hidden):
    part, count = embedding.parts(hidden)
    assert part & (part - 1) == 0
    assert count <= 8
    assert (count - 1) * part < hidden <= count * part


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids", lambda v: v[0], r"ids: expected torch.int64 \[B, S\].*got torch.int64 \(8,\)"),
        ("ids", lambda v: v.int(), r"ids: expected torch.int64 \[B, S\], got torch.int32"),
        ("ids", lambda v: v[:1, :1].expand(2**16, 2**15), r"ids: expected fewer than 2\^31 tokens, got"),
        ("ids", lambda v: v * 0 + 30, "ids: expected 0 to 29.*got 30 to 30"),
        ("ids", lambda v: v.repeat(1, 2), "ids: 16 tokens are too many; expected 10 at most, as positions has"),
        ("types", lambda v: v - 1, "types: expected 0 to 1.*got -1 to 0"),
        ("types", lambda v: v[:, :3], r"types: expected torch.int64 \(2, 8\).*got torch.int64 \(2, 3\)"),
        ("tokens", lambda v: v.double(), r"tokens: expected float32 or bfloat16.*got torch.float64 \(30, 12\)"),
        ("positions", lambda v: v[:, :5], r"positions: expected torch.float32 \[.*got torch.float32 \(10, 5\)"),
        ("kinds", lambda v: v.repeat(3, 1), "kinds: expected 1 to 4.*got 6 types"),
        ("gain", lambda v: v.bfloat16(), r"gain: expected torch.float32 \[12\].*got torch.bfloat16 \(12,\)"),
        ("shift", lambda v: v[None], r"shift: .*got torch.float32 \(1, 12\)"),
        ("dropout", lambda v: 1.0, "dropout: expected a number from 0, below 1.*got 1.0"),
    ],
)  # fmt: skip
def test_wrong_shapes_types_and_ids_are_one_clear_error(rng, name, change, message):
    ids, _, tables, _ = draw((2, 8, 12, 30, 2), rng)
    kinds = torch.tensor([0, 1] * 4).expand(2, 8)
    given = {"ids": ids, "types": kinds, **dict(zip(TABLES, tables, strict=True)), "dropout": 0.0}
    given[name] = change(given[name])
    if name == "ids":
        given["types"] = None
    dropout = given.pop("dropout")
    with pytest.raises(UsageError, match=message):
        embedding.embed(*given.values(), dropout=dropout)
