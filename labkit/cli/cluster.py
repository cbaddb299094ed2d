"""Dask clusters for a sweep: local processes, jobs of Slurm or PBS, or a scheduler that is running already."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from labkit.cli.run import THREAD_VARIABLES
from labkit.session.reading import read_yaml
from whywrong.errors import UsageError

CLUSTERS = "local, slurm, pbs, or tcp://HOST:PORT of a scheduler that runs"
LOOPBACK = "127.0.0.1:0"
CONNECT = 20.0
"""Seconds in which a scheduler has to answer."""

DASK = {
    "distributed.worker.daemon": False,  # a daemon may have no children, and a run is one
    "distributed.nanny.pre-spawn-environ": {},  # it would limit every run to one thread
    "distributed.scheduler.worker-saturation": 1.0,
}

Shares = list[dict[str, str]]
"""The cores and the GPU of each local worker, as variables of its environment."""


@contextmanager
def connect(
    kind: str, workers: int | None, gpus: bool, settings: Path | None, retries: int, dashboard: str = ""
) -> Iterator[tuple[Any, Shares]]:
    """A client of a cluster, and the shares of its local workers.

    `settings` is a YAML file with keyword arguments of Dask's cluster. A task fails after it has killed its worker
    more than `retries` times. `dashboard` is where Dask's page of the scheduler listens, LOOPBACK by default.
    Raises UsageError for a cluster that is not available.
    """
    import dask
    from distributed import Client, LocalCluster
    from distributed.utils import silence_logging_cmgr

    arguments, shares = read_yaml(settings, "--settings") if settings else {}, Shares()
    if not isinstance(arguments, dict):
        raise UsageError(f"--settings: expected `name: value` lines, such as queue, cores, got {settings}")
    is_running = kind.startswith("tcp://")
    useless: dict[str, Any] = {"--gpus": gpus and kind != "local", "--workers": workers and is_running}
    useless |= {"--settings": arguments and is_running, "--dashboard": dashboard and is_running}
    for option in (option for option, is_set in useless.items() if is_set):
        raise UsageError(f"{option}: does nothing for --cluster {kind}; expected it left out")
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(DASK | {"distributed.scheduler.allowed-failures": retries}))
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
        address: Any = kind
        if kind == "local":
            shares = shares_of(workers, gpus)
            options: dict[str, Any] = {"n_workers": len(shares), "threads_per_worker": 1, "memory_limit": 0}
            options |= {"dashboard_address": dashboard or LOOPBACK, "silence_logs": logging.CRITICAL}
            address = stack.enter_context(LocalCluster(**options | arguments))
            stack.enter_context(_replaced(address, len(shares)))
        elif kind in ("slurm", "pbs"):
            address = stack.enter_context(batch_cluster(kind, arguments, dashboard or LOOPBACK))
            stack.enter_context(_replaced(address, workers or 1))
        elif not is_running:
            raise UsageError(f"--cluster: expected {CLUSTERS}, got {kind!r}")
        try:
            client = Client(address, timeout=CONNECT)
        except OSError as error:
            raise UsageError(f"--cluster: {kind} does not answer ({str(error)[:80]}); expected {CLUSTERS}") from None
        yield stack.enter_context(client), shares


@contextmanager
def _replaced(cluster: Any, workers: int) -> Iterator[None]:
    """Start so many workers, and new ones for those that are lost.

    Dask itself gives up a nanny whose worker is away for 15 s, and a job that has ended.
    """
    from tornado.ioloop import PeriodicCallback

    cluster.scale(workers)
    again = PeriodicCallback(lambda: cluster.scale(workers), 5000.0)
    cluster.loop.add_callback(again.start)
    try:
        yield
    finally:
        cluster.loop.add_callback(again.stop)


def shares_of(workers: int | None, gpus: bool) -> Shares:
    """Each local worker's share of the cores, and one GPU if `gpus`. Raises UsageError if there is no GPU to share."""
    devices: list[str] = []
    if gpus:
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = [name for name in visible.split(",") if name]
        if not devices:
            raise UsageError("--gpus: expected one GPU at least, got none that torch sees")
    cores = sorted(os.sched_getaffinity(0))
    count, total = workers or len(devices) or len(cores), len(cores)
    shares = [cores[i * total // count : (i + 1) * total // count] or [cores[i % total]] for i in range(count)]
    gpu = itertools.cycle([{"CUDA_VISIBLE_DEVICES": name} for name in devices] or [{}])
    return [{"LABKIT_CORES": ",".join(map(str, share))} | next(gpu) for share in shares]


def batch_cluster(kind: str, arguments: Mapping[str, Any], dashboard: str = LOOPBACK) -> Any:
    """A SLURMCluster or PBSCluster of dask-jobqueue, whose jobs make one run at a time in each process.

    `arguments` are its keyword arguments. Raises UsageError for one that it does not take.
    """
    import dask_jobqueue

    options = {"cores": 1, "processes": 1, "memory": "4GB", **arguments}
    threads = max(1, options["cores"] // options["processes"])
    prologue = [f"export {variable}={threads}" for variable in THREAD_VARIABLES]
    prologue += ["export DASK_DISTRIBUTED__WORKER__DAEMON=False", *options.pop("job_script_prologue", [])]
    extra = ["--nthreads", "1", *options.pop("worker_extra_args", [])]
    make = {"slurm": dask_jobqueue.SLURMCluster, "pbs": dask_jobqueue.PBSCluster}[kind]
    options["scheduler_options"] = {"dashboard_address": dashboard} | options.get("scheduler_options", {})
    try:
        return make(**options, job_script_prologue=prologue, worker_extra_args=extra)
    except (TypeError, ValueError) as error:
        expected = f"expected keyword arguments of dask-jobqueue's {make.__name__}"
        raise UsageError(f"--settings: {expected}, got an error: {str(error).splitlines()[0]}") from None
