"""The runs that a command asks for: notebooks with checked parameters, each in a folder of its own, and their results.

A run's folder is OUT/<notebook>/<run id>/. The run id is a hash of the notebook, its parameters, the sources and the
device, so a finished run is not repeated.
"""

from __future__ import annotations

import importlib.util
import os
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.session.catalogue import Notebook, notebook, notebooks, resolve
from labkit.session.claims import answer
from labkit.session.record import belongs, complete, run_id, sources, summary
from whywrong.errors import UsageError
from whywrong.tables import Table


@dataclass
class Run:
    """One execution of a notebook in `directory`, before and after; it failed if it has no result."""

    book: Notebook
    parameters: dict[str, Any]
    device: str
    sources: dict[str, str]
    directory: Path
    result: dict[str, Any] | None = None
    status: str = ""
    """``ok``, ``ok (reused)`` or ``failed: ...``."""

    def finished(self) -> dict[str, Any] | None:
        """The result of a complete run in this folder, or None."""
        with suppress(UsageError, OSError):
            if (self.directory / "report.html").read_bytes().rstrip().endswith(b"</html>"):
                return self.checked(self.directory, "result.json")
        return None

    def checked(self, folder: Path, name: str) -> dict[str, Any]:
        """The result of a complete run in `folder`. Raises UsageError for an incomplete run, and for another one."""
        result = complete(folder, name)
        if not belongs(result, self.directory):
            raise UsageError(f"{folder}: its result is of another notebook, device, or other parameters or sources")
        return result


def plan(names: Sequence[str], texts: Mapping[str, str], device: str, out: Path) -> list[Run]:
    """Check names and parameters, and return the runs. Nothing is started or written.

    `texts` are parameters as on a command line; every notebook must declare each of them. Without names all notebooks
    are run. Raises UsageError.
    """
    from labkit.session.device import decide

    for module in ("papermill", "nbconvert", "ipykernel"):  # each run imports them in a process of its own
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    books = [notebook(name) for name in names] if names else list(notebooks().values())
    if not books:
        raise UsageError("NAME: there are no notebooks here; expected one at least")
    if device != "auto" and texts.get("device", device) != device:
        raise UsageError(f"-p device={texts['device']} against --device {device}: expected one of them")
    runs = []
    for book in dict.fromkeys(books):
        requested = {"device": device} if device != "auto" and "device" in book.parameters else {}
        values = resolve(book.name, book.parameters, {**texts, **requested}, text=True)
        chosen = decide(values.get("device", device))
        if "device" in values:
            values["device"] = chosen.kind
        hashes = sources(book)
        identity = run_id(book.name, values, hashes, (chosen.kind, chosen.name))
        runs.append(Run(book, values, chosen.kind, hashes, out.resolve() / book.name / identity))
    return runs


def table(runs: Sequence[Run]) -> Table:
    """The table of verdicts: a row for each run."""
    rows = []
    for run in runs:
        cause, counts, seconds = (*summary(run.result), run.result["seconds"]) if run.result else (None, None, None)
        rows.append((run.book.name, run.status.partition("; see ")[0], cause, counts, run.device, seconds))
    return Table(("notebook", "status", "cause", "claims", "device", "seconds"), rows, wrap=40)


def answers(runs: Sequence[Run]) -> str:
    """A paragraph for each run: the notebook's answer with what this run measured, and the page to open."""
    paragraphs = []
    for run in runs:
        text = run.status
        with suppress(UsageError):  # a notebook without claims, or an answer that needs what this run did not measure
            text = (run.result and answer(run.book.name, run.result)) or text
        paragraphs.append(textwrap.fill(f"{run.book.name}: {text}", 80))
        if (page := run.directory / "report.html").exists():
            paragraphs.append(f"  page: {os.path.relpath(page)}")
    return "\n".join(paragraphs)
