"""What a trace's metadata promises of a step's precision, read from free text; the honest fallback where it says
nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit import promises
from labkit.trace.dumps import Dump

UNIT = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "integer": 0.0,
    "8 bits": 2.0**-7,
    "4 bits": 2.0**-3,
}
"""Unit round-off by name; of scaled integers, half a step over the RMS of a block whose largest is about twice that."""

LARGEST_INDEX = 4096
"""Numbers of 16 bits beyond this are taken for fixed-point, up to it for positions."""
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Precision:
    """How one step was promised to be computed and stored."""

    stored: str
    """The narrower of the tensor's dtype and the promised one."""
    compute: float
    """Unit round-off of the arithmetic inside the step."""
    factor: float
    """Unit round-off to which the factors of products are cut first; 0 where they are taken as they are."""
    flush: bool
    """Whether denormal results may become zero."""
    extra: float
    """Further relative error that the text grants, as for fast functions."""
    eager: bool = False
    """Whether each operation inside the step rounds to the stored dtype."""
    golden: torch.dtype | None = None
    """The golden's own dtype where it is not float64, so that it is off too."""
    stochastic: bool = False
    """Whether storage may round to either neighbour."""
    levels: int = 0
    """How many steps of a whole tensor's range the numbers were kept in, 0 where they were not kept as integers."""

    between: float = 0.0
    """Unit round-off of what is between a step's operations, where nobody promises float32 for that."""
    absolute: float = 0.0
    """What a function may be off whatever its value, where a note grants that."""
    scaled: bool = False
    """Whether what is stored is a float8 number times a scale."""
    fixed: bool = False
    """Whether what is stored is fixed-point: real numbers as whole multiples of a power of two."""
    transformed: bool = False
    """Whether factors are cut after they were transformed, so that how many digits they had does not matter."""

    @property
    def unit(self) -> float:
        """Unit round-off of the stored dtype."""
        return UNIT[self.stored]

    @property
    def dtype(self) -> torch.dtype | None:
        """The stored dtype, None for integers."""
        return _DTYPES.get(self.stored)


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype."""
    return str(dtype).removeprefix("torch.") if dtype.is_floating_point else "integer"


def of_step(
    name: str, tensor: torch.Tensor, observed: Dump, golden: Dump, against: torch.dtype, is_product: bool = False
) -> Precision:
    """What both traces' metadata promise of the observed step; of a golden only what is narrower than its float64.

    `against` is the dtype of the golden's step; `is_product`: that it is one is known whatever its text says.
    """
    own = dtype_name(tensor.dtype)
    stored, promised = _stored(name, tensor, observed, golden)
    op = _text(name, observed, golden)
    told = (observed.about.get("compute"), observed.about.get("dtype_note"), golden.about.get("compute"))
    said = promises.arithmetic(told)
    notes = " ".join(str(d.about.get("dtype_note", "")) for d in (observed, golden))
    product = is_product or _is_product(name, tensor, observed, golden)
    narrow, eager = UNIT[stored] > UNIT["float32"], promises.eager(said)
    accumulate = UNIT["float32"] if UNIT.get(stored, 0.0) >= UNIT["float32"] or stored == "integer" else UNIT["float64"]
    accumulate = max(accumulate, UNIT.get(promises.narrow_sums(said) or "", 0.0))
    if eager and not product:
        accumulate = max(accumulate, UNIT[stored])
    factor = 0.0
    silent = promised in (None, "float32") and not said and stored == "float32"
    scaled = _scaled_float8(name, observed, golden)
    if product and ("tf32" in said or silent):  # silence cannot exclude TF32, which many products of float32 are in
        factor = max(2.0 * UNIT["tf32"], UNIT.get(observed.narrowest or "", 0.0) if silent else 0.0)
    elif product:
        factor = UNIT.get(promises.factors(said) or "", 0.0)
    if product and scaled:
        factor = max(factor, (2.0 if promises.stochastic(f"{notes} {said}") else 1.0) * UNIT[scaled])
    if product and narrow and not promises.float32_named(said):
        factor = max(factor, UNIT[stored])  # sums are kept in float32 by all hardware, factors as narrow as storage
    return Precision(
        stored,
        accumulate,
        factor,
        promises.flushed(said),
        2.0 * promises.ulps(said) * UNIT["float32"],
        eager,
        None if _exact(against) else against,
        promises.stochastic(f"{notes} {said} {op}"),
        promises.levels(op, notes) if own in _DTYPES else 0,
        UNIT[stored] if narrow and not promises.float32_named(said, beyond_sums=True) else 0.0,
        promises.absolute(name, op, f"{notes} {said}"),
        stored.startswith("float8") and own != stored,
        tensor.dtype == torch.int16 and float(tensor.double().abs().max()) > LARGEST_INDEX,
        promises.transformed(said),
    )


def _text(name: str, observed: Dump, golden: Dump) -> str:
    return max((str(one.step(name).get("op") or "") for one in (golden, observed)), key=len) or name


def _stored(name: str, tensor: torch.Tensor, observed: Dump, golden: Dump) -> tuple[str, str | None]:
    """The type that a step is held to, its own or a narrower one that is promised; and the one that is promised."""
    own = dtype_name(tensor.dtype)
    words = [observed.step(name).get("dtype"), observed.about.get("storage_dtype"), golden.step(name).get("dtype")]
    words.append(golden.about.get("storage_dtype"))
    promised = next((p for p in map(promises.type_named, words) if p not in (None, "float64", "tf32")), None)
    if own not in _DTYPES:
        return own, promised
    stored = own
    if not any(words) and (found := observed.narrow) and UNIT[dtype_name(found)] > UNIT[own]:
        promised = dtype_name(found)  # nobody says how it is stored, but all of it is
    if promised in _DTYPES and UNIT[promised] > UNIT[own]:
        stored = promised
    keys = ("compute", "dtype_note")
    notes = " ".join(str(d.about.get(key, "")) for d in (observed, golden) for key in keys).lower()
    short = promises.float8_format(name, notes)
    if promises.casts_to_float8(_text(name, observed, golden)):
        known = (short, own, promises.type_named(_text(name, observed, golden)))
        stored = next((one for one in known if one and one.startswith("float8")), "float8_e5m2")  # at worst, if unnamed
    elif short and UNIT[short] > UNIT[own] and _only_of(short, tensor, golden.read(name)):
        stored = short
    return stored, promised


def _is_product(name: str, tensor: torch.Tensor, observed: Dump, golden: Dump) -> bool:
    """Whether a step holds a product, as its text, its name, its inputs' shapes or its length have it."""
    op = _text(name, observed, golden)
    told = bool(golden.step(name).get("op") or observed.step(name).get("op"))
    given = golden.step(name).get("inputs") or observed.step(name).get("inputs")
    if promises.transform(op):
        return False
    if promises.product(op) or (told and promises.juxtaposed(op, given or golden.names)):
        return True
    of_scores = promises.SCORES.search(op) if told else promises.OF_SCORES.search(name)
    if of_scores and not any(promises.SCORED.search(one) for one in golden.names):
        return True
    factors, alike = _factors(name, tensor, golden)
    if factors > 1 and (not told or not alike):
        return True
    length = str(golden.step(name).get("K") or observed.step(name).get("K") or "")
    return length.isdigit() and int(length) > 1 and (not told or bool(promises.OUTPUT.search(op)))


def of_8_bits(x: torch.Tensor) -> bool:
    """Whether a tensor is of an 8-bit type, or has the numbers of one in a wider type."""
    if x.element_size() == 1 or not x.is_floating_point():
        return x.element_size() == 1
    return any(bool((x.to(one).to(x.dtype) == x).all()) for one in (torch.float8_e4m3fn, torch.float8_e5m2))


def fewer_digits(name: str, value: torch.Tensor, wanted: torch.Tensor, observed: Dump, golden: Dump) -> bool:
    """Whether a step that was promised in float32, by itself, has a 16-bit type's numbers where it would have others.

    `value` is what it has and `wanted` what its inputs give, float64 both.
    """
    if observed.read(name).dtype != torch.float32 or "float32" not in (
        promises.type_named(one.step(name).get("dtype")) for one in (observed, golden)
    ):
        return False
    return any(_only_of(kept, value.float(), wanted.float()) for kept in ("bfloat16", "float16"))


def _only_of(kept: str, observed: torch.Tensor, golden: torch.Tensor) -> bool:
    """Whether all of many observed numbers are some of a narrow type's, as the golden's are not."""
    narrow = _DTYPES[kept]

    def on_grid(x: torch.Tensor) -> bool:
        return bool((x.to(narrow).to(x.dtype) == x).all())

    return observed.numel() >= 64 and on_grid(observed) and not on_grid(golden) and len(observed.unique()) >= 16


def _factors(name: str, tensor: torch.Tensor, golden: Dump) -> tuple[int, bool]:
    """How many of a step's recorded inputs are matrices of another shape than its own, as a product's factors are; and
    whether one is of its own shape."""
    given = golden.step(name).get("inputs") or []
    shapes = [tuple(golden.read(str(x)).shape) for x in given if str(x) in golden] if isinstance(given, list) else []
    other = [shape for shape in shapes if shape != tuple(tensor.shape)]
    return sum(len(shape) >= 2 for shape in other), len(other) < len(shapes)


def _scaled_float8(name: str, observed: Dump, golden: Dump) -> str | None:
    """The 8-bit type of a product's factor where the other one has a scale too, and so was cast to it on the way."""
    given = golden.step(name).get("inputs") or observed.step(name).get("inputs") or []
    told = [str(x) for x in given] if isinstance(given, list) else []
    if sum("scale" in x.lower() for x in told) < 2:
        return None
    kinds = (dtype_name(observed.read(x).dtype) for x in told if x in observed)
    return next((kind for kind in kinds if kind.startswith("float8")), None)


def _exact(dtype: torch.dtype) -> bool:
    return dtype == torch.float64 or not dtype.is_floating_point
