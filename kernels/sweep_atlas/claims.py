"""What is measured for each claim of notebook sweep_atlas, and its truth; the words are in data/claims."""

import pandas

from kernels.sweep_atlas.experiments import DISTINGUISHED, SILENT
from labkit import Ledger


def settle_numbers(ledger: Ledger, runs: pandas.DataFrame) -> None:
    """Do the report's numbers alone leave one cause anywhere?"""
    left = runs["left"][runs["ok"]]
    one = int((left == 1).sum())
    ledger.settle("numbers", one > 0, settings=len(left), one=one, fewest=int(left.min()), most=int(left.max()))


def settle_experiment(ledger: Ledger, runs: pandas.DataFrame) -> None:
    """Does the further experiment tell some of those that are left apart, in every setting?"""
    apart = runs["apart"][runs["ok"]].map(len)
    ledger.settle("experiment", bool(apart.min() > 0), fewest=int(apart.min()), most=int(apart.max()))


def settle_silent(ledger: Ledger, matrix: pandas.DataFrame) -> None:
    """Are there causes that neither numbers nor experiment exclude in any setting?"""
    silent = [str(cause) for cause, row in matrix.iterrows() if (row.dropna() == SILENT).all()]
    ledger.settle("silent", bool(silent), causes=silent, count=len(silent))


def settle_depends(ledger: Ledger, matrix: pandas.DataFrame) -> None:
    """Does it depend on the setting whether a cause that exists there is told apart?"""
    mixed = [str(cause) for cause, row in matrix.iterrows() if {DISTINGUISHED, SILENT} <= {*row.dropna()}]
    ledger.settle("depends", bool(mixed), causes=mixed)


def settle_nothing(ledger: Ledger, runs: pandas.DataFrame) -> None:
    """Do the settings in which there is no wrong number to explain say so?"""
    failed = runs["status"][~runs["ok"]]
    right = failed.str.contains("nothing is wrong")
    truth = bool(right.all()) if len(failed) else None
    ledger.settle("nothing", truth, failed=len(failed), right=int(right.sum()))
