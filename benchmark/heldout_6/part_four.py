"""A diffusion sampler, a recommender with gradients, and the energy of charged particles with forces."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, sigmoid, step

TIMES = (37, 25, 15, 7, 1)


def schedule():
    """Cumulative products of alphas, as floats."""
    out, product = [], 1.0
    for i in range(40):
        product *= 1 - (0.06 + (0.45 - 0.06) * i / 39) ** 2
        out.append(product)
    return out


@program("y04", variants=("f32", "bf16", "bf16reg"))
class dpm_solver:
    """DPM-Solver++(2M) with rescaled classifier-free guidance, four steps; the port goes by samples."""

    def make(g):
        return dict(
            noise=randn(g, 2, 15, 6),
            cond=randn(g, 2, 8, scale=0.8),
            uncond=randn(g, 8, scale=0.5),
            w_in=randn(g, 10, 6, scale=0.4),
            w_t=randn(g, 10, 8, scale=0.4),
            w_c=randn(g, 10, 8, scale=0.5),
            w_eps=randn(g, 6, 10, scale=0.4),
            w_dec=randn(g, 4, 6, scale=0.5),
        )

    def reference(noise, cond, uncond, w_in, w_t, w_c, w_eps, w_dec):
        bar = torch.tensor(schedule(), dtype=noise.dtype)
        alpha, sigma = bar.sqrt(), (1 - bar).sqrt()
        lam = alpha.log() - sigma.log()
        freqs = torch.exp(-math.log(100) * torch.arange(4, dtype=noise.dtype) / 4)
        x, before = noise, None
        for i in range(4):
            s, t = TIMES[i], TIMES[i + 1]
            emb = step("emb", torch.cat([(s * freqs).sin(), (s * freqs).cos()]))
            ctx = torch.stack([uncond.expand(2, 8), cond])
            hidden = torch.tanh(x @ w_in.T + w_t @ emb + (ctx @ w_c.T)[:, :, None])
            eps = step("eps", hidden @ w_eps.T + x)
            e_u, e_c = eps[0], eps[1]
            e = e_u + 3.0 * (e_c - e_u)
            rescaled = e * e_c.std((1, 2), keepdim=True) / e.std((1, 2), keepdim=True)
            e = step("guided", 0.7 * rescaled + 0.3 * e)
            x0 = step("x0", (x - sigma[s] * e) / alpha[s])
            h = lam[t] - lam[s]
            direction = x0
            if before is not None and i < 3:
                r = (lam[s] - lam[TIMES[i - 1]]) / h
                direction = x0 + (x0 - before) / (2 * r)
            x = step("x", sigma[t] / sigma[s] * x - alpha[t] * torch.expm1(-h) * direction)
            before = x0
        return x @ w_dec.T

    def port(P: Port):
        bar = np.array(schedule())
        cond, uncond = P["cond"], P["uncond"]
        lam = 0.5 * np.log(bar / (1 - bar))
        x, history = P["noise"], []
        for i in range(4):
            s, t = TIMES[i], TIMES[i + 1]
            emb = np.empty(8, x.dtype)
            for k in range(4):
                angle = s * 100.0 ** (-k / 4)
                pair = (
                    (math.cos(angle), math.sin(angle))
                    if P.d("cosine_before_sine")
                    else (math.sin(angle), math.cos(angle))
                )
                emb[k], emb[4 + k] = pair
            emb = P.put("emb", emb)
            eps = np.empty((2, 2, 15, 6), x.dtype)
            for n in range(2):
                for k, ctx in enumerate((uncond, cond[n])):
                    base = P["w_t"] @ emb + P["w_c"] @ ctx
                    for r0 in range(0, 15, 4):
                        rows = x[n, r0 : r0 + 4]
                        up = np.exp(2 * (rows @ P["w_in"].T + base))
                        eps[k, n, r0 : r0 + 4] = (1 - 2 / (up + 1)) @ P["w_eps"].T + rows
            eps = P.put("eps", eps)

            e = 3 * eps[1] - 2 * eps[0]
            guided = np.empty_like(e)
            for n in range(2):
                a, b = (eps[1], e) if P.d("deviation_over_the_batch") else (eps[1, n], e[n])
                ratio = np.sqrt(((a - a.mean()) ** 2).sum() / ((b - b.mean()) ** 2).sum())
                guided[n] = e[n] * (P.f(0.7) * ratio + P.f(0.3))
            e = P.put("guided", guided)
            under = bar[s] if P.d("root_of_alpha_bar_forgotten") else math.sqrt(bar[s])
            x0 = P.put("x0", x * P.f(1 / under) - e * P.f(math.sqrt(1 - bar[s]) / under))

            h = lam[t] - lam[s]
            direction = x0
            if history and i < 3:
                last = lam[s] - lam[TIMES[i - 1]]
                r = h / last if P.d("step_ratio_inverted") else last / h
                old = history[0] if P.d("history_not_updated") else history[-1]
                direction = P.f(1 + 0.5 / r) * x0 - P.f(0.5 / r) * old
            # alpha_t (1 - exp(-h)) = alpha_t - sigma_t alpha_s / sigma_s
            keep = math.sqrt((1 - bar[t]) / (1 - bar[s]))
            take = math.sqrt(bar[t]) - keep * math.sqrt(bar[s])
            if P.d("expm1_sign"):
                take = -take
            x = P.put("x", P.f(keep) * x + P.f(take) * direction)
            history.append(x0)
        P.put("output", np.einsum("nrc,oc->nro", x, P["w_dec"]))

    defects = [
        D(
            "cosine_before_sine",
            "emb",
            "swap",
            "The time embedding has its cosines before its sines.",
            ("permute", "layout", "flip", "shift", "function"),
        ),
        D(
            "deviation_over_the_batch",
            "guided",
            "axis",
            "The standard deviations of the guidance rescale are taken over the whole batch instead of each sample.",
            ("scale", "factor", "other"),
        ),
        D(
            "root_of_alpha_bar_forgotten",
            "x0",
            "function",
            "The estimate is divided by alpha bar instead of its square root.",
            ("factor", "scale", "constant"),
        ),
        D(
            "step_ratio_inverted",
            "x#2",
            "factor",
            "The ratio of the last step's length to this one's is upside down.",
            ("function", "swap", "scale", "constant", "other"),
        ),
        D(
            "history_not_updated",
            "x#3",
            "stale",
            "The second-order term goes on with the first step's estimate instead of the last one's.",
            ("shift",),
        ),
        D("expm1_sign", "x", "sign", "The estimate enters with the wrong sign.", ()),
    ]


@program("y05", variants=("bf16", "f32"), wide=("logit", "output"))
class dlrm:
    """A recommender over one fused embedding table with bags and dot interactions, its loss and gradients."""

    def make(g):
        return dict(
            dense=randint(g, 0, 40, 7, 4).double(),
            tables=randn(g, 26, 6, scale=0.7),
            idx_a=randint(g, 0, 6, 16),
            off_a=torch.tensor([0, 3, 5, 5, 9, 10, 13, 16]),
            idx_b=randint(g, 0, 8, 7),
            idx_c=randint(g, 0, 7, 13),
            off_c=torch.tensor([0, 1, 4, 6, 8, 9, 12, 13]),
            weight_c=rand(g, 13, low=0.2, high=1.5),
            w_bot=randn(g, 6, 4, scale=0.25),
            w_1=randn(g, 9, 12, scale=0.4),
            b_1=randn(g, 9, scale=0.2, shift=0.2),
            w_2=randn(g, 9, scale=0.5),
            label=torch.tensor([1, 0, 0, 1, 0, 1, 0]),
        )

    def reference(dense, tables, idx_a, off_a, idx_b, idx_c, off_c, weight_c, w_bot, w_1, b_1, w_2, label):
        bottom = step("bottom", torch.log1p(dense) @ w_bot.T)
        of_a = torch.repeat_interleave(torch.arange(7), off_a.diff())
        of_c = torch.repeat_interleave(torch.arange(7), off_c.diff())
        zero = torch.zeros(7, 6, dtype=tables.dtype)
        a = zero.index_add(0, of_a, tables[idx_a]) / off_a.diff().clamp(min=1)[:, None]
        a = step("bag_a", a)
        b = step("row_b", tables[11 + idx_b])
        c = step("bag_c", zero.index_add(0, of_c, tables[19 + idx_c] * weight_c[:, None]))
        every = torch.stack([bottom, a, b, c], 1)
        i, j = torch.tril_indices(4, 4, -1)
        inter = step("inter", torch.cat([bottom, (every @ every.transpose(1, 2))[:, i, j]], 1))
        hidden = step("hidden", F.relu(inter @ w_1.T + b_1))
        logit = step("logit", hidden @ w_2)
        y = label.to(logit.dtype)
        return F.binary_cross_entropy_with_logits(logit, y, pos_weight=torch.tensor(2.5, dtype=logit.dtype))

    def port(P: Port):
        tables, ia, ib, ic = P["tables"], P["idx_a"], P["idx_b"], P["idx_c"]
        oa, oc, wc, y = P["off_a"], P["off_c"], P["weight_c"], P["label"]
        dt = tables.dtype
        features = np.log(1 + P["dense"])
        bottom = P.put("bottom", np.einsum("nk,ok->no", features, P["w_bot"]))
        a, c = np.zeros((7, 6), dt), np.zeros((7, 6), dt)
        for n in range(7):
            start, stop = oa[n], oa[n + 1]
            if P.d("last_bag_cut_short") and n == 6:
                stop -= 1
            for k in range(start, stop):
                a[n] += tables[ia[k]] / (stop - start)
        a = P.put("bag_a", a)
        b = P.put("row_b", tables[11 + ib])
        base_c = 11 if P.d("table_offset_of_the_one_before") else 19
        for n in range(7):
            for k in range(oc[n], oc[n + 1]):
                c[n] += tables[base_c + ic[k]] * wc[k]
        c = P.put("bag_c", c)

        every = (bottom, a, b, c)
        pairs = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
        if P.d("upper_triangle_order"):
            pairs = [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (3, 2)]
        inter = np.empty((7, 12), dt)
        inter[:, :6] = bottom
        for k, (i, j) in enumerate(pairs):
            inter[:, 6 + k] = (every[i] * every[j]).sum(1)
        inter = P.put("inter", inter)
        hidden = P.put("hidden", np.maximum(np.einsum("nk,ok->no", inter, P["w_1"]) + P["b_1"], 0))
        logit = P.put("logit", (hidden * P["w_2"]).sum(1))

        weight = np.where(y == 1, P.f(2.5), P.f(1))
        losses = np.where(y == 1, np.logaddexp(0, -logit), np.logaddexp(0, logit))
        if P.d("positive_weight_on_all"):
            P.put("output", (P.f(2.5) * losses).sum() / 7)
        else:
            P.put("output", (weight * losses).sum() / 7)

        g_logit = weight * (sigmoid(logit) - y.astype(dt)) / 7
        P.put("grad:w_2", g_logit @ hidden)
        g_hidden = g_logit[:, None] * P["w_2"] * (hidden > 0)
        P.put("grad:w_1", g_hidden.T @ inter)
        P.put("grad:b_1", g_hidden.sum(0))
        g_inter = g_hidden @ P["w_1"]
        g = [np.zeros((7, 6), dt) for _ in range(4)]
        for k, (i, j) in enumerate(pairs):
            g[i] += g_inter[:, 6 + k, None] * every[j]
            g[j] += g_inter[:, 6 + k, None] * every[i]
        if not P.d("direct_path_left_out"):
            g[0] = g[0] + g_inter[:, :6]
        P.put("grad:w_bot", g[0].T @ features)
        g_wc = np.array([tables[19 + ic[k]] @ g[3][n] for n in range(7) for k in range(oc[n], oc[n + 1])])
        P.put("grad:weight_c", g_wc)
        g_tables = np.zeros_like(tables)
        for n in range(7):
            for k in range(oa[n], oa[n + 1]):
                part = g[1][n] / (oa[n + 1] - oa[n])
                if P.d("repeated_rows_overwritten"):
                    g_tables[ia[k]] = part
                else:
                    g_tables[ia[k]] += part
            g_tables[11 + ib[n]] += g[2][n]
            for k in range(oc[n], oc[n + 1]):
                g_tables[19 + ic[k]] += wc[k] * g[3][n]
        P.put("grad:tables", g_tables)

    defects = [
        D(
            "last_bag_cut_short",
            "bag_a",
            "truncate",
            "The last entry of the last bag is left out.",
            ("drop_term", "mask", "shift"),
        ),
        D(
            "table_offset_of_the_one_before",
            "bag_c",
            "shift",
            "The rows of the third table are read from the start of the second one.",
            ("stale", "swap", "other", "layout", "constant"),
        ),
        D(
            "upper_triangle_order",
            "inter",
            "permute",
            "The interactions are in the order of the upper triangle instead of the lower one.",
            ("transpose", "layout", "swap", "axis"),
        ),
        D(
            "positive_weight_on_all",
            "output",
            "factor",
            "The weight of positive labels is applied to negative ones too.",
            ("scale", "mask", "function", "other"),
        ),
        D(
            "direct_path_left_out",
            "grad:w_bot",
            "drop_term",
            "The gradient through the concatenated dense vector is left out; only that of the interactions remains.",
            ("other",),
        ),
        D(
            "repeated_rows_overwritten",
            "grad:tables",
            "race",
            "Where rows of the first table occur several times, their gradients overwrite each other instead of adding up.",
            ("drop_term", "stale", "other", "truncate"),
        ),
    ]


BOX = (3.9, 4.2, 4.5)


@program("y06", variants=("f32",))
class charged_particles:
    """Lennard-Jones and screened Coulomb energies in a periodic box, with gradients; the port goes by tiles of 8."""

    def make(g):
        i = torch.arange(27)
        sites = torch.stack([i // 9, i // 3 % 3, i % 3], -1)[torch.randperm(27, generator=g)[:19]]
        spacing = torch.tensor(BOX, dtype=torch.float64) / 3
        return dict(
            pos=sites.double() * spacing + rand(g, 19, 3, low=-0.12, high=0.12),
            charge=randn(g, 19, scale=0.8),
            kind=randint(g, 0, 3, 19),
            sigma=torch.tensor([0.8, 1.05, 1.3], dtype=torch.float64),
            depth=torch.tensor([0.6, 1.0, 0.4], dtype=torch.float64),
        )

    def reference(pos, charge, kind, sigma, depth):
        box = torch.tensor(BOX, dtype=pos.dtype)
        d = pos[:, None] - pos
        d = step("disp", d - box * torch.round(d / box))
        eye = torch.eye(19, dtype=pos.dtype)
        r = step("dist", torch.sqrt(d.pow(2).sum(-1) + eye))
        x = ((r - 1.4) / 0.5).clamp(0, 1)
        switch = step("switch", (1 - x**3 * (10 - 15 * x + 6 * x**2)) * (1 - eye))
        s = (sigma[kind][:, None] + sigma[kind]) / 2
        e = torch.sqrt(depth[kind][:, None] * depth[kind])
        s6 = (s / r) ** 6
        lj = step("lj", 4 * e * (s6**2 - s6) * (1 - eye))
        coulomb = step("coulomb", charge[:, None] * charge * torch.erfc(0.9 * r) / r * (1 - eye))
        atom = step("atom", 0.5 * ((lj + coulomb) * switch).sum(1))
        return atom.sum() - 0.9 / math.sqrt(math.pi) * charge.pow(2).sum()

    def port(P: Port):
        pos, q, kind, sigma, depth = P["pos"], P["charge"], P["kind"], P["sigma"], P["depth"]
        dt, n = pos.dtype, 19
        box = P.f([BOX[0]] * 3 if P.d("one_box_length_for_all_axes") else BOX)
        erfc = np.vectorize(math.erfc, otypes=[dt])
        alpha = P.f(0.9)
        off = ~np.eye(n, dtype=bool)

        disp = np.empty((n, n, 3), dt)
        for i in range(n):
            for ax in range(3):
                d = pos[i, ax] - pos[:, ax]
                half = box[ax] / 2
                d = np.where(d > half, d - box[ax], np.where(d < -half, d + box[ax], d))
                disp[i, :, ax] = d
        disp = P.put("disp", disp)
        r = np.ones((n, n), dt)
        r[off] = np.sqrt(np.einsum("kc,kc->k", disp[off], disp[off]))
        r = P.put("dist", r)

        x = (r - P.f(1.4)) / P.f(0.5)
        s = (1 - x) ** 3 * (1 + 3 * x + 6 * x**2)
        s = np.where(x <= 0, 1, np.where(x >= 1, 0, s)).astype(dt) * off
        switch = P.put("switch", s)

        lj, coulomb = np.zeros((n, n), dt), np.zeros((n, n), dt)
        mixed = np.zeros((n, n, 2), dt)
        for i0 in range(0, n, 8):
            for j0 in range(0, n, 8):
                for i in range(i0, min(i0 + 8, n)):
                    for j in range(j0, min(j0 + 8, n)):
                        if i == j:
                            continue
                        a, b = kind[i], kind[j]
                        if P.d("geometric_mean_of_sigmas"):
                            m = np.sqrt(sigma[a] * sigma[b])
                        else:
                            m = (sigma[a] + sigma[b]) / 2
                        e = np.sqrt(depth[a] * depth[b])
                        mixed[i, j] = m, e
                        inv2 = m * m / (r[i, j] * r[i, j])
                        lj[i, j] = 4 * e * inv2**3 * (inv2**3 - 1)
                        qj = q[j - j0] if P.d("charge_by_index_in_tile") else q[j]
                        coulomb[i, j] = q[i] * qj / r[i, j]
        coulomb = coulomb * erfc(alpha * r)
        lj, coulomb = P.put("lj", lj), P.put("coulomb", coulomb)

        atom = np.zeros(n, dt)
        for i in range(n):
            for j0 in range(0, n, 8):
                if P.d("clamped_tail_not_masked"):
                    js = [min(j, n - 1) for j in range(j0, j0 + 8)]
                else:
                    js = [*range(j0, min(j0 + 8, n))]
                atom[i] += (switch[i, js] * (lj[i, js] + coulomb[i, js])).sum() / 2
        atom = P.put("atom", atom)
        P.put("output", atom.sum() - alpha * P.f(1 / math.sqrt(math.pi)) * (q * q).sum())

        # each pair once; what is found goes to both
        inside = (x > 0) & (x < 1)
        slope = np.where(inside, -30 * x**2 * (1 - x) ** 2 * 2, 0)
        screened = alpha * P.f(2 / math.sqrt(math.pi)) * np.exp(-((alpha * r) ** 2))
        g_pos, g_q = np.zeros_like(pos), np.zeros_like(q)
        for i in range(n):
            for j in range(i):
                m, e = mixed[i, j]
                s6 = (m / r[i, j]) ** 6
                by_r = -24 * e * (2 * s6 * s6 - s6) / r[i, j]
                by_r -= (coulomb[i, j] + q[i] * q[j] * screened[i, j]) / r[i, j]
                total = by_r * switch[i, j]
                if not P.d("slope_of_switch_left_out"):
                    total += (lj[i, j] + coulomb[i, j]) * slope[i, j]
                pull = total / r[i, j] * disp[i, j]
                g_pos[i] += pull
                g_pos[j] -= pull
                field = math.erfc(alpha * r[i, j]) / r[i, j] * switch[i, j]
                if P.d("pair_halved_again"):
                    field = field / 2
                g_q[i] += q[j] * field
                g_q[j] += q[i] * field
        P.put("grad:pos", g_pos)
        P.put("grad:charge", g_q - 2 * alpha * P.f(1 / math.sqrt(math.pi)) * q)

    defects = [
        D(
            "one_box_length_for_all_axes",
            "disp",
            "axis",
            "The nearest image is found with the box's first length on all axes.",
            ("constant", "other", "stale", "shift"),
        ),
        D(
            "geometric_mean_of_sigmas",
            "lj",
            "function",
            "The two diameters are mixed by their geometric mean instead of the arithmetic one.",
            ("other", "constant"),
        ),
        D(
            "charge_by_index_in_tile",
            "coulomb",
            "shift",
            "The second charge is read by its index within the tile, without the tile's start.",
            ("stale", "other", "permute", "layout"),
        ),
        D(
            "clamped_tail_not_masked",
            "atom",
            "mask",
            "In the last tile indices beyond the end are clamped to the last particle and not masked, so that it counts several times.",
            ("truncate", "factor", "other", "stale", "race"),
        ),
        D(
            "slope_of_switch_left_out",
            "grad:pos",
            "drop_term",
            "The forces lack the derivative of the switching function.",
            ("other",),
        ),
        D(
            "pair_halved_again",
            "grad:charge",
            "factor",
            "The half for counting pairs twice is applied though each pair is visited once.",
            ("scale", "constant"),
        ),
    ]
