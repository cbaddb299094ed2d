"""An optimiser with orthogonal updates, and speculative sampling."""

from __future__ import annotations

import math

import numpy as np
import torch

from benchmark.base import D, Port, bf16, program, rand, randint, randn, step

A, B, C = 3.4445, -4.7750, 2.0315


@program("r07", variants=("f32",), notes="a loop: the second time's steps are called name#2")
class muon_step:
    """Muon for a wide and a tall matrix, with five Newton-Schulz iterations, and Lion for a vector.

    The reference transposes the tall matrix; the port orthogonalises it as it is, by the products of its columns.
    """

    def make(g):
        return dict(
            w=randn(g, 14, 22, scale=0.3),
            w_grad=randn(g, 14, 22, scale=0.02),
            w_buf=randn(g, 14, 22, scale=0.02),
            u=randn(g, 20, 9, scale=0.3),
            u_grad=randn(g, 20, 9, scale=0.02),
            u_buf=randn(g, 20, 9, scale=0.02),
            b=randn(g, 17, scale=0.3),
            b_grad=randn(g, 17, scale=0.02),
            b_buf=randn(g, 17, scale=0.01),
        )

    def reference(w, w_grad, w_buf, u, u_grad, u_buf, b, b_grad, b_buf):
        new = {}
        for name, p, grad, buf in (("w", w, w_grad, w_buf), ("u", u, u_grad, u_buf)):
            buf = step(f"{name}_momentum", 0.95 * buf + 0.05 * grad)
            x = step(f"{name}_nesterov", 0.95 * buf + 0.05 * grad)
            x = step(f"{name}_unit", x / (x.norm() + 1e-7))
            tall = x.shape[0] > x.shape[1]
            x = x.mT if tall else x
            for _ in range(5):
                gram = step(f"{name}_gram", x @ x.mT)
                x = step(f"{name}_iterate", A * x + (B * gram + C * gram @ gram) @ x)
            x = x.mT if tall else x
            x = step(f"{name}_update", x * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            new[f"{name}_new"] = p * (1 - 0.02 * 0.1) - 0.02 * x
        mix = step("b_mix", 0.9 * b_buf + 0.1 * b_grad)
        new["b_new"] = b * (1 - 0.003 * 0.1) - 0.003 * mix.sign()
        new["b_buf_new"] = 0.99 * b_buf + 0.01 * b_grad
        return new

    def port(P: Port):
        new = {}
        lr, decay = P.f(0.02), P.f(0.1)
        for name in ("w", "u"):
            p, grad, buf = P[name], P[f"{name}_grad"], P[f"{name}_buf"]
            rows, columns = p.shape
            if P.d("gradient_not_damped"):
                buf = P.f(0.95) * buf + grad
            else:
                buf = buf + P.f(0.05) * (grad - buf)
            buf = P.put(f"{name}_momentum", buf)
            if P.d("momentum_itself"):
                x = buf
            elif P.d("lerp_arguments_exchanged"):
                x = buf + P.f(0.95) * (grad - buf)
            else:
                x = grad + P.f(0.95) * (buf - grad)
            x = P.put(f"{name}_nesterov", x)
            x = x / (np.sqrt((x * x).sum()) + P.f(1e-7))
            x = P.put(f"{name}_unit", x)
            tall = rows > columns
            n = min(rows, columns)
            a, b, c = (1.5, -0.5, 0.0) if P.d("cubic_iteration") else (A, B, C)
            for turn in range(5):
                gram = np.zeros((n, n), x.dtype)
                inner = max(rows, columns)
                for k0 in range(0, inner, 8):
                    tile = x[k0 : k0 + 8].T if tall else x[:, k0 : k0 + 8]
                    gram += bf16(bf16(tile) @ bf16(tile).T) if P.d("gram_in_bf16") else tile @ tile.T
                if P.d("only_lower_half_written"):
                    gram = np.tril(gram)
                gram = P.put(f"{name}_gram", gram)
                poly = P.f(b) * gram + P.f(c) * (gram @ gram)
                for i in range(n):
                    poly[i, i] += P.f(a)
                x = x @ poly if tall else poly @ x
                x = P.put(f"{name}_iterate", x.T if tall else x)
                x = x.T if tall else x
            shape = columns / rows if P.d("ratio_of_sides_inverted") else rows / columns
            update = P.put(f"{name}_update", P.f(math.sqrt(max(shape, 1))) * x)
            if P.d("decay_without_learning_rate"):
                q = p * (1 - decay)
            else:
                q = p * (1 - lr * decay)
            new[f"{name}_new"] = q - lr * update

        b, grad, buf = P["b"], P["b_grad"], P["b_buf"]
        fast, slow = P.f(0.9), P.f(0.99)
        if P.d("lion_betas_exchanged"):
            fast, slow = slow, fast
        mix = P.put("b_mix", grad + fast * (buf - grad))
        P.put("w_new", new["w_new"])
        P.put("u_new", new["u_new"])
        P.put("b_new", b - P.f(0.003) * (np.sign(mix) + decay * b))
        P.put("b_buf_new", mix if P.d("interpolation_kept_as_momentum") else grad + slow * (buf - grad))

    defects = [
        D(
            "gradient_not_damped",
            "w_momentum",
            "factor",
            "the gradient is added without its factor 1 - 0.95, as in SGD",
            accept=("scale", "constant", "drop_term", "other"),
        ),
        D(
            "momentum_itself",
            "w_nesterov",
            "drop_term",
            "the update is the momentum itself, without Nesterov's step",
            accept=("function", "stale", "factor", "other"),
        ),
        D(
            "lerp_arguments_exchanged",
            "w_nesterov",
            "swap",
            "gradient and momentum are exchanged in the Nesterov update",
            accept=("constant",),
        ),
        D("gram_in_bf16", "w_gram", "precision", "the products of rows are made and summed in bfloat16"),
        D(
            "only_lower_half_written",
            "w_gram",
            "zero",
            "only the lower half of the symmetric product is written",
            accept=("mask", "truncate", "drop_term"),
        ),
        D(
            "cubic_iteration",
            "w_iterate",
            "constant",
            "the classic cubic iteration's coefficients 1.5, -0.5 and 0",
            accept=("function", "scale"),
        ),
        D(
            "ratio_of_sides_inverted",
            "w_update",
            "swap",
            "the update's factor has columns over rows",
            accept=("factor", "scale", "constant"),
        ),
        D("lion_betas_exchanged", "b_mix", "swap", "Lion's two betas are exchanged", accept=("constant",)),
        D(
            "decay_without_learning_rate",
            "w_new",
            "factor",
            "weights decay by 0.1 and not by 0.1 times the learning rate",
            accept=("scale", "constant"),
        ),
        D(
            "interpolation_kept_as_momentum",
            "b_buf_new",
            "stale",
            "the sign's mixture is kept as Lion's momentum",
            accept=("constant", "swap", "other"),
        ),
    ]


@program("r08", variants=("f32",))
class speculative_sampling:
    """Three draft tokens a sequence against the target's penalties, temperature, top-k and top-p; the rest is resampled.

    The port goes token by token, and finds the kept words by counting larger ones in place of sorting.
    """

    def make(g):
        target = randn(g, 5, 4, 29, scale=1.6)
        return dict(
            target_logits=target,
            draft_logits=target[:, :3] * 0.5 + randn(g, 5, 3, 29, scale=1.1),
            history=randint(g, 0, 29, 5, 14),
            draft=target[:, :3].topk(6).indices.gather(2, randint(g, 0, 6, 5, 3, 1))[..., 0],
            u=rand(g, 5, 3),
            u_last=rand(g, 5),
        )

    def reference(target_logits, draft_logits, history, draft, u, u_last):
        zero = torch.zeros(5, 29, dtype=u.dtype)
        counts = zero.scatter_add(1, history, torch.ones(5, 14, dtype=u.dtype))[:, None]
        z = step("penalised", target_logits - 0.3 * counts - 0.5 * (counts > 0))
        full = step("probs", (z / 0.8).softmax(-1))
        order = step("order", full.argsort(-1, descending=True))
        ranked = full.gather(-1, order)
        cum = step("cumulative", ranked.cumsum(-1))
        kept = (cum - ranked < 0.9) & (torch.arange(29) < 12)
        kept = torch.zeros_like(kept).scatter(-1, order, kept)
        target = torch.where(kept, full, 0.0)
        target = step("target", target / target.sum(-1, keepdim=True))
        guess = step("guess", (draft_logits / 0.8).softmax(-1))
        p = target[:, :3].gather(2, draft[..., None])[..., 0]
        q = guess.gather(2, draft[..., None])[..., 0]
        ratio = step("ratio", (p / q).clamp(max=1))
        accepted = step("accepted", (u < ratio).long().cumprod(1).sum(1))
        here = target[torch.arange(5), accepted]
        guessed = torch.cat([guess, torch.zeros(5, 1, 29, dtype=u.dtype)], 1)[torch.arange(5), accepted]
        rest = (here - guessed).clamp(min=0)
        rest = step("rest", rest / rest.sum(1, keepdim=True))
        cdf = step("cdf", rest.cumsum(1))
        token = step("token", (cdf <= u_last[:, None]).sum(1).clamp(max=28))
        return here.gather(1, token[:, None])[:, 0].clamp(min=1e-9).log()

    def port(P: Port):
        history, draft = P["history"], P["draft"]
        z = P["target_logits"]
        for b in range(5):
            if P.d("repeated_words_counted_once"):
                z[b][:, history[b]] -= P.f(0.3)  # without accumulation
            else:
                for word in history[b]:
                    z[b, :, word] -= P.f(0.3)
            for word in set(history[b].tolist()):
                z[b, :, word] -= P.f(0.5)
        z = P.put("penalised", z)

        def softmax(y, temperature):
            e = np.exp((y - y.max(-1, keepdims=True)) / P.f(temperature))
            return e / e.sum(-1, keepdims=True)

        full = P.put("probs", softmax(z, 0.8))
        order = np.empty(full.shape, np.int64)
        cum = np.empty_like(full)
        target = np.zeros_like(full)
        for at in np.ndindex(5, 4):
            p = full[at]
            rank = np.array([(p > value).sum() for value in p])
            if P.d("ascending_order"):
                rank = 28 - rank
            order[at][rank] = np.arange(29)
        order = P.put("order", order)
        for at in np.ndindex(5, 4):
            run = P.f(0)
            for n, word in enumerate(order[at]):
                run = run + full[at][word]
                cum[at][n] = run
        cum = P.put("cumulative", cum)
        for at in np.ndindex(5, 4):
            for n, word in enumerate(order[at]):
                before = cum[at][n] if P.d("crossing_word_left_out") else cum[at][n] - full[at][word]
                if before < 0.9 and n < 12:
                    place = n if P.d("mask_in_sorted_order") else word
                    target[at][place] = full[at][place]
            target[at] /= target[at].sum()
        target = P.put("target", target)
        guess = P.put("guess", softmax(P["draft_logits"], 1 if P.d("draft_without_temperature") else 0.8))
        ratio = np.empty((5, 3), z.dtype)
        for b, n in np.ndindex(5, 3):
            row = n + 1 if P.d("target_one_position_on") else n
            p, q = target[b, row, draft[b, n]], guess[b, n, draft[b, n]]
            ratio[b, n] = min(p / q, 1)
        ratio = P.put("ratio", ratio)
        accepted = np.zeros(5, np.int64)
        for b in range(5):
            for n in range(3):
                if P["u"][b, n] < ratio[b, n]:
                    accepted[b] += 1
                elif not P.d("accepted_behind_rejected"):
                    break
        accepted = P.put("accepted", accepted)
        rest = np.empty((5, 29), z.dtype)
        for b in range(5):
            n = accepted[b]
            if n == 3:
                rest[b] = target[b, 3]
            elif P.d("absolute_difference"):
                rest[b] = np.abs(target[b, n] - guess[b, n])
            else:
                rest[b] = np.maximum(target[b, n] - guess[b, n], 0)
            rest[b] /= rest[b].sum()
        rest = P.put("rest", rest)
        cdf = np.zeros_like(rest)
        for b in range(5):
            run = P.f(0)
            for word in range(29):
                if P.d("exclusive_sum"):
                    cdf[b, word] = run
                run = run + rest[b, word]
                if not P.d("exclusive_sum"):
                    cdf[b, word] = run
        cdf = P.put("cdf", cdf)
        token = np.array([min(np.searchsorted(cdf[b], P["u_last"][b], side="right"), 28) for b in range(5)])
        token = P.put("token", token.astype(np.int64))
        source = full if P.d("probability_before_filters") else target
        P.put("output", np.log(np.maximum([source[b, accepted[b], token[b]] for b in range(5)], P.f(1e-9))))

    defects = [
        D(
            "repeated_words_counted_once",
            "penalised",
            "race",
            "an indexed update without accumulation takes the penalty off once for a repeated word",
            accept=("drop_term", "factor", "other"),
        ),
        D("ascending_order", "order", "flip", "words are ranked from the least likely"),
        D("crossing_word_left_out", "target", "shift", "the word that crosses 0.9 isn't kept", accept=("mask",)),
        D(
            "mask_in_sorted_order",
            "target",
            "permute",
            "the mask of ranks isn't put back into the vocabulary's order",
            accept=("mask", "layout", "other"),
        ),
        D(
            "draft_without_temperature",
            "guess",
            "factor",
            "the draft's logits aren't divided by the temperature",
            accept=("scale", "constant"),
        ),
        D("target_one_position_on", "ratio", "shift", "the target's row of the next position is taken"),
        D(
            "accepted_behind_rejected",
            "accepted",
            "other",
            "draft tokens behind a rejected one are counted too",
            accept=("mask", "drop_term", "function", "factor"),
        ),
        D(
            "absolute_difference",
            "rest",
            "function",
            "the rest is the absolute difference and not its positive part",
            accept=("mask", "sign"),
        ),
        D("exclusive_sum", "cdf", "shift", "the cumulative sum leaves out the word itself", accept=("drop_term",)),
        D(
            "probability_before_filters",
            "output",
            "stale",
            "the logarithm is of the probability before top-k and top-p",
            accept=("other", "swap", "factor"),
        ),
    ]
