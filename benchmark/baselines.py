"""What others use to compare two runs step by step, as functions of a step that say whether it is wrong.

Each is given all that it is entitled to: the step as observed, the reference's in float64, and where it asks for one
an eager run of the reference in the port's own types. docs/comparison.md says how each is run, and what is unfair.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

import whywrong

CAREFUL = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative and absolute tolerances of the order that tests of kernels have."""


class Step(NamedTuple):
    """A step as the port stored it, what the reference gives in float64, and what it gives in the port's types: None
    where the reference does not run in them."""

    name: str
    observed: torch.Tensor
    exact: torch.Tensor
    eager: torch.Tensor | None


def eager_run(case: dict[str, Any]) -> Mapping[str, torch.Tensor]:
    """The reference on the inputs as the port has them, or all of them in the type that it declares; {} if it does
    not run so."""
    inputs = {name: case["observed"][name] for name in case["inputs"]}
    storage = getattr(torch, case["precision"]["storage"])
    narrow = {name: x.to(storage) if x.is_floating_point() else x for name, x in inputs.items()}
    for given in (inputs, narrow):
        try:
            return whywrong.capture(case["reference"], loss=case["loss"], **given)
        except (RuntimeError, whywrong.UsageError):  # no kernel for these types
            continue
    return {}


def steps(case: dict[str, Any]) -> Iterator[Step]:
    """The named steps that both sides have, in the reference's order; what updates an input is NAME#2."""
    if "runs" not in case:
        exact = whywrong.capture(case["reference"], loss=case["loss"], **case["inputs"])
        case["runs"] = exact, eager_run(case)
    exact, eager = case["runs"]
    updated = {f"{name}#2": name for name in case["inputs"]}
    for name in exact.names:
        observed = case["observed"].get(updated.get(name, name))
        if observed is not None and name not in case["inputs"]:
            yield Step(name, observed, exact[name], eager[name] if name in eager else None)  # noqa: SIM401 (a Trace has no get)


def finite(*tensors: torch.Tensor) -> list[torch.Tensor] | None:
    """In float64 and flat, without the elements that are the same infinity or NaN in all; None if any other is left."""
    wide = [x.double().flatten() for x in tensors]
    kept = wide[0].isfinite()
    for x in wide[1:]:
        kept = kept | ~((x == wide[0]) | (x.isnan() & wide[0].isnan()))
    wide = [x[kept] for x in wide]
    return wide if all(bool(x.isfinite().all()) for x in wide) else None


def assert_close(step: Step) -> bool:
    """torch.testing.assert_close with its own tolerance for the type."""
    return differs(step)


def by_type(step: Step) -> bool:
    """torch.testing.assert_close with the tolerance of CAREFUL for the type."""
    tolerance = CAREFUL.get(step.observed.dtype, 0.0)
    return differs(step, rtol=tolerance, atol=tolerance)


def differs(step: Step, **tolerance: float) -> bool:
    """Whether assert_close raises."""
    try:
        torch.testing.assert_close(step.observed, step.exact.to(step.observed.dtype), equal_nan=True, **tolerance)
    except AssertionError:
        return True
    return False


def sqnr(step: Step) -> bool:
    """A signal to noise ratio below that of noise of ten epsilons of the type: 118 dB in float32, 40 in float16, 22 in
    bfloat16. Integers have to be equal."""
    if not step.observed.is_floating_point():
        return not torch.equal(step.observed, step.exact.to(step.observed.dtype))
    pair = finite(step.exact, step.observed)
    if pair is None:
        return True
    signal, noise = pair[0].norm(), (pair[1] - pair[0]).norm()
    return bool(noise > 10 * torch.finfo(step.observed.dtype).eps * signal)


def twice_eager(step: Step) -> bool | None:
    """The largest error against float64 beyond twice that of the eager run in the same types, as FlashAttention's tests
    and torch's have it; None without an eager run."""
    if step.eager is None:
        return None
    triple = finite(step.exact, step.observed, step.eager)
    if triple is None:
        return True
    exact, observed, eager = triple
    return len(exact) > 0 and bool((observed - exact).abs().max() > 2 * (eager - exact).abs().max())


def dynamo_same(step: Step) -> bool | None:
    """torch._dynamo.utils.same with the eager run, the one in float64, and the tolerances of torch's own benchmarks;
    None without an eager run."""
    from torch._dynamo.utils import same

    if step.eager is None:
        return None
    tol = 1e-3 if step.observed.dtype in {torch.bfloat16, torch.float16} else 1e-4
    quiet = logging.getLogger(__name__).debug
    eager = step.eager.to(step.observed.dtype)
    return not same(eager, step.observed, fp64_ref=step.exact, tol=tol, equal_nan=True, log_error=quiet)


@cache
def _sglang() -> Callable[..., Any]:
    """SGLang's comparator of two tensors. Its packages are entered without their __init__, which needs a server's
    requirements; the dumper that it imports gives it a text for its reports alone."""
    place = next(iter(find_spec("sglang").submodule_search_locations))  # type: ignore[union-attr, arg-type]
    for name in ("", ".srt", ".srt.debug_utils", ".srt.debug_utils.comparator"):
        package = types.ModuleType(f"sglang{name}")
        package.__path__ = [place + name.replace(".", "/")]
        sys.modules[package.__name__] = package
    dumper = types.ModuleType("sglang.srt.debug_utils.dumper")
    dumper.get_truncated_value = str  # type: ignore[attr-defined]
    sys.modules[dumper.__name__] = dumper
    from sglang.srt.debug_utils.comparator.tensor_comparator.comparator import compare_tensor_pair

    return compare_tensor_pair


def sglang(step: Step) -> bool:
    """SGLang's comparator, whose rule is a relative difference 1 - 2 x.y / (x.x + y.y) of 0.001 at most."""
    info = _sglang()(step.exact, step.observed, name=step.name)
    return not (info.diff and info.diff.passed)


def polygraphy(step: Step) -> bool:
    """Polygraphy's SimpleCompareFunc, element by element, with the tolerances of CAREFUL in place of its default of
    1e-5: an element fails that is beyond both the relative and the absolute one."""
    from polygraphy.comparator import IterationResult, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    exact = step.exact.to(step.observed.dtype)
    tolerance = CAREFUL.get(step.observed.dtype, 0.0)
    wide = [x.float() if x.is_floating_point() else x for x in (step.observed, exact)]
    sides = [IterationResult({step.name: x.numpy()}) for x in wide]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        compared = SimpleCompareFunc(rtol=tolerance, atol=tolerance, infinities_compare_equal=True)(*sides)
    return not compared[step.name]


def msprobe(step: Step) -> bool:
    """msProbe's measures of the step as the output of a call whose inputs agree, and its verdict: error or warning."""
    from msprobe.core.common.const import CompareConst, Const
    from msprobe.core.compare.indicator_analysis.calculator import calculate_result
    from msprobe.core.compare.npy_compare import CompareResult, ValidateTensor, compare_ops_apply

    exact = step.exact.to(step.observed.dtype)
    observed, golden = (x.float().numpy() if x.is_floating_point() else x.numpy() for x in (step.observed, exact))
    header = CompareConst.COMPARE_RESULT_HEADER
    checked = ValidateTensor().check_tensor(CompareResult(observed.copy(), golden.copy()))
    measures, _ = compare_ops_apply(checked.n_value, checked.b_value, checked.error_flag, checked.err_msg)
    name, dtype, shape = f"Functional.{step.name}.0.forward.output.0", str(exact.dtype), list(exact.shape)
    row = dict.fromkeys(header, "")
    row |= dict(zip(CompareConst.BUILTIN_COMPARE_COLUMNS, measures, strict=True))
    row |= dict(zip(CompareConst.BASIC_INFO, (name, name, dtype, dtype, shape, shape), strict=False))
    for side, x in (("NPU", observed), ("Bench", golden)):
        row |= {f"{side} max": float(x.max()), f"{side} min": float(x.min())}
    return calculate_result([list(row.values())], Const.ALL) != CompareConst.PASS


JUDGES: dict[str, Callable[[Step], bool | None]] = {
    "assert_close": assert_close,
    "assert_close_by_type": by_type,
    "sqnr": sqnr,
    "sglang": sglang,
    "polygraphy": polygraphy,
    "msprobe": msprobe,
    "dynamo_same": dynamo_same,
    "twice_eager": twice_eager,
}
PACKAGES = {"sglang": "sglang --no-deps", "polygraphy": "polygraphy", "msprobe": "mindstudio-probe"}
"""What pip installs for those that are modules of their own."""
