"""One point of a sweep, and the table of all points: the error of dalpha_pre under each fault, by sizes."""

from __future__ import annotations

from pathlib import Path

import pandas

from kernels.mhc import counterfactual, faulty
from kernels.mhc.faulty import Problem
from kernels.mhc.problem import Constants
from labkit.session.record import RESULTS
from whywrong.errors import UsageError

SIZES = ["n", "tokens", "d"]
"""The parameters that make a setting; seeds of one setting are taken together."""
PREFIX = "metrics.errors."
NO_TABLE = "none"


def point(tokens: int, n: int, d: int, seed: int, device: str) -> dict[str, float]:
    """For each fault of the list, the real kernel's error of dalpha_pre over its tolerance, on inputs of these sizes.

    The tolerance is what a float32 kernel may be off, derived with the golden; at most 1 is within rounding.
    """
    p = Problem.sample(tokens, n, d, seed, Constants(), device)
    exact = counterfactual.backward(p).step("dalpha")
    value, allowed = float(exact.value[0]), float(exact.bound.absolute[0])
    faults = faulty.rivals(n, d)
    return {name: abs(float(faulty.backward(p, a)["dalpha"][0]) - value) / allowed for name, a in faults.items()}


def read(table: str, errors: dict[str, float], seed: int, **sizes: int) -> pandas.DataFrame:
    """The points of a sweep: columns for SIZES and the seed, and one for each fault with its error over the tolerance.

    `table` is what `labkit table --out` wrote, in data/results or at a path; `none` stands for this point alone, whose
    `errors`, `seed` and `sizes` are given. Raises UsageError for another table.
    """
    if table == NO_TABLE:
        return pandas.DataFrame([{**sizes, "seed": seed, **errors}])
    path = Path(table) if Path(table).is_absolute() else RESULTS / table
    try:
        frame = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
        frame = frame[frame["status"] == "ok"]
        points = frame[[f"parameters.{name}" for name in (*SIZES, "seed")]].set_axis([*SIZES, "seed"], axis=1)
    except (OSError, ValueError, KeyError) as error:
        expected = "expected labkit table's of sweep_atlas, or none"
        raise UsageError(f"parameter table: {expected}, got {table} ({str(error)[:80]})") from None
    found = frame[[name for name in frame if name.startswith(PREFIX)]]
    return points.join(found.rename(columns=lambda name: name.removeprefix(PREFIX)))


def worst(points: pandas.DataFrame) -> pandas.DataFrame:
    """The largest error over the tolerance of all seeds: a row a setting, a column a fault."""
    return points.drop(columns="seed").groupby(SIZES).max()


def wrong(points: pandas.DataFrame) -> pandas.DataFrame:
    """Whether dalpha_pre is wrong by more than rounding: a row a fault, a column a setting."""
    return (worst(points) > 1.0).T


def alike(pattern: pandas.DataFrame) -> list[list[str]]:
    """The faults in groups that are right and wrong at the same settings, the largest group first."""
    groups: dict[bytes, list[str]] = {}
    for name, row in pattern.iterrows():
        groups.setdefault(row.to_numpy().tobytes(), []).append(str(name))
    return sorted(groups.values(), key=len, reverse=True)


def alone(pattern: pandas.DataFrame) -> list[str]:
    """The faults whose pattern no other fault has."""
    return [group[0] for group in alike(pattern) if len(group) == 1]
