"""What the notebook shows of the sweep: what a switch changes, what goes together, what another print had told."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels.tinyllm import faulty
from kernels.tinyllm.faulty import OUTCOME
from kernels.tinyllm.tinyllm import TinyLLM, steps
from labkit import plots
from labkit.session.device import Device

Array = np.ndarray
Curve = Sequence[tuple[int, float, float]]
LOSS = "loss in [-0.99, 0.7]"
"""Left out of what is to go together: no cross-entropy can be negative, so it was another number."""


def changes(rows: Array, outcomes: Array, column: int) -> int:
    """How many sets have another outcome when this switch is set than when it is not."""
    place = {tuple(row): i for i, row in enumerate(rows.tolist())}
    end = OUTCOME.fields["loss"][1] + 4  # type: ignore[index]  # what follows is padding
    count = 0
    for row in rows[rows[:, column] == 1].tolist():
        there = place[tuple(row)]
        row[column] = 0
        count += outcomes[there].tobytes()[:end] != outcomes[place[tuple(row)]].tobytes()[:end]
    return count


def sets(found: Sequence[frozenset[str]]) -> str:
    """Sets in words."""
    return "; ".join(" + ".join(sorted(one)) or "none needed" for one in found) or "no set shows it"


def together(seen: Mapping[str, Array]) -> list[tuple[tuple[str, ...], int]]:
    """The largest groups of observations, the loss left out, that one and the same set shows, and how many sets do."""
    names = [name for name in seen if name != LOSS]
    for size in range(len(names), 0, -1):
        groups = [
            (group, int(np.logical_and.reduce([seen[name] for name in group]).sum()))
            for group in itertools.combinations(names, size)
        ]
        if any(count for _, count in groups):
            return [(group, count) for group, count in groups if count]
    return []


def mended(rows: Array, found: Array, right: Array, switch: str) -> Array:
    """For each set where `found`: whether it is right once this switch alone is put right. `rows` are all sets."""
    place = {tuple(row): i for i, row in enumerate(rows.tolist())}
    return right[[place[tuple(row)] for row in faulty.corrected(rows[found], switch).tolist()]]


def fullest(rows: Array, seen: Mapping[str, Array], right: Array, switch: str) -> tuple[int, int, int, int]:
    """Of the sets with zero logits, those that show most of what was observed.

    How many observations that is, how many sets, how many of these have this fault, and how many are right without it.
    """
    zero = seen["logits all 0"]
    shown = np.sum([found for name, found in seen.items() if name != LOSS], axis=0)
    best = zero & (shown == shown[zero].max(initial=0))
    fixed = mended(rows, best, right, switch)
    return int(shown[best].max(initial=0)), int(best.sum()), int(faulty.has(rows[best], switch).sum()), int(fixed.sum())


def cured_by_way(rows: Array, zero: Mapping[str, Array]) -> dict[str, int]:
    """Sets whose logits are zero by value, copied or elided: how many are not with an out-parameter or a shared_ptr."""
    place = {tuple(row): i for i, row in enumerate(rows.tolist())}
    every = cured = 0
    for found in zero.values():
        for row in rows[found & (rows[:, -1] < 2)].tolist():
            every += 1
            cured += not any(found[place[(*row[:-1], way)]] for way in (2, 3))
    return {"all": every, "cured": cured}


def draw(axes: Any, rows: Array, zero: Mapping[str, Array]) -> None:
    """For each switch, the share of sets with zero logits among those that have it and among those that have it not."""
    names = list(faulty.SWITCHES)
    colours = (plots.BLUE, plots.ORANGE, plots.GREEN)
    step = 0.8 / len(zero)
    for j, ((world, found), colour) in enumerate(zip(zero.items(), colours, strict=False)):
        at = np.arange(len(names)) + (j - (len(zero) - 1) / 2) * step
        on = [100 * found[rows[:, i] == 1].mean() for i in range(len(names))]
        off = [100 * found[rows[:, i] == 0].mean() for i in range(len(names))]
        axes.vlines(at, off, on, color=colour, lw=1.5)
        axes.plot(at, on, "o", color=colour, ms=4.5, label=f"set; {world}")
        axes.plot(at, off, "o", color=colour, ms=4.5, mfc="white")
    axes.set_xticks(range(len(names)), [name.replace("_", "\n", 1) for name in names], fontsize=6.5)
    axes.set_ylabel("sets with all-zero logits, %")
    axes.set_title("filled: the switch is set; hollow: it is not", fontsize=8)
    axes.legend(fontsize=7)


def draw_curve(axes: Any, curves: Mapping[str, Curve], vocabulary: int) -> None:
    """Validation and training loss against steps."""
    for (name, curve), colour in zip(curves.items(), (plots.BLUE, plots.ORANGE), strict=False):
        at = [max(1, point[0]) for point in curve]
        axes.plot(at, [point[2] for point in curve], color=colour, marker="o", ms=3, label=f"validation, {name}")
        axes.plot(at, [point[1] for point in curve], color=colour, ls=":", label=f"training, {name}")
    axes.axhline(np.log(vocabulary), color=plots.GREY, ls="--", lw=1, label=f"ln {vocabulary}")
    axes.axhline(2.0, color=plots.RED, ls="-.", lw=1, label="2 nats a byte")
    axes.set_xscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("nats a byte")
    axes.legend(fontsize=7)


def tail(p: faulty.Program, x: Array, device: Device) -> Array:
    """Logits that the norm and the head make of a given x: a model without layers, whose embedding is that x."""
    config = replace(p.config, layers=0)
    weights = {"head.w": p.weights["head.w"], "head.b": p.weights["head.b"], "positions": np.asarray(x, np.float32)}
    weights |= {"lnf.gain": p.weights["lnf.gain"], "lnf.shift": p.weights["lnf.shift"]}
    weights["table"] = np.zeros_like(p.weights["table"])
    model = TinyLLM(config, device)
    model.write(weights)
    model.forward(p.ids[None])
    logits = model.logits()[0]
    model.close()
    return logits


@dataclass(frozen=True)
class Smallest:
    """The least of all activations of a run, without masked ones and the biases' zeros."""

    least: float
    denormal: int
    zeros: int
    count: int
    by_step: dict[str, float]

    @property
    def underflows(self) -> bool:
        """Whether any is zero, or below the least normal float32."""
        return bool(self.zeros or self.denormal)

    def __str__(self) -> str:
        few = {
            name: f"{value:.1e}" for name, value in self.by_step.items() if name.endswith(("out", "mixed", "logits"))
        }
        return f"largest of each step: {few}; least of {self.count}: {self.least:.1e}"


def smallest(p: faulty.Program, device: Device) -> Smallest:
    """Every activation of a forward with the program's weights, held against the least normal float32."""
    model = TinyLLM(p.config, device)
    model.write(p.weights)
    trace = model.trace(p.ids[None], p.ids[None])
    model.close()
    tiny, values, by_step = float(np.finfo(np.float32).tiny), [], {}
    for name in steps(p.config):
        value = np.abs(np.asarray(trace[name]))
        if name.endswith(".p"):
            value = value[..., np.tril(np.ones(value.shape[-2:], bool))]  # the others are masked: zero is right
        by_step[name] = float(value.max())
        values.append(value.reshape(-1))
    whole = np.concatenate(values)
    return Smallest(
        float(whole.min()), int(((whole > 0) & (whole < tiny)).sum()), int((whole == 0).sum()), whole.size, by_step
    )


def prints(p: faulty.Program, suspects: Sequence[frozenset[str]], device: Device, world: str) -> list[tuple[str, ...]]:
    """For each set: what the first ff_out's host vector held, what x held in the end, and how many calls failed."""
    found = []
    for one in suspects:
        o = faulty.run(p, faulty.switches(*one, way=1)[None], device, fresh=world)[0]
        n = p.elements
        host = f"{o['host_size']} floats, {o['host_zero']} of them 0"
        first = "zeros" if o["x_zero"] == n else f"wrong, {o['x'][0]:.2g}, {o['x'][1]:.2g} first"
        x = "right" if o["x_right"] == n else first
        found.append((" + ".join(sorted(one)), host, x, str(o["failed_calls"])))
    return found


def first_wrong(p: faulty.Program, suspects: Sequence[frozenset[str]], device: Device, world: str) -> str:
    """The first of ff_out, x and logits that is wrong in each set; several where the sets differ."""
    found = set()
    for one in suspects:
        o = faulty.run(p, faulty.switches(*one, way=1)[None], device, fresh=world)[0]
        right = {"ff_out": o["ff_right"] == p.elements, "x": o["x_right"] == p.elements}
        found.add(next((name for name in right if not right[name]), "logits"))
    return " or ".join(name for name in ("ff_out", "x", "logits") if name in found)


def guesses(model: TinyLLM, text: Array) -> set[int]:
    """The bytes that the model predicts over a batch of `text`."""
    c = model.config
    model.forward(text[: c.sequences * c.context].astype(np.int32).reshape(c.sequences, c.context))
    return {int(v) for v in np.unique(model.logits().argmax(-1))}


def on_gpu(p: faulty.Program, device: Device) -> dict[str, list[str]]:
    """compute-sanitizer on four programs, its leak check on a thousand tensors, and what fresh device memory holds."""
    told = {}
    cases = {
        "right, memcheck": ((), "memcheck"),
        "right, initcheck": ((), "initcheck"),
        "uploads by h_data.size(), memcheck": (
            ("prefer_host", "resize_by_size", "copy_by_host_size", "unchecked"), "memcheck"),
        "uploads by h_data.size(), initcheck": (
            ("prefer_host", "resize_by_size", "copy_by_host_size", "h2d_by_host_size", "unchecked"), "initcheck"),
        "size in elements, memcheck": (("size_in_elements", "unchecked"), "memcheck"),
    }  # fmt: skip
    for name, (switched, tool) in cases.items():
        count, lines = faulty.sanitized(p, faulty.switches(*switched), device, tool)
        told[name] = [f"{count} errors", *lines]
    told["a thousand tensors made, copied, moved: leak check"] = faulty.leak_check(device)
    told["fresh device memory"] = faulty.fresh_memory(device)
    return told
