"""Rotary positions and SwiGLU, with their gradients, against float64."""

import pytest
import torch

import labkit
from kernels.lm import elementwise
from kernels.lm.model import rotated
from labkit.session.device import decide

DTYPES = [torch.float32, torch.bfloat16][: 1 + decide().is_cuda]  # Triton's interpreter does not round to bfloat16


def held(result, inputs, reference, storage):
    """Result and gradients of a loss against float64, by the workbook's own bounds."""
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.device)
    leaves = [x for x in inputs.values() if x.requires_grad]
    gradients = torch.autograd.grad((result * weights.to(result.dtype)).sum(), leaves)
    rounded = weights.to(result.dtype)
    recorded = labkit.golden(
        lambda **x: labkit.step("result", reference(**x)), **inputs, loss=lambda y: (y * rounded.to(y.dtype)).sum()
    )
    names = [f"grad:{name}" for name, x in inputs.items() if x.requires_grad]
    steps = {**inputs, "result": result, **dict(zip(names, gradients, strict=True))}
    return labkit.localise(labkit.Trace(steps), recorded, labkit.Precision(storage=storage, eager=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "length", "heads", "d"), [(1, 1, 1, 2), (2, 7, 3, 10), (3, 5, 4, 64)])
def test_rotated_parts_and_their_gradients_are_within_their_bounds(batch, length, heads, d, dtype, device):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, length, 3 * heads * d, generator=generator).to(device, dtype).requires_grad_()
    angles = torch.rand(length, d // 2, generator=generator).to(device) * 6.0
    inputs = {"qkv": qkv, "cos": angles.cos(), "sin": angles.sin()}

    def reference(qkv, cos, sin):
        q, k, v = qkv.unflatten(-1, (3, heads, d)).unbind(2)
        return torch.stack([rotated(q, cos, sin), rotated(k, cos, sin), v])

    result = torch.stack(elementwise.rotated_parts(qkv, inputs["cos"], inputs["sin"], heads))
    assert held(result, inputs, reference, str(dtype).removeprefix("torch.")).first is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 37), (3, 1500)])
def test_swiglu_and_its_gradient_are_within_their_bounds(rows, columns, dtype, device):
    generator = torch.Generator().manual_seed(0)
    gate_up = (4.0 * torch.randn(rows, 2, 2 * columns, generator=generator)).to(device, dtype).requires_grad_()

    def reference(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    result = elementwise.swiglu(gate_up)
    assert held(result, {"gate_up": gate_up}, reference, str(dtype).removeprefix("torch.")).first is None
