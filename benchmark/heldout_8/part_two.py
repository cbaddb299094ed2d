"""A convolutional decoder block, graph attention with a gated update, and a step of molecular dynamics."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randn, sigmoid, step


@program("a04", variants=("bf16", "f32", "bf16reg"))
class decoder_block:
    """Group norm, SiLU, a grouped, strided and dilated convolution, a transposed one, bilinear resizing, pooling and a
    1x1 convolution over a concatenation. The port gathers by taps, scatters, and resizes by two matrices."""

    def make(g):
        return dict(
            x=randn(g, 2, 6, 7, 9, scale=1.3) * rand(g, 6, 1, 1, low=0.4, high=2.0) + randn(g, 6, 1, 1, scale=0.8),
            gn_w=randn(g, 6, scale=0.3, shift=1.0),
            gn_b=randn(g, 6, scale=0.3),
            w1=randn(g, 8, 3, 3, 3, scale=0.3),
            b1=randn(g, 8, scale=0.4),
            wt=randn(g, 8, 5, 3, 4, scale=0.25),
            bt=randn(g, 5, scale=0.4),
            skip=randn(g, 2, 3, 6, 7),
            w_out=randn(g, 4, 8, scale=0.5),
        )

    def reference(x, gn_w, gn_b, w1, b1, wt, bt, skip, w_out):
        y = step("normed", F.group_norm(x, 3, gn_w, gn_b, 1e-5))
        y = step("act", F.silu(y))
        y = step("conv", F.conv2d(y, w1, b1, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2))
        y = step("up", F.conv_transpose2d(y, wt, bt, stride=2, padding=1, output_padding=(1, 0)))
        y = step("resized", F.interpolate(y, size=(11, 13), mode="bilinear", align_corners=False))
        y = step("pooled", F.avg_pool2d(y, 3, 2, 1, count_include_pad=False))
        return F.conv2d(torch.cat([y, skip], 1), w_out[:, :, None, None])

    def port(P: Port):
        x, gw, gb = P["x"], P["gn_w"], P["gn_b"]
        dt = x.dtype
        y = np.empty_like(x)
        groups = [[0, 1], [2, 3], [4, 5]]
        if P.d("group_channels_interleaved"):
            groups = [[0, 3], [1, 4], [2, 5]]
        if P.d("statistics_per_channel"):
            groups = [[c] for c in range(6)]
        for n in range(2):
            for chans in groups:
                part = x[n, chans]
                mean = part.sum() / part.size
                var = ((part - mean) ** 2).sum() / part.size
                for c in chans:
                    y[n, c] = (x[n, c] - mean) / np.sqrt(var + P.f(1e-5)) * gw[c] + gb[c]
        y = P.put("normed", y)

        act = P.put("act", y * sigmoid(P.f(1.702) * y if P.d("quick_gelu") else y))

        w1 = P["w1"]
        if P.d("kernel_flipped"):
            w1 = w1[:, :, ::-1, ::-1]
        mode = "edge" if P.d("border_clamped") else "constant"
        padded = np.pad(act, ((0, 0), (0, 0), (1, 1), (2, 2)), mode=mode)
        conv = np.zeros((2, 8, 4, 9), dt) + P["b1"][:, None, None]
        for o in range(8):
            first = 0 if P.d("every_group_reads_the_first") else o // 4 * 3
            for c in range(3):
                for i in range(3):
                    for j in range(3):
                        conv[:, o] += w1[o, c, i, j] * padded[:, first + c, i : i + 7 : 2, 2 * j : 2 * j + 9]
        conv = P.put("conv", conv)

        wt = P["wt"]
        if P.d("transposed_weight_read_out_first"):
            wt = wt.reshape(5, 8, 3, 4).transpose(1, 0, 2, 3)
        full = np.zeros((2, 5, 10, 20), dt)
        for i in range(3):
            for j in range(4):
                full[:, :, i : i + 7 : 2, j : j + 17 : 2] += np.einsum("nchw,cd->ndhw", conv, wt[:, :, i, j])
        start = 0 if P.d("transposed_padding_left_out") else 1
        up = P.put("up", full[:, :, start : start + 8, start : start + 18] + P["bt"][:, None, None])

        def weights(size, to):
            m = np.zeros((to, size), dt)
            for o in range(to):
                if P.d("pixel_corners_for_centres"):
                    at = P.f(o) * P.f(size / to)
                else:
                    at = max(P.f((o + 0.5) * (size / to) - 0.5), P.f(0))
                low = int(at)
                frac = P.f(at - low)
                m[o, low] += 1 - frac
                m[o, min(low + 1, size - 1)] += frac
            return m

        rows, cols = weights(8, 11), weights(18, 13)
        resized = P.put("resized", np.einsum("oh,nchw,pw->ncop", rows, up, cols))

        pooled = np.empty((2, 5, 6, 7), dt)
        for i in range(6):
            for j in range(7):
                part = resized[:, :, max(2 * i - 1, 0) : 2 * i + 2, max(2 * j - 1, 0) : 2 * j + 2]
                pooled[:, :, i, j] = part.sum((2, 3)) / (part.shape[2] * part.shape[3])
        pooled = P.put("pooled", pooled)

        parts = [pooled, P["skip"]]
        if P.d("skip_concatenated_first"):
            parts = parts[::-1]
        cat = np.concatenate(parts, 1).reshape(2, 8, 42)
        P.put("output", np.stack([P["w_out"] @ cat[n] for n in range(2)]).reshape(2, 4, 6, 7))

    defects = [
        D(
            "group_channels_interleaved",
            "normed",
            "layout",
            "A group of the norm is every third channel; it should be two neighbouring channels.",
            ("permute", "axis"),
        ),
        D(
            "statistics_per_channel",
            "normed",
            "axis",
            "Mean and variance are taken for each channel (instance norm), not for each group.",
            ("other", "function", "scale"),
        ),
        D(
            "quick_gelu",
            "act",
            "function",
            "The activation is the quick GELU, x * sigmoid(1.702 x), not SiLU.",
            ("factor", "scale", "constant"),
        ),
        D(
            "kernel_flipped",
            "conv",
            "flip",
            "The kernel is flipped in both directions: a convolution where a cross-correlation is meant.",
            ("permute", "transpose"),
        ),
        D(
            "border_clamped",
            "conv",
            "mask",
            "Indices beyond the border are clamped to it where zeros are meant.",
            ("zero", "other", "stale", "shift"),
        ),
        D(
            "every_group_reads_the_first",
            "conv",
            "layout",
            "The offset of a group's input channels is missing: both groups read the first three channels.",
            ("shift", "other", "swap", "stale", "drop_term"),
        ),
        D(
            "transposed_weight_read_out_first",
            "up",
            "transpose",
            "The transposed convolution's weight is read as [out, in, ...]; it is stored as [in, out, ...].",
            ("layout", "permute"),
        ),
        D(
            "transposed_padding_left_out",
            "up",
            "shift",
            "The transposed convolution's padding is not cut off at the start, so that all is one pixel off.",
            ("other", "drop_term", "truncate", "constant"),
        ),
        D(
            "pixel_corners_for_centres",
            "resized",
            "shift",
            "Resizing maps pixel corners, without the half pixel to the centres.",
            ("constant", "drop_term", "other", "function"),
        ),
        D(
            "skip_concatenated_first",
            "output",
            "swap",
            "The skip connection is concatenated before the decoder's channels, not after them.",
            ("layout", "permute"),
        ),
    ]


@program("a05", variants=("f32",))
class graph_attention:
    """Attention over the edges of a graph in CSR (rows are destinations) with edge features, then a GRU cell. The port
    goes row by row, in tiles of 4 edges."""

    def make(g):
        degrees = torch.tensor([0, 1, 2, 3, 4, 5, 6, 1, 3, 2, 7, 0, 5])[torch.randperm(13, generator=g)]
        return dict(
            x=randn(g, 13, 10),
            indptr=torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)]),
            indices=torch.randint(0, 13, (39,), generator=g),
            edge_ids=torch.randperm(39, generator=g),
            edge_attr=randn(g, 39, 4),
            w=randn(g, 12, 10, scale=0.4),
            w_edge=randn(g, 3, 4, scale=0.4),
            a_src=randn(g, 3, 4, scale=0.6),
            a_dst=randn(g, 3, 4, scale=0.6),
            w_ih=randn(g, 30, 12, scale=0.35),
            w_hh=randn(g, 30, 10, scale=0.35),
            b_ih=randn(g, 30, scale=0.3),
            b_hh=randn(g, 30, scale=0.5),
        )

    def reference(x, indptr, indices, edge_ids, edge_attr, w, w_edge, a_src, a_dst, w_ih, w_hh, b_ih, b_hh):
        feat = step("feat", x @ w.T)
        f = feat.view(13, 3, 4)
        dst = torch.repeat_interleave(torch.arange(13), indptr.diff())
        e = (f * a_src).sum(-1)[indices] + (f * a_dst).sum(-1)[dst] + (edge_attr @ w_edge.T)[edge_ids]
        e = step("logits", F.leaky_relu(e, 0.2))
        top = e.new_full((13, 3), float("-inf")).scatter_reduce(0, dst[:, None].expand(39, 3), e.detach(), "amax")
        p = torch.exp(e - top[dst])
        alpha = step("alpha", p / torch.zeros_like(f[..., 0]).index_add(0, dst, p)[dst])
        msg = torch.zeros_like(f).index_add(0, dst, alpha[..., None] * f[indices])
        msg = step("msg", msg.reshape(13, 12))
        ir, iz, i_n = F.linear(msg, w_ih, b_ih).chunk(3, -1)
        hr, hz, hn = F.linear(x, w_hh, b_hh).chunk(3, -1)
        r = step("reset", torch.sigmoid(ir + hr))
        z = step("update", torch.sigmoid(iz + hz))
        n = step("cand", torch.tanh(i_n + r * hn))
        return (1 - z) * n + z * x

    def port(P: Port):
        x, indptr, src = P["x"], P["indptr"], P["indices"]
        dt = x.dtype
        feat = np.zeros((13, 12), dt)
        for k in range(0, 10, 4):
            feat += x[:, k : k + 4] @ P["w"][:, k : k + 4].T
        feat = P.put("feat", feat)

        a_src, a_dst = P["a_src"].reshape(-1), P["a_dst"].reshape(-1)
        if P.d("source_and_destination_swapped"):
            a_src, a_dst = a_dst, a_src
        slope = P.f(0.01 if P.d("slope_of_default_leaky_relu") else 0.2)
        e = np.empty((39, 3), dt)
        for i in range(13):
            for k in range(indptr[i], indptr[i + 1]):
                attr = P["edge_attr"][k if P.d("edge_features_in_input_order") else P["edge_ids"][k]]
                for h in range(3):
                    s = slice(4 * h, 4 * h + 4)
                    v = feat[src[k], s] @ a_src[s] + feat[i, s] @ a_dst[s] + P["w_edge"][h] @ attr
                    e[k, h] = v if v > 0 else slope * v
        e = P.put("logits", e)

        alpha = np.empty((39, 3), dt)
        rows = [(0, 39)] if P.d("softmax_over_all_edges") else list(zip(indptr[:-1], indptr[1:], strict=True))
        for start, end in rows:
            if start == end:
                continue
            top = e[start:end].max(0)
            total = np.zeros(3, dt)
            for k in range(start, end):
                total += np.exp(e[k] - top)
            alpha[start:end] = np.exp(e[start:end] - top) / total
        alpha = P.put("alpha", alpha)

        wide = np.repeat(alpha, 4, 1)
        if P.d("head_of_feature_interleaved"):
            wide = np.tile(alpha, (1, 4))
        msg = np.zeros((13, 12), dt)
        acc = np.zeros(12, dt)
        for i in range(13):
            start, end = indptr[i], indptr[i + 1]
            if start < end or not P.d("buffer_kept_for_rows_without_edges"):
                acc = np.zeros(12, dt)
            for t in range(start, end, 4):
                k = slice(t, min(t + 4, end))
                part = (wide[k] * feat[src[k]]).sum(0)
                acc = part if P.d("tiles_stored_without_atomic_add") else acc + part
            msg[i] = acc
        msg = P.put("msg", msg)

        w_ih, w_hh, b_ih, b_hh = P["w_ih"], P["w_hh"], P["b_ih"], P["b_hh"]
        R, Z, N = slice(0, 10), slice(10, 20), slice(20, 30)
        if P.d("update_gate_stored_first"):
            R, Z = Z, R

        def gate(s):
            lin = np.concatenate([msg, x], 1) @ np.concatenate([w_ih[s], w_hh[s]], 1).T
            return sigmoid(lin + (b_ih[s] + b_hh[s]))

        r, z = P.put("reset", gate(R)), P.put("update", gate(Z))
        new = np.einsum("nk,fk->nf", msg, w_ih[N]) + b_ih[N]
        if P.d("reset_before_product"):
            new = new + ((r * x) @ w_hh[N].T + b_hh[N])
        else:
            new = new + r * (x @ w_hh[N].T + b_hh[N])
        n = P.put("cand", np.tanh(new))
        P.put("output", n + z * (n - x) if P.d("update_difference_negated") else n + z * (x - n))

    defects = [
        D(
            "source_and_destination_swapped",
            "logits",
            "swap",
            "The attention vectors for an edge's source and destination are applied to each other's node.",
            ("transpose", "permute"),
        ),
        D(
            "slope_of_default_leaky_relu",
            "logits",
            "constant",
            "The leaky ReLU has the default slope 0.01, not 0.2.",
            ("function", "factor", "scale"),
        ),
        D(
            "edge_features_in_input_order",
            "logits",
            "permute",
            "Edge features are read in the order of the edge list; the CSR order has its own edge ids.",
            ("layout", "other", "swap"),
        ),
        D(
            "softmax_over_all_edges",
            "alpha",
            "axis",
            "The softmax goes over all edges of the graph, not over those of each destination.",
            ("other", "scale", "factor", "mask"),
        ),
        D(
            "head_of_feature_interleaved",
            "msg",
            "layout",
            "Feature f is weighted by head f % 3; heads are contiguous, f // 4.",
            ("permute", "swap"),
        ),
        D(
            "buffer_kept_for_rows_without_edges",
            "msg",
            "stale",
            "A node without edges gets the sum of the node before it, because the buffer is not cleared.",
            ("zero", "mask", "other"),
        ),
        D(
            "tiles_stored_without_atomic_add",
            "msg",
            "race",
            "Tiles of a row's edges overwrite each other's sums where they should be added.",
            ("drop_term", "truncate", "stale", "other", "mask"),
        ),
        D(
            "update_gate_stored_first",
            "reset",
            "swap",
            "Reset and update gates are taken from each other's rows (the order of Keras and ONNX).",
            ("layout", "permute"),
        ),
        D(
            "reset_before_product",
            "cand",
            "other",
            "The reset gate is applied to the state before the recurrent product, not to the product and its bias.",
            ("function", "swap", "factor"),
        ),
        D(
            "update_difference_negated",
            "output",
            "sign",
            "In the form n + z * (h - n) the difference has the wrong sign.",
            ("swap", "other"),
        ),
    ]


CUT, ON = 2.4, 1.6


def pair_terms(pos, types, charge, sigma, epsilon, box, bonds):
    """The energy of each pair, and forces."""
    n = len(pos)
    d = pos[:, None] - pos[None]
    d = d - box * torch.round(d / box)
    r2 = step("dist2", d.square().sum(-1))
    eye = torch.eye(n, dtype=torch.bool)
    excluded = eye.index_put((bonds[:, 0], bonds[:, 1]), torch.tensor(True))
    keep = (r2 < CUT**2) & ~(excluded | excluded.T)
    safe = torch.where(eye, torch.ones_like(r2), r2)
    sig = (sigma[types][:, None] + sigma[types][None]) / 2
    eps = torch.sqrt(epsilon[types][:, None] * epsilon[types][None])
    s6 = (sig.square() / safe) ** 3
    lj, dlj = 4 * eps * (s6.square() - s6), 4 * eps * (3 * s6 - 6 * s6.square()) / safe
    a, b = CUT**2 - safe, (CUT**2 - ON**2) ** 3
    outer = safe > ON**2
    sw = torch.where(outer, a.square() * (CUT**2 + 2 * safe - 3 * ON**2) / b, torch.ones_like(a))
    dsw = torch.where(outer, 6 * a * (ON**2 - safe) / b, torch.zeros_like(a))
    qq = charge[:, None] * charge[None]
    energy = step("pair_energy", keep * (lj * sw + qq * (safe**-0.5 + safe / (2 * CUT**3) - 1.5 / CUT)))
    over_r = keep * (-2 * (dlj * sw + lj * dsw) + qq * (safe**-1.5 - CUT**-3))
    force = step("force", (over_r[..., None] * d).sum(1))
    return energy, force, over_r * r2


@program("a06", variants=("f32",))
class verlet_step:
    """A step of velocity Verlet in a periodic box: switched Lennard-Jones with mixed types, reaction-field charges, and
    excluded bonds; then temperature and pressure. The port goes through pairs once and adds to both particles."""

    def make(g):
        box = torch.tensor([5.2, 6.1, 7.0], dtype=torch.float64)
        grid = torch.cartesian_prod(*(torch.arange(3.0, dtype=torch.float64),) * 3)
        pos = grid[torch.randperm(27, generator=g)[:13]] / 3 * box + rand(g, 13, 3, low=-0.2, high=0.2)
        d = pos[:, None] - pos[None]
        r = (d - box * torch.round(d / box)).norm(dim=-1) + 100 * torch.ones(13, 13).tril()
        near = r.flatten().topk(4, largest=False).indices
        return dict(
            pos=pos,
            vel=randn(g, 13, 3, scale=0.8),
            types=torch.arange(13) % 2,
            charge=randn(g, 13, scale=0.7),
            mass=torch.tensor([0.8, 2.1], dtype=torch.float64),
            sigma=rand(g, 2, low=-0.08, high=0.08) + torch.tensor([1.1, 1.7], dtype=torch.float64),
            epsilon=rand(g, 2, low=-0.1, high=0.1) + torch.tensor([0.6, 1.2], dtype=torch.float64),
            box=box,
            bonds=torch.stack([near // 13, near % 13], 1),
        )

    def reference(pos, vel, types, charge, mass, sigma, epsilon, box, bonds):
        dt, m = 0.05, mass[types][:, None]
        _, force, _ = pair_terms(pos, types, charge, sigma, epsilon, box, bonds)
        half = step("vel_half", vel + dt / 2 * force / m)
        moved = pos + dt * half
        moved = step("moved", moved - box * torch.floor(moved / box))
        _, force, virial = pair_terms(moved, types, charge, sigma, epsilon, box, bonds)
        new = step("vel_new", half + dt / 2 * force / m)
        twice_kinetic = (m * new.square()).sum()
        temperature = step("temperature", twice_kinetic / (3 * 13 - 3))
        pressure = ((3 * 13 - 3) * temperature + virial.sum() / 2) / (3 * box.prod())
        return pressure

    def port(P: Port):
        types, charge, box = P["types"], P["charge"], P["box"]
        sigma, epsilon = P["sigma"], P["epsilon"]
        c2, o2, dtype = P.f(CUT**2), P.f(ON**2), box.dtype
        bonded = {frozenset(b) for b in P["bonds"].tolist()}

        def pairs(pos):
            edges = np.repeat(box[:1], 3) if P.d("first_box_edge_for_all_axes") else box
            r2, energy = np.zeros((13, 13), dtype), np.zeros((13, 13), dtype)
            vec = {}
            for i in range(13):
                for j in range(i + 1, 13):
                    d = pos[i] - pos[j]
                    d = np.where(d > edges / 2, d - edges, np.where(d < -edges / 2, d + edges, d))
                    d = np.where(d > edges / 2, d - edges, np.where(d < -edges / 2, d + edges, d))
                    vec[i, j] = d
                    r2[i, j] = r2[j, i] = d[0] * d[0] + d[1] * d[1] + d[2] * d[2]
            r2 = P.put("dist2", r2)
            force, virial = np.zeros((13, 3), dtype), P.f(0)
            for (i, j), d in vec.items():
                if r2[i, j] >= c2 or (frozenset((i, j)) in bonded and not P.d("bonded_pairs_not_excluded")):
                    continue
                if P.d("geometric_mean_of_sigma"):
                    sig = np.sqrt(sigma[types[i]] * sigma[types[j]])
                else:
                    sig = P.f(0.5) * (sigma[types[i]] + sigma[types[j]])
                four_eps = 4 * np.sqrt(epsilon[types[i]] * epsilon[types[j]])
                inv2 = 1 / r2[i, j]
                s6 = (sig * sig * inv2) ** 3
                lj, pull = four_eps * s6 * (s6 - 1), four_eps * 6 * s6 * (2 * s6 - 1) * inv2
                if r2[i, j] > o2:
                    gap, width = c2 - r2[i, j], c2 - o2
                    sw = gap * gap * (width + 2 * (r2[i, j] - o2)) / width**3
                    slope = 12 * gap * (r2[i, j] - o2) / width**3
                    pull = pull * sw if P.d("slope_of_switch_left_out") else pull * sw + lj * slope
                    lj = lj * sw
                qq, inv = charge[i] * charge[j], np.sqrt(inv2)
                energy[i, j] = energy[j, i] = lj + qq * (inv + r2[i, j] * P.f(0.5 / CUT**3) - P.f(1.5 / CUT))
                pull = pull + qq * (inv * inv2 - P.f(CUT**-3))
                force[i] += pull * d
                force[j] += pull * d if P.d("reaction_with_the_same_sign") else -pull * d
                virial = virial + pull * r2[i, j] * (2 if P.d("virial_of_pairs_twice") else 1)
            P.put("pair_energy", energy)
            return P.put("force", force), virial

        inv_m = (1 / P["mass"])[types][:, None]
        force, _ = pairs(P["pos"])
        kick = P.f(0.05 if P.d("whole_kick_first") else 0.025)
        half = P.put("vel_half", P["vel"] + kick * force * inv_m)
        moved = P["pos"] + P.f(0.05) * half
        if P.d("remainder_keeps_sign"):
            moved = np.fmod(moved, box)
        else:
            moved = np.mod(moved, box)
        moved = P.put("moved", moved)
        later, virial = pairs(moved)
        if P.d("second_kick_with_old_forces"):
            later = force
        new = P.put("vel_new", half + P.f(0.025) * later * inv_m)
        twice = P.f(0)
        for i in range(13):
            twice = twice + (new[i] @ new[i]) / inv_m[i, 0]
        temperature = P.put("temperature", twice / P.f(39 if P.d("drift_counted_as_freedom") else 36))
        P.put("output", (36 * temperature + virial) / (3 * box[0] * box[1] * box[2]))

    defects = [
        D(
            "first_box_edge_for_all_axes",
            "dist2",
            "axis",
            "The nearest image is found with the box's first edge on all three axes.",
            ("constant", "other", "swap"),
        ),
        D(
            "geometric_mean_of_sigma",
            "pair_energy",
            "function",
            "The sigma of two types is their geometric mean; the rule here is the arithmetic mean.",
            ("constant", "other", "factor"),
        ),
        D(
            "bonded_pairs_not_excluded",
            "pair_energy",
            "mask",
            "Bonded pairs, which are excluded, take part.",
            ("zero", "other"),
        ),
        D(
            "slope_of_switch_left_out",
            "force",
            "drop_term",
            "The force lacks the derivative of the switching function.",
            ("other",),
        ),
        D(
            "reaction_with_the_same_sign",
            "force",
            "sign",
            "The second particle of a pair gets the force of the first, not its opposite.",
            ("flip", "swap"),
        ),
        D(
            "whole_kick_first",
            "vel_half",
            "factor",
            "The first kick lasts a whole time step, not half of one.",
            ("scale", "constant"),
        ),
        D(
            "remainder_keeps_sign",
            "moved",
            "function",
            "Positions are put back into the box by a remainder that keeps the sign, so that negative ones stay out.",
            ("sign", "shift", "other", "mask"),
        ),
        D(
            "second_kick_with_old_forces",
            "vel_new",
            "stale",
            "The second kick uses the forces from before the move.",
            ("swap", "other", "shift"),
        ),
        D(
            "drift_counted_as_freedom",
            "temperature",
            "ddof",
            "The temperature divides by 3 N degrees of freedom, not by 3 N - 3.",
            ("factor", "scale", "constant"),
        ),
        D(
            "virial_of_pairs_twice",
            "output",
            "factor",
            "The virial of each pair is counted twice.",
            ("scale", "constant"),
        ),
    ]
