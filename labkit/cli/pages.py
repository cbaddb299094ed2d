"""Pages that need nothing but a browser: an executed notebook as a report, and all runs below a folder as a gallery.

What lies in a run's folder was written by programs that may have been killed, and by people. It is checked and shown
as text; no page runs a script but its own, or asks the network for anything.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from bs4 import BeautifulSoup
from markupsafe import Markup
from math_core import LatexError, LatexToMathML
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from PIL import Image

from labkit.errors import UsageError
from labkit.session.catalogue import Notebook, notebooks
from labkit.session.claims import VERDICTS
from labkit.session.record import SCHEMA, run_id
from labkit.session.secrets import KNOWN
from labkit.tables import number, printable

HIDDEN = "hide-input"
"""The tag of cells whose source is glue: Lab folds them, a page leaves them out."""
PAGES = Path(__file__).parent / "pages"
CARDS = 12
"""Settings of one notebook that have a card each; more are shown as a sweep."""
ALONG, FACETS = 48, 8
"""Places along an axis of a sweep, and its pictures; neighbouring values share a place where there are more."""
ANSWERS = {"undecidable": "○", "none of these": "◇", "nothing weighed": "–", "failed": "×", "no result": "!"}
"""What a run may end with beside a cause, and its mark in a sweep."""
CAUSES = "●▲■◆▼★"
"""Marks of the commonest causes."""
INTERACTIVE = "interactive"
"""The folder of runs from Lab, nbval and plain papermill: the result of the last one, and no page."""
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError)
"""What reading a file that is not as it should be may raise."""
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("notebook", "status", "date"), (str,)),
    **dict.fromkeys(("parameters", "device", "verdict", "claims", "metrics", "provenance"), (dict,)),
    "seconds": (int, float),
}
"""The types of result.json's parts."""
RAISED = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|.*\b(?:died|[Kk]illed|signal)\b.*")
"""A line of a log that says why."""
MATHML = LatexToMathML()


@dataclass
class Card:
    """One run as pages show it: `link` leads to its report, `notebook` is what was executed."""

    name: str
    link: str
    notebook: Path
    state: str = "ok"
    """``ok``, ``failed``, or ``no result`` where result.json is not what a run writes."""
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    when: float = 0.0
    book: Notebook | None = None
    """The notebook of this checkout, where it has one of that name."""
    earlier: Sequence[Card] = ()
    """Runs before this one at the same setting."""

    @property
    def ends(self) -> str:
        """The cause that was identified, or a word of ANSWERS."""
        return self.state if self.state != "ok" else self.result["verdict"].get("cause") or "nothing weighed"

    @property
    def counts(self) -> Counter[str]:
        """How many claims have each verdict."""
        return Counter(claim["verdict"] for claim in self.result.get("claims", {}).values())

    @property
    def device(self) -> dict[str, str]:
        """Kind and name of where it ran."""
        return self.result.get("device") or {"kind": str(self.parameters.get("device", "unknown")), "name": ""}

    @property
    def interactive(self) -> bool:
        """Whether it is the last run from Lab, nbval or plain papermill."""
        return self.notebook.parent.name == INTERACTIVE

    @property
    def clock(self) -> str:
        """When it ended."""
        return datetime.fromtimestamp(self.when, UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def about(self) -> dict[str, str]:
        """The notebook's question and answer; empty where they cannot be had."""
        try:
            return dict(self.book.about) if self.book else {}
        except BROKEN:
            return {}

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The parameters that differ from their defaults, and these."""
        try:
            defaults = {name: p.default for name, p in self.book.parameters.items()} if self.book else {}
        except BROKEN:
            defaults = {}
        given = {name: (value, defaults.get(name)) for name, value in self.parameters.items() if name != "device"}
        return {name: (value, default) for name, (value, default) in given.items() if value != default}

    @property
    def figure(self) -> tuple[str, str] | None:
        """The first figure, scaled down, as an address that holds it, and its alternative text."""
        try:
            outputs = (output for cell in _read(self.notebook)["cells"] for output in cell.get("outputs", ()))
            shown = next(output for output in outputs if "image/png" in output.get("data", {}))
            with Image.open(io.BytesIO(base64.b64decode("".join(shown["data"]["image/png"])))) as picture:
                small, packed = picture.convert("RGB"), io.BytesIO()
            small.thumbnail((720, 480))
            small.quantize(48).save(packed, "PNG", optimize=True)
            alt = str(shown["metadata"].get("image/png", {}).get("alt", ""))
        except (StopIteration, *BROKEN):
            return None
        return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}", alt


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def as_page(notebook: Path, run: Card | None = None) -> str:
    """An executed notebook as HTML, without the source of glue, under what the result.json beside it says.

    `run` takes the place of that. A notebook with a cell that raised or did not run is shown as failed.
    """
    book = nbformat.read(notebook, as_version=4)
    options = {"template_name": "basic", "template_file": str(PAGES / "cells.html.j2")}
    exporter = HTMLExporter(**options, filters={"markdown2html": _markdown}, exclude_input_prompt=True)
    body = BeautifulSoup(exporter.from_notebook_node(book)[0], "html.parser")
    home = "index.html" if run else "../../index.html"
    run = run or _run(notebook.parent)
    run.book = notebooks().get(run.name)
    code = [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]
    done = sum(cell.execution_count is not None for cell in code)
    if run.state == "failed" or done < len(code) or _error(book.cells):
        run.state, run.result = "failed", {}
        run.reason = _error(book.cells) or run.reason or f"{done} of {len(code)} cells ran, and none says why"
    title = body.h1.extract().get_text() if body.h1 else run.name
    about = {key: str(value) for key, value in book.metadata.get("labkit", {}).items()} or run.about
    for paragraph in body.find_all("p"):
        if paragraph.strong and paragraph.strong.get_text() in ("Question.", "Answer."):
            paragraph.extract()
    headings = body.select("h2, h3")
    for k, heading in enumerate(headings):
        heading["id"] = f"section-{k}"
    contents = [(heading["id"], heading.name, heading.get_text()) for heading in headings]
    return _page("report.html", run=run, title=title, about=about, contents=contents, body=Markup(body), home=home)


def _markdown(source: str, attachments: Any = None) -> str:
    renderer = _Renderer(escape=False, exclude_anchor_links=True, attachments=attachments)
    return MarkdownWithMath(renderer=renderer).render(source)


class _Renderer(IPythonRenderer):
    """Markdown whose mathematics is MathML; what cannot be converted stays as it is written."""

    def inline_math(self, body: str, block: bool = False) -> str:
        try:
            return MATHML.convert_with_local_state(body, displaystyle=block)
        except LatexError:
            return f"<code>{self.escape_html(body)}</code>"

    def block_math(self, body: str) -> str:
        return self.inline_math(body, block=True)


def _run(folder: Path) -> Card:
    """What result.json says, whatever it is, or without one why the run failed."""
    made = Card(folder.parent.name, "", folder / "notebook.ipynb")
    try:
        made.when = max(path.stat().st_mtime for path in folder.glob("*.*"))
        found = _read(folder / "result.json")
        made.reason = _wrong(found, made.name)
        made.state = "no result" if made.reason else "ok"
        made.result, made.parameters = ({}, {}) if made.reason else (found, found["parameters"])
    except FileNotFoundError:
        made.state, made.reason = "failed", _logged(folder / "log.txt")
    except BROKEN:
        made.state, made.reason = "no result", "result.json cannot be read"
    return made


def _wrong(found: Any, name: str) -> str:
    """How a result differs from what lab.finish writes, if it does."""
    if not isinstance(found, dict):
        return "result.json holds no object"
    if type(found.get("schema")) is not int or found["schema"] != SCHEMA:
        return f"result.json is of schema {str(found.get('schema'))[:20]}; this labkit reads {SCHEMA}"
    if wrong := [key for key, kinds in KINDS.items() if type(found.get(key)) not in kinds]:
        return f"result.json has no {', '.join(wrong)} of the right type"
    texts = [found["device"].get("kind"), found["device"].get("name"), found["verdict"].get("cause") or ""]
    texts += [claim[part] for claim in found["claims"].values() for part in ("kind", "because")]
    right = [
        *(type(text) is str for text in texts),
        *(claim["verdict"] in VERDICTS for claim in found["claims"].values()),
        *(type(value) in (str, int, float, bool) for value in found["parameters"].values()),
        *(type(found["verdict"].get(part)) is list for part in ("explains", "refuted")),
        (found["status"], found["notebook"]) == ("ok", name),
        math.isfinite(found["seconds"]),
    ]
    return "" if all(right) else "result.json is not as lab.finish writes it"


def card(folder: Path) -> Card:
    """A run's folder as a card. Raises nothing for what its files are."""
    made, page = _run(folder), folder / ("result.json" if folder.name == INTERACTIVE else "report.html")
    if page.is_file():
        made.link = urllib.parse.quote(os.fsencode(page.relative_to(folder.parent.parent)))
    try:
        if made.state == "ok" and folder.name != INTERACTIVE:
            kept, device = made.result["provenance"]["sources"], made.device
            name = run_id(made.name, made.parameters, kept, (device["kind"], device["name"]))
            if name != folder.name or not made.link:
                made.state, made.reason = "no result", "result.json is not of this folder's run"
        elif made.state == "failed":
            executed = _read(made.notebook)
            given = executed["metadata"]["papermill"]["parameters"].items()
            made.parameters = {name: value for name, value in given if type(value) in (str, int, float, bool)}
            made.reason = _error(executed["cells"]) or made.reason
    except BROKEN:
        made.state = "no result" if made.state == "ok" else made.state
    return made


def _error(cells: Iterable[Any]) -> str:
    """What a cell raised, in a line."""
    raised = [o for cell in cells for o in cell.get("outputs", ()) if o.get("output_type") == "error"]
    return f"{raised[-1]['ename']}: {str(raised[-1]['evalue']).strip().partition(chr(10))[0]}" if raised else ""


def _logged(log: Path) -> str:
    """Why a run failed, from the end of its log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    told = [line for line in lines if RAISED.fullmatch(line)]
    return (told or ["it has not ended, or was killed: there is no result.json"])[-1]


def gallery(out: Path) -> Path:
    """Write OUT/index.html, which shows every run below OUT, and return it.

    Raises UsageError where it cannot be written.
    """
    files = ("result.json", "log.txt", "notebook.ipynb")
    return index(map(card, sorted({path.parent for name in files for path in out.glob(f"*/*/{name}")})), out)


def index(cards: Iterable[Card], out: Path, title: str = "Runs") -> Path:
    """Write OUT/index.html: a card for each setting that was run, or a grid where a notebook has many."""
    books, stacks = notebooks(), defaultdict(list)
    for one in sorted(cards, key=lambda one: -one.when):
        one.book = books.get(one.name)
        setting = repr(sorted(one.parameters.items())) if one.parameters else str(one.notebook)
        stacks[one.name, one.interactive, setting].append(one)
    groups: dict[str, list[Card]] = defaultdict(list)
    for one, *one.earlier in stacks.values():
        groups[one.name].append(one)
    sweeps = [_sweep(group) for group in groups.values() if len(group) > CARDS]
    single = [one for group in groups.values() if len(group) <= CARDS for one in group]
    text = _page("index.html", title=title, cards=sorted(single, key=lambda one: -one.when), sweeps=sweeps)
    path, temporary = out / "index.html", out / f".index.html.{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); wanted a folder with space for it") from None
    return path


def _sweep(runs: list[Card]) -> dict[str, Any]:
    """Runs of one notebook by the two parameters that vary most, a picture for each value of the third."""
    values: dict[str, set[Any]] = defaultdict(set)
    for one in runs:
        for name, value in one.parameters.items():
            values[name].add(value)
    varying = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))
    across, down, facet = [*varying, "", "", ""][:3]
    facet = facet if len(values[facet]) <= FACETS else ""
    places = [_places(values[name]) for name in (facet, down, across)]
    labels = [[*dict.fromkeys(place.values()), ""] for place in places]
    pictures: dict[str, dict[str, dict[str, dict[str, list[Card]]]]] = {}
    for one in runs:
        f, d, c = (place.get(one.parameters.get(n), "") for place, n in zip(places, (facet, down, across), strict=True))
        cell = pictures.setdefault(f, {}).setdefault(d, {}).setdefault(c, {})
        cell.setdefault(one.ends, []).append(one)
    ends = Counter(one.ends for one in runs)
    causes = [end for end, _ in ends.most_common() if end not in ANSWERS]
    marks = {end: (mark, k) for k, (end, mark) in enumerate(zip(causes, CAUSES, strict=False))}
    marks |= {end: (mark, 8 if mark in "×!" else 6) for end, mark in ANSWERS.items()}
    return {
        "runs": runs,
        "size": sum(1 + len(one.earlier) for one in runs),
        "axes": (facet, down, across),
        "labels": labels,
        "columns": {
            f: [c for c in labels[2] if any(c in row for row in rows.values())] for f, rows in pictures.items()
        },
        "pictures": pictures,
        "ends": ends,
        "marks": {end: marks.get(end, ("✚", 6)) for end in ends},
        "counts": sum((one.counts for one in runs), Counter()),
        "reasons": Counter(one.reason for one in runs if one.reason).most_common(8),
    }


def _places(values: Collection[Any]) -> dict[Any, str]:
    """The label of each value's place along an axis."""
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    step = math.ceil(len(ordered) / ALONG) or 1
    parts = [ordered[k : k + step] for k in range(0, len(ordered), step)]
    return {value: f"{part[0]} to {part[-1]}" if len(part) > 1 else str(value) for part in parts for value in part}


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else KNOWN.sub("(withheld)", printable(number(value)))


def _page(template: str, **values: Any) -> str:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    style, script = (Markup((PAGES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return made.get_template(template).render(
        style=style, script=script, digest=digest, verdicts=[*VERDICTS], answers=ANSWERS, **values
    )
