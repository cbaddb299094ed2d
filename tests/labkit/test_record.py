import json
import re
import secrets
import subprocess
from xml.etree import ElementTree

import pytest

from labkit.errors import UsageError
from labkit.session import record
from labkit.session.catalogue import ROOT, notebook


def test_the_hash_of_a_folder_follows_its_sources_only(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    first = record.hash_folder(tmp_path)
    (tmp_path / "README.md").write_text("words\n")
    assert record.hash_folder(tmp_path) == first
    (tmp_path / "claims.py").write_text("said = 1\n")
    assert record.hash_folder(tmp_path, record.WORDS) == first
    assert record.hash_folder(tmp_path) != first
    (tmp_path / "claims.py").unlink()
    (tmp_path / "a.py").write_text("x = 2\n")
    assert record.hash_folder(tmp_path) != first


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


def test_only_an_ok_result_is_recorded(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"schema": 1, "status": "failed"}))
    with pytest.raises(UsageError, match="not an ok result"):
        record.record(tmp_path)


def test_a_record_is_one_flat_file_named_by_notebook_and_device(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    result = {"schema": 1, "status": "ok", "notebook": "attention_matmul", "device": {"kind": "cuda", "name": "X"}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert record.record(tmp_path).name == "attention_matmul.cuda.json"
    assert record.recorded("attention_matmul").result == result
    assert record.recorded("attention_matmul", "cpu") is None


def test_a_result_with_a_secret_is_not_recorded_and_the_secret_not_printed(tmp_path, monkeypatch):
    pytest.importorskip("detect_secrets")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    planted = secrets.token_hex(20)
    result = {
        "schema": 1,
        "status": "ok",
        "notebook": "x",
        "device": {"kind": "cpu"},
        "parameters": {"api_key": planted},
    }
    (tmp_path / "result.json").write_text(json.dumps(result, indent=1))
    with pytest.raises(UsageError, match="holds what looks like a secret") as error:
        record.record(tmp_path)
    assert planted not in str(error.value)
    assert not (tmp_path / "results").exists()


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
    from labkit.bench.timing import COLUMNS, read

    paths = list((ROOT / "data" / "benchmarks").glob("*.csv"))
    assert paths
    for path in paths:
        rows = read(path)
        assert tuple(rows[0]) == COLUMNS
        (folder,) = (ROOT / "kernels").glob(f"**/{path.stem.removesuffix('_cpu')}/__init__.py")
        now = record.hash_folder(folder.parent, record.WORDS)
        held_to(f"data/benchmarks/{path.name}", {row["kernels_hash"] for row in rows} == {now})


def test_no_benchmark_rests_on_what_is_said_of_it():
    for path in (ROOT / "kernels").rglob("bench.py"):
        assert not re.search(r"import .*\b(claims|figures)\b|\b(claims|figures) import", path.read_text()), path


def test_no_record_names_a_folder_of_a_machine():
    for path in (record.RESULTS / "gpu-tests").glob("*.xml"):
        assert not re.search(r">/\w+/", path.read_text()), path.name


FOLDERS = sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py"))


@pytest.mark.parametrize("name", [*FOLDERS, "labkit"])
def test_the_gpu_tests_on_record_passed_with_the_kernels_as_they_are(name):
    path = record.RESULTS / "gpu-tests" / f"{name}.xml"
    if not path.exists():
        held_to(f"data/results/gpu-tests/{name}.xml", False)
        return
    (suite,) = ElementTree.parse(path).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert {item.get("message") for item in suite.iter("skipped")} <= {"needs two GPUs"}
    assert int(suite.get("tests")) > 0
    made_by = {item.get("name"): item.get("value") for item in suite.iter("property")}
    if name in FOLDERS:
        now = record.hash_folder(ROOT / "kernels" / name, record.WORDS)
        held_to(f"data/results/gpu-tests/{name}.xml", made_by[f"kernels/{name}"] == now)
