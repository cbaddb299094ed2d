"""`labkit run` against the ways in which a headless notebook can look finished without being so."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas
import pytest

from labkit.cli import plan, run, table
from labkit.cli.main import main
from labkit.cli.pages import Card
from labkit.session.catalogue import ROOT, Notebook
from labkit.session.claims import answer
from labkit.session.device import cpu_name
from labkit.session.record import records, sealed
from whywrong.files import complete_file

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


def labkit_run(*arguments, preexec=lambda: None, **options):
    """Start the command in a session of its own, so that all of it can be killed, and so that it heeds an interrupt.

    What a shell starts in the background ignores it, and hands that on.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "labkit", "run", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), preexec()),
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}, **options,
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def planned(name, out, **parameters):
    return plan.plan([name], {key: str(value) for key, value in parameters.items()}, "cpu", out)


@pytest.mark.long
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
    assert set(result["provenance"]["sources"]) == {"notebook", "kernels", "labkit", "whywrong"}
    code, said, _ = finish(labkit_run("good", "--out", out, "-p", "heads=3"))
    assert code == 0
    assert "reused" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", FINISH], "the kernel was killed by SIGKILL"),
        (["import sys; sys.exit(0)", FINISH], "without lab.finish"),
        (["raise ValueError('the cell\\nsays why')", FINISH], "cell 4: ValueError: the cell says why"),
        ([FINISH, "raise ValueError('after the end')"], "cell 5: ValueError: after the end"),
        ([FINISH, "import sys; sys.exit(0)", "1 / 0"], "cell 5 did not complete"),
        (["import os; os._exit(3)", FINISH], "the kernel ended with exit status 3"),
        ([FORGED], "without lab.finish"),
    ],
    ids=["killed", "sys.exit", "error", "error after finish", "sys.exit after finish", "exit status", "forged"],
)
def test_a_run_that_did_not_finish_is_a_failure(books, tmp_path, cells, reason):
    books("bad", *cells)
    (one,) = runs = planned("bad", tmp_path / "runs")
    run.run(runs, progress=lambda text: None)
    assert one.result is None
    assert re.search(f"failed: .*({reason}).*; see .*log.txt", one.status), one.status
    assert not list(one.directory.rglob("result*.json"))
    assert (one.directory / "report.html").exists()


@pytest.mark.long
def test_a_run_cut_off_half_way_is_taken_up_again(books, tmp_path):
    flag, out = tmp_path / "flag", tmp_path / "runs"
    books("slow", f"import pathlib, time\nif not pathlib.Path({str(flag)!r}).exists(): time.sleep(600)", FINISH)
    process = labkit_run("slow", "--out", out)
    deadline = time.monotonic() + 120
    while not list(out.glob("slow/*/attempt/notebook.ipynb")) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(out.glob("slow/*/result.json"))
    flag.touch()
    assert finish(labkit_run("slow", "--out", out))[0] == 0
    assert len(list(out.glob("slow/*/result.json"))) == 1


@pytest.mark.long
def test_two_commands_in_one_folder_make_one_run(books, tmp_path):
    count = tmp_path / "count"
    books("once", f"import time; time.sleep(2); open({str(count)!r}, 'a').write('x')", FINISH)
    both = [labkit_run("once", "--out", tmp_path / "runs") for _ in range(2)]
    codes, said = zip(*[finish(process)[:2] for process in both], strict=True)
    assert codes == (0, 0)
    assert count.read_text() == "x"
    assert sum("reused" in text for text in said) == 1


@pytest.mark.slow
def test_two_notebooks_run_side_by_side(books, tmp_path):
    for name in ("left", "right"):
        books(name, FINISH)
    code, said, _ = finish(labkit_run("--jobs", 2, "--out", tmp_path / "runs"))
    assert code == 0
    assert said.count(" ok ") >= 2


@pytest.mark.long
def test_one_failure_among_runs_fails_the_command_and_keeps_the_rest(books, tmp_path):
    books("good", FINISH)
    books("bad", "1 / 0")
    code, said, _ = finish(labkit_run("--jobs", 2, "--out", tmp_path / "runs"))
    assert code == 1
    assert len(list((tmp_path / "runs").glob("*/*/result.json"))) == 1
    assert "ZeroDivisionError" in said


@pytest.mark.long
def test_a_kernel_that_did_not_start_is_started_once_more(books, tmp_path):
    calls = []

    async def execute(*rest):
        calls.append(rest)
        failed = "RuntimeError: Kernel died before replying to kernel_info"
        return failed if len(calls) == 1 else await run.execute(*rest)

    books("good", FINISH)
    (one,) = runs = plan.plan(["good"], {}, "cpu", tmp_path / "runs")
    run.run(runs, progress=lambda text: None, execute=execute)
    assert one.result, one.status
    assert len(calls) == 2


def test_the_run_id_depends_on_parameters_and_code(books, tmp_path):
    books("good", FINISH)
    first, other = planned("good", tmp_path)[0].directory, planned("good", tmp_path, heads=3)[0].directory
    books("good", FINISH + "  # changed")
    assert len({first, other, planned("good", tmp_path)[0].directory}) == 3
    assert planned("good", tmp_path)[0].directory == planned("good", tmp_path, heads=12)[0].directory


@pytest.mark.long
@pytest.mark.parametrize(("names", "given", "share"), [(["a", "b"], "", 3), (["a"], "", 4), (["a"], "2", 2)])
def test_each_job_is_held_to_its_share_of_the_cores_four_at_most_or_to_less_if_told(
    books, tmp_path, monkeypatch, names, given, share
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    for variable in run.THREAD_VARIABLES:
        monkeypatch.setenv(variable, given)
    for name in names:
        books(name, f"import os; assert os.environ['OMP_NUM_THREADS'] == '{share}'", FINISH)
    runs = plan.plan(names, {}, "cpu", tmp_path / "runs")
    run.run(runs, jobs=2, progress=lambda text: None)
    assert all(one.result for one in runs), [one.status for one in runs]


@pytest.mark.parametrize(("jobs", "order"), [(1, "abc"), (2, "bca")])
def test_of_several_at_a_time_the_longest_begins_first(books, tmp_path, monkeypatch, jobs, order):
    monkeypatch.setattr(run, "records", lambda name: [SimpleNamespace(result={"seconds": seconds[name[0]]})])
    seconds, begun = {"a": 1.0, "b": 3.0, "c": 2.0}, []
    for name in seconds:
        books(name, FINISH)

    async def execute(one, *rest):
        begun.append(one.book.name)
        return "not run"

    run.run(plan.plan([*seconds], {}, "cpu", tmp_path / "runs"), jobs, progress=lambda text: None, execute=execute)
    assert begun == [*order]


@pytest.mark.long
def test_a_run_that_a_cell_starts_shows_figures_and_no_widgets(books, tmp_path, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "explore.ipynb")
    books("a", "import os; assert 'JPY_SESSION_NAME' not in os.environ", FINISH)
    runs = plan.plan(["a"], {}, "cpu", tmp_path / "runs")
    run.run(runs, jobs=1, progress=lambda text: None)
    assert runs[0].result, runs[0].status


SLEEPS = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
open({path!r}, "w").write(f"{{os.getpid()}} {{os.getppid()}} {{child.pid}}")
time.sleep(600)
"""


def wait_for(what, why):
    deadline = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.1)
    return found


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_ends_the_command_ends_its_processes_and_frees_the_lock(books, tmp_path, number):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{signal.Signals(number).name} is ignored here, as under nohup, and by what is started from here")
    path, out = tmp_path / "pids", tmp_path / "runs"
    books("slow", SLEEPS.format(path=str(path)), FINISH)
    process = labkit_run("slow", "--out", out)
    kernel, executor, child = wait_for(lambda: path.exists() and path.read_text().split(), "no kernel")
    if number == signal.SIGINT:
        waiting = labkit_run("slow", "--out", out)
        line = wait_for(waiting.stdout.readline, "the second does not wait")
        assert f"waiting for it: process {process.pid} on " in line
        waiting.send_signal(number)
        assert finish(waiting)[0] == 130
    process.send_signal(number)
    if number == signal.SIGTERM:
        process.send_signal(signal.SIGINT)  # and a second one, at any moment of the first's work
    code, _, err = finish(process)
    if number != signal.SIGTERM:
        assert code == (-9 if number == signal.SIGKILL else 130)
        assert ("interrupted" in err) == (number != signal.SIGKILL)
    wait_for(lambda: not any(map(alive, (kernel, executor, child))), "they live on")
    assert not list(out.glob("slow/*/result.json"))
    with open(next(out.glob("slow/*/.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_second_interrupt_does_not_stop_what_the_first_ends(books, tmp_path, monkeypatch):
    """It came once while processes were killed: the command then waited at its end for one that slept."""
    path, kill = tmp_path / "pids", run._kill
    books("slow", SLEEPS.format(path=str(path)), FINISH)
    monkeypatch.setattr(run, "_kill", lambda process: (signal.raise_signal(signal.SIGINT), kill(process)))

    def first(*_):
        if path.exists() and path.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, first)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    with pytest.raises(KeyboardInterrupt):
        run.run(planned("slow", tmp_path / "runs"), progress=lambda text: None)
    signal.signal(signal.SIGALRM, before)
    wait_for(lambda: not any(map(alive, path.read_text().split())), "they live on")
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.long
def test_a_run_that_takes_too_long_is_ended_and_said_so(books, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", 'sagte"wörtlich')
    books("slow", "import os; print(os.environ['MY_TOKEN'])", "import time; time.sleep(600)", FINISH)
    code, said, _ = finish(labkit_run("slow", "--out", tmp_path / "runs", "--timeout", "8"))
    assert code == 1
    assert "slow: failed: it took longer than 8 s (--timeout) and was ended; see " in said
    (log,) = (tmp_path / "runs").glob("slow/*/log.txt")
    assert log.read_text().splitlines()[-1] == "it took longer than 8 s (--timeout) and was ended"
    assert "<MY_TOKEN>" in log.with_name("notebook.ipynb").read_text(), (
        "what was printed until then, without the secret"
    )


TOKEN = "hf_" + "aB3" * 12
FLAKY = """
import os, pathlib, sys
print(os.environ["MY_TOKEN"], {token!r}, "\\x1b[2J")
flag = pathlib.Path({flag!r})
if flag.exists(): raise ValueError(os.environ["MY_TOKEN"] + "\\x1b[2J")
flag.touch()
"""


@pytest.mark.long
def test_a_good_result_stays_until_there_is_another_and_no_page_has_a_secret(books, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", 'said"aloud')
    books("flaky", FINISH, FLAKY.format(token=TOKEN, flag=str(tmp_path / "flag")))
    arguments = ["run", "flaky", "--out", str(tmp_path / "runs")]
    assert main(arguments) == 0
    (folder,) = (tmp_path / "runs" / "flaky").iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", ".holder")}
    assert main([*arguments, "--force"]) == 1
    said = capsys.readouterr().out
    assert "failed: cell 5: ValueError: <MY_TOKEN>\\x1b[2J; the earlier result stays; see" in said
    assert all((folder / name).read_bytes() == held for name, held in before.items())
    files = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert "&lt;MY_TOKEN&gt;" in (folder / "report.html").read_text()
    assert not any(text in file for file in [said, *files] for text in ('said"aloud', 'said\\"aloud', TOKEN))
    assert main(arguments) == 0
    assert "ok (reused)" in capsys.readouterr().out


LOUD = """
import os, subprocess
for text in (os.environ["MYSQL_PWD"], os.environ["DATABASE_URL"], {token!r}, {key!r}):
    print(text)
    os.write(2, text.encode() + b"\\n")
    subprocess.run(["echo", text], check=True)
os.write(2, b"the last words")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "end", [FINISH, "raise SystemExit(os.environ['MYSQL_PWD'])", SLEEPS], ids=["ok", "fails", "killed"]
)
def test_no_file_of_a_run_has_a_secret_whatever_wrote_it_and_however_it_ended(books, tmp_path, monkeypatch, end):
    body, password, other = "MIIEpAIBAAKCAQEA" * 4, "pw1-of-this-test", "pw2-of-this-test"
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n{body}\n-----END RSA PRIVATE KEY-----"
    monkeypatch.setenv("MYSQL_PWD", password)
    monkeypatch.setenv("DATABASE_URL", f"postgres://me:{other}@host/x")
    books("loud", LOUD.format(token=TOKEN, key=key), end.format(path=str(tmp_path / "pids")))
    process = labkit_run("loud", "--out", tmp_path / "runs")
    if end == SLEEPS:
        wait_for(lambda: (tmp_path / "pids").exists(), "no kernel")
        process.kill()
    said = "".join(map(str, finish(process)[1:]))
    files = {path: path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for secret in (password, other, TOKEN, body[:40]):
        assert secret not in said
        assert [path.name for path, text in files.items() if secret in text] == []
    (log,) = (text for path, text in files.items() if path.name == "log.txt")
    assert "<MYSQL_PWD>" in log
    assert log.endswith("-----\n") if end == SLEEPS else "the last words" in log, "a line without an end waits for it"
    assert [path.name for path, text in files.items() if path.name == "notebook.ipynb" and "<DATABASE_URL>" in text]


def test_a_full_disk_is_one_line_no_half_file_and_a_table(books, tmp_path):
    def full():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # as a full disk, for these processes alone

    books("good", FINISH)
    process = labkit_run("good", "--out", tmp_path / "runs", preexec=full)
    code, said, err = finish(process)
    assert code == 1
    assert re.search(
        r"good: failed: OSError: \[Errno 27\] File too large; .*\ngood  +failed: OSError", said, re.DOTALL
    ), said
    assert "Traceback" not in said + err
    (folder,) = (tmp_path / "runs" / "good").iterdir()
    assert {path.name for path in folder.iterdir()} <= {".lock", ".holder", "log.txt", "attempt"}


@pytest.fixture
def forged(books, tmp_path):
    """A plan, and a folder that holds its finished run, made by hand."""
    books("good", FINISH)
    (one,) = planned("good", tmp_path / "runs")
    result = {"schema": 1, "status": "ok", "notebook": "good", "date": "2026-01-01", "seconds": 1.0, "metrics": {}}
    result |= {"parameters": one.parameters, "device": {"kind": "cpu", "name": cpu_name()}}
    result |= {"verdict": {"cause": None, "first_divergence": None, "explains": [], "refuted": []}}
    result |= {"claims": {}, "provenance": {"sources": one.sources}}
    done = {"execution_count": 1, "metadata": {"papermill": {"status": "completed"}}}
    content = one.book.content | {"cells": [cell | done for cell in one.book.content["cells"]]}
    one.directory.mkdir(parents=True)
    (one.directory / "report.html").write_text("<html></html>\n")

    def write(result=result, content=content):
        (one.directory / "notebook.ipynb").write_text(json.dumps(content))
        result = sealed(result, one.directory / "notebook.ipynb") if isinstance(result, dict) else result
        (one.directory / "result.json").write_text(json.dumps(result))

    write()
    return one, result, content, write


def test_only_a_result_of_this_very_run_is_reused(forged):
    one, result, content, write = forged
    assert one.finished().items() >= result.items()
    for wrong in (
        {"notebook": "other"}, {"schema": 99}, {"status": "failed"}, {"parameters": one.parameters | {"heads": 3}},
        {"provenance": {}}, {"provenance": {"sources": {}}}, {"device": {"kind": "cuda", "name": "X"}}, {"claims": []},
    ):  # fmt: skip
        write(result | wrong)
        assert one.finished() is None, wrong
    for whole in ([], {}, None, "ok"):
        write(whole)
        assert one.finished() is None
    write()
    for cut in ("", "<html>"):
        (one.directory / "report.html").write_text(cut)
        assert one.finished() is None
    (one.directory / "report.html").write_text("<html></html>")
    assert one.finished().items() >= result.items()
    content["cells"][-1]["metadata"]["papermill"]["status"] = "pending"
    write(content=content)
    assert one.finished() is None


@pytest.mark.long
def test_a_result_that_cannot_be_put_in_its_place_fails_the_command(books, tmp_path, capsys):
    books("good", FINISH)
    (planned("good", tmp_path / "runs")[0].directory / "result.json").mkdir(parents=True)
    assert main(["run", "good", "--device", "cpu", "--out", str(tmp_path / "runs")]) == 1
    assert "good: failed: Is a directory: " in capsys.readouterr().out


@pytest.mark.long
def test_a_kernel_has_no_child_that_it_would_wait_for_at_its_end(books, tmp_path):
    """An ipykernel asks its children to end, and waits two seconds for those that do not: the guard is none of them."""
    books("good", "import psutil\nassert psutil.Process().children() == []", FINISH)
    assert main(["run", "good", "--device", "cpu", "--out", str(tmp_path / "runs")]) == 0


@pytest.mark.long
def test_what_a_cell_leaves_behind_does_not_fail_a_run(books, tmp_path, capsys):
    away = tmp_path / "away"
    books("good", f"import os; lab.directory.rename({str(away)!r}); os.symlink({str(away)!r}, lab.directory)", FINISH)
    assert main(["run", "good", "--device", "cpu", "--out", str(tmp_path / "runs")]) == 0
    assert "good: ok after " in capsys.readouterr().out


def test_what_changed_since_the_command_began_is_not_run(forged, books):
    one = forged[0]
    books("good", FINISH + "  # changed")
    run.run([one], force=True, progress=lambda text: None)
    assert one.status == "failed: notebook, kernels or labkit changed since the command began"
    assert (one.directory / "result.json").exists()


def test_a_lock_that_is_a_folder_is_one_line_and_the_table_stands(forged, capsys):
    (forged[0].directory / ".lock").mkdir()
    assert main(["run", "good", "--out", str(forged[0].directory.parent.parent)]) == 1
    assert re.search(r"good: failed: Is a directory: \S*\.lock", capsys.readouterr().out)


@pytest.mark.parametrize("name", [".", "attempt", ".lock", ".holder", "attempt/kept", "hard .lock"])
def test_nothing_behind_a_link_in_a_runs_folder_is_changed(books, tmp_path, name):
    async def execute(run, folder, environment, progress):
        return "not executed"

    books("good", FINISH)
    (one,) = planned("good", tmp_path / "runs")
    target, link = tmp_path / "target", one.directory / name.removeprefix("hard ")
    target.mkdir()
    (target / "log.txt").write_text("precious")
    link.parent.mkdir(parents=True)
    behind = target / "log.txt" if name.endswith((".lock", ".holder")) else target
    (link.hardlink_to if name.startswith("hard") else link.symlink_to)(behind)
    run.run([one], progress=lambda text: None, execute=execute)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"log.txt": "precious"}
    wanted = {".": "expected a folder, got a symbolic link: ", ".lock": "Too many levels of symbolic links: "}
    assert one.status.startswith(f"failed: {(wanted | {'attempt': wanted['.']}).get(name, 'not executed; see ')}")


def test_the_command_says_answer_and_claims_of_a_run_and_which_page_to_open(forged, capsys):
    assert main(["run", "good", "--out", str(forged[0].directory.parent.parent)]) == 0
    assert re.search(r"good: ok \(reused\)\n  page: \S*report\.html\n", capsys.readouterr().out)
    for record in records():
        one = plan.Run(
            Notebook(ROOT / "notebooks" / f"{record.result['notebook']}.ipynb"),
            {},
            "cpu",
            {},
            forged[0].directory,
            record.result,
        )
        said = " ".join(plan.answers([one]).split())
        assert f"{one.book.name}: {answer(one.book.name, record.result)} page: " in said
        assert sum(map(int, re.findall(r"(\d+) (?:con|ref|und|unt)", str(plan.table([one]).rows)))) == len(
            record.result["claims"]
        )


@pytest.mark.long
def test_a_notebook_that_does_not_pass_every_parameter_on_is_refused(books, tmp_path):
    books("forgets", FINISH)
    path = tmp_path / "books" / "forgets.ipynb"
    path.write_text(path.read_text().replace("heads=heads, ", ""))
    (one,) = runs = planned("forgets", tmp_path / "runs")
    run.run(runs, progress=lambda text: None)
    assert "forgets declares heads too" in one.status


@pytest.mark.long
def test_a_result_needs_the_ledger_of_the_notebooks_own_claims(books, tmp_path):
    books("attention_matmul", FINISH)
    (one,) = runs = planned("attention_matmul", tmp_path / "runs")
    run.run(runs, progress=lambda text: None)
    assert "ledger: expected labkit.claims('attention_matmul'), got None" in one.status
    assert not (one.directory / "result.json").exists()


def test_the_table_counts_the_claims_as_the_notebook_does(books, tmp_path):
    books("good", FINISH)
    (one,) = runs = planned("good", tmp_path)
    claims = {"a": {"kind": "implied", "verdict": "refuted"}, "b": {"kind": "ours", "verdict": "confirmed"}}
    one.result = {"verdict": {"cause": "found"}, "claims": claims, "seconds": 1.0}
    assert "1 confirmed, 1 refuted" in str(plan.table(runs))


def test_a_page_leaves_out_glue_and_says_what_a_figure_shows(tmp_path):
    from labkit.cli.pages import as_page, card

    alt = {"image/png": {"alt": "A row of bars"}}
    picture = nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo="}, metadata=alt)
    cells = [
        nbformat.v4.new_code_cell("import glue", metadata={"tags": ["hide-input"]}),
        nbformat.v4.new_code_cell("draw()", outputs=[picture]),
    ]
    path = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    page = as_page(path, card(path.parent, path.stem))
    assert "glue" not in page
    assert 'alt="A row of bars"' in page


@pytest.mark.long
def test_times_braces_and_halves_of_characters_in_runs_end_no_command(books, tmp_path, capsys):
    books("good", FINISH)
    books("bad", "raise ValueError('x')")
    out = tmp_path / "a{b}c{"
    assert main(["run", "good", "--out", str(out)]) == 0, "papermill formats the paths that it is given"
    assert main(["run", "bad", "--out", str(out)]) == 1
    ((good,), (bad,)) = (list(out.glob(f"{name}/*/notebook.ipynb")) for name in ("good", "bad"))
    bad.write_text(bad.read_text().replace('"evalue": "x"', '"evalue": "\\ud800"'))
    assert main(["table", "bad", "--runs", str(out)]) == 0
    assert "failed: ValueError: ?" in capsys.readouterr().out
    later = good.parent / "result.json"
    assert table.runs("good", out)["status"].tolist() == ["ok"]
    later.write_text(later.read_text().replace('"seconds": ', '"seconds": 1'))
    assert "another digest" in table.runs("good", out)["status"][0]


@pytest.mark.parametrize("when", [1e17, -1e17])
def test_a_time_that_no_calendar_has_is_shown_as_the_last_or_first_that_it_has(tmp_path, when):
    assert Card("x", tmp_path, when=when).clock in ("9999-12-31 23:59 UTC", "1970-01-01 00:00 UTC")


def test_a_temporary_name_is_one_processs_own_on_every_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with complete_file(tmp_path / "a") as first, complete_file(tmp_path / "a") as second:
        assert first != second
        first.write_text("1")
        second.write_text("2")


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path):
    texts = ["=1+1", "+1", "-1", "@x", "\t=1", "plain", None]
    path = table.write(pandas.DataFrame({"a": texts, "n": [-1.5] * 7}).convert_dtypes(), tmp_path / "a.csv")
    read = pandas.read_csv(path)
    assert [str(text)[0] for text in read["a"][:5]] == ["'"] * 5
    assert read["a"][5] == "plain"
    assert read["n"].tolist() == [-1.5] * 7
