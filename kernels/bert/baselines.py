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
    import cudnn as library

    handle = library.create_handle()

    def given(graph: Any, x: Tensor, columns: int) -> Any:
        return graph.tensor(dim=[x.numel() // columns, columns, 1, 1], stride=[columns, 1, columns, columns],
                            data_type=x.dtype)  # fmt: skip

    def graph_of() -> Any:
        kind = library.data_type.FLOAT
        return library.pygraph(handle=handle, intermediate_data_type=kind, compute_data_type=kind)

    def built(graph: Any, results: dict[Any, torch.dtype]) -> tuple[Any, Tensor]:
        for one, dtype in results.items():
            one.set_output(True).set_data_type(dtype)
        graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
        return graph, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")

    @cache
    def forward(rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
        graph = graph_of()
        x = given(graph, torch.empty(rows, columns, dtype=dtype, device="meta"), columns)
        gain, shift = (given(graph, torch.empty(columns, dtype=dtype, device="meta"), columns) for _ in range(2))
        eps = graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=torch.float32, is_pass_by_value=True)
        phase = library.norm_forward_phase.TRAINING
        out, mean, inverse = graph.layernorm(
            norm_forward_phase=phase, input=x, scale=gain, bias=shift, epsilon=eps, name="layer norm"
        )
        made = built(graph, {out: dtype, mean: torch.float32, inverse: torch.float32})
        return (*made, x, gain, shift, eps, out, mean, inverse)

    @cache
    def backward(rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
        graph = graph_of()
        dout, x = (given(graph, torch.empty(rows, columns, dtype=dtype, device="meta"), columns) for _ in range(2))
        gain = given(graph, torch.empty(columns, dtype=dtype, device="meta"), columns)
        mean, inverse = (given(graph, torch.empty(rows, device="meta"), 1) for _ in range(2))
        dx, dgain, dshift = graph.layernorm_backward(
            grad=dout, input=x, scale=gain, mean=mean, inv_variance=inverse, name="layer norm backward"
        )
        made = built(graph, {dx: dtype, dgain: dtype, dshift: dtype})
        return (*made, dout, x, gain, mean, inverse, dx, dgain, dshift)

    def execute(graph: Any, workspace: Tensor, tensors: dict[Any, Tensor]) -> None:
        library.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
            graph, workspace, *places = forward(*x.shape, x.dtype)
            out, moments = torch.empty_like(x), [x.new_empty(len(x), 1, 1, 1, dtype=torch.float32) for _ in range(2)]
            values = (x, gain, shift, torch.full((1, 1, 1, 1), eps), out, *moments)
            execute(graph, workspace, dict(zip(places, values, strict=True)))
            ctx.save_for_backward(x, gain, *moments)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
            x, gain, *moments = ctx.saved_tensors
            graph, workspace, *places = backward(*x.shape, x.dtype)
            made = torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)
            execute(graph, workspace, dict(zip(places, (dout.contiguous(), x, gain, *moments, *made), strict=True)))
            return *made, None

    return lambda x, gain, shift, eps: Function.apply(x, gain, shift, eps)
