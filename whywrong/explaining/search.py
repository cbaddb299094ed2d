"""Why a step is wrong: the mutation of the recorded reference, of many tried, that reproduces the numbers observed."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from html import escape
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from whywrong.checking.alignment import renamed
from whywrong.checking.findings import Localisation, plain
from whywrong.checking.localise import TRACE_FALSE_POSITIVES, few_threads, localise
from whywrong.checking.with_program import bounded
from whywrong.comparing.precision import INTEGERS, Precision, half_ulp, name_of, representable
from whywrong.comparing.signature import along_each
from whywrong.errors import UsageError, check_number, collected
from whywrong.explaining.mutations import (
    THRESHOLDS,
    Context,
    Mutation,
    argument,
    edit_results,
    is_number,
    kind_of_number,
    mutations,
    numbered,
    summed_over,
    zeroed,
)
from whywrong.explaining.part import Edit, Part
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.program import INPUT, Node, Ref
from whywrong.recording.steps import Trace, as_trace
from whywrong.tables import Table, digits, printable, to_stderr

Tensor = torch.Tensor

CAUSE, UNDECIDABLE, NONE = "cause", "undecidable", "none of these"

NARROWER_PRECISIONS: list[dict[str, Any]] = [{"products": name} for name in ("tf32", "bfloat16", "float16")]
NARROWER_PRECISIONS += [{"accumulate": name} for name in ("float16", "bfloat16")]
NARROWER_PRECISIONS += [{"accumulate": name, "products": name} for name in ("bfloat16", "float16")]
NARROWER_PRECISIONS += [{"storage": name, "eager": True} for name in ("float16", "bfloat16")]
"""Declarations of fewer digits, the widest first."""

UNCHANGED_KEPT = 8
"""Mutations of a kind that change nothing on the inputs, which are tried on others. Half as many lose a kind of
`blind_to` in 2 of 58 cases, twice as many find no more."""

MOST_CHECKED = 24
"""Mutations that are checked against their own bound: the nearest of all that were tried. It bounds the time; 12, 48
and all give the same in 58 cases."""

FEWEST_FOR_NOISE, SMOOTHNESS_SAMPLES = 8, 64
"""Elements in which noise can be seen and a rank decide, and those in which an error that depends on the value can."""
LESS_LIKELY = 2.0
"""The error that the cause leaves is noise, whose size many elements show well: what leaves twice as much is no cause.
1 gives another answer in 4 of 58 cases, 4 and more the same after a longer time."""

COSINE_OF_NOISE = 0.3
"""Cosine of the angle between an error and the value above which the error is no noise. 0.15 gives the same in 58
cases, 0.6 a wrong cause in one."""

DOES_NOT_APPLY = (RuntimeError, IndexError, OverflowError)
"""What torch raises for shapes, types and places that do not fit: whether a mutation fits all operations after it shows
when it is run. 511 of the 600 cases of the benchmark have such, 18 677 in all. A user can do nothing about them, so
they are in the log alone; other exceptions are noted."""

OPERATIONS_WITH_FITTED_NUMBER = ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp", "rsub")
"""Operations of which a number is looked for that fits."""

FARTHEST = 1e9
"""How far off, in tolerances, what cannot be compared counts as."""


@dataclass(frozen=True)
class Cause:
    """A mutation of the reference that gives what was observed."""

    kind: str
    says: str
    line: str
    """Where it stands in the reference: file, number and text; nothing where no line is known."""
    of_bound: float
    """The largest difference that is left, as a share of what rounding allows there."""
    also: tuple[str, ...] = ()
    """Equivalent mutations, which give the same on these inputs and on sampled ones, with their kinds."""
    elsewhere: tuple[str, ...] = ()
    """Other lines of the reference in which these are."""

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {key: plain(value) for key, value in asdict(self).items()}


@dataclass(repr=False)
class Explanation:
    """What :func:`explain` found."""

    step: str | None
    verdict: str
    causes: list[Cause] = field(default_factory=list)
    nearest: Cause | None = None
    """Where nothing fits, what comes nearest, and how far off it is."""
    separate: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the reference on which the causes that are left differ, by name."""
    blind_to: dict[str, str] = field(default_factory=dict)
    """Kinds of mutations that change nothing on these inputs, and would on others, with an example each."""
    others: list[str] = field(default_factory=list)
    """Steps after it with an error of their own: a second fault, or the same one in another place."""
    tried: int = 0
    notes: list[str] = field(default_factory=list)
    report: Localisation | None = None

    def as_json(self) -> dict[str, Any]:
        """The part "explain" of what `whywrong diff --explain --json` prints."""
        found: dict[str, Any] = {
            "step": self.step,
            "verdict": self.verdict,
            "causes": [c.as_json() for c in self.causes],
        }
        found |= {"nearest": self.nearest.as_json() if self.nearest else None, "separate": sorted(self.separate)}
        return found | {key: getattr(self, key) for key in ("blind_to", "others", "tried", "notes")}

    def _sentences(self) -> Iterator[str]:
        why = f"why {self.step}: {self.verdict} ({self.tried} mutations tried)"
        yield why if self.step is not None else self.verdict
        yield from self.notes
        for cause in self.causes:
            kinds = {each.partition(":")[0]: each for each in reversed(cause.also)}  # the first of each
            others = [says for kind, says in kinds.items() if kind != cause.kind][-3:]
            if others := [*others, *(f"also at {line}" for line in cause.elsewhere)]:
                yield f"{cause.says}; equivalent mutations: {'; '.join(others)} (.also has all {len(cause.also)})"
        if self.nearest is not None:
            off = digits(self.nearest.of_bound, 3)
            yield f"nearest: {self.nearest.says}; {off} times the tolerance off ({self.nearest.line})"
        if self.separate:
            yield f"they differ on other inputs: .separate has {', '.join(self.separate)}"
        if self.blind_to:
            yield f"these inputs would not show every {', '.join(self.blind_to)} (.blind_to has an example of each)"
        if self.others:
            yield f"also wrong by themselves: {', '.join(self.others)} (step=, or --step, looks at each)"

    def table(self) -> Table:
        """A row a cause."""
        rows = [(c.kind, c.says, c.line, f"{digits(c.of_bound, 3)} times the tolerance") for c in self.causes]
        return Table(("kind", "cause", "in the reference", "what is left"), rows)

    def _repr_html_(self) -> str:
        table = self.table()._repr_html_() if self.causes else ""
        return "".join(f"<p>{escape(line)}</p>" for line in self._sentences()) + table

    def __repr__(self) -> str:
        return printable("\n".join([*([str(self.table())] if self.causes else []), *self._sentences()]))


def explain(
    observed: Any,
    golden: Any,
    *,
    precision: Precision | None = None,
    names: Mapping[str, str] | None = None,
    step: str | None = None,
    seconds: float = 20.0,
    report: Localisation | None = None,
    progress: Callable[[str], None] = to_stderr,
) -> Explanation:
    """Mutate the recorded reference before its first wrong step in every known way; see what gives the observed values.

    Arguments are those of :func:`whywrong.localise`. `observed` may be a list of runs on the same inputs: a step
    that is wrong in only some of them is a race, or reads memory that was never written. `step` is another wrong step
    to look at, `report` what :func:`whywrong.localise` found of the first run, where that is known, and `seconds` about
    how long the search may take, a half of it to try. Each mutation is run in float64 on what was observed before the
    step; the nearest are checked against the tolerance of the mutated program. Mutations that agree on sampled inputs
    too are one cause, identified by the simplest. Several that do not are `undecidable`, and `separate` has inputs on
    which they differ. No cause is reported that did not reproduce the observed values within its tolerance.

    Raises UsageError for a golden that is not recorded, and for what :func:`whywrong.localise` refuses.
    """
    if not isinstance(golden, Golden):
        raise UsageError(f"golden: expected what whywrong.golden recorded, got a {type(golden).__name__}")
    check_number("seconds", seconds)
    runs = list(observed) if isinstance(observed, (list, tuple)) else [observed]
    if not runs:
        raise UsageError("observed: expected one run at least, got []")
    known = [report] if report is not None else []
    reports = known + [
        localise(run, golden, precision=precision, names=names, progress=progress) for run in runs[len(known) :]
    ]
    k = next((k for k, report in enumerate(reports) if report.first is not None), 0)
    report = reports[k]
    wrong = [name for name, found in report.findings.items() if found.wrong and found.total is not None]
    if step is not None and step not in wrong:
        raise UsageError(f"step: expected a wrong one: {', '.join(wrong) or 'there is none'}, got {step!r}")
    step = step or report.first
    if step is None:
        return Explanation(None, "no divergence", report=report)
    result = Explanation(step, NONE, others=[name for name in wrong if name != step], report=report)
    if (total := report.findings[step].total) is None or total.count < 0:
        result.notes.append(f"{step}: {report.findings[step].words}; there are no numbers to reproduce")
        return result
    golden = golden.with_steps(name for name in report.findings if name not in golden.steps)
    node = golden.program.nodes[golden.steps[step]]
    if node.func == INPUT:
        result.notes.append(f"{step} is an input: give the golden what the program was given")
        return result
    correct = sum(step in report.findings and not report.findings[step].wrong for report in reports)
    if correct:
        says = f"{step} is wrong in {len(runs) - correct} of {len(runs)} runs: a race, or memory that was never written"
        result.verdict, result.causes = CAUSE, [Cause("race", says, node.site, 0.0)]
        return result
    golden = golden.to("cpu")  # where an index outside of its tensor raises, and does not end the process as on a GPU
    trace = renamed(as_trace("observed", runs[k]), golden, dict(names or {}))
    with few_threads(golden[step].numel()):
        _Search(golden, trace, report.precision, seconds, result).run()
    return result


class _Tried(NamedTuple):
    """A mutation, and how far what it gives is from what was observed: everywhere, and where the step is wrong."""

    mutation: Mutation
    off: float
    off_there: float


class _Search:
    """The search for why one step is wrong. What it finds goes into `result`; nothing else changes."""

    def __init__(self, golden: Golden, seen: Trace, rules: Precision, seconds: float, result: Explanation) -> None:
        self._step, self._result = str(result.step), result
        self._until, self._last = time.monotonic() + seconds / 2.0, time.monotonic() + seconds
        self._part = Part(golden, seen, self._step)
        self._context = Context(self._part)
        steps = [name for name in self._part.names.values() if name in seen]
        self._rules = replace(rules, steps={name: rule for name, rule in rules.steps.items() if name in steps})
        self._seen = seen.named({name: name for name in steps})
        observed = seen.read(self._step)
        self._reference = self._part.values[self._part.target]
        self._observed = observed.to(self._reference.device, self._reference.dtype)
        self._allowed = self._tolerance(name_of(observed.dtype))
        off = self._off(self._reference)
        self._base, self._wrong = self._rms(off), off > 1.0
        self._box = tuple(slice(int(p[0]), int(p[-1]) + 1) if len(p) else slice(0) for p in along_each(self._wrong))
        self._enough = math.log(len(self._part.nodes) / TRACE_FALSE_POSITIVES)
        some = self._observed[self._box]
        self._somewhere = 0 < some.numel() < off.numel() and self._telling(some)
        self._inputs = dict[str, Tensor]()

    def _telling(self, some: Tensor) -> bool:
        """Whether numbers are so many that hardly any others are the same: a few whole numbers are so by chance."""
        whole = self._allowed is None or bool((some == some.round()).all())
        return not whole or some.numel() * math.log(max(1, len(some.unique()))) > self._enough

    def _tolerance(self, storage: str | None) -> Tensor | None:
        """What each element may be off, at least; None for whole numbers."""
        reference, step = self._reference, self._step
        if not reference.is_floating_point():
            return None
        storage = self._rules.of(step).storage or (None if storage in INTEGERS else storage)
        bound = bounded(self._part.mutated({}), precision=replace(self._rules, storage=storage)).step(step).bound
        allowed = torch.as_tensor(bound.absolute if bound else 0.0).expand(reference.shape)
        # a wrong value may be larger than the reference's
        observed = half_ulp(self._observed.nan_to_num(0.0, 0.0, 0.0), storage or "float32")
        return torch.maximum(allowed, observed).clamp(min=1e-300)

    def _off(self, value: Tensor) -> Tensor:
        """How far off each element is, in tolerances."""
        o = self._observed
        if self._allowed is None or not value.is_floating_point():
            return (value != o).double() * FARTHEST
        z = ((value - o).abs() / self._allowed).clamp(max=FARTHEST)
        return torch.where((value == o) | (value.isnan() & o.isnan()), 0.0, z.nan_to_num(FARTHEST, FARTHEST, FARTHEST))

    def run(self) -> None:
        """Try all mutations, check the nearest against their bounds, and report those that pass."""
        result, same = self._result, defaultdict[str, list[Mutation]](list)
        if not bool((self._observed.isfinite() | ~self._reference.isfinite()).any()):
            says = "is NaN or infinite wherever the reference is finite: was its memory written at all?"
            result.notes += [f"{self._step} {says}"]
            return
        tried = list(self._tried(mutations(self._context), same))
        near, numbers = [t for t in tried if t.mutation.kind != "precision"], self._allowed is not None
        fits = self._fitting(near)
        if {mutation.kind for mutation, _ in fits} <= {"constant", "scale", "ddof"}:  # none, or another number may fit
            near += [t for t in self._tried(self._fitted(), same) if self._beyond_chance(t)]
            fits = self._fitting(near)
        fits = fits or self._fitting(self._tried(self._unwritten(), same))
        fits = fits or self._fitting(near, everywhere=False)
        fits = fits or self._fitting(t for t in tried if t.mutation.kind == "precision")[:1]
        result.causes = self._distinct(fits) if fits or not numbers else self._narrower()
        result.verdict = NONE if not result.causes else CAUSE if len(result.causes) == 1 else UNDECIDABLE
        if not result.causes and tried:
            best = min(tried, key=lambda t: t.off)
            result.nearest = self._cause(best.mutation, best.off) if best.off < self._base / 2.0 else None
        result.blind_to = self._blind(same)
        if errors := self._context.errors:
            says = f"{len(errors)} mutations could not be made or run, the first: {errors[0]}"
            result.notes.append(f"{says} (logger whywrong, level DEBUG, has each)")

    def _rms(self, off: Tensor) -> float:
        return float(off.square().mean().sqrt())

    def _late(self, until: float) -> bool:
        """Whether the time is up, which is noted once."""
        late = time.monotonic() > until
        words = "the time was up before all were tried: seconds= (--seconds) allows more"
        self._result.notes += [words] * (late and words not in self._result.notes)
        return late

    def _tried(self, some: Iterable[Mutation], same: dict[str, list[Mutation]]) -> Iterator[_Tried]:
        """How far off mutations are, while there is time; those that change nothing go into `same`, by their kind."""
        for mutation in some:
            if self._late(self._until):
                return
            if (value := self._value(mutation)) is None:
                continue
            self._result.tried += 1
            if torch.equal(value, self._reference):
                same[mutation.kind] += [mutation] * (len(same[mutation.kind]) < UNCHANGED_KEPT)
            else:
                off = self._off(value)
                there = self._rms(off[self._box]) if self._somewhere else math.inf
                yield _Tried(mutation, self._rms(off), there)

    def _beyond_chance(self, fitted: _Tried) -> bool:
        """Whether a number that was fitted to one element explains the others better than one of many would by chance.

        The likelihood ratio of normal errors before and after, against the false-positive rate over all operations.
        """
        ratio = (self._reference.numel() - 1) * math.log(self._base / max(fitted.off, 1e-300))
        return ratio > self._enough and int(self._wrong.sum()) != 1  # of one element any number fits

    def _value(self, mutation: Mutation, values: Any = None) -> Tensor | None:
        """What a mutation gives; None where it cannot be run, or gives another shape."""
        with collected(self._context.errors, f"{mutation.says} could not be run", DOES_NOT_APPLY):
            value = self._part.value(mutation.edits, values)
            return value if value.shape == self._observed.shape else None
        return None

    def _fitting(self, tried: Iterable[_Tried], everywhere: bool = True) -> list[tuple[Mutation, float]]:
        """Those that are within the bound of their own program, the nearest first.

        What leaves LESS_LIKELY times the error of the nearest is not the cause: that error is noise, and more is not.
        """
        off: Callable[[_Tried], float] = attrgetter("off" if everywhere else "off_there")
        near = [t for t in tried if off(t) < self._base / 2]
        # what differs by rounding alone stays in the order in which it was tried
        near.sort(key=lambda t: (max(0, math.ceil(math.log2(off(t) + 1e-300))), t.mutation.rank))
        found: list[tuple[_Tried, float]] = []
        least = math.inf
        for k, t in enumerate(near[:MOST_CHECKED]):
            if k and self._late(self._last):  # at least one is checked
                break
            if off(t) > LESS_LIKELY * least:
                continue
            if (share := self._share(t.mutation, everywhere)) is not None:
                found.append((t, share))
                least = min(least, off(t))
        likely = [(t.mutation, share) for t, share in found if off(t) <= LESS_LIKELY * least]
        return [(m if everywhere else self._there(m), share) for m, share in likely]

    def _there(self, mutation: Mutation) -> Mutation:
        """The same mutation in the wrong places alone."""
        places = enumerate(zip(self._box, self._observed.shape, strict=True))
        there = [(d, p.start, p.stop - 1, n) for d, (p, n) in places if p != slice(0, n)]
        where = [f"{a}{f' to {b}' * (b > a)} of dimension {d}" for d, a, b, _ in there]
        tail = mutation.kind in ("factor", "drop_term") and any(b == n - 1 for *_, b, n in there)
        kind, says = "truncate" if tail else mutation.kind, f"{mutation.says}, but only in {' and '.join(where)}"
        return replace(mutation, kind=kind, says=says, rank=mutation.rank + 2)

    def _share(self, mutation: Mutation, everywhere: bool = True, rules: Precision | None = None) -> float | None:
        """The largest difference as a share of the mutation's own bound; None where it is beyond, or looks systematic.

        A cast is checked against the reference's bound: the recorder, which is in float64, has no operation for it.
        """
        edits, seen = dict(mutation.edits), self._seen
        if mutation.kind == "precision":
            share = float(self._off(self._part.value(edits)).max())
            return share if share <= 1.0 else None
        if not everywhere:
            target = self._part.target
            first = edits.get(target, Edit(torch.clone, (Ref(target),)))
            edits[target] = Edit(lambda *args: first.run(*args)[self._box], first.takes)
            there = seen.read(self._step)[self._box]
            seen = Trace({name: there if name == self._step else seen[name] for name in seen.names})
        with collected(self._context.errors, f"{mutation.says} could not be checked against its tolerance"):
            found = localise(seen, self._part.mutated(edits), precision=rules or self._rules).findings[self._step]
            return None if found.wrong or found.own is None else found.own.bound_used
        return None

    def _fitted(self) -> Iterator[Mutation]:
        """Factors, offsets and numbers of the program that are looked for, not taken from a list."""
        good = self._observed.isfinite() & self._reference.isfinite()
        o, v = self._observed[good], self._reference[good]
        if v.numel() and self._allowed is not None:
            c, shift = float((o * v).sum() / v.square().sum().clamp(min=1e-300)), float((o - v).median())
            words = f"the result is {abs(shift):.6g} too {'large' if shift > 0 else 'small'}"
            yield Mutation("constant", words, edit_results([self._part.target], lambda x: x + shift), 5)
            words = f"the result is {c:.6g} times what it should be"
            yield Mutation("scale", words, edit_results([self._part.target], lambda x: x * c), 5)
        for node in self._part.nodes:
            for j, number in enumerate(node.args):
                if (
                    node.op in OPERATIONS_WITH_FITTED_NUMBER
                    and is_number(number)
                    and number
                    and self._context.real(node.id)
                ):
                    yield self._best_number(node, j, number)
                elif node.op in THRESHOLDS and is_number(number) and self._telling(self._observed):
                    yield self._best_threshold(node, j, number)
            for d in summed_over(node, self._part.values) if self._allowed is not None else ():
                yield from self._best_ranges(node, d, self._part.values[node.parents[0]].shape[d])

    def _best_number(self, node: Node, j: int, c: float) -> Mutation:
        """The number that brings the step nearest to what was observed, in place of one of the program's."""
        from scipy.optimize import minimize_scalar

        mutation = partial(self._another, node, j, c)

        def off(new: float) -> float:
            return self._distance(mutation(new))

        best = min([c * 10.0 ** (k / 4) for k in range(-16, 17)] + [10.0**k for k in range(-8, 9)], key=off)
        span = sorted((best * 10**-0.25, best * 10**0.25))
        found = minimize_scalar(off, bounds=span, method="bounded", options={"xatol": abs(best) * 1e-8})
        return mutation(min(best, float(found.x), key=off))

    def _best_threshold(self, node: Node, j: int, c: float) -> Mutation:
        """The same for a number that others are compared with: between two of these."""
        each = self._part.values[node.parents[0]].double().unique()
        between = ((each[1:] + each[:-1]) / 2.0).tolist() or [c]

        def mutation(k: int) -> Mutation:
            return self._another(node, j, c, between[k])

        return mutation(_lowest(cache(self._distance_of(mutation)), 0, len(between)))

    def _another(self, node: Node, j: int, c: float, new: float) -> Mutation:
        says = f"{node.op} has about {new:.6g} where the reference has {c:.6g}"
        return Mutation(kind_of_number(node.op, c, new), says, numbered(self._part, [node.id], j, new), 4)

    def _best_ranges(self, node: Node, d: int, n: int) -> Iterator[Mutation]:
        """The end, and the beginning, that a sum over dimension `d` lacks to come nearest to what was observed."""

        def mutation(a: int, b: int) -> Mutation:
            edits = argument(self._part, [node.id], 0, partial(zeroed, d=d, a=a, b=b))
            return Mutation("truncate", f"{node.op} leaves out {a} to {b - 1} of {n}", edits, 3)

        def end(k: int) -> Mutation:
            return mutation(k, n)

        for part in (end, partial(mutation, 0)) if n > 1 else ():
            yield part(_lowest(cache(self._distance_of(part)), 1, n))

    def _distance_of(self, mutation: Callable[[int], Mutation]) -> Callable[[int], float]:
        """How far off the mutations of a number are."""
        return lambda k: self._distance(mutation(k))

    def _unwritten(self) -> Iterator[Mutation]:
        """NaN in all elements that are wrong, or 0 where these are a block, or the same along a dimension.

        Scattered zeros may have been computed, as by another threshold.
        """
        wrong, count = int(self._wrong.sum()), self._wrong.numel()
        seen = self._wrong | (self._reference == 0)  # a zero that was never written does not show
        spread = [self._wrong.any(d, keepdim=True) for d, n in enumerate(seen.shape) if n > 1]
        block = bool(seen[self._box].all()) or any(bool((seen | ~one).all()) for one in spread)
        block = block or not bool(
            self._wrong[np.ix_(*along_each(~self._wrong))].any()
        )  # what was written may be a block
        fills = [("0", 0.0)] * block + [("NaN", math.nan)] * self._reference.is_floating_point()
        for name, fill in fills if wrong < count else ():
            says = f"{self._step} is {name} in {wrong} of {count} elements, like memory that was never written"
            unwritten = partial(torch.masked_fill, mask=self._wrong, value=fill)
            yield Mutation("zero", says, edit_results([self._part.target], unwritten))

    def _distance(self, mutation: Mutation) -> float:
        """How far off a mutation is; Inf where it cannot be run, or the time is up."""
        value = self._value(mutation) if not self._late(self._until) else None
        return self._rms(self._off(value)) if value is not None else math.inf

    def _cause(self, mutation: Mutation, share: float) -> Cause:
        first = min(mutation.edits)
        sites = [self._part.nodes[i].site for i in (first, *self._part.users.get(first, ()))]
        says = mutation.says if mutation.kind != "precision" else f"consistent with: {mutation.says}"
        nowhere = "in its backward" if self._step.startswith(GRADIENT) else ""
        return Cause(mutation.kind, says, next(filter(None, sites), nowhere), share)

    def _distinct(self, fits: list[tuple[Mutation, float]]) -> list[Cause]:
        """One cause for all mutations that agree on fresh inputs, the simplest; what separates others is kept too."""
        classes: list[tuple[Tensor | None, list[tuple[Mutation, float]]]] = []
        for mutation, share in sorted(fits, key=lambda fit: fit[0].rank):
            value = self._value(mutation, self._fresh)
            if (same := next((same for other, same in classes if _alike(value, other)), None)) is None:
                classes.append((value, same := []))
            same.append((mutation, share))
        simplest = min((mutation.rank for mutation, _ in fits), default=0)
        left: dict[tuple[str, str], Cause] = {}  # of one number, those that fit are one cause
        few = self._observed.numel() < FEWEST_FOR_NOISE  # of a few numbers the simplest that fits is no evidence
        for (mutation, share), *rest in (same for _, same in classes if few or same[0][0].rank == simplest):
            number = mutation.says.partition(" has ")[0] if mutation.kind == "eps" else mutation.says
            cause = left.get((mutation.kind, number), self._cause(mutation, share))
            also = (*cause.also, *(f"{m.kind}: {m.says}" for m, _ in rest))
            lines = dict.fromkeys((*cause.elsewhere, *(self._cause(m, 0.0).line for m, _ in rest)))
            elsewhere = tuple(line for line in lines if ":" in line and line != cause.line)
            left[mutation.kind, number] = replace(cause, also=also, elsewhere=elsewhere)
        if len(left) > 1 and self._fresh:
            self._result.separate = self._inputs
        if any(cause.also for cause in left.values()) and not self._fresh:
            self._result.notes.append(
                "the reference takes no sampled inputs: causes that agree on these inputs are one"
            )
        return list(left.values())

    @cached_property
    def _fresh(self) -> dict[int, Any]:
        """What every operation gives on sampled inputs; nothing where the reference does not take them.

        Whole numbers are sampled too, unless that makes what is no number, or none that the reference takes.
        """
        for whole in (True, False):
            with collected([], "the reference took no sampled inputs"):  # of which `_distinct` makes a note
                given = {name: self._part.golden[name] for name in self._part.golden.inputs}
                self._inputs = {name: _sampled(x, k, whole) for k, (name, x) in enumerate(given.items())}
                found = self._part.fresh(self._inputs)
                if bool(found[self._part.target].isfinite().all() or not self._reference.isfinite().all()) or not whole:
                    return found
        return {}

    def _blind(self, same: Mapping[str, list[Mutation]]) -> dict[str, str]:
        """Of the mutations that changed nothing, those that change something on sampled inputs: one of each kind."""
        shows: dict[str, str] = {}
        for kind, mutation in ((kind, mutation) for kind, some in same.items() for mutation in some if self._fresh):
            value = self._value(mutation, self._fresh) if kind not in shows else None
            if value is not None and not _alike(value, self._fresh[self._part.target]):
                shows[kind] = mutation.says
        return shows

    def _narrower(self) -> list[Cause]:
        """The narrower precision that the step would keep, where its error looks like theirs: as large, and noise.

        How large is chosen, not derived: both limits may be halved or doubled in 58 cases. A few numbers are not enough
        to see noise: one of three errors that are anything is as large. What is summed or stored with fewer digits has
        no more than these.
        """
        error = (self._observed - self._reference).nan_to_num(0.0, 0.0, 0.0)
        value = self._reference.nan_to_num(0.0, 0.0, 0.0)
        off = float(error.norm())

        def like(x: Tensor, most: float) -> bool:
            return abs(float((error * x).sum())) > most * off * float(x.norm())

        results = [x for i, x in self._part.values.items() if self._context.real(i) and x.shape == value.shape]
        by_chance = max(COSINE_OF_NOISE, 4.0 * error.numel() ** -0.5)  # of many results
        alike = like(value, COSINE_OF_NOISE) or any(like(x.nan_to_num(0.0, 0.0, 0.0), by_chance) for x in results)
        if error.numel() < FEWEST_FOR_NOISE or alike or _smooth(error, value):
            return []
        for narrower in NARROWER_PRECISIONS:
            if not representable(self._observed, narrower.get("storage", narrower.get("accumulate", "ieee"))):
                continue
            if self._late(self._until):
                break
            declared = {**self._rules.steps.get(self._step, {}), **narrower}
            rules = replace(self._rules, steps={**self._rules.steps, self._step: declared})
            share = self._share(Mutation("", "", {}), rules=rules)
            bound = (
                bounded(self._part.mutated({}), precision=rules).step(self._step).bound if share is not None else None
            )
            noise = float(torch.as_tensor(bound.noise if bound is not None else math.inf).expand(value.shape).norm())
            if share is not None and noise / 8.0 <= off <= 2.0 * noise:
                words = ", ".join(f"{key}={value}" for key, value in narrower.items())
                says = f"consistent with: fewer digits than declared ({words})"
                return [Cause("precision", says, self._part.nodes[self._part.target].site, share)]
        return []


def _lowest(of: Callable[[int], float], a: int, b: int) -> int:
    """Where in `a` to `b` - 1 a function is lowest that grows to both sides of that."""
    apart = max(1, (b - a) // 32)
    best = min(range(a, b, apart), key=of)
    while apart > 1:
        apart = (apart + 1) // 2
        best = min((k for k in (best, best - apart, best + apart) if a <= k < b), key=of)
    return best


def _smooth(error: Tensor, value: Tensor) -> bool:
    """Whether an error depends on the value, as that of another function does: those of neighbours are alike.

    Neighbours are some way apart, since equal values are rounded alike: their correlation, of SMOOTHNESS_SAMPLES
    values in order.
    """
    v, order = (each[:: max(1, value.numel() // SMOOTHNESS_SAMPLES)] for each in value.flatten().sort())
    e = error.flatten()[order] - error.flatten()[order].mean()
    alike = (e[1:] * e[:-1])[v.diff() > 1e-9 * v.abs().max()]
    return float(alike.sum()) > 3.0 * len(e) ** -0.5 * float(e.square().sum())


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two results in float64 are equal but for the order of operations, which costs some of its 16 digits."""
    if a is None or b is None or a.shape != b.shape:
        return False
    if not torch.promote_types(a.dtype, b.dtype).is_floating_point:
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=1e-7, atol=1e-10, equal_nan=True)


def _sampled(x: Tensor, seed: int, whole: bool) -> Tensor:
    """Values like those of x in other places, none constant; `whole` numbers between its own, in order where it is."""
    generator = torch.Generator().manual_seed(seed)
    if not x.numel() or x.dtype == torch.bool or x.is_complex() or not (whole or x.is_floating_point()):
        return x
    if not x.is_floating_point():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high < 2:  # a number with a meaning of its own, as -100 for no label, and masks
            return x
        other = torch.randint(min(low, 1) if low == high else low, high + 1, x.shape, generator=generator).to(x)
        return other.sort(-1).values if torch.equal(x, x.sort(-1).values) else other
    mixed = x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    constant = x.numel() > 1 and bool((x == x.flatten()[0]).all())
    mixed = (
        -mixed if x.numel() < FEWEST_FOR_NOISE and bool((x < 0.0).any()) else mixed
    )  # else a few would keep their signs
    return mixed * (1.0 + 0.25 * noise) + (0.5 * noise if constant else 0.0)
