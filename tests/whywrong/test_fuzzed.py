"""`whywrong fuzz` and `@whywrong.fuzzed`, as people and programs call them."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch

import whywrong
from labkit.session.catalogue import ROOT
from whywrong.reporting.command import main
from whywrong.reporting.fuzzed import FuzzedError

PORT = """
import torch

def reference(x, gain):
    return torch.softmax(x, -1) * gain

def right(x, gain):
    return torch.softmax(x, -1) * gain

def wrong(x, gain):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True) * gain

def example():
    return {"x": torch.randn(4, 9), "gain": torch.randn(9)}
"""
TESTS = """
import whywrong
from port_of_softmax import example, reference, right, wrong

@whywrong.fuzzed(reference, example, examples=40, most=1 << 10)
def test_right(x, gain):
    return right(x, gain)

@whywrong.fuzzed(reference, example, examples=40, most=1 << 10)
def test_wrong(x, gain):
    return wrong(x, gain)

@whywrong.fuzzed(reference, example, examples=3)
def test_hardly(x, gain):
    return right(x, gain)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "port_of_softmax.py").write_text(PORT)
    np.savez(tmp_path / "inputs.npz", x=np.ones((4, 9), np.float32), gain=np.ones(9, np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    yield tmp_path
    sys.modules.pop("port_of_softmax", None)


def fuzz(kernel, *more, example="inputs.npz"):
    file = "port_of_softmax.py"
    return main(["fuzz", f"{file}::{kernel}", f"{file}::reference", "--example", example, "--most", "1024", *more])


@pytest.mark.long
def test_the_exit_code_says_what_was_found(folder, capsys):
    assert fuzz("right") == 0
    assert "right: no failure found\n  50 tried" in capsys.readouterr().out
    assert fuzz("wrong", "--script", "test_it.py") == 1
    assert "output: own error: 1 NaN" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="1 NaN"):
        runpy.run_path("test_it.py")["test_wrong"]()
    assert fuzz("right", "--examples", "3", "--json", example="port_of_softmax.py::example") == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["found"], said["passed"], said["examples"], said["ended"]) == (None, False, 3, "3 cases, as asked")


@pytest.mark.long
def test_a_failure_as_json_and_all_options(folder, capsys):
    asked = "--seconds 60 --seed 3 --sizes x=rows,columns --sizes gain=columns --forms gain=sorted --layouts contiguous"
    assert fuzz("wrong", "--json", "--precision", "storage=float32", *asked.split()) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["inputs"] == "x: float32 [1, 1]; gain: float32 [1]"
    assert said["numbers"] == "at (0, 0): nan for 1"
    assert "1 NaN" in said["failure"]
    assert fuzz("right", "--sizes", "x=rows,columns*3", "--sizes", "gain=columns*3") == 0
    assert "sizes (your example's): columns 1 to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["port_of_softmax.py::rigth", "port_of_softmax.py::reference"], "has no 'rigth'; did you mean right?"),
        (
            ["port_of_softmax.py", "port_of_softmax.py::reference"],
            "kernel: expected FILE.py::NAME, got 'port_of_softmax",
        ),
        (["none.py::right", "port_of_softmax.py::reference"], "kernel: expected a file, and there is no none.py"),
        (["port_of_softmax.py::right"] * 2 + ["--sizes", "x"], "--sizes: expected ARGUMENT=..., got 'x'"),
        (["port_of_softmax.py::right"] * 2 + ["--sizes", "x=n*m"], "--sizes: expected NAME*MULTIPLE, got 'n*m'"),
        (["port_of_softmax.py::right"] * 2 + ["--sizes", "y=n"], "sizes: expected a length, a name"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line_and_2(folder, capsys, words, line):
    assert main(["fuzz", *words, "--example", "inputs.npz"]) == 2
    shown = capsys.readouterr().err.strip()
    assert line in shown
    assert "\n" not in shown


def test_a_fuzzed_function_is_a_test_without_arguments_and_still_the_kernel():
    @whywrong.fuzzed(torch.neg, (torch.ones(3),), examples=30, most=64)
    def kernel(x):
        return -x * (1 + (x.numel() > 5))

    assert kernel(torch.ones(2)).tolist() == [-1.0, -1.0]
    with pytest.raises(FuzzedError, match="own error") as error:
        kernel()
    assert list(error.value.report.failure.inputs[0].shape) == [7]


@pytest.mark.long
def test_pytest_shows_the_failure_and_a_test_of_it_and_imports_torch_for_fuzzed_tests_alone(folder):
    (folder / "test_tests.py").write_text(TESTS)
    (folder / "test_other.py").write_text("import sys\ndef test_none():\n    assert 'torch' not in sys.modules\n")
    plugin = ["-p", "no:whywrong", "-p", "whywrong.reporting.pytest_plugin"]  # once, installed or not
    plugin += ["-p", "no:xdist", "-p", "no:cacheprovider", "-q"]
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    how = {"capture_output": True, "text": True, "cwd": folder, "env": environment, "timeout": 300}
    alone = subprocess.run([sys.executable, "-m", "pytest", *plugin, "test_other.py"], **how)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    shown = subprocess.run([sys.executable, "-m", "pytest", *plugin, "test_tests.py"], **how).stdout
    assert "1 passed" in shown
    assert "2 failed" in shown
    assert "test_wrong: output: own error: 1 NaN, first at (0, 0); wrong elements are NaN\n" in shown
    assert "\n  at (0, 0): nan for 1\n  x: float32 [1, 1]" in shown
    assert "test_hardly: no failure found, but it was hardly searched" in shown
    assert "- a test of this failure -" in shown
    assert "from test_tests import test_wrong as kernel" in shown
    assert "def test_wrong():" in shown
    assert "Traceback" not in shown
    assert "fuzz.py:" not in shown
