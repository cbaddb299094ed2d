"""Traces on disk and in memory."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from labkit import Trace
from labkit.errors import UsageError
from labkit.trace.dumps import natural, open_dump


def test_what_is_saved_is_loaded(tmp_path):
    trace = Trace(about={"compute": "fp32 accumulate"})
    trace.add("zeta", torch.arange(6.0).reshape(2, 3).T)
    trace.add("alpha", np.float32(2.5))
    trace.add("beta", torch.ones(2, dtype=torch.bfloat16), ("zeta", "alpha"), about={"op": "matmul", "K": 3})
    path = trace.save(tmp_path / "t.safetensors")
    back = Trace.load(path)
    assert back.names == ["zeta", "alpha", "beta"]
    assert torch.equal(back["zeta"], trace["zeta"])
    assert back["beta"].dtype == torch.bfloat16
    assert back.step("beta").inputs == ("zeta", "alpha")
    assert back.step("beta").about == {"op": "matmul", "K": 3}
    assert back.about["compute"] == "fp32 accumulate"
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_metadata_are_strings_as_any_language_reads_them(tmp_path):
    trace = Trace()
    trace.add("x", torch.ones(1), about={"op": "add bias", "inputs_complete": False, "dtype": "float32"})
    with safe_open(trace.save(tmp_path / "t.safetensors"), "np") as file:
        said = file.metadata()
    assert json.loads(said["order"]) == ["x"]
    assert json.loads(said["steps"]) == {"x": {"op": "add bias", "inputs_complete": False, "dtype": "float32"}}


@pytest.mark.parametrize(
    ("about", "message"),
    [({"K": "3"}, "K='3' of step 'x' is not right"), ({"colour": "red"}, "colour='red' of step 'x' is not right")],
)
def test_metadata_of_the_wrong_kind_are_refused_and_nothing_is_written(tmp_path, about, message):
    trace = Trace()
    trace.add("x", torch.ones(1), about=about)
    with pytest.raises(UsageError, match=message):
        trace.save(tmp_path / "t.safetensors")
    assert not list(tmp_path.iterdir())


def test_without_an_order_names_sort_as_people_sort():
    assert sorted(["s10", "s9", "s1a", "s1"], key=natural) == ["s1", "s1a", "s9", "s10"]


def test_an_order_that_is_wrong_or_short_loses_no_step(tmp_path):
    save_file({n: torch.ones(1) for n in ("a", "b", "c")}, tmp_path / "t.safetensors", {"order": '["c", "zz", "c"]'})
    assert open_dump(tmp_path / "t.safetensors").names == ["c", "a", "b"]
    save_file({n: torch.ones(1) for n in ("b", "a")}, tmp_path / "u.safetensors", {"order": "not json", "steps": "[1]"})
    dump = open_dump(tmp_path / "u.safetensors")
    assert (dump.names, dump.step("a")) == (["a", "b"], {})


def test_a_dump_reads_one_step_at_a_time(tmp_path, monkeypatch):
    read = []
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.ones(3))
    from labkit.trace import dumps

    load = dumps._load
    monkeypatch.setattr(dumps, "_load", lambda path: read.append(path.stem) or load(path))
    dump = open_dump(tmp_path)
    assert read == []
    dump.read("b")
    assert read == ["b"]


def test_a_state_dict_in_one_file_is_a_trace(tmp_path):
    torch.save({"layers": {"0": torch.ones(2)}, "head": torch.zeros(1), "epoch": 3}, tmp_path / "m.pt")
    dump = open_dump(tmp_path / "m.pt")
    assert dump.names == ["head", "layers.0"]
    assert dump.read("layers.0").tolist() == [1.0, 1.0]
