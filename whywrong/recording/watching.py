"""A module or a function as it runs, watched: its steps by their names, its gradients, and what it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong.comparing.comparison import as_tensor, real
from whywrong.errors import UsageError
from whywrong.process_state import uncompiled
from whywrong.recording.recorder import BACKWARD, OnStep, Watcher, instead_of, listening
from whywrong.recording.steps import OUTPUT
from whywrong.torch_private import _disable_current_modes

GRADIENT = "grad:"
"""What stands before the name of the input or the parameter that a gradient is of."""

COMPILED = "_orig_mod"
"""What torch.compile calls the module that it puts a wrapper around."""

Named = dict[str, Any]
Leaves = dict[str, Tensor]
Loss = Callable[[Any], Tensor] | None


def snapshot(tensor: Tensor) -> Tensor:
    """A copy that no recording sees."""
    with _disable_current_modes():
        return tensor.detach().clone()


def check_subject(what: str, subject: Any, loss: Any) -> None:
    """Raise UsageError, which calls the caller `what`, unless there is something to run, and a loss is a function."""
    if not callable(subject):
        kind = type(subject).__name__
        raise UsageError(f"{what}: expected a torch.nn.Module or a function, then its inputs, got a {kind}")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss: expected a function of the result that gives one number, got {loss!r:.60}")


def leaves_of(subject: Any, inputs: Any, named: Named, differentiate: bool, dtype: torch.dtype | None = None) -> Leaves:
    """Inputs, as copies that want gradients if they are to be differentiated, and parameters, by their names.

    With `dtype`, floating-point inputs are of that dtype. Raises UsageError where two have one name.
    """
    leaves: Leaves = {}

    def leaf(name: str, value: Any) -> Any:
        if name in leaves:
            raise UsageError(f"{name}: expected one input of the name, got two; give one another keyword or key")
        if "complex" in str(value.dtype):
            why = "give the two parts, and torch.complex of them inside"
            raise UsageError(f"{name}: expected real or whole numbers, got complex ones; {why}")
        x = value if isinstance(value, Tensor) else as_tensor(name, value)
        floating = x.is_floating_point()
        copied = x.detach().clone() if dtype is None or not floating else x.detach().to(dtype, copy=True)
        leaves[name] = copied.requires_grad_(floating and differentiate)
        return value

    # whywrong.fuzz takes those that are tensors themselves for the first
    arguments = sorted(_arguments(inputs, named).items(), key=lambda item: not isinstance(item[1], Tensor))
    _replaced("", dict(arguments), leaf)
    for name, x in arguments:
        numbers = isinstance(x, (list, tuple)) and any(isinstance(item, (int, float, list, tuple)) for item in x)
        if numbers and not any(leaf_name.startswith(f"{name}.") for leaf_name in leaves):
            raise UsageError(f"{name}: expected a tensor or an array, got a {type(x).__name__} of numbers")
    if isinstance(subject, torch.nn.Module):
        for name, parameter in tensors_held(subject).items():
            if name in leaves:
                raise UsageError(f"{name}: expected another keyword for the input, got the name of a parameter")
            if parameter.is_floating_point():
                leaves[name] = parameter
    return leaves


def run_watched(
    subject: Any, inputs: Any, named: Named, leaves: Leaves, loss: Loss, watcher: Watcher | None, on_step: OnStep
) -> Any:
    """One forward and, where there is what to differentiate, one backward, below `watcher`; `on_step` gets each step.

    Returns the result of the forward. The caller holds :data:`~whywrong.process_state.ALONE`.
    """
    module = isinstance(subject, torch.nn.Module)
    handles = _hooks(subject, watcher, on_step) if module and watcher is not None else []
    with ExitStack() as stack:
        for context in (watcher, listening(on_step, watcher), uncompiled(), *handles) if watcher is not None else ():
            stack.enter_context(context)
        arguments = _replaced("", _arguments(inputs, named), lambda name, _: _writable(leaves[name]))
        output = subject(*list(arguments.values())[: len(inputs)], **{name: arguments[name] for name in named})
        if not handles:  # else its hook has reported them
            for name, value in tensors_of(OUTPUT if module or not isinstance(output, dict) else "", output):
                on_step(name, value)
        if watcher is not None:
            watcher.path = BACKWARD
        for name, gradient in gradients(output, loss, leaves):
            on_step(name, gradient)
    return output


def _writable(x: Tensor) -> Tensor:
    """A tensor that may be written to in place, which autograd does not allow what it differentiates by."""
    return x.clone() if x.requires_grad else x


def _arguments(inputs: Any, named: Named) -> Named:
    return {f"input.{i}": x for i, x in enumerate(inputs)} | named


def _replaced(name: str, value: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """`value` with `leaf(name, x)` in place of each tensor and array of numbers inside, by the names of tensors_of."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "fiubc"):
        return leaf(name, value)
    parts = {k: _replaced(f"{name}.{k}" if name else str(k), part, leaf) for k, part in parts_of(value).items()}
    if all(part is parts[key] for key, part in parts_of(value).items()):
        return value
    if isinstance(value, (tuple, list)):
        return getattr(value, "_make", type(value))(parts.values())
    copied = copy.copy(value)
    for key, part in parts.items():
        copied.__setitem__(key, part) if isinstance(value, dict) else object.__setattr__(copied, key, part)
    return copied


def parts_of(value: Any) -> dict[Any, Any]:
    """What a dict, a tuple, a list or a dataclass holds, by key, number or field; nothing of anything else."""
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, (dict, type)):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return value if isinstance(value, dict) else {}


def tensors_held(module: torch.nn.Module) -> dict[str, Tensor]:
    """A module's parameters, then its buffers, by their paths."""
    return {path_of(name): x for name, x in (*module.named_parameters(), *module.named_buffers())}


def path_of(name: str) -> str:
    """The path of a part or parameter below a module, without the wrappers that torch.compile puts around modules."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _hooks(module: torch.nn.Module, watcher: Watcher, on_step: OnStep) -> list[Any]:
    names, paths = {part: path_of(name) for name, part in module.named_modules() if COMPILED not in part._modules}, [""]

    def enter(part: torch.nn.Module, _inputs: Any) -> None:
        paths.append(names[part])
        watcher.path = paths[-1]

    def report(name: str, value: Any) -> Any:
        return instead_of(value, on_step(name, real(value))) if isinstance(value, Tensor) else value

    def leave(part: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        output = _replaced(names[part] or OUTPUT, output, report)
        paths.pop()
        watcher.path = paths[-1]
        return output

    handles: list[Any] = [part.register_forward_pre_hook(enter) for part in names]
    return handles + [part.register_forward_hook(leave) for part in names]


def gradients(output: Any, loss: Loss, leaves: Leaves) -> Iterator[tuple[str, Tensor]]:
    """The gradient of each leaf by its name, ``grad:`` in front.

    Of `loss(output)`; without a loss of the output, from fixed random numbers of its parts' shapes, since ones hide
    what sums to nothing. Nothing where nothing wants a gradient.
    """
    parts = [loss(output)] if loss is not None else [x for _, x in tensors_of(OUTPUT, output)]
    differentiated = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    parts = [x for x in parts if x.requires_grad]
    if not parts or not differentiated:
        return
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.ones_like(x) if x.numel() == 1 else _sample(x, generator) for x in parts]
    results = torch.autograd.grad(parts, list(differentiated.values()), seeds, allow_unused=True)
    for name, gradient in zip(differentiated, results, strict=True):
        if gradient is not None:
            yield f"{GRADIENT}{name}", gradient


def _sample(x: Tensor, generator: torch.Generator) -> Tensor:
    with _disable_current_modes():  # given to the backward, not computed by it
        sampled = torch.randn(x.shape, generator=generator, dtype=torch.float32)
        return sampled.to(torch.bfloat16).to(x.detach())  # the same numbers in any type


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a result, nested as it may be, by name; without one by their keys or numbers alone."""
    if isinstance(value, Tensor):
        yield name, real(value)
    for key, part in parts_of(value).items():
        yield from tensors_of(f"{name}.{key}" if name else str(key), part)
