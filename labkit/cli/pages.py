"""runs/index.html: each run with its verdict, parameters, device and time, and a link to its page."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>labkit runs</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem; border-bottom: 1px solid #ddd }
code { font-size: 13px }
.failed { color: #b00020; font-weight: 600 }
</style>
<h1>Runs</h1>
<table><tr><th>notebook</th><th>verdict</th><th>claims</th><th>parameters</th><th>device</th><th>time</th><th>date</th></tr>
"""


def write_index(out: Path) -> Path:
    """Write OUT/index.html from the runs found below OUT, newest first, and return its path."""
    folders = [path for path in out.glob("*/*") if (path / "log.txt").exists()]
    folders.sort(key=lambda path: (path / "log.txt").stat().st_mtime, reverse=True)
    rows = "".join(_row(out, folder) for folder in folders)
    index = out / "index.html"
    temporary = out / f".index.{os.getpid()}.html"
    temporary.write_text(f"{_HEAD}{rows}</table></html>\n", encoding="utf-8")
    temporary.replace(index)
    return index


def _row(out: Path, folder: Path) -> str:
    name = folder.parent.name
    page = folder / "report.html"
    link = f'<a href="{page.relative_to(out).as_posix()}">{name}</a>' if page.exists() else name
    try:
        return _finished_row(link, json.loads((folder / "result.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):  # no result, or not one that this version wrote
        log = (folder / "log.txt").relative_to(out).as_posix()
        failed = f'<span class="failed">no result</span>, <a href="{log}">log</a>'
        return f"<tr><td>{link}</td><td>{failed}</td><td></td>{_asked(folder)}<td></td><td></td></tr>\n"


def _asked(folder: Path) -> str:
    """Parameters and device of a run without a result, from the job that it was given."""
    try:
        given = json.loads((folder / "job.json").read_text(encoding="utf-8"))["parameters"]
    except (OSError, ValueError, KeyError):
        return "<td></td><td></td>"
    return f"<td>{_code(given)}</td><td>{html.escape(str(given.get('device', '')))}</td>"


def _code(parameters: dict[str, Any]) -> str:
    text = " ".join(f"{name}={value}" for name, value in parameters.items())
    return f"<code>{html.escape(text)}</code>"


def _finished_row(link: str, r: dict[str, Any]) -> str:
    given = [claim["verdict"] for claim in r["claims"].values()]
    counts = ", ".join(f"{given.count(word)} {word}" for word in dict.fromkeys(given))
    verdict = f"<b>{html.escape(r['verdict']['cause'] or 'not weighed')}</b>"
    if r["verdict"].get("first_divergence"):
        verdict += f"<br>first divergence: {html.escape(str(r['verdict']['first_divergence']))}"
    cells = (
        link, verdict, html.escape(counts), _code(r["parameters"]),
        html.escape(r["device"]["name"]), f"{r['seconds']:.0f} s", html.escape(r["date"]),
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
