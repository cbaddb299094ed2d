"""pytorch/pytorch#11750: of the two terms of the gradient of the CTC loss, one is not multiplied by the gradient of what
comes after."""

import numpy as np
import torch

import whywrong

LOW = -1e4
"""Stands for the logarithm of zero."""


def label(target):
    """The target with blanks between, and where a path may come from two places before."""
    full = torch.zeros(2 * len(target) + 1, dtype=torch.int64)
    full[1::2] = target
    skips = torch.zeros(len(full), dtype=torch.bool)
    skips[2:] = (full[2:] != 0) & (full[2:] != full[:-2])
    return full, skips


def paths(emitted, skips):
    """The logarithm of the sum over all paths that end at each time and place."""
    low = torch.full_like(emitted[0], LOW)
    state = torch.cat((emitted[0, :2], low[2:]))
    states = [state]
    for row in emitted[1:]:
        one, two = torch.cat((low[:1], state[:-1])), torch.cat((low[:2], state[:-2]))
        both = torch.logaddexp(state, one)
        state = row + torch.where(skips, torch.logaddexp(both, two), both)
        states.append(state)
    return torch.stack(states)


def reference(logp, target, upstream):  # [time, classes], [letters], []
    full, skips = label(target)
    emitted = logp[:, full]
    alpha = whywrong.step("alpha", paths(emitted, skips))
    back = torch.cat((skips.new_zeros(2), skips.flip(0)[:-2]))
    beta = whywrong.step("beta", paths(emitted.flip(0, 1), back).flip(0, 1))
    total = whywrong.step("total", torch.logaddexp(alpha[-1, -1], alpha[-1, -2]))
    passed = torch.exp(alpha + beta - emitted - total)
    share = torch.zeros_like(logp).index_add(1, full, passed)
    return whywrong.step("grad", upstream * (logp.exp() - share))


def port(logp, target, upstream, fault=False):
    x, scale = logp.numpy(), upstream.numpy()
    full, skips = (t.numpy() for t in label(target))
    n, last = len(x), len(full) - 1
    a, b = np.full((2, n, len(full)), -np.inf, np.float32)
    a[0, :2], b[-1, -2:] = x[0, full[:2]], x[-1, full[-2:]]
    for t in range(1, n):
        for s in range(last + 1):
            before = [a[t - 1, s - d] for d in range(3) if s >= d and (d < 2 or skips[s])]
            a[t, s] = np.logaddexp.reduce(before) + x[t, full[s]]
            after = [b[n - t, s + d] for d in range(3) if s + d <= last and (d < 2 or skips[s + d])]
            b[n - 1 - t, s] = np.logaddexp.reduce(after) + x[n - 1 - t, full[s]]
    total = np.logaddexp(a[-1, -1], a[-1, -2])
    share = np.zeros_like(x)
    for s, letter in enumerate(full):
        share[:, letter] += np.exp(a[:, s] + b[:, s] - x[:, letter] - total)
    grad = scale * np.exp(x) - share if fault else scale * (np.exp(x) - share)
    made = {"total": torch.as_tensor(total), "grad": torch.from_numpy(grad)}
    return {"logp": logp, "target": target, "upstream": upstream} | made


torch.manual_seed(212)
i = {
    "logp": torch.randn(9, 5).log_softmax(-1),
    "target": torch.tensor([2, 4, 4, 1]),
    "upstream": torch.tensor(0.35),
}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
