"""Parts of language and speech models: paged attention, a state space scan, connectionist temporal classification."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, silu, step


@program("s01", variants=("bf16", "f32", "bf16reg"), wide=("inv_freq", "lse"))
class paged_decode_attention:
    """One decoded token of three sequences over a paged cache: partial rotation, NTK-aware base, 6 heads on 2 of keys.

    The port goes through a sequence's block table in partitions of two blocks, and merges the partitions.
    """

    def make(g):
        return dict(
            x=randn(g, 3, 20),
            w_qkv=randn(g, 160, 20, scale=0.3),
            bias=randn(g, 160, scale=0.3),
            key_cache=randn(g, 15, 5, 2, 16),
            value_cache=randn(g, 15, 2, 16, 5),
            block_table=torch.randperm(15, generator=g).view(3, 5),
            lengths=torch.tensor([13, 7, 21]),
            w_o=randn(g, 20, 96, scale=0.2),
        )

    def reference(x, w_qkv, bias, key_cache, value_cache, block_table, lengths, w_o):
        base = 10000 * 4 ** (12 / 10)
        inv_freq = step("inv_freq", base ** (-torch.arange(0, 12, 2, dtype=x.dtype) / 12))
        position = lengths - 1
        angles = (position[:, None] * inv_freq)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def rotated(y):
            a, b, rest = y.split([6, 6, 4], -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

        qkv = step("qkv", x @ w_qkv.T + bias).view(3, 10, 16)
        q = step("q_rope", rotated(qkv[:, :6]))
        k = step("k_rope", rotated(qkv[:, 6:8]))
        block = block_table.gather(1, position[:, None] // 5)[:, 0]
        slot = position % 5
        keys = step("keys", key_cache.index_put((block, slot), k))
        at = (block[:, None, None], torch.arange(2)[:, None], torch.arange(16), slot[:, None, None])
        values = step("values", value_cache.index_put(at, qkv[:, 8:]))
        k = keys[block_table].flatten(1, 2)
        v = values[block_table].permute(0, 1, 4, 2, 3).flatten(1, 2)
        seen = (torch.arange(25) < lengths[:, None])[:, None]
        scores = torch.einsum("bgnd,bsgd->bgns", q.view(3, 2, 3, 16), k).flatten(1, 2) / 4
        scores = step("scores", torch.where(seen, scores, 0.0))
        lse = step("lse", scores.masked_fill(~seen, -math.inf).logsumexp(-1))
        p = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
        context = step("context", torch.einsum("bgns,bsgd->bgnd", p.view(3, 2, 3, 25), v).flatten(1, 2))
        return context.flatten(1) @ w_o.T

    def port(P: Port):
        x, table, lengths = P["x"], P["block_table"], P["lengths"]
        rotary, ntk = 12, 4.0
        base = 10000 * (ntk if P.d("ntk_without_exponent") else ntk ** (rotary / (rotary - 2)))
        inv_freq = P.put("inv_freq", P.f([1 / base ** (2 * i / rotary) for i in range(rotary // 2)]))
        first = 4 if P.d("last_dims_rotated") else 0
        back = -1 if P.d("query_rotated_back") else 1

        def rotated(y, way):
            out = y.copy()
            for b in range(3):
                for i in range(6):
                    angle = (lengths[b] - 1) * inv_freq[i]
                    c, s = np.cos(angle), way * np.sin(angle)
                    one, two = first + i, first + i + 6
                    out[b, :, one] = y[b, :, one] * c - y[b, :, two] * s
                    out[b, :, two] = y[b, :, one] * s + y[b, :, two] * c
            return out

        qkv = P.put("qkv", np.stack([P["w_qkv"] @ row + P["bias"] for row in x]))
        heads = qkv.reshape(3, 10, 16)
        q = P.put("q_rope", rotated(heads[:, :6], back))
        k = P.put("k_rope", rotated(heads[:, 6:8], 1))
        keys, values = P["key_cache"], P["value_cache"]
        for b in range(3):
            block, slot = divmod(int(lengths[b]) - 1, 5)
            keys.reshape(75, 2, 16)[table[b, block] * 5 + slot] = k[b]
            if not (P.d("first_slot_of_block_not_written") and slot == 0):
                values[table[b, block], :, :, slot] = heads[b, 8:]
        keys, values = P.put("keys", keys), P.put("values", values)

        scores = np.zeros((3, 6, 25), x.dtype)
        lse, context = np.zeros((3, 6), x.dtype), np.zeros((3, 6, 16), x.dtype)
        scale = P.f(1 / math.sqrt(rotary if P.d("scale_of_rotary_dims") else 16))
        stride = 4 if P.d("table_stride_of_four") else 5
        for b in range(3):
            for h in range(6):
                g = h % 2 if P.d("key_heads_in_turn") else h // 3
                for s in range(lengths[b]):
                    block = table.reshape(-1)[b * stride + s // 5]
                    scores[b, h, s] = (q[b, h] * keys[block, s % 5, g]).sum() * scale
        scores = P.put("scores", scores)
        for b in range(3):
            n = int(lengths[b])
            for h in range(6):
                parts = []
                for s0 in range(0, n, 10):
                    s1 = min(s0 + 10, n)
                    if P.d("last_block_whole"):
                        s1 = -(-s1 // 5) * 5
                    m = scores[b, h, s0:s1].max()
                    parts.append((m, np.exp(scores[b, h, s0:s1] - m).sum()))
                top = max(m for m, _ in parts)
                lse[b, h] = top + np.log(sum(np.exp(m - top) * total for m, total in parts))
        lse = P.put("lse", lse)
        for b in range(3):
            n = int(lengths[b])
            for h in range(6):
                parts = []
                for s0 in range(0, n, 10):
                    s = np.arange(s0, min(s0 + 10, n))
                    m = scores[b, h, s].max()
                    e = np.exp(scores[b, h, s] - m)
                    held = values[table[b, s // 5]]
                    if P.d("values_read_slots_first"):
                        held = held.reshape(len(s), 2, 5, 16).swapaxes(2, 3)
                    held = held[np.arange(len(s)), h // 3, :, s % 5]
                    parts.append((m, e.sum(), e @ held / e.sum()))
                for m, total, part in parts:
                    weight = 1 / P.f(len(parts)) if P.d("partitions_averaged") else total * np.exp(m - lse[b, h])
                    context[b, h] += weight * part
        context = P.put("context", context)
        P.put("output", context.reshape(3, 96) @ P["w_o"].T)

    defects = [
        D(
            "ntk_without_exponent",
            "inv_freq",
            "constant",
            "the base is multiplied by 4 and not by 4 to the power of 12 / 10",
            accept=("factor", "function", "scale", "drop_term"),
        ),
        D("query_rotated_back", "q_rope", "sign", "queries are rotated by the negative angle", accept=("transpose",)),
        D(
            "last_dims_rotated",
            "q_rope",
            "shift",
            "the last 12 of 16 columns are rotated and not the first",
            accept=("permute", "mask"),
        ),
        D(
            "first_slot_of_block_not_written",
            "values",
            "stale",
            "a value that begins a new block isn't written: the slot keeps what was there",
            accept=("drop_term", "truncate", "mask"),
        ),
        D(
            "key_heads_in_turn",
            "scores",
            "permute",
            "head h reads keys of head h % 2 and not h // 3",
            accept=("layout", "swap"),
        ),
        D(
            "table_stride_of_four",
            "scores",
            "layout",
            "the block table is read as rows of 4 and not of 5",
            accept=("shift", "permute", "other"),
        ),
        D(
            "scale_of_rotary_dims",
            "scores",
            "scale",
            "scores are divided by the root of 12 rotated columns, not 16",
            accept=("factor", "constant"),
        ),
        D("last_block_whole", "lse", "mask", "empty slots of the last block are in the sum with a score of zero"),
        D(
            "values_read_slots_first",
            "context",
            "transpose",
            "a block of values is read with slots before columns",
            accept=("layout",),
        ),
        D(
            "partitions_averaged",
            "context",
            "factor",
            "partitions are averaged, without the weight of their sums",
            accept=("drop_term", "scale", "other"),
        ),
    ]


@program("s02", variants=("bf16", "f32", "bf16reg"), wide=("dt", "log_decay", "state"))
class ssd_scan:
    """Mamba-2's mixer: a causal depthwise convolution, a state space scan with 4 heads in 2 groups, a gated norm.

    The reference steps through 21 tokens; the port has the dual form in chunks of 8, the last one of 5.
    """

    def make(g):
        return dict(
            xbc=randn(g, 2, 21, 56),
            z=randn(g, 2, 21, 24),
            dt_raw=randn(g, 2, 21, 4, scale=1.2),
            conv_w=randn(g, 56, 4, scale=0.5),
            conv_b=randn(g, 56, scale=0.2),
            conv_state=randn(g, 2, 3, 56),
            dt_bias=randn(g, 4, scale=0.5),
            a_log=rand(g, 4, low=-1.5, high=0.3),
            d=randn(g, 4, shift=0.8),
            s0=randn(g, 2, 4, 6, 8, scale=0.5),
            gamma=randn(g, 24, scale=0.2, shift=1.0),
            w_out=randn(g, 14, 24, scale=0.25),
        )

    def reference(xbc, z, dt_raw, conv_w, conv_b, conv_state, dt_bias, a_log, d, s0, gamma, w_out):
        long = torch.cat([conv_state, xbc], 1)
        conv = F.conv1d(long.transpose(1, 2), conv_w[:, None], conv_b, groups=56).transpose(1, 2)
        xbc = step("conv", F.silu(conv))
        x, b, c = xbc.split([24, 16, 16], -1)
        x = x.unflatten(-1, (4, 6))
        b = b.unflatten(-1, (2, 8)).repeat_interleave(2, 2)
        c = c.unflatten(-1, (2, 8)).repeat_interleave(2, 2)
        dt = step("dt", F.softplus(dt_raw + dt_bias).clamp(0.05, 2.0))
        log_decay = step("log_decay", -dt * a_log.exp())
        s, y = s0, []
        for t in range(21):
            write = torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], b[:, t])
            s = log_decay[:, t].exp()[..., None, None] * s + write
            y.append(torch.einsum("bhpn,bhn->bhp", s, c[:, t]))
        y = step("y", torch.stack(y, 1))
        y = step("skipped", y + d[:, None] * x)
        y = step("gated", y.flatten(2) * F.silu(z))
        y = y.unflatten(-1, (2, 12))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        normed = step("normed", y.flatten(2) * gamma)
        return {"output": normed @ w_out.T, "state": s}

    def port(P: Port):
        xbc, z = P["xbc"], P["z"]
        T, C = 21, 8
        w, history = P["conv_w"], P["conv_state"]
        conv = np.empty_like(xbc)
        for n in range(2):
            window = np.zeros_like(history[n]) if P.d("conv_starts_empty") else history[n].copy()
            for t in range(T):
                total = P["conv_b"].copy()
                for j in range(4):
                    tap = w[:, j] if P.d("taps_from_the_newest") else w[:, 3 - j]
                    total += tap * (xbc[n, t] if j == 0 else window[3 - j])
                conv[n, t] = total
                window = np.concatenate([window[1:], xbc[n, t : t + 1]])
        conv = P.put("conv", silu(conv))
        x = conv[..., :24].reshape(2, T, 4, 6)
        b, c = conv[..., 24:40].reshape(2, T, 2, 8), conv[..., 40:].reshape(2, T, 2, 8)
        raw = P["dt_raw"] + P["dt_bias"]
        dt = np.exp(raw) if P.d("dt_by_exp") else np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw)))
        dt = P.put("dt", np.minimum(np.maximum(dt, P.f(0.05)), 2))
        log_decay = P.put("log_decay", dt * -np.exp(P["a_log"]))

        y, end = np.zeros_like(x), np.empty_like(P["s0"])
        into, out_of = (c, b) if P.d("b_and_c_exchanged") else (b, c)
        stop = T // C * C if P.d("last_chunk_left_out") else T
        for n in range(2):
            for h in range(4):
                s = P["s0"][n, h]
                for t0 in range(0, stop, C):
                    at = slice(t0, min(t0 + C, T))
                    run = np.cumsum(log_decay[n, at, h])
                    bb, cc, xx = into[n, at, h // 2], out_of[n, at, h // 2], x[n, at, h]
                    L = len(run)
                    between = np.zeros((L, L), x.dtype)
                    for i in range(L):
                        for j in range(i + 1):
                            before = run[j] - log_decay[n, t0 + j, h] if P.d("decay_of_own_token_too") else run[j]
                            between[i, j] = np.exp(run[i] - before)
                    weighted = xx * dt[n, at, h, None]
                    y[n, at, h] = (cc @ bb.T * between) @ weighted + np.exp(run)[:, None] * (cc @ s.T)
                    end[n, h] = s
                    held = xx if P.d("no_dt_in_carried_state") else weighted
                    s = np.exp(run[-1]) * s + (held * np.exp(run[-1] - run)[:, None]).T @ bb
                if not P.d("state_before_last_chunk"):
                    end[n, h] = s
        y = P.put("y", y)
        d = P["d"]
        flat = np.tile(d, 6) if P.d("skip_of_heads_in_turn") else np.repeat(d, 6)
        y = P.put("skipped", y + (flat * x.reshape(2, T, 24)).reshape(y.shape))
        y = P.put("gated", y.reshape(2, T, 24) * silu(z))
        normed = np.empty_like(y)
        width = 24 if P.d("norm_over_both_groups") else 12
        for g0 in range(0, 24, width):
            part = y[..., g0 : g0 + width]
            mean = sum(part[..., i] * part[..., i] for i in range(width)) / width
            normed[..., g0 : g0 + width] = part / np.sqrt(mean + P.f(1e-5))[..., None]
        normed = P.put("normed", normed * P["gamma"])
        P.put("output", normed @ P["w_out"].T)
        P.put("state", end)

    defects = [
        D("taps_from_the_newest", "conv", "flip", "the convolution's first weight meets the newest token"),
        D(
            "conv_starts_empty",
            "conv",
            "zero",
            "the three tokens before the first one are taken for zero",
            accept=("stale", "drop_term", "truncate", "mask"),
        ),
        D("dt_by_exp", "dt", "function", "the step is exp and not softplus", accept=("drop_term",)),
        D("b_and_c_exchanged", "y", "swap", "the projections B and C are taken for each other", accept=("permute",)),
        D(
            "decay_of_own_token_too",
            "y",
            "shift",
            "in a chunk a token's write decays once already when it is written",
            accept=("factor", "other"),
        ),
        D(
            "no_dt_in_carried_state",
            "y",
            "drop_term",
            "what a chunk passes on isn't multiplied by the step",
            accept=("factor", "scale", "stale", "other"),
        ),
        D(
            "last_chunk_left_out",
            "y",
            "truncate",
            "only whole chunks are gone through: the last 5 tokens are zero",
            accept=("zero", "mask"),
        ),
        D(
            "skip_of_heads_in_turn",
            "skipped",
            "layout",
            "column c takes D of head c % 4 and not c // 6",
            accept=("permute", "transpose"),
        ),
        D(
            "norm_over_both_groups",
            "normed",
            "axis",
            "the mean square is over all 24 columns and not over groups of 12",
            accept=("factor",),
        ),
        D(
            "state_before_last_chunk",
            "state",
            "stale",
            "the state that is kept is the one before the last chunk",
            accept=("truncate", "shift"),
        ),
    ]


@program("s03", variants=("f32", "bf16"), wide=("log_probs", "alpha", "log_scale", "nll", "per_label", "output"))
class ctc_loss:
    """Connectionist temporal classification of three utterances, a repeated label among them, and its gradient.

    The reference has scaled probabilities and automatic differentiation; the port works with logarithms, forwards and
    backwards. Labels are concatenated; 0 is the blank.
    """

    def make(g):
        labels = randint(g, 1, 7, 9)
        labels[1] = labels[2] = 3
        labels[5] = labels[4]
        return dict(
            logits=randn(g, 3, 11, 7, scale=1.3),
            labels=labels,
            frames=torch.tensor([11, 10, 8]),
            counts=torch.tensor([4, 3, 2]),
        )

    def reference(logits, labels, frames, counts):
        log_probs = step("log_probs", logits.log_softmax(-1))
        s = torch.arange(9)
        start = counts.cumsum(0) - counts
        place = (start[:, None] + s // 2).clamp(max=8)
        valid = s < 2 * counts[:, None] + 1
        states = torch.where((s % 2 == 1) & valid, labels[place], 0)
        skip = (states != 0) & (states != F.pad(states, (2, 0))[:, :9])
        emitted = log_probs.exp().gather(2, states[:, None].expand(3, 11, 9)) * valid[:, None]

        def moved(a, skip, emitted):
            return (a + F.pad(a, (1, 0))[..., :9] + skip * F.pad(a, (2, 0))[..., :9]) * emitted

        first = (s == 0).to(logits.dtype).expand(3, 9)
        a, alpha = first, []
        for t in range(11):
            new = moved(a, skip, emitted[:, t])
            a = torch.where((t < frames)[:, None], new / new.sum(-1, keepdim=True), a)
            alpha.append(a)
        alpha = step("alpha", torch.stack(alpha, 1))
        total = moved(torch.cat([first[:, None], alpha[:, :-1]], 1), skip[:, None], emitted).sum(-1)
        inside = torch.arange(11) < frames[:, None]
        log_scale = step("log_scale", torch.where(inside, total, 1.0).log())
        final = alpha[:, -1].gather(1, 2 * counts[:, None] - torch.arange(2)).sum(-1)
        nll = step("nll", -log_scale.sum(-1) - final.log())
        per_label = step("per_label", nll / counts)
        return per_label.mean()

    def loss(output):
        return output

    def port(P: Port):
        logits, labels, frames, counts = P["logits"], P["labels"], P["frames"], P["counts"]
        B, T, V = 3, 11, 7
        axis = 1 if P.d("softmax_over_frames") else 2
        top = logits.max(axis, keepdims=True)
        log_probs = P.put("log_probs", logits - top - np.log(np.exp(logits - top).sum(axis, keepdims=True)))
        NONE = P.f(-np.inf)
        starts = [0, 3, 6] if P.d("label_offsets_of_three") else [0, 4, 7]
        alpha, log_scale = np.zeros((B, T, 9), logits.dtype), np.zeros((B, T), logits.dtype)
        states, jump = [], []
        for b in range(B):
            line = [0]
            for n in range(counts[b]):
                line += [int(labels[starts[b] + n]), 0]
            states.append(line)
            equal_too = P.d("skip_between_equal_labels")
            jump.append([i > 1 and line[i] != 0 and (equal_too or line[i] != line[i - 2]) for i in range(len(line))])
        for b in range(B):
            S = len(states[b])
            la = np.full(S, NONE)
            for t in range(frames[b]):
                new = np.full(S, NONE)
                for i in range(S):
                    if t == 0:
                        one_start = P.d("starts_with_blank_only")
                        value = P.f(0) if i == 0 or (i == 1 and not one_start) else NONE
                    else:
                        value = la[i]
                        if i > 0:
                            value = np.logaddexp(value, la[i - 1])
                        if jump[b][i]:
                            value = np.logaddexp(value, la[i - 2])
                    new[i] = value + log_probs[b, t, states[b][i]]
                    if P.d("alpha_in_half"):
                        new[i] = np.float16(new[i])
                m = new.max()
                log_scale[b, t] = m + np.log(np.exp(new - m).sum())
                la = new - log_scale[b, t]
                alpha[b, t, :S] = np.exp(la)
            alpha[b, frames[b] :] = alpha[b, frames[b] - 1]
        alpha = P.put("alpha", alpha)
        if P.d("scale_in_bits"):
            log_scale = log_scale / P.f(math.log(2))
        log_scale = P.put("log_scale", log_scale)
        nll = np.empty(B, logits.dtype)
        for b in range(B):
            n = int(frames[b]) - (1 if P.d("last_frame_not_in_sum") else 0)
            S = len(states[b])
            nll[b] = -sum(log_scale[b, t] for t in range(n)) - np.log(alpha[b, -1, S - 1] + alpha[b, -1, S - 2])
        nll = P.put("nll", nll)
        per_label = P.put("per_label", nll / (frames if P.d("divided_by_frames") else counts).astype(logits.dtype))
        P.put("output", (per_label[0] + per_label[1] + per_label[2]) / 3)

        grad = np.zeros_like(logits)
        for b in range(B):
            S, n = len(states[b]), int(frames[b])
            lb = np.full(S, NONE)
            lb[S - 1] = lb[S - 2] = 0
            for t in range(n - 1, -1, -1):
                if t < n - 1:
                    e = lb + log_probs[b, t + 1, states[b]]
                    for i in range(S):
                        value = e[i]
                        if i + 1 < S:
                            value = np.logaddexp(value, e[i + 1])
                        if i + 2 < S and jump[b][i + 2]:
                            value = np.logaddexp(value, e[i + 2])
                        lb[i] = value
                with np.errstate(all="ignore"):
                    share = np.log(alpha[b, t, :S]) + lb
                share = np.exp(share - share.max())
                share = share / share.sum()
                grad[b, t] = np.exp(log_probs[b, t])
                for i in range(S):
                    grad[b, t, states[b][i]] -= share[i]
            grad[b] = grad[b] / P.f(3 * counts[b])
            if P.d("gradient_of_log_likelihood"):
                grad[b] = -grad[b]
        if P.d("gradient_frames_first"):
            grad = np.ascontiguousarray(grad.swapaxes(0, 1)).reshape(B, T, V)
        P.put("grad:logits", grad)

    defects = [
        D("softmax_over_frames", "log_probs", "axis", "the softmax is over frames and not over labels"),
        D(
            "label_offsets_of_three",
            "alpha",
            "shift",
            "an utterance's labels begin at 3 b and not behind those of the ones before",
            accept=("layout", "constant", "permute"),
        ),
        D(
            "skip_between_equal_labels",
            "alpha",
            "mask",
            "the blank between two equal labels can be skipped",
            accept=("other",),
        ),
        D(
            "starts_with_blank_only",
            "alpha",
            "zero",
            "the first label's state is zero at the first frame",
            accept=("mask", "drop_term"),
        ),
        D("alpha_in_half", "alpha", "precision", "logarithms of the forward sum are kept in float16"),
        D(
            "scale_in_bits",
            "log_scale",
            "scale",
            "logarithms to the base of two",
            accept=("factor", "constant", "function"),
        ),
        D(
            "last_frame_not_in_sum",
            "nll",
            "truncate",
            "the last frame's logarithm is left out of the sum",
            accept=("drop_term", "shift", "mask"),
        ),
        D(
            "divided_by_frames",
            "per_label",
            "swap",
            "divided by the number of frames and not of labels",
            accept=("factor", "other", "scale"),
        ),
        D(
            "gradient_of_log_likelihood",
            "grad:logits",
            "sign",
            "the gradient has the other sign",
            accept=("factor", "scale"),
        ),
        D(
            "gradient_frames_first",
            "grad:logits",
            "transpose",
            "the gradient is written with frames before utterances",
            accept=("layout", "permute"),
        ),
    ]
