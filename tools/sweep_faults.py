"""Faults at random moments over a sweep: none of its runs may be lost, and none falsely ok.

    python -m tools.sweep_faults 500 [SEED] [OUT.csv]

Sweeps run by turns on labkit's own local cluster and on a scheduler and two nannies that run already. Kernel, executor,
worker, all workers at once, nanny, scheduler, all of the cluster at once, or `labkit sweep` itself is killed with
SIGKILL; files of runs are cut off at a random length; what a process may write is limited to some bytes, which is a
full disk to it. A sweep that has ended is begun again; it may end with 2 only if its scheduler was killed. At the end
one sweep runs without faults, and has to find or make every run.
"""

import csv
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil

from labkit.session.catalogue import ROOT
from labkit.session.record import complete
from whywrong.errors import UsageError

SINGLE = ("kernel", "executor", "worker", "labkit", "nanny", "scheduler")
TOGETHER = {"workers": ("worker",), "cluster": ("scheduler", "nanny", "worker")}
OF_A_CLUSTER = ("nanny", "scheduler", "cluster")
"""Kinds that need a cluster which runs already."""
KINDS = (*SINGLE, *TOGETHER, "cut off", "full disk")
POINTS = 8
"""Runs of one sweep; when all are made, the next has others."""
CELLS = (
    'batch: int = 0  # [0, 1000000] sweep\nseed: int = 0  # [0, 1000] point\ndevice: str = "cpu"  # {auto, cpu} where',
    "import time\nimport labkit\nlab = labkit.start('brief', batch=batch, seed=seed, device=device)",
    "time.sleep(0.25)\nfirst = 1000 * batch",
    "time.sleep(0.25)\nlab.finish(verdict=None, metrics={'sum': first + seed})",
)


def write_notebook(folder, name, cells):
    """A notebook whose first cell declares the parameters."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.cells[0].metadata["tags"] = ["parameters"]
    book.metadata = {"kernelspec": {"name": "python3", "display_name": "p", "language": "python"}}
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, folder / f"{name}.ipynb")


def environment(folder):
    """The environment of `labkit sweep`, and of workers, on that folder's notebooks."""
    own = {"LABKIT_NOTEBOOKS": str(folder / "books"), "PYTHONPATH": str(ROOT)}
    return os.environ | own | {"DASK_DISTRIBUTED__WORKER__DAEMON": "False"}


def started(folder, *arguments):
    """`labkit sweep` on that folder's notebooks, its words in FOLDER/said.txt."""
    command = [sys.executable, "-m", "labkit", "sweep", *map(str, arguments), "--out", str(folder / "runs")]
    with (folder / "said.txt").open("a") as said:
        streams = {"stdout": said, "stderr": said}
        return subprocess.Popen(command, env=environment(folder), **streams, start_new_session=True)


class Cluster:
    """A scheduler and nannies of workers, each a process of its own."""

    def __init__(self, folder, workers=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.folder, self.scheduler, self.nannies = folder, None, [None] * workers

    def __enter__(self):
        """Start what does not run."""
        at, page = ["--host", "127.0.0.1"], ["--dashboard-address", "127.0.0.1:0"]
        if not alive(self.scheduler):
            self.scheduler = self._start("scheduler", *at, "--port", self.address.rpartition(":")[2], *page)
        for k, nanny in enumerate(self.nannies):
            if not alive(nanny):
                self.nannies[k] = self._start("worker", self.address, *at, "--nthreads", "1", *page)
        return self

    def _start(self, *words):
        streams, here = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}, {"cwd": self.folder}
        command = [sys.executable, "-m", "distributed.cli.dask_" + words[0], *words[1:]]
        return subprocess.Popen(command, env=environment(self.folder), **streams, **here)

    def __exit__(self, *_):
        for process in filter(alive, [self.scheduler, *self.nannies]):
            for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def alive(process):
    """Whether a process was started and has not ended."""
    return process is not None and process.poll() is None


def ok_runs(folder):
    """The runs that call themselves ok, by folder: parameters, sum, and when result.json was made."""
    found = {}
    for path in (folder / "runs" / "brief").glob("*/result.json"):
        try:
            result = complete(path.parent)
        except UsageError:
            continue
        given = result["parameters"]
        found[path.parent] = (given["batch"], given["seed"], result["metrics"]["sum"], path.stat().st_mtime_ns)
    return found


def processes(sweep, cluster=None):
    """The processes of a sweep, and of the cluster that it uses, by what they are."""
    found = {kind: [] for kind in SINGLE}
    found["labkit"] = [sweep]
    if cluster:
        found["scheduler"] = [psutil.Process(cluster.scheduler.pid)] if alive(cluster.scheduler) else []
        found["nanny"] = [psutil.Process(nanny.pid) for nanny in filter(alive, cluster.nannies)]
    for root in found["nanny"] if cluster else [sweep]:
        with suppress(psutil.NoSuchProcess):
            for one in root.children(recursive=True):
                words = " ".join(one.cmdline())
                if "ipykernel" in words:
                    found["kernel"].append(one)
                    found["executor"].append(one.parent())
                elif "spawn_main" in words and one.ppid() == root.pid:
                    found["worker"].append(one)
    return found


def strike(kind, there, folder, draw):
    """One fault; returns the folder of the run whose file was cut off, True for another, None if none could be."""
    if kind == "cut off":
        files = [path for path in (folder / "runs").rglob("*") if path.is_file() and path.stat().st_size]
        files = [path for path in files if path.name not in ("report.html", "log.txt")]
        if not files:
            return None
        path = draw.choice(files)
        try:
            os.truncate(path, draw.randrange(path.stat().st_size))
        except OSError:  # it has moved on
            return None
        return next(parent for parent in path.parents if parent.parent.name == "brief")
    if kind in TOGETHER:
        targets = [one for part in TOGETHER[kind] for one in there[part]]
        if not all(there[part] for part in TOGETHER[kind]):
            return None
    else:
        choice = there["kernel"] + there["executor"] if kind == "full disk" else there[kind]
        targets = [draw.choice(choice)] if choice else []
    struck = None
    for target in filter(None, targets):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if kind == "full disk":
                resource.prlimit(target.pid, resource.RLIMIT_FSIZE, (draw.randrange(4000), resource.RLIM_INFINITY))
            else:
                target.kill()
            struck = True
    return struck


def inject(count, folder, seed=0, workers=2, pause=1.5, of=KINDS):
    """Strike `count` times, by turns by each kind in `of`.

    Returns how often each kind did, and what was lost or falsely ok, in words.
    """
    write_notebook(folder / "books", "brief", CELLS)
    draw, struck, wrong, batch, cut, seen = random.Random(seed), Counter(), [], 0, set(), {}

    def check():
        """Each ok run has the right sum, and is the one that was ok before, unless its files were cut off."""
        now = ok_runs(folder)
        for run, (of, point, total, _) in now.items():
            if total != 1000 * of + point:
                wrong.append(f"falsely ok: {run}")
        for run, before in seen.items():
            if run not in cut and now.get(run) != before:
                wrong.append(f"lost: {run}")
        seen.clear()
        seen.update(now)
        cut.clear()

    def begin(*where):
        points = ("-p", f"seed=0..{POINTS - 1}", "-p", f"batch=0..{batch}")
        return started(folder, "brief", *points, *(where or ("--workers", workers)))

    kinds = [of[number % len(of)] for number in range(count)]
    draw.shuffle(kinds)
    own = {*OF_A_CLUSTER}
    command, cluster, excused = None, Cluster(folder, workers), False
    while kinds:
        if not alive(command):
            if command is not None and command.returncode not in (0, 1, -9) and not excused:
                said = (folder / "said.txt").read_text()[-300:]
                wrong.append(f"a sweep ended with {command.returncode} and its scheduler ran: {said}")
            batch += command is not None and command.returncode == 0
            check()
            external = not own.isdisjoint(kinds[:2])
            excused = False
            command = begin("--cluster", cluster.__enter__().address) if external else begin()
        time.sleep(draw.uniform(0.0, pause))
        if external:
            cluster.__enter__()  # nannies end some time after their scheduler
        there = processes(psutil.Process(command.pid), cluster if external else None)
        if not alive(command) or not there["kernel"]:  # nothing runs yet that could be hurt
            continue
        kind = next((kind for kind in kinds if external or kind not in own), kinds[0])
        if done := strike(kind, there, folder, draw):
            kinds.remove(kind)
            struck[kind] += 1
            cut |= {done} if kind == "cut off" else set()
            excused = excused or kind in ("scheduler", "cluster")
        if kind == "labkit" and done:
            command.wait()
    if alive(command):
        command.kill()
        command.wait()
    cluster.__exit__()
    check()
    code = begin().wait()
    check()
    made = {(of, point) for of, point, _, _ in seen.values()}
    wanted = {(of, point) for of in range(batch + 1) for point in range(POINTS)}
    wrong.extend(f"missing: {one}" for one in sorted(wanted - made))
    if code:
        wrong.append(f"the sweep without faults ended with {code}: {(folder / 'said.txt').read_text()[-500:]}")
    return struck, wrong, len(wanted)


if __name__ == "__main__":
    import tempfile

    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        struck, wrong, runs = inject(int(sys.argv[1]), Path(place), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    rows = [(kind, struck[kind]) for kind in KINDS]
    rows += [("runs", runs), ("lost or falsely ok", len(wrong)), ("seconds", round(time.monotonic() - begun))]
    csv.writer(sys.stdout).writerows([("fault", "times"), *rows])
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w", newline="") as file:
            csv.writer(file).writerows([("fault", "times"), *rows])
    print(json.dumps(wrong[:20], indent=1))
    sys.exit(bool(wrong))
