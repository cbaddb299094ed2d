"""The steps of a torch module or function as it runs: outputs, operations, gradients; and whether looking changed
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from whywrong.comparing.bits import same_bits
from whywrong.comparing.precision import guess
from whywrong.errors import UsageError
from whywrong.process_state import process_wide
from whywrong.recording.golden import with_backward
from whywrong.recording.recorder import Watcher, unique
from whywrong.recording.steps import DIFFERS, NO_EFFECT, Trace
from whywrong.recording.watching import check_subject, leaves_of, path_of, run_watched, snapshot
from whywrong.torch_private import _reparametrize_module


def capture(
    subject: torch.nn.Module | Callable[..., Any],
    /,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    **named: Any,
) -> Trace:
    """Run a module, or a function of tensors, and keep its steps by the names that :func:`whywrong.golden` gives.

    These are the inputs and parameters as they were given, every operation that computes something
    (``layers.0.attention/bmm``), each :func:`whywrong.step`, every submodule's output, the result and the gradients, in
    the order of execution and in their own dtypes. `loss` takes the result to a number; without it a module's backward
    starts from fixed random numbers.

    It is then run again without being watched, from the same random state and buffers, and
    ``trace.about["precision"]`` says that each operation was stored, as it is in a program that runs so, and which
    results torch's CPU kernels added up in bfloat16 or float16 (:data:`~whywrong.recording.operations.IN_STORAGE`), and
    ``trace.about["observer"]`` what differs: "none" if results and gradients are bit-identical. Gradients and
    buffers of a module are afterwards as they were. Raises UsageError where nothing gives a tensor.
    """
    check_subject("capture", subject, loss)
    return observed_steps(subject, inputs, named, loss)


def observed_steps(
    subject: Any, inputs: Any, named: dict[str, Any], loss: Any = None, grafts: Mapping[str, Tensor] | None = None
) -> Trace:
    """What :func:`capture` gives. The subject goes on with `grafts` in place of the steps of their names, which are
    submodules' outputs, parameters, and each :func:`whywrong.step`."""
    grafts = grafts or {}
    narrow: dict[str, dict[str, str]] = {}

    def run(differentiate: bool, watch: bool) -> tuple[dict[str, Tensor], Any]:
        seen: dict[str, Tensor] = {}
        computed: list[tuple[Tensor, dict[str, str]]] = []
        last, given = Counter[str](), list[str]()

        def keep(name: str, tensor: Tensor) -> Tensor | None:
            name = unique(name, seen, last)
            tensor = grafts[name].to(tensor) if name in grafts else tensor
            seen[name] = snapshot(tensor)
            narrow.update((name, fields) for x, fields in computed if x.data_ptr() == tensor.data_ptr())
            return tensor if name in grafts else None

        def on_step(name: str, tensor: Tensor) -> Tensor | None:
            given.append(name)
            return keep(name, tensor)

        watcher = Watcher(keep, computed) if watch else None
        buffers: Any = nullcontext()
        if isinstance(subject, torch.nn.Module):  # which may write to its buffers: while it runs these are copies
            copies = {name: x.detach().clone() for name, x in subject.named_buffers()}
            owned = ((name, path_of(name), x) for name, x in subject.named_parameters())
            copies |= {name: grafts[path].to(x) for name, path, x in owned if path in grafts}
            buffers = _reparametrize_module(subject, copies, tie_weights=True)
        with torch.random.fork_rng(), buffers:
            leaves = leaves_of(subject, inputs, named, differentiate)
            if watch:
                seen |= {name: snapshot(leaf) for name, leaf in leaves.items()}
            result = run_watched(subject, inputs, named, leaves, loss, watcher, on_step)
        if watch and not given:  # operations alone
            raise UsageError("capture: expected a result with a tensor, got none")
        return seen, result

    with process_wide():  # the generator, and the module's hooks and buffers, are the same for all threads
        seen = with_backward(lambda differentiate: run(differentiate, True), subject, loss)
        plain = {} if grafts else with_backward(lambda differentiate: run(differentiate, False), subject, loss)
    differ = [name for name, value in plain.items() if name not in seen or not same_bits(value, seen[name])]
    about = {"observer": NO_EFFECT if not differ else f"{DIFFERS}{', '.join(differ)}"}
    declared: dict[str, Any] = {"accumulate": guess([x.dtype for x in seen.values()]).accumulate, "eager": True}
    declared |= {"steps": narrow} if narrow else {}
    return Trace(seen, about | {"precision": declared})
