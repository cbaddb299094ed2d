"""Steps checked with a recorded golden: each step's part of the program is re-run on the observed steps before it.

A part is run once exactly: observed minus re-run is the step's own error. It is run SIMULATED_RUNS times with random
rounding, which gives the error that each element may have, and twice as often again, with independent and with fully
correlated errors, which gives what errors may add up to over rows, columns and tiles. A step that fails is still
correct if it equals the golden, or if the steps before it may have been rounded otherwise than they were observed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor

from whywrong.checking.findings import INHERITED, NOT_CHECKED, OTHER_PARAMETER, OWN, Finding, absent, reason
from whywrong.checking.masks import unmasked
from whywrong.checking.rounding import LIVE, Exact, Rounding, linear, magnitude, simulate
from whywrong.checking.ties import RUNS, either_way
from whywrong.comparing.bounds import Bound, quantile
from whywrong.comparing.comparison import Comparison, compare
from whywrong.comparing.elements import Block, Elements
from whywrong.comparing.precision import (
    FIELD_CHOICES,
    INTEGERS,
    UNIT_ROUNDOFF,
    Precision,
    dtype_of,
    half_ulp,
    name_of,
    stored,
)
from whywrong.comparing.relation import DIFFERS, relation
from whywrong.comparing.structure import Null, Structure, structure
from whywrong.comparing.touched import rearranged, touched
from whywrong.errors import UsageError, did_you_mean, first_line
from whywrong.process_state import SMALL
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.operations import IN_STORAGE, MOVES, NOT_UNIQUE, PRODUCTS, SUMS
from whywrong.recording.program import INPUT, narrower
from whywrong.recording.recorder import BACKWARD
from whywrong.recording.steps import Trace

Progress = Callable[[str], None]

SIMULATED_RUNS = 24
"""Simulated runs. Student's quantile at 24 is 1.3 to 2 times the normal one; twice the runs would take a fifth off."""

ROUNDED = "if what came before it was rounded otherwise"
AS_GOLDEN = "equal to the golden"
AT_TIES = "if ties or kinks went the other way"
TIES = "ok: ties that fell the other way"
"""How a step had to be read to be correct, where not simply from the observed steps before it."""

MOST_RECOMPUTED = 64
"""Operations up to which a value may be computed again for each operation that takes it. A kernel stores what takes
more, and to re-run that for each would take time that grows as the square of the program's length."""

AT_ONCE = 1 << 27
"""Elements of the operations whose steps are checked at a time, 1 GiB in float64: some are in memory in a few forms."""

LONG_SECONDS = 10.0
"""Seconds that a re-run may take without a line beforehand: as long as people wait before they think it hangs."""


class Rerun:
    """The observed steps of a golden, which has all of them among its steps, and how they are checked.

    `chance` is the false positive rate of one step and instrument. `guessed` says that nobody declared the precision:
    then a program that goes on with unrounded steps is correct too. `_observed` has the steps of the golden's shapes,
    in their own dtypes on the golden's device; `_names` their names by operation, `_values` their values by operation,
    real numbers in float64; `_misshapen` the other steps.
    """

    def __init__(
        self,
        golden: Golden,
        observed: Trace,
        rules: Precision,
        guessed: bool,
        chance: float,
        progress: Progress,
        elements: bool,
    ) -> None:
        self._golden, self._program, self._rules = golden, golden.program, rules
        self._chance, self._progress, self._keep, self._declared = chance, progress, elements, not guessed
        self._readings = (rules, replace(rules, eager=False)) if guessed and rules.eager else (rules,)
        self._device = golden[next(iter(golden.steps))].device
        steps = {name: observed.read(name).to(self._device) for name in observed.names}
        self._floats = {name_of(x.dtype) for x in steps.values()} & set(UNIT_ROUNDOFF)
        self._observed = {name: x for name, x in steps.items() if x.shape == golden[name].shape}
        self._misshapen = {name: x for name, x in steps.items() if name not in self._observed}
        self._names: dict[int, list[str]] = {}
        for name in self._observed:
            self._names.setdefault(golden.steps[name], []).append(name)
        self._values = {i: self._value(names[0]) for i, names in self._names.items()}
        self._stored = _may_be_stored(golden)
        self._before_exp = set(self._program.cone((n.id for n in self._program.nodes if n.op in ("exp", "exp2")), ()))

    def _value(self, name: str) -> Tensor:
        """An observed step, in float64 where the golden has real numbers."""
        observed = self._observed[name]
        return self._golden.widened(name, observed) if self._golden[name].is_floating_point() else observed

    def check(self) -> dict[str, Finding]:
        """A finding for every step, in the order of the program; where inputs differ, for these alone."""
        steps, nodes = self._golden.steps, self._program.nodes
        findings = {name: self._input(name) for name in self._observed if nodes[steps[name]].func == INPUT}
        present = {name: i for name, i in steps.items() if name in self._observed or name in self._misshapen}
        differ = {name for name, finding in findings.items() if finding.diverges}
        if differ - {*self._golden.parameters}:
            return {name: findings.get(name, Finding(name, None, words=NOT_CHECKED)) for name in present}
        findings |= self._check_made({steps[name] for name in differ})
        for name, observed in self._misshapen.items():
            total, given = compare(observed, self._golden[name]), nodes[steps[name]].func == INPUT
            words = self._not_given(name, total) if given else f"{OWN}: {reason(total, None)}"
            holds = rearranged(observed, self._golden[name])
            findings[name] = Finding(name, total, wrong=True, diverges=True, words=words, touched=holds)
        numbers, last = set(present.values()), max(present.values())
        missing = {name: i for name, i in steps.items() if i not in numbers and nodes[i].func != INPUT}
        findings |= {name: absent(name, after_all=i > last) for name, i in missing.items()}
        return {name: findings[name] for name in steps if name in findings}

    def _check_made(self, tainted: set[int]) -> dict[str, Finding]:
        """Check each computed step on the steps before it; what fails, again as if these had been rounded otherwise.

        A step that passes either check is correct, or one with its ties the other way. If it still differs from the
        golden after a divergence, as those of the inputs `tainted`, it inherits.
        """
        parts = {i: self._program.cone([i], self._values) for i in self._values if self._program.nodes[i].func != INPUT}
        findings = self._check_some(parts)
        for rules in self._readings:
            self._rules = rules
            failing = {i: part for i, part in parts.items() if any(findings[name].wrong for name in self._names[i])}
            rounded = self._check_some(failing, rounded=True)
            findings |= {name: finding for name, finding in rounded.items() if not finding.wrong}
        for i, part in parts.items():
            if any(findings[name].wrong for name in self._names[i]):
                findings |= self._tied(i, part)
        for first, *others in self._names.values():  # one step by several names is wrong once
            same = [n for n in others if findings.get(n) and torch.equal(self._observed[n], self._observed[first])]
            findings |= {n: replace(findings[n], wrong=False, words=INHERITED) for n in same if findings[n].wrong}
        for i in parts:
            inherits = not tainted.isdisjoint(self._program.before(i, self._values))
            for name in self._names[i]:
                finding = findings[name]
                if inherits and not finding.wrong and finding.total is not None and not finding.total.ok:
                    finding = findings[name] = replace(finding, diverges=True, words=INHERITED)
                tainted |= {i} if finding.diverges else set()
        return findings

    def _check_some(self, parts: dict[int, list[int]], rounded: bool = False) -> dict[str, Finding]:
        """The same as of :meth:`_check_parts`, of as many at a time as have AT_ONCE elements in all."""
        found = {} if rounded else {n: f for i, part in parts.items() for n, f in self._nearest(i, part).items()}
        groups, size = list[dict[int, list[int]]]([{}]), 0
        for i, part in ((i, part) for i, part in parts.items() if self._names[i][0] not in found):
            own = sum(math.prod(self._program.nodes[k].shape) for k in part)
            if size + own > AT_ONCE and groups[-1]:
                groups, size = [*groups, {}], 0
            groups[-1][i], size = part, size + own
        for group in filter(None, groups):
            found |= self._check_parts(group, rounded)
        return found

    def _nearest(self, i: int, part: list[int]) -> dict[str, Finding]:
        """Findings of a large step whose every element is the number of its type that is nearest to the exact one.

        No implementation can do better, so no rounding has to be simulated: one run is enough. Two in three elements of
        an eager program are of such steps. Nothing of other steps, and of a part that cannot be run.
        """
        found, names = dict[str, Finding](), self._names[i]
        golden = self._golden[names[0]]
        if golden.numel() < SMALL or not golden.is_floating_point():
            return {}
        try:
            exact = self._program.run(part, {k: v for k, v in self._values.items() if k != i}, (i,))[i]
        except RuntimeError:  # of which _check_parts makes words
            return {}
        for name in names:
            observed, types = self._observed[name], {self._storage(name), name_of(self._observed[name].dtype)}
            half = torch.stack([half_ulp(exact, dtype) for dtype in types]).amin(0)
            if not compare(observed, exact, bound=half).ok:
                return {}
            unit = Bound(2.0 * half, "a unit in the last place")
            own, total = compare(observed, exact, bound=unit), compare(observed, golden, bound=unit)
            elements = self._elements(name, observed, exact, unit.absolute)
            found[name] = Finding(name, total, own, compare(exact, golden).rms_ratio, words="ok", elements=elements)
        return found

    def _check_parts(self, parts: dict[int, list[int]], rounded: bool = False) -> dict[str, Finding]:
        """A finding for each step that ends one of `parts`.

        A step that fails a test of structure, with its null from independent errors, is checked again with that of more
        simulated runs, whose errors may have as much structure. A part that cannot be run on the observed steps, since
        shapes depend on values, is separated from the rest, and not checked.
        """
        findings: dict[str, Finding] = {}
        for with_null in (False, True):
            try:
                simulated = self._simulated(parts, rounded=rounded, with_null=with_null) if parts else {}
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if len(parts) > 1:
                    for i, part in parts.items():
                        findings |= self._check_parts({i: part}, rounded)
                    return findings
                words = f"{NOT_CHECKED}: cannot be run on what was observed before it ({first_line(error)})"
                return findings | {name: Finding(name, None, words=words) for i in parts for name in self._names[i]}
            for i in parts:
                findings |= {n: self._finding(n, i, simulated[n], ROUNDED * rounded) for n in self._names[i]}
            structured = {finding.name for finding in findings.values() if finding.wrong and finding.structure}
            parts = {i: part for i, part in parts.items() if not structured.isdisjoint(self._names[i])}
        return findings

    def _tied(self, i: int, part: list[int]) -> dict[str, Finding]:
        """Findings of a step that is correct if ties and kinks before it went otherwise than in the golden.

        An element that depends on them may be off by what that changes, and takes no part in structure. A whole number
        lies between the smallest and the largest that there may be.
        """
        program, unit, name = self._program, self._rule(i).unit, self._names[i][0]
        gradient = name.startswith((GRADIENT, f"{BACKWARD}/")) or not program.backward.isdisjoint(program.cone([i], ()))
        others, exact = list(either_way(program, i, unit, gradient)), self._golden[name]
        changed = [x - exact for x in others] if exact.is_floating_point() else []
        off = torch.stack(changed).nan_to_num(0.0, 0.0, 0.0) if changed else exact.new_zeros(1, *exact.shape)
        undecided = off.abs().amax(0) > half_ulp(exact, self._storage(name)) if changed else None
        if not others or (undecided is not None and not bool(undecided.any())):
            return {}
        found: dict[str, Finding] = {}
        simulated = self._simulated({i: part}, rounded=True, with_null=undecided is not None, undecided=undecided)
        for name in self._names[i]:
            observed = self._observed[name]
            if undecided is None:
                low, high = torch.stack(others).aminmax(dim=0) if len(others) else (exact, exact)
                fits = bool(((observed >= low) & (observed <= high)).all())
                found |= {name: Finding(name, compare(observed, exact), words=TIES)} if fits else {}
                continue
            o, allowed = self._value(name), simulated[name].bound(self._value(name), self._chance)
            spread = quantile(self._chance / max(1, o.numel()), RUNS) * off.square().mean(0).sqrt()
            allowed = replace(allowed, absolute=allowed.absolute + torch.where(undecided, spread, 0.0))
            own, pattern, wrong = self._against(i, o, exact, allowed)
            if not wrong:
                found[name] = Finding(name, own, own, 0.0, pattern, reading=AT_TIES)
        return found

    def _input(self, name: str) -> Finding:
        """An input equals the golden's within half a unit of its storage."""
        observed, golden = self._observed[name], self._golden[name]
        half = Bound(half_ulp(golden, self._storage(name)), "half a unit") if golden.is_floating_point() else None
        total = compare(observed, golden, bound=half)
        words = "ok" if total.ok else self._not_given(name, total)
        elements = self._elements(name, observed, golden, half.absolute if half else 0.0)
        return Finding(name, total, total, 0.0, None, not total.ok, not total.ok, words, elements=elements)

    def _not_given(self, name: str, total: Comparison) -> str:
        """What an input is of the golden's, which it is not."""
        observed = self._observed[name] if name in self._observed else self._misshapen[name]
        known = relation(observed, self._golden[name])
        words = reason(total, None) if known.kind == DIFFERS else known.words
        what = OTHER_PARAMETER if name in self._golden.parameters else "not the golden's input"
        return f"{what}: {words}"

    def _elements(self, name: str, o: Tensor, exact: Tensor, allowed: Any) -> Elements | None:
        if not self._keep:
            return None
        return Elements.of(self._observed[name], self._golden[name], [Block.of(o, exact, allowed)])

    def _storage(self, name: str) -> str:
        """The name of the dtype that bounds a step's rounding: the declared one, or its own."""
        own, declared = name_of(self._observed[name].dtype), self._rules.of(name).storage
        return own if declared is None or own in INTEGERS or declared in INTEGERS else declared

    def _rule(self, i: int) -> Precision:
        """The precision of a step, stored in its own dtype where none is declared; before integers, as declared."""
        name = self._names[i][0]
        rule, storage = self._rules.of(name), self._storage(name)
        return rule if storage in INTEGERS else replace(rule, storage=storage)

    def _rules_of(self, i: int, part: list[int], rounded: bool) -> dict[int, Precision]:
        """The precision of each operation in a step's part; `eager` means that its result is rounded to storage.

        Where eager operations are declared, these are all whose storage is narrower than the accumulator, also those
        that one of torch's is made of: a program may have written it out. Otherwise they are none, or, with `rounded`,
        those in :attr:`_stored`, and the whole part of a gradient or of what computes one, since a backward starts from
        stored values. These may be narrower than the step, as the sum of the gradients of a residual stream, which
        autograd adds unseen before they are cast. A cast that was recorded in the observed dtype always rounds.
        """
        rule, program = self._rule(i), self._program
        as_written = self._as_written(i)
        gradient = self._names[i][0].startswith((GRADIENT, f"{BACKWARD}/"))
        stored = part if gradient else self._stored
        narrowest = self._rules.storage or (self._narrowest if rule.eager and not as_written else "")

        def of(k: int) -> Precision:
            written = program.nodes[k].dtype if as_written and not rounded else ""
            storage = written or rule.storage or ""
            rounds = rounded and k in stored and k != i
            if gradient and rounds and narrower(narrowest, storage):
                storage = narrowest
            narrow = UNIT_ROUNDOFF.get(storage, 0.0) > rule.unit
            eager = rounds or (as_written and program.narrows(k)) or (rule.eager and narrow)
            types = storage or None, self._rules.storage or self._narrowest
            return replace(for_operation(rule, program.nodes[k].op, types, self._declared), eager=eager)

        return {k: of(k) for k in part}

    def _shared(self, part: list[int]) -> set[int]:
        """Values that several operations of a part take, and that a kernel may compute again for each of them."""
        if any(self._program.nodes[k].op in NOT_UNIQUE for k in part):  # two results of these do not go together
            return set()
        run = (k for k in part if k not in self._values or k == part[-1])
        taken = Counter(p for k in run for p in self._program.nodes[k].parents)
        shared = (k for k, count in taken.items() if count > 1 and k not in self._values)
        return {k for k in shared if len(self._program.cone([k], self._values)) <= MOST_RECOMPUTED}

    @property
    def _narrowest(self) -> str:
        return max(self._floats, key=UNIT_ROUNDOFF.__getitem__, default="")

    def _input_tolerances(self, parts: Mapping[int, list[int]]) -> dict[int, Tensor | None]:
        """How far each value that enters a part may be from the observed: half a unit of the dtype it was rounded to.

        Not eager: the kernel may have gone on with its unrounded result. Eager: a copy in the trace's narrowest dtype
        may exist, unless the golden has recorded its casts. An input that the trace does not have may have been stored
        in the dtype of the step that is computed from it. None: it may have been rounded, and all of it is exact.
        """
        tolerances: dict[int, Tensor | None] = {}
        for i, part in parts.items():
            rule, storage = self._rule(i), self._storage(self._names[i][0])
            types = {k: storage for k in part if self._program.nodes[k].func == INPUT and k not in self._values}
            if not rule.eager:
                types |= {k: self._storage(self._names[k][0]) for k in self._before(i)}
            elif not self._as_written(i):
                types |= dict.fromkeys(self._before(i), self._narrowest)
            for k, name in types.items():
                value = self._values[k] if k in self._values else self._program.values[k]
                registers = k in self._values and not rule.eager
                if not value.is_floating_point() or (registers and UNIT_ROUNDOFF.get(name, 0.0) <= rule.unit):
                    continue
                copied = k in self._values and len(self._floats) > 1
                exact = value == stored(value, name)
                if registers or copied:  # a zero is one, unless others are so small that it may have been rounded to it
                    tiny = torch.finfo(dtype_of(name)).tiny
                    exact = (value == 0.0) & ~((value != 0.0) & (value.abs() < tiny)).any()
                half = None if bool(exact.all()) else torch.where(exact, 0.0, half_ulp(value, name))
                some = [x for x in (tolerances.get(k), half) if x is not None]
                tolerances[k] = reduce(torch.maximum, some) if some else None
        return tolerances

    def _as_written(self, i: int) -> bool:
        """Whether the golden gives the dtypes inside a step's part: it was recorded in the observed dtype."""
        return self._program.nodes[i].dtype == self._storage(self._names[i][0])

    def _before(self, i: int) -> list[int]:
        """The observed steps from which one is computed; inputs only where every operation is stored."""
        eager, nodes = self._rule(i).eager, self._program.nodes
        return [k for k in self._program.before(i, self._values) if eager or nodes[k].func != INPUT]

    def _computed_twice(self, parts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The parts of observed steps before these that share operations with them, where not all is stored.

        A kernel that has to compute those for the later step may never take the earlier one. Before a gradient these
        are all: its formula may hold for unrounded values alone, as that deviations from a mean add up to zero.
        """
        nodes, twice = self._program.nodes, dict[int, list[int]]()
        for i, part in parts.items():
            for k in (k for k in self._before(i) if nodes[k].func != INPUT and self._values[k].is_floating_point()):
                cone = self._program.cone([k], self._values)
                shared = (n for n in {*cone} & {*part} - {k} if not isinstance(nodes[n].func, str))
                computes = not self._rule(i).eager and any(nodes[n].op not in MOVES for n in shared)
                if computes or self._names[i][0].startswith(GRADIENT):
                    twice[k] = cone
        return twice

    def _simulated(
        self,
        parts: dict[int, list[int]],
        *,
        rounded: bool = False,
        scale: float = 1.0,
        with_null: bool = False,
        undecided: Tensor | None = None,
    ) -> dict[str, Simulated]:
        """The results of the parts, all together: once exactly, and SIMULATED_RUNS times with random rounding, three
        times as often `with_null`.

        With `rounded`, an observed step that shares operations with a part errs as if the kernel had computed it again.
        Elements that are `undecided` have no part in structure.
        """
        program, device, observed = self._program, self._device, self._values
        twice = self._computed_twice(parts) if rounded else {}
        checked = sorted(set().union(*parts.values()))
        order = sorted(set(checked).union(*twice.values()))
        rules: dict[int, Precision] = {}
        for i, part in (parts | twice).items():
            rules = self._rules_of(i, part, rounded) | rules
        start = {k: v for k, v in observed.items() if k not in parts}
        tolerances: Mapping[int, Tensor | None] = self._input_tolerances(parts) if rounded else {}

        values: dict[int, Any] = {}

        def record(results: dict[int, Any], perturbed: Mapping[int, Any], i: int, value: Any) -> Any:
            """Keep the result of each checked step, and go on with its perturbed value, else with its observed one."""
            if i in parts or i in twice:
                results[i] = value
            return perturbed.get(i, observed.get(i, value))

        shared = {k for part in parts.values() for k in self._shared(part)} if rounded else set()
        nested = {k for k in shared if not rules[k].eager and len(shared.intersection(program.cone([k], observed))) > 1}
        entering = program.values | observed
        exact = Exact(rules, program, device, moved=bool(tolerances))
        begun = time.perf_counter()
        inputs = {k: v for k, v in start.items() if k not in twice}
        program.run(order, inputs, (), rule=exact, seen=partial(record, values, {}))
        brief = time.perf_counter() - begun < LONG_SECONDS / 1000.0
        simulated = {
            name: Simulated(values[i], self._storage(name), rules[i], undecided)
            for i in parts
            for name in self._names[i]
        }
        curved = (part for i, part in parts.items() if self._rule(i).normwise or not linear(program, part))
        nonlinear = {k for part in curved for k in part}

        def run(nearest: bool = False) -> dict[int, Any]:
            results: dict[int, Any] = {}

            def recompute(k: int, rounding: Rounding, x: Any) -> Any:
                """A numerator and its sum may be of scores computed twice, if these are not stored."""
                value = program.run(program.cone([k], observed), {**observed, **perturbed}, (k,), rule=rounding)[k]
                some = k in nested and isinstance(x, Tensor)
                return torch.where(rounding.either() > 0.0, value, x) if some else value

            recomputed = {k: partial(recompute, k) for k in shared}
            rounding = Rounding(exact, nonlinear, observed, scale, nearest, recomputed)
            perturbed = {k: rounding.moved(entering[k], half) for k, half in tolerances.items() if half is not None}
            for k, part in twice.items():
                before = {j: v for j, v in observed.items() if j != k}
                independent = Rounding(exact, nonlinear, observed, scale, nearest)
                error = program.run(part, before, (k,), rule=independent)[k] - values[k]
                perturbed[k] = perturbed.get(k, observed[k]) + error.nan_to_num(0.0, 0.0, 0.0)
            program.run(checked, start | perturbed, (), rule=rounding, seen=partial(record, results, perturbed))
            return results

        largest, count = program.largest(order), (3 if with_null else 1) * SIMULATED_RUNS
        if not brief:  # a simulated run shows how long all of them will take
            begun = time.perf_counter()
            list(simulate(run, 1, 0, largest, device))
            seconds, memory = (time.perf_counter() - begun) * count, 8 * LIVE * largest / 2**20
            if seconds > LONG_SECONDS:
                self._progress(
                    f"{len(order)} operations are run {count} times: about {seconds:.0f} s and {memory:.0f} MiB"
                )

        for seed, nearest in enumerate((None, True, False) if with_null else (None,)):
            for i, results in simulate(partial(run, bool(nearest)), SIMULATED_RUNS, seed, largest, device):
                for name in self._names[i]:
                    simulated[name].add(results, nearest)
        return simulated

    def _finding(self, name: str, i: int, simulated: Simulated, reading: str = "") -> Finding:
        observed, golden = self._observed[name], self._golden[name]
        if not golden.is_floating_point():
            return self._whole_numbers(name, i, observed, golden, simulated)
        o, exact = self._value(name), simulated.exact
        allowed = simulated.bound(o, self._chance)
        total = compare(observed, golden, bound=allowed)
        inherited = compare(exact, golden).rms_ratio
        own, pattern, wrong = self._against(i, o, exact, allowed)
        if wrong and not (as_golden := self._against(i, o, golden, allowed))[-1]:
            own, pattern, wrong = as_golden  # it is correct, whatever the dump has of the steps before it
            reading = AS_GOLDEN
        words = f"{OWN}: {reason(own, pattern)}" if wrong else "ok"
        pair = self._unmasked(i, o, golden if reading == AS_GOLDEN else exact)
        touches = self._touched(i, *pair, allowed.absolute) if wrong and not reading else ()
        elements = self._elements(name, *pair, allowed.absolute)
        return Finding(name, total, own, inherited, pattern, wrong, wrong, words, reading, touches, elements)

    def _touched(self, i: int, o: Tensor, exact: Tensor, allowed: Any) -> tuple[str, ...]:
        """Which elements are wrong, in the words of the inputs and of the steps from which a step is computed."""
        names = {self._names[k][0]: x for k, x in self._values.items() if k < i}
        before = {self._names[k][0] for k in self._program.before(i, self._values)}
        given = {name: self._golden[name] for name in self._golden.inputs}
        return touched(o, exact, allowed, given | {name: names[name] for name in names if name in before}, names)

    def _against(self, i: int, o: Tensor, exact: Tensor, allowed: Bound) -> tuple[Comparison, Structure | None, bool]:
        """Both instruments, each element and, where no element fails, structure; and whether one of them fails."""
        o, exact = self._unmasked(i, o, exact)
        own = compare(o, exact, bound=allowed)
        pattern = structure(o - exact, exact, allowed, false_alarm=self._chance) if own.ok else None
        return own, pattern, pattern is None or not pattern.ok

    def _unmasked(self, i: int, o: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        return unmasked(o, exact) if i in self._before_exp else (o, exact)

    def _whole_numbers(self, name: str, i: int, observed: Tensor, golden: Tensor, simulated: Simulated) -> Finding:
        """Whole numbers and truth values are equal, unless rounding before them may change one.

        Then simulated runs give other values there too, with errors as large as the elementwise test would allow.
        """
        total, own = compare(observed, golden), compare(observed, simulated.exact)
        wrong, words = False, "ok"
        if not own.ok:
            scale = quantile(self._chance / max(1, golden.numel()), math.inf)
            part = self._program.cone([i], self._values)
            scaled = self._simulated({i: part}, rounded=True, scale=scale)[name]
            value = observed.to(scaled.low.dtype)
            wrong = not total.ok and bool(((value < scaled.low) | (value > scaled.high)).any())
            words = f"{OWN}: {reason(own, None)}" if wrong else TIES
        inherited = float(not compare(simulated.exact, golden).ok)
        touches = self._touched(i, observed, simulated.exact, 0.0) if wrong else ()
        elements = self._elements(name, observed, simulated.exact, 0.0)
        return Finding(name, total, own, inherited, None, wrong, wrong, words, touched=touches, elements=elements)


def _may_be_stored(golden: Golden) -> set[int]:
    """Operations whose results a program may store although it declares so of steps alone, not all of them observed.

    These are the steps, what their values were moved from, as the rows of a stack are, and the values of the forward
    that the backward takes.
    """
    program = golden.program
    forward = set(program.cone([i for name, i in golden.steps.items() if not name.startswith(GRADIENT)], ()))
    stored = set(golden.steps.values())
    for node in reversed(program.nodes):
        if node.op in MOVES and node.id in stored:
            stored.update(node.parents)
        elif node.id not in forward:
            stored.update(forward.intersection(node.parents))
    return stored


def for_operation(rule: Precision, op: str, types: tuple[str | None, ...], declared: bool = True) -> Precision:
    """The rule of one operation of which the first of `types` is the storage, with the formats of factors and of sums.

    Of products that are not declared the factors have the first of the types that is narrow; where every operation is
    eager, they have that format anyway. Where that is `declared`, torch's sums to places in memory (those of SUMS that
    are :data:`IN_STORAGE`) are stored each time that something is added, in which a long one may lose much.
    """
    formats = types if op in PRODUCTS and not rule.eager else ()
    products = rule.products or next((format for format in formats if format in FIELD_CHOICES["products"]), None)
    stored = declared and rule.eager and op in IN_STORAGE & SUMS and types[0] in FIELD_CHOICES["accumulate"]
    sums = max(rule.accumulate, str(types[0]) if stored else "", key=lambda name: UNIT_ROUNDOFF.get(name, 0.0))
    return replace(rule, storage=types[0], products=products, accumulate=sums)


def bounded(
    golden: Golden, *, precision: Precision, false_alarm: float = 1e-6, steps: Collection[str] | None = None
) -> Trace:
    """The golden's steps, float64, each with a :class:`whywrong.Bound` of its whole error, own and inherited.

    The bounds come from SIMULATED_RUNS runs of the whole program in `precision`, from the same inputs; steps of whole
    numbers and inputs have none. `false_alarm` is the probability that a correct step is flagged: with 1e-6 thousands
    can be compared. `steps` are those that are wanted, by name; without, all. Raises UsageError for a golden that was
    not recorded, and for a name that it does not have.
    """
    if not isinstance(golden, Golden):
        raise UsageError(f"golden: expected what whywrong.golden recorded, got a {type(golden).__name__}")
    names = [*dict.fromkeys(golden.steps if steps is None else steps)]
    if isinstance(steps, str) or not names:
        raise UsageError(f"steps: expected names of steps, got {steps!r}")
    if unknown := [name for name in names if name not in golden.steps]:
        raise UsageError(
            f"steps: no step {unknown[0]!r}; {did_you_mean(unknown[0], golden.steps)}expected a step's name"
        )
    program, numbers, wanted = golden.program, set(golden.steps.values()), {golden.steps[name] for name in names}
    exact, order = {i: golden.value(i) for i in wanted}, program.cone(wanted, ())
    device = next(iter(exact.values())).device
    rules: dict[int, Precision] = {}
    for name, i in golden.steps.items():
        rule = precision.of(name)
        for k in program.cone([i], numbers) - rules.keys():
            rules[k] = for_operation(rule, program.nodes[k].op, (rule.storage, precision.storage))
    made = [i for i, x in exact.items() if x.is_floating_point() and program.nodes[i].func != INPUT]
    simulated = {i: Simulated(exact[i], rules[i].storage or "float32", rules[i]) for i in made}
    factors = Exact(rules, program, device)
    program.run(order, {}, (), rule=factors)
    run = partial(program.run, order, {}, simulated, rule=Rounding(factors))
    for i, results in simulate(run, SIMULATED_RUNS, 0, program.largest(order), device):
        simulated[i].add(results)
    trace = Trace()
    for name, i in ((name, golden.steps[name]) for name in names):
        trace.add(name, exact[i], simulated[i].bound(exact[i], false_alarm) if i in simulated else None)
    return trace


class Simulated:
    """A step's exact re-run, and how far simulated runs are from it."""

    def __init__(self, exact: Tensor, storage: str, rule: Precision, undecided: Tensor | None = None) -> None:
        self.exact, self._storage, self._rule, self._undecided = exact, storage, rule, undecided
        self.low, self.high = exact, exact
        self._squares: Tensor | float = 0.0
        real = storage not in INTEGERS and exact.is_floating_point()
        self._overflowed = exact.abs() > torch.finfo(dtype_of(storage)).max if real else torch.tensor(False)
        self._null: Null | None = None

    def add(self, value: Tensor, nearest: bool | None = None) -> None:
        """Take simulated results [runs, *shape], not yet rounded to storage.

        Without `nearest` they give each element's variance, from SIMULATED_RUNS of them. With it, True for correlated
        errors and False for independent ones, they are the null of the tests of structure.
        """
        if not self.exact.is_floating_point():
            self.low, self.high = torch.minimum(self.low, value.amin(0)), torch.maximum(self.high, value.amax(0))
            return
        self._overflowed = self._overflowed | ~(value.abs().amax(0) < math.inf)
        if nearest is None:
            self._squares = self._squares + self._error(value).square().sum(0)
            return
        self._null = self._null or Null(self.exact, self._noise)
        if nearest:
            value = value.round() if self._storage in INTEGERS else stored(value, self._storage)
        else:  # either way: a step whose declared dtype is narrower than its own need not be rounded at all
            half = half_ulp(value, self._storage, flush=self._rule.flush)
            value = value + (torch.rand_like(value) - 0.5) * (2.0 * half)
        self._null.add(self._error(value), nearest)

    def _error(self, value: Tensor) -> Tensor:
        return (value - self.exact).nan_to_num(0.0, 0.0, 0.0)

    @cached_property
    def _noise(self) -> Tensor:
        """The standard deviation of an element's error, rounded to storage; after the first SIMULATED_RUNS.

        Below the normal numbers there are few to round to, and rounding is no noise: there it is 0, and only single
        elements are checked; so it is where a choice could go either way.
        """
        size = magnitude(self.exact)
        half = half_ulp(size, self._storage, flush=self._rule.flush)
        normal = size >= (0.0 if self._storage in INTEGERS else torch.finfo(dtype_of(self._storage)).tiny)
        normal = normal if self._undecided is None else normal & ~self._undecided
        return torch.where(normal, (half.square() / 3.0 + self._squares / SIMULATED_RUNS).sqrt(), 0.0)

    def bound(self, observed: Tensor, chance: float) -> Bound:
        """The tolerance of each element, its error's standard deviation, and the null of the tests of structure."""
        finite = self.exact.isfinite()
        size = torch.maximum(magnitude(self.exact), magnitude(observed))
        half = torch.where(finite, half_ulp(size, self._storage, flush=self._rule.flush), 0.0)
        t = quantile(chance / max(1, observed.numel()), SIMULATED_RUNS)
        allowed = half + t * torch.as_tensor(self._squares / SIMULATED_RUNS).sqrt()
        why = f"{t:.3g} sigma of {SIMULATED_RUNS} simulated runs and half a unit of storage"
        overflows = self._overflowed & finite & ~observed.isfinite()
        allowed = torch.where(overflows, math.inf, torch.nan_to_num(allowed, 0.0))
        return Bound(allowed, why, self._noise, null=self._null)
