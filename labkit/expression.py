"""Formulas in text, such as ``0.9*m + (1-0.9)*g``: read by Python's own parser, evaluated in float64 with an error.

Only numbers, names, + - * / ** and comparisons, and a few functions are taken. The error follows each operation (Higham
2002, section 3.3): what its operands were off, carried to first order, and one rounding.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from labkit.snippets import plain

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
"""A value, and how much it may be off."""

LETTERS = "abcde"
"""What the inputs of a step are called in a formula that is looked for."""
FAILURES = (RuntimeError, IndexError, ZeroDivisionError, OverflowError, KeyError)
"""What evaluating a formula on tensors of the wrong shapes, or too large a power of numbers, may raise."""
ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)\s*=\s*(-?\d+\.?\d*(?:e[-+]?\d+)?)(?![\w.]|\s*[-+*/^])", re.IGNORECASE)
_CAST = re.compile(r"^\s*cast\s+(?:to\s+)?\w+\s*\((.*)\)[^)]*$", re.IGNORECASE)
_DEFINED = re.compile(r"^\s*[A-Za-z_]\w*\s*=\s*(\d+\.?\d*\s+[A-Za-z_(][^,;=]*[-+*/^].*)$", re.DOTALL)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)

# name -> function, and the size of its derivative
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sqrt": (torch.sqrt, lambda x: 0.5 / torch.sqrt(x)),
    "rsqrt": (torch.rsqrt, lambda x: 0.5 * torch.rsqrt(x) ** 3),
    "exp": (torch.exp, torch.exp),
    "log": (torch.log, lambda x: 1.0 / x.abs()),
    "sigmoid": (torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
    "tanh": (torch.tanh, lambda x: 1.0 - torch.tanh(x) ** 2),
    "relu": (torch.relu, torch.ones_like),
    "abs": (torch.abs, torch.ones_like),
    "cos": (torch.cos, torch.ones_like),
    "sin": (torch.sin, torch.ones_like),
    "erf": (torch.erf, lambda x: (2.0 / math.sqrt(math.pi)) * torch.exp(-x * x)),
}

_ROUNDINGS = {"erf": 8.0}
"""Round-offs of a function's value where they are not 4. Vectorised erf in float32 is Abramowitz and Stegun's 7.1.26,
off by 1.5e-7 whatever its size."""

_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "max": lambda x: x.amax(-1, keepdim=True),
    "rows": lambda x: x.sum(-2, keepdim=True),
    "tokens": lambda x: x.flatten(0, -2).sum(0, keepdim=True),
}
"""Functions of a whole row, along the last dimension; `rows`, the sum of all rows; `tokens`, that of all blocks."""

_MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
    "pairs": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
}
"""A quarter turn: halves of a row, or columns two by two, in each other's place, the new first ones negated."""


@dataclass(frozen=True)
class Expression:
    """A text as it was read: its tree, and the numbers that it, or custom, gives to names."""

    tree: ast.expr
    numbers: dict[str, float]

    @property
    def variables(self) -> list[str]:
        """The names in it that have no number, sorted."""
        nodes = list(ast.walk(self.tree))
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        return sorted({node.id for node in nodes if isinstance(node, ast.Name)} - called - set(self.numbers))


@lru_cache(maxsize=4096)
def parse(op: str) -> Expression | None:
    """What the text may say, without the words before it: ``divide a / b``, ``weight decay: p*(1-lr*wd), lr=0.1``.

    None where it is no formula.
    """
    text = op.strip()
    if cast := _CAST.match(text):
        text = cast.group(1)
    if formula := _DEFINED.match(text):  # `m = 0.9 m + 0.1 g` gives m no number
        text = formula.group(1)
    usual = {"beta1": 0.9, "beta2": 0.999}  # of Adam, where the text gives no others
    numbers = usual | {name.lower(): float(value) for name, value in ASSIGNED.findall(text)}
    text = re.split(r"[,;]|->|\u2192", plain(text))[0].lower()
    text = text.replace("^", "**").replace("\u00b7", "*").replace("\u00d7", "*")
    text = re.sub(r"(?<=[\w)]) o (?=[\w(])", " * ", text)  # Hadamard's
    text = re.sub(r"\brow(sum|max|mean)\b", r"\1", text)
    if "=" in text and not re.search(r"[<>]=", text):
        text = text.rsplit("=", 1)[1]
    said = text.rsplit(":", 1)[-1]
    for rest in (said.split(), _with_stars(said).split()):
        for dropped in range(min(4, len(rest))):
            try:
                tree = ast.parse(" ".join(rest[dropped:]), mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            if isinstance(tree, (ast.BinOp, ast.Call)) and _allowed(tree):
                return Expression(tree, numbers)
    return None


def _with_stars(text: str) -> str:
    """``p(1 - lr wd) - lr u`` as ``p*(1 - lr*wd) - lr*u``: what stands side by side is multiplied."""
    known = "|".join((*_FUNCTIONS, *_ROWS, *_MOVED))
    text = re.sub(rf"(?<![\w.])(?!(?:{known})\b)([a-z_]\w*|\))\s*\(", r"\1*(", text)
    return re.sub(r"(?<=[\w)])\s+(?=[a-z_(])", "*", text)


def _allowed(tree: ast.expr) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            continue
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and isinstance(node.ops[0], (ast.Gt, ast.GtE, ast.Lt, ast.LtE))
        ):
            continue
        if isinstance(node, ast.Call):
            if not (
                isinstance(node.func, ast.Name)
                and node.func.id in (*_FUNCTIONS, *_ROWS, *_MOVED)
                and len(node.args) == 1
                and not node.keywords
            ):
                return False
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            continue
        if isinstance(node, (ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.operator, ast.cmpop)):
            continue
        return False
    return True


def sampled(text: str, given: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a formula's text where its names have these values; None where it cannot be had of them."""
    read = parse(text)
    if read is None:
        return None
    exact = {name: (torch.tensor(x, dtype=torch.float64), torch.zeros(())) for name, x in read.numbers.items()}
    try:
        return evaluate(read.tree, exact | {name: (x, torch.zeros_like(x)) for name, x in given.items()}, 0.0, 0.0)[0]
    except FAILURES:
        return None


def uses_rows(text: str) -> bool:
    """Whether a text has functions of whole rows."""
    return any(re.search(rf"\b{name}\(", text) for name in (*_ROWS, *_MOVED))


def number(x: float, unit: float) -> Pair:
    """A number in a formula: whole ones are exact, others rounded."""
    value = torch.tensor(float(x), dtype=torch.float64)
    exact = x == int(x) if math.isfinite(x) else False
    return value, torch.zeros_like(value) if exact else unit * value.abs()


def evaluate(node: ast.expr, given: Mapping[str, Pair], unit: float, sums: float) -> Pair:
    """The value in float64, and how much arithmetic of `unit` round-off may be off; `sums` is that of sums and means.

    Raises one of FAILURES where what is given does not fit together.
    """
    if isinstance(node, ast.Constant):
        return number(float(node.value), unit)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return given[node.id]
    if isinstance(node, ast.UnaryOp):
        value, error = evaluate(node.operand, given, unit, sums)
        return (-value if isinstance(node.op, ast.USub) else value), error
    if isinstance(node, ast.Compare):
        (a, ea), (b, eb) = evaluate(node.left, given, unit, sums), evaluate(node.comparators[0], given, unit, sums)
        greater = isinstance(node.ops[0], (ast.Gt, ast.GtE))
        return ((a > b) if greater else (a < b)).double(), ((a - b).abs() <= ea + eb).double() * (ea + eb > 0)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        x, error = evaluate(node.args[0], given, unit, sums)
        if node.func.id in _MOVED:
            return _MOVED[node.func.id](x), _MOVED[node.func.id](error.expand(x.shape)).abs()
        if node.func.id in _ROWS:
            along = _ROWS[node.func.id]
            if node.func.id == "max":
                return along(x), along(_settled(x, error.expand(x.shape)))
            length = x.numel() // along(x).numel()
            return along(x), along(error.expand(x.shape)) + (length - 1 + (length > 1)) * sums * along(x.abs())
        run, slope = _FUNCTIONS[node.func.id]
        value = run(x)
        carried = torch.where(error > 0.0, slope(x).abs() * error * 1.01, 0.0)
        size = torch.ones_like(value) if node.func.id == "erf" else value.abs()
        return value, _settled(value, carried + _ROUNDINGS.get(node.func.id, 4.0) * unit * size)
    assert isinstance(node, ast.BinOp)
    (a, ea), (b, eb) = evaluate(node.left, given, unit, sums), evaluate(node.right, given, unit, sums)
    if isinstance(node.op, (ast.Add, ast.Sub)):
        value = a + b if isinstance(node.op, ast.Add) else a - b
        error = ea + eb
    elif isinstance(node.op, ast.Mult):
        value, error = a * b, a.abs() * eb + b.abs() * ea + ea * eb
    elif isinstance(node.op, ast.Div):
        value = a / b
        error = torch.where((ea > 0) | (eb > 0), (ea + value.abs() * eb) / (b.abs() - eb).clamp(min=1e-300), 0.0)
    else:
        value = a**b
        error = torch.where(ea > 0, (b * value / a).abs() * ea, 0.0)
        error = error + torch.where(eb > 0, (value * torch.log(a.abs().clamp(min=1e-300))).abs() * eb, 0.0)
        unit = unit * (1.0 + b.abs().max().item())  # a power may be taken by repeated products
    return value, _settled(value, error + unit * value.abs())


def _settled(value: Tensor, error: Tensor) -> Tensor:
    """An infinity is off by nothing: a mask stays one."""
    return torch.where(value.isfinite(), error, 0.0)
