"""`report.explore()`: a picture and a table where nobody can turn a widget, widgets where somebody can."""

import io
import time

import matplotlib.image
import nbclient
import nbformat
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from whywrong import localise
from whywrong.comparing.elements import Block, Elements
from whywrong.drawing import explorer as explore
from whywrong.drawing import plots
from whywrong.drawing.plots import PURPLE
from whywrong.errors import UsageError


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, in order."""
    found = []
    monkeypatch.setattr(explore, "display", lambda what, **more: found.append(what))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    return found


def report():
    g = {
        "a": torch.linspace(1.0, 2.0, 60).view(3, 4, 5),
        "<b>": torch.ones(7),
        "n": torch.arange(6),
        "s": torch.ones(()),
    }
    o = {name: x.clone() for name, x in g.items()}
    o["<b>"][2] = torch.nan
    o["a"][1, 2, 3] += 1.0
    return localise(o, g)


def pixels(png):
    return matplotlib.image.imread(io.BytesIO(png))[..., :3]


def holds(png, colour):
    return bool((np.abs(pixels(png) - to_rgb(colour)).max(-1) < 0.01).any())


def test_where_no_page_is_open_one_picture_and_a_table_are_shown(shown):
    report().explore()
    assert [type(one).__name__ for one in shown] == ["Image", "Table"]
    assert shown[1].rows[0][0] == "1, 2, 3", "the first divergence, and its worst element"
    assert pixels(shown[0].data).shape[1] > 900


def test_where_there_is_nothing_to_draw_the_findings_are_shown(shown):
    localise({"a": torch.ones(3)}, {"a": torch.ones(4)}).explore()
    assert [type(one).__name__ for one in shown] == ["Localisation"]


def test_without_ipywidgets_the_error_says_what_to_install(shown, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    with pytest.raises(
        UsageError, match=r"widgets: expected ipywidgets \(pip install ipywidgets\), .*, got no ipywidgets"
    ):
        report().explore(widgets=True)


def test_without_ipywidgets_a_page_gets_the_still_picture(shown, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    report().explore()
    assert [type(one).__name__ for one in shown] == ["Image", "Table"]


def test_an_explorer_is_shown_where_a_server_started_the_kernel(shown, monkeypatch):
    pytest.importorskip("ipywidgets", reason="needs ipywidgets")
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    report().explore()
    report().explore(widgets=False)
    assert [type(one).__name__ for one in shown] == ["VBox", "Image", "Table"]


def elements(o, g, allowed=1.0):
    return Elements.of(o, g, [Block.of(o, g, allowed)])


def picture(o, g):
    return explore.Picture(elements(o, g))


def test_a_picture_has_a_colour_for_what_is_not_finite():
    g = torch.linspace(0.5, 1.0, 64).view(8, 8)
    clean, nan, inf = g.clone(), g.clone(), g.clone()
    nan[3, 3], inf[3, 3] = torch.nan, torch.inf
    images = [picture(o, g) for o in (clean, nan, inf)]
    clean, nan, inf = (one.draw(*one.start) for one in images)
    black = [int((pixels(png).max(-1) < 0.01).sum()) for png in (clean, nan, inf)]
    assert black[0] + 200 < black[2] < black[1] - 200, "Inf is black in the error map, NaN in the observed too"
    purple = [int((np.abs(pixels(png) - to_rgb(PURPLE)).max(-1) < 0.01).sum()) for png in (clean, nan, inf)]
    assert purple[0] == 0
    assert purple[2] > purple[1] + 200


def test_the_ring_is_drawn_only_where_the_worst_element_is():
    g = torch.zeros(2, 6, 6)
    o = g.clone()
    o[1, 2, 2] = 3.0
    found = picture(o, g)
    assert found.start == [1, (0, 5), (0, 5)]
    assert holds(found.draw(*found.start), PURPLE)
    assert not holds(found.draw(0, (0, 5), (0, 5)), PURPLE)
    assert not holds(found.draw(1, (3, 5), (0, 5)), PURPLE)


def test_axes_may_be_swapped_and_a_reduction_is_said():
    g = torch.zeros(600, 900)
    found, swapped = picture(g + 1.0, g), explore.Picture(elements(g + 1.0, g), 1, 0)
    assert found.draw(*found.start) != swapped.draw(*swapped.start)
    assert found.note == "each cell is the worst of 4 × 4"
    found.draw((0, 9), (0, 9))
    assert found.note == ""


@pytest.mark.long
def test_a_large_step_moves_in_a_fifth_of_a_second():
    """Of processor time, since others may use the machine too."""
    g = torch.zeros(4096, 4096)
    found = picture(g + 1.0, g)
    found.draw((0, 4095), (0, 4095))
    took = []
    for k in range(3):
        began = time.thread_time()
        found.draw((k, 4095), (k, 4095))
        took.append(time.thread_time() - began)
    assert min(took) < 0.2


@pytest.fixture
def parts(monkeypatch):
    """The widgets of an explorer, by what they are."""
    widgets = pytest.importorskip("ipywidgets", reason="needs ipywidgets")
    found = report().detailed
    steps = {name: f.elements for name, f in found.findings.items()}
    findings = {name: f.words for name, f in found.findings.items()}
    box = explore.explorer(widgets, steps, findings, "a", found._repr_html_())
    return widgets, *box.children


@pytest.mark.long
def test_a_reader_chooses_a_step_and_slices_it(parts):
    widgets, head, step, chosen, turned, worst = parts

    def sliders():
        return turned.children[0].children[0].children

    def image():
        return turned.children[0].children[1].value

    assert "first divergence: a" in head.value
    assert "&lt;b&gt;" in head.value
    assert [s.value for s in sliders()] == [1, (0, 3), (0, 4)], "at the worst element"
    assert image().startswith('<img alt="Maps of a step')
    before = image()
    sliders()[0].value = 0
    assert image() != before
    sliders()[0].value = 1
    assert image() == before
    sliders()[2].value = (1, 2)
    assert image() != before
    (axes,) = chosen.children
    assert dict(axes.options)["axis 1 (4) down, axis 2 (5) across"] == axes.value
    axes.value = (2, 0)
    assert [type(s) for s in sliders()] == [widgets.IntRangeSlider, widgets.IntSlider, widgets.IntRangeSlider]
    assert sliders()[1].value == 2, "at the worst element"
    for name, dimensions in (("<b>", 2), ("n", 2), ("s", 2), ("a", 3)):
        step.value = name
        assert len(sliders()) == dimensions
        assert chosen.children[0].value == (dimensions - 2, dimensions - 1)
    assert "1, 2, 3" in worst.value


def drawing(a=2, transposed=False, kind="x"):
    figure, axes = plots.figure(width=2.0, height=1.0)
    axes.set_title(f"{a} {transposed} {kind}")
    return figure


CONTROLS = {"a": (1, 5), "transposed": False, "kind": ["w", "x"]}


def test_a_figure_stands_still_where_no_page_is_open(monkeypatch):
    found = []
    monkeypatch.setattr(plots, "display", lambda what, **more: found.append((what, more)))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    explore.turnable(drawing, "A title.", **CONTROLS)
    ((figure, more),) = found
    assert figure.axes[0].get_title(loc="left") == "2 False x"
    assert more["metadata"]["image/png"]["alt"] == "A title."


def test_a_figure_is_turned_by_sliders_boxes_and_menus(shown):
    widgets = pytest.importorskip("ipywidgets", reason="needs ipywidgets")
    before = plots.plt.get_fignums()
    explore.turnable(drawing, 'A "title"', widgets=True, **CONTROLS)
    grid, image = shown[0].children
    slider, box, menu = grid.children
    assert [type(one) for one in grid.children] == [widgets.IntSlider, widgets.Checkbox, widgets.Dropdown]
    assert [one.value for one in grid.children] == [2, False, "x"], "the defaults of the function, not the first"
    assert (slider.min, slider.max) == (1, 5)
    assert image.value.startswith('<img alt="A &quot;title&quot;" style="max-width: 100%" src="data:image/png;base64,')
    seen = [image.value]
    for control, value in ((slider, 3), (box, True), (menu, "w")):
        control.value = value
        assert image.value not in seen
        seen.append(image.value)
    assert plots.plt.get_fignums() == before


@pytest.mark.long
def test_a_notebook_that_is_run_as_a_whole_gets_one_still_figure(monkeypatch):
    """By nbclient, which papermill, nbconvert and `labkit run` execute notebooks with."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    code = (
        "from whywrong.drawing import plots\n"
        "from whywrong.drawing.explorer import turnable\n"
        "def drawing(a=2):\n"
        "    return plots.figure(width=2.0, height=1.0)[0]\n"
        "turnable(drawing, 'An empty figure.', a=(1, 5))"
    )
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)], metadata=kernel)
    nbclient.NotebookClient(notebook, timeout=300).execute()
    (output,) = notebook.cells[0].outputs
    assert sorted(output.data) == ["image/png", "text/plain"]
    assert output.metadata["image/png"]["alt"] == "An empty figure."
