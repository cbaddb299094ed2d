"""Run notebooks headless through papermill: one process for each run, several at a time, resumable.

A run's folder holds notebook.ipynb, result.json, report.html and log.txt. The notebook is executed in the folder
`attempt` inside it, where lab.finish writes the result under a name that no cell knows. Only when every cell of the
executed notebook has completed and that result is valid, the files move up, result.json last: so there is never a
result.json of a run that failed or was killed, and an earlier one stays until there is a new one.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib.util
import multiprocessing
import os
import platform
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from filelock import AsyncFileLock, Timeout

from labkit.cli.plan import Run
from labkit.session.catalogue import ROOT, Notebook
from labkit.session.record import records, sealed, sources, write_json
from labkit.session.secrets import hidden
from whywrong.errors import UsageError
from whywrong.files import write_text

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
FILES = ("notebook.ipynb", "report.html", "log.txt")
Progress = Callable[[str], None]
Execute = Callable[[Run, Path, dict[str, str], Progress], Awaitable[str]]
"""Executes a run's notebook in a process with a folder and an environment of its own. See :func:`execute`."""


async def execute(
    run: Run, folder: Path, environment: dict[str, str], progress: Progress, timeout: float | None = None
) -> str:
    """Execute a run's notebook in a fork of a server that has imported papermill, and report how many cells are done.

    Returns why it failed, or an empty string. It is killed and has failed after `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["labkit.cli.execute"])
    (receiver, sender), (output, log) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    arguments = (run.book.path, folder, run.parameters, environment, sender, log)
    process = context.Process(target=_child, args=arguments)
    process.start()
    sender.close()
    log.close()
    logging = threading.Thread(target=_log, args=(output, folder / "log.txt"), daemon=True)
    logging.start()
    count, shown = len(run.book.content["cells"]) + bool(run.parameters), time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            while isinstance(message := await _received(receiver), int):
                if time.monotonic() > shown + 1.0:
                    progress(f"{run.book.name}: {message} of {count} cells")
                    shown = time.monotonic()
            return message
    except TimeoutError:
        return f"it took longer than {timeout:g} s (--timeout) and was ended"
    except EOFError:
        process.join()
        return f"its process {ended(process.exitcode)}"
    finally:
        _kill(process)
        logging.join(2.0)  # what a cell has started may live on with the pipe's other end


def _log(output: Any, path: Path) -> None:
    """Write what comes out of a pipe to the file `path` without secrets: whole lines, and those of a key together."""
    text, chunk = b"", b"\n"
    with output, path.open("ab", buffering=0) as log:
        while chunk:
            text += (chunk := os.read(output.fileno(), 1 << 16))
            key = re.search(rb"-----BEGIN (?![^\0]*-----END )", text)  # whose end is still to come
            end = min(text.rfind(b"\n") + 1, key.start() if key else len(text))
            if not chunk or len(text) > 1 << 20:
                end = len(text)
            with suppress(OSError):  # a full disk
                log.write(hidden(text[:end].decode(errors="replace")).encode())
            text = text[end:]


async def _received(receiver: Any) -> int | str:
    """The next message of a run's process: a number of cells, or at last why it failed. EOFError if it has ended."""
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(receiver.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        asyncio.get_running_loop().remove_reader(receiver.fileno())
    return receiver.recv()


def _child(
    notebook: Path, folder: Path, parameters: dict[str, Any], environment: dict[str, str], sender: Any, log: Any
) -> None:
    """The fork. It inherits the pipe whose end would tell its server that labkit is gone, so it watches that itself."""

    def end_with_labkit() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGKILL)

    from labkit.cli.execute import END_WITH_PARENT, main

    ctypes.CDLL(None).prctl(*END_WITH_PARENT)
    threading.Thread(target=end_with_labkit, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    for output in (1, 2):
        os.dup2(log.fileno(), output)
    sender.send(main(notebook, folder, parameters, sender.send))


def run(
    runs: Sequence[Run], jobs: int = 1, force: bool = False, progress: Progress = print, execute: Execute = execute
) -> None:
    """Execute the runs, `jobs` at a time, each limited to its share of the cores, and fill in their results.

    Of several at a time the notebook that took longest where it was recorded begins first: the last one, begun late,
    would run alone.

    An interrupt from the keyboard ends what is running and raises KeyboardInterrupt. Further ones do not stop that:
    a process left over would be waited for at the end.
    """
    share = len(os.sched_getaffinity(0)) // max(1, min(jobs, len(runs)))
    cores = min(4, max(1, share))  # tensors on the CPU are small here, and 16 threads took twice the time of 4

    took = {name: _seconds_recorded(name) for name in {run.book.name for run in runs}} if jobs > 1 else {}
    ordered = sorted(runs, key=lambda run: -took.get(run.book.name, 0.0))

    async def all_runs() -> None:
        with suppress(RuntimeError):  # in another than the main thread, which no interrupt reaches
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asyncio.current_task().cancel)  # type: ignore[union-attr]
        slots = asyncio.Semaphore(jobs)
        await asyncio.gather(*(_reuse_or_execute(run, slots, cores, force, progress, execute) for run in ordered))

    try:
        asyncio.run(all_runs())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _seconds_recorded(name: str) -> float:
    return max((record.result["seconds"] for record in records(f"{name}.*")), default=0.0)


async def _reuse_or_execute(
    run: Run, slots: asyncio.Semaphore, cores: int, force: bool, progress: Progress, execute: Execute
) -> None:
    async with slots:
        begun, error, lock = time.perf_counter(), "", AsyncFileLock(run.directory / ".lock", run_in_executor=False)
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            if link := next(filter(Path.is_symlink, (run.directory, run.directory / "attempt")), None):
                raise OSError(errno.ELOOP, "expected a folder, got a symbolic link", link)
            waited = await _acquire(lock, run, progress)
            earlier = run.finished()
            if earlier and (not force or waited):
                run.result, run.status = earlier, "ok (reused)"
                progress(f"{run.book.name}: finished before, reused (--force runs it again)")
                return
            begun, error = time.perf_counter(), "notebook, kernels or labkit changed since the command began"
            if sources(Notebook(run.book.path)) == run.sources:
                error = await _attempt(run, earlier is not None, cores, progress, execute)
        except OSError as failure:  # a full disk, or a folder that cannot be written
            run.result, error = None, f"{failure.strerror}: {os.path.relpath(failure.filename or run.directory)}"
        finally:
            await lock.release()
        run.status = f"failed: {error}" if error else "ok"
        progress(f"{run.book.name}: {run.status} after {time.perf_counter() - begun:.0f} s")


async def _acquire(lock: AsyncFileLock, run: Run, progress: Progress) -> bool:
    """Lock the run's folder, and write who holds it to `.holder`. Returns whether another process held it first.

    The operating system releases the lock when a process ends. The lock file is not written: it may be a hard link.
    """
    path, waited = run.directory / ".holder", False
    try:
        await lock.acquire(blocking=False)
    except Timeout:
        waited, holder = True, path.read_text(encoding="utf-8", errors="replace")[:200] if path.exists() else "unknown"
        progress(f"{run.book.name}: the same run is in progress elsewhere, waiting for it: {holder}")
        await lock.acquire(poll_interval=0.5)
    write_text(path, f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
    return waited


async def _attempt(run: Run, keep: bool, cores: int, progress: Progress, execute: Execute) -> str:
    """Execute the notebook, check its result, and move the files up. Returns why it failed, or an empty string.

    The reason is also the last line of the log. A failure moves up the files of FILES alone, and with `keep` nothing.
    """
    folder, name = run.directory / "attempt", f"result.{secrets.token_hex(8)}.json"
    folder.mkdir(exist_ok=True)
    for path in [*folder.iterdir(), *(run.directory / file for file in ("result.json", *FILES) if not keep)]:
        if path.is_symlink() or not path.is_dir():  # such as a training's states, which it resumes from
            path.unlink(missing_ok=True)
    environment = _environment(cores) | {"LABKIT_RUN_DIR": str(folder), "LABKIT_RESULT": name}
    error = await execute(run, folder, environment, progress)
    if "died before replying to kernel_info" in error:  # kernels that start together may have been given one port
        error = await execute(run, folder, environment, progress)
    try:
        run.result = None if error else run.checked(folder, name)
    except UsageError as invalid:
        is_missing = not (folder / name).exists()
        error = "it ended without lab.finish" if is_missing else str(invalid).removeprefix(f"{folder}: ")
    if error:
        _clean_up(folder, error)
        if keep:
            return f"{error}; the earlier result stays; see {os.path.relpath(folder / 'log.txt')}"
    elif run.result:
        run.result = sealed(run.result, folder / "notebook.ipynb")
        write_json(folder / name, run.result)
    for path in folder.iterdir():
        if path.name in FILES if error else path.name not in (name, "result.json"):
            if (target := run.directory / path.name).is_dir():
                shutil.rmtree(target)
            path.replace(target)
    if error:
        return f"{error}; see {os.path.relpath(run.directory / 'log.txt')}"
    (folder / name).replace(run.directory / "result.json")
    shutil.rmtree(folder, ignore_errors=True)  # what a cell has started may still write there
    return ""


def _clean_up(folder: Path, error: str) -> None:
    """Remove the results of a failed attempt, and end its log with why."""
    for path in folder.glob("result.*json"):
        path.unlink()
    with suppress(OSError), (folder / "log.txt").open("a", encoding="utf-8") as log:  # on a disk that is full
        print("", error, sep="\n", file=log)


def _environment(cores: int) -> dict[str, str]:
    """The environment of a run's process, which is limited to so many cores."""
    limits = [int(os.environ[name]) for name in THREAD_VARIABLES if os.environ.get(name, "").isdecimal()]
    # JPY_SESSION_NAME, where a cell starts a run, would give it widgets and no figures.
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "JPY_SESSION_NAME")}
    environment = kept | dict.fromkeys(THREAD_VARIABLES, str(max(1, min([cores, *limits]))))
    # Installed by `pip install --target`, nbconvert's templates lie beside it, where Jupyter does not look.
    site = Path(importlib.util.find_spec("nbconvert").origin).parent.parent  # type: ignore[union-attr, arg-type]
    for variable, first in {"PYTHONPATH": ROOT, "JUPYTER_PATH": site / "share" / "jupyter"}.items():
        environment[variable] = os.pathsep.join(filter(None, [str(first), os.environ.get(variable)]))
    return environment


def _kill(process: Any) -> None:
    """Kill a process and everything that it has started, if it is running."""
    with suppress(psutil.NoSuchProcess):
        if process.is_alive():
            parent = psutil.Process(process.pid)
            for member in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
    process.join()


def ended(code: int | None) -> str:
    """How a process ended, from its exit status as subprocess gives it: by which signal, or with which status."""
    return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"
