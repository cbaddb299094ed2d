"""A first day's mistakes, and hostile files: what was written, and the names in the one line that comes back."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import whywrong
from whywrong import Bound, Golden, Precision, Trace, capture, golden, localise
from whywrong.errors import UsageError
from whywrong.recording.dumps import open_dump
from whywrong.reporting.command import main

X = torch.linspace(-1.0, 2.0, 12).reshape(3, 4)
RECORDED = golden(lambda x: {"scores": x * 2.0, "probs": torch.softmax(x * 2.0, -1)}, x=X)
RIGHT = {"x": X, "scores": X * 2.0, "probs": torch.softmax(X * 2.0, -1)}


def setting(_):
    return X


MISTAKES = {
    "arguments exchanged": (lambda: localise(RECORDED, RIGHT), ("observed", "golden")),
    "a list in place of steps": (lambda: localise([X], RECORDED), ("observed", "list", "dict")),
    "names that are no texts": (lambda: localise({1: X}, RECORDED), ("observed", "names")),
    "no step at all": (lambda: localise({}, RECORDED), ("observed", "golden")),
    "a step that is no array": (lambda: localise({"scores": None}, RECORDED), ("scores", "tensor")),
    "a golden that is none": (lambda: localise(RIGHT, 3), ("golden", "int")),
    "precision as a text": (
        lambda: localise(RIGHT, RECORDED, precision="float32"),
        ("precision", "float32", "Precision"),
    ),
    "precision as a dict": (lambda: localise(RIGHT, RECORDED, precision={"storage": "bf16"}), ("precision", "storage")),
    "a format that is none": (lambda: Precision("bf17"), ("storage", "bf17", "bfloat16")),
    "a module in place of what it gives": (lambda: whywrong.assert_close(X, nn.Linear(4, 4)), ("golden", "Linear")),
    "a function in place of what it gives": (lambda: whywrong.assert_close(torch.relu, X), ("golden", "relu itself")),
    "a precision for a missing step": (
        lambda: localise(RIGHT, RECORDED, precision=Precision(steps={"score": {"storage": "bf16"}})),
        ("precision", "score", "did you mean scores"),
    ),
    "names: not in the golden": (lambda: localise(RIGHT, RECORDED, names={"score": "x"}), ("names", "scores")),
    "names: not in the observed": (lambda: localise(RIGHT, RECORDED, names={"x": "prob"}), ("names", "probs")),
    "names: the observed has both": (
        lambda: localise({**RIGHT, "new": X}, RECORDED, names={"scores": "new"}),
        ("names", "scores", "new"),
    ),
    "names: one for two": (
        lambda: localise({"x": X, "y": X}, RECORDED, names={"scores": "y", "probs": "y"}),
        ("names", "y"),
    ),
    "a number as a step": (lambda: whywrong.step("a", 3.0), ("a", "float", "tensor")),
    "a step's arguments exchanged": (lambda: whywrong.step(X, "a"), ("str", "tensor")),
    "golden of a number": (lambda: golden(3), ("golden", "int", "function")),
    "golden's arguments exchanged": (lambda: golden(X, nn.Linear(4, 4)), ("golden", "Tensor", "Module")),
    "a list as an input": (lambda: golden(lambda x: x, [1.0, 2.0]), ("input.0", "list", "tensor")),
    "a loss as a text": (lambda: golden(lambda x: x, X, loss="mse"), ("loss", "mse", "function")),
    "capture of a tensor": (lambda: capture(X), ("capture", "Tensor", "Module")),
    "capture of a list": (lambda: capture(lambda x: x, [[1.0]]), ("input.0", "list", "tensor")),
    "a sparse result": (lambda: golden(lambda x: x.to_sparse(), X), ("_to_sparse",)),
    "half a time": (lambda: whywrong.repeat(lambda: X, times=2.5), ("times", "2.5")),
    "repeat of a number": (lambda: whywrong.repeat(5), ("run", "int", "function")),
    "repeat with no golden": (lambda: whywrong.repeat(lambda: X, golden=5), ("golden", "int", "Bound")),
    "bounds of steps": (lambda: whywrong.bounded(RIGHT, precision=Precision()), ("golden", "dict", "whywrong.golden")),
    "bounds of no step": (
        lambda: whywrong.bounded(golden(lambda x: {"y": x + 1}, X), precision=Precision(), steps=["z"]),
        ("steps", "'z'", "expected a step's name"),
    ),
    "bounds of none": (
        lambda: whywrong.bounded(golden(lambda x: {"y": x + 1}, X), precision=Precision(), steps="y"),
        ("steps", "names", "'y'"),
    ),
    "a bound below zero": (lambda: whywrong.compare(X, X, bound=-1.0), ("bound",)),
    "a counterfactual without a bound": (
        lambda: whywrong.weigh(setting, {"right": lambda _: X.double()}, settings={"one": 1}),
        ("right", "Bound"),
    ),
    "a number for a bound": (
        lambda: whywrong.weigh(setting, {"right": lambda _: (X, 1e-5)}, settings={"one": 1}),
        ("right", "Bound"),
    ),
    "saved where nothing is": (lambda: Trace(RIGHT).save("/nowhere/t.safetensors"), ("/nowhere", "folder")),
    "a golden saved where nothing is": (lambda: RECORDED.save("/nowhere/g.safetensors"), ("/nowhere", "folder")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_that_names_it(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(UsageError) as raised:
        make()
    assert "\n" not in str(raised.value)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_missing_an_unexpected_and_a_renamed_step_are_told_apart():
    found = localise({"x": X, "score": RIGHT["scores"], "extra": X}, RECORDED)
    assert found.unexpected == ["score", "extra"]
    assert [note for note in found.notes if "did you mean scores" in note]
    assert not [note for note in found.notes if "extra" in note]
    assert found.findings["probs"].total is None


def test_inputs_that_differ_are_said_alone():
    found = localise({**RIGHT, "x": X + 1.0, "probs": X}, RECORDED)
    assert (found.divergent, "inputs differ" in found.verdict) == (["x"], True)
    assert found.findings["probs"].as_json()["ok"] is None


def test_a_nan_that_is_inherited_is_counted():
    bad = torch.where(X.max() == X, torch.nan, RIGHT["scores"])
    found = localise({**RIGHT, "scores": bad, "probs": torch.softmax(bad, -1)}, RECORDED)
    rows = {row[0]: row for row in found.table().rows}
    assert (found.first, rows["scores"][1], rows["probs"][1]) == ("scores", "1 NaN", "4 NaN")


def test_a_dict_is_a_golden_of_steps():
    exact = {name: RECORDED[name] for name in RECORDED.names}
    assert localise(RIGHT, exact).first is None
    assert localise({**RIGHT, "probs": X}, exact).first == "probs"


def test_a_counterfactual_of_whole_numbers_needs_no_bound():
    found = whywrong.weigh(
        lambda _: np.ones(3), {"one": lambda _: np.ones(3), "two": lambda _: np.full(3, 2.0)}, settings={"s": 0}
    )
    assert found.cause == "one"
    assert whywrong.weigh(setting, {"x": lambda _: (X.double(), Bound(1e-6, "given"))}, settings={"s": 0}).cause == "x"


def test_a_captured_file_is_judged_and_saved_again(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    seen = capture(model, X)
    back = whywrong.load(seen.save(tmp_path / "a.safetensors"))
    again = whywrong.load(back.save(tmp_path / "b.safetensors"))
    assert again.names == seen.names
    assert again.precision == seen.precision is not None
    assert localise(again, golden(model, X)).first is None


def test_nan_in_every_run_is_not_ok():
    runs = iter([torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 2.0]), torch.tensor([torch.nan, 1.0])])
    assert not whywrong.repeat(lambda: next(runs), times=3, golden=Bound(10.0, "given")).ok


def test_whole_numbers_beyond_int64_are_compared_exactly():
    a = np.array([2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1], np.uint64)
    assert whywrong.compare(a, a).ok
    assert whywrong.compare(a, a - np.uint64(1)).mismatches == 4
    assert whywrong.compare(np.array([2**63], np.uint64), np.array([-(2**63)])).mismatches == 1


def test_a_folder_in_a_folder_of_steps_is_not_passed_over(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(2))
    (tmp_path / "rank1").mkdir()
    with pytest.raises(UsageError, match="rank1"):
        open_dump(tmp_path)


def test_what_steers_a_terminal_is_printed_as_text(tmp_path, capsys):
    name = "x\x1b[31mred\x07"
    Trace({name: torch.ones(2)}).save(tmp_path / "g.safetensors")
    Trace({name: torch.zeros(2)}, {"note": "\x1b]0;title\x07"}).save(tmp_path / "o.safetensors")
    assert main(["diff", str(tmp_path / "g.safetensors"), str(tmp_path / "o.safetensors")]) == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\\x1b" in shown.out


def _tampered(tmp_path, change, **about):
    path = golden(lambda a, b: a + b, a=torch.ones(3), b=torch.ones(3)).save(tmp_path / "g.safetensors")
    with safe_open(path, "pt") as file:
        said = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = json.loads(said["program"])
    change(text, tensors)
    save_file(tensors, path, said | {"program": json.dumps(text)} | about)
    return path


def _last(func, args, shape):
    """A change that puts another operation in place of the sum."""
    return lambda text, tensors: text["nodes"].__setitem__(2, [func, args, {"named": {}}, shape])


ATTACKS = {
    "16 GiB of a small file": _last("full.default", [[1 << 31], 1.0], [1 << 31]),
    "minutes of elementwise work": lambda text, tensors: text["nodes"].extend(
        [["full.default", [[1 << 24], 1.0], {"named": {}}, [1 << 24]]]
        + [["exp.default", [{"ref": 3 + k}], {"named": {}}, [1 << 24]] for k in range(100)]
    ),
    "a tuple as a step": _last("split.Tensor", [{"ref": 0}, 1], []),
    "an index out of range": _last("select.int", [{"ref": 0}, 0, 7], []),
    "gathered out of range": lambda text, tensors: (
        tensors.update({"1": torch.full((3,), 99)}),
        text["nodes"].__setitem__(2, ["index_select.default", [{"ref": 0}, 0, {"ref": 1}], {"named": {}}, [3]]),
    ),
    "strides out of bounds": _last("as_strided.default", [{"ref": 0}, [3], [1 << 40], 0], [3]),
    "complex numbers": _last("complex.default", [{"ref": 0}, {"ref": 1}], [3]),
    "arguments that are none": _last("add.Tensor", ["a", "b"], [3]),
    "shapes that are texts": _last("add.Tensor", [{"ref": 0}, {"ref": 1}], ["x"]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_golden_is_refused_in_one_line(tmp_path, attack):
    path = _tampered(tmp_path, ATTACKS[attack])
    with pytest.raises(UsageError, match=r"g\.safetensors") as raised:
        Golden.load(path)
    assert "\n" not in str(raised.value)


def test_a_golden_of_another_version_says_how_to_make_it_again(tmp_path):
    path = _tampered(tmp_path, lambda text, tensors: None, whywrong="golden 2")
    with pytest.raises(UsageError, match=r"golden 2.*record it again"):
        Golden.load(path)
