import json
import re
import secrets
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from labkit.session import record
from labkit.session.catalogue import ROOT, notebook
from whywrong.errors import UsageError


def test_a_hash_is_of_what_code_imports_builds_and_includes(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "data")
    files = {
        "data/rows.jsonl": "{}", "data/other.jsonl": "{}",
        "kernels/__init__.py": "", "kernels/one/__init__.py": "", "kernels/one/claims.py": "WORDS = 1",
        "kernels/one/used.py": "def later():\n    from kernels.one import deep, claims\nbuild(FOLDER / 'api.cu')",
        "kernels/one/deep.py": "import os\nROWS = 'rows.jsonl'", "kernels/one/bench.py": "",
        "kernels/one/api.cu": '#include "part.cuh"',
        "kernels/one/part.cuh": "#include <host.h>", "kernels/host/host.h": "", "kernels/one/other.cuh": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = ("from kernels.one import used", "%%bash is no Python: it is passed over")
    before, without = record.made_by(*code), record.made_by(*code, without=record.WORDS)
    assert before != without
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
        assert (record.made_by(*code) != before) == (
            name.split("/")[-1] not in ("bench.py", "other.cuh", "other.jsonl")
        ), name
        (tmp_path / name).write_text(text)
    (tmp_path / "kernels/one/claims.py").write_text("WORDS = 2")
    (tmp_path / "data/rows.jsonl").write_text("[]")
    assert record.made_by(*code, without=record.WORDS) == without


def test_outputs_and_prose_do_not_change_a_notebooks_hash(tmp_path):
    import nbformat

    book = notebook("attention_matmul")
    content = nbformat.read(book.path, as_version=4)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.outputs = []
        else:
            cell.source += "\nmore words"
    path = tmp_path / book.path.name
    nbformat.write(content, path)
    changed = type(book)(path)
    assert record.sources(changed)["notebook"] == record.sources(book)["notebook"]


def test_json_is_moved_into_place_whole(tmp_path):
    path = tmp_path / "deep" / "result.json"
    record.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    for bad in (object(), float("nan")):
        with pytest.raises(UsageError, match=r"result\.json"):
            record.write_json(path, {"a": bad})
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    assert json.loads(path.read_text()) == {"a": 1}


RESULT = {
    "schema": 1, "status": "ok", "notebook": "attention_matmul", "date": "2026-01-01", "seconds": 1.0, "parameters": {},
    "device": {"kind": "cuda", "name": "X"}, "claims": {}, "metrics": {},
    "verdict": {"cause": None, "first_divergence": None, "explains": [], "refuted": []},
    "provenance": {"sources": {"notebook": "0", "labkit": "0"}},
}  # fmt: skip
DEVICE = ("cuda", "X")
DONE = {"cell_type": "code", "source": "x", "execution_count": 1, "metadata": {"papermill": {"status": "completed"}}}


def finished_run(folder, result=RESULT, cells=(DONE,)):
    """A folder as `labkit run` leaves it, below `folder`; a text stands for a file's whole content."""
    given = result if isinstance(result, dict) else RESULT
    identity = record.run_id(RESULT["notebook"], given.get("parameters", {}), RESULT["provenance"]["sources"], DEVICE)
    run = folder / RESULT["notebook"] / identity
    run.mkdir(parents=True, exist_ok=True)
    (run / "notebook.ipynb").write_text(json.dumps({"cells": list(cells), "metadata": {}}))
    result = record.sealed(result, run / "notebook.ipynb") if isinstance(result, dict) else result
    (run / "result.json").write_text(result if isinstance(result, str) else json.dumps(result, indent=1))
    return run


def without(part):
    return {key: value for key, value in RESULT.items() if key != part}


@pytest.mark.parametrize(
    "result",
    [
        {"schema": 1, "status": "failed"},
        RESULT | {"status": "failed"},
        RESULT | {"schema": 99},
        RESULT | {"device": {"kind": "../x", "name": "X"}},
        RESULT | {"claims": {"a": 3}},
        RESULT | {"provenance": {}},
        RESULT | {"seconds": None},
        *map(without, RESULT),
        *("[]", "3", "null", '"text"', "{}"),
        json.dumps(RESULT).replace("1.0", "1e999"),
        json.dumps(RESULT).replace("1.0", "NaN"),
        json.dumps(RESULT | {"metrics": {"half of a character": "\ud800"}}),
    ],
    ids=str,
)
def test_only_an_ok_result_is_recorded(tmp_path, monkeypatch, result):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    with pytest.raises(UsageError, match="not an ok result") as error:
        record.record(finished_run(tmp_path, result))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff", "\x00"], ids=["", "half", "deep", "bytes", "nul"])
def test_a_file_that_is_no_json_is_one_line(tmp_path, text):
    run = finished_run(tmp_path)
    for name in ("result.json", "notebook.ipynb"):
        (run / name).write_text(text, errors="surrogateescape")
        with pytest.raises(UsageError, match=f"{name} cannot be read .*; expected JSON") as error:
            record.record(run)
        assert "\n" not in str(error.value)
        finished_run(tmp_path)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "evil", "", "attention_matmul/../evil"])
def test_a_record_is_of_a_known_notebook_and_never_outside_its_folder(tmp_path, monkeypatch, name):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "data" / "results")
    with pytest.raises(UsageError, match="no notebook is called"):
        record.record(finished_run(tmp_path / "run", RESULT | {"notebook": name}))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "cell",
    [
        DONE | {"metadata": {"papermill": {"status": "pending"}}},
        DONE | {"metadata": {"papermill": {"status": "failed", "exception": True}}},
        DONE | {"metadata": {}},
        DONE | {"metadata": {"papermill": []}},
        DONE | {"execution_count": None},  # papermill says completed of cells that it never came to
    ],
)
def test_only_a_run_of_which_every_cell_completed_is_recorded(tmp_path, cell):
    run = finished_run(tmp_path, cells=[DONE, cell])
    with pytest.raises(UsageError, match="cell 2 did not complete"):
        record.record(run)
    (run / "notebook.ipynb").unlink()
    with pytest.raises(UsageError, match=r"holds no notebook\.ipynb"):
        record.record(run)


def test_a_result_that_was_changed_after_its_run_or_is_of_another_folder_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    run = finished_run(tmp_path, RESULT | {"metrics": {"sum": 1.0}})
    whole, book = ((run / name).read_text() for name in ("result.json", "notebook.ipynb"))
    without_digest = {name: value for name, value in json.loads(whole).items() if name != "digest"}
    for name, changed in (
        ("result.json", whole.replace('"sum": 1.0', '"sum": 2.0')),
        ("result.json", json.dumps(without_digest)),
        ("notebook.ipynb", book.replace('"x"', '"y"')),
    ):
        (run / name).write_text(changed)
        with pytest.raises(UsageError, match=r"expected it and its notebook as the run wrote them, got another digest"):
            record.record(run)
        (run / "result.json").write_text(whole)
        (run / "notebook.ipynb").write_text(book)
    shutil.copytree(run, run.with_name("0123456789ab"))
    with pytest.raises(UsageError, match="expected the folder that labkit run made, got the result of another run"):
        record.record(run.with_name("0123456789ab"))
    assert not (tmp_path / "results").exists()
    assert record.record(run).exists()


def test_a_record_is_one_flat_file_named_by_notebook_and_device(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    text, empty = DONE | {"cell_type": "markdown", "execution_count": None}, DONE | {"source": " "}
    assert record.record(finished_run(tmp_path, cells=[DONE, text, empty])).name == "attention_matmul.cuda.json"
    assert record.recorded("attention_matmul").result.items() >= RESULT.items()
    assert record.recorded("attention_matmul", "cpu") is None


def test_a_result_with_a_secret_is_not_recorded_and_the_secret_not_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    planted = secrets.token_hex(20)
    with pytest.raises(UsageError, match="holds what looks like a secret") as error:
        record.record(finished_run(tmp_path, RESULT | {"parameters": {"api_key": planted}}))
    assert planted not in str(error.value)
    assert not (tmp_path / "results").exists()


def test_a_disk_that_is_full_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self, text, **options):
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    path = tmp_path / "result.json"
    record.write_json(path, {"a": 1})
    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        record.write_json(path, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_the_commit_is_gits_or_what_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("LABKIT_COMMIT", raising=False)
    assert record.commit() == (None, None)
    git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "empty"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert record.commit() == (head.strip(), False)
    (tmp_path / "new").touch()
    assert record.commit() == (head.strip(), True)
    monkeypatch.setenv("LABKIT_COMMIT", "abc")
    assert record.commit() == ("abc", None)


def test_why_a_run_failed_is_the_last_line_of_its_log_or_the_cell_that_raised(tmp_path):
    assert record.failure(tmp_path) == ("", {})
    attempt = tmp_path / "attempt"  # a run that was cut off
    attempt.mkdir()
    (attempt / "log.txt").write_bytes(b"a warning\xff\nthe kernel was killed by SIGKILL\n\n")
    killed = "the kernel was killed by SIGKILL"
    for text in ("", "[", '{"cells": [], "metadata": {"papermill": 3}}', '{"cells": 3, "metadata": {}}'):
        (attempt / "notebook.ipynb").write_text(text)
        assert record.failure(tmp_path) == (killed, {}), text
    error = {"output_type": "error", "ename": "ValueError", "evalue": "three\nand more"}
    content = {"cells": [DONE | {"outputs": [error]}], "metadata": {"papermill": {"parameters": {"heads": 3}}}}
    (attempt / "notebook.ipynb").write_text(json.dumps(content))
    assert record.failure(tmp_path) == ("ValueError: three", {"heads": 3})


STALE = record.stale()


def held_to(path, fresh):
    """A record is of the kernels as they are, or the list of stale ones says why not."""
    assert fresh or path in STALE, f"{path}: kernels changed since; record it again, or say why not in stale.yaml"
    assert not (fresh and path in STALE), f"{path}: is up to date; take it off stale.yaml"


def test_what_is_listed_as_stale_has_a_reason():
    assert all(path.startswith("data/") and len(why) > 20 for path, why in STALE.items())


@pytest.mark.parametrize("kept", record.records(), ids=lambda kept: kept.path.name)
def test_a_record_is_of_the_kernels_as_they_are(kept):
    held_to(f"data/results/{kept.path.name}", "kernels" not in kept.changed)


def test_a_benchmark_is_of_the_kernels_as_they_are():
    from labkit.bench.timing import read

    paths = list((ROOT / "data" / "benchmarks").glob("*.csv"))
    assert paths
    for path in paths:
        rows = read(path)
        (file,) = (ROOT / "kernels").glob(f"**/{path.stem.removesuffix('_cpu')}/bench.py")
        now = record.made_by(f"import {'.'.join(file.relative_to(ROOT).with_suffix('').parts)}")
        held_to(f"data/benchmarks/{path.name}", {row["kernels_hash"] for row in rows} == {now})


def test_no_benchmark_rests_on_what_is_said_of_it():
    for path in (ROOT / "kernels").rglob("bench.py"):
        assert not re.search(r"import .*\b(claims|figures)\b|\b(claims|figures) import", path.read_text()), path


def test_no_record_names_a_folder_of_a_machine():
    for path in (record.RESULTS / "gpu-tests").glob("*.xml"):
        assert not re.search(r">/\w+/", path.read_text()), path.name


def texts(name):
    """What tests a folder of kernels."""
    return [file.read_text() for file in (ROOT / "tests" / "kernels").glob(f"test_{name}*.py")]


FOLDERS = sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py"))
ON_A_GPU = [name for name in FOLDERS if any("mark.gpu" in text for text in texts(name))]


@pytest.mark.parametrize("name", [*ON_A_GPU, "whywrong"])
def test_the_gpu_tests_on_record_passed_with_the_kernels_as_they_are(name):
    path = record.RESULTS / "gpu-tests" / f"{name}.xml"
    if not path.exists():
        held_to(f"data/results/gpu-tests/{name}.xml", False)
        return
    (suite,) = ElementTree.parse(path).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert {item.get("message") for item in suite.iter("skipped")} <= {"needs two GPUs", "one GPU for each rank"}
    assert int(suite.get("tests")) > 0
    made_by = {item.get("name"): item.get("value") for item in suite.iter("property")}
    if name in FOLDERS:
        now = record.made_by(*texts(name), without=record.WORDS)
        held_to(f"data/results/gpu-tests/{name}.xml", made_by[f"kernels/{name}"] == now)


def test_the_commit_is_read_without_a_lock_which_a_run_that_is_killed_would_leave_behind(tmp_path, monkeypatch):
    """A stand-in for git, which needs no lock where it is told so, answers with the words that it is called with."""
    (tmp_path / "git").write_text('#!/bin/sh\nprintf "# branch.oid %s\\n" "$1"\n')
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("LABKIT_COMMIT", raising=False)
    assert record.commit() == ("--no-optional-locks", False)
