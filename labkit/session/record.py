"""result.json and its provenance; records of runs on another machine, and whether their sources have changed."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.session.catalogue import ROOT, Notebook, notebook
from labkit.session.reading import read_json, read_yaml, validate
from labkit.session.secrets import refuse_secrets
from whywrong.errors import UsageError
from whywrong.files import write_text

SCHEMA = 1
RESULTS = ROOT / "data" / "results"
PACKAGES = ("torch", "triton", "numpy", "scipy", "numba", "nvmath-python", "nvidia-cublas", "papermill", "ipykernel")
NATIVE_SUFFIXES, DATA_SUFFIXES = (".cu", ".cuh", ".cpp", ".h"), (".csv", ".jsonl")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)', re.MULTILINE)

WORDS = ("claims.py", "figures.py", *DATA_SUFFIXES)
"""Ends of the names of files that describe, plot or hold measurements: no test of a kernel on a GPU depends on them."""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _hash(files: Iterable[Path]) -> str:
    """Twelve hex digits over the names and contents of files of this checkout."""
    entries = (f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0" for path in sorted(files))
    return _digest(b"".join(entries))


def hash_of(package: str) -> str:
    """A hash of all Python files of a package of this checkout."""
    return _hash((ROOT / package).rglob("*.py"))


def made_by(*code: str, without: Collection[str] = ()) -> str:
    """A hash of the files that Python code depends on: what it imports, builds or includes below kernels/, recursively,
    and what it reads of data/results/.

    Files whose names end in one of `without` are skipped. Imports inside functions count too.
    """
    files, waiting = set[Path](), [(ROOT / "code.py", text) for text in code]
    while waiting:
        for path in _references(*waiting.pop()):
            if path not in files and not path.name.endswith(tuple(without)) and path.is_file():
                files.add(path)
                waiting.append((path, path.read_text(encoding="utf-8")))
    return _hash(files)


def _references(path: Path, code: str) -> Iterator[Path]:
    """The files that the code of `path` may refer to, whether they exist or not."""
    if path.suffix in NATIVE_SUFFIXES:
        for name in INCLUDE.findall(code):
            yield from (path.parent / name, *(ROOT / "kernels").glob(f"*/{name}"))
        return
    with suppress(SyntaxError):  # a cell in another language
        for node in ast.walk(ast.parse(code)) if path.suffix == ".py" else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
            for module in (ROOT.joinpath(*name.split(".")) for name in names if name.split(".")[0] == "kernels"):
                yield from (module.with_suffix(".py"), module / "__init__.py", module.parent / "__init__.py")
            if isinstance(node, ast.Constant) and str(node.value).endswith(NATIVE_SUFFIXES + DATA_SUFFIXES):
                yield from (path.parent / str(node.value), RESULTS / str(node.value))


def sources(book: Notebook) -> dict[str, str]:
    """Hashes of the code of a run: the notebook's, that of the kernels that it uses, labkit and whywrong."""
    code = _digest("\0".join(book.code).encode())
    plain = ["".join(line for line in cell.splitlines(True) if line[0] not in "%!") for cell in book.code]  # no magics
    return {"notebook": code, "labkit": hash_of("labkit"), "whywrong": hash_of("whywrong"), "kernels": made_by(*plain)}


def run_id(name: str, parameters: Mapping[str, Any], hashes: Mapping[str, str], device: Sequence[str]) -> str:
    """The name of a run's folder: twelve hex digits over notebook, parameters, source hashes, device kind and name."""
    return _digest(json.dumps([name, parameters, hashes, *device], sort_keys=True).encode())


def belongs(result: Mapping[str, Any], folder: Path) -> bool:
    """Whether a result is that of the run whose id is the folder's name."""
    name, device = result["notebook"], (result["device"]["kind"], result["device"]["name"])
    identity = run_id(name, result["parameters"], result["provenance"]["sources"], device)
    return (name, identity) == (folder.parent.name, folder.name)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers may depend on."""
    installed = (name for name in PACKAGES if any(importlib.metadata.distributions(name=name)))
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in installed}


def commit() -> tuple[str | None, bool | None]:
    """The checkout's commit, and whether it has uncommitted changes; in a copy without git LABKIT_COMMIT names it."""
    if name := os.environ.get("LABKIT_COMMIT"):
        return name, None
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None, None
    # "# branch.oid <commit>" comes first, and lines without "#" are changes
    return lines[0].split()[-1], not all(line.startswith("#") for line in lines)


def write_json(path: Path, content: Any) -> None:
    """Write a whole JSON file or none. Raises UsageError for values that JSON does not have."""
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path.name}: expected finite numbers, strings, lists and dicts, got {error}") from None
    write_text(path, text + "\n")


@dataclass(frozen=True)
class Record:
    """A result recorded elsewhere, usually on a GPU, and kept under data/results/."""

    path: Path
    result: dict[str, Any]

    @property
    def changed(self) -> list[str]:
        """Which of notebook, kernels, labkit and whywrong have changed since it was recorded."""
        before = self.result["provenance"]["sources"]
        return [part for part, now in sources(notebook(self.result["notebook"])).items() if now != before.get(part)]

    @property
    def where(self) -> str:
        """GPU (or CPU) and date, as captions show them, and which sources have changed since."""
        age = f" ({', '.join(changed)} changed since)" if (changed := self.changed) else ""
        return f"recorded on {self.result['device']['name']}, {self.result['date']}{age}"


def records(name: str = "*.*") -> list[Record]:
    """The records under data/results/: all, or that of ``<notebook>.<device>``."""
    return [Record(path, read_json(path, "record")) for path in sorted(RESULTS.glob(f"{name}.json"))]


def recorded(name: str, device: str = "cuda") -> Record | None:
    """The record of notebook `name` on `device`, or None where there is none."""
    return next(iter(records(f"{name}.{device}")), None)


def summary(result: dict[str, Any]) -> tuple[str | None, str]:
    """The cause in a result, and how many claims have each verdict."""
    verdicts = [claim["verdict"] for claim in result["claims"].values()]
    return result["verdict"]["cause"], ", ".join(f"{verdicts.count(word)} {word}" for word in sorted(set(verdicts)))


def stale() -> dict[str, str]:
    """Records that are missing or of earlier kernels: why each is not up to date, by its path below the checkout."""
    return read_yaml(RESULTS / "stale.yaml", "records") or {}


def as_result(content: Any) -> dict[str, Any]:
    """`content` if it is what lab.finish writes, by result.schema.json. Raises ValueError if it is not."""
    json.dumps(content, allow_nan=False, ensure_ascii=False).encode()  # 1e999 is infinite; half a character is no text
    return validate(content, "result")


def sealed(result: dict[str, Any], book: Path) -> dict[str, Any]:
    """A result with a digest of itself and of its executed notebook, by which a change of either shows.

    It protects against mistakes alone: who changes a file on purpose can write its digest too.
    """
    own = {name: value for name, value in result.items() if name != "digest"}
    return own | {"digest": _digest(json.dumps(own, sort_keys=True).encode() + book.read_bytes())}


def complete(run_directory: Path, name: str = "result.json") -> dict[str, Any]:
    """The result of a run of which every code cell completed.

    Raises UsageError for a folder without a result, for a result that is invalid or not ok, for a notebook of which a
    cell did not complete, and where result.json or its notebook is not as it was when the run ended.
    """
    path, book = run_directory / name, run_directory / "notebook.ipynb"
    for file in (path, book):
        if not file.is_file():
            raise UsageError(f"{run_directory}: it holds no {file.name}; expected the folder of a finished run")
    content = read_json(path, str(run_directory))
    try:
        result = as_result(content)
    except ValueError as error:
        raise UsageError(f"{run_directory}: {path.name} is not an ok result of schema {SCHEMA} ({error})") from None
    for number, cell in enumerate(Notebook(book).content["cells"], 1):
        state = cell["metadata"].get("papermill")
        is_done = isinstance(state, dict) and state.get("status") == "completed" and cell.get("execution_count")
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not is_done:
            raise UsageError(f"{run_directory}: cell {number} did not complete; expected every cell to")
    if name == "result.json" and result != sealed(result, book):
        raise UsageError(f"{path}: expected it and its notebook as the run wrote them, got another digest")
    return result


def failure(run_directory: Path) -> tuple[str, dict[str, Any]]:
    """Why a run failed, in one line, and its parameters, as far as its files record them.

    The error of a cell takes precedence over the last line of the log. A run that was cut off left `attempt` behind.
    """
    reason, parameters = "", dict[str, Any]()
    for folder in (run_directory / "attempt", run_directory):
        with suppress(OSError):
            reason = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            executed = Notebook(folder / "notebook.ipynb").content
            reason = raised(executed["cells"]) or reason
            parameters |= executed["metadata"]["papermill"]["parameters"]
    text = json.dumps(parameters, ensure_ascii=False).encode("utf-8", "replace")  # which may have halves of characters
    return reason.encode("utf-8", "replace").decode(), json.loads(text)


def raised(cells: Iterable[Any]) -> str:
    """The last error that a cell raised, in one line; an empty string if none did."""
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    errors = [output for output in outputs if output.get("output_type") == "error"]
    return f"{errors[-1]['ename']}: {str(errors[-1]['evalue']).strip().partition(chr(10))[0]}" if errors else ""


def record(run_directory: Path) -> Path:
    """Copy the result of a finished run to data/results/<notebook>.<device>.json.

    Raises UsageError for a run that is incomplete, changed, of an unknown notebook or another folder, and for a result
    that holds a secret.
    """
    result = complete(run_directory)
    path = run_directory / "result.json"
    target = RESULTS / f"{notebook(result['notebook']).name}.{result['device']['kind']}.json"
    if not belongs(result, run_directory.resolve()):
        raise UsageError(f"{run_directory}: expected the folder that labkit run made, got the result of another run")
    refuse_secrets(str(path), path.read_text(encoding="utf-8"))
    write_json(target, result)
    return target
