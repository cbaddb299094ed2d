"""The report's program with any switches set: what each tensor holds on the way, and the log that results."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from kernels.tinyllm import faulty
from kernels.tinyllm.experiments import REPORT_LOG, log
from kernels.tinyllm.fault_sets import ending
from kernels.tinyllm.faulty import DEBUG_PRINTS, MEMORY, NAMES, PRINTED, WAYS, Program
from labkit.session.device import Device
from whywrong.drawing import plots

CONTROLS: dict[str, Any] = {
    **{name: name in PRINTED for name in NAMES},
    "memory": list(MEMORY), "debug_print": list(DEBUG_PRINTS), "way": list(WAYS),
}  # fmt: skip
"""What can be turned: every switch, fresh memory, how many numbers a debug print copies, how results return."""
ALT = (
    "Three tensors, each with a host vector above a device buffer, and the copies between them as the switches have "
    "them, with how many numbers are right in each; beside it the log of this run under that of the report."
)


def switches(
    p: Program,
    device: Device,
    memory: str = MEMORY[1],
    debug_print: str = "a fixed number",
    way: str = WAYS[0],
    **turned: bool,
) -> Figure:
    """One run of the real Tensor in another process, with these switches set beside the printed lines.

    `turned` has names of :data:`faulty.SWITCHES`, True or False; those not named are as in the report's printed lines.
    """
    on = {name for name in NAMES if turned.get(name, name in PRINTED)}
    outcomes = faulty.run(p, faulty.row(*on, way=WAYS.index(way), memory=memory)[None], device)
    seen = [bool(shown[0]) for shown in faulty.observations(outcomes, p, debug_print).values()]
    figure, axes = plots.figure(1, 2, width=13.0, height=3.5)
    figure.set_layout_engine("none")
    axes[0].set_position((0.01, 0.06, 0.62, 0.83))
    axes[1].set_position((0.65, 0.06, 0.34, 0.83))
    _draw_path(axes[0], on, way, outcomes[0], p)
    axes[0].set_title(f"How it ends: {ending(outcomes[0], p)}", weight="bold")
    axes[1].set_title(f"{sum(seen)} of {len(seen)} lines show what the report saw")
    other = "otherwise" if outcomes[0]["status"] == faulty.FINISHED else "otherwise, or the run had ended"
    pairs = zip(REPORT_LOG, log(outcomes[0], debug_print), seen, strict=True)
    for y, (reported, here, shown) in enumerate(pairs):
        alike = "as the report" if y else "right, as the report's; other weights"
        words: Any = {"fontsize": 7.5, "family": "monospace", "va": "top"}
        axes[1].text(0.0, 0.98 - 0.2 * y, f"report  {reported}", color=plots.GREY, **words)
        colour, mark = (plots.BLUE, alike) if shown else (plots.RED, other)
        axes[1].text(0.0, 0.91 - 0.2 * y, f"here    {here}\n        ({mark})", color=colour, **words)
    axes[1].axis("off")
    o = outcomes[0]
    calls = f"{o['failed_calls']} calls failed, {o['failed_uploads']} of them uploads ({o['failed_h2d']} in h2d)"
    figure.text(0.01, 0.02, f"{calls}; orange: differs from a right Tensor", fontsize=7, color=plots.GREY)
    return figure


def _draw_path(axes: Axes, on: Set[str], way: str, o: Any, p: Program) -> None:
    """The tensors of a turn of the loop with what was seen of each, and the copies between them as `on` has them."""
    n = p.elements
    there = f"{o['x_right']} of {n} right" + f"\n{o['x_zero']} zeros" * bool(o["x_zero"])
    made, returned = (f"{o[name]} of {p.logits} right" for name in ("logits_made", "logits_right"))
    boxes = {
        "ff_out": (
            f"h_data: {o['host_size']} numbers,\n{o['host_right']} of {n} right",
            f"{o['ff_right']} of {n} right",
        ),
        "layer_out": ("h_data", ""),
        "x": (f"h_data: {o['x_host']} numbers", "cannot be read" if o["x_failed"] else there),
        "logits": (f"h_data\n{returned}", made),
    }
    for k, (name, (host, buffer)) in enumerate(boxes.items()):
        axes.text(4.0 * k + 1.2, 3.05, name, ha="center", fontsize=9, weight="bold")
        for bottom, colour, words in ((2.0, plots.BLUE, host), (0.2, plots.GREEN, f"d_data\n{buffer}".strip())):
            axes.add_patch(Rectangle((4.0 * k, bottom), 2.4, 0.85, fc=colour, alpha=0.2, ec=colour))
            axes.text(4.0 * k + 1.2, bottom + 0.42, words, ha="center", va="center", fontsize=7.5)

    def arrow(start: tuple[float, float], end: tuple[float, float], words: str, *faults: str, side: int = 1) -> None:
        colour = plots.RED if on & set(faults) else plots.GREY
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, lw=1.4))
        upright = start[0] == end[0]
        x, y = (start[0] - 0.08 * side, 1.52) if upright else (start[0] + 0.05, start[1] + 0.06)
        place: Any = {"va": "center" if upright else "bottom", "ha": "right" if upright and side > 0 else "left"}
        axes.text(x, y, words, fontsize=6.8, color=colour, **place)

    def uploaded(fault: str) -> str:
        return "h_data.size() * 4" if fault in on else "size"

    if "no_layer_d2h" not in on:
        length = "size" if "resize_by_size" in on else "size / 4"
        arrow((1.9, 1.05), (1.9, 2.0), f"d2h():\nresize({length})", "resize_by_size")
    copies = (("constructor", "copy\nconstructor", way == WAYS[0]), ("assignment", "assignment", way != WAYS[3]))
    for k, (copy, words, made) in enumerate(copies):
        left = 4.0 * k + 2.4
        if not made:
            axes.text(left + 0.1, 2.45, f"no {words}", fontsize=6.8, color=plots.GREY)
            continue
        early = "\nallocates too early" * (f"{copy}_omits_shape" in on)
        arrow((left, 2.42), (left + 1.6, 2.42), f"{words}{early}", f"{copy}_omits_shape")
        if f"shallow_{copy}" in on:
            arrow((left, 0.62), (left + 1.6, 0.62), "one buffer,\ntwo owners", f"shallow_{copy}")
        if "prefer_host" in on:
            words = f"uploads\n{uploaded(f'{copy}_by_host_size')}"
            arrow((left + 2.0, 2.0), (left + 2.0, 1.05), words, f"{copy}_by_host_size")
        elif f"shallow_{copy}" not in on:
            arrow((left, 0.62), (left + 1.6, 0.62), "copies\nthe buffer")
    arrow((9.6, 2.0), (9.6, 1.05), f"h2d():\n{uploaded('h2d_by_host_size')}", "h2d_by_host_size", side=-1)
    arrow((10.4, 0.62), (12.0, 0.62), "norm, head")
    assigned = way in WAYS[:2] and "prefer_host" in on
    upload = f"assigned: uploads\n{uploaded('assignment_by_host_size')}\n" if assigned else "returned,\n"
    download = "not downloaded" if "no_other_d2h" in on else "then d2h()"
    arrow((13.2, 1.05), (13.2, 2.0), upload + download, "no_other_d2h", *["assignment_by_host_size"] * assigned)
    axes.set(xlim=(-0.1, 14.5), ylim=(0.0, 3.3))
    axes.axis("off")
