"""Which step of one program is which of another: a proposal by shapes, values and order, for a person to confirm."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from labkit.numerics.precision import UNIT_ROUNDOFF, name_of
from labkit.tables import Table
from labkit.trace.golden import Golden
from labkit.trace.steps import as_trace

CLOSE = 0.5
"""The largest relative difference of two steps that are called close: unrelated ones are about 1.4 apart."""

NEARER = 2.0
"""How many times nearer than any other a partner is."""

SAMPLE = 1 << 12
"""Elements of each step that are compared."""

RULES = ("values", "direction", "place")
"""By the difference; by the angle, which a wrong factor or sign leaves as it is; as the only one left of its shape
between two partners."""


class Partner(NamedTuple):
    """A golden step's partner. `difference` is the RMS of what they differ by over that of the golden."""

    observed: str
    difference: float
    rule: str


@dataclass(repr=False)
class Proposal:
    """What :func:`propose_names` found; `names` is what `names=` of :func:`labkit.localise` takes."""

    partners: dict[str, Partner]
    golden: list[str]
    """Steps of the golden without a partner, those included of which several would do."""
    observed: list[str]
    """Steps of the observed without a partner."""

    @property
    def names(self) -> dict[str, str]:
        """Golden name -> observed name."""
        return {name: partner.observed for name, partner in self.partners.items()}

    def __repr__(self) -> str:
        rows = [(name, *partner) for name, partner in self.partners.items()]
        table = Table(("golden", "observed", "relative difference", "by"), rows)
        sides = {"golden": self.golden, "observed": self.observed}
        left = [f"{side} without a partner: {', '.join(names)}" for side, names in sides.items() if names]
        return "\n".join([str(table), *left])


def propose_names(observed: Any, golden: Any) -> Proposal:
    """Propose which observed step is which of the golden's, where two programs call them differently.

    Arguments are as in :func:`labkit.localise`. Partners have one shape, and each is nearer to the other than to any
    other step; a step that is equally near to several has none. Where both orders are known, partners that are found
    narrow down where others may be, and the only step left of its shape there is proposed whatever its values, since a
    wrong step may have any. Steps of one name and shape are partners already and are not proposed. Confirm the result,
    then give its ``names`` to :func:`labkit.localise`.
    """
    ours = golden.trace() if isinstance(golden, Golden) else as_trace("golden", golden)
    theirs = as_trace("observed", observed)
    g, o = ({x: _Sample.of(trace.read(x)) for x in trace.names if not _operation(x)} for trace in (ours, theirs))
    pairs = {name: name for name in g if name in o and g[name].shape == o[name].shape}
    found: dict[str, Partner] = {}
    ordered, k = ours.ordered and theirs.ordered, 0
    while k < len(RULES):
        new = _round(g, o, pairs, ordered, RULES[k])
        found |= {a: Partner(b, g[a].distance(o[b]), RULES[k]) for a, b in new.items()}
        pairs |= new
        k = 0 if new else k + 1
    left = [[x for x in side if x not in taken] for side, taken in ((g, pairs.keys()), (o, set(pairs.values())))]
    return Proposal({name: found[name] for name in g if name in found}, *left)


def _operation(name: str) -> bool:
    """Whether a name is that of a single operation, as :func:`labkit.capture` gives it: its values are a step's too."""
    _, sign, kind = name.rpartition("/")
    return bool(sign) and hasattr(torch.ops.aten, kind.split("#")[0])


class _Sample(NamedTuple):
    """Some elements of a step, float64, finite. Differences below `noise` are none: half of the digits of its type."""

    shape: tuple[int, ...]
    values: torch.Tensor
    noise: float

    @classmethod
    def of(cls, x: torch.Tensor) -> _Sample:
        places = torch.linspace(0, x.numel() - 1, min(SAMPLE, x.numel()), dtype=torch.float64).long()
        values = x.reshape(-1)[places.to(x.device)].double().cpu().nan_to_num(0.0, 0.0, 0.0)
        return cls(tuple(x.shape), values, UNIT_ROUNDOFF.get(name_of(x.dtype), 0.0) ** 0.5)

    def distance(self, other: _Sample, rule: str = RULES[0]) -> float:
        a, b = self.values, other.values
        size, theirs = float(a.norm()), float(b.norm())
        if not size or not theirs:
            return 0.0 if size == theirs else math.inf
        if rule == "direction":
            return math.sqrt(max(0.0, 2.0 - 2.0 * abs(float(a @ b)) / (size * theirs)))
        return float((a - b).norm()) / size


def _round(
    g: dict[str, _Sample], o: dict[str, _Sample], pairs: dict[str, str], ordered: bool, rule: str
) -> dict[str, str]:
    """Partners among the steps that have none yet, by one rule."""
    place, taken = {name: k for k, name in enumerate(o)}, set(pairs.values())
    distances: dict[tuple[str, str], float] = {}
    names = list(g)
    for k, a in enumerate(names):
        if a in pairs:
            continue
        before = next((place[pairs[x]] for x in reversed(names[:k]) if x in pairs), -1)
        after = next((place[pairs[x]] for x in names[k:] if x in pairs), len(o))
        first, last = (before, after) if ordered and before < after else (-1, len(o))
        for b in o:
            if b not in taken and first < place[b] < last and g[a].shape == o[b].shape:
                distances[a, b] = max(g[a].distance(o[b], rule), o[b].noise)
    rows: dict[str, list[float]] = defaultdict(list)
    columns: dict[str, list[float]] = defaultdict(list)
    for (a, b), d in sorted(distances.items(), key=lambda item: item[1]):
        rows[a].append(d)
        columns[b].append(d)
    new = {}
    for (a, b), d in distances.items():
        lines = rows[a], columns[b]
        near = d < CLOSE and all(d == line[0] and NEARER * d < [*line, math.inf][1] for line in lines)
        if len(rows[a]) == len(columns[b]) == 1 if rule == "place" else near:
            new[a] = b
    return new
