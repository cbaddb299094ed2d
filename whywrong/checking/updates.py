"""Steps that are an earlier one and a small change, as weights after an update are: what the change shows of them.

A weight's type may hold so few digits that it hides the change, and a tolerance for the weight passes any change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import count

import torch

from whywrong.comparing.precision import UNIT_ROUNDOFF, half_ulp, name_of
from whywrong.recording.golden import Golden
from whywrong.recording.steps import Trace
from whywrong.tables import first_of

SAMPLE = 1 << 16
"""Elements of a sample, which is looked at in place of more of them, or first."""
HIDDEN_SHARE = 0.1
"""The share of elements whose change is lost from which a note says so."""


def earlier(golden: Golden | Trace, names: list[str]) -> dict[str, str]:
    """For each of `names`, in order, the step that it changes, where there is one; nothing is read.

    With a program that is the last observed one of its shape from which it is computed. Without, it has the same name
    with a number that is one less: p.3 and p.4 are a step of training apart, and of step10 and step20 nobody knows what
    lies between.
    """
    found: dict[str, str] = {}
    if isinstance(golden, Golden):
        nodes, at = golden.program.nodes, {golden.steps[name]: name for name in reversed(names)}
        for name in names:
            i = golden.steps[name]
            same = [at[k] for k in golden.program.before(i, at) if k < i and nodes[k].shape == nodes[i].shape]
            found |= {name: same[-1]} if same else {}
        return found
    for name in names:
        for digits in re.finditer(r"\d+", name):
            before = f"{name[: digits.start()]}{int(digits[0]) - 1:0{len(digits[0])}d}{name[digits.end() :]}"
            found |= {name: before} if before in golden else {}
    return found


def hidden(golden: Golden | Trace, observed: Trace, changed: dict[str, str]) -> list[str]:
    """A note for the steps of which many elements stay as in the one before, since their type has too few digits."""
    shares = dict(_lost(golden, observed, changed))
    if not shares:
        return []
    few, many = (f"{value:.0%}" for value in (min(shares.values()), max(shares.values())))
    names, share = list(shares), few if few == many else f"{few} to {many}"
    which = first_of(names, 1)
    dtype = name_of(observed.read(names[0]).dtype)
    return [f"in {which} {share} of the changes are lost: they are below half a digit of {dtype}"]


def _lost(golden: Golden | Trace, observed: Trace, changed: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Steps, and the share of their elements whose change is lost, where that is large."""
    for name, before in changed.items():
        if before not in observed:
            continue
        end, start = (_read(golden, step) for step in (name, before))
        if end.shape != start.shape or not start.numel():
            continue
        new, old = (observed.read(step).to(start.device) for step in (name, before))
        if new.shape != old.shape or new.dtype != old.dtype or name_of(new.dtype) not in UNIT_ROUNDOFF:
            continue
        end, start, new, old = map(sample, (end, start, new, old))
        change = (end.double() - start.double()).abs()
        rounding = 16.0 * UNIT_ROUNDOFF["float64"] * start.double().abs().amax()  # of the golden, as between two sums
        made = change > rounding
        small = made & (change <= half_ulp(old.double(), name_of(old.dtype)))
        share = int((small & (new == old)).sum()) / max(1, int(made.sum()))
        if share >= HIDDEN_SHARE:
            yield name, share


def _read(golden: Golden | Trace, name: str) -> torch.Tensor:
    return golden[name] if isinstance(golden, Golden) else golden.read(name)


def sample(x: torch.Tensor, most: int = SAMPLE) -> torch.Tensor:
    """`most` elements about, equally far apart, of all columns alike; all of fewer."""
    return x.flatten()[:: apart(x, most)]


def apart(x: torch.Tensor, most: int = SAMPLE) -> int:
    """How far the elements of a sample are apart."""
    return next(k for k in count(max(1, -(-x.numel() // most))) if math.gcd(k, x.shape[-1] if x.ndim else 1) == 1)
