"""`labkit sweep`: its points, its clusters, and runs whose workers die."""

import json
import os
import shutil
import signal
import time

import pandas
import psutil
import pytest

from labkit.cli import cluster as clusters
from labkit.cli import sweep, table
from labkit.cli.main import main
from tools.sweep_faults import CELLS, KINDS, OF_A_CLUSTER, Cluster, inject, ok_runs, processes, started, write_notebook
from whywrong.errors import UsageError

# An error in a thread of Dask's would leave the cluster waiting. A cluster refused its settings is never closed, and
# has no repr with which xdist could report the warning of that.
pytestmark = pytest.mark.filterwarnings("default", "ignore:unclosed cluster:ResourceWarning")

PARAMETERS = """
heads: int = 12  # [1, 128] number of heads
scale: float = 0.5  # [0, 1] a factor
word: str = "a"  # {a, b} a word
device: str = "cpu"  # {auto, cpu} where kernels run
"""
START = "import labkit\nlab = labkit.start('{name}', heads=heads, scale=scale, word=word, device=device)"
FINISH = "lab.finish(verdict=None, metrics={'product': heads * scale, 'list': [heads]})"

ISOLATED = """
import builtins, os, pathlib, psutil, sys
server = psutil.Process().parent().parent()  # of the kernel: of the process that papermill runs in
assert "forkserver" in " ".join(server.cmdline()), server.cmdline()
assert "LEFT" not in os.environ and "left" not in sys.modules and not hasattr(builtins, "left")
assert pathlib.Path.cwd().name == "books", "not where the notebook is"
os.environ["LEFT"] = "x"
sys.modules["left"] = builtins.left = sys
os.chdir("/")
"""
DIES = """
flag = pathlib.Path({flag!r})
if heads == 2 and not flag.exists():
    flag.touch()
    server.parent().kill()  # the worker
if heads == 3:
    raise ValueError("three")
if heads == 4:
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def books(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_NOTEBOOKS", str(tmp_path / "books"))

    def add(name, *cells):
        write_notebook(tmp_path / "books", name, [PARAMETERS, START.format(name=name), *cells, FINISH])

    add("brief")
    return add


def test_a_grid_has_each_combination_once(books):
    points = sweep.grid("brief", {"heads": "1..3,8,2", "scale": "0..0.3..0.1", "word": "b,a"})
    assert len(points) == 4 * 4 * 2
    assert [point["heads"] for point in points[::8]] == [1, 2, 3, 8]
    assert sorted({point["scale"] for point in points}) == [0.0, 0.1, 0.2, 0.3]  # not 0.30000000000000004
    assert points[0] == {"heads": 1, "scale": 0.0, "word": "b"}
    assert sweep.grid("brief", {}) == [{}]


def test_a_sample_is_always_the_same_and_more_have_the_fewer_among_them(books):
    given = {"heads": "1..128", "scale": "0..1..0.001"}
    few, many = sweep.grid("brief", given, 20), sweep.grid("brief", given, 40)
    assert few == many[:20] == sweep.grid("brief", given, 20)
    assert len({(point["heads"], point["scale"]) for point in many}) == 40
    assert sorted(map(str, sweep.grid("brief", {"heads": "1..9"}, 50))) == sorted(
        map(str, sweep.grid("brief", {"heads": "1..9"}))
    )


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["heads=1..200"], "parameter heads: expected int in [1, 128], got 129"),
        (["heads=1,x"], "parameter heads: expected int in [1, 128], got 'x'"),
        (["heads=5..1"], "parameter heads: expected low..high..step, at most 1,000,000 values, got '5..1'"),
        (["heads=5..4.5"], "parameter heads: expected low..high..step, at most 1,000,000 values, got '5..4.5'"),
        (["heads=1...3"], "parameter heads: expected low..high..step, at most 1,000,000 values, got '1...3'"),
        (["scale=0...5"], "parameter scale: expected low..high..step, at most 1,000,000 values, got '0...5'"),
        (["heads=1..8..0"], "parameter heads: expected low..high..step, at most 1,000,000 values, got '1..8..0'"),
        (["heads=1..2..3..4"], "parameter heads: expected low..high..step, at most 1,000,000 values, got '1..2..3..4'"),
        (["heads=1..nan"], "parameter heads: expected low..high..step, at most 1,000,000 values, got '1..nan'"),
        (["heads=1..1e30"], "at most 1,000,000"),
        (["heads=1..4..0.5"], "parameter heads: expected int in [1, 128], got '1.0'"),
        (["head=1"], "parameter head: brief has none of that name; did you mean heads?"),
        (["heads=1", "heads=2"], "-p heads: it is given twice"),
        (
            ["heads=1..128", "scale=0..1..0.0001"],
            "expected at most 1,000,000 points, or --sample, got 1,280,128 points",
        ),
        (
            ["heads=1", "--cluster", "cloud"],
            "--cluster: expected local, slurm, pbs, or tcp://HOST:PORT of a scheduler that runs, got 'cloud'",
        ),
        (["heads=1", "--cluster", "tcp://127.0.0.1:1"], "--cluster: tcp://127.0.0.1:1 does not answer"),
        (["heads=1", "--settings", "none.yaml"], "--settings: none.yaml cannot be read"),
        (["heads=1", "--retries", "-1"], "--retries"),
        (["heads=1", "--cluster", "slurm", "--gpus"], "--gpus: does nothing for --cluster slurm"),
        (["heads=1", "--cluster", "tcp://127.0.0.1:1", "--workers", "2"], "--workers: does nothing for --cluster tcp:"),
        (["heads=1", "--cluster", "tcp://127.0.0.1:1", "--dashboard", ":0"], "--dashboard: does nothing for --cluster"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_starts(books, tmp_path, capsys, given, words, monkeypatch):
    monkeypatch.setattr(clusters, "CONNECT", 0.5)
    arguments = [part for word in given for part in (["-p", word] if word[:2] in ("he", "sc") else [word])]
    assert main(["sweep", "brief", *arguments, "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_folder_that_cannot_be_written_is_one_line_and_no_failed_run(books, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["sweep", "brief", "-p", "heads=1", "--workers", "1", "--out", str(tmp_path / "file")]) == 2
    assert "labkit: --out: " in capsys.readouterr().err


def test_local_workers_share_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [place["LABKIT_CORES"] for place in clusters.shares_of(3, gpus=False)] == ["0,1", "2,3,4", "5,6,7"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in clusters.shares_of(4, gpus=True)] == ["3", "5", "3", "5"]
    assert len(clusters.shares_of(None, gpus=True)) == 2
    assert len(clusters.shares_of(20, gpus=False)) == 20


@pytest.mark.parametrize(("kind", "queue"), [("slurm", "#SBATCH -p long"), ("pbs", "#PBS -q long")])
def test_a_jobs_script_asks_for_what_the_settings_say(kind, queue):
    given = {"queue": "long", "cores": 8, "processes": 2, "memory": "16GB", "walltime": "01:00:00"}
    with clusters.batch_cluster(kind, given | {"job_script_prologue": ["module load cuda"]}) as cluster:
        script = cluster.job_script()
    lines = script.splitlines()
    assert queue in lines
    assert any("01:00:00" in line for line in lines)
    before, command = lines[:-1], lines[-1]
    assert "distributed.cli.dask_worker" in command
    assert command.rindex("--nthreads 1") > command.index("--nthreads 4")  # a run at a time in each; the last counts
    assert "--nworkers 2" in command
    assert before.index("export OMP_NUM_THREADS=4") < before.index("module load cuda")
    assert "export DASK_DISTRIBUTED__WORKER__DAEMON=False" in before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the cluster that was not made
def test_settings_that_the_cluster_does_not_take_are_one_line():
    with pytest.raises(
        UsageError, match=r"^--settings: expected keyword arguments of dask-jobqueue's SLURMCluster, got "
    ):
        clusters.batch_cluster("slurm", {"queues": "long"})


@pytest.mark.long
def test_runs_are_isolated_deaths_are_made_good_and_the_rest_goes_on(books, tmp_path, capsys):
    """One worker, so that all runs are forked from one server."""
    books("mixed", ISOLATED, DIES.format(flag=str(tmp_path / "flag")))
    command = [
        "sweep",
        "mixed",
        "-p",
        "heads=1..5",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "runs"),
        "--retries",
        "1",
    ]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "3 ok, 2 failed" in said.splitlines()[-3], said
    assert "heads=3: failed: cell" in said
    assert "ValueError: three" in said
    assert "heads=4: failed: the kernel was killed by SIGKILL" in said
    assert "2 attempts were lost with their process and made again" in said  # that of heads=2, and one of heads=4
    assert "dashboard: http://" in said
    where = os.path.relpath(tmp_path / "runs")
    assert said.splitlines()[-1] == f"Runs: {where}; labkit table mixed --runs {where} has them as a table"

    frame = table.runs("mixed", tmp_path / "runs")
    assert frame["parameters.heads"].tolist() == [1, 2, 3, 4, 5]
    assert frame["status"].tolist()[:3] == ["ok", "ok", "failed: ValueError: three"]
    assert frame["status"][3] == "failed: the kernel was killed by SIGKILL"
    assert frame["metrics.product"].dropna().tolist() == [0.5, 1.0, 2.5]
    assert main(["table", "mixed", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    title, left = shown.splitlines()[0].split(), int(shown.splitlines()[-1].split()[2])
    assert title[:3] == ["run", "heads", "status"]
    assert {*title[3:]} < {"seconds", "metrics.product", "metrics.list"}, "as many as a line has room for"
    assert len(title[3:]) + left == 2 + (frame["seconds"].nunique() > 1)
    assert "word" not in shown, "it does not vary"
    assert max(map(len, shown.splitlines())) <= 80
    for name, read in {"all.parquet": pandas.read_parquet, "all.csv": pandas.read_csv}.items():
        assert main(["table", "mixed", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / name)]) == 0
        assert read(tmp_path / name)["metrics.list"].dropna().tolist() == ["[1]", "[2]", "[5]"]

    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/mixed/*/result.json")}
    assert main([*command[:3], "heads=1,2,5", *command[4:]]) == 0
    assert "3 ok (reused)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in made} == made

    run = next(iter(made)).parent
    shutil.copytree(run, run.with_name("copied"))
    statuses = table.runs("mixed", tmp_path / "runs").set_index("run")["status"]
    assert (statuses[run.name], statuses["copied"]) == ("ok", "failed: result.json is of another run")


@pytest.mark.long
@pytest.mark.parametrize(("dashboard", "where"), [("", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0")])
def test_the_dashboard_listens_on_loopback_unless_an_address_is_given(dashboard, where):
    with clusters.connect("local", 1, False, None, 0, dashboard) as (client, _):
        port = int(client.dashboard_link.rpartition(":")[2].partition("/")[0])
        own = psutil.Process()
        sockets = [each for one in (own, *own.children(recursive=True)) for each in one.net_connections()]
        listening = {each.laddr.port: each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening.pop(port) == where
    assert {*listening.values()} == {"127.0.0.1"}


def until_running(root, folder):
    """Wait until two runs of a sweep have their kernels below `root`; the processes below it."""
    deadline = time.monotonic() + 240
    below = []
    while sum("ipykernel" in " ".join(one.cmdline()) for one in below) < 2:
        assert time.monotonic() < deadline, (folder / "said.txt").read_text()
        time.sleep(0.3)
        below = [one for one in root.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return below


@pytest.mark.long
def test_a_sweep_goes_on_where_one_worker_of_two_is_killed(books, tmp_path):
    write_notebook(tmp_path / "books", "brief", CELLS)
    command = started(tmp_path, "brief", "-p", "seed=0..3", "--workers", 2)
    sweep = psutil.Process(command.pid)
    until_running(sweep, tmp_path)
    processes(sweep)["worker"][0].kill()
    code, said = command.wait(timeout=240), (tmp_path / "said.txt").read_text()
    assert code == 0, said
    assert "4 of 4 (4 ok)" in said
    assert "1 attempts were lost with their process and made again" in said


@pytest.mark.long
def test_a_local_worker_whose_nanny_has_given_up_is_replaced():
    import dask

    quick = dask.config.set({"distributed.deploy.lost-worker-timeout": "1s"})
    with quick, clusters.connect("local", 1, False, None, 0) as (client, _):
        ((first, _),) = client.nthreads().items()
        client.cluster.sync(client.cluster.workers[0].close)
        deadline = time.monotonic() + 60
        while not client.nthreads() or first in client.nthreads():
            assert time.monotonic() < deadline, "it stays lost, and the sweep waits for ever"
            time.sleep(0.2)
        assert client.submit(os.getpid).result(30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nanny", "scheduler"])
def test_a_nanny_or_a_scheduler_that_is_killed_loses_no_run(books, tmp_path, kind):
    write_notebook(tmp_path / "books", "brief", CELLS)
    with Cluster(tmp_path) as cluster:
        command = started(tmp_path, "brief", "-p", "seed=0..3", "--cluster", cluster.address)
        until_running(psutil.Process(), tmp_path)
        processes(psutil.Process(command.pid), cluster)[kind][0].kill()
        code, said = command.wait(timeout=240), (tmp_path / "said.txt").read_text()
    assert code == {"nanny": 0, "scheduler": 2}[kind], said
    if kind == "scheduler":
        expected = "labkit: --cluster: expected a scheduler that runs on, got one that has ended; finished runs"
        assert said.splitlines()[-1].startswith(expected)
        assert "Traceback" not in said
        assert started(tmp_path, "brief", "-p", "seed=0..3", "--workers", 2).wait(timeout=240) == 0
    assert len(ok_runs(tmp_path)) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_nothing_lives_on_when_a_sweep_ends(books, tmp_path, number):
    """SIGINT goes to all of its processes, as from a keyboard."""
    books("slow", "import time; time.sleep(600)")
    command = started(tmp_path, "slow", "-p", "heads=1,2", "--workers", 2)
    below = until_running(psutil.Process(command.pid), tmp_path)
    (os.killpg if number == signal.SIGINT else os.kill)(command.pid, number)
    code = command.wait(timeout=60)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert [one.cmdline() for one in alive] == []
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -9}[number]
    if number != signal.SIGKILL:
        assert "the same command takes up the rest" in (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize(("name", "words"), [("x.txt", "ends in .parquet or .csv"), ("no/x.csv", "cannot be written")])
def test_a_table_that_cannot_be_written_is_one_line(tmp_path, name, words):
    with pytest.raises(UsageError, match=rf"^--out: .*{words}"):
        table.write(pandas.DataFrame({"a": [1]}), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_runs_that_failed_and_those_before_a_new_parameter_have_their_rows(books, tmp_path):
    books("brief", "raise ValueError")
    runs = tmp_path / "runs"
    assert main(["run", "brief", "--out", str(runs)]) == 1
    assert "failed: ValueError" in table.printed(table.runs("brief", runs))
    books("brief", FINISH)
    assert main(["run", "brief", "--out", str(runs)]) == 0
    (book,) = tmp_path.glob("books/brief.ipynb")
    book.write_text(book.read_text().replace('"heads: int', '"extra: int = 1  # [1, 2] new\\nheads: int'))
    frame = table.runs("brief", runs)
    assert (len(frame), frame["parameters.extra"].isna().all()) == (2, True)


def test_a_notebook_without_runs_has_no_table(books, tmp_path, capsys):
    assert main(["table", "brief", "--runs", str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err


@pytest.mark.long
def test_fuzzing_on_a_cluster_stops_at_a_failure_and_counts_all(tmp_path):
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("distributed")

    def wrong(x):
        return x * 2 + (x.shape[0] > 30)

    with distributed.Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None) as client:
        x = torch.ones(8)
        found = sweep.fuzz(client, wrong, lambda x: x * 2, {"x": x}, seeds=range(8), examples=5)
        right = sweep.fuzz(client, lambda x: x * 2, lambda x: x * 2, {"x": x}, seeds=range(3), examples=5)
    assert found.found
    assert not right.found
    assert right.examples >= 10, "the counts of three fuzzings"


@pytest.mark.long
def test_faults_at_random_moments_lose_no_run_and_make_none_falsely_ok(tmp_path):
    """`python -m tools.sweep_faults 500` is the long form."""
    local = [kind for kind in KINDS if kind not in OF_A_CLUSTER]
    struck, wrong, _ = inject(12, tmp_path, seed=1, pause=0.5, of=local)
    assert (sum(struck.values()), len(struck)) == (12, len(local))
    assert json.dumps(wrong) == "[]"
