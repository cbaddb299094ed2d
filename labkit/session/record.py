"""result.json and where it came from; records of runs on another machine, and whether they still hold."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT, Notebook, notebook

SCHEMA = 1
RESULTS = ROOT / "data" / "results"
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "scipy",
    "numba",
    "nvmath-python",
    "nvidia-cublas",
    "papermill",
    "nbclient",
    "ipykernel",
)
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}


def hash_folder(folder: Path) -> str:
    """Twelve hex digits over the names and contents of the source files below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(
        p for p in folder.rglob("*") if p.suffix in SOURCE_SUFFIXES and not _hidden(p.relative_to(folder))
    ):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def sources(book: Notebook) -> dict[str, str]:
    """Hashes of what a run depends on: the notebook's code, its kernels' folder, labkit."""
    code = hashlib.sha256("\0".join(book.code).encode()).hexdigest()[:12]
    found = {"notebook": code, "labkit": hash_folder(ROOT / "labkit")}
    if book.kernels:
        found["kernels"] = hash_folder(ROOT / "kernels" / book.kernels)
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> tuple[str | None, bool | None]:
    """The checkout's commit and whether it has uncommitted changes; LABKIT_COMMIT names that of a copy."""
    if given := os.environ.get("LABKIT_COMMIT"):
        return given, None
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head, bool(changes.strip())


def provenance(hashes: Mapping[str, str], device: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The `provenance` of result.json; `hashes` are the :func:`sources` as they were when the run began."""
    head, dirty = commit()
    cuda = device["kind"] == "cuda"
    return {
        "commit": head,
        "dirty": dirty,
        "versions": versions(),
        "gpu": device["name"] if cuda else None,
        "driver": device["driver"],
        "seed": seed,
        "sources": dict(hashes),
    }


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a temporary name beside `path` and move it into place. UsageError for what JSON has not."""
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path.name}: {error}; wanted finite numbers, words, lists and dicts") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as f:
        f.write(text + "\n")
    Path(f.name).chmod(0o644)
    Path(f.name).replace(path)


@dataclass(frozen=True)
class Record:
    """A result recorded elsewhere, usually on a GPU, and kept under data/results/."""

    path: Path
    result: dict[str, Any]

    @property
    def where(self) -> str:
        """GPU (or CPU) and date, as captions show them."""
        return f"recorded on {self.result['device']['name']}, {self.result['date']}{self.age}"

    @property
    def changed(self) -> list[str]:
        """Which of notebook, kernels and labkit have changed since it was recorded."""
        now = sources(notebook(self.result["notebook"]))
        then = self.result["provenance"]["sources"]
        return [part for part in now if now[part] != then.get(part)]

    @property
    def age(self) -> str:
        """Words to add to a caption when the workbook has moved on since."""
        return f" ({', '.join(self.changed)} changed since)" if self.changed else ""

    def claim(self, claim_id: str) -> dict[str, Any]:
        """The recorded verdict of one claim."""
        return self.result["claims"][claim_id]


def recorded(name: str, device: str = "cuda") -> Record | None:
    """The record of notebook `name` on `device`, or None where there is none."""
    path = RESULTS / f"{name}.{device}.json"
    return Record(path, json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def stale() -> dict[str, str]:
    """Records of earlier kernels, or not made yet, by their path below the checkout: why each is not up to date."""
    import yaml

    return yaml.safe_load((RESULTS / "stale.yaml").read_text(encoding="utf-8")) or {}


def records() -> list[Record]:
    """Every record under data/results/."""
    return [Record(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob("*.json"))]


def record(run_directory: Path) -> Path:
    """Copy the result of a finished run to data/results/<notebook>.<device>.json.

    Raises UsageError where the folder holds no result.json, or one of a run that did not end ok.
    """
    path = run_directory / "result.json"
    if not path.exists():
        raise UsageError(f"RUN_DIR: {run_directory} holds no result.json; wanted the folder of a finished run")
    result = json.loads(path.read_text(encoding="utf-8"))
    if result.get("schema") != SCHEMA or result.get("status") != "ok":
        raise UsageError(f"RUN_DIR: {path} is not an ok result of schema {SCHEMA}")
    target = RESULTS / f"{result['notebook']}.{result['device']['kind']}.json"
    write_json(target, result)
    return target
