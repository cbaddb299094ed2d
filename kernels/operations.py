"""Kernels as torch knows them: operations of the library `workbook`, with a shape-only form and a gradient each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = "workbook"


def differentiable(
    name: str, gradients: Callable[..., tuple[Any, ...]], keep: Callable[[Any, tuple[Any, ...], Any], None]
) -> Callable[..., Any]:
    """Gives the library's operation of that name its gradient; returns what to call.

    `keep(ctx, inputs, output)` saves what `gradients(ctx, *above)` needs. What is returned calls the operation as an
    autograd Function, since torch.func differentiates Functions and no custom operations.
    """
    torch.library.register_autograd(f"{LIBRARY}::{name}", gradients, setup_context=keep)
    operation = getattr(getattr(torch.ops, LIBRARY), name).default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(*given: Any) -> Any:
            return operation(*given)

        setup_context, backward = staticmethod(keep), staticmethod(gradients)

    return Differentiable.apply
