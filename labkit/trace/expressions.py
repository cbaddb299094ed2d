"""What a file says that a step is: the name of an ATen operation, or a torch expression over the step's inputs.

`scaled = softmax(scores * 0.125, -1)` is written as ``torch.softmax(scores * 0.125, -1)``. The text is parsed, never
evaluated as code: names of inputs, numbers, arithmetic, indices, and calls of what is in the table below.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.trace.operations import ALLOWED, FACTORIES

Tensor = torch.Tensor

LONGEST, MOST_ELEMENTS = 2000, 1 << 28
"""Characters of a text, and elements of an intermediate result (2 GiB), beyond which a text is not understood."""

_COMPOSITE = frozenset(
    [
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "gelu",
        "silu",
        "sigmoid",
        "linear",
        "matmul",
        "square",
        "rsqrt",
        "var",
        "std",
        "logsumexp",
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "one_hot",
        "norm",
        "contiguous",
        "float",
        "double",
        "to",
        "mT",
        "T",
        "softplus",
        "leaky_relu",
        "elu",
        "hardswish",
        "conv1d",
        "conv2d",
        "conv3d",
        "einsum",
        "addmm",
        "baddbmm",
        "outer",
        "flatten",
        "unflatten",
        "movedim",
        "swapaxes",
        "swapdims",
        "chunk",
        "narrow",
    ]
)
_FUNCTIONS = ((ALLOWED - FACTORIES - {"repeat", "expand", "as_strided", "fill"}) | _COMPOSITE) - {"getitem"}

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}


def parsed(text: str, inputs: list[str]) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The function of named tensors that a text stands for. Raises ValueError where it is not understood."""
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    names = {_python_name(name): name for name in inputs}
    for name in sorted(inputs, key=len, reverse=True):  # a step's name need not be a Python name
        text = text.replace(name, _python_name(name))
    if text.strip().removeprefix("torch.").removeprefix("aten.") in _FUNCTIONS:
        text = f"{text.strip()}({', '.join(names)})"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("no expression") from None
    _check(tree, set(names))
    return lambda values: _value(tree, {python: values[name] for python, name in names.items()})


def _python_name(name: str) -> str:
    return name if name.isidentifier() else "_" + "".join(c if c.isalnum() else "_" for c in name)


def _check(node: ast.AST, names: set[str]) -> None:
    """Everything in a tree is of a kind that is allowed."""
    match node:
        case ast.Name(id=name) if name in names:
            return
        case ast.Constant(value=bool() | int() | float() | None):
            return
        case ast.BinOp(left=a, op=op, right=b) if type(op) in _BINARY:
            _check(a, names)
            _check(b, names)
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _BINARY:
            _check(a, names)
            _check(b, names)
        case ast.UnaryOp(op=op, operand=a) if type(op) in _UNARY:
            _check(a, names)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                _check(part, names)
        case ast.Subscript(value=a, slice=at):
            _check(a, names)
            _check_index(at, names)
        case ast.Attribute(value=a, attr="mT" | "T"):
            _check(a, names)
        case ast.Call(func=func, args=args, keywords=keywords):
            if not isinstance(func, ast.Name) or func.id not in _FUNCTIONS:
                if not isinstance(func, ast.Attribute) or func.attr not in _FUNCTIONS:
                    raise ValueError(f"{ast.unparse(func)[:40]!r} is no operation that is known")
                if not _is_torch(func.value):
                    _check(func.value, names)
            for one in args:
                _check(one, names) if not _is_text(one, func) else None
            for keyword in keywords:
                if keyword.arg is None:
                    raise ValueError("** is not understood")
                _check(keyword.value, names)
        case _:
            raise ValueError(f"{ast.unparse(node)[:40]!r} is not understood")


def _is_text(node: ast.AST, func: ast.AST) -> bool:
    """The equation of an einsum, the one text that an operation takes."""
    return ast.unparse(func).endswith("einsum") and isinstance(node, ast.Constant) and isinstance(node.value, str)


def _check_index(node: ast.AST, names: set[str]) -> None:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    for part in parts:
        if isinstance(part, ast.Slice):
            for end in (part.lower, part.upper, part.step):
                if end is not None:
                    _check(end, names)
        elif not (isinstance(part, ast.Constant) and part.value in (None, ...)):
            _check(part, names)


def _is_torch(node: ast.AST) -> bool:
    return ast.unparse(node) in ("torch", "aten", "F", "torch.nn.functional", "nn.functional")


def _value(node: Any, names: Mapping[str, Tensor]) -> Any:
    match node:
        case ast.Name(id=name):
            return names[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=a, op=op, right=b):
            x, y = _value(a, names), _value(b, names)
            if isinstance(op, ast.Pow) and not isinstance(x, Tensor):
                x = float(x)  # whole numbers to a power can take for ever
            return _BINARY[type(op)](x, y)
        case ast.Compare(left=a, ops=[op], comparators=[b]):
            return _BINARY[type(op)](_value(a, names), _value(b, names))
        case ast.UnaryOp(op=op, operand=a):
            return _UNARY[type(op)](_value(a, names))
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names) for part in parts)
        case ast.List(elts=parts):
            return [_value(part, names) for part in parts]
        case ast.Slice(lower=lower, upper=upper, step=step):
            return slice(*(None if end is None else _value(end, names) for end in (lower, upper, step)))
        case ast.Subscript(value=a, slice=at):
            return _value(a, names)[_value(at, names)]
        case ast.Attribute(value=a, attr=name):
            return getattr(_value(a, names), name)
        case ast.Call(func=func, args=args, keywords=keywords):
            given = [_value(one, names) for one in args]
            named = {keyword.arg: _value(keyword.value, names) for keyword in keywords}
            if isinstance(func, ast.Attribute) and not _is_torch(func.value):
                return getattr(_value(func.value, names), func.attr)(*given, **named)
            name = func.id if isinstance(func, ast.Name) else func.attr
            return _library(name)(*given, **named)
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not understood")


def _library(name: str) -> Any:
    for place in (torch, torch.nn.functional, torch.ops.aten):
        if hasattr(place, name):
            return getattr(place, name)
    raise ValueError(f"{name!r} is no operation that is known")


class _Sizes(TorchDispatchMode):
    """Refuses results that are too large; run on tensors without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(part, Tensor) and part.numel() > MOST_ELEMENTS:
                raise ValueError(f"a result of more than {MOST_ELEMENTS} elements")
        return out


def checked(
    text: str, inputs: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """:func:`parsed`, once it is known, without any data, that it gives a result of `shape`. Raises ValueError."""
    run = parsed(text, list(inputs))
    try:
        with _Sizes():
            found = run({name: torch.empty_like(x, device="meta") for name, x in inputs.items()})
    except ValueError:
        raise
    except Exception as error:
        raise ValueError((str(error).strip().splitlines() or ["it does not run"])[0][:80]) from None
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"gives {got}, the step is {shape}")
    return run
