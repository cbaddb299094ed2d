"""Language models: multi-head latent attention, a fused GRPO loss, a GPTQ 4-bit linear layer with LoRA."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randint, randn, step


@program("w01")
class latent_attention:
    """DeepSeek's multi-head latent attention, left-padded; the port absorbs the up projections, keys in tiles of 4."""

    def make(g):
        return dict(
            x=randn(g, 2, 9, 20, scale=0.8),
            w_dq=randn(g, 14, 20, scale=0.2),
            q_gamma=randn(g, 14, scale=0.2, shift=1.0),
            w_uq=randn(g, 3 * 14, 14, scale=0.3),
            w_dkv=randn(g, 16, 20, scale=0.03),
            kv_gamma=randn(g, 10, scale=0.2, shift=1.0),
            w_ukv=randn(g, 3 * 14, 10, scale=0.35),
            w_o=randn(g, 20, 18, scale=0.25),
            start=torch.tensor([0, 3]),
        )

    def reference(x, w_dq, q_gamma, w_uq, w_dkv, kv_gamma, w_ukv, w_o, start):
        B, T, H, nope, rope, dv = 2, 9, 3, 8, 6, 6

        def rms(a, gamma):
            return a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma

        pos = (torch.arange(T)[None] - start[:, None]).clamp(min=0).to(x.dtype)
        angle = pos[..., None] * 10000.0 ** (-torch.arange(0, rope, 2).to(x.dtype) / rope)
        cos, sin = angle.cos(), angle.sin()

        def rotate(a, cos, sin):
            even, odd = a[..., 0::2], a[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        cq = step("q_latent", rms(x @ w_dq.T, q_gamma))
        q_nope, q_pe = (cq @ w_uq.T).view(B, T, H, nope + rope).split([nope, rope], -1)
        q_pe = step("q_rope", rotate(q_pe, cos[:, :, None], sin[:, :, None]))
        c, k_pe = (x @ w_dkv.T).split([10, rope], -1)
        ckv = step("kv_latent", rms(c, kv_gamma))
        k_pe = step("k_rope", rotate(k_pe, cos, sin))
        k_nope, v = (ckv @ w_ukv.T).view(B, T, H, nope + dv).split([nope, dv], -1)
        s = torch.einsum("bthd,bshd->bhts", q_nope, k_nope) + torch.einsum("bthd,bsd->bhts", q_pe, k_pe)
        s = step("scores", s * (nope + rope) ** -0.5)
        t = torch.arange(T)
        seen = (t[None, :, None] >= t[None, None, :]) & (t[None, None, :] >= start[:, None, None])
        seen = seen | torch.eye(T, dtype=torch.bool)
        p = step("probs", s.masked_fill(~seen[:, None], -math.inf).softmax(-1))
        o = step("context", torch.einsum("bhts,bshd->bthd", p, v))
        return o.reshape(B, T, H * dv) @ w_o.T

    def port(P: Port):
        x, start = P["x"], P["start"]
        w_ukv = P["w_ukv"].reshape(3, 14, 10)
        w_uk, w_uv = w_ukv[:, :8], w_ukv[:, 8:]

        def rms(a, gamma, eps):
            flat = a.reshape(18, -1)
            out = np.empty_like(flat)
            for r in range(18):
                out[r] = flat[r] / np.sqrt(flat[r] @ flat[r] / flat.shape[1] + P.f(eps)) * gamma
            return out.reshape(a.shape)

        def rotate(a):  # (9, ..., 6) at positions from `first`
            for t in range(9):
                at = t if P.d("positions_count_padding") else max(t - first, 0)
                for i in range(3):
                    c, s = P.f(math.cos(at * 10000 ** (-i / 3))), P.f(math.sin(at * 10000 ** (-i / 3)))
                    e, o = (i, i + 3) if P.d("rope_of_halves") else (2 * i, 2 * i + 1)
                    re, im = a[t, ..., e].copy(), a[t, ..., o].copy()
                    a[t, ..., e], a[t, ..., o] = re * c - im * s, im * c + re * s

        cq = P.put("q_latent", rms(x @ P["w_dq"].T, P["q_gamma"], 1e-6))
        q = np.einsum("btc,hdc->bthd", cq, P["w_uq"].reshape(3, 14, 14))
        q_nope, q_pe = q[..., :8], q[..., 8:].copy()
        for b in range(2):
            first = int(start[b])
            rotate(q_pe[b])
        q_pe = P.put("q_rope", q_pe)
        down = x @ P["w_dkv"].T
        ckv = P.put("kv_latent", rms(down[..., :10], P["kv_gamma"], 1e-5 if P.d("kv_norm_eps_1e5") else 1e-6))
        k_pe = down[..., 10:].copy()
        for b in range(2):
            first = int(start[b])
            rotate(k_pe[b])
        k_pe = P.put("k_rope", k_pe)

        # one key per position, 10 latent and 6 rotary numbers, as in a decoding kernel
        query = np.concatenate([np.einsum("bthd,hdc->bhtc", q_nope, w_uk), q_pe.transpose(0, 2, 1, 3)], -1)
        scale = 1 / math.sqrt(16 if P.d("scale_of_latent_width") else 14)
        scores = np.empty((2, 3, 9, 9), x.dtype)
        for k0 in range(0, 9, 4):
            k1 = min(k0 + 4, 9)
            key = np.concatenate([ckv[:, k0:k1], k_pe[:, k0:k1]], -1)
            scores[..., k0:k1] = query @ key.transpose(0, 2, 1)[:, None] * scale
        scores = P.put("scores", scores)

        probs = np.zeros_like(scores)
        for b in range(2):
            for t in range(9):
                lo = int(start[b])
                lo = 0 if P.d("padding_keys_seen") else min(lo, t)
                if t < start[b] and not P.d("padding_keys_seen"):
                    lo = t
                m, total = np.full(3, -np.inf, x.dtype), np.zeros(3, x.dtype)
                for k0 in range(lo, t + 1, 4):  # running maximum and sum
                    part = scores[b, :, t, k0 : min(k0 + 4, t + 1)]
                    new = np.maximum(m, part.max(-1))
                    total = total * np.exp(m - new) + np.exp(part - new[:, None]).sum(-1)
                    m = new
                probs[b, :, t, lo : t + 1] = np.exp(scores[b, :, t, lo : t + 1] - m[:, None]) / total[:, None]
        probs = P.put("probs", probs)

        latent = np.zeros((2, 3, 9, 10), x.dtype)
        for k0 in range(0, 9, 4):
            latent += probs[..., k0 : k0 + 4] @ ckv[:, None, k0 : k0 + 4]
        context = np.einsum("bhtc,hdc->bthd", latent, w_uv)
        context = P.put("context", context)
        if P.d("heads_not_moved_back"):
            flat = np.ascontiguousarray(context.transpose(0, 2, 1, 3)).reshape(18, 18)
        else:
            flat = context.reshape(18, 18)
        P.put("output", (flat @ P["w_o"].T).reshape(2, 9, 20))

    defects = [
        D("positions_count_padding", "q_rope", "shift",
          "Rotary positions count the left padding, so that a padded sequence is rotated three positions too far.",
          ("constant",)),
        D("rope_of_halves", "q_rope", "layout",
          "Rotary pairs are taken as (i, i + half) where the model has them side by side.",
          ("permute", "swap", "function")),
        D("kv_norm_eps_1e5", "kv_latent", "eps", "The norm of the key-value latent has eps 1e-5 instead of 1e-6.",
          ("constant",)),
        D("scale_of_latent_width", "scores", "scale",
          "Scores are scaled by the width of the absorbed key, 16, instead of the head's width, 14.",
          ("factor", "constant")),
        D("padding_keys_seen", "probs", "mask", "Keys of the left padding are not masked; only the causal mask is used."),
        D("heads_not_moved_back", "output", "layout",
          "The context is reshaped from (batch, head, time, width) without moving heads behind time.",
          ("permute", "transpose", "axis")),
    ]  # fmt: skip


@program("w02", wide=("old_logp", "ref_logp", "rewards", "logp", "advantage", "ratio", "kl", "token_loss", "output"))
class grpo_loss:
    """GRPO with the language-model head fused in; the port never has the logits, goes by tiles of 16 words."""

    def make(g):
        h, weight = randn(g, 6, 7, 12, scale=0.8), randn(g, 37, 12, scale=0.5)
        tokens = randint(g, 0, 37, 6, 7)
        logp = ((h @ weight.T) / 0.9).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return dict(
            h=h,
            weight=weight,
            tokens=tokens,
            lengths=torch.tensor([7, 4, 6, 5, 7, 2]),
            old_logp=logp + randn(g, 6, 7, scale=0.25),
            ref_logp=logp + randn(g, 6, 7, scale=0.4),
            rewards=randn(g, 6, scale=1.5, shift=0.5),
        )

    def reference(h, weight, tokens, lengths, old_logp, ref_logp, rewards):
        logits = h @ weight.T / 0.9
        logp = step("logp", logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0])
        r = rewards.view(2, 3)
        adv = step("advantage", ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(6))
        ratio = step("ratio", torch.exp(logp - old_logp))
        kl = step("kl", torch.exp(ref_logp - logp) - (ref_logp - logp) - 1)
        a = adv[:, None]
        mask = torch.arange(7)[None] < lengths[:, None]
        token = -torch.min(ratio * a, ratio.clamp(1 - 0.2, 1 + 0.28) * a) + 0.04 * kl
        token = step("token_loss", token * mask)
        return token.sum() / mask.sum()

    def port(P: Port):
        h, w = P["h"].reshape(42, 12), P["weight"]
        tokens, lengths = P["tokens"], P["lengths"]
        inv_t = P.f(1 / 0.9)
        if P.d("labels_shifted_again"):
            tokens = np.concatenate([tokens[:, 1:], tokens[:, -1:]], 1)
        label = tokens.reshape(42)
        m, total, picked = np.full(42, -np.inf, h.dtype), np.zeros(42, h.dtype), np.zeros(42, h.dtype)
        for v0 in range(0, 37, 16):
            z = h @ w[v0 : v0 + 16].T * inv_t
            new = np.maximum(m, z.max(1))
            total = total * np.exp(m - new) + np.exp(z - new[:, None]).sum(1)
            m = new
            here = np.flatnonzero((label >= v0) & (label < v0 + z.shape[1]))
            picked[here] = z[here, label[here] - v0]
        lse = m + np.log(total)
        logp = P.put("logp", (picked - lse).reshape(6, 7))

        adv = np.empty(6, h.dtype)
        for s in range(0, 6, 3):
            r = P["rewards"][s : s + 3]
            dev = r - (r[0] + r[1] + r[2]) / 3
            std = np.sqrt((dev * dev).sum() / (3 if P.d("biased_reward_std") else 2))
            adv[s : s + 3] = dev / (std + P.f(1e-4))
        adv = P.put("advantage", adv)
        ratio = P.put("ratio", np.exp(logp - P["old_logp"]))
        gap = P["ref_logp"] - logp
        if P.d("kl_the_other_way"):
            gap = -gap
        kl = P.put("kl", np.expm1(gap) - gap)

        a = adv[:, None]
        high = P.f(1.2 if P.d("upper_clip_as_lower") else 1.28)
        low = P.f(0.8)
        clipped = np.where(a > 0, ratio > high, ratio < low)  # where the clipped branch is the smaller one
        bound = np.where(a > 0, high, low)
        mask = np.arange(7) < lengths[:, None]
        token = np.where(mask, P.f(0.04) * kl - np.where(clipped, bound, ratio) * a, P.f(0))
        token = P.put("token_loss", token)
        P.put("output", token.sum() / int(lengths.sum()))

        d_logp = np.where(clipped, P.f(0), -a * ratio) - P.f(0.04) * np.expm1(P["ref_logp"] - logp)
        d_logp = np.where(mask, d_logp, P.f(0)).reshape(42) / int(lengths.sum())
        dh, dw = np.zeros_like(h), np.zeros_like(w)
        for r0 in range(0, 42, 8):
            rows = slice(r0, min(r0 + 8, 42))
            for v0 in range(0, 37, 16):
                words = slice(v0, min(v0 + 16, 37))
                p = np.exp(h[rows] @ w[words].T * inv_t - lse[rows, None])
                hit = label[rows, None] == np.arange(words.start, words.stop)
                dz = (hit - p) * d_logp[rows, None]
                dh[rows] += dz @ w[words] * (1 if P.d("temperature_not_in_grad_h") else inv_t)
                dw[words] += dz.T @ h[rows] * inv_t
            if P.d("weight_grad_kept_in_bf16"):
                dw = bf16(dw)
        P.put("grad:h", dh.reshape(6, 7, 12))
        P.put("grad:weight", dw)

    defects = [
        D("labels_shifted_again", "logp", "shift",
          "Tokens, which belong to their hidden states already, are shifted by one once more."),
        D("biased_reward_std", "advantage", "ddof",
          "The rewards' standard deviation in a group divides by 3 instead of 2.", ("factor", "scale")),
        D("kl_the_other_way", "kl", "sign",
          "The KL estimate has logp - ref_logp in place of ref_logp - logp.", ("swap", "function")),
        D("upper_clip_as_lower", "token_loss", "constant",
          "The ratio is clipped at 1.2 above, by the lower eps, instead of 1.28.", ("function",)),
        D("temperature_not_in_grad_h", "grad:h", "factor",
          "The gradient of the hidden states lacks the division by the temperature, 0.9.", ("scale", "constant")),
        D("weight_grad_kept_in_bf16", "grad:weight", "precision",
          "The weight's gradient is summed up over row tiles in bfloat16."),
    ]  # fmt: skip


@program("w03", variants=("f32", "f16", "f16reg"))
class gptq_lora_linear:
    """A GPTQ layer (4 bits, groups of 8, act-order) with LoRA and GELU; the port sorts rows by group, then split-K."""

    def make(g):
        return dict(
            x=randn(g, 2, 7, 32, scale=0.7),
            qweight=randint(g, -(2**31), 2**31, 4, 24).to(torch.int32),
            qzeros=randint(g, -(2**31), 2**31, 4, 3).to(torch.int32),
            scales=rand(g, 4, 24, low=0.01, high=0.05),
            g_idx=torch.randperm(32, generator=g) // 8,
            bias=randn(g, 24, scale=0.3),
            lora_a=randn(g, 4, 32, scale=0.25),
            lora_b=randn(g, 24, 4, scale=0.2),
        )

    def reference(x, qweight, qzeros, scales, g_idx, bias, lora_a, lora_b):
        nibble = 4 * torch.arange(8)
        q = ((qweight.long()[:, None, :] >> nibble[None, :, None]) & 15).reshape(32, 24)
        z = step("zeros", ((qzeros.long()[:, :, None] >> nibble) & 15).reshape(4, 24))
        w = step("weight", (q - (z[g_idx] + 1)) * scales[g_idx])
        y = step("base", x @ w + bias)
        low = step("low", x @ lora_a.T)
        delta = step("delta", low @ lora_b.T * (6.0 / 4))
        return F.gelu(y + delta, approximate="tanh")

    def loss(out):
        return (out * torch.cos(0.7 * torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape)).sum()

    def port(P: Port):
        x, g_idx, scales = P["x"].reshape(14, 32), P["g_idx"], P["scales"]
        words, zwords = P["qweight"].view(np.uint32), P["qzeros"].view(np.uint32)
        z = np.empty((4, 24), np.int64)
        column_of = (0, 2, 4, 6, 1, 3, 5, 7) if P.d("zeros_in_awq_order") else range(8)
        for i, c in enumerate(column_of):
            z[:, c::8] = (zwords >> np.uint32(4 * i)) & np.uint32(15)
        z = P.put("zeros", z)

        w = np.empty((32, 24), x.dtype)
        one = 0 if P.d("zero_points_without_one") else 1
        for k in range(32):
            code = ((words[k // 8] >> np.uint32(4 * (k % 8))) & np.uint32(15)).astype(np.int64)
            group = k // 8 if P.d("act_order_ignored") else g_idx[k]
            w[k] = (code - z[group] - one).astype(x.dtype) * scales[group]
        w = P.put("weight", w)

        order = np.argsort(g_idx, kind="stable")  # rows of a group together
        acc = np.tile(P["bias"], (14, 1))
        for k0 in range(0, 32, 8):
            rows = order[k0 : k0 + 8]
            acc = acc + x[:, rows] @ w[rows]
            if P.d("sums_in_half"):
                acc = acc.astype(np.float16).astype(x.dtype)
        y = P.put("base", acc.reshape(2, 7, 24)).reshape(14, 24)

        la, lb = P["lora_a"], P["lora_b"]
        low = P.put("low", np.einsum("mk,rk->mr", x, la).reshape(2, 7, 4)).reshape(14, 4)
        s = P.f(6 / math.sqrt(4) if P.d("scale_of_rslora") else 6 / 4)
        delta = P.put("delta", (low @ (lb * s).T).reshape(2, 7, 24)).reshape(14, 24)

        # tanh GELU as u * sigmoid(2 c (u + 0.044715 u^3))
        u = y + delta
        c = 2 * math.sqrt(2 / math.pi)
        sig = 1 / (1 + np.exp(-c * (u + 0.044715 * u * u * u)))
        P.put("output", (u * sig).reshape(2, 7, 24))

        g = P.f(np.cos(0.7 * np.arange(14 * 24))).reshape(14, 24)
        du = g * (sig + u * sig * (1 - sig) * c * (1 + 3 * 0.044715 * u * u))
        s = P.f(6 / 4)
        da = np.zeros_like(la)
        for b in range(2):  # a micro-batch each
            rows = slice(7 * b, 7 * b + 7)
            part = (du[rows] @ lb).T @ x[rows] * s
            da = part if P.d("second_batch_overwrites_grad") else da + part
        P.put("grad:lora_a", da)
        P.put("grad:lora_b", du.T @ low * s)

    defects = [
        D("zeros_in_awq_order", "zeros", "permute",
          "Packed zero points are unpacked in AWQ's interleaved order of nibbles instead of GPTQ's.",
          ("layout", "swap")),
        D("zero_points_without_one", "weight", "constant",
          "The one that GPTQ's format takes off the zero points is not added again.", ("drop_term",)),
        D("act_order_ignored", "weight", "permute",
          "Rows take their group's scale and zero point by k // 8 instead of by g_idx.", ("layout", "swap", "other")),
        D("sums_in_half", "base", "precision", "Partial sums over K are kept in float16."),
        D("scale_of_rslora", "delta", "scale", "LoRA is scaled by alpha / sqrt(r) instead of alpha / r.",
          ("factor", "constant", "function")),
        D("second_batch_overwrites_grad", "grad:lora_a", "drop_term",
          "The second micro-batch's gradient overwrites the first one's instead of being added.",
          ("truncate", "stale", "race", "zero", "mask")),
    ]  # fmt: skip
