"""A notebook's parameters: flat literals whose range or choices stand in the comment.

    heads: int = 12  # [1, 128] number of heads
    device: str = "auto"  # {auto, cpu, cuda} where kernels run

The cell tagged ``parameters`` is the one place where they are declared; `labkit list`, `labkit run` and
`labkit.start` all read it from there.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import UsageError

_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_RANGE = re.compile(r"^\[\s*([^,\]]+?)\s*,\s*([^\]]+?)\s*\]\s*(.*)$")
_CHOICES = re.compile(r"^\{\s*([^}]+?)\s*\}\s*(.*)$")


@dataclass(frozen=True)
class Parameter:
    """One declared parameter: its type, default, and either a closed range or a set of choices."""

    name: str
    type: type
    default: Any
    help: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()

    @property
    def allowed(self) -> str:
        """What a right value is, in words: ``int in [1, 128]``."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        span = "" if self.low is None else f" in [{self.low:g}, {self.high:g}]"
        return f"{self.type.__name__}{span}"

    def check(self, value: Any) -> Any:
        """Return `value` in the declared type; raise UsageError where it is of another type or out of range."""
        right_type = isinstance(value, self.type) and (self.type is bool or not isinstance(value, bool))
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value, right_type = float(value), True
        in_range = right_type and (self.low is None or self.low <= value <= (self.high or 0.0))
        if not in_range or (self.choices and value not in self.choices):
            raise UsageError(f"parameter {self.name}: {value!r} is not right; wanted {self.allowed}")
        return value

    def parse(self, text: str) -> Any:
        """Read a value as it is written on a command line."""
        if self.type is str:
            return self.check(text)
        if self.type is bool:
            if text.lower() not in ("true", "false"):
                raise UsageError(f"parameter {self.name}: {text!r} is not right; wanted true or false")
            return text.lower() == "true"
        try:
            return self.check(self.type(text))
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"parameter {self.name}: {text!r} is not right; wanted {self.allowed}") from None


def declared(source: str) -> dict[str, Parameter]:
    """Read the parameters that a cell declares, in order. Anything but a flat, typed literal is an error."""
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, Parameter] = {}
    for node in ast.parse(source).body:
        if not (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.annotation, ast.Name)
            and node.annotation.id in _TYPES
            and node.value is not None
        ):
            raise UsageError(f"parameters cell, line {node.lineno}: wanted `name: type = literal  # [range] help`")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise UsageError(f"parameters cell, line {node.lineno}: the default is no literal") from None
        parameter = _with_comment(node.target.id, _TYPES[node.annotation.id], default, comments.get(node.lineno, ""))
        parameter.check(default)
        found[parameter.name] = parameter
    return found


def _with_comment(name: str, kind: type, default: Any, comment: str) -> Parameter:
    if match := _RANGE.match(comment):
        return Parameter(name, kind, default, match[3], low=float(match[1]), high=float(match[2]))
    if match := _CHOICES.match(comment):
        choices = tuple(kind(choice.strip()) for choice in match[1].split(","))
        return Parameter(name, kind, default, match[2], choices=choices)
    return Parameter(name, kind, default, comment)


def resolve(
    notebook: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any], *, text: bool = False
) -> dict[str, Any]:
    """Check `given` against what the notebook declares and fill in the defaults.

    With `text` the values are strings from a command line. Raises UsageError for an unknown name, a value of the
    wrong type or out of range.
    """
    for name in given:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"parameter {name}: {notebook} has none of that name; {hint}it has {', '.join(parameters)}"
            )
    values = {name: parameter.default for name, parameter in parameters.items()}
    for name, value in given.items():
        values[name] = parameters[name].parse(value) if text else parameters[name].check(value)
    return values
