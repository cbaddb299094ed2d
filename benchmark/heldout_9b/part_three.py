"""A step of two optimisers with a common clip, a block of shifted windows, and a step of a flow with a tracer."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randn, step

LOSS_SCALE, MAX_NORM, LR, DECAY, COUNT = 64.0, 1.5, 0.1, 0.2, 3
NS = (3.4445, -4.775, 2.0315)


@program("bb05", variants=("f32",))
class two_optimisers:
    """Gradients with a loss scale are clipped by their common norm; a tall matrix gets an orthogonalised Nesterov
    momentum, a vector gets Adam with decoupled decay. The port sums norms in blocks of 64 and iterates on the small
    Gram matrix."""

    def make(g):
        return dict(
            w=randn(g, 24, 16, scale=0.5),
            w_grad=randn(g, 24, 16, scale=4.0) * rand(g, 24, 1, low=0.3, high=1.5),
            mom=randn(g, 24, 16, scale=0.05),
            b=randn(g, 200, scale=0.5),
            b_grad=randn(g, 200, scale=7.0) * rand(g, 200, low=0.02, high=1.5),
            m=randn(g, 200, scale=0.04),
            v=rand(g, 200, low=1e-5, high=2e-3),
        )

    def reference(w, w_grad, mom, b, b_grad, m, v):
        gw, gb = w_grad / LOSS_SCALE, b_grad / LOSS_SCALE
        norm = step("norm", torch.sqrt(gw.square().sum() + gb.square().sum()))
        factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
        gw, gb = step("clipped", gw * factor), gb * factor

        mom = step("momentum", torch.lerp(mom, gw, 0.05))
        x = step("nesterov", torch.lerp(gw, mom, 0.95)).T
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            a = x @ x.T
            x = NS[0] * x + (NS[1] * a + NS[2] * a @ a) @ x
        x = step("ortho", x.T)
        step("w_new", w * (1 - LR * DECAY) - LR * (24 / 16) ** 0.5 * x)

        m = step("exp_avg", torch.lerp(m, gb, 0.1))
        v = step("exp_avg_sq", 0.98 * v + 0.02 * gb.square())
        m_hat, v_hat = m / (1 - 0.9**COUNT), v / (1 - 0.98**COUNT)
        return b * (1 - LR * DECAY) - LR * m_hat / (v_hat.sqrt() + 1e-4)

    def port(P: Port):
        inv = P.f(1 / LOSS_SCALE)
        gw, gb = P["w_grad"] * inv, P["b_grad"] * inv

        def squares(x):
            flat, total = x.reshape(-1), P.f(0)
            end = flat.size // 64 * 64 if P.d("last_block_of_the_norm_left_out") else flat.size
            for k in range(0, end, 64):
                total = total + flat[k : k + 64] @ flat[k : k + 64]
            return total

        of_w, of_b = squares(gw), squares(gb)
        norm = P.put("norm", np.sqrt(of_w + of_b))
        by = np.sqrt(of_w) if P.d("clipped_by_own_norm") else norm
        factor = min(P.f(1), P.f(MAX_NORM) / (by + P.f(1e-6)))
        unclipped = gb
        gw, gb = P.put("clipped", gw * factor), gb * min(P.f(1), P.f(MAX_NORM) / (norm + P.f(1e-6)))

        keep, take = P.f(0.95), P.f(0.05)
        if P.d("momentum_weights_exchanged"):
            keep, take = take, keep
        old = P["mom"]
        mom = P.put("momentum", keep * old + take * gw)
        ahead = old if P.d("nesterov_from_old_momentum") else mom
        x = P.put("nesterov", P.f(0.05) * gw + P.f(0.95) * ahead)
        x = x / (np.sqrt((x * x).sum()) + P.f(1e-7))
        for _ in range(2 if P.d("one_iteration_fewer") else 3):
            gram = x.T @ x
            x = x @ (P.f(NS[0]) * np.eye(16, dtype=x.dtype) + gram @ (P.f(NS[1]) * np.eye(16) + P.f(NS[2]) * gram))
            x = x.astype(gw.dtype)
        if P.d("result_not_transposed_back"):
            x = np.ascontiguousarray(x.T).reshape(24, 16)
        x = P.put("ortho", x)
        aspect = P.f(1.5) if P.d("aspect_without_root") else np.sqrt(P.f(1.5))
        w = P["w"]
        P.put("w_new", w - P.f(LR) * (P.f(DECAY) * w + aspect * x))

        m = P.put("exp_avg", P["m"] + P.f(0.1) * (gb - P["m"]))
        g2 = unclipped if P.d("second_moment_of_unclipped") else gb
        v = P.put("exp_avg_sq", P["v"] + P.f(0.02) * (g2 * g2 - P["v"]))
        count = COUNT - 1 if P.d("step_counted_from_zero") else COUNT
        root = np.sqrt(P.f(1 - 0.98**count))
        size = P.f(LR / (1 - 0.9**count))
        if P.d("eps_under_the_root"):
            update = size * m / np.sqrt(v / root**2 + P.f(1e-4))
        else:
            update = size * root * m / (np.sqrt(v) + P.f(1e-4) * root)
        b = P["b"]
        P.put("output", b - P.f(LR * DECAY) * b - update)

    defects = [
        D(
            "last_block_of_the_norm_left_out",
            "norm",
            "truncate",
            "The number of blocks of 64 is rounded down: the vector's last 8 gradients are missing in the norm.",
            ("mask", "drop_term", "zero", "other"),
        ),
        D(
            "clipped_by_own_norm",
            "clipped",
            "other",
            "The matrix's gradient is clipped by its own norm, not by that of all gradients.",
            ("factor", "scale", "drop_term", "constant", "swap"),
        ),
        D(
            "momentum_weights_exchanged",
            "momentum",
            "swap",
            "The weights of the old momentum and of the gradient are exchanged.",
            ("constant", "factor", "other"),
        ),
        D(
            "nesterov_from_old_momentum",
            "nesterov",
            "stale",
            "The Nesterov step looks ahead with the momentum from before the update.",
            ("swap", "other", "drop_term"),
        ),
        D(
            "one_iteration_fewer",
            "ortho",
            "truncate",
            "The loop of Newton-Schulz iterations ends one too early.",
            ("drop_term", "other", "constant", "function", "stale"),
        ),
        D(
            "result_not_transposed_back",
            "ortho",
            "transpose",
            "The result, which was computed for the transposed matrix, is stored without transposing it back.",
            ("layout", "permute"),
        ),
        D(
            "aspect_without_root",
            "w_new",
            "function",
            "The update is scaled by the ratio of rows to columns; its square root is meant.",
            ("factor", "scale", "constant", "drop_term"),
        ),
        D(
            "second_moment_of_unclipped",
            "exp_avg_sq",
            "stale",
            "The second moment takes the gradient from before the clip.",
            ("swap", "factor", "scale", "drop_term", "other"),
        ),
        D(
            "step_counted_from_zero",
            "output",
            "shift",
            "Both bias corrections use a step count that is one too low.",
            ("constant", "factor", "scale", "other"),
        ),
        D(
            "eps_under_the_root",
            "output",
            "eps",
            "The small constant of Adam is added under the root; it should be added to the root.",
            ("function", "other"),
        ),
    ]


@program("bb06", variants=("bf16", "f32", "bf16reg"))
class shifted_windows:
    """Attention in shifted windows of 3 by 3 with a table of relative biases and a mask of regions, a residual, and
    merging of patches of 2 by 2 with a norm. The port finds each token of a window by its own coordinates."""

    def make(g):
        return dict(
            x=randn(g, 2, 6, 9, 12, scale=1.2) + randn(g, 12, scale=0.6),
            ln_w=randn(g, 12, scale=0.3, shift=1.0),
            ln_b=randn(g, 12, scale=0.3),
            w_qkv=randn(g, 36, 12, scale=0.35),
            b_qkv=randn(g, 36, scale=0.6),
            table=randn(g, 25, 3, scale=1.2),
            w_proj=randn(g, 12, 12, scale=0.45),
            b_proj=randn(g, 12, scale=0.3),
            ln2_w=randn(g, 48, scale=0.3, shift=1.0),
            ln2_b=randn(g, 48, scale=0.3),
            w_red=randn(g, 24, 48, scale=0.25),
        )

    def reference(x, ln_w, ln_b, w_qkv, b_qkv, table, w_proj, b_proj, ln2_w, ln2_b, w_red):
        y = step("normed", F.layer_norm(x, (12,), ln_w, ln_b, 1e-5))
        qkv = step("qkv", F.linear(y, w_qkv, b_qkv))

        def windows(t):
            t = torch.roll(t, (-1, -1), (1, 2))
            t = t.reshape(t.shape[0], 2, 3, 3, 3, -1).permute(0, 1, 3, 2, 4, 5)
            return t.reshape(-1, 9, t.shape[-1])

        q, k, v = windows(qkv).view(12, 9, 3, 3, 4).permute(2, 0, 3, 1, 4)
        yy, xx = torch.arange(9) // 3, torch.arange(9) % 3
        index = (yy[:, None] - yy + 2) * 5 + (xx[:, None] - xx + 2)
        s = step("scores", q @ k.transpose(-1, -2) / 4**0.5 + table[index].permute(2, 0, 1))
        row, col = torch.zeros(6, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        row[0], col[0] = 1, 1  # what the shift moves to the far end
        region = windows((2 * row[:, None] + col)[None, :, :, None]).view(6, 9)
        same = (region[:, :, None] == region[:, None]).repeat(2, 1, 1)[:, None]
        p = step("probs", torch.softmax(s.masked_fill(~same, float("-inf")), -1))
        ctx = step("ctx", (p @ v).transpose(1, 2).reshape(12, 9, 12))
        back = ctx.view(2, 2, 3, 3, 3, 12).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 9, 12)
        y = step("resid", x + F.linear(torch.roll(back, (1, 1), (1, 2)), w_proj, b_proj))
        y = F.pad(y, (0, 0, 0, 1))
        y = torch.cat([y[:, 0::2, 0::2], y[:, 1::2, 0::2], y[:, 0::2, 1::2], y[:, 1::2, 1::2]], -1)
        y = step("merged", F.layer_norm(y, (48,), ln2_w, ln2_b, 1e-5))
        return F.linear(y, w_red)

    def port(P: Port):
        x = P["x"]
        dt = x.dtype

        def norm(t, weight, bias, over):
            t = t - t.sum(-1, keepdims=True) / t.shape[-1]
            return t / np.sqrt((t * t).sum(-1, keepdims=True) / over + P.f(1e-5)) * weight + bias

        y = P.put("normed", norm(x, P["ln_w"], P["ln_b"], 11 if P.d("unbiased_variance") else 12))
        bias = P["b_qkv"]
        qkv = np.zeros((2, 6, 9, 36), dt) + bias
        for k in range(12):
            qkv += y[..., k, None] * P["w_qkv"][:, k]
        qkv = P.put("qkv", qkv + bias if P.d("bias_in_start_and_epilogue") else qkv)

        places = [
            [((3 * (w // 3) + i // 3 + 1) % 6, (3 * (w % 3) + i % 3 + 1) % 9) for i in range(9)] for w in range(6)
        ]
        scale = P.f(1 / np.sqrt(12 if P.d("scaled_by_all_channels") else 4))
        scores, probs, ctx = np.empty((12, 3, 9, 9), dt), np.zeros((12, 3, 9, 9), dt), np.empty((12, 9, 12), dt)
        for n in range(2):
            for w in range(6):
                at = np.array([qkv[n, r, c] for r, c in places[w]])
                for h in range(3):
                    q, k = at[:, 4 * h : 4 * h + 4], at[:, 12 + 4 * h : 16 + 4 * h]
                    for i in range(9):
                        for j in range(9):
                            dy, dx = i // 3 - j // 3, i % 3 - j % 3
                            if P.d("relative_offset_of_key_to_query"):
                                dy, dx = -dy, -dx
                            scores[6 * n + w, h, i, j] = q[i] @ k[j] * scale + P["table"][5 * (dy + 2) + dx + 2, h]
        scores = P.put("scores", scores)
        for n in range(2):
            for w in range(6):
                for i, (r, c) in enumerate(places[w]):
                    for h in range(3):
                        e = np.exp(scores[6 * n + w, h, i] - scores[6 * n + w, h, i].max())
                        for j, (r2, c2) in enumerate(places[w]):
                            rows_differ = (r == 0) != (r2 == 0) and not P.d("rows_that_wrap_not_masked")
                            if rows_differ or (c == 0) != (c2 == 0):
                                e[j] = 0
                        unmasked = w // 3 == 0 and w % 3 < 2
                        keys = 8 if unmasked and P.d("unmasked_path_without_the_tail") else 9
                        probs[6 * n + w, h, i] = e / e[:keys].sum()
        probs = P.put("probs", probs)
        for n in range(2):
            of = 0 if P.d("last_image_reads_values_of_the_first") and n == 1 else n
            for w in range(6):
                v = np.array([qkv[of, r, c, 24:] for r, c in places[w]])
                for h in range(3):
                    ctx[6 * n + w, :, 4 * h : 4 * h + 4] = probs[6 * n + w, h] @ v[:, 4 * h : 4 * h + 4]
        ctx = P.put("ctx", ctx)

        resid = np.array(y if P.d("residual_from_the_norm") else x)
        for n in range(2):
            for w in range(6):
                for i, (r, c) in enumerate(places[w]):
                    if P.d("shifted_back_the_wrong_way"):
                        r, c = (r - 2) % 6, (c - 2) % 9
                    resid[n, r, c] += P["w_proj"] @ ctx[6 * n + w, i] + P["b_proj"]
        resid = P.put("resid", resid)

        merged = np.zeros((2, 3, 5, 48), dt)
        for part in range(4):
            i, j = (part // 2, part % 2) if P.d("patches_merged_row_by_row") else (part % 2, part // 2)
            block = resid[:, i::2, j::2]
            merged[:, :, : block.shape[2], 12 * part : 12 * part + 12] = block
        merged = P.put("merged", norm(merged, P["ln2_w"], P["ln2_b"], 48))
        P.put("output", np.einsum("nijk,ok->nijo", merged, P["w_red"]))

    defects = [
        D(
            "unbiased_variance",
            "normed",
            "ddof",
            "The variance divides by 11, not by all 12 channels.",
            ("factor", "scale", "constant"),
        ),
        D(
            "bias_in_start_and_epilogue",
            "qkv",
            "factor",
            "The bias is added twice: the accumulator starts with it, and the epilogue adds it again.",
            ("scale", "constant", "other"),
        ),
        D(
            "scaled_by_all_channels",
            "scores",
            "constant",
            "Scores are divided by the root of all 12 channels, not by that of a head's 4.",
            ("factor", "scale"),
        ),
        D(
            "relative_offset_of_key_to_query",
            "scores",
            "transpose",
            "The table of relative biases is indexed by key minus query; it should be query minus key.",
            ("flip", "sign", "swap", "permute"),
        ),
        D(
            "rows_that_wrap_not_masked",
            "probs",
            "mask",
            "The mask separates the columns that the shift wraps around, and not the rows.",
            ("axis", "other", "drop_term", "zero"),
        ),
        D(
            "unmasked_path_without_the_tail",
            "probs",
            "truncate",
            "In windows that need no mask, the softmax's sum goes over the first 8 of 9 keys, without the tile's tail.",
            ("mask", "drop_term", "other", "zero"),
        ),
        D(
            "last_image_reads_values_of_the_first",
            "ctx",
            "layout",
            "For the last image the batch offset of the values is missing, so that it reads those of the first image.",
            ("shift", "stale", "swap", "other", "permute"),
        ),
        D(
            "shifted_back_the_wrong_way",
            "resid",
            "shift",
            "After attention the windows are shifted by -1 in both directions again; they should be shifted back.",
            ("sign", "permute", "layout", "other"),
        ),
        D(
            "residual_from_the_norm",
            "resid",
            "swap",
            "The residual adds the normed tokens, not the block's input.",
            ("other", "stale"),
        ),
        D(
            "patches_merged_row_by_row",
            "merged",
            "permute",
            "The 2 by 2 patches are concatenated row by row; they should be column by column.",
            ("swap", "layout", "transpose"),
        ),
    ]


NY, NX, DT, DX, DY, NU, OMEGA = 14, 18, 0.3, 0.8, 1.1, 0.35, 1.3


def walls(x, sign):
    """A ghost row beyond each wall."""
    return torch.cat([sign * x[:1], x, sign * x[-1:]])


@program("bb07", variants=("f32",))
class channel_flow:
    """A step of a flow in a channel, periodic in x, with walls in y: semi-Lagrangian advection, viscosity, three
    red-black sweeps for the pressure, projection, a limited upwind scheme for a tracer in x, and its implicit diffusion
    in y. The port goes cell by cell, and solves columns by the algorithm of Thomas."""

    def make(g):
        return dict(
            u=randn(g, NY, NX, scale=1.6) + 0.4,
            v=randn(g, NY, NX, scale=1.4),
            p=randn(g, NY, NX, scale=0.8),
            c=randn(g, NY, NX) + 2.0 * (torch.arange(NX) > 8),
            k=rand(g, NY - 1, NX, low=0.3, high=4.0),
        )

    def reference(u, v, p, c, k):
        j, i = torch.arange(NY)[:, None], torch.arange(NX)[None]
        px = i - u * (DT / DX)
        py = (j - v * (DT / DY)).clamp(0, NY - 1)
        x0, y0 = px.floor(), py.floor().clamp(max=NY - 2)
        fx, fy = px - x0, py - y0
        x0, y0 = x0.long(), y0.long()
        left, right = x0 % NX, (x0 + 1) % NX

        def sampled(f):
            low = f[y0, left] * (1 - fx) + f[y0, right] * fx
            high = f[y0 + 1, left] * (1 - fx) + f[y0 + 1, right] * fx
            return low * (1 - fy) + high * fy

        uv = step("adv", torch.stack([sampled(u), sampled(v)]))

        def diffused(f):
            y = walls(f, -1)
            across = (torch.roll(f, 1, 1) - 2 * f + torch.roll(f, -1, 1)) / DX**2
            return f + DT * NU * (across + (y[2:] - 2 * f + y[:-2]) / DY**2)

        u, v = step("visc", torch.stack([diffused(uv[0]), diffused(uv[1])]))
        y = walls(v, -1)
        div = step("div", (torch.roll(u, -1, 1) - torch.roll(u, 1, 1)) / (2 * DX) + (y[2:] - y[:-2]) / (2 * DY))
        for half in range(6):
            y = walls(p, 1)
            both = (torch.roll(p, 1, 1) + torch.roll(p, -1, 1)) / DX**2 + (y[2:] + y[:-2]) / DY**2
            best = (both - div / DT) / (2 / DX**2 + 2 / DY**2)
            p = torch.where((i + j) % 2 == half % 2, (1 - OMEGA) * p + OMEGA * best, p)
        p = step("pressure", p)
        y = walls(p, 1)
        u = u - DT * (torch.roll(p, -1, 1) - torch.roll(p, 1, 1)) / (2 * DX)
        v = v - DT * (y[2:] - y[:-2]) / (2 * DY)
        u, v = step("proj", torch.stack([u, v]))

        behind = torch.roll(c, 1, 1)  # a face lies between the cell before and that of its index
        a, b = c - behind, torch.roll(c, -1, 1) - c
        slope = torch.where(a * b > 0, 2 * a * b / torch.where(a * b > 0, a + b, torch.ones_like(a)), 0 * a)
        speed = (torch.roll(u, 1, 1) + u) / 2
        part = (1 - speed.abs() * DT / DX) / 2
        value = torch.where(speed > 0, behind + part * torch.roll(slope, 1, 1), c - part * slope)
        flux = step("flux", speed * value)
        c = step("moved", c - DT / DX * (torch.roll(flux, -1, 1) - flux))
        r = F.pad(k, (0, 0, 1, 1)) * DT / DY**2
        r = r.T
        matrix = torch.diag_embed(1 + r[:, 1:] + r[:, :-1])
        matrix = matrix - torch.diag_embed(r[:, 1:-1], 1) - torch.diag_embed(r[:, 1:-1], -1)
        return torch.linalg.solve(matrix, c.T[..., None])[..., 0].T

    def port(P: Port):
        u, v, p, c, k = P["u"], P["v"], P["p"], P["c"], P["k"]
        dt_, dx, dy = P.f(DT), P.f(DX), P.f(DY)
        half = P.f(0.5)

        def traced(f, u, v):
            out = np.empty_like(f)
            for j in range(NY):
                for i in range(NX):
                    x, y = P.f(i) - u[j, i] * P.f(DT / DX), P.f(j) - v[j, i] * P.f(DT / DY)
                    y = min(max(y, P.f(0)), P.f(NY - 1))
                    if P.d("clamped_where_it_should_wrap"):
                        x = min(max(x, P.f(0)), P.f(NX - 1))
                    x0, y0 = int(np.floor(x)), min(int(y), NY - 2)
                    fx, fy = x - P.f(x0), y - P.f(y0)
                    rows = f[y0 : y0 + 2, [x0 % NX, (x0 + 1) % NX]]
                    out[j, i] = np.array([1 - fy, fy]) @ rows @ np.array([1 - fx, fx])
            return out

        new_u = traced(u, u, v)
        new_v = traced(v, new_u if P.d("second_component_traced_by_the_new_first") else u, v)
        uv = P.put("adv", np.stack([new_u, new_v]))

        def around(f, j, i, sign):
            """West, east, south and north of a cell."""
            south = f[j - 1, i] if j else sign * f[0, i]
            north = f[j + 1, i] if j < NY - 1 else sign * f[NY - 1, i]
            return f[j, i - 1], f[j, (i + 1) % NX], south, north

        cells = [(j, i) for j in range(NY) for i in range(NX)]
        across = dy if P.d("one_spacing_for_both_axes") else dx
        ghost = 1 if P.d("walls_without_friction") else -1
        visc = np.empty_like(uv)
        for m in range(2):
            for j, i in cells:
                w, e, s, n = around(uv[m], j, i, ghost)
                f = uv[m, j, i]
                visc[m, j, i] = f + P.f(DT * NU) * ((w - f + (e - f)) / across**2 + (s - f + (n - f)) / dy**2)
        u, v = P.put("visc", visc)

        div = np.empty_like(u)
        for j, i in cells:
            w, e, _, _ = around(u, j, i, -1)
            _, _, s, n = around(v, j, i, -1)
            if P.d("rows_at_walls_not_computed") and j in (0, NY - 1):
                div[j, i] = 0
                continue
            div[j, i] = half * ((e - w) / dx + (n - s) / dy)
        div = P.put("div", div)

        p = p.copy()
        gx, gy = 1 / dx**2, 1 / dy**2
        for _ in range(3):
            start = p.copy()
            for colour in range(2):
                for j, i in cells:
                    if (i + j) % 2 != colour:
                        continue
                    w, e, s, n = around(start if P.d("colours_without_a_barrier") else p, j, i, 1)
                    best = ((w + e) * gx + (s + n) * gy - div[j, i] / dt_) / (2 * (gx + gy))
                    p[j, i] += P.f(OMEGA) * (best - p[j, i])
        p = P.put("pressure", p)

        proj = np.empty_like(visc)
        for j, i in cells:
            w, e, s, n = around(p, j, i, 1)
            proj[0, j, i] = u[j, i] - dt_ * half * (e - w) / dx
            proj[1, j, i] = v[j, i] - dt_ * (1 if P.d("one_cell_for_two_in_y") else half) * (n - s) / dy
        u, v = P.put("proj", proj)

        slope = np.zeros_like(c)
        for j, i in cells:
            a, b = c[j, i] - c[j, i - 1], c[j, (i + 1) % NX] - c[j, i]
            if a * b > 0:
                slope[j, i] = 2 / (1 / a + 1 / b)
        flux = np.empty_like(c)
        for j, i in cells:
            speed = half * (u[j, i - 1] + u[j, i])
            part = half * (1 - abs(speed) * P.f(DT / DX))
            if speed > 0:
                value = c[j, i - 1] + part * slope[j, i - 1]
            elif P.d("same_sign_of_slope_against_the_wind"):
                value = c[j, i] + part * slope[j, i]
            else:
                value = c[j, i] - part * slope[j, i]
            flux[j, i] = speed * value
        flux = P.put("flux", flux)
        moved = np.empty_like(c)
        for j, i in cells:
            ahead = i if P.d("faces_one_cell_back") else (i + 1) % NX
            moved[j, i] = c[j, i] - P.f(DT / DX) * (flux[j, ahead] - flux[j, ahead - 1])
        c = P.put("moved", moved)

        out = np.empty_like(c)
        for i in range(NX):
            below = [P.f(0), *(k[:, i] * P.f(DT / DY**2))]
            above = [*below[1:], P.f(0)]
            if P.d("diagonals_exchanged"):
                lower, upper = [P.f(0), *above[1:]], [*below[:-1], P.f(0)]
            else:
                lower, upper = below, above
            factor, rhs = np.zeros_like(c[:, 0]), np.zeros_like(c[:, 0])
            for j in range(NY):
                pivot = 1 + below[j] + above[j]
                if j:
                    pivot = pivot - lower[j] * factor[j - 1]
                    rhs[j] = (c[j, i] + lower[j] * rhs[j - 1]) / pivot
                else:
                    rhs[j] = c[j, i] / pivot
                factor[j] = upper[j] / pivot
            for j in range(NY - 1, -1, -1):
                out[j, i] = rhs[j] + (factor[j] * out[j + 1, i] if j < NY - 1 else 0)
        P.put("output", out)

    defects = [
        D(
            "clamped_where_it_should_wrap",
            "adv",
            "mask",
            "Departure points beyond the ends in x are clamped to the end; they should wrap around.",
            ("shift", "other", "stale", "function"),
        ),
        D(
            "second_component_traced_by_the_new_first",
            "adv",
            "stale",
            "The second component's departure points use the first component after its own advection.",
            ("race", "swap", "other"),
        ),
        D(
            "one_spacing_for_both_axes",
            "visc",
            "constant",
            "The second difference in x is divided by the square of the spacing in y.",
            ("axis", "swap", "factor", "scale"),
        ),
        D(
            "walls_without_friction",
            "visc",
            "sign",
            "The velocity beyond a wall has the sign of that before it; it should be the opposite.",
            ("mask", "other", "flip", "stale"),
        ),
        D(
            "rows_at_walls_not_computed",
            "div",
            "zero",
            "The divergence is computed between the walls' rows only; the first and the last row stay zero.",
            ("mask", "truncate", "drop_term"),
        ),
        D(
            "colours_without_a_barrier",
            "pressure",
            "race",
            "Black cells read the red ones from before the sweep, for want of a barrier between the colours.",
            ("stale", "other"),
        ),
        D(
            "one_cell_for_two_in_y",
            "proj",
            "factor",
            "The pressure's central difference in y is divided by one spacing, not by two.",
            ("scale", "constant"),
        ),
        D(
            "same_sign_of_slope_against_the_wind",
            "flux",
            "sign",
            "Where the flow goes to lower x, half a slope is added to the cell's value; it should be subtracted.",
            ("flip", "other"),
        ),
        D(
            "faces_one_cell_back",
            "moved",
            "shift",
            "The difference of fluxes is that of the faces of the cell before.",
            ("permute", "other"),
        ),
        D(
            "diagonals_exchanged",
            "output",
            "swap",
            "In each row of the tridiagonal system the coefficients of the cells below and above are exchanged.",
            ("shift", "transpose", "permute", "other"),
        ),
    ]
