"""Edits of a program on a GPU, where a place outside of a tensor would end CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from whywrong.recording.operations import name_of
from whywrong.torch_private import TorchDispatchMode, tree_map_only

Tensor = torch.Tensor

ON_CPU = ("masked_scatter", "repeat_interleave", "embedding_dense_backward")
"""How the names of operations begin of which it is not seen here whether all places are inside of their tensor."""
LOOKUPS = ("index", "gather", "scatter", "embedding", "take", "put", "nll_loss", "max_unpool", "multinomial", *ON_CPU)
"""How the names of operations begin that take places in a tensor as whole numbers, or counts."""
MOVING = ("_to_copy", "copy_")
"""What moves from a device to another."""


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Tensors are made on a device, others are brought there, and nothing ends it."""
    if device.type == "cpu":
        yield
        return
    with device, Brought(device):
        yield


class Brought(TorchDispatchMode):
    """Runs operations on a device. What they take from elsewhere is brought there, and so is what they give.

    What looks up places runs there if all are inside of its tensor, else on the CPU, where a place outside raises.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name in MOVING:
            return func(*args, **kwargs)
        safe = not name.startswith(LOOKUPS) or (not name.startswith(ON_CPU) and _inside(*args))
        device = self._device if safe else torch.device("cpu")
        here = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
        found = func(*here[0], **here[1])
        if func._schema.is_mutable:
            return found if here[0][0] is args[0] else args[0].copy_(here[0][0])
        return tree_map_only(Tensor, lambda x: x.to(self._device), found)


def _inside(x: Any, by: Any = None, *others: Any) -> bool:
    """Whether whole numbers, in one dimension or a tensor of them for each of the first, are places of a tensor."""
    if not isinstance(x, Tensor) or not x.ndim:
        return False
    some = [*zip(by, x.shape, strict=False)] if isinstance(by, (list, tuple)) else [(by, min(x.shape))]
    some = [(others[0], x.shape[by])] if isinstance(by, int) and others else some
    return all(
        places is None or (isinstance(places, Tensor) and places.dtype == torch.int64 and _below(places, n))
        for places, n in some
    )


def _below(places: Tensor, n: int) -> bool:
    return not places.numel() or bool((places.min() >= 0) & (places.max() < n))
