import subprocess
import sys

import pytest

from labkit.cli.main import main
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.device import decide
from labkit.session.record import stale


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["attention_matmul", "-p", "head=3"],
            "parameter head: attention_matmul has none of that name; did you mean heads?",
        ),
        (["attention_matmul", "-p", "heads=three"], "parameter heads: 'three' is not right; wanted int in [1, 128]"),
        (["attention_matmul", "-p", "heads=0"], "parameter heads: 0 is not right"),
        (["attention_matmul", "-p", "heads=-1"], "parameter heads: -1 is not right"),
        (["attention_matmul", "-p", "heads"], "-p: 'heads' is not right; wanted name=value"),
        (["no_such_notebook"], "no notebook is called 'no_such_notebook'; there are: attention_matmul"),
        (["--jobs", "0"], "argument --jobs: '0' is not right; wanted a whole number from 1"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["attention_matmu"], "did you mean attention_matmul?"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, message):
    out = tmp_path / "runs"
    assert main(["run", *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_file_where_the_runs_should_go_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["run", "attention_matmul", "--out", str(tmp_path / "file")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.skipif(decide().is_cuda, reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path, capsys):
    for arguments in (["--device", "cuda"], ["-p", "device=cuda"]):
        assert main(["run", "attention_matmul", *arguments, "--out", str(tmp_path / "runs")]) == 2
        assert "device: 'cuda' was asked for, and torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_list_shows_questions_parameters_and_ranges(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name, book in notebooks().items():
        assert f"{name}: {book.about['question']}" in shown
    assert "int in [1, 128]" in shown


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
