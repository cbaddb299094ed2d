"""What is drawn: sizes, memory layouts, dtypes and values, and what a user requires of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong.checking.guarded import memory_of
from whywrong.comparing.bits import digest
from whywrong.errors import UsageError

Inputs = dict[Any, Any]
Names = tuple[Any, ...]
Size = tuple[str, int]
"""Of an axis: the name of a size, and how many times it is; of a fixed length no name, and the length."""

SAMPLED_LENGTHS = sorted(
    {1, 11, 13, 37, 61, 97, 251, 1009, 4099, 16411} | {2**k + d for k in range(1, 17) for d in (-1, 0, 1)}
)
"""Lengths of an axis: one, primes, and powers of two with their neighbours."""

LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contiguous": lambda x, gap: x,
    "offset": lambda x, gap: torch.cat([gap, x.flatten()])[1:].view(x.shape),
    "rows apart": lambda x, gap: torch.cat([x, gap.expand(*x.shape[:-1], 3)], -1)[..., :-3],
    "gaps": lambda x, gap: torch.stack([x, gap.expand_as(x)], -1)[..., 0],
    "first axis fastest": lambda x, gap: x.view(x.shape[::-1]).permute(*range(x.dim())[::-1]),
    "repeated": lambda x, gap: x[:1].expand_as(x),
}
"""How a tensor lies in memory: from its beginning; one element behind it; with room between rows; with room between
elements; in the order of Fortran; with one slice of the first axis that stands for all."""

KINDS_OF_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": torch.ones_like,
    "counting": lambda x: 1 + torch.arange(len(x)) % 7,
    "normal": lambda x: x,
    "large mean": lambda x: x + 1000,
    "wide": lambda x: x * torch.exp2(torch.arange(len(x)) % 17 - 8.0),
    "zeros": torch.zeros_like,
    "denormal": lambda x: x * (torch.finfo(x.dtype).tiny / 8),
    "NaN": lambda x: x.index_fill(0, x.argmax(), math.nan),
    "infinite": lambda x: x.index_fill(0, x.argmax(), math.inf),
    "minus infinite": lambda x: x.index_fill(0, x.argmin(), -math.inf),
}
"""Kinds of floating-point values, made of normal ones. Not every reference allows the last three."""

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows sum to 1": lambda x: torch.nn.functional.normalize(x.abs() + (x == 0).all(-1, keepdim=True), 1.0, -1),
    "unique": lambda x: x,
    "sorted": lambda x: x.sort(-1).values,
    "offsets": lambda x: x.sort(-1).values,
}
"""What may be required of an input: rows that sum to 1, without a sign; rows of different numbers; sorted ones; rows
that rise from 0 to the largest number, or to a SIZE ("offsets to SIZE"). Whole numbers may also be "below SIZE"."""


@dataclass
class Case:
    """What a kernel is given. `made` has the text that makes each input, where it was drawn; `normal` other values for
    those of floating-point; `lengths` the sizes by name."""

    inputs: Inputs
    made: dict[Any, str] = field(default_factory=dict)
    normal: Inputs = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for the same inputs."""
        return str([self.made, *(_digest(x) for name, x in tensors(self.inputs).items() if name not in self.made)])

    @property
    def elements(self) -> int:
        """Of all its tensors."""
        return sum(x.numel() for x in tensors(self.inputs).values())


class Drawing:
    """What is drawn like an example: `free` are the names of its sizes, and `ones` is the example with all of them 1.

    Axes of equal length are one size, and those of length 1 stay. Where of two tensors without a size in common one is
    longer by a whole number of times at the same place from the end, it stays so many times as long: heads of queries
    and of keys, the width of a head and of its rotation. `sizes` and `forms` say otherwise, and more.
    """

    def __init__(
        self, example: Inputs, out: Names, sizes: Mapping[Any, Any], forms: Mapping[Any, Any], where: Callable[..., Any]
    ) -> None:
        self._given = {name: x for name, x in tensors(example).items() if x.dim()}
        self._out, self._axes = out, dict[Any, tuple[Size, ...]]()
        if wrong := [name for name in out if name not in tensors(example)]:
            raise UsageError(f"out: expected one of {', '.join(map(repr, example))}, got {wrong[0]!r}")
        if not self._given:
            raise UsageError("inputs: no tensor with axes is among them; expected one, or a NumPy array")
        if empty := [n for n, x in self._given.items() if not x.numel() and not (n in out and x.is_floating_point())]:
            raise UsageError(f"inputs: {empty[0]!r} has no element; expected an example that shows a range of numbers")
        if not where(example):
            raise UsageError("where: expected a condition that holds for the example, and it does not")
        self._name_axes(sizes)
        self.free = self._names()
        self._forms = {name: self._required(name, str(said)) for name, said in forms.items()}
        texts = {n: literal(x) for n, x in example.items() if n not in self._given}
        self.example = Case(example, texts, {}, {name: self._length(name) for name in self.free})
        lengths = dict.fromkeys(self.free, 1)
        self.ones = example | {n: x.new_zeros(self._shape(n, lengths)) for n, x in self._given.items()}

    def _name_axes(self, sizes: Mapping[Any, Any]) -> None:
        called: dict[int, str] = {}
        for name, axes in sizes.items():
            x = self._given.get(name)
            if x is None or len(axes) != x.dim() or not all(map(_is_size, axes, x.shape)):
                shapes = ", ".join(f"{n!r}: {tuple(x.shape)}" for n, x in self._given.items())
                wanted = 'a length, a name or ("name", multiple) for each axis of one of the tensors, which are'
                raise UsageError(f"sizes: expected {wanted} {{{shapes}}}, got {name!r}: {axes!r}")
            self._axes[name] = tuple(map(_size, axes))
            called |= {n: one for n, one in zip(x.shape, axes, strict=True) if isinstance(one, str)}
        for name, x in self._given.items():
            self._axes.setdefault(name, tuple(("" if n == 1 else called.get(n, str(n)), 1) for n in x.shape))
        lengths, ratios = {one: self._length(one) for one in self._names()}, dict[str, Size]()
        places = {
            one: {(n, k - len(axes)) for n, axes in self._axes.items() for k in _at(axes, one)} for one in lengths
        }
        for one, other in product(sorted(places, key=lengths.__getitem__), repeat=2):
            owners, ends = map(set, zip(*places[one], strict=True))
            others, their_ends = map(set, zip(*places[other], strict=True))
            apart = owners.isdisjoint(others) and not ends.isdisjoint(their_ends) and owners.isdisjoint(sizes)
            if apart and lengths[other] < lengths[one] and not lengths[one] % lengths[other]:
                base, times = ratios.get(other, (other, 1))
                ratios[one] = base, times * lengths[one] // lengths[other]
        for name, axes in self._axes.items():
            self._axes[name] = tuple(
                ratios[one] if one in ratios and times == 1 else (one, times) for one, times in axes
            )

    def _names(self) -> list[str]:
        return sorted({name for axes in self._axes.values() for name, _ in axes} - {""})

    def _length(self, name: str) -> int:
        """Of the example."""
        tensor, axis = next((n, k) for n, axes in self._axes.items() for k in _at(axes, name))
        return self._given[tensor].shape[axis] // self._axes[tensor][axis][1]

    def words(self, name: str) -> str:
        """A size's own name, or where it stands if it has none."""
        tensor, axis = next((n, k) for n, axes in self._axes.items() for k in _at(axes, name))
        of = repr(tensor) if isinstance(tensor, str) else f"argument {tensor}"
        return f"dimension {axis} of {of}" if name.isdecimal() else name

    def _shape(self, name: Any, lengths: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(lengths.get(one, 1) * times for one, times in self._axes[name])

    def _fits(self, lengths: Mapping[str, int], most: int) -> bool:
        """Whether all tensors have `most` elements together, and what has all sizes 64 times as many, at most."""
        elements = sum(math.prod(self._shape(name, lengths)) for name in self._axes)
        return elements <= most and math.prod(lengths.values()) <= 64 * most

    def _required(self, name: Any, said: str) -> list[tuple[str, str]]:
        """What is required of an input, each with a size or without one. Raises UsageError for anything else."""
        parts = [part.strip() for part in said.split(",")]
        found = [p.rpartition(" ")[::2] if p.startswith(("below ", "offsets to ")) else (p, "") for p in parts]
        whole = name in self._given and not self._given[name].is_floating_point()
        alone, sized = [form for form in FORMS if whole or form != "offsets"], ("below", "offsets to") if whole else ()
        fine = all(form in sized if size else form in alone for form, size in found)
        fine &= name in self._given and all(size in ("", *self.free) or size.isdecimal() for _, size in found)
        if not fine:
            wanted = f"{', '.join(FORMS)}, of whole numbers also below SIZE, offsets to SIZE ({', '.join(self.free)})"
            names = ", ".join(map(repr, self._given))
            raise UsageError(f"forms: expected some of {wanted} for one of {names}, got {name!r}: {said!r}")
        return found

    def cut(self, case: Case, name: str) -> Iterator[Case]:
        """The same case with only the first numbers along a size, the fewest first."""
        for length in SAMPLED_LENGTHS[: bisect_left(SAMPLED_LENGTHS, case.lengths[name])]:
            inputs = dict(case.inputs)
            for tensor, axis in ((n, k) for n, axes in self._axes.items() for k in _at(axes, name)):
                inputs[tensor] = inputs[tensor].narrow(axis, 0, length * self._axes[tensor][axis][1]).clone()
            yield Case(inputs, case.made, {}, case.lengths | {name: length})

    def cases(self, strategies: Any, dtypes: Names, layouts: Names, values: Names, most: int) -> Any:
        """The strategy."""
        ones = dict.fromkeys(self.free, 1)
        lengths_of = {name: [n for n in SAMPLED_LENGTHS[1:] if self._fits(ones | {name: n}, most)] for name in ones}

        def case(draw: Any) -> Case:

            def one_of(choices: Any) -> Any:
                return draw(strategies.sampled_from(choices))

            lengths = dict(ones)
            first = one_of(self.free) if self.free else ""
            for name in sorted(self.free, key=first.__eq__, reverse=True):  # the first is more often long
                possible = [1, *lengths_of[name]]
                longest = one_of(possible + possible[len(possible) // 2 :] * (2 * (name == first)))
                fitting = (n for n in SAMPLED_LENGTHS if n <= longest and self._fits(lengths | {name: n}, most))
                lengths[name] = max(fitting, default=1)
            wanted = one_of(dtypes) if dtypes else None
            inputs, normal, texts = dict(self.example.inputs), {}, dict(self.example.made)
            seed = one_of(range(1000))  # integers() would sample numbers of the modules that are loaded
            for i, (name, x) in enumerate(self._given.items()):
                shape, forms = self._shape(name, lengths), self._forms.get(name, [])
                dtype = wanted if wanted is not None and x.is_floating_point() else x.dtype
                how: dict[str, Any] = {"seed": seed + i, "device": str(x.device)}
                fine = [one for one in layouts if one != "repeated" or not (forms or name in self._out)]
                how["layout"] = one_of(fine or ["contiguous"])
                if kept := tuple(form.removesuffix(" to") for form, _ in forms if form != "below"):
                    how["form"] = kept
                if not x.is_floating_point():
                    low, high = int(x.long().min()), int(x.long().max())
                    how |= {"low": low, "high": low + one_of((high - low, 0, min(1, high - low), (high - low) // 8))}
                    for form, size in forms:
                        if size:
                            how |= {"low": 0, "high": (lengths.get(size) or int(size)) - (form == "below")}
                elif name not in self._out:
                    how |= {"low": 0.0} if x.double().min() >= 0 else {}
                    normal[name] = sample(shape, dtype, "normal", **how)
                    how["values"] = one_of((*values, *(["normal"] * 3 if "normal" in values else [])))
                    how |= {"seed": 0} if how["values"] in ("ones", "zeros", "counting") else {}  # the same case is one
                inputs[name] = sample(shape, dtype, **how)
                said = "".join(f", {key}={value!r}" for key, value in how.items() if value != "cpu")
                texts[name] = f"sample({shape}, {dtype}{said})"
            read = [n for n, x in self._given.items() if x.is_floating_point() and n not in (*self._out, *self._forms)]
            for a, b in combinations(read, 2):
                if (inputs[a].shape, inputs[a].dtype) == (inputs[b].shape, inputs[b].dtype) and one_of(range(8)) == 7:
                    inputs[b], texts[b] = inputs[a], f"inputs[{a!r}]"
            return Case(inputs, {name: texts[name] for name in inputs}, normal, lengths)

        return strategies.composite(case)()


def _size(one: Any) -> Any:
    """As a name and a multiple."""
    return (one, 1) if isinstance(one, str) else ("", one) if isinstance(one, int) else one


def _is_size(one: Any, length: int) -> bool:
    match _size(one):
        case (str(name), int(times)):
            return times > 0 and (not name or length % times == 0)
    return False


def _at(axes: tuple[Size, ...], name: str) -> list[int]:
    """Where a size stands."""
    return [k for k, (one, _) in enumerate(axes) if one == name]


def sample(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    values: str = "ones",
    layout: str = "contiguous",
    seed: int = 0,
    low: float = -math.inf,
    high: float = math.inf,
    device: str = "cpu",
    form: tuple[str, ...] = (),
) -> Tensor:
    """A tensor of one of :data:`KINDS_OF_VALUES` that lies in memory as one of :data:`LAYOUTS`, and has :data:`FORMS`.

    Whole numbers are sampled from `low` to `high` instead; floating-point numbers lose their sign if `low` is not
    negative. What lies between the elements is NaN, or `low`.
    """
    noise, count = torch.Generator().manual_seed(seed), math.prod(shape)
    if dtype.is_floating_point:
        normal = (1000 * torch.randn(count, generator=noise, dtype=torch.float64)).round() / 1000
        x, gap = KINDS_OF_VALUES[values](normal.to(torch.float32 if dtype.itemsize == 1 else dtype)), math.nan
        x = x.abs() if low >= 0 else x
        x = x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x  # beyond that it has NaN alone
    else:
        end = min(int(high), 2**63 - 2) + 1  # which torch does not sample, and which must be a number of int64 too
        x, gap = torch.randint(min(int(low), end - 1), end, (count,), generator=noise), low
    if "unique" in form:  # of rows that are longer than there are numbers, the first ones
        start, width = (0, shape[-1]) if dtype.is_floating_point else (int(low), max(end - int(low), shape[-1]))
        rows = [torch.randperm(width, generator=noise)[: shape[-1]] for _ in range(count // shape[-1])]
        x = start + torch.stack(rows).to(x.dtype)
    x = x.reshape(shape)
    for one in form:
        x = FORMS[one](x)
    if "offsets" in form:
        x[..., -1], x[..., 0] = int(high), 0
    x = x.to(device, dtype)
    return LAYOUTS[layout](x, torch.full_like(x[:1].flatten()[:1], gap))


def tensors(inputs: Mapping[Any, Any]) -> dict[Any, Tensor]:
    """Those of the arguments that are tensors."""
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor)}


def by_name(inputs: Any) -> Inputs:
    """Arguments by name, or by position."""
    several = inputs if isinstance(inputs, (Mapping, tuple, list)) else [inputs]
    return dict(several if isinstance(several, Mapping) else enumerate(several))


def without_arrays(inputs: Inputs) -> tuple[Inputs, Names]:
    """Tensors in place of copies of NumPy arrays, and the names of these."""
    arrays = tuple(name for name, x in inputs.items() if isinstance(x, np.ndarray))
    return inputs | {name: torch.from_numpy(np.array(inputs[name])) for name in arrays}, arrays


def _digest(x: Tensor) -> str:
    """Of all of a tensor's memory, and how it lies there."""
    return f"{x.dtype} {x.shape} {x.stride()} {x.storage_offset()} {digest(memory_of(x.detach()))}"


def literal(x: Any) -> str:
    """The text that gives a tensor, as it lies in memory."""
    if not isinstance(x, Tensor):
        return repr(x)
    where = f", device={str(x.device)!r}" * x.is_cuda
    if x.is_contiguous() and not x.storage_offset():
        return f"torch.tensor({x.tolist()}, dtype={x.dtype}{where})"
    lying = f"as_strided({tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"
    return f"torch.tensor({memory_of(x.detach()).tolist()}, dtype={x.dtype}{where}).{lying}"
