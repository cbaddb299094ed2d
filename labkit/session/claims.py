"""The ledger of a report's claims: each gets exactly one verdict, with what was measured and why.

data/claims/<notebook>.yaml holds the question, the answer, the parameters' help, the claims, and for each claim the
texts of its verdicts with fields, which :meth:`Ledger.settle` fills in (see :mod:`labkit.session.wording`).
"""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.session.catalogue import ROOT, read_yaml
from labkit.session.record import Record, recorded
from labkit.session.wording import fields, fill
from whywrong.errors import UsageError
from whywrong.tables import Table

VERDICTS = {"confirmed": "#0072b2", "refuted": "#d55e00", "undecidable": "#8a6d00", "untestable": "#666666"}
"""The verdicts, and the colour in which a ledger shows each."""
KINDS_OF_CLAIMS = ("asserted", "implied", "ours")
"""What a report says, what follows from what it does, and what this workbook asks beyond it."""


@dataclass(frozen=True)
class Claim:
    """Something that a report says, or that this workbook asks; `where` is its place, `settles` the experiment.

    `texts` are those of its verdicts, `given` what they rest on untested. `only` says why a claim can come out in one
    way, where it can.
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
            wanted = f"its texts are for {', '.join(claim.texts) or 'none'}"
            raise UsageError(f"claim {claim_id}: {verdict} has no text in data/claims/{self.name}.yaml; {wanted}")
        values = plain(measured)
        needed = set().union(*map(fields, [*claim.texts.values(), claim.given]))
        if missing := sorted(needed - values.keys()):
            raise UsageError(f"claim {claim_id}: its texts need {missing[0]}; measured are {', '.join(values)}")
        because, given = (fill(f"claim {claim_id}", text, values) for text in (claim.texts[verdict], claim.given))
        self.settled[claim_id] = Settled(verdict, values, because, given)

    def settle_from(self, claim_id: str, record: Record | None, needs: str) -> None:
        """Take a claim's verdict from a run recorded elsewhere; `needs` says what this machine lacks for it."""
        if record is None:
            self.settled[claim_id] = Settled("untestable", {}, f"It needs {needs}, and no run on one is on record.")
            return
        found = record.result["claims"][claim_id]
        values = {name: found[name] for name in ("verdict", "measured", "because", "given") if name in found}
        self.settled[claim_id] = Settled(**values, source=record.where)

    def verdicts(self, without: Collection[str] = ()) -> Table:
        """Claim and verdict alone, the report's before this workbook's: words that do not depend on where it ran.

        `without` leaves out claims of times, which a busy machine may turn.
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
        """The report's claims, and apart from them the questions of this workbook."""
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
        """A line a claim, its verdict in colour; the reason unfolds."""
        lines = []
        for title, rows in self._groups().items():
            lines.append(f"<p><b>{title}</b> (a click on a claim shows the reason)</p>")
            for claim, settled in rows:
                colour = VERDICTS.get(settled.verdict, "#000000")
                mark = f'<b style="color:{colour};display:inline-block;width:7em">{settled.verdict}</b>'
                more = [f"<i>{claim.id}</i> ({claim.kind}; {html.escape(claim.where)}).", html.escape(reason(settled))]
                more += [f"Reported: {html.escape(str(claim.reported))}."] * (claim.reported is not None)
                body = f'<p style="margin-left:8.5em">{" ".join(more)}</p>'
                lines.append(f"<details><summary>{mark} {html.escape(claim.says)}</summary>{body}</details>")
        return "\n".join(lines)


def reason(settled: Settled) -> str:
    """Why a claim has its verdict, what that rests on, and which run it is from."""
    stop = "" if settled.because.endswith((".", "!", "?")) else "."
    given = f" Given: {settled.given.rstrip('.')}." if settled.given else ""
    return settled.because + stop * bool(settled.because) + given + (f" [{settled.source}]" if settled.source else "")


def claims_file(name: str) -> Path:
    """Where the claims of notebook `name` are, if it has any."""
    return ROOT / "data" / "claims" / f"{name}.yaml"


def described(name: str) -> dict[str, Any]:
    """What data/claims/`name`.yaml holds. Raises UsageError if it is not there."""
    path = claims_file(name)
    if not path.exists():
        raise UsageError(f"claims: {path.relative_to(ROOT)} is not there; expected the claims of {name!r}")
    found = read_yaml(path, "claims")
    if not (isinstance(found, dict) and isinstance(found.get("claims"), list)):
        raise UsageError(f"{path.relative_to(ROOT)}: expected question, answer and a list of claims")
    return found


def claims(name: str) -> Ledger:
    """Read data/claims/`name`.yaml. Raises UsageError if it is missing, or an entry is not as it should be."""
    found: dict[str, Claim] = {}
    for entry in described(name)["claims"]:
        try:
            words = {key: " ".join(v.split()) if isinstance(v, str) else v for key, v in entry.items()}
            texts = {verdict: text for verdict in VERDICTS if (text := words.pop(verdict, ""))}
            claim = Claim(**words, texts=texts)
            right = (
                claim.kind in KINDS_OF_CLAIMS and claim.id not in found and all((claim.id, claim.says, claim.settles))
            )
            right = right and (bool(claim.only) or {"confirmed", "refuted"} <= texts.keys())
            right = right and len(set(texts.values())) == len(texts) > 0
        except (TypeError, AttributeError):
            right = False
        if not right:
            wanted = f"id (each once), kind ({', '.join(KINDS_OF_CLAIMS)}), where, says, settles, texts for confirmed"
            wanted += " and refuted, each another (or `only`, why there is one outcome), and reported where there is a"
            wanted += " figure"
            raise UsageError(f"claims: data/claims/{name}.yaml: expected {wanted}, got {str(entry)[:80]}")
        found[claim.id] = claim
    return Ledger(name, found)


def answer(name: str, result: Mapping[str, Any] | None = None) -> str:
    """The notebook's answer, filled in with `claims`, `metrics`, `parameters` and so on of a result, or its record.

    The record of a GPU comes before that of a CPU. `claims` gives for each id the verdict and what was measured.
    """
    if result is None:
        record = recorded(name) or recorded(name, "cpu")
        result = record.result if record else {}
    return fill(f"answer of {name}", described(name).get("answer", ""), result)


def plain(value: Any) -> Any:
    """NumPy and torch scalars and arrays as JSON has them."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
