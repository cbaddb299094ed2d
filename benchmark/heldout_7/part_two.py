"""A Kalman filter with its smoother, the CTC loss with its gradient, and Muon and Adam with averaged weights."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randn, step


def cholesky(s):
    """Lower factor, column by column."""
    s, n = s.copy(), len(s)
    for j in range(n):
        s[j, j] = np.sqrt(s[j, j])
        s[j + 1 :, j] /= s[j, j]
        for k in range(j + 1, n):
            s[k:, k] -= s[k:, j] * s[k, j]
        s[j, j + 1 :] = 0
    return s


def solve(low, b):
    """(low low^T)^-1 b, by substitution there and back."""
    x = b.copy()
    for i in range(len(low)):
        x[i] = (x[i] - low[i, :i] @ x[:i]) / low[i, i]
    for i in reversed(range(len(low))):
        x[i] = (x[i] - low[i + 1 :, i] @ x[i + 1 :]) / low[i, i]
    return x


@program("z04", variants=("f32",))
class kalman_smoother:
    """Filter and Rauch-Tung-Striebel smoother over 6 uneven times, with controls and two missing observations."""

    def make(g):
        root = randn(g, 2, 5, 5, scale=0.4)
        present = torch.ones(2, 6, dtype=torch.int64)
        present[1, 2] = present[0, 4] = 0
        return dict(
            y=randn(g, 2, 6, 3, scale=1.5) * present[..., None],
            present=present,
            u=randn(g, 2, 6, 4, scale=0.7),
            gaps=rand(g, 6, low=0.4, high=1.6),
            drift=randn(g, 5, 5, scale=0.25) - 0.3 * torch.eye(5, dtype=torch.float64),
            control=randn(g, 5, 4, scale=0.5),
            q_root=randn(g, 5, 5, scale=0.15).tril() + 0.6 * torch.eye(5, dtype=torch.float64),
            h=randn(g, 3, 5, scale=0.6),
            r_std=rand(g, 3, low=0.4, high=0.8),
            mean0=randn(g, 2, 5),
            cov0=root @ root.mT + 0.4 * torch.eye(5, dtype=torch.float64),
        )

    def reference(y, present, u, gaps, drift, control, q_root, h, r_std, mean0, cov0):
        eye5, q, r = torch.eye(5, dtype=y.dtype), q_root @ q_root.T, torch.diag(r_std.square())
        m, p, nll, kept = mean0, cov0, 0, []
        for t in range(6):
            f = eye5 + gaps[t] * drift
            mp = step("pred_mean", m @ f.T + gaps[t] * u[:, t] @ control.T)
            pp = step("pred_cov", f @ p @ f.T + gaps[t] * q)
            e = step("innov", y[:, t] - mp @ h.T)
            s = step("innov_cov", h @ pp @ h.T + r)
            there = present[:, t].to(y.dtype)
            gain = step("gain", torch.linalg.solve(s, h @ pp).mT * there[:, None, None])
            m = step("filt_mean", mp + (gain @ e[..., None])[..., 0])
            left = eye5 - gain @ h
            p = step("filt_cov", left @ pp @ left.mT + gain @ r @ gain.mT)
            distance = (e * torch.linalg.solve(s, e[..., None])[..., 0]).sum(-1)
            nll = nll + 0.5 * there * (distance + torch.logdet(s) + 3 * math.log(2 * math.pi))
            kept.append((mp, pp, m, p, f))
        step("nll", nll)
        out = [m]
        for t in range(4, -1, -1):
            mp, pp, _, _, f = kept[t + 1]
            mf, pf = kept[t][2:4]
            c = step("back_gain", torch.linalg.solve(pp, f @ pf).mT)
            m = step("smooth_mean", mf + (c @ (m - mp)[..., None])[..., 0])
            p = step("smooth_cov", pf + c @ (p - pp) @ c.mT)
            out.insert(0, m)
        return torch.stack(out, 1)

    def port(P: Port):
        y, h, r_std, gaps, there = P["y"], P["h"], P["r_std"], P["gaps"], P["present"]
        dt = y.dtype
        q = np.einsum("ik,jk->ij", P["q_root"], P["q_root"])
        r = np.diag(r_std if P.d("noise_std_not_squared") else r_std * r_std)
        f = [np.eye(5, dtype=dt) + gap * P["drift"] for gap in gaps]
        m, p, nll = P["mean0"], P["cov0"], np.zeros(2, dt)
        mps, pps, ms, ps = [], [], [], []
        for t in range(6):
            mp, pp = np.empty_like(m), np.empty_like(p)
            for n in range(2):
                mp[n] = f[t] @ m[n] + gaps[t] * (P["control"] @ P["u"][n, t])
                ft = f[t].T if P.d("covariance_sandwiched_the_other_way") else f[t]
                pp[n] = np.einsum("ia,ab,jb->ij", ft, p[n], ft)
                pp[n] += q if P.d("process_noise_not_by_the_gap") else q * gaps[t]
            mp, pp = P.put("pred_mean", mp), P.put("pred_cov", pp)
            e, s = np.empty((2, 3), dt), np.empty((2, 3, 3), dt)
            for n in range(2):
                e[n] = h @ mp[n] - y[n, t] if P.d("innovation_turned_round") else y[n, t] - h @ mp[n]
                s[n] = (h @ pp[n]) @ h.T + r
            e, s = P.put("innov", e), P.put("innov_cov", s)
            gain = np.zeros((2, 5, 3), dt)
            for n in range(2):
                low = cholesky(s[n])
                if there[n, t] or P.d("missing_observation_used"):
                    gain[n] = solve(low, h @ pp[n]).T
                if there[n, t]:
                    logdet = np.log(np.diag(low)).sum() * P.f(1 if P.d("log_determinant_of_the_factor") else 2)
                    nll[n] += P.f(0.5) * (e[n] @ solve(low, e[n]) + logdet + P.f(3 * np.log(2 * np.pi)))
            gain = P.put("gain", gain)
            m, p = np.empty_like(m), np.empty_like(p)
            for n in range(2):
                m[n] = mp[n] + gain[n] @ e[n]
                if P.d("joseph_form_without_the_noise"):
                    left = np.eye(5, dtype=dt) - gain[n] @ h
                    p[n] = left @ pp[n] @ left.T
                else:
                    p[n] = pp[n] - gain[n] @ s[n] @ gain[n].T
            m, p = P.put("filt_mean", m), P.put("filt_cov", p)
            for kept, x in zip((mps, pps, ms, ps), (mp, pp, m, p)):
                kept.append(x)
        P.put("nll", nll)

        out = np.empty((2, 6, 5), dt)
        out[:, 5] = m
        for t in (4, 3, 2, 1, 0):
            c, sm, sp = np.empty_like(p), np.empty_like(m), np.empty_like(p)
            step_f = f[t] if P.d("transition_of_the_wrong_gap") else f[t + 1]
            for n in range(2):
                c[n] = solve(cholesky(pps[t + 1][n]), step_f @ ps[t][n]).T
            c = P.put("back_gain", c)
            later = ms[t + 1] if P.d("smoothed_from_filtered_means") else m
            minus = ps[t + 1] if P.d("filtered_covariance_taken_off") else pps[t + 1]
            for n in range(2):
                sm[n] = ms[t][n] + c[n] @ (later[n] - mps[t + 1][n])
                sp[n] = ps[t][n] + c[n] @ (p[n] - minus[n]) @ c[n].T
            m, p = P.put("smooth_mean", sm), P.put("smooth_cov", sp)
            out[:, t] = m
        P.put("output", out)

    defects = [
        D(
            "covariance_sandwiched_the_other_way",
            "pred_cov",
            "transpose",
            "The covariance is predicted as F^T P F, not as F P F^T.",
            ("swap",),
        ),
        D(
            "process_noise_not_by_the_gap",
            "pred_cov",
            "factor",
            "The process noise is not multiplied by the time since the last observation.",
            ("drop_term", "scale", "constant"),
        ),
        D(
            "innovation_turned_round",
            "innov",
            "sign",
            "The innovation is the prediction minus the observation.",
            ("swap",),
        ),
        D(
            "noise_std_not_squared",
            "innov_cov",
            "function",
            "The standard deviations of the observations are taken for variances.",
            ("factor", "other", "scale"),
        ),
        D(
            "missing_observation_used",
            "gain#3",
            "mask",
            "The gain is not set to 0 where the observation is missing: a 0 is taken as observed.",
            ("zero", "other"),
        ),
        D(
            "joseph_form_without_the_noise",
            "filt_cov",
            "drop_term",
            "The Joseph form lacks its second term, K R K^T.",
            ("other",),
        ),
        D(
            "log_determinant_of_the_factor",
            "nll",
            "scale",
            "The logarithms of the Cholesky factor's diagonal are not doubled.",
            ("factor", "constant", "drop_term"),
        ),
        D(
            "transition_of_the_wrong_gap",
            "back_gain",
            "shift",
            "The smoother's gain takes the transition into time t where the one out of it is meant.",
            ("stale", "other", "swap"),
        ),
        D(
            "smoothed_from_filtered_means",
            "smooth_mean#2",
            "stale",
            "The mean after t that is smoothed from is the filtered one; right only for the last but one time.",
            ("swap", "other", "drop_term"),
        ),
        D(
            "filtered_covariance_taken_off",
            "smooth_cov",
            "swap",
            "The filtered covariance of time t + 1 is subtracted where the predicted one should be.",
            ("stale", "other", "shift"),
        ),
    ]


@program("z05", variants=("f32", "bf16"), wide=("probs", "forward", "nll", "output"))
class ctc_loss:
    """CTC over 13 frames, scaled as by Rabiner; the port in logarithms, its gradient by the backward variable."""

    def make(g):
        targets = torch.tensor([[3, 1, 1, 6, 2], [5, 5, 2, 4, 1], [1, 6, 3, 1, 6]])  # the rest is arbitrary
        return dict(
            logits=randn(g, 3, 13, 7, scale=1.3),
            targets=targets,
            input_lengths=torch.tensor([13, 9, 12]),
            target_lengths=torch.tensor([4, 3, 5]),
        )

    def reference(logits, targets, input_lengths, target_lengths):
        probs = step("probs", torch.softmax(logits, -1))
        ext = torch.zeros(3, 11, dtype=torch.int64)
        ext[:, 1::2] = targets
        s = torch.arange(11)
        valid = s < 2 * target_lengths[:, None] + 1
        emit = probs.gather(2, ext[:, None].expand(3, 13, 11)) * valid[:, None]
        skip = torch.zeros(3, 11, dtype=torch.bool)
        skip[:, 2:] = (ext[:, 2:] != 0) & (ext[:, 2:] != ext[:, :-2])
        a = step("forward", emit[:, 0] * (s < 2))
        log_scale = torch.log(a.sum(1))
        for t in range(1, 13):
            hat = a / a.sum(1, keepdim=True)
            moved = hat + F.pad(hat, (1, 0))[:, :-1] + F.pad(hat, (2, 0))[:, :-2] * skip
            live = t < input_lengths
            a = step("forward", torch.where(live[:, None], moved * emit[:, t], hat))
            log_scale = log_scale + torch.log(a.sum(1))
        hat = a / a.sum(1, keepdim=True)
        ends = hat.gather(1, torch.stack([2 * target_lengths, 2 * target_lengths - 1], 1)).sum(1)
        nll = step("nll", -log_scale - torch.log(ends))
        return (nll / target_lengths).mean()

    def port(P: Port):
        logits, targets, in_len, out_len = P["logits"], P["targets"], P["input_lengths"], P["target_lengths"]
        dt = logits.dtype
        along = 1 if P.d("softmax_over_the_frames") else 2
        z = logits - logits.max(along, keepdims=True)
        p = np.exp(z)
        p = P.put("probs", p / p.sum(along, keepdims=True))
        logp = np.log(p)

        blank = 6 if P.d("blank_is_the_last_class") else 0
        labels = []
        for n in range(3):
            first = int(out_len[:n].sum()) if P.d("targets_read_as_packed") else 5 * n
            word = targets.reshape(-1)[first : first + out_len[n]]
            labels.append([blank if s % 2 == 0 else int(word[s // 2]) for s in range(2 * len(word) + 1)])

        def may_skip(n, s):
            row = labels[n]
            if P.d("skip_between_equal_labels"):
                return s >= 2 and row[s] != blank
            return s >= 2 and row[s] != blank and row[s] != row[s - 2]

        none = P.f(-np.inf)
        forward = np.zeros((13, 3, 11), dt)
        log_scale, in_place = np.zeros(3, dt), P.d("forward_updated_in_place")
        for t in range(13):
            for n in range(3):
                size = len(labels[n])
                if t == 0:
                    for s in range(1 if P.d("first_frame_only_blank") else 2):
                        forward[0, n, s] = np.exp(logp[n, 0, labels[n][s]])
                    continue
                before = np.log(forward[t - 1, n] / forward[t - 1, n].sum())
                if t >= in_len[n]:
                    forward[t, n] = np.exp(before)
                    continue
                for s in range(size):
                    ways = [before[s], before[s - 1] if s else none, before[s - 2] if may_skip(n, s) else none]
                    top = max(ways)
                    if top == none:
                        continue
                    total = top + np.log(sum(np.exp(way - top) for way in ways)) + logp[n, t, labels[n][s]]
                    forward[t, n, s] = np.exp(total)
                    if in_place:
                        before[s] = total
            forward[t] = P.put("forward", forward[t])
            log_scale += np.log(forward[t].sum(1))

        hat = forward / forward.sum(2, keepdims=True)
        nll = np.empty(3, dt)
        for n in range(3):
            size = len(labels[n])
            end = hat[12, n, size - 1] + (0 if P.d("ends_only_in_the_blank") else hat[12, n, size - 2])
            nll[n] = -log_scale[n] - np.log(end)
        nll = P.put("nll", nll)
        by = in_len if P.d("divided_by_the_frames") else out_len
        P.put("output", ((nll[0] / by[0] + nll[1] / by[1] + nll[2] / by[2]) / P.f(3)).astype(dt))

        grad = np.zeros_like(logits)
        for n in range(3):
            size, row = len(labels[n]), labels[n]
            back = np.zeros(size, dt)
            back[-2:] = 1
            frames = in_len[n]
            for t in reversed(range(frames)):
                if t < frames - 1:
                    ahead = back * p[n, t + 1, row]
                    back = ahead.copy()
                    back[:-1] += ahead[1:]
                    for s in range(2, size):
                        if may_skip(n, s):
                            back[s - 2] += ahead[s]
                    back = back / back.sum()
                share = hat[t, n, :size] * back
                if P.d("emission_in_both_variables"):
                    share = share * p[n, t, row]
                share = share / share.sum()
                line = p[n, t].copy()
                for s in range(size):
                    line[row[s]] -= share[s]
                grad[n, t] = line / P.f(3 * by[n])
            if P.d("gradient_after_the_last_frame"):
                grad[n, frames:] = p[n, frames:] / P.f(3 * by[n])
        P.put("grad:logits", grad)

    defects = [
        D(
            "softmax_over_the_frames",
            "probs",
            "axis",
            "The softmax goes along the frames, not along the classes.",
            ("transpose", "layout", "other"),
        ),
        D(
            "blank_is_the_last_class",
            "forward",
            "constant",
            "The blank is the last class, as in TensorFlow, not class 0.",
            ("shift", "permute", "other"),
        ),
        D(
            "targets_read_as_packed",
            "forward",
            "layout",
            "A target starts after the lengths of those before it, as in a packed array; the array is padded.",
            ("shift", "permute", "other"),
        ),
        D(
            "first_frame_only_blank",
            "forward",
            "zero",
            "In the first frame a path can only start with the blank; the first label's entry stays 0.",
            ("drop_term", "truncate", "mask"),
        ),
        D(
            "skip_between_equal_labels",
            "forward#2",
            "mask",
            "The blank between two equal labels can be skipped.",
            ("other", "drop_term", "function"),
        ),
        D(
            "forward_updated_in_place",
            "forward#2",
            "race",
            "The forward variable has one buffer: entries of this frame are read as those of the frame before.",
            ("stale", "other", "shift"),
        ),
        D(
            "ends_only_in_the_blank",
            "nll",
            "drop_term",
            "Only paths that end in the last blank are counted, not those that end in the last label.",
            ("truncate", "zero", "mask"),
        ),
        D(
            "divided_by_the_frames",
            "output",
            "scale",
            "A sample's loss is divided by its number of frames, not by the length of its target.",
            ("factor", "swap", "constant"),
        ),
        D(
            "emission_in_both_variables",
            "grad:logits",
            "factor",
            "Forward and backward variable both hold a frame's probability; it is not divided out of their product.",
            ("scale", "other", "function", "drop_term"),
        ),
        D(
            "gradient_after_the_last_frame",
            "grad:logits",
            "mask",
            "The frames after a sample's length get the softmax as gradient, where it should be 0.",
            ("zero", "truncate"),
        ),
    ]


RATE, DECAY = 0.05, 0.1
NS = (3.4445, -4.7750, 2.0315)


@program(
    "z06",
    variants=("f32", "bf16"),
    wide=(
        *("w", "b", "mom", "avg", "avg_sq", "ema_w", "inputs", "gnorm"),
        *("momentum", "m1", "m2", "weight", "bias", "ema", "output"),
    ),
)
class muon_adam:
    """Two steps: clipping by global norm, Muon for the matrix, Adam for the bias, averaged weights; a linear layer."""

    def make(g):
        size = torch.tensor([0.3, 0.03], dtype=torch.float64)
        return dict(
            w=randn(g, 14, 9, scale=0.3),
            b=randn(g, 14, scale=0.2),
            grads_w=randn(g, 2, 14, 9) * size[:, None, None],
            grads_b=randn(g, 2, 14) * 2 * size[:, None],
            mom=randn(g, 14, 9, scale=0.04),
            avg=randn(g, 14, scale=0.03),
            avg_sq=rand(g, 14, low=1e-4, high=6e-4),
            ema_w=randn(g, 14, 9, scale=0.3),
            done=torch.tensor([3]),
            inputs=randn(g, 5, 9),
        )

    def reference(w, b, grads_w, grads_b, mom, avg, avg_sq, ema_w, done, inputs):
        m1, m2, ema = avg, avg_sq, ema_w
        for k in range(2):
            t = done[0].item() + k + 1
            gnorm = step("gnorm", (grads_w[k].square().sum() + grads_b[k].square().sum()).sqrt())
            coef = (1.0 / (gnorm + 1e-6)).clamp(max=1.0)
            gw, gb = step("clip_w", grads_w[k] * coef), step("clip_b", grads_b[k] * coef)
            mom = step("momentum", 0.95 * mom + 0.05 * gw)
            nest = step("nesterov", 0.05 * gw + 0.95 * mom)
            x = step("unit", nest.T / (nest.norm() + 1e-7))
            for _ in range(3):
                gram = step("gram", x @ x.T)
                x = step("ns", NS[0] * x + (NS[1] * gram + NS[2] * gram @ gram) @ x)
            w = step("weight", w * (1 - RATE * DECAY) - RATE * 0.2 * math.sqrt(14) * x.T)
            m1 = step("m1", 0.9 * m1 + 0.1 * gb)
            m2 = step("m2", 0.98 * m2 + 0.02 * gb.square())
            root = (m2 / (1 - 0.98**t)).sqrt()
            b = step("bias", b - RATE * (m1 / (1 - 0.9**t)) / (root + 1e-3))
            d = min(0.999, (1 + t) / (10 + t))
            ema = step("ema", d * ema + (1 - d) * w)
        return inputs @ ema.T + b

    def port(P: Port):
        w, b, mom, m1, m2, ema = P["w"], P["b"], P["mom"], P["avg"], P["avg_sq"], P["ema_w"]
        dt = w.dtype
        for k in range(2):
            t = int(P["done"][0]) + k + 1
            raw_w, raw_b = P["grads_w"][k], P["grads_b"][k]
            total = P.f(0)
            for i in range(0, 14, 4):
                total = total + (raw_w[i : i + 4] ** 2).sum() + (raw_b[i : i + 4] ** 2).sum()
            gnorm = P.put("gnorm", np.sqrt(total))
            clip = gnorm > 1 or P.d("clipped_below_the_limit_too")
            coef = 1 / (gnorm + P.f(1e-6)) if clip else P.f(1)
            gw, gb = P.put("clip_w", raw_w * coef), P.put("clip_b", raw_b * coef)

            before = mom
            mom = P.put("momentum", mom + P.f(0.05) * (gw - mom))
            past = before if P.d("nesterov_from_the_momentum_before") else mom
            nest = P.put("nesterov", gw + P.f(0.95) * (past - gw))

            squares = (nest * nest).sum(1, keepdims=True)  # one a row
            if not P.d("each_row_normalised"):
                squares = squares.sum()
            x = P.put("unit", (nest / (np.sqrt(squares) + P.f(1e-7))).T)
            for _ in range(3):
                gram = np.zeros((9, 9), dt)
                for j in range(0, 14, 5):
                    part = x[:, j : j + 5]
                    if P.d("gram_summed_in_bf16"):
                        gram = bf16(gram + bf16(bf16(part) @ bf16(part).T))
                    else:
                        gram += part @ part.T
                gram = P.put("gram", gram)
                square = gram * gram if P.d("gram_squared_by_element") else gram @ gram
                x = P.put("ns", P.f(NS[0]) * x + P.f(NS[1]) * (gram @ x) + P.f(NS[2]) * (square @ x))

            delta = x.reshape(14, 9) if P.d("update_not_transposed_back") else x.T
            if P.d("decay_applied_twice"):
                w = w - P.f(RATE * DECAY) * w
            w = w - P.f(RATE * DECAY) * w - P.f(RATE * 0.2 * math.sqrt(14)) * delta
            w = P.put("weight", w)

            m1 = P.put("m1", P.f(0.9) * m1 + P.f(0.1) * gb)
            m2 = P.put("m2", P.f(0.98) * m2 + P.f(0.02) * gb * gb)
            count = t - 1 if P.d("bias_correction_counts_from_zero") else t
            c1, c2 = P.f(1 - 0.9**count), P.f(1 - 0.98**count)
            if P.d("eps_under_the_root"):
                under = np.sqrt(m2 / c2 + P.f(1e-3))
            else:
                under = np.sqrt(m2) / np.sqrt(c2) + P.f(1e-3)
            b = P.put("bias", b - P.f(RATE) / c1 * m1 / under)
            d = 0.999 if P.d("average_without_warm_up") else min(0.999, (1 + t) / (10 + t))
            new = P.f(1 - d)
            ema = P.put("ema", ema + new * (w - ema))
        out = np.empty((5, 14), dt)
        for j in range(14):
            out[:, j] = P["inputs"] @ ema[j] + b[j]
        P.put("output", out)

    defects = [
        D(
            "clipped_below_the_limit_too",
            "clip_w#2",
            "function",
            "The gradients are scaled to norm 1 also where their norm is below it: the clamp at 1 is missing.",
            ("scale", "factor", "mask", "drop_term", "other"),
        ),
        D(
            "nesterov_from_the_momentum_before",
            "nesterov",
            "stale",
            "The look-ahead takes the momentum before this step's update.",
            ("shift", "swap", "other", "drop_term"),
        ),
        D(
            "each_row_normalised",
            "unit",
            "axis",
            "Each row is divided by its own norm, not the matrix by its Frobenius norm.",
            ("scale", "factor", "other"),
        ),
        D(
            "gram_summed_in_bf16",
            "gram",
            "precision",
            "The Gram matrix is multiplied and summed in bfloat16.",
        ),
        D(
            "gram_squared_by_element",
            "ns",
            "function",
            "The Gram matrix's square is taken element by element, not as a matrix product.",
            ("other",),
        ),
        D(
            "update_not_transposed_back",
            "weight",
            "layout",
            "The update of 9 x 14 is read as 14 x 9 in memory order, not transposed.",
            ("transpose", "permute"),
        ),
        D(
            "decay_applied_twice",
            "weight",
            "factor",
            "The weights are decayed before the update and once more in it.",
            ("scale", "constant", "other"),
        ),
        D(
            "bias_correction_counts_from_zero",
            "bias",
            "shift",
            "The step count in the bias corrections starts at 0: it is one too small.",
            ("scale", "constant", "factor"),
        ),
        D(
            "eps_under_the_root",
            "bias",
            "eps",
            "Epsilon is added under the square root.",
            ("function", "other"),
        ),
        D(
            "average_without_warm_up",
            "ema",
            "constant",
            "The decay of the averaged weights is 0.999 from the start, not (1 + t) / (10 + t).",
            ("factor", "scale", "function"),
        ),
    ]
