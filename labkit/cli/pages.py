"""Pages that need nothing but a browser: an executed notebook as a report, and all runs below a folder as a gallery.

What lies in a run's folder was written by programs that may have been killed, and by people. It is checked and shown
as text; no page runs a script but its own, or asks the network for anything.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from markupsafe import Markup
from math_core import LatexToMathML
from mistune.plugins.table import table_in_quote
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from PIL import Image

from labkit.session.catalogue import notebooks
from labkit.session.claims import VERDICTS
from labkit.session.record import as_result, belongs, failure, raised
from labkit.session.secrets import KNOWN
from whywrong.errors import UsageError
from whywrong.files import write_text, writing
from whywrong.tables import number, printable

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
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SyntaxError, UsageError)
"""What reading a file that is not as it should be may raise; SyntaxError is Pillow's of a picture."""
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""What no text has: characters that steer a terminal, and halves of characters."""
TITLE = re.compile("<h1>(.*?)</h1>", re.DOTALL)
HEADING = re.compile(r"<(h[23])>(.*?)</\1>", re.DOTALL)
SAID = re.compile(r"<p><strong>(?:Question|Answer)\.</strong>.*?</p>", re.DOTALL)
"""What the head of a report says of a notebook's first cell."""
MATHML = LatexToMathML(continue_on_error=True)


@dataclass
class Card:
    """One run as pages show it: `link` leads to its report, `notebook` is what was executed."""

    name: str
    notebook: Path
    link: str = ""
    state: str = "no result"
    """``ok``, ``failed``, or ``no result`` where result.json is not what a run writes."""
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    when: float = 0.0
    about: dict[str, Any] = field(default_factory=lambda: {"question": "", "answer": ""})
    """Question and answer."""
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """The parameters that differ from the checkout's defaults, and these."""
    earlier: Sequence[Card] = ()
    """Runs before this one at the same setting."""
    interactive: bool = False
    """Whether it is the last run from Lab, nbval or plain papermill."""

    @property
    def ends(self) -> str:
        """The cause that was identified, or a word of ANSWERS."""
        return self.state if self.state != "ok" else self.result["verdict"]["cause"] or "nothing weighed"

    @property
    def counts(self) -> Counter[str]:
        """How many claims have each verdict."""
        return Counter(claim["verdict"] for claim in self.result.get("claims", {}).values())

    @property
    def device(self) -> str:
        """The kind of device that it ran on."""
        return self.result["device"]["kind"] if self.result else str(self.parameters.get("device", "unknown"))

    @property
    def clock(self) -> str:
        """When it ended."""
        return datetime.fromtimestamp(self.when, UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def figure(self) -> tuple[str, str] | None:
        """The first figure, scaled down, as an address that holds it, and its alternative text."""
        with suppress(StopIteration, Image.DecompressionBombError, *BROKEN):
            outputs = (output for cell in _read(self.notebook)["cells"] for output in cell.get("outputs", ()))
            shown = next(output for output in outputs if "image/png" in output.get("data", {}))
            with Image.open(io.BytesIO(base64.b64decode("".join(shown["data"]["image/png"])))) as picture:
                small, packed = picture.convert("RGB"), io.BytesIO()
            small.thumbnail((720, 480))
            small.quantize(48).save(packed, "PNG", optimize=True)
            alt = str(shown["metadata"].get("image/png", {}).get("alt", ""))
            return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}", alt
        return None

    def compare(self) -> Card:
        """Fill in what the notebook of this checkout says, where there is one and it can be read."""
        with suppress(*BROKEN):
            book = notebooks()[self.name]
            self.about |= book.about
            known = {name: parameter.default for name, parameter in book.parameters.items()}
            differ = (name for name, value in self.parameters.items() if known.get(name) != value)
            self.changed = {name: (self.parameters[name], known.get(name)) for name in differ if name != "device"}
        return self


class _Renderer(IPythonRenderer):
    """Markdown whose mathematics is MathML."""

    def inline_math(self, body: str) -> str:
        return MATHML.convert_with_local_state(body, displaystyle=False)

    def block_math(self, body: str) -> str:
        return MATHML.convert_with_local_state(body, displaystyle=True)


def _markdown(source: str, attachments: Any = None) -> str:
    made = MarkdownWithMath(_Renderer(escape=False, exclude_anchor_links=True, attachments=attachments))
    table_in_quote(made)
    return made.render(source)


def as_page(notebook: Path, run: Card, home: str = "../../index.html", failed: str = "") -> str:
    """An executed notebook as HTML, without the source of glue, under what `run` says of it.

    A notebook with a cell that raised or did not run is shown as failed, and one of which `failed` says why it ended.
    `home` is where the gallery lies from here.
    """
    book = nbformat.read(notebook, as_version=4)
    options = {"template_name": "basic", "template_file": str(PAGES / "cells.html.j2")}
    cells, _ = HTMLExporter(**options, filters={"markdown2html": _markdown}).from_notebook_node(book)
    body = STEERING.sub("", cells)
    run = run.compare()
    run.about |= book.metadata.get("labkit", {})
    code = [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]
    done, reason = sum(cell.execution_count is not None for cell in code), raised(book.cells) or failed
    if reason or done < len(code):
        run.state, run.result = "failed", {}
        run.reason = reason or f"{done} of {len(code)} cells ran, and none says why it ended"
    title, contents = TITLE.search(body), list[tuple[str, str, Markup]]()

    def anchored(heading: re.Match[str]) -> str:
        contents.append((heading[1], f"section-{len(contents)}", Markup(heading[2])))
        return f'<{heading[1]} id="{contents[-1][1]}">{heading[2]}</{heading[1]}>'

    body = Markup(HEADING.sub(anchored, SAID.sub("", TITLE.sub("", body, 1), 2)))
    head = Markup(title[1]).striptags() if title else run.name
    return _page("report.html", run=run, title=head, contents=contents, body=body, home=home)


def card(folder: Path, attempt: str = "", result: str = "result.json") -> Card:
    """A run's folder as a card; `attempt` names the notebook of one that is in progress, which has no report yet.

    Raises nothing for what its files are.
    """
    made = Card(attempt or folder.parent.name, folder / "notebook.ipynb", interactive=folder.name == INTERACTIVE)
    kept = folder / ("result.json" if made.interactive else "report.html")
    if kept.is_file():
        made.link = urllib.parse.quote(os.fsencode(kept.relative_to(folder.parent.parent)))
    try:
        made.when = folder.stat().st_mtime
        found = as_result(_read(folder / result))
        made.when = (folder / result).stat().st_mtime
        of_folder = made.interactive or (made.link and belongs(found, folder))
        if found["notebook"] != made.name or not (attempt or of_folder):
            raise ValueError("it is not of this folder's run")
        made.state, made.result, made.parameters = "ok", found, found["parameters"]
    except FileNotFoundError:
        reason, given = failure(folder)
        made.state, made.reason = "failed", reason or "it did not come to lab.finish, so there is no result.json"
        made.parameters = {name: value for name, value in given.items() if isinstance(value, str | int | float)}
    except BROKEN as error:
        made.reason = f"result.json is not as a run writes it: {error}"
    return made


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def gallery(out: Path) -> Path:
    """Write OUT/index.html, which shows every run below OUT, and return it.

    Raises UsageError where it cannot be written.
    """
    files = [path for name in ("result.json", "log.txt", "notebook.ipynb") for path in out.glob(f"*/*/{name}")]
    return index(map(card, sorted({path.parent for path in files})), out)


def index(cards: Iterable[Card], out: Path, title: str = "Runs") -> Path:
    """Write OUT/index.html: a card for each setting that was run, or a grid where a notebook has many."""
    stacks, groups = defaultdict(list), defaultdict(list)
    for one in sorted(cards, key=lambda one: -one.when):
        setting = repr(sorted(one.parameters.items())) if one.parameters else str(one.notebook)
        stacks[one.name, one.interactive, setting].append(one)
    for one, *one.earlier in stacks.values():
        groups[one.name].append(one)
    shown = [one.compare() for one, *_ in stacks.values() if len(groups[one.name]) <= CARDS]
    sweeps = [_sweep(group) for group in groups.values() if len(group) > CARDS]
    path = out / "index.html"
    with writing(path, "--out"):
        write_text(path, _page("index.html", title=title, cards=shown, sweeps=sweeps))
    return path


def _sweep(runs: list[Card]) -> dict[str, Any]:
    """Runs of one notebook by the two parameters that vary most, a picture for each value of the third."""
    names = dict.fromkeys([*(name for one in runs for name in one.parameters), ""])
    values = {name: {one.parameters[name] for one in runs if name in one.parameters} for name in names}
    varying = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))
    axes = [*varying, "", "", ""][:3]
    axes[2] = axes[2] if len(values[axes[2]]) <= FACETS else ""
    places, cells = [_places(values[name]) for name in axes], defaultdict(list)
    for one in runs:
        at = (place.get(one.parameters.get(name), "") for place, name in zip(places, axes, strict=True))
        cells[tuple(at)].append(one)
    used = [set(along) for along in zip(*cells, strict=True)]
    labels = [[one for one in [*place.values(), ""] if one in along] for place, along in zip(places, used, strict=True)]
    ends, reasons = Counter(one.ends for one in runs), Counter(one.reason for one in runs if one.reason)
    causes = [end for end, _ in ends.most_common() if end not in ANSWERS]
    marks = ANSWERS | dict.fromkeys(causes, "✚") | dict(zip(causes, CAUSES, strict=False))
    counts = sum((one.counts for one in runs), Counter[str]())
    return {
        "runs": runs, "first": runs[0].compare(), "axes": axes, "cells": cells, "labels": map(dict.fromkeys, labels),
        "ends": ends.most_common(12), "marks": marks, "counts": counts, "reasons": reasons.most_common(8),
    }  # fmt: skip


def _places(values: Collection[Any]) -> dict[Any, str]:
    """The label of each value's place along an axis."""
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    step = -(-len(ordered) // ALONG) or 1
    parts = [ordered[k : k + step] for k in range(0, len(ordered), step)]
    return {value: f"{part[0]} to {part[-1]}" if len(part) > 1 else str(value) for part in parts for value in part}


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else KNOWN.sub("(withheld)", printable(number(value)))


def _page(template: str, **values: Any) -> str:
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGES), undefined=jinja2.StrictUndefined, autoescape=True)
    made.trim_blocks = made.lstrip_blocks = True
    made.finalize = _shown
    style, script = (Markup((PAGES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made.globals |= {"style": style, "script": script, "digest": digest, "verdicts": [*VERDICTS], "answers": ANSWERS}
    return made.get_template(template).render(values)
