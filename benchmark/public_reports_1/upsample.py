"""ml-explore/mlx#3908: bilinear resizing by a factor that gives no whole length takes the grid of the corners in place of
that of the pixels' centres."""

import numpy as np
import torch

import whywrong

FACTOR = 1.5


def reference(x, w):  # [batch, in, height, width], [out, in]
    mixed = whywrong.step("mixed", torch.einsum("oc,bchw->bohw", w, x))
    resized = torch.nn.functional.interpolate(mixed, scale_factor=FACTOR, mode="bilinear", align_corners=False)
    return whywrong.step("resized", resized)


def resize(y, axis, fault):
    n = y.shape[axis]
    m = int(FACTOR * n)
    shift = (n - 1 - (m - 1) / FACTOR) / 2 if fault else (1 / FACTOR - 1) / 2
    place = np.clip(np.arange(m) / FACTOR + shift, 0, n - 1)
    low = place.astype(int)
    part = (place - low).astype(np.float32).reshape([-1 if d == axis else 1 for d in range(y.ndim)])
    return y.take(low, axis) * (1 - part) + y.take(np.minimum(low + 1, n - 1), axis) * part


def port(x, w, fault=False):
    mixed = np.tensordot(x.numpy().transpose(0, 2, 3, 1), w.numpy().T, 1)  # channels last
    resized = resize(resize(mixed, 1, fault), 2, fault)
    made = {"mixed": mixed, "resized": resized}
    return {"x": x, "w": w} | {n: torch.from_numpy(v.transpose(0, 3, 1, 2).copy()) for n, v in made.items()}


torch.manual_seed(216)
i = {"x": torch.randn(2, 5, 7, 11), "w": torch.randn(3, 5) / 2}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
