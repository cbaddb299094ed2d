"""A port run with one step's golden value in its place: what of its result heals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whywrong.checking.findings import Localisation
from whywrong.checking.localise import localise
from whywrong.comparing.precision import Precision
from whywrong.errors import UsageError, did_you_mean
from whywrong.recording.capture import observed_steps
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.steps import OUTPUT
from whywrong.recording.watching import check_subject, path_of
from whywrong.tables import digits

ALL, PART, NONE = "all", "part", "none"

HEALED = 0.9
"""Share of the result's error up to which a part of it is healed: other roundings behind a graft change it too."""


@dataclass(repr=False)
class Graft:
    """What :func:`graft` found: `heals` is "all", "part" or "none" of the error of the port's result.

    `errors` are its RMS over that of the golden, without and with the graft, and `tolerance` is the largest error that
    is left over what is allowed. `others` are the steps that are wrong by themselves with the graft, and `report` is
    that run against the golden.
    """

    step: str
    heals: str
    errors: tuple[float, float]
    tolerance: float
    others: list[str]
    report: Localisation

    def __repr__(self) -> str:
        others = f"; wrong by themselves are still {', '.join(self.others)}" if self.others else ""
        if self.heals == ALL:
            correct = f"with {self.step} repaired the result is correct, to {digits(self.tolerance)} of its tolerance"
            return correct + (others or "; it is the only fault")
        how = "a part" if self.heals == PART else "nothing"
        sizes = " to ".join(digits(error, 3) for error in self.errors)
        return f"with {self.step} repaired {how} of the result heals: its error (rms) goes from {sizes}{others}"


def graft(
    port: torch.nn.Module | Callable[..., Any],
    golden: Golden,
    step: str,
    /,
    *inputs: Any,
    precision: Precision | None = None,
    names: Mapping[str, str] | None = None,
    **named: Any,
) -> Graft:
    """Run `port` as it is, and with the golden's value of `step` in its place; see what of its result heals.

    port: a module, of which a submodule's output or a parameter is replaced, or a function, in which a
    :func:`whywrong.step` returns the golden's value. golden: what :func:`whywrong.golden` recorded. step: one of its
    steps. inputs: those of the port; without, the golden's, real numbers in the type of the port's first parameter, or
    in float32. `precision` and `names` are those of :func:`whywrong.localise`.

    All heals where the result is then within its tolerance; the step is the only fault if no other step is wrong by
    itself. The port stays as it was. Raises UsageError for a step that the port does not compute in the golden's shape,
    and for a port whose result is correct.
    """
    check_subject("graft", port, None)
    if not isinstance(golden, Golden) or step not in golden:
        hint = did_you_mean(step, golden.names) if isinstance(golden, Golden) else ""
        raise UsageError(f"graft: expected a recorded golden and one of its steps, got {step!r}; {hint}".rstrip("; "))
    own = {path_of(n) for n, _ in port.named_parameters()} if isinstance(port, torch.nn.Module) else set()
    theirs = (names or {}).get(step, step)
    with torch.no_grad():
        if not (inputs or named):
            inputs, named = _inputs(port, golden)
        plain = observed_steps(port, inputs, named)
        given = theirs not in own and theirs in golden.inputs
        if given or "/" in theirs or theirs not in plain or plain[theirs].shape != golden[step].shape:
            got = f"one of shape {tuple(plain[theirs].shape)}" if theirs in plain else "none"
            raise UsageError(f"{step}: expected a step that the port computes in the golden's shape, got {got}")
        grafted = observed_steps(port, inputs, named, grafts={theirs: golden[step]})
    before, after = (localise(x, golden, precision=precision, names=names) for x in (plain, grafted))
    made = [name for name in golden.names if name not in golden.inputs and not name.startswith(GRADIENT)]
    ends = [name for name in made if name.partition(".")[0] == OUTPUT] or made[-1:]
    if not any(before.findings[end].diverges for end in ends):
        raise UsageError(f"graft: expected a port whose result is wrong, got a correct one: {', '.join(ends)}")
    errors = _error(before, ends), _error(after, ends)
    left = any(after.findings[end].diverges for end in ends)
    heals = ALL if not left else PART if errors[1] < HEALED * errors[0] else NONE
    used = max(alone.bound_used if (alone := after.findings[end].own) else math.inf for end in ends)
    return Graft(step, heals, errors, used, [name for name in after.own if name != step], after)


def _error(report: Localisation, ends: list[str]) -> float:
    return max(total.rms_ratio if (total := report.findings[end].total) else math.inf for end in ends)


def _inputs(port: Any, golden: Golden) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The golden's inputs as arguments of the port."""
    dtype = next((x.dtype for x in getattr(port, "parameters", list)()), torch.float32)
    given = {name: golden[name] for name in golden.inputs if name not in golden.parameters}
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    if any("." in name.removeprefix("input.") for name in given):
        raise UsageError("graft: expected the port's inputs after the step where the golden's are nested, got none")
    return tuple(given.pop(name) for name in [*given] if name.startswith("input.")), given
