"""A localisation to look around in: widgets in JupyterLab, a picture and a table anywhere else."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.image import imsave

from labkit.errors import UsageError
from labkit.plots import BLUE, PURPLE, RED, SHARES, caption, figure
from labkit.trace.elements import BINS, WITHIN, Elements, axes
from labkit.trace.findings import Localisation

_SHARE = LinearSegmentedColormap.from_list("share", [((x + 3.0) / 6.0, colour) for x, colour in SHARES])
_VALUE = LinearSegmentedColormap.from_list("value", [BLUE, "white", RED])
_BEYOND = 9.0


def explore(found: Localisation, widgets: bool | None = None) -> None:
    """See :meth:`labkit.Localisation.explore`. A kernel that a server started for a page has JPY_SESSION_NAME."""
    shown = found.detailed
    steps = {name: f.elements for name, f in shown.findings.items() if f.elements and f.elements.share.numel()}
    if not steps:
        display(shown)
        return
    name = shown.first if shown.first in steps else next(iter(steps))
    if widgets or (widgets is None and "JPY_SESSION_NAME" in os.environ):
        display(explorer(shown, steps, name))
        return
    picture = Picture(steps[name])
    alt = f"{name}: the error of each element over its tolerance, golden, observed, and a histogram of the errors"
    display(Image(picture.draw(*picture.start)[0]), metadata={"image/png": {"alt": alt}})
    display(steps[name].table())


class Picture:
    """A step's error map with golden and observed beside it, and its histogram.

    All but the maps and the names of their axes is drawn once, so that a move takes a tenth of a second.
    """

    def __init__(self, elements: Elements) -> None:
        self._elements = elements
        self._missing = max(0, 2 - elements.share.ndim)
        self.axes, self.shape = axes(elements.share.ndim), (1,) * self._missing + tuple(elements.share.shape)
        worst = elements.worst[0].at if elements.worst else (0,) * elements.share.ndim
        self.worst = [*(0,) * self._missing, *worst]
        whole = [slice(0, n) for n in self.shape[-2:]]
        self.start: tuple[int, int, list[Any]] = len(self.shape) - 2, len(self.shape) - 1, [*self.worst[:-2], *whole]
        """The last two axes as rows and columns, and on the others the place of the worst element."""
        golden = np.abs(elements.reduced()[1][1])
        golden = golden[np.isfinite(golden)]
        self._limit = (float(np.quantile(golden, 0.99)) if golden.size else 0.0) or 1.0
        self._figure, panels = figure(1, 4, width=12.0, height=3.4)
        plt.close(self._figure)  # a notebook would show it once more
        value = _VALUE.with_extremes(bad="black", under=PURPLE, over=PURPLE)
        looks = (
            (_SHARE.with_extremes(under="white", over="black"), 3.0, "log10 of error / tolerance"),
            (value, 1.0, f"golden / {self._limit:.3g}"),
            (value, 1.0, f"observed / {self._limit:.3g}"),
        )
        self._moving: list[Any] = []
        for panel, (colours, most, title) in zip(panels, looks, strict=False):
            options: Any = {"aspect": "auto", "interpolation": "nearest", "animated": True}
            image = panel.imshow(np.zeros((1, 1)), colours, vmin=-most, vmax=most, **options)
            self._figure.colorbar(image, ax=panel, location="bottom", shrink=0.8, aspect=30)
            panel.set(title=title, xticks=[], yticks=[], xlabel=" ", ylabel=" ")
            for label in (panel.xaxis.label, panel.yaxis.label):
                label.set_animated(True)
            self._moving.append(image)
        panels[3].bar(range(len(BINS)), elements.histogram, color=[BLUE] * WITHIN + [RED] * (len(BINS) - WITHIN))
        panels[3].axvline(WITHIN - 0.5, color="black", ls="--", lw=1.0)
        panels[3].set(yscale="symlog", title="elements by error / tolerance", xlim=(-0.6, len(BINS) - 0.4))
        panels[3].set_xticks(range(len(BINS)), BINS, rotation=90, fontsize=7)
        ring = {"mfc": "none", "mec": PURPLE, "ms": 11.0, "mew": 2.0, "clip_on": False, "animated": True}
        self._ring = panels[0].plot([], [], "o", **ring)[0]
        self._ring.set_in_layout(False)
        caption(
            self._figure,
            "ring: the worst element; error: white 0, black NaN, Inf, or none allowed; values: black NaN, purple Inf",
        )
        self._canvas: Any = FigureCanvasAgg(self._figure)
        self._canvas.draw()
        self._still = self._canvas.copy_from_bbox(self._figure.bbox)

    def draw(self, down: int, across: int, place: Sequence[Any]) -> tuple[bytes, str]:
        """A PNG of axes `down` and `across`, and what its cells are; `place` has a slice for these, an index for any
        other axis."""
        size, arrays = self._elements.reduced(window=tuple(place[self._missing :]))
        share, golden, observed = (a.T if down > across else a for a in arrays)
        logs = np.log10(share.clip(1e-3, 1e3))  # matplotlib has no colour for Inf: what is beyond a scale has one
        values = [np.where(share == 0.0, -_BEYOND, np.where(share == np.inf, _BEYOND, logs))]
        for x in (golden, observed):
            values.append(
                np.where(np.isinf(x), np.copysign(_BEYOND, x), x.clip(-self._limit, self._limit) / self._limit)
            )
        self._canvas.restore_region(self._still)
        for image, shown in zip(self._moving, values, strict=True):
            image.set_data(shown)
            image.set_extent((0.0, 1.0, 1.0, 0.0))
            image.axes.set(xlabel=self._named(across, place), ylabel=self._named(down, place))
            for artist in (image, image.axes.xaxis.label, image.axes.yaxis.label):
                image.axes.draw_artist(artist)
        inside = [
            place[k].start <= i < place[k].stop if k in (down, across) else place[k] == i
            for k, i in enumerate(self.worst)
        ]
        if all(inside) and self._elements.worst:
            x, y = ((self.worst[k] - place[k].start + 0.5) / (place[k].stop - place[k].start) for k in (across, down))
            self._ring.set_data([x], [y])
            self._ring.axes.draw_artist(self._ring)
        file = io.BytesIO()
        imsave(file, np.asarray(self._canvas.buffer_rgba()), format="png", pil_kwargs={"compress_level": 1})
        return file.getvalue(), f"each cell is the worst of {' × '.join(map(str, size))}" if max(size) > 1 else ""

    def _named(self, axis: int, place: Sequence[Any]) -> str:
        return f"{self.axes[axis]}: {place[axis].start} to {place[axis].stop - 1} of {self.shape[axis]}"


def explorer(shown: Localisation, steps: dict[str, Elements], first: str) -> Any:
    """The widgets, as one. Raises UsageError where ipywidgets is not installed."""
    w = _ipywidgets()
    choice = w.Dropdown(
        options=[(f"{n}: {shown.findings[n].words}", n) for n in steps], value=first, description="step"
    )
    choice.layout.width = "60em"
    rows, columns = w.Dropdown(description="rows"), w.Dropdown(description="columns")
    words, sliders, image, worst = w.HTML(), w.VBox(), w.Image(format="png"), w.HTML()

    picture: Picture
    changing = False

    def redraw(_: Any = None) -> None:
        values = [slider.value for slider in sliders.children]
        place = [slice(v[0], v[1] + 1) if isinstance(v, tuple) else v for v in values]
        image.value, note = picture.draw(rows.value, columns.value, place)
        words.value = note

    def arrange(change: Any = None) -> None:
        if changing:
            return
        if rows.value == columns.value:  # the other takes the axis that this one had
            (columns if change["owner"] is rows else rows).value = change["old"]
            return
        made = []
        for k, (name, n, start) in enumerate(zip(picture.axes, picture.shape, picture.worst, strict=True)):
            if k in (rows.value, columns.value):
                slider = w.IntRangeSlider(value=(0, n - 1), max=n - 1, description=name)
            else:
                slider = w.IntSlider(value=start, max=n - 1, description=name)
            slider.layout = w.Layout(width="40em", display="none" if n == 1 else None)
            slider.observe(redraw, "value")
            made.append(slider)
        sliders.children = made
        redraw()

    def select(_: Any = None) -> None:
        nonlocal picture, changing
        picture, changing = Picture(steps[choice.value]), True
        named = [(f"{name} ({n})", k) for k, (name, n) in enumerate(zip(picture.axes, picture.shape, strict=True))]
        for menu, value in zip((rows, columns), picture.start, strict=False):
            menu.options, menu.value = named, value
        worst.value, changing = steps[choice.value].table()._repr_html_(), False
        arrange()

    choice.observe(select, "value")
    rows.observe(arrange, "value")
    columns.observe(arrange, "value")
    select()
    style = "<style>.labkit-explore :is(td, th) { padding-right: 1em; line-height: 1.5; }</style>"
    head = w.HTML(f"{style}{shown.table()._repr_html_()}<b>{html.escape(shown.verdict)}</b>")
    for part in (head, worst):
        part.add_class("labkit-explore")
    return w.VBox([head, choice, words, w.HBox([rows, columns]), sliders, image, worst])


def _ipywidgets() -> ModuleType:
    try:
        import ipywidgets
    except ImportError:
        raise UsageError("explore: ipywidgets is not installed; wanted labkit[lab], or widgets=False") from None
    return ipywidgets
