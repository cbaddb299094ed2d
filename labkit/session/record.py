"""result.json and where it came from; records of runs on another machine, and whether they still hold."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.session.catalogue import CHECKOUT, ROOT, Notebook, notebook, read_json
from labkit.session.secrets import refuse_secrets

SCHEMA = 1
RESULTS = ROOT / "data" / "results"
PACKAGES = ("torch", "triton", "numpy", "scipy", "numba", "nvmath-python", "nvidia-cublas", "papermill", "ipykernel")
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}

WORDS = ("claims.py", "figures.py")
"""What a kernels' folder says and draws of what was measured: no benchmark and no test of a kernel depends on it."""


def hash_folder(folder: Path, without: Collection[str] = ()) -> str:
    """Twelve hex digits over the names and contents of the source files below `folder`, hidden ones and some not."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.suffix in SOURCE_SUFFIXES and not hidden and path.name not in without:
            digest.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def sources(book: Notebook) -> dict[str, str]:
    """Hashes of what a run depends on: the notebook's code, its kernels' folder, labkit."""
    code = hashlib.sha256("\0".join(book.code).encode()).hexdigest()[:12]
    found = {"notebook": code, "labkit": hash_folder(ROOT / "labkit")}
    if folder := book.about.get("kernels"):
        found["kernels"] = hash_folder(ROOT / "kernels" / folder)
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> tuple[str | None, bool | None]:
    """The checkout's commit and whether it has uncommitted changes; LABKIT_COMMIT names that of a copy."""
    if given := os.environ.get("LABKIT_COMMIT"):
        return given, None
    command = ["git", "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None, None
    # "# branch.oid <commit>" comes first, and lines without "#" are changes
    return lines[0].split()[-1], not all(line.startswith("#") for line in lines)


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a temporary name beside `path` and move it into place. UsageError for what JSON has not."""
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path.name}: {error}; wanted finite numbers, words, lists and dicts") from None
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none: to a temporary name beside `path`, then moved into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def writable(folder: Path, what: str) -> Path:
    """The folder, made if it is not there. Raises UsageError, which begins with `what`, if nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"{what}: {folder} cannot be written ({error.strerror}); wanted a folder that can") from None
    return folder


@dataclass(frozen=True)
class Record:
    """A result recorded elsewhere, usually on a GPU, and kept under data/results/."""

    path: Path
    result: dict[str, Any]

    @property
    def changed(self) -> list[str]:
        """Which of notebook, kernels and labkit have changed since it was recorded."""
        now = sources(notebook(self.result["notebook"]))
        then = self.result["provenance"]["sources"]
        return [part for part in now if now[part] != then.get(part)]

    @property
    def where(self) -> str:
        """GPU (or CPU) and date, as captions show them, and what of the workbook has moved on since."""
        age = f" ({', '.join(self.changed)} changed since)" if self.changed else ""
        return f"recorded on {self.result['device']['name']}, {self.result['date']}{age}"


def records(name: str = "*.*") -> list[Record]:
    """The records under data/results/: all, or that of ``<notebook>.<device>``."""
    return [Record(path, read_json(path, "record")) for path in sorted(RESULTS.glob(f"{name}.json"))]


def recorded(name: str, device: str = "cuda") -> Record | None:
    """The record of notebook `name` on `device`, or None where there is none."""
    return next(iter(records(f"{name}.{device}")), None)


def outcomes(name: str) -> list[tuple[str, str]]:
    """What runs of a notebook cost and found: that on record, on a CPU and on a GPU, and the last one under runs/."""
    found = [("recorded", record.result) for record in records(f"{name}.*")]
    runs = [path for path in (ROOT / "runs" / name).glob("*/result.json") if path.with_name("report.html").exists()]
    with suppress(UsageError):
        last = max(runs, key=lambda path: path.stat().st_mtime, default=None)
        found += [("last run", complete(last.parent))] if last else []
    ran = [f"{result['date']} on {result['device']['name']}, {result['seconds']:.0f} s" for _, result in found]
    said = ["; ".join(filter(None, summary(result))) for _, result in found]
    return [(when, f"{where}: {what}") for (when, _), where, what in zip(found, ran, said, strict=True)]


def summary(result: dict[str, Any]) -> tuple[str | None, str]:
    """The cause that a result gives, and its claims counted, as the notebook's ledger shows them."""
    verdicts = [claim["verdict"] for claim in result["claims"].values()]
    return result["verdict"]["cause"], ", ".join(f"{verdicts.count(word)} {word}" for word in sorted(set(verdicts)))


def stale() -> dict[str, str]:
    """Records of earlier kernels, or not made yet, by their path below the checkout: why each is not up to date."""
    if not CHECKOUT:
        return {}
    import yaml

    return yaml.safe_load((RESULTS / "stale.yaml").read_text(encoding="utf-8")) or {}


PARTS: dict[str, Any] = {"notebook": str, "date": str, "seconds": (int, float)}
PARTS |= dict.fromkeys(("parameters", "device", "verdict", "claims", "metrics", "provenance"), dict)
"""What a result has, and of which types."""


def complete(run_directory: Path, name: str = "result.json") -> dict[str, Any]:
    """The result of a run whose every code cell completed.

    Raises UsageError where the folder holds no result, one that did not end ok or lacks something, or one of an
    executed notebook that is not complete.
    """
    path, book = run_directory / name, run_directory / "notebook.ipynb"
    for needed in (path, book):
        if not needed.is_file():
            raise UsageError(f"{run_directory}: it holds no {needed.name}; wanted the folder of a finished run")
    result = read_json(path, str(run_directory))
    try:
        json.dumps(result, allow_nan=False)  # 1e999 is read as infinite
        right = (result["schema"], result["status"]) == (SCHEMA, "ok") and result["device"]["kind"] in ("cpu", "cuda")
        right = right and all(isinstance(result[part], kind) for part, kind in PARTS.items())
        _ = result["verdict"]["cause"], result["device"]["name"], result["provenance"]["sources"]
        _ = [claim["verdict"] for claim in result["claims"].values()]
    except (TypeError, KeyError, AttributeError, ValueError):
        right = False
    if not right:
        raise UsageError(f"{run_directory}: {path.name} is not an ok result of schema {SCHEMA}")
    for number, cell in enumerate(Notebook(book).content["cells"], 1):
        by = cell["metadata"].get("papermill")
        done = isinstance(by, dict) and by.get("status") == "completed" and cell.get("execution_count")
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not done:
            raise UsageError(f"{run_directory}: cell {number} did not complete; wanted a run of which every cell did")
    return result


def record(run_directory: Path) -> Path:
    """Copy the result of a finished run to data/results/<notebook>.<device>.json.

    Raises UsageError where the run is not complete or of no notebook here, and for a result that holds a secret.
    """
    result = complete(run_directory)
    path = run_directory / "result.json"
    refuse_secrets(str(path), path.read_text(encoding="utf-8"))
    target = RESULTS / f"{notebook(result['notebook']).name}.{result['device']['kind']}.json"
    write_json(target, result)
    return target
