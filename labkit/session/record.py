"""result.json and where it came from; records of runs on another machine, and whether they still hold."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from labkit.session.catalogue import ROOT, Notebook, notebook, read_json, read_yaml
from labkit.session.secrets import refuse_secrets
from whywrong.errors import UsageError
from whywrong.files import write_text

SCHEMA = 1
RESULTS = ROOT / "data" / "results"
PACKAGES = ("torch", "triton", "numpy", "scipy", "numba", "nvmath-python", "nvidia-cublas", "papermill", "ipykernel")
NATIVE = (".cu", ".cuh", ".cpp", ".h")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)', re.MULTILINE)

WORDS = ("claims.py", "figures.py")
"""What a kernels' folder says and draws of what was measured: no test of a kernel on a GPU depends on it."""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _hash(files: Iterable[Path]) -> str:
    """Twelve hex digits over the names and contents of files of this checkout."""
    named = (f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0" for path in sorted(files))
    return _digest(b"".join(named))


def hash_of(package: str) -> str:
    """A hash of all of the code of a package of this checkout."""
    return _hash((ROOT / package).rglob("*.py"))


def made_by(*code: str, without: Collection[str] = ()) -> str:
    """A hash of the files below kernels/ that Python code imports, whatever they import, and the CUDA C++ they build.

    Files whose names are in `without` are passed over. What is imported where it is needed counts too.
    """
    found, waiting = set[Path](), [(ROOT / "code.py", text) for text in code]
    while waiting:
        for path in _used(*waiting.pop()):
            if path not in found and path.name not in without and path.is_file():
                found.add(path)
                waiting.append((path, path.read_text(encoding="utf-8")))
    return _hash(found)


def _used(path: Path, code: str) -> Iterator[Path]:
    """The files that the code of a file may name: what it imports from kernels, builds or includes."""
    if path.suffix in NATIVE:
        for name in INCLUDE.findall(code):
            yield from (path.parent / name, *(ROOT / "kernels").glob(f"*/{name}"))
        return
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a cell of another language
        return
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            if name.split(".")[0] == "kernels":
                module = ROOT.joinpath(*name.split("."))
                yield from (module.with_suffix(".py"), module / "__init__.py", module.parent / "__init__.py")
        if isinstance(node, ast.Constant) and str(node.value).endswith(NATIVE):
            yield path.parent / str(node.value)


def sources(book: Notebook) -> dict[str, str]:
    """Hashes of what a run depends on: the notebook's code, the kernels that it uses, labkit and whywrong."""
    code = _digest("\0".join(book.code).encode())
    plain = ["".join(line for line in cell.splitlines(True) if line[0] not in "%!") for cell in book.code]  # no magics
    return {"notebook": code, "labkit": hash_of("labkit"), "whywrong": hash_of("whywrong"), "kernels": made_by(*plain)}


def run_id(name: str, parameters: Mapping[str, Any], hashes: Mapping[str, str], device: Sequence[str]) -> str:
    """The name of a run's folder, twelve hex digits: what was run, with what, and the device's kind and name."""
    return _digest(json.dumps([name, parameters, hashes, *device], sort_keys=True).encode())


def belongs(result: Mapping[str, Any], folder: Path) -> bool:
    """Whether a result is that of the run whose id is the folder's name."""
    device = result["device"]["kind"], result["device"]["name"]
    name = run_id(result["notebook"], result["parameters"], result["provenance"]["sources"], device)
    return name == folder.name and result["notebook"] == folder.parent.name


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers may depend on."""
    installed = (name for name in PACKAGES if any(importlib.metadata.distributions(name=name)))
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in installed}


def commit() -> tuple[str | None, bool | None]:
    """The checkout's commit and whether it has uncommitted changes; LABKIT_COMMIT names that of a copy."""
    if given := os.environ.get("LABKIT_COMMIT"):
        return given, None
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
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
        raise UsageError(f"{path.name}: {error}; expected finite numbers, words, lists and dicts") from None
    write_text(path, text + "\n")


@dataclass(frozen=True)
class Record:
    """A result recorded elsewhere, usually on a GPU, and kept under data/results/."""

    path: Path
    result: dict[str, Any]

    @property
    def changed(self) -> list[str]:
        """Which of notebook, kernels, labkit and whywrong have changed since it was recorded."""
        then = self.result["provenance"]["sources"]
        return [part for part, now in sources(notebook(self.result["notebook"])).items() if now != then.get(part)]

    @property
    def where(self) -> str:
        """GPU (or CPU) and date, as captions show them, and what of the workbook has moved on since."""
        age = f" ({', '.join(changed)} changed since)" if (changed := self.changed) else ""
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
    words = "{date} on {device[name]}, {seconds:.0f} s: "
    return [(when, words.format(**result) + "; ".join(filter(None, summary(result)))) for when, result in found]


def summary(result: dict[str, Any]) -> tuple[str | None, str]:
    """The cause that a result gives, and its claims counted, as the notebook's ledger shows them."""
    verdicts = [claim["verdict"] for claim in result["claims"].values()]
    return result["verdict"]["cause"], ", ".join(f"{verdicts.count(word)} {word}" for word in sorted(set(verdicts)))


def stale() -> dict[str, str]:
    """Records of earlier kernels, or not made yet, by their path below the checkout: why each is not up to date."""
    return read_yaml(RESULTS / "stale.yaml", "records") or {}


@cache
def _schema() -> Callable[[Any], dict[str, Any]]:
    import fastjsonschema

    return fastjsonschema.compile(read_json(Path(__file__).parent / "result.schema.json", "schema"))


def as_result(content: Any) -> dict[str, Any]:
    """`content` where it is what lab.finish writes, by result.schema.json. Raises ValueError where it is not."""
    json.dumps(content, allow_nan=False)  # 1e999 is read as infinite
    return _schema()(content)


def complete(run_directory: Path, name: str = "result.json") -> dict[str, Any]:
    """The result of a run whose every code cell completed.

    Raises UsageError where the folder holds no result, one that did not end ok or lacks something, or one of an
    executed notebook that is not complete.
    """
    path, book = run_directory / name, run_directory / "notebook.ipynb"
    for needed in (path, book):
        if not needed.is_file():
            raise UsageError(f"{run_directory}: it holds no {needed.name}; expected the folder of a finished run")
    content = read_json(path, str(run_directory))
    try:
        result = as_result(content)
    except ValueError as error:
        raise UsageError(f"{run_directory}: {path.name} is not an ok result of schema {SCHEMA} ({error})") from None
    for number, cell in enumerate(Notebook(book).content["cells"], 1):
        by = cell["metadata"].get("papermill")
        done = isinstance(by, dict) and by.get("status") == "completed" and cell.get("execution_count")
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not done:
            raise UsageError(f"{run_directory}: cell {number} did not complete; expected a run of which every cell did")
    return result


def failure(run_directory: Path) -> tuple[str, dict[str, Any]]:
    """Why a run failed, in a line, and its parameters, as far as the files in its folder say.

    A cell that raised comes before the last line of the log. The folder `attempt` is there where a run was cut off.
    """
    reason, parameters = "", dict[str, Any]()
    for folder in (run_directory / "attempt", run_directory):
        with suppress(OSError):
            reason = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            executed = Notebook(folder / "notebook.ipynb").content
            reason = raised(executed["cells"]) or reason
            parameters |= executed["metadata"]["papermill"]["parameters"]
    return reason, parameters


def raised(cells: Iterable[Any]) -> str:
    """What the last cell that raised did raise, in a line; an empty string where none did."""
    errors = [o for cell in cells for o in cell.get("outputs", ()) if o.get("output_type") == "error"]
    return f"{errors[-1]['ename']}: {str(errors[-1]['evalue']).strip().partition(chr(10))[0]}" if errors else ""


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
