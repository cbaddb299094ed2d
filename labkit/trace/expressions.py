"""What a file says that a step is: the name of an ATen operation, or a torch expression over the step's inputs.

`scaled = softmax(scores * 0.125, -1)` is written as ``torch.softmax(scores * 0.125, -1)``. The text is parsed, never
run as code: names of inputs, numbers, arithmetic, indices, and calls of what is in the table below.
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

_NAMES = """softmax log_softmax layer_norm rms_norm group_norm gelu silu linear matmul square var std logsumexp
cross_entropy nll_loss mse_loss one_hot norm float double to softplus leaky_relu elu hardswish conv1d conv2d conv3d
einsum addmm baddbmm outer flatten unflatten movedim swapaxes chunk narrow"""
_COMPOSITE = frozenset(_NAMES.split())
_FUNCTIONS = (ALLOWED - FACTORIES - {"repeat", "expand", "as_strided", "as_strided_scatter", "getitem"}) | _COMPOSITE
_LIBRARIES = ("torch", "aten", "F", "torch.nn.functional")

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip


def checked(
    text: str, inputs: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The function of named tensors that a text stands for, once it gives a result of `shape` without any data.

    Raises ValueError where a text is not understood, or gives anything else.
    """
    tree, names = _parsed(text, list(inputs))
    try:
        with _Sizes():
            found = _value(tree, {names[name]: torch.empty_like(x, device="meta") for name, x in inputs.items()})
    except ValueError:
        raise
    except Exception as error:
        raise ValueError((str(error).strip().splitlines() or ["it does not run"])[0][:80]) from None
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"it gives {got}, the step is {shape}")
    return lambda values: _value(tree, {names[name]: values[name] for name in inputs})


def _parsed(text: str, inputs: list[str]) -> tuple[ast.expr, dict[str, str]]:
    """The tree of a text, and the Python name by which each input stands in it."""
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    names = {name: name if name.isidentifier() else f"input_{i}" for i, name in enumerate(inputs)}
    for name in sorted(inputs, key=len, reverse=True):  # a step's name need not be a Python name
        text = text.replace(name, names[name]) if not name.isidentifier() else text
    if text.strip().removeprefix("torch.").removeprefix("aten.") in _FUNCTIONS:
        text = f"{text.strip()}({', '.join(names.values())})"
    try:
        return ast.parse(text.strip(), mode="eval").body, names
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("no expression") from None


def _value(node: Any, names: Mapping[str, Tensor]) -> Any:
    """The value of a tree; ValueError for what is in no table."""

    def of(part: Any) -> Any:
        return None if part is None else _value(part, names)

    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Constant(value=value) if value is None or value is ... or isinstance(value, (bool, int, float)):
            return value
        case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]) if (
            type(op) in _OPERATORS
        ):
            x, y = of(a), of(b)
            if isinstance(op, ast.Pow) and not isinstance(x, Tensor):
                x = float(x)  # whole numbers to a power can take for ever
            return _OPERATORS[type(op)](x, y)
        case ast.UnaryOp(op=op, operand=a) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(a))
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(of(part) for part in parts)
        case ast.Slice(lower=low, upper=high, step=step):
            return slice(of(low), of(high), of(step))
        case ast.Subscript(value=a, slice=at):
            return of(a)[of(at)]
        case ast.Attribute(value=a, attr="mT" | "T" as name):
            return getattr(of(a), name)
        case ast.Call(func=func, args=args, keywords=keywords):
            name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
            if name not in _FUNCTIONS or any(keyword.arg is None for keyword in keywords):
                raise ValueError(f"{ast.unparse(func)[:40]!r} is no operation that is known")
            equation = name == "einsum"  # the one text that an operation takes
            given = [ast.literal_eval(one) if equation and i == 0 else of(one) for i, one in enumerate(args)]
            named = {str(keyword.arg): of(keyword.value) for keyword in keywords}
            if isinstance(func, ast.Attribute) and ast.unparse(func.value) not in _LIBRARIES:
                return getattr(of(func.value), name)(*given, **named)
            places = (torch, torch.nn.functional, torch.ops.aten)
            return next(getattr(place, name) for place in places if hasattr(place, name))(*given, **named)
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not understood")


class _Sizes(TorchDispatchMode):
    """Refuses results that are too large, before they take memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(part, Tensor) and part.numel() > MOST_ELEMENTS:
                raise ValueError(f"a result of more than {MOST_ELEMENTS} elements")
        return out
