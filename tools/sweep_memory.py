"""Memory of Dask's scheduler while a sweep hands it 100,000 points that do nothing.

python -m tools.sweep_memory [POINTS] prints the resident memory every tenth of them.
"""

import sys
import time

import psutil
from distributed import Client, LocalCluster

from labkit.cli.cluster import DASK
from labkit.cli.sweep import completed


def same(point):
    return f"ok {point['seed']}"


def main(count):
    """The scheduler runs in this process, with the sweep's own loop."""
    import dask

    this, begun = psutil.Process(), time.monotonic()
    with (
        dask.config.set(DASK),
        LocalCluster(n_workers=2, threads_per_worker=32, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for done, (_, status) in enumerate(completed(client, same, ({"seed": i} for i in range(count)), 0), 1):
            assert status.startswith("ok") or not status
            if done % (count // 10) == 0 or done == 1:
                mb, tasks = this.memory_info().rss / 2**20, len(cluster.scheduler.tasks)
                print(f"{done} points, {time.monotonic() - begun:.0f} s: {mb:.0f} MB, {tasks} tasks known", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
