"""`labkit run` against the ways in which a headless notebook can look finished without being so."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from labkit.cli import run
from labkit.session.catalogue import ROOT

START = 'import labkit\nlab = labkit.start("{name}", heads=heads, scale=scale, device=device)'
FINISH = "lab.finish(verdict=None)"
FORGED = """
import json
lab.finish(verdict=None)
forged = lab._result.read_text()
lab._result.unlink()
(lab.directory / "result.json").write_text(forged)
(lab.directory / "result.0123456789abcdef.json").write_text(forged)
"""
PARAMETERS = """
heads: int = 12  # [1, 128] number of heads
scale: float = 1e-05  # [0, 1] YAML reads a number without a point as a word
device: str = "cpu"  # {auto, cpu, cuda} where kernels run
"""


@pytest.fixture
def books(tmp_path, monkeypatch):
    """A folder of notebooks of this test's own; `add(name, *cells)` writes one."""
    folder = tmp_path / "books"
    folder.mkdir()
    monkeypatch.setenv("LABKIT_NOTEBOOKS", str(folder))

    def add(name, *cells):
        book = nbformat.v4.new_notebook()
        book.cells = [nbformat.v4.new_code_cell(source) for source in (PARAMETERS, START.format(name=name), *cells)]
        book.cells[0].metadata["tags"] = ["parameters"]
        book.metadata = {"kernelspec": {"name": "python3", "display_name": "p", "language": "python"}}
        nbformat.write(book, folder / f"{name}.ipynb")

    return add


def labkit_run(*arguments, **options):
    """Start the command in a session of its own, so that all of it can be killed, and so that it heeds an interrupt.

    What a shell starts in the background ignores it, and hands that on.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "labkit", "run", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}, **options,
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def planned(name, out, **parameters):
    return run.plan([name], {key: str(value) for key, value in parameters.items()}, "cpu", out)


def test_a_finished_run_has_its_four_files_and_is_not_repeated(books, tmp_path):
    books("good", FINISH)
    out = tmp_path / "runs"
    assert finish(labkit_run("good", "--out", out, "-p", "heads=3"))[0] == 0
    (folder,) = (out / "good").iterdir()
    assert {"notebook.ipynb", "result.json", "report.html", "log.txt"} <= {path.name for path in folder.iterdir()}
    result = json.loads((folder / "result.json").read_text())
    assert (result["schema"], result["status"], result["notebook"]) == (1, "ok", "good")
    assert result["parameters"] == {"heads": 3, "scale": 1e-05, "device": "cpu"}
    assert result["provenance"]["versions"]["torch"]
    assert set(result["provenance"]["sources"]) == {"notebook", "labkit"}
    code, said, _ = finish(labkit_run("good", "--out", out, "-p", "heads=3"))
    assert code == 0
    assert "reused" in said


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", FINISH], "the kernel was killed by SIGKILL"),
        (["import sys; sys.exit(0)", FINISH], "without lab.finish"),
        (["raise ValueError('the cell\\nsays why')", FINISH], "cell 4: ValueError: the cell says why"),
        ([FINISH, "raise ValueError('after the end')"], "cell 5: ValueError: after the end"),
        ([FINISH, "import sys; sys.exit(0)", "1 / 0"], "cell 6 did not complete"),
        (["import os; os._exit(3)", FINISH], "the kernel ended with exit status 3"),
        ([FORGED], "without lab.finish"),
    ],
    ids=["killed", "sys.exit", "error", "error after finish", "sys.exit after finish", "exit status", "forged"],
)
def test_a_run_that_did_not_finish_is_a_failure(books, tmp_path, cells, reason):
    books("bad", *cells)
    (one,) = runs = planned("bad", tmp_path / "runs")
    run.run(runs, say=lambda text: None)
    assert one.result is None
    assert re.search(f"failed: .*({reason}).*; see .*log.txt", one.status), one.status
    assert not (one.directory / "result.json").exists()
    assert (one.directory / "report.html").exists()


def test_a_run_cut_off_half_way_is_taken_up_again(books, tmp_path):
    flag, out = tmp_path / "flag", tmp_path / "runs"
    books("slow", f"import pathlib, time\nif not pathlib.Path({str(flag)!r}).exists(): time.sleep(600)", FINISH)
    process = labkit_run("slow", "--out", out)
    deadline = time.monotonic() + 120
    while not list(out.glob("slow/*/notebook.ipynb")) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(out.glob("slow/*/result.json"))
    flag.touch()
    assert finish(labkit_run("slow", "--out", out))[0] == 0
    assert len(list(out.glob("slow/*/result.json"))) == 1


def test_two_commands_in_one_folder_make_one_run(books, tmp_path):
    count = tmp_path / "count"
    books("once", f"import time; time.sleep(2); open({str(count)!r}, 'a').write('x')", FINISH)
    both = [labkit_run("once", "--out", tmp_path / "runs") for _ in range(2)]
    codes, said = zip(*[finish(process)[:2] for process in both], strict=True)
    assert codes == (0, 0)
    assert count.read_text() == "x"
    assert sum("reused" in text for text in said) == 1


def test_two_notebooks_run_side_by_side(books, tmp_path):
    for name in ("left", "right"):
        books(name, FINISH)
    code, said, _ = finish(labkit_run("--jobs", 2, "--out", tmp_path / "runs"))
    assert code == 0
    assert said.count(" ok ") >= 2


def test_one_failure_among_runs_fails_the_command_and_keeps_the_rest(books, tmp_path):
    books("good", FINISH)
    books("bad", "1 / 0")
    code, said, _ = finish(labkit_run("--jobs", 2, "--out", tmp_path / "runs"))
    assert code == 1
    assert len(list((tmp_path / "runs").glob("*/*/result.json"))) == 1
    assert "ZeroDivisionError" in said


def test_a_kernel_that_did_not_start_is_started_once_more(books, tmp_path, monkeypatch):
    real, calls = run._python, []

    async def python(words, *rest):
        calls.append(words[0])
        failed = "RuntimeError: Kernel died before replying to kernel_info"
        return failed if len(calls) == 1 else await real(words, *rest)

    monkeypatch.setattr(run, "_python", python)
    books("good", FINISH)
    (one,) = runs = run.plan(["good"], {}, "cpu", tmp_path / "runs")
    run.run(runs, jobs=1, say=lambda text: None)
    assert one.result, one.status
    assert len(calls) == 2


def test_the_run_id_depends_on_parameters_and_code(books, tmp_path):
    books("good", FINISH)
    first, other = planned("good", tmp_path)[0].directory, planned("good", tmp_path, heads=3)[0].directory
    books("good", FINISH + "  # changed")
    assert len({first, other, planned("good", tmp_path)[0].directory}) == 3
    assert planned("good", tmp_path)[0].directory == planned("good", tmp_path, heads=12)[0].directory


@pytest.mark.parametrize(("names", "given", "share"), [(["a", "b"], "", 4), (["a"], "", 8), (["a"], "2", 2)])
def test_each_job_is_held_to_its_share_of_the_cores_or_to_less_if_told(
    books, tmp_path, monkeypatch, names, given, share
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    for variable in run.THREAD_VARIABLES:
        monkeypatch.setenv(variable, given)
    for name in names:
        books(name, f"import os; assert os.environ['OMP_NUM_THREADS'] == '{share}'", FINISH)
    runs = run.plan(names, {}, "cpu", tmp_path / "runs")
    run.run(runs, jobs=2, say=lambda text: None)
    assert all(one.result for one in runs), [one.status for one in runs]


def test_an_interrupt_ends_what_runs_and_what_waits(books, tmp_path):
    pid = tmp_path / "pid"
    books("slow", f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)", FINISH)
    first = labkit_run("slow", "--out", tmp_path / "runs")
    deadline = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    waiting = labkit_run("slow", "--out", tmp_path / "runs")
    while "waiting for it" not in waiting.stdout.readline():
        assert waiting.poll() is None
    for process in (waiting, first):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "interrupted" in process.stderr.read()
    while os.path.exists(f"/proc/{pid.read_text()}") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert time.monotonic() < deadline, "the notebook's kernel lives on"
    assert not list(tmp_path.glob("runs/slow/*/result.json"))


def test_a_notebook_that_does_not_pass_every_parameter_on_is_refused(books, tmp_path):
    books("forgets", FINISH)
    path = tmp_path / "books" / "forgets.ipynb"
    path.write_text(path.read_text().replace("heads=heads, ", ""))
    (one,) = runs = planned("forgets", tmp_path / "runs")
    run.run(runs, say=lambda text: None)
    assert "forgets declares heads too" in one.status


def test_a_result_needs_the_ledger_of_the_notebooks_own_claims(books, tmp_path):
    books("attention_matmul", FINISH)
    (one,) = runs = planned("attention_matmul", tmp_path / "runs")
    run.run(runs, say=lambda text: None)
    assert "ledger: None is not right; wanted labkit.claims('attention_matmul')" in one.status
    assert not (one.directory / "result.json").exists()


def test_the_table_counts_the_claims_as_the_notebook_does(books, tmp_path):
    books("good", FINISH)
    (one,) = runs = planned("good", tmp_path)
    claims = {"a": {"kind": "implied", "verdict": "refuted"}, "b": {"kind": "ours", "verdict": "confirmed"}}
    one.result = {"verdict": {"cause": "found"}, "claims": claims, "seconds": 1.0}
    assert "1 confirmed, 1 refuted" in str(run.table(runs))


def test_a_page_leaves_out_glue_and_says_what_a_figure_shows(tmp_path):
    from labkit.cli.execute import HIDDEN, as_page

    alt = {"image/png": {"alt": "A row of bars"}}
    picture = nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo="}, metadata=alt)
    cells = [
        nbformat.v4.new_code_cell("import glue", metadata={"tags": [HIDDEN]}),
        nbformat.v4.new_code_cell("draw()", outputs=[picture]),
    ]
    path = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    page = as_page(path)
    assert "glue" not in page
    assert 'alt="A row of bars"' in page
