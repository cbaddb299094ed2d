"""The files of data/examples: they are what make.py makes, and `whywrong diff` says of them what their README shows."""

import re
import runpy
import shutil

import pytest
import torch

import whywrong
from labkit.session.catalogue import ROOT
from whywrong.reporting.command import main

FOLDER = ROOT / "data" / "examples"
FILES = ("attention_golden", "attention_right", "attention_wrong", "race_1", "race_2")
SHOWN = re.findall(r"(?ms)^    \$ whywrong diff (.*?)\n(.*?)^    exit (\d)", (FOLDER / "README.md").read_text())
"""The arguments, the output and the exit status of each command that the README shows."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    runpy.run_path(str(FOLDER / "make.py"))["make"](folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_what_the_script_makes(made, name):
    stored, again = (whywrong.load(folder / f"{name}.safetensors") for folder in (FOLDER, made))
    assert stored.names == again.names
    for step in stored.names:
        tolerance = 2.0**-7 if stored[step].dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(again[step], stored[step], rtol=tolerance, atol=tolerance)


def test_the_files_are_small_and_no_others_are_there():
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.safetensors")}
    assert set(sizes) == {f"{name}.safetensors" for name in FILES}
    assert max(sizes.values()) < 60_000


def words(text):
    """A text without its numbers, rules and line breaks, which the width of a column moves."""
    return re.sub(r"[-\d.e+]*\d[-\d.e+]*|-{3,}|\s+", " ", text).split()


@pytest.mark.parametrize(("arguments", "output", "status"), SHOWN, ids=[shown[0].split()[-1] for shown in SHOWN])
def test_the_readme_shows_what_the_command_says(arguments, output, status, tmp_path, monkeypatch, capsys):
    for name in FILES:
        shutil.copy(FOLDER / f"{name}.safetensors", tmp_path)
    monkeypatch.chdir(tmp_path)
    code = main(["diff", *arguments.split()])
    assert code == int(status)
    assert words(capsys.readouterr().out) == words(output)


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_why_is_asked_of_a_golden_that_is_not_recorded(more, capsys):
    files = [str(FOLDER / f"attention_{name}.safetensors") for name in ("wrong", "right")]
    assert main(["diff", *files, *more]) == 1
    shown = capsys.readouterr().out
    assert main(["diff", *files, *more, "--explain"]) == 1
    said = capsys.readouterr()
    assert said.out == shown
    assert said.err.startswith(f"--explain: {files[0]} has steps alone; expected a recorded golden: whywrong.golden(")
    assert said.err.count("\n") == 1
    assert main(["diff", files[0], files[0], "--explain"]) == 0
    assert not capsys.readouterr().err


def test_the_readme_shows_a_fault_a_right_program_and_a_race():
    assert [status for *_, status in SHOWN] == ["1", "0", "1"]
    assert "first divergence: merged" in SHOWN[0][1]
    assert "a race or an uninitialised read" in " ".join(SHOWN[2][1].split())
