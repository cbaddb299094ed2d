"""Kernels as torch knows them: operations of the library `workbook`, with a shape-only form and a gradient each.

As a call costs the host time: an operation of `torch.library.custom_op` takes three times as long as one that is
defined here, and a Function whose signature is looked up anew at each call twice as long as one that carries it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

NAME = "workbook"
_library = torch.library.Library(NAME, "FRAGMENT")


def operation(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operation that writes into none of its arguments and whose results are no views of them."""

    def define(function: Callable[..., Any]) -> Any:
        _library.define(name + torch.library.infer_schema(function, mutates_args=()))
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(getattr(torch.ops, NAME), name).default

    return define


def shapes_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the operation's form that allocates its results and computes nothing."""
    return torch.library.register_fake(f"{NAME}::{name}")


def differentiable(
    operation: Any, gradients: Callable[..., tuple[Any, ...]], keep: Callable[[Any, tuple[Any, ...], Any], None]
) -> Callable[..., Any]:
    """Gives an operation its gradient; returns what to call.

    `keep(ctx, inputs, output)` saves what `gradients(ctx, *above)` needs. What is returned calls the operation as an
    autograd Function, since torch.func differentiates Functions and no operations.
    """
    torch.library.register_autograd(operation.name(), gradients, setup_context=keep)

    def forward(*given: Any) -> Any:
        return operation(*given)

    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    parts = {"forward": forward, "setup_context": keep, "backward": gradients}
    kind = type(operation.name(), (torch.autograd.Function,), {name: staticmethod(run) for name, run in parts.items()})
    return kind.apply
