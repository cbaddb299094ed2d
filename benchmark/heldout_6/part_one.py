"""A selective scan (Mamba), a GRPO loss with its gradient, and a linear layer in 4-bit weights and 8-bit activations."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, silu, step


@program("x01")
class selective_scan:
    """Mamba's inner block; the port convolves with a ring buffer and scans in chunks of 8 with a doubling scan."""

    def make(g):
        return dict(
            x=randn(g, 2, 19, 10, scale=0.9),
            z=randn(g, 2, 19, 10),
            conv_w=randn(g, 10, 4, scale=0.5),
            conv_b=randn(g, 10, scale=0.2),
            w_x=randn(g, 13, 10, scale=0.4),
            dt_w=randn(g, 10, 3, scale=0.5),
            dt_bias=randn(g, 10, scale=0.5, shift=-0.8),
            a_log=rand(g, 10, 5, low=0.0, high=1.6),
            d_skip=randn(g, 10, scale=0.3, shift=1.0),
        )

    def reference(x, z, conv_w, conv_b, w_x, dt_w, dt_bias, a_log, d_skip):
        pre = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv_w[:, None], conv_b, groups=10).transpose(1, 2)
        u = step("conv", F.silu(pre))
        proj = step("proj", u @ w_x.T)
        dt, b, c = proj.split([3, 5, 5], dim=-1)
        delta = step("delta", F.softplus(dt @ dt_w.T + dt_bias))
        a = -torch.exp(a_log)
        h, states = torch.zeros_like(u[:, 0, :, None] * a), []
        for t in range(x.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * a)
            h = decay * h + (delta[:, t] * u[:, t])[:, :, None] * b[:, t, None, :]
            states.append(h)
        h = step("states", torch.stack(states, 1))
        y = step("scan", (h * c[:, :, None, :]).sum(-1) + d_skip * u)
        return y * F.silu(z)

    def port(P: Port):
        x, z, cw, cb = P["x"], P["z"], P["conv_w"], P["conv_b"]
        u = np.empty_like(x)
        ring = np.zeros((4, 10), x.dtype)
        for n in range(2):
            if not P.d("ring_kept_between_sequences"):
                ring[:] = 0
            for t in range(19):
                ring[t % 4] = x[n, t]
                acc = cb.copy()
                for k in range(4):
                    acc += cw[:, 3 - k] * ring[(t - k) % 4]
                u[n, t] = silu(acc)
        u = P.put("conv", u)

        wx = P["w_x"]
        proj = np.zeros((2, 19, 13), x.dtype)
        for k in range(0, 10, 4):
            proj += np.einsum("nlk,ok->nlo", u[..., k : k + 4], wx[:, k : k + 4])
        proj = P.put("proj", proj)
        dt, b, c = proj[..., :3], proj[..., 3:8], proj[..., 8:]
        if P.d("b_and_c_swapped"):
            b, c = c, b

        lin = dt @ P["dt_w"].T
        if P.d("dt_bias_after_softplus"):
            delta = np.log1p(np.exp(lin)) + P["dt_bias"]
        else:
            lin = lin + P["dt_bias"]
            delta = np.maximum(lin, 0) + np.log1p(np.exp(-np.abs(lin)))
        delta = P.put("delta", delta)

        a = -P["a_log"] if P.d("a_log_not_exponentiated") else -np.exp(P["a_log"])
        h = np.empty((2, 19, 10, 5), x.dtype)
        for n in range(2):
            carry = np.zeros((10, 5), x.dtype)
            for t in range(0, 19, 8):
                s = slice(t, min(t + 8, 19))
                da = np.exp(delta[n, s, :, None] * a)
                db = (delta[n, s] * u[n, s])[:, :, None] * b[n, s, None, :]
                hop = 1
                while hop < len(da):  # each element becomes the composition of all before it in the chunk
                    na, nb = da.copy(), db.copy()
                    na[hop:] = da[hop:] * da[:-hop]
                    nb[hop:] = da[hop:] * db[:-hop] + db[hop:]
                    da, db, hop = na, nb, 2 * hop
                h[n, s] = db + (carry if P.d("carry_not_decayed") else da * carry)
                carry = h[n, s][-1]
        h = P.put("states", h)

        y = P["d_skip"] * u
        for k in range(4 if P.d("state_tail_left_out") else 5):
            y = y + h[..., k] * c[..., k][..., None]
        y = P.put("scan", y)
        P.put("output", y * silu(z))

    defects = [
        D(
            "ring_kept_between_sequences",
            "conv",
            "stale",
            "The convolution's buffer of last inputs is not cleared for the next sequence of the batch.",
            ("mask", "other", "zero"),
        ),
        D(
            "dt_bias_after_softplus",
            "delta",
            "other",
            "The bias of delta is added after the softplus, not before it.",
            ("function", "drop_term", "swap"),
        ),
        D("b_and_c_swapped", "states", "swap", "B and C are taken from each other's part of the projection."),
        D(
            "a_log_not_exponentiated",
            "states",
            "function",
            "A is -a_log, not -exp(a_log).",
            ("other", "factor", "drop_term", "scale"),
        ),
        D(
            "carry_not_decayed",
            "states",
            "factor",
            "The state carried into a chunk is added without the decay since the chunk's start.",
            ("drop_term", "scale", "other"),
        ),
        D(
            "state_tail_left_out",
            "scan",
            "truncate",
            "The sum over states ends after a tile of 4 and leaves out the fifth.",
            ("drop_term", "mask"),
        ),
    ]


@program(
    "x02",
    variants=("f32", "bf16"),
    wide=("old_logp", "ref_logp", "rewards", "logp", "adv", "ratio", "policy", "kl", "token_loss", "output"),
)
class grpo_loss:
    """GRPO with a clipped ratio and a KL penalty to a reference model; the gradient for the logits by hand."""

    def make(g):
        logits = randn(g, 6, 9, 13, scale=1.3)
        tokens = randint(g, 0, 13, 6, 9)
        logp = torch.log_softmax(logits / 0.7, -1).gather(-1, tokens[..., None])[..., 0]
        return dict(
            logits=logits,
            tokens=tokens,
            old_logp=logp + randn(g, 6, 9, scale=0.25),
            ref_logp=logp + randn(g, 6, 9, scale=0.7),
            rewards=rand(g, 6, low=-0.5, high=1.5),
            lengths=randint(g, 4, 9, 6),
        )

    def reference(logits, tokens, old_logp, ref_logp, rewards, lengths):
        logp = step("logp", F.log_softmax(logits / 0.7, -1).gather(-1, tokens[..., None]).squeeze(-1))
        r = rewards.view(2, 3)
        adv = step("adv", ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).reshape(6, 1))
        ratio = step("ratio", torch.exp(logp - old_logp))
        policy = step("policy", -torch.minimum(ratio * adv, ratio.clamp(1 - 0.2, 1 + 0.28) * adv))
        gap = ref_logp - logp
        kl = step("kl", torch.exp(gap) - gap - 1)
        mask = torch.arange(9)[None] < lengths[:, None]
        tok = step("token_loss", (policy + 0.2 * kl) * mask)
        return (tok.sum(1) / lengths).mean()

    def port(P: Port):
        logits, tokens, old, ref = P["logits"], P["tokens"], P["old_logp"], P["ref_logp"]
        lengths, rewards = P["lengths"], P["rewards"]
        dt = logits.dtype
        inv_t = P.f(1 / 0.7)
        lse = np.empty((6, 9), dt)
        for n in range(6):
            for t in range(9):
                m, s = P.f(-np.inf), P.f(0)
                for v in range(0, 13, 5):
                    part = logits[n, t, v : v + 5] * inv_t
                    new = np.maximum(m, part.max())
                    if P.d("running_sum_not_rescaled"):
                        s = s + np.exp(part - new).sum()
                    else:
                        s = s * np.exp(m - new) + np.exp(part - new).sum()
                    m = new
                lse[n, t] = m + np.log(s)
        at = np.take_along_axis(logits, tokens[..., None], -1)[..., 0] * inv_t
        logp = P.put("logp", at - lse)

        adv = np.empty((6, 1), dt)
        for k in range(2):
            r = rewards[3 * k : 3 * k + 3]
            mean = (r[0] + r[1] + r[2]) / 3
            ss = ((r - mean) ** 2).sum()
            sd = np.sqrt(ss / (3 if P.d("population_std") else 2))
            adv[3 * k : 3 * k + 3, 0] = (r - mean) / (sd + P.f(1e-4))
        adv = P.put("adv", adv)

        ratio = P.put("ratio", np.exp(logp - old))
        clipped = np.minimum(np.maximum(ratio, P.f(0.8)), P.f(1.28))
        # by the sign of the advantage: only one side of the clip can be the smaller one
        active = np.where(adv >= 0, ratio <= P.f(1.28), ratio >= P.f(0.8))
        if P.d("clip_without_minimum"):
            active = ratio == clipped
            policy = -clipped * adv
        else:
            policy = -np.where(active, ratio, clipped) * adv
        policy = P.put("policy", policy)

        gap = logp - ref if P.d("kl_other_way_round") else ref - logp
        kl = P.put("kl", np.expm1(gap) - gap)

        tok = np.zeros((6, 9), dt)
        ends = lengths + 1 if P.d("token_after_the_end_counted") else lengths
        for n, e in enumerate(ends):
            tok[n, :e] = policy[n, :e] + P.f(0.2) * kl[n, :e]
        tok = P.put("token_loss", tok)
        total = P.f(0)
        for n in range(6):
            total = total + tok[n].sum() / P.f(lengths[n])
        P.put("output", total / P.f(6))

        grad = np.zeros_like(logits)
        for n in range(6):
            for t in range(ends[n]):
                d = -adv[n, 0] * ratio[n, t] if active[n, t] else P.f(0)
                slope = np.expm1(gap[n, t])
                d = d + P.f(0.2) * (slope if P.d("kl_other_way_round") else -slope)
                d = d / P.f(6 * lengths[n])
                p = np.exp(logits[n, t] * inv_t - lse[n, t])
                row = -d * p
                row[tokens[n, t]] += d
                grad[n, t] = row if P.d("temperature_left_out_backward") else row * inv_t
        P.put("grad:logits", grad)

    defects = [
        D(
            "running_sum_not_rescaled",
            "logp",
            "factor",
            "The online sum of exponentials is not rescaled when a later tile has a larger maximum.",
            ("scale", "stale", "drop_term", "other"),
        ),
        D(
            "population_std",
            "adv",
            "ddof",
            "The group's standard deviation divides by n, not by n - 1.",
            ("scale", "factor"),
        ),
        D(
            "clip_without_minimum",
            "policy",
            "drop_term",
            "The clipped objective is always used, without the minimum with the unclipped one.",
            ("function", "other", "mask"),
        ),
        D(
            "kl_other_way_round",
            "kl",
            "swap",
            "The log ratio in the KL estimate is policy minus reference, not reference minus policy.",
            ("sign",),
        ),
        D(
            "token_after_the_end_counted",
            "token_loss",
            "mask",
            "The mask lets one token after a completion's end through.",
            ("shift", "truncate"),
        ),
        D(
            "temperature_left_out_backward",
            "grad:logits",
            "factor",
            "The gradient lacks the 1 / temperature of the logits.",
            ("scale", "drop_term", "constant"),
        ),
    ]


@program("x03", variants=("f16", "f32"), wide=("xscale", "acc"))
class w4a8_linear:
    """GPTQ weights of 4 bits with act-order, inputs smoothed and in int8 by token; the port goes in tiles of 20 over K."""

    def make(g):
        word = 2**31
        return dict(
            x=randn(g, 7, 48, scale=1.2) * torch.exp(randn(g, 48, scale=0.6)),
            smooth=torch.exp(randn(g, 48, scale=0.5)),
            qweight=randint(g, -word, word, 6, 24).int(),  # 8 rows of K a word, the lowest bits first
            qzeros=randint(g, -word, word, 3, 3).int(),  # 8 columns a word
            scales=rand(g, 3, 24, low=0.01, high=0.05),
            g_idx=torch.arange(48)[torch.randperm(48, generator=g)] // 16,
            bias=randn(g, 24, scale=2.0),
        )

    def reference(x, smooth, qweight, qzeros, scales, g_idx, bias):
        xs = step("smooth", x / smooth)
        sx = step("xscale", xs.abs().amax(-1, keepdim=True) / 127)
        q = step("xq", torch.round(xs / sx).clamp(-128, 127).to(torch.int8))
        shifts = torch.arange(0, 32, 4)
        w4 = ((qweight[:, None, :].long() >> shifts[None, :, None]) & 15).reshape(48, 24)
        zero = ((qzeros[:, :, None].long() >> shifts) & 15).reshape(3, 24) + 1
        w = step("weight", scales[g_idx] * (w4 - zero[g_idx]))
        acc = step("acc", q.to(w.dtype) @ w)
        return acc * sx + bias

    def port(P: Port):
        x, smooth, scales, bias = P["x"], P["smooth"], P["scales"], P["bias"]
        dt = x.dtype
        xs = P.put("smooth", x * (1 / smooth))

        sx = np.empty((7, 1), dt)
        for r in range(7):
            top = P.f(0)
            for k in range(0, 48, 16):
                top = np.maximum(top, np.abs(xs[r, k : k + 16]).max())
            sx[r, 0] = top / 127
        if P.d("one_scale_for_all_tokens"):
            sx[:] = sx.max()
        sx = P.put("xscale", sx)

        scaled = xs / sx
        q = np.trunc(scaled) if P.d("cast_without_rounding") else np.rint(scaled)
        q = P.put("xq", np.clip(q, -128, 127).astype(np.int8))

        qw, qz = P["qweight"].view(np.uint32), P["qzeros"].view(np.uint32)
        g_idx = P["g_idx"]
        w = np.empty((48, 24), dt)
        for k in range(48):
            group = k // 16 if P.d("act_order_ignored") else g_idx[k]
            place = 7 - k % 8 if P.d("high_bits_first") else k % 8
            for j in range(24):
                nibble = int(qw[k // 8, j]) >> (4 * place) & 15
                zero = (int(qz[group, j // 8]) >> (4 * (j % 8)) & 15) + 1
                if P.d("zero_point_without_one"):
                    zero -= 1
                w[k, j] = scales[group, j] * (nibble - zero)
        w = P.put("weight", w)

        qf = q.astype(dt)
        acc = np.zeros((7, 24), dt)
        for k in range(0, 48, 20):
            if P.d("half_accumulator"):
                for kk in range(k, min(k + 20, 48)):
                    acc = (acc + qf[:, kk : kk + 1] * w[kk]).astype(np.float16).astype(dt)
            else:
                acc = acc + qf[:, k : k + 20] @ w[k : k + 20]
        acc = P.put("acc", acc)
        P.put("output", acc * sx + bias)

    defects = [
        D(
            "one_scale_for_all_tokens",
            "xscale",
            "axis",
            "The largest value is taken over the whole input, not for each token.",
            ("scale", "other"),
        ),
        D(
            "cast_without_rounding",
            "xq",
            "function",
            "The cast to int8 cuts off the fraction where it should round to nearest.",
            ("precision", "truncate", "other"),
        ),
        D(
            "high_bits_first",
            "weight",
            "flip",
            "The eight 4-bit weights of a word are unpacked from the highest bits down.",
            ("permute", "layout", "swap"),
        ),
        D(
            "act_order_ignored",
            "weight",
            "permute",
            "The group of a row is k // 16 where g_idx says another.",
            ("layout", "other", "swap"),
        ),
        D(
            "zero_point_without_one",
            "weight",
            "constant",
            "GPTQ stores zero points less one; the one is not added back.",
            ("drop_term", "shift", "other"),
        ),
        D("half_accumulator", "acc", "precision", "The sum over K is kept in float16."),
    ]
