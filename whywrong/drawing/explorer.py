"""A figure to turn, and a localisation to look around in: widgets in JupyterLab, a still picture anywhere else."""

from __future__ import annotations

import base64
import html
import inspect
import io
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import permutations
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.core.pylabtools import print_figure
from IPython.display import Image, display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import imsave

from whywrong.comparing.elements import BINS_WITHIN_TOLERANCE, HISTOGRAM_BINS, Elements
from whywrong.drawing.plots import BLUE, PURPLE, RED, SHARES, caption, figure, show
from whywrong.errors import UsageError

_SHARE = LinearSegmentedColormap.from_list("share", [((x + 3.0) / 6.0, colour) for x, colour in SHARES])
_VALUE = LinearSegmentedColormap.from_list("value", [BLUE, "white", RED])
_BEYOND = 9.0
_COLOURS = "ring: the worst; error: white 0, black NaN, Inf, or none allowed; values: black NaN, purple Inf"
_ALT = "Maps of a step: each element's error over its tolerance, golden and observed; a histogram of the errors"


def turnable(draw: Callable[..., Figure], alt: str, widgets: bool | None = None, **controls: Any) -> None:
    """Show the figure that `draw` makes, with a slider, a menu or a box for each of its parameters named in `controls`.

    A control is what `ipywidgets.interact` takes: (least, most) for a slider and a list for a menu, which begin at the
    parameter's default, or True or False for a box, which begins so. `alt` says what the figure shows. Where no page
    is open, or ipywidgets is missing, the one figure of the defaults is shown; `widgets` decides otherwise. Raises
    UsageError for widgets where ipywidgets is not installed.
    """
    boxes = {name: how for name, how in controls.items() if isinstance(how, bool)}
    if (w := _ipywidgets(widgets)) is None:
        show(draw(**boxes), alt)
        return

    def picture(**values: Any) -> bytes:
        plt.close(drawing := draw(**values))
        return print_figure(drawing)

    begin = {name: parameter.default for name, parameter in inspect.signature(draw).parameters.items()} | boxes
    made = {name: w.interactive.widget_from_abbrev(how, begin[name]) for name, how in controls.items()}
    display(_turned(w, picture, alt, made))


def explore(steps: Mapping[str, Elements], findings: Mapping[str, str], first: str, heading: str, widgets: Any) -> None:
    """Show steps, beginning with `first`, under `heading`, which is HTML. See :meth:`whywrong.Localisation.explore`.

    `findings` has a few words on each step.
    """
    if (w := _ipywidgets(widgets)) is not None:
        display(explorer(w, steps, findings, first, heading))
    else:
        display(Image(Picture(steps[first]).draw()), metadata={"image/png": {"alt": f"{first}. {_ALT}"}})
        display(steps[first].table())


def _ipywidgets(widgets: bool | None) -> ModuleType | None:
    """ipywidgets where widgets are wanted. A kernel that a server started for a page has JPY_SESSION_NAME."""
    there = find_spec("ipywidgets") is not None
    if widgets and not there:
        raise UsageError("widgets: expected ipywidgets (pip install ipywidgets), or widgets=False, got no ipywidgets")
    widgets = "JPY_SESSION_NAME" in os.environ and there if widgets is None else widgets
    return import_module("ipywidgets") if widgets else None


def _turned(w: ModuleType, draw: Callable[..., bytes], alt: str, controls: Mapping[str, Any]) -> Any:
    """The controls, as many beside each other as there is room for, above the PNG that `draw` makes of their values."""
    image = w.HTML()

    def redraw(_: Any = None) -> None:
        png = draw(**{name: control.value for name, control in controls.items()})
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        image.value = f'<img alt="{html.escape(alt)}" style="max-width: 100%" src="{source}">'

    for name, control in controls.items():
        control.description, control.style.description_width = name, "initial"
        control.continuous_update = False  # a figure a drag, not a hundred
        control.observe(redraw, "value")
    redraw()
    columns = w.Layout(grid_template_columns="repeat(auto-fill, minmax(21em, 1fr))")
    return w.VBox([w.GridBox(list(controls.values()), layout=columns), image])


class Picture:
    """Two axes of a step: its error map with golden and observed beside it, and its histogram.

    All but the maps is drawn once, so that a move takes a tenth of a second.
    """

    def __init__(self, elements: Elements, down: int = -2, across: int = -1) -> None:
        self._elements, shape = elements, elements.shape
        self._shown = down % len(shape), across % len(shape)
        self.start: list[Any] = [(0, n - 1) if k in self._shown else elements.place[k] for k, n in enumerate(shape)]
        """All of the two axes, and on the others the place of the worst element."""
        golden = np.abs(elements.reduced()[1][1])
        golden = golden[np.isfinite(golden)]
        self._limit = (float(np.quantile(golden, 0.99)) if golden.size else 0.0) or 1.0
        self._figure, panels = figure(1, 4, width=12.0, height=3.4)
        plt.close(self._figure)  # a notebook would show it once more
        value = _VALUE.with_extremes(bad="black", under=PURPLE, over=PURPLE)
        looks = [(_SHARE.with_extremes(under="white", over="black"), 3.0, "log10 of error / tolerance")]
        looks += [(value, 1.0, f"{side} / {self._limit:.3g}") for side in ("golden", "observed")]
        ylabel, xlabel = (f"{elements.axes[k]} ({shape[k]})" for k in self._shown)
        options: Any = {"aspect": "auto", "interpolation": "nearest", "animated": True, "extent": (0.0, 1.0, 1.0, 0.0)}
        self._maps = []
        for panel, (colours, most, title) in zip(panels, looks, strict=False):
            self._maps.append(panel.imshow([[0.0]], colours, vmin=-most, vmax=most, **options))
            self._figure.colorbar(self._maps[-1], ax=panel, location="bottom", shrink=0.8, aspect=30)
            panel.set(title=title, xticks=[], yticks=[], xlabel=xlabel, ylabel=ylabel)
        panels[3].bar(
            range(len(HISTOGRAM_BINS)),
            elements.histogram,
            color=[BLUE] * BINS_WITHIN_TOLERANCE + [RED] * (len(HISTOGRAM_BINS) - BINS_WITHIN_TOLERANCE),
        )
        panels[3].axvline(BINS_WITHIN_TOLERANCE - 0.5, color="black", ls="--", lw=1.0)
        panels[3].set(yscale="symlog", title="elements by error / tolerance", xlim=(-0.6, len(HISTOGRAM_BINS) - 0.4))
        panels[3].set_xticks(range(len(HISTOGRAM_BINS)), HISTOGRAM_BINS, rotation=90, fontsize=8)
        still: Any = {"animated": True, "in_layout": False}
        self._ring = panels[0].plot([], [], "o", mfc="none", mec=PURPLE, ms=11.0, mew=2.0, clip_on=False, **still)[0]
        self._note = self._figure.text(0.99, 0.01, "", fontsize=8, ha="right", **still)
        caption(self._figure, _COLOURS)
        self._canvas: Any = FigureCanvasAgg(self._figure)
        self._canvas.draw()
        self._still = self._canvas.copy_from_bbox(self._figure.bbox)

    def draw(self, *place: Any) -> bytes:
        """A PNG; `place` has the first and the last index of each of the two axes, and the index of any other one.

        Without it, that is :attr:`start`.
        """
        place = place or tuple(self.start)
        ends = [at if isinstance(at, tuple) else (at, at) for at in place]
        window = tuple(slice(at[0], at[1] + 1) if isinstance(at, tuple) else at for at in place)
        size, arrays = self._elements.reduced(window=window)
        down, across = self._shown
        share, golden, observed = (a.T if down > across else a for a in arrays)
        logs = np.log10(share.clip(1e-3, 1e3))  # matplotlib has no colour for Inf: what is beyond a scale has one
        values = [np.where(share == 0.0, -_BEYOND, np.where(share == np.inf, _BEYOND, logs))]
        most, sides = self._limit, (golden, observed)
        values += [np.where(np.isinf(x), np.copysign(_BEYOND, x), x.clip(-most, most) / most) for x in sides]
        for image, cells in zip(self._maps, values, strict=True):
            image.set_data(cells)
        self.note = f"each cell is the worst of {' × '.join(map(str, size))}" if max(size) > 1 else ""
        self._note.set_text(self.note)
        inside = self._elements.worst and all(a <= i <= b for i, (a, b) in zip(self._elements.place, ends, strict=True))
        at = [(self._elements.place[k] - ends[k][0] + 0.5) / (ends[k][1] - ends[k][0] + 1) for k in (across, down)]
        self._ring.set_data([[x] if inside else [] for x in at])
        self._canvas.restore_region(self._still)
        for artist in (*self._maps, self._ring, self._note):
            artist.draw(self._canvas.get_renderer())
        file = io.BytesIO()
        imsave(file, np.asarray(self._canvas.buffer_rgba()), format="png", pil_kwargs={"compress_level": 1})
        return file.getvalue()


def explorer(
    w: ModuleType, steps: Mapping[str, Elements], findings: Mapping[str, str], first: str, heading: str
) -> Any:
    """The widgets, as one: menus of the steps and of pairs of axes, a slider for each axis, the picture, the worst."""
    options = [(f"{name}: {findings[name]}", name) for name in steps]
    step = w.Dropdown(options=options, value=first, description="step", layout=w.Layout(width="60em"))
    chosen, turned, worst = w.VBox(), w.VBox(), w.HTML()

    def arrange(pair: tuple[int, int]) -> None:
        elements = steps[step.value]
        picture, sliders = Picture(elements, *pair), {}
        for name, n, at in zip(elements.axes, elements.shape, picture.start, strict=True):
            made = w.IntRangeSlider if isinstance(at, tuple) else w.IntSlider
            sliders[name] = made(value=at, max=n - 1, layout=w.Layout(display="none" if n == 1 else None))
        turned.children = [_turned(w, lambda **places: picture.draw(*places.values()), _ALT, sliders)]

    def select(_: Any = None) -> None:
        elements = steps[step.value]
        sizes = [f"{name} ({n})" for name, n in zip(elements.axes, elements.shape, strict=True)]
        pairs = [(f"{sizes[a]} down, {sizes[b]} across", (a, b)) for a, b in permutations(range(len(sizes)), 2)]
        last = (len(sizes) - 2, len(sizes) - 1)
        pair = w.Dropdown(options=pairs, value=last, description="axes", layout=w.Layout(width="30em"))
        pair.observe(lambda change: arrange(change["new"]), "value")
        worst.value, chosen.children = elements.table()._repr_html_(), [pair]
        arrange(last)

    step.observe(select, "value")
    select()
    style = "<style>.whywrong-explore :is(td, th) { padding-right: 1em; line-height: 1.5; }</style>"
    head = w.HTML(f"{style}{heading}")
    for part in (head, worst):
        part.add_class("whywrong-explore")
    return w.VBox([head, step, chosen, turned, worst])
