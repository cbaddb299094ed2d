"""Fuzzing: the example, then what is sampled, until a kernel fails; and the failure is made small and plain.

Hypothesis samples sizes, memory layouts, dtypes and kinds of values. A case is checked as any other: the golden is
recorded on its inputs, and the kernel may differ from it by what the declared precision allows.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import torch
from torch import Tensor

from whywrong import child
from whywrong.checking.findings import Localisation
from whywrong.checking.guarded import Span, rounded, span_in_words
from whywrong.checking.localise import TRACE_FALSE_POSITIVES, localise
from whywrong.child import function_name, imported
from whywrong.comparing.precision import Precision, dtype_of, guess, name_of
from whywrong.console import Progress
from whywrong.errors import LOG, UsageError, check_number, collected, first_line, needs
from whywrong.explaining.search import CAUSE, Cause, Explanation, explain
from whywrong.fuzzing.inputs import (
    KINDS_OF_VALUES,
    LAYOUTS,
    SAMPLED_LENGTHS,
    Case,
    Drawing,
    Inputs,
    Names,
    by_name,
    literal,
    sample,
    tensors,
    without_arrays,
)
from whywrong.fuzzing.running import LOST, Call, Kernel, called, isolated, results
from whywrong.process_state import process_wide, temporarily
from whywrong.recording.golden import Golden, golden
from whywrong.recording.work import Work, work_of
from whywrong.tables import digits, first_of, number, printable, to_stderr

__all__ = ["LAYOUTS", "SAMPLED_LENGTHS", "Failure", "FuzzReport", "check", "fuzz", "sample"]

ENOUGH = 30
"""Cases under which a kernel was hardly searched."""

SHRINKING_CASES, SHRINKING_SECONDS = 100, 30.0
"""What may be tried to make a failure smaller, within the time that the fuzzing has."""

HANGING_SECONDS = 30.0
"""How long the calls of one case may take, and those on the example four times; a quarter of `seconds` where that is
less, but 5 s in any case. Time that they wait for a core is not counted."""

HINTS = {
    "IndexError": "indices below a size: forms={NAME: 'below SIZE'}",
    "RuntimeError: index ": "indices below a size: forms={NAME: 'below SIZE'}",
    "RuntimeError": "sizes that fit, or a multiple: sizes={NAME: ('n', ('m', 4))}",
    "ValueError": "where=, of which it says no",
}
"""What may be missing where a reference raises such an error on what was sampled."""


@dataclass(repr=False)
class Failure:
    """A case that fails. `inputs` are what the kernel was given, by name or position; `words` say what is wrong.

    `observed` has the inputs and the kernel's results by the golden's names, so that they can be explained with
    `golden` and `precision`; `again` those of the other call on these inputs, if that gave other bits.
    `localisation` is None where there is nothing to check. `informative` checks the kernel on the example, and on the
    largest inputs on which it failed, with normal values. `strided`: it is correct on contiguous copies of these
    inputs, which is a failure only of a kernel that promises strides. `reads`: what outside of an input changes its
    results, from which element to which, counted in memory from the input's first.
    """

    inputs: Inputs
    words: str
    golden: Golden
    precision: Precision | None
    observed: dict[str, Tensor] = field(default_factory=dict)
    again: dict[str, Tensor] = field(default_factory=dict)
    localisation: Localisation | None = None
    informative: Callable[[], Iterable[Failure | str]] = tuple
    strided: bool = False
    reads: dict[Any, Span] = field(default_factory=dict)
    called: dict[Any, str] = field(default_factory=dict)
    """The reference's parameters by their positions, where inputs have no names."""

    def explain(self, seconds: float = 20.0) -> Explanation:
        """Why, by :func:`whywrong.explain`: the smallest inputs show little, so on `informative` where these fail too.

        A kernel whose results are made of what lies outside of an input reads that; one that is correct on contiguous
        copies ignores strides. Raises UsageError where there are no wrong numbers to explain.
        """
        if self.localisation is not None and (self.reads or self.strided):
            says = [("layout", "strides are ignored: on contiguous copies of its inputs it is correct")]
            causes = [Cause(*one, "", 0.0) for one in (says if self.strided else self._memory())]
            return Explanation(self.localisation.first, CAUSE, causes, report=self.localisation)
        for case in chain(self.informative(), [self]):
            if isinstance(case, Failure) and case.localisation is not None and case.localisation.first is not None:
                calls = [case.observed, *[case.again] * bool(case.again)]
                found = explain(calls, case.golden, precision=case.precision, seconds=seconds)
                found.notes += [f"looked at on these inputs: {case.given}"] * (case is not self)
                return found
        raise UsageError(f"failure: {self.words}; there are no wrong numbers to explain")

    def _memory(self) -> Iterator[tuple[str, str]]:
        """What is read outside of inputs, and which length was rounded up, on all inputs alike."""
        cases = [case for case in chain(self.informative(), [self]) if isinstance(case, Failure)]
        for name in self.reads:
            spans = [(case.inputs[name], case.reads[name]) for case in cases if name in case.reads]
            same = sorted(set.intersection(*(rounded(*one) for one in spans)))[:1]
            longer = [f", as if dimension {axis} were rounded up to a multiple of {k}" for axis, k in same]
            yield "memory", "".join([span_in_words(name, *spans[0]), *longer])

    @property
    def given(self) -> str:
        """The inputs in words."""
        by_name = tensors(self.inputs).items()
        lying = {name: f", strides {x.stride()}" * (not x.is_contiguous()) for name, x in by_name}
        said = {name: self.called.get(name, name) for name in self.inputs}
        return "; ".join(f"{said[name]}: {name_of(x.dtype)} {list(x.shape)}{lying[name]}" for name, x in by_name)

    @property
    def numbers(self) -> str:
        """Where it is wrong most: what the kernel gave, for what, and how far it may be off there."""
        if self.localisation is None or self.localisation.first is None:
            return ""
        finding = self.localisation.detailed.findings[self.localisation.first]
        worst = finding.own or finding.total
        if worst is None or worst.worst_index is None:
            return ""
        observed, expected = float(worst.worst_observed or 0.0), float(worst.worst_golden or 0.0)
        text = f"at {worst.worst_index}: {digits(observed, 9)} for {digits(expected, 9)}"
        if math.isnan(expected):
            return f"{text}, which the reference gives: not a number"
        share = float(finding.elements.share[worst.worst_index]) if finding.elements else 0.0
        return text + f", tolerance {number(abs(observed - expected) / share)}" * (0.0 < share < math.inf)

    def __repr__(self) -> str:
        return printable("\n  ".join([self.words, *[self.numbers] * bool(self.numbers), *self.given.split("; ")]))


@dataclass(repr=False)
class FuzzReport:
    """What :func:`fuzz` found.

    `examples` were tried, up to the first failure; besides, the kernel `refused` some, and some were `discarded` since
    the reference fails on them, which `reasons` counts by what it raised, or makes a tensor or results of more than
    four times `most` elements, or takes too long. `made` has the text that makes each input of the failure, by its
    name, but for an example's and a strategy's tensors, which :meth:`script` writes. `ended` says why no more were
    tried, `ranges` between which sizes, and `notes` what became of the example.
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
    reasons: Counter[str] = field(default_factory=Counter)
    ranges: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    ended: str = ""
    notes: list[str] = field(default_factory=list)
    arrays: Names = ()

    @property
    def found(self) -> bool | None:
        """Whether a failure was found; None where none was, and the kernel was hardly searched."""
        return True if self.failure else None if self.hardly_searched else False

    @property
    def passed(self) -> bool:
        """Whether no failure was found, and the kernel was not hardly searched."""
        return self.found is False

    @property
    def hardly_searched(self) -> bool:
        """Whether fewer than ENOUGH cases were tried, or more were discarded than tried."""
        return self.failure is None and (self.examples < ENOUGH or self.discarded > self.examples)

    @property
    def counts(self) -> str:
        """How many cases there were, in words."""
        return f"{self.examples} tried, {self.refused} refused, {self.discarded} discarded"

    def __repr__(self) -> str:
        none = "no failure found" + ", but it was hardly searched" * self.hardly_searched
        lines = [
            f"{function_name(self.kernel)}: {self.failure or (none if self.examples else 'nothing was tried')}",
            f"{self.counts}; seed {self.seed}",
        ]
        sizes = [f"{name} {a} to {b} ({own})" for name, (a, b, own) in self.ranges.items() if b]
        if sizes and not self.failure:
            lines.append(f"sizes (your example's): {', '.join(sizes)}")
        lines += [f"ended: {self.ended}"] * (self.failure is None) + self.notes
        for why, count in self.reasons.most_common(1):
            hint = next((f" (missing, perhaps: {hint})" for name, hint in HINTS.items() if why.startswith(name)), "")
            lines.append(f"discarded, {count} of them: {why}{hint}")
        return printable("\n  ".join(lines))

    def as_json(self) -> dict[str, Any]:
        """What `whywrong fuzz --json` prints."""
        names = ("examples", "refused", "discarded", "seed", "ended", "notes", "reasons", "ranges")
        data: dict[str, Any] = {"kernel": function_name(self.kernel), "found": self.found, "passed": self.passed}
        data |= {name: getattr(self, name) for name in names}
        failed = self.failure
        return data | ({"failure": failed.words, "numbers": failed.numbers, "inputs": failed.given} if failed else {})

    def script(self) -> str:
        """A test for pytest that also runs by itself, and then exits with 1 while the smallest failure is there.

        It imports kernel and reference by their names; of a script, what is not below ``if __name__ == "__main__":``
        runs again then. Raises UsageError where there is no failure, and for what cannot be imported: a lambda, a
        function within another, one that was typed in.
        """
        if self.failure is None:
            raise UsageError("fuzz: found no failure; expected one to write down")
        imports = [imported("kernel", self.kernel), imported("reference", self.reference)]
        made = {name: self.made.get(name) or literal(x) for name, x in self.failure.inputs.items()}
        made |= {name: f"{made[name]}.numpy()" for name in self.arrays}
        test = "test_" + re.sub(r"\W+", "_", function_name(self.kernel)).strip("_").removeprefix("test_") + "()"
        title = f'"""{function_name(self.kernel)}: {first_line(self.failure.words)}"""'
        lines = [title, "", "import os", "import sys", "from math import inf, nan", "", "import torch", ""]
        lines += ["from whywrong import Precision", "from whywrong.fuzzing.fuzz import check, sample"]
        lines += ["", f"sys.path[:0] = {sorted({r for r, _ in imports})}", "if not torch.cuda.is_available():"]
        lines += ['    os.environ["TRITON_INTERPRET"] = "1"  # before Triton\'s kernels are imported']
        lines += [*(text for _, text in imports), "", ""]
        lines += [f"def {test}:", "    inputs = {}", *(f"    inputs[{n!r}] = {text}" for n, text in made.items())]
        how = f"precision={self.failure.precision!r}, out={self.out}"
        lines += [f"    failure = check(kernel, reference, inputs, {how})"]
        lines += ["    assert failure is None, failure", "", "", f'if __name__ == "__main__":\n    {test}', ""]
        return "\n".join(lines)


def fuzz(
    kernel: Callable[..., Any],
    reference: Any,
    inputs: Any,
    *,
    precision: Precision | None = None,
    examples: int = 50,
    seconds: float = math.inf,
    seed: int = 0,
    most: int = 0,
    sizes: Any = None,
    forms: Any = None,
    where: Callable[..., Any] | None = None,
    out: Any = (),
    dtypes: Iterable[torch.dtype] = (),
    layouts: Iterable[str] = LAYOUTS,
    values: Iterable[str] = tuple(KINDS_OF_VALUES)[:-3],
    refuses: tuple[type[Exception], ...] = (ValueError, AssertionError, NotImplementedError),
    isolate: bool | None = None,
    progress: Callable[[str], None] = to_stderr,
) -> FuzzReport:
    """Try the example, then sample inputs, until `kernel` differs from `reference` by more than `precision` allows.

    `inputs` is an example, a tuple or a dict of tensors, NumPy arrays and other arguments, or a Hypothesis strategy
    that gives such. The example is the first case; then what is sampled lies contiguous, in half of the cases, and
    after that as `layouts` say. A failure is shrunk. From an example: axes of equal length are one size and are sampled
    together, those of length 1 stay, and a ratio of sizes stays, as of 48 to 24 in two tensors' last axes. Whole
    numbers and truth values stay within the range that it shows, and floating-point numbers are not negative where it
    has none; tensors without axes, and what is no tensor, stay as they are.

    What is required of inputs: `sizes`, names, multiples of these and fixed lengths for an argument,
    ``{"x": ("rows", ("half", 2)), "gain": (64,)}``; `forms`, some of :data:`FORMS`, as ``{"p": "rows sum to 1",
    "table": "unique, below pages", "starts": "offsets to rows"}``; `where`, a function of arguments by their names,
    ``lambda q, k: len(q) <= len(k)``. `dtypes` are sampled for floating-point tensors, `layouts` of :data:`LAYOUTS`
    ("contiguous" for a kernel that promises no strides), `values` of :data:`KINDS_OF_VALUES` (NaN and infinite ones
    only where they are asked for); `most` is how many elements all inputs may have together: by default (0) 2^17, but
    2^9 where Triton is imported and interprets (TRITON_INTERPRET), some ms a program, and no strategy samples, and less
    where the reference loops over a size and takes long. The product of all different lengths is 64 times as much at
    most. Two inputs of the same kind may be one tensor.

    `kernel` takes the arguments of `reference` and gives a tensor, a tuple, or a dict by the golden's names, or it
    writes into those of its arguments that `out` names (which the reference is not given). Each case runs in poisoned
    memory between guard zones: once on other values in the same place, then twice. It fails if a result is beyond what
    is allowed, if anything but the results changes, if a later call changes the result of an earlier one, and if it
    raises: what is among `refuses` is not a failure, and neither is a case that the reference fails on. Where the
    reference gives NaN of inputs without one, as for a row that is masked whole, or has no finite number in the inputs'
    own dtype, anything is right; of denormal inputs, denormal numbers may be zero.

    With `isolate`, by default on Linux without a GPU, the kernel runs in a process that was forked from this one: if it
    dies, hangs or forks, that is a failure, and what it does to this process's objects is not seen here. There, in one
    more call, each input ends where nothing may be touched behind it, so that a read without an effect is a failure
    too. Otherwise a kernel that reads or writes further than GUARD_ELEMENTS elements outside may end this process.

    The same seed samples the same cases, up to `examples` of them. All takes `seconds` at most, and shrinking 30 s of
    these; only a reference, and a kernel in this process, are not cut off. From two seconds on a terminal's standard
    error says how far it is; elsewhere `progress` is called with a line every ten seconds. Fewer than 30 cases, or more
    discarded than tried: it was hardly searched, and `found` is None. An interrupt ends it with what was found. Nothing
    is written: :meth:`FuzzReport.script` gives the text of a test.

    While it runs, other threads see that Hypothesis's home directory is a temporary one, and that `random` and
    `numpy.random` are seeded while a case is run, which Hypothesis does; all are afterwards as they were. Two threads
    that fuzz take turns.

    Raises UsageError for arguments of another kind, where no input sampled suits the reference, and where
    Hypothesis is not installed.
    """
    with needs("whywrong.fuzz"):
        from hypothesis import strategies
    for name, value in {"examples": examples, "seed": seed, "most": most, "seconds": seconds}.items():
        check_number(name, value, least=int(name == "examples"), whole=name != "seconds")
    if wrong := [kind for kind in _names(refuses) if not (isinstance(kind, type) and issubclass(kind, Exception))]:
        raise UsageError(f"refuses: expected exceptions, as (ValueError,), got {wrong[0]!r}")
    out, layouts, values = _names(out), _chosen("layouts", layouts, LAYOUTS), _chosen("values", values, KINDS_OF_VALUES)
    dtypes = tuple(dtype_of(Precision(one).storage) for one in _names(dtypes))
    if wrong := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise UsageError(f"dtypes: expected floating-point ones, got {name_of(wrong[0])!r}")
    report = FuzzReport(kernel, reference, out, seed)
    strategy = isinstance(inputs, strategies.SearchStrategy)
    example, report.arrays = ({}, ()) if strategy else without_arrays(by_name(inputs))
    fixed = {name: x for name, x in example.items() if name not in tensors(example)}
    alone = isolated(isolate, example, kernel)
    asked = None if alone == "fresh" else reference  # which need not be one that can be imported
    process = Kernel(kernel, out, _names(refuses), report.arrays, alone, fixed, asked)
    interpreted = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET", "0") != "0"
    default = 1 << (17 if strategy or not interpreted else 9)
    search = _Search(report, process, precision, seconds, examples)
    search.most, search.progress = most or default, Progress(progress)
    for what in (kernel, reference):
        try:
            imported("", what)
        except UsageError:
            progress(f"fuzz: {function_name(what)} is no function at the top level of a file: no .script() imports it")
    try:
        if strategy:
            search.where, drawing = _where(where, {}), None
            drawn = [inputs.map(_case)]
        else:
            parameters = _parameters(reference, [name for name in example if name not in out])
            search.where = _where(where, parameters)
            axes, wanted = ({parameters.get(n, n): x for n, x in by_name(w or {}).items()} for w in (sizes, forms))
            drawing = Drawing(example, out, axes, wanted, search.where)
            search.begin(drawing)
            drawn = [drawing.cases(strategies, dtypes, some, values, search.most) for some in (layouts[:1], layouts)]
        search.run(drawn[: len(layouts)], seed, drawing)
    except KeyboardInterrupt:
        report.ended = "interrupted"
    finally:
        process.close()
        search.progress.close()
    if report.failure is not None:
        names = [name for name in report.failure.inputs if name not in out]
        report.failure.called = {n: p for p, n in _parameters(reference, names).items() if isinstance(p, str)}
    if report.discarded and not report.examples + report.refused:
        raise UsageError(f"reference: none of {report.discarded} inputs suits {function_name(reference)}: {search.why}")
    return report


def check(
    kernel: Any, reference: Any, inputs: Any, *, precision: Any = None, out: Any = (), isolate: bool | None = None
) -> Failure | None:
    """Check `kernel` on `inputs` alone, as :func:`fuzz` does, which says what the arguments are; None if it passes.

    Whole numbers as keys of `inputs` are positions.
    """
    (inputs, arrays), out = without_arrays(by_name(inputs)), _names(out)
    process = Kernel(kernel, out, (), arrays, isolated(isolate, inputs, kernel))
    try:
        recorded = _record(reference, inputs, out)
        search = _Search(FuzzReport(kernel, reference, out, 0), process, precision, math.inf, 1)
        found = search.judged(process(inputs, recorded, math.inf), inputs, recorded)
    finally:
        process.close()
    return found if isinstance(found, Failure) else None


class _EnoughError(BaseException):
    """Ends Hypothesis's search, which takes an Exception for a failure."""


class _Search:
    """One fuzzing: what was tried, with which outcome, and how long a case may take.

    `_rate` is the seconds that a check takes for a unit of the reference's work, by the one with most work so far.
    """

    where: Callable[[Inputs], Any]

    def __init__(self, report: FuzzReport, kernel: Kernel, precision: Any, seconds: float, examples: int) -> None:
        self.report, self.why, self.most, self.progress = report, "", 0, Progress()
        self._kernel, self._precision, self._seconds, self._lost = kernel, precision, seconds, False
        self._examples = self._until = examples
        self._begun = time.monotonic()
        self._end = self._begun + seconds
        self._outcomes: dict[str, Failure | str] = {}
        self._rate, self._longest, self._after = 1e-3, 0.0, 0
        self._example, self._largest, self._failed = Case({}), Case({}), Case({})
        self._sizes, self._passed = dict[str, str](), tuple[Any, ...]()

    def begin(self, drawing: Drawing) -> None:
        """Try the example. Raises what the reference raises on it."""
        self._example, out, report = drawing.example, self.report.out, self.report
        self._sizes = {name: drawing.words(name) for name in drawing.free}
        report.ranges = {self._sizes[name]: (0, 0, length) for name, length in self._example.lengths.items()}
        try:
            recorded = _record(report.reference, self._example.inputs, out)
        except TypeError as error:
            names = ", ".join(str(name) for name in self._example.inputs if name not in out)
            wanted = f"expected one that takes {names or 'nothing'}" + f" (not {', '.join(out)}: out=)" * bool(out)
            raise UsageError(f"reference: {first_line(error)}; {wanted}") from error
        found: Failure | str | None = None
        with suppress(_EnoughError):
            found = self.tried(self._example, recorded)
        found = report.failure or found
        if isinstance(found, Failure) or found != "examples":
            words = {"refused": "the kernel refuses", "discarded": f"was discarded, since {self.why}"}
            what = words.get(str(found), "fails" if found else "was not tried to its end")
            report.notes.append(f"your example {what}")
        if self._lost:
            return
        if (elements := self._example.elements) > self.most:
            report.notes.append(f"your example has {elements} elements, what is sampled {self.most} at most (most=)")
        both = drawing.ones, drawing.example.inputs
        small, there = (Work().without_numbers(*self._call(one)) for one in both)
        base = there.count if there.count < 2 * small.count else 0  # else it loops over a size
        if there.work > base:
            times = (self._share() / self._rate - base) / (there.work - base)
            self.most = min(self.most, max(64, int(elements * times)))

    def run(self, drawn: list[Any], seed: int, drawing: Drawing | None = None) -> None:
        """Search each of these strategies; then say what the smallest failure is."""
        import hypothesis
        import hypothesis.configuration as config
        from hypothesis import Phase, settings

        phases = Phase.generate, Phase.shrink
        how = settings(max_examples=5 * self._examples, database=None, deadline=None, phases=phases)
        home = partial(temporarily, lambda: vars(config)["__hypothesis_home_directory"], config.set_hypothesis_home_dir)
        with tempfile.TemporaryDirectory() as folder, process_wide(home(folder)):
            # finds numbers in the sources of all modules, and without a home of its own it writes them to .hypothesis
            first = self.report.failure
            for part, strategy in enumerate(drawn, 1):
                self._until, self.report.ended = self._examples * part // len(drawn), ""
                if self.report.failure is first and not self._lost:
                    with suppress(hypothesis.errors.NoSuchExample, hypothesis.errors.Unsatisfiable, _EnoughError):
                        hypothesis.find(strategy, self._fails, settings=how, random=Random(seed))
        if self.report.failure:
            if not self._lost:
                self._finish(self.report.failure, drawing)
        elif self._passed and self._kernel.isolated == "fork" and self.report.kernel is not self.report.reference:
            seconds = min(5.0, max(1.0, self._end - time.monotonic()))
            if self._kernel.answer("reference", self._passed[0], self._passed[1], seconds):
                self.report.notes.append("the kernel calls the reference, whose numbers are right whatever it does")
        self.report.ended = self.report.ended or "what is sampled repeats itself"

    def _fails(self, case: Case) -> bool:
        from hypothesis import assume

        assume(self.where(case.inputs))
        found = self.tried(case)
        assume(found not in ("refused", "discarded"))
        return isinstance(found, Failure)

    def tried(self, case: Case, recorded: Golden | None = None) -> Failure | str | None:
        """What becomes of a case; None where it is not tried. Raises _EnoughError where no more is to be tried."""
        report, now = self.report, time.monotonic()
        if (key := case.key) not in self._outcomes:
            if report.failure is None:
                ends = {f"{self._seconds:g} s are over": now > self._end}
                ends |= {f"{report.examples} cases, as asked": report.examples >= self._until}
                ends |= {"hardly any is allowed": report.discarded + report.refused > 10 * self._until}
                for report.ended in (words for words, true in ends.items() if true):
                    raise _EnoughError
            if report.failure is not None and (now > self._end or self._after >= SHRINKING_CASES):
                return None
            smaller = f", then {self._after} to make the failure smaller" * (report.failure is not None)
            self.progress(f"fuzz: {report.counts}{smaller} after {now - self._begun:.0f} s")
            self._after += report.failure is not None
            found = self._outcomes[key] = self.outcome(case.inputs, recorded)
            if report.failure is None:
                vars(report)[found if isinstance(found, str) else "examples"] += 1
                for name, length in case.lengths.items() if found != "discarded" and case is not self._example else ():
                    low, high, own = report.ranges[self._sizes[name]]
                    report.ranges[self._sizes[name]] = min(low or length, length), max(high, length), own
        found = self._outcomes[key]
        if isinstance(found, Failure):
            if report.failure is None:
                self._end = min(self._end, time.monotonic() + SHRINKING_SECONDS)
            report.failure, report.made, self._failed = found, case.made, case
            if LOST in found.words and not self._kernel.isolated:
                report.notes.append("so nothing smaller was tried; isolate=True gives the kernel a process of its own")
                self._lost = True
                raise _EnoughError
            self._largest = max(self._largest, Case(case.inputs | case.normal), key=lambda one: one.elements)
            found.informative = self._informative
        return found

    def _informative(self) -> Iterator[Failure | str]:
        self._end = math.inf
        try:
            if self._example.inputs:
                recorded = _record(self.report.reference, self._example.inputs, self.report.out)
                yield self._reading(self.outcome(self._example.inputs, recorded))
            yield self._reading(self.outcome(self._largest.inputs))
        finally:
            self._kernel.close()

    def _reading(self, found: Failure | str) -> Failure | str:
        """With what is read outside of the inputs, where numbers are wrong or something is touched there."""
        if isinstance(found, Failure) and found.localisation is not None:
            found.reads = self._kernel.answer("reads", found.inputs, found.golden, HANGING_SECONDS) or {}
        return found

    def outcome(self, inputs: Inputs, recorded: Golden | None = None) -> Failure | str:
        """What is wrong with the kernel on these inputs, or what they count as."""
        begun, report = time.monotonic(), self.report
        bounds = (self._share() / self._rate, 4 * self.most) if recorded is None else (math.inf, math.inf)
        self.why, made = "", Work(4 * bounds[0], bounds[1])
        try:
            if recorded is None:
                self.why = Work(*bounds).without_numbers(*self._call(inputs)).why
            if recorded is None and not self.why:
                with made:
                    recorded = _record(report.reference, inputs, report.out)
        except Exception as error:
            self.why = made.why or child.in_words(error)
            LOG.debug("discarded, since the reference raised %s", self.why, exc_info=True)
        if recorded is not None and sum(recorded[name].numel() for name in recorded.names) > bounds[1]:
            self.why = Work.LARGE.format(4 * self.most)
        if self.why or recorded is None:
            if report.failure is None:  # and not while it is made smaller, which counts nothing
                report.reasons[self.why] += 1
            return "discarded"
        longest = HANGING_SECONDS * (4 if inputs is self._example.inputs else 1)
        limit, left = min(longest, max(5.0, self._seconds / 4)), (self._end - time.monotonic()) / 2
        try:
            calls = self._kernel(inputs, recorded, min(limit, max(left, 0.1)))
        except child.TimedOutError as error:
            calls = [Call(words=f"hangs: it {error}")]
            if left < limit:
                case = Failure(inputs, "", recorded, None).given
                report.ended = f"{self._seconds:g} s are over; a case {error}: {case}"
                raise _EnoughError from None
        found = self.judged(calls, inputs, recorded)
        self._passed = (inputs, recorded) if found == "examples" else self._passed
        work = work_of(recorded.program)
        if work >= self._longest:
            self._longest, self._rate = work, max(1e-6, (time.monotonic() - begun) / (1000.0 + work))
        return found

    def judged(self, calls: list[Call], inputs: Inputs, recorded: Golden) -> Failure | str:
        """What is wrong with the kernel's calls: first what they do to memory, then their results.

        If nothing is, what they count as: examples or refused.
        """
        if LOST in calls[-1].words:  # nor can the inputs be read
            return Failure(inputs, calls[-1].words, recorded, self._precision)
        reads = (x for name, x in tensors(inputs).items() if name not in self.report.out)
        given, precision = dict(zip(recorded.inputs, reads, strict=False)), _declared(self._precision, inputs)
        failure, touched = Failure(inputs, "", recorded, precision), calls[0].touched
        unchecked: list[str] = []
        chance = TRACE_FALSE_POSITIVES / (2 * self._examples)  # two calls
        for k, call in enumerate(calls):
            failure.words = call.words
            if call.words:
                return "refused" if call.words == "refused" else failure
            failure.observed = given | self._defined(call.results, inputs, recorded)
            found = localise(failure.observed, recorded, precision=precision, false_alarm=chance)
            failure.localisation = found
            if found.first is not None:
                same = (call.results[name] for name in call.same)
                stale = not k and any(x.numel() and x.min() < x.max() for x in same)  # one number says nothing
                words = ["the call before, on other inputs, gave the same"] * stale
                for other in (one for one in calls[1 - k : 2 - k] if not one.words):
                    failure.again = given | self._defined(other.results, inputs, recorded)
                    words += _apart(failure.observed[found.first], failure.again.get(found.first))
                finding = found.findings[found.first]
                words = [f"{found.first}: {finding.words}", *finding.touched, *words, *[touched] * bool(touched)]
                failure.words = "; ".join(words)
                return failure
            unchecked += [f"{name}: {found.findings[name].words}" for name in found.unchecked]
        failure.words = touched
        if touched or not unchecked:
            return failure if touched else "examples"
        self.why = first_of(unchecked)
        self.report.reasons[self.why] += self.report.failure is None
        return "discarded"

    def _defined(self, found: dict[str, Tensor], inputs: Inputs, recorded: Golden) -> dict[str, Tensor]:
        """Results, with the golden's number where anything is right: where the reference gives NaN of inputs without
        one, or a number that is not finite there, or in the inputs' own dtypes, and not the same in both, as of areas
        that underflow or are 0."""
        numbers = {name: x for name, x in found.items() if x.is_floating_point() and name in recorded}
        numbers = {name: x for name, x in numbers.items() if x.shape == recorded[name].shape}
        exact = {name: recorded[name].to(x.device, torch.float64) for name, x in numbers.items()}
        plain = dict[str, Tensor]()
        if any(bool(_unlike(x.double(), exact[name]).any()) for name, x in numbers.items()):
            with collected([], "the reference in the inputs' own dtypes"):
                run, copies = self._call({n: x.clone() if isinstance(x, Tensor) else x for n, x in inputs.items()})
                plain = results(recorded.names, recorded.inputs, run(copies))
        given = any(bool(x.isnan().any()) for x in tensors(inputs).values())
        for name, x in numbers.items():
            nan = exact[name].isnan()
            undefined = torch.where(nan, not given, _unlike(plain.get(name, exact[name]).double(), exact[name]))
            found[name] = torch.where(undefined, exact[name], x.double()).to(x.dtype) if bool(undefined.any()) else x
        return found

    def _call(self, inputs: Inputs) -> tuple[Callable[[Inputs], Any], Inputs]:
        """The reference as a function of its inputs alone."""
        return partial(called, self.report.reference), {n: x for n, x in inputs.items() if n not in self.report.out}

    def _share(self) -> float:
        """The seconds that a case may take: an eighth of those left, or all to make a failure smaller, which is
        slower to judge than what passes; ten at most."""
        return max(0.1, min((self._end - time.monotonic()) / (1.0 if self.report.failure else 8.0), 10.0))

    def _finish(self, found: Failure, drawing: Drawing | None) -> None:
        """Where only the example fails, cut it; and ask whether the kernel is right on contiguous copies."""
        report, late = self.report, time.monotonic() > self._end and not self._kernel.isolated
        with suppress(_EnoughError):
            example = self._outcomes.get(self._example.key)
            if drawing and isinstance(example, Failure) and self._example.elements <= self._failed.elements:
                report.failure, report.made = example, self._example.made
                self._failed, self._after = self._example, 0
                for name in drawing.free:
                    any(isinstance(self.tried(smaller), Failure) for smaller in drawing.cut(self._failed, name))
            found = report.failure or found
            self._end = max(self._end, time.monotonic() + 5.0)
            copies = {name: x.contiguous() for name, x in tensors(found.inputs).items() if not x.is_contiguous()}
            found.strided = bool(copies) and self.outcome(found.inputs | copies) == "examples"
        if found.strided:
            asked = "right on contiguous copies of its inputs; does your kernel promise strides?"
            found.words += f"; {asked} Else layouts='contiguous'"
        elif not late:
            self._reading(found)
            read = [span_in_words(name, found.inputs[name], span) for name, span in found.reads.items()]
            found.words = "; ".join([found.words, *read])


def _unlike(x: Tensor, exact: Tensor) -> Tensor:
    """Where two differ, and one of them is not finite."""
    return (x != exact) & ~(x.isfinite() & exact.isfinite())


def _apart(one: Tensor, other: Tensor | None) -> list[str]:
    """In how many elements two results differ, in words."""
    if other is None or one.shape != other.shape:
        return []
    count = int(((one != other) & ~(one.isnan() & other.isnan())).sum())
    return [f"two calls on the same inputs differ in {count} of {one.numel()} elements"] * bool(count)


def _declared(precision: Precision | None, inputs: Inputs) -> Precision | None:
    """What is promised: of denormal inputs, that denormal numbers may be zero."""
    floats = [x for x in tensors(inputs).values() if x.is_floating_point()]
    if any(bool(((x != 0) & (x.double().abs() < torch.finfo(x.dtype).tiny)).any()) for x in floats):
        return replace(precision or guess([x.dtype for x in floats]), flush=True)
    return precision


def _record(reference: Any, inputs: Inputs, out: Names) -> Golden:
    return called(partial(golden, reference), {name: x for name, x in inputs.items() if name not in out})


def _case(inputs: Any) -> Case:
    """Of a strategy, which gives arguments by name or position."""
    inputs = by_name(inputs)
    return Case(inputs, {name: repr(x) for name, x in inputs.items() if name not in tensors(inputs)})


def _parameters(reference: Any, taken: list[Any]) -> dict[Any, Any]:
    """Arguments by the names of a reference's parameters, where it has a signature."""
    with suppress(TypeError, ValueError):
        return dict(zip(inspect.signature(reference).parameters, taken, strict=False)) | {name: name for name in taken}
    return {name: name for name in taken}


def _where(where: Callable[..., Any] | None, parameters: Mapping[Any, Any]) -> Callable[[Inputs], Any]:
    """A user's condition as one on all inputs."""
    names = list(inspect.signature(where).parameters) if where else []
    if unknown := [name for name in names if parameters and name not in parameters]:
        raise UsageError(f"where: expected arguments among {', '.join(map(str, parameters))}, got {unknown[0]!r}")

    def holds(inputs: Inputs) -> bool:
        return where is None or bool(where(**{name: inputs[parameters.get(name, name)] for name in names}))

    return holds


def _names(out: Any) -> Names:
    return (out,) if out is None or isinstance(out, (str, int, torch.dtype)) else tuple(out)


def _chosen(what: str, some: Iterable[str], known: Iterable[str]) -> Names:
    """Names of those known, one or several, in any case."""
    some, names = _names(some), {name.lower(): name for name in known}
    if not some or not {str(one).lower() for one in some} <= set(names):
        raise UsageError(f"{what}: expected some of {', '.join(names.values())}, got {some}")
    return tuple(names[one.lower()] for one in some)
