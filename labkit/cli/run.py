"""Run notebooks headless through papermill: one process a run, some at a time, resumable.

A run's folder is OUT/<notebook>/<run id>/ with notebook.ipynb, result.json, report.html and log.txt (and job.json, what
it was asked). The run id is a hash of the notebook, its parameters, the sources and the device, so a finished run is
not repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT, Notebook, notebook, notebooks
from labkit.session.parameters import resolve
from labkit.session.record import sources
from labkit.tables import Table

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

GRACE = 15
"""Seconds that an interrupted run has to end its kernel and to render what it has."""


@dataclass
class Run:
    """One execution of a notebook, before and after."""

    book: Notebook
    parameters: dict[str, Any]
    device: str
    out: Path
    id: str
    result: dict[str, Any] | None = None
    reused: bool = False
    seconds: float = 0.0
    error: str = ""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def directory(self) -> Path:
        """Where its four files lie."""
        return self.out / self.book.name / self.id

    @property
    def ok(self) -> bool:
        """Whether it wrote an ok result."""
        return self.result is not None

    @property
    def status(self) -> str:
        """``ok``, ``ok (reused)`` or ``failed: ...``."""
        if not self.ok:
            return f"failed: {self.error}"
        return "ok (reused)" if self.reused else "ok"

    def finished(self) -> dict[str, Any] | None:
        """The result of an earlier, complete run in this folder, or None."""
        path = self.directory / "result.json"
        if not (path.exists() and (self.directory / "report.html").exists()):
            return None
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None
        right = result.get("status") == "ok" and result.get("parameters") == self.parameters
        return result if right else None


def plan(names: Sequence[str], given: Mapping[str, str], device: str, out: Path) -> list[Run]:
    """Check names and parameters, and lay out the runs. Nothing is started or written.

    `given` are parameters as text; each must be known to every notebook named. Raises UsageError.
    """
    from labkit.session.device import decide

    books = [notebook(name) for name in names] if names else list(notebooks().values())
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: {out} is not a folder; wanted one, or a path where one can be made")
    runs = []
    for book in books:
        asked = {"device": device} if device != "auto" and "device" in book.parameters else {}
        values = resolve(book.name, book.parameters, {**given, **asked}, text=True)
        chosen = decide(values.get("device", device))
        if "device" in values:
            values["device"] = chosen.kind
        identity = json.dumps([book.name, values, sources(book), chosen.kind, chosen.name], sort_keys=True)
        runs.append(Run(book, values, chosen.kind, out, hashlib.sha256(identity.encode()).hexdigest()[:12]))
    return runs


def run(runs: Sequence[Run], jobs: int = 1, force: bool = False, say: Callable[[str], None] = print) -> None:
    """Execute the runs, `jobs` at a time, each held to its share of the cores. Fills in their results."""
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, min(jobs, len(runs))))
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:  # around the submitting too: its first thread runs before the last is started
            for future in [pool.submit(_one, one, cores, force, say, stop) for one in runs]:
                future.result()
        except BaseException:  # an interrupt too: end what is running, start nothing more
            stop.set()
            raise


def _one(one: Run, cores: int, force: bool, say: Callable[[str], None], stop: threading.Event) -> None:
    one.directory.mkdir(parents=True, exist_ok=True)
    with (one.directory / ".lock").open("w") as lock:
        waited = False
        while not _locked(lock):
            if not waited:
                say(f"{one.book.name}: the same run is in progress elsewhere, waiting for it")
                waited = True
            if stop.wait(0.5):
                break
        if stop.is_set():
            one.error = "interrupted"
        elif (not force or waited) and (earlier := one.finished()):
            one.result, one.reused, one.seconds = earlier, True, earlier["seconds"]
            say(f"{one.book.name}: finished before, reused (--force runs it again)")
        else:
            _execute(one, cores, lock.fileno(), say, stop)


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _execute(one: Run, cores: int, lock: int, say: Callable[[str], None], stop: threading.Event) -> None:
    for name in ("result.json", "report.html", "notebook.ipynb", "log.txt"):
        (one.directory / name).unlink(missing_ok=True)
    job = one.directory / "job.json"
    content = {
        "notebook": str(one.book.path),
        "directory": str(one.directory.resolve()),
        "parameters": one.parameters,
    }
    job.write_text(json.dumps(content), encoding="utf-8")
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(cores))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment.pop("TRITON_INTERPRET", None)
    begun = time.perf_counter()
    with (one.directory / "log.txt").open("wb") as log:
        one._process = subprocess.Popen(
            [sys.executable, "-m", "labkit.cli.execute", str(job)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[lock],  # the folder stays locked for as long as the process lives, even without its parent
        )
        _watch(one, one._process, say, stop)
    one.seconds = time.perf_counter() - begun
    if stop.is_set():
        one.error = "interrupted"
        return
    _judge(one)
    say(f"{one.book.name}: {one.status} after {one.seconds:.0f} s")


def _watch(one: Run, process: subprocess.Popen[bytes], say: Callable[[str], None], stop: threading.Event) -> None:
    """Say which cell is running, from the notebook that papermill saves; when told to stop, end the process."""
    total, shown = len(one.book.code), -1
    while True:
        try:
            process.wait(timeout=1.0)
            return
        except subprocess.TimeoutExpired:
            if stop.is_set():
                _end(process)
                return
            done = _cells_done(one.directory / "notebook.ipynb")
            if done != shown:
                say(f"{one.book.name}: {done} of {total} cells")
                shown = done


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to close what it has open, once: asked again, it would be stopped in its closing."""
    process.terminate()
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()  # its kernel sees that and ends
        process.wait()


def _cells_done(path: Path) -> int:
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return 0
    done = [cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "completed"]
    return sum(
        cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", []) for cell in done
    )


def _judge(one: Run) -> None:
    """Success is an ok result.json from a process that ended well; anything else is a failure with its reason."""
    code = one._process.returncode if one._process else 1
    if code == 0 and (result := one.finished()):
        one.result = result
        return
    if code == 0:
        one.error = "it ended without lab.finish, so there is no result"
    else:
        one.error = f"{_last_line(one.directory / 'log.txt') or f'exit status {code}'}"
    one.error += f"; see {_relative(one.directory / 'log.txt')}"


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:200]


def _relative(path: Path) -> str:
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


def table(runs: Sequence[Run]) -> Table:
    """The table of verdicts: a row a run."""
    rows = []
    for one in runs:
        verdict = (one.result or {}).get("verdict", {})
        given = [claim["verdict"] for claim in (one.result or {}).get("claims", {}).values() if claim["kind"] != "ours"]
        counts = ", ".join(f"{given.count(word)} {word}" for word in dict.fromkeys(given))
        seconds = f"{one.seconds:.0f} s"
        rows.append((one.book.name, one.status, verdict.get("cause") or "", counts, one.device, seconds))
    return Table(("notebook", "status", "cause", "claims", "device", "time"), rows, wrap=40)
