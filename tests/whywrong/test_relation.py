"""What one tensor is of another: every relation is found in each type, and none that does not hold of each element."""

import pytest
import torch

from whywrong.comparing.factors import BLOCK
from whywrong.comparing.relation import fingerprints, relation

ROWS, COLUMNS = 256, 192


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


G = normal(ROWS, COLUMNS)


def swapped(x, outer, a, b):
    """In each of `outer` groups of rows a x b blocks transposed."""
    return x.view(outer, a, b, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def blocks(x, order):
    return x.view(len(order), -1, *x.shape[1:])[list(order)].reshape(x.shape)


MOVED = {
    "transposed": (lambda x: x.T, "transposed", "transposed"),
    "rotary halves to pairs": (
        lambda x: swapped(x, 4, 2, 32),
        "regrouped",
        "dimension 0: in each of 4 groups, 64 slices = 2 x 32, transposed (halves interleaved)",
    ),
    "rotary pairs to halves": (
        lambda x: swapped(x, 4, 32, 2),
        "regrouped",
        "dimension 0: in each of 4 groups, 64 slices = 32 x 2, transposed (pairs brought to halves)",
    ),
    "heads before projections": (
        lambda x: swapped(x, 1, 4, 2),
        "regrouped",
        "dimension 0: 8 blocks of 32 = 4 x 2, transposed",
    ),
    "gates": (lambda x: blocks(x, (0, 2, 1, 3)), "permuted", "dimension 0: 4 blocks of 64 in the order 0, 2, 1, 3"),
    "gate and up": (lambda x: blocks(x, (1, 0)), "permuted", "dimension 0: 2 blocks of 128 in the order 1, 0"),
    "gates in columns": (
        lambda x: blocks(x.T, (2, 0, 1)).T,
        "permuted",
        "dimension 1: 3 blocks of 64 in the order 2, 0, 1",
    ),
    "both dimensions": (
        lambda x: blocks(swapped(x, 4, 2, 32).T, (1, 0)).T,
        "regrouped",
        "dimension 0: in each of 4 groups, 64 slices = 2 x 32, transposed (halves interleaved); "
        "dimension 1: 2 blocks of 96 in the order 1, 0",
    ),
    "flipped": (lambda x: x.flip(0), "flipped", "dimension 0: 256 slices in reverse"),
    "two heads of many": (
        lambda x: blocks(x, (0, 1, 5, 3, 4, 2, 6, 7)),
        "permuted",
        "dimension 0: 64 to 95, 160 to 191 are the golden's 160 to 191, 64 to 95",
    ),
    "two rows": (
        lambda x: x[[200 if i == 3 else 3 if i == 200 else i for i in range(ROWS)]],
        "permuted",
        "dimension 0: 3, 200 are the golden's 200, 3",
    ),
    "another shape": (lambda x: x.reshape(COLUMNS, ROWS), "regrouped", "(256, 192) read as (192, 256)"),
    "columns read as rows": (
        lambda x: x.T.reshape(ROWS, COLUMNS),
        "transposed",
        "transposed; (192, 256) read as (256, 192)",
    ),
    "transposed pairs": (
        lambda x: swapped(x, 4, 2, 32).T,
        "transposed",
        "transposed; dimension 1: in each of 4 groups, 64 slices = 2 x 32, transposed (halves interleaved)",
    ),
    "shuffled": (
        lambda x: x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))].view(x.shape),
        "permuted",
        "the same numbers, in an order that has no simple description",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", MOVED)
def test_numbers_that_were_moved_are_found_in_any_type(name, dtype):
    move, kind, words = MOVED[name]
    found = relation(move(G).contiguous().to(dtype), G)
    assert (found.kind, found.words, found.dtype) == (kind, words, str(dtype).removeprefix("torch."))
    assert relation(move(G).contiguous(), G.to(dtype)).words == words, "the golden may be the narrower"


@pytest.mark.parametrize("name", MOVED)
def test_numbers_that_were_moved_are_not_found_where_one_is_another(name):
    move, kind, words = MOVED[name]
    o = move(G).clone()
    o[5, 7] += 0.01
    found = relation(o, G)
    assert (found.kind, found.words) != (kind, words)
    assert found.kind in ("differs", "partly")


def test_a_bias_of_few_different_numbers_is_found_too():
    """4096 numbers of bfloat16 have 8 digits: most occur more than once."""
    bias = normal(4096, dtype=torch.bfloat16)
    assert len(bias.unique()) < 2000
    assert relation(swapped(bias, 32, 2, 64), bias).words.endswith(
        "128 slices = 2 x 64, transposed (halves interleaved)"
    )
    assert relation(blocks(bias, (0, 2, 1, 3)), bias).words.endswith("4 blocks of 1024 in the order 0, 2, 1, 3")


def test_dimensions_of_a_convolution():
    x = normal(8, 3, 5, 5)
    assert relation(x.permute(2, 3, 1, 0).contiguous(), x).words == "transposed to dimensions (2, 3, 1, 0)"
    assert relation(x.flip(1), x).words == "dimension 1: 3 slices in the order 2, 1, 0"
    assert relation(x.flip(3), x).words == "dimension 3: 5 slices in reverse"


def test_twelve_as_four_by_three_taken_as_three_by_four():
    x = torch.arange(12.0)
    found = relation(x.view(4, 3).T.reshape(12), x)
    assert (found.kind, found.words) == ("regrouped", "dimension 0: 12 slices = 4 x 3, transposed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64], ids=str)
def test_the_same_is_the_same_to_the_narrower_type(dtype):
    narrow = G.to(dtype)
    words = f"the same, rounded to {str(dtype if dtype != torch.float64 else torch.float32).removeprefix('torch.')}"
    for o, g in ((narrow, G), (G, narrow)):
        assert relation(o, g)[:2] == ("same", words)
    other = G.clone()
    other[3, 4] *= 1.5
    assert relation(other, narrow).kind == "partly"
    assert relation(narrow, other).kind == "partly"


def test_what_was_rounded_and_stored_wider_is_said_to_be():
    assert relation(G.bfloat16().float(), G)[:2] == ("rounded", "the same, rounded to bfloat16")
    assert relation(G.bfloat16().float(), G.bfloat16()).kind == "same", "the golden was rounded too"
    mostly = G.bfloat16().float()
    mostly[9] = G[9]
    assert relation(mostly, G).kind != "rounded"


def quantised(x, dtype, largest, dims):
    scale = x.abs().amax(dims, keepdim=True) / largest
    y = x / scale
    return (y.round().to(dtype) if dtype == torch.int8 else y.to(dtype)), scale


NUMBERS = torch.arange(2.0, 2.0 + ROWS)
SCALED = {
    "a factor": (lambda x: x * 0.125, "scaled", "times 0.125"),
    "a sign": (lambda x: -x, "scaled", "times -1"),
    "nothing": (lambda x: x * 0.0, "scaled", "times 0"),
    "a factor and transposed": (lambda x: (2.0 * x).T, "scaled", "transposed, and times 2"),
    "of each row": (lambda x: x * NUMBERS[:, None], "scaled", "times 2, 3, 4, 5, ... for each slice of dimension 0"),
    "of each column": (
        lambda x: x * NUMBERS[:COLUMNS],
        "scaled",
        "times 2, 3, 4, 5, ... for each slice of dimension 1",
    ),
    "one more": (lambda x: x + 1.0, "offset", "plus 1"),
    "a bias": (lambda x: x + NUMBERS[:COLUMNS], "offset", "plus 2, 3, 4, 5, ... for each slice of dimension 1"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_factors_and_offsets_are_found(name, dtype):
    change, kind, words = SCALED[name]
    found = relation(change(G).to(dtype), G)
    assert found.kind == kind
    assert dtype == torch.bfloat16 or found.words == words
    o = change(G).to(dtype).contiguous()
    o[5, 7] += 3.0
    assert relation(o, G).kind == "differs"


def test_a_norm_that_has_one_added_to_its_weight():
    weight = 0.1 * normal(64, dtype=torch.bfloat16)
    assert relation(1.0 + weight, weight).words == "plus 1"
    assert relation(weight, 1.0 + weight).kind in ("offset", "differs"), "what 1 + w rounded away is gone"


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.int8, 127.0), (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str
)
@pytest.mark.parametrize(
    ("dims", "words"),
    [((0, 1), ""), ((1,), " for each slice of dimension 0"), ((0,), " for each slice of dimension 1")],
    ids=["tensor", "row", "column"],
)
def test_what_is_quantised_has_its_scales(dtype, largest, dims, words):
    o, scale = quantised(G, dtype, largest, dims)
    found = relation(o, G)
    assert found.kind == "quantised"
    assert found.words.endswith(words)
    low, high = found.numbers.low, found.numbers.high
    flat = scale.flatten().double()
    assert low.shape == flat.shape
    assert bool(((low <= flat * (1 + 1e-6)) & (flat * (1 - 1e-6) <= high)).all())
    assert bool((high / low < 1.01).all())
    wrong = o.clone()
    wrong[0, 0] = 0 if abs(float(o[0, 0])) > largest / 4 else largest
    assert relation(wrong, G).kind != "quantised"


def test_blocks_that_have_a_scale_each():
    g = normal(256, 256)
    for tall, wide in ((128, 128), (1, 128), (1, 64), (1, BLOCK)):
        split = g.view(256 // tall, tall, 256 // wide, wide)
        o, scale = quantised(split, torch.float8_e4m3fn, 448.0, (1, 3))
        found = relation(o.view(256, 256), g)
        assert found.words.endswith(f" for each block of {tall} x {wide}")
        assert len(found.numbers.low) == scale.numel()
    experts = normal(4, 32, 16)
    o, _ = quantised(experts, torch.int8, 127.0, (1, 2))
    assert relation(o, experts).words.endswith(" for each slice of dimension 0")
    o, _ = quantised(experts, torch.int8, 127.0, (2,))
    assert relation(o, experts).words.endswith(" for each row along dimension 2")


def test_what_is_the_golden_in_some_slices():
    extra = torch.cat([G, torch.zeros(8, COLUMNS)])
    assert (
        relation(extra, G).words
        == "slices 0 to 255 of dimension 0 are the golden's 0 to 255 of 256; the others, 256 to 263: zero"
    )
    assert relation(G[:200], G)[:2] == ("part", "slices 0 to 199 of dimension 0 are the golden's 0 to 199 of 256")
    shifted = torch.cat([G[1:], normal(1, COLUMNS, seed=1)])
    assert relation(shifted, G).words.startswith("slices 0 to 254 of dimension 0 are the golden's 1 to 255")
    lost = G.clone()
    lost[5] = 0.0
    assert relation(lost, G).words == "slices 0 to 4, 6 to 255 of dimension 0 are the golden's; the others, 5: zero"
    block = G.clone()
    block[3:9, 7:20] *= 2.0
    assert relation(block, G).words == (
        "slices 0 to 2, 9 to 255 of dimension 0 are the golden's; the others, 3 to 8: "
        "slices 0 to 6, 20 to 191 of dimension 1 are the golden's; the others, 7 to 19: times 2"
    )


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("shape", [(8,), (64,), (200,), (4, 4), (3, 5, 2), (64, 8), (16, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_unrelated_numbers_have_no_relation(shape, dtype):
    """Of few digits many are equal by chance."""
    for seed in range(20):
        g, o = normal(*shape, seed=seed), normal(*shape, seed=1000 + seed)
        o = (40.0 * o).clamp(-127.0, 127.0).to(dtype) if dtype == torch.int8 else o.to(dtype)
        found = relation(o, g.bfloat16() if dtype == torch.bfloat16 else g)
        assert found.kind == "differs", (seed, found)


def test_numbers_that_are_not_finite_and_tensors_without_any():
    x = G.clone()
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    assert relation(x.clone(), x).kind == "same"
    assert relation(x.bfloat16(), x).kind == "same"
    assert relation(x * 2.0, x)[:2] == ("scaled", "times 2")
    assert relation(torch.where(x.isnan(), 0.0, x), x).kind == "partly"
    assert relation(torch.zeros(0, 3), torch.zeros(0, 3)).kind == "same"
    assert relation(torch.zeros(0, 3), torch.zeros(2, 3)).kind == "differs"
    assert relation(torch.tensor(2.0), torch.tensor(3.0)).kind == "differs"
    assert relation(torch.tensor(3.0), torch.tensor(3.0)).kind == "same"


def test_whole_numbers_and_truth_values():
    x = torch.arange(60).view(12, 5)
    assert relation(x.clone(), x).kind == "same"
    assert relation(x.flip(1), x).words == "dimension 1: 5 slices in reverse"
    assert relation(x > 30, x > 30).kind == "same"
    assert relation(x > 30, x > 31).kind != "same"
    assert relation(torch.tensor([2**53, 2**53 + 1]), torch.tensor([2**53 + 1, 2**53])).kind != "same"


def test_fingerprints_do_not_depend_on_how_many_are_hashed_at_a_time(monkeypatch):
    whole = fingerprints(normal(7, 5, 3))
    monkeypatch.setattr("whywrong.comparing.relation.HASHED", 32)
    assert all(torch.equal(a, b) for a, b in zip(whole, fingerprints(normal(7, 5, 3)), strict=True))
    monkeypatch.setattr("whywrong.comparing.factors.PIECE", 1000)
    assert relation(G * 0.5, G).words == "times 0.5"
    assert relation(quantised(G, torch.int8, 127.0, (0,))[0], G).words.endswith(" for each slice of dimension 1")
