"""Make the example files anew: `python data/examples/make.py [FOLDER]`. The same numbers each time, up to rounding."""

import math
import sys
from pathlib import Path

import numpy as np
import torch

import whywrong

SEQUENCE, HEADS, HEAD_WIDTH = 21, 3, 8
WIDTH = HEADS * HEAD_WIDTH
TILE = 8
"""Keys that the tiled kernel takes at a time."""


def inputs():
    """A sequence [SEQUENCE, WIDTH] and the weights of both projections, float32 numbers that bfloat16 has too."""
    rng = np.random.default_rng(20250525)
    shapes = {"x": (SEQUENCE, WIDTH), "w_in": (WIDTH, 3 * WIDTH), "w_out": (WIDTH, WIDTH)}
    sizes = {"x": 1.0, "w_in": WIDTH**-0.5, "w_out": WIDTH**-0.5}
    drawn = {name: torch.from_numpy(sizes[name] * rng.standard_normal(shape)) for name, shape in shapes.items()}
    return {name: value.bfloat16().float() for name, value in drawn.items()}


def attention(x, w_in, w_out, *, keep=lambda step: step, merge=None, weigh=torch.matmul):
    """Causal attention, a step after the other; `keep` is what storing a step does to it.

    `merge` joins heads [HEADS, SEQUENCE, HEAD_WIDTH] to rows [SEQUENCE, WIDTH], `weigh` takes the mean of the values.
    """
    merge = merge or (lambda heads: heads.transpose(0, 1).reshape(SEQUENCE, WIDTH))
    q, k, v = keep(x @ w_in).view(SEQUENCE, 3, HEADS, HEAD_WIDTH).permute(1, 2, 0, 3)
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    steps = {"scores": keep((q @ k.mT / math.sqrt(HEAD_WIDTH)).masked_fill(future, -math.inf))}
    steps["probabilities"] = keep(steps["scores"].softmax(-1))
    steps["context"] = keep(weigh(steps["probabilities"], v))
    steps["merged"] = keep(merge(steps["context"]))
    steps["output"] = keep(steps["merged"] @ w_out)
    return {"q": q, "k": k, "v": v, **steps}


def unmoved(heads):
    """The fault of attention_wrong: memory read as if the heads' rows were already side by side."""
    return heads.reshape(SEQUENCE, WIDTH)


def tiled(order, lost=()):
    """The mean of the values, tiles of keys added up in `order`; what `lost` names, a head and a tile, is not added."""

    def weigh(probabilities, values):
        total = torch.zeros_like(values)
        for tile in order:
            keys = slice(TILE * tile, TILE * (tile + 1))
            part = probabilities[..., keys] @ values[:, keys]
            for head in (head for head, of in lost if of == tile):
                part[head, TILE:] = 0.0
            total += part
        return total

    return weigh


def make(folder):
    """Write the five files into `folder`."""
    given = inputs()
    whywrong.golden(attention, **given).save(folder / "attention_golden.safetensors")

    def save(name, steps, about=None):
        whywrong.Trace({**given, **steps}, about).save(folder / f"{name}.safetensors")

    def in_bfloat16(step):
        return step.bfloat16().float()

    right = {name: step.bfloat16() for name, step in attention(**given, keep=in_bfloat16).items()}
    save("attention_right", right, {"precision": {"storage": "bfloat16"}})
    save("attention_wrong", attention(**given, merge=unmoved))
    save("race_1", attention(**given, weigh=tiled((0, 1, 2))))
    save("race_2", attention(**given, weigh=tiled((2, 0, 1), lost=[(1, 0)])))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
