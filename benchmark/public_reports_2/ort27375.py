"""microsoft/onnxruntime#27375 (issue 26708): AveragePool with padding counted: the windows' end in height is clamped by
pads[1] (left) where pads[2] (bottom) belongs, so that the bottom padding is not counted in the divisor."""
import numpy as np, torch, whywrong
K, STRIDE, PADS = 3, 2, (0, 0, 1, 1)                        # pads: top, left, bottom, right
def reference(x, gain, shift):                              # [images, channels, h, w], [channels], [channels]
    top, left, bottom, right = PADS
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    windows = padded.unfold(2, K, STRIDE).unfold(3, K, STRIDE)
    total = whywrong.step("total", windows.sum((-1, -2)))
    mean = whywrong.step("mean", total / (K * K))
    scaled = whywrong.step("scaled", mean * gain[:, None, None] + shift[:, None, None])
    return whywrong.step("pooled", torch.relu(scaled))
def port(x, gain, shift, fault=False):
    a = x.numpy()
    images, channels, h, w = a.shape
    oh, ow = (h + PADS[0] + PADS[2] - K) // STRIDE + 1, (w + PADS[1] + PADS[3] - K) // STRIDE + 1
    total, mean = (np.zeros((images, channels, oh, ow), np.float32) for _ in range(2))
    for r in range(oh):
        for c in range(ow):
            r0, c0 = r * STRIDE - PADS[0], c * STRIDE - PADS[1]
            r1, c1 = min(r0 + K, h + (PADS[1] if fault else PADS[2])), min(c0 + K, w + PADS[3])
            total[..., r, c] = a[:, :, max(r0, 0):min(r1, h), max(c0, 0):min(c1, w)].sum((2, 3))
            mean[..., r, c] = total[..., r, c] / ((r1 - r0) * (c1 - c0))
    scaled = mean * gain.numpy()[:, None, None] + shift.numpy()[:, None, None]
    made = {"total": total, "mean": mean, "scaled": scaled, "pooled": np.maximum(scaled, 0)}
    return dict(x=x, gain=gain, shift=shift) | {n: torch.from_numpy(v) for n, v in made.items()}
torch.manual_seed(114)
i = dict(x=torch.randn(2, 4, 10, 8), gain=1 + 0.2 * torch.randn(4), shift=0.1 * torch.randn(4))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
