"""The observed steps by the golden's names: declared names, a common prefix, single operations."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from statistics import multimode

import torch

from whywrong.comparing.comparison import as_tensor
from whywrong.comparing.precision import stored
from whywrong.errors import UsageError, did_you_mean
from whywrong.recording.golden import Golden
from whywrong.recording.steps import Trace

NARROW_NAMES = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32")
"""Dtypes that numbers are tested for, the narrowest first: a later one holds most numbers of those before it."""


MOST_HINTS = 10_000
"""Pairs of names that are looked at for a hint; in a dump with more, names differ by more than a slip."""


def renamed(observed: Trace, golden: Golden | Trace, names: dict[str, str]) -> Trace:
    """All observed steps, by the golden's names where it has them.

    `names` maps golden names to observed ones. Raises UsageError for a name that the golden or the observed does not
    have, and for a step that would have two values.
    """
    if not names and not any(name in golden for name in observed.names):
        observed = _without_prefix(observed, golden)
    for ours, theirs in names.items():
        if ours not in golden or theirs not in observed:
            side, name, known = ("golden", ours, golden) if ours not in golden else ("observed", theirs, observed)
            hint = did_you_mean(name, known.names)
            expected = "expected golden names mapped to observed ones"
            raise UsageError(f"names: the {side} has no step {name!r}; {hint}{expected}")
        if (ours in observed and ours not in names.values()) or list(names.values()).count(theirs) > 1:
            raise UsageError(f"names: {ours!r} and {theirs!r} are both there; expected one observed step for each")
    new_names = {theirs: ours for ours, theirs in names.items()}
    for name, later in ((name, f"{name}#2") for name in getattr(golden, "inputs", ())):
        if name in observed and later in golden and later not in observed:
            x, before = observed.read(name), golden[name]
            if not any(torch.equal(x.double(), stored(before.double(), kind)) for kind in (*NARROW_NAMES, "float64")):
                new_names.setdefault(name, later)  # a dump keeps an updated tensor under its first name
    return observed.named({name: new_names.get(name, name) for name in observed.names})


def _without_prefix(observed: Trace, golden: Golden | Trace) -> Trace:
    """The observed by the golden's names, where those of one side have a prefix, as in a container or a wrapper.

    It is unchanged where there is none, where several would do for as many names, and where most names have none.
    """

    def cut(name: str) -> list[tuple[str, str]]:
        """The name without each prefix that it may have, and that prefix."""
        return [(name[: dot.end()], name[dot.end() :]) for dot in re.finditer(r"\.", name)]

    off = [(prefix, o, g) for o in observed.names for prefix, g in cut(o) if g in golden]
    on = [(prefix, o, g) for g in golden.names for prefix, o in cut(g) if o in observed]
    most = multimode(prefix for prefix, *_ in off or on)
    new = {o: g for prefix, o, g in off or on if [prefix] == most}
    new = new if 2 * len(new) >= min(len(observed.names), len(golden.names)) else {}
    note = f"names: {len(new)} of the observed are taken with{'out' * bool(off)} {''.join(most)!r} before them"
    return observed.named({name: new.get(name, name) for name in observed.names}, note * bool(new))


def common_steps(golden: Golden | Trace, observed: Trace) -> tuple[Golden | Trace, Trace]:
    """The golden, with the single operations that both have among its steps; and the observed of its steps, in order.

    Raises UsageError where that is no step.
    """
    if isinstance(golden, Golden):
        golden = golden.with_steps(_operations(golden, observed))
    in_both = {name: name for name in golden.names if name in observed}
    if not observed.names:
        raise UsageError(f"{observed.source or 'observed'}: expected tensors by the golden's names, got none")
    if not in_both:
        observed_names, golden_names = (
            ", ".join(side.names[:3] + ["..."] * (len(side.names) > 3)) or "none" for side in (observed, golden)
        )
        expected = "expected the same names, or --names (names=), which --propose-names (whywrong.propose_names) writes"
        have = f"it has {observed_names}; the golden {golden_names}"
        where = observed.source or "observed"
        raise UsageError(f"{where}: shares no step with the golden ({have}); {expected}")
    return golden, observed.named(in_both)


def _operations(golden: Golden, observed: Trace) -> list[str]:
    """Single operations that both have: as many of a kind in a place, of equal shapes, else none of that kind.

    None of a place where they come in another order, as if a state is read before it is set and not after.
    """

    def count(names: Iterable[str]) -> Counter[str]:
        return Counter(name.split("#")[0] for name in names)

    nodes, taken = golden.program.nodes, set(golden.steps.values())
    both = {name: i for name, i in golden.operations.items() if name in observed}
    ours, theirs = count(golden.operations), count(observed.names)
    alike = count(name for name, i in both.items() if tuple(observed.read(name).shape) == nodes[i].shape)
    kinds = {kind for kind in alike if ours[kind] == theirs[kind] == alike[kind]}

    def in_order(names: Iterable[str]) -> dict[str, list[str]]:
        found = defaultdict[str, list[str]](list)
        for kind in (name.split("#")[0] for name in names):
            found[kind.rpartition("/")[0]] += [kind] * (kind in kinds)
        return found

    mine, its = in_order(golden.operations), in_order(observed.names)
    kinds = {kind for kind in kinds if mine[place := kind.rpartition("/")[0]] == its[place]}
    return [name for name, i in both.items() if i not in taken and name.split("#")[0] in kinds]


def _shape(trace: Trace, name: str) -> tuple[int, ...] | None:
    """A step's shape; None of a text, which has none."""
    with suppress(UsageError):
        return tuple(trace.read(name).shape)
    return None


def name_hints(golden: Golden | Trace, observed: Trace, unexpected: list[str]) -> list[str]:
    """For each unexpected step, which missing step of the golden it may be: by its name, else by its shape."""
    missing = [name for name in golden.names if name not in observed]
    if len(missing) * len(unexpected) > MOST_HINTS:
        return []
    shapes = {name: tuple(as_tensor(name, golden[name]).shape) for name in missing}
    of_shape = {shape: name for name, shape in reversed(shapes.items())}
    notes = []
    for name in unexpected:
        hint = did_you_mean(name, [other for other in missing if _shape(observed, name) in (None, shapes[other])])
        of_shape = {shape: other for shape, other in of_shape.items() if f" {other}?" not in hint}
        with suppress(UsageError):  # of a text, which has no shape
            if not hint and (other := of_shape.pop(tuple(observed.read(name).shape), None)):
                hint = f"is it perhaps {other}, of its shape? "
        if hint:
            notes.append(f"{name} is not in the golden; {hint}(names= maps the golden's steps to others)")
    return notes
