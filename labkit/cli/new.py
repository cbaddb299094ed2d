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
PLACES = {
    "__init__.txt": "kernels/NAME/__init__.py",
    "golden.txt": "kernels/NAME/golden.py",
    "faulty.txt": "kernels/NAME/faulty.py",
    "claims.txt": "kernels/NAME/claims.py",
    "README.md": "kernels/NAME/README.md",
    "claims.yaml": "data/claims/NAME.yaml",
    "test.txt": "tests/kernels/test_NAME.py",
    "notebook.txt": "notebooks/NAME.ipynb",
}
"""Where each file of the template goes."""


def new(name: str) -> list[Path]:
    """Write the files of investigation `name`, run its notebook in place, and return where they are.

    Raises UsageError for a name that is no Python name in small letters, and for one of which a file is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"NAME: {name!r} is not right; wanted a Python name in small letters, such as softmax_rows")
    targets = {source: ROOT / place.replace("NAME", name) for source, place in PLACES.items()}
    if there := [path for path in targets.values() if path.exists()] or [
        path for path in (ROOT / "kernels" / name, ROOT / "kernels" / f"{name}.py") if path.exists()
    ]:
        raise UsageError(f"NAME: {there[0].relative_to(ROOT)} is there already; wanted a name that is not in use")
    for source, path in targets.items():
        text = (TEMPLATE / source).read_text(encoding="utf-8").replace("NAME", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nbformat.writes(notebook(text, name)) + "\n" if source == "notebook.txt" else text, "utf-8")
    refresh = [sys.executable, str(ROOT / ".ci" / "answers.py"), name]
    execute = "jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False"
    for command in (refresh, [sys.executable, "-m", *execute.split(), str(targets["notebook.txt"])]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{Path(command[-1]).name}: {done.stderr.strip().splitlines()[-1]}")
    return list(targets.values())


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
