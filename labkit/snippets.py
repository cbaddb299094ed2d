"""Code of PyTorch or NumPy, such as ``x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w``, as a formula.

It is read by Python's own parser and never run; what has no meaning as a formula of :mod:`labkit.expression` stays as
it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

MODULES = {"torch", "np", "numpy", "jnp", "jax", "math", "f", "tl", "nn", "functional"}
_LAST = {"dim", "axis"}
_SAME = {"sqrt", "rsqrt", "exp", "log", "sigmoid", "tanh", "relu", "abs", "cos", "sin", "erf"}
_OF_ROWS = {"mean": "mean", "sum": "sum", "max": "max", "amax": "max"}
_INFIX = {
    "add": "+", "sub": "-", "subtract": "-", "mul": "*", "multiply": "*", "div": "/", "divide": "/", "true_divide": "/",
    "pow": "**", "power": "**",
}  # fmt: skip
_CALLS: dict[str, tuple[tuple[str, ...], str]] = {
    "square": (("a",), "a * a"),
    "reciprocal": (("a",), "1 / a"),
    "neg": (("a",), "-a"),
    "silu": (("a",), "a * sigmoid(a)"),
    "gelu": (("a",), "0.5 * a * (1 + erf(a * 0.7071067811865476))"),
    "lerp": (("a", "b", "weight"), "a + weight * (b - a)"),
    "addcmul": (("a", "b", "c", "value"), "a + value * b * c"),
    "addcdiv": (("a", "b", "c", "value"), "a + value * b / c"),
}
"""What a function of these arguments is; the last one is 1 where it is not given and is named."""
_TANH = "0.5 * a * (1 + tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)))"


class _UnknownError(Exception):
    """What has no meaning as a formula."""


def plain(text: str) -> str:
    """The text, or the formula that it is the code of."""
    if not re.search(r"\w\.[A-Za-z_]\w*\(|\w\(", text):
        return text
    for part in (text, text.split(";")[0], re.split(r",\s*(?=\w+\s*=[^)]*$)", text)[0]):
        try:
            tree = next(_values(ast.parse(part.strip())))
            return ast.unparse(ast.fix_missing_locations(_Plain().visit(tree)))
        except (SyntaxError, ValueError, RecursionError, MemoryError, StopIteration, _UnknownError):
            continue
    return text


def _values(tree: ast.Module) -> Iterator[ast.expr]:
    """What is assigned, or the expression itself, where there is but one of them."""
    if len(tree.body) == 1 and isinstance(tree.body[0], (ast.Assign, ast.Expr)):
        yield tree.body[0].value


class _Plain(ast.NodeTransformer):
    """Calls of modules' functions, and of methods, as calls and operations of formulas."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Attribute):
            of = node.func.value
            name = node.func.attr
            given = list(node.args) if _is_module(of) else [of, *node.args]
        elif isinstance(node.func, ast.Name):
            name, given = node.func.id, list(node.args)
        else:
            raise _UnknownError
        arguments = [self.visit(x) for x in given]
        named = {one.arg: self.visit(one.value) for one in node.keywords if one.arg}
        return _meaning(name.lower().rstrip("_"), arguments, named)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        raise _UnknownError  # a transposed matrix, a field


def _is_module(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id.lower() in MODULES


def _meaning(name: str, given: list[ast.expr], named: dict[str, ast.expr]) -> ast.expr:
    if name in _SAME and len(given) == 1 and not named:
        return ast.Call(ast.Name(name, ast.Load()), given, [])
    if name in _OF_ROWS and given:
        along = [*given[1:2], *(named[one] for one in _LAST & set(named))]
        if len(given) > 3 or [ast.unparse(one) for one in along] not in ([], ["-1"]):
            raise _UnknownError
        return ast.Call(ast.Name(_OF_ROWS[name], ast.Load()), given[:1], [])
    if name in _INFIX and len(given) == 2 and set(named) <= {"alpha"}:
        right = "alpha * b" if named else "b"
        return _filled(f"a {_INFIX[name]} {right}", {"a": given[0], "b": given[1], **named})
    if name == "gelu" and ast.unparse(named.get("approximate", ast.Constant("none"))) == "'tanh'":
        return _filled(_TANH, {"a": given[0]})
    if name in _CALLS:
        letters, text = _CALLS[name]
        values = {**dict(zip(letters, given, strict=False)), **named}
        values.setdefault("value", ast.Constant(1))
        if set(letters) <= set(values) and len(given) <= len(letters) and set(named) <= {"value", "weight"}:
            return _filled(text, values)
    raise _UnknownError


def _filled(text: str, values: dict[str, ast.expr]) -> ast.expr:
    class Filled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return values.get(node.id, node)

    fill: Callable[[ast.AST], ast.expr] = Filled().visit
    return fill(ast.parse(text, mode="eval").body)
