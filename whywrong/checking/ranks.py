"""Steps of which each rank holds a part: which rank's part is wrong, which replicas differ, which sum is not one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from whywrong.checking.findings import Finding
from whywrong.comparing.comparison import compare
from whywrong.comparing.precision import UNIT_ROUNDOFF, name_of
from whywrong.recording.golden import Golden
from whywrong.recording.shards import Shards
from whywrong.recording.steps import Trace

CLEAR = 8.0
"""How many times larger the error of a wrong part is than that of a right one, and an error than what a repair leaves;
and round-offs, of the size of a step, from which on two replicas differ by more than the order of their sums."""

NAMED_RANKS = 4
"""Ranks with a wrong part that are named."""


def by_rank(golden: Golden | Trace, steps: Trace, findings: Mapping[str, Finding]) -> dict[str, Finding]:
    """The findings, with what the ranks tell: of wrong steps in shards, and of steps that several ranks hold."""
    result = dict(findings)
    for name in steps.names:
        shards, finding = steps.reader(name), findings.get(name)
        if finding is None or not isinstance(shards, Shards):
            continue
        exact = partial(golden.__getitem__ if isinstance(golden, Golden) else golden.read, name)
        own = finding.total is not None and not CLEAR * (finding.inherited or 0.0) > finding.total.rms_ratio
        if words := _differing(shards, exact):
            words = words if finding.words == "ok" else f"{finding.words}; {words}"
            result[name] = replace(finding, wrong=True, diverges=True, words=words)
        elif finding.wrong and own and (seen := steps.read(name)).shape == exact().shape:
            words = _summed(shards, seen, exact()) or _parts(shards, seen, exact())
            result[name] = replace(finding, words=finding.words + f"; {words}" * bool(words))
    return result


def _error(o: Tensor, g: Tensor) -> float:
    """The RMS of the difference, infinite where one alone is not finite."""
    o, g = o.double(), g.double()
    difference = torch.where((o == g) | (o.isnan() & g.isnan()), 0.0, o - g)
    rms = float(difference.square().mean().sqrt()) if o.numel() else 0.0
    return rms if math.isfinite(rms) else math.inf


def _differing(shards: Shards, exact: partial[Tensor]) -> str:
    """Which of the parts that are to be the same differ, and whether their sum is what each should be."""
    for group in (group for group in shards.alike if len(group) > 1):
        a = shards.parts[group[0]].read()
        for k in group[1:]:
            if not torch.equal(a, b := shards.parts[k].read()):
                size = a.double().abs().clamp(min=_error(a, torch.zeros_like(a)))
                allowed = CLEAR * UNIT_ROUNDOFF.get(name_of(a.dtype), 0.0) * size
                if a.shape != b.shape or not compare(b, a.double(), bound=allowed.nan_to_num(0.0, 0.0)).ok:
                    words = f"replicas differ: {shards.label(k, group[0])} from {shards.label(group[0], k)}"
                    return words + _summands(shards, group, exact())
    return ""


def _summands(shards: Shards, group: list[int], exact: Tensor) -> str:
    """Whether the replicas hold summands of the golden."""
    for axis, size in shards.axes.items():
        held = [*{shards.places[k].get(axis): shards.parts[k].read() for k in group}.values()]
        if len(held) < size or any(x.shape != exact.shape for x in held):
            continue
        if CLEAR * _error(sum(held[1:], held[0].double()), exact) < min(_error(x, exact) for x in held):
            return f", and their sum is the golden's: the all-reduce over {axis} is missing"
    return ""


def _summed(shards: Shards, seen: Tensor, exact: Tensor) -> str:
    """Whether a step is as many times the golden as an axis has ranks, or that part of it."""
    for axis, size in shards.axes.items():
        for times, words in (
            (size, f"as if summed over {axis} once too often"),
            (1.0 / size, "as if divided by their number"),
        ):
            if CLEAR * _error(seen.double() / times, exact) < _error(seen, exact):
                return f"{'1/' * (times < 1.0)}{size} times the golden, and {axis} has {size} ranks: {words}"
    return ""


def _parts(shards: Shards, seen: Tensor, exact: Tensor) -> str:
    """The ranks whose part is wrong, where those of others are right; and those that hold another's part."""
    owners = shards.owners()
    parts = {k: (seen[owners == k], exact[owners == k]) for k in owners.unique().tolist()}
    least = UNIT_ROUNDOFF.get(name_of(seen.dtype), 0.0) * _error(exact, torch.zeros_like(exact))
    errors = {k: max(_error(*pair), least, 1e-300) for k, pair in parts.items()}
    order = sorted(errors, key=errors.__getitem__)
    jumps = [errors[b] / errors[a] for a, b in pairwise(order)]
    wrong = order[jumps.index(max(jumps)) + 1 :] if jumps and max(jumps) >= CLEAR else order
    words = []
    for k in sorted(wrong):
        o = parts[k][0]
        others = (i for i, (_, g) in parts.items() if g.shape == o.shape and CLEAR * _error(o, g) < errors[k])
        if (other := next(others, None)) is not None:
            words.append(f"{shards.label(k)} (it holds what is of {shards.label(other)})")
        elif len(wrong) < len(order):
            words.append(shards.label(k))
    more = " and others" * (len(words) > NAMED_RANKS) + " alone" * (len(words) < len(order))
    return f"wrong in {', '.join(words[:NAMED_RANKS])}{more}" if words else ""
