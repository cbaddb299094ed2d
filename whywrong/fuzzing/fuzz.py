"""Fuzzing: inputs are sampled until a kernel fails, and the failure is made as small and as plain as it gets.

Hypothesis samples sizes, memory layouts, dtypes and kinds of values. A case is checked as any other: the golden is
recorded on its inputs, and the kernel may differ from it by what the declared precision allows.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong.checking.findings import Localisation
from whywrong.checking.localise import TRACE_FALSE_POSITIVES, localise
from whywrong.checking.repetition import poisoned
from whywrong.comparing.bits import digest, same_bits
from whywrong.comparing.comparison import as_tensor
from whywrong.comparing.precision import Precision, dtype_of, name_of
from whywrong.errors import LOG, UsageError, check_number, collected, first_line, needs
from whywrong.explaining.search import CAUSE, Cause, Explanation, explain
from whywrong.process_state import process_wide, temporarily
from whywrong.recording.golden import GRADIENT, Golden, golden
from whywrong.recording.watching import OUTPUT, tensors_of
from whywrong.tables import printable
from whywrong.torch_private import FakeTensorMode, TorchDispatchMode, tree_leaves, tree_map_only

Inputs = dict[Any, Any]
Names = tuple[Any, ...]

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

GUARD_ELEMENTS = 1 << 12
"""Elements of the guard zones on both sides of what a kernel is given and of what it allocates."""

SHRINKING_CASES = 100
"""Cases that are tried to make a failure smaller."""

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "full"}


@dataclass(repr=False)
class Failure:
    """A case that fails. `inputs` are what the kernel was given, by name or position; `words` say what is wrong.

    `observed` has the inputs and the kernel's results by the golden's names, so that they can be explained with
    `golden` and `precision`. `localisation` is None where there is nothing to check. `informative` checks the kernel
    on the example, and on the largest inputs on which it failed, with normal values. `strided`: it is correct on
    contiguous copies of these inputs.
    """

    inputs: Inputs
    words: str
    golden: Golden
    precision: Precision | None
    observed: dict[str, Tensor] = field(default_factory=dict)
    localisation: Localisation | None = None
    informative: Callable[[], Iterable[Failure | str]] = tuple
    strided: bool = False

    def explain(self, seconds: float = 20.0) -> Explanation:
        """Why, by :func:`whywrong.explain`: the smallest inputs show little, so on `informative` where these fail too.

        A kernel that is correct on contiguous copies ignores strides. Raises UsageError where there are no wrong
        numbers to explain.
        """
        if self.strided and self.localisation is not None:
            cause = Cause("layout", "strides are ignored: on contiguous copies of its inputs it is correct", "", 0.0)
            return Explanation(self.localisation.first, CAUSE, [cause], report=self.localisation)
        for case in chain(self.informative(), [self]):
            if isinstance(case, Failure) and case.localisation is not None and case.localisation.first is not None:
                found = explain(case.observed, case.golden, precision=case.precision, seconds=seconds)
                found.notes += [f"looked at on these inputs: {case.given}"] * (case is not self)
                return found
        raise UsageError(f"failure: {self.words}; there are no wrong numbers to explain")

    @property
    def given(self) -> str:
        """The inputs in words."""
        tensors = _tensors(self.inputs).items()
        lying = {name: f", strides {x.stride()}" * (not x.is_contiguous()) for name, x in tensors}
        return "; ".join(f"{name}: {name_of(x.dtype)} {list(x.shape)}{lying[name]}" for name, x in tensors)

    def __repr__(self) -> str:
        return printable("\n  ".join([self.words, *self.given.split("; ")]))


@dataclass(repr=False)
class FuzzReport:
    """What :func:`fuzz` found.

    `examples` were tried, up to the first failure; besides, the kernel `refused` some, and some were `discarded` since
    the reference fails on them, or makes a tensor or results of more than four times `most` elements. `made` has the
    text that makes each input of the failure, by its name, but for a strategy's tensors, which :meth:`script` writes.
    """

    kernel: Callable[..., Any]
    reference: Any
    out: Names
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
        """A test for pytest that also runs by itself, and then exits with 1 while the smallest failure is there.

        It imports kernel and reference by their names; of a script, what is not below ``if __name__ == "__main__":``
        runs again then. Raises UsageError where there is no failure, and for what cannot be imported: a lambda, a
        function within another, one that was typed in.
        """
        if self.failure is None:
            raise UsageError("fuzz: found no failure; expected one to write down")
        imports = [_imported("kernel", self.kernel), _imported("reference", self.reference)]
        made = {name: self.made.get(name) or _literal(x) for name, x in self.failure.inputs.items()}
        test = "test_" + re.sub(r"\W+", "_", _name(self.kernel)).strip("_") + "()"
        title = f'"""{_name(self.kernel)}: {first_line(self.failure.words)}"""'
        lines = [title, "", "import os", "import sys", "from math import inf, nan", "", "import torch", ""]
        lines += ["from whywrong import Precision", "from whywrong.fuzzing.fuzz import check, sample"]
        lines += ["", f"sys.path[:0] = {sorted({r for r, _ in imports})}", "if not torch.cuda.is_available():"]
        lines += ['    os.environ["TRITON_INTERPRET"] = "1"  # before Triton\'s kernels are imported']
        lines += [*(text for _, text in imports), "", ""]
        lines += [f"def {test}:", "    inputs = {}", *(f"    inputs[{n!r}] = {text}" for n, text in made.items())]
        lines += [
            f"    failure = check(kernel, reference, inputs, precision={self.failure.precision!r}, out={self.out})"
        ]
        lines += ["    assert failure is None, failure", "", "", f'if __name__ == "__main__":\n    {test}', ""]
        return "\n".join(lines)


def fuzz(
    kernel: Callable[..., Any], reference: Any, inputs: Any, *, precision: Precision | None = None,
    examples: int = 50, seconds: float = math.inf, seed: int = 0, most: int = 0, sizes: Any = None, out: Any = (),
    dtypes: Iterable[torch.dtype] = (), layouts: Iterable[str] = LAYOUTS, values: Iterable[str] =
    tuple(KINDS_OF_VALUES)[:-3], refuses: tuple[type[Exception], ...] = (ValueError, AssertionError,
    NotImplementedError),
) -> FuzzReport:  # fmt: skip
    """Sample inputs until `kernel` differs from `reference` by more than `precision` allows; shrink the failure.

    `inputs` is an example, a tuple or a dict of tensors and other arguments, or a Hypothesis strategy that gives such.
    From an example: axes of equal length are one size and are sampled together, those of length 1 stay; whole numbers
    and truth values stay within the range that it shows, and floating-point numbers are not negative where it has none;
    tensors without axes, and what is no tensor, stay as they are. `sizes` says otherwise, a tuple of names and fixed
    lengths for an argument: ``{"x": ("rows", 64), "gain": (64,)}``. `dtypes` are sampled for its floating-point
    tensors, `layouts` of :data:`LAYOUTS`, `values` of :data:`KINDS_OF_VALUES` (NaN and infinite ones only where they
    are asked for); `most` is how many elements all inputs may have together: by default (0) 2^17, but 2^9 where
    Triton's kernels are interpreted (TRITON_INTERPRET), some ms a program, and no strategy samples. The product of all
    different lengths is 64 times as much at most. Two inputs of the same kind may be one tensor.

    `kernel` takes the arguments of `reference` and gives a tensor, a tuple, or a dict by the golden's names, or it
    writes into those of its arguments that `out` names (which the reference is not given). Each case runs in poisoned
    memory between guard zones: once on other values in the same place, then twice. It fails if a result is beyond what
    is allowed, if anything but the results changes, if a later call changes the result of an earlier one, and if it
    raises: what is among `refuses` is not a failure, and neither is a case that the reference fails on. A kernel that
    reads or writes further than :data:`GUARD_ELEMENTS` elements outside may still end the process.

    The same seed samples the same cases, up to `examples` of them, of which none begins after `seconds`; a failure is
    made smaller in as much time again at most. Nothing is written: :meth:`FuzzReport.script` gives the text of a test.

    While it runs, other threads see that Hypothesis's home directory is a temporary one, and that `random` and
    `numpy.random` are seeded while a case is run, which Hypothesis does; all are afterwards as they were. Two threads
    that fuzz take turns.

    Raises UsageError for arguments of another kind, where no input sampled suits the reference, and where
    Hypothesis is not installed.
    """
    with needs("whywrong.fuzz"):
        import hypothesis
        import hypothesis.configuration as config
        from hypothesis import Phase, settings, strategies
        from hypothesis.errors import NoSuchExample, Unsatisfiable
    for name, number in {"examples": examples, "seed": seed, "most": most, "seconds": seconds}.items():
        check_number(name, number, least=int(name == "examples"), whole=name != "seconds")
    if wrong := [kind for kind in _names(refuses) if not (isinstance(kind, type) and issubclass(kind, Exception))]:
        raise UsageError(f"refuses: expected exceptions, as (ValueError,), got {wrong[0]!r}")
    strategy = isinstance(inputs, strategies.SearchStrategy)
    most = most or 1 << (17 if strategy or os.environ.get("TRITON_INTERPRET", "0") == "0" else 9)
    out, layouts, values = _names(out), _chosen("layouts", layouts, LAYOUTS), _chosen("values", values, KINDS_OF_VALUES)
    dtypes = tuple(dtype_of(Precision(one).storage) for one in _names(dtypes))
    if wrong := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise UsageError(f"dtypes: expected floating-point ones, got {name_of(wrong[0])!r}")
    if strategy:
        cases = inputs.map(_by_name).map(
            lambda case: (case, {n: repr(x) for n, x in case.items() if n not in _tensors(case)}, {})
        )
    else:
        if wrong := [name for name in out if name not in _tensors(_by_name(inputs))]:
            raise UsageError(f"out: expected one of {', '.join(map(repr, _by_name(inputs)))}, got {wrong[0]!r}")
        try:
            _record(reference, _by_name(inputs), out)  # which says what is wrong with a reference that fails
        except TypeError as error:
            wanted = "expected one that takes every input but those that `out` names"
            raise UsageError(f"reference: {first_line(error)}; {wanted}") from error
        taken = [name for name in _by_name(inputs) if name not in out]
        with suppress(TypeError, ValueError):  # of what has no signature: by position arguments have their names too
            called = dict(zip(inspect.signature(reference).parameters, taken, strict=False))
            sizes = {n if n in taken else called.get(n, n): said for n, said in _by_name(sizes or {}).items()}
        cases = _cases(strategies, _by_name(inputs), sizes, out, dtypes, layouts, values, most)
    report, end = FuzzReport(kernel, reference, out, seed), time.monotonic() + seconds
    outcomes: dict[str, Failure | str] = {}
    largest: Inputs = {}
    why = f"it makes tensors of more than {4 * most} elements, or results of as many together, four times most={most}"

    def outcome(inputs: Inputs) -> Failure | str:
        nonlocal why
        recorded = None
        try:
            recorded = _record(reference, inputs, out) if _longest(reference, inputs, out) <= 4 * most else None
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            LOG.debug("discarded, since the reference raised %s", why, exc_info=True)
        if recorded is None or sum(recorded[name].numel() for name in recorded.names) > 4 * most:
            return "discarded"
        return _failure(
            kernel, recorded, inputs, precision, out, refuses, TRACE_FALSE_POSITIVES / (2 * examples)
        )  # two calls

    def fails(case: tuple[Inputs, dict[Any, str], Inputs]) -> bool:
        nonlocal end, largest
        key = str([case[1], *(_digest(x) for name, x in _tensors(case[0]).items() if name not in case[1])])
        count = report.examples + report.refused + report.discarded
        if key not in outcomes:
            if time.monotonic() > end and not report.found:
                raise _TimeUp
            if time.monotonic() > end or len(outcomes) >= count + SHRINKING_CASES:
                return False
            found = outcomes[key] = outcome(case[0])
            vars(report)[found if isinstance(found, str) else "examples"] += not report.found
        found = outcomes[key]
        if isinstance(found, Failure):
            end = end if report.found else time.monotonic() + seconds
            report.failure, report.made = found, case[1]
            largest = max(largest, case[0] | case[2], key=lambda one: sum(x.numel() for x in _tensors(one).values()))
            found.informative = lambda: (outcome(given) for given in ({} if strategy else _by_name(inputs), largest))
        hypothesis.assume(found not in ("refused", "discarded"))
        return isinstance(found, Failure)

    how = settings(max_examples=examples, database=None, deadline=None, phases=(Phase.generate, Phase.shrink))
    home = partial(temporarily, lambda: vars(config)["__hypothesis_home_directory"], config.set_hypothesis_home_dir)
    with (
        tempfile.TemporaryDirectory() as folder,
        process_wide(home(folder)),
        suppress(NoSuchExample, Unsatisfiable, _TimeUp),
    ):
        # finds numbers in the sources of all modules, and without a home of its own it writes them to .hypothesis
        hypothesis.find(cases, fails, settings=how, random=Random(seed))
    if failed := report.failure:
        copies = {name: x.contiguous() for name, x in _tensors(failed.inputs).items() if not x.is_contiguous()}
        failed.strided = bool(copies) and outcome(failed.inputs | copies) == "examples"
        failed.words += "; on contiguous copies of its inputs it is correct" * failed.strided
    if report.discarded and not report.examples + report.refused:
        raise UsageError(f"reference: none of {report.discarded} inputs sampled suits {_name(reference)}: {why}")
    return report


def check(kernel: Any, reference: Any, inputs: Any, *, precision: Any = None, out: Any = ()) -> Failure | None:
    """Check `kernel` on `inputs` alone, as :func:`fuzz` does, which says what the arguments are; None if it passes.

    Whole numbers as keys of `inputs` are positions.
    """
    inputs, out = _by_name(inputs), _names(out)
    found = _failure(kernel, _record(reference, inputs, out), inputs, precision, out, ())
    return found if isinstance(found, Failure) else None


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, values: str = "ones", layout: str = "contiguous", seed: int = 0,
    low: float = -math.inf, high: float = math.inf, device: str = "cpu",
) -> Tensor:  # fmt: skip
    """A tensor of one of :data:`KINDS_OF_VALUES` that lies in memory as one of :data:`LAYOUTS`.

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
    x = x.to(device, dtype).reshape(shape)
    return LAYOUTS[layout](x, torch.full_like(x[:1].flatten()[:1], gap))


def _cases(
    strategies: Any, example: Inputs, sizes: Any, out: Names, dtypes: Names, layouts: Names, values: Names, most: int
) -> Any:
    """The strategy of an example: inputs, the text that makes each, and normal values for those of floating-point."""
    tensors = {name: x for name, x in _tensors(example).items() if x.dim()}
    if not tensors:
        raise UsageError("inputs: no torch.Tensor with axes is among them; expected one, as of torch.from_numpy(array)")
    if empty := [name for name, x in tensors.items() if not x.numel() and not (name in out and x.is_floating_point())]:
        raise UsageError(f"inputs: {empty[0]!r} has no element; expected an example that shows a range of numbers")
    axes: Inputs = dict(_by_name(sizes or {}))
    called: dict[int, str] = {}
    for name, said in axes.items():
        if name not in tensors or len(said) != tensors[name].dim() or any(isinstance(n, int) and n < 1 for n in said):
            shapes = ", ".join(f"{n!r}: {tuple(x.shape)}" for n, x in tensors.items())
            wanted = f"expected a name or a length for each axis of one of the tensors, which are {{{shapes}}}"
            raise UsageError(f"sizes: {wanted}, got {name!r}: {said!r}")
        called |= {n: one for n, one in zip(tensors[name].shape, said, strict=True) if isinstance(one, str)}
    for name, x in tensors.items():
        axes.setdefault(name, tuple(1 if n == 1 else called.get(n, str(n)) for n in x.shape))
    free = sorted({one for said in axes.values() for one in said if isinstance(one, str)})

    def fits(lengths: dict[Any, int]) -> bool:
        shapes = [[lengths.get(n, n) for n in said] for said in axes.values()]
        return sum(map(math.prod, shapes)) <= most and math.prod(lengths.values()) <= 64 * most

    def case(draw: Any) -> tuple[Inputs, dict[Any, str], Inputs]:

        def one_of(choices: Any) -> Any:
            return draw(strategies.sampled_from(choices))

        lengths: dict[Any, int] = dict.fromkeys(free, 1)
        for name in sorted(free, key=one_of(free).__eq__, reverse=True) if free else ():
            longest = one_of(SAMPLED_LENGTHS)  # always as many choices: fewer would seem to be simpler
            lengths[name] = max(n for n in SAMPLED_LENGTHS if n == 1 or (n <= longest and fits(lengths | {name: n})))
        wanted = one_of(dtypes) if dtypes else None
        lying = one_of((layouts[:1], layouts))
        inputs, normal, texts = dict(example), {}, {n: _literal(x) for n, x in example.items() if n not in tensors}
        seed = one_of(range(1000))  # integers() would sample numbers of the modules that are loaded
        for i, (name, x) in enumerate(tensors.items()):
            shape = tuple(lengths.get(n, n) for n in axes[name])
            dtype = wanted if wanted is not None and x.is_floating_point() else x.dtype
            how: dict[str, Any] = {"seed": seed + i, "device": str(x.device)}
            how["layout"] = one_of([one for one in lying if name not in out or one != "repeated"])
            if not x.is_floating_point():
                how |= {"low": int(x.long().min()), "high": int(x.long().max())}
            elif name not in out:
                how |= {"low": 0.0} if x.double().min() >= 0 else {}
                normal[name] = sample(shape, dtype, "normal", **how)
                how["values"] = one_of((*values, *(["normal"] * 3 if "normal" in values else [])))
                how |= {"seed": 0} if how["values"] in ("ones", "zeros", "counting") else {}  # the same case is one
            inputs[name] = sample(shape, dtype, **how)
            said = "".join(f", {key}={value!r}" for key, value in how.items() if value != "cpu")
            texts[name] = f"sample({shape}, {dtype}{said})"
        read = [name for name, x in tensors.items() if x.is_floating_point() and name not in out]
        for a, b in combinations(read, 2):
            if (inputs[a].shape, inputs[a].dtype) == (inputs[b].shape, inputs[b].dtype) and one_of(range(8)) == 7:
                inputs[b], texts[b] = inputs[a], f"inputs[{a!r}]"
        return inputs, {name: texts[name] for name in inputs}, normal

    return strategies.composite(case)()


class _TimeUp(BaseException):
    """Ends Hypothesis's search, which takes an Exception for a failure."""


@contextmanager
def _silent_here(logger: logging.Logger) -> Iterator[None]:
    """Records of this thread do not go to a logger; those of others do."""
    here = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)


class _Longest(TorchDispatchMode):
    """The most elements of a tensor that is made, as it lies in memory."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(made)):
            self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return made


def _longest(reference: Any, inputs: Inputs, out: Names) -> int:
    """The most elements of a tensor that the reference makes, as far as it gets without any numbers."""
    with (
        collected([], "the reference on tensors without numbers"),  # which ends where numbers decide what is run
        _silent_here(logging.getLogger(FakeTensorMode.__module__)),  # of what has no fake
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        _Longest() as longest,
    ):
        _called(reference, tree_map_only(Tensor, fake.from_tensor, {n: x for n, x in inputs.items() if n not in out}))
    return longest.elements


class _Allocations(TorchDispatchMode):
    """Guard zones around what is allocated."""

    edges: tuple[Tensor, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _FACTORIES or not made.numel() or 0 in made.stride() or made.is_meta:
            return made
        memory = _guarded(made)
        self.edges += (memory[:GUARD_ELEMENTS], memory[-GUARD_ELEMENTS:])
        return memory.as_strided(made.shape, made.stride(), GUARD_ELEMENTS)


def _edge(x: Tensor) -> Tensor:
    return x.new_full((GUARD_ELEMENTS,), math.nan if x.is_floating_point() else int(x.long().min()))


def _memory(x: Tensor) -> Tensor:
    """All of the memory that `x` is part of."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def _guarded(x: Tensor) -> Tensor:
    """A copy of all of the memory that `x` is part of, between guard zones: NaN, or the smallest number in it."""
    memory = _memory(x)
    return torch.cat([_edge(memory), memory, _edge(memory)])


def _failure(
    kernel: Any, recorded: Golden, inputs: Inputs, precision: Precision | None, out: Names, refuses: Names,
    false_alarm: float = TRACE_FALSE_POSITIVES,
) -> Failure | str:  # fmt: skip
    """What is wrong with the kernel on these inputs: first what it does to memory, then its results.

    If nothing is, what they count as: examples or refused.
    """
    tensors = _tensors(inputs)
    at = {name: x.untyped_storage().data_ptr() for name, x in tensors.items()}
    memory = {at[name]: _guarded(x) for name, x in tensors.items()}
    ours = {x.untyped_storage().data_ptr() for x in memory.values()}

    def views(of: Mapping[int, Tensor]) -> dict[Any, Tensor]:
        return {
            n: of[at[n]].as_strided(x.shape, x.stride(), x.storage_offset() + GUARD_ELEMENTS)
            for n, x in tensors.items()
        }

    given = views(memory)
    for name in out:
        with poisoned():
            given[name].copy_(torch.empty_like(given[name]))
    before, others = ({place: x.clone() for place, x in memory.items()} for _ in range(2))
    for place in {at[name] for name, x in tensors.items() if name not in out and x.is_floating_point()}:
        x = others[place]  # no result takes these for the same, be it without mean and scale
        x.copy_(x.double().square() + 1 + torch.arange(len(x), device=x.device) % 3)

    def run(start: Mapping[int, Tensor], refused: Names = ()) -> tuple[dict[str, Tensor], str]:
        """The results of a call, and what it did that it must not do."""
        for place, x in memory.items():
            x.copy_(start[place])
        try:
            with poisoned(), _Allocations() as allocated:
                value = _called(kernel, inputs | given)
        except refused:
            return {}, "refused"
        except Exception as why:
            return {}, f"raised {type(why).__name__}: {first_line(why)}"
        was = views(start)
        if out:
            copies = {name: given[name].clone() for name in out}
            found: Any = list(copies.values())
            value = copies if out[0] in recorded else found if len(out) > 1 else found[0]
            for name in out:
                given[name].copy_(was[name])
        if changed := [name for name, x in given.items() if not same_bits(x, was[name])]:
            return {}, f"changed its input {changed[0]!r}"
        outside = not all(same_bits(edge, _edge(edge[:1])) for edge in allocated.edges)
        outside = outside or not all(same_bits(x, start[place]) for place, x in memory.items())
        results = _results(recorded, value)
        if not results:
            return {}, f"gave {type(value).__name__} {value!r:.60}; expected a tensor, several, or a dict of them"
        return results, "wrote outside of what it was given and of what it allocated" * outside

    read = zip(recorded.inputs, (x for name, x in tensors.items() if name not in out), strict=False)
    failure = Failure(inputs, "", recorded, precision, dict(read))
    last = run(others, (Exception,))[0]
    for refused, so in ((refuses, ""), ((), "; so a second call on the same inputs")):
        kept = {name: x.clone() for name, x in last.items() if x.untyped_storage().data_ptr() not in ours}
        results, failure.words = run(before, refused)
        if not failure.words and not all(same_bits(last[name], x) for name, x in kept.items()):
            failure.words = "a later call changed the result of an earlier one"
        if failure.words:
            return "refused" if failure.words == "refused" else failure
        same = [x for name, x in kept.items() if name in results and same_bits(results[name], x)]
        if so and len(same) == len(results):
            break
        failure.observed |= {name: x.clone() for name, x in results.items()}
        failure.localisation = found = localise(
            failure.observed, recorded, precision=precision, false_alarm=false_alarm
        )
        if found.first is not None:
            finding = found.findings[found.first]
            looks = f"; as it looks, {finding.signature}" * bool(finding.signature)
            stale = any(x.numel() and x.min() < x.max() for x in same)  # one number all over says nothing
            so = so or "; the call before, on other inputs, gave the same" * stale
            failure.words = f"{found.first}: {finding.words}{looks}{so}"
            return failure
        last = results
    return "examples"


def _results(recorded: Golden, value: Any) -> dict[str, Tensor]:
    """What a kernel gave, by the golden's names: a dict's own, else as of a reference's result.

    What has the name of an input is what the reference gives under that name.
    """
    found = tree_map_only((np.ndarray, np.generic), lambda x: as_tensor("result", np.array(x)), value)  # a copy
    found = dict(tensors_of("" if isinstance(value, dict) else OUTPUT, found))
    if OUTPUT in found and OUTPUT not in recorded:
        return {next(name for name in recorded.names[::-1] if not name.startswith(GRADIENT)): found[OUTPUT]}
    later = {name: f"{name}#2" for name in recorded.inputs if f"{name}#2" in recorded}
    return {later.get(name, name): x for name, x in found.items()}


def _tensors(inputs: Mapping[Any, Any]) -> dict[Any, Tensor]:
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor)}


def _by_name(inputs: Any) -> Inputs:
    """Arguments by name, or by position."""
    several = inputs if isinstance(inputs, (Mapping, tuple, list)) else [inputs]
    return dict(several if isinstance(several, Mapping) else enumerate(several))


def _names(out: Any) -> Names:
    return (out,) if out is None or isinstance(out, (str, int, torch.dtype)) else tuple(out)


def _chosen(what: str, some: Iterable[str], known: Iterable[str]) -> Names:
    """Names of those known, one or several, in any case."""
    some, names = _names(some), {name.lower(): name for name in known}
    if not some or not {str(one).lower() for one in some} <= set(names):
        raise UsageError(f"{what}: expected some of {', '.join(names.values())}, got {some}")
    return tuple(names[one.lower()] for one in some)


def _called(function: Callable[..., Any], inputs: Mapping[Any, Any]) -> Any:
    named = {name: x for name, x in inputs.items() if isinstance(name, str)}
    return function(*(x for name, x in inputs.items() if name not in named), **named)


def _record(reference: Any, inputs: Mapping[Any, Any], out: tuple[Any, ...]) -> Golden:
    return _called(partial(golden, reference), {name: x for name, x in inputs.items() if name not in out})


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _imported(what: str, function: Any) -> tuple[str, str]:
    """Where the module of a function is found, and the line that imports it; a script has its file's name."""
    of, name = sys.modules.get(getattr(function, "__module__", "")), getattr(function, "__name__", "")
    path = getattr(of, "__file__", None) or ""
    module = getattr(getattr(of, "__spec__", None), "name", Path(path).stem) if path else ""
    if not all(map(str.isidentifier, module.split("."))) or getattr(of, name, None) is not function:
        raise UsageError(
            f"{what}: {_name(function)} cannot be imported; expected a function at the top level of a file"
        )
    root = Path(path).resolve().parents[module.count(".") + (Path(path).stem == "__init__")]
    return str(root), f"from {module} import {name} as {what}  # noqa: E402"


def _digest(x: Tensor) -> str:
    """Of all of a tensor's memory, and how it lies there."""
    return f"{x.dtype} {x.shape} {x.stride()} {x.storage_offset()} {digest(_memory(x.detach()))}"


def _literal(x: Any) -> str:
    """The text that gives a tensor, as it lies in memory."""
    if not isinstance(x, Tensor):
        return repr(x)
    where = f", device={str(x.device)!r}" * x.is_cuda
    if x.is_contiguous() and not x.storage_offset():
        return f"torch.tensor({x.tolist()}, dtype={x.dtype}{where})"
    lying = f"as_strided({tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"
    return f"torch.tensor({_memory(x.detach()).tolist()}, dtype={x.dtype}{where}).{lying}"
