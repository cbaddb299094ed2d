"""Why a step is wrong: the mutation of the recorded reference, of many tried, that reproduces the numbers observed."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from whywrong.checking.alignment import renamed
from whywrong.checking.findings import Localisation, several
from whywrong.checking.localise import localise
from whywrong.checking.with_program import bounded
from whywrong.comparing.precision import INTEGERS, Precision, half_ulp, name_of
from whywrong.comparing.regions import Region, bits_of_subset, numbers_of_slices, tightest
from whywrong.comparing.relation import holders
from whywrong.console import Progress
from whywrong.errors import UsageError, check_number, collected
from whywrong.explaining.explanation import CAUSE, NONE, UNDECIDABLE, Cause, Explanation
from whywrong.explaining.mutations import (
    THRESHOLDS,
    Context,
    Mutation,
    edit_results,
    is_number,
    kind_of_number,
    mutations,
    numbered,
)
from whywrong.explaining.on_device import on
from whywrong.explaining.part import Edit, NotRunError, Part
from whywrong.explaining.partly import (
    Partial,
    behind,
    changed,
    chosen,
    from_one_on,
    in_a_loop,
    one_way,
    refined,
    subsets,
    summed,
    twins,
    unnamed,
)
from whywrong.explaining.residual import FARTHEST, Residual
from whywrong.explaining.slices import Slices, large, sampled
from whywrong.explaining.solved import PER_NUMBER, Equation, unknowns
from whywrong.process_state import few_threads
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.program import INPUT, Node, Ref
from whywrong.recording.steps import Trace, as_trace
from whywrong.tables import to_stderr

Tensor = torch.Tensor

NARROWER_PRODUCTS = ("tf32", "bfloat16", "float16")
"""Types of fewer digits in which factors may be held, the widest first."""

UNCHANGED_KEPT = 8
"""Mutations of a kind that change nothing on the inputs, which are tried on others. Half as many lose a kind of
`blind_to` in 2 of 58 cases, twice as many find no more."""

FEWEST_FOR_NOISE, SMOOTHNESS_SAMPLES = 8, 64
"""Elements in which noise can be seen and a rank decide, and those in which an error that depends on the value can."""

COSINE_OF_NOISE = 0.3
"""Cosine of the angle between an error and the value above which the error is no noise. 0.15 gives the same in 58
cases, 0.6 a wrong cause in one."""

MARGIN, CLOSE = 3.0, 6.0
"""Bits that a cause has to save, its description paid, and that one of so many was picked. Bits within which two that
fit are undecidable."""
PER_RANK, PER_REGION = 8.0, 8.0
"""Bits that a rank of a mutation costs, and that it holds in a region costs beside the region."""
EXPLAINED = 3.0
"""Tolerances of the reference within which a mutated value is held against that of its own program."""
MOST_POLISHED = 10_000_000
"""Elements times numbers up to which a solution is fitted to all: that of a sample leaves a pattern there."""
MOST_EQUIVALENT = 30
"""Longer descriptions that are held against a cause, to be listed with it."""
MOST_AT_HAND = 200
"""Values of the program that may have been added, the nearest first."""
MENDED = 0.05
"""Share of the wrong elements in a sample that a mutation has to bring within EXPLAINED to be tried on all of a large
step."""
CHECKED = 24
"""Slices equally far apart of a large step on which the rounding of a mutated program is simulated, beside those that
were looked at; chosen, not measured."""
SAMPLED, RESTRICTED = 384, 40
"""Elements by which mutations are ordered, and those nearest that are tried in each part of a dimension."""

DOES_NOT_APPLY = (RuntimeError, IndexError, OverflowError)
"""What torch raises for shapes, types and places that do not fit: whether a mutation fits all operations after it shows
when it is run. 511 of the 600 cases of the benchmark have such, 18 677 in all. A user can do nothing about them, so
they are in the log alone; other exceptions are noted."""

OPERATIONS_WITH_FITTED_NUMBER = ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp", "rsub")
"""Operations of which a number is looked for that fits."""


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
    to look at, or all that a loop's line computes, as the table calls them ("h.0 ... h.9"); `report` is what
    :func:`whywrong.localise` found of the first run, where that is known. `seconds` is about how long the search may
    take, a half of it to try; half as long again is for a loop's line that gave several wrong steps, all of which a
    cause has to explain, and where nothing fits the rest of twice as long for other wrong steps. Each mutation is run
    in float64 on what was observed before the step; the nearest are checked against the tolerance of the mutated
    program. Mutations that agree on sampled inputs too are one cause, identified by the simplest. Several that do not
    are `undecidable`, and `separate` has inputs on which they differ. No cause is reported that did not reproduce the
    observed values within its tolerance; of a step of more than 2^26 multiplications the tolerance is that of some
    slices, and elsewhere the reference's.

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
    loops = [name for name, loop in report.loops.items() if not {*wrong}.isdisjoint(loop)]
    if step is not None and step not in (*wrong, *loops):
        expected = ", ".join((report.folded(wrong), *map(repr, loops))) if wrong else "there is none"
        raise UsageError(f"step: expected a wrong one: {expected}, got {step!r}")
    step = step or report.first
    if step is None:
        return Explanation(None, report.verdict, report=report)
    golden = golden.with_steps(name for name in report.findings if name not in golden.steps)
    result = Explanation(step, NONE, others=[name for name in wrong if name != step], report=report)
    traces = [renamed(as_trace("observed", run), golden, dict(names or {})) for run in runs]
    trace = traces.pop(k)
    if step not in loops and _without_search(golden, trace, reports, result):
        return result
    if step in loops:
        return _together(golden, trace, report, report.loops[step], seconds, {})
    until = time.monotonic() + 2.0 * seconds
    fitted = _searched(golden, trace, traces, report.precision, seconds, result)
    found = _throughout(golden, trace, report, seconds, result, fitted)
    return found if found.causes else _elsewhere(golden, trace, report, until, found)


def _without_search(golden: Golden, observed: Trace, reports: list[Localisation], result: Explanation) -> bool:
    """Whether there is nothing to search for, which is noted: no numbers, an input, a parameter of which it is known
    what it holds, or a step that not all runs have wrong."""
    step, report = str(result.step), result.report or reports[0]
    if (total := report.findings[step].total) is None or total.count < 0:
        said = "; ".join((report.findings[step].words, *report.findings[step].touched))
        result.notes.append(f"{step}: {said}; there are no numbers to reproduce")
        return True
    node = golden.program.nodes[golden.steps[step]]
    if node.func == INPUT:
        if step not in golden.parameters:
            result.notes.append(f"{step} is an input: give the golden what the program was given")
            return True
        if held := _held(golden, observed.read(step), step):
            result.verdict, result.causes = CAUSE, [Cause("swap", f"{step} holds what {held} is", "", 0.0)]
        return bool(held)
    correct = sum(step in report.findings and not report.findings[step].wrong for report in reports)
    if correct:
        count = f"{len(reports) - correct} of {len(reports)}"
        says = f"{step} is wrong in {count} runs: a race, or memory that was never written"
        result.verdict, result.causes = CAUSE, [Cause("race", says, node.site, 0.0)]
    return correct > 0


def _held(golden: Golden, x: Tensor, parameter: str) -> str:
    """Which other of the golden's parameters a wrong one holds; nothing where none, or all is one number."""
    others = ((name, golden[name].to(x.device)) for name in golden.parameters if name != parameter)
    return next(holders(x, others), "")


def _throughout(
    golden: Golden, trace: Trace, report: Localisation, seconds: float, result: Explanation, known: _Known
) -> Explanation:
    """Where a loop's line gave others that are wrong by themselves too: what explains all that it gave, if anything
    does, since more than one mutation may fit a single one."""
    step = str(result.step)
    loop = next((loop for loop in report.loops.values() if step in loop), [])
    if {*loop}.isdisjoint(result.others) or (result.causes and not known):  # known: no race, no noise
        return result
    every = _together(golden, trace, report, loop, seconds / 2.0, known)
    if not every.causes:
        return result
    every.notes.append(f"it explains {every.step} together, which one line gives")
    return replace(every, step=step, tried=result.tried + every.tried, blind_to=result.blind_to)


def _elsewhere(golden: Golden, trace: Trace, report: Localisation, until: float, result: Explanation) -> Explanation:
    """Where nothing explains a step: as notes, what explains the first wrong steps of other lines."""
    first = {report.lines.get(name, name): name for name in reversed([str(result.step), *result.others])}
    for name in (name for name in result.others if name in first.values() and golden[name].is_floating_point()):
        if (left := until - time.monotonic()) > 0.0:
            other = Explanation(name, NONE, report=report)
            _searched(golden, trace, [], report.precision, left, other)
            result.notes += [f"{name}, wrong by itself too: {cause.says} ({cause.line})" for cause in other.causes]
    return result


def _together(
    golden: Golden, trace: Trace, report: Localisation, loop: list[str], seconds: float, known: _Known
) -> Explanation:
    """One explanation for all steps of a line, each from what was observed before it."""
    whole = several(loop)
    loop = [name for name in loop if name in trace and trace.read(name).shape == golden[loop[0]].shape]
    numbers = {golden.steps[name] for name in loop}
    before = set(golden.program.cone(numbers, ()))
    later = {n for n, i in golden.steps.items() if not numbers.isdisjoint(golden.program.cone([i], ()))}
    later = {n for n in later if golden.steps[n] not in before}  # they have the fault in them, and are no evidence
    steps = Trace({name: trace[name] for name in trace.names if name not in later})
    steps.add(whole, torch.stack([trace.read(name) for name in loop]))
    others = [name for name in report.own if name not in loop]
    result = Explanation(whole, NONE, others=others, report=report)
    _searched(golden.stacked(loop, whole), steps, [], report.precision, seconds, result, known)
    return result


def _searched(
    golden: Golden,
    seen: Trace,
    others: list[Trace],
    rules: Precision,
    seconds: float,
    result: Explanation,
    known: _Known | None = None,
) -> _Known:
    """Search for why one step is wrong, and write what is found into `result`; the mutations that fit.

    Those that are `known` are tried first, and the words that led lead again; nor is a number or noise fitted then.
    """
    there = golden[str(result.step)]
    with few_threads(there.numel()):
        golden = golden.to(there.device)  # constants too, which are recorded where they were made
        try:
            search = _Search(golden, seen, others, rules, seconds, result, known or {})
        except NotRunError as error:
            result.notes.append(f"{result.step}: {error}; what was observed before the step has such")
            return {}
        search.run()
        search.progress.close()
        return search.fitted


_Known = dict[tuple[Any, ...], bool]
"""Mutations, as :meth:`_Search._key` names them, and whether they led those that are the same."""


class _Candidate(NamedTuple):
    """A mutation that may be the cause, in a region where that has words; `bits` say it and what it leaves."""

    mutation: Mutation
    bits: float
    region: Region
    order: tuple[float, int]
    """Bits of the description alone, and its place among those that were tried, the usual ones first."""

    def says(self) -> Mutation:
        """The mutation, with the region in its sentence. What a sum or product lacks from some place on is a tail."""
        m, words = self.mutation, self.region.words
        if self.region.scattered and m.lost:
            return replace(m, kind="race", says=f"{words} {m.says}: their updates were lost, as in a race")
        tail = m.kind in ("factor", "drop_term") and words.startswith("from ")
        kind = "truncate" if tail else m.kind
        return replace(m, kind=kind, says=f"{m.says}, but only {words}") if words else m


class _OnSlices(NamedTuple):
    """What a mutation gives on slices: whether these are nearer to those observed than the reference's, or some that
    were far off are near; whether they differ from the reference's; and by how much in the sample."""

    promising: bool
    differs: bool
    error: Tensor


class _Search:
    """The search for why one step is wrong. What it finds goes into `result`; nothing else changes."""

    def __init__(
        self,
        golden: Golden,
        seen: Trace,
        others: list[Trace],
        rules: Precision,
        seconds: float,
        result: Explanation,
        known: _Known,
    ) -> None:
        self._step, self._result, self._others, self._known = str(result.step), result, others, known
        self.fitted: _Known = {}
        self.progress = Progress()
        self._part = Part(golden, seen, self._step)
        if self._part.device.type != "cpu" and not large(self._part):  # launches take longer than the work
            self._part = Part(golden.to("cpu"), seen, self._step)
        self._context = Context(self._part)
        steps = [name for name in self._part.names.values() if name in seen]
        self._rules = replace(rules, steps={name: rule for name, rule in rules.steps.items() if name in steps})
        self._seen, self._seen_all = seen.named({name: name for name in steps}), seen
        observed = seen.read(self._step)
        self._reference = self._part.values[self._part.target].cpu()
        self._observed, self._storage = observed.to("cpu", self._reference.dtype), name_of(observed.dtype)
        self._allowed, noise = self._tolerance({})
        inputs = numbers_of_slices(self._reference.shape, [(name, golden[name]) for name in golden.inputs])
        self._residual = Residual(self._observed, self._reference, self._allowed, noise, inputs)
        self._candidates, self._refused = list[_Candidate](), 0
        self._alike = Counter[tuple[Any, ...]]()
        self._shares = dict[int, float | None]()
        self._slices = slices = sampled(self._part, self._residual.wrong)
        self._sample, places = self._residual, torch.arange(self._observed.numel())
        if slices is not None:
            self._sample = self._residual.of(lambda x: slices.of(x).to(self._part.device))
            places = slices.of(places.view(self._observed.shape)).flatten()
        o, v = self._sample.observed.cpu(), self._sample.reference.cpu()
        self._in_sample = _places(o, v, self._residual.wrong.flatten()[places])
        self._at = places[self._in_sample]
        self._rows = list[tuple[Mutation, Tensor]]()
        self._inputs = dict[str, Tensor]()
        self._until, self._last = time.monotonic() + seconds / 2.0, time.monotonic() + seconds

    def _tolerance(self, edits: Mapping[int, Edit]) -> tuple[Tensor | None, Any]:
        """What each element of a mutated program may be off, at least, and its noise; None for whole numbers."""
        reference, step = self._reference, self._step
        if not reference.is_floating_point():
            return None, 0.0
        storage = self._rules.of(step).storage or (None if self._storage in INTEGERS else self._storage)
        program = self._part.mutated(edits)
        rules = replace(self._rules, storage=storage)
        bound = bounded(program, precision=rules, steps=[step]).step(step).bound
        allowed = torch.as_tensor(bound.absolute if bound else 0.0).cpu().expand(reference.shape)
        # a wrong value may be larger than the reference's
        observed = half_ulp(self._observed.nan_to_num(0.0, 0.0, 0.0), storage or "float32")
        noise = torch.as_tensor(bound.noise).to(observed) if bound is not None and bound.noise is not None else 0.0
        return torch.maximum(allowed, observed).clamp(min=1e-300), noise

    def run(self) -> None:
        """Try all mutations, check the nearest against their bounds, and report those that pass."""
        result, same = self._result, defaultdict[str, list[Mutation]](list)
        if self._runs_differ():
            return
        if not bool((self._observed.isfinite() | ~self._reference.isfinite()).any()):
            says = "is NaN or infinite wherever the reference is finite: was its memory written at all?"
            result.notes += [f"{self._step} {says}"]
            return
        for region, mutation in self._unwritten():
            self._try([mutation], same, region.bits * bool(self._observed[self._residual.wrong].isfinite().all()))
        fits, narrower = list[tuple[_Candidate, float]](), list[Cause]()
        if self._known:
            some = [
                m for m in self._counted(mutations(self._context)) if self._key(m) in self._known and self._of_all(m)
            ]
            if not {key for key, led in self._known.items() if led} <= {*map(self._key, some)}:
                return  # what led cannot be said of all, and so is not refuted
            self._try(some, same)
            fits = self._fitting()
        if not fits:
            fits, narrower = self._found(same)
        result.causes = self._distinct(fits) or narrower
        result.verdict = NONE if not result.causes else CAUSE if len(result.causes) == 1 else UNDECIDABLE
        if not result.causes:
            result.about = self._about()
            result.nearest = self._nearest()
        result.blind_to = self._blind(same)
        if errors := self._context.errors:
            says = f"{len(errors)} mutations could not be made or run, the first: {errors[0]}"
            result.notes.append(f"{says} (logger whywrong, level DEBUG, has each)")

    def _key(self, m: Mutation) -> tuple[Any, ...]:
        """A mutation of one run of a line, or of each: kind, lines, words."""
        kind, says = unnamed(self._context, m)
        return kind, says.replace("each ", ""), *sorted({self._part.nodes[i].site for i in m.edits})

    def _of_all(self, m: Mutation) -> bool:
        """Whether a mutation reaches every one of the steps that are looked at together."""
        reached, target = self._part.downstream(*m.edits), self._part.target
        return target in m.edits or set(self._part.nodes[target].parents) <= {*reached}

    def _found(self, same: dict[str, list[Mutation]]) -> tuple[list[tuple[_Candidate, float]], list[Cause]]:
        """The mutations that fit; where none does, the type of fewer digits that would give such an error."""
        self._try(self._mutations(), same)
        fits, fit = self._fitting(), not self._known
        usual = {c.mutation.kind for c, _ in fits if c.mutation.rank < 2}
        if usual <= {"constant", "scale", "ddof", "shift"}:  # or none: another number, or a part of a sum, may fit
            self._try(self._fitted() if fit else ())
            self._sums()
            fits = self._fitting()
        narrower = self._narrower() if fit and self._allowed is not None and not fits else []
        stages = (self._terms, self._twins, *[self._solved] * fit, self._later, self._inside, self._one_way)
        for k, stage in enumerate(stages if not fits and not narrower else ()):
            now = time.monotonic()
            self._until = now + (self._last - now) / (len(stages) - k + 1)
            stage()
            if fits := self._fitting():
                break
        return fits, narrower

    def _mutations(self) -> Iterable[Mutation]:
        """All mutations, which are counted; of a large step in batches that run at once, those first that are likely
        for their time."""
        every, slices = self._counted(mutations(self._context)), self._slices
        if slices is None:
            return every
        places = defaultdict[tuple[int, ...], list[Mutation]](list)
        with on(self._part.device):
            for mutation in every:
                places[mutation.rank, *mutation.edits].append(mutation)
        batches = list[tuple[float, list[Mutation]]]()
        for (rank, *edits), some in places.items():
            some.sort(key=self._which)
            most = slices.together(edits)
            for batch in (some[k : k + most] for k in range(0, len(some), most)):
                likely = sum(2.0 ** -self._which(m) for m in batch)
                batches.append((PER_RANK * rank + math.log2(slices.time(edits, len(batch)) / likely), batch))
        return [m for _, batch in sorted(batches, key=itemgetter(0)) for m in batch]

    def _counted(self, some: Iterable[Mutation]) -> Iterator[Mutation]:
        for mutation in some:
            self._alike[mutation.kind, *mutation.edits] += 1
            yield mutation

    def _which(self, m: Mutation) -> float:
        """Bits that say which it is of the mutations of one kind in one place."""
        return math.log2(self._alike[m.kind, *m.edits] or math.inf)

    def _runs_differ(self) -> bool:
        """Whether other runs on the same numbers before the step gave others in it: a race, or unwritten memory."""
        own, result = self._residual.observed, self._result
        part = self._part
        before = [part.names[i] for i in part.given if i in part.names and part.target in part.downstream(i)]
        differ = torch.zeros(own.shape, dtype=torch.bool)
        count = 0
        for other in self._others:
            if self._step in other and all(n in other and _equal(other.read(n), self._seen.read(n)) for n in before):
                there = other.read(self._step).to(own)
                apart = ~((there - own).abs() <= 2.0 * self._allowed) if self._allowed is not None else there != own
                apart &= ~(there.isnan() & own.isnan())
                count += bool(apart.any())
                differ |= apart
        if count:
            some = f"{int(differ.sum())} of {differ.numel()} elements"
            says = (
                f"{count} of {len(self._others)} other runs gave other numbers in {some} from the same numbers before"
            )
            site = self._part.nodes[self._part.target].site
            result.causes = [Cause("race", f"{says}: a race, or memory that was never written", site, 0.0)]
            result.verdict, result.about = CAUSE, self._about()
        return bool(count)

    def _about(self) -> list[str]:
        """What :func:`localise` says of the step beside what it is called."""
        found = self._result.report.findings.get(self._step) if self._result.report else None
        return [*(found.touched or (found.words,))] if found else []

    def _late(self, until: float) -> bool:
        """Whether the time is up, which is noted once."""
        late = time.monotonic() > until
        words = "the time was up before all were tried: seconds= (--seconds) allows more"
        self._result.notes += [words] * (late and words not in self._result.notes)
        return late

    def _try(self, some: Iterable[Mutation], same: dict[str, list[Mutation]] | None = None, more: float = 0.0) -> None:
        """Make candidates of mutations, while there is time; those that change nothing go into `same`, by kind."""
        for mutation, value in self._values(some, same is not None):
            self._result.tried += 1
            if not torch.equal(value, self._reference):
                self._consider(mutation, value, more)
                if same is not None:
                    self._rows.append((mutation, self._error(value)))
            elif same is not None:
                same[mutation.kind] += [mutation] * (len(same[mutation.kind]) < UNCHANGED_KEPT)

    def _values(self, some: Iterable[Mutation], usual: bool) -> Iterator[tuple[Mutation, Tensor]]:
        """What mutations give; of a large step those that on its slices leave less, or mend some elements.

        What cannot be run on slices alone is run last.
        """
        slices, whole = self._slices, list[Mutation]()
        for alone, these in ((slices is None, some), (True, whole)):  # the second grows meanwhile
            for edits, alike in itertools.groupby(these, lambda m: (*m.edits,)):
                most = 1 if slices is None or alone else slices.together(edits)
                while group := [*itertools.islice(alike, most)]:
                    self.progress(f"explain: {self._result.tried} mutations tried")
                    if self._late(self._until):
                        return
                    found = [None] if alone else self._on_slices(group)
                    for mutation, judged in zip(group, self._judged(found), strict=True):
                        if judged is None and not alone:
                            whole.append(mutation)
                        elif judged is not None and not (judged.promising and self._near(mutation)):
                            self._result.tried += 1
                            if usual and judged.differs:
                                self._rows.append((mutation, judged.error))
                        elif (value := self._value(mutation)) is not None:
                            yield mutation, value

    def _judged(self, found: Sequence[Tensor | None]) -> list[_OnSlices | None]:
        """What slices tell, those of several mutations at once."""
        some = [x for x in found if x is not None]
        if not some or len({x.dtype for x in some}) > 1:
            return [self._judged([x])[0] if x is not None else None for x in found] if some else [None] * len(found)
        values, was = torch.stack(some), self._sample
        off = was.distance(values)
        mended = ((off <= EXPLAINED) & (was.off > EXPLAINED))[:, was.wrong].double().mean(1).tolist()
        promising = [cost < was.half or share >= MENDED for cost, share in zip(was.costs(off), mended, strict=True)]
        differs = (values != was.reference).flatten(1).any(1).tolist()
        errors = [self._error(x, places=slice(None)) for x in values.flatten(1)[:, self._in_sample]]
        told = map(_OnSlices, promising, differs, errors)
        return [None if x is None else next(told) for x in found]

    def _near(self, mutation: Mutation) -> bool:
        """Whether a mutation may be a candidate on all, of which a GPU's values are not brought to the host for it."""
        if self._part.device.type == "cpu" or (value := self._value(mutation, there=True)) is None:
            return True
        return self._there.improves(self._there.distance(value), EXPLAINED)

    @cached_property
    def _there(self) -> Residual:
        """What is left of the whole step, on the part's device."""
        return self._residual.of(lambda x: x.to(self._part.device))

    def _on_slices(self, group: list[Mutation]) -> list[Tensor | None]:
        """What mutations of the same operations give on the slices, at once; each half where they cannot be run so."""
        if len(group) == 1 or self._slices is None:
            return [self._value(mutation, sample=True) for mutation in group]
        with collected([], "mutations at once", DOES_NOT_APPLY):
            found = self._slices.values([m.edits for m in group])
            if found is not None and all(x.shape == self._sample.observed.shape for x in found):
                return found
        half = len(group) // 2
        return self._on_slices(group[:half]) + self._on_slices(group[half:])

    @cached_property
    def _everywhere(self) -> Tensor:
        """The same number of elements as on the slices, of all."""
        if self._slices is None:
            return self._at
        return _places(self._observed, self._reference, self._residual.wrong.flatten())

    @cached_property
    def _relative(self) -> float:
        """What a fitted number may be off by the step's own tolerance."""
        if self._allowed is None:
            return 1e-7
        size = self._reference.nan_to_num(0.0, 0.0, 0.0).abs()
        return float((self._allowed / size.clamp(min=1e-300)).median())

    def _error(
        self, value: Tensor, at: Tensor | None = None, allowed: Tensor | None = None, places: Any = None
    ) -> Tensor:
        """By how much elements, which a value has at `places`, or at `at`, too, are not the reference's; tolerances."""
        at, allowed = self._at if at is None else at, self._allowed if allowed is None else allowed
        a, b = value.flatten()[at if places is None else places].cpu(), self._reference.flatten()[at]
        error = (a - b).abs() if a.is_complex() else a.double() - b.double()
        error = error / (allowed.flatten()[at] if allowed is not None else 1.0)
        return error.nan_to_num(0.0, 0.0, 0.0)

    def _consider(self, mutation: Mutation, value: Tensor, more: float = 0.0) -> None:
        """A candidate everywhere, and one in the tightest region, where these save bits."""
        residual = self._residual
        cost = PER_RANK * mutation.rank + PER_NUMBER * mutation.fitted + more
        off = residual.distance(value)
        self._add(mutation, cost, Region(0.0, "", residual.wrong), off)
        if mutation.kind != "precision" and (found := residual.left(off, EXPLAINED)) and found[1].words:
            self._add(mutation, cost + PER_REGION + found[1].bits, found[1], found[0])

    def _add(self, mutation: Mutation, cost: float, region: Region, off: Tensor) -> None:
        left, few = self._residual.cost(off), off.numel() < FEWEST_FOR_NOISE
        bits = left + cost - few * PER_RANK * mutation.rank  # of a few numbers the simplest that fits is no evidence
        if bits < self._residual.bits and left < self._residual.half:
            self._candidates.append(_Candidate(mutation, bits, region, (cost, len(self._candidates))))

    def _value(
        self, mutation: Mutation, fresh: bool = False, sample: bool = False, there: bool = False
    ) -> Tensor | None:
        """What a mutation gives, or the slices of it; None where it cannot be run, or gives another shape."""
        with collected(self._context.errors, f"{mutation.says} could not be run", DOES_NOT_APPLY):
            slices, like = self._slices, self._observed
            if slices is not None and sample:
                value, like = slices.value(mutation.edits), self._sample.observed
            else:
                value = self._part.value(mutation.edits, self._fresh if fresh else None)
            fits = value is not None and value.shape == like.shape
            return None if not fits else value if there else value.to(like.device)
        return None

    def _fitting(self) -> list[tuple[_Candidate, float]]:
        """The shortest candidates that are within the bound of their own program, and those as short within CLOSE.

        What holds in scattered elements alone says what these hold, and not why: it is no cause, but for a part of a
        sum that is missing there, which is what a race leaves.
        """
        limit = self._residual.bits - MARGIN - math.log2(max(1, self._result.tried - self._refused))
        self._refused = self._result.tried
        until = (time.monotonic() + self._last) / 2.0
        found: list[tuple[_Candidate, float]] = []
        some = (c for c in self._candidates if not c.region.scattered or c.mutation.lost)
        for candidate in sorted(some, key=attrgetter("bits")):
            if candidate.bits > limit or self._late(until):
                break
            if id(candidate) not in self._shares:
                self._shares[id(candidate)] = self._share(candidate.mutation, candidate.region)
            if (share := self._shares[id(candidate)]) is not None:
                limit = min(limit, candidate.bits + CLOSE)
                found.append((candidate, share))
                if candidate.mutation.kind == "precision":  # of rounding nothing shows where it was
                    return found[:1] if len(found) == 1 else found[:-1]
        return found

    def _share(self, mutation: Mutation, region: Region, rules: Precision | None = None) -> float | None:
        """The largest difference as a share of the mutation's own bound; None where it is beyond, or looks systematic.

        A cast is checked against the reference's bound: the recorder, which is in float64, has no operation for it.
        """
        edits, seen = dict(mutation.edits), self._seen
        if mutation.kind == "precision":
            share = float(self._residual.distance(self._part.value(edits).cpu()).max())
            return share if share <= 1.0 else None
        if region.words:
            target, mask = self._part.target, region.mask
            first = edits.get(target, Edit(torch.clone, (Ref(target),)))
            edits[target] = Edit(lambda *args: first.run(*args)[mask], first.takes)
            there = seen.read(self._step)[mask]
            seen = Trace({name: there if name == self._step else seen[name] for name in seen.names})
        with collected(self._context.errors, f"{mutation.says} could not be checked against its tolerance"):
            program = self._part.mutated(edits)
            rules = rules or self._rules
            alone = self._alone(program, rules) if not region.words else None
            if alone is not None:  # these first; they are enough where all is near
                some = self._checked(*alone)
                if some is None or float(self._residual.distance(self._part.value(edits).cpu()).max()) <= 1.0:
                    return some
            return self._checked(program, seen, rules)
        return None

    def _alone(self, program: Golden, rules: Precision) -> tuple[Golden, Trace, Precision] | None:
        """Slices of a mutated program, some of them others than what was looked at; what was observed of them, and
        their rules. None of a small step, and where all of it counts."""
        slices, observed = self._slices, self._seen.read(self._step)
        if slices is None or rules.normwise or any(rule.get("normwise") for rule in rules.steps.values()):
            return None
        with collected([], "slices as a program of their own"):
            others = torch.linspace(0, observed.shape[slices.dim.dim] - 1, CHECKED).long()
            places = torch.cat([slices.places, others]).unique()
            some = Slices(Part(program, program.trace(), self._step, only_shapes=True), slices.dim.dim, places)
            golden, taken = some.alone()
            seen = Trace({name: some.cut(self._seen.read(of), along) for name, (of, along) in taken.items()})
            steps = {name: rules.steps[of] for name, (of, _) in taken.items() if of in rules.steps}
            return golden, seen, replace(rules, steps=steps)
        return None

    def _checked(self, program: Golden, seen: Trace, rules: Precision) -> float | None:
        found = localise(seen, program, precision=rules).findings[self._step]
        return None if found.wrong or found.own is None else found.own.bound_used

    def _nearest(self) -> Cause | None:
        """What saves most bits of all that was refused, where it saves half."""
        best = min(self._candidates, key=attrgetter("bits"), default=None)
        if best is None or (value := self._value(best.mutation)) is None:
            return None
        off = self._residual.distance(value)
        return self._cause(best.says(), float(off[best.region.mask].max()) if best.region.words else float(off.max()))

    def _ordered(self) -> list[Mutation]:
        """What was tried, those first that look most like the error, or make most wrong elements right."""
        if not self._rows:
            return []
        error, rows = self._error(self._observed), torch.stack([row for _, row in self._rows])
        cosines = (rows @ error).abs() / (rows.norm(dim=1) * error.norm()).clamp(min=1e-300)
        wrong = error.abs() > 1.0
        mended = ((rows - error).abs() <= EXPLAINED)[:, wrong].double().mean(1) if bool(wrong.any()) else cosines
        order = torch.maximum(cosines, mended).argsort(descending=True, stable=True).tolist()
        return [self._rows[i][0] for i in order]

    def _one_way(self) -> None:
        """Mutations that reach the result by one of several ways."""
        usual = (m for m in self._ordered() if m.kind != "precision")
        self._try(way for m in usual for way in one_way(self._context, m))

    def _twins(self) -> None:
        """The same change of two values."""
        self._try(twins(self._context, (m for m in self._ordered() if m.kind != "precision")))

    def _terms(self) -> None:
        """A value of the program that was added, or not cleared, times a number."""
        good = self._residual.wrong & self._observed.isfinite() & self._reference.isfinite()
        if self._allowed is None or int(good.sum()) < FEWEST_FOR_NOISE:
            return
        at = good.flatten().nonzero().flatten()
        at = at if self._slices is None else self._everywhere[good.flatten()[self._everywhere]]
        error, allowed = (self._observed - self._reference).flatten()[at], self._allowed.flatten()[at]
        known = list(self._at_hand())
        for name, v in known:
            if self._late(self._until):
                return
            some = v.flatten()[at]
            large = some.abs() > 4.0 * allowed
            if int(large.sum()) < FEWEST_FOR_NOISE:
                continue
            c = float((error[large] / some[large]).median())
            if not c or not math.isfinite(c):
                continue
            simple = next((k for k in (1.0, -1.0, 0.5, -0.5, 2.0, -2.0) if abs(c - k) < 1e-4 * abs(k)), None)
            c = simple if simple is not None else c
            says = f"{name} is {'added' if c > 0 else 'subtracted'}" + f", {abs(c):.6g} times" * (abs(c) != 1.0)
            added = partial(torch.add, other=c * v)
            self._try(
                [Mutation("other", says, edit_results([self._part.target], added), fitted=simple is None)],
                more=4.0 + math.log2(len(known) + 1) + 2.0 * (name not in self._part.golden.steps),
            )

    def _solved(self) -> None:
        """Several of the program's own numbers at once: those in its lines, and those of a table."""
        if self._allowed is None or not bool((self._observed.isfinite() | ~self._reference.isfinite()).all()):
            return
        every = torch.arange(self._observed.numel())
        for some in unknowns(self._context, OPERATIONS_WITH_FITTED_NUMBER):
            start = some.numbers
            x = self._equation(some.edits, self._everywhere, self._allowed).fewest(start)
            if x is not None and (count := int((x != start).sum())):
                if count * len(every) < MOST_POLISHED:
                    allowed, _ = self._tolerance(some.edits(x))
                    x = self._equation(some.edits, every, allowed).polished(x, x != start)
                more = PER_NUMBER * (count - 1) + bits_of_subset(len(x), count)
                self._try([Mutation("constant", some.says(x), some.edits(x), 0, True)], more=more)
                if self._fitting():
                    return

    def _equation(self, edits: Callable[[Tensor], dict[int, Edit]], at: Tensor, allowed: Tensor | None) -> Equation:
        """What numbers have to give in some elements, and what edits for them do, in tolerances."""

        def run(x: Tensor) -> Tensor | None:
            value = self._value(Mutation("", "other numbers", edits(x)))
            if value is None or not bool((value.isfinite() | ~self._reference.isfinite()).all()):
                return None
            return self._error(value, at, allowed)

        return Equation(run, self._error(self._observed, at, allowed), partial(self._late, self._until))

    def _at_hand(self) -> Iterator[tuple[str, Tensor]]:
        """Values that the program computes, from what was observed where that is known, in the step's shape."""
        golden, shape = self._part.golden, self._observed.shape
        program, target = golden.program, golden.steps[self._step]
        names = {number: name for name, number in reversed(golden.steps.items())}
        wanted = [n.id for n in program.nodes if n.id != target and n.shape and _fits(n.shape, shape) and n.dtype]
        wanted = sorted(wanted, key=lambda i: abs(i - target))[:MOST_AT_HAND]

        found = dict[int, Tensor]()

        def seen(i: int, value: Any) -> Any:
            known = names.get(i, "") if i != target else ""
            there = self._seen_all.read(known) if known in self._seen_all else None
            value = there.to(value) if there is not None and there.shape == value.shape else value
            if i in wanted and isinstance(value, Tensor) and value.is_floating_point():
                found[i] = value.cpu()
            return value

        with collected(self._context.errors, "values at hand could not be computed"), on(self._part.device):
            program.run(program.cone(wanted, ()), {}, (), seen=seen)
        done: list[Tensor] = []
        for i in (i for i in wanted if i in found):
            x = found[i].expand(shape)
            varies = bool(x.isfinite().all()) and float(x.std()) > 0.0
            if varies and not any(torch.equal(x, other) for other in done):
                done.append(x)
                site = program.nodes[i].site.split(": ")[0]
                yield names.get(i, f"the result of {program.nodes[i].op.strip('_')} ({site})"), x

    def _later(self) -> None:
        """The same change of one line in a loop from one of its times on."""
        likely = [m for m in self._ordered() if in_a_loop(self._part, m)]
        for mutation in (m for m in likely if not self._late(self._until)):
            n, later = in_a_loop(self._part, mutation), partial(from_one_on, mutation)
            best = _lowest(cache(self._distance_of(later)), 1, n)
            self._try([later(best)], more=math.log2(n))

    def _inside(self) -> None:
        """Mutations in a part of one dimension of what they change; what leaves something out first."""
        likely = [m for m in self._ordered() if m.kind != "precision"]
        left_out = [m for m in likely if m.kind in ("drop_term", "zero")][:RESTRICTED]
        for mutation in dict.fromkeys([*left_out, *likely[:RESTRICTED]]):
            if self._late(self._until):
                return
            with collected(self._context.errors, f"{mutation.says} could not be restricted", DOES_NOT_APPLY):
                self._in_parts(changed(self._context, mutation))

    def _sums(self) -> None:
        """Sums that leave out some of their terms; of extrema, whose parts do not add up, all but the first tile."""
        self._in_parts(summed(self._context))
        for whole, d in ((one, d) for one in summed(self._context) for d in one.dims):
            for tile in (2**k for k in range(2, 12) if 2**k < whole.shape[d]):
                part, bits = whole.within(d, behind(whole.shape, d, tile))
                self._try([part], more=bits)

    def _in_parts(self, some: Iterable[Partial]) -> None:
        """Those parts of a dimension in which a mutation comes nearest, if it holds in these only."""
        for whole, d in ((one, d) for one in some for d in one.dims if one.shape[d] > 1):
            masks = subsets(whole.shape, d, whole.parts)
            for parts in self._parts_of(whole, d, masks):
                if whole.shape[d] > len(masks):  # they are tiles, whose ends are looked at
                    self._parts_of(whole, d, refined(whole.shape, d, whole.parts, parts))

    def _parts_of(self, whole: Partial, d: int, masks: list[Tensor]) -> list[list[int]]:
        """Which of these masks together come nearest; each choice is tried."""
        columns = list[Tensor]()
        for mask in masks:
            if self._late(self._until) or (value := self._value(whole.within(d, mask)[0])) is None:
                return []
            columns.append(self._error(value, self._everywhere))
        error = self._error(self._observed, self._everywhere)
        wrong = error.abs() > 1.0  # where it holds elsewhere is the region's to say
        found = [*chosen(torch.stack(columns, 1)[wrong], error[wrong])] if bool(wrong.any()) and columns else []
        for parts in dict.fromkeys(map(tuple, found)):
            mask = torch.stack([masks[k] for k in parts] or [torch.zeros(1, dtype=torch.bool)]).any(0)
            if bool(mask.any()) and not bool(mask.all()) and not whole.scattered(mask):
                part, bits = whole.within(d, mask)
                zero = part.kind == "truncate" and not bool(self._observed[self._residual.wrong].any())
                self._try([replace(part, kind="zero") if zero else part], more=bits)
        return found

    def _fitted(self) -> Iterator[Mutation]:
        """Factors, offsets and numbers of the program that are looked for, not taken from a list."""
        good = self._observed.isfinite() & self._reference.isfinite()
        o, v = self._observed[good], self._reference[good]
        if v.numel() and self._allowed is not None and int(self._residual.wrong.sum()) != 1:  # one number always fits
            c, shift = float((o * v).sum() / v.square().sum().clamp(min=1e-300)), float((o - v).median())
            words = f"the result is {abs(shift):.6g} too {'large' if shift > 0 else 'small'}"
            yield Mutation("constant", words, edit_results([self._part.target], lambda x: x + shift), 0, True)
            words = f"the result is {c:.6g} times what it should be"
            yield Mutation("scale", words, edit_results([self._part.target], lambda x: x * c), 0, True)
        for node in self._part.nodes:
            for j, number in enumerate(node.args):
                if not is_number(number):
                    continue
                if node.op in OPERATIONS_WITH_FITTED_NUMBER and number and self._context.real(node.id):
                    yield self._best_number(node, j, number)
                elif node.op in THRESHOLDS:
                    yield self._best_threshold(node, j, number)

    def _best_number(self, node: Node, j: int, c: float) -> Mutation:
        """The number that brings the step nearest to what was observed, in place of one of the program's."""
        from scipy.optimize import minimize_scalar

        mutation = partial(self._another, node, j, c)

        def off(new: float) -> float:
            return self._distance(mutation(new))

        best = min([0.0, *(c * 10.0 ** (k / 4) for k in range(-16, 17)), *(10.0**k for k in range(-8, 9))], key=off)
        if not best:
            return mutation(best)
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
        edits, too = numbered(self._part, [node.id], j, new)
        says = f"{node.op} has about {new:.6g} where the reference has {c:.6g}{too}"
        return Mutation(kind_of_number(node.op, c, new), says, edits, 0, True)

    def _distance_of(self, mutation: Callable[[int], Mutation]) -> Callable[[int], float]:
        """How far off the mutations of a number are."""
        return lambda k: self._distance(mutation(k))

    def _unwritten(self) -> Iterator[tuple[Region, Mutation]]:
        """One number in all elements that are wrong, as in memory that was never written, or was cleared alone.

        Scattered zeros may have been computed, as by another threshold: those are left to the mutations.
        """
        wrong, target = self._residual.wrong, self._part.target
        some, everywhere = self._observed[wrong], bool(wrong.all())
        first = some[0] if len(some) else None
        if first is None or not bool(((some == first) | (some.isnan() & first.isnan())).all()):
            return
        name, count = ("NaN" if first.isnan() else f"{float(first):.6g}"), wrong.numel()
        says = f"{self._step} is {name} in {len(some)} of {count} elements, like memory that was never written"
        constant = bool((self._observed == first).all()) and wrong.numel() >= FEWEST_FOR_NOISE
        if constant or everywhere:
            says = f"{self._step} is {name} everywhere: was it computed, or written, at all?"
        if count > 1 and (first == 0 or first.isnan()):
            never = ~wrong & (self._reference != 0) & (not constant)
            region = tightest(wrong | (self._reference == 0), never, self._residual.inputs)
            if bool(first.isnan()) or not region.scattered:
                fill = partial(torch.masked_fill, mask=wrong | constant, value=float(first))
                yield region, Mutation("zero", says, edit_results([target], fill), 0)

    def _distance(self, mutation: Mutation) -> float:
        """What a mutation leaves, in bits; as if nothing were comparable where it cannot be run, or the time is up."""
        residual, value = self._residual, None
        if not self._late(self._until):
            value = self._value(mutation, sample=True) if self._slices is not None else None
            residual = residual if value is None else self._sample
            value = value if value is not None else self._value(mutation)
        off = residual.distance(value) if value is not None else torch.full_like(residual.off, FARTHEST)
        return residual.cost(off)

    def _cause(self, mutation: Mutation, share: float) -> Cause:
        first = min(mutation.edits)
        sites = [self._part.nodes[i].site for i in (first, *self._part.users.get(first, ()))]
        says = mutation.says if mutation.kind != "precision" else f"consistent with: {mutation.says}"
        nowhere = "in its backward" if self._step.startswith(GRADIENT) else ""
        return Cause(mutation.kind, says, next(filter(None, sites), nowhere), share)

    def _simplest_first(self, same: list[tuple[_Candidate, float]]) -> list[tuple[_Candidate, float]]:
        """Equivalent ones in the order of their descriptions, but for the first: where many of one kind in one place
        agree, what they have in common is known, and not which it was. Of its kind that of fewest alternatives leads.
        """
        ordered = sorted(same, key=lambda fit: fit[0].order)
        kind, rank = ordered[0][0].mutation.kind, ordered[0][0].order[0]
        alike = [fit for fit in ordered if fit[0].mutation.kind == kind and fit[0].order[0] <= rank + PER_RANK]
        first = min(alike, key=lambda fit: fit[0].order[0] + self._which(fit[0].mutation))
        first = next((fit for fit in ordered if self._known.get(self._key(fit[0].mutation))), first)
        return [first, *(fit for fit in ordered if fit is not first)]

    def _distinct(self, fits: list[tuple[_Candidate, float]]) -> list[Cause]:
        """One cause for all mutations that agree on fresh inputs, the shortest; what separates others is kept too."""
        classes: list[tuple[Tensor | None, str, list[tuple[_Candidate, float]]]] = []
        for candidate, share in fits:
            value, words = self._value(candidate.mutation, fresh=True, there=True), candidate.region.words
            value = value[candidate.region.mask] if value is not None and words else value
            near = self._relative if candidate.mutation.fitted else 1e-7
            same = next((s for other, where, s in classes if where == words and _alike(value, other, near)), None)
            if same is None:
                classes.append((value, words, same := []))
            same.append((candidate, share))
        left: dict[str, Cause] = {}  # of one number, those that fit are one cause
        for (candidate, share), *rest in (self._simplest_first(same) for *_, same in classes):
            equivalent = [*(each for each, _ in rest), *self._equivalent(candidate, fits)]
            self.fitted |= {self._key(each.mutation): False for each in equivalent}
            self.fitted[self._key(candidate.mutation)] = not candidate.mutation.fitted
            mutation = candidate.says()
            number, has, _ = mutation.says.partition(" has ")
            number = number if has else f"{mutation.kind}: {mutation.says}"
            cause = left.get(number, self._cause(mutation, share))
            others = [each.says() for each in equivalent]
            also = (*cause.also, *(f"{m.kind}: {m.says}" for m in others))
            lines = dict.fromkeys((*cause.elsewhere, *(self._cause(m, 0.0).line for m in others)))
            elsewhere = tuple(line for line in lines if ":" in line and line != cause.line)
            left[number] = replace(cause, also=also, elsewhere=elsewhere)
        if len(left) > 1 and self._fresh:
            self._result.separate = self._inputs
        if any(cause.also for cause in left.values()) and not self._fresh:
            self._result.notes.append(
                "the reference takes no sampled inputs: causes that agree on these inputs are one"
            )
        return list(left.values())

    def _equivalent(self, cause: _Candidate, fits: list[tuple[_Candidate, float]]) -> Iterator[_Candidate]:
        """Of the candidates with longer descriptions those that are the same, on these inputs and on fresh ones."""
        known = [each for each, _ in fits]
        longer = [c for c in self._candidates if c.region.words == cause.region.words and c not in known]
        here, fresh = (self._value(cause.mutation, fresh=fresh, there=True) for fresh in (False, True))
        for other in sorted(longer, key=attrgetter("bits"))[:MOST_EQUIVALENT]:
            same = _alike(self._value(other.mutation, there=True), here)
            if same and _alike(self._value(other.mutation, fresh=True, there=True), fresh):
                yield other

    @cached_property
    def _fresh(self) -> dict[int, Any]:
        """What the part is given and gives on sampled inputs; nothing where the reference does not take them.

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
            value = self._value(mutation, fresh=True, there=True) if kind not in shows else None
            if value is not None and not _alike(value, self._fresh[self._part.target]):
                shows[kind] = mutation.says
        return shows

    def _narrower(self) -> list[Cause]:
        """The type of fewer digits whose products would give such an error: as large, and noise.

        How large is chosen, not derived: both limits may be halved or doubled in 58 cases. A few numbers are not enough
        to see noise: one of three errors that are anything is as large. Sums in fewer digits are not tried: no case of
        749 needs it, and of 24 errors that are no rounding 4 were taken for it.
        """
        error = (self._observed - self._reference).nan_to_num(0.0, 0.0, 0.0)
        value = self._reference.nan_to_num(0.0, 0.0, 0.0)
        off = float(error.norm())

        def like(x: Tensor, most: float) -> bool:
            return abs(float((error * x).sum())) > most * off * float(x.norm())

        values = self._part.values
        results = (x.cpu() for i, x in values.items() if self._context.real(i) and x.shape == value.shape)
        by_chance = max(COSINE_OF_NOISE, 4.0 * error.numel() ** -0.5)  # of many results
        alike = like(value, COSINE_OF_NOISE) or any(like(x.nan_to_num(0.0, 0.0, 0.0), by_chance) for x in results)
        few = error.numel() < FEWEST_FOR_NOISE or not self._residual.everywhere
        if few or alike or _smooth(error, value):
            return []
        program, size = self._part.mutated({}), off / math.sqrt(error.numel())
        for narrower in (n for n in NARROWER_PRODUCTS if not self._late(self._last)):
            declared = {**self._rules.steps.get(self._step, {}), "products": narrower}
            rules = replace(self._rules, steps={**self._rules.steps, self._step: declared})
            some, _, of_some = self._alone(program, rules) or (program, self._seen, rules)
            bound = bounded(some, precision=of_some, steps=[self._step]).step(self._step).bound
            noise = torch.as_tensor(bound.noise if bound is not None else math.inf).double().square().mean().sqrt()
            if not noise / 8.0 <= size <= 2.0 * noise:
                continue
            share = self._share(Mutation("", "", {}), Region(0.0, "", self._residual.wrong), rules)
            if share is not None:
                says = f"consistent with: fewer digits than declared (products={narrower})"
                return [Cause("precision", says, self._part.nodes[self._part.target].site, share)]
        return []


def _places(observed: Tensor, reference: Tensor, wrong: Tensor) -> Tensor:
    """SAMPLED elements of those that are finite, by chance, three in four of them wrong."""
    good = (observed.isfinite() & reference.isfinite()).flatten().nonzero().flatten()
    good = good[torch.randperm(len(good), generator=torch.Generator().manual_seed(0))]
    return torch.cat([good[wrong[good]][: 3 * SAMPLED // 4], good[~wrong[good]][: SAMPLED // 4]])


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN at NaN's place."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a shape can be expanded to another."""
    return 0 < len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(shape[::-1], whole[::-1], strict=False))


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


def _alike(a: Tensor | None, b: Tensor | None, relative: float = 1e-7) -> bool:
    """Whether two results in float64 are equal but for the order of operations, which costs some of its 16 digits."""
    if a is None or b is None or a.shape != b.shape:
        return False
    if not torch.promote_types(a.dtype, b.dtype).is_floating_point:
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=relative, atol=1e-10, equal_nan=True)


def _sampled(x: Tensor, seed: int, whole: bool) -> Tensor:
    """Values like those of x in other places, none constant; `whole` numbers between its own, in order where it is."""
    generator = torch.Generator(x.device).manual_seed(seed)
    if not x.numel() or x.dtype == torch.bool or x.is_complex() or not (whole or x.is_floating_point()):
        return x
    if not x.is_floating_point():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high < 2:  # a number with a meaning of its own, as -100 for no label, and masks
            return x
        first = min(low, 1) if low == high else low
        other = torch.randint(first, high + 1, x.shape, generator=generator, device=x.device).to(x)
        return other.sort(-1).values if torch.equal(x, x.sort(-1).values) else other
    mixed = x.flatten()[torch.randperm(x.numel(), generator=generator, device=x.device)].view(x.shape)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    constant = x.numel() > 1 and bool((x == x.flatten()[0]).all())
    mixed = (
        -mixed if x.numel() < FEWEST_FOR_NOISE and bool((x < 0.0).any()) else mixed
    )  # else a few would keep their signs
    return mixed * (1.0 + 0.25 * noise) + (0.5 * noise if constant else 0.0)
