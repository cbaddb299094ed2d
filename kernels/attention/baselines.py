"""Others' kernels for the same products at float32's accuracy, to hold ours against.

CUTLASS makes each product of three in TF32 as ours does (3xTF32). The kernel that torch chooses for attention in
float32 is CUTLASS's too, compiled by torch (OpMultiplyAddFastF32 in its mem_eff_attention), and what xFormers 0.0.35
calls for float32 is torch's operator: neither is a further baseline of attention.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

Tensor = torch.Tensor
TILES = {"128 x 128": 0, "128 x 64": 1, "64 x 64": 2}
"""Of CUTLASS's generator, for three TF32 products; the numbers of cutlass_scores.cu."""


@cache
def _cutlass() -> ctypes.CDLL:
    """cutlass_scores.cu, compiled with the headers of the package nvidia-cutlass. Without it ModuleNotFoundError."""
    try:
        package = importlib.metadata.distribution("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError("nvidia-cutlass, which has CUTLASS's headers, is not installed") from None
    from torch.utils import cpp_extension

    path = cpp_extension.load(
        "cutlass_scores",
        [str(Path(__file__).with_name("cutlass_scores.cu"))],
        extra_include_paths=[str(package.locate_file("cutlass_library/source/include"))],
        extra_cuda_cflags=["-O3", "-w", "--expt-relaxed-constexpr"],
        is_python_module=False,
    )
    library = ctypes.CDLL(path)
    library.cutlass_scores.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3, *[ctypes.c_int] * 4, ctypes.c_void_p]
    return library


def tiles() -> Iterator[str]:
    """Tiles that :func:`cutlass_scores` takes: none, and a line that says so, without the package nvidia-cutlass."""
    try:
        _cutlass()
    except ModuleNotFoundError as missing:
        print(f"  left out: CUTLASS: {missing}")
    else:
        yield from TILES


def cutlass_scores(q: Tensor, k: Tensor, out: Tensor, tile: str) -> None:
    """Q K^T by CUTLASS in tiles of :data:`TILES`: float32 q [heads, N, d_k], k [heads, M, d_k], out [heads, N, M]."""
    (heads, n, d_k), m = q.shape, k.shape[1]
    at = [x.data_ptr() for x in (q, k, out)]
    stream = torch.cuda.current_stream().cuda_stream
    status = _cutlass().cutlass_scores(TILES[tile], *at, heads, n, m, d_k, stream)
    if status:
        raise RuntimeError(f"CUTLASS ended with status {status}")


@cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V by FlexAttention, compiled; each [heads, N or M, d_k]."""
    return _flex()(q[None], k[None], v[None])[0]
