"""The same model in PyTorch, as its users write it: float32, scaled_dot_product_attention, fused AdamW.

In float32 PyTorch's own choice of attention is a kernel that makes each product of three in TF32, also where one would
be allowed; a `formula` in its place has one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.tinyllm.tinyllm import Config

Tensor = torch.Tensor
Parameters = dict[str, torch.nn.Parameter]
CHOICES = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Among which PyTorch chooses."""


def loss_of(w: Parameters, tokens: Tensor, targets: Tensor, config: Config, attention: list[SDPBackend]) -> Tensor:
    """Mean cross-entropy."""
    d = config.width
    x = w["table"][tokens] + w["positions"]
    for i in range(config.layers):
        at = f"L{i}."
        y = functional.layer_norm(x, (d,), w[at + "ln1.gain"], w[at + "ln1.shift"])
        qkv = torch.addmm(w[at + "qkv.b"], y.flatten(0, 1), w[at + "qkv.w"]).view(*tokens.shape, -1)
        q, k, v = (part.unflatten(-1, (config.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        with sdpa_kernel(attention):
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + torch.addmm(w[at + "o.b"], y.flatten(0, 1), w[at + "o.w"]).view_as(x)
        y = functional.layer_norm(x, (d,), w[at + "ln2.gain"], w[at + "ln2.shift"])
        y = functional.gelu(torch.addmm(w[at + "up.b"], y.flatten(0, 1), w[at + "up.w"]))
        x = x + torch.addmm(w[at + "down.b"], y, w[at + "down.w"]).view_as(x)
    y = functional.layer_norm(x, (d,), w["lnf.gain"], w["lnf.shift"]).flatten(0, 1)
    return functional.cross_entropy(torch.addmm(w["head.b"], y, w["head.w"]), targets.flatten())


class Trainer:
    """Training steps in PyTorch, eager or compiled."""

    def __init__(
        self, parameters: dict[str, np.ndarray], config: Config, compiled: bool, tf32: bool, formula: bool = False
    ) -> None:
        self.w = {name: torch.nn.Parameter(torch.tensor(v, device="cuda")) for name, v in parameters.items()}
        self.config, self.tf32, self.attention = config, tf32, [SDPBackend.MATH] if formula else CHOICES
        self.optimizer = torch.optim.AdamW(
            self.w.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=True
        )
        self.loss: Callable[..., Tensor] = torch.compile(loss_of) if compiled else loss_of

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Forward, backward and AdamW."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.w, tokens, targets, self.config, self.attention).backward()
        self.optimizer.step()

    def captured(self, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
        """A whole step on these tokens as one CUDA graph. Parameters and moments are then what they were before."""
        with torch.no_grad():
            before = [p.clone() for p in self.w.values()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, and lets cuBLAS and the optimizer allocate what they keep
                self.step(tokens, targets)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(tokens, targets)
        with torch.no_grad():
            for parameter, value in zip(self.w.values(), before, strict=True):
                parameter.copy_(value)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        return graph.replay

    def gradients(self) -> dict[str, np.ndarray]:
        """Of the last step."""
        return {name: p.grad.cpu().numpy() for name, p in self.w.items() if p.grad is not None}
