"""The page of `whywrong diff --html`, and the explorer in JupyterLab, in a real Chromium.

Skipped where Playwright or a Chromium is missing: neither is a dependency, so that the tests stay quick to set up.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
import torch

from labkit.cli.main import main
from whywrong import Trace

HOSTILE = "<img src=x onerror=document.title='run'><script>document.title='run'</script>"


@pytest.fixture
def tab(chromium):
    """A tab, what it asked for, and what went wrong in it."""
    page = chromium.new_page(viewport={"width": 1200, "height": 1000})
    page.asked, page.wrong = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    yield page
    page.close()


@pytest.fixture
def written(tmp_path):
    """A page whose second step is wrong at one element of a slice that is not the first."""
    g = torch.linspace(-1.0, 1.0, 3 * 20 * 30).view(3, 20, 30)
    wrong = g.clone()
    wrong[1, 5, 7] = torch.nan
    Trace({HOSTILE: g, "wrong": g, "flat": torch.ones(9)}).save(tmp_path / "g.safetensors")
    Trace({HOSTILE: g, "wrong": wrong, "flat": torch.ones(9)}).save(tmp_path / "o.safetensors")
    main(["diff", *(str(tmp_path / f"{side}.safetensors") for side in "go"), "--html", str(tmp_path / "page.html")])
    return (tmp_path / "page.html").as_uri()


def colour(canvas, x, y):
    return canvas.evaluate("(c, [x, y]) => [...c.getContext('2d').getImageData(x, y, 1, 1).data]", [x, y])


def test_a_page_opens_at_the_first_divergence_and_runs_nothing_of_a_file(tab, written):
    tab.goto(written)
    assert (tab.asked, tab.wrong) == ([written], [])
    assert tab.title() == tab.inner_text("h1") == "first divergence: wrong"
    assert tab.locator("section:visible h2").all_inner_texts() == ["wrong"]
    assert tab.locator("section img, table img").count() == 0
    assert HOSTILE in tab.inner_text(".steps")


def test_a_page_fits_a_phone_and_follows_a_dark_scheme(chromium, written):
    for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 24, 27)")):
        page = chromium.new_page(viewport={"width": 420, "height": 900}, color_scheme=scheme)
        page.goto(written)
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
        page.close()


def test_pictures_show_the_chosen_step_and_slice(tab, written):
    tab.goto(written)
    shown = tab.locator("section:visible")
    error, golden, observed = shown.locator(".maps canvas").all()
    black, white = [0, 0, 0, 255], [255, 255, 255, 255]
    assert [colour(error, x, 5) for x in (7, 8)] == [black, white]
    assert (colour(observed, 7, 5), colour(golden, 7, 5) == black) == (black, False)
    assert shown.locator(".ring").is_visible()
    box = error.bounding_box()
    error.hover(position={"x": 7.5 / 30 * box["width"], "y": 5.5 / 20 * box["height"]})
    read = shown.locator(".read").inner_text()
    assert "axis 0: 1, axis 1: 5, axis 2: 7." in read
    assert "observed NaN, error / tolerance ∞" in read
    shown.locator("input[type=range]").fill("2")
    assert colour(error, 7, 5) == white
    assert not shown.locator(".ring").is_visible()
    shown.locator("select").first.select_option(label="axis 0 (3)")
    assert error.evaluate("c => [c.width, c.height]") == [30, 3]
    shown.locator("input[type=range]").fill("5")
    assert colour(error, 7, 1) == black
    tab.click("text=flat")
    tab.locator("section:visible h2", has_text="flat").wait_for()  # the browser follows the link in its own time
    assert tab.locator("section:visible").count() == 1
    assert tab.locator("section:visible canvas").first.evaluate("c => [c.width, c.height]") == [9, 1]
    assert tab.wrong == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """JupyterLab on this machine, with one notebook that explores."""
    for package in ("jupyterlab", "ipywidgets"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, of labkit[lab]")
    folder = tmp_path_factory.mktemp("lab")
    codes = {
        "explore": "import torch, whywrong\n"
        "g = torch.linspace(-1.0, 1.0, 3 * 20 * 30).view(3, 20, 30)\n"
        "o = g.clone(); o[1, 5, 7] += 1.0\n"
        "whywrong.localise({'x': o, 'y': g}, {'x': g, 'y': g}).explore()",
        "gemm": "from labkit.session.device import choose\n"
        "choose('cpu')\n"
        "from kernels.attention import explorers\n"
        "from whywrong.drawing.explorer import turnable\n"
        "turnable(explorers.gemm, explorers.ALT, **explorers.CONTROLS)",
    }
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for name, code in codes.items():
        cells = [nbformat.v4.new_code_cell(code)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / f"{name}.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    options = (
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", *options]
    with (folder / "log").open("w") as log:
        lab = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **home}, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                break
            except OSError:
                assert lab.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(0.5)
        yield address
    finally:
        lab.terminate()
        lab.wait(30)


def run_in_lab(tab, server, name):
    """The picture that the only cell of a notebook shows with its widgets."""
    tab.goto(f"{server}/lab/tree/{name}.ipynb?reset")
    tab.wait_for_selector(".jp-Notebook .jp-Cell .cm-content", timeout=90_000)
    tab.click(".jp-Notebook .jp-Cell .cm-content")
    for _ in range(100):  # Lab drops what is run before it has a session
        if tab.inner_text(".jp-InputPrompt").strip() != "[ ]:":
            break
        tab.keyboard.press("Control+Enter")
        tab.wait_for_timeout(500)
    return tab.wait_for_selector(".widget-html-content img", timeout=90_000)


def changed(tab, before):
    """The picture, once it is another one."""
    look = "before => document.querySelector('.widget-html-content img').src !== before"
    tab.wait_for_function(look, arg=before, timeout=60_000)
    return tab.get_attribute(".widget-html-content img", "src")


def test_the_explorer_is_turned_in_jupyterlab(tab, server):
    picture = run_in_lab(tab, server, "explore")
    assert "first divergence: x" in tab.inner_text(".jp-OutputArea-output")
    assert picture.get_attribute("alt").startswith("Maps of a step")
    worst = tab.locator(".labkit-explore").last
    assert "1, 5, 7" in worst.inner_text()
    before = picture.get_attribute("src")
    tab.locator(".widget-readout").first.fill("0")
    tab.keyboard.press("Enter")
    sliced = changed(tab, before)
    tab.locator(".widget-dropdown select").first.select_option(index=1)
    changed(tab, sliced)
    assert "1, 5, 7" not in worst.inner_text(), "the worst elements are those of the chosen step"


def test_a_slider_of_the_gemm_explorer_changes_the_figure_in_jupyterlab(tab, server):
    picture = run_in_lab(tab, server, "gemm")
    before = picture.get_attribute("src")
    assert picture.evaluate("img => img.naturalWidth") > 900, "the figure is there, and not a broken image"
    room = tab.locator(".jp-OutputArea-output").bounding_box()
    box = picture.bounding_box()
    assert box["x"] + box["width"] <= room["x"] + room["width"], "and none of it is cut off"
    lda = tab.locator(".widget-slider", has_text="lda")
    assert lda.locator(".widget-readout").inner_text() == "11"
    lda.locator(".noUi-handle").focus()
    tab.keyboard.press("ArrowRight")
    turned = changed(tab, before)
    assert lda.locator(".widget-readout").inner_text() == "12"
    lda.locator(".widget-readout").fill("5")
    tab.keyboard.press("Enter")
    changed(tab, turned)
    box = tab.locator(".widget-html-content img").bounding_box()
    assert box["height"] < 150, "BLAS rejects the call: one line"
    assert not tab.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count()
