"""What is left of a wrong step's error: how much, in bits, and what it looks like where no cause is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from whywrong.explaining.regions import Region, along, bits_of_subset, listed, slices, tightest
from whywrong.tables import digits

Tensor = torch.Tensor

FARTHEST = 1e9
"""How far off, in tolerances, what cannot be compared counts as."""
QUIETEST = 1.0 / 16.0
"""Standard deviation, in tolerances, below which noise is not believed to be known."""
SEEMS = 0.02
"""Share of an error that a description may leave."""


class Residual:
    """An observed step against the reference's, element by element.

    `allowed` is what each element may be off, None for whole numbers, of which each is right or wrong; `noise` the
    standard deviation of a correct one's error. `inputs` has for dimensions the whole numbers that a program was given
    for their slices.
    """

    def __init__(
        self,
        observed: Tensor,
        reference: Tensor,
        allowed: Tensor | None,
        noise: Tensor | float,
        inputs: Mapping[int, Sequence[tuple[str, Tensor]]],
    ) -> None:
        self.observed, self.reference, self.allowed, self.inputs = observed, reference, allowed, inputs
        relative = torch.as_tensor(noise, dtype=torch.float64) / allowed if allowed is not None else torch.ones(())
        self._noise = relative.nan_to_num(QUIETEST, QUIETEST, QUIETEST).clamp(min=QUIETEST)
        self._values = len(observed.unique()) if allowed is None else 0
        self.off = self.distance(reference)
        self.wrong = self.off > 1.0
        self.bits = self.cost(self.off)
        self.half = (self.bits + self.cost(self.off.masked_fill(self.wrong, 0.0))) / 2.0
        """Bits of which a half of what wrong elements take is left."""

    def distance(self, value: Tensor) -> Tensor:
        """How far a value of this shape is from what was observed, in tolerances; NaN is at NaN's place."""
        o = self.observed
        if self.allowed is None or not value.is_floating_point():
            return (value != o).double() * FARTHEST
        z = ((value - o).abs() / self.allowed).clamp(max=FARTHEST)
        return torch.where((value == o) | (value.isnan() & o.isnan()), 0.0, z.nan_to_num(FARTHEST, FARTHEST, FARTHEST))

    def cost(self, off: Tensor) -> float:
        """What it takes to say, in bits, by how much elements are `off`: nothing of one that is off by noise."""
        if self.allowed is None:
            k = int((off > 1.0).sum())
            return k * math.log2(max(2, self._values)) + bits_of_subset(off.numel(), k)
        return float(torch.log2(1.0 + (off / self._noise).square()).sum()) / 2.0

    def left(self, value: Tensor, explained: float) -> tuple[Tensor, Region] | None:
        """How far off all is if the observed is `value` in a region and the reference elsewhere, and that region.

        None where an element that is wrong is off by more than `explained` tolerances.
        """
        off = self.distance(value)
        fits = off <= explained
        if not bool(self.wrong.any()) or bool((self.wrong & ~fits).any()):
            return None
        region = tightest(self.wrong, ~fits & ~self.wrong, self.inputs)
        return torch.where(region.mask, off, self.off), region

    @property
    def everywhere(self) -> bool:
        """Whether most elements are off by more than a correct one's error, of which 0.67 of its deviation is usual."""
        return float((self.off / self._noise).median()) > 1.0

    def description(self) -> list[str]:
        """What the error looks like, in sentences."""
        if not bool(self.wrong.any()):
            return ["each element is within its tolerance, but together they are not noise"]
        return [*self._places(), *self._numbers()]

    def _places(self) -> Iterator[str]:
        wrong, n = self.wrong, self.wrong.numel()
        count = int(wrong.sum())
        if count == n:
            yield f"all {n} elements are wrong"
            return
        region = tightest(wrong, ~wrong, self.inputs)
        if not region.scattered:
            yield f"wrong are all elements {region.words}"
            return
        some = [(d, along(wrong, d)) for d in range(wrong.ndim) if wrong.ndim > 1]
        parts = [f"in {listed(any_)} of dimension {d} of {len(any_)}" for d, any_ in some if not bool(any_.all())]
        yield f"{count} of {n} elements are wrong" + "".join(f", {part}" for part in parts)
        for d, any_ in some:
            same = [one for one in slices(len(any_), self.inputs.get(d, ())) if torch.equal(one.mask, any_)]
            if same and not bool(any_.all()):
                yield f"the wrong slices of dimension {d} are those {min(same, key=lambda one: one.bits).words}"

    def _numbers(self) -> Iterator[str]:
        """What wrong elements hold, and their relation to the right ones."""
        o, e, wrong = self.observed.double(), self.reference.double(), self.wrong
        some, right = o[wrong], e[wrong]
        if bool(some.isnan().all()):
            yield "wrong elements are NaN"
            return
        if bool(some.isinf().all()):
            yield "wrong elements are infinite"
            return
        if len(some) > 1 and bool((some == some[0]).all()):
            yield f"wrong elements are all {float(some[0]):.6g}"
            return
        if nan := int(some.isnan().sum()):
            yield f"{nan} of the wrong elements are NaN"
        if self.allowed is None or not bool(some.isfinite().all() and right.isfinite().all()):
            return
        if len(some) <= 3:
            pairs = (
                f"{digits(a, 6)} where {digits(b, 6)} is right"
                for a, b in zip(some.tolist(), right.tolist(), strict=True)
            )
            yield f"wrong elements are {'; '.join(pairs)}"
            return
        error = some - right
        factor = float((some * right).sum() / right.square().sum().clamp(min=1e-300))
        if float((some - factor * right).norm()) < SEEMS * float(error.norm()):
            yield f"wrong elements are {factor:.6g} times what is right"
        shift = float(error.median())
        if float((error - shift).norm()) < SEEMS * float(error.norm()):
            yield f"wrong elements are {digits(abs(shift), 6)} too {'large' if shift > 0 else 'small'}"
        yield from self._by_slices((o - e).masked_fill(~wrong, 0.0), e)
        yield from self._neighbours(o, e)

    def _by_slices(self, error: Tensor, e: Tensor) -> Iterator[str]:
        """A factor or an offset for each slice of a dimension; the rank of a matrix."""
        for d, n in enumerate(error.shape):
            rest = [k for k in range(error.ndim) if k != d]
            for words, x in (("a factor", e), ("an offset", torch.ones_like(e))) if 1 < n <= error.numel() // 3 else ():
                c = (error * x).sum(rest, True) / x.square().sum(rest, True).clamp(min=1e-300)
                if float((error - c * x).norm()) < SEEMS * float(error.norm()):
                    first = ", ".join(digits(v, 4) for v in (c + (x is e)).flatten()[:4].tolist())
                    yield f"the error is {words} for each slice of dimension {d}: {first}{', ...' * (n > 4)}"
        if error.ndim > 1 and min(error.shape[-2:]) > 4:
            matrix = error.flatten(0, -3)[0] if error.ndim > 2 else error
            sizes = torch.linalg.svdvals(matrix)
            rank = int((sizes > 1e-3 * sizes[0].clamp(min=1e-300)).sum())
            if 0 < rank <= min(matrix.shape) // 2:
                which = "the first" if error.ndim > 2 else "the"
                yield f"the error of {which} matrix has rank {rank} of {min(matrix.shape)}"

    def _neighbours(self, o: Tensor, e: Tensor) -> Iterator[str]:
        """Right values of other places in memory."""
        at = self.wrong.flatten().nonzero().flatten()
        allowed = torch.as_tensor(self.allowed).expand(o.shape).flatten()
        steps = {1, *_strides(o.shape)}
        for by in sorted({s * k for k in steps for s in (1, -1)}, key=abs):
            there = (at + by >= 0) & (at + by < o.numel())
            here = at[there]
            near = (o.flatten()[here] - e.flatten()[here + by]).abs() <= 2.0 * allowed[here]
            if int(there.sum()) > 3 and float(near.double().mean()) > 0.9:
                yield f"wrong elements hold what belongs {abs(by)} places {'later' if by > 0 else 'earlier'} in memory"


def _strides(shape: Sequence[int]) -> Iterator[int]:
    """Elements between neighbours along each dimension of contiguous memory."""
    apart = 1
    for n in reversed(shape):
        yield apart
        apart *= n
