"""Traces on disk: what is read, in which order, and what is refused in one line."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import whywrong
from whywrong import Precision, Trace
from whywrong.errors import UsageError
from whywrong.recording.dumps import natural, open_dump


def test_what_is_saved_is_loaded(tmp_path):
    trace = Trace({"zeta": torch.arange(6.0).reshape(2, 3).T, "alpha": np.float32(2.5)}, {"made by": "a test"})
    trace.add("beta", torch.ones(2, dtype=torch.bfloat16))
    back = whywrong.load(trace.save(tmp_path / "t.safetensors"))
    assert back.names == ["zeta", "alpha", "beta"]
    assert torch.equal(back["zeta"], trace["zeta"])
    assert back["beta"].dtype == torch.bfloat16
    assert back.about["made by"] == "a test"
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]
    with safe_open(tmp_path / "t.safetensors", "np") as file:
        assert json.loads(file.metadata()["order"]) == ["zeta", "alpha", "beta"]


def test_metadata_that_are_no_strings_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"about: expected strings, got .*"):
        Trace({"x": torch.ones(1)}, {"K": 3}).save(tmp_path / "t.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_trace_shows_how_many_steps_it_has_and_the_first():
    assert repr(Trace({f"s{k}": torch.ones(1) for k in range(9)})) == "trace: 9 steps: s0, s1, s2, s3, s4, s5, ..."


def test_a_step_is_added_once():
    trace = Trace({"x": torch.ones(1)})
    with pytest.raises(ValueError, match="step 'x' is already there"):
        trace.add("x", torch.zeros(1))


def test_without_an_order_names_sort_as_people_sort():
    assert sorted(["s10", "s9", "s1a", "s1"], key=natural) == ["s1", "s1a", "s9", "s10"]


@pytest.mark.parametrize(
    ("names", "order", "known"),
    [
        (["b", "a", "c"], ["a", "b", "c"], False),
        (["02_scores", "10_out", "01_x"], ["01_x", "02_scores", "10_out"], True),
        (["out_3", "x_1", "p_2"], ["x_1", "p_2", "out_3"], True),
        (["layer1.a", "layer1.b"], ["layer1.a", "layer1.b"], False),
    ],
)
def test_an_order_comes_from_numbers_or_is_not_known(tmp_path, names, order, known):
    for name in names:
        np.save(tmp_path / f"{name}.npy", np.ones(3))
    dump = open_dump(tmp_path)
    assert (dump.names, dump.ordered) == (order, known)


def test_an_order_that_is_told_is_taken_and_a_wrong_one_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({n: torch.ones(1) for n in ("a", "b", "c")}, path, {"order": '["c", "a", "b"]'})
    assert (open_dump(path).names, open_dump(path).ordered) == (["c", "a", "b"], True)
    save_file({n: torch.ones(1) for n in ("a", "b", "c")}, path, {"order": '["c"]'})
    assert (open_dump(path).names, open_dump(path).ordered) == (["c", "a", "b"], False), "no step is lost"
    save_file({n: torch.ones(1) for n in ("a", "b")}, path, {"order": '["a", "zz"]'})
    with pytest.raises(UsageError, match="order: expected names of its steps, got 'zz', which is no step"):
        open_dump(path)


def test_a_dump_reads_one_step_at_a_time(tmp_path, monkeypatch):
    read = []
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.ones(3))
    from whywrong.recording import dumps

    load = dumps._load
    monkeypatch.setattr(dumps, "_load", lambda path: read.append(path.stem) or load(path))
    dump = open_dump(tmp_path)
    assert read == []
    dump.read("b")
    assert read == ["b"]


def test_everything_in_a_pt_file_has_a_name_and_its_own_order(tmp_path):
    nested = {"z": {"0": torch.ones(2)}, "a": [torch.zeros(1), (torch.ones(3), 2.5)], "epoch": 3, "note": "text"}
    torch.save(nested, tmp_path / "m.pt")
    dump = open_dump(tmp_path / "m.pt")
    assert dump.names == ["z.0", "a.0", "a.1.0", "a.1.1", "epoch"]
    assert (dump.read("a.1.1").item(), dump.read("epoch").item(), dump.ordered) == (2.5, 3, True)
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match=r"two tensors of the name 'a\.b'"):
        open_dump(tmp_path / "m.pt")


def test_an_npz_keeps_its_order(tmp_path):
    np.savez(tmp_path / "t.npz", second=np.ones(2), first=np.zeros(3, np.float16))
    dump = open_dump(tmp_path / "t.npz")
    assert (dump.names, dump.read("first").dtype) == (["second", "first"], torch.float16)


def write(path, text):
    path.write_text(text)
    return path


def flipped(path):
    np.savez(path, x=np.ones(8))
    path.write_bytes(path.read_bytes().replace(np.ones(1).tobytes(), np.zeros(1).tobytes(), 1))
    return path


def cut(path):
    torch.save({"x": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing.npy", "got a path that is not there"),
        (lambda p: write(p / "x.txt", "1 2 3"), r"expected a file .* or a folder of them, got \.txt"),
        (lambda p: write(p / "x.safetensors", "no tensors"), "is cut, damaged or no safetensors file"),
        (lambda p: write(p / "x.npy", "no array"), r"x\.npy: is cut, damaged or of another kind"),
        (lambda p: os.mkfifo(p / "x.npy") or p / "x.npy", "got no regular file"),
        (lambda p: p, "expected one tensor a file"),
        (lambda p: (np.save(p / "x.npy", np.array(["a"])), p / "x.npy")[1], "expected a tensor or an array.*got <U1"),
        (
            lambda p: (np.save(p / "x.npy", np.ones(2, np.longdouble)), p / "x.npy")[1],
            "expected a tensor",
        ),
        (lambda p: flipped(p / "x.npz"), r"x\.npz: x is cut, damaged or of another kind \(Bad CRC"),
        (lambda p: cut(p / "x.pt"), r"x\.pt: is cut, damaged or of another kind"),
        (
            lambda p: (np.savez(p / "x.npz", note=np.array("text")), p / "x.npz")[1],
            r"x\.npz: note is .*got <U4",
        ),
        (
            lambda p: (torch.save({"x": {1, 2}}, p / "x.pt"), p / "x.pt")[1],
            "x: expected tensors, by name or in a list, got a set",
        ),
        (lambda p: (torch.save({"x": "text"}, p / "x.pt"), p / "x.pt")[1], "holds no tensor"),
        (lambda p: os.mkfifo(p / "x.npy") or p, "got no regular file"),
        (
            lambda p: (np.savez(p / "x.npz", a=np.array([None])), p / "x.npz")[1],
            r"x\.npz: a is cut, damaged or of another kind \(Object arrays",
        ),
        (
            lambda p: (torch.save(torch.nn.Linear(2, 2), p / "x.pt"), p / "x.pt")[1],
            r"x\.pt: expected tensors alone, .* got what torch\.load\(weights_only=True\) refuses",
        ),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, make, message):
    made = make(tmp_path)
    with pytest.raises(UsageError, match=message) as raised:
        [*map(open_dump(made).read, open_dump(made).names)]
    assert str(raised.value).isprintable()


def test_clashing_files_and_bad_metadata_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(1))
    for text, message in (
        ("[1]", "expected an object, got a list"),
        ("{", "is cut, damaged or of another kind"),
        ("[" * 100000, "is cut, damaged or of another kind"),
    ):
        (tmp_path / "metadata.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            open_dump(tmp_path)
    (tmp_path / "metadata.json").write_text('{"order": [1]}')
    with pytest.raises(UsageError, match="metadata 'order': expected a list of names"):
        open_dump(tmp_path)
    (tmp_path / "metadata.json").write_text('{"order": {"x": 1}}')
    with pytest.raises(UsageError, match="metadata 'order': expected JSON, a list"):
        open_dump(tmp_path)
    for said in (1, {"inputs": "y"}, {"inputs": [1]}, {"K": "8"}, {"K": True}, {"K": 10**400}):
        (tmp_path / "metadata.json").write_text(json.dumps({"steps": {"x": said}}))
        with pytest.raises(UsageError, match=r"metadata 'steps', 'x': expected inputs.*got"):
            open_dump(tmp_path)
    (tmp_path / "metadata.json").unlink()
    torch.save(torch.ones(1), tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"expected one file a step, got x\.npy and x\.pt"):
        open_dump(tmp_path)


def test_a_precision_in_a_file_is_typed_and_prose_is_text(tmp_path):
    path = tmp_path / "t.safetensors"
    said = {
        "precision": '{"storage": "bfloat16", "steps": {"x": {"products": "tf32"}}}',
        "dtype_note": "fp16 was tried",
    }
    save_file({"x": torch.ones(1)}, path, said)
    assert open_dump(path).precision == Precision("bfloat16", steps={"x": {"products": "tf32"}})
    assert open_dump(path).texts == {"dtype_note": "fp16 was tried"}
    save_file({"x": torch.ones(1)}, path, {"precision": '{"storage": "bf17"}'})
    with pytest.raises(UsageError, match=r"expected one of float64.*got storage='bf17'"):
        open_dump(path).precision  # noqa: B018


def test_a_folder_with_one_file_of_all_is_that_file(tmp_path):
    Trace({"x": torch.ones(2)}).save(tmp_path / "all.safetensors")
    assert open_dump(tmp_path).names == ["x"]


def test_metadata_that_are_no_json_are_refused(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors", {"order": "x first"})
    with pytest.raises(UsageError, match="metadata 'order': expected JSON, a list"):
        open_dump(tmp_path / "x.safetensors")


def test_what_is_not_read_is_shown_and_changes_nothing(tmp_path):
    said = {"x": {"op": "input", "inputs": []}, "y": {"inputs": ["x"], "op": 5, "inputs_complete": "no", "K": 4}}
    tensors = {"x": torch.ones(2), "y": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors", {"steps": json.dumps(said), "compute": "bf16"})
    dump = open_dump(tmp_path / "x.safetensors")
    assert dump.texts == {"steps": "inputs_complete, op: not read", "compute": "bf16"}
    assert (
        dump.step_metadata("x")["inputs"],
        dump.step_metadata("y")["inputs"],
        dump.step_metadata("y")["K"],
        dump.step_metadata("z"),
    ) == (
        [],
        ["x"],
        4,
        {},
    )


def test_a_malformed_precision_names_the_file(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors", {"precision": '{"storag": "bfloat16"}'})
    with pytest.raises(
        UsageError, match=r"x\.safetensors: metadata precision: expected the fields storage, .*, got 'storag'"
    ):
        open_dump(tmp_path / "x.safetensors").precision  # noqa: B018
