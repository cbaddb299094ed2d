"""Steps against a recorded golden: each one's part of the program, re-run on what was observed before it.

The part is run once as it is: what is left is the step's own error. Then SIMULATED_RUNS times with random rounding,
which gives the error that each element may have, and SIMULATED_RUNS times more with independent errors and with errors
as alike as they can be, which gives what errors may add up to over rows, columns and tiles. A step that is wrong by
this is right all the same if it equals the golden, or if what came before it may have been rounded otherwise than it
was observed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from whywrong.checking.findings import INHERITED, NOT_CHECKED, OWN, Finding, absent, reason
from whywrong.checking.masks import unmasked
from whywrong.checking.rounding import LIVE, Exact, Rounding, linear, magnitude, simulate
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
from whywrong.comparing.signature import signature
from whywrong.comparing.structure import Null, Structure, structure
from whywrong.errors import UsageError, first_line
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.operations import MOVES, NOT_UNIQUE, PRODUCTS
from whywrong.recording.program import INPUT, narrower
from whywrong.recording.steps import Trace

Progress = Callable[[str], None]

SIMULATED_RUNS = 24
"""Simulated runs. Student's quantile at 24 is 1.3 to 2 times the normal one; twice the runs would take a fifth off."""

ROUNDED = "if what came before it was rounded otherwise"
AS_GOLDEN = "equal to the golden"
"""How a step had to be read to be right, where not simply from what was observed before it."""

COMPUTED_ANEW = 64
"""Operations up to which a value may be computed again for each that takes it. A kernel stores what takes more, and to
run that again for each would take time that grows as the square of the program's length."""

LONG_SECONDS = 10.0
"""Seconds that a re-run may take without a word beforehand: as long as people wait before they think it hangs."""


class Rerun:
    """A golden, and what was observed of its steps. `chance` is the false-alarm rate of one step and instrument.

    `guessed` says that nobody declared the precision: a program that goes on with unrounded steps is right by it too.
    `_names` are the steps by the number of their operation, `_given` what was observed of them, float64.
    """

    def __init__(
        self,
        golden: Golden,
        seen: Trace,
        rules: Precision,
        guessed: bool,
        chance: float,
        progress: Progress,
        elements: bool,
    ) -> None:
        golden = golden.with_steps(name for name in seen.names if name not in golden.steps)
        self._golden, self._program, self._seen, self._rules = golden, golden.program, seen, rules
        self._chance, self._progress, self._keep = chance, progress, elements
        self._readings = (rules, replace(rules, eager=False)) if guessed and rules.eager else (rules,)
        self._names: dict[int, list[str]] = {}
        for name, number in golden.steps.items():
            if name in seen:
                self._names.setdefault(number, []).append(name)
        self._device = golden[next(iter(golden.steps))].device
        self._given = {i: self._observed(names[0]) for i, names in self._names.items() if self._fits(names[0])}
        self._stored = _may_be_stored(golden)
        self._before_exp = set(self._program.cone((n.id for n in self._program.nodes if n.op in ("exp", "exp2")), ()))

    def _fits(self, name: str) -> bool:
        return tuple(self._seen.read(name).shape) == tuple(self._golden[name].shape)

    def _observed(self, name: str) -> Tensor:
        """An observed step where the golden is, real numbers in float64."""
        value, golden = self._seen.read(name).to(self._device), self._golden[name]
        return value.double() if golden.is_floating_point() else value

    def check(self) -> dict[str, Finding]:
        """A finding for every step, in the order of the program; where inputs differ, of these alone."""
        steps, nodes = self._golden.steps, self._program.nodes
        found = {name: self._input(name) for i in self._given if nodes[i].func == INPUT for name in self._names[i]}
        if any(one.diverges for one in found.values()):
            there = (name for name in steps if name in self._seen)
            return {name: found.get(name, Finding(name, None, words=NOT_CHECKED)) for name in there}
        found |= self._checked()
        last = max(steps[name] for name in self._seen.names)
        for name, i in steps.items():
            if name in self._seen and not self._fits(name):
                total = compare(self._seen.read(name), self._golden[name])
                found[name] = Finding(name, total, wrong=True, diverges=True, words=f"{OWN}: {reason(total, None)}")
            elif name not in self._seen and i not in self._names and nodes[i].func != INPUT:
                found[name] = absent(name, after_all=i > last)
        return {name: found[name] for name in steps if name in found}

    def _checked(self) -> dict[str, Finding]:
        """Check each step on the steps observed before it; what fails, again as if these had been rounded otherwise.

        Passing either way clears a step. If it differs from the golden all the same, after a divergence, it inherits.
        """
        made = [i for i in self._given if self._program.nodes[i].func != INPUT]
        parts = {i: self._program.cone([i], self._given) for i in made}
        found = self._check_steps(parts)
        for rules in self._readings:
            self._rules = rules
            failing = {i: part for i, part in parts.items() if any(found[name].wrong for name in self._names[i])}
            found |= {name: one for name, one in self._check_steps(failing, rounded=True).items() if not one.wrong}
        tainted: set[int] = set()
        for i in made:
            inherits = not tainted.isdisjoint(self._program.before(i, self._given))
            for name in self._names[i]:
                one = found[name]
                if inherits and not one.wrong and one.total is not None and not one.total.ok:
                    one = found[name] = replace(one, diverges=True, words=INHERITED)
                tainted |= {i} if one.diverges else set()
        return found

    def _check_steps(self, parts: dict[int, list[int]], rounded: bool = False) -> dict[str, Finding]:
        """A finding for each step of `parts`.

        What has structure by errors that do not depend on each other is held to that of more simulated runs, in whose
        errors there may be as much. What cannot be run on what was observed, since shapes depend on values, is checked
        apart from the rest, and not checked itself.
        """
        found: dict[str, Finding] = {}
        for whole in (False, True):
            try:
                simulated = self._simulated(parts, rounded=rounded, whole=whole) if parts else {}
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if len(parts) > 1:
                    apart = (self._check_steps({i: part}, rounded) for i, part in parts.items())
                    return found | {name: one for each in apart for name, one in each.items()}
                words = f"{NOT_CHECKED}: cannot be run on what was observed before it ({first_line(error)})"
                return found | {name: Finding(name, None, words=words) for i in parts for name in self._names[i]}
            for i in parts:
                found |= {name: self._finding(name, i, simulated[name], ROUNDED * rounded) for name in self._names[i]}
            structured = {one.name for one in found.values() if one.wrong and one.structure}
            parts = {i: part for i, part in parts.items() if not structured.isdisjoint(self._names[i])}
        return found

    def _input(self, name: str) -> Finding:
        """What was given to both is equal, but for what storing it costs."""
        observed, golden = self._seen.read(name).to(self._device), self._golden[name]
        half = Bound(half_ulp(golden, self._storage(name)), "half a unit") if golden.is_floating_point() else None
        total = compare(observed, golden, bound=half)
        words = "ok" if total.ok else f"not the golden's input: {reason(total, None)}"
        every = self._elements(name, observed, golden, half.absolute if half else 0.0)
        return Finding(name, total, total, 0.0, None, not total.ok, not total.ok, words, elements=every)

    def _elements(self, name: str, o: Tensor, exact: Tensor, allowed: Any) -> Elements | None:
        if not self._keep:
            return None
        return Elements.of(self._seen.read(name), self._golden[name], [Block.of(o, exact, allowed)])

    def _storage(self, name: str) -> str:
        """The name of the dtype that a step is held to: the one that was declared, or its own."""
        own, said = name_of(self._seen.read(name).dtype), self._rules.of(name).storage
        return own if said is None or own in INTEGERS or said in INTEGERS else said

    def _rule(self, i: int) -> Precision:
        """What is declared of a step, stored as it is; of what stands before whole numbers, what is declared at all."""
        name = self._names[i][0]
        rule, storage = self._rules.of(name), self._storage(name)
        return rule if storage in INTEGERS else replace(rule, storage=storage)

    def _rules_of(self, i: int, part: list[int], rounded: bool) -> dict[int, Precision]:
        """The precision of each operation in a step's part; `eager` means that its result is rounded to storage.

        Where eager operations are declared, these are all whose storage is narrower than what is between, also those
        that one of torch's is made of: a program may have written it out. Otherwise they are none, or, with `rounded`,
        those in :attr:`_stored`, and a gradient's whole part, since a backward starts from what is stored. A cast that
        was recorded in the observed dtype always rounds.
        """
        rule, program = self._rule(i), self._program
        as_written = self._as_written(i)
        gradient = self._names[i][0].startswith(GRADIENT)
        stored = part if gradient else self._stored

        def of(k: int) -> Precision:
            written = program.nodes[k].dtype if as_written and not rounded else ""
            storage = written or rule.storage or ""
            kept = rounded and k in stored and k != i
            if gradient and kept and narrower(self._rules.storage or "", storage):
                storage = str(self._rules.storage)
            kept = kept or (as_written and program.narrows(k))
            narrow = UNIT_ROUNDOFF.get(storage, 0.0) > rule.unit
            products = format_of_factors(rule, program.nodes[k].op, storage, self._rules.storage or self._narrowest)
            return replace(rule, storage=storage or None, eager=kept or (rule.eager and narrow), products=products)

        return {k: of(k) for k in part}

    def _shared(self, part: list[int]) -> set[int]:
        """What several operations of a part take, and a kernel may compute again for each of them."""
        if any(self._program.nodes[k].op in NOT_UNIQUE for k in part):  # two answers of these do not go together
            return set()
        run = (k for k in part if k not in self._given or k == part[-1])
        taken = Counter(p for k in run for p in self._program.nodes[k].parents)
        shared = (k for k, count in taken.items() if count > 1 and k not in self._given)
        return {k for k in shared if len(self._program.cone([k], self._given)) <= COMPUTED_ANEW}

    @cached_property
    def _floats(self) -> set[str]:
        """The floating-point dtypes of what was observed."""
        return {name_of(value.dtype) for value in map(self._seen.read, self._seen.names)} & set(UNIT_ROUNDOFF)

    @property
    def _narrowest(self) -> str:
        return max(self._floats, key=UNIT_ROUNDOFF.__getitem__, default="")

    def _input_tolerances(self, parts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """How far each value that enters a part may be from the observed: half a unit of the dtype it was rounded to.

        Not eager: the kernel may have gone on with its unrounded result. Eager: a copy in the trace's narrowest dtype
        may exist, unless the golden has recorded its casts. An input that the trace has not may have been stored in the
        dtype of the step that is made from it.
        """
        tolerances: dict[int, Tensor] = {}
        for i, part in parts.items():
            rule, storage = self._rule(i), self._storage(self._names[i][0])
            types = {k: storage for k in part if self._program.nodes[k].func == INPUT and k not in self._given}
            if not rule.eager:
                types |= {k: self._storage(self._names[k][0]) for k in self._before(i)}
            elif not self._as_written(i):
                types |= dict.fromkeys(self._before(i), self._narrowest)
            for k, name in types.items():
                value = self._given[k] if k in self._given else self._program.values[k]
                registers = k in self._given and not rule.eager
                if not value.is_floating_point() or (registers and UNIT_ROUNDOFF.get(name, 0.0) <= rule.unit):
                    continue
                copied = k in self._given and len(self._floats) > 1
                known = value == stored(value, name)
                if registers or copied:  # a zero is one, unless others are so small that it may have been rounded to it
                    tiny = torch.finfo(dtype_of(name)).tiny
                    known = (value == 0.0) & ~((value != 0.0) & (value.abs() < tiny)).any()
                half = torch.where(known, 0.0, half_ulp(value, name))
                tolerances[k] = torch.maximum(tolerances[k], half) if k in tolerances else half
        return tolerances

    def _as_written(self, i: int) -> bool:
        """Whether the golden tells the types of what a step is made of: it was recorded in the observed's."""
        return self._program.nodes[i].dtype == self._storage(self._names[i][0])

    def _before(self, i: int) -> list[int]:
        """The observed steps from which one is computed; inputs are as they were given, unless all is stored."""
        eager, nodes = self._rule(i).eager, self._program.nodes
        return [k for k in self._program.before(i, self._given) if eager or nodes[k].func != INPUT]

    def _computed_twice(self, parts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The parts of observed steps before these that share operations with them, where not all is stored.

        A kernel that has to compute those for the later step may never take the earlier one. Before a gradient these
        are all: its formula may hold for what was not rounded alone, as that deviations from a mean add up to zero.
        """
        nodes, found = self._program.nodes, dict[int, list[int]]()
        for i, part in parts.items():
            for k in (k for k in self._before(i) if nodes[k].func != INPUT and self._given[k].is_floating_point()):
                cone = self._program.cone([k], self._given)
                shared = (n for n in {*cone} & {*part} - {k} if not isinstance(nodes[n].func, str))
                twice = not self._rule(i).eager and any(nodes[n].op not in MOVES for n in shared)
                if twice or self._names[i][0].startswith(GRADIENT):
                    found[k] = cone
        return found

    def _simulated(
        self, parts: dict[int, list[int]], *, rounded: bool = False, scale: float = 1.0, whole: bool = False
    ) -> dict[str, Simulated]:
        """What ends the parts, all together: once exactly, and SIMULATED_RUNS times with random rounding, thrice for a
        `whole`.

        With `rounded`, what was observed and shares operations with a part errs as if the kernel had computed it again.
        """
        program, device, given = self._program, self._device, self._given
        again = self._computed_twice(parts) if rounded else {}
        judged = sorted(set().union(*parts.values()))
        order = sorted(set(judged).union(*again.values()))
        rules: dict[int, Precision] = {}
        for i, part in (parts | again).items():
            rules = self._rules_of(i, part, rounded) | rules
        start = {k: v for k, v in given.items() if k not in parts}
        tolerances = self._input_tolerances(parts) if rounded else {}

        values: dict[int, Any] = {}

        def seen(results: dict[int, Any], replaced: Mapping[int, Any], i: int, value: Any) -> Any:
            """Keep the result of each checked step, and go on with what replaces it, else with its observed value."""
            if i in parts or i in again:
                results[i] = value
            return replaced.get(i, given.get(i, value))

        shared = {k for part in parts.values() for k in self._shared(part)} if rounded else set()
        nested = {k for k in shared if not rules[k].eager and len(shared.intersection(program.cone([k], given))) > 1}
        entering = program.values | given
        exact = Exact(rules, program, device, moved=bool(tolerances))
        begun = time.perf_counter()
        inputs = {k: v for k, v in start.items() if k not in again}
        program.run(order, inputs, (), rule=exact, seen=partial(seen, values, {}))
        brief = time.perf_counter() - begun < LONG_SECONDS / 1000.0
        found = {name: Simulated(values[i], self._storage(name), rules[i]) for i in parts for name in self._names[i]}
        curved = (part for i, part in parts.items() if self._rule(i).normwise or not linear(program, part))
        nonlinear = {k for part in curved for k in part}

        def run(nearest: bool = False) -> dict[int, Any]:
            results: dict[int, Any] = {}

            def anew(k: int, rounding: Rounding, x: Any) -> Any:
                """A numerator and its sum may be of scores computed twice, if these are not stored."""
                value = program.run(program.cone([k], given), {**given, **on}, (k,), rule=rounding)[k]
                some = k in nested and isinstance(x, Tensor)
                return torch.where(rounding.either() > 0.0, value, x) if some else value

            rounding = Rounding(exact, nonlinear, given, scale, nearest, {k: partial(anew, k) for k in shared})
            on = {k: rounding.moved(entering[k], half) for k, half in tolerances.items()}
            for k, part in again.items():
                before = {j: v for j, v in given.items() if j != k}
                apart = Rounding(exact, nonlinear, given, scale, nearest)
                off = program.run(part, before, (k,), rule=apart)[k] - values[k]
                on[k] = on.get(k, given[k]) + off.nan_to_num(0.0, 0.0, 0.0)
            program.run(judged, start | on, (), rule=rounding, seen=partial(seen, results, on))
            return results

        largest, count = program.largest(order), (3 if whole else 1) * SIMULATED_RUNS
        if not brief:  # a simulated run says how long all of them will take
            begun = time.perf_counter()
            list(simulate(run, 1, 0, largest, device))
            seconds, memory = (time.perf_counter() - begun) * count, 8 * LIVE * largest / 2**20
            if seconds > LONG_SECONDS:
                self._progress(
                    f"{len(order)} operations are run {count} times: about {seconds:.0f} s and {memory:.0f} MiB"
                )

        for seed, nearest in enumerate((None, True, False) if whole else (None,)):
            for i, results in simulate(partial(run, bool(nearest)), SIMULATED_RUNS, seed, largest, device):
                for name in self._names[i]:
                    found[name].add(results, nearest)
        return found

    def _finding(self, name: str, i: int, simulated: Simulated, reading: str = "") -> Finding:
        observed, golden = self._seen.read(name).to(self._device), self._golden[name]
        if not golden.is_floating_point():
            return self._whole_numbers(name, i, observed, golden, simulated)
        o, exact = self._observed(name), simulated.exact
        allowed = simulated.bound(o, self._chance)
        total = compare(observed, golden, bound=allowed)
        inherited = compare(exact, golden).rms_ratio
        own, below, wrong = self._against(i, o, exact, allowed)
        if wrong and not (as_golden := self._against(i, o, golden, allowed))[-1]:
            own, below, wrong = as_golden  # it is right, whatever the dump has of the steps before it
            reading = AS_GOLDEN
        words = f"{OWN}: {reason(own, below)}" if wrong else "ok"
        looks = signature(o, exact, allowed.absolute) if wrong else ""
        every = self._elements(name, *self._unmasked(i, o, golden if reading == AS_GOLDEN else exact), allowed.absolute)
        return Finding(name, total, own, inherited, below, wrong, wrong, words, reading, looks, every)

    def _against(self, i: int, o: Tensor, exact: Tensor, allowed: Bound) -> tuple[Comparison, Structure | None, bool]:
        """Both instruments: each element, and where all are possible, what they are together; and whether one fails."""
        o, exact = self._unmasked(i, o, exact)
        own = compare(o, exact, bound=allowed)
        below = structure(o - exact, exact, allowed, false_alarm=self._chance) if own.ok else None
        return own, below, below is None or not below.ok

    def _unmasked(self, i: int, o: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        return unmasked(o, exact) if i in self._before_exp else (o, exact)

    def _whole_numbers(self, name: str, i: int, observed: Tensor, golden: Tensor, simulated: Simulated) -> Finding:
        """Whole numbers and truth values are equal, unless rounding before them may turn one over.

        Then simulated runs give other values there too, with errors as large as the elementwise test would allow.
        """
        total, own = compare(observed, golden), compare(observed, simulated.exact)
        wrong, words = False, "ok"
        if not own.ok:
            scale = quantile(self._chance / max(1, golden.numel()), math.inf)
            wide = self._simulated({i: self._program.cone([i], self._given)}, rounded=True, scale=scale)[name]
            value = observed.to(wide.low.dtype)
            wrong = not total.ok and bool(((value < wide.low) | (value > wide.high)).any())
            words = f"{OWN}: {reason(own, None)}" if wrong else "ok: ties that fell the other way"
        inherited = float(not compare(simulated.exact, golden).ok)
        every = self._elements(name, observed, simulated.exact, 0.0)
        return Finding(name, total, own, inherited, None, wrong, wrong, words, elements=every)


def _may_be_stored(golden: Golden) -> set[int]:
    """Operations whose results a program may store although it declares that of steps alone, not all of them observed.

    These are the steps, what their values were moved from, as the rows of a stack are, and what the backward takes
    from the forward.
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


def format_of_factors(rule: Precision, op: str, *storage: str | None) -> str | None:
    """The format of an operation's factors: as declared, else that of what is stored, the first that is narrow.

    The latter is so of products alone. Where each operation is stored, its factors are of such numbers anyway.
    """
    kinds = storage if op in PRODUCTS and not rule.eager else ()
    return rule.products or next((one for one in kinds if one in FIELD_CHOICES["products"]), None)


def bounded(golden: Golden, *, precision: Precision, false_alarm: float = 1e-6) -> Trace:
    """The golden's steps with what each may be off in all, own and inherited, from the same inputs.

    SIMULATED_RUNS simulated runs of the whole program. `false_alarm` is that of one step: 1e-6 lets thousands be
    compared.
    """
    if not isinstance(golden, Golden):
        raise UsageError(f"golden: expected what whywrong.golden recorded, got a {type(golden).__name__}")
    program, numbers = golden.program, set(golden.steps.values())
    exact, order = {i: golden.value(i) for i in numbers}, program.cone(numbers, ())
    device = next(iter(exact.values())).device
    rules: dict[int, Precision] = {}
    for name, i in golden.steps.items():
        rule = precision.of(name)
        for k in program.cone([i], numbers) - rules.keys():
            products = format_of_factors(rule, program.nodes[k].op, rule.storage, precision.storage)
            rules[k] = replace(rule, products=products)
    made = [i for i, x in exact.items() if x.is_floating_point() and program.nodes[i].func != INPUT]
    found = {i: Simulated(exact[i], rules[i].storage or "float32", rules[i]) for i in made}
    factors = Exact(rules, program, device)
    program.run(order, {}, (), rule=factors)
    run = partial(program.run, order, {}, found, rule=Rounding(factors))
    for i, results in simulate(run, SIMULATED_RUNS, 0, program.largest(order), device):
        found[i].add(results)
    trace = Trace()
    for name, i in golden.steps.items():
        trace.add(name, exact[i], found[i].bound(exact[i], false_alarm) if i in found else None)
    return trace


class Simulated:
    """A step's exact re-run, and how far simulated runs are from it."""

    def __init__(self, exact: Tensor, storage: str, rule: Precision) -> None:
        self.exact, self._storage, self._rule = exact, storage, rule
        self.low, self.high = exact, exact
        self._squares: Tensor | float = 0.0
        real = storage not in INTEGERS and exact.is_floating_point()
        self._overflowed = exact.abs() > torch.finfo(dtype_of(storage)).max if real else torch.tensor(False)
        self._null: Null | None = None

    def add(self, value: Tensor, nearest: bool | None = None) -> None:
        """Take simulated results [runs, *shape], not yet rounded to storage.

        The first SIMULATED_RUNS give each element's variance. Those with independent errors, or `nearest`, which are
        said to be, are what chance gives the tests of structure.
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
        else:  # rounded either way: where it is declared to be narrower than it is, it need not be rounded at all
            half = half_ulp(value, self._storage, flush=self._rule.flush)
            value = value + (torch.rand_like(value) - 0.5) * (2.0 * half)
        self._null.add(self._error(value), nearest)

    def _error(self, value: Tensor) -> Tensor:
        return (value - self.exact).nan_to_num(0.0, 0.0, 0.0)

    @cached_property
    def _noise(self) -> Tensor:
        """The standard deviation of an element's error, rounded to storage; after the first SIMULATED_RUNS.

        Below the normal numbers there are few to round to, and rounding is no noise: there it is 0, and elements are
        checked alone.
        """
        size = magnitude(self.exact)
        half = half_ulp(size, self._storage, flush=self._rule.flush)
        normal = size >= (0.0 if self._storage in INTEGERS else torch.finfo(dtype_of(self._storage)).tiny)
        return torch.where(normal, (half.square() / 3.0 + self._squares / SIMULATED_RUNS).sqrt(), 0.0)

    def bound(self, observed: Tensor, chance: float) -> Bound:
        """What each element may be off, and what noise looks like."""
        finite = self.exact.isfinite()
        size = torch.maximum(magnitude(self.exact), magnitude(observed))
        half = torch.where(finite, half_ulp(size, self._storage, flush=self._rule.flush), 0.0)
        t = quantile(chance / max(1, observed.numel()), SIMULATED_RUNS)
        allowed = half + t * torch.as_tensor(self._squares / SIMULATED_RUNS).sqrt()
        why = f"{t:.3g} sigma of {SIMULATED_RUNS} simulated runs and half a unit of storage"
        overflows = self._overflowed & finite & ~observed.isfinite()
        allowed = torch.where(overflows, math.inf, torch.nan_to_num(allowed, 0.0))
        return Bound(allowed, why, self._noise, null=self._null)
