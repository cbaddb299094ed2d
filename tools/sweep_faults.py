"""Faults at random moments over a sweep: none of its runs may be lost, and none falsely ok.

    python -m tools.sweep_faults 500 [SEED] [OUT.csv]

Kernel, executor, worker or `labkit sweep` itself is killed with SIGKILL; files of runs are cut off at a random length;
what a process may write is limited to some bytes, which is a full disk to it. A sweep that has ended is begun again.
At the end one sweep runs without faults, and has to find or make every run.
"""

import csv
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import nbformat
import psutil

from labkit.session.catalogue import ROOT
from labkit.session.record import complete
from whywrong.errors import UsageError

KINDS = ("kernel", "executor", "worker", "labkit", "cut off", "full disk")
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


def started(folder, *arguments):
    """`labkit sweep` on that folder's notebooks, its words in FOLDER/said.txt."""
    environment = {"LABKIT_NOTEBOOKS": str(folder / "books"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "labkit", "sweep", *map(str, arguments), "--out", str(folder / "runs")]
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen(command, env=os.environ | environment, stdout=said, stderr=said, start_new_session=True)


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


def processes(sweep):
    """The processes below `labkit sweep` by what they are."""
    found = {kind: [] for kind in KINDS[:4]}
    try:
        found["labkit"] = [sweep]
        for one in sweep.children(recursive=True):
            words = " ".join(one.cmdline())
            if "ipykernel" in words:
                found["kernel"].append(one)
                found["executor"].append(one.parent())
            elif "spawn_main" in words and one.ppid() == sweep.pid:
                found["worker"].append(one)
    except psutil.NoSuchProcess:
        pass
    return found


def strike(kind, sweep, folder, draw):
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
    there = processes(sweep)
    targets = there["kernel"] + there["executor"] if kind == "full disk" else there[kind]
    if not targets:
        return None
    target = draw.choice(targets)
    try:
        if kind == "full disk":
            resource.prlimit(target.pid, resource.RLIMIT_FSIZE, (draw.randrange(4000), resource.RLIM_INFINITY))
        else:
            target.kill()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return True


def inject(count, folder, seed=0, workers=2, pause=1.5):
    """Strike `count` times. Returns how often each kind did, and what was lost or falsely ok, in words."""
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

    def begin():
        given = ("brief", "-p", f"seed=0..{POINTS - 1}", "-p", f"batch=0..{batch}", "--workers", workers)
        return started(folder, *given)

    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    draw.shuffle(kinds)
    command = begin()
    while sum(struck.values()) < count:
        time.sleep(draw.uniform(0.0, pause))
        if command.poll() is not None:
            if command.returncode == 0:
                batch += 1
            check()
            command = begin()
            continue
        if not processes(psutil.Process(command.pid))["kernel"]:  # nothing runs yet that could be hurt
            continue
        kind = kinds[sum(struck.values())]
        if done := strike(kind, psutil.Process(command.pid), folder, draw):
            struck[kind] += 1
            if kind == "cut off":
                cut.add(done)
        if kind == "labkit" and done:
            command.wait()
    if command.poll() is None:
        command.kill()
        command.wait()
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
