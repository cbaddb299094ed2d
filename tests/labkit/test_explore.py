"""`report.explore()`: a picture and a table where nobody can turn a widget, widgets where somebody can."""

import io

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from labkit import explore, localise
from labkit.errors import UsageError
from labkit.plots import PURPLE
from labkit.trace.elements import Block, Elements


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
    with pytest.raises(UsageError, match=r"ipywidgets is not installed; wanted labkit\[lab\]"):
        report().explore(widgets=True)


def test_an_explorer_is_shown_where_a_server_started_the_kernel(shown, monkeypatch):
    pytest.importorskip("ipywidgets", reason="needs ipywidgets, of labkit[lab]")
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    report().explore()
    report().explore(widgets=False)
    assert [type(one).__name__ for one in shown] == ["VBox", "Image", "Table"]


def picture(o, g, allowed=1.0):
    return explore.Picture(Elements.of(o, g, [Block.of(o, g, allowed)]))


def test_a_picture_has_a_colour_for_what_is_not_finite():
    g = torch.linspace(0.5, 1.0, 64).view(8, 8)
    clean, nan, inf = g.clone(), g.clone(), g.clone()
    nan[3, 3], inf[3, 3] = torch.nan, torch.inf
    images = [picture(o, g) for o in (clean, nan, inf)]
    clean, nan, inf = (one.draw(*one.start)[0] for one in images)
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
    down, across, place = found.start
    assert (down, across, place[0]) == (1, 2, 1)
    assert holds(found.draw(down, across, place)[0], PURPLE)
    assert not holds(found.draw(down, across, [0, *place[1:]])[0], PURPLE)
    assert not holds(found.draw(down, across, [1, slice(3, 6), place[2]])[0], PURPLE)


def test_axes_may_be_swapped_and_a_reduction_is_said():
    g = torch.zeros(600, 900)
    found = picture(g + 1.0, g)
    assert found.draw(*found.start)[1] == "each cell is the worst of 4 × 4"
    down, across, place = found.start
    assert found.draw(across, down, place)[0] != found.draw(down, across, place)[0]
    assert found.draw(down, across, [slice(0, 9), slice(0, 9)])[1] == ""


@pytest.fixture
def parts(monkeypatch):
    """The widgets of an explorer, by what they are."""
    widgets = pytest.importorskip("ipywidgets", reason="needs ipywidgets, of labkit[lab]")
    found = report().detailed
    steps = {name: f.elements for name, f in found.findings.items()}
    box = explore.explorer(found, steps, "a")
    head, step, note, axes, sliders, image, worst = box.children
    return widgets, head, step, note, axes.children, sliders, image, worst


def test_a_reader_chooses_a_step_and_slices_it(parts):
    widgets, head, step, _, (rows, columns), sliders, image, worst = parts
    assert "first divergence: a" in head.value
    assert "&lt;b&gt;" in head.value
    assert [s.value for s in sliders.children] == [1, (0, 3), (0, 4)], "at the worst element"
    before = image.value
    sliders.children[0].value = 0
    assert image.value != before
    sliders.children[0].value = 1
    assert image.value == before
    sliders.children[2].value = (1, 2)
    assert image.value != before
    rows.value = 2
    assert (rows.value, columns.value) == (2, 1), "the other axis makes room"
    rows.value = 0
    assert [type(s) for s in sliders.children] == [widgets.IntRangeSlider, widgets.IntRangeSlider, widgets.IntSlider]
    assert sliders.children[2].value == 3
    for name, dimensions in (("<b>", 2), ("n", 2), ("s", 2), ("a", 3)):
        step.value = name
        assert len(sliders.children) == dimensions
        assert (rows.value, columns.value) == (dimensions - 2, dimensions - 1)
    assert "1, 2, 3" in worst.value
