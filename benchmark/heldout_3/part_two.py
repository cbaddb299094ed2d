"""Parts of image models: an up-sampling block of a U-Net, the box head of a detector."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randn, sigmoid, silu, step


def pattern(shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a loss: sixteenths, in no order that a layout could hide."""
    return ((np.arange(math.prod(shape)) * 7 % 23) - 11).reshape(shape) / 16


@program("s04", variants=("f32", "bf16", "bf16reg"), wide=("rstd",))
class unet_up_block:
    """5 x 7 to 11 x 13 points by bilinear interpolation, a skip, group norm with a time's scale and shift, a convolution.

    The port gathers four neighbours a point, convolves in tiles of 4 columns, and makes the gradients by hand.
    """

    def make(g):
        width = torch.tensor([0.05, 0.05, 0.05, 1, 1, 1, 0.3, 2, 1, 1, 0.5, 1], dtype=torch.float64)
        return dict(
            x=randn(g, 2, 12, 5, 7) * width[:, None, None] + 0.3 * width[:, None, None],
            skip=randn(g, 2, 6, 11, 13, shift=-0.2),
            t=randn(g, 2, 10),
            w_t=randn(g, 36, 10, scale=0.25),
            b_t=randn(g, 36, scale=0.2),
            gamma=randn(g, 18, scale=0.2, shift=1.0),
            beta=randn(g, 18, scale=0.3),
            w_conv=randn(g, 8, 18, 3, 3, scale=0.1),
            b_conv=randn(g, 8, scale=0.2),
            w_short=randn(g, 8, 18, scale=0.25),
        )

    def reference(x, skip, t, w_t, b_t, gamma, beta, w_conv, b_conv, w_short):
        up = step("up", F.interpolate(x, size=(11, 13), mode="bilinear", align_corners=False))
        both = step("both", torch.cat([up, skip], 1))
        groups = both.view(2, 6, 429)
        centred = groups - groups.mean(-1, keepdim=True)
        rstd = step("rstd", torch.rsqrt(centred.pow(2).mean(-1) + 1e-5))
        unit = (centred * rstd[..., None]).view_as(both)
        normed = step("normed", unit * gamma[:, None, None] + beta[:, None, None])
        film = step("film", F.silu(t) @ w_t.T + b_t)[..., None, None]
        scale, shift = film.chunk(2, 1)
        h = step("modulated", normed * (1 + scale) + shift)
        h = step("act", F.silu(h))
        h = step("conv", F.conv2d(h, w_conv, b_conv, padding=1))
        short = step("short", torch.einsum("oc,bchw->bohw", w_short, both))
        return (h + short) / 2**0.5

    def loss(output):
        n = output.numel()
        return (output * ((torch.arange(n, dtype=output.dtype) * 7 % 23 - 11) / 16).view(output.shape)).sum()

    def port(P: Port):
        x, skip, w_conv = P["x"], P["skip"], P["w_conv"]
        B, H, W = 2, 11, 13

        def neighbours(small, large):
            """For each point its lower and upper neighbour, and the weight of the upper one."""
            out = []
            for i in range(large):
                if P.d("corners_aligned"):
                    at = i * (small - 1) / (large - 1)
                else:
                    at = (i + 0.5) * small / large - 0.5
                if not P.d("negative_coordinates_kept"):
                    at = max(at, 0)
                low = int(at)
                out.append((low, min(low + 1, small - 1), at - low))
            return out

        rows, columns = neighbours(5, H), neighbours(7, W)
        up = np.empty((B, 12, H, W), x.dtype)
        for i, (r0, r1, fr) in enumerate(rows):
            for j, (c0, c1, fc) in enumerate(columns):
                above = x[:, :, r0, c0] * P.f(1 - fc) + x[:, :, r0, c1] * P.f(fc)
                below = x[:, :, r1, c0] * P.f(1 - fc) + x[:, :, r1, c1] * P.f(fc)
                up[:, :, i, j] = above * P.f(1 - fr) + below * P.f(fr)
        up = P.put("up", up)
        both = np.empty((B, 18, H, W), x.dtype)
        both[:, :12], both[:, 12:] = up, skip
        both = P.put("both", both)

        members = [np.arange(18)[n::6] if P.d("groups_in_turn") else np.arange(3 * n, 3 * n + 3) for n in range(6)]
        eps = P.f(1e-3 if P.d("group_eps_of_batch_norm") else 1e-5)
        mean, rstd = np.empty((B, 6), x.dtype), np.empty((B, 6), x.dtype)
        for b in range(B):
            for n in range(6):
                part = both[b, members[n]].ravel()
                mean[b, n] = part.sum() / part.size
                rest = part - mean[b, n]
                rstd[b, n] = 1 / np.sqrt((rest * rest).sum() / part.size + eps)
        rstd = P.put("rstd", rstd)
        unit = np.empty_like(both)
        for n in range(6):
            m, r = mean[:, n, None, None, None], rstd[:, n, None, None, None]
            unit[:, members[n]] = (both[:, members[n]] - m) * r
        normed = P.put("normed", unit * P["gamma"][:, None, None] + P["beta"][:, None, None])
        film = P.put("film", np.stack([P["w_t"] @ silu(row) + P["b_t"] for row in P["t"]]))
        scale, shift = film[:, :18, None, None], film[:, 18:, None, None]
        if P.d("scale_and_shift_exchanged"):
            scale, shift = shift, scale
        modulated = P.put("modulated", normed + normed * scale + shift)
        act = P.put("act", silu(modulated))

        pad = np.pad(act, ((0, 0), (0, 0), (1, 1), (1, 1)))
        conv = np.zeros((B, 8, H, W), x.dtype)
        end = W // 4 * 4 if P.d("last_column_not_convolved") else W
        for c0 in range(0, end, 4):
            c1 = min(c0 + 4, W)
            for i in range(3):
                for j in range(3):
                    tap = w_conv[:, :, j, i] if P.d("kernel_rows_for_columns") else w_conv[:, :, i, j]
                    conv[..., c0:c1] += np.einsum("bchw,oc->bohw", pad[:, :, i : i + H, c0 + j : c1 + j], tap)
            conv[..., c0:c1] += P["b_conv"][:, None, None]
        conv = P.put("conv", conv)
        short = P.put("short", np.tensordot(P["w_short"], both, (1, 1)).swapaxes(0, 1))
        half = P.f(1 if P.d("sum_not_divided") else math.sqrt(0.5))
        out = P.put("output", half * conv + half * short)

        g = P.f(pattern(out.shape)) * P.f(math.sqrt(0.5))
        around = np.pad(g, ((0, 0), (0, 0), (1, 1), (1, 1)))
        d_act, d_conv = np.zeros_like(act), np.zeros_like(w_conv)
        for i in range(3):
            for j in range(3):
                back = around[:, :, 2 - i : 2 - i + H, 2 - j : 2 - j + W]
                d_act += np.einsum("bohw,oc->bchw", back, w_conv[:, :, i, j])
                at = (2 - i, 2 - j) if P.d("weight_gradient_turned") else (i, j)
                d_conv[:, :, at[0], at[1]] = np.einsum("bohw,bchw->oc", g, pad[:, :, i : i + H, j : j + W])
        s = sigmoid(modulated)
        d_normed = d_act * s * (1 + modulated * (1 - s)) * (1 + film[:, :18, None, None])
        d_unit = d_normed * P["gamma"][:, None, None]
        d_both = np.einsum("bohw,oc->bchw", g, P["w_short"])
        for b in range(B):
            for n in range(6):
                du, u = d_unit[b, members[n]], unit[b, members[n]]
                along = u * (du * u).mean()
                if P.d("deviation_not_differentiated"):
                    along = 0
                d_both[b, members[n]] += rstd[b, n] * (du - du.mean() - along)
        d_x = np.zeros_like(x)
        for i, (r0, r1, fr) in enumerate(rows):
            for j, (c0, c1, fc) in enumerate(columns):
                d = d_both[:, :12, i, j]
                d_x[:, :, r0, c0] += d * P.f((1 - fr) * (1 - fc))
                d_x[:, :, r0, c1] += d * P.f((1 - fr) * fc)
                d_x[:, :, r1, c0] += d * P.f(fr * (1 - fc))
                d_x[:, :, r1, c1] += d * P.f(fr * fc)
        P.put("grad:x", d_x)
        P.put("grad:gamma", (d_normed * unit).sum((0, 2, 3)))
        P.put("grad:w_conv", d_conv)

    defects = [
        D(
            "corners_aligned",
            "up",
            "function",
            "the corners of both images are laid on each other, as with align_corners",
            accept=("shift", "scale", "factor", "constant"),
        ),
        D(
            "negative_coordinates_kept",
            "up",
            "mask",
            "coordinates before the first point aren't clamped to it, and weights are negative",
            accept=("drop_term", "sign", "function", "shift"),
        ),
        D(
            "groups_in_turn",
            "rstd",
            "layout",
            "channel c is in group c % 6 and not c // 3",
            accept=("permute", "transpose", "axis"),
        ),
        D("group_eps_of_batch_norm", "rstd", "eps", "the epsilon is 1e-3 and not 1e-5", accept=("constant",)),
        D(
            "scale_and_shift_exchanged",
            "modulated",
            "swap",
            "the time's first half is taken for the shift",
            accept=("permute",),
        ),
        D(
            "kernel_rows_for_columns",
            "conv",
            "transpose",
            "the kernel's rows and columns are exchanged",
            accept=("layout", "swap"),
        ),
        D(
            "last_column_not_convolved",
            "conv",
            "truncate",
            "the 13th column, behind three tiles of 4, stays zero",
            accept=("zero", "mask"),
        ),
        D(
            "sum_not_divided",
            "output",
            "scale",
            "the sum of both branches isn't divided by the root of 2",
            accept=("factor", "constant", "drop_term"),
        ),
        D(
            "deviation_not_differentiated",
            "grad:x",
            "drop_term",
            "the norm's gradient leaves out the term of the deviation",
        ),
        D(
            "weight_gradient_turned",
            "grad:w_conv",
            "flip",
            "the gradient of the kernel is turned by 180 degrees",
        ),
    ]


@program("s05", variants=("f32", "f16"), wide=("boxes", "clipped", "scores", "iou", "rois"))
class box_head:
    """17 anchors of a 36 x 44 image: decoding, non-maximum suppression, RoIAlign of five boxes, and a small head.

    The port goes box by box; it ranks by counting and samples the features point by point.
    """

    def make(g):
        centre = (rand(g, 4, 2) * torch.tensor([44.0, 36.0]))[torch.arange(17) % 4] + randn(g, 17, 2, scale=2.5)
        size = 13 * torch.exp(randn(g, 17, 2, scale=0.3))
        return dict(
            anchors=torch.cat([centre - size / 2, centre + size / 2], 1),
            deltas=randn(g, 17, 4, scale=1.0) * torch.tensor([1.0, 1.0, 1.2, 1.2]),
            logits=randn(g, 17, scale=1.5),
            centreness=randn(g, 17),
            features=randn(g, 5, 9, 11),
            w1=randn(g, 14, 30, scale=0.3),
            b1=randn(g, 14, scale=0.3),
            w2=randn(g, 4, 14, scale=0.5),
        )

    def reference(anchors, deltas, logits, centreness, features, w1, b1, w2):
        size = anchors[:, 2:] - anchors[:, :2]
        centre = (anchors[:, :2] + anchors[:, 2:]) / 2 + deltas[:, :2] / 10 * size
        size = size * (deltas[:, 2:] / 5).clamp(max=math.log(1000 / 16)).exp()
        boxes = step("boxes", torch.cat([centre - size / 2, centre + size / 2], 1))
        x, y = boxes[:, 0::2].clamp(0, 44), boxes[:, 1::2].clamp(0, 36)
        boxes = step("clipped", torch.stack([x, y], 2).flatten(1))
        scores = step("scores", (logits.sigmoid() * centreness.sigmoid()).sqrt())
        order = step("order", scores.argsort(descending=True))
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        low = torch.maximum(boxes[:, None, :2], boxes[:, :2])
        high = torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
        both = (high - low).clamp(min=0).prod(2)
        iou = step("iou", both / (area[:, None] + area - both))
        near = iou[order][:, order] > 0.35
        keep = torch.ones(17, dtype=torch.bool)
        for i in range(17):
            keep = keep & ~(near[i] & keep[i] & (torch.arange(17) > i))
        keep = step("keep", keep.to(torch.int64))
        five = (1 - keep).argsort(stable=True)[:5]
        rois = step("rois", boxes[order[five]] * keep[five][:, None])

        start, end = rois[:, :2] / 4 - 0.5, rois[:, 2:] / 4 - 0.5
        part = (torch.arange(6, dtype=rois.dtype) + 0.5) / 6
        ys = start[:, 1:] + (end - start)[:, 1:] * part
        xs = start[:, :1] + (end - start)[:, :1] * part[:4] * 1.5

        def weights(at, n):
            hat = (1 - (at.clamp(0, n - 1)[..., None] - torch.arange(n)).abs()).clamp(min=0)
            return hat.unflatten(1, (-1, 2)).mean(2)

        pooled = torch.einsum("rph,rqw,chw->rcpq", weights(ys, 9), weights(xs, 11), features)
        pooled = step("pooled", pooled)
        hidden = step("hidden", F.relu(pooled.flatten(1) @ w1.T + b1))
        return (hidden @ w2.T).softmax(-1)

    def port(P: Port):
        anchors, deltas, features = P["anchors"], P["deltas"], P["features"]
        N = 17
        boxes = np.empty_like(anchors)
        for i in range(N):
            x1, y1, x2, y2 = anchors[i]
            w, h = x2 - x1, y2 - y1
            dx, dy, dw, dh = deltas[i]
            cx, cy = x1 + w / 2 + dx * w / 10, y1 + h / 2 + dy * h / 10
            by = 10 if P.d("size_deltas_by_ten") else 5
            w, h = w * np.exp(min(dw / by, math.log(62.5))), h * np.exp(min(dh / by, math.log(62.5)))
            boxes[i] = cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2
        boxes = P.put("boxes", boxes)
        limits = (36, 44) if P.d("height_for_width") else (44, 36)
        clipped = np.empty_like(boxes)
        for n in range(4):
            clipped[:, n] = np.minimum(np.maximum(boxes[:, n], 0), limits[n % 2])
        clipped = P.put("clipped", clipped)
        scores = sigmoid(P["logits"]) * sigmoid(P["centreness"])
        scores = P.put("scores", scores if P.d("product_without_root") else np.sqrt(scores))
        order = np.empty(N, np.int64)
        for i in range(N):
            order[(scores > scores[i]).sum()] = i
        order = P.put("order", order)
        iou = np.empty((N, N), boxes.dtype)
        one = 1 if P.d("sides_with_one_pixel_more") else 0
        for i in range(N):
            for j in range(N):
                a, b = clipped[i], clipped[j]
                w, h = min(a[2], b[2]) - max(a[0], b[0]) + one, min(a[3], b[3]) - max(a[1], b[1]) + one
                if not P.d("overlap_not_clamped"):
                    w, h = max(w, 0), max(h, 0)
                total = sum((c[2] - c[0] + one) * (c[3] - c[1] + one) for c in (a, b))
                iou[i, j] = w * h / (total - w * h)
        iou = P.put("iou", iou)
        keep = np.zeros(N, np.int64)
        for i in range(N):
            against = [j for j in range(i) if keep[j] or P.d("suppressed_boxes_suppress")]
            keep[i] = all(iou[order[i], order[j]] <= P.f(0.35) for j in against)
        keep = P.put("keep", keep)
        rois = np.zeros((5, 4), boxes.dtype)
        ranks = [i for i in range(N) if keep[i]][:5]
        for n, i in enumerate(ranks):
            rois[n] = clipped[i if P.d("rank_taken_for_box") else order[i]]
        rois = P.put("rois", rois)

        offset = 0 if P.d("half_pixel_missing") else 0.5
        pooled = np.zeros((5, 5, 3, 2), boxes.dtype)
        for n in range(5):
            x1, y1, x2, y2 = rois[n] / 4 - P.f(offset)
            bh, bw = (y2 - y1) / 3, (x2 - x1) / 2
            for p in range(3):
                for q in range(2):
                    for i in range(4):
                        y = y1 + p * bh + (i // 2 + P.f(0.5)) * bh / 2
                        x = x1 + q * bw + (i % 2 + P.f(0.5)) * bw / 2
                        y, x = min(max(y, 0), 8), min(max(x, 0), 10)
                        r, c = int(y), int(x)
                        fr, fc = y - r, x - c
                        r1, c1 = min(r + 1, 8), min(c + 1, 10)
                        pooled[n, :, p, q] += (
                            features[:, r, c] * (1 - fr) * (1 - fc)
                            + features[:, r, c1] * (1 - fr) * fc
                            + features[:, r1, c] * fr * (1 - fc)
                            + features[:, r1, c1] * fr * fc
                        ) / 4
        if P.d("bins_columns_first"):
            pooled = np.ascontiguousarray(pooled.swapaxes(2, 3)).reshape(5, 5, 3, 2)
        pooled = P.put("pooled", pooled)
        flat = pooled.transpose(0, 2, 3, 1) if P.d("channels_flattened_last") else pooled
        hidden = np.maximum(flat.reshape(5, 30) @ P["w1"].T + P["b1"], 0)
        hidden = P.put("hidden", hidden)
        z = np.stack([P["w2"] @ row for row in hidden])
        e = np.exp(z - z.max())
        P.put("output", e / e.sum(1, keepdims=True))

    defects = [
        D(
            "size_deltas_by_ten",
            "boxes",
            "constant",
            "deltas of the size are divided by 10, as those of the centre, and not by 5",
            accept=("scale", "factor"),
        ),
        D(
            "height_for_width",
            "clipped",
            "swap",
            "x is clipped to the height and y to the width",
            accept=("constant", "axis", "mask"),
        ),
        D(
            "product_without_root",
            "scores",
            "function",
            "the score is the product and not its root",
            accept=("drop_term",),
        ),
        D(
            "sides_with_one_pixel_more",
            "iou",
            "constant",
            "sides are counted as x2 - x1 + 1",
            accept=("shift", "drop_term"),
        ),
        D(
            "overlap_not_clamped",
            "iou",
            "mask",
            "negative widths of boxes that don't touch aren't clamped to zero",
            accept=("function", "drop_term", "sign"),
        ),
        D(
            "suppressed_boxes_suppress",
            "keep",
            "other",
            "a box that is suppressed suppresses others all the same",
            accept=("mask", "drop_term", "stale"),
        ),
        D(
            "rank_taken_for_box",
            "rois",
            "permute",
            "a rank among the sorted scores is taken for the number of a box",
            accept=("other", "swap"),
        ),
        D(
            "half_pixel_missing",
            "pooled",
            "shift",
            "coordinates aren't moved by half a pixel",
            accept=("constant", "drop_term"),
        ),
        D(
            "bins_columns_first",
            "pooled",
            "transpose",
            "the bins of a box are written column by column",
            accept=("layout", "permute"),
        ),
        D(
            "channels_flattened_last",
            "hidden",
            "layout",
            "bins are flattened with channels innermost",
            accept=("permute", "transpose", "axis"),
        ),
    ]
