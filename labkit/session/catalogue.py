"""The notebooks of this checkout, their questions and their parameters. Reads JSON only, so it is quick."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.session.parameters import Parameter, declared

ROOT = Path(__file__).resolve().parent.parent.parent


def folder() -> Path:
    """Where the notebooks are: notebooks/, or the folder that LABKIT_NOTEBOOKS names."""
    return Path(os.environ.get("LABKIT_NOTEBOOKS") or ROOT / "notebooks").resolve()


@dataclass(frozen=True)
class Notebook:
    """One investigation: a notebook of this checkout. `metadata["labkit"]` names its question and its kernels."""

    path: Path

    @property
    def name(self) -> str:
        """The notebook's name, which is also that of its claims file."""
        return self.path.stem

    @cached_property
    def content(self) -> dict[str, Any]:
        """The notebook as JSON."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def about(self) -> dict[str, str]:
        """The notebook's own metadata: question, answer, kernels."""
        return self.content["metadata"].get("labkit", {})

    @property
    def kernels(self) -> str:
        """The folder under kernels/ that holds the systems under investigation."""
        return self.about.get("kernels", "")

    @cached_property
    def code(self) -> list[str]:
        """The source of each code cell."""
        return ["".join(cell["source"]) for cell in self.content["cells"] if cell["cell_type"] == "code"]

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """What the cell tagged `parameters` declares."""
        for cell in self.content["cells"]:
            if "parameters" in cell["metadata"].get("tags", []):
                return declared("".join(cell["source"]))
        return {}


def notebooks() -> dict[str, Notebook]:
    """Every notebook of the checkout, by name."""
    return {path.stem: Notebook(path) for path in sorted(folder().glob("*.ipynb"))}


def notebook(name: str) -> Notebook:
    """The notebook called `name`; a UsageError that lists the names if there is none."""
    known = notebooks()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no notebook is called {name!r}; {hint}there are: {', '.join(known)}")
    return known[name]


def kernels_of(name: str) -> str:
    """The folder under kernels/ for a notebook's name, or for that folder's own name."""
    if (ROOT / "kernels" / name / "__init__.py").exists():
        return name
    return notebook(name).kernels
