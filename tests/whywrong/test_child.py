"""Calls in a process that may die: each end is one line, the next call works, and no process is left."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest
import torch

from whywrong import child
from whywrong.child import Child, DiedError, RaisedError, TimedOutError, _works_below

pytestmark = pytest.mark.skipif(not child.available(), reason="children are for Linux without a GPU")


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError


def detached():
    """Sleeps in another session, its parent gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def waited_for():
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def spin(seconds):
    """Takes so much of a core; waits without one if negative."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    time.sleep(600.0 * (seconds < 0))
    return "spun"


def eat():
    held = []
    while True:
        held.append(torch.ones(1 << 22))


def act(kind, value=None):
    if kind == "leak":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    deeds = {"segfault": lambda: ctypes.string_at(0), "abort": os.abort, "exit": lambda: os._exit(3)}
    deeds |= {"sleep": lambda: time.sleep(600), "memory": eat, "stderr": lambda: os.close(2), "fork": os.fork}
    deeds |= {"forked and waited": waited_for, "detached": detached, "sys.exit": sys.exit, "parent": kill_parent}
    if kind in deeds:
        deeds[kind]()
    if kind == "raise":
        raise value
    return value


def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def descendants(pid):
    """The processes of this session's test, by what they were started from."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found += [int(stat.parent.name), *descendants(int(stat.parent.name))]
    return found


@pytest.fixture
def made():
    before = set(descendants(os.getpid()))
    with Child(act, memory=1 << 30) as one:
        yield one
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("segfault", r"died: Segmentation fault \(signal 11\)"),
        ("abort", r"died: Aborted \(signal 6\)"),
        ("exit", "ended the process, with exit code 3"),
        ("sleep", r"had not ended after 0\.3 s"),
        ("stderr", "closed or replaced standard error"),
        ("fork", "forked a process, which returned from the call too"),
        ("parent", "ended the process above its own"),
    ],
)
def test_an_end_is_one_line_and_the_next_call_works(made, kind, words):
    assert made("say", 1) == 1
    with pytest.raises(DiedError, match=f"^{words}$"):
        made(kind, seconds=0.3 if kind == "sleep" else 60.0)
    assert made("say", 2) == 2


@pytest.mark.parametrize("kind", ["forked and waited", "leak", "detached"])
def test_what_a_call_starts_does_not_disturb_it_and_ends_with_it(made, kind):
    assert made(kind, 3) == 3
    assert made("say", 4) == 4


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (UnspeakableError(), "UnspeakableError"),
    ],
)
def test_what_a_call_raises_is_one_line(made, error, words):
    with pytest.raises(RaisedError, match=words):
        made("raise", error)


def test_memory_has_an_end(made):
    with pytest.raises((RaisedError, DiedError), match=r"memory|Killed"):
        made("memory", seconds=60.0)


def test_tensors_lie_on_the_other_side_as_they_lie_here(made):
    x = torch.arange(24.0).reshape(4, 6)
    given = {"view": x[1:, ::2].T, "all": x, "none": torch.empty(0, 3), "half": x.bfloat16(), "one": torch.ones(3, 1)}
    back = made("say", given | {"wide": x[:1].expand(4, 6)})
    assert all(torch.equal(back[name], y) and back[name].stride() == y.stride() for name, y in given.items())
    assert (back["wide"].stride(), back["wide"].untyped_storage().nbytes()) == ((0, 1), 24 * 4)
    back["all"][1, 0] = 99.0
    assert back["view"][0, 0] == 99.0
    assert x[1, 0] == 6.0


def test_a_call_costs_less_than_two_milliseconds(made):
    x = torch.ones(1 << 12)
    made("say", x)
    assert sorted(timeit.repeat(lambda: made("say", x), number=1, repeat=50))[12] < 2e-3, "beside other work some do"


def test_an_interrupt_ends_the_call_and_the_next_one_works(made):
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        made("sleep")
    assert made("say", 5) == 5


@pytest.mark.long
def test_it_ends_with_the_process_that_began_it():
    code = "import os; from whywrong.child import Child; c = Child(os.getpid); print(c(), flush=True); os._exit(0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    for _ in range(200):
        if not Path(f"/proc/{int(run.stdout)}").exists():
            return
        time.sleep(0.02)
    pytest.fail("the worker is still there")


def test_a_closure_is_called_and_time_is_kept():
    with Child(lambda: act("say", sys.version)) as one:
        assert one() == sys.version
    with Child(lambda: time.sleep(60)) as one:
        start = time.monotonic()
        with pytest.raises(TimedOutError):
            one(seconds=0.2)
        assert time.monotonic() - start < 5.0


def test_the_time_that_a_worker_waits_for_a_core_is_not_counted():
    """On one core that four others use as well."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with Child(spin) as one:
            began = time.monotonic()
            assert one(0.8, seconds=1.2) == "spun"
            assert time.monotonic() - began > 1.2
            with pytest.raises(TimedOutError):
                one(-1.0, seconds=0.3)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(("state", "works"), [("R", True), ("D", True), ("S", False), ("Z", False)])
def test_a_compiler_works_where_it_runs_or_reads(state, works, monkeypatch):
    started_by = {1: [(2, "S")], 2: [(3, state)], 3: []}
    monkeypatch.setattr("whywrong.child._children", started_by.__getitem__)
    assert _works_below(1) == works


def started(code):
    return subprocess.run([sys.executable, "-c", code], check=True).returncode


@pytest.mark.long
def test_the_time_that_a_worker_waits_for_a_compiler_is_not_counted():
    """Which is a process that works; one that sleeps is not waited for."""
    with Child(started) as one:
        assert (
            one("import time; end = time.process_time() + 3.0\nwhile time.process_time() < end: pass", seconds=1.2) == 0
        )
        with pytest.raises(TimedOutError):
            one("import time; time.sleep(60)", seconds=1.2)
