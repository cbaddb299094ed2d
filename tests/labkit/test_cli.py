import json
import re
import subprocess
import sys

import pytest

from labkit.cli import doctor
from labkit.cli.main import main
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.device import decide
from labkit.session.record import records, stale

TOKEN = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["attention_matmul", "-p", "head=3"],
            "parameter head: attention_matmul has none of that name; did you mean heads?",
        ),
        (["attention_matmul", "-p", "heads=three"], "parameter heads: expected int in [1, 128], got 'three'"),
        (["attention_matmul", "-p", "heads=0"], "parameter heads: expected int in [1, 128], got 0"),
        (["attention_matmul", "-p", "heads=-1"], "parameter heads: expected int in [1, 128], got -1"),
        (["attention_matmul", "-p", "heads"], "argument -p: expected name=value, got 'heads'"),
        (["no_such_notebook"], "no notebook is called 'no_such_notebook'; there are: attention_matmul"),
        (["--jobs", "0"], "argument --jobs: expected a whole number from 1, got '0'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["attention_matmu"], "did you mean attention_matmul?"),
        (["--explian"], "unrecognized arguments: --explian; labkit run --help shows what there is"),
        (["x" * 300], "no notebook is called"),
        (["attention_matmul", "-p", "x" * 300 + "=3"], "attention_matmul has none of that name"),
        (["attention_matmul", "-p", "heads=3", "-p", "heads=4"], "-p heads: it is given twice"),
        (["attention_matmul", "-p", "device=auto", "--device", "cpu"], "-p device=auto against --device cpu"),
        (["attention_matmul", "-p", "heads=\udcff"], "an argument has bytes that are no UTF-8"),
        (["attention_matmul", "-p", "heads=1_2"], "parameter heads: expected int in [1, 128], got '1_2'"),
        (["attention_matmul", "-p", f"heads={TOKEN}"], "parameter heads: it looks like a secret"),
        (["attention_matmul", "-p", f"{TOKEN}=3"], "parameter <secret>: "),
        (["attention_matmul", "-p", TOKEN], "argument -p: expected name=value, got '<secret>'"),
        ([TOKEN], "no notebook is called '<secret>'"),
        (["\x1b[2Jname"], "no notebook is called '\\x1b[2Jname'"),
        (["--jobs", "\uff11"], "expected a whole number from 1"),
        (["--jobs", "9" * 5000], "argument --jobs"),
        (["--timeout", "0"], "argument --timeout: expected a whole number from 1, got '0'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, message):
    out = tmp_path / "runs"
    assert main(["run", *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert TOKEN not in error
    assert not out.exists()


@pytest.mark.parametrize("path", ["file", "file/below", "x" * 300])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys, path):
    (tmp_path / "file").touch()
    out = str(tmp_path / path)
    for command in (
        ["run", "start_here", "--device", "cpu", "--out", out],
        ["bench", "compare", "--device", "cpu", "--out", out],
    ):
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert re.search(r"labkit: --\w+: .* cannot be written \(.*\)", error), error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def books(folder, monkeypatch, **texts):
    monkeypatch.setenv("LABKIT_NOTEBOOKS", str(folder))
    for name, text in texts.items():
        (folder / f"{name}.ipynb").write_text(text, errors="surrogateescape")


def test_nothing_to_run_is_an_error(tmp_path, monkeypatch, capsys):
    books(tmp_path, monkeypatch)
    assert main(["run", "--out", str(tmp_path / "runs")]) == 2
    assert "there are no notebooks here" in capsys.readouterr().err


def test_corrupt_notebooks_are_a_line_each_and_the_others_are_listed(tmp_path, monkeypatch, capsys):
    good = {"cells": [], "metadata": {"labkit": {"question": "Is it\x1b[2J right?", "answer": 3}}}
    cell = {"cell_type": "code", "source": "heads: int = ", "metadata": {"tags": ["parameters"]}}
    corrupt = {
        "empty": "", "half": '{"cells": [', "deep": "[" * 100_000, "list": "[]", "number": "3", "bare": "{}",
        "bytes": "\udcff", "cells": '{"cells": [3], "metadata": {}}', 
        "about": '{"cells": [], "metadata": {"labkit": 3}}',
        "source": '{"cells": [{"cell_type": "code", "source": 3, "metadata": {}}], "metadata": {}}',
        "python": json.dumps({"cells": [cell], "metadata": {}}),
    }  # fmt: skip
    books(tmp_path, monkeypatch, **corrupt, zz=json.dumps(good))
    assert main(["list"]) == 2
    shown, error = capsys.readouterr()
    assert "zz\n  Is it\\x1b[2J right?\n" in shown
    assert sorted(error.splitlines()) == sorted(line for line in error.splitlines() if line.startswith("labkit: "))
    assert len(error.splitlines()) == len(corrupt)
    for name in corrupt:
        assert main(["run", name, "--device", "cpu", "--out", str(tmp_path / "runs")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_list_is_80_columns_wide_and_aligned(capsys):
    assert main(["list", *notebooks()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, book in notebooks().items():
        start = lines.index(name)
        block = lines[start : lines.index("", start)]
        joined = " ".join(" ".join(block).split())
        for part in ("question", "answer"):
            assert f"{part} {book.about[part]}" in joined
        for found in records(f"{name}.*"):
            assert f"on {found.result['device']['name']}, {found.result['seconds']:.0f} s" in joined
        firsts = [line for line in block if line.startswith("    ") and line[4] != " "]
        assert [line.split()[0] for line in firsts] == list(book.parameters)
        width = max(map(len, book.parameters)) + 6
        assert all(line[width - 1] == " " != line[width] for line in firsts)


def test_help_has_examples_and_the_parameters_of_a_notebook_that_is_named(capsys):
    for words in (["run"], ["bench"], ["record"], ["new"], ["list"], ["doctor"], ["run", "start_here"]):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert f"examples:\n  labkit {words[0]}" in shown
        assert max(map(len, shown.splitlines())) <= 80
        assert ("seed of" in shown) == (words[1:] == ["start_here"])


def test_a_full_device_is_one_line():
    with open("/dev/full", "w") as full:
        shown = subprocess.run(
            [sys.executable, "-m", "labkit", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert shown.returncode == 2
    assert shown.stderr == "labkit: OSError: [Errno 28] No space left on device (LABKIT_TRACEBACK=1 shows where)\n"


@pytest.mark.skipif(decide().is_cuda, reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path, capsys):
    for arguments in (["--device", "cuda"], ["-p", "device=cuda"]):
        assert main(["run", "attention_matmul", *arguments, "--out", str(tmp_path / "runs")]) == 2
        assert "device: 'cuda' was asked for, and torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_list_shows_questions_and_of_named_ones_parameters_and_ranges(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name, book in notebooks().items():
        assert f"{name}\n  {book.about['question'][:40]}" in shown
    assert "int in [1, 128]" not in shown
    assert main(["list", "attention_matmul"]) == 0
    assert "int in [1, 128]" in capsys.readouterr().out
    assert main(["list", "nothing"]) == 2
    assert "no notebook is called 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["list"]])
def test_help_and_list_import_nothing_heavy(arguments):
    code = (
        f"import sys; from labkit.cli.main import main\ntry: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'triton', 'matplotlib', 'papermill'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_record_wants_the_folder_of_a_finished_run(tmp_path, capsys):
    assert main(["record", str(tmp_path)]) == 2
    assert "holds no result.json" in capsys.readouterr().err


def test_bench_wants_a_known_name(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "no notebook is called 'nothing'" in capsys.readouterr().err


@pytest.mark.long
def test_doctor_says_what_runs_where(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "Triton interpreted" in shown
    assert shown.splitlines()[-1].endswith("records are not up to date" if stale() else "all is well")


def test_a_reader_that_leaves_early_gets_no_traceback():
    shown = subprocess.run(
        f"{sys.executable} -m labkit list | head -1", shell=True, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert shown.stderr == ""
    assert shown.stdout.startswith("attention_matmul")


def test_doctor_distinguishes_pypis_labkit_from_this_one_by_its_path(tmp_path, monkeypatch):
    assert not any("labkit" in problem for problem in doctor.problems())
    (tmp_path / "labkit-1.0.dist-info").mkdir()
    (tmp_path / "labkit-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: labkit\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = (problem for problem in doctor.problems() if "labkit" in problem)
    expected = f"the unrelated PyPI package `labkit` is installed, in {tmp_path / 'labkit'}: `pip uninstall labkit`"
    assert problem == expected
    monkeypatch.setattr(doctor, "ROOT", tmp_path)  # a distribution of that name whose folder is the checkout's
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit" / "pyproject.toml").touch()
    assert not any("labkit" in problem for problem in doctor.problems())


def test_doctor_reports_a_labkit_that_is_imported_from_elsewhere_than_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert f"labkit: expected to be imported from the checkout, got {tmp_path / 'labkit'}" in "\n".join(
        doctor.problems()
    )
