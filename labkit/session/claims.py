"""The ledger of a report's claims: each gets exactly one verdict, with what was measured and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT
from labkit.session.record import Record
from labkit.tables import Table, number

VERDICTS = ("confirmed", "refuted", "undecidable", "untestable")


@dataclass(frozen=True)
class Claim:
    """Something that a report asserts or implies, and the figure that it gives, if any."""

    id: str
    says: str
    reported: Any = None


@dataclass(frozen=True)
class Settled:
    """A claim's verdict. `source` says where its evidence was made, when that was not in this run."""

    verdict: str
    measured: Any
    because: str
    source: str = ""


@dataclass(repr=False)
class Ledger:
    """The claims of one report, in its file's order, and the verdicts given so far."""

    name: str
    claims: dict[str, Claim]
    settled: dict[str, Settled] = field(default_factory=dict)

    def settle(
        self, claim_id: str, verdict: str | bool, *, measured: Any = None, because: str, source: str = ""
    ) -> None:
        """Give a claim its verdict; a truth value means confirmed or refuted. A second verdict replaces the first.

        Raises UsageError for a claim that the file does not have, a word that is no verdict, or an empty reason.
        """
        if claim_id not in self.claims:
            raise UsageError(f"claim {claim_id!r}: {self.name} has none of that id; it has {', '.join(self.claims)}")
        if isinstance(verdict, bool):
            verdict = "confirmed" if verdict else "refuted"
        if verdict not in VERDICTS:
            raise UsageError(f"claim {claim_id}: {verdict!r} is no verdict; wanted one of {', '.join(VERDICTS)}")
        if not because.strip():
            raise UsageError(f"claim {claim_id}: because is empty; wanted the reason for {verdict}")
        self.settled[claim_id] = Settled(verdict, plain(measured), because, source)

    def settle_from(self, claim_id: str, record: Record | None, needs: str) -> None:
        """Take a claim's verdict from a run recorded elsewhere; `needs` says what this machine lacks for it."""
        if record is None:
            self.settle(claim_id, "untestable", because=f"it needs {needs}, and no run on one is on record")
            return
        found = record.claim(claim_id)
        self.settle(
            claim_id, found["verdict"], measured=found["measured"], because=found["because"], source=record.where
        )

    @property
    def open(self) -> list[str]:
        """The claims that have no verdict yet."""
        return [claim_id for claim_id in self.claims if claim_id not in self.settled]

    def counts(self) -> dict[str, int]:
        """How many claims have each verdict."""
        given = [settled.verdict for settled in self.settled.values()]
        return {verdict: given.count(verdict) for verdict in VERDICTS}

    def verdicts(self) -> Table:
        """Claim and verdict alone: words that do not depend on where the notebook ran."""
        rows = [(c.id, self.settled[c.id].verdict if c.id in self.settled else "OPEN") for c in self.claims.values()]
        return Table(("claim", "verdict"), rows)

    def table(self) -> Table:
        """Every claim with its verdict, the figures reported and measured, and the reason."""
        rows = []
        for claim in self.claims.values():
            settled = self.settled.get(claim.id, Settled("OPEN", None, ""))
            because = settled.because + (f" [{settled.source}]" if settled.source else "")
            measured = number(settled.measured)
            rows.append((claim.id, claim.says, settled.verdict, number(claim.reported), measured, because))
        return Table(("claim", "says", "verdict", "reported", "measured", "because"), rows, wrap=44)

    def as_json(self) -> dict[str, dict[str, Any]]:
        """The claims of result.json. Raises UsageError while a claim is open."""
        if self.open:
            raise UsageError(f"ledger of {self.name}: no verdict yet for {', '.join(self.open)}")
        return {
            claim.id: {
                "verdict": self.settled[claim.id].verdict,
                "measured": self.settled[claim.id].measured,
                "reported": claim.reported,
                "because": self.settled[claim.id].because,
                "source": self.settled[claim.id].source,
            }
            for claim in self.claims.values()
        }

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())


def claims_file(name: str) -> Path:
    """Where the claims of notebook `name` are, if it has any."""
    return ROOT / "data" / "claims" / f"{name}.yaml"


def claims(name: str) -> Ledger:
    """Read data/claims/`name`.yaml. Raises UsageError if it is missing or a claim lacks its id or its text."""
    import yaml

    path = claims_file(name)
    if not path.exists():
        raise UsageError(f"claims: {path.relative_to(ROOT)} is not there; wanted the claims of {name!r}")
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["claims"]
    found: dict[str, Claim] = {}
    for entry in entries:
        if not (isinstance(entry, dict) and entry.get("id") and entry.get("says")):
            raise UsageError(f"claims: {path.relative_to(ROOT)} has an entry without id or says: {entry!r}")
        if entry["id"] in found:
            raise UsageError(f"claims: {path.relative_to(ROOT)} has {entry['id']!r} twice")
        found[entry["id"]] = Claim(entry["id"], entry["says"], entry.get("reported"))
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
