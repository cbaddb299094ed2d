"""Pages that need nothing but a browser: a run's folder as a card, and its executed notebook as a report.

The files in a run's folder may be damaged or written by people. They are checked and shown as text; a page runs no
script but its own, and requests nothing from the network.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Sequence
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
from labkit.session.record import as_result, belongs, failure, raised, sealed
from labkit.session.secrets import hidden
from whywrong.errors import UsageError
from whywrong.tables import number, printable

PAGES = Path(__file__).parent / "pages"
ANSWERS = {"undecidable": "○", "none of these": "◇", "nothing weighed": "–", "failed": "×", "no result": "!"}
"""The ends of a run other than a cause, and their marks in a sweep."""
LATEST = datetime.max.replace(tzinfo=UTC).timestamp() - 1.0
INTERACTIVE = "interactive"
"""The folder of runs from Lab, nbval and plain papermill: it has the result of the last one, and no page."""
READ_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SyntaxError, UsageError)
"""What reading a damaged file may raise; SyntaxError is Pillow's for a picture."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs."""
TITLE = re.compile("<h1>(.*?)</h1>", re.DOTALL)
HEADING = re.compile(r"<(h[23])>(.*?)</\1>", re.DOTALL)
QUESTION = re.compile(r"(?s)<details><summary><b>Answer.*?</details>|<p><strong>(?:Question|Answer)\.</strong>.*?</p>")
"""The part of a notebook's first cell that the head of a report repeats."""
MATHML = LatexToMathML(continue_on_error=True)


@dataclass
class Card:
    """One run as pages show it: `link` leads to its report, `notebook` is the executed one."""

    name: str
    notebook: Path
    link: str = ""
    state: str = "no result"
    """``ok``, ``failed``, or ``no result`` if result.json is not what a run writes."""
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
        return datetime.fromtimestamp(min(max(self.when, 0.0), LATEST), UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def figure(self) -> tuple[str, str] | None:
        """The first figure, scaled down, as an address that holds it, and its alternative text."""
        with suppress(StopIteration, Image.DecompressionBombError, *READ_ERRORS):
            outputs = (output for cell in _read(self.notebook)["cells"] for output in cell.get("outputs", ()))
            output = next(output for output in outputs if "image/png" in output.get("data", {}))
            picture, file = Image.open(io.BytesIO(base64.b64decode("".join(output["data"]["image/png"])))), io.BytesIO()
            picture.thumbnail((720, 480))
            picture.convert("RGB").quantize(48).save(file, "PNG", optimize=True)
            alt = str(output["metadata"].get("image/png", {}).get("alt", ""))
            return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", alt
        return None

    def compare(self) -> Card:
        """Fill in question, answer and changed parameters from this checkout's notebook, if it can be read."""
        with suppress(*READ_ERRORS):
            book = notebooks()[self.name]
            self.about |= book.about
            defaults = {name: parameter.default for name, parameter in book.parameters.items()}
            pairs = {name: (value, defaults.get(name)) for name, value in self.parameters.items() if name != "device"}
            self.changed = {name: (value, default) for name, (value, default) in pairs.items() if value != default}
        return self


class _Renderer(IPythonRenderer):
    """Markdown whose mathematics is MathML."""

    def inline_math(self, body: str) -> str:
        return MATHML.convert_with_local_state(body, displaystyle=False)

    def block_math(self, body: str) -> str:
        return MATHML.convert_with_local_state(body, displaystyle=True)


def _markdown(source: str, attachments: Any = None) -> str:
    markdown = MarkdownWithMath(_Renderer(escape=False, exclude_anchor_links=True, attachments=attachments))
    table_in_quote(markdown)
    return markdown.render(source)


def as_page(notebook: Path, run: Card, home: str = "../../index.html", failed: str = "") -> str:
    """An executed notebook as HTML, under the verdict, answer and ledger of `run`.

    A notebook of which a cell raised or did not run is shown as failed; `failed` is why, if no cell has the reason.
    `home` is the gallery's address. The source of cells tagged hide-input is left out.
    """
    book = nbformat.read(notebook, as_version=4)
    options = {"template_name": "basic", "template_file": str(PAGES / "cells.html.j2")}
    cells, _ = HTMLExporter(**options, filters={"markdown2html": _markdown}).from_notebook_node(book)
    body = CONTROL.sub("", cells)
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

    body = Markup(HEADING.sub(anchored, QUESTION.sub("", TITLE.sub("", body, 1), 2)))
    head = Markup(title[1]).striptags() if title else run.name
    return render("report.html", run=run, title=head, contents=contents, body=body, home=home)


def card(folder: Path, attempt: str = "", result: str = "result.json") -> Card:
    """A run's folder as a card. `attempt` is the notebook's name for a run in progress, which has no report yet.

    Raises nothing, whatever the files hold.
    """
    run = Card(attempt or folder.parent.name, folder / "notebook.ipynb", interactive=folder.name == INTERACTIVE)
    page = folder / ("result.json" if run.interactive else "report.html")
    if page.is_file():
        run.link = urllib.parse.quote(os.fsencode(page.relative_to(folder.parent.parent)))
    try:
        run.when = folder.stat().st_mtime
        content = as_result(_read(folder / result))
        run.when = (folder / result).stat().st_mtime
        is_own = attempt or run.interactive or (run.link and belongs(content, folder))
        if content["notebook"] != run.name or not is_own:
            raise ValueError("it is not of this folder's run")
        if not (attempt or run.interactive or (run.notebook.is_file() and content == sealed(content, run.notebook))):
            raise ValueError("it or its notebook has another digest than when the run ended")
        run.state, run.result, run.parameters = "ok", content, content["parameters"]
    except FileNotFoundError:
        reason, parameters = failure(folder)
        run.state, run.reason = "failed", reason or "it did not come to lab.finish, so there is no result.json"
        run.parameters = {name: value for name, value in parameters.items() if isinstance(value, str | int | float)}
    except READ_ERRORS as error:
        run.reason = f"result.json is not as a run writes it: {error}"
    return run


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def render(template: str, **values: Any) -> str:
    """A page from a template beside this module; secrets and control characters are written out."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGES), undefined=jinja2.StrictUndefined)
    environment.autoescape = environment.trim_blocks = environment.lstrip_blocks = True
    environment.finalize = _safe
    style, script = (Markup((PAGES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values |= {"style": style, "script": script, "digest": digest, "verdicts": [*VERDICTS], "answers": ANSWERS}
    return environment.get_template(template, globals=values).render()


def _safe(value: Any) -> Any:
    return value if isinstance(value, Markup) else hidden(printable(number(value)))
