import csv
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.bench import timing as bench
from labkit.session.catalogue import ROOT
from labkit.session.device import Device
from whywrong.comparing.comparison import compare
from whywrong.errors import UsageError

CPU = Device("cpu", "test")


def provider(name, value):
    out = np.empty(4)

    def run():
        out[:] = value

    return bench.Provider(name, run, lambda: out.fill(np.nan), lambda: compare(out, np.ones(4), bound=1e-12))


def case(*providers):
    return bench.Case("k", "forward", "size", "4", providers, bytes=32, operations=4)


def test_what_is_wrong_is_not_timed(capsys):
    rows = list(bench.measure(case(provider("right", 1.0), provider("wrong", 1.1)), CPU))
    timed = {row["kernel_provider"] for row in rows if row["metric_name"] == "time"}
    assert timed == {"right"}
    assert {row["kernel_provider"] for row in rows if row["metric_name"] == "max_abs_error"} == {"right", "wrong"}
    assert "not timed, since it is wrong: wrong" in capsys.readouterr().out


def test_a_provider_that_writes_nothing_is_wrong(capsys):
    out = np.ones(4)
    idle = bench.Provider("idle", lambda: None, lambda: out.fill(np.nan), lambda: compare(out, np.ones(4), bound=1e-12))
    assert all(row["metric_name"] != "time" for row in bench.measure(case(idle), CPU))


def test_times_are_the_median_and_the_outer_fifths():
    median, low, high = bench.host_times(lambda: None, 0.0)
    assert 0.0 < low <= median <= high


def test_a_folder_without_a_bench_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"expected a folder under kernels/ with a bench\.py, got kernels/nothing"):
        bench.bench("nothing", "cpu", tmp_path)


@pytest.mark.long
def test_a_benchmark_is_added_to_what_was_recorded_before(tmp_path, monkeypatch):
    """Of each case the newest run is read, whatever was run beside it."""
    monkeypatch.setattr(bench, "made_by", lambda _: "hash")
    for name, day, run in [("A", 1, {"4": 1.0, "8": 1.0}), ("B", 2, {"4": 1.0}), ("A", 3, {"8": 1.0 + 5e-13})]:
        cases = [replace(case(provider("ours", x)), x_value=n) for n, x in run.items()]
        monkeypatch.setattr(bench, "import_module", lambda _, cases=cases: SimpleNamespace(cases=lambda _: cases))
        monkeypatch.setattr(bench, "datetime", SimpleNamespace(now=lambda _, day=day: datetime(2026, 1, day)))
        monkeypatch.setattr(bench.devices, "choose", lambda _, name=name: Device("cpu", name))
        path = bench.bench("attention", "cpu", tmp_path)
    rows = bench.read(path)
    errors = [(row["x_value"], float(row["y_value_50"])) for row in rows if row["metric_name"] == "max_abs_error"]
    assert errors == [("4", 0.0), ("8", pytest.approx(5e-13, rel=1e-3))], "in the order in which they first appear"
    assert bench.recorded_on(rows) == "B, 2026-01-02; A, 2026-01-03"
    assert bench.recorded_on([row | {"gpu_name": "A"} for row in rows]) == "A, 2026-01-02 to 2026-01-03"
    assert len(path.read_text().splitlines()) == 1 + 4 * 3, "four runs of a case, with two errors and a time each"


@pytest.mark.parametrize("text", ["", "mine\n1\n", ",".join(bench.COLUMNS) + "\nattention,ours\n"])
def test_a_file_with_other_columns_is_not_added_to(text, tmp_path):
    (tmp_path / "attention_cpu.csv").write_text(text)
    with pytest.raises(UsageError, match=r"attention_cpu\.csv: expected rows of kernel_name, .*, got other ones"):
        bench.bench("attention", "cpu", tmp_path)
    assert (tmp_path / "attention_cpu.csv").read_text() == text


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "benchmarks").glob("*.csv")), ids=lambda path: path.stem)
def test_the_newest_run_of_a_case_has_every_baseline_that_was_ever_timed(path):
    """One that is not installed is left out, and ours would look the faster for it."""
    with path.open(newline="") as file:
        every = {
            (*bench.case_of(row), row["kernel_provider"])
            for row in csv.DictReader(file)
            if row["metric_name"] == "time"
        }
    newest = {(*bench.case_of(row), row["kernel_provider"]) for row in bench.read(path)}
    assert {row for row in every - newest if not row[-1].startswith("ours")} == set()


@pytest.mark.parametrize(("name", "runs"), [("bert", 1), ("lm", 1)])
def test_the_runs_whose_tables_name_cards_and_dates_are_as_many(name, runs):
    assert len({row["timestamp"] for row in bench.read(ROOT / "data" / "benchmarks" / f"{name}.csv")}) == runs


def test_a_gpu_whose_peak_is_not_known_has_no_arithmetic_lower_bound(monkeypatch):
    monkeypatch.setattr(bench, "copy_rate", lambda: 1e12)
    case = bench.Case(
        "k", "forward", "n", "1", [], bytes=1000, operations=1, further_bounds={"compulsory traffic": 500}
    )
    gpu = SimpleNamespace(major=8, minor=0, multi_processor_count=10, clock_rate=1e5)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    assert bench.lower_bounds(case, Device("cuda", "test")) == {"traffic lower bound": 1e-3, "compulsory traffic": 5e-4}
    gpu.major = 9
    assert bench.lower_bounds(case, Device("cuda", "test"))["arithmetic lower bound, fp32"] == 1e6 / (10 * 256 * 1e8)
