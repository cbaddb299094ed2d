"""Tables of what the experiments on the report's claims measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.attention.experiments import Counted, Exchange
from kernels.attention.problem import REPORT
from kernels.attention.survey import Likelihood, count_by_statistic, false_alarms
from whywrong import Table

YES = {True: "yes", False: "no"}


def statistics(likelihoods: Sequence[Likelihood], level: float, diagnosed: set[str]) -> Table:
    """How many wrong products fit by each statistic at three levels, and how often it rules out the true call."""
    columns = ("level", "statistic", "wrong products that fit", "the diagnosis too", "true call ruled out in")
    return Table(
        columns,
        [
            (f"{at:g}", statistic, number, YES[too], f"{false_alarms(statistic, at, REPORT.heads):.0%}")
            for at in sorted({0.01, 0.05, level})
            for statistic, (number, too) in count_by_statistic(likelihoods, at, diagnosed).items()
        ],
    )


def unrelated(products: Mapping[str, Counted], level: float) -> Table:
    """Products of operands that have nothing to do with the right ones, beside the report's range."""
    columns = ("product of", "heads in the range", "typical smallest and largest of 12 heads", "fits")
    return Table(columns, [(n, f"{x.share:.0%}", x.typical, YES[x.chance >= level]) for n, x in products.items()])


def rebuilt(calls: Mapping[str, Counted]) -> Table:
    """The calls rebuilt from the report's description, beside its range."""
    columns = ("call", "draws with all heads in the range", "single heads in it", "typical ends of 12")
    return Table(columns, [(n, f"{x.hits} of {x.draws}", f"{x.share:.0%}", x.typical) for n, x in calls.items()])


def scalings(shown: Mapping[str, float], passes: Mapping[str, bool]) -> Table:
    """What each wrong scaling would have shown, and whether the report's last check passes it."""
    columns = ("wrong scaling", "of heads in the unscaled range, in the scaled too", "passes the last check")
    return Table(columns, [(name, f"{share:.0%}", YES[passes[name]]) for name, share in shown.items()])


def exchanges(exchange: Exchange, fits: int) -> Table:
    """What exchanging M and N changes; `fits`: the outcomes that fit the range."""
    return Table(
        ("", "how many", "of"),
        [
            ("calls that the exchange changes at N = M = 128", exchange.changed_at_equal, exchange.pairs),
            ("calls that it changes at 37 x 53 x 29", exchange.changed_at_unequal, exchange.pairs),
            ("fitting outcomes that a call with it gives", exchange.fit_exchanged, fits),
            ("fitting outcomes that a call without it gives", exchange.fit_straight, fits),
            ("outcomes with it in blocks of 48 that fit", exchange.ragged_fit, exchange.ragged),
        ],
    )


def behind_q(fillings: Mapping[str, Counted]) -> Table:
    """The chance of the range by what lies behind Q in memory."""
    return Table(("behind Q in memory", "chance of the range"), [(name, x.chance) for name, x in fillings.items()])


def diagnosis_and_rival(forms: Mapping[str, Likelihood], chances: Mapping[str, float], rival: Likelihood) -> Table:
    """The diagnosis in each form beside its best rival."""
    rows = [(f"the diagnosis {name}", chances[name], law.ends) for name, law in forms.items()]
    rows.append((f"the best rival: {rival.name}", rival.chance, rival.ends))
    return Table(("call", "chance of the range", "probability of both ends"), rows)


def shifts(passes: Mapping[float, bool], within: Mapping[float, bool]) -> Table:
    """Shifts of all scores that the report's check passes, and that the tolerance allows."""
    columns = ("all scores shifted by", "passes the report's check", "within the tolerance")
    return Table(columns, [(f"{shift:g}", YES[passes[shift]], YES[within[shift]]) for shift in passes])
