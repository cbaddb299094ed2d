"""What torch keeps for a whole process, or a thread, changed by one thread at a time, and put back as it was."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

SMALL = 1 << 17
"""Elements below which an operation takes less time than waking a second thread, or than launching a kernel."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""What glibc's malloc.h calls the free bytes that it gives back, and those from which it asks the system each time."""

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


def uncompiled() -> AbstractContextManager[None]:
    """What torch.compile has compiled runs as it is written. Nothing is, where torch's compiler was never imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def float64_by_default() -> Iterator[None]:
    """float64 where a program asks for no dtype, as for positions that it counts, or whole numbers that it divides.

    It is of the process: torch divides whole numbers below its modes, and to widen their float32 quotients is too late.
    """
    with ALONE, temporarily(torch.get_default_dtype, torch.set_default_dtype, torch.float64):
        yield


def keep_freed_memory() -> None:
    """For the rest of a command, what is freed stays with the process, where glibc allocates.

    The system clears each page that it gives anew, up to 1 GiB: 60 passes over 32 MiB took 1.5 s, and 0.25 so.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(option, 1 << 30)


_DECIDED = ContextVar("_DECIDED", default=False)
"""Whether how many threads run was decided by a check that this one is a part of."""


@contextmanager
def few_threads(elements: int) -> Iterator[None]:
    """One thread for small tensors, where several would wait for each other longer than they work, and where another
    process takes a core: then each operation of several threads waits until that one is let go.

    torch keeps this number for each thread; only a thread that first uses torch meanwhile begins with it too.
    """
    most = torch.get_num_threads()
    several = most > 1 and elements >= SMALL and (_DECIDED.get() or _seconds(most) < _seconds(1))
    before = _DECIDED.set(elements >= SMALL)
    try:
        with temporarily(torch.get_num_threads, torch.set_num_threads, most if several else 1):
            yield
    finally:
        _DECIDED.reset(before)


def _seconds(threads: int) -> float:
    """How long some operations take now, on so many threads; some 50 ms on one."""
    x = torch.ones(1 << 17, dtype=torch.float64)
    with temporarily(torch.get_num_threads, torch.set_num_threads, threads):
        x.sqrt()  # starts the threads
        begun = time.perf_counter()
        for _ in range(256):
            x.sqrt()
        return time.perf_counter() - begun
