"""What the parts share: how numbers are sampled and stored, a port's side of a run, defects, and the cases made of
them.

A program is a class with ``make`` (a generator's inputs), ``reference`` (PyTorch, with named steps), ``port`` (the same
in NumPy, by other means) and ``defects``. The port asks at each place where it can go wrong whether that defect is on.
A variant says in which format steps are stored: ``f32``, ``bf16`` or ``f16``; everything is computed in float32. The
suffix ``reg`` is a fused kernel, which goes on with what it has in registers instead of what it has stored. ``f64``
computes and stores in float64, to check labels (see check.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import whywrong

KINDS = (
    *("transpose", "swap", "layout", "permute", "flip", "axis"),  # everything is there, in another place or order
    *("shift", "truncate", "zero", "stale", "mask", "race"),  # something is read or written that should not be, or not
    *("drop_term", "factor", "scale", "constant", "eps", "ddof", "sign", "function"),  # another formula
    *("precision", "other"),
)
FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
PROGRAMS: dict[str, Program] = {}
"""Every program of the sets that are imported, by its id; no two sets share one."""

OBSERVER: ContextVar[Callable[[str, torch.Tensor], torch.Tensor]] = ContextVar("observer", default=whywrong.step)
"""What a reference's :func:`step` calls: whywrong's, or another tool's, or that of the check of labels."""


def step(name: str, x: torch.Tensor) -> torch.Tensor:
    """Name an intermediate tensor of a reference; what follows takes what is returned."""
    return OBSERVER.get()(name, x)


def members(package: str) -> dict[str, Program]:
    """The programs of a set, by their ids, in order."""
    found = (p for p in PROGRAMS.values() if p.package == package)
    return {p.id: p for p in sorted(found, key=lambda p: p.id)}


@dataclass(frozen=True)
class D:
    """A defect: its name in the port, the first step that is wrong by it, and what a fair reader may call it."""

    name: str
    step: str
    kind: str
    sentence: str
    accept: tuple[str, ...] = ()
    """Kinds that are right answers beside `kind`."""

    def __post_init__(self) -> None:
        if unknown := {self.kind, *self.accept} - {*KINDS}:
            raise ValueError(f"{self.name}: {unknown} are no kinds")


@dataclass
class Program:
    id: str
    name: str
    make: Callable[[torch.Generator], dict[str, torch.Tensor]]
    reference: Callable[..., Any]
    port: Callable[[Port], None]
    defects: list[D]
    loss: Callable[[Any], torch.Tensor] | None
    variants: tuple[str, ...] = ("f32", "bf16", "bf16reg")
    """Defects are shown in the first one."""
    wide: tuple[str, ...] = ()
    """Steps and inputs that are float32 in every variant."""
    seeds: int = 3
    """Correct runs a variant; the first one has one more."""
    notes: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    package: str = ""
    """The set that it belongs to."""

    def storage(self, name: str, variant: str) -> torch.dtype:
        """The format of an input, or of a step however often it was passed (`name#2`)."""
        if variant == "f64":
            return torch.float64
        return FORMATS["f32" if name.split("#")[0] in self.wide else variant.removesuffix("reg")]


def program(id: str, **settings: Any) -> Callable[[type], type]:
    """Keep a class as the program `id`."""

    def kept(cls: Any) -> Any:
        loss = getattr(cls, "loss", None)
        PROGRAMS[id] = Program(id, cls.__name__, cls.make, cls.reference, cls.port, cls.defects, loss, **settings)
        PROGRAMS[id].package = cls.__module__.rpartition(".")[0]
        return cls

    return kept


class Port:
    """What a port is given and what it stores. ``P["x"]`` is an input, in float32 or as the integers it is."""

    def __init__(self, program: Program, inputs: dict[str, torch.Tensor], variant: str, defect: str | None) -> None:
        self.program, self.variant, self.defect = program, variant, defect
        self.ct = torch.float64 if variant == "f64" else torch.float32
        self.inputs = {name: self._stored(name, x) for name, x in inputs.items()}
        self.observed: dict[str, torch.Tensor] = {}
        self.asked: set[str] = set()

    def _stored(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.program.storage(name, self.variant)) if x.is_floating_point() else x

    def __getitem__(self, name: str) -> np.ndarray:
        return computed(self.inputs[name], self.ct)

    def d(self, *names: str) -> bool:
        """Whether one of these defects is on."""
        self.asked.update(names)
        return self.defect in names

    def f(self, x: Any) -> np.ndarray:
        """Constants and sums in the format that the port computes in."""
        return np.asarray(x, np.float64 if self.variant == "f64" else np.float32)

    def put(self, name: str, x: Any) -> np.ndarray:
        """Store a step. What comes back is what the port goes on with."""
        count = sum(other.split("#")[0] == name for other in self.observed)
        name = f"{name}#{count + 1}" if count else name
        stored = self.observed[name] = self._stored(name, torch.from_numpy(np.array(x, order="C")))
        return np.asarray(x) if self.variant.endswith("reg") else computed(stored, self.ct)


def computed(x: torch.Tensor, ct: torch.dtype) -> np.ndarray:
    """A copy in the format that the port computes in."""
    return np.array(x.to(ct) if x.is_floating_point() else x)


def bf16(x: Any) -> np.ndarray:
    """Rounded to bfloat16 and back."""
    x = np.array(x, order="C")
    return torch.from_numpy(x).bfloat16().float().numpy().astype(x.dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def randn(g: torch.Generator, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    """Normal numbers about `shift`."""
    return shift + scale * torch.randn(*shape, generator=g, dtype=torch.float64)


def rand(g: torch.Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Uniform numbers from `low` to `high`."""
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


def randint(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """Integers from `low` to below `high`."""
    return torch.randint(low, high, shape, generator=g)


def inputs_of(p: Program, variant: str, seed: int) -> dict[str, torch.Tensor]:
    """A reference's inputs in float64, each a number of the format that the port has it in."""
    made = p.make(torch.Generator().manual_seed(1000 * seed + zlib.crc32(p.id.encode()) % 100_000))
    return {name: x.to(p.storage(name, variant)).double() if x.is_floating_point() else x for name, x in made.items()}


def run_port(p: Program, inputs: dict[str, torch.Tensor], variant: str, defect: str | None) -> Port:
    """A port that has run; a defect that it does not know is an error."""
    port = Port(p, inputs, variant, defect)
    with np.errstate(all="ignore"):
        p.port(port)
    if defect not in {None, *port.asked}:
        raise ValueError(f"{p.id}: its port has no defect {defect}")
    return port


def precision_of(port: Port) -> dict[str, Any]:
    """The words of whywrong.Precision for what a port declares."""
    declared = FORMATS[port.variant.removesuffix("reg")]
    other = {name: x.dtype for name, x in observed_of(port).items() if x.is_floating_point() and x.dtype != declared}
    steps = {"steps": {name: {"storage": f"{dtype}".removeprefix("torch.")} for name, dtype in other.items()}}
    return {"storage": f"{declared}".removeprefix("torch."), **(steps if other else {})}


def observed_of(port: Port) -> dict[str, torch.Tensor]:
    """Inputs and steps."""
    return {**port.inputs, **port.observed}


def case(p: Program, variant: str, seed: int, defect: D | None) -> dict[str, Any]:
    """One run of a port beside what its reference needs and what is known of the defect."""
    inputs = inputs_of(p, variant, seed)
    port = run_port(p, inputs, variant, defect and defect.name)
    return {
        "id": f"{p.id}/{defect.name if defect else 'clean'}/{variant}/{seed}",
        "reference": p.reference,
        "loss": p.loss,
        "inputs": inputs,
        "observed": observed_of(port),
        "precision": precision_of(port),
        "clean": defect is None,
        "true_step": defect and defect.step,
        "kind": defect and defect.kind,
        "accept": (defect.kind, *defect.accept) if defect else (),
    }


def cases(
    programs: Iterable[Program], clean: bool = True, defects: bool = True, every_variant: bool = False
) -> Iterator[dict[str, Any]]:
    """Correct runs and defects of programs, program by program; a defect in every variant if asked for."""
    for p in programs:
        for variant in p.variants if clean else ():
            for seed in range(p.seeds + (variant == p.variants[0])):
                yield case(p, variant, seed, None)
        for defect in p.defects if defects else ():
            for variant in p.variants if every_variant else p.variants[:1]:
                yield case(p, variant, 0, defect)
