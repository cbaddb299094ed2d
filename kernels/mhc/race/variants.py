"""Variants of the projection: what to compile for each, and what repeated runs of each give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from kernels.mhc import golden, launch
from kernels.mhc.problem import Constants
from kernels.mhc.race import race_kernels
from kernels.mhc.race.emitted import Order
from labkit import Lab
from labkit.bench.timing import cuda_times
from whywrong.comparing.bounds import Bound, sum_of_products

Tensor = torch.Tensor
STREAMS = 4
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
AS_IT_WAS = "64 tokens, 4 stages"
ANOTHER_STORE = "results stored by token, 4 stages"


@dataclass(frozen=True)
class Variant:
    """Tile of x in tokens and columns, stages of the pipeline, and what :mod:`race_kernels` says of the rest.

    `streams` are those of a token, n, from which phi has n^2 + 2 n columns.
    """

    tokens: int = 64
    columns: int = 128
    stages: int = 4
    readers: int = 2
    guarded: bool = False
    dtype: torch.dtype = torch.bfloat16
    products: str = "exact"
    by_split: bool = True
    streams: int = 4

    @property
    def padded(self) -> int:
        """Columns of phi, padded to a power of two: 32 for 4 streams, 128 for 8."""
        return 1 << (self.streams**2 + 2 * self.streams - 1).bit_length()

    @property
    def width(self) -> int:
        """Columns that the kernel multiplies by: twice as many where phi comes as two bfloat16."""
        return (2 if self.products == "exact" else 1) * self.padded

    def constants(self, k: int) -> dict[str, Any]:
        """What the kernel is compiled for, with K = `k`."""
        return {
            "K": k,
            "WIDTH": self.width,
            "BLOCK_T": self.tokens,
            "BLOCK_K": self.columns,
            "READERS": self.readers,
            "GUARDED": self.guarded,
            "PRODUCTS": self.products,
            "BY_SPLIT": self.by_split,
        }

    def order(self, k: int) -> Order:
        """What to compile."""
        pointers = {"x_ptr": TYPES[self.dtype], "phi_ptr": "*bf16" if self.products == "exact" else "*fp32"}
        signature = pointers | {"out_ptr": "*fp32", "squares_ptr": "*fp32", "T": "i32", "runtime_one": "fp32"}
        return Order("kernels.mhc.race.race_kernels:variant_kernel", signature, self.constants(k), 4, self.stages)


FLOAT32_COLUMNS = {"dtype": torch.float32, "columns": 64}
VARIANTS = {
    AS_IT_WAS: Variant(),
    "2 stages": Variant(stages=2),
    "1 stage": Variant(stages=1),
    "32 tokens, 4 stages": Variant(tokens=32),
    "one reader, 4 stages": Variant(readers=1),
    "guarded, 4 stages": Variant(guarded=True),
    ANOTHER_STORE: Variant(by_split=False),
    "8 streams, 2 stages": Variant(stages=2, streams=8),
    "8 streams, one reader, 2 stages": Variant(stages=2, streams=8, readers=1),
    "8 streams, guarded, 2 stages": Variant(stages=2, streams=8, guarded=True),
    "float32, one TF32 product": Variant(**FLOAT32_COLUMNS, products="tf32"),
    "float32, one TF32 product, guarded": Variant(**FLOAT32_COLUMNS, products="tf32", guarded=True),
    "float32, three TF32 products": Variant(**FLOAT32_COLUMNS, products="tf32x3"),
    "float16, three TF32 products": Variant(dtype=torch.float16, columns=64, products="tf32x3"),
}


@dataclass(frozen=True)
class Repeats:
    """What `times` runs on the same inputs gave: `differ` of them are not bit-identical to the first.

    `error` is the largest |result - float64| of any run, `bound` the largest that a float32 sum may have, and
    `rms` the smallest and the largest relative RMS error of what a layer would then get. `uncommon` runs have other
    bits than the most common result; None in records from before it was counted.
    """

    times: int
    differ: int
    error: float
    bound: float
    rms: tuple[float, float]
    uncommon: int | None = None

    @property
    def counted(self) -> str:
        """How many repeats differ; the first run is what the others are compared with, so that it is no repeat."""
        return f"{self.differ} of {self.times - 1}"


def random_inputs(
    tokens: int, k: int, streams: int, dtype: torch.dtype, seed: int, device: str
) -> tuple[Tensor, Tensor]:
    """x [T, K] of `dtype`, standard normal, and phi [K, n^2 + 2 n] in float32, of variance 1 / K."""
    rng = torch.Generator(device).manual_seed(seed)
    phi = torch.randn(k, streams * streams + 2 * streams, generator=rng, device=device) * k**-0.5
    return torch.randn(tokens, k, generator=rng, device=device, dtype=dtype), phi


def prepare_launch(variant: Variant, x: Tensor, phi: Tensor, compiled: Any = None) -> tuple[Callable[[], None], Tensor]:
    """A call without arguments, and the out [T, width], float32, that it fills.

    `compiled` is launched in place of what Triton compiles for the variant: a kernel of the same arguments, as
    :func:`~kernels.mhc.race.spare_buffer.to_kernel` makes it.
    """
    t, k = x.shape
    exact = variant.products == "exact"
    weights = launch.pack(phi) if exact else torch.nn.functional.pad(phi, (0, variant.padded - phi.shape[1]))
    out = torch.empty(t, variant.width, device=x.device)
    squares = torch.zeros(t, device=x.device)
    programs = -(-t // variant.tokens)

    def run() -> None:
        if compiled is not None:
            compiled[programs, 1, 1](x, weights, out, squares, t, 1.0)
            return
        race_kernels.variant_kernel[programs, 1](
            x, weights, out, squares, t, 1.0, **variant.constants(k), num_warps=4, num_stages=variant.stages
        )

    return run, out


def repeat_variant(
    variant: Variant, tokens: int, k: int, seed: int, times: int, device: str, compiled: Any = None
) -> Repeats:
    """Run a variant `times` times on the same inputs; compare each result with float64 and, by bits, with the first.

    `compiled` is run in its place, as in :func:`prepare_launch`.
    """
    return repeat_in_turn(variant, tokens, k, seed, times, device, [compiled])[0]


class Measured(NamedTuple):
    """Repeats of every variant, and what made them; no repeats where there is neither a GPU nor a record of one."""

    repeats: dict[str, Repeats]
    triton: str
    where: str
    sizes: Mapping[str, Any]
    """The parameters of the run."""


def measured(lab: Lab, times: int) -> Measured:
    """On a GPU each variant is run now; elsewhere its runs are those on record."""
    given = lab.parameters
    if lab.device.is_cuda:
        sizes = (given["tokens"], STREAMS * given["d"], lab.seed, times, "cuda")
        runs = {name: repeat_variant(variant, *sizes) for name, variant in VARIANTS.items()}
        return Measured(runs, triton.__version__, lab.caption, given)
    if lab.recorded:
        metrics = lab.recorded.result["metrics"]
        recorded = lab.recorded.result["parameters"]
        return Measured(from_json(metrics["runs"]), metrics["triton"], lab.recorded.where, recorded)
    return Measured({}, triton.__version__, lab.caption, given)


def repeat_in_turn(
    variant: Variant, tokens: int, k: int, seed: int, times: int, device: str, kernels: Sequence[Any]
) -> list[Repeats]:
    """As :func:`repeat_variant`, of each of several `kernels`, one run of each after the other, `times` times.

    So that they differ in nothing that changes with time. Each run gets memory of its own behind a block whose size
    changes, and the kernels take turns in beginning.
    """
    x, phi = random_inputs(tokens, k, variant.streams, variant.dtype, seed, device)
    exact, bound = _exact(x, phi, variant.products)
    right = _layer_input(x, exact, variant.streams)
    results: list[list[tuple[bytes, float, float]]] = [[] for _ in kernels]
    for turn in range(times):
        for place in range(len(kernels)):
            at = (place + turn) % len(kernels)
            before = torch.empty((turn % 7) * 2**18 + 1, device=x.device)  # up to 6 MiB
            run, out = prepare_launch(variant, x, phi, kernels[at])
            results[at].append(_result(run, out, variant, x, phi.shape[1], exact, right))
            del before, run, out
    return [_repeats(found, float(bound.absolute.max())) for found in results]


def _result(
    run: Callable[[], None], out: Tensor, variant: Variant, x: Tensor, m: int, exact: Tensor, right: Tensor
) -> tuple[bytes, float, float]:
    """Of one run: a hash of its bits, its largest error, and the relative RMS error of the layer's input."""
    out.fill_(float("nan"))
    run()
    low = variant.padded
    result = out[:, :m] + out[:, low : low + m] if variant.products == "exact" else out[:, :m].clone()
    layer = _layer_input(x, result.double(), variant.streams)
    rms = float((layer.to(x.dtype).double() - right).norm() / right.norm())
    bits = sha256(result.cpu().numpy().tobytes()).digest()
    return bits, float((result - exact).abs().max()), rms


def _repeats(found: Sequence[tuple[bytes, float, float]], bound: float) -> Repeats:
    """What several runs gave, each as :func:`_result` has it."""
    bits, errors, rms = zip(*found, strict=True)
    differ = sum(other != bits[0] for other in bits)
    common = Counter(bits).most_common(1)[0][1]
    return Repeats(len(bits), differ, max(errors), bound, (min(rms), max(rms)), len(bits) - common)


def _exact(x: Tensor, phi: Tensor, products: str) -> tuple[Tensor, Bound]:
    """x phi in float64, and what float32 sums of products that were cut as `products` says may be off."""
    a, b = x.double(), phi.double()
    magnitude = a.abs() @ b.abs()
    if products == "tf32":
        return a @ b, sum_of_products(magnitude, x.shape[1], "tf32")
    cut = 2.0**-16 if products == "exact" else 2.0**-18  # phi as two bfloat16; both factors as two TF32 numbers
    return a @ b, sum_of_products(magnitude, x.shape[1]) + Bound(cut * magnitude, "what cutting loses")


def _layer_input(x: Tensor, projected: Tensor, n: int) -> Tensor:
    """The sum over streams of pre x, as the operator hands it to its layer, for the first 1024 tokens; float64."""
    streams = x[:1024].double().view(min(len(x), 1024), n, -1)
    r = torch.rsqrt(streams.square().mean((1, 2)) + Constants().norm_eps)
    pre = torch.sigmoid(projected[:1024, :n] * r[:, None]) + Constants().hc_eps
    return golden.aggregate(streams, pre)


def operator_orders(tokens: int, d: int, dtype: torch.dtype) -> dict[str, Order]:
    """Every kernel of the operator, forward and backward, as it is launched at these sizes; nothing runs."""
    orders: dict[str, Order] = {}

    def note(_compiled: Any, _kind: Any, kernel: Any, _grid: Any, *given: Any, **constants: Any) -> None:
        options = {name: constants.pop(name, usual) for name, usual in (("num_warps", 4), ("num_stages", 3))}
        signature = dict(zip(kernel.arg_names, map(_type, given), strict=False))
        name = f"{kernel.__name__}, {str(dtype).removeprefix('torch.')}"
        orders[name] = Order(f"{kernel.fn.__module__}:{kernel.__name__}", signature, constants, *options.values())

    n, m = STREAMS, STREAMS * STREAMS + 2 * STREAMS
    x = torch.empty(tokens, n, d, dtype=dtype)
    phi, b, alpha = torch.empty(n * d, m), torch.empty(m), torch.empty(3)
    with mock.patch.object(launch, "launch", note):
        s = launch.forward(x, phi, b, alpha, Constants())
        launch.expand(x, s["x_in"], s["post"], s["p"])
        _, dpost, dp = launch.expand_backward(x, s["x_in"], s["post"], x)
        launch.backward(x, phi, b, alpha, s, s["x_in"], dpost, dp, x, Constants())
    return orders


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def operator_repeats(dtype: torch.dtype, tokens: int, d: int, seed: int, times: int, device: str) -> Repeats:
    """The operator's own projection: repeats of r x phi, as :func:`repeat_variant` has it for the variants."""
    x, phi = random_inputs(tokens, STREAMS * d, STREAMS, dtype, seed, device)
    exact, bound = _exact(x, phi, "exact" if dtype == torch.bfloat16 else "tf32x3")
    r = torch.rsqrt(x.double().square().mean(1) + Constants().norm_eps)[:, None]
    exact, allowed = exact * r, bound.absolute * r + 2.0**-22 * (exact * r).abs()  # r, and one rounding of the product
    b, alpha = torch.zeros(phi.shape[1], device=device), torch.ones(3, device=device)
    first, differ, error = None, 0, 0.0
    for _ in range(times):
        results = launch.forward(x.view(tokens, STREAMS, d), phi, b, alpha, Constants())
        first = results if first is None else first
        differ += not all(torch.equal(results[name], first[name]) for name in first)
        error = max(error, float(((results["mix"] - exact).abs() / allowed).max()))
    return Repeats(times, differ, error, 1.0, (0.0, 0.0))


def microseconds(variant: Variant, tokens: int, k: int, seed: int) -> float:
    """The time of one run on a GPU with cold caches, the median of many."""
    run, _ = prepare_launch(variant, *random_inputs(tokens, k, variant.streams, variant.dtype, seed, "cuda"))
    return cuda_times(run)[0]


def as_json(repeats: Mapping[str, Repeats]) -> dict[str, Any]:
    """For result.json, from which :func:`from_json` makes it again."""
    return {name: asdict(runs) for name, runs in repeats.items()}


def from_json(recorded: Mapping[str, Any]) -> dict[str, Repeats]:
    """The runs that a record holds."""
    return {name: Repeats(**runs) for name, runs in recorded.items()}
