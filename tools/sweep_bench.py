"""What a sweep costs beyond its notebooks: runs of 2 s on 2 workers against the ideal.

    python -m tools.sweep_bench [RUNS] [OUT.csv]

The ideal is the wall time of plain papermill, one run after the other in one process, kernel start included, over the
workers; it is measured on a tenth of the runs. Twice it is shown: for a notebook that waits 2 s, and for one that
computes for 2 s. The start of the cluster is in the sweep's time, and is shown beside it.
"""

import csv
import os
import sys
import tempfile
import time
from pathlib import Path

import papermill

from labkit.cli import cluster, sweep
from tools.sweep_faults import write_notebook

WORKERS = 2
HEAD = (
    'seed: int = 0  # [0, 1000000] which\ndevice: str = "cpu"  # {auto, cpu} where',
    "import labkit, time\nlab = labkit.start('{name}', seed=seed, device=device)",
)
KINDS = {
    "waits": "time.sleep(2)",
    "computes": "end = time.process_time() + 2\nwhile time.process_time() < end: pass",
}


def main(count, folder):
    """A row for each kind."""
    os.environ["LABKIT_NOTEBOOKS"] = str(folder / "books")
    for name, cell in KINDS.items():
        head = [HEAD[0], HEAD[1].format(name=name)]
        write_notebook(folder / "books", name, [*head, cell, "lab.finish(verdict=None)"])
        some, begun = max(3, count // 10), time.monotonic()
        for seed in range(some):
            executed = folder / "executed.ipynb"
            os.environ["LABKIT_RUN_DIR"] = str(folder)
            papermill.execute_notebook(
                folder / "books" / f"{name}.ipynb", executed, {"seed": seed}, progress_bar=False, cwd=folder
            )
        del os.environ["LABKIT_RUN_DIR"]
        serial = (time.monotonic() - begun) / some
        begun, first = time.monotonic(), []
        points = sweep.grid(name, {"seed": f"0..{count - 1}"})

        def say(text, begun=begun, first=first):
            if "dashboard" in text:
                first.append(time.monotonic() - begun)

        with cluster.connect("local", WORKERS, False, None, 2) as connected:
            counts = sweep.sweep(*connected, name, points, folder / "runs", 2, say)
        wall, ideal = time.monotonic() - begun, serial * count / WORKERS
        assert counts == {"ok": count}, counts
        yield name, count, f"{serial:.2f}", f"{ideal:.1f}", f"{wall:.1f}", f"{first[0]:.1f}", f"{ideal / wall:.3f}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        rows = [("notebook", "runs", "papermill s a run", "ideal s", "sweep s", "of these start s", "of the ideal")]
        rows += main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, Path(place))
    csv.writer(sys.stdout).writerows(rows)
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", newline="") as file:
            csv.writer(file).writerows(rows)
