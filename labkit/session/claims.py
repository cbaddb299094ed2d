"""The ledger of a report's claims: each gets exactly one verdict, with what was measured and why.

data/claims/<notebook>.yaml holds the question, the answer, the parameters' help, the claims, and for each claim the
texts of its verdicts with fields, which :meth:`Ledger.settle` fills in (see :mod:`labkit.session.wording`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from labkit.session.catalogue import ROOT
from labkit.session.reading import read_yaml
from labkit.session.record import Record, recorded
from labkit.session.wording import fields, fill
from whywrong.errors import UsageError
from whywrong.tables import Table

VERDICTS = {"confirmed": "#0072b2", "refuted": "#d55e00", "undecidable": "#8a6d00", "untestable": "#666666"}
"""The verdicts, and the colour in which a ledger shows each."""


@dataclass(frozen=True)
class Claim:
    """A statement of a report (asserted, or implied by what it does), or a question of this workbook (ours).

    `where` is its place, `settles` the experiment, and `texts` has the reason for each possible verdict. `given` is
    what they assume without a test. `only` says why a claim with a single possible verdict has no other.
    """

    id: str
    kind: str
    where: str
    says: str
    settles: str
    texts: dict[str, str]
    reported: Any = None
    given: str = ""
    only: str = ""


@dataclass(frozen=True)
class Settled:
    """A claim's verdict. `given` is what it assumes without a test; `source` is the recorded run that it is from."""

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

    def settle(self, claim_id: str, truth: bool | str | None, **measured: Any) -> None:
        """Give a claim its verdict, and fill in that verdict's text with what was measured.

        `truth` is True for confirmed, False for refuted, None for undecidable, or a verdict's word. A second verdict
        replaces the first. Raises UsageError for a claim that the file does not have, for a truth that is no verdict
        or has no text, and for a field of any of the claim's texts that was not measured.
        """
        if claim_id not in self.claims:
            raise UsageError(f"claim {claim_id!r}: {self.name} has none of that id; it has {', '.join(self.claims)}")
        claim, truths = self.claims[claim_id], {True: "confirmed", False: "refuted", None: "undecidable"}
        verdict = truth if isinstance(truth, str) else truths.get(truth, repr(truth))
        if verdict not in claim.texts:
            expected = f"expected {' or '.join(claim.texts)}, as data/claims/{self.name}.yaml has texts for"
            raise UsageError(f"claim {claim_id}: {expected}, got {verdict}")
        values = plain(measured)
        needed = set().union(*map(fields, [*claim.texts.values(), claim.given]))
        if missing := sorted(needed - values.keys()):
            raise UsageError(
                f"claim {claim_id}: its texts need {missing[0]}; expected it measured, got {', '.join(values)}"
            )
        because, given = (fill(f"claim {claim_id}", text, values) for text in (claim.texts[verdict], claim.given))
        self.settled[claim_id] = Settled(verdict, values, because, given)

    def settle_from(self, claim_id: str, record: Record | None, needs: str) -> None:
        """Take a claim's verdict from a run on another machine; `needs` is what this machine lacks for it."""
        if record is None:
            self.settled[claim_id] = Settled("untestable", {}, f"It needs {needs}, and no run on one is on record.")
            return
        claim = record.result["claims"][claim_id]
        values = {name: claim[name] for name in ("verdict", "measured", "because", "given") if name in claim}
        self.settled[claim_id] = Settled(**values, source=record.where)

    def verdicts(self, without: Collection[str] = ()) -> Table:
        """Claims and verdicts alone, the report's before this workbook's: they do not depend on the machine.

        `without` leaves out claims about times, whose verdict may change on a busy machine.
        """
        rows = [(claim.id, claim.kind, settled.verdict) for rows in self._groups().values() for claim, settled in rows]
        return Table(("claim", "kind", "verdict"), [row for row in rows if row[0] not in without])

    def as_json(self) -> dict[str, dict[str, Any]]:
        """The claims of result.json: kind, where, reported, and verdict, measured, because, given, source of each.

        Raises UsageError while a claim is open.
        """
        if still_open := [claim_id for claim_id in self.claims if claim_id not in self.settled]:
            raise UsageError(f"ledger of {self.name}: no verdict yet for {', '.join(still_open)}")
        about = {name: {"kind": c.kind, "where": c.where, "reported": c.reported} for name, c in self.claims.items()}
        return {name: about[name] | asdict(self.settled[name]) for name in self.claims}

    def _groups(self) -> dict[str, list[tuple[Claim, Settled]]]:
        """The report's claims and the questions of this workbook, each under a title."""
        titles = {"What the report says": False, "What this workbook asks": True}
        rows = [(claim, self.settled.get(claim.id, OPEN)) for claim in self.claims.values()]
        groups = {title: [row for row in rows if (row[0].kind == "ours") is ours] for title, ours in titles.items()}
        return {title: rows for title, rows in groups.items() if rows}

    def __repr__(self) -> str:
        columns = ("claim", "says", "verdict", "reported", "because")
        return "\n\n".join(
            str(Table(columns, [(c.id, c.says, s.verdict, c.reported, reason(s)) for c, s in rows], title, wrap=44))
            for title, rows in self._groups().items()
        )

    def _repr_html_(self) -> str:
        """A line for each claim, with its verdict in colour; a click shows the reason."""
        template = Path(__file__).with_name("ledger.html").read_text(encoding="utf-8")
        environment = jinja2.Environment(autoescape=True, trim_blocks=True)
        return environment.from_string(template).render(groups=self._groups(), colours=VERDICTS, reason=reason)


def reason(settled: Settled) -> str:
    """Why a claim has its verdict, what that assumes, and which run it is from."""
    stop = "" if settled.because.endswith((".", "!", "?")) else "."
    given = f" Given: {settled.given.rstrip('.')}." if settled.given else ""
    return settled.because + stop * bool(settled.because) + given + (f" [{settled.source}]" if settled.source else "")


def claims_file(name: str) -> Path:
    """The path of the claims of notebook `name`, which need not exist."""
    return ROOT / "data" / "claims" / f"{name}.yaml"


def described(name: str) -> dict[str, Any]:
    """The content of data/claims/`name`.yaml. Raises UsageError for a missing or invalid file."""
    path = claims_file(name)
    if not path.exists():
        raise UsageError(f"claims: expected {path.relative_to(ROOT)} with the claims of {name!r}, got no such file")
    return read_yaml(path, "claims", "claims")


def claims(name: str) -> Ledger:
    """Read data/claims/`name`.yaml. Raises UsageError if it is missing, or an entry does not match the schema."""
    ledger = Ledger(name, {})
    for entry in described(name)["claims"]:
        words = {key: " ".join(value.split()) if isinstance(value, str) else value for key, value in entry.items()}
        texts = {verdict: words.pop(verdict) for verdict in VERDICTS if verdict in words}
        if words["id"] in ledger.claims or len(set(texts.values())) < len(texts):
            raise UsageError(
                f"claims: data/claims/{name}.yaml: expected ids and texts that differ, got {entry['id']!r}"
            )
        ledger.claims[words["id"]] = Claim(**words, texts=texts)
    return ledger


def answer(name: str, result: Mapping[str, Any] | None = None) -> str:
    """The notebook's answer, filled in with `claims`, `metrics`, `parameters` and so on of a result, or its record.

    The record of a GPU comes before that of a CPU. `claims` gives for each id the verdict and what was measured.
    """
    if result is None:
        record = recorded(name) or recorded(name, "cpu")
        result = record.result if record else {}
    return fill(f"answer of {name}", described(name).get("answer", ""), result)


def plain(value: Any) -> Any:
    """`value` with numbers and lists in place of NumPy's and torch's scalars and arrays, as JSON needs them."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
