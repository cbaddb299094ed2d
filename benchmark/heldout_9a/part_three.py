"""A step of a lattice Boltzmann flow, and windowed attention with its gradients by hand."""

from __future__ import annotations

import numpy as np
import torch

from benchmark.base import D, Port, program, randn, sigmoid, step

CX, CY = (0, 1, 0, -1, 0, 1, -1, -1, 1), (0, 0, 1, 0, -1, 1, 1, -1, -1)
OPPOSITE = (0, 3, 4, 1, 2, 7, 8, 5, 6)
WEIGHT = (4 / 9, *[1 / 9] * 4, *[1 / 36] * 4)


@program("ba07", variants=("f32", "bf16"))
class lattice_boltzmann:
    """A step of a flow on a lattice of nine velocities: moments with half the force, equilibrium, a relaxation time of
    Smagorinsky, collision with Guo's force, streaming, bounce-back on solid cells, and the drag of each fluid cell. The
    port goes velocity by velocity, and in tiles of four rows where cells collide."""

    def make(g):
        solid = torch.rand(10, 12, generator=g) < 0.12
        solid[0] = solid[9] = True
        w = torch.tensor(WEIGHT, dtype=torch.float64)[:, None, None]
        f = w * (1 + randn(g, 9, 10, 12, scale=0.2).clamp(-0.7, 0.7))
        return dict(f=f, force=randn(g, 2, 10, 12, scale=0.05), solid=solid)

    def reference(f, force, solid):
        c = torch.tensor([CX, CY], dtype=f.dtype)
        w = torch.tensor(WEIGHT, dtype=f.dtype)[:, None, None]
        rho = step("rho", f.sum(0))
        u = step("u", (torch.einsum("di,iyx->dyx", c, f) + force / 2) / rho)
        cu = torch.einsum("di,dyx->iyx", c, u)
        feq = step("feq", w * rho * (1 + 3 * cu + 4.5 * cu.square() - 1.5 * u.square().sum(0)))
        stress = torch.einsum("di,ei,iyx->deyx", c, c, f - feq).square().sum((0, 1)).sqrt()
        tau = step("tau", 0.5 * (0.6 + (0.36 + 1.5 * stress / rho).sqrt()))
        cf = torch.einsum("di,dyx->iyx", c, force)
        push = w * (3 * (cf - (u * force).sum(0)) + 9 * cu * cf)
        post = step("post", f - (f - feq) / tau + (1 - 0.5 / tau) * push)
        moved = torch.stack([torch.roll(post[i], (CY[i], CX[i]), (0, 1)) for i in range(9)])
        moved = step("streamed", moved)
        out, drag = [], 0
        for i in range(9):
            behind = torch.roll(solid, (CY[i], CX[i]), (0, 1)) & ~solid
            out.append(torch.where(behind, post[OPPOSITE[i]], moved[i]))
            drag = drag + 2 * (post[OPPOSITE[i]] * behind) * c[:, OPPOSITE[i], None, None]
        step("bounced", torch.stack(out))
        return drag

    def port(P: Port):
        f, force, solid = P["f"], P["force"], P["solid"]
        dt = f.dtype
        rho = np.zeros((10, 12), dt)
        for i in range(8 if P.d("last_velocity_not_summed") else 9):
            rho += f[i]
        rho = P.put("rho", rho)

        u = np.zeros((2, 10, 12), dt) if P.d("half_force_left_out") else force / 2
        for i in range(9):
            u[0] += CX[i] * f[i]
            u[1] += CY[i] * f[i]
        u = P.put("u", u / rho)

        feq = np.empty_like(f)
        quadratic = 3 if P.d("square_with_the_linear_factor") else 4.5
        for i in range(9):
            along = CX[i] * u[0] + CY[i] * u[1]
            feq[i] = P.f(WEIGHT[i]) * rho * (1 + along * (3 + quadratic * along) - 1.5 * (u[0] ** 2 + u[1] ** 2))
        feq = P.put("feq", feq)

        xx, yy, xy = np.zeros((3, 10, 12), dt)
        for i in range(1, 9):
            off = f[i] - feq[i]
            xx += CX[i] ** 2 * off
            yy += CY[i] ** 2 * off
            xy += CX[i] * CY[i] * off
        shear = 1 if P.d("shear_counted_once") else 2
        stress = np.sqrt(xx**2 + yy**2 + shear * xy**2)
        tau = P.put("tau", P.f(0.3) + np.sqrt(P.f(0.36) + P.f(1.5) * stress / rho) / 2)

        post, buffer = np.empty_like(f), np.empty((4, 12), dt)
        for y in range(0, 10, 4):
            r = slice(y, min(y + 4, 10))
            n = r.stop - y
            if n == 4 or not P.d("short_tile_keeps_old_relaxation"):
                buffer[:n] = tau[r]
            rate = 1 / buffer[:n]
            fx, fy = force[:, r]
            for i in range(9):
                cf, cu = CX[i] * fx + CY[i] * fy, CX[i] * u[0, r] + CY[i] * u[1, r]
                push = P.f(WEIGHT[i]) * (3 * cf - 3 * (u[0, r] * fx + u[1, r] * fy) + 9 * cu * cf)
                post[i, r] = (1 - rate) * f[i, r] + rate * feq[i, r] + (1 - rate / 2) * push
        post = P.put("post", post)

        streamed = np.empty_like(f)
        for i in range(9):
            cy = -CY[i] if P.d("diagonals_move_the_other_way_in_y") and i >= 5 else CY[i]
            ys, xs = (np.arange(10) - cy) % 10, (np.arange(12) - CX[i]) % 12
            streamed[i] = post[i][ys][:, xs]
        if P.d("row_moved_in_place"):
            row = post[1].copy()
            last = row[:, 11].copy()
            for x in range(1, 12):
                row[:, x] = row[:, x - 1]
            row[:, 0] = last
            streamed[1] = row
        streamed = P.put("streamed", streamed)

        opposite = list(OPPOSITE)
        if P.d("opposites_of_two_diagonals_exchanged"):
            opposite[5], opposite[6] = opposite[6], opposite[5]
        bounced, drag = streamed.copy(), np.zeros((2, 10, 12), dt)
        for i in range(9):
            for y in range(10):
                for x in range(12):
                    if solid[y, x]:
                        continue
                    if solid[(y - CY[i]) % 10, (x - CX[i]) % 12]:
                        drag[0, y, x] -= 2 * post[OPPOSITE[i], y, x] * CX[i]
                        drag[1, y, x] -= 2 * post[OPPOSITE[i], y, x] * CY[i]
                    ahead = P.d("solid_looked_for_ahead")
                    at = (y + CY[i], x + CX[i]) if ahead else (y - CY[i], x - CX[i])
                    if solid[at[0] % 10, at[1] % 12]:
                        bounced[i, y, x] = post[opposite[i], y, x]
        P.put("bounced", bounced)
        P.put("output", -drag if P.d("drag_along_the_returning_velocity") else drag)

    defects = [
        D(
            "last_velocity_not_summed",
            "rho",
            "truncate",
            "The density sums eight velocities; the last one is left out.",
            ("drop_term", "mask"),
        ),
        D(
            "half_force_left_out",
            "u",
            "drop_term",
            "The velocity lacks half the force.",
            ("zero",),
        ),
        D(
            "square_with_the_linear_factor",
            "feq",
            "constant",
            "The square of the velocity along the direction has the factor 3 of the linear term; it should be 9/2.",
            ("factor", "scale"),
        ),
        D(
            "shear_counted_once",
            "tau",
            "factor",
            "The stress's norm counts the off-diagonal entry once, not twice.",
            ("drop_term", "constant", "scale", "truncate"),
        ),
        D(
            "short_tile_keeps_old_relaxation",
            "post",
            "stale",
            "The last tile, of two rows, collides with the relaxation times of the tile before, still in the buffer.",
            ("shift", "mask", "truncate"),
        ),
        D(
            "diagonals_move_the_other_way_in_y",
            "streamed",
            "sign",
            "Populations of the four diagonals are moved in y against their velocity.",
            ("shift", "flip", "swap", "permute", "other"),
        ),
        D(
            "row_moved_in_place",
            "streamed",
            "race",
            "The population that moves along x is moved in place; each cell overwrites what the next one needs.",
            ("stale", "shift", "other", "axis"),
        ),
        D(
            "opposites_of_two_diagonals_exchanged",
            "bounced",
            "swap",
            "The table of opposite velocities has two diagonals in each other's place.",
            ("permute", "other"),
        ),
        D(
            "solid_looked_for_ahead",
            "bounced",
            "mask",
            "A population bounces where the next cell is solid; it should where the cell that it comes from is.",
            ("sign", "shift", "flip", "other"),
        ),
        D(
            "drag_along_the_returning_velocity",
            "output",
            "sign",
            "The drag is counted along the velocity after the wall; it should be along the one before.",
            ("flip", "swap"),
        ),
    ]


SLOPES = tuple(2.0 ** (-2 * h) for h in (1, 2, 3, 4))


@program("ba08", variants=("bf16", "f32"), wide=("scores", "output"))
class windowed_attention_backward:
    """Attention of four query heads on two key heads with normalised queries and keys, linear biases, a causal window
    of 4 and a gate for each head, and the gradients of a weighted mean over valid tokens. The port has the gradients by
    hand, each in a kernel of its own; that of queries goes in tiles of 4 rows."""

    def make(g):
        return dict(
            q=randn(g, 2, 10, 4, 6, scale=1.5),
            k=randn(g, 2, 10, 2, 6, scale=1.5),
            v=randn(g, 2, 10, 2, 6, shift=0.4),
            gq=randn(g, 6, scale=0.3, shift=1.3),
            gk=randn(g, 6, scale=0.3, shift=1.3),
            gate=randn(g, 2, 10, 4),
            co=randn(g, 2, 10, 4, 6, shift=0.5),
            lens=torch.tensor([10, 7])[torch.randperm(2, generator=g)],
        )

    def reference(q, k, v, gq, gk, gate, co, lens):
        qn = step("qn", q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-5) * gq)
        kn = step("kn", k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-5) * gk)
        s = torch.einsum("bihd,bjhd->bhij", qn, kn.repeat_interleave(2, 2)) / 6**0.5
        i = torch.arange(10)
        dist = i[:, None] - i
        s = step("scores", s - torch.tensor(SLOPES, dtype=q.dtype)[:, None, None] * dist)
        seen = (dist >= 0) & (dist < 4) & (i < lens[:, None])[:, None, None]
        p = step("probs", torch.softmax(s.masked_fill(~seen, float("-inf")), -1))
        attn = step("attn", torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2)))
        gated = step("gated", attn * torch.sigmoid(gate)[..., None])
        valid = (i < lens[:, None])[..., None, None]
        return (gated * co * valid).sum() / lens.sum()

    def port(P: Port):
        q, k, v, gq, gk, co, lens = (P[n] for n in ("q", "k", "v", "gq", "gk", "co", "lens"))
        dt = q.dtype
        inv = P.f(6**-0.5)

        def inverse(x):
            return 1 / np.sqrt((x * x).sum(-1, keepdims=True) / 6 + P.f(1e-5))

        rq, rk = inverse(q), inverse(k)
        if P.d("norm_over_all_heads"):
            qn = q / np.sqrt((q * q).mean((2, 3), keepdims=True) + P.f(1e-5)) * gq
        else:
            qn = q * rq * gq
        qn = P.put("qn", qn)
        kn = k * rk * gk
        if P.d("keys_normalised_twice"):
            kn = kn * inverse(kn) * gk
        kn = P.put("kn", kn)

        scores, probs, exact = np.empty((3, 2, 4, 10, 10), dt)
        for h in range(4):
            slope = P.f(4.0**-h if P.d("slopes_start_at_one") else 4.0 ** -(h + 1))
            for i in range(10):
                for j in range(10):
                    scores[:, h, i, j] = (qn[:, i, h] * kn[:, j, h // 2]).sum(1) * inv - slope * (i - j)
        scores = P.put("scores", scores)
        window = 5 if P.d("window_one_too_wide") else 4
        for b in range(2):
            for i in range(10):
                for w, into in ((window, probs), (4, exact)):
                    s = slice(max(0, i - w + 1), min(i + 1, lens[b]))
                    e = np.exp(scores[b, :, i, s] - scores[b, :, i, s].max(-1, keepdims=True))
                    into[b, :, i] = 0
                    into[b, :, i, s] = e / e.sum(-1, keepdims=True)
        probs = P.put("probs", probs)
        attn = np.empty((2, 10, 4, 6), dt)
        for h in range(4):
            at = h % 2 if P.d("values_dealt_in_turn") else h // 2
            attn[:, :, h] = probs[:, h] @ v[:, :, at]
        attn = P.put("attn", attn)
        gate = sigmoid(P["gate"])
        gated = P.put("gated", attn * gate[..., None])
        count = P.f(lens.sum())
        P.put("output", sum((gated[b, : lens[b]] * co[b, : lens[b]]).sum() for b in range(2)) / count)

        dout = co / count
        for b in range(2):
            dout[b, lens[b] :] = 0
        slope = 1 - gate**2 if P.d("slope_of_another_function") else gate * (1 - gate)
        dattn = dout * gate[..., None]

        dqn, dqn_gain = np.zeros_like(q), np.zeros_like(q)
        dkn, dkn_gain, dv = np.zeros_like(k), np.zeros_like(k), np.zeros_like(v)
        for b in range(2):
            for h in range(4):
                g = h // 2
                dp = dattn[b, :, h] @ v[b, :, g].T
                delta = (dp * exact[b, h]).sum(1, keepdims=True)
                ds = exact[b, h] * (dp - delta) * inv
                dqn_gain[b, :, h] = ds @ kn[b, :, g]
                for t in range(0, 10, 4):
                    r = slice(t, t + 4)
                    if t == 8 and P.d("delta_not_subtracted_in_short_tile"):
                        dqn[b, r, h] = (exact[b, h, r] * dp[r] * inv) @ kn[b, :, g]
                    else:
                        dqn[b, r, h] = ds[r] @ kn[b, :, g]
                dkn[b, :, g] += (ds if P.d("scores_gradient_not_transposed") else ds.T) @ qn[b, :, h]
                dkn_gain[b, :, g] += ds.T @ qn[b, :, h]
                part = probs[b, h].T @ dattn[b, :, h]
                dv[b, :, g] = part if P.d("second_head_overwrites") else dv[b, :, g] + part

        def through_norm(x, r, dy, gain):
            hat, dh = x * r, dy * gain
            return r * (dh - hat * ((dh * hat).sum(-1, keepdims=True) / 6))

        P.put("grad:q", through_norm(q, rq, dqn, gq))
        P.put("grad:k", through_norm(k, rk, dkn, gk))
        P.put("grad:v", dv)
        dgq, dgk = np.zeros(6, dt), np.zeros(6, dt)
        for b in range(2):
            if P.d("gain_gradient_cleared_for_each_sequence"):
                dgq[:] = 0
            dgq += (dqn_gain[b] * q[b] * rq[b]).sum((0, 1))
            dgk += (dkn_gain[b] * k[b] * rk[b]).sum((0, 1))
        P.put("grad:gq", dgq)
        P.put("grad:gk", dgk)
        P.put("grad:gate", (dout * attn).sum(-1) * slope)

    def loss(result):
        return result

    defects = [
        D(
            "norm_over_all_heads",
            "qn",
            "axis",
            "A query's mean square is taken over all four heads, not in each head.",
            ("factor", "scale", "function", "other"),
        ),
        D(
            "keys_normalised_twice",
            "kn",
            "other",
            "Keys are normalised and multiplied with the gains a second time.",
            ("factor", "scale", "function"),
        ),
        D(
            "slopes_start_at_one",
            "scores",
            "scale",
            "The slopes of the linear biases start at 1, not at 1/4; each is four times too large.",
            ("factor", "constant", "shift"),
        ),
        D(
            "window_one_too_wide",
            "probs",
            "mask",
            "The window lets a fifth key through.",
            ("constant", "shift", "truncate"),
        ),
        D(
            "values_dealt_in_turn",
            "attn",
            "layout",
            "Head h reads value head h % 2; neighbouring heads share one (h // 2). Keys are read rightly.",
            ("permute", "swap", "other"),
        ),
        D(
            "delta_not_subtracted_in_short_tile",
            "grad:q",
            "drop_term",
            "In the last tile of rows, which is not full, the softmax's gradient lacks the row sum.",
            ("mask", "truncate", "stale", "zero"),
        ),
        D(
            "scores_gradient_not_transposed",
            "grad:k",
            "transpose",
            "The gradient of keys multiplies the scores' gradient with queries without transposing it.",
            ("swap", "layout", "axis"),
        ),
        D(
            "second_head_overwrites",
            "grad:v",
            "race",
            "The second query head of a group overwrites the gradient of the values where it should add to it.",
            ("stale", "drop_term", "truncate", "other", "mask"),
        ),
        D(
            "gain_gradient_cleared_for_each_sequence",
            "grad:gq",
            "truncate",
            "The sum for the gain's gradient is cleared at each sequence, so that only the last one is in it.",
            ("drop_term", "stale", "race", "zero", "mask"),
        ),
        D(
            "slope_of_another_function",
            "grad:gate",
            "function",
            "The gate's gradient has 1 - s^2, the derivative of tanh; a sigmoid has s (1 - s).",
            ("constant", "drop_term", "factor", "sign"),
        ),
    ]
