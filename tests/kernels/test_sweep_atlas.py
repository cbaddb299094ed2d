"""A point of the sweep over sizes, the table of points, and what settles each claim."""

import pandas
import pytest

import labkit
from kernels.sweep_atlas import claims, experiments, figures
from whywrong.drawing import plots
from whywrong.errors import UsageError

TILE, OTHER, STRIDE, SILENT = claims.TILE, "first tile of 64 columns only", "pre without its stride over tokens", "eps"


def points(widths=(16, 32, 33, 65), streams=(1, 4), tokens=(1, 8)):
    """A table in which each fault is wrong where it is by its nature; rounding hides one."""
    rows = []
    for n in streams:
        for t in tokens:
            for d in widths:
                errors = {TILE: d > 32, OTHER: d > 64, STRIDE: n > 1 and t > 1, SILENT: False, "late": True}
                size = {name: 1e3 * wrong for name, wrong in errors.items()}
                rows += [{"n": n, "tokens": t, "d": d, "seed": seed, **size} for seed in (0, 1)]
    return pandas.DataFrame(rows)


@pytest.mark.parametrize(("d", "right"), [(16, True), (32, True), (33, False)])
def test_a_tile_is_exact_up_to_its_width_and_wrong_one_column_later(device, d, right):
    errors = experiments.point(4, 4, d, 0, device)
    assert (errors[TILE] <= 1.0) == right
    assert errors["dx_in one element late"] > 100.0


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["x as [T, D, n]", "x without its stream in the token's stride"])
def test_a_stride_between_streams_does_no_harm_to_one(device, name):
    assert experiments.point(4, 1, 24, 0, device)[name] <= 1.0 < experiments.point(4, 4, 24, 0, device)[name]


def test_a_sweeps_table_is_read_as_points(tmp_path):
    table = points().rename(
        columns=lambda c: f"parameters.{c}" if c in (*experiments.SIZES, "seed") else f"metrics.errors.{c}"
    )
    table["status"] = ["failed"] + ["ok"] * (len(table) - 1)
    table.to_csv(tmp_path / "runs.csv")
    read = experiments.read(str(tmp_path / "runs.csv"), {}, 0)
    pandas.testing.assert_frame_equal(
        read.reset_index(drop=True)[points().columns], points()[1:].reset_index(drop=True)
    )
    alone = experiments.read("none", {TILE: 5.0}, 3, n=4, tokens=8, d=33)
    assert alone.to_dict("records") == [{"n": 4, "tokens": 8, "d": 33, "seed": 3, TILE: 5.0}]
    with pytest.raises(UsageError, match="parameter table: expected"):
        experiments.read(str(tmp_path / "none.csv"), {}, 0)


def test_a_fault_is_wrong_where_one_draw_shows_it():
    table = points()
    table.loc[0, "late"] = 0.0  # one draw of two hides it
    pattern = experiments.wrong(table)
    assert pattern.loc["late"].all()
    assert experiments.alike(pattern[[(1, 1, 16), (1, 8, 16)]]) == [[TILE, OTHER, STRIDE, SILENT], ["late"]]
    assert set(experiments.alone(pattern)) == {TILE, OTHER, STRIDE, SILENT, "late"}


def verdicts(table):
    ledger = labkit.claims("sweep_atlas")
    claims.settle(ledger, table)
    return {name: settled.verdict for name, settled in ledger.settled.items()}


def test_the_verdicts_of_a_sweep():
    found = {"one_setting": "refuted", "sweep_of_d": "confirmed", "sizes_of_one": "confirmed", "alike": "refuted"}
    assert verdicts(points()) == found
    same = points().assign(same=lambda table: table[TILE])
    assert verdicts(same) == found | {"sweep_of_d": "refuted", "alike": "confirmed"}
    assert verdicts(points().drop(columns=STRIDE))["sizes_of_one"] == "refuted"


def test_a_single_point_decides_nothing_but_itself():
    found = verdicts(points((33,), (4,), (8,)))
    assert found == {
        "one_setting": "refuted",
        "sweep_of_d": "undecidable",
        "sizes_of_one": "undecidable",
        "alike": "undecidable",
    }
    only = points((33,), (4,), (8,))[["n", "tokens", "d", "seed", TILE, OTHER]]
    assert verdicts(only)["one_setting"] == "confirmed"


def test_the_pictures_show_each_fault_and_setting():
    _, axes = plots.figure(1, 4)
    figures.draw_patterns(axes, points(), [TILE, OTHER])
    assert axes[0].get_title(loc="left") == "n = 1, tokens: 1"
    _, axes = plots.figure()
    figures.draw_cliff(axes, points(), 4, 8)
    assert len(axes.lines) == 5 + 1
