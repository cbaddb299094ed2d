"""`labkit bench mhc/reductions`: dalpha's reduction alone, 2^12 to 2^26 products, in CUDA graphs beside torch.dot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.mhc.reductions import sums
from labkit.bench import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.bounds import sum_of_products
from whywrong.comparing.comparison import Comparison, compare
from whywrong.errors import UsageError

Tensor = torch.Tensor
SHAPES = ((8, 2048, 8), (1, 1024, 16), (2, 1024, 16), (4, 1024, 16), (2, 2048, 32))
"""Programs a multiprocessor, elements of a tile and warps that are tried; the best of each way counts."""
TUNED = ("atomic_add", "two-stage", "flagged")


def cases(device: Device) -> Iterator[Case]:
    """A case a count."""
    device.needs_cuda("labkit bench mhc/reductions", "the interpreter's times are none")
    for power in (12, 16, 20, 22, 24, 26):
        count = 1 << power
        generator = torch.Generator(device.kind).manual_seed(power)
        a, b = (torch.randn(count, generator=generator, device=device.kind) for _ in range(2))
        exact = a.double() * b.double()
        bound = sum_of_products(exact.abs().sum()[None], count)
        yield _case(count, a, b, exact.sum()[None], bound)


def _case(count: int, a: Tensor, b: Tensor, exact: Tensor, bound: object) -> Case:
    out = torch.empty(1, device=a.device)
    providers = []

    kept: dict[str, Tensor] = {}

    def provider(name: str, run: Callable[[], None]) -> Provider:
        def check() -> Comparison:
            return compare(kept.get(name, out), exact, bound=bound)

        return Provider(name, run, lambda: None if name.startswith("atomic") else _poison(out), check)

    for way in sums.WAYS:
        shapes = SHAPES if way in TUNED else SHAPES[:1]
        for programs, block, warps in shapes:
            shape = f"{programs} programs of {warps} warps a multiprocessor, tiles of {block}"
            label = way if len(shapes) == 1 else f"{way}, {shape}"
            try:
                providers.append(provider(label, sums.prepared(way, a, b, out, programs, block, warps)))
            except UsageError as refused:
                print(f"  left out: {label}: {refused}")
    providers.append(provider("torch.dot", lambda: kept.update({"torch.dot": torch.dot(a, b)[None]})))
    return Case(
        kernel="reductions",
        mode="forward",
        x_name="products",
        x_value=str(count),
        providers=providers,
        bytes=8 * count,
        operations=2 * count,
    )


def _poison(out: Tensor) -> None:
    out.fill_(float("nan"))
