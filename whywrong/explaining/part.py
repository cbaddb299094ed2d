"""A wrong step's part of a recorded program, on what was observed before it: to be mutated and run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from whywrong.explaining.on_device import on
from whywrong.process_state import float64_by_default
from whywrong.recording.golden import Golden
from whywrong.recording.operations import UNCHECKED, name_of
from whywrong.recording.program import CONSTANT, INPUT, Node, Program, Ref, call, filled
from whywrong.recording.recorder import Recorder
from whywrong.recording.steps import Trace
from whywrong.torch_private import TorchDispatchMode, tree_map_only

Tensor = torch.Tensor


EDITED = "edited"

RIVALS = 12
"""Observed steps of a shape that occurs in a part, which are not in it and may stand in place of what is in it."""


class Edit(NamedTuple):
    """What runs in place of an operation, `run(*takes)`: on its own arguments, where `takes` says nothing else.

    `takes` may refer to the operation itself, which is what it gave (an input or a constant: its value), and to any
    before it.
    """

    run: Callable[..., Any]
    takes: tuple[Any, ...] | None = None


class NotRunError(RuntimeError):
    """An operation is not run, since its kernel may write anywhere in memory."""


class Checked(TorchDispatchMode):
    """Runs operations of :data:`UNCHECKED` as they were called before, with other numbers at most.

    The first run, in which they are `trusted`, is the recorded program's. After it each tensor has to have the shape
    that it had in one of these calls, and what the kernel does not check has to be as in that call, or within its
    limits. Else NotRunError is raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trusted = True
        self._known: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if name in UNCHECKED and self.trusted:
            self._known[name].append(args)
        elif name in UNCHECKED and not any(_fits(name, args, known) for known in self._known[name]):
            says = "with other integers or shapes is not run: its kernel does not check them"
            raise NotRunError(f"{name.strip('_')} {says}")
        return func(*args, **(kwargs or {}))


def _fits(name: str, args: tuple[Any, ...], known: tuple[Any, ...]) -> bool:
    """Whether arguments have the shapes of known ones, and what the operation does not check is known or in limits."""
    if [getattr(x, "shape", None) for x in args] != [getattr(x, "shape", None) for x in known]:
        return False
    for k, limits in UNCHECKED[name].items():
        new, old = torch.as_tensor(args[k]), torch.as_tensor(known[k])
        if new.shape != old.shape:
            return False
        allowed = limits(args) if limits is not None else range(0)
        if not bool(((new == old) | ((new >= allowed.start) & (new < allowed.stop))).all()):
            return False
    return True


class Part:
    """The operations of `golden` from the steps observed before a step, which are constants here, to the step itself.

    The steps observed are those of `seen` that have the golden's shapes. `names` are the steps among the operations and
    `origin` every operation's number in the golden, both by number here; `target` is the wrong step's number, `given`
    those of what is not computed here (the steps before, inputs and constants), and `values` what each operation gives,
    float64, on the golden's `device`; with `only_shapes`, real numbers between those given and the step are shapes.
    """

    def __init__(self, golden: Golden, seen: Trace, step: str, *, only_shapes: bool = False) -> None:
        target, nodes = golden.steps[step], golden.program.nodes
        others = [(name, k) for name, k in golden.steps.items() if k != target and name in seen]
        known = {k: name for name, k in others[::-1] if tuple(seen.read(name).shape) == nodes[k].shape}
        before = golden.program.before(target, known)
        shapes = {nodes[k].shape for k in (*before, target)}
        rivals = [k for k in known if nodes[k].shape in shapes and k not in before]
        rivals = sorted(rivals, key=lambda k: (abs(k - target), k))[:RIVALS]
        observed = {k: golden.widened(known[k], seen.read(known[k])) for k in (*before, *rivals)}
        later = [k for k in rivals if target in golden.program.cone([k], before)]
        own = {k: observed[k] for k in before}  # a later step's observed value has the fault in it, and is no evidence
        self.device = golden[step].device
        with on(self.device):
            observed |= golden.program.run(golden.program.cone(later, before), own, set(later))
        self.golden, self.program, values = golden, Program(), golden.program.values | observed
        number: dict[int, int] = {}
        for k in sorted({*observed, *golden.program.cone([target], known)}, key=lambda k: (k not in rivals, k)):
            constant = Node(k, CONSTANT, shape=nodes[k].shape, dtype=nodes[k].dtype)
            number[k] = self.program.copy(constant if k in observed else nodes[k], number, values)
        self.program.inside = {number[k] for k in golden.program.inside & number.keys()}
        self.names = {number[k]: known[k] for k in observed} | {number[target]: step}
        self.target, self.origin = number[target], {new: old for old, new in number.items()}
        self.nodes = self.program.nodes
        self._checked = _checked(golden, [target, *rivals])
        self.given = [node.id for node in self.nodes if node.func in (INPUT, CONSTANT)]
        self.values = dict[int, Any]()
        kept = range(len(self.nodes)) if not only_shapes else [*self.given, self.target]

        def keep(i: int, value: Any) -> Any:
            self.values[i] = value if i in kept else tree_map_only(Tensor, _shape, value)
            return value

        with self._checked, on(self.device):
            self.program.run(range(len(self.nodes)), {}, (), seen=keep)
        self.users: dict[int, list[int]] = {}
        for node in self.nodes:
            for parent in node.parents:
                self.users.setdefault(parent, []).append(node.id)
        self._reached: dict[tuple[int, ...], list[int]] = {}

    def value(self, edits: Mapping[int, Edit], values: Mapping[int, Any] | None = None) -> Any:
        """The step with `edits` in place, by number; on `values` of some operations, where not on what was observed.

        What the edits need and `values` do not have is computed again.
        """
        known = values or self.values
        nodes, changed = list(self.nodes), self.downstream(*edits)
        taken = {p for i, edit in edits.items() for p in Node(i, EDITED, self._takes(i, edit)).parents}
        order = self.program.cone({*changed} | (taken - known.keys()), known.keys() - {*changed})
        for i, edit in edits.items():
            nodes[i] = Node(i, EDITED, self._takes(i, edit))
            if i in nodes[i].parents and i not in self.given:  # it takes what it gives by itself
                takes = tree_map_only(Ref, partial(_replaced, old=i, new=len(nodes)), nodes[i].args)
                nodes[i] = Node(i, EDITED, takes)
                order.insert(order.index(i), len(nodes))
                nodes.append(self.nodes[i])

        def rule(node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
            return edits[node.id].run(*args) if node.func == EDITED else call(node, args, kwargs)

        with self._checked, on(self.device):
            return Program(nodes).run(order, known, {self.target}, rule=rule)[self.target]

    def _takes(self, i: int, edit: Edit) -> tuple[Any, ...]:
        return self.nodes[i].args if edit.takes is None else edit.takes

    def downstream(self, *start: int) -> list[int]:
        """These operations and all that depend on them, in order."""
        if start not in self._reached:
            found = set(start)
            for node in self.nodes:  # each comes after what it takes
                if not found.isdisjoint(node.parents):
                    found.add(node.id)
            self._reached[start] = sorted(found)
        return self._reached[start]

    def fresh(self, inputs: Mapping[str, Tensor]) -> dict[int, Any]:
        """On other inputs of the golden: what is given here, and what the step gives."""
        given = {self.golden.steps[name]: value for name, value in inputs.items()}
        wanted, whole = {self.origin[i] for i in self.given}, self.golden.program
        with self._checked, on(self.device):
            found = whole.run(whole.cone(wanted, given), given, wanted)
            start = {i: found[self.origin[i]] for i in self.given}
            return start | self.program.run(range(len(self.nodes)), start, {self.target})

    def mutated(self, edits: Mapping[int, Edit]) -> Golden:
        """This part as a golden with `edits` in place: recorded, so that their own rounding can be simulated."""
        program, number, given = Program(), dict[int, int](), self.given
        for node in sorted(self.nodes, key=lambda node: node.id not in given):
            number[node.id] = program.copy(node, number, self.values)
            if node.id in edits and node.id not in given:
                number[node.id] = self._splice(program, node, edits[node.id], number)
            if [node.id] == given[-1:]:  # these may take each other's place
                number |= {i: self._splice(program, self.nodes[i], edits[i], number) for i in given if i in edits}
        program.inside |= {number[i] for i in self.program.inside}
        steps = {self.names[i]: k for k, i in enumerate(given) if i in self.names}
        golden = Golden(program, {**steps, self.names[self.target]: number[self.target]}, {})
        return golden.to(self.device)

    def _splice(self, program: Program, node: Node, edit: Edit, outer: Mapping[int, int]) -> int:
        """Append what an edit does, `outer` being the numbers of operations there; returns that of its result."""
        recorder, takes = Recorder(), self._takes(node.id, edit)
        values = {p: self.values[p] for p in Node(0, EDITED, takes).parents}
        inputs = {p: recorder.input(x) for p, x in values.items() if isinstance(x, Tensor)}
        with torch.no_grad(), float64_by_default(), self._checked, on(self.device), recorder:
            result = edit.run(*filled(takes, values))
            result = result.clone() if any(result is x for x in values.values()) else result
        mini, last = recorder.program, recorder.number(result)
        number = {inner: outer[p] for p, inner in inputs.items()}
        for each in (each for each in mini.nodes[: last + 1] if each.id not in inputs.values()):
            number[each.id] = program.copy(each, number, mini.values)
            program.nodes[-1].dtype = node.dtype if each.id == last else each.dtype
            if node.id in self.program.inside or (each.id in mini.inside and each.id != last):
                program.inside.add(number[each.id])
        return number[last]


def _checked(golden: Golden, targets: list[int]) -> AbstractContextManager[Any]:
    """What checks the operations of UNCHECKED, whose recorded calls it has seen; nothing where there is none."""
    program = golden.program
    unchecked = {k for k in program.cone(targets, ()) if program.nodes[k].op in UNCHECKED}
    if not unchecked:
        return nullcontext()
    with (checked := Checked()):
        program.run(program.cone(unchecked, ()), {}, ())
    checked.trusted = False
    return checked


def _shape(x: Tensor) -> Tensor:
    """Of real numbers the shape alone."""
    return x.to("meta") if x.is_floating_point() else x


def _replaced(ref: Ref, old: int, new: int) -> Ref:
    """A reference to `new` in place of one to `old`."""
    return Ref(new) if ref.id == old else ref
