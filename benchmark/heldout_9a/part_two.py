"""An audio front end, a detection head with pooled regions, and a step of an optimiser with factored moments."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randn, sigmoid, step


def mel_edges() -> list[float]:
    """The edges of eight triangles from 0 to 4 kHz, in kHz."""
    top = 2595 * math.log10(1 + 4000 / 700)
    return [0.7 * (10 ** (top * i / 9 / 2595) - 1) for i in range(10)]


@program("ba04", variants=("f32", "bf16"))
class audio_features:
    """Log mel energies and their deltas: pre-emphasis, centred frames of 32 every 20 samples, a Hann window after the
    frame's mean is taken off, power, 8 triangles of unit area, a floor, deltas over five frames, and normalisation over
    the valid frames. The port has the Fourier transform as products and gathers frames by index."""

    def make(g):
        t = torch.arange(300, dtype=torch.float64)
        tone = torch.sin(t * rand(g, 2, 1, low=0.2, high=1.2)) * torch.exp(-t / 90)
        return dict(
            wav=tone + randn(g, 2, 300, scale=0.25) * torch.exp(-t / 120) + 0.3,
            valid=torch.tensor([16, 11])[torch.randperm(2, generator=g)],
        )

    def reference(wav, valid):
        dtype = wav.dtype
        y = step("emph", wav - 0.97 * torch.cat([wav[:, :1], wav[:, :-1]], 1))
        frames = step("frames", F.pad(y[:, None], (16, 16), mode="reflect")[:, 0].unfold(-1, 32, 20))
        window = torch.hann_window(32, periodic=True, dtype=dtype)
        y = step("windowed", (frames - frames.mean(-1, keepdim=True)) * window)
        power = step("power", torch.fft.rfft(y).abs().square())
        hz = torch.arange(17, dtype=dtype) / 4
        e = torch.tensor(mel_edges(), dtype=dtype)[:, None]
        low, mid, high = e[:-2], e[1:-1], e[2:]
        bank = torch.minimum((hz - low) / (mid - low), (high - hz) / (high - mid)).clamp(min=0) * (2 / (high - low))
        mel = step("mel", power @ bank.T)
        logmel = step("logmel", torch.log10(mel.clamp(min=0.02)))
        padded = torch.cat([logmel[:, :1], logmel[:, :1], logmel, logmel[:, -1:], logmel[:, -1:]], 1)
        delta = step("delta", sum(n * (padded[:, 2 + n : 18 + n] - padded[:, 2 - n : 18 - n]) for n in (1, 2)) / 10)
        both = torch.cat([logmel, delta], -1)
        here = (torch.arange(16) < valid[:, None])[..., None].to(dtype)
        count = valid[:, None, None].to(dtype)
        mean = (both * here).sum(1, keepdim=True) / count
        var = ((both - mean).square() * here).sum(1, keepdim=True) / count
        return (both - mean) / (var + 1e-4).sqrt() * here

    def port(P: Port):
        wav = P["wav"]
        dt = wav.dtype
        flat, y = wav.reshape(-1), np.empty(600, dt)
        for i in range(600):
            first = i == 0 if P.d("previous_sample_across_recordings") else i % 300 == 0
            y[i] = flat[i] - P.f(0.97) * flat[i if first else i - 1]
        y = P.put("emph", y.reshape(2, 300))

        frames = np.empty((2, 16, 32), dt)
        for i in range(16):
            for k in range(32):
                at = 20 * i - 16 + k
                if at < 0:
                    at = -at - P.d("reflection_repeats_the_edge")
                if at >= 300:
                    at = 598 - at + P.d("reflection_repeats_the_edge")
                frames[:, i, k] = y[:, at]
        frames = P.put("frames", frames)

        period = 31 if P.d("symmetric_window") else 32
        window = P.f([0.5 - 0.5 * math.cos(2 * math.pi * k / period) for k in range(32)])
        if P.d("mean_taken_off_after_window"):
            windowed = frames * window
            windowed -= windowed.sum(-1, keepdims=True) / 32
        else:
            windowed = window * frames - window * (frames.sum(-1, keepdims=True) / 32)
        windowed = P.put("windowed", windowed)

        bins = 16 if P.d("last_frequency_left_out") else 17
        power = np.zeros((2, 16, 17), dt)
        for f in range(bins):
            angle = 2 * np.pi * f * np.arange(32) / 32
            re, im = windowed @ P.f(np.cos(angle)), windowed @ P.f(np.sin(angle))
            power[..., f] = re**2 + im**2
        power = P.put("power", power)

        edges, mel = mel_edges(), np.zeros((2, 16, 8), dt)
        for m in range(8):
            low, mid, high = edges[m : m + 3]
            for f in range(17):
                hz = f / 4
                if low < hz < high:
                    weight = (hz - low) / (mid - low) if hz < mid else (high - hz) / (high - mid)
                    if not P.d("triangles_of_unit_height"):
                        weight *= 2 / (high - low)
                    mel[..., m] += P.f(weight) * power[..., f]
                    if P.d("energies_summed_in_half"):
                        mel[..., m] = mel[..., m].astype(np.float16)
        mel = P.put("mel", mel)

        floor = P.f(0.02)
        logmel = np.log(mel + floor if P.d("floor_added") else np.maximum(mel, floor)) / P.f(math.log(10))
        logmel = P.put("logmel", logmel)

        delta = np.zeros((2, 16, 8), dt)
        for i in range(16):
            for n in (1, 2):
                for sign in (1, -1):
                    at = i + sign * n
                    if 0 <= at < 16 or not P.d("frames_outside_are_zero"):
                        delta[:, i] += sign * n * logmel[:, min(max(at, 0), 15)]
        delta = P.put("delta", delta / 10)

        out = np.zeros((2, 16, 16), dt)
        for r in range(2):
            n = P["valid"][r]
            both = np.concatenate([logmel[r], delta[r]], 1)
            counted = both if P.d("statistics_of_padding_too") else both[:n]
            mean = counted.mean(0)
            var = ((counted - mean) ** 2).mean(0)
            out[r, :n] = (both[:n] - mean) / np.sqrt(var + P.f(1e-4))
        P.put("output", out)

    defects = [
        D(
            "previous_sample_across_recordings",
            "emph",
            "stale",
            "The first sample of the second recording subtracts the last sample of the first recording.",
            ("shift", "mask", "other", "layout"),
        ),
        D(
            "reflection_repeats_the_edge",
            "frames",
            "shift",
            "The reflection at both ends repeats the edge sample, so that the padding is one sample off.",
            ("other", "flip", "function", "mask", "permute"),
        ),
        D(
            "symmetric_window",
            "windowed",
            "constant",
            "The window has the period 31 (symmetric); it should have 32 (periodic).",
            ("function", "ddof"),
        ),
        D(
            "mean_taken_off_after_window",
            "windowed",
            "other",
            "The frame's mean is taken off after the window was applied; it goes first.",
            ("swap", "function", "drop_term"),
        ),
        D(
            "last_frequency_left_out",
            "power",
            "truncate",
            "The power at the last frequency, bin 16, is not computed and stays zero.",
            ("zero", "mask", "drop_term"),
        ),
        D(
            "triangles_of_unit_height",
            "mel",
            "factor",
            "The triangles have the height one; each should be divided by half its width.",
            ("scale", "drop_term"),
        ),
        D(
            "energies_summed_in_half",
            "mel",
            "precision",
            "The sum over frequencies is rounded to float16 after each term.",
        ),
        D(
            "floor_added",
            "logmel",
            "eps",
            "The floor is added to the energy before the logarithm; it should be its lower limit.",
            ("function", "constant", "drop_term", "other"),
        ),
        D(
            "frames_outside_are_zero",
            "delta",
            "zero",
            "Frames before the first and after the last count as zero; the edge frame should be repeated.",
            ("mask", "truncate", "drop_term", "other"),
        ),
        D(
            "statistics_of_padding_too",
            "output",
            "mask",
            "Mean and variance are taken over all frames, those after the recording's end included.",
            ("ddof", "other", "constant", "truncate"),
        ),
    ]


@program("ba05", variants=("f32", "bf16"), wide=("iou", "decayed"))
class detection_head:
    """A detector's head on two levels: sides as expectations over five bins, boxes in an image of 32 by 24, overlaps,
    matrix NMS in each class, and the best four boxes pooled by bilinear samples. The port goes box by box and reads the
    feature map through flat offsets."""

    def make(g):
        return dict(
            reg=randn(g, 2, 20, 16, scale=1.5),
            cls=randn(g, 2, 3, 16, scale=1.2),
            obj=randn(g, 2, 16),
            feat=randn(g, 2, 5, 6, 8),
        )

    def reference(reg, cls, obj, feat):
        dtype = reg.dtype
        anchors, strides = [], []
        for h, w, stride in ((3, 4, 8), (2, 2, 16)):
            y, x = torch.meshgrid(torch.arange(h, dtype=dtype), torch.arange(w, dtype=dtype), indexing="ij")
            anchors.append(torch.stack([x, y], -1).reshape(-1, 2) + 0.5)
            strides += [stride] * (h * w)
        anchors = step("anchors", torch.cat(anchors))
        strides = torch.tensor(strides, dtype=dtype)[:, None]
        p = reg.reshape(2, 4, 5, 16).softmax(2)
        dist = step("dist", (p * torch.arange(5, dtype=dtype)[:, None]).sum(2).transpose(1, 2))
        size = torch.tensor([32, 24], dtype=dtype)
        lo, hi = (anchors - dist[..., :2]) * strides, (anchors + dist[..., 2:]) * strides
        boxes = torch.cat([lo, hi], -1)
        boxes = step("boxes", torch.minimum(boxes.clamp(min=0), torch.cat([size, size])))
        scores = step("scores", (torch.sigmoid(cls) * torch.sigmoid(obj)[:, None]).sqrt())
        a, b = boxes[:, :, None], boxes[:, None]
        inter = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
        area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
        iou = step("iou", inter / (area[:, :, None] + area[:, None] - inter + 1e-6))
        best, label = scores.max(1)
        above = (best[:, None] > best[:, :, None]) & (label[:, None] == label[:, :, None])
        by = iou * above
        decay = torch.exp(-2 * (by.square() - by.amax(-1)[:, None].square()))
        decay = torch.where(above, decay, torch.ones_like(decay)).amin(-1)
        decayed = step("decayed", best * decay)
        top = step("top", decayed.topk(4, -1).indices)
        picked = boxes.gather(1, top[..., None].expand(2, 4, 4)) / 4 - 0.5
        at = (torch.arange(4, dtype=dtype) + 0.5) / 4
        along = picked[..., None, :2] + at[:, None] * (picked[..., 2:] - picked[..., :2])[..., None, :]
        x, y = along[..., 0].clamp(0, 7), along[..., 1].clamp(0, 5)
        wx = (1 - (x[..., None] - torch.arange(8, dtype=dtype)).abs()).clamp(min=0)
        wy = (1 - (y[..., None] - torch.arange(6, dtype=dtype)).abs()).clamp(min=0)
        samples = torch.einsum("nkih,nkjw,nchw->nkcij", wy, wx, feat)
        return samples.reshape(2, 4, 5, 2, 2, 2, 2).mean((4, 6))

    def port(P: Port):
        reg, cls, obj, feat = P["reg"], P["cls"], P["obj"], P["feat"]
        dt = reg.dtype
        anchors = np.empty((16, 2), dt)
        for i in range(16):
            j, w = (i, 4) if i < 12 else (i - 12, 2)
            if P.d("cells_split_by_height") and i < 12:
                w = 3
            anchors[i] = (j % w + 0.5, j // w + 0.5)
        anchors = P.put("anchors", anchors)

        dist = np.empty((2, 16, 4), dt)
        for side in range(4):
            e = np.exp(reg[:, 5 * side : 5 * side + 5])
            total = sum((k + P.d("bins_counted_from_one")) * e[:, k] for k in range(5))
            dist[..., side] = total / e.sum(1)
        dist = P.put("dist", dist)

        boxes = np.empty((2, 16, 4), dt)
        width, height = (24, 32) if P.d("limits_of_image_exchanged") else (32, 24)
        for i in range(16):
            s = 8 if i < 12 or P.d("stride_of_first_level_for_all") else 16
            (x, y), d = anchors[i], dist[:, i]
            boxes[:, i, 0] = np.clip((x - d[:, 0]) * s, 0, width)
            boxes[:, i, 1] = np.clip((y - d[:, 1]) * s, 0, height)
            boxes[:, i, 2] = np.clip((x + d[:, 2]) * s, 0, width)
            boxes[:, i, 3] = np.clip((y + d[:, 3]) * s, 0, height)
        boxes = P.put("boxes", boxes)

        product = 1 / ((1 + np.exp(-cls)) * (1 + np.exp(-obj[:, None])))
        scores = P.put("scores", product if P.d("product_without_root") else np.sqrt(product))

        iou = np.empty((2, 16, 16), dt)
        for n in range(2):
            for i in range(16):
                for j in range(16):
                    a, b = boxes[n, i], boxes[n, j]
                    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
                    inter = w * h
                    if min(w, h) < 0 and not P.d("negative_overlaps_multiplied"):
                        inter = P.f(0)
                    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
                    iou[n, i, j] = inter / (areas - inter + P.f(1e-6))
        iou = P.put("iou", iou)

        best, label = scores.max(1), scores.argmax(1)
        decayed = np.empty((2, 16), dt)
        for n in range(2):
            order = np.argsort(-best[n], kind="stable")
            most = np.zeros(16, dt)
            for rank, i in enumerate(order):
                before = order[: rank + P.d("a_box_suppresses_itself")]
                before = [j for j in before if label[n, j] == label[n, i]]
                most[i] = max([iou[n, i, j] for j in before], default=0)
                least = P.f(1)
                for j in before:
                    least = min(least, np.exp(2 * most[j] ** 2 - 2 * iou[n, i, j] ** 2))
                decayed[n, i] = best[n, i] * least
        decayed = P.put("decayed", decayed)

        ranked = best if P.d("ranked_before_decay") else decayed
        top = P.put("top", np.argsort(-ranked, axis=1, kind="stable")[:, :4])

        out = np.zeros((2, 4, 5, 2, 2), dt)
        half = P.f(0 if P.d("half_pixel_left_out") else 0.5)
        flat = feat.reshape(2, 5, 48)
        for n in range(2):
            for k in range(4):
                x1, y1, x2, y2 = boxes[n, top[n, k]] / 4 - half
                for i in range(4):
                    for j in range(4):
                        y = min(max(y1 + (i + P.f(0.5)) * (y2 - y1) / 4, 0), 5)
                        x = max(x1 + (j + P.f(0.5)) * (x2 - x1) / 4, 0)
                        if not P.d("samples_beyond_last_column"):
                            x = min(x, 7)
                        fy, fx = y - int(y), x - int(x)
                        for dy, wy in ((0, 1 - fy), (1, fy)):
                            for dx, wx in ((0, 1 - fx), (1, fx)):
                                at = min((int(y) + dy) * 8 + int(x) + dx, 47)
                                out[n, k, :, i // 2, j // 2] += wy * wx / 4 * flat[n, :, at]
        P.put("output", out)

    defects = [
        D(
            "cells_split_by_height",
            "anchors",
            "layout",
            "On the level of 3 by 4 cells, row and column come from the division by the height 3, not the width 4.",
            ("transpose", "constant", "permute", "swap", "other"),
        ),
        D(
            "bins_counted_from_one",
            "dist",
            "constant",
            "The bins of a side count from 1 to 5; they should from 0 to 4.",
            ("shift", "other"),
        ),
        D(
            "limits_of_image_exchanged",
            "boxes",
            "swap",
            "Boxes are limited to the image's height in x and to its width in y.",
            ("constant", "transpose", "layout", "mask"),
        ),
        D(
            "stride_of_first_level_for_all",
            "boxes",
            "constant",
            "Boxes of the second level are multiplied with the stride 8 of the first; theirs is 16.",
            ("scale", "factor", "stale"),
        ),
        D(
            "product_without_root",
            "scores",
            "function",
            "The root of the product of class and object scores is not taken.",
            ("drop_term",),
        ),
        D(
            "negative_overlaps_multiplied",
            "iou",
            "mask",
            "Overlaps that are negative are not set to zero; the product counts for boxes that are apart.",
            ("function", "drop_term", "zero", "sign"),
        ),
        D(
            "a_box_suppresses_itself",
            "decayed",
            "mask",
            "The loop over better boxes goes one too far and takes the box itself, whose overlap is one.",
            ("shift", "other"),
        ),
        D(
            "ranked_before_decay",
            "top",
            "stale",
            "The best boxes are chosen by their scores before the decay.",
            ("swap", "other", "permute", "drop_term"),
        ),
        D(
            "half_pixel_left_out",
            "output",
            "shift",
            "The half pixel is not taken off the boxes' coordinates in the feature map.",
            ("constant", "drop_term"),
        ),
        D(
            "samples_beyond_last_column",
            "output",
            "mask",
            "Samples right of the last column are not moved to it; they mix in the first value of the next row.",
            ("shift", "stale", "other", "layout"),
        ),
    ]


@program(
    "ba06",
    variants=("bf16", "f32"),
    wide=(
        *("vr", "vc", "m", "bias_m", "bias_v", "old_ema"),
        *("gnorm", "clipped", "row_ms", "col_ms", "update", "m_new", "output"),
    ),
)
class factored_optimiser:
    """A step of an optimiser on a matrix and a bias: gradients without the loss scale 8, clipped by the norm of both,
    factored second moments with a clipped update for the matrix, Adam for the bias, decoupled decay, and an average of
    the weights. The port has the gradients in one buffer and sums rows in tiles of 8."""

    def make(g):
        return dict(
            w=randn(g, 12, 10, scale=0.5),
            bias=randn(g, 10, scale=0.5),
            gw=randn(g, 12, 10, scale=2.0) * torch.exp(randn(g, 12, 1, scale=0.7)),
            gb=randn(g, 10, scale=4.0),
            vr=rand(g, 12, low=0.002, high=0.02),
            vc=rand(g, 10, low=0.002, high=0.02),
            m=randn(g, 12, 10, scale=0.7),
            bias_m=randn(g, 10, scale=0.05),
            bias_v=rand(g, 10, low=0.001, high=0.01),
            old_ema=randn(g, 12, 10, scale=0.5),
            t=torch.tensor(4),
        )

    def reference(w, bias, gw, gb, vr, vc, m, bias_m, bias_v, old_ema, t):
        both = torch.cat([gw.flatten(), gb]) / 8
        gnorm = step("gnorm", both.norm())
        both = step("clipped", both * (1.5 / (gnorm + 1e-6)).clamp(max=1))
        gw, gb = both[:120].view(12, 10), both[120:]
        sq = gw.square() + 1e-3
        vr = step("row_ms", 0.8 * vr + 0.2 * sq.mean(1))
        vc = step("col_ms", 0.8 * vc + 0.2 * sq.mean(0))
        u = gw / (vr[:, None] * vc / vr.mean()).sqrt()
        u = step("update", u / (u.square().mean().sqrt() / 0.9).clamp(min=1))
        m = step("m_new", 0.9 * m + 0.1 * u)
        w = step("w_new", w - 0.2 * (m + 0.1 * w))
        bias_m, bias_v = 0.9 * bias_m + 0.1 * gb, 0.95 * bias_v + 0.05 * gb.square()
        m_hat, v_hat = bias_m / (1 - 0.9**t), bias_v / (1 - 0.95**t)
        step("bias_new", bias - 0.3 * m_hat / (v_hat.sqrt() + 1e-6))
        return 0.97 * old_ema + 0.03 * w

    def port(P: Port):
        w, bias, gw, gb = P["w"], P["bias"], P["gw"], P["gb"]
        dt = w.dtype
        buffer = np.concatenate([gw.reshape(-1), gb]) * P.f(0.125)
        if P.d("norms_of_tensors_added"):
            gnorm = np.sqrt((buffer[:120] ** 2).sum()) + np.sqrt((buffer[120:] ** 2).sum())
        else:
            total = P.f(0)
            for k in range(0, 130, 8):
                total = total + (buffer[k : k + 8] ** 2).sum()
                if P.d("squares_summed_in_half"):
                    total = bf16(total)
            gnorm = np.sqrt(total)
        gnorm = P.put("gnorm", gnorm)

        clipped = buffer * min(P.f(1), P.f(1.5) / (gnorm + P.f(1e-6)))
        if P.d("bias_unscaled_twice"):
            clipped[120:] *= P.f(0.125)
        clipped = P.put("clipped", clipped)
        g, gb = clipped[:120].reshape(12, 10), clipped[120:]

        eps = P.f(1e-3)
        if P.d("eps_after_the_average"):
            row = P.f(0.8) * P["vr"] + P.f(0.2) * (g * g).sum(1) / 10 + eps
        else:
            row = P.f(0.8) * P["vr"] + P.f(0.2) * ((g * g).sum(1) / 10 + eps)
        row = P.put("row_ms", row)
        if P.d("mean_of_tile_means"):
            mean = ((g[:8] ** 2).mean(0) + (g[8:] ** 2).mean(0)) / 2
        else:
            mean = ((g[:8] ** 2).sum(0) + (g[8:] ** 2).sum(0)) / 12
        col = P.put("col_ms", P.f(0.8) * P["vc"] + P.f(0.2) * (mean + eps))

        u = g / np.outer(np.sqrt(row), np.sqrt(col)) * np.sqrt(row.sum() / 12)
        if P.d("update_clipped_row_by_row"):
            rms = np.sqrt((u * u).sum(1, keepdims=True) / 10)
        else:
            rms = np.sqrt((u * u).sum() / 120)
        update = P.put("update", u * np.minimum(P.f(1), P.f(0.9) / rms))

        old, new = (0.1, 0.9) if P.d("weights_of_momentum_exchanged") else (0.9, 0.1)
        m = P.put("m_new", P.f(old) * P["m"] + P.f(new) * update)

        if P.d("decay_without_learning_rate"):
            w_new = w - P.f(0.2) * m - P.f(0.1) * w
        else:
            w_new = w * P.f(1 - 0.02) - P.f(0.2) * m
        w_new = P.put("w_new", w_new)

        t = int(P["t"]) - P.d("steps_counted_from_zero")
        bias_m, bias_v = P["bias_m"], P["bias_v"]
        bias_m += P.f(0.1) * (gb - bias_m)
        bias_v += P.f(0.05) * (gb * gb - bias_v)
        rate = P.f(0.3 / (1 - 0.9**t))
        P.put("bias_new", bias - rate * bias_m / (np.sqrt(bias_v / P.f(1 - 0.95**t)) + P.f(1e-6)))
        averaged = w if P.d("average_of_old_weights") else w_new
        P.put("output", P["old_ema"] + P.f(0.03) * (averaged - P["old_ema"]))

    defects = [
        D(
            "squares_summed_in_half",
            "gnorm",
            "precision",
            "The sum of squares is rounded to bfloat16 after each tile.",
        ),
        D(
            "norms_of_tensors_added",
            "gnorm",
            "function",
            "The norms of the two tensors are added; their squares should be, under the root.",
            ("other",),
        ),
        D(
            "bias_unscaled_twice",
            "clipped",
            "factor",
            "The loss scale is taken out of the bias's gradient twice.",
            ("scale", "constant"),
        ),
        D(
            "eps_after_the_average",
            "row_ms",
            "eps",
            "Epsilon is added to the averaged moment, not to the mean square that enters with the weight 0.2.",
            ("constant", "factor", "scale", "other", "drop_term"),
        ),
        D(
            "mean_of_tile_means",
            "col_ms",
            "factor",
            "The mean over rows is that of two tiles' means, though the second tile has only 4 rows.",
            ("scale", "function", "other", "constant", "ddof"),
        ),
        D(
            "update_clipped_row_by_row",
            "update",
            "axis",
            "The update is clipped by the root mean square of each row; it should be that of the whole matrix.",
            ("function", "factor", "scale", "other"),
        ),
        D(
            "weights_of_momentum_exchanged",
            "m_new",
            "swap",
            "The momentum has the weight 0.1 and the update 0.9; it is the other way round.",
            ("constant", "factor", "scale"),
        ),
        D(
            "decay_without_learning_rate",
            "w_new",
            "factor",
            "The weight decay is not multiplied with the learning rate.",
            ("scale", "constant", "drop_term"),
        ),
        D(
            "steps_counted_from_zero",
            "bias_new",
            "shift",
            "The corrections of the moments use the step before, as if steps counted from zero.",
            ("constant", "factor", "scale", "other"),
        ),
        D(
            "average_of_old_weights",
            "output",
            "stale",
            "The average takes the weights from before the step.",
            ("swap", "other"),
        ),
    ]
