"""Many runs of one notebook on Dask distributed: a grid of parameters, or some of it drawn.

Each point is a run as `labkit run` makes it, in the same folder, so a finished one is reused and a sweep that was cut
off goes on. A worker makes one run at a time. It forks each run's process from a server that has papermill imported,
which saves seconds a run; the notebook itself has a kernel of its own, as ever.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from labkit.cli import run
from labkit.cli.run import Say
from labkit.session.catalogue import Parameter, notebook, resolve
from labkit.session.reading import read_yaml
from whywrong.errors import UsageError

MOST_POINTS = 1_000_000
"""Points of a sweep, and values of a range, above which it is taken for a mistake."""

CLUSTERS = "local, slurm, pbs, or tcp://HOST:PORT of a scheduler that runs"
CONNECT = 20.0
"""Seconds in which a scheduler has to answer."""

DASK = {
    "distributed.worker.daemon": False,  # a daemon may have no children, and a run is one
    "distributed.nanny.pre-spawn-environ": {},  # it would hold every run to one thread
    "distributed.scheduler.worker-saturation": 1.0,
}

Point = dict[str, Any]
"""One value for each parameter that is swept."""
Held = list[dict[str, str]]
"""What each local worker is held to, its cores and its GPU, as variables of its environment."""


def grid(name: str, given: Sequence[tuple[str, str]], sample: int | None = None) -> list[Point]:
    """The points of a sweep over notebook `name`; `given` are pairs such as ("heads", "1..16") or ("tile", "8,16").

    With `sample` so many of them are sampled, always the same; more of them have the fewer among them. Raises
    UsageError for what the notebook does not declare, for one value that it does not allow, and for more than a
    million.
    """
    known, axes = notebook(name).parameters, dict[str, list[Any]]()
    for parameter, text in given:
        if parameter in axes:
            raise UsageError(f"parameter {parameter}: is given twice; expected one list of values, such as 1,2,8..16")
        texts = [value for part in text.split(",") for value in _span(known.get(parameter), parameter, part.strip())]
        is_text = parameter not in known or known[parameter].type is str  # which may be a secret
        for first in texts if is_text else texts[:1]:
            resolve(name, known, {parameter: first}, text=True)
        axes[parameter] = list(dict.fromkeys(map(known[parameter].parse, texts)))
    shape = [*map(len, axes.values()), 1]
    total = math.prod(shape)
    if (count := min(sample or total, total)) > MOST_POINTS or total >= 1 << 63:
        raise UsageError(f"-p: {total:,} points are too many; expected at most {MOST_POINTS:,}, or --sample")
    draw, drawn = random.Random(0), dict.fromkeys(range(total) if count == total else ())
    while len(drawn) < count:
        drawn[draw.randrange(total)] = None
    places = zip(*np.unravel_index(list(drawn), shape), strict=True)
    return [{name: values[at] for (name, values), at in zip(axes.items(), place, strict=False)} for place in places]


def _span(declared: Parameter | None, name: str, text: str) -> Iterable[str]:
    """The values that ``a..b`` or ``a..b..step`` stands for, as text, both ends included; else the text itself."""
    if ".." not in text or declared is None or declared.type not in (int, float):
        return [text]
    count = 0
    with suppress(InvalidOperation, ValueError, OverflowError):
        low, high, *steps = map(Decimal, text.split(".."))
        (step,) = steps or [Decimal(1)]
        count = int((high - low) // step) + 1 if step > 0 and low <= high and "..." not in text else 0
    if not 0 < count <= MOST_POINTS:
        raise UsageError(f"parameter {name}: expected low..high..step, at most {MOST_POINTS:,} values, got {text!r}")
    return (f"{low + i * step:f}" for i in range(count))


def sweep(
    client: Any, held: Held, name: str, points: Sequence[Point], out: Path, retries: int, say: Say
) -> Counter[str]:
    """Make the run of each point on the workers of :func:`cluster`. Returns how many ended ok, ok (reused), failed.

    A run whose process or kernel died, or whose worker did, is made again up to `retries` times; one in which a cell
    raised is not. Progress goes to `say`.
    """
    begun, shown, counts, attempts = time.monotonic(), 0.0, Counter[str](), Counter[str]()
    say(f"{name}: {len(points)} points; dashboard: {client.dashboard_link}")
    client.subscribe_topic("labkit", lambda event: attempts.update([event[1]]))
    for point, status in completed(client, partial(_execute, name, out.resolve(), held), points, retries):
        counts[status.partition(":")[0]] += 1
        if status.startswith("failed"):
            say(f"{' '.join(f'{key}={value}' for key, value in point.items())}: {status}")
        done, passed = counts.total(), time.monotonic() - begun
        if done == len(points) or passed - shown > 10:
            shown = passed
            left = passed * (len(points) - done) / max(1, done - counts["ok (reused)"])
            words = ", ".join(f"{count} {word}" for word, count in counts.items())
            took = f"after {timedelta(seconds=round(passed))}, about {timedelta(seconds=round(left))} left"
            say(f"{done} of {len(points)} ({words}), {len(client.nthreads())} workers, {took}")
    say(f"{sum(attempts.values()) - len(attempts)} attempts were lost with their process and made again")
    return counts


def completed(client: Any, work: Callable[[Any], Any], items: Iterable[Any], retries: int) -> Iterator[tuple[Any, Any]]:
    """Call `work` on each of `items`, as many at a time as there are workers, and yield them as they are done.

    With each comes what `work` returned, or what went wrong. Only what is being worked on is with the scheduler,
    so that its memory does not grow with the number, and the death of a worker is on the account of no other.
    """
    from distributed import KilledWorker, wait

    waiting, pending = iter(items), dict[Any, Any]()
    try:
        while True:
            for item in itertools.islice(waiting, max(1, sum(client.nthreads().values())) - len(pending)):
                pending[client.submit(work, item, pure=False, retries=retries)] = item
            if not pending:
                return
            with suppress(TimeoutError):  # after which there may be more workers
                for future in wait(list(pending), timeout=1, return_when="FIRST_COMPLETED").done:
                    error = future.exception()
                    words = "its worker was killed each time" if isinstance(error, KilledWorker) else str(error)
                    outcome = future.result() if error is None else f"failed: {words.removeprefix('failed: ')}"
                    future.release()
                    yield pending.pop(future), outcome
    finally:
        client.cancel(list(pending))


def fuzz(client: Any, kernel: Any, reference: Any, inputs: Any, *, seeds: Iterable[int], **options: Any) -> Any:
    """:func:`whywrong.fuzz` on a Dask client: a fuzzing from each of `seeds`, which draw other cases, up to a failure.

    Returns the fuzz that found one, or the last, with the counts of all. Raises RuntimeError where a worker died of it.
    """
    from whywrong.fuzzing.fuzz import FuzzReport, fuzz

    total, counted = FuzzReport(kernel, reference, (), 0), ("examples", "refused", "discarded")
    for seed, report in completed(client, lambda seed: fuzz(kernel, reference, inputs, seed=seed, **options), seeds, 0):
        if isinstance(report, str):
            raise RuntimeError(f"fuzz from seed {seed}: {report}")
        total = replace(report, **{name: getattr(total, name) + getattr(report, name) for name in counted})
        if total.found:
            break
    return total


@contextmanager
def cluster(
    kind: str, workers: int | None, gpus: bool, settings: Path | None, retries: int
) -> Iterator[tuple[Any, Held]]:
    """A client of a cluster, and what each local worker is held to.

    `settings` is a YAML file with keyword arguments of Dask's cluster. A worker that dies of a task more than `retries`
    times fails it. Raises UsageError for a cluster that cannot be had.
    """
    import dask
    from distributed import Client, LocalCluster

    given, held = read_yaml(settings, "--settings") if settings else {}, Held()
    if not isinstance(given, dict):
        raise UsageError(f"--settings: expected `name: value` lines, such as queue, cores, got {settings}")
    running = kind.startswith("tcp://")
    for option, useless in (
        ("--gpus", gpus and kind != "local"),
        ("--workers", workers and running),
        ("--settings", given and running),
    ):
        if useless:
            raise UsageError(f"{option}: does nothing for --cluster {kind}; expected it left out")
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(DASK | {"distributed.scheduler.allowed-failures": retries}))
        address: Any = kind
        if kind == "local":
            held = places(workers, gpus)
            options = {"n_workers": len(held), "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
            address = stack.enter_context(LocalCluster(**options | {"silence_logs": logging.CRITICAL} | given))
        elif kind in ("slurm", "pbs"):
            address = stack.enter_context(jobs(kind, given))
            address.scale(workers or 1)
        elif not running:
            raise UsageError(f"--cluster: expected {CLUSTERS}, got {kind!r}")
        try:
            client = Client(address, timeout=CONNECT)
        except OSError as error:
            raise UsageError(f"--cluster: {kind} does not answer ({str(error)[:80]}); expected {CLUSTERS}") from None
        yield stack.enter_context(client), held


def places(workers: int | None, gpus: bool) -> Held:
    """Each local worker's share of the cores, and one GPU where `gpus` are to be shared.

    Raises UsageError where there is no GPU to share.
    """
    devices = []
    if gpus:
        import torch

        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        if not (devices := named.split(",") if named else []):
            raise UsageError("--gpus: torch sees no GPU here; expected one at least")
    cores = sorted(os.sched_getaffinity(0))
    many, each = workers or len(devices) or len(cores), len(cores)
    shares = [cores[i * each // many : (i + 1) * each // many] or [cores[i % each]] for i in range(many)]
    gpu = itertools.cycle([{"CUDA_VISIBLE_DEVICES": name} for name in devices] or [{}])
    return [{"LABKIT_CORES": ",".join(map(str, share))} | next(gpu) for share in shares]


def jobs(kind: str, given: Mapping[str, Any]) -> Any:
    """A SLURMCluster or PBSCluster of dask-jobqueue, whose jobs make one run at a time in each process.

    `given` are its keyword arguments. Raises UsageError for one that it does not take.
    """
    import dask_jobqueue

    options = {"cores": 1, "processes": 1, "memory": "4GB", **given}
    threads = max(1, options["cores"] // options["processes"])
    prologue = [f"export {variable}={threads}" for variable in run.THREAD_VARIABLES]
    prologue += ["export DASK_DISTRIBUTED__WORKER__DAEMON=False", *options.pop("job_script_prologue", [])]
    extra = ["--nthreads", "1", *options.pop("worker_extra_args", [])]
    make = {"slurm": dask_jobqueue.SLURMCluster, "pbs": dask_jobqueue.PBSCluster}[kind]
    try:
        return make(**options, job_script_prologue=prologue, worker_extra_args=extra)
    except (TypeError, ValueError) as error:
        wanted = f"expected keyword arguments of dask-jobqueue's {make.__name__}"
        raise UsageError(f"--settings: {str(error).splitlines()[0]}; {wanted}") from None


def _execute(name: str, out: Path, held: Held, point: Point) -> str:
    """Make one run, on a worker, and return its status. Raises RuntimeError where another attempt may end otherwise."""
    from distributed import get_worker

    worker = get_worker()
    if held:
        os.environ |= held[int(worker.name)]
        os.sched_setaffinity(0, map(int, os.environ["LABKIT_CORES"].split(",")))
    (one,) = run.plan([name], {key: str(value) for key, value in point.items()}, "auto", out)
    if not one.finished():
        worker.log_event("labkit", one.directory.name)
    run.run([one], say=lambda text: None, how=None if multiprocessing.current_process().daemon else _fork)
    if one.result is None and not one.status.startswith("failed: cell "):  # which it will do again
        raise RuntimeError(one.status)
    return one.status


async def _fork(one: run.Run, folder: Path, environment: dict[str, str], say: Say) -> str:
    """Execute a run's notebook in a fork of a server that has papermill imported. Returns why it failed, or nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["labkit.cli.execute", "labkit.cli.sweep"])
    answer, write = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(one.book.path, folder, one.parameters, environment, write))
    process.start()
    write.close()
    process.join()
    with suppress(EOFError):
        return answer.recv()
    return f"its process {run.ended(process.exitcode)}"


def _child(notebook: Path, folder: Path, parameters: dict[str, Any], environment: dict[str, str], answer: Any) -> None:
    """The fork. It holds the pipe by which its server would see that the worker has ended, so it looks itself."""

    def end_with_worker() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGKILL)

    from labkit.cli.execute import END_WITH_PARENT, main

    ctypes.CDLL(None).prctl(*END_WITH_PARENT)
    threading.Thread(target=end_with_worker, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with (folder / "log.txt").open("ab") as log, open(os.devnull, "w") as nowhere:
        for output in (1, 2):
            os.dup2(log.fileno(), output)
        answer.send(main(notebook, folder, parameters, nowhere))
