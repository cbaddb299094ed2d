"""Hunting: inputs are drawn until a kernel fails, and the failure is made as small and as plain as it gets.

Hypothesis draws sizes, memory layouts, dtypes and kinds of values. A case is judged as any other: the golden is
recorded on its inputs, and the kernel is held to what the promised precision allows.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.causes.explain import Explanation, explain
from labkit.errors import UsageError
from labkit.numerics.precision import Precision
from labkit.tables import printable
from labkit.trace.findings import Localisation
from labkit.trace.golden import Golden, golden
from labkit.trace.localise import localise
from labkit.trace.repetition import poisoned, same_bits
from labkit.trace.watching import OUTPUT, tensors_of

Tensor = torch.Tensor

SIZES = sorted(
    {1, 5, 11, 13, 37, 61, 97, 251, 1009, 4099, 16411} | {2**k + d for k in range(1, 17) for d in (-1, 0, 1)}
)
"""Lengths of an axis: one, primes, and powers of two with their neighbours."""

LAYOUTS = ("contiguous", "offset", "rows apart", "gaps", "first axis fastest", "repeated")
"""How a tensor lies in memory: from its beginning; one element behind it; with room between rows; with room between
elements; in the order of Fortran; with one slice of the first axis that stands for all."""

VALUES = ("ones", "counting", "normal", "large mean", "wide", "zeros", "denormal")
SPECIAL = ("NaN", "infinite")
"""Kinds of floating-point values: those that a kernel has to take, and those that its reference has to allow."""

GUARD = 1 << 12
"""Elements of the guard zones on both sides of what a kernel is given and of what it allocates."""

SHRINKS, LITERAL = 100, 24
"""Cases that are tried to make a failure smaller, and elements up to which a script writes a tensor's values."""

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "full"}


@dataclass(repr=False)
class Failure:
    """A case that fails. `inputs` are what the kernel was given, by name or position; `words` say what is wrong.

    `observed` has the inputs and the kernel's results by the golden's names, so that they can be explained with
    `golden` and `precision`. `localisation` is None where there is nothing to judge.
    """

    inputs: dict[Any, Any]
    words: str
    golden: Golden
    precision: Precision | None
    observed: dict[str, Tensor] = field(default_factory=dict)
    localisation: Localisation | None = None

    def explain(self, seconds: float = 20.0) -> Explanation:
        """Why, by :func:`labkit.explain`. Raises UsageError where there are no wrong numbers to explain."""
        if self.localisation is None or self.localisation.first is None:
            raise UsageError(f"failure: {self.words}; there are no wrong numbers to explain")
        return explain(self.observed, self.golden, self.precision, seconds=seconds)

    def __repr__(self) -> str:
        lines = [self.words]
        for name, x in self.inputs.items():
            if isinstance(x, Tensor):
                lying = "" if x.is_contiguous() else f", strides {x.stride()}"
                lines.append(f"  {name}: {str(x.dtype)[6:]} {list(x.shape)}{lying}")
        return printable("\n".join(lines))


class _RefusedError(Exception):
    """The kernel refused its inputs."""


class _FoundError(Exception):
    """What Hypothesis takes for a failure."""


@dataclass(repr=False)
class Hunt:
    """What :func:`hunt` found.

    `examples` were tried, up to the first failure; besides, the kernel `refused` some, and some were `discarded` since
    the reference fails on them. `made` has the text that makes each input of the failure, by its name.
    """

    kernel: Callable[..., Any]
    reference: Any
    out: tuple[Any, ...]
    seed: int
    examples: int = 0
    refused: int = 0
    discarded: int = 0
    failure: Failure | None = None
    made: dict[Any, str] = field(default_factory=dict)

    @property
    def found(self) -> bool:
        """Whether a failure was found."""
        return self.failure is not None

    def __repr__(self) -> str:
        counts = f"{self.examples} tried, {self.refused} refused, {self.discarded} discarded; seed {self.seed}"
        none = "no failure found" if self.examples else "nothing was tried"
        return f"{_name(self.kernel)}: {self.failure or none}\n  {counts}"

    def script(self) -> str:
        """A program that runs the smallest failure by itself and exits with 1 while it is there.

        Raises UsageError where there is no failure, and for a kernel or reference that cannot be imported by its name.
        """
        head, body, call = self._parts()
        return (
            "\n".join([*head, *body, f"failure = {call}", 'print(failure or "no failure")', "sys.exit(bool(failure))"])
            + "\n"
        )

    def test(self) -> str:
        """The same as a test for pytest. Raises UsageError as :meth:`script` does."""
        head, body, call = self._parts()
        lines = [*body, f"failure = {call}", "assert failure is None, failure"]
        return "\n".join([*head, "", f"def test_{_word(self.kernel)}():", *(f"    {line}" for line in lines)]) + "\n"

    def save(self, directory: Path | str) -> list[Path]:
        """Write both into a folder, as ``hunted_<kernel>.py`` and ``test_hunted_<kernel>.py``. Returns their paths."""
        name = f"hunted_{_word(self.kernel)}.py"
        texts = {Path(directory) / name: self.script(), Path(directory) / f"test_{name}": self.test()}
        Path(directory).mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return list(texts)

    def _parts(self) -> tuple[list[str], list[str], str]:
        """What a script imports, its inputs, and the check."""
        if self.failure is None:
            raise UsageError("hunt: found no failure; wanted one to write down")
        sources = [_imported("kernel", self.kernel), _imported("reference", self.reference)]
        used = "check, drawn" if any("drawn(" in text for text in self.made.values()) else "check"
        promised = _promised(self.failure.precision)
        head = [f'"""{_name(self.kernel)}: {_line(self.failure.words)}"""', "", "import sys", "", "import torch", ""]
        head += ["from labkit import Precision"] * bool(promised)
        head += [f"from labkit.causes.hunt import {used}", "from labkit.session.device import choose", ""]
        head += [f"sys.path[:0] = {sorted({root for root, _ in sources})}"]
        head += ['choose("auto")  # before Triton\'s kernels are imported', *(text for _, text in sources), ""]
        body = ["nan, inf = float('nan'), float('inf')"] * any("nan" in t or "inf" in t for t in self.made.values())
        body += ["inputs = {}", *(f"inputs[{name!r}] = {text}" for name, text in self.made.items())]
        more = f", {promised}" * bool(promised) + f", out={self.out}" * bool(self.out)
        return head, body, f"check(kernel, reference, inputs{more})"


def hunt(
    kernel: Callable[..., Any],
    reference: Any,
    inputs: Any,
    precision: Precision | None = None,
    *,
    examples: int = 50,
    seed: int = 0,
    sizes: Any = None,
    out: Any = (),
    dtypes: Iterable[torch.dtype] = (),
    layouts: Iterable[str] = LAYOUTS,
    values: Iterable[str] = VALUES,
    most: int = 1 << 17,
    refuses: tuple[type[Exception], ...] = (ValueError, AssertionError, NotImplementedError),
) -> Hunt:
    """Draw inputs until `kernel` is not what `reference` is, within what `precision` allows; shrink the failure.

    `inputs` is an example, a tuple or a dict of tensors and other arguments, or a Hypothesis strategy that gives such.
    From an example: axes of equal length are one size and are drawn together, those of length 1 stay; whole numbers and
    truth values stay within the range that it shows, and floating-point numbers are not negative where it has none;
    tensors without axes, and what is no tensor, stay as they are. `sizes` says otherwise, a tuple of names and fixed
    lengths for an argument: ``{"x": ("rows", 64), "gain": (64,)}``. `dtypes` are drawn for its floating-point tensors,
    `layouts` of :data:`LAYOUTS`, `values` of :data:`VALUES` and, where the reference allows them, :data:`SPECIAL`;
    `most` is how many elements all inputs may have together. Two inputs of the same kind may be one tensor.

    `kernel` takes the arguments of `reference` and gives a tensor, a tuple, or a dict by the golden's names, or it
    writes into those of its arguments that `out` names (which the reference is not given). Each case runs in poisoned
    memory between guard zones: once on other values in the same place, then twice. It fails if a result is beyond what
    is allowed, if anything but the results changes, if a later call changes the result of an earlier one, and if it
    raises: what is among `refuses` is not a failure, and neither is a case that the reference fails on. A kernel that
    reads or writes further than :data:`GUARD` elements outside may still end the process.

    The same seed draws the same cases, and nothing is written. Raises UsageError for arguments that are not right,
    where Hypothesis is not installed, and where the reference fails on every case.
    """
    try:
        import hypothesis
        from hypothesis import strategies
    except ImportError:
        raise UsageError("hypothesis: is not installed; wanted pip install 'labkit[hunt]'") from None
    if not callable(kernel) or not callable(reference):
        raise UsageError(f"kernel, reference: {kernel!r:.40}, {reference!r:.40} are not right; wanted two functions")
    if not isinstance(examples, int) or examples < 1:
        raise UsageError(f"examples: {examples!r} is not right; wanted a whole number from 1")
    out = _names(out)
    chosen = {"values": (tuple(values), VALUES + SPECIAL), "layouts": (tuple(layouts), LAYOUTS)}
    for what, (some, known) in chosen.items():
        if not some or not set(some) <= set(known):
            raise UsageError(f"{what}: {some} is not right; wanted some of {', '.join(known)}")
    if isinstance(inputs, strategies.SearchStrategy):
        cases: Any = inputs.map(lambda case: (_by_name(case), {n: _literal(x) for n, x in _by_name(case).items()}))
    else:
        example = _by_name(inputs)
        _record(reference, example, out)  # which says what is wrong with a reference that fails
        cases = _cases(strategies, example, sizes, out, tuple(dtypes), tuple(layouts), tuple(values), most)
    report, spare = Hunt(kernel, reference, out, seed), SHRINKS
    judged: dict[Any, Failure | None] = {}
    error: Exception | None = None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(cases)
    def attempt(case: Any) -> None:
        nonlocal spare, error
        inputs, made = case
        key = str(made)
        if key not in judged:
            spare -= report.found
            if spare < 0:
                return
            try:
                recorded = _record(reference, inputs, out)
            except Exception as why:
                error = why
                report.discarded += not report.found
                hypothesis.reject()
            if sum(recorded[name].numel() for name in recorded.names) > 4 * most:  # an outer product of long ones
                hypothesis.reject()
            try:
                judged[key] = _failure(kernel, recorded, inputs, precision, out, refuses)
            except _RefusedError:
                report.refused += not report.found
                hypothesis.reject()
            report.examples += not report.found
        if judged[key] is not None:
            report.failure, report.made = judged[key], made
            raise _FoundError

    with tempfile.TemporaryDirectory() as folder, suppress(_FoundError, hypothesis.errors.Unsatisfiable):
        hypothesis.configuration.set_hypothesis_home_dir(folder)  # else it keeps numbers of the sources it sees
        attempt()
    hypothesis.configuration.set_hypothesis_home_dir(None)
    if error is not None and not report.examples + report.refused:
        raise UsageError(f"reference: failed on every case, at last with {_line(str(error))}")
    return report


def check(
    kernel: Callable[..., Any], reference: Any, inputs: Any, precision: Precision | None = None, out: Any = ()
) -> Failure | None:
    """Judge `kernel` on `inputs` alone, as :func:`hunt` does, which says what the arguments are; None if it is right.

    Whole numbers as keys of `inputs` are positions.
    """
    inputs, out = _by_name(inputs), _names(out)
    return _failure(kernel, _record(reference, inputs, out), inputs, precision, out, ())


def drawn(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    values: str = "ones",
    layout: str = "contiguous",
    seed: int = 0,
    low: float = -math.inf,
    high: float = math.inf,
    device: str = "cpu",
) -> Tensor:
    """A tensor of one of :data:`VALUES` or :data:`SPECIAL` that lies in memory as one of :data:`LAYOUTS`.

    Whole numbers are drawn from `low` to `high` instead; floating-point numbers lose their sign if `low` is not
    negative. What lies between the elements is NaN, or `low`.
    """
    noise, count = torch.Generator().manual_seed(seed), math.prod(shape)
    normal = (1000 * torch.randn(count, generator=noise, dtype=torch.float64)).round() / 1000
    if not dtype.is_floating_point:
        x = torch.randint(int(low), int(high) + 1, (count,), generator=noise)
    elif values in ("ones", "zeros"):
        x = torch.full_like(normal, values == "ones")
    elif values == "counting":
        x = 1 + torch.arange(count, dtype=torch.float64) % 7
    elif values == "denormal":
        x = normal * torch.finfo(dtype).tiny / 8
    elif values == "wide":
        x = normal * torch.exp2(torch.randint(-8, 9, (count,), generator=noise))
    else:
        x = normal + 1000 * (values == "large mean")
        x[-(seed % count) - 1] = {"NaN": math.nan, "infinite": math.inf}.get(values, x[-(seed % count) - 1])
    x = x.abs() if dtype.is_floating_point and low >= 0 else x
    strides, step = [0] * len(shape), 1 + (layout == "gaps")
    for i in range(len(shape)) if layout == "first axis fastest" else reversed(range(len(shape))):
        strides[i], step = step, step * shape[i] + 3 * (layout == "rows apart")
    strides[:1] = [0] if layout == "repeated" else strides[:1]
    start = int(layout == "offset")
    span = start + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = torch.full((span,), math.nan if dtype.is_floating_point else int(low), dtype=dtype)
    written = slice(1 if layout == "repeated" else None)
    memory.as_strided(shape, strides, start)[written].copy_(x.reshape(shape)[written])
    return memory.to(device).as_strided(shape, strides, start)


def _cases(
    strategies: Any,
    example: dict[Any, Any],
    sizes: Any,
    out: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...],
    layouts: tuple[str, ...],
    values: tuple[str, ...],
    most: int,
) -> Any:
    """The strategy of an example: inputs, and the text that makes each."""
    tensors = {name: x for name, x in example.items() if isinstance(x, Tensor) and x.dim()}
    axes, called = dict(_by_name(sizes or {})), {}
    for name, said in axes.items():
        if name not in tensors or len(said) != tensors[name].dim():
            raise UsageError(
                f"sizes: {name!r}: {said!r} is not right; wanted a name or a length for each axis of a tensor"
            )
        called.update({n: one for n, one in zip(tensors[name].shape, said, strict=True) if isinstance(one, str)})
    for name, x in tensors.items():
        axes.setdefault(name, tuple(1 if n == 1 else called.get(n, str(n)) for n in x.shape))
    free = sorted({one for said in axes.values() for one in said if isinstance(one, str)})

    def elements(lengths: dict[Any, int]) -> int:
        return sum(math.prod(n if isinstance(n, int) else lengths.get(n, 1) for n in said) for said in axes.values())

    def span(x: Tensor) -> dict[str, Any]:
        floating = x.is_floating_point()
        low, high = (float(x.min()), math.inf) if floating else (int(x.min()), int(x.max()))
        return {"low": 0.0 if low >= 0 else -math.inf} if floating else {"low": low, "high": high}

    spans = {name: span(x) for name, x in tensors.items() if name not in out}
    likely = [kind for kind in values for _ in range(4 if kind == "normal" else 1)]

    def case(draw: Any) -> tuple[dict[Any, Any], dict[Any, str]]:
        lengths: dict[Any, int] = {}
        for name in sorted(free, key=draw(strategies.sampled_from(free)).__eq__, reverse=True) if free else ():
            longest = draw(strategies.sampled_from(SIZES))  # always as many choices: fewer would seem to be simpler
            lengths[name] = max(n for n in SIZES if n == 1 or (n <= longest and elements(lengths | {name: n}) <= most))
        wanted = draw(strategies.sampled_from(dtypes)) if dtypes else None
        lying = layouts if draw(strategies.booleans()) else layouts[:1]
        made: dict[Any, tuple[Any, ...]] = {}
        for name, x in tensors.items():
            shape = tuple(n if isinstance(n, int) else lengths[n] for n in axes[name])
            dtype = wanted if wanted is not None and x.is_floating_point() else x.dtype
            layout = draw(strategies.sampled_from([one for one in lying if name not in out or one != "repeated"]))
            kind = draw(strategies.sampled_from(likely)) if x.is_floating_point() and name not in out else VALUES[0]
            twin = [n for n, m in made.items() if m[:2] == (shape, dtype) and x.is_floating_point() and n not in out]
            again = made and draw(strategies.sampled_from(range(8))) == 7
            same = twin[0] if twin and again and name not in out else None
            made[name] = (shape, dtype, {"values": kind, "layout": layout}, same)
        seed = draw(
            strategies.sampled_from(range(1000))
        )  # integers() would draw numbers of the modules that are loaded
        inputs, texts = dict(example), {name: _literal(x) for name, x in example.items() if name not in made}
        for i, (name, (shape, dtype, how, same)) in enumerate(made.items()):
            how |= {"seed": seed + i, "device": str(example[name].device), **spans.get(name, {})}
            inputs[name] = x = drawn(shape, dtype, **how) if same is None else inputs[same]
            said = "".join(f", {key}={value!r}" for key, value in how.items() if value not in ("cpu", -math.inf))
            small = x.untyped_storage().nbytes() <= LITERAL * x.itemsize
            texts[name] = _literal(x) if small else f"drawn({shape}, {dtype}{said})"
            texts[name] = texts[name] if same is None else f"inputs[{same!r}]"
        return inputs, {name: texts[name] for name in inputs}

    return strategies.composite(case)()


class _Allocations(TorchDispatchMode):
    """Guard zones around what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _FACTORIES or not made.numel() or 0 in made.stride() or made.is_meta:
            return made
        memory = _guarded(made)
        self.edges += [memory[:GUARD], memory[-GUARD:]]
        return memory.as_strided(made.shape, made.stride(), GUARD)

    @property
    def written(self) -> bool:
        """Whether a zone is not as it was."""
        return not all(same_bits(edge, _edge(edge[:1])) for edge in self.edges)


def _edge(x: Tensor) -> Tensor:
    return torch.full((GUARD,), math.nan if x.is_floating_point() else x.min().item(), dtype=x.dtype, device=x.device)


def _guarded(x: Tensor) -> Tensor:
    """A copy of all of the memory that `x` is part of, between guard zones: NaN, or the smallest number in it."""
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return torch.cat([_edge(memory), memory, _edge(memory)])


def _failure(
    kernel: Callable[..., Any],
    recorded: Golden,
    inputs: dict[Any, Any],
    precision: Precision | None,
    out: tuple[Any, ...],
    refuses: tuple[type[Exception], ...],
) -> Failure | None:
    """What is wrong with the kernel on these inputs: first what it does to memory, then its results."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    at = {name: x.untyped_storage().data_ptr() for name, x in tensors.items()}
    memory = {at[name]: _guarded(x) for name, x in tensors.items()}
    given = inputs | {
        name: memory[at[name]].as_strided(x.shape, x.stride(), x.storage_offset() + GUARD)
        for name, x in tensors.items()
    }
    for name in out:
        x = given[name]
        x.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
    before = {place: x.clone() for place, x in memory.items()}
    names = [name for name in tensors if name not in out]
    steps = dict(zip(recorded.inputs, (tensors[name] for name in names), strict=False))
    failure = Failure(inputs, "", recorded, precision, steps)

    def run() -> tuple[dict[str, Tensor], bool]:
        with poisoned(), _Allocations() as allocated:
            value = _called(kernel, given)
        if out:
            copies = {name: given[name].clone() for name in out}
            named = len(out) > 1 and all(name in recorded for name in out)
            value = copies if named else list(copies.values())[0 if len(out) == 1 else slice(None)]
        return _results(recorded, value), allocated.written

    def reset() -> None:
        for place, x in memory.items():
            x.copy_(before[place])

    def judge(results: dict[str, Tensor], why: str = "") -> Failure | None:
        failure.observed = steps | {name: x.clone() for name, x in results.items()}
        failure.localisation = found = localise(failure.observed, recorded, precision)
        if found.first is None:
            return None
        finding = found.findings[found.first]
        looks = f"; as it looks, {finding.signature}" if finding.signature else ""
        failure.words = f"{found.first}: {finding.words}{looks}{why}"
        return failure

    for place in {at[name] for name in names if given[name].is_floating_point()}:
        memory[place].mul_(memory[place]).add_(1.0)  # which no result takes for the same, be it without mean and scale
    other: dict[str, Tensor] = {}
    with suppress(Exception):
        other = run()[0]
    reset()
    ours = {x.untyped_storage().data_ptr() for x in memory.values()}
    earlier = {name: x.clone() for name, x in other.items() if x.untyped_storage().data_ptr() not in ours}
    try:
        first, outside = run()
    except refuses as why:
        raise _RefusedError from why
    except Exception as why:
        failure.words = f"raised {type(why).__name__}: {_line(str(why))}"
        return failure
    for name, x in tensors.items():
        where, was, now = (x.shape, x.stride(), x.storage_offset() + GUARD), before[at[name]], memory[at[name]].clone()
        if name in out:
            now.as_strided(*where).copy_(was.as_strided(*where))
        elif not same_bits(now.as_strided(*where), was.as_strided(*where)):
            failure.words = f"changed its input {name!r}"
            return failure
        outside = outside or not same_bits(now, was)
    if outside:
        failure.words = "wrote outside of what it was given and of what it allocated"
        return failure
    if not all(same_bits(other[name], x) for name, x in earlier.items()):
        failure.words = "a later call changed the result of an earlier one"
        return failure
    first = {name: x.clone() for name, x in first.items()}
    stale = any(name in first and torch.equal(first[name], x) for name, x in earlier.items())
    if judge(first, "; the call before, on other inputs, gave the same" * stale):
        return failure
    reset()
    try:
        second = run()[0]
    except Exception as why:
        failure.words = f"raised {type(why).__name__} when it was called again: {_line(str(why))}"
        return failure
    again = all(same_bits(first[name], second[name]) for name in first.keys() & second.keys())
    return None if again else judge(second, "; so a second call on the same inputs")


def _results(recorded: Golden, value: Any) -> dict[str, Tensor]:
    """What a kernel gave, by the golden's names: a dict's own, else as of a reference's result."""
    if isinstance(value, Mapping) and any(name in recorded for name in value):
        return {name: x for name, x in value.items() if isinstance(x, Tensor)}
    found = dict(tensors_of(OUTPUT, value))
    return {recorded.names[-1]: found[OUTPUT]} if OUTPUT in found and OUTPUT not in recorded else found


def _by_name(inputs: Any) -> dict[Any, Any]:
    """Arguments by name, or by position."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return dict(enumerate(inputs)) if isinstance(inputs, (tuple, list)) else {0: inputs}


def _names(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _called(function: Callable[..., Any], inputs: Mapping[Any, Any]) -> Any:
    named = {name: x for name, x in inputs.items() if isinstance(name, str)}
    return function(*(x for name, x in inputs.items() if name not in named), **named)


def _record(reference: Any, inputs: Mapping[Any, Any], out: tuple[Any, ...]) -> Golden:
    return _called(partial(golden, reference), {name: x for name, x in inputs.items() if name not in out})


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:120]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _word(function: Any) -> str:
    return re.sub(r"\W+", "_", _name(function)).strip("_")


def _imported(what: str, function: Any) -> tuple[str, str]:
    """Where the module of a function is found, and the line that imports it."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module == "__main__" or getattr(sys.modules[module], name, None) is not function:
        raise UsageError(f"{what}: {_name(function)} of {module} cannot be imported; wanted a function of a module")
    root = Path(path).resolve().parents[module.count(".") + (Path(path).stem == "__init__")]
    return str(root), f"from {module} import {name} as {what}  # noqa: E402"


def _promised(precision: Precision | None) -> str:
    changed = [(one.name, getattr(precision, one.name)) for one in fields(Precision)] if precision is not None else []
    said = ", ".join(f"{name}={value!r}" for name, value in changed if value != getattr(Precision(), name))
    return f"precision=Precision({said})" * (precision is not None)


def _literal(x: Any) -> str:
    """The text that gives a tensor, as it lies in memory."""
    if not isinstance(x, Tensor):
        return repr(x)
    memory = x if x.is_contiguous() else torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    numbers = memory.detach().cpu()
    numbers = numbers.float() if numbers.is_floating_point() and numbers.itemsize < 4 else numbers
    where = f", device={str(x.device)!r}" * (x.device.type != "cpu")
    text = f"torch.tensor({_digits(numbers.numpy())}, dtype={x.dtype}{where})"
    return text if x.is_contiguous() else f"{text}.as_strided({tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"


def _digits(values: Any) -> str:
    return f"[{', '.join(map(_digits, values))}]" if values.ndim else str(values[()])
