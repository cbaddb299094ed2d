"""`labkit bench mhc/reductions`: dalpha's reduction alone, 2^10 to 2^26 products, in CUDA graphs beside torch.dot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.mhc.reductions import sums
from labkit.bench import Case, Provider
from labkit.compare import Comparison, compare
from labkit.device import Device
from labkit.tolerance import sum_of_products

Tensor = torch.Tensor
SHAPES = ((1056, 2048), (528, 4096), (2112, 1024), (264, 4096))
"""Programs and elements of a tile that are tried; the best of each way is what the CSV shows beside the others."""


def cases(device: Device) -> Iterator[Case]:
    """A case a count."""
    device.needs_cuda("labkit bench mhc/reductions", "the interpreter's times are none")
    for power in range(10, 27, 2):
        count = 1 << power
        generator = torch.Generator(device.kind).manual_seed(power)
        a, b = (torch.randn(count, generator=generator, device=device.kind) for _ in range(2))
        exact = a.double() * b.double()
        bound = sum_of_products(exact.abs().sum()[None], count)
        yield _case(count, a, b, exact.sum()[None], bound)


def _case(count: int, a: Tensor, b: Tensor, exact: Tensor, bound: object) -> Case:
    out = torch.empty(1, device=a.device)
    providers = []

    def provider(name: str, run: Callable[[], None]) -> Provider:
        def check() -> Comparison:
            return compare(out, exact, bound)

        return Provider(name, run, lambda: None if name.startswith("atomic") else _poison(out), check)

    for way in sums.WAYS:
        shapes = SHAPES if way in ("atomic_add", "two-stage") else SHAPES[:1]
        for programs, block in shapes:
            label = way if len(shapes) == 1 else f"{way}, {programs} programs of {block}"
            providers.append(provider(label, sums.prepared(way, a, b, out, programs, block)))
    providers.append(provider("torch.dot", lambda: out.copy_(torch.dot(a, b)[None]) and None))
    return Case(
        kernel="reductions", mode="forward", x_name="products", x_value=str(count), providers=providers,
        bytes=8 * count, operations=2 * count,
    )  # fmt: skip


def _poison(out: Tensor) -> None:
    out.fill_(float("nan"))
