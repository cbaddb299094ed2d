"""A lattice Boltzmann solver, graph attention on a CSR graph, and Gaussian splatting with gradients."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, sigmoid, step

CX = [0, 1, 0, -1, 0, 1, -1, -1, 1]
CY = [0, 0, 1, 0, -1, 1, 1, -1, -1]
WEIGHTS = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
OPPOSITE = [0, 3, 4, 1, 2, 7, 8, 5, 6]


@program("x04", variants=("f32", "f16"))
class lattice_boltzmann:
    """Two steps of D2Q9 with a force, walls by bounce-back and periodic edges; the port pulls, cell by cell."""

    def make(g):
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        return dict(
            f=weights[:, None, None] * rand(g, 9, 11, 14, low=0.5, high=1.6),
            solid=(rand(g, 11, 14) < 0.18).long(),
            force=torch.tensor([0.02, -0.012], dtype=torch.float64) + randn(g, 2, scale=0.003),
        )

    def reference(f, solid, force):
        tau = 0.8
        c = torch.tensor([CX, CY]).to(f.dtype)
        w = torch.tensor(WEIGHTS, dtype=torch.float64).to(f.dtype)[:, None, None]
        for _ in range(2):
            rho = step("rho", f.sum(0))
            u = step("u", (torch.einsum("dq,qyx->dyx", c, f) + tau * force[:, None, None]) / rho)
            cu = torch.einsum("dq,dyx->qyx", c, u)
            feq = step("feq", w * rho * (1 + 3 * cu + 4.5 * cu**2 - 1.5 * u.pow(2).sum(0)))
            post = step("collide", torch.where(solid.bool(), f[OPPOSITE], f - (f - feq) / tau))
            f = step("stream", torch.stack([post[q].roll((CY[q], CX[q]), (0, 1)) for q in range(9)]))
        return torch.einsum("dq,qyx->dyx", c, f)

    def port(P: Port):
        f, solid, (gx, gy) = P["f"], P["solid"], P["force"]
        first, dt = f, f.dtype
        ny, nx = 11, 14
        tau = P.f(0.8)
        omega = tau if P.d("tau_for_omega") else 1 / tau
        opposite = [0, 3, 4, 1, 2, 6, 5, 8, 7] if P.d("opposites_of_other_numbering") else OPPOSITE
        k2, k3 = (9 // 2, 3 // 2) if P.d("integer_division_of_constants") else (4.5, 1.5)
        for it in range(2):
            if P.d("buffers_not_swapped") and it == 1:
                f = first
            rho = f[0].copy()
            for q in range(1, 9):
                rho += f[q]
            rho = P.put("rho", rho)
            jx = f[1] - f[3] + f[5] - f[6] - f[7] + f[8]
            jy = f[2] - f[4] + f[5] + f[6] - f[7] - f[8]
            u = P.put("u", np.stack([(jx + tau * gx) / rho, (jy + tau * gy) / rho]))
            feq = np.empty_like(f)
            for q in range(9):
                cu = CX[q] * u[0] + CY[q] * u[1]
                feq[q] = P.f(WEIGHTS[q]) * rho * (1 + cu * (3 + k2 * cu) - k3 * (u[0] * u[0] + u[1] * u[1]))
            feq = P.put("feq", feq)
            post = np.empty_like(f)
            for q in range(9):
                post[q] = np.where(solid == 1, f[opposite[q]], (1 - omega) * f[q] + omega * feq[q])
            post = P.put("collide", post)

            out = post.copy().reshape(9, ny * nx)
            for q in range(9):
                src = out[q] if P.d("streamed_in_place") else post[q].reshape(-1)
                for y in range(ny):
                    for x in range(nx):
                        sx, sy = x - CX[q], (y - CY[q]) % ny
                        if not (P.d("negative_x_not_wrapped") and sx < 0):  # C's -1 % nx is -1
                            sx = sx % nx
                        out[q, y * nx + x] = src[sy * nx + sx]
            f = P.put("stream", out.reshape(9, ny, nx))
        moments = np.zeros((2, ny, nx), dt)
        for q in range(1, 9):
            moments[0] += CX[q] * f[q]
            moments[1] += CY[q] * f[q]
        P.put("output", moments)

    defects = [
        D(
            "integer_division_of_constants",
            "feq",
            "constant",
            "9/2 and 3/2 are divided as integers, so that the equilibrium has 4 and 1 for 4.5 and 1.5.",
            ("factor", "scale", "precision", "truncate"),
        ),
        D(
            "tau_for_omega",
            "collide",
            "factor",
            "The collision multiplies by tau where it should divide by it.",
            ("constant", "scale", "function", "other"),
        ),
        D(
            "opposites_of_other_numbering",
            "collide",
            "permute",
            "The table of opposite directions belongs to another numbering of the diagonals.",
            ("swap", "flip", "other"),
        ),
        D(
            "streamed_in_place",
            "stream",
            "race",
            "Streaming reads and writes the same buffer, so that cells are read after they were overwritten.",
            ("stale", "other"),
        ),
        D(
            "negative_x_not_wrapped",
            "stream",
            "shift",
            "Left of the first column the index is not wrapped, and the cell at the end of the row before is read.",
            ("other", "layout", "mask"),
        ),
        D(
            "buffers_not_swapped",
            "rho#2",
            "stale",
            "The second time step reads the first one's input, as the two buffers were not swapped.",
            ("swap", "other", "race"),
        ),
    ]


@program("x05", variants=("bf16", "bf16reg", "f32"))
class graph_attention:
    """A GAT layer with edge features and mean pooling by graph; the port goes by CSR row, in blocks of 4 edges."""

    def make(g):
        degree = randint(g, 0, 7, 17)
        degree[randint(g, 0, 6, 1)] = 0
        degree[7], degree[13] = 11, 13
        rowptr = torch.cat([torch.zeros(1, dtype=torch.long), degree.cumsum(0)])
        edges = int(rowptr[-1])
        return dict(
            x=randn(g, 17, 7),
            w=randn(g, 15, 7, scale=0.35),
            a_src=randn(g, 3, 5, scale=0.35),
            a_dst=randn(g, 3, 5, scale=0.35, shift=0.1),
            edge=randn(g, edges, 4),
            w_edge=randn(g, 3, 4, scale=0.25),
            bias=randn(g, 15, scale=0.3),
            rowptr=rowptr,
            col=randint(g, 0, 17, edges),
            batch=torch.tensor([0] * 5 + [1] * 9 + [2] * 3),
        )

    def reference(x, w, a_src, a_dst, edge, w_edge, bias, rowptr, col, batch):
        row = torch.repeat_interleave(torch.arange(17), rowptr.diff())
        h = step("feat", (x @ w.T).view(17, 3, 5))
        src, dst = (h * a_src).sum(-1), (h * a_dst).sum(-1)
        score = step("score", F.leaky_relu(src[col] + dst[row] + edge @ w_edge.T, 0.2))
        index = row[:, None].expand(-1, 3)
        top = torch.full((17, 3), -torch.inf, dtype=score.dtype).scatter_reduce(0, index, score, "amax")
        e = torch.exp(score - top.detach()[row])
        alpha = step("alpha", e / torch.zeros(17, 3, dtype=e.dtype).index_add(0, row, e)[row])
        agg = step("agg", torch.zeros_like(h).index_add(0, row, alpha[:, :, None] * h[col]))
        merged = step("merged", F.elu(agg.reshape(17, 15) + bias))
        count = torch.bincount(batch, minlength=3)
        return torch.zeros(3, 15, dtype=h.dtype).index_add(0, batch, merged) / count[:, None]

    def port(P: Port):
        x, w, a_src, a_dst = P["x"], P["w"], P["a_src"], P["a_dst"]
        rowptr, col, batch = P["rowptr"], P["col"], P["batch"]
        dt, edges = x.dtype, len(col)
        h = np.empty((17, 3, 5), dt)
        for k in range(3):
            h[:, k] = np.einsum("nf,cf->nc", x, w[5 * k : 5 * k + 5])
        h = P.put("feat", h)

        src, dst = np.einsum("nhc,hc->nh", h, a_src), np.einsum("nhc,hc->nh", h, a_dst)
        if P.d("source_and_target_swapped"):
            src, dst = dst, src
        slope = P.f(0.01 if P.d("default_slope") else 0.2)
        bias_e = P["edge"] @ P["w_edge"].T
        score = np.empty((edges, 3), dt)
        for r in range(17):
            for e in range(rowptr[r], rowptr[r + 1]):
                s = src[col[e]] + dst[r] + bias_e[e]
                score[e] = np.maximum(s, 0) + slope * np.minimum(s, 0)
        score = P.put("score", score)

        alpha = np.empty((edges, 3), dt)
        for r in range(17):
            lo, hi = rowptr[r], rowptr[r + 1]
            last = min(hi, lo + 8) if P.d("at_most_eight_edges_summed") else hi
            m, total = np.full(3, -np.inf, dt), np.zeros(3, dt)
            for e in range(lo, last, 4):
                part = score[e : min(e + 4, last)]
                new = np.maximum(m, part.max(0))
                total = total * np.exp(m - new) + np.exp(part - new).sum(0)
                m = new
            for e in range(lo, hi):
                alpha[e] = np.exp(score[e] - m) / total
        alpha = P.put("alpha", alpha)

        agg = np.zeros((17, 3, 5), dt)
        for r in range(17):
            for e in range(rowptr[r], rowptr[r + 1]):
                to, at = (col[e], r) if P.d("messages_against_the_edges") else (r, col[e])
                agg[to] += alpha[e][:, None] * h[at]
        agg = P.put("agg", agg)

        flat = agg.transpose(0, 2, 1).reshape(17, 15) if P.d("heads_innermost") else agg.reshape(17, 15)
        flat = flat + P["bias"]
        merged = P.put("merged", np.where(flat > 0, flat, np.expm1(np.minimum(flat, 0))))

        pooled, count = np.zeros((3, 15), dt), np.zeros((3, 1), dt)
        if P.d("pooled_without_atomics"):
            pooled[batch] += merged
        else:
            np.add.at(pooled, batch, merged)
        np.add.at(count, batch, P.f(1))
        P.put("output", pooled / count)

    defects = [
        D(
            "source_and_target_swapped",
            "score",
            "swap",
            "The attention vectors for the source and the target of an edge are exchanged.",
            ("transpose",),
        ),
        D(
            "default_slope",
            "score",
            "constant",
            "The leaky ReLU has the framework's slope of 0.01, not 0.2.",
            ("factor", "function", "scale"),
        ),
        D(
            "at_most_eight_edges_summed",
            "alpha",
            "truncate",
            "The softmax's sum takes only the first 8 edges of a row.",
            ("drop_term", "mask"),
        ),
        D(
            "messages_against_the_edges",
            "agg",
            "transpose",
            "The messages go from row to column, as with the transposed adjacency.",
            ("swap",),
        ),
        D(
            "heads_innermost",
            "merged",
            "layout",
            "The heads are joined with the head as the fastest index, not the channel.",
            ("transpose", "permute"),
        ),
        D(
            "pooled_without_atomics",
            "output",
            "race",
            "Rows of one graph are added without atomics, so that only one of them remains.",
            ("drop_term", "stale", "truncate", "other"),
        ),
    ]


@program("x06", variants=("f32",))
class gaussian_splatting:
    """Gaussians projected and blended in 11 by 14 pixels, with gradients for opacity and colour by hand."""

    def make(g):
        return dict(
            means=torch.cat([randn(g, 13, 2, scale=0.9), randn(g, 13, 1, scale=0.6, shift=0.3)], 1),
            log_scale=randn(g, 13, 3, scale=0.35, shift=-0.9),
            quat=randn(g, 13, 4),
            opacity=randn(g, 13, scale=0.9, shift=0.8),
            color=rand(g, 13, 3),
            rot=torch.linalg.qr(torch.eye(3, dtype=torch.float64) + randn(g, 3, 3, scale=0.15))[0]
            * torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64),
            trans=torch.tensor([0.1, -0.2, 4.0], dtype=torch.float64) + randn(g, 3, scale=0.05),
            target=rand(g, 11, 14, 3),
        )

    def reference(means, log_scale, quat, opacity, color, rot, trans, target):
        fx, fy, cx, cy = 14.0, 13.0, 7.2, 5.4
        cam = step("cam", means @ rot.T + trans)
        w, x, y, z = F.normalize(quat, dim=-1).unbind(-1)
        r = torch.stack(
            [
                *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
                *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
                *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
            ],
            -1,
        ).view(13, 3, 3)
        m = r * torch.exp(log_scale)[:, None, :]
        cov3 = step("cov3d", m @ m.transpose(1, 2))
        tx, ty, tz = cam.unbind(-1)
        zero = torch.zeros_like(tx)
        j = torch.stack([fx / tz, zero, -fx * tx / tz**2, zero, fy / tz, -fy * ty / tz**2], -1).view(13, 2, 3)
        t = j @ rot
        cov2 = step("cov2d", t @ cov3 @ t.transpose(1, 2) + 0.3 * torch.eye(2, dtype=cam.dtype))
        xy = step("xy", torch.stack([fx * tx / tz + cx, fy * ty / tz + cy], -1))
        px = torch.stack(
            torch.meshgrid(torch.arange(14).to(cam.dtype) + 0.5, torch.arange(11).to(cam.dtype) + 0.5, indexing="xy"),
            -1,
        )
        d = px[:, :, None] - xy
        power = -0.5 * torch.einsum("yxgi,gij,yxgj->yxg", d, torch.linalg.inv(cov2), d)
        a = (torch.sigmoid(opacity) * torch.exp(power)).clamp(max=0.99)
        alpha = step("alpha", torch.where(a < 1 / 255, 0.0, a))
        order = torch.argsort(tz)
        left = torch.cumprod(1 - alpha[:, :, order], -1)
        before = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1]], -1)
        ground = torch.tensor([0.9, 0.7, 0.4], dtype=torch.float64).to(cam.dtype)
        image = step("image", (before * alpha[:, :, order]) @ color[order] + left[..., -1:] * ground)
        return (image - target).pow(2).mean()

    def port(P: Port):
        means, scale, color, rot, trans = P["means"], np.exp(P["log_scale"]), P["color"], P["rot"], P["trans"]
        dt = means.dtype
        fx, fy, cx, cy = P.f(14), P.f(13), P.f(7.2), P.f(5.4)
        ground = P.f([0.9, 0.7, 0.4])
        cam = np.empty((13, 3), dt)
        for n in range(13):
            cam[n] = rot @ means[n] + trans
        cam = P.put("cam", cam)

        cov3 = np.empty((13, 3, 3), dt)
        for n in range(13):
            q = P["quat"][n]
            q = q / np.sqrt(q @ q)
            if P.d("quaternion_real_part_last"):
                q = q[[3, 0, 1, 2]]
            w, v = q[0], q[1:]
            k = np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]], dt)
            r = np.eye(3, dtype=dt) + 2 * w * k + 2 * k @ k  # Rodrigues
            c = np.zeros((3, 3), dt)
            for i in range(3):
                c += scale[n, i] ** 2 * np.outer(r[:, i], r[:, i])
            cov3[n] = c
        cov3 = P.put("cov3d", cov3)

        cov2 = np.empty((13, 2, 2), dt)
        sign = 1 if P.d("jacobian_sign_of_depth") else -1
        for n in range(13):
            x, y, z = cam[n]
            c = rot @ cov3[n] @ rot.T
            j0 = np.array([fx / z, 0, sign * fx * x / (z * z)], dt)
            j1 = np.array([0, fy / z, sign * fy * y / (z * z)], dt)
            a, b, d = j0 @ c @ j0, j0 @ c @ j1, j1 @ c @ j1
            cov2[n] = [[a + P.f(0.3), b], [b, d + P.f(0.3)]]
        cov2 = P.put("cov2d", cov2)
        xy = P.put("xy", np.stack([cam[:, 0] / cam[:, 2] * fx + cx, cam[:, 1] / cam[:, 2] * fy + cy], 1))

        opacity = sigmoid(P["opacity"])
        half = P.f(0 if P.d("pixel_corners_for_centres") else 0.5)
        xs, ys = P.f(np.arange(14)) + half, P.f(np.arange(11)) + half
        gauss = np.empty((11, 14, 13), dt)
        for n in range(13):
            (a, b), (_, d) = cov2[n]
            det = a * d - b * b
            con = (a / det, -b / det, d / det) if P.d("conic_diagonal_not_exchanged") else (d / det, -b / det, a / det)
            dx, dy = (xs - xy[n, 0])[None, :], (ys - xy[n, 1])[:, None]
            gauss[:, :, n] = np.exp(-(con[0] * dx * dx + con[2] * dy * dy) / 2 - con[1] * dx * dy)
        raw = opacity * gauss
        alpha = np.minimum(raw, P.f(0.99))
        alpha[alpha < P.f(1 / 255)] = 0
        alpha = P.put("alpha", alpha)

        order = np.argsort(cam[:, 2], kind="stable")
        image, through = np.zeros((11, 14, 3), dt), np.ones((11, 14), dt)
        grid = (11 // 4, 14 // 4) if P.d("grid_of_whole_tiles") else (-(-11 // 4), -(-14 // 4))
        for ty in range(grid[0]):
            for tx in range(grid[1]):
                for y in range(4 * ty, min(4 * ty + 4, 11)):
                    for x in range(4 * tx, min(4 * tx + 4, 14)):
                        t, c = P.f(1), np.zeros(3, dt)
                        for n in order:
                            if alpha[y, x, n] > 0:
                                c += t * alpha[y, x, n] * color[n]
                                t = t * (1 - alpha[y, x, n])
                        image[y, x], through[y, x] = c + t * ground, t
        image = P.put("image", image)
        diff = image - P["target"]
        P.put("output", P.f((diff * diff).sum() / P.f(diff.size)))

        g_color, g_opacity = np.zeros((13, 3), dt), np.zeros(13, dt)
        d_image = 2 * diff / P.f(diff.size)
        for y in range(11):
            for x in range(14):
                t = through[y, x]
                # what lies behind a Gaussian, seen through nothing
                behind = np.zeros(3, dt) if P.d("background_left_out_backward") else ground.copy()
                for n in order[::-1]:
                    a = alpha[y, x, n]
                    if a == 0:
                        continue
                    t = t / (1 - a)
                    g_color[n] += t * a * d_image[y, x]
                    d_alpha = t * ((color[n] - behind) @ d_image[y, x])
                    if raw[y, x, n] <= P.f(0.99):
                        g_opacity[n] += d_alpha * gauss[y, x, n] * opacity[n] * (1 - opacity[n])
                    behind = a * color[n] + (1 - a) * behind
        P.put("grad:opacity", g_opacity)
        P.put("grad:color", g_color)

    defects = [
        D(
            "quaternion_real_part_last",
            "cov3d",
            "permute",
            "The quaternion is read as (x, y, z, w) where it is (w, x, y, z).",
            ("swap", "layout", "shift"),
        ),
        D(
            "jacobian_sign_of_depth",
            "cov2d",
            "sign",
            "The derivatives by the depth in the projection's Jacobian lack their minus.",
        ),
        D(
            "conic_diagonal_not_exchanged",
            "alpha",
            "swap",
            "The two diagonal entries of the inverse of the 2 by 2 covariance are exchanged.",
            ("transpose", "permute", "flip"),
        ),
        D(
            "pixel_corners_for_centres",
            "alpha",
            "shift",
            "Pixels are taken at their corners, half a pixel away from their centres.",
            ("constant", "drop_term"),
        ),
        D(
            "grid_of_whole_tiles",
            "image",
            "zero",
            "The launch has only as many tiles as fit whole, and pixels beyond them stay zero.",
            ("truncate", "mask"),
        ),
        D(
            "background_left_out_backward",
            "grad:opacity",
            "drop_term",
            "The gradient by alpha leaves out the background that shines through.",
            ("zero", "factor", "other"),
        ),
    ]
