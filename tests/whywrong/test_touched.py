"""Which elements of a wrong step are wrong, and what they hold, in the words of its inputs."""

import pytest
import torch

import whywrong
from whywrong import Precision, golden, localise, step
from whywrong.comparing.touched import MOST, rearranged, touched

GENERATOR = torch.Generator().manual_seed(0)
SQUARE = torch.randn(64, 64, dtype=torch.float64, generator=GENERATOR)
NOISE = torch.randn(64, 64, dtype=torch.float64, generator=GENERATOR)
ROWS, COLUMNS = torch.arange(64)[:, None], torch.arange(64)
LENGTH = torch.randint(1, 64, (64,), generator=GENERATOR)
OTHER = torch.randn(64, 64, dtype=torch.float64, generator=GENERATOR)
CORNERS = torch.rand(64, 4, generator=GENERATOR).double() * 8
PLACES = {
    "from 40 on of dimension 1": COLUMNS >= 40,
    "in 3, 9 to 10 of dimension 0": (ROWS == 3) | (ROWS == 9) | (ROWS == 10),
    "in 32 to 47 of dimension 0 and from 48 on of dimension 1": (ROWS // 16 == 2) & (COLUMNS >= 48),
    "at 6 and more in each tile of 8 of dimension 1": COLUMNS % 8 >= 6,
    "above the diagonal of dimensions 0 and 1": COLUMNS > ROWS,
    "except where the place in dimension 0, less that in 1, is 0": COLUMNS != ROWS,
    "except where the place in dimension 0, less that in 1, is 0 modulo 32": (COLUMNS - ROWS) % 32 != 0,
    "where length is 0 modulo 4": (LENGTH % 4 == 0)[:, None],
    f"where length is {int(LENGTH.mode().values)}": (LENGTH.mode().values == LENGTH)[:, None],
    "where the place in dimension 1, less length, is over -1": LENGTH[:, None] <= COLUMNS,
    "where |the right value| is at most 0.5": SQUARE.abs() < 0.5,
    "where other is at least 1": OTHER > 1.0,
    "where boxes[:, 2] - boxes[:, 0] is at most 0.": (CORNERS[:, 2] - CORNERS[:, 0] < 1.0)[:, None],
}


def said(observed, limit=1e-9):
    return touched(observed, SQUARE, limit, {"length": LENGTH, "other": OTHER, "boxes": CORNERS})


@pytest.mark.parametrize("words", PLACES)
def test_the_wrong_elements_are_said_in_the_words_of_the_input(words):
    wrong = PLACES[words].expand(SQUARE.shape)
    assert said(torch.where(wrong, SQUARE + 1.0 + NOISE.abs(), SQUARE))[0].startswith(f"wrong are all elements {words}")


def test_a_condition_holds_for_every_wrong_and_for_no_right_element():
    wrong = (LENGTH % 4 == 0)[:, None].expand(SQUARE.shape).clone()
    wrong[int((LENGTH % 4 == 1).nonzero()[0]), 3] = True
    first = said(torch.where(wrong, SQUARE + 1.0 + NOISE.abs(), SQUARE))[0]
    assert "modulo" not in first
    assert first.startswith(f"wrong are {int(wrong.sum())} of the {64 * (int(wrong.sum()) // 64 + 1)} elements")


def test_of_scattered_elements_no_place_is_said_and_one_in_each_slice_is_no_factor():
    scattered = torch.rand(64, 64, generator=GENERATOR) < 0.3
    assert said(torch.where(scattered, SQUARE + NOISE, SQUARE)) == ()
    assert not any(
        "each slice" in words for words in said(torch.where(LENGTH[:, None] == COLUMNS, SQUARE + NOISE, SQUARE))
    )


def test_a_large_step_is_described_by_its_slices():
    large = torch.zeros(MOST // 512 + 1, 512)
    wrong = large.index_fill(0, torch.arange(64, 70), 1.0)
    assert touched(wrong, large, 0.1, {})[0] == "wrong are all elements in 64 to 69 of dimension 0"


HELD = {
    "wrong elements are 9.9e-05 too large": SQUARE + 9.9e-5,
    "wrong elements are 0.0001 too small": SQUARE - 1e-4,
    "wrong elements are 1.001 times what is right": SQUARE * 1.001,
    "wrong elements are -1 times what is right": -SQUARE,
    "4032 of 4096 wrong elements hold what belongs 1 earlier in dimension 1": SQUARE.roll(1, 1),
    "4032 of 4096 wrong elements hold what belongs 1 later in dimension 0": SQUARE.roll(-1, 0),
    "wrong elements are transposed in dimensions 0 and 1": SQUARE.T,
    "wrong elements hold other": torch.where(COLUMNS > 7, SQUARE, OTHER),
    "wrong elements hold what belongs 16 later in dimension 0": torch.where(ROWS < 16, SQUARE.roll(-16, 0), SQUARE),
    "wrong elements are zero": torch.where(ROWS % 3 == 0, 0.0, SQUARE),
    "wrong elements are all 7": torch.where(NOISE > 0.3, 7.0, SQUARE),
    "wrong elements are NaN": torch.where(NOISE > 0.3, torch.nan, SQUARE),
    "wrong elements are 9 where ": torch.where((ROWS == 3) & (COLUMNS == 4), 9.0, SQUARE),
    "the error is a factor for each slice of dimension 0": SQUARE * (1.0 + 0.1 * NOISE[:, :1]),
    "the error is an offset for each slice of dimension 1": SQUARE + NOISE[:1],
    "the error of the matrix has rank 1 of 64": SQUARE + NOISE[:, :1] * NOISE[:1],
}


@pytest.mark.parametrize("words", HELD)
def test_what_wrong_elements_hold_is_said(words):
    assert said(HELD[words])[-1].startswith(words)


@pytest.mark.parametrize(
    "observed",
    [
        SQUARE.flip(0) + SQUARE.T,
        SQUARE * (1.0 + 1e-12),  # no element is beyond what it may be off
        torch.where((ROWS == 3) & (COLUMNS == 4), SQUARE + 1.5e-9, SQUARE + 1e-10 * NOISE)[:0],
    ],
    ids=["anything", "within the tolerance", "nothing"],
)
def test_of_what_is_not_simple_nothing_is_said(observed):
    assert touched(observed, SQUARE[: len(observed)], 1e-9, {}) == ()


def test_whole_numbers_are_right_or_wrong():
    x = torch.arange(40).view(8, 5)
    assert touched(x.index_fill(0, torch.tensor([2]), 9), x, 0.0, {}) == (
        "wrong are all elements at 2 of dimension 0",
        "wrong elements are all 9",
    )
    assert touched(x + 1, x, 0.0, {}) == ("wrong elements are 1 too large",)


def flushed(x, length):
    keep = torch.arange(x.shape[1]) < length[:, None]
    return step("y", step("p", torch.exp(x)).masked_fill(~keep, 0.0).sum(1))


@pytest.mark.long
def test_localise_says_it_in_the_table_the_json_the_assertion_and_no_word_of_a_correct_run():
    x = torch.linspace(-100.0, 0.0, 8 * 40).view(8, 40)
    length = torch.tensor([32, 7, 16, 33, 40, 5, 39, 8])
    p = torch.exp(x)
    right = {"x": x, "length": length, "p": p, "y": (p * (torch.arange(40) < length[:, None])).sum(1)}
    recorded = golden(flushed, x=x, length=length)
    precision = Precision("float32")
    report = localise(right, recorded, precision=precision)
    assert not any(finding.touched for finding in report.findings.values())
    assert report.touched == ()
    p = torch.where(p < 2.0**-80, 0.0, p)
    later = (p * (torch.arange(40) < length[:, None])).sum(1) + (length % 16 == 0)
    wrong = right | {"p": p, "y": later}
    report = localise(wrong, recorded, precision=precision)
    first, then = (report.findings[name] for name in ("p", "y"))
    assert report.touched == first.touched
    assert first.touched[0].startswith("wrong are all elements where"), first.touched
    assert first.touched[1] == "wrong elements are zero"
    assert then.touched == ("wrong are all elements where length is 0 modulo 16", "wrong elements are all 1")
    assert "wrong elements are zero" in str(report).replace("\n", " ").replace("  ", " ")
    assert first.as_json()["touched"] == first.touched
    with pytest.raises(AssertionError, match="wrong elements are zero"):
        whywrong.assert_close(wrong, recorded, precision=precision)


def test_steps_that_one_line_of_a_loop_computes_are_one_row():
    weights = torch.cumsum(0.1 * torch.randn(9, 6, 4, generator=torch.Generator().manual_seed(1)), 0)

    def averaged(weights, later=0.1):
        shadow, steps = weights[0], {}
        for i in range(1, 9):
            shadow = shadow - (later if i >= 5 else 0.1) * (shadow - weights[i])
            steps[f"shadow.{i}"] = step(f"shadow.{i}", shadow)
        return steps

    recorded = golden(averaged, weights=weights)
    right, wrong = ({"weights": weights, **averaged(weights, later)} for later in (0.1, 0.5))
    rows = {row[0]: row for row in localise(right, recorded, precision=Precision("float32")).table().rows}
    assert rows["shadow.1 ... shadow.8"][-1] == "ok"
    report = localise(wrong, recorded, precision=Precision("float32"))
    (row,) = (row for row in report.table().rows if row[0] == "shadow.1 ... shadow.8")
    assert row[-1].startswith("wrong from 5 on: own error: 24 of 24 elements")
    assert "<- first" in row[-1]
    assert report.first == "shadow.5"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.complex64, torch.bfloat16])
def test_inputs_of_every_type_are_taken(dtype):
    given = (torch.arange(64) % 2).to(dtype)
    said_of_rows = touched(
        torch.where(ROWS % 2 == 1, SQUARE + NOISE.abs() + 1.0, SQUARE), SQUARE, 1e-9, {"mask": given}
    )
    assert said_of_rows[0] == "wrong are all elements at every 2th from 1 of dimension 0"


def test_a_plain_dump_says_which_elements_are_wrong_and_what_they_hold():
    """Of the first wrong step alone: what follows may be wrong by it."""
    generator = torch.Generator().manual_seed(0)
    right = {name: torch.randn(32, 16, generator=generator) for name in ("a", "b", "c")}
    wrong = {"zero": right["b"].clone(), "factor": right["b"] / 8.0}
    wrong["zero"][24:] = 0.0
    words = {"zero": "wrong elements are zero", "factor": "wrong elements are 0.125 times what is right"}
    for name, b in wrong.items():
        found = localise(right | {"b": b, "c": -right["c"]}, right)
        assert found.touched[-1] == words[name]
        assert (found.findings["a"].touched, found.findings["c"].touched) == ((), ())
    assert (
        localise(right | {"b": wrong["zero"]}, right).touched[0] == "wrong are all elements from 24 on of dimension 0"
    )


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (
            lambda h: h.permute(2, 0, 1).bfloat16(),
            "it holds the golden's numbers with the dimensions in the order 2, 0, 1",
        ),
        (torch.flatten, "it holds the golden's numbers in the same order"),
        (lambda h: torch.flip(h, (0,)).flatten(), ""),
        (lambda h: h[1:], ""),
    ],
    ids=["permuted", "flat", "flat_and_turned", "some_rows"],
)
def test_a_step_of_another_shape_is_said_to_hold_the_same_numbers_where_it_does(stored, words):
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, 6), torch.randn(6, 5)
    recorded = golden(lambda x, w: step("h", x @ w), x=x, w=w)
    plain = whywrong.Trace({"x": x, "h": x @ w})
    said = f"shape: observed {(*stored(x @ w).shape,)}, golden (3, 4, 5)"
    for reference, given in ((recorded, {"x": x, "w": w}), (plain, {"x": x})):
        found = localise({**given, "h": stored(x @ w)}, reference, precision=Precision("float32")).findings["h"]
        assert found.words.endswith(said)
        assert found.touched == ((words,) if words else ())


def test_of_numbers_that_are_nearly_alike_the_order_is_still_the_right_one():
    torch.manual_seed(0)
    near, apart = 1.0 + 0.01 * torch.randn(4, 6), torch.randn(4, 6)
    assert rearranged(near.T, near) == ("it holds the golden's numbers with the dimensions in the order 1, 0",)
    assert rearranged(torch.ones(6, 4), near) == rearranged(torch.ones(6, 4), torch.ones(4, 6)) == ()
    assert rearranged(torch.full((6, 4), torch.nan), apart) == ()
