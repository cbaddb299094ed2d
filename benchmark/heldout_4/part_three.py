"""A Swin block, synchronised batch norm, AdamW with mixed precision, an LSTM over packed sequences."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randn, step


def erf_by_table(x: np.ndarray) -> np.ndarray:
    """The error function by a table with a step of 1/64 and a Taylor series to the sixth derivative."""
    nodes = np.arange(0, 6 * 64 + 1) / 64
    table = np.array([math.erf(v) for v in nodes]).astype(x.dtype)
    slope = (2 / math.sqrt(math.pi) * np.exp(-nodes * nodes)).astype(x.dtype)
    a = np.minimum(np.abs(x), np.asarray(6.0, x.dtype))
    k = np.rint(a * 64).astype(np.int64)
    z = (k / 64).astype(x.dtype)
    d = a - z
    h2 = 4 * z * z - 2
    h3 = z * (8 * z * z - 12)
    h4 = (16 * z * z - 48) * z * z + 12
    h5 = ((32 * z * z - 160) * z * z + 120) * z
    series = 1 + d * (-z + d * (h2 / 6 + d * (-h3 / 24 + d * (h4 / 120 - d * h5 / 720))))
    return np.sign(x) * (table[k] + slope[k] * d * series)


@program("u01", variants=("f32", "bf16", "bf16reg"), wide=("lse",))
class swin_block:
    """A shifted window block on a map of 24 x 18 that is padded to 28 x 21; padded keys are masked, some rows wholly.

    The port gathers windows by index, has an online softmax over key tiles of 16 and GELU by a table.
    """

    def make(g):
        C = 48
        return dict(
            x=randn(g, 2, 24, 18, C, shift=1.5),
            gamma1=randn(g, C, scale=0.2, shift=1.0),
            beta1=randn(g, C, scale=0.2),
            w_qkv=randn(g, 3 * C, C, scale=0.13),
            b_qkv=randn(g, 3 * C, scale=0.2),
            table=randn(g, 169, 3, scale=0.8),
            w_proj=randn(g, C, C, scale=0.2),
            b_proj=randn(g, C, scale=0.1),
            gamma2=randn(g, C, scale=0.2, shift=1.0),
            beta2=randn(g, C, scale=0.2),
            w1=randn(g, 128, C, scale=0.2),
            b1=randn(g, 128, scale=0.2),
            w2=randn(g, C, 128, scale=0.1),
            b2=randn(g, C, scale=0.1),
        )

    def reference(x, gamma1, beta1, w_qkv, b_qkv, table, w_proj, b_proj, gamma2, beta2, w1, b1, w2, b2):
        def partition(y):
            return y.view(-1, 4, 7, 3, 7, y.shape[-1]).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, y.shape[-1])

        normed = step("normed", F.layer_norm(x, (48,), gamma1, beta1, 1e-5))
        rolled = torch.roll(F.pad(normed, (0, 0, 0, 3, 0, 4)), (-3, -3), (1, 2))
        windows = step("windows", partition(rolled))
        qkv = step("qkv", windows @ w_qkv.T + b_qkv).view(24, 49, 3, 3, 16).permute(2, 0, 3, 1, 4)
        at = torch.stack(torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + 6
        rel_bias = step("rel_bias", table[apart[0] * 13 + apart[1]].permute(2, 0, 1))
        scores = step("scores", qkv[0] @ qkv[1].transpose(-1, -2) / 4 + rel_bias)

        region = torch.zeros(1, 28, 21, 1)
        for n, rows in enumerate((slice(0, -7), slice(-7, -3), slice(-3, None))):
            for m, columns in enumerate((slice(0, -7), slice(-7, -3), slice(-3, None))):
                region[:, rows, columns] = 3 * n + m
        real = torch.roll(F.pad(torch.ones(1, 24, 18, 1), (0, 0, 0, 3, 0, 4)), (-3, -3), (1, 2))
        region, real = partition(region)[..., 0], partition(real)[..., 0]
        keep = (region[:, :, None] == region[:, None, :]) & (real[:, None, :] > 0)
        keep = keep.repeat(2, 1, 1)[:, None]
        some = keep.any(-1)
        lse = torch.where(keep, scores, -1e30).logsumexp(-1)
        lse = step("lse", torch.where(some, lse, 0.0))
        p = torch.where(keep, torch.where(keep, scores - lse[..., None], 0.0).exp(), 0.0)
        context = step("context", (p @ qkv[2]).transpose(1, 2).flatten(2))
        proj = step("proj", context @ w_proj.T + b_proj)
        back = proj.view(2, 4, 3, 7, 7, 48).permute(0, 1, 3, 2, 4, 5).reshape(2, 28, 21, 48)
        x = step("summed", x + torch.roll(back, (3, 3), (1, 2))[:, :24, :18])
        normed = step("normed", F.layer_norm(x, (48,), gamma2, beta2, 1e-5))
        hidden = step("hidden", F.gelu(normed @ w1.T + b1))
        return x + hidden @ w2.T + b2

    def port(P: Port):
        def norm(x, gamma, beta):
            mean, m2 = np.zeros(x.shape[:-1], x.dtype), np.zeros(x.shape[:-1], x.dtype)
            for i in range(48):
                delta = x[..., i] - mean
                mean += delta / (i + 1)
                m2 += delta * (x[..., i] - mean)
            return (x - mean[..., None]) / np.sqrt(m2 / 48 + P.f(1e-5))[..., None] * gamma + beta

        x = P["x"]
        normed = P.put("normed", norm(x, P["gamma1"], P["beta1"]))
        token = np.arange(49)
        row = (np.arange(4)[:, None, None] * 7 + token // 7).repeat(3, 1).reshape(12, 49)  # in the rolled map
        column = np.broadcast_to(np.arange(3)[:, None] * 7 + token % 7, (4, 3, 49)).reshape(12, 49)
        source_row, source_column = (row + 3) % 28, (column + 3) % 21
        real = (source_row < 24) & (source_column < 18)
        flat = np.where(real, source_row * 18 + source_column, 0)
        windows = np.where(real[None, :, :, None], normed.reshape(2, 432, 48)[:, flat], P.f(0)).reshape(24, 49, 48)
        windows = P.put("windows", windows)
        qkv = np.empty((24 * 49, 144), x.dtype)
        w, rows = P["w_qkv"], windows.reshape(-1, 48)
        for t in range(0, len(rows), 128):
            for n in range(0, 144, 64):
                qkv[t : t + 128, n : n + 64] = P["b_qkv"][n : n + 64] + (
                    rows[t : t + 128, :32] @ w[n : n + 64, :32].T + rows[t : t + 128, 32:] @ w[n : n + 64, 32:].T
                )
        qkv = P.put("qkv", qkv.reshape(24, 49, 144)).reshape(24, 49, 9, 16)
        table, rel = P["table"], np.empty((3, 49, 49), x.dtype)
        for i in range(49):
            dy, dx = i // 7 - token // 7, i % 7 - token % 7
            if P.d("bias_from_key_to_query"):
                dy, dx = -dy, -dx
            rel[:, i] = table[(dy + 6) * 13 + dx + 6].T
        rel = P.put("rel_bias", rel)
        scores = np.empty((24, 3, 49, 49), x.dtype)
        for h in range(3):
            q, k = qkv[:, :, h] * P.f(0.25), qkv[:, :, 3 + h]
            scores[:, h] = np.matmul(q, k.swapaxes(1, 2)) + rel[h]
        scores = P.put("scores", scores)

        def band(y, size):  # 0 before the last window, 1 in its part that is in place, 2 in the part that came around
            return (y >= size - 7).astype(int) + (y >= size - 3)

        bands = band(row, 28) * 3 + band(column, 21)
        if P.d("no_mask_across_columns"):
            bands = band(row, 28)
        keep = (bands[:, :, None] == bands[:, None, :]) & real[:, None, :]
        keep = np.concatenate([keep, keep])[:, None]
        log2e = P.f(1 / math.log(2))
        m = np.full((24, 3, 49), -np.inf, x.dtype)
        total, context = np.zeros((24, 3, 49), x.dtype), np.zeros((24, 3, 49, 16), x.dtype)
        v = qkv[:, :, 6:].swapaxes(1, 2)
        for j in range(0, 49, 16):
            s = np.where(keep[..., j : j + 16], scores[..., j : j + 16], -np.inf)
            top = np.maximum(m, s.max(-1))
            safe = np.where(np.isinf(top), P.f(0), top)
            e = np.exp2((s - safe[..., None]) * log2e)
            old = np.exp2((m - safe) * log2e)
            total = total * old + e.sum(-1)
            context = context * old[..., None] + e @ v[:, :, j : j + 16]
            m = top
        empty = total == 0
        lse = np.where(empty, P.f(0), np.where(empty, P.f(0), m) + np.log(np.where(empty, P.f(1), total)))
        P.put("lse", lse)
        context = context / np.where(empty, P.f(1), total)[..., None]
        context = P.put("context", context.swapaxes(1, 2).reshape(24, 49, 48))
        proj = P.put("proj", np.einsum("wtc,dc->wtd", context, P["w_proj"]) + P["b_proj"])
        add = np.empty_like(x)
        shift = -3 if P.d("rolled_on_not_back") else 3
        for r in range(24):
            for c in range(18):
                a, b = (r - shift) % 28, (c - shift) % 21
                add[:, r, c] = proj.reshape(2, 12, 49, 48)[:, a // 7 * 3 + b // 7, a % 7 * 7 + b % 7]
        x = P.put("summed", x + add)
        normed = P.put("normed", norm(x, P["gamma2"], P["beta2"]))
        y = normed @ P["w1"].T + P["b1"]
        if P.d("gelu_by_tanh"):
            hidden = y / 2 * (1 + np.tanh(P.f(math.sqrt(2 / math.pi)) * (y + P.f(0.044715) * y**3)))
        else:
            hidden = y * (P.f(0.5) + P.f(0.5) * erf_by_table(y * P.f(math.sqrt(0.5))))
        hidden = P.put("hidden", hidden)
        out = x + P["b2"]
        for k in range(0, 128, 32):  # split-K
            out = out + hidden[..., k : k + 32] @ P["w2"][:, k : k + 32].T
        P.put("output", out)

    defects = [
        D(
            "bias_from_key_to_query",
            "rel_bias",
            "transpose",
            "the relative position is key minus query, so that each head's bias is transposed",
            accept=("flip", "sign", "permute", "swap"),
        ),
        D(
            "no_mask_across_columns",
            "lse",
            "mask",
            "columns that came around by the shift are not masked, only rows",
            accept=("drop_term", "other"),
        ),
        D(
            "rolled_on_not_back",
            "summed",
            "shift",
            "windows are put together with the shift applied once more instead of undone",
            accept=("sign", "permute", "layout"),
        ),
        D("gelu_by_tanh", "hidden", "function", "GELU by tanh where the model has the error function"),
    ]


@program("u02", variants=("f32", "bf16", "bf16reg"), wide=(
    "gamma", "beta", "running_mean", "running_var", "local_mean", "local_var", "mean", "var", "new_mean", "new_var",
    "loss", "grad:gamma", "grad:beta",
))  # fmt: skip
class synchronised_batch_norm:
    """Batch norm in training over two ranks of 7 and 5 images, a residual, ReLU, and what goes back.

    The port has a shifted one-pass variance in tiles and merges ranks by Chan's formula; backward is by its sums.
    """

    def make(g):
        mean = randn(g, 40, 1, 1, scale=6.0)
        mean[3] = 60.0
        drift = torch.where(torch.arange(12) < 7, 0.0, 0.4).view(12, 1, 1, 1)
        spread = rand(g, 40, 1, 1, low=0.25, high=1.6)
        return dict(
            x=mean + spread * (randn(g, 12, 40, 15, 11) + drift),
            residual=randn(g, 12, 40, 15, 11),
            gamma=randn(g, 40, scale=0.3, shift=1.0),
            beta=randn(g, 40, scale=0.3),
            running_mean=mean.flatten() + randn(g, 40, scale=0.5),
            running_var=rand(g, 40, low=0.1, high=2.0),
            upstream=randn(g, 12, 40, 15, 11, scale=0.01, shift=0.003),
        )

    def reference(x, residual, gamma, beta, running_mean, running_var, upstream):
        images = torch.tensor([7, 5])
        local_mean = step("local_mean", torch.stack([part.mean((0, 2, 3)) for part in x.split([7, 5])]))
        local_var = [part.var((0, 2, 3), correction=0) for part in x.split([7, 5])]
        local_var = step("local_var", torch.stack(local_var))
        share = images.to(x.dtype)[:, None] / 12
        mean = step("mean", (share * local_mean).sum(0))
        var = step("var", (share * (local_var + (local_mean - mean) ** 2)).sum(0))
        n = 12 * 15 * 11
        new_mean = step("new_mean", torch.lerp(running_mean, mean, 0.1))
        new_var = step("new_var", torch.lerp(running_var, var * n / (n - 1), 0.1))
        normed = (x - mean[:, None, None]) * torch.rsqrt(var + 1e-5)[:, None, None]
        normed = step("normed", normed)
        pre = step("pre", normed * gamma[:, None, None] + beta[:, None, None] + residual)
        output = pre.relu()
        pooled = output.mean((2, 3))
        return {"output": output, "pooled": pooled, "loss": (output * upstream).sum()}

    def loss(result):
        return result["loss"]

    def port(P: Port):
        x, C, n = P["x"], 40, 165
        ranks = (slice(0, 7), slice(7, 12))
        local_mean, local_var = np.empty((2, C), x.dtype), np.empty((2, C), x.dtype)
        for r, at in enumerate(ranks):
            part = x[at].swapaxes(0, 1).reshape(C, -1)
            origin = part[:, :1]
            first, second = np.zeros(C, x.dtype), np.zeros(C, x.dtype)
            for t in range(0, part.shape[1], 256):
                y = part[:, t : t + 256] - origin
                first += y.sum(1)
                second += (y * y).sum(1)
            first /= part.shape[1]
            local_mean[r] = first + origin[:, 0]
            local_var[r] = second / part.shape[1] - first * first
        local_mean, local_var = P.put("local_mean", local_mean), P.put("local_var", local_var)
        count = [7 * n, 5 * n]
        total = count[0] + count[1]
        delta = local_mean[1] - local_mean[0]
        part = P.f(0.5 if P.d("ranks_have_equal_weight") else count[1] / total)
        mean = P.put("mean", local_mean[0] + delta * part)
        # sums of squares about the mean that was stored
        m2 = [count[r] * (local_var[r] + np.square(local_mean[r] - mean)) for r in (0, 1)]
        var = P.put("var", (m2[0] + m2[1]) / total)
        momentum = P.f(0.1)
        P.put("new_mean", (1 - momentum) * P["running_mean"] + momentum * mean)
        unbiased = var if P.d("running_variance_biased") else (m2[0] + m2[1]) / (total - 1)
        P.put("new_var", (1 - momentum) * P["running_var"] + momentum * unbiased)
        rstd = 1 / np.sqrt(var + P.f(1e-5))
        wide = lambda v: v[:, None, None]  # noqa: E731
        normed = P.put("normed", (x - wide(mean)) * wide(rstd))
        pre = np.empty_like(x)
        for i in range(12):
            pre[i] = wide(P["gamma"]) * normed[i] + (wide(P["beta"]) + P["residual"][i])
        pre = P.put("pre", pre)
        output = P.put("output", np.maximum(pre, 0))
        exact = np.maximum(pre, 0)
        P.put("pooled", np.add.reduce(exact.reshape(12, C, 165), axis=2) * P.f(1 / 165))
        P.put("loss", np.add.reduce([(exact[i] * P["upstream"][i]).sum() for i in range(12)]))

        dy = np.where(output > 0, P["upstream"], P.f(0))
        sum_dy, sum_dy_normed = np.empty((2, C), x.dtype), np.empty((2, C), x.dtype)
        for r, at in enumerate(ranks):
            a, b = dy[at].swapaxes(0, 1).reshape(C, -1), normed[at].swapaxes(0, 1).reshape(C, -1)
            sum_dy[r], sum_dy_normed[r] = a.sum(1), np.einsum("ci,ci->c", a, b)
        P.put("grad:beta", sum_dy[0] + sum_dy[1])
        if P.d("second_rank_overwrites_first"):
            P.put("grad:gamma", sum_dy_normed[1])
        else:
            P.put("grad:gamma", sum_dy_normed[0] + sum_dy_normed[1])
        dx = np.empty_like(x)
        for r, at in enumerate(ranks):
            own = (x[at] - wide(mean)) * wide(rstd)  # as it is before it is stored
            along = sum_dy_normed
            a, b, k = (
                (sum_dy[r], along[r], count[r]) if P.d("sums_of_own_rank") else (sum_dy.sum(0), along.sum(0), total)
            )
            dx[at] = wide(P["gamma"] * rstd) * (dy[at] - wide(a) / k - own * wide(b) / k)
        P.put("grad:x", dx)
        P.put("grad:residual", dy)

    defects = [
        D(
            "ranks_have_equal_weight",
            "mean",
            "factor",
            "means of the ranks are averaged without the weight of 7 and 5 images",
            accept=("other", "scale", "constant", "drop_term"),
        ),
        D(
            "running_variance_biased",
            "new_var",
            "ddof",
            "the running variance takes the biased variance",
            accept=("factor", "scale"),
        ),
        D(
            "second_rank_overwrites_first",
            "grad:gamma",
            "race",
            "the second rank's sum is written over the first one's instead of added",
            accept=("truncate", "drop_term", "stale", "mask"),
        ),
        D(
            "sums_of_own_rank",
            "grad:x",
            "axis",
            "in the gradient of the input sums are a rank's own, not of both",
            accept=("drop_term", "other", "truncate", "mask"),
        ),
    ]


@program("u03", variants=("f16", "bf16", "f32"), wide=(
    "w1", "b1", "w2", "m_w1", "m_b1", "m_w2", "v_w1", "v_b1", "v_w2", "ema_w1", "ema_b1", "ema_w2", "loss_scale",
    "unscaled", "norm", "clip", "m", "v", "master", "ema", "scale", "ema_w1_end", "norms",
))  # fmt: skip
class adamw_mixed_precision:
    """Four steps of AdamW on scaled 16-bit gradients; the second one overflows and is skipped.

    Tensors of 96 x 130, 130 and 130 x 57, wide master weights and moments, clipping by the global norm, no decay of the
    bias, an average of the weights. The port goes through a flat buffer in chunks of 2048, as multi-tensor kernels do.
    """

    def make(g):
        shapes = {"w1": (96, 130), "b1": (130,), "w2": (130, 57)}
        found = {}
        for n, shape in shapes.items():
            found[n] = randn(g, *shape, scale=0.09, shift=0.4 if n == "b1" else 0.0)
        for n, shape in shapes.items():
            size = randn(g, *shape[:1], *(1 for _ in shape[1:]), scale=1.2, shift=-7.5).exp()
            found[f"m_{n}"] = size * randn(g, *shape)
            found[f"v_{n}"] = size**2 * rand(g, *shape, low=0.3, high=3.0)
            found[f"ema_{n}"] = found[n] + randn(g, *shape, scale=0.01)
            found[f"g_{n}"] = 8192 * size * randn(g, 4, *shape)
            found[f"g_{n}"][2:] /= 2
        found["g_w2"][1, 57, 3] = math.inf
        found["g_w2"][1, 9, 56] = -math.inf
        return {**found, "loss_scale": torch.tensor(8192.0, dtype=torch.float64), "taken": torch.tensor(3)}

    def reference(w1, b1, w2, m_w1, v_w1, ema_w1, g_w1, m_b1, v_b1, ema_b1, g_b1, m_w2, v_w2, ema_w2, g_w2, loss_scale, taken):  # fmt: skip
        w, m, v, ema = [w1, b1, w2], [m_w1, m_b1, m_w2], [v_w1, v_b1, v_w2], [ema_w1, ema_b1, ema_w2]
        copies, norms, scale = [None] * 3, [], loss_scale
        for t in range(4):
            raw = [g_w1[t], g_b1[t], g_w2[t]]
            g = [step("unscaled", torch.where(y.isfinite(), y, 0.0) / scale) for y in raw]
            skip = step("overflow", sum((~y.isfinite()).sum() for y in raw)) > 0
            norm = step("norm", torch.stack([y.norm() for y in g]).norm())
            norms.append(norm)
            clip = step("clip", (0.05 / (norm + 1e-6)).clamp(max=1.0))
            taken = step("steps_taken", taken + (~skip).long())
            for i in range(3):
                grad = g[i] * clip
                m[i] = step("m", torch.where(skip, m[i], 0.9 * m[i] + 0.1 * grad))
                v[i] = step("v", torch.where(skip, v[i], 0.98 * v[i] + 0.02 * grad * grad))
                m_hat, v_hat = m[i] / (1 - 0.9**taken), v[i] / (1 - 0.98**taken)
                decayed = w[i] * (1 - 0.004 * (0.0 if i == 1 else 0.1))
                new = decayed - 0.004 * m_hat / (v_hat.sqrt() + 1e-6)
                w[i] = step("master", torch.where(skip, w[i], new))
                ema[i] = step("ema", torch.lerp(ema[i], w[i], 0.05))
                copies[i] = step("weight", w[i])
            scale = step("scale", torch.where(skip, scale / 2, scale))
        return {"w1_end": copies[0], "b1_end": copies[1], "ema_w1_end": ema[0], "norms": torch.stack(norms)}

    def port(P: Port):
        names = ("w1", "b1", "w2")
        shapes = [P[n].shape for n in names]
        sizes = [int(np.prod(s)) for s in shapes]
        edge = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
        flat = lambda prefix: np.concatenate([P[prefix + n].reshape(-1) for n in names])  # noqa: E731
        w, m, v, ema = flat(""), flat("m_"), flat("v_"), flat("ema_")
        decay = np.ones_like(w)
        for i in (0, 2):
            decay[edge[i] : edge[i + 1]] = 1 - 0.004 * 0.1
        scale, taken, norms, total, counted = P["loss_scale"], int(P["taken"]), [], edge[3], 0
        beta1, beta2, lr, eps = 0.9, 0.98, 0.004, 1e-6
        for t in range(4):
            raw = np.concatenate([P["g_" + n][t].reshape(-1) for n in names])
            finite = np.isfinite(raw)
            overflow = int(total - finite.sum())
            g = np.where(finite, raw, P.f(0)) * (1 / scale)
            split = lambda y: [y[edge[i] : edge[i + 1]].reshape(shapes[i]) for i in range(3)]  # noqa: E731
            g = np.concatenate([P.put("unscaled", y).reshape(-1) for y in split(g)])
            P.put("overflow", np.int64(overflow))
            if P.d("norms_of_tensors_added"):
                norm = sum(np.sqrt(np.square(y).sum()) for y in split(g))
            else:
                norm = np.sqrt(sum(np.dot(g[k : k + 2048], g[k : k + 2048]) for k in range(0, total, 2048)))
            norm = P.put("norm", P.f(norm))
            norms.append(norm)
            clip = P.put("clip", np.minimum(P.f(0.05) / (norm + P.f(1e-6)), P.f(1)))
            skip = overflow > 0
            taken += not skip
            counted += 1
            P.put("steps_taken", np.int64(taken))
            if not skip:
                power = int(P["taken"]) + counted if P.d("skipped_step_counted") else taken
                step_size = P.f(lr / (1 - beta1**power))
                root = P.f(1 / math.sqrt(1 - beta2**power))
                for k in range(0, total, 2048):
                    at = slice(k, k + 2048)
                    y = g[at] * clip
                    m[at] += P.f(1 - beta1) * (y - m[at])
                    v[at] += P.f(1 - beta2) * (y * y - v[at])
                    if P.d("eps_under_the_root"):
                        below = np.sqrt(v[at] * root * root + P.f(eps))
                    else:
                        below = np.sqrt(v[at]) * root + P.f(eps)
                    w[at] = decay[at] * w[at] - step_size * m[at] / below
            averaged = np.float16(w).astype(w.dtype) if P.d("average_of_half_weights") else w
            ema = ema * P.f(0.95) + averaged * P.f(0.05)
            end = []
            for parts in zip(split(m), split(v), split(w), split(ema), strict=True):
                for n, y in zip(("m", "v", "master", "ema"), parts, strict=True):
                    P.put(n, y)
                end.append(P.put("weight", parts[2]))
            scale = P.put("scale", scale / 2 if skip else scale)
        P.put("w1_end", end[0])
        P.put("b1_end", end[1])
        P.put("ema_w1_end", split(ema)[0])
        P.put("norms", np.array(norms))

    defects = [
        D(
            "norms_of_tensors_added",
            "norm",
            "axis",
            "norms of the tensors are added, not their squares: the norm is not a global one",
            accept=("function", "factor", "scale", "other", "drop_term"),
        ),
        D(
            "eps_under_the_root",
            "master",
            "eps",
            "epsilon is added to the variance under the root, not to the root",
            accept=("function", "other", "constant"),
        ),
        D(
            "skipped_step_counted",
            "master#7",
            "shift",
            "bias correction counts the skipped step too",
            accept=("factor", "scale", "constant", "stale", "other"),
        ),
        D(
            "average_of_half_weights",
            "ema",
            "precision",
            "the average takes weights rounded to float16 and not the master weights",
        ),
    ]


LENGTHS = (20, 20, 20, 18, 17, 17, 13, 12, 12, 9, 7, 7, 5, 3, 1, 1)


@program("u04", variants=("f32", "bf16", "bf16reg"), wide=(
    "c", "c_end", "loss", "grad:w_hh", "grad:w_ih", "grad:b_hh",
))  # fmt: skip
class packed_lstm:
    """An LSTM over 16 packed sequences of 20 to 1 tokens, a linear head, a squared error, and back through time.

    The port has one matrix product for all inputs, keeps no gates (backward computes them again) and collects the
    gradients of the weights over all steps before the products.
    """

    def make(g):
        sizes = torch.tensor([sum(n > t for n in LENGTHS) for t in range(20)])
        S, I, H = int(sizes.sum()), 33, 40
        return dict(
            x=randn(g, S, I, shift=0.5),
            sizes=sizes,
            w_ih=randn(g, 4 * H, I, scale=0.2),
            w_hh=randn(g, 4 * H, H, scale=0.22),
            b_ih=randn(g, 4 * H, scale=0.3),
            b_hh=randn(g, 4 * H, scale=0.3) + torch.where(torch.arange(4 * H) // H == 1, 1.0, 0.0),
            h0=randn(g, 16, H, scale=0.4),
            c0=randn(g, 16, H, scale=0.6),
            w_out=randn(g, 11, H, scale=0.3),
            target=randn(g, S, 11),
        )

    def reference(x, sizes, w_ih, w_hh, b_ih, b_hh, h0, c0, w_out, target):
        projected = step("projected", x @ w_ih.T + b_ih)
        h, c, hs, last_h, last_c, at = h0, c0, [], [], [], 0
        for n in sizes.tolist():
            if n < len(h):
                last_h.append(h[n:])
                last_c.append(c[n:])
            gates = projected[at : at + n] + h[:n] @ w_hh.T + b_hh
            i, f, g, o = gates.chunk(4, 1)
            c = step("c", f.sigmoid() * c[:n] + i.sigmoid() * g.tanh())
            h = step("h", o.sigmoid() * c.tanh())
            hs.append(h)
            at += n
        h_end = torch.cat([h, *last_h[::-1]])
        c_end = torch.cat([c, *last_c[::-1]])
        predicted = step("predicted", torch.cat(hs) @ w_out.T)
        loss = (predicted - target).pow(2).mean() / 2
        return {"h_end": h_end, "c_end": c_end, "loss": loss}

    def loss(result):
        return result["loss"]

    def port(P: Port):
        x, sizes, w_hh, H = P["x"], P["sizes"].tolist(), P["w_hh"], 40
        S = len(x)
        start = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        projected = np.empty((S, 4 * H), x.dtype)
        for r in range(0, S, 64):
            for k in range(0, 160, 48):
                projected[r : r + 64, k : k + 48] = x[r : r + 64] @ P["w_ih"][k : k + 48].T + P["b_ih"][k : k + 48]
        projected = P.put("projected", projected)

        def gates_of(t, h):
            n = sizes[t]
            z = projected[start[t] : start[t] + n].copy()
            if P.d("steps_of_sixteen_rows"):
                first = min(16 * t, S - n)
                z = projected[first : first + n].copy()
            z += P["b_hh"]
            for k in range(0, H, 16):
                z += h[:n, k : k + 16] @ w_hh[:, k : k + 16].T
            half = P.f(0.5)
            i, f, o = (half + half * np.tanh(half * z[:, k * H : (k + 1) * H]) for k in (0, 1, 3))
            return i, f, np.tanh(z[:, 2 * H : 3 * H]), o

        h, c = P["h0"], P["c0"]
        hs, cs = [h], [c]
        h_end, c_end = np.empty_like(h), np.empty_like(c)
        for t, n in enumerate(sizes):
            i, f, g, o = gates_of(t, h)
            if P.d("input_and_forget_gates_exchanged"):
                i, f = f, i
            c = P.put("c", c[:n] * f + g * i)
            h = P.put("h", o * (c if P.d("cell_without_tanh") else np.tanh(c)))
            hs.append(h)
            cs.append(c)
            h_end[:n], c_end[:n] = h, c
        packed = np.concatenate(hs[1:])
        predicted = P.put("predicted", np.einsum("sh,oh->so", packed, P["w_out"]))
        P.put("h_end", h_end)
        P.put("c_end", c_end)
        error = predicted - P["target"]
        P.put("loss", np.square(error).sum(1).sum() / P.f(2 * 11 * S))

        d_packed = (error / P.f(11 * S)) @ P["w_out"]
        dz = np.zeros((S, 4 * H), x.dtype)
        dh, dc = np.zeros((16, H), x.dtype), np.zeros((16, H), x.dtype)
        for t in range(19, -1, -1):
            n = sizes[t]
            i, f, g, o = gates_of(t, hs[t])
            th = np.tanh(cs[t + 1])
            dh[:n] += d_packed[start[t] : start[t] + n]
            dct = dc[:n] + dh[:n] * o * (1 - th) * (1 + th)
            part = dz[start[t] : start[t] + n]
            part[:, :H] = dct * g * i * (1 - i)
            part[:, H : 2 * H] = dct * cs[t][:n] * f * (1 - f)
            part[:, 2 * H : 3 * H] = dct * i * (1 - g * g)
            part[:, 3 * H :] = dh[:n] * th * o * (1 - o)
            dc[:n] = dct * f
            dh[:n] = part @ w_hh
        P.put("grad:x", dz @ P["w_ih"])
        P.put("grad:w_ih", sum(dz[k : k + 50].T @ x[k : k + 50] for k in range(0, S, 50)))
        if P.d("hidden_state_after_the_step"):
            before = packed
        else:
            before = np.concatenate([hs[t][:n] for t, n in enumerate(sizes)])
        P.put("grad:w_hh", dz.T @ before)
        P.put("grad:b_hh", dz.sum(0))
        P.put("grad:h0", dh)

    defects = [
        D(
            "steps_of_sixteen_rows",
            "c#3",
            "layout",
            "a step's rows are looked for at 16 t in the packed buffer, as if no sequence had ended",
            accept=("shift", "other", "permute"),
        ),
        D(
            "input_and_forget_gates_exchanged",
            "c",
            "permute",
            "the order of gates is taken for forget, input, cell, output",
            accept=("swap", "layout"),
        ),
        D(
            "cell_without_tanh",
            "h",
            "drop_term",
            "the hidden state is the output gate times the cell, without tanh",
            accept=("function",),
        ),
        D(
            "hidden_state_after_the_step",
            "grad:w_hh",
            "shift",
            "the gradient of recurrent weights takes the hidden state after a step, not before it",
            accept=("stale", "swap", "other"),
        ),
    ]
