"""Run notebooks headless through papermill: one process a run, some at a time, resumable.

A run's folder is OUT/<notebook>/<run id>/ with notebook.ipynb, result.json, report.html and log.txt. The run id is a
hash of the notebook, its parameters, the sources and the device, so a finished run is not repeated. What counts as
success is decided from result.json: a notebook whose kernel died, or that left early by sys.exit(0), looks complete to
papermill.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT, Notebook, notebook, notebooks, resolve
from labkit.session.record import sources
from labkit.tables import Table

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass
class Run:
    """One execution of a notebook in `directory`, before and after; it failed where it has no result."""

    book: Notebook
    parameters: dict[str, Any]
    device: str
    directory: Path
    result: dict[str, Any] | None = None
    status: str = ""
    """``ok``, ``ok (reused)`` or ``failed: ...``."""

    def finished(self) -> dict[str, Any] | None:
        """The result of a complete run in this folder, or None."""
        try:
            result = json.loads((self.directory / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        right = result.get("status") == "ok" and result.get("parameters") == self.parameters
        return result if right and (self.directory / "report.html").exists() else None


def plan(names: Sequence[str], given: Mapping[str, str], device: str, out: Path) -> list[Run]:
    """Check names and parameters, and lay out the runs. Nothing is started or written.

    `given` are parameters as text; each must be known to every notebook named. Raises UsageError.
    """
    from labkit.session.device import decide

    for module in ("papermill", "nbconvert", "ipykernel"):  # each run imports them in a process of its own
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
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
        run_id = hashlib.sha256(identity.encode()).hexdigest()[:12]
        runs.append(Run(book, values, chosen.kind, out.resolve() / book.name / run_id))
    return runs


def run(runs: Sequence[Run], jobs: int = 1, force: bool = False, say: Callable[[str], None] = print) -> None:
    """Execute the runs, `jobs` at a time, each held to its share of the cores. Fills in their results.

    An interrupt ends what is running.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, min(jobs, len(runs))))

    async def in_turn(turn: asyncio.Semaphore, one: Run) -> None:
        async with turn:
            await _one(one, cores, force, say)

    async def all_runs() -> None:
        turn = asyncio.Semaphore(jobs)
        await asyncio.gather(*(in_turn(turn, one) for one in runs))

    asyncio.run(all_runs())


async def _one(one: Run, cores: int, force: bool, say: Callable[[str], None]) -> None:
    one.directory.mkdir(parents=True, exist_ok=True)
    with (one.directory / ".lock").open("w") as lock:
        waited = False
        while not _locked(lock):
            if not waited:
                say(f"{one.book.name}: the same run is in progress elsewhere, waiting for it")
            waited = True
            await asyncio.sleep(0.5)
        if (not force or waited) and (earlier := one.finished()):
            one.result, one.status = earlier, "ok (reused)"
            say(f"{one.book.name}: finished before, reused (--force runs it again)")
            return
        begun, watching = time.perf_counter(), asyncio.create_task(_watch(one, say))
        try:
            error = await _execute(one, cores, lock)
        finally:
            watching.cancel()
    if not error:
        one.result = one.finished()
        error = "it ended without lab.finish, so there is no result"
    one.status = "ok" if one.result else f"failed: {error}; see {os.path.relpath(one.directory / 'log.txt')}"
    say(f"{one.book.name}: {one.status} after {time.perf_counter() - begun:.0f} s")


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _watch(one: Run, say: Callable[[str], None]) -> None:
    """Say how many cells are done, from the notebook that papermill saves."""
    shown = 0
    while True:
        await asyncio.sleep(1.0)
        try:
            cells = json.loads((one.directory / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
        except (OSError, ValueError):  # not there yet, or half written
            continue
        done = sum(cell["metadata"].get("papermill", {}).get("status") == "completed" for cell in cells)
        if done != shown:
            say(f"{one.book.name}: {done} of {len(cells)} cells")
            shown = done


async def _execute(one: Run, cores: int, lock: IO[str]) -> str:
    """Execute the notebook and render what came out, whole or not. Returns what went wrong, or an empty string."""
    files = [one.directory / name for name in ("result.json", "notebook.ipynb", "report.html", "log.txt")]
    for path in files:
        path.unlink(missing_ok=True)
    result, *_, log = files
    given = [int(os.environ[name]) for name in THREAD_VARIABLES if os.environ.get(name, "").isdecimal()]
    threads = dict.fromkeys(THREAD_VARIABLES, str(max(1, min([cores, *given]))))
    environment = os.environ | threads | {"LABKIT_RUN_DIR": str(one.directory)}
    environment.pop("TRITON_INTERPRET", None)
    # Installed by `pip install --target`, nbconvert's templates lie beside it, where Jupyter does not look.
    site = Path(importlib.util.find_spec("nbconvert").origin).parent.parent  # type: ignore[union-attr, arg-type]
    for variable, first in {"PYTHONPATH": ROOT, "JUPYTER_PATH": site / "share" / "jupyter"}.items():
        environment[variable] = os.pathsep.join(filter(None, [str(first), os.environ.get(variable)]))

    words = ["labkit.cli.execute", str(one.book.path), str(one.directory), json.dumps(one.parameters)]
    error = await _python(words, environment, log, lock)
    if "died before replying to kernel_info" in error:  # kernels that start together may have been given one port
        error = await _python(words, environment, log, lock)
    if error:
        result.unlink(missing_ok=True)  # a cell after lab.finish failed: no success
    return error


async def _python(words: Sequence[str], environment: Mapping[str, str], log: Path, lock: IO[str]) -> str:
    """Run a module of Python's to its end; returns the last line of the log where it failed, else an empty string."""
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *words),
            env=environment,
            stdin=DEVNULL,
            stdout=file,
            stderr=STDOUT,
            pass_fds=[lock.fileno()],  # the folder stays locked while the process lives, even without its parent
        )
    try:
        if await process.wait() == 0:
            return ""
    except asyncio.CancelledError:
        process.kill()  # a notebook's kernel sees that and ends
        await process.wait()
        raise
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), f"exit status {process.returncode}")[:200]


def table(runs: Sequence[Run]) -> Table:
    """The table of verdicts: a row a run."""
    rows = []
    for one in runs:
        result = one.result or {"verdict": {"cause": None}, "claims": {}, "seconds": None}
        given = [claim["verdict"] for claim in result["claims"].values() if claim["kind"] != "ours"]
        counts = ", ".join(f"{given.count(word)} {word}" for word in dict.fromkeys(given))
        rows.append((one.book.name, one.status, result["verdict"]["cause"], counts, one.device, result["seconds"]))
    return Table(("notebook", "status", "cause", "claims", "device", "seconds"), rows, wrap=40)
