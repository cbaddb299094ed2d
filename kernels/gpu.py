"""What the shape of a launch depends on: the GPU where its tensors are."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from whywrong.errors import UsageError

INTERPRETED = 64
"""Multiprocessors that the interpreter is taken to have, so that what is split on a GPU is split there too."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_at_once(kernel: Any, device: torch.device) -> int:
    """Programs of a kernel that Triton compiled for `device` which it holds at once, if nothing else runs there."""
    return blocks_per_multiprocessor(kernel, device) * multiprocessors(device)


def blocks_per_multiprocessor(kernel: Any, device: torch.device) -> int:
    """By the driver, from the kernel's registers, shared memory and threads (cuOccupancyMaxActiveBlocksPer..)."""
    with torch.cuda.device(device):
        _ = kernel.run  # loads the kernel, and so gives it a function
        blocks = ctypes.c_int()
        status = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks),
            ctypes.c_void_p(kernel.function),
            ctypes.c_int(32 * kernel.metadata.num_warps),
            ctypes.c_size_t(kernel.metadata.shared),
        )
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: CUDA status {status}")
    return blocks.value


def refuse_unless_resident(what: str, programs: int, kernel: Any, device: torch.device) -> None:
    """Raise UsageError where `programs` programs, which wait for each other, would not all run at once."""
    held = programs_at_once(kernel, device)
    if programs > held:
        raise UsageError(
            f"{what}: its {programs} programs wait for each other, and this GPU holds {held} of them at once; "
            f"expected at most {held} programs, or a way that does not wait"
        )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
