"""Which rows the table of a localisation has: all of a short one, and of a long one those around what is wrong."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch

from labkit.session.catalogue import ROOT
from whywrong import Precision, Table, Trace, assert_close, capture, golden, localise, step
from whywrong.checking.findings import SHORT_TABLE
from whywrong.reporting.command import main

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FLOAT32 = Precision("float32")
X, WEIGHTS = torch.linspace(0.1, 1.0, 40), list(torch.linspace(0.5, 1.5, 9))
INPUTS = {"given": X} | {f"weights.{k}": w for k, w in enumerate(WEIGHTS)}
RED = "\x1b[1;31m"


def chain(given, weights, wrong=""):
    """26 steps, one after the other; those that are named are off."""
    x, made = given, {}
    for k, letter in enumerate(LETTERS):
        x = x * weights[k % len(weights)] + (1.01 if letter in wrong else 1.0)
        made[letter] = x
    return made


def looped(given, later=0.5):
    x, made = given, {}
    for k in range(20):
        made[f"h.{k}"] = x = x * (later if k >= 15 else 0.5)
    return made


@pytest.fixture(scope="module")
def recorded():
    return golden(chain, given=X, weights=WEIGHTS)


def observed(wrong="", without=""):
    return INPUTS | {name: x for name, x in chain(X, WEIGHTS, wrong).items() if name not in without}


def names(report, **how):
    return [row[0] for row in report.table(**how).rows]


def counted(table):
    """How many steps the last line says were left out, by their kinds; and how many it says there are."""
    counts, every = re.fullmatch(r"left out: (.*); table\(full=True\), .* show all (\d+) steps", table.note).groups()
    return {kind: int(n) for kind, n in re.findall(r"(.+?) \((\d+)\)(?:, )?", counts)}, int(every)


def test_a_long_table_has_the_first_wrong_step_its_neighbours_and_the_other_own_errors(recorded):
    report = localise(observed("kt"), recorded, precision=FLOAT32)
    assert names(report) == ["...", "i", "j", "k", "l", "m", "...", "t", "..."]
    assert counted(report.table()) == ({"inputs": 10, "ok": 8, "inherited only": 12}, 36)
    assert [report.table().rows[k][0] for k in report.table().marked] == ["k", "t"]


def test_full_has_every_step_and_no_last_line(recorded):
    table = localise(observed("kt"), recorded, precision=FLOAT32).table(full=True)
    assert [row[0] for row in table.rows] == [*INPUTS, *LETTERS]
    assert table.note == ""
    assert [table.rows[k][0] for k in table.marked] == ["k", "t"]


@pytest.mark.parametrize("count", [SHORT_TABLE, SHORT_TABLE + 1])
def test_what_fits_is_shown_whole(count):
    steps = {letter: torch.ones(3) for letter in LETTERS[:count]}
    report = localise(steps | {"a": torch.zeros(3)}, Trace(steps))
    whole = count == SHORT_TABLE
    assert names(report) == ([*LETTERS[:count]] if whole else ["a", "b", "c", "..."])
    assert (report.table().note == "") == whole
    assert ("left out" in repr(report)) != whole
    assert ("left out" in report._repr_html_()) != whole


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("wrong", ["", "a", "b", "z", "az", LETTERS])
@pytest.mark.parametrize("without", ["", "yz", "cd"])
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("program", [True, False])
def test_what_is_shown_and_what_was_left_out_is_all(recorded, wrong, without, extra, program):
    more = {f"more.{k}": X for k in range(extra)}
    against = recorded if program else recorded.trace()
    report = localise(observed(wrong, without) | more, against, precision=FLOAT32)
    table = report.table()
    left, every = counted(table) if table.note else ({}, len(table.rows))
    shown = [row for row in table.rows if row[0] != "..."]
    assert len(shown) + sum(left.values()) == every == len(names(report, full=True))
    assert len(shown) < every or not left
    assert left.get("not in the golden", 0) == extra
    own = [name for name, f in report.findings.items() if f.wrong and f.total is not None]
    assert {*own[:SHORT_TABLE]} <= {*names(report)}
    assert left.get("wrong", 0) == max(0, len(own) - SHORT_TABLE)
    assert report.first is None or report.first in names(report)


def test_steps_of_a_loop_that_are_one_row_are_counted_each():
    report = localise({"given": X, **looped(X, 0.25)}, golden(looped, given=X), precision=FLOAT32)
    assert names(report) == ["given", "h.0 ... h.19"]
    assert names(report, full=True) == ["given", *(f"h.{k}" for k in range(20))]

    def again(given):
        for _ in range(4):
            given = step("x", torch.tanh(given))
        return given

    made, name = {"given": X}, ""
    for k in range(4):
        name, value = f"x#{k + 1}" if k else "x", torch.tanh(made[name or "given"]) * (1.0 + 0.1 * (k > 1))
        made[name] = value
    found = localise(made, golden(again, given=X), precision=FLOAT32)
    assert names(found) == ["given", "x ... x#4"]
    assert found.loops == {"x ... x#4": ["x", "x#2", "x#3", "x#4"]}
    assert found.table().rows[1][-1].startswith("wrong from 3 on: ")

    def both(given, weights):
        return looped(given) | chain(given, weights)

    made = observed("k") | looped(X)
    table = localise(made, golden(both, given=X, weights=WEIGHTS), precision=FLOAT32).table()
    left, every = counted(table)
    assert left == {"inputs": 10, "ok": 28, "inherited only": 13}
    assert sum(left.values()) + sum(row[0] != "..." for row in table.rows) == every == 56


def test_where_nothing_is_wrong_the_step_nearest_to_its_tolerance_is_shown(recorded):
    report = localise(observed(), recorded, precision=FLOAT32)
    nearest = max(report.findings.values(), key=lambda finding: finding.own.bound_used).name
    assert report.first is None
    assert nearest in names(report)
    assert len(names(report)) <= 7
    assert not report.table().marked


def test_inputs_that_differ_are_shown(recorded):
    report = localise(observed() | {"weights.3": WEIGHTS[3] + 1.0}, recorded, precision=FLOAT32)
    assert names(report) == ["...", "weights.3", "...", "a", "b", "..."]
    assert counted(report.table())[0] == {"inputs": 9, "not checked": 24}


def test_parameters_that_differ_are_counted_with_the_errors():
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(10)))
    port = copy.deepcopy(module)
    for parameter in port.parameters():
        parameter.data += 0.1
    x = torch.randn(3, 5)
    report = localise(capture(port, x), golden(module, x), precision=FLOAT32)
    assert {*report.own} == {name for name, _ in module.named_parameters()}
    assert counted(report.table()) == ({"inputs": 1, "wrong": 20 - SHORT_TABLE, "inherited only": 57, "ok": 2}, 82)


def test_wrong_rows_are_in_colour_in_a_notebook(recorded):
    report = localise(observed("kt"), recorded, precision=FLOAT32)
    coloured = re.findall(r"<tr style=[^>]*background[^>]*><td[^>]*>(.*?)<", report._repr_html_())
    assert coloured == ["k", "t"]
    assert "<p>left out: " in report._repr_html_()
    assert "background" not in localise(observed(), recorded, precision=FLOAT32)._repr_html_()


@pytest.mark.parametrize(("terminal", "variables"), [(True, {}), (True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"})])
def test_wrong_rows_are_in_colour_in_a_terminal_that_has_colours(recorded, monkeypatch, terminal, variables):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm", "COLUMNS": "60"} | variables).items():
        monkeypatch.setenv(name, value)
    report = localise(observed("k"), recorded, precision=FLOAT32)
    assert RED not in repr(report), "standard output is no terminal here"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    lines = repr(report).splitlines()
    coloured = [line for line in lines if line.startswith(RED)]
    assert all(line.endswith("\x1b[0m") for line in coloured)
    assert "\x1b" not in "".join(line for line in lines if line not in coloured)
    assert bool(coloured) == (not variables)
    assert not coloured or " ".join("".join(line[len(RED) : -4] for line in coloured).split()).startswith("k ")


def test_what_files_hold_has_no_colour(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = str(Table(("a",), [(f"{RED}b",), (f"{RED}c",)], f"{RED}d", note=f"{RED}e", marked=(1,)))
    assert text.count("\x1b") == 2
    assert text.count("\\x1b[1;31m") == 4


@pytest.fixture
def files(recorded, tmp_path):
    recorded.save(tmp_path / "golden.safetensors")
    Trace(observed("kt")).save(tmp_path / "observed.safetensors")
    return [str(tmp_path / name) for name in ("golden.safetensors", "observed.safetensors")]


def test_the_command_prints_the_short_table_and_with_full_all_of_it(files, capsys, monkeypatch):
    def rows(*options):
        assert main(["diff", *files, *options]) == 1
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[0] for line in lines[2 : lines.index("")] if line[0] != " "]

    assert rows() == ["...", "i", "j", "k", "l", "m", "...", "t", "...", "left"]
    assert rows("--full") == [*INPUTS, *LETTERS]
    assert main(["diff", *files, "--json"]) == 1
    assert [*json.loads(capsys.readouterr().out)["steps"]] == [*INPUTS, *LETTERS]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["diff", *files]) == 1
    assert {line[len(RED)] for line in capsys.readouterr().out.splitlines() if line.startswith(RED)} >= {"k", "t"}


def test_the_page_has_a_row_for_every_step_which_leads_to_that_step(tmp_path, capsys):
    paths = [tmp_path / name for name in ("golden.safetensors", "observed.safetensors", "page.html")]
    golden(looped, given=X).save(paths[0])
    Trace({"given": X, **looped(X, 0.25)}).save(paths[1])
    assert main(["diff", *map(str, paths[:2]), "--html", str(paths[2])]) == 1
    assert "h.0 ... h.19" in capsys.readouterr().out
    rows = re.findall(r'<tr data-step.*?<span class="(\w+)">.*?<a href="#(step-\d+)">(.*?)</a>', paths[2].read_text())
    assert rows == [
        (f"{'wrong' if k > 15 else 'ok'}", f"step-{k}", name)
        for k, name in enumerate(["given", *(f"h.{k}" for k in range(20))])
    ]
    sections = dict(re.findall(r'<section id="(step-\d+)">\s*<h2>(.*?)</h2>', paths[2].read_text()))
    assert [sections[place] for _, place, _ in rows] == [name for *_, name in rows]


TESTS = """
from tests.whywrong.test_findings import FLOAT32, WEIGHTS, X, assert_close, chain, golden, localise, observed

def test_of_a_table():
    report = localise(observed("kt"), golden(chain, given=X, weights=WEIGHTS), precision=FLOAT32)
    assert report.first is None, str(report)

def test_of_an_assertion():
    assert_close(observed("kt"), golden(chain, given=X, weights=WEIGHTS), precision=FLOAT32)
"""


@pytest.mark.long
@pytest.mark.parametrize("verbosity", ["-v", "-vv"])
def test_pytest_shows_the_short_table_and_all_of_it_when_asked_twice(tmp_path, verbosity):
    (tmp_path / "test_long.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        verbosity,
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        tmp_path,
    ]
    done = subprocess.run([*command, "--tb=short"], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert "2 failed" in done.stdout, done.stdout + done.stderr
    of_a_table, of_an_assertion = re.split("^_+ test_of_", done.stdout, flags=re.MULTILINE)[1:]
    every = verbosity == "-vv"
    assert ("left out: inputs (10), ok (8), inherited only (12)" in of_a_table) != every
    assert "own errors: k, t; inherited only: 14 steps" in of_an_assertion
    for text in (of_a_table, of_an_assertion):
        rows = [re.findall(rf"^E +{re.escape(name)} .* ok$", text, re.MULTILINE) for name in INPUTS]
        assert all(rows) == any(rows) == every


def test_a_message_names_a_few_steps_that_inherit_and_counts_many(recorded):
    with pytest.raises(AssertionError, match="own errors: k; inherited only: 15 steps"):
        assert_close(observed("k"), recorded, precision=FLOAT32)
    with pytest.raises(AssertionError, match="own errors: x; inherited only: y, z"):
        assert_close(observed("x"), recorded, precision=FLOAT32)
