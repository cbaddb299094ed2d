"""What the common names of operations mean, as formulas of their inputs.

A name is worth nothing by itself: what it means counts only where it gives the golden's step from the golden's inputs
(:func:`labkit.formula.formula`). Where a step has inputs but no name, every meaning is tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SILU = "{x}*sigmoid({x})"
_GELU = "0.5*{x}*(1+erf({x}*0.7071067811865476))"
_GELU_TANH = "0.5*{x}*(1+tanh(0.7978845608028654*({x}+0.044715*{x}*{x}*{x})))"
_OF_RMS = "rsqrt(mean(a*a)+eps)"
_OF_SPREAD = "rsqrt(mean((a-mean(a))*(a-mean(a)))+eps)"
_RMS = f"a*{_OF_RMS}"
_LAYER = f"(a-mean(a))*{_OF_SPREAD}"
_LSE = "log(sum(exp(a-max(a))))+max(a)"
_DENOMINATOR = "sum(exp(a-max(a)))"
REDUCTIONS = (_LSE, _DENOMINATOR, "sum(a*b)", "mean(a*b)", "mean(a*a)", _OF_RMS, _OF_SPREAD, "tokens(a*b)")
"""Of rows, or of all tokens, what is no plain sum."""


@dataclass(frozen=True)
class Meaning:
    """One formula of inputs a, b, c, d, and how many results before its last an implementation may have stored."""

    text: str
    stored: int = 0


_MEANINGS: tuple[tuple[str, tuple[Meaning, ...]], ...] = (
    (r"relu", (Meaning("relu(a)"), Meaning("a*(b>0)"))),
    (r"silu|swish|swiglu", (
        Meaning(_SILU.format(x="a")), Meaning(_SILU.format(x="a") + "*b", 1),
        Meaning("a*sigmoid(b)*(1+b*(1-sigmoid(b)))", 2),
    )),
    (r"gelu|geglu", (
        Meaning(_GELU.format(x="a")), Meaning(_GELU_TANH.format(x="a")),
        Meaning(_GELU.format(x="a") + "*b", 1), Meaning(_GELU_TANH.format(x="a") + "*b", 1),
    )),
    (r"sigmoid", (
        Meaning("sigmoid(a)"), Meaning("2*sigmoid(a)", 1), Meaning("a*b*(1-b)", 2), Meaning("a*b*(1-b/2)", 2),
    )),
    (r"tanh", (Meaning("tanh(a)"), Meaning("a*(1-b*b)", 2))),
    (r"\bexp\b", (Meaning("exp(a)"), Meaning("a*b"))),
    (r"\blog\b", (Meaning("log(a)"),)),
    (r"\bcos", (Meaning("cos(a)"),)),
    (r"\bsine?\b", (Meaning("sin(a)"),)),
    (r"sqrt", (Meaning("sqrt(a)"), Meaning("rsqrt(a)"))),
    (r"rms_?norm", (Meaning(_RMS, 1), Meaning(_RMS + "*b", 1), Meaning("a*b*c", 1))),
    (r"layer_?norm|\bln\b", (Meaning(_LAYER, 1), Meaning(f"{_LAYER}*b", 1), Meaning(f"{_LAYER}*b+c", 2))),
    (r"log[ _-]*sum[ _-]*exp|\blse\b", (Meaning(_LSE),)),
    (r"sum\W*(of )?exp|denom|exp\W*sum|\bl\b", (
        Meaning("sum(exp(a-b))"), Meaning(_DENOMINATOR), Meaning("sum(exp(a))"),
    )),
    (r"mean.*square", (Meaning("mean(a*a)"),)),
    (r"\bvar", (Meaning("mean((a-b)*(a-b))"),)),
    (r"rstd|inv\w*[ _]*(rms|std)|rsqrt", (
        Meaning("rsqrt(mean((a-b)*(a-b))+eps)", 1), Meaning(_OF_SPREAD, 1),
        Meaning(_OF_RMS, 1), Meaning("rsqrt(a+eps)", 1),
    )),
    (r"normali[sz]", (Meaning("a/sum(a)"), Meaning("a/rows(a)"), Meaning("a/b"), Meaning("a*b"))),
    (r"softmax.*(back|bwd|grad)|(back|bwd|grad|d).*softmax", (
        Meaning("a*(b-c)", 1), Meaning("a*(b-sum(a*b))", 2),
    )),
    (r"rope|rotary|rotat", (Meaning("a*b+halves(a)*c", 2), Meaning("a*b+pairs(a)*c", 2))),
    (r"ema|average|moment|\bm\b", (Meaning("beta1*a+(1-beta1)*b", 2), Meaning("(1-beta1)*a"))),
    (r"ema|average|moment|square|\bv\b", (Meaning("beta2*a+(1-beta2)*b*b", 2), Meaning("(1-beta2)*a*a", 1))),
    (r"nll|loss|entropy", (Meaning("a-b"),)),
    (r"\bdots?\b|sum|mean|delta|grad", (
        Meaning("sum(a*b)", 1), Meaning("mean(a*b)", 1), Meaning("tokens(a*b)", 1), Meaning("tokens(a)"),
    )),
    (r"residual|\badd\b", (Meaning("a+b"), Meaning("a+b+c", 1))),
    (r"\bmul\b|product|times|gate", (Meaning("a*b"), Meaning("a*b*c", 1))),
)  # fmt: skip

EPSILONS = ("1e-5", "1e-6", "1e-8", "1e-12", "0.0")
"""Tried in turn where the text gives none."""


def everything() -> list[Meaning]:
    """Every meaning there is, once."""
    return list({one.text: one for _, all_of_it in _MEANINGS for one in all_of_it}.values())


def meanings(op: str, inputs: int) -> Iterator[Meaning]:
    """What `op` may mean of so many inputs; every meaning there is for an `op` of no words."""
    known: dict[str, tuple[int, Meaning]] = {}
    for pattern, all_of_it in _MEANINGS:
        if op and not re.search(pattern, op, re.IGNORECASE):
            continue
        for one in all_of_it:
            used = len(set(re.findall(r"\b[abcd]\b", one.text)))
            if used <= inputs and (op or used == inputs):
                known.setdefault(one.text, (inputs - used, one))
    yield from (one for _, one in sorted(known.values(), key=lambda pair: pair[0]))  # those that use all inputs first
