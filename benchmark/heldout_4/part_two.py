"""Graph attention, a gated delta rule, a point cloud."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, silu, step


@program("t05", variants=("f32", "bf16", "bf16reg"), wide=("s_src", "s_dst", "e", "bias", "a_src", "a_dst"))
class graph_attention:
    """300 nodes with 2200 edges in any order, one with many, some with none: four heads, their mean, and gradients.

    The port sorts edges by target, goes through a node's edges in pieces with a running maximum, and recomputes.
    """

    def make(g):
        dst = randint(g, 0, 280, 2200)
        dst[randint(g, 0, 2200, 260)] = 7
        return dict(
            x=randn(g, 300, 20, scale=0.8, shift=0.5),
            w=randn(g, 20, 48, scale=0.25),
            a_src=randn(g, 4, 12, scale=0.5),
            a_dst=randn(g, 4, 12, scale=0.5),
            bias=randn(g, 12, scale=0.2),
            src=randint(g, 5, 300, 2200),
            dst=dst,
        )

    def reference(x, w, a_src, a_dst, bias, src, dst):
        h = step("h", x @ w).view(300, 4, 12)
        s_src = step("s_src", (h * a_src).sum(-1))
        s_dst = step("s_dst", (h * a_dst).sum(-1))
        e = step("e", F.leaky_relu(s_src[src] + s_dst[dst], 0.2))
        to = dst[:, None].expand(2200, 4)
        top = torch.zeros_like(s_src).scatter_reduce(0, to, e.detach(), "amax", include_self=False)
        p = (e - top[dst]).exp()
        total = torch.zeros_like(s_src).index_add(0, dst, p)
        attention = step("attention", p / total[dst])
        agg = step("agg", torch.zeros_like(h).index_add(0, dst, attention[..., None] * h[src]))
        return F.elu(agg.mean(1) + bias)

    def loss(output):
        return output.square().sum() / 100

    def port(P: Port):
        x, w, a_src, a_dst, src, dst = P["x"], P["w"], P["a_src"], P["a_dst"], P["src"], P["dst"]
        N, E, H, C = 300, 2200, 4, 12
        h = np.empty((N, H * C), x.dtype)
        for r in range(0, N, 64):
            for c in range(0, H * C, 32):
                h[r : r + 64, c : c + 32] = x[r : r + 64] @ w[:, c : c + 32]
        h = P.put("h", h).reshape(N, H, C)
        s_src = np.stack([h[:, i] @ a_src[i] for i in range(H)], 1)
        s_dst = np.stack([h[:, i] @ a_dst[i] for i in range(H)], 1)
        s_src, s_dst = P.put("s_src", s_src), P.put("s_dst", s_dst)
        pre = s_src[src] + s_dst[dst]
        slope = P.f(0.01 if P.d("slope_of_a_hundredth") else 0.2)
        e = P.put("e", np.maximum(pre, 0) + slope * np.minimum(pre, 0))

        order = np.argsort(dst, kind="stable")
        start = np.searchsorted(dst[order], np.arange(N + 1))
        segments = [(n, order[start[n] : start[n + 1]]) for n in range(N) if start[n] < start[n + 1]]
        attention = np.empty((E, H), x.dtype)
        lse = np.zeros((N, H), x.dtype)
        for n, edges in segments:
            m, total = np.full(H, P.f(-np.inf)), np.zeros(H, x.dtype)
            for i in range(0, len(edges), 32):
                some = e[edges[i : i + 32]]
                new = np.maximum(m, some.max(0))
                total = total * np.exp(m - new) + np.exp(some - new).sum(0)
                m = new
            lse[n] = m + np.log(total)
            attention[edges] = np.exp(e[edges] - m) / total
        attention = P.put("attention", attention)
        agg = np.zeros((N, H, C), x.dtype)
        if P.d("sums_of_equal_targets_lost"):
            for i in range(0, E, 64):
                s = slice(i, i + 64)
                agg[dst[s]] += attention[s, :, None] * h[src[s]]
        else:
            for n, edges in segments:
                agg[n] = np.einsum("eh,ehc->hc", attention[edges], h[src[edges]])
        agg = P.put("agg", agg)
        if P.d("mean_over_groups_of_four"):
            mean = agg.reshape(N, C, H).mean(2)
        else:
            mean = (agg[:, 0] + agg[:, 1] + agg[:, 2] + agg[:, 3]) * P.f(0.25)
        z = mean + P["bias"]
        out = np.maximum(z, 0) + np.expm1(np.minimum(z, 0))
        P.put("output", out)

        dz = out * P.f(0.02) * np.exp(np.minimum(z, 0))
        dbias = np.zeros(C, x.dtype)
        for r in range(0, N, 64):
            dbias += dz[r : r + 64].sum(0)
        dagg = (dz * P.f(0.25))[:, None]  # the same for every head
        dh = np.zeros((N, H, C), x.dtype)
        ds_dst, de = np.zeros((N, H), x.dtype), np.empty((E, H), x.dtype)
        for n, edges in segments:
            dp = h[src[edges]] @ dagg[n, 0]
            p = np.exp(e[edges] - lse[n])
            de[edges] = p * (dp - (p * dp).sum(0)) * np.where(pre[edges] > 0, P.f(1), P.f(0.2))
            ds_dst[n] = de[edges].sum(0)
        ds_src = np.zeros((N, H), x.dtype)
        back = np.argsort(src, kind="stable")
        first = np.searchsorted(src[back], np.arange(N + 1))
        for n in range(N):
            edges = back[first[n] : first[n + 1]]
            ds_src[n] = de[edges].sum(0)
            dh[n] = np.einsum("eh,ec->hc", attention[edges], dagg[dst[edges], 0])
        dh += ds_src[..., None] * a_src + ds_dst[..., None] * a_dst
        flat = dh.reshape(N, H * C)
        P.put("grad:x", flat @ w.T)
        P.put("grad:w", sum(x[r : r + 100].T @ flat[r : r + 100] for r in range(0, N, 100)))
        P.put("grad:a_src", np.einsum("nh,nhc->hc", ds_src, h))
        gathered = h[src] if P.d("sources_for_targets_in_gradient") else h[dst]
        P.put("grad:a_dst", np.einsum("eh,ehc->hc", de, gathered))
        P.put("grad:bias", dbias)

    defects = [
        D(
            "slope_of_a_hundredth",
            "e",
            "constant",
            "the leaky slope is 0.01 and not 0.2",
            accept=("factor", "function", "scale"),
        ),
        D(
            "sums_of_equal_targets_lost",
            "agg",
            "race",
            "of edges to the same node in a batch of 64, only the last one is added",
            accept=("drop_term", "stale", "truncate", "other", "zero", "mask"),
        ),
        D(
            "mean_over_groups_of_four",
            "output",
            "axis",
            "the mean is over groups of four channels and not over heads",
            accept=("layout", "transpose", "permute"),
        ),
        D(
            "sources_for_targets_in_gradient",
            "grad:a_dst",
            "swap",
            "the gradient of the target's vector has the features of sources",
            accept=("other", "stale", "permute"),
        ),
    ]


@program(
    "t06",
    variants=("f32", "bf16", "bf16reg"),
    wide=("log_decay", "final_state", "a_log", "dt_bias", "weight"),
)
class gated_delta_net:
    """Two sequences of 75 and 61, three heads: a delta rule with decay, a gated norm, gradients of q, v and the norm.

    The port goes in chunks of 16, where it solves a triangular system, and back in chunks with the transposed one.
    """

    def make(g):
        return dict(
            q=randn(g, 2, 75, 3, 20),
            k=randn(g, 2, 75, 3, 20, shift=0.2),
            v=randn(g, 2, 75, 3, 28, scale=0.7),
            b=randn(g, 2, 75, 3),
            a=randn(g, 2, 75, 3),
            a_log=rand(g, 3, low=-1.5, high=0.8),
            dt_bias=randn(g, 3, scale=0.5, shift=-1.5),
            z=randn(g, 2, 75, 84),
            weight=randn(g, 28, scale=0.1, shift=1.0),
            lengths=torch.tensor([75, 61]),
        )

    def reference(q, k, v, b, a, a_log, dt_bias, z, weight, lengths):
        inside = (torch.arange(75) < lengths[:, None])[..., None]
        q = step("q_norm", q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt())
        k = step("k_norm", k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt())
        beta = step("beta", b.sigmoid() * inside)
        log_decay = step("log_decay", -a_log.exp() * F.softplus(a + dt_bias) * inside)
        decay = log_decay.exp()[..., None, None]
        state, deltas = v.new_zeros(2, 3, 20, 28), []
        for t in range(75):
            state = state * decay[:, t]
            delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + k[:, t, :, :, None] * delta[:, :, None]
            deltas.append(delta)
        delta = step("delta", torch.stack(deltas, 1))
        state, o = v.new_zeros(2, 3, 20, 28), []
        for t in range(75):
            state = state * decay[:, t] + k[:, t, :, :, None] * delta[:, t, :, None]
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        o = step("o", torch.stack(o, 1) * 20**-0.5 * inside[..., None])
        normed = step("normed", o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight)
        return {"output": normed.flatten(2) * F.silu(z), "final_state": state}

    def loss(result):
        y, s = result["output"], result["final_state"]
        pattern = (0.7 * torch.arange(y.numel(), dtype=y.dtype)).sin().view(y.shape)
        return (y * pattern).mean() + 0.1 * s.mean()

    def port(P: Port):
        lengths, w = P["lengths"], P["weight"]
        B, T, H, K, V, SIZE = 2, 75, 3, 20, 28, 16
        raw = P["q"]
        inside = np.arange(T) < lengths[:, None]

        def unit(y):
            return y / np.sqrt(np.einsum("bthk,bthk->bth", y, y) + P.f(1e-6))[..., None]

        q, k = P.put("q_norm", unit(raw)), P.put("k_norm", unit(P["k"]))
        beta = P.put("beta", np.where(inside[..., None], 0.5 + 0.5 * np.tanh(0.5 * P["b"]), 0).astype(raw.dtype))
        y = P["a"] + P["dt_bias"]
        softplus = np.maximum(y, 0) + np.log1p(np.exp(-np.abs(y)))
        log_decay = np.where(inside[..., None], -np.exp(P["a_log"]) * softplus, 0).astype(raw.dtype)
        log_decay = P.put("log_decay", log_decay)

        def by_head(y):  # tokens behind heads
            return np.ascontiguousarray(np.moveaxis(y, 2, 1))

        Q, KK, VV, BE, LD = by_head(q), by_head(k), by_head(P["v"]), by_head(beta), by_head(log_decay)
        chunks = []
        for c in range(0, T, SIZE):
            s = slice(c, min(c + SIZE, T))
            G = np.cumsum(LD[:, :, s], 2)
            n = G.shape[2]
            lower = np.tril(np.ones((n, n), bool))
            since = G[..., :, None] - G[..., None, :]
            pair = np.exp(np.where(lower, since, -np.inf))
            L = BE[:, :, s, None] * np.tril(pair * (KK[:, :, s] @ KK[:, :, s].swapaxes(2, 3)), -1)
            if P.d("own_decay_twice"):
                since = since + LD[:, :, None, s]
                wrong = np.exp(np.where(lower, since, -np.inf))
                L = BE[:, :, s, None] * np.tril(wrong * (KK[:, :, s] @ KK[:, :, s].swapaxes(2, 3)), -1)
            rest = np.exp(G[..., -1:] - G)
            chunks.append((s, np.exp(G)[..., None], pair, L, rest[..., None]))

        delta = np.empty_like(VV)
        state = np.zeros((B, H, K, V), raw.dtype)
        for s, since, _, L, rest in chunks:
            u = BE[:, :, s, None] * (VV[:, :, s] - since * (KK[:, :, s] @ state))
            for i in range(1, u.shape[2]):
                u[:, :, i] -= np.einsum("bhj,bhjv->bhv", L[:, :, i, :i], u[:, :, :i])
            delta[:, :, s] = u
            state = since[:, :, -1:] * state + (rest * KK[:, :, s]).swapaxes(2, 3) @ u
        U = by_head(P.put("delta", by_head(delta)))

        o = np.empty_like(VV)
        state, starts = np.zeros((B, H, K, V), raw.dtype), []
        for s, since, pair, _, rest in chunks:
            starts.append(state)
            o[:, :, s] = since * (Q[:, :, s] @ state) + (pair * (Q[:, :, s] @ KK[:, :, s].swapaxes(2, 3))) @ U[:, :, s]
            state = since[:, :, -1:] * state + (rest * KK[:, :, s]).swapaxes(2, 3) @ U[:, :, s]
        scale = P.f(1 / math.sqrt(K))
        o = P.put("o", by_head(o) * scale * inside[:, :, None, None])
        eps = 1e-6 if P.d("norm_eps_of_a_millionth") else 1e-5
        rstd = 1 / np.sqrt(np.einsum("bthv,bthv->bth", o, o) / V + P.f(eps))[..., None]
        normed = P.put("normed", o * rstd * w)
        z = P["z"].reshape(B, T, H, V)
        P.put("output", (normed * silu(z)).reshape(B, T, H * V))
        final = state
        if P.d("state_written_values_first"):
            final = state.swapaxes(2, 3).reshape(B, H, K, V)
        P.put("final_state", final)

        # Backward: through the gated norm, through the output, through the delta rule.
        size = B * T * H * V
        pattern = P.f(np.sin(0.7 * np.arange(size))).reshape(B, T, H, V)
        dn = pattern * silu(z) / size
        rstd = 1 / np.sqrt(np.einsum("bthv,bthv->bth", o, o) / V + P.f(1e-5))[..., None]
        hat = o * rstd
        dw = np.zeros(V, raw.dtype)
        for b in range(B):
            dw += (dn[b] * hat[b]).sum((0, 1))
        g = dn * w
        do = rstd * (g - hat * (g * hat).mean(-1, keepdims=True))
        do = by_head(do * inside[:, :, None, None]) * scale
        dq, dv = np.empty_like(Q), np.empty_like(VV)
        ds = np.full((B, H, K, V), P.f(0.1 / (B * H * K * V)))
        ds_rule = np.zeros_like(ds)
        for (s, since, pair, L, rest), start in zip(chunks[::-1], starts[::-1], strict=True):
            qs, ks, d = Q[:, :, s], KK[:, :, s], do[:, :, s]
            dq[:, :, s] = since * (d @ start.swapaxes(2, 3)) + (pair * (d @ U[:, :, s].swapaxes(2, 3))) @ ks
            du = (pair * (qs @ ks.swapaxes(2, 3))).swapaxes(2, 3) @ d + (rest * ks) @ (ds + ds_rule)
            ds = since[:, :, -1:] * ds + (since * qs).swapaxes(2, 3) @ d
            for i in range(du.shape[2] - 2, -1, -1):
                du[:, :, i] -= np.einsum("bhj,bhjv->bhv", L[:, :, i + 1 :, i], du[:, :, i + 1 :])
            du *= BE[:, :, s, None]
            dv[:, :, s] = du
            into = (since * ks).swapaxes(2, 3) @ du
            if P.d("state_gradient_added"):
                into = -into
            ds_rule = since[:, :, -1:] * ds_rule - into
        dq = by_head(dq)
        length = np.sqrt(np.einsum("bthk,bthk->bth", raw, raw) + P.f(1e-6))[..., None]
        unit_q = raw / length
        P.put("grad:q", (dq - unit_q * (unit_q * dq).sum(-1, keepdims=True)) / length)
        P.put("grad:v", by_head(dv))
        P.put("grad:weight", dw)

    defects = [
        D(
            "own_decay_twice",
            "delta",
            "shift",
            "in a chunk, decay is counted from one token too early, the writing one's own decay being in it",
            accept=("factor", "scale", "other"),
        ),
        D(
            "norm_eps_of_a_millionth",
            "normed",
            "eps",
            "the norm's epsilon is a millionth and not a hundred-thousandth",
            accept=("constant",),
        ),
        D(
            "state_written_values_first",
            "final_state",
            "transpose",
            "a head's state is written with values before keys",
            accept=("layout", "permute"),
        ),
        D(
            "state_gradient_added",
            "grad:v",
            "sign",
            "what a chunk gives back to the state before it through the delta rule is added and not subtracted",
            accept=("other", "factor"),
        ),
    ]


@program(
    "t07",
    variants=("f32", "f16", "f16reg"),
    wide=("xyz", "dist", "d2", "near_d2", "weights", "relative"),
)
class point_cloud_layer:
    """Two clouds of 300 and 271 points far from zero: 24 farthest points, 16 neighbours, MLP, maximum, interpolation.

    The port keeps running minima, has distances by tiles, splits the MLP's first product, and keeps a running maximum.
    """

    def make(g):
        xyz = randn(g, 2, 300, 3, scale=0.8) + torch.tensor([40.0, -25.0, 6.0], dtype=torch.float64)
        xyz[1, 271:] = 0
        feats = randn(g, 2, 300, 16, shift=0.3)
        feats[1, 271:] = 0
        return dict(
            xyz=xyz,
            feats=feats,
            counts=torch.tensor([300, 271]),
            w1=randn(g, 32, 19, scale=0.3),
            b1=randn(g, 32, scale=0.3),
            w2=randn(g, 40, 32, scale=0.25),
            b2=randn(g, 40, scale=0.4, shift=-1.0),
            w3=randn(g, 28, 56, scale=0.15),
        )

    def reference(xyz, feats, counts, w1, b1, w2, b2, w3):
        inside = torch.arange(300) < counts[:, None]
        cloud = torch.arange(2)
        far = torch.zeros(2, dtype=torch.long)
        dist = torch.where(inside, 1e10, -1.0).to(xyz.dtype)
        picked = [far]
        for _ in range(23):
            there = (xyz - xyz[cloud, far][:, None]).square().sum(-1)
            dist = step("dist", torch.where(inside, torch.minimum(dist, there), -1.0))
            far = step("far", dist.argmax(1))
            picked.append(far)
        centre = step("centre", torch.stack(picked, 1))
        at = xyz[cloud[:, None], centre]
        d2 = (at[:, :, None] - xyz[:, None]).square().sum(-1)
        d2 = step("d2", torch.where(inside[:, None], d2, 1e6))
        neighbour = step("neighbour", d2.sort(dim=-1, stable=True).indices[..., :16])
        batch = cloud[:, None, None]
        relative = step("relative", (xyz[batch, neighbour] - at[:, :, None]) / 0.8)
        hidden = step("hidden", (torch.cat([relative, feats[batch, neighbour]], -1) @ w1.T + b1).relu())
        point = step("point", hidden @ w2.T + b2)
        pooled = step("pooled", point.amax(2))
        near = d2.transpose(1, 2).sort(dim=-1, stable=True).indices
        near = step("near", near[..., :3])
        three = step("near_d2", d2.transpose(1, 2).gather(2, near))
        inverse = 1 / (three + 1e-8)
        weights = step("weights", inverse / inverse.sum(-1, keepdim=True))
        spread = (pooled[batch, near] * weights[..., None]).sum(2) * inside[..., None]
        spread = step("spread", spread)
        return torch.cat([spread, feats], -1) @ w3.T

    def port(P: Port):
        xyz, feats, counts = P["xyz"], P["feats"], P["counts"]
        B, N, M, KN = 2, 300, 24, 16
        dtype = xyz.dtype
        axes = np.ascontiguousarray(np.moveaxis(xyz, 2, 0))  # x, y, z apart
        dist = np.full((B, N), P.f(1e10))
        centre = np.zeros((B, M), np.int64)
        for m in range(1, M):
            far = np.empty(B, np.int64)
            for b in range(B):
                n = counts[b]
                last = centre[b, m - 1]
                dx, dy, dz = (axes[i, b, :n] - axes[i, b, last] for i in range(3))
                dist[b, :n] = np.minimum(dist[b, :n], dx * dx + dy * dy + dz * dz)
                dist[b, n:] = -1
            dist = P.put("dist", dist)
            for b in range(B):
                best = []
                for lo in range(0, counts[b], 64):  # every warp its own, then the best of them
                    part = dist[b, lo : min(lo + 64, counts[b])]
                    best.append((-part.max(), lo + int(part.argmax())))
                far[b] = min(best)[1]
            centre[:, m] = P.put("far", far)
        centre = P.put("centre", centre)
        d2 = np.full((B, M, N), P.f(1e6))
        for b in range(B):
            n = int(counts[b])
            for lo in range(0, n, 128):
                hi = min(lo + 128, n)
                gap = xyz[b, None, lo:hi] - xyz[b, centre[b], None]
                d2[b, :, lo:hi] = gap[..., 2] ** 2 + gap[..., 1] ** 2 + gap[..., 0] ** 2
        d2 = P.put("d2", d2)
        neighbour = np.empty((B, M, KN), np.int64)
        for b in range(B):
            for m in range(M):
                row = d2[b, m]
                limit = np.partition(row, KN - 1)[KN - 1]
                (some,) = np.nonzero(row <= limit)
                neighbour[b, m] = some[np.lexsort((some, row[some]))][:KN]
        neighbour = P.put("neighbour", neighbour)
        relative = np.empty((B, M, KN, 3), dtype)
        gathered = np.empty((B, M, KN, 16), dtype)
        for b in range(B):
            for m in range(M):
                relative[b, m] = (xyz[b, neighbour[b, m]] - xyz[b, centre[b, m]]) * P.f(1.25)
                gathered[b, m] = feats[b, neighbour[b, m]]
        if P.d("centre_less_neighbour"):
            relative = -relative
        relative = P.put("relative", relative)
        w1 = P["w1"]
        hidden = P["b1"] + gathered @ w1[:, 3:].T
        for i in range(3):
            hidden += relative[..., i : i + 1] * w1[:, i]
        hidden = P.put("hidden", np.maximum(hidden, 0))
        point = P.put("point", (hidden.reshape(-1, 32) @ P["w2"].T + P["b2"]).reshape(B, M, KN, 40))
        pooled = np.full((B, M, 40), P.f(0 if P.d("maximum_from_zero") else -np.inf))
        for i in range(KN):
            pooled = np.maximum(pooled, point[:, :, i])
        pooled = P.put("pooled", pooled)

        near = np.zeros((B, N, 3), np.int64)
        three = np.full((B, N, 3), P.f(np.inf))
        for b in range(B):
            for m in range(M):  # inserted into a sorted list of three, where strictly nearer
                d, who = d2[b, m].copy(), np.full(N, m)
                for i in range(3):
                    less = d < three[b, :, i]
                    three[b, :, i], d = np.where(less, d, three[b, :, i]), np.where(less, three[b, :, i], d)
                    near[b, :, i], who = np.where(less, who, near[b, :, i]), np.where(less, near[b, :, i], who)
        near, three = P.put("near", near), P.put("near_d2", three)
        inverse = three + P.f(1e-8)
        if P.d("inverse_of_distance_unsquared"):
            inverse = np.sqrt(three) + P.f(1e-8)
        a, b_, c = inverse[..., 0], inverse[..., 1], inverse[..., 2]
        # 1/a, 1/b and 1/c over their sum, without their reciprocals.
        bc, ac, ab = b_ * c, a * c, a * b_
        weights = P.put("weights", np.stack([bc, ac, ab], -1) / (bc + ac + ab)[..., None])
        spread = np.zeros((B, N, 40), dtype)
        rows = pooled.reshape(B * M, 40)
        for b in range(B):
            n = int(counts[b])
            first = 0 if P.d("first_cloud_for_both") else b * M
            for i in range(3):
                spread[b, :n] += rows[first + near[b, :n, i]] * weights[b, :n, i : i + 1]
        spread = P.put("spread", spread)
        w3 = P["w3"]
        P.put("output", spread @ w3[:, :40].T + feats @ w3[:, 40:].T)

    defects = [
        D(
            "centre_less_neighbour",
            "relative",
            "sign",
            "a centre less its neighbours and not the other way",
            ("swap", "factor", "scale"),
        ),
        D(
            "maximum_from_zero",
            "pooled",
            "zero",
            "the running maximum starts from zero, so that nothing is negative",
            accept=("mask", "function", "constant", "other"),
        ),
        D(
            "inverse_of_distance_unsquared",
            "weights",
            "function",
            "weights are inverse distances and not inverse squares",
            accept=("other",),
        ),
        D(
            "first_cloud_for_both",
            "spread",
            "shift",
            "the second cloud's points gather the first one's features",
            accept=("stale", "swap", "layout", "other", "permute"),
        ),
    ]
