"""`whywrong weights`: what each tensor of a checkpoint is of the golden one's, without a run.

As JSON: ``alarm``; ``counts`` of the tensors by kind; ``tensors``: for each by its golden name, or its own where the
golden has it not, a ``kind`` (of :class:`whywrong.comparing.relation.Relation`, or "missing", "extra", "another's",
"tied", "joined", "scale"), ``ok``, the relation in ``words`` and the type to which the same is the same, ``dtype``;
``notes``.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whywrong.checking.alignment import renamed
from whywrong.comparing.precision import SMALLEST, UNIT_ROUNDOFF, name_of
from whywrong.comparing.relation import DIFFERS, SAME, Relation, agreed, placed, relation
from whywrong.errors import UsageError
from whywrong.recording.dumps import SUFFIXES, natural, open_dump
from whywrong.recording.steps import Steps, Trace, as_trace
from whywrong.tables import Table, printable, ranges, to_stderr

Checkpoint = Steps | Path | str
MISSING, EXTRA, ANOTHER, TIED, JOINED, SCALE = "missing", "extra", "another's", "tied", "joined", "scale"
FINE = (SAME, TIED, JOINED)
"""Kinds in which nothing is lost."""

FIRST = 16
"""Elements by which tensors and rows that may hold the same numbers are found; then all are compared."""
MOST_CANDIDATES, MOST_SOUGHT = 8, 4096
"""Tensors with the same first elements, of which each is compared, and tensors that are looked for by their numbers."""
SECONDS = 10.0
"""Between lines that say how far it is."""


@dataclass(repr=False)
class Weights:
    """What :func:`weights` found: `relations` by golden name, in its order, and then by those that it has not."""

    relations: dict[str, Relation]
    notes: list[str] = field(default_factory=list)

    @property
    def alarm(self) -> bool:
        """Whether a tensor is other than the golden's."""
        return any(known.kind not in FINE for known in self.relations.values())

    @property
    def count(self) -> str:
        """How many tensors are the same, and to which types, how many are tied, and how many are others."""
        kinds = Counter(x.words if x.kind == SAME else x.kind for x in self.relations.values())
        tied = [f"{name} is {x.words}" for name, x in self.relations.items() if x.kind == TIED]
        words = [f"{n} {what}" + f" ({'; '.join(tied[:3])})" * (what == TIED) for what, n in kinds.items()]
        return f"{len(self.relations)} tensors: {', '.join(words) or 'none'}"

    def table(self) -> Table:
        """A row for each tensor that is not the golden's."""
        shown = {name: x for name, x in self.relations.items() if x.kind not in (SAME, TIED)}
        return Table(
            ("tensor", "relation", "in words"), [(name, x.kind, x.words) for name, x in shown.items()], wrap=110
        )

    def as_json(self) -> dict[str, Any]:
        """What `whywrong weights --json` prints."""
        counts = Counter(x.kind for x in self.relations.values())
        about = {
            name: {"kind": x.kind, "ok": x.kind in FINE, "words": x.words, "dtype": x.dtype}
            for name, x in self.relations.items()
        }
        return {"alarm": self.alarm, "counts": counts, "tensors": about, "notes": self.notes}

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + "".join(f"<p>{line}</p>" for line in (*self.notes, self.count))

    def __repr__(self) -> str:
        table = self.table()
        return printable("\n".join([*([f"{table}\n"] if table.rows else []), *self.notes, self.count]))


def weights(
    golden: Checkpoint,
    observed: Checkpoint,
    *,
    names: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = to_stderr,
) -> Weights:
    """Find what each tensor of `observed` is of the tensor of that name in `golden`.

    Both are checkpoints: a file (safetensors, .npz, .pt or .bin of tensors alone), a folder of shards, or a dict of
    arrays by name, of any shapes and of real or whole numbers. `names` maps golden names to observed ones. A pair is in
    memory at a time, and copies of it where it differs. A tensor may be the golden's in a narrower type, transposed,
    with slices in another order, in another shape, times a factor, plus an offset, quantised, or in some slices alone;
    each is reported only where all elements fit. Of a tensor that is none of these, and of one without a partner, the
    numbers are looked for among the golden's other tensors. Nothing in a file is executed.

    Raises UsageError for what is no checkpoint, and for names that neither has.
    """
    ours = open_checkpoint(golden, "golden")
    theirs = renamed(open_checkpoint(observed, "observed"), ours, dict(names or {}))
    search = _Search(ours, theirs, progress)
    return Weights(search.run(), [theirs.note] * bool(theirs.note))


def open_checkpoint(checkpoint: Checkpoint, what: str) -> Trace:
    """Tensors by name, each read when it is looked at. Raises UsageError, which calls what is no checkpoint `what`."""
    if not isinstance(checkpoint, (str, Path)):
        return as_trace(what, checkpoint)
    path = Path(checkpoint)
    if not path.is_dir():
        return open_dump(path)
    files = sorted((f for f in path.iterdir() if f.suffix in SUFFIXES), key=lambda f: natural(f.name))
    if not files or any(file.suffix == ".npy" for file in files) or (path / "metadata.json").exists():
        return open_dump(path)
    shards = {file: open_dump(file) for file in files}
    if all(shard.names == ["tensor"] for shard in shards.values()):
        return open_dump(path)
    tensors: dict[str, Callable[[], Any]] = {}
    for file, shard in shards.items():
        if twice := [name for name in shard.names if name in tensors]:
            raise UsageError(f"{path}: expected each tensor in one shard, got {twice[0]!r} in {file.name} and before")
        tensors |= {name: _reader(shard, name) for name in shard.names}
    for index in path.glob("*.index.json"):
        absent = sorted(_indexed(index) - {file.name for file in files})
        if absent:
            raise UsageError(f"{path}: expected the shards that {index.name} names, got none called {absent[0]!r}")
    return Trace.lazy(tensors, {}, str(path), False)


def _reader(shard: Trace, name: str) -> Callable[[], Any]:
    return lambda: shard[name]


def _indexed(index: Path) -> set[str]:
    """The files that an index of shards names."""
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{index}: expected JSON with a weight_map of names to files, got something else") from None


class _Search:
    """The relation of each pair, and where the numbers of what has no partner are.

    `_first` has for each number of elements the golden's tensors that have so many: names, first elements, errors.
    """

    def __init__(self, golden: Trace, observed: Trace, progress: Callable[[str], None]) -> None:
        self._golden, self._observed, self._progress = golden, observed, progress
        self._relations: dict[str, Relation] = {}
        self._first: dict[int, tuple[list[str], list[Tensor]]] = defaultdict(lambda: ([], []))

    def run(self) -> dict[str, Relation]:
        """The relation of each tensor."""
        ours, theirs = self._golden, self._observed
        if not any(name in theirs for name in ours.names):
            have = ", ".join(theirs.names[:3]) or "none"
            expected = f"expected names of the golden, or --names (names=), got {have}"
            raise UsageError(f"{theirs.source or 'observed'}: {expected}")
        last = time.monotonic()
        for k, name in enumerate(ours.names):
            x = ours.read(name)
            names, first = self._first[x.numel()]
            names.append(name)
            first.append(_first(x.view(1, -1) if x.is_contiguous() else x.reshape(1, -1))[:, 0])
            known = relation(theirs.read(name).to(x.device), x) if name in theirs else Relation(MISSING, "")
            self._relations[name] = known
            if time.monotonic() > last + SECONDS:
                last = time.monotonic()
                self._progress(f"{k + 1} of {len(ours.names)} tensors")
        self._relations |= {name: Relation(EXTRA, "") for name in theirs.names if name not in ours}
        self._scales()
        self._others()
        self._joined(theirs, ours, EXTRA, MISSING)
        self._joined(ours, theirs, MISSING, EXTRA)
        return self._relations

    def _of(self, *kinds: str) -> list[str]:
        return [name for name, known in self._relations.items() if known.kind in kinds]

    def _twins(self, x: Tensor, but: str = "") -> list[str]:
        """The golden's tensors that hold the numbers of x."""
        if x.numel() not in self._first or bool((x == x.flatten()[:1]).all()):
            return []  # or all are one number, which says nothing of where it is from
        names, first = self._first[x.numel()]
        alike = _alike(torch.stack(first, 1), _first(x.reshape(1, -1))).nonzero().flatten().tolist()
        found = (names[k] for k in alike[:MOST_CANDIDATES] if names[k] != but)
        return [name for name in found if agreed(x, self._golden.read(name).to(x.device))]

    def _scales(self) -> None:
        """Tensors that hold the scales of what is quantised, or one over them."""
        for name, known in list(self._relations.items()):
            beside = [other for other in self._of(EXTRA) if other.startswith(name.rpartition(".")[0])]
            for extra in beside if known.scale is not None else ():
                x = self._observed.read(extra).flatten().double()
                low, high = (side.cpu() for side in known.scale or ())
                if x.shape == low.shape:
                    unit = 2.0**-22  # of a scale that was itself rounded to float32
                    fits = {"": x, "one over ": 1.0 / x}
                    inside = {
                        w: bool(((y >= low * (1 - unit)) & (y <= high * (1 + unit))).all()) for w, y in fits.items()
                    }
                    words = next((w for w in fits if inside[w]), None)
                    known_scale = Relation(SCALE, f"{words}the scale of {name}")
                    other = Relation(EXTRA, f"not the scale that {name} has")
                    self._relations[extra] = known_scale if words is not None else other

    def _others(self) -> None:
        """What has no partner or is not its partner's: whether it is a tensor of another name, and was tied to one."""
        for name in self._of(MISSING, EXTRA, DIFFERS, "partly")[:MOST_SOUGHT]:
            known = self._relations[name]
            tied = self._twins(self._golden.read(name), name) if name in self._golden else []
            same = [twin for twin in tied if self._relations[twin].kind == SAME]
            twins = self._twins(self._observed.read(name)) if known.kind != MISSING else []
            copies = [twin for twin in twins if self._relations[twin].kind == SAME]
            if known.kind == MISSING and same:
                known = Relation(TIED, f"stored once, as {same[0]}")
            elif known.kind == EXTRA and copies:
                known = Relation(TIED, f"stored twice, as {copies[0]} too")
            elif twins:
                known = Relation(ANOTHER, f"the golden's {twins[0]}")
            elif same:
                known = known._replace(words=f"{known.words}; tied with {same[0]} in the golden, and not here")
            self._relations[name] = known

    def _joined(self, wholes: Trace, parts: Trace, whole: str, part: str) -> None:
        """Tensors without a partner that are the slices of several of the other side, and these."""
        for name in self._of(whole)[:MOST_SOUGHT]:
            x = wholes.read(name)
            free, found = torch.ones(x.shape[:1], dtype=torch.bool), dict[str, Tensor]()
            for other in self._of(part)[:MOST_SOUGHT] if x.ndim else ():
                y = parts.read(other)
                if y.shape[1:] == x.shape[1:] and len(y) < len(x) and (at := _placed(y, x)) is not None:
                    free[at], found[other] = False, at
            if not found:
                continue
            words = [f"slices {ranges(at.tolist())} of dimension 0 are {other}" for other, at in found.items()]
            words += [f"slices {ranges(free.nonzero().flatten().tolist())} are in no other"] * bool(free.any())
            self._relations[name] = Relation(whole if bool(free.any()) else JOINED, "; ".join(words))
            self._relations |= {other: Relation(JOINED, f"in {name}") for other in found}


def _first(rows: Tensor) -> Tensor:
    """The first elements of each row, float64, and how far each may be off by its type: [2, rows, elements]."""
    name = name_of(rows.dtype)
    x = rows[:, :FIRST].double().cpu().nan_to_num()
    return torch.stack([x, UNIT_ROUNDOFF.get(name, 0.0) * x.abs() + SMALLEST.get(name, 0.0)])


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """Which rows, of those that :func:`_first` gives, may hold the same numbers."""
    return ((a[0] - b[0]).abs() <= 1.01 * (a[1] + b[1])).all(1)


def _placed(part: Tensor, whole: Tensor) -> Tensor | None:
    """The slices of dimension 0 of `whole` that are those of `part`, which follow each other or stand in groups."""
    few = min(FIRST, part.numel())
    rows = whole.flatten(1) if whole.ndim > 1 else whole.unfold(0, few, 1)
    starts = _alike(_first(rows), _first(part.reshape(1, -1)[:, : rows.shape[1]])).nonzero().flatten()
    for start in starts.tolist()[:MOST_CANDIDATES]:
        if agreed(whole[start : start + len(part)], part):
            return torch.arange(start, start + len(part))
    return placed(part, whole) if len(starts) and whole.ndim > 1 else None
