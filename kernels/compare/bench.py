"""whywrong.compare beside the checks that are in use, on equal work: is this pair equal within 1e-5, and where not?

Two gibibytes of float32 are read once at the least; `read both` does that and no more, so it is the lower bound that
was measured in the same run. A provider is right if it passes a clean pair and reports one wrong element in it. Times
are of the whole call, the read of the result included; `kernels only` leaves that out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from labkit.bench import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.comparison import Comparison, compare

ALLOWED = 1e-5
Pair = tuple[torch.Tensor, torch.Tensor]


def cases(device: Device) -> Iterator[Case]:
    """Pairs of 1 GiB a side on a GPU, of 256 MiB on a CPU."""
    count = 1 << (28 if device.is_cuda else 26)
    generator = torch.Generator(device.kind).manual_seed(0)
    golden = torch.randn(count, generator=generator, device=device.kind)
    observed = golden * (1.0 + 1e-7 * torch.rand(count, generator=generator, device=device.kind))
    yield _case("float32 against float32", (observed, golden), device)
    if not device.is_cuda:
        narrow = golden[: count // 4].bfloat16()
        yield _case("bfloat16 against float64", (narrow, narrow.double()), device)
        return
    side = 1 << 14
    yield _case("every second column", (observed.view(side, side)[:, ::2], golden.view(side, side)[:, ::2]), device)
    yield _case("both transposed", (observed.view(side, side).T, golden.view(side, side).T), device)
    del observed
    narrow = golden.bfloat16()
    yield _case("bfloat16 against float64", (narrow, narrow.double()), device)


def _case(name: str, pair: Pair, device: Device) -> Case:
    observed, golden = pair
    baselines: dict[str, Callable[[], Any]] = {
        "ours: whywrong.compare": lambda: compare(observed, golden, bound=ALLOWED).ok
    }
    if device.is_cuda:
        baselines["ours, kernels only"] = partial(kernels_alone, observed, golden)
        baselines["torch.compile of the same statistics"] = partial(_compiled(), observed, golden)
    baselines["torch.testing.assert_close"] = partial(assert_close, observed, golden)
    if not device.is_cuda and observed.dtype == golden.dtype:
        baselines["numpy.testing.assert_allclose"] = partial(_assert_allclose, observed, golden)
    baselines["read both"] = partial(read, observed, golden)
    size = observed.numel() * (observed.element_size() + golden.element_size())
    return Case(
        kernel="compare",
        mode="forward",
        x_name="pair",
        x_value=f"{name}, {observed.numel() >> 20} Mi elements",
        providers=[_provider(baseline, run, observed) for baseline, run in baselines.items()],
        bytes=size,
        operations=0,
        graph=False,
        memory=True,
    )


def _provider(name: str, run: Callable[[], Any], observed: torch.Tensor) -> Provider:
    def check() -> Comparison:
        if name == "read both":
            return compare(np.zeros(1), np.zeros(1), bound=0.0)
        place = (7,) * observed.ndim
        clean, before = bool(run()), observed[place].clone()
        observed[place] += 1.0
        spoilt = bool(run())
        observed[place] = before
        return compare(np.array([clean, spoilt], float), np.array([1.0, 0.0]), bound=0.0)

    def timed() -> None:
        run()

    return Provider(name, timed, lambda: None, check)


def kernels_alone(observed: torch.Tensor, golden: torch.Tensor) -> Any:
    """Launch what whywrong.compare launches on a GPU, and do not wait for it."""
    from whywrong.comparing.gpu import one_pass

    return _LazyVerdict(one_pass(observed, golden, ALLOWED))


class _LazyVerdict:
    """The truth value is read only when it is asked for."""

    def __init__(self, statistics: torch.Tensor) -> None:
        self._statistics = statistics

    def __bool__(self) -> bool:
        return float(self._statistics[0]) == 0.0


def _statistics(observed: torch.Tensor, golden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The chain that torch.compile is given: what Comparison holds, as a torch user would write it."""
    o, g = observed.float(), golden.float()
    d = o - g
    a = d.abs()
    finite = torch.isfinite(d)
    a = torch.where(finite, a, 0.0)
    return (
        (~(a <= ALLOWED)).sum(),
        a.max(),
        a.sum(),
        (a * a).sum(),
        (g * g).sum(),
        (o * g).sum(),
        torch.where(g != 0, a / g.abs(), 0.0).max(),
        o.isnan().sum(),
        g.isnan().sum(),
        o.isinf().sum(),
        g.isinf().sum(),
        (o == 0).sum(),
        (g == 0).sum(),
    )


def _compiled() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    chain = torch.compile(_statistics, dynamic=False)  # else the second shape makes all sizes symbols
    return lambda observed, golden: int(chain(observed, golden)[0]) == 0


def assert_close(observed: torch.Tensor, golden: torch.Tensor) -> bool:
    """What torch.testing.assert_close says of the pair."""
    try:
        torch.testing.assert_close(observed, golden, rtol=0.0, atol=ALLOWED, check_dtype=False)
    except AssertionError:
        return False
    return True


def _assert_allclose(observed: torch.Tensor, golden: torch.Tensor) -> bool:
    try:
        np.testing.assert_allclose(observed.numpy(), golden.numpy(), rtol=0.0, atol=ALLOWED)
    except AssertionError:
        return False
    return True


def read(observed: torch.Tensor, golden: torch.Tensor) -> None:
    """Read both tensors once, and do next to nothing with them."""
    torch.amax(observed)
    torch.amax(golden)
