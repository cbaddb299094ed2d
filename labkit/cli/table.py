"""All runs of a notebook as a pandas table: a row for each run, failed ones with their reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]

from labkit.session.catalogue import Notebook, notebook
from labkit.session.record import belongs, complete, failure
from whywrong.errors import UsageError
from whywrong.files import complete_file, writing
from whywrong.tables import Table, number

LONGEST = 32
"""Characters above which a column is left out on a terminal; the file has all of it."""


def runs(name: str, out: Path) -> pandas.DataFrame:
    """The runs of notebook `name` below `out`, sorted by their parameters.

    Columns are run, status, ``parameters.*``, ``verdict.*``, ``claims.*`` (each claim's verdict), ``metrics.*``,
    ``device.*``, seconds, date and commit; lists are JSON. Raises UsageError where there is no run.
    """
    book = notebook(name)
    rows = [_row(book, path.parent) for path in sorted((out / name).glob("*/.lock"))]
    if not rows:
        raise UsageError(f"NAME: {out / name} holds no runs; expected those of labkit run or sweep, or --runs DIR")
    frame = pandas.json_normalize(rows)
    frame = frame.sort_values([f"parameters.{parameter}" for parameter in book.parameters], kind="stable")
    for column in frame.columns[frame.dtypes == "object"]:
        kinds = {type(value) for value in frame[column].dropna()}
        if len(kinds) > 1 or list in kinds:
            frame[column] = frame[column].map(_as_text, na_action="ignore")
    return frame.convert_dtypes().reset_index(drop=True)


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _no_formula(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula, behind an apostrophe (OWASP, CSV injection)."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _row(book: Notebook, folder: Path) -> dict[str, Any]:
    parameters: dict[str, Any] = dict.fromkeys(book.parameters)
    row = {"run": folder.name, "status": "", "seconds": None, "parameters": parameters}
    try:
        if not belongs(result := complete(folder), folder):
            return row | {"status": "failed: result.json is of another run"}
    except UsageError as error:
        reason, known = failure(folder)
        reason = "" if (folder / "result.json").exists() else reason  # the run ended well: its log does not say why
        return row | {"status": f"failed: {reason or error}"[:200], "parameters": parameters | known}
    row |= {part: result[part] for part in ("verdict", "metrics", "device", "seconds", "date")}
    row |= {"parameters": parameters | result["parameters"], "commit": result["provenance"].get("commit")}
    return row | {"status": "ok", "claims": {claim: entry["verdict"] for claim, entry in result["claims"].items()}}


def printed(frame: pandas.DataFrame) -> str:
    """The columns that vary, as many as fit into a line of the terminal."""
    room, shown, left_out = shutil.get_terminal_size((80, 24)).columns, dict[str, list[str]](), 0
    head = ["run", *(name for name in frame if name.startswith("parameters.")), "status", "seconds"]
    for name in [*head, *(name for name in frame if name not in head)]:
        texts = [number(value if pandas.notna(value) else None) for value in frame[name].tolist()]
        title = name.rpartition(".")[2] if name in head else name
        width = min(LONGEST, max(map(len, [title, *texts])))
        if name not in ("run", "status") and frame[name].nunique() <= 1:
            continue
        if width + 2 > room or (name != "status" and max(map(len, texts)) > LONGEST):
            left_out += 1
        else:
            shown[title], room = texts, room - width - 2
    table = Table(list(shown), list(zip(*shown.values(), strict=True)), wrap=LONGEST)
    return f"{table}\n{len(frame)} runs; {left_out} more columns vary, and --out FILE.parquet or FILE.csv has all"


def write(frame: pandas.DataFrame, path: Path) -> Path:
    """Write a whole Parquet or CSV file, or none. Raises UsageError for another suffix and for an unwritable path."""
    if path.suffix not in (".parquet", ".csv"):
        raise UsageError(f"--out: expected a name that ends in .parquet or .csv, got {path}")
    with writing(path, "--out"), complete_file(path) as temporary:
        if path.suffix == ".parquet":
            frame.to_parquet(temporary)
        else:
            frame.map(_no_formula, na_action="ignore").to_csv(temporary, index=False)
    return path
