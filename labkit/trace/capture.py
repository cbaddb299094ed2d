"""The steps of a torch module by hooks: forward outputs, gradients of inputs and parameters; and whether looking
changed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit.errors import UsageError
from labkit.trace.steps import Trace

OUTPUT = "output"
"""The name of the root module's output; gradients are ``grad:`` and the name of an input or a parameter."""


def capture(module: torch.nn.Module, *inputs: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> Trace:
    """Run `module` on `inputs` and keep every submodule's output and, after one backward, every gradient.

    Steps are named as the module tree names them (``layers.0.attention``), a second call of the same module gets
    ``#2``, parts of a tuple or dict ``.0`` or ``.key``; gradients are ``grad:layers.0.weight`` and ``grad:input.0``.
    `loss` takes the module's output to a number; without it the backward starts from fixed random numbers of the
    output's shape, since ones hide what sums to nothing. Gradients are left out where nothing requires one.

    The module is then run again without hooks from the same random state and buffers, and
    ``trace.about["observer"]`` says what differs: "none" if outputs and gradients are bit-identical. The module's own
    gradients and buffers are as they were before. Raises UsageError where the module is none or gives no tensor.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"module: {type(module).__name__} is not right; wanted a torch.nn.Module")
    back, random = _state(module), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    trace = Trace()
    try:
        seen = _run(module, inputs, loss, trace)
        back()
        torch.random.set_rng_state(random)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        plain = _run(module, inputs, loss, None)
    finally:
        back()
    differ = [name for name in plain if name not in seen or not _identical(plain[name], seen[name])]
    trace.about["observer"] = "none" if not differ else f"differs when nothing is captured: {', '.join(differ)}"
    return trace


def _state(module: torch.nn.Module) -> Callable[[], None]:
    """Remember buffers, gradients and their absence; what it returns puts them back."""
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    gradients = {name: p.grad for name, p in module.named_parameters()}

    def back() -> None:
        for name, buffer in module.named_buffers():
            buffer.detach().copy_(buffers[name])
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]

    return back


def _run(
    module: torch.nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], torch.Tensor] | None, trace: Trace | None
) -> dict[str, torch.Tensor]:
    """One forward and backward. Returns outputs and gradients; fills `trace`, if one is given, through hooks."""
    for parameter in module.parameters():
        parameter.grad = None
    given = [_leaf(x) for x in inputs]
    handles = []
    if trace is not None:
        for name, part in module.named_modules():
            handles.append(part.register_forward_hook(_hook(name or OUTPUT, trace)))
    try:
        output = module(*given)
    finally:
        for handle in handles:
            handle.remove()
    found = {name: value.detach().clone() for name, value in _tensors(OUTPUT, output)}
    if not found:
        raise UsageError(f"module: its output {type(output).__name__} holds no tensor; wanted one at least")
    _backward(output, loss)
    named = [(f"input.{i}", x) for i, x in enumerate(given)] + list(module.named_parameters())
    for name, leaf in named:
        if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
            found[f"grad:{name}"] = leaf.grad.detach().clone()
            if trace is not None:
                trace.add(f"grad:{name}", found[f"grad:{name}"])
    return found


def _leaf(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    copy = x.detach().clone()
    return copy.requires_grad_(True) if copy.is_floating_point() else copy


def _backward(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
    if loss is not None:
        loss(output).backward()
        return
    parts = [x for _, x in _tensors(OUTPUT, output) if x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in parts]
    if parts:
        torch.autograd.backward(parts, seeds)


def _hook(name: str, trace: Trace) -> Callable[..., None]:
    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for part, value in _tensors(name, output):
            count = 1
            unique = part
            while unique in trace:
                count += 1
                unique = f"{part}#{count}"
            trace.add(unique, value.detach().clone())

    return keep


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}", part)
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _tensors(f"{name}.{i}", part)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.ndim else a.equal(b)
