"""Many runs of one notebook on Dask distributed: a grid of parameters, or a sample of it.

Each point is a run as `labkit run` makes it, in the same folder, so a finished one is reused and a sweep that was cut
off continues. A worker makes one run at a time.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from labkit.cli.cluster import Shares
from labkit.cli.plan import plan
from labkit.cli.run import Progress, run
from labkit.session.catalogue import Parameter, notebook, resolve
from whywrong.errors import UsageError
from whywrong.tables import to_stderr

MOST_POINTS = 1_000_000
"""Points of a sweep, and values of a range, above which it is taken for a mistake."""

Point = dict[str, Any]
"""One value for each parameter that is swept."""


def grid(name: str, ranges: Mapping[str, str], sample: int | None = None) -> list[Point]:
    """The points of a sweep over notebook `name`; `ranges` are such as {"heads": "1..16", "tile": "8,16"}.

    With `sample` that many points are sampled, always the same; a larger sample contains the smaller one. Raises
    UsageError for a parameter or a value that the notebook does not allow, and for more than MOST_POINTS points.
    """
    known, axes = notebook(name).parameters, dict[str, list[Any]]()
    for parameter, text in ranges.items():
        texts = [value for part in text.split(",") for value in _span(known.get(parameter), parameter, part.strip())]
        is_text = parameter not in known or known[parameter].type is str  # which may be a secret
        for value in texts if is_text else texts[:1]:
            resolve(name, known, {parameter: value}, text=True)
        axes[parameter] = list(dict.fromkeys(map(known[parameter].parse, texts)))
    shape = [*map(len, axes.values()), 1]
    total = math.prod(shape)
    if (count := min(sample or total, total)) > MOST_POINTS or total >= 1 << 63:
        raise UsageError(f"-p: expected at most {MOST_POINTS:,} points, or --sample, got {total:,} points")
    random_numbers, chosen = random.Random(0), dict.fromkeys(range(total) if count == total else ())
    while len(chosen) < count:
        chosen[random_numbers.randrange(total)] = None
    places = zip(*np.unravel_index(list(chosen), shape), strict=True)
    return [{name: values[i] for (name, values), i in zip(axes.items(), place, strict=False)} for place in places]


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
    client: Any, shares: Shares, name: str, points: Sequence[Point], out: Path, retries: int, progress: Progress
) -> Counter[str]:
    """Make the run of each point on the workers of a cluster. Returns how many ended ok, ok (reused), failed.

    A run whose process, kernel or worker died is made again up to `retries` times; one in which a cell raised is not.
    """
    begun, shown, counts, attempts = time.monotonic(), 0.0, Counter[str](), Counter[str]()
    progress(f"{name}: {len(points)} points; dashboard: {client.dashboard_link}")
    client.subscribe_topic("labkit", lambda event: attempts.update([event[1]]))
    for point, status in completed(client, partial(_execute, name, out.resolve(), shares), points, retries, progress):
        counts[status.partition(":")[0]] += 1
        if status.startswith("failed"):
            progress(f"{' '.join(f'{key}={value}' for key, value in point.items())}: {status}")
        done, passed = counts.total(), time.monotonic() - begun
        if done == len(points) or passed - shown > 10:
            shown, left = passed, passed * (len(points) - done) / max(1, done - counts["ok (reused)"])
            by_status = ", ".join(f"{count} {word}" for word, count in counts.items())
            times = f"after {timedelta(seconds=round(passed))}, about {timedelta(seconds=round(left))} left"
            progress(f"{done} of {len(points)} ({by_status}), {len(client.nthreads())} workers, {times}")
    progress(f"{attempts.total() - len(attempts)} attempts were lost with their process and made again")
    return counts


def completed(
    client: Any, work: Callable[[Any], Any], items: Iterable[Any], retries: int, progress: Progress = to_stderr
) -> Iterator[tuple[Any, Any]]:
    """Call `work` on each of `items`, as many at a time as there are workers, and yield them as they are done.

    With each comes what `work` returned, or why it failed. The scheduler has only the items in progress, so its memory
    does not grow with their number, and the death of a worker counts for no other item. Where no worker is left, that
    is said, and it waits for one. Raises UsageError where the scheduler has ended.
    """
    from concurrent.futures import CancelledError

    from distributed import KilledWorker, wait

    waiting, pending, before = iter(items), dict[Any, Any](), 1
    try:
        while True:
            if before > (workers := len(client.nthreads())) == 0:
                progress("the cluster has no worker: waiting for one")
            before = workers
            free = max(1, sum(client.nthreads().values())) - len(pending)  # below 0 when a worker has died
            for item in itertools.islice(waiting, max(0, free)):
                pending[client.submit(work, item, pure=False, retries=retries)] = item
            if not pending:
                return
            with suppress(TimeoutError):  # after which there may be more workers
                for future in wait(list(pending), timeout=1, return_when="FIRST_COMPLETED").done:
                    error = future.exception()
                    why = "its worker was killed each time" if isinstance(error, KilledWorker) else str(error)
                    outcome = future.result() if error is None else f"failed: {why.removeprefix('failed: ')}"
                    future.release()
                    yield pending.pop(future), outcome
    except CancelledError:
        expected = "finished runs are kept, the same command takes up the rest"
        raise UsageError(f"--cluster: expected a scheduler that runs on, got one that has ended; {expected}") from None
    finally:
        client.cancel(list(pending))


def fuzz(client: Any, kernel: Any, reference: Any, inputs: Any, *, seeds: Iterable[int], **options: Any) -> Any:
    """:func:`whywrong.fuzz` on a Dask client from each of `seeds`, until one finds a failure.

    Returns the report with the failure, or the last, with the counts of all. Raises RuntimeError if a worker died.
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


def _execute(name: str, out: Path, shares: Shares, point: Point) -> str:
    """Make one run on a worker, and return its status. Raises RuntimeError if another attempt may end otherwise."""
    from distributed import get_worker

    worker = get_worker()
    if shares:
        os.environ |= shares[int(worker.name)]
        os.sched_setaffinity(0, map(int, os.environ["LABKIT_CORES"].split(",")))
    (this_run,) = plan([name], {key: str(value) for key, value in point.items()}, "auto", out)
    if not this_run.finished():
        worker.log_event("labkit", this_run.directory.name)
    run([this_run], progress=lambda text: None)
    if this_run.result is None and not this_run.status.startswith("failed: cell "):  # which would raise again
        raise RuntimeError(this_run.status)
    return this_run.status
