"""What a sweep's table says of each cause in each setting."""

import json
from pathlib import Path

import pandas

from labkit.session.record import RESULTS
from whywrong.errors import UsageError

RULED_OUT, DISTINGUISHED, SILENT = "ruled out", "distinguished by the experiment", "not distinguished"
"""Of a cause: the report's numbers exclude it; they do not, but a further experiment does; or neither does."""


def read(table: str) -> pandas.DataFrame:
    """A table that `labkit table --out` wrote, from data/results or from a path. Raises UsageError where there is none.

    The columns ``explains``, ``refuted`` are lists of causes.
    """
    path = Path(table) if Path(table).is_absolute() else RESULTS / table
    try:
        frame = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"parameter table: {table} cannot be read ({str(error)[:80]}); expected labkit table's"
        ) from None
    for column in ("explains", "refuted"):
        if f"verdict.{column}" not in frame:
            raise UsageError(f"parameter table: {table} has no verdict.{column}; expected runs that weigh causes")
        frame[column] = [json.loads(text) if isinstance(text, str) else [] for text in frame[f"verdict.{column}"]]
    return frame


def over(frame: pandas.DataFrame, down: str, across: str, further: str) -> pandas.DataFrame:
    """The runs by two parameters, sorted; `left` causes by the numbers, `apart` of them by the metric `further`.

    Raises UsageError for a parameter or metric that the table has not, and for two runs of one setting.
    """
    wanted = [f"parameters.{down}", f"parameters.{across}", f"metrics.{further}"]
    if missing := [name for name in wanted if name not in frame]:
        raise UsageError(
            f"parameters down, across, further: the table has no {missing[0]}; expected one of its columns"
        )
    runs = frame.assign(down=frame[wanted[0]], across=frame[wanted[1]]).sort_values(["across", "down"])
    if runs.duplicated(["down", "across"]).any():
        raise UsageError(f"parameters down, across: several runs have one {down} and {across}; expected others")
    runs["ok"] = runs["status"] == "ok"
    runs["left"] = runs["explains"].map(len)
    distinguished = [json.loads(text) if isinstance(text, str) else [] for text in runs[wanted[2]]]
    runs["apart"] = [sorted({*names} & {*left}) for names, left in zip(distinguished, runs["explains"], strict=True)]
    return runs.reset_index(drop=True)


def grid(runs: pandas.DataFrame, values: str) -> pandas.DataFrame:
    """A column of numbers as a matrix: `down` downwards, `across` to the right; NaN where a run failed."""
    numbers = runs[values].where(runs["ok"]).astype(float)
    return runs.assign(number=numbers).pivot(index="down", columns="across", values="number")


def causes(runs: pandas.DataFrame) -> pandas.DataFrame:
    """For each cause (a row) and each ok run (a column of its name): RULED_OUT, DISTINGUISHED, SILENT, or None.

    None where the cause does not exist in that setting. Those that are distinguished most often come first.
    """
    by_run = {}
    for run in runs[runs["ok"]].itertuples():
        verdicts = dict.fromkeys(run.refuted, RULED_OUT) | dict.fromkeys(run.explains, SILENT)
        by_run[run.run] = verdicts | dict.fromkeys(run.apart, DISTINGUISHED)
    matrix = pandas.DataFrame(by_run, dtype=object)
    matrix = matrix.where(matrix.notna(), None)
    silent, apart = (matrix == SILENT).sum(axis=1), (matrix == DISTINGUISHED).sum(axis=1)
    return matrix.loc[sorted(matrix.index, key=lambda cause: (silent[cause], -apart[cause], cause))]
