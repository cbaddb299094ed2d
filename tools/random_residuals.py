"""Errors that no mutation made: how often is a cause named all the same? None should be.

python -m tools.random_residuals [--count 20] [--seed 0] [--types float32 bfloat16 float16]

Each error is added to a correct result that is stored in a type: smooth, in one element or five, in a row, in two, of
rank 1, noise, the rounding of another type, or noise as large as the root of the value.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from scipy.stats import binomtest

import whywrong

Tensor = torch.Tensor
FAMILIES = (
    "smooth",
    "one element",
    "five elements",
    "a row",
    "two rows",
    "rank 1",
    "noise",
    "rounding",
    "by the value",
)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weighted by a softmax."""
    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, -1) @ v


def norm(x: Tensor, w: Tensor) -> Tensor:
    """A layer norm without an offset."""
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w


def loss(x: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of each row."""
    return torch.logsumexp(x, -1) - x.gather(1, y[:, None])[:, 0]


def update(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """A step of Adam without its corrections."""
    return p - 1e-2 * m / (v.square().sqrt() + 1e-8)


def sampled(generator: torch.Generator, which: int) -> tuple[object, dict[str, Tensor]]:
    """A program and its inputs."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    programs = (
        (attention, lambda: {"q": normal(24, 16), "k": normal(40, 16), "v": normal(40, 20)}),
        (norm, lambda: {"x": normal(24, 32), "w": normal(32).abs() + 0.5}),
        (loss, lambda: {"x": normal(40, 12), "y": torch.randint(0, 12, (40,), generator=generator)}),
        (update, lambda: {"p": normal(30, 20), "m": normal(30, 20), "v": normal(30, 20)}),
    )
    function, inputs = programs[which % len(programs)]
    return function, inputs()


def residual(family: str, e: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """An error of the size of a tenth of a result's spread."""
    noise, size = torch.randn(e.shape, generator=generator, dtype=e.dtype), 0.1 * float(e.std())
    r, some = torch.zeros_like(e), torch.randperm(e.numel(), generator=generator)
    place = torch.arange(e.numel(), dtype=e.dtype).view(e.shape)
    if family == "smooth":
        return size * torch.sin(place / 7.3 + float(noise.flatten()[0]))
    if "element" in family:
        r.view(-1)[some[: 5 if "five" in family else 1]] = 10 * size * noise.flatten()[: 5 if "five" in family else 1]
    elif "row" in family:
        rows = some[: 2 if "two" in family else 1] % len(e)
        r[rows] = 10 * size * noise[rows]
    elif family == "rank 1":
        r = size * noise[:, :1] * noise[:1] if e.ndim > 1 else size * noise
    elif family == "rounding":
        half = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
        r = (e * (1 + 2.0**-9 * noise)).to(half).to(e.dtype) - e
    elif family == "by the value":
        r = size * torch.tanh(noise.flip(0)) * e.abs().sqrt()
    else:
        r = size * noise
    return r


def cases(count: int, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, str, whywrong.Explanation]]:
    """What is said of so many errors of all families in turn."""
    for n in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + n)
        function, inputs = sampled(generator, n // len(FAMILIES) + n)
        golden = whywrong.golden(lambda function=function, **given: {"result": function(**given)}, **inputs)
        family, e = FAMILIES[n % len(FAMILIES)], golden["result"]
        observed = (e + residual(family, e, dtype, generator)).to(dtype)
        rules = whywrong.Precision(str(dtype).removeprefix("torch."))
        found = whywrong.explain(inputs | {"result": observed}, golden, precision=rules, progress=lambda text: None)
        yield family, function.__name__, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16", "float16"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.types:
        named = 0
        for family, program, found in cases(given.count, given.seed, getattr(torch, name)):
            if found.causes and family != "rounding":
                named += 1
                print(f"{name}, {family}, {program}: {found.verdict}: {found.causes[0].says}")
        total = given.count - sum(n % len(FAMILIES) == FAMILIES.index("rounding") for n in range(given.count))
        high = binomtest(named, total).proportion_ci(method="exact").high if total else math.nan
        print(f"{name}: {named} of {total} errors of no cause have one (95%: at most {100 * high:.1f}%)", flush=True)
