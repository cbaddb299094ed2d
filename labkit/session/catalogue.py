"""The notebooks of this checkout, their questions and their parameters. Imports nothing slow.

The cell tagged ``parameters`` declares flat literals, whose range or choices stand in the comment; `labkit list`,
`labkit run` and `labkit.start` all read them from there:

    heads: int = 12  # [1, 128] number of heads
    device: str = "auto"  # {auto, cpu, cuda} where kernels run
"""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.session.reading import read_json
from labkit.session.secrets import secrets
from whywrong.errors import UsageError, did_you_mean

ROOT = Path(__file__).resolve().parent.parent.parent


_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
"""A number as Python and YAML both write it: no digits of other scripts, no 1_2."""
_COMMENT = re.compile(r"[\s#]*(?:\[([^,\]]+),([^\]]+)\]|\{([^}]+)\})?\s*(.*)")  # low, high, choices, help


@dataclass(frozen=True)
class Parameter:
    """One declared parameter: its type, default, and either a closed range or a set of choices."""

    name: str
    type: type
    default: Any
    help: str = ""
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()

    @property
    def allowed(self) -> str:
        """The allowed values in words: ``int in [1, 128]``."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        span = "" if self.low == -math.inf else f" in [{self.low:g}, {self.high:g}]"
        return "true or false" if self.type is bool else f"{self.type.__name__}{span}"

    def check(self, value: Any) -> Any:
        """Return `value` in the declared type; raise UsageError for another type and for a value out of range."""
        if self.type is float and type(value) is int:
            value = float(value)
        is_valid = type(value) is self.type and (not self.choices or value in self.choices)
        if is_valid and self.type is not str:
            is_valid = self.low <= value <= self.high and abs(value) < math.inf
        if not is_valid:
            raise UsageError(f"parameter {self.name}: expected {self.allowed}, got {repr(value)[:80]}")
        return value

    def parse(self, text: str) -> Any:
        """Read a value from a command line, and check it."""
        value: Any = text
        if self.type is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif _NUMBER.fullmatch(text):
            with suppress(ValueError):  # 2.5 is no int; `check` reports it
                value = self.type(text)
        return self.check(value)


def declared(source: str) -> dict[str, Parameter]:
    """Read the parameters that a cell declares, in order. Raises UsageError for anything but flat, typed literals."""
    parameters: dict[str, Parameter] = {}
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"parameters cell: expected Python, got a cell that is none ({str(error)[:80]})") from None
    for node in nodes:
        try:
            name, kind = node.target.id, _TYPES[node.annotation.id]  # type: ignore[attr-defined]
            default = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            line = source.splitlines()[(node.end_lineno or node.lineno) - 1]
            low, high, listed, help = _COMMENT.findall(line.encode()[node.end_col_offset :].decode())[0]
            limits = float(low or -math.inf), float(high or math.inf)
            choices = tuple(kind(choice.strip()) for choice in listed.split(",")) if listed else ()
        except (AttributeError, KeyError, ValueError):
            cell = f"parameters cell, line {node.lineno}"
            raise UsageError(f"{cell}: expected `name: type = literal  # [range] help`") from None
        parameters[name] = Parameter(name, kind, default, help, *limits, choices)
        parameters[name].check(default)
    return parameters


def resolve(book: str, known: dict[str, Parameter], values: Mapping[str, Any], text: bool = False) -> dict[str, Any]:
    """Check `values` against the parameters that the notebook declares, and fill in the defaults.

    With `text` the values are strings from a command line. Raises UsageError for an unknown name, a value of the
    wrong type or out of range, or a secret, which it does not repeat.
    """
    for name, value in values.items():
        if isinstance(value, str) and secrets(f"{name}: {value}"):
            raise UsageError(f"parameter {name}: it looks like a secret; expected none, since pages show parameters")
        if name not in known:
            hint = f"{did_you_mean(name, known)}it has {', '.join(known)}"
            raise UsageError(f"parameter {name}: {book} has none of that name; {hint}")
    read = Parameter.parse if text else Parameter.check
    defaults = {name: parameter.default for name, parameter in known.items()}
    return defaults | {name: read(known[name], value) for name, value in values.items()}


@dataclass(frozen=True)
class Notebook:
    """One investigation: a notebook of this checkout. Its name is also that of its claims file."""

    path: Path

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @cached_property
    def content(self) -> dict[str, Any]:
        """The notebook as JSON. Raises UsageError for an invalid file."""
        return read_json(self.path, f"notebook {self.name}", "notebook")

    @property
    def about(self) -> dict[str, str]:
        """The notebook's own metadata: question, answer, and kernels, its folder under kernels/."""
        return self.content["metadata"].get("labkit", {})

    @cached_property
    def code(self) -> list[str]:
        """The source of each code cell."""
        return ["".join(cell["source"]) for cell in self.content["cells"] if cell["cell_type"] == "code"]

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters that the cell tagged `parameters` declares."""
        tagged = (cell for cell in self.content["cells"] if "parameters" in cell["metadata"].get("tags", []))
        return declared("".join(next(tagged, {"source": ""})["source"]))


def notebooks() -> dict[str, Notebook]:
    """Every notebook by name, from notebooks/ or the folder that LABKIT_NOTEBOOKS names."""
    folder = Path(os.environ.get("LABKIT_NOTEBOOKS") or ROOT / "notebooks").resolve()
    return {path.stem: Notebook(path) for path in sorted(folder.glob("*.ipynb"))}


def notebook(name: str) -> Notebook:
    """The notebook called `name`. Raises UsageError, which lists the names, if there is none."""
    known = notebooks()
    if name not in known:
        raise UsageError(f"no notebook is called {name!r}; {did_you_mean(name, known)}there are: {', '.join(known)}")
    return known[name]
