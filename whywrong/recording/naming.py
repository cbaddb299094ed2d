"""Which step of one program is which of another: a proposal by shapes, values and order, for a person to confirm.

Values find the partners of what is computed correctly. Behind a wrong step every value differs; a recorded golden is
therefore re-run on what was observed of the partners found so far, which gives the values that the steps after them
should have. The wrong step itself is the one from which those after it follow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from whywrong.comparing.precision import UNIT_ROUNDOFF, name_of
from whywrong.recording.golden import Golden
from whywrong.recording.steps import Steps, Trace, as_trace
from whywrong.tables import Table

RULES = {"values": 0.1, "what follows": 0.1, "direction": 0.5, "place": math.inf}
"""Why two steps are partners, the strongest reason first, and the largest relative difference for that reason: they are
close; those after them are, once one is put in the other's place; they are close but for a factor or a sign; each is
the only one of its shape that is left between two partners. Unrelated steps are about 1.4 apart."""

NEARER = 2.0
"""How many times nearer than any other a partner is."""

SAMPLE = 1 << 12
"""Elements of each step that are compared."""


class Partner(NamedTuple):
    """The partner of a golden step: the name of an `observed` one, and which of :data:`RULES` is the `reason`.

    `difference` is the RMS of what they differ by, over that of the golden as re-run on what was observed before it.
    """

    observed: str
    difference: float
    reason: str


@dataclass(repr=False)
class Proposal:
    """What :func:`propose_names` found; `names` is what `names=` of :func:`whywrong.localise` takes."""

    partners: dict[str, Partner]
    """By the names of the golden's steps."""
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
        table = Table(("golden", "observed", "relative difference", "partners by"), rows)
        sides = {"golden": self.golden, "observed": self.observed}
        left = [f"{side} without a partner: {', '.join(names)}" for side, names in sides.items() if names]
        return "\n".join([str(table), *left])


def propose_names(observed: Steps, golden: Golden | Steps) -> Proposal:
    """Propose which observed step is which of the golden's, where two programs call them differently.

    Arguments are as in :func:`whywrong.localise`. Partners have one shape, and each is nearer to the other than to any
    other step; a step that is equally near to several has none, except that of observed steps with the same values the
    first is taken. Where both orders are known, a step that is left is
    proposed for the only one of its shape between the same partners. Steps of one name and shape are partners already
    and are not proposed. Parts of a recorded golden are run again, for each candidate in a wrong step's place.

    Confirm the result, what is proposed by place above all, since a wrong step may have any value; then give its
    ``names`` to :func:`whywrong.localise`. Raises UsageError for arguments of another kind.
    """
    ours = golden.trace() if isinstance(golden, Golden) else as_trace("golden", golden)
    theirs = as_trace("observed", observed)
    g, o = ({x: _Sample.of(trace.read(x)) for x in trace.names if not _operation(x)} for trace in (ours, theirs))
    pairs = {name: name for name in g if name in o and g[name].shape == o[name].shape}
    partners: dict[str, Partner] = {}
    ordered, reasons = ours.ordered and theirs.ordered, list(RULES)
    while reasons:
        reason = reasons.pop(0)
        if reason == "what follows":
            new = _followed(g, o, pairs, golden, theirs) if isinstance(golden, Golden) else {}
        else:
            new = _nearest(g, o, pairs, ordered, reason)
        if new:
            partners |= {a: Partner(b, g[a].distance(o[b]), reason) for a, b in new.items()}
            pairs, reasons = pairs | new, list(RULES)
            if isinstance(golden, Golden):
                g |= _rerun(golden, theirs, pairs, [x for x in g if x not in pairs])
    left = [[x for x in side if x not in taken] for side, taken in ((g, pairs.keys()), (o, set(pairs.values())))]
    return Proposal({name: partners[name] for name in g if name in partners}, *left)


def _operation(name: str) -> bool:
    """Whether a name is a single operation's, as :func:`whywrong.capture` gives it: its values are a step's too."""
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

    def distance(self, other: _Sample, reason: str = "values") -> float:
        a, b = self.values, other.values
        size, theirs = float(a.norm()), float(b.norm())
        if not size or not theirs:
            return math.inf  # zeros say nothing of where they are from
        if reason == "direction":
            return math.sqrt(max(0.0, 2.0 - 2.0 * abs(float(a @ b)) / (size * theirs)))
        return float((a - b).norm()) / size


_Samples = dict[str, _Sample]


def _rerun(golden: Golden, theirs: Trace, pairs: dict[str, str], names: Iterable[str]) -> _Samples:
    """The golden's steps as they follow from what was observed of their partners."""
    inputs = {golden.steps[a]: theirs.read(b).to(golden[a].device, golden[a].dtype) for a, b in pairs.items()}
    numbers = {name: golden.steps[name] for name in names}
    results = golden.program.run(golden.program.cone(numbers.values(), inputs), inputs, set(numbers.values()))
    return {name: _Sample.of(results[i]) for name, i in numbers.items()}


def _candidates(g: _Samples, o: _Samples, pairs: dict[str, str], ordered: bool) -> Iterator[tuple[str, str]]:
    """Steps of one shape that have no partner, and that lie between the same partners where the order is known."""
    place, taken, names = {name: k for k, name in enumerate(o)}, set(pairs.values()), list(g)
    echoes, partner = _echoes(o), {b: a for a, b in pairs.items()}

    def same(a: str, b: str) -> bool:
        """Whether an echo may be a step's partner: where that step is one too, of the partner of what is echoed."""
        return b not in echoes or (echoes[b] in taken and g[a].distance(g[partner[echoes[b]]]) < RULES["values"])

    for k, a in enumerate(names):
        before = next((place[pairs[x]] for x in reversed(names[:k]) if x in pairs), -1)
        after = next((place[pairs[x]] for x in names[k:] if x in pairs), len(o))
        first, last = (before, after) if ordered and before < after else (-1, len(o))
        free = (b for b in o if b not in taken and first < place[b] < last and g[a].shape == o[b].shape)
        yield from ((a, b) for b in free if a not in pairs and same(a, b))


def _echoes(o: _Samples) -> dict[str, str]:
    """Steps with the values of one before, as the input of a call has those of another's output, and which that is."""
    same = defaultdict[tuple[tuple[int, ...], bytes], list[str]](list)
    for name, sample in o.items():
        same[sample.shape, sample.values.numpy().tobytes()].append(name)
    return {name: names[0] for names in same.values() for name in names[1:]}


def _nearest(g: _Samples, o: _Samples, pairs: dict[str, str], ordered: bool, reason: str) -> dict[str, str]:
    """Candidates that are nearer to each other than to any other; by place those that have no other."""
    candidates = _candidates(g, o, pairs, ordered and reason == "place")
    distances = {(a, b): max(g[a].distance(o[b], reason), o[b].noise) for a, b in candidates}
    lines: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (a, b), d in sorted(distances.items(), key=lambda item: item[1]):
        lines["golden", a].append(d)
        lines["observed", b].append(d)
    new = {}
    for (a, b), d in distances.items():
        both = lines["golden", a], lines["observed", b]
        alone = all(len(line) == 1 for line in both)
        near = all(d == line[0] and NEARER * d < [*line, math.inf][1] for line in both)
        if d < RULES[reason] and (alone if reason == "place" else near):
            new[a] = b
    return new


def _followed(g: _Samples, o: _Samples, pairs: dict[str, str], golden: Golden, theirs: Trace) -> dict[str, str]:
    """The first golden step, and the one candidate in its place, on which a step after it is as it was observed.

    That candidate would not do as well in the place of another golden step.
    """
    candidates = list(_candidates(g, o, pairs, ordered=False))
    free = [b for b in o if b not in pairs.values()]

    def score(a: str, b: str) -> float:
        """How near the nearest observed step is to one that takes `a` from `b`."""
        known = {golden.steps[x] for x in (*pairs, a)}
        after = [x for x in g if x not in pairs and golden.steps[a] in golden.program.before(golden.steps[x], known)]
        again = _rerun(golden, theirs, {**pairs, a: b}, after).values()
        near = (max(s.distance(o[c]), o[c].noise) for s in again for c in free if c != b and o[c].shape == s.shape)
        return min(near, default=math.inf)

    for a in dict.fromkeys(a for a, _ in candidates):
        best, b = min((score(a, b), b) for c, b in candidates if c == a)
        if best < RULES["what follows"]:
            others = [(c, d) for c, d in candidates if (c == a) != (d == b)]
            if all(NEARER * best < score(*other) for other in others):
                return {a: b}
    return {}
