"""Parts of language models: gated MLP, windowed attention with sinks, mixture of experts, retention."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randn, sigmoid, silu, step


@program("q01")
class swiglu_mlp:
    """RMSNorm, SwiGLU and a residual; the port goes over the hidden units in tiles of 16."""

    def make(g):
        return dict(
            x=randn(g, 3, 11, 24, scale=0.9, shift=0.2),
            gamma=randn(g, 24, scale=0.25, shift=1.0),
            w_gate=randn(g, 44, 24, scale=0.3),
            w_up=randn(g, 44, 24, scale=0.3),
            w_down=randn(g, 24, 44, scale=0.2),
        )

    def reference(x, gamma, w_gate, w_up, w_down):
        n = step("norm", x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gamma)
        gate = step("gate", n @ w_gate.T)
        up = step("up", n @ w_up.T)
        a = step("act", F.silu(gate) * up)
        return x + a @ w_down.T

    def port(P: Port):
        x, gamma = P["x"].reshape(33, 24), P["gamma"]
        wg, wu, wd = P["w_gate"], P["w_up"], P["w_down"]
        n = np.empty_like(x)
        for r in range(33):
            row = x[r]
            if P.d("layer_norm_instead"):
                row = row - row.sum() / 24
            ms = (row * row).sum() / 24
            if P.d("gamma_plus_one"):
                n[r] = row / np.sqrt(ms + P.f(1e-5)) * (1 + gamma)
            else:
                n[r] = row / np.sqrt(ms + P.f(1e-5)) * gamma
        n = P.put("norm", n.reshape(3, 11, 24)).reshape(33, 24)

        gate, up = np.zeros((33, 44), x.dtype), np.zeros((33, 44), x.dtype)
        for t in range(0, 44, 16):
            s = slice(t, min(t + 16, 44))
            src = n
            if P.d("gate_first_rows_reused") and t == 32:
                src = np.concatenate([n[:16], n[:16], n[32:]])  # the row tile was not advanced
            gate[:, s] = src @ wg[s].T
            up[:, s] = n @ wu[s].T
        gate = P.put("gate", gate.reshape(3, 11, 44)).reshape(33, 44)
        up = P.put("up", up.reshape(3, 11, 44)).reshape(33, 44)

        if P.d("gate_up_swapped"):
            a = silu(up) * gate
        elif P.d("gelu_tanh_for_silu"):
            a = gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
        elif P.d("sigmoid_without_input"):
            a = sigmoid(gate) * up
        else:
            a = silu(gate) * up
        a = P.put("act", a.reshape(3, 11, 44)).reshape(33, 44)

        acc = np.zeros((33, 24), x.dtype)
        lost = np.random.default_rng(1).random((33, 24)) < 0.04
        if P.d("down_read_as_44_by_24"):
            wd = np.ascontiguousarray(wd).reshape(44, 24).T
        for t in range(0, 32 if P.d("hidden_tail_left_out") else 44, 16):
            part = a[:, t : t + 16] @ wd[:, t : t + 16].T
            if P.d("split_k_overwrites") and t == 32:  # a plain store where an atomic add should be
                acc = np.where(lost, part, acc + part)
            else:
                acc = acc + part
            if P.d("accumulator_in_bf16"):
                acc = bf16(acc)
        res = n if P.d("residual_of_normed") else x
        P.put("output", (res + acc).reshape(3, 11, 24))

    defects = [
        D(
            "layer_norm_instead",
            "norm",
            "function",
            "the mean is subtracted: LayerNorm in place of RMSNorm",
            accept=("other",),
        ),
        D(
            "gamma_plus_one",
            "norm",
            "constant",
            "multiplied by 1 + gamma instead of gamma, as for Gemma's checkpoints",
            accept=("factor", "other"),
        ),
        D(
            "gate_first_rows_reused",
            "gate",
            "stale",
            "for the last hidden tile, rows 16 to 31 get the products of rows 0 to 15",
            accept=("layout", "shift"),
        ),
        D("gate_up_swapped", "act", "swap", "SiLU is taken of up and multiplied by gate"),
        D("gelu_tanh_for_silu", "act", "function", "GELU (tanh) in place of SiLU"),
        D(
            "sigmoid_without_input",
            "act",
            "factor",
            "sigmoid(gate) * up: the factor gate is missing",
            accept=("function",),
        ),
        D(
            "hidden_tail_left_out",
            "output",
            "truncate",
            "hidden units 32 to 43, less than a full tile, are not summed",
            accept=("drop_term",),
        ),
        D("down_read_as_44_by_24", "output", "layout", "w_down's memory is read as 44 x 24", accept=("transpose",)),
        D(
            "split_k_overwrites",
            "output",
            "race",
            "4% of the outputs keep only the last split's partial sum",
            accept=("other", "truncate", "drop_term", "stale"),
        ),
        D("accumulator_in_bf16", "output", "precision", "the partial sums are kept in bfloat16"),
        D(
            "residual_of_normed",
            "output",
            "other",
            "the residual adds the normed x instead of x",
            accept=("swap", "stale"),
        ),
    ]


@program("q02", variants=("f32", "bf16", "f16reg"), wide=("lse", "sinks"))
class window_attention_sinks:
    """Sliding-window attention with a learned sink logit a head and grouped keys; the port is an online softmax in tiles."""

    def make(g):
        return dict(
            q=randn(g, 2, 4, 16, 16, scale=1.3),
            k=randn(g, 2, 2, 16, 16, scale=1.3),
            v=randn(g, 2, 2, 16, 16),
            sinks=randn(g, 4, scale=0.8, shift=0.7),
            wo=randn(g, 64, 64, scale=0.12),
        )

    def reference(q, k, v, sinks, wo):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        s = step("scores", q @ k.transpose(-1, -2) / 4)
        i = torch.arange(16, device=q.device)
        far = i[:, None] - i[None, :]
        s = s.masked_fill((far < 0) | (far >= 6), float("-inf"))
        lse = step("lse", torch.logaddexp(torch.logsumexp(s, -1), sinks[None, :, None].expand(2, 4, 16)))
        ctx = step("context", torch.exp(s - lse[..., None]) @ v)
        return ctx.transpose(1, 2).reshape(2, 16, 64) @ wo.T

    def port(P: Port):
        q, k, v, sinks, wo = P["q"], P["k"], P["v"], P["sinks"], P["wo"]
        s = np.zeros((2, 4, 16, 16), q.dtype)
        scale = P.f(1 / 8) if P.d("scale_of_model_width") else P.f(0.25)
        for b in range(2):
            for h in range(4):
                kv = h % 2 if P.d("kv_heads_interleaved") else h // 2
                s[b, h] = np.einsum("id,jd->ij", q[b, h] * scale, k[b, kv])
        s = P.put("scores", s)

        width = 7 if P.d("window_one_wider") else 6
        lse = np.zeros((2, 4, 16), q.dtype)
        ctx = np.zeros((2, 4, 16, 16), q.dtype)
        for b in range(2):
            for h in range(4):
                kv = h // 2
                sink = sinks[h // 2] if P.d("sink_of_kv_head") else sinks[h]
                for i0 in range(0, 16, 8):
                    rows = np.arange(i0, i0 + 8)
                    m = np.full(8, -np.inf, q.dtype)
                    den = np.zeros(8, q.dtype)
                    acc = np.zeros((8, 16), q.dtype)
                    first = max(0, (i0 - width + 1) // 4 * 4)
                    if P.d("first_key_tile_skipped") and i0:
                        first += 4
                    for j0 in range(first, i0 + 8, 4):
                        cols = np.arange(j0, j0 + 4)
                        far = rows[:, None] - cols[None]
                        seen = (far >= 0) & (far < width)
                        if P.d("diagonal_tile_unmasked") and j0 >= i0:
                            seen = far < width
                        sij = np.where(seen, s[b, h, i0 : i0 + 8, j0 : j0 + 4], -np.inf)
                        new = np.maximum(m, sij.max(1))
                        base = np.where(np.isfinite(new), new, 0).astype(q.dtype)
                        p = np.exp(sij - base[:, None])
                        fix = np.exp(m - base)
                        den = den * fix + p.sum(1)
                        if P.d("probabilities_in_bf16"):
                            p = bf16(p)
                        vt = v[b, kv, j0 : j0 + 4]
                        if P.d("value_buffer_not_swapped") and j0 > first and (j0 - first) // 4 % 2:
                            vt = v[b, kv, j0 - 4 : j0]
                        if not P.d("accumulator_not_rescaled"):
                            acc = acc * fix[:, None]
                        acc = acc + p @ vt
                        m = new
                    if not P.d("sink_not_in_sum"):
                        new = np.maximum(m, sink)
                        den = den * np.exp(m - new) + np.exp(sink - new)
                        acc = acc * np.exp(m - new)[:, None]
                        m = new
                    lse[b, h, rows] = m + np.log(den)
                    ctx[b, h, rows] = acc / den[:, None]
        P.put("lse", lse)
        ctx = P.put("context", ctx)
        if P.d("heads_not_moved_back"):
            flat = ctx.reshape(2, 16, 64)
        else:
            flat = np.concatenate([ctx[:, h] for h in range(4)], -1)
        P.put("output", flat @ (wo if P.d("projection_transposed") else wo.T))

    defects = [
        D(
            "scale_of_model_width",
            "scores",
            "scale",
            "divided by sqrt(64) instead of sqrt(16)",
            accept=("constant", "factor"),
        ),
        D(
            "kv_heads_interleaved",
            "scores",
            "permute",
            "query head h uses key head h % 2 instead of h // 2",
            accept=("layout",),
        ),
        D("window_one_wider", "lse", "shift", "the window takes 7 keys instead of 6", accept=("mask", "constant")),
        D(
            "first_key_tile_skipped",
            "lse",
            "truncate",
            "for queries 8 to 15 the window's first tile of 4 keys is skipped",
            accept=("mask", "drop_term", "shift"),
        ),
        D("diagonal_tile_unmasked", "lse", "mask", "keys after the query are seen within its own tile"),
        D("sink_not_in_sum", "lse", "drop_term", "the sink's exp is not in the sum", accept=("mask",)),
        D(
            "sink_of_kv_head",
            "lse",
            "shift",
            "head h uses the sink at h // 2 instead of h",
            accept=("permute", "layout", "other", "stale"),
        ),
        D(
            "probabilities_in_bf16",
            "context",
            "precision",
            "probabilities are rounded to bfloat16 before the product with v",
        ),
        D(
            "value_buffer_not_swapped",
            "context",
            "stale",
            "every second key tile uses the values of the tile before",
            accept=("shift", "layout"),
        ),
        D(
            "accumulator_not_rescaled",
            "context",
            "factor",
            "the accumulator isn't multiplied by exp(old max - new max)",
            accept=("stale",),
        ),
        D(
            "heads_not_moved_back",
            "output",
            "layout",
            "context (heads, tokens, 16) is viewed as (tokens, 64) without moving heads",
            accept=("permute", "transpose"),
        ),
        D("projection_transposed", "output", "transpose", "the 64 x 64 projection is used the other way round"),
    ]


@program("q03", variants=("f32", "bf16"), wide=("logits", "probs", "weights", "aux"))
class moe_top2_capacity:
    """Top-2 routing into 5 experts of 11 slots each, in the order of tokens, squared ReLU, and the balance loss."""

    def make(g):
        return dict(
            x=randn(g, 29, 12),
            w_router=randn(g, 5, 12, scale=0.5),
            w_expert=randn(g, 5, 12, 12, scale=0.35),
        )

    def reference(x, w_router, w_expert):
        logits = step("logits", x @ w_router.T)
        probs = step("probs", torch.softmax(logits, -1))
        experts = step("experts", probs.topk(2, -1).indices)
        w = probs.gather(1, experts)
        weights = step("weights", w / w.sum(-1, keepdim=True))
        flat = experts.reshape(-1)
        hot = F.one_hot(flat, 5)
        at = ((hot.cumsum(0) - 1) * hot).sum(-1).reshape(29, 2)
        slot = step("slot", torch.where(at < 11, at, -1))
        token = torch.arange(29).repeat_interleave(2)
        kept = slot.reshape(-1) >= 0
        buf = x.new_zeros(5, 11, 12).index_put((flat[kept], slot.reshape(-1)[kept]), x[token[kept]])
        buf = step("dispatched", buf)
        y = step("expert_out", torch.relu(torch.einsum("ecd,efd->ecf", buf, w_expert)).square())
        share = F.one_hot(experts[:, 0], 5).to(x.dtype).mean(0)
        aux = step("aux", 5 * (share * probs.mean(0)).sum())
        picked = y[experts, slot.clamp(min=0)] * (slot >= 0).to(x.dtype)[..., None]
        out = (picked * weights[..., None]).sum(1)
        return {"output": out, "total_aux": aux * 0.01}

    def port(P: Port):
        x, wr, we = P["x"], P["w_router"], P["w_expert"]
        logits = np.zeros((29, 5), x.dtype)
        for c in range(0, 12, 4):
            logits += x[:, c : c + 4] @ wr[:, c : c + 4].T
        logits = P.put("logits", bf16(logits) if P.d("router_in_bf16") else logits)
        ax = 0 if P.d("softmax_over_tokens") else 1
        e = np.exp(logits - logits.max(ax, keepdims=True))
        probs = P.put("probs", e / e.sum(ax, keepdims=True))
        order = np.argsort(-probs, axis=1, kind="stable")[:, :2]
        if P.d("second_choice_first"):
            order = order[:, ::-1]
        experts = P.put("experts", np.ascontiguousarray(order))
        w = np.stack([probs[np.arange(29), experts[:, c]] for c in range(2)], 1)
        weights = P.put("weights", w if P.d("not_renormalised") else w / (w[:, :1] + w[:, 1:]))
        count = [1] * 5 if P.d("slots_count_from_one") else [0] * 5
        slot = np.full((29, 2), -1)
        pairs = [(t, c) for t in range(29) for c in range(2)]
        if P.d("first_choices_before_second"):
            pairs = [(t, c) for c in range(2) for t in range(29)]
        for t, c in pairs:
            e = experts[t, c]
            if count[e] < 11:
                slot[t, c] = count[e]
            count[e] += 1
        slot = P.put("slot", slot)
        buf = np.zeros((5, 11, 12), x.dtype)
        for t in range(29):
            for c in range(2):
                if slot[t, c] >= 0:
                    d = t
                    if P.d("two_tokens_one_slot") and t in (5, 13, 21) and c == 0:
                        d = t + 1  # a later writer won
                    buf[experts[t, c], slot[t, c]] = x[d]
        buf = P.put("dispatched", buf)
        y = np.zeros((5, 11, 12), x.dtype)
        for i in range(4 if P.d("last_expert_never_run") else 5):
            w1 = we[i] if P.d("expert_weight_transposed") else we[i].T
            h = np.maximum(buf[i] @ w1, 0)
            y[i] = h * h
        y = P.put("expert_out", y)
        share = np.zeros(5, x.dtype)
        for t in range(29):
            share[experts[t, 0]] += P.f(1 / 29)
        aux = (share * probs.sum(0)).sum() * P.f((1 if P.d("aux_without_expert_count") else 5) / 29)
        aux = P.put("aux", aux)
        out = np.zeros((29, 12), x.dtype)
        for t in range(29):
            for c in range(2):
                if slot[t, c] < 0 and not P.d("dropped_tokens_still_added"):
                    continue
                k = 0 if P.d("first_weight_for_both") else c
                out[t] += weights[t, k] * y[experts[t, c], slot[t, c]]
        P.put("output", out)
        P.put("total_aux", P.f(aux) * P.f(0.001 if P.d("aux_coefficient") else 0.01))

    defects = [
        D("router_in_bf16", "logits", "precision", "the logits, promised in float32, are rounded to bfloat16"),
        D("softmax_over_tokens", "probs", "axis", "the softmax goes over the tokens instead of the experts"),
        D(
            "second_choice_first",
            "experts",
            "flip",
            "the two choices are in ascending order",
            accept=("permute", "swap"),
        ),
        D(
            "not_renormalised",
            "weights",
            "factor",
            "the two weights aren't divided by their sum",
            accept=("drop_term", "function"),
        ),
        D("slots_count_from_one", "slot", "shift", "slots count from 1", accept=("constant",)),
        D(
            "first_choices_before_second",
            "slot",
            "permute",
            "slots are given to all first choices before all second ones",
            accept=("other", "axis", "layout"),
        ),
        D(
            "two_tokens_one_slot",
            "dispatched",
            "race",
            "three slots hold the next token's row",
            accept=("stale", "shift", "other"),
        ),
        D(
            "expert_weight_transposed",
            "expert_out",
            "transpose",
            "the experts' 12 x 12 matrices are used the other way round",
        ),
        D("last_expert_never_run", "expert_out", "zero", "expert 4's output is zero", accept=("truncate",)),
        D("aux_without_expert_count", "aux", "scale", "the number of experts is not multiplied in", accept=("factor",)),
        D(
            "dropped_tokens_still_added",
            "output",
            "mask",
            "slot -1, dropped, reads the expert's last slot and is added",
        ),
        D(
            "first_weight_for_both",
            "output",
            "stale",
            "the second choice is weighted as the first one",
            accept=("other", "factor", "swap", "shift"),
        ),
        D("aux_coefficient", "total_aux", "constant", "0.001 instead of 0.01", accept=("scale",)),
    ]


@program("q04", variants=("f32", "bf16", "bf16reg"), wide=("state", "decay"))
class retention_chunked:
    """Retention with a decay a head, in its parallel form; the port goes through chunks of 8 with a state."""

    def make(g):
        return dict(
            q=randn(g, 2, 3, 20, 6),
            k=randn(g, 2, 3, 20, 6),
            v=randn(g, 2, 3, 20, 10),
            g=randn(g, 2, 20, 30),
            decay=rand(g, 3, low=0.75, high=0.97),
        )

    def reference(q, k, v, g, decay):
        i = torch.arange(20)
        far = i[:, None] - i[None, :]
        d = torch.where(far >= 0, decay[:, None, None] ** far.clamp(min=0), 0.0)
        o = step("retained", (q @ k.transpose(-1, -2) * 6**-0.5 * d) @ v)
        left = decay[:, None] ** (19 - i)
        state = step("state", torch.einsum("bhtk,bhtv,ht->bhkv", k, v, left))
        mean = o.mean(-1, keepdim=True)
        var = (o - mean).square().mean(-1, keepdim=True)
        n = step("normed", (o - mean) / torch.sqrt(var + 1e-3))
        y = step("output_heads", n.transpose(1, 2).reshape(2, 20, 30))
        return {"output": F.silu(g) * y, "size": state.square().sum((-1, -2))}

    def port(P: Port):
        q, k, v, gt, decay = P["q"], P["k"], P["v"], P["g"], P["decay"]
        o = np.zeros((2, 3, 20, 10), q.dtype)
        state = np.zeros((2, 3, 6, 10), q.dtype)
        scale = P.f(1.0 if P.d("scores_not_scaled") else 6**-0.5)
        for b in range(2):
            for h in range(3):
                dc = decay[2 - h] if P.d("decays_in_reverse") else decay[h]
                s = np.zeros((6, 10), q.dtype)
                held = s
                for c in range(0, 20, 8):
                    n = min(8, 20 - c)
                    i = np.arange(n)
                    qc, kc, vc = q[b, h, c : c + n], k[b, h, c : c + n], v[b, h, c : c + n]
                    far = i[:, None] - i[None]
                    low = far > 0 if P.d("diagonal_left_out") else far >= 0
                    dm = np.where(low, dc ** np.maximum(far, 0).astype(q.dtype), 0).astype(q.dtype)
                    inner = ((qc @ kc.T) * scale * dm) @ vc
                    ahead = i if P.d("cross_decay_one_less") else i + 1
                    across = (
                        (qc @ (held if P.d("state_of_chunk_before") else s))
                        * scale
                        * (dc ** ahead.astype(q.dtype))[:, None]
                    )
                    o[b, h, c : c + n] = inner + across
                    held = s
                    whole = 8 if P.d("last_chunk_decays_fully") else n
                    to_end = dc ** (n - 1 - i).astype(q.dtype)
                    s = s * (P.f(1) if P.d("state_not_decayed") else dc ** P.f(whole)) + (kc * to_end[:, None]).T @ vc
                    if P.d("state_in_bf16"):
                        s = bf16(s)
                state[b, h] = s
        o = P.put("retained", o)
        if P.d("state_kept_v_major"):
            state = np.ascontiguousarray(state.transpose(0, 1, 3, 2)).reshape(2, 3, 6, 10)
        state = P.put("state", state)
        n = np.empty_like(o)
        for b in range(2):
            for t in range(20):
                r = o[b, :, t]
                if P.d("norm_over_all_heads"):
                    mean, var = r.mean(), ((r - r.mean()) ** 2).mean()
                else:
                    mean = r.sum(1, keepdims=True) / 10
                    var = ((r - mean) ** 2).sum(1, keepdims=True) / 10
                n[b, :, t] = (r - mean) / (
                    np.sqrt(var) + P.f(1e-3) if P.d("eps_outside_root") else np.sqrt(var + P.f(1e-3))
                )
        n = P.put("normed", n)
        y = n.reshape(2, 20, 30) if P.d("heads_viewed_as_tokens") else np.concatenate([n[:, h] for h in range(3)], -1)
        y = P.put("output_heads", y)
        P.put("output", y * (sigmoid(gt) if P.d("gate_is_sigmoid") else silu(gt)))
        P.put("size", np.einsum("bhkv,bhkv->bh", state, state))

    defects = [
        D("scores_not_scaled", "retained", "scale", "1/sqrt(6) is left out", accept=("factor", "drop_term")),
        D("decays_in_reverse", "retained", "flip", "head h decays as head 2 - h", accept=("permute",)),
        D("diagonal_left_out", "retained", "mask", "a token does not see itself", accept=("shift", "drop_term")),
        D(
            "cross_decay_one_less",
            "retained",
            "shift",
            "what comes from earlier chunks decays one position too little",
            accept=("factor",),
        ),
        D(
            "state_of_chunk_before",
            "retained",
            "stale",
            "a chunk reads the state from before the previous chunk",
            accept=("shift",),
        ),
        D(
            "state_not_decayed",
            "retained",
            "factor",
            "the state isn't multiplied by decay**8 from chunk to chunk",
            accept=("drop_term",),
        ),
        D("state_in_bf16", "retained", "precision", "the state between chunks is kept in bfloat16"),
        D(
            "last_chunk_decays_fully",
            "state",
            "shift",
            "the last chunk, of 4, decays the state by 8 positions",
            accept=("factor", "constant", "truncate"),
        ),
        D(
            "state_kept_v_major",
            "state",
            "layout",
            "the state is laid out (10, 6) and read as (6, 10)",
            accept=("transpose",),
        ),
        D("norm_over_all_heads", "normed", "axis", "mean and variance are over heads and channels"),
        D("eps_outside_root", "normed", "eps", "sqrt(var) + eps instead of sqrt(var + eps)"),
        D(
            "heads_viewed_as_tokens",
            "output_heads",
            "layout",
            "(heads, tokens, 10) is viewed as (tokens, 30) without moving heads",
            accept=("permute", "transpose"),
        ),
        D("gate_is_sigmoid", "output", "function", "sigmoid(g) instead of SiLU(g)", accept=("factor",)),
    ]
