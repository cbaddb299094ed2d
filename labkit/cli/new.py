"""An investigation of one's own: a notebook, a kernels' folder, claims and tests that run as they are made."""

from __future__ import annotations

import keyword
import re
import subprocess
import sys
from pathlib import Path

import nbformat

from labkit.cli.pages import HIDDEN
from labkit.errors import UsageError
from labkit.session.catalogue import ROOT

TEMPLATE = Path(__file__).parent / "template"
"""The files where the checkout has them; NAME stands for the name, and .txt at the end keeps a file from the linter."""


def new(name: str) -> list[Path]:
    """Write the files of investigation `name`, run its notebook in place, and return where they are.

    Raises UsageError for a name that is no Python name in small letters, and for one of which a file is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"NAME: {name!r} is not right; wanted a Python name in small letters, such as softmax_rows")
    sources = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file()]
    places = [str(path.relative_to(TEMPLATE)).removesuffix(".txt").replace("NAME", name) for path in sources]
    for place in (*places, f"kernels/{name}", f"kernels/{name}.py"):
        if (ROOT / place).exists():
            raise UsageError(f"NAME: {place} is there already; wanted a name that is not in use")
    targets = [ROOT / place for place in places]
    for source, path in zip(sources, targets, strict=True):
        text = source.read_text(encoding="utf-8").replace("NAME", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nbformat.writes(notebook(text, name)) + "\n" if path.suffix == ".ipynb" else text, "utf-8")
    refresh = [sys.executable, str(ROOT / ".ci" / "answers.py"), name]
    execute = "jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False"
    for command in (refresh, [sys.executable, "-m", *execute.split(), f"notebooks/{name}.ipynb"]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{Path(command[-1]).name}: {done.stderr.strip().splitlines()[-1]}")
    return targets


def notebook(text: str, name: str) -> nbformat.NotebookNode:
    """A notebook from its text. A cell begins with ``# %%`` and its tags, or ``[markdown]``."""
    cells: list[nbformat.NotebookNode] = []
    for tags, source in re.findall(r"(?ms)^# %%(.*?)\n(.*?)(?=^# %%|\Z)", text):
        make = nbformat.v4.new_markdown_cell if "[markdown]" in tags else nbformat.v4.new_code_cell
        metadata = {} if "[markdown]" in tags or not tags.strip() else {"tags": tags.split()}
        if HIDDEN in tags:
            metadata["jupyter"] = {"source_hidden": True}
        cells.append(make(source.strip(), id=f"cell-{len(cells)}", metadata=metadata))
    about = {"labkit": {"kernels": name}}
    about["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata=about)
