"""The ledger of a report's claims: each gets exactly one verdict, with what was measured and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT
from labkit.session.record import Record
from labkit.tables import Table, number

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
        verdict = ("confirmed" if truth else "refuted") if isinstance(truth, bool) else str(truth)
        words = {verdict, *because} | ({"confirmed", "refuted"} if isinstance(truth, bool) else set())
        if wrong := words - set(VERDICTS):
            raise UsageError(f"claim {claim_id}: {wrong.pop()!r} is no verdict; wanted one of {', '.join(VERDICTS)}")
        if silent := [word for word in VERDICTS if word in words and not because.get(word, "").strip()]:
            raise UsageError(f"claim {claim_id}: because has no reason for {silent[0]}; wanted one for each outcome")
        if len({reason.strip() for reason in because.values()}) < len(because):
            raise UsageError(f"claim {claim_id}: because has one reason for two verdicts; wanted one for each outcome")
        self.settled[claim_id] = Settled(verdict, plain(measured), because[verdict], given)

    def settle_from(self, claim_id: str, record: Record | None, needs: str) -> None:
        """Take a claim's verdict from a run recorded elsewhere; `needs` says what this machine lacks for it."""
        if record is None:
            lacking = f"it needs {needs}, and no run on one is on record"
            self.settle(claim_id, "untestable", because={"untestable": lacking})
            return
        found = record.claim(claim_id)
        self.settled[claim_id] = Settled(
            found["verdict"], found["measured"], found["because"], found.get("given", ""), record.where
        )

    @property
    def open(self) -> list[str]:
        """The claims that have no verdict yet."""
        return [claim_id for claim_id in self.claims if claim_id not in self.settled]

    def counts(self) -> dict[str, int]:
        """How many of the report's own claims have each verdict; those of kind ``ours`` are not counted."""
        given = [settled.verdict for claim, settled in self.settled.items() if self.claims[claim].kind != "ours"]
        return {verdict: given.count(verdict) for verdict in VERDICTS}

    def verdicts(self) -> Table:
        """Claim and verdict alone: words that do not depend on where the notebook ran."""
        rows = [(c.id, c.kind, self.settled[c.id].verdict if c.id in self.settled else "OPEN") for c in self._sorted()]
        return Table(("claim", "kind", "verdict"), rows)

    def table(self, *kinds: str) -> Table:
        """The claims of some kinds, all unless said, with verdict, figures reported and measured, and the reason."""
        rows = []
        for claim in self._sorted(*kinds):
            settled = self.settled.get(claim.id, Settled("OPEN", None, ""))
            because = settled.because + (f" Given: {settled.given}." if settled.given else "")
            because += f" [{settled.source}]" if settled.source else ""
            figures = number(claim.reported), number(settled.measured)
            says = f"{claim.says} ({claim.kind}; {claim.where})"
            rows.append((claim.id, says, settled.verdict, *figures, because))
        return Table(("claim", "says", "verdict", "reported", "measured", "because"), rows, wrap=44)

    def _sorted(self, *kinds: str) -> list[Claim]:
        """What the report says before what this workbook asks."""
        return [c for c in sorted(self.claims.values(), key=lambda c: c.kind == "ours") if c.kind in (kinds or KINDS)]

    def as_json(self) -> dict[str, dict[str, Any]]:
        """The claims of result.json: kind, where, reported, and verdict, measured, because, given, source of each.

        Raises UsageError while a claim is open.
        """
        if self.open:
            raise UsageError(f"ledger of {self.name}: no verdict yet for {', '.join(self.open)}")
        return {
            claim.id: {"kind": claim.kind, "where": claim.where, "reported": claim.reported}
            | asdict(self.settled[claim.id])
            for claim in self.claims.values()
        }

    def _tables(self) -> list[Table]:
        """The report's claims, and in a table of their own the questions of this workbook."""
        titled = {"What the report says": ("asserted", "implied"), "What this workbook asks beyond it": ("ours",)}
        tables = [(title, self.table(*kinds)) for title, kinds in titled.items()]
        return [replace(table, title=title) for title, table in tables if table.rows]

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables())

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._tables()))


def claims_file(name: str) -> Path:
    """Where the claims of notebook `name` are, if it has any."""
    return ROOT / "data" / "claims" / f"{name}.yaml"


def claims(name: str) -> Ledger:
    """Read data/claims/`name`.yaml. Raises UsageError if it is missing, or an entry is not as it should be."""
    import yaml

    path = claims_file(name)
    if not path.exists():
        raise UsageError(f"claims: {path.relative_to(ROOT)} is not there; wanted the claims of {name!r}")
    found: dict[str, Claim] = {}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["claims"]:
        try:
            claim = Claim(**{key: " ".join(v.split()) if isinstance(v, str) else v for key, v in entry.items()})
        except (TypeError, AttributeError):
            claim = None
        if (
            claim is None
            or claim.kind not in KINDS
            or claim.id in found
            or not all((claim.id, claim.says, claim.settles))
        ):
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
