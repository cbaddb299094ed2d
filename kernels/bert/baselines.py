"""Layer norms of others behind PyTorch's embedding, to hold the fused embedding against.

The lookup, the sum of its rows and the dropout are compiled by torch; the layer norm between is one call of the
library, with its own backward. TransformerEngine's needs its compiled part, whose import raises where it was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Tensor = torch.Tensor
LayerNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(x [rows, D], gain [D], shift [D], eps) -> [rows, D], differentiable in the three tensors."""


def liger() -> LayerNorm:
    """liger-kernel's, in Triton."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, gain, shift, eps: LigerLayerNormFunction.apply(x, gain, shift, eps)


def cudnn() -> LayerNorm:
    """cuDNN's, by the package nvidia-cudnn-frontend. Moments are kept in float32, as its backward wants them."""
    _handle()  # raises where there is none
    return lambda x, gain, shift, eps: _CudnnLayerNorm.apply(x, gain, shift, eps)


class _CudnnLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        out, moments = torch.empty_like(x), [x.new_empty(len(x), 1, 1, 1, dtype=torch.float32) for _ in range(2)]
        _execute(_forward(*x.shape, x.dtype), x, gain, shift, torch.full((1, 1, 1, 1), eps), out, *moments)
        ctx.save_for_backward(x, gain, *moments)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, *moments = ctx.saved_tensors
        made = torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)
        _execute(_backward(*x.shape, x.dtype), dout.contiguous(), x, gain, *moments, *made)
        return *made, None


@cache
def _handle() -> Any:
    import cudnn as library

    return library.create_handle()


def _graph() -> Any:
    import cudnn as library

    kind = library.data_type.FLOAT
    return library.pygraph(handle=_handle(), intermediate_data_type=kind, compute_data_type=kind)


def _place(graph: Any, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """A graph's argument [rows, columns], in the four dimensions that it wants."""
    return graph.tensor(dim=[rows, columns, 1, 1], stride=[columns, 1, columns, columns], data_type=dtype)


@cache
def _forward(rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The graph, its workspace, and the places of x, gain, shift, eps, out, mean and inverse."""
    import cudnn as library

    graph = _graph()
    x, gain, shift = (_place(graph, count, columns, dtype) for count in (rows, 1, 1))
    eps = graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=torch.float32, is_pass_by_value=True)
    out, mean, inverse = graph.layernorm(
        norm_forward_phase=library.norm_forward_phase.TRAINING, input=x, scale=gain, bias=shift, epsilon=eps,
        name="layer norm",
    )  # fmt: skip
    workspace = _built(graph, {out: dtype, mean: torch.float32, inverse: torch.float32})
    return graph, workspace, x, gain, shift, eps, out, mean, inverse


@cache
def _backward(rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The graph, its workspace, and the places of dout, x, gain, mean, inverse, dx, dgain and dshift."""
    graph = _graph()
    dout, x, gain = (_place(graph, count, columns, dtype) for count in (rows, rows, 1))
    mean, inverse = (_place(graph, rows, 1, torch.float32) for _ in range(2))
    dx, dgain, dshift = graph.layernorm_backward(
        grad=dout, input=x, scale=gain, mean=mean, inv_variance=inverse, name="layer norm backward"
    )
    workspace = _built(graph, dict.fromkeys((dx, dgain, dshift), dtype))
    return graph, workspace, dout, x, gain, mean, inverse, dx, dgain, dshift


def _built(graph: Any, results: dict[Any, torch.dtype]) -> Tensor:
    import cudnn as library

    for one, dtype in results.items():
        one.set_output(True).set_data_type(dtype)
    graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
    return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")


def _execute(built: tuple[Any, ...], *tensors: Tensor) -> None:
    import cudnn as library

    graph, workspace, *places = built
    library.set_stream(handle=_handle(), stream=torch.cuda.current_stream().cuda_stream)
    graph.execute(dict(zip(places, tensors, strict=True)), workspace, handle=_handle())
