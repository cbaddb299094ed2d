"""`whywrong weights`: what each tensor of a checkpoint is of the golden one's, without a run.

As JSON: ``alarm``; ``tensors``: for each by its golden name, or its own where the golden has it not, a ``kind`` (of
:class:`whywrong.comparing.relation.Relation`, or "missing", "extra", "another's", "tied", "joined", "fused", "scale"),
``ok``, the relation in ``words`` and the ``dtype`` in which it holds; ``note``, how the names were taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whywrong.checking.alignment import renamed
from whywrong.comparing.relation import DIFFERS, PART, PARTLY, SAME, Relation, holders, relation
from whywrong.errors import UsageError
from whywrong.recording.dumps import SUFFIXES, natural, open_dump
from whywrong.recording.steps import Steps, Trace, as_trace
from whywrong.tables import Table, printable

Checkpoint = Steps | Path | str
MISSING, EXTRA, ANOTHER, SCALE = "missing", "extra", "another's", "scale"
TIED, JOINED, FUSED = "tied", "joined", "fused"
FINE = (SAME, TIED, JOINED, FUSED)
"""Kinds in which nothing is lost."""

GOLDENS = "the golden's"
"""Of a part of another tensor these words are of that tensor."""

MOST_SOUGHT = 1000
"""Tensors whose numbers are looked for under other names."""
FIRST = 16
"""Elements that are looked at before tensors of two names are compared."""


@dataclass(repr=False)
class Weights:
    """What :func:`weights` found: `relations` by golden name, in its order, and then by those that it has not."""

    relations: dict[str, Relation]
    note: str = ""

    @property
    def alarm(self) -> bool:
        """Whether a tensor is other than the golden's."""
        return any(known.kind not in FINE for known in self.relations.values())

    def as_json(self) -> dict[str, Any]:
        """What `whywrong weights --json` prints."""
        every = {name: {**x._asdict(), "ok": x.kind in FINE, "numbers": None} for name, x in self.relations.items()}
        return {"alarm": self.alarm, "tensors": every, "note": self.note}

    def __repr__(self) -> str:
        rows = [(name, x.kind, x.words) for name, x in self.relations.items() if x.kind not in FINE[:3]]
        table = [f"{Table(('tensor', 'relation', 'in words'), rows)}\n"] if rows else []
        kinds = Counter(x.words if x.kind in (SAME, TIED) else x.kind for x in self.relations.values())
        count = ", ".join(f"{n} {words}" for words, n in kinds.most_common())
        return printable("\n".join([*table, *[self.note] * bool(self.note), f"{len(self.relations)} tensors: {count}"]))


def weights(golden: Checkpoint, observed: Checkpoint, *, names: Mapping[str, str] | None = None) -> Weights:
    """Find what each tensor of `observed` is of the tensor of that name in `golden`.

    Both are checkpoints: a file (safetensors, .npz, .pt or .bin of tensors alone), a folder of shards, or a dict of
    arrays by name, of any shapes and of real or whole numbers. `names` maps golden names to observed ones. A pair is in
    memory at a time, and copies of it where it differs. A tensor may be the golden's in a narrower type, transposed,
    with slices in another order, in another shape, times a factor, plus an offset, quantised, or in some slices alone;
    each is reported only where all elements fit. Of a tensor that is none of these, and of one without a partner, the
    numbers are looked for among the golden's other tensors. Nothing in a file is executed.

    Raises UsageError for what is no checkpoint, and for names that neither has.
    """
    ours = open_checkpoint("golden", golden)
    theirs = renamed(open_checkpoint("observed", observed), ours, dict(names or {}))
    both = [name for name in ours.names if name in theirs]
    if not both:
        have = f"expected names of the golden, or --names (names=), got {', '.join(theirs.names[:3]) or 'none'}"
        raise UsageError(f"{theirs.source or 'observed'}: {have}")
    found = {name: Relation(MISSING, "not in the observed") for name in ours.names}
    found |= {name: Relation(EXTRA, "not in the golden") for name in theirs.names}
    found |= {name: relation(theirs.read(name), ours.read(name)) for name in both}
    _find_scales(found, theirs)
    notes = [theirs.note, _find_others(found, ours, theirs)]
    _find_joined(found, ours, theirs)
    return Weights(found, "; ".join(filter(None, notes)))


def open_checkpoint(what: str, checkpoint: Checkpoint) -> Trace:
    """Tensors by name, each read when it is looked at. Raises UsageError, which calls what is no checkpoint `what`."""
    if not isinstance(checkpoint, (str, Path)):
        return as_trace(what, checkpoint)
    path, tensors = Path(checkpoint), dict[str, Any]()
    files = (file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else ()
    shards = [open_dump(file) for file in sorted(files, key=lambda file: natural(file.name))]
    if all(shard.names == ["tensor"] for shard in shards):
        return open_dump(path)  # one file, or a folder of them, each of one tensor
    for shard in shards:
        if twice := [name for name in shard.names if name in tensors]:
            raise UsageError(f"{path}: expected a tensor in one shard, got {twice[0]!r} in {shard.source} and before")
        tensors |= {name: partial(shard.__getitem__, name) for name in shard.names}
    return Trace.lazy(tensors, {}, str(path), False)


def _of(found: dict[str, Relation], *kinds: str) -> list[str]:
    return [name for name, known in found.items() if known.kind in kinds]


def _find_scales(found: dict[str, Relation], theirs: Trace) -> None:
    """The tensors that hold the scales of quantised ones, or one over them, and have names that begin likewise."""
    for name in _of(found, "quantised"):
        for extra in (extra for extra in _of(found, EXTRA) if extra.startswith(name.rpartition(".")[0])):
            scale, x = found[name].numbers, theirs.read(extra).flatten().double().cpu()
            if scale and x.shape == scale.low.shape:
                low, high = scale.low.cpu() * (1.0 - 2.0**-22), scale.high.cpu() * (1.0 + 2.0**-22)  # float32 scales
                fits = any(bool(((y >= low) & (y <= high)).all()) for y in (x, 1.0 / x))
                found[extra] = Relation(SCALE if fits else EXTRA, f"{'not ' * (not fits)}the scale of {name}")


def _find_others(found: dict[str, Relation], ours: Trace, theirs: Trace) -> str:
    """Of what has no partner or is not its partner's: under which name the golden has it, and to what it was tied.

    Returns a note where not all were looked for.
    """
    sought, firsts = _of(found, MISSING, EXTRA, DIFFERS, PARTLY), defaultdict[torch.Size, dict[str, Tensor]](dict)
    for name, x in ((name, ours.read(name)) for name in ours.names if sought):
        firsts[x.shape][name] = _first(x)
    same = {*_of(found, SAME)}
    for name in sought[:MOST_SOUGHT]:
        known = found[name]
        twin = next(_twins(theirs.read(name), ours, firsts), "") if name in theirs else ""
        before = _twins(ours.read(name), ours, firsts) if name in ours else ()
        tied = next((other for other in before if other in same), "")
        if known.kind == MISSING and tied:
            found[name] = Relation(TIED, f"stored once: {name} is {tied}")
        elif known.kind == EXTRA and twin in same:
            found[name] = Relation(TIED, f"stored twice: {name} is {twin}")
        elif twin:
            found[name] = Relation(ANOTHER, f"the golden's {twin}")
        elif tied:
            found[name] = known._replace(words=f"{known.words}; in the golden it is tied with {tied}")
    most = f"the numbers of {MOST_SOUGHT} tensors were looked for under other names, of {len(sought)} that differ"
    return most * (len(sought) > MOST_SOUGHT)


def _first(x: Tensor) -> Tensor:
    return x.flatten()[:FIRST].double().cpu().nan_to_num()


def _twins(x: Tensor, ours: Trace, firsts: Mapping[torch.Size, dict[str, Tensor]]) -> Iterator[str]:
    """The golden's tensors that hold the numbers of x, unless all of these are one number."""
    others, first = firsts.get(x.shape, {}), _first(x)
    if others:
        off = (torch.stack([*others.values()]) - first).abs()
        near = (off <= first.abs().amax() / 8.0).all(1)  # what rounding to fp8 moves
        yield from holders(x, ((name, ours.read(name)) for name, fits in zip(others, near, strict=True) if fits))


def _find_joined(found: dict[str, Relation], ours: Trace, theirs: Trace) -> None:
    """Tensors without a partner that are slices of one of the other side, also without, whose name begins likewise."""
    for a, b in product(_of(found, MISSING)[:MOST_SOUGHT], _of(found, EXTRA)[:MOST_SOUGHT]):
        (x, y), blocks = (ours.read(a), theirs.read(b)), {name.rpartition(".")[0].rpartition(".")[0] for name in (a, b)}
        fits = len(blocks) == 1 and x.shape[1:] == y.shape[1:] and x.shape != y.shape
        for part, whole, known in ((a, b, relation(x, y)), (b, a, relation(y, x))) if fits else ():
            if known.kind == PART:
                words = f"{part}: {known.words.replace(GOLDENS, 'its')}"
                before = f"{found[whole].words}; " if found[whole].kind == FUSED else ""
                found[part], found[whole] = Relation(JOINED, f"in {whole}"), Relation(FUSED, before + words)
