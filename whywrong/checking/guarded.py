"""Memory between guard zones and guard pages, which shows what a kernel does outside of its inputs and allocations."""

from __future__ import annotations

import ctypes
import math
import mmap
import signal
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whywrong.checking.repetition import poisoned
from whywrong.comparing.bits import same_bits
from whywrong.torch_private import TorchDispatchMode

GUARD_ELEMENTS = 1 << 12
"""Elements of the guard zones on both sides of what a kernel is given and of what it allocates."""

GUARD_BYTES = 1 << 20
"""Of the guard pages on both sides of a memory; touching them is a segmentation fault."""

LIBRARIES = ("whywrong", "triton", "torch", "numpy", "ctypes")
"""Whose lines are not a kernel's."""

ROUNDED_TO = (8, 16, 32, 64, 128)
"""Of what a length may be taken for a multiple."""

Span = tuple[int, int]
"""The first and the last element outside of a tensor that is read, counted in memory from the tensor's first one."""

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "full"}


def memory_of(x: Tensor) -> Tensor:
    """All of the memory that `x` is part of."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


class Memory:
    """The memory of inputs between guard zones, by where it was; `start` is how it is before each call.

    In `again` what lies outside of the inputs, in the guard zones and between elements, has other values: large ones
    for NaN. `pages`, for a CPU alone, are guard pages in place of the zones before each memory ("before"), which then
    begins where a page begins, or in place of those behind it ("behind").
    """

    def __init__(self, tensors: dict[Any, Tensor], out: Collection[Any], pages: str = "") -> None:
        self._tensors, self._out = tensors, out
        self._at = {name: x.untyped_storage().data_ptr() for name, x in self._tensors.items()}
        self._zone = 0 if pages == "before" else GUARD_ELEMENTS
        self._memory = {self._at[name]: _guarded(x) for name, x in self._tensors.items()}
        for place, x in self._memory.items() if pages else ():
            rest = x[GUARD_ELEMENTS:] if pages == "before" else x[:-GUARD_ELEMENTS]
            self._memory[place] = _between_pages(rest, pages == "behind")
        for name in out:
            with poisoned():
                views = self.views(self._memory)
                views[name].copy_(torch.empty_like(views[name]))
        self.start = {place: x.clone() for place, x in self._memory.items()}
        inside = {place: torch.zeros(len(x), dtype=torch.bool, device=x.device) for place, x in self.start.items()}
        for view in self.views(inside).values():
            view.fill_(True)
        self._outside = {place: (~x).nonzero()[:, 0] for place, x in inside.items()}
        self.again = {place: _filled(x, self._outside[place], _largest(x)) for place, x in self.start.items()}

    def views(self, of: Mapping[int, Tensor]) -> dict[Any, Tensor]:
        """The inputs in such memory."""
        return {
            n: of[self._at[n]].as_strided(x.shape, x.stride(), x.storage_offset() + self._zone)
            for n, x in self._tensors.items()
        }

    def others(self) -> dict[int, Tensor]:
        """Other values in the same place, which no result takes for the same, be it without mean and scale."""
        found = {place: x.clone() for place, x in self.start.items()}
        for place in {self._at[n] for n, x in self._tensors.items() if n not in self._out and x.is_floating_point()}:
            x = found[place]
            x.copy_(x.double().square() + 1 + torch.arange(len(x), device=x.device) % 3)
        return found

    def copies(self, start: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The memory that the kernel is given, as at the start."""
        for place, x in self._memory.items():
            x.copy_(start[place])
        return self._memory

    def whole(self, start: Mapping[int, Tensor]) -> bool:
        """Whether all of it, guard zones too, is as it was."""
        return all(same_bits(x, start[place]) for place, x in self._memory.items())

    def has(self, x: Tensor) -> bool:
        """Whether a result lies in it."""
        return x.untyped_storage().data_ptr() in {ours.untyped_storage().data_ptr() for ours in self._memory.values()}

    def reads(self, run: Callable[[Mapping[int, Tensor]], Any]) -> dict[Any, Span]:
        """What outside of each input changes what `run` gives of such memory; nothing if runs differ by themselves.

        NaN shows in a sum of large numbers, and a large number in a maximum that leaves NaN out.
        """
        found = dict[Any, Span]()
        for usual, other in ((self.again, self.start), (self.start, self.again)):
            for name, (first, last) in self._shown(run, usual, other):
                known = found.get(name, (first, last))
                found[name] = min(known[0], first), max(known[1], last)
        return found

    def _shown(
        self, run: Callable[[Mapping[int, Tensor]], Any], usual: dict[int, Tensor], other: dict[int, Tensor]
    ) -> Iterator[tuple[Any, Span]]:
        """What changes the usual results, with the other memory's numbers there."""
        before = run(usual)

        def changes(place: int, at: Tensor) -> bool:
            return bool(run(usual | {place: _filled(usual[place], at, other[place][at])}) != before)

        for name, x in self._tensors.items() if run(usual) == before else ():
            if name not in self._out and changes(place := self._at[name], at := self._outside[place]):
                first, last = _span(partial(changes, place), at)
                read = at[(first <= at) & (at <= last)]
                tries = (0, 0, 1, 1, 0, 1)  # of a kernel that gives other numbers by itself, hardly all agree
                if all(changes(place, read[: n * len(read)]) == bool(n) for n in tries):
                    start = self._zone + int(x.storage_offset())
                    yield name, (int(first) - start, int(last) - start)

    def touched(self, address: int) -> str:
        """Which input's guard pages have this address, and at which element, in words; nothing if none."""
        for name, x in self._tensors.items():
            memory, view = self._memory[self._at[name]], self.views(self._memory)[name]
            if -GUARD_BYTES <= address - memory.data_ptr() < memory.nbytes + GUARD_BYTES:
                element = (address - view.data_ptr()) // x.element_size()
                edge = "first is 0" if element < 0 else f"last is {extent(x) - 1}"
                return f"touches memory outside of {name!r}: element {element}, where its {edge}{_line()}"
        return ""


class Allocations(TorchDispatchMode):
    """Guard zones around what is allocated."""

    edges: tuple[Tensor, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether they are as they were."""
        return all(same_bits(edge, _edge(edge[:1])) for edge in self.edges)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _FACTORIES or not made.numel() or 0 in made.stride() or made.is_meta:
            return made
        memory = _guarded(made)
        self.edges += (memory[:GUARD_ELEMENTS], memory[-GUARD_ELEMENTS:])
        return memory.as_strided(made.shape, made.stride(), GUARD_ELEMENTS)


def _edge(x: Tensor) -> Tensor:
    return x.new_full((GUARD_ELEMENTS,), math.nan if x.is_floating_point() else int(x.long().min()))


def _guarded(x: Tensor) -> Tensor:
    """A copy of all of the memory that `x` is part of, between guard zones: NaN, or the smallest number in it."""
    memory = memory_of(x)
    return torch.cat([_edge(memory), memory, _edge(memory)])


def _span(changes: Callable[[Tensor], bool], at: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last of some places of which a change is seen; a change of all of them is."""
    first = bisect_left(range(len(at)), True, key=lambda k: changes(at[: k + 1]))
    behind = bisect_left(range(len(at)), True, key=lambda k: not changes(at[k:]))
    return at[first], at[behind - 1]


def _largest(x: Tensor) -> Tensor:
    """What takes the place of NaN, or of the smallest number: large, or the largest number among them."""
    value = torch.finfo(x.dtype).max / 4 if x.is_floating_point() else int(x.long().max())
    return torch.full((1,), value, dtype=x.dtype, device=x.device)


def _filled(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """A copy with values at some places, whatever the dtype."""
    x = x.clone()
    bytes_of_x, bytes_of_values = (of.view(torch.uint8).view(-1, of.element_size()) for of in (x, values))
    bytes_of_x[at] = bytes_of_values
    return x


def _between_pages(x: Tensor, behind: bool) -> Tensor:
    """A copy between guard pages: it begins where a page begins, or ends where one ends, `behind` which they lie."""
    whole = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, whole + 2 * GUARD_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = GUARD_BYTES + (whole - x.nbytes) * behind
    made = torch.frombuffer(region, dtype=torch.uint8, count=x.nbytes, offset=start).view(x.dtype)
    for edge in (made.data_ptr() - start, made.data_ptr() - start + GUARD_BYTES + whole):
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(GUARD_BYTES), 0)
    return made.copy_(x)


def extent(x: Tensor) -> int:
    """From a tensor's first element to behind its last one in memory."""
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def span_in_words(name: Any, x: Tensor, span: Span) -> str:
    """What is read outside of a tensor."""
    (first, last), end = span, extent(x)
    if first >= end:
        return f"reads {last + 1 - end} elements past the end of {name!r}"
    return f"reads {-first} elements before {name!r}" if last < 0 else f"reads {first} to {last} in memory of {name!r}"


def rounded(x: Tensor, span: Span) -> set[tuple[int, int]]:
    """Which axis' length may have been rounded up to a multiple of which number, if so much is read past the end."""
    more = {axis: divmod(span[1] + 1 - extent(x), stride) for axis, stride in enumerate(x.stride()) if stride}
    longer = {axis: x.shape[axis] + count for axis, (count, rest) in more.items() if not rest}
    return {(axis, k) for axis, n in longer.items() for k in ROUNDED_TO if -(-x.shape[axis] // k) * k == n}


class _Action(ctypes.Structure):
    """Linux's sigaction, as its C library has it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_void_p),
    )


SA_SIGINFO, SA_RESETHAND, ADDRESS = 4, -0x80000000, 16
"""Of sigaction(2): the handler is given more, and is for one signal only; where siginfo_t has a fault's address."""


@contextmanager
def faults(seen: Callable[[int], Any]) -> Iterator[None]:
    """Call `seen` with the address of the first segmentation fault; if it returns, the process dies as it would."""

    def handle(number: int, info: int, context: int) -> None:
        seen(ctypes.c_uint64.from_address(info + ADDRESS).value)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(handle)
    action = _Action(
        ctypes.cast(handler, ctypes.c_void_p), b"", ctypes.c_int(SA_SIGINFO | SA_RESETHAND - (1 << 32)), None
    )
    before = _Action()
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        ctypes.CDLL(None).sigaction(signal.SIGSEGV, ctypes.byref(before), None)


def _line() -> str:
    """The line that is run, outside of libraries, in words."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame = frame.f_back
    return f", in line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
