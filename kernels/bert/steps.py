"""Names for the tensors inside a function: nothing outside a recording, a dictionary within one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Steps = dict[str, torch.Tensor]
_open: list[Steps] = []


def step(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, which a :func:`recording` that is open keeps under `name`."""
    if _open:
        _open[-1][name] = tensor
    return tensor


@contextmanager
def recording() -> Iterator[Steps]:
    """Collects the steps of what runs within it, in order."""
    found: Steps = {}
    _open.append(found)
    try:
        yield found
    finally:
        _open.pop()
