"""Tools in the form that `python -m benchmark score` takes."""

from __future__ import annotations

from typing import Any

import torch

import whywrong
from benchmark.score import Answer


def whywrong_tool(case: dict[str, Any], seconds: float) -> Answer:
    """whywrong: the first wrong step, and the mutation that gives the port's numbers."""
    golden = whywrong.golden(case["reference"], loss=case["loss"], **case["inputs"])
    precision = whywrong.Precision(**case["precision"])
    found = whywrong.explain(case["observed"], golden, precision=precision, seconds=seconds)
    text = found.causes[0].says if found.causes else ""
    return Answer(found.step, found.verdict, [cause.kind for cause in found.causes], text, found.tried)


def assert_close(case: dict[str, Any], seconds: float) -> Answer:
    """The practice of the field: each step in order against the reference in float64, by `torch.testing.assert_close`
    with its own tolerance for the dtype. The first that fails is the first wrong step; it gives no cause."""
    golden = whywrong.capture(case["reference"], loss=case["loss"], **case["inputs"])
    updated = {f"{name}#2": name for name in case["inputs"]}
    for name in golden.names:
        observed = case["observed"].get(updated.get(name, name))
        if observed is None or name in case["inputs"]:
            continue
        try:
            torch.testing.assert_close(observed, golden[name].to(observed.dtype), equal_nan=True)
        except AssertionError as error:
            return Answer(name, text=" ".join(str(error).split()))
    return Answer(None)


TOOLS = {"whywrong": whywrong_tool, "assert_close": assert_close}
