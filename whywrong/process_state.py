"""What torch keeps for a whole process, changed by one thread at a time, and put back as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

ALONE = threading.RLock()
"""Held while whywrong changes such a setting, and while it runs a program that must not see it changed: the default
dtype, how tensors are filled, whether algorithms are deterministic, the random generator's state, a module's hooks and
buffers. Two threads of whywrong's take turns; a thread that does not use whywrong sees a setting while it is
changed."""


@contextmanager
def temporarily(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """Another value of a setting, which is afterwards as it was."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Another value of an attribute of an object, which is afterwards as it was."""
    return temporarily(partial(getattr, owner, name), partial(setattr, owner, name), value)


@contextmanager
def process_wide(*settings: AbstractContextManager[None]) -> Iterator[None]:
    """Change settings of the whole process, in a thread that holds :data:`ALONE` meanwhile."""
    with ALONE, ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting)
        yield


@contextmanager
def float64_by_default() -> Iterator[None]:
    """float64 where a program asks for no dtype, as for positions that it counts, or whole numbers that it divides.

    It is of the process: torch divides whole numbers below its modes, and to widen their float32 quotients is too late.
    """
    with process_wide(temporarily(torch.get_default_dtype, torch.set_default_dtype, torch.float64)):
        yield
