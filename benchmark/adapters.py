"""Tools in the form that `python -m benchmark score` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import whywrong
from benchmark.baselines import JUDGES, Step, steps
from benchmark.score import Answer, Tool


def whywrong_tool(case: dict[str, Any], seconds: float) -> Answer:
    """whywrong: the first wrong step, and the mutation that gives the port's numbers."""
    golden = whywrong.golden(case["reference"], loss=case["loss"], **case["inputs"])
    precision = whywrong.Precision(**case["precision"])
    found = whywrong.explain(case["observed"], golden, precision=precision, seconds=seconds)
    text = found.causes[0].says if found.causes else ""
    return Answer(found.step, found.verdict, [cause.kind for cause in found.causes], text, found.tried)


def localised(case: dict[str, Any], seconds: float) -> Answer:
    """whywrong's first wrong step alone."""
    golden = whywrong.golden(case["reference"], loss=case["loss"], **case["inputs"])
    precision = whywrong.Precision(**case["precision"])
    return Answer(whywrong.localise(case["observed"], golden, precision=precision).first)


def first_step(fails: Callable[[Step], bool | None]) -> Tool:
    """Steps in order, of which the first that fails is the answer; it gives no cause. A step of another shape fails."""

    def tool(case: dict[str, Any], seconds: float) -> Answer:
        wrong = (x.name for x in steps(case) if x.observed.shape != x.exact.shape or fails(x))
        return Answer(next(wrong, None))

    return tool


BASELINES = {name: first_step(fails) for name, fails in JUDGES.items()}
TOOLS = {"whywrong": whywrong_tool, "localise": localised, **BASELINES}
