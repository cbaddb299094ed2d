"""The order of a trace's steps: as it is told, or as the golden's numbers tell what is made of what."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence

from labkit import precision
from labkit.allowance import roundings
from labkit.inference import Found, inferred
from labkit.judgement import NEAREST, State

TWO_WAYS = ("exp", "log", "sqrt")
"""Functions whose inverse is one that is looked for too."""


def in_order(state: State) -> list[str]:
    """The golden's steps in its own order; where only the observed says one, in that, with what it has not after it.

    Where neither says one, in the names' natural order, but no step before its own inputs: what is told of them, else
    what each was found to be made of.
    """
    golden, observed = state.golden, state.observed
    if golden.about.get("order"):
        return golden.names
    if not observed.about.get("order"):
        return _inputs_first(golden.names, {x: state.inputs(x) or state.deduced.get(x, []) for x in golden.names})
    known = [name for name in observed.names if name in golden]
    return known + [name for name in golden.names if name not in observed]


def _inputs_first(names: Sequence[str], made: Mapping[str, Sequence[str]]) -> list[str]:
    ordered: dict[str, None] = {}
    for wanted in names:
        open_steps, met = [wanted], {wanted}
        while open_steps:
            inputs = made[open_steps[-1]]
            first = next((x for x in inputs if x in made and x not in ordered and x not in met), None)
            if first is None:  # all there, or a circle, which is cut where it is met
                ordered[open_steps.pop()] = None
            else:
                met.add(first)
                open_steps.append(first)
    return list(ordered)


def deduced(state: State) -> dict[str, list[str]]:
    """What each step that was computed is made of, read off the golden's numbers, where nobody tells it or an order.

    What can be read one way only comes first: a product, a softmax, a sigmoid. A sum can be read three ways; it is
    taken for the one whose parts are not made of it.
    """
    steps = [x for x in state.golden.names if x in state.observed]
    told = {x: inputs for x in steps if (inputs := state.inputs(x))}
    made: dict[str, list[str]] = {}
    computed = [x for x in steps if x not in told and state.searched(x) is not None and state.computed(x)]
    cost = dict.fromkeys((x for x in steps if x not in computed), 0)

    def search(name: str, others: Sequence[str], one_way: bool, below: float = math.inf) -> None:
        found = _found(name, [x for x in others if not _depends(x, name, told | made)], one_way, state)
        if found is not None and (size := 1 if found.written is None else found.written.steps) < below:
            made[name], cost[name] = found.names, size

    for name in computed:
        search(name, _near(name, steps), one_way=True)
    for name in sorted(made, key=lambda x: -cost[x]):  # of a gate's product, from the gate that is recorded
        search(name, [x for x in _near(name, steps) if cost.get(x, cost[name]) < cost[name]], False, cost[name])
    for name in (x for x in computed if x not in made):
        search(name, _near(name, steps), one_way=False)
    return made


def _near(name: str, steps: Sequence[str]) -> list[str]:
    at = steps.index(name)
    return sorted((x for x in steps if x != name), key=lambda x: abs(steps.index(x) - at))[: 2 * NEAREST]


def _depends(name: str, on: str, made: Mapping[str, Sequence[str]]) -> bool:
    open_steps, met = [name], {name}
    while open_steps:
        for x in made.get(open_steps.pop(), ()):
            if x == on:
                return True
            if x not in met:
                met.add(x)
                open_steps.append(x)
    return False


def _found(name: str, others: Sequence[str], one_way: bool, state: State) -> Found | None:
    g = state.searched(name)
    assert g is not None
    stored = state.golden.read(name).dtype
    promised = precision.of_step(name, state.observed.read(name), state.observed, state.golden, stored)
    given = {x: t for x in others if (t := state.searched(x)) is not None}
    return next(filter(_one_way if one_way else None, inferred(g, given, *roundings(g, promised))), None)


def _one_way(found: Found) -> bool:
    """Whether what was found cannot be read the other way round."""
    if found.way is not None:
        return found.way.product or found.way.softmax or found.way.length > 1
    assert found.written is not None
    nodes = list(ast.walk(found.written.tree))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(called - {*TWO_WAYS}) or any(isinstance(node, ast.Compare) for node in nodes)
