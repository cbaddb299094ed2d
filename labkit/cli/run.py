"""Run notebooks headless through papermill: one process a run, some at a time, resumable.

A run's folder is OUT/<notebook>/<run id>/ with notebook.ipynb, result.json, report.html and log.txt. The run id is a
hash of the notebook, its parameters, the sources and the device, so a finished run is not repeated. It is executed in
the folder `attempt` inside, where lab.finish writes the result under a name that no cell knows. Only when every cell of
the executed notebook has completed and that result is there and right, all of it moves up, result.json last: so there
is never a result.json of a run that failed or was killed, and an earlier one stays until there is a new one.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import itertools
import json
import os
import platform
import secrets
import shutil
import signal
import sys
import textwrap
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from labkit.session.catalogue import ROOT, Notebook, notebook, notebooks, resolve
from labkit.session.claims import answer
from labkit.session.reading import read_json
from labkit.session.record import complete, run_id, sources, summary
from labkit.session.secrets import hidden
from whywrong.errors import UsageError
from whywrong.files import write_text
from whywrong.tables import Table

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
FILES = ("notebook.ipynb", "report.html", "log.txt")
Say = Callable[[str], None]
Execute = Callable[["Run", Path, dict[str, str], Say], Awaitable[str]]
"""Executes a run's notebook in a process with a folder and an environment of its own. See :func:`execute`."""


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
    sources: dict[str, str] = field(default_factory=dict)

    def finished(self) -> dict[str, Any] | None:
        """The result of a complete run in this folder, or None."""
        with suppress(UsageError, OSError):
            if (self.directory / "report.html").read_bytes().rstrip().endswith(b"</html>"):
                return self.checked(self.directory, "result.json")
        return None

    def checked(self, folder: Path, name: str) -> dict[str, Any]:
        """The result of a complete run in `folder`. Raises UsageError where it is not complete, or of another run."""
        result = complete(folder, name)
        found = (result["notebook"], result["parameters"], result["device"]["kind"], result["provenance"]["sources"])
        if found != (self.book.name, self.parameters, self.device, self.sources):
            raise UsageError(f"{folder}: its result is of another notebook, device, or other parameters or sources")
        return result


def plan(names: Sequence[str], given: Mapping[str, str], device: str, out: Path) -> list[Run]:
    """Check names and parameters, and lay out the runs. Nothing is started or written.

    `given` are parameters as text; each must be known to every notebook named. Raises UsageError.
    """
    from labkit.session.device import decide

    for module in ("papermill", "nbconvert", "ipykernel"):  # each run imports them in a process of its own
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    books = [notebook(name) for name in names] if names else list(notebooks().values())
    if not books:
        raise UsageError("NAME: there are no notebooks here, so there is nothing to run; expected one at least")
    runs = []
    for book in dict.fromkeys(books):
        if device != "auto" and given.get("device", device) != device:
            raise UsageError(f"-p device={given['device']} against --device {device}: expected one of them")
        asked = {"device": device} if device != "auto" and "device" in book.parameters else {}
        values = resolve(book.name, book.parameters, {**given, **asked}, text=True)
        chosen = decide(values.get("device", device))
        if "device" in values:
            values["device"] = chosen.kind
        made_of = sources(book)
        name = run_id(book.name, values, made_of, (chosen.kind, chosen.name))
        runs.append(Run(book, values, chosen.kind, out.resolve() / book.name / name, sources=made_of))
    return runs


def run(runs: Sequence[Run], jobs: int = 1, force: bool = False, say: Say = print, how: Execute | None = None) -> None:
    """Execute the runs, `jobs` at a time, each held to its share of the cores. Fills in their results.

    An interrupt (from the keyboard, SIGTERM, SIGHUP) ends what is running and raises KeyboardInterrupt. `how` is
    :func:`execute` or what stands in for it.
    """
    share = len(os.sched_getaffinity(0)) // max(1, min(jobs, len(runs)))
    cores = min(4, max(1, share))  # tensors on the CPU are small here, and 16 threads took twice the time of 4

    async def all_runs() -> None:
        turn, this = asyncio.Semaphore(jobs), asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) == signal.SIG_DFL:
                asyncio.get_running_loop().add_signal_handler(number, this.cancel)  # type: ignore[union-attr]
        await asyncio.gather(*(_one(one, turn, cores, force, say, how or execute) for one in runs))

    try:
        asyncio.run(all_runs())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _one(one: Run, turn: asyncio.Semaphore, cores: int, force: bool, say: Say, how: Execute) -> None:
    async with turn:
        begun = time.perf_counter()
        try:
            one.directory.mkdir(parents=True, exist_ok=True)
            with (one.directory / ".lock").open("a+") as lock:
                waited = await _locked(one, lock, say)
                earlier = one.finished()
                if earlier and (not force or waited):
                    one.result, one.status = earlier, "ok (reused)"
                    say(f"{one.book.name}: finished before, reused (--force runs it again)")
                    return
                begun, error = time.perf_counter(), "notebook, kernels or labkit changed since the command began"
                if sources(Notebook(one.book.path)) == one.sources:
                    error = await _attempt(one, earlier is not None, cores, say, how)
        except OSError as failure:  # a full disk, or a folder that cannot be written
            one.result, error = None, f"{failure.strerror}: {os.path.relpath(failure.filename or one.directory)}"
        one.status = f"failed: {error}" if error else "ok"
        say(f"{one.book.name}: {one.status} after {time.perf_counter() - begun:.0f} s")


async def _locked(one: Run, lock: IO[str], say: Say) -> bool:
    """Lock the run's folder, and write into `lock` who holds it; the system frees it when that process ends.

    Returns whether another held it first.
    """
    for waited in itertools.count():
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        if not waited:
            holder = (one.directory / ".lock").read_text(encoding="utf-8", errors="replace")[:200]
            say(f"{one.book.name}: the same run is in progress elsewhere, waiting for it: {holder}")
        await asyncio.sleep(0.5)
    lock.truncate(0)
    print(f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S}", end="", file=lock)
    lock.flush()
    return waited > 0


async def _attempt(one: Run, keep: bool, cores: int, say: Say, how: Execute) -> str:
    """Execute the notebook, check what came out, and move it up. Returns what went wrong, or an empty string.

    What went wrong is the last line of the log. A failure moves up the files of FILES alone, and with `keep` nothing.
    """
    folder, name = one.directory / "attempt", f"result.{secrets.token_hex(8)}.json"
    folder.mkdir(exist_ok=True)
    for path in [*folder.iterdir(), *(one.directory / file for file in ("result.json", *FILES) if not keep)]:
        if not path.is_dir():  # such as a training's states, which it resumes from
            path.unlink(missing_ok=True)
    environment = _environment(cores) | {"LABKIT_RUN_DIR": str(folder), "LABKIT_RESULT": name}
    error = await how(one, folder, environment, say)
    if "died before replying to kernel_info" in error:  # kernels that start together may have been given one port
        error = await how(one, folder, environment, say)
    try:
        one.result = None if error else one.checked(folder, name)
    except UsageError as wrong:
        missing = not (folder / name).exists()
        error = "it ended without lab.finish" if missing else str(wrong).removeprefix(f"{folder}: ")
    if error:
        for path in folder.glob("result.*json"):
            path.unlink()
        for path in folder.glob("*.ipynb"):  # of a run that was ended before it hid what is secret
            try:
                write_text(path, hidden(path.read_text(encoding="utf-8", errors="replace")))
            except OSError:  # a full disk
                path.unlink()
        with suppress(OSError), (folder / "log.txt").open("a", encoding="utf-8") as log:  # on a disk that is full
            print("", error, sep="\n", file=log)
    if error and keep:
        return f"{error}; the earlier result stays; see {os.path.relpath(folder / 'log.txt')}"
    for path in folder.iterdir():
        if path.name not in (name, "result.json") and (path.name in FILES if error else True) and _whole(path):
            if (target := one.directory / path.name).is_dir():
                shutil.rmtree(target)
            path.replace(target)
    if error:
        return f"{error}; see {os.path.relpath(one.directory / 'log.txt')}"
    (folder / name).replace(one.directory / "result.json")
    shutil.rmtree(folder, ignore_errors=True)  # what a cell has started may still write there
    return ""


def _whole(path: Path) -> bool:
    """False for a notebook that was cut off."""
    with suppress(UsageError):
        return path.suffix != ".ipynb" or bool(read_json(path, ""))
    return False


def _environment(cores: int) -> dict[str, str]:
    """The environment of a run's process, held to so many cores."""
    given = [int(os.environ[name]) for name in THREAD_VARIABLES if os.environ.get(name, "").isdecimal()]
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(max(1, min([cores, *given]))))
    environment.pop("TRITON_INTERPRET", None)
    # Installed by `pip install --target`, nbconvert's templates lie beside it, where Jupyter does not look.
    site = Path(importlib.util.find_spec("nbconvert").origin).parent.parent  # type: ignore[union-attr, arg-type]
    for variable, first in {"PYTHONPATH": ROOT, "JUPYTER_PATH": site / "share" / "jupyter"}.items():
        environment[variable] = os.pathsep.join(filter(None, [str(first), os.environ.get(variable)]))
    return environment


async def execute(one: Run, folder: Path, environment: dict[str, str], say: Say, timeout: float | None = None) -> str:
    """Execute a run's notebook in a new Python, and say how many cells are done. Returns why it failed, or nothing.

    One that takes longer than `timeout` seconds is ended and has failed.
    """
    words = [sys.executable, "-m", "labkit.cli.execute", str(one.book.path), str(folder)]
    words += [json.dumps(one.parameters), str(os.getpid())]
    count, line, shown = len(one.book.content["cells"]) + bool(one.parameters), "", time.monotonic()
    with (folder / "log.txt").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*words, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=log)
    try:
        async with asyncio.timeout(timeout):
            async for written in process.stdout:  # type: ignore[union-attr]
                line = written.decode(errors="replace").strip()
                if line.isdecimal() and time.monotonic() > shown + 1.0:
                    say(f"{one.book.name}: {line} of {count} cells")
                    shown = time.monotonic()
            if await process.wait() == 0:
                return ""
    except TimeoutError:
        return f"it took longer than {timeout:g} s (--timeout) and was ended"
    finally:
        await _end(process)
    return line if line and not line.isdecimal() else f"its process {ended(process.returncode)}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process and all that it has started, where it runs."""
    import psutil  # type: ignore[import-untyped]

    if process.returncode is None:
        with suppress(psutil.NoSuchProcess):
            this = psutil.Process(process.pid)
            for one in [*this.children(recursive=True), this]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        await process.communicate()


def ended(code: int | None) -> str:
    """How a process ended, from its exit status as subprocess gives it: by which signal, or with which status."""
    return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"


def table(runs: Sequence[Run]) -> Table:
    """The table of verdicts: a row a run."""
    rows = []
    for one in runs:
        cause, counts, seconds = (*summary(one.result), one.result["seconds"]) if one.result else (None, None, None)
        rows.append((one.book.name, one.status.partition("; see ")[0], cause, counts, one.device, seconds))
    return Table(("notebook", "status", "cause", "claims", "device", "seconds"), rows, wrap=40)


def pages(runs: Sequence[Run]) -> str:
    """A paragraph a run: its answer, from what it measured, and the page to open."""
    shown = []
    for one in runs:
        said = one.status
        with suppress(UsageError):  # a notebook without claims, or an answer that needs what this run did not measure
            said = (one.result and answer(one.book.name, one.result)) or said
        shown.append(textwrap.fill(f"{one.book.name}: {said}", 80))
        if (page := one.directory / "report.html").exists():
            shown.append(f"  page: {os.path.relpath(page)}")
    return "\n".join(shown)
