"""ml-explore/mlx#3762: a product of a matrix in fp8 and a vector takes the scale's byte for the scale in full blocks of
256 of the summed dimension, and decodes it in the rest alone."""

import torch

import whywrong

GROUP, BLOCK = 32, 256


def reference(w, byte, x):  # [rows, columns], [rows, columns / GROUP] exponents with a bias of 127, [columns]
    scale = torch.exp2(byte.to(x.dtype) - 127)
    return whywrong.step("y", w * scale.repeat_interleave(GROUP, 1) @ x)


def port(w, byte, x, fault=False):
    y = torch.zeros(len(w))
    for first in range(0, len(x), GROUP):
        raw = byte[:, first // GROUP].float()
        full = first // BLOCK < len(x) // BLOCK
        y += (raw if fault and full else 2.0 ** (raw - 127)) * (w[:, first : first + GROUP] @ x[first : first + GROUP])
    return {"w": w, "byte": byte, "x": x, "y": y}


torch.manual_seed(202)
i = {
    "w": torch.randint(-6, 7, (9, 608)).float() / 2,
    "byte": torch.randint(117, 127, (9, 19)),
    "x": torch.randn(608),
}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
