"""Inputs are sampled until a kernel fails; the failure is small, says why, and runs by itself."""

import logging
import math
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies

import whywrong
from labkit.session.catalogue import ROOT
from tools import small_kernels as kernels
from whywrong.checking.with_program import Rerun
from whywrong.errors import UsageError
from whywrong.fuzzing.fuzz import LAYOUTS, SAMPLED_LENGTHS, check, sample
from whywrong.recording.work import Work

EXAMPLE = {"x": torch.randn(4, 9)}
TRIED = {"examples": 25, "most": 1 << 12}
HERE = {"isolate": False}
"""For a kernel that notes in this process what it was given."""


def hunted(name, **how):
    return whywrong.fuzz(getattr(kernels, name), kernels.reference, EXAMPLE, **(TRIED | how))


@pytest.mark.long
def test_a_right_kernel_is_not_accused():
    found = hunted("right", examples=40)
    assert (found.found, found.passed, found.examples) == (False, True, 40)
    assert "no failure found\n  40 tried, 0 refused, 0 discarded; seed 0\n  sizes (your example's): " in repr(found)
    assert re.search(r": dimension 0 of 'x' 1 to \d+ \(4\), dimension 1 of 'x' 1 to \d+ \(9\)\n", repr(found))
    assert "ended: 40 cases, as asked" in repr(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("overflowing", "1 NaN"),
        ("unwritten_tail", "NaN"),
        ("unwritten", "1 NaN"),
        ("earlier_result", "the call before, on other inputs, gave the same"),
        ("one_buffer", "a later call changed the result of an earlier one"),
        ("every_second", "; two calls on the same inputs differ in 1 of "),
        ("in_place", "changed its input 'x'"),
        ("without_strides", "NaN"),
        ("behind_its_result", "wrote outside"),
        ("before_its_input", "changed its input 'x'"),
        ("without_square", "raised RuntimeError: no square"),
        ("narrow", "times the tolerance"),
    ],
)
def test_each_fault_is_found_and_said(name, words):
    found = hunted(name)
    assert found.found
    assert words in found.failure.words


def updated(x, y):
    return {"y": y + x}


def test_a_result_may_have_the_name_of_an_input_and_be_equal_to_it():
    found = whywrong.fuzz(updated, updated, {"x": torch.randn(5, 7), "y": torch.randn(5, 7)}, examples=50)
    assert not found.found, found


def test_what_a_kernel_gave_is_said_where_it_is_no_tensor():
    given = {"x": torch.randn(3)}
    for made, words in ((None, "gave NoneType None; expected a tensor"), ([1.0], "gave list [1.0]; expected a tensor")):
        assert words in check(lambda x, made=made: made, torch.neg, given).words
    assert check(lambda x: -x.numpy()[::-1][::-1], torch.neg, given) is None
    assert check(lambda x: x.numpy()[::-1], lambda x: x.flip(0), given) is None
    assert check(lambda x: x.numpy().sum(), torch.sum, given) is None


def test_a_tensor_is_the_result_of_a_dict_of_one_name_that_is_differentiated():
    given = {"x": torch.ones(1, 1), "y": torch.ones(1, 1)}
    assert check(lambda x, y: x + y, updated, given) is None


def test_infinities_of_both_signs_are_drawn_where_they_are_asked_for():
    def kernel(x):
        return torch.where(x == -math.inf, 1.0, torch.sigmoid(x))

    for values, wrong in (("infinite", False), ("minus infinite", True)):
        assert whywrong.fuzz(kernel, torch.sigmoid, (torch.randn(5, 7),), values=[values]).found == wrong


@pytest.mark.long
def test_the_failure_is_the_smallest_and_plainest():
    shape = {
        name: tuple(hunted(name).failure.inputs["x"].shape) for name in ("overflowing", "unwritten_tail", "in_place")
    }
    assert shape == {"overflowing": (1, 1), "unwritten_tail": (1, 9), "in_place": (1, 1)}
    assert hunted("without_strides").failure.inputs["x"].flatten().tolist() == [1.0, 1.0]


def test_the_call_before_is_spoken_of_only_where_it_says_something():
    words = {name: hunted(name).failure.words for name in ("earlier_result", "always_zero")}
    assert "the call before, on other inputs, gave the same" in words["earlier_result"]
    assert "the call before" not in words["always_zero"]


@pytest.mark.long
def test_axes_of_equal_length_are_one_size():
    example = (torch.randn(4, 9), torch.randn(9, 5))
    assert not whywrong.fuzz(kernels.product, kernels.product, example, **TRIED).found
    found = whywrong.fuzz(kernels.narrow_product, kernels.product, example, **TRIED)
    a, b = found.failure.inputs.values()
    assert a.shape[1] == b.shape[0]


def test_sizes_may_be_named_and_fixed():
    seen = []

    def kernel(x, y):
        seen.append((*x.shape, *y.shape))
        return x + y

    example = {"x": torch.randn(4, 4), "y": torch.randn(4)}
    whywrong.fuzz(kernel, lambda x, y: x + y, example, sizes={"x": ("rows", 8), "y": (8,)}, **TRIED, **HERE)
    assert seen[0] == (4, 4, 4), "the example comes first"
    assert {shape[1:] for shape in seen} == {(4, 4), (8, 8)}
    assert len({shape[0] for shape in seen}) > 5


def test_sides_go_beyond_two_to_the_16_where_memory_allows(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    seen = set()

    def kernel(x):
        seen.add(len(x))
        return x + 1

    whywrong.fuzz(kernel, lambda x: x + 1, torch.randn(5), examples=60, seed=1, **HERE)
    assert max(seen) > 1 << 16
    assert 1 in seen
    assert seen <= {5, *SAMPLED_LENGTHS}


def test_sides_are_short_where_triton_is_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    lengths = set()

    def kernel(x):
        lengths.add(len(x))
        return x + 1

    whywrong.fuzz(kernel, lambda x: x + 1, torch.randn(5), seed=1, **HERE)
    assert 128 < max(lengths) <= 512


def test_whole_numbers_stay_within_the_range_of_the_example():
    example = {"ids": torch.tensor([0, 6, 3]), "table": torch.randn(7, 4)}
    fixed = {"table": (7, "d")}
    assert not whywrong.fuzz(kernels.looked_up, kernels.looked_up, example, sizes=fixed, **TRIED).found
    found = whywrong.fuzz(kernels.looked_up_beside, kernels.looked_up, example, sizes=fixed, **TRIED)
    assert 0 <= int(found.failure.inputs["ids"].min()) <= int(found.failure.inputs["ids"].max()) < 7


def test_a_kernel_may_write_into_what_it_is_given():
    example = EXAMPLE | {"out": torch.empty(4, 9)}

    def words(name):
        found = whywrong.fuzz(getattr(kernels, name), kernels.reference, example, out="out", **TRIED, **HERE)
        return found.failure.words if found.found else ""

    assert words("into") == ""
    assert "wrote outside" in words("into_more")
    assert "1 NaN" in words("into_nothing")


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("out", [("larger", "smaller"), (1, 2)])
def test_a_kernel_may_write_several_results(out):
    names = dict(zip(("larger", "smaller"), out, strict=True))
    x = "x" if out == ("larger", "smaller") else 0
    example = {x: torch.randn(4, 9)} | {name: torch.empty(4, 9) for name in out}

    def reference(x):
        found = {"larger": x + 1, "smaller": x - 1}
        return found if "larger" in names.values() else tuple(found.values())

    for wrong in (0, 1):

        def kernel(x, larger, smaller, wrong=wrong):
            larger.copy_(x + 1)
            smaller.copy_(x - 1 - wrong)

        assert bool(whywrong.fuzz(kernel, reference, example, out=out, **TRIED).found) == bool(wrong)


def test_a_case_whose_result_is_too_long_is_discarded():
    longest = []

    def kernel(a, b):
        longest.append(len(a) * len(b))
        return torch.outer(a, b)

    found = whywrong.fuzz(kernel, torch.outer, (torch.randn(4), torch.randn(5)), examples=40, most=1 << 10, **HERE)
    assert not found.found
    assert found.discarded > 0
    assert max(longest) <= 4 << 10


def test_lengths_are_not_long_together():
    seen = []

    def reference(a, b):
        seen.append((*a.shape, b.shape[1]))
        if len(seen) > 3:  # the example, to record it and to see what its operations depend on
            raise MemoryError
        return a @ b

    found = whywrong.fuzz(torch.matmul, reference, (torch.randn(4, 9), torch.randn(9, 5)), examples=10, most=1 << 11)
    assert (found.found, found.examples, found.reasons) == (None, 1, {"MemoryError: MemoryError": found.discarded})
    assert len(set(seen)) > 20
    assert max(max(lengths) for lengths in seen) > 1 << 10
    assert max(math.prod(lengths) for lengths in seen) <= 64 << 11


def test_no_reference_makes_a_tensor_too_long_on_its_way():
    lengths = set()

    def attention(x):
        return torch.softmax(x @ x.mT, -1) @ x

    def kernel(x):
        lengths.add(len(x))
        return attention(x)

    found = whywrong.fuzz(kernel, attention, torch.randn(4, 3), examples=30, most=1 << 8, **HERE)
    assert (found.found, found.discarded > 0) == (False, True)
    assert 16 < max(lengths) <= 32, "their square is 4 times 256 at most"


@pytest.mark.long
@pytest.mark.parametrize(("says", "hint"), [("odd", "sizes that fit"), ("index 3 is out of bounds", "indices below")])
def test_a_case_that_the_reference_fails_on_is_discarded(says, hint):
    def reference(x):
        if len(x) % 2:
            raise RuntimeError(says)
        return x + 1

    found = whywrong.fuzz(lambda x: x + 1, reference, torch.randn(4), most=1 << 10)
    assert (found.failure, found.discarded > 0, found.examples > 0) == (None, True, True)
    assert f"discarded, {found.discarded} of them: RuntimeError: {says} (missing, perhaps: {hint}" in repr(found)


def test_a_case_that_could_not_be_checked_is_discarded(monkeypatch):
    """It was: a kernel that gave twice what is right passed."""

    def fails(*given, **how):
        raise RuntimeError("out of bounds")

    monkeypatch.setattr(Rerun, "_simulated", fails)
    example = torch.randn(4, 3)
    with pytest.raises(UsageError, match="output: not checked: cannot be run on what was observed"):
        whywrong.fuzz(lambda x: 2.0 * x.sum(0), lambda x: x.sum(0), example, **TRIED, **HERE)


@pytest.mark.long
def test_no_case_begins_after_the_seconds_given():
    found = hunted("slow", examples=1000, seconds=1.0)
    assert (found.found, found.passed, 1 <= found.examples <= 10) == (None, False, True)
    assert "no failure found, but it was hardly searched" in repr(found)
    assert "ended: 1 s are over" in repr(found)
    start = time.monotonic()
    assert hunted("slow_and_wrong", seconds=1.0).found
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize("takes", [0.0, 40.0])
def test_a_failure_is_made_smaller_within_the_seconds_given(takes, monkeypatch):
    """By a clock that each wrong call moves on by so many seconds."""
    clock = [0.0]

    def kernel(x):
        clock[0] += takes * (x.shape[1] > 8)
        return kernels.reference(x) + (x.shape[1] > 8)

    monkeypatch.setattr("whywrong.fuzzing.fuzz.time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = whywrong.fuzz(kernel, kernels.reference, EXAMPLE, seconds=90.0, **TRIED, **HERE)
    assert (tuple(found.failure.inputs["x"].shape) == (1, 9)) == (takes == 0.0)
    assert clock[0] <= 90.0 + 3 * takes, "three calls a case"


def test_why_is_asked_of_the_failure():
    assert hunted("overflowing", values=["large mean"]).failure.explain().verdict in ("cause", "none of these")
    with pytest.raises(UsageError, match="no wrong numbers to explain"):
        hunted("in_place").failure.explain()


def test_why_is_asked_on_normal_values_of_the_largest_that_failed():
    def kernel(a, b):
        return a[:, :32] @ b[:32]

    found = whywrong.fuzz(kernel, torch.matmul, (torch.randn(4, 9), torch.randn(9, 5)), values="ones", **TRIED)
    assert [list(x.shape) for x in found.failure.inputs.values()] == [[1, 33], [33, 1]]
    why = found.failure.explain()
    assert why.verdict == "cause"
    assert re.fullmatch(r"mm leaves out 32 to \d+ of dimension 1 of \d+ of input\.0", why.causes[0].says)
    assert "looked at on these inputs: 0: float32 [" in repr(why)


def test_why_is_asked_on_the_example_where_the_kernel_fails_there():
    """A shift of rows cannot be told from a constant one where there are two rows, as in the smallest failure."""
    example = (torch.randn(7, 5),)
    found = whywrong.fuzz(lambda x: x[[0, *range(len(x) - 1)]].exp(), torch.exp, example, **TRIED)
    assert found.failure.inputs[0].shape[0] == 2
    why = found.failure.explain()
    assert why.causes[0].says == "output is one place later in dimension 0, the edge repeated"
    assert "0: float32 [7, 5]" in repr(why)


@pytest.mark.long
def test_a_kernel_that_takes_no_strides_is_right_on_copies():
    def kernel(x):
        flat = x.as_strided((x.numel(),), (1,), x.storage_offset())  # as if rows lay one behind the other
        return flat.view(x.shape).exp()

    found = whywrong.fuzz(kernel, torch.exp, (torch.randn(6, 5),), values=["normal"], **TRIED)
    words = "; right on contiguous copies of its inputs; does your kernel promise strides? Else layouts='contiguous'"
    assert found.failure.words.endswith(words)
    assert whywrong.fuzz(kernel, torch.exp, (torch.randn(6, 5),), layouts="contiguous", examples=40).passed
    why = found.failure.explain()
    assert (why.step, why.verdict, why.causes[0].kind) == ("output", "cause", "layout")


def test_sizes_may_be_said_by_the_names_of_the_reference():
    seen = set()

    def kernel(x, gain):
        seen.add(tuple(x.shape[1:]) + tuple(gain.shape))
        return x * gain

    def scaled(rows, by):
        return rows * by

    example = (torch.randn(6, 8), torch.randn(8))
    assert not whywrong.fuzz(kernel, scaled, example, sizes={"rows": ("n", 8), "by": (8,)}, **TRIED, **HERE).found
    assert seen == {(8, 8)}
    with pytest.raises(UsageError, match=r"sizes: expected .*which are {0: \(6, 8\), 1: \(8,\)}, got 'x': \('n', 8\)"):
        whywrong.fuzz(kernel, scaled, example, sizes={"x": ("n", 8)}, **TRIED)


@pytest.mark.long
def test_what_the_kernel_refuses_is_counted_and_no_failure():
    found = hunted("small_alone")
    assert (found.failure, found.refused > 0, found.examples > 0) == (None, True, True)
    assert hunted("small_alone", refuses=()).failure.words.startswith(
        "raised ValueError: x: expected 16 at most, got 17 columns"
    )


def test_two_inputs_may_be_one_tensor():
    seen = set()

    def kernel(a, b):
        seen.add(a.data_ptr() == b.data_ptr())
        return a * b

    whywrong.fuzz(kernel, lambda a, b: a * b, (torch.randn(4), torch.randn(4)), examples=60, most=1 << 10, **HERE)
    assert seen == {True, False}


def test_dtypes_are_drawn():
    seen = set()

    def kernel(x):
        seen.add(x.dtype)
        return x * 2

    wanted = (torch.float32, torch.bfloat16, torch.float16)
    assert not whywrong.fuzz(kernel, lambda x: x * 2, torch.randn(4), dtypes=wanted, **TRIED, **HERE).found
    assert seen == set(wanted)


def test_nan_and_infinity_are_drawn_where_asked_for():
    def kernel(x):
        return torch.nan_to_num(x)

    assert not whywrong.fuzz(kernel, lambda x: x * 1, torch.randn(4), **TRIED).found
    for values in (["NaN"], ["infinite"], "nan", ["Infinite", "ONES"]):
        assert whywrong.fuzz(kernel, lambda x: x * 1, torch.randn(4), values=values, **TRIED).found


def test_nothing_is_drawn_after_the_seconds_given_and_only_a_failure_is_written_as_text(monkeypatch):
    """A fuzz with a strategy of large matrices did not end: all were sampled, and each was written as text."""
    monkeypatch.setattr("whywrong.fuzzing.inputs.literal", lambda x: pytest.fail("written down"))
    made = []

    def case(seed):
        made.append(seed)
        return {"x": sample((4, 9), torch.float32, "normal", seed=seed)}

    inputs = strategies.builds(case, strategies.integers(0, 99))
    found = whywrong.fuzz(kernels.right, kernels.reference, inputs, examples=1000, seconds=0.0)
    assert (found.examples, found.found, len(made) <= 2) == (0, None, True)
    assert "nothing was tried" in repr(found)
    assert whywrong.fuzz(kernels.right, kernels.reference, inputs, examples=5).examples == 5


@pytest.mark.parametrize(
    ("inputs", "why"),
    [({"y": torch.ones(3)}, "TypeError"), ({"x": torch.ones(1 << 12)}, "of more than 64 elements")],
)
def test_a_reference_that_no_input_suits_is_said(inputs, why):
    with pytest.raises(UsageError, match=f"reference: none of 1 inputs suits reference: .*{why}"):
        whywrong.fuzz(kernels.right, kernels.reference, strategies.just(inputs), most=16)


def test_a_strategy_gives_what_it_likes():
    cases = strategies.integers(1, 40).map(lambda n: {"x": torch.arange(float(n)).reshape(1, n)})
    found = whywrong.fuzz(kernels.unwritten_tail, kernels.reference, cases, **TRIED)
    assert tuple(found.failure.inputs["x"].shape) == (1, 9)
    assert "torch.tensor([[0.0, 1.0," in found.script()
    assert repr(found.failure).endswith("\n  x: float32 [1, 9]")


def test_a_strategys_tensor_is_written_down_as_it_lies():
    x = torch.arange(24.0).reshape(4, 6)[1:, ::2].T
    found = whywrong.fuzz(kernels.without_strides, kernels.reference, strategies.just({"x": x}), **TRIED)
    (text,) = (line for line in found.script().splitlines() if line.startswith("    inputs['x'] = "))
    made = eval(text.partition(" = ")[2], {"torch": torch})
    assert torch.equal(made, x)
    assert (made.stride(), made.storage_offset()) == (x.stride(), x.storage_offset())
    assert repr(found.failure).endswith("\n  x: float32 [3, 3], strides (2, 6)")


def test_the_script_has_what_was_drawn_and_not_what_a_kernel_made_of_it():
    def kernel(x, seen):
        seen.append(1)
        return 2.0 * x

    found = whywrong.fuzz(kernel, lambda x, seen: 1.0 * x, strategies.builds(lambda: {"x": torch.ones(3), "seen": []}))
    assert found.made == {"seen": "[]"}


@pytest.mark.long
def test_the_same_seed_draws_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [repr(hunted("narrow", seed=3)) for _ in range(2)]
    assert words[0] == words[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_script_is_a_test_and_runs_by_itself(tmp_path):
    path = tmp_path / "test_hunted.py"
    path.write_text(hunted("unwritten_tail", precision=whywrong.Precision(products="tf32")).script())
    assert len(path.read_text().splitlines()) <= 30
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, "1 NaN" in done.stderr) == (1, True), done.stderr
    with pytest.raises(AssertionError, match="1 NaN"):
        runpy.run_path(str(path))["test_unwritten_tail"]()
    path.write_text(path.read_text().replace("import unwritten_tail as", "import right as"))
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.long
@pytest.mark.parametrize("how", [["path"], pytest.param(["-m", "my_kernel"], marks=pytest.mark.slow)])
def test_functions_of_a_script_are_imported_by_its_name(how, tmp_path, monkeypatch):
    path = tmp_path / "my_kernel.py"
    path.write_text(
        "import whywrong, torch\ndef double(x): return x * 2\ndef wrong(x): return x * 3\n"
        "if __name__ == '__main__': print(whywrong.fuzz(wrong, double, torch.ones(3), most=9, examples=3).script())\n"
    )
    command = [sys.executable, *(path if one == "path" else one for one in how)]
    script = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "from my_kernel import wrong as kernel" in script.stdout, script.stderr
    (tmp_path / "again.py").write_text(script.stdout)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(AssertionError, match="output: own error"):
        runpy.run_path(str(tmp_path / "again.py"), run_name="__main__")
    assert Path(sys.modules.pop("my_kernel").__file__) == path


@pytest.mark.long
def test_a_script_makes_the_very_inputs_again():
    found = hunted("without_strides", values=["normal"], sizes={"x": ("rows", 61)})
    made = eval(found.made["x"], {"torch": torch, "sample": sample})
    x = found.failure.inputs["x"]
    assert (made.stride(), made.storage_offset()) == (x.stride(), x.storage_offset())
    assert torch.equal(made, x)
    assert check(kernels.without_strides, kernels.reference, {"x": made}) is not None
    assert check(kernels.right, kernels.reference, {"x": made}) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_holds_the_values(layout):
    x = sample((3, 5), torch.float32, "counting", layout)
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0]
    assert sorted(x.flatten().tolist()) == sorted(values[:5] * 3 if layout == "repeated" else values)
    assert x.is_contiguous() == (layout in ("contiguous", "offset"))


@pytest.mark.long
def test_what_was_observed_can_be_judged_again():
    failure = hunted("narrow").failure
    assert list(failure.observed) == ["x", "output"]
    assert whywrong.localise(failure.observed, failure.golden, precision=failure.precision).first == "output"


@pytest.mark.long
def test_the_promised_precision_is_what_counts():
    assert hunted("narrow_result").found
    assert not hunted("narrow_result", precision=whywrong.Precision(storage="bfloat16")).found


def test_a_reference_that_fails_on_the_example_says_why():
    with pytest.raises(RuntimeError, match="no square"):
        whywrong.fuzz(kernels.right, kernels.without_square, torch.randn(4, 4))


def test_bad_arguments_are_named():
    with pytest.raises(UsageError, match=r"values: .*got .*'none'.*"):
        hunted("right", values="none")
    with pytest.raises(UsageError, match=r"examples: .*got 0"):
        hunted("right", examples=0)
    with pytest.raises(UsageError, match="got storage='nonsense'"):
        hunted("right", dtypes=["nonsense"])
    with pytest.raises(UsageError, match=r"out: expected one of 'x'.*got 'y'"):
        hunted("right", out="y")
    with pytest.raises(UsageError, match=r"expected one that takes nothing \(not x: out=\)"):
        hunted("right", out="x")
    with pytest.raises(UsageError, match=r"for each axis of one of the tensors.*got 'y'"):
        hunted("right", sizes={"y": (3,)})
    with pytest.raises(UsageError, match=r"sizes: .*got 'x': \('n', 0\)"):
        hunted("right", sizes={"x": ("n", 0)})
    for wrong in ({"seed": -1}, {"most": "x"}, {"examples": 0}, {"seconds": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=f"{name}: expected a (whole )?number from.*got {value!r}"):
            hunted("right", **wrong)
    with pytest.raises(UsageError, match=r"refuses: expected exceptions.*got 'sorted'"):
        hunted("right", refuses="sorted")
    with pytest.raises(UsageError, match=r"inputs: no tensor with axes .*or a NumPy array"):
        whywrong.fuzz(torch.neg, torch.neg, torch.ones(()))
    with pytest.raises(UsageError, match="found no failure"):
        hunted("right", examples=1).script()
    with pytest.raises(UsageError, match=r"kernel: .*<lambda> cannot be imported; expected a function at the top"):
        whywrong.fuzz(lambda x: x * 2, kernels.reference, EXAMPLE, **TRIED).script()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_drawn_without_nan_and_a_fault_found(dtype):
    def faulty(x):
        return torch.where(x.float() > 300.0, 0.0, 2.0 * x.float())

    given = {"x": torch.ones(7).to(dtype)}

    def twice(x):
        return 2.0 * x.to(torch.get_default_dtype())

    assert not whywrong.fuzz(twice, twice, given, examples=20).found
    found = whywrong.fuzz(faulty, twice, given, examples=20)
    assert "times the tolerance" in found.failure.words
    assert not found.failure.inputs["x"].float().isnan().any()


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.uint32])
def test_whole_numbers_of_the_whole_range_of_their_type_are_drawn(dtype):
    ends = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max]).to(dtype)

    def half(x):
        return x.long() >> 1

    assert not whywrong.fuzz(half, half, {"x": ends}, examples=10).found
    assert whywrong.fuzz(lambda x: x.long(), half, {"x": ends}, examples=10).found
    assert sample((5,), torch.int64, low=2**63 - 1, high=2**63 - 1).min() > 2**62


def test_the_home_of_hypothesis_is_afterwards_what_it_was(tmp_path):
    config = hypothesis.configuration
    before = vars(config)["__hypothesis_home_directory"]
    config.set_hypothesis_home_dir(tmp_path)
    try:
        hunted("right", examples=1)
        assert vars(config)["__hypothesis_home_directory"] == tmp_path
    finally:
        config.set_hypothesis_home_dir(before)


@pytest.mark.long
def test_nothing_is_written(tmp_path):
    """Hypothesis keeps what it finds in sources, without a database too, in .hypothesis where it has no other home."""
    (tmp_path / "doubling.py").write_text("NUMBER = 123457\n\ndef doubled(x):\n    return NUMBER * x\n")
    run = "import torch, whywrong, doubling as d; whywrong.fuzz(d.doubled, d.doubled, torch.ones(4, 8), examples=50)"
    before = sorted(tmp_path.iterdir())
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "", "HOME": ""}
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, env=environment, check=True, timeout=300)
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_reference_raises_is_logged(caplog):
    def small(x):
        if len(x) > 3:
            raise RuntimeError("too long")
        return 2.0 * x

    with caplog.at_level(logging.DEBUG, logger="whywrong"):
        found = whywrong.fuzz(small, small, torch.ones(3), examples=10)
    discarded = [line for line in caplog.messages if line.endswith("the reference raised RuntimeError: too long")]
    assert len(discarded) == found.discarded > 0


def test_an_array_of_another_byte_order_is_a_result_and_one_of_more_digits_is_refused():
    swapped, long = (lambda x, to=to: (-x).numpy().astype(to) for to in (">f4", np.longdouble))
    assert check(swapped, torch.neg, {"x": torch.ones(3)}) is None
    assert check(long, torch.neg, {"x": torch.ones(3)}).words.endswith("got float128")


def test_hypothesis_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(UsageError, match="pip install hypothesis"):
        hunted("right")


def test_tensors_inside_of_an_input_stay_as_they_are_and_are_given_to_both():
    def scaled(weights, x):
        return x * weights["gain"]

    given = {"weights": {"gain": torch.tensor(3.0)}, "x": torch.randn(4)}
    assert not whywrong.fuzz(scaled, scaled, given, precision=whywrong.Precision("float32"), examples=5).found


def test_truth_values_are_written_and_examples_without_a_range_are_refused():
    def positive(x, out):
        out.copy_(x > 0)

    given = {"x": torch.randn(3, 4), "out": torch.empty(3, 4, dtype=torch.bool)}
    assert not whywrong.fuzz(positive, lambda x: x > 0, given, out="out", examples=8).found
    with pytest.raises(UsageError, match="inputs: 'input' has no element; expected an example that shows a range"):
        whywrong.fuzz(torch.sin, torch.sin, {"input": torch.empty(0, 3)})
    with pytest.raises(UsageError, match=r"dtypes: expected floating-point ones.*got 'int32'"):
        whywrong.fuzz(torch.sin, torch.sin, {"input": torch.ones(3)}, dtypes="int32")


@pytest.mark.long
def test_the_example_is_the_first_case_and_is_made_smaller_where_nothing_sampled_fails():
    x = torch.zeros(40, 6)
    x[3, 2] = 12345.0

    def kernel(x):
        return torch.where(x == 12345.0, 0.0, x)

    found = whywrong.fuzz(kernel, lambda x: x * 1.0, {"x": x}, examples=30)
    assert (found.examples, found.notes) == (1, ["your example fails"])
    assert list(found.failure.inputs["x"].shape) == [4, 3]
    assert "at (3, 2): 0 for 12345, tolerance 0.00" in repr(found)


@pytest.mark.long
def test_an_example_larger_than_what_is_sampled_is_tried_and_said():
    found = whywrong.fuzz(lambda x: x + (x.numel() > 99), lambda x: x * 1.0, {"x": torch.zeros(10, 10)}, most=50)
    assert found.notes == [
        "your example fails",
        "your example has 100 elements, what is sampled 50 at most (most=)",
    ]


@pytest.mark.long
def test_ratios_of_the_example_are_kept_unless_told_otherwise():
    def rotated(x, cos):
        half = x.shape[-1] // 2
        return torch.cat([x[..., :half] * cos[:, None], x[..., half:] * cos[:, None]], -1)

    seen = set()

    def kernel(x, cos):
        seen.add((x.shape[-1], cos.shape[-1]))
        return rotated(x, cos)

    given = (torch.randn(6, 3, 48), torch.randn(6, 24))
    assert whywrong.fuzz(kernel, rotated, given, examples=40, most=1 << 12, **HERE).passed
    assert {wide / narrow for wide, narrow in seen} == {2.0}
    assert len(seen) > 8
    seen.clear()
    sizes = {"x": ("t", "h", "d"), "cos": ("t", "w")}
    whywrong.fuzz(kernel, rotated, given, examples=40, most=1 << 12, sizes=sizes, **HERE)
    assert any(wide != 2 * narrow for wide, narrow in seen), "which the reference survives by broadcasting"


def test_sizes_may_be_multiples():
    seen = set()

    def kernel(q, k):
        seen.add((len(q), len(k)))
        return q.view(len(k), -1).sum(1) + k

    sizes = {"q": (("n", 4),), "k": ("n",)}
    assert whywrong.fuzz(kernel, kernel, (torch.randn(8), torch.randn(2)), sizes=sizes, examples=30, **HERE).passed
    assert {q / k for q, k in seen} == {4.0}
    with pytest.raises(UsageError, match=r"sizes: expected a length, a name or .*'n', 3"):
        whywrong.fuzz(kernel, kernel, (torch.randn(8), torch.randn(2)), sizes={"q": (("n", 3),)})


@pytest.mark.long
def test_what_is_required_of_inputs_is_kept():
    seen = []

    def reference(p, keys, ids, starts, table):
        return (p * 1.0, keys + 1, table[ids], starts + 1)

    def kernel(*given, **named):
        seen.append(tuple(x.clone() for x in named.values()))
        return reference(*given, **named)

    given = {"p": torch.softmax(torch.randn(5, 7), -1), "keys": torch.tensor([1, 3, 9]), "ids": torch.tensor([4, 0])}
    given |= {"starts": torch.tensor([0, 2, 2, 6]), "table": torch.randn(6, 3)}
    forms = {"p": "rows sum to 1", "keys": "sorted, unique", "ids": "unique, below pages", "starts": "offsets to pages"}
    sizes = {"p": (5, "w"), "keys": ("k",), "ids": ("i",), "starts": ("s",), "table": ("pages", 3)}
    asked = {"forms": forms, "sizes": sizes, "where": lambda ids, table: len(ids) <= len(table)}
    found = whywrong.fuzz(kernel, reference, given, examples=40, most=1 << 9, values="normal", **asked, **HERE)
    assert (found.passed, found.discarded) == (True, 0)
    for p, keys, ids, starts, table in seen[1:]:
        if not bool((p > 1).any()):  # else the values before, on which a kernel is called first
            assert torch.allclose(p.sum(-1), torch.ones(p.shape[:-1]))
        assert keys.tolist() == sorted(set(keys.tolist()))
        assert len(set(ids.tolist())) == len(ids) <= len(table)
        assert max(ids.tolist()) < len(table)
        assert (int(starts[0]), starts.tolist()) == (0, sorted(starts.tolist()))
        assert len(starts) == 1 or int(starts[-1]) == len(table)
    assert len({len(table) for *_, table in seen}) > 5


def test_what_cannot_be_required_is_named():
    given = {"x": torch.randn(4, 9), "ids": torch.tensor([1, 2])}
    for forms in ({"x": "below 4"}, {"ids": "below nothing"}, {"ids": "round"}, {"y": "sorted"}, {"ids": "below"}):
        with pytest.raises(UsageError, match=r"forms: expected some of rows sum to 1, .*for one of 'x', 'ids', got '"):
            whywrong.fuzz(torch.add, torch.add, given, forms=forms)
    with pytest.raises(UsageError, match=r"where: expected arguments among .*got 'z'"):
        whywrong.fuzz(torch.add, lambda x, ids: x, given, where=lambda z: True)
    with pytest.raises(UsageError, match=r"where: expected a condition that holds for the example"):
        whywrong.fuzz(torch.add, lambda x, ids: x, given, where=lambda x: len(x) > 4)
    with pytest.raises(UsageError, match=r"isolate: expected False, or None"):
        whywrong.fuzz(torch.neg, torch.neg, {"x": torch.ones(3, device="meta")}, isolate=True)


def test_numpy_inputs_are_arrays_to_the_kernel_and_tensors_to_the_reference():
    def kernel(x, gain):
        assert isinstance(x, np.ndarray)
        return np.where(x.shape[0] > 4, 0.0, 1.0) * x * gain

    given = {"x": np.ones((3, 5), np.float32), "gain": np.ones(5, np.float32)}
    found = whywrong.fuzz(kernel, lambda x, gain: x * gain, given, refuses=())
    assert list(found.failure.inputs["x"].shape) == [5, 1]
    assert check(lambda x: x * 1.0, lambda x: x * 1.0, {"x": np.ones(3, np.float32)}) is None


def test_a_number_that_is_wrong_is_shown_with_its_tolerance():
    failure = check(lambda x: x + 0.5, lambda x: x * 1.0, {"x": torch.ones(1, 1)})
    assert re.search(r"at \(0, 0\): 1\.5 for 1, tolerance \d\.\d+e-08", repr(failure))
    failure = check(lambda x: x * 1.0, lambda x: x / 0 * 0, {"x": torch.tensor([[math.nan]])}, precision=None)
    assert failure is None
    failure = check(lambda x: x.nan_to_num(), lambda x: x * 1.0, {"x": torch.tensor([[math.nan, 1.0]])})
    assert "at (0, 0): 0 for nan, which the reference gives: not a number" in repr(failure)


def test_progress_and_what_no_script_imports_are_said(monkeypatch):
    lines, clock = [], [0.0]

    def kernel(x):
        clock[0] += 4.0
        return x * 2.0

    for module in ("fuzzing.fuzz", "console"):
        monkeypatch.setattr(f"whywrong.{module}.time", SimpleNamespace(monotonic=lambda: clock[0]))
    whywrong.fuzz(kernel, kernels.reference, EXAMPLE, examples=3, progress=lines.append, **HERE)
    assert re.fullmatch(r"fuzz: .*kernel is no function at the top level of a file: no .script\(\) .*", lines[0])
    assert whywrong.fuzz(kernels.right, kernels.right, EXAMPLE, examples=3, progress=lines.append).examples == 3
    lines.clear()
    whywrong.fuzz(kernel, lambda x: x * 2.0, EXAMPLE, examples=5, progress=lines.append, **HERE)
    assert "fuzz: 1 tried, 0 refused, 0 discarded after 12 s" in lines


def test_an_interrupt_ends_it_with_what_was_found():
    calls = []

    def kernel(x):
        calls.append(1)
        if len(calls) > 12:
            raise KeyboardInterrupt
        return x * 2.0

    found = whywrong.fuzz(kernel, lambda x: x * 2.0, EXAMPLE, **TRIED, **HERE)
    assert (found.examples, found.found, found.ended) == (4, None, "interrupted")


def looping(x):
    h = torch.zeros_like(x[0])
    for row in x:
        h = torch.tanh(h + row)
    return h


@pytest.mark.long
def test_a_reference_that_loops_is_given_small_sizes_and_the_time_is_kept():
    start = time.monotonic()
    found = whywrong.fuzz(looping, looping, {"x": torch.randn(20, 3)}, sizes={"x": ("t", "d")}, seconds=8)
    assert time.monotonic() - start < 12.0
    assert found.examples > 5
    assert found.ranges["t"][1] < 1000


def test_an_error_that_leaves_cuda_unusable_ends_it_and_is_said():
    calls = []

    def kernel(x):
        calls.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    found = whywrong.fuzz(kernel, lambda x: x * 2.0, EXAMPLE, examples=30, **HERE)
    assert (len(calls), found.examples) == (1, 1), "on other values than the example's; nothing runs after it"
    assert "raised RuntimeError: CUDA error: an illegal" in found.failure.words
    lost = "no call of CUDA works in its process any more"
    assert found.failure.words.endswith(f"was encountered, on other values of these inputs; {lost}")
    assert found.notes[0] == "so nothing smaller was tried; isolate=True gives the kernel a process of its own"


def test_a_failure_with_strides_alone_does_not_hide_another():
    def kernel(x):
        flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
        return flat.view(x.shape).exp() * (1.0 + (x.shape[0] > 8))

    found = whywrong.fuzz(kernel, torch.exp, (torch.randn(6, 5),), examples=80, values="normal")
    assert not found.failure.strided
    assert list(found.failure.inputs[0].shape) == [9, 1]


@pytest.mark.long
def test_a_reference_with_gradients_may_be_ended_at_any_of_its_operations():
    """torch aborts the process for an error where autograd asks for a device, or saves a tensor."""

    def reference(x):
        x = x.detach().requires_grad_()
        flat = x.flatten(-2)
        scaled = (flat @ flat.T) * torch.rsqrt(flat.square().mean(-1) + 1e-6)[:, None]
        return torch.autograd.grad(scaled.softmax(-1).sum(), x)[0]

    ended = [Work(float(most)).without_numbers(reference, torch.ones(3, 2, 5)).why for most in range(1, 200)]
    assert ended[0].startswith("it would take too long")
    assert ended[-1] == ""


def test_an_infinity_that_the_reference_has_in_one_precision_alone_is_not_asked_for():
    """A quotient by a difference that is 0 in float64, and what rounding leaves of it in float32."""

    def reference(x):
        return 1.0 / (3.0 * x - x - x - x)

    given = {"x": torch.tensor([0.001, 0.003, 0.7])}
    assert bool(reference(given["x"].double()).isinf().all())
    assert bool(reference(given["x"]).isfinite().all())
    for kernel in (reference, lambda x: torch.full_like(x, math.nan)):
        assert check(kernel, reference, given) is None
    for zero in (0.0, 1.0):
        found = check(lambda x: torch.full_like(x, math.nan), torch.log, {"x": torch.full((3,), zero)})
        assert "3 NaN" in found.words


def test_a_failure_that_took_long_to_judge_is_made_smaller(monkeypatch):
    """It was not: what is a quarter as large was said to take too long. By a clock: six seconds a wrong call."""
    clock = [0.0]

    def kernel(x):
        clock[0] += 6.0 * len(x) / 4097
        return x * 2.0 + (len(x) > 2)

    monkeypatch.setattr("whywrong.fuzzing.fuzz.time", SimpleNamespace(monotonic=lambda: clock[0]))
    drawn = strategies.sampled_from([1, 2, 3, 1009, 4097]).map(lambda n: {"x": torch.ones(n)})
    found = whywrong.fuzz(kernel, lambda x: x * 2.0, drawn, seconds=40.0, **HERE)
    assert len(found.failure.inputs["x"]) == 3


@pytest.mark.long
def test_without_triton_inputs_are_large_and_have_the_references_names(monkeypatch):
    """TRITON_INTERPRET alone, which the command sets, limits nothing: this kernel is wrong from 600 elements on."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "triton", raising=False)

    def summed(rows, gain):
        return (rows[:, :300] * gain[:300]).sum(1) if rows.shape[1] > 300 else (rows * gain).sum(1)

    def reference(rows, gain):
        return (rows * gain).sum(1)

    found = whywrong.fuzz(summed, reference, (torch.randn(3, 8), torch.randn(8)), seconds=60)
    assert found.found
    assert "rows: float32" in repr(found)
