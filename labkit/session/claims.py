"""The ledger of a report's claims: each gets exactly one verdict, with what was measured and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT
from labkit.session.record import Record
from labkit.tables import Table

VERDICTS = ("confirmed", "refuted", "undecidable", "untestable")
KINDS = ("asserted", "implied", "ours")
"""What a report says, what follows from what it does, and what this workbook asks beyond it."""


@dataclass(frozen=True)
class Claim:
    """Something that a report says, or that this workbook asks; `where` is its place, `settles` the experiment."""

    id: str
    kind: str
    where: str
    says: str
    settles: str
    reported: Any = None


@dataclass(frozen=True)
class Settled:
    """A claim's verdict. `given` is what it rests on and was not tested; `source` the other run that it is from."""

    verdict: str
    measured: Any
    because: str
    given: str = ""
    source: str = ""


OPEN = Settled("OPEN", None, "")


@dataclass(repr=False)
class Ledger:
    """The claims of one report, in its file's order, and the verdicts given so far."""

    name: str
    claims: dict[str, Claim]
    settled: dict[str, Settled] = field(default_factory=dict)

    def settle(
        self, claim_id: str, truth: str | bool, *, because: Mapping[str, str], measured: Any = None, given: str = ""
    ) -> None:
        """Give a claim its verdict: a truth value, for confirmed or refuted, or a verdict's word.

        `because` has a reason for each verdict that can come out, so that none is told under another's. `given` names
        what the verdict rests on without a test of its own. A second verdict replaces the first. Raises UsageError for
        a claim that the file does not have, a word that is no verdict, and a verdict without a reason of its own.
        """
        if claim_id not in self.claims:
            raise UsageError(f"claim {claim_id!r}: {self.name} has none of that id; it has {', '.join(self.claims)}")
        outcomes = ("confirmed", "refuted") if isinstance(truth, bool) else (truth,)
        reasons = dict.fromkeys(outcomes, "") | {word: reason.strip() for word, reason in because.items()}
        if wrong := reasons.keys() - set(VERDICTS):
            raise UsageError(f"claim {claim_id}: {wrong.pop()!r} is no verdict; wanted one of {', '.join(VERDICTS)}")
        if silent := [word for word, reason in reasons.items() if not reason]:
            raise UsageError(f"claim {claim_id}: because has no reason for {silent[0]}; wanted one for each outcome")
        if len(set(reasons.values())) < len(reasons):
            raise UsageError(f"claim {claim_id}: because has one reason for two verdicts; wanted one for each outcome")
        verdict = ("confirmed" if truth else "refuted") if isinstance(truth, bool) else truth
        self.settled[claim_id] = Settled(verdict, plain(measured), because[verdict], given)

    def settle_from(self, claim_id: str, record: Record | None, needs: str) -> None:
        """Take a claim's verdict from a run recorded elsewhere; `needs` says what this machine lacks for it."""
        if record is None:
            lacking = f"it needs {needs}, and no run on one is on record"
            self.settle(claim_id, "untestable", because={"untestable": lacking})
            return
        found = record.result["claims"][claim_id]
        kept = {name: found[name] for name in ("verdict", "measured", "because", "given") if name in found}
        self.settled[claim_id] = Settled(**kept, source=record.where)

    def verdicts(self, without: Collection[str] = ()) -> Table:
        """Claim and verdict alone, the report's before this workbook's: words that do not depend on where it ran.

        `without` leaves out claims of times, which a busy machine may turn.
        """
        of_report_first = sorted(self.claims.values(), key=lambda claim: claim.kind == "ours")
        shown = [claim for claim in of_report_first if claim.id not in without]
        rows = [(claim.id, claim.kind, self.settled.get(claim.id, OPEN).verdict) for claim in shown]
        return Table(("claim", "kind", "verdict"), rows)

    def as_json(self) -> dict[str, dict[str, Any]]:
        """The claims of result.json: kind, where, reported, and verdict, measured, because, given, source of each.

        Raises UsageError while a claim is open.
        """
        if still_open := [claim_id for claim_id in self.claims if claim_id not in self.settled]:
            raise UsageError(f"ledger of {self.name}: no verdict yet for {', '.join(still_open)}")
        return {
            name: {"kind": claim.kind, "where": claim.where, "reported": claim.reported} | asdict(self.settled[name])
            for name, claim in self.claims.items()
        }

    def _tables(self) -> list[Table]:
        """The report's claims, and in a table of their own the questions of this workbook."""
        tables = []
        for title, ours in (("What the report says", False), ("What this workbook asks beyond it", True)):
            rows = [self._row(claim) for claim in self.claims.values() if (claim.kind == "ours") is ours]
            tables.append(Table(("claim", "says", "verdict", "reported", "measured", "because"), rows, title, wrap=44))
        return [table for table in tables if table.rows]

    def _row(self, claim: Claim) -> tuple[Any, ...]:
        settled = self.settled.get(claim.id, OPEN)
        stop = "" if settled.because.endswith((".", "!", "?")) else "."
        because = settled.because + (f"{stop} Given: {settled.given}." if settled.given else "")
        because += f" [{settled.source}]" if settled.source else ""
        says = f"{claim.says} ({claim.kind}; {claim.where})"
        return claim.id, says, settled.verdict, claim.reported, settled.measured, because

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables())


def claims_file(name: str) -> Path:
    """Where the claims of notebook `name` are, if it has any."""
    return ROOT / "data" / "claims" / f"{name}.yaml"


def claims(name: str) -> Ledger:
    """Read data/claims/`name`.yaml. Raises UsageError if it is missing, or an entry is not as it should be."""
    path = claims_file(name)
    if not path.exists():
        raise UsageError(f"claims: {path.relative_to(ROOT)} is not there; wanted the claims of {name!r}")
    found: dict[str, Claim] = {}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["claims"]:
        try:
            claim = Claim(**{key: " ".join(v.split()) if isinstance(v, str) else v for key, v in entry.items()})
            right = claim.kind in KINDS and claim.id not in found and all((claim.id, claim.says, claim.settles))
        except (TypeError, AttributeError):
            right = False
        if not right:
            raise UsageError(
                f"claims: {path.relative_to(ROOT)} has an entry {str(entry)[:80]}; wanted id (each once), "
                f"kind ({', '.join(KINDS)}), where, says, settles, and reported where there is a figure"
            )
        found[claim.id] = claim
    return Ledger(name, found)


def plain(value: Any) -> Any:
    """NumPy and torch scalars and arrays as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value
