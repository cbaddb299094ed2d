"""result.json and where it came from; records of runs on another machine, and whether they still hold."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.session.catalogue import CHECKOUT, ROOT, Notebook, notebook
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


def run_id(name: str, parameters: Mapping[str, Any], hashes: Mapping[str, str], device: Sequence[str]) -> str:
    """The name of a run's folder, twelve hex digits: what was run, with what, and the device's kind and name."""
    identity = json.dumps([name, parameters, hashes, *device], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


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
    return [Record(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob(f"{name}.json"))]


def recorded(name: str, device: str = "cuda") -> Record | None:
    """The record of notebook `name` on `device`, or None where there is none."""
    return next(iter(records(f"{name}.{device}")), None)


def stale() -> dict[str, str]:
    """Records of earlier kernels, or not made yet, by their path below the checkout: why each is not up to date."""
    if not CHECKOUT:
        return {}
    import yaml

    return yaml.safe_load((RESULTS / "stale.yaml").read_text(encoding="utf-8")) or {}


def record(run_directory: Path) -> Path:
    """Copy the result of a finished run to data/results/<notebook>.<device>.json.

    Raises UsageError where the folder holds no result.json, one of a run that did not end ok, or one with a secret.
    """
    path = run_directory / "result.json"
    if not path.exists():
        raise UsageError(f"RUN_DIR: {run_directory} holds no result.json; wanted the folder of a finished run")
    text = path.read_text(encoding="utf-8")
    refuse_secrets(str(path), text)
    result = json.loads(text)
    if result.get("schema") != SCHEMA or result.get("status") != "ok":
        raise UsageError(f"RUN_DIR: {path} is not an ok result of schema {SCHEMA}")
    target = RESULTS / f"{result['notebook']}.{result['device']['kind']}.json"
    write_json(target, result)
    return target
