"""Reports and the gallery of runs: what they say of runs of every kind, and that nothing in a run becomes code.

The tests in a real Chromium, offline, are skipped where Playwright or a Chromium is missing (see conftest.py).
"""

import base64
import io
import json
import os
import re
import time
from functools import cache
from html import unescape

import nbformat
import pytest
from PIL import Image

from labkit.cli import gallery as galleries
from labkit.cli import pages
from labkit.cli.gallery import gallery
from labkit.cli.main import main
from labkit.cli.pages import as_page, card
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.record import as_result, run_id, sealed
from tools import book
from whywrong.errors import UsageError

HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\x1b[2J'\"&"
CLAIM = {"kind": "asserted", "where": "", "reported": None, "measured": 1, "given": "", "source": ""}
SOURCES = {"notebook": "0" * 12, "labkit": "1" * 12}


def page_of(notebook):
    """The report of an executed notebook, under the result.json beside it, as while its run is in progress."""
    return as_page(notebook, card(notebook.parent, notebook.parent.parent.name))


def a_result(name, parameters, cause="undecidable", verdicts=("confirmed", "refuted"), device=("cpu", "a CPU")):
    return {
        "schema": 1, "notebook": name, "status": "ok", "date": "2026-11-24", "seconds": 12.3, "parameters": parameters,
        "device": dict(zip(("kind", "name"), device, strict=True)),
        "verdict": {"cause": cause, "first_divergence": "qk", "explains": ["a", "b"], "refuted": ["c"]},
        "claims": {f"claim_{k}": {**CLAIM, "verdict": v, "because": f"Reason {k}."} for k, v in enumerate(verdicts)},
        "metrics": {}, "provenance": {"sources": SOURCES},
    }  # fmt: skip


def add(out, name, parameters, folder=None, **options):
    """A finished run's folder, as `labkit run` leaves it, with an empty notebook."""
    result = a_result(name, parameters, **options)
    identity = run_id(name, parameters, SOURCES, tuple(result["device"].values()))
    place = out / name / (folder or identity)
    place.mkdir(parents=True)
    (place / "notebook.ipynb").write_text("{}")
    (place / "result.json").write_text(json.dumps(sealed(result, place / "notebook.ipynb")))
    (place / "report.html").write_text("")
    return place


def a_picture():
    file = io.BytesIO()
    Image.new("RGB", (1600, 900), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def a_notebook(path, *cells, labkit=None, parameters=None):
    """Write an executed notebook. A cell is Markdown, or code and its outputs."""
    made = nbformat.v4.new_notebook(metadata={"labkit": labkit or {}, "papermill": {"parameters": parameters or {}}})
    for cell in cells:
        if isinstance(cell, str):
            made.cells.append(nbformat.v4.new_markdown_cell(cell))
        else:
            code, *outputs = cell
            made.cells.append(nbformat.v4.new_code_cell(code, outputs=outputs, execution_count=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return path


def picture(alt="A red area, and nothing else in it"):
    return nbformat.v4.new_output("display_data", {"image/png": a_picture()}, metadata={"image/png": {"alt": alt}})


def raised(name, value):
    return nbformat.v4.new_output("error", ename=name, evalue=value, traceback=[f"{name}: {value}"])


def text_of(page):
    """What a reader sees, more or less."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]*>", " ", page, flags=re.S)).split())


@pytest.fixture
def known(monkeypatch, tmp_path):
    """One notebook of this test's own, `sizes`, with its parameters."""
    source = "heads: int = 12  # [1, 128] heads\nseed: int = 0  # [0, 1000] seed\ndevice: str = 'cpu'  # {cpu} where"
    made = nbformat.v4.new_notebook(metadata={"labkit": {"question": "Which size?", "answer": "Every `odd` one."}})
    made.cells = [nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})]
    (tmp_path / "books").mkdir()
    nbformat.write(made, tmp_path / "books" / "sizes.ipynb")
    monkeypatch.setenv("LABKIT_NOTEBOOKS", str(tmp_path / "books"))
    return "sizes"


def index_of(out):
    return gallery(out).read_text(encoding="utf-8")


@cache
def committed(name):
    """The page of a committed notebook."""
    return page_of(ROOT / "notebooks" / f"{name}.ipynb")


# Reports


def test_a_report_begins_with_verdict_answer_and_ledger(tmp_path):
    folder = add(tmp_path, "sizes", {"seed": 1}, cause="a tile too narrow", verdicts=("confirmed",) * 3 + ("refuted",))
    about = {"question": "Which size?", "answer": "Every `odd` one."}
    text = "# A title\n\n**Question.** Which size?\n\n**Answer.** Every odd one.\n\n**Cost.** Little."
    page = page_of(a_notebook(folder / "notebook.ipynb", text, "## A part\n\nSome words.", labkit=about))
    seen = text_of(page)
    first = seen[: seen.index("Contents")]
    assert "Verdict a tile too narrow" in first
    weighed = "hypotheses weighed: 2 fit, 1 refuted"  # as many as verdict.explains and verdict.refuted have
    for words in ("A title", "Which size?", weighed, "Every odd one.", "3 confirmed", "1 refuted", "a CPU"):
        assert words in first, words
    assert seen.count("Which size?") == 1, "the header says it already"
    assert "Little." in seen
    assert re.search(r'href="#(section-0)">A part</a>.*<h2 id="\1">', page, re.DOTALL)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([("x", raised("ValueError", "it is too wide\nby far"))], "ValueError: it is too wide"),
        (["only words"], "it did not come to lab.finish"),
    ],
    ids=["a cell raised", "no result"],
)
def test_a_report_of_a_failed_run_says_so_and_why(tmp_path, cells, reason):
    page = page_of(a_notebook(tmp_path / "sizes" / "a" / "notebook.ipynb", *cells))
    assert re.search(rf"Failed {reason}(?! by far)", text_of(page))
    assert "Verdict" not in text_of(page)


def test_a_result_written_before_a_cell_that_failed_or_did_not_run_is_not_shown_as_a_verdict(tmp_path):
    folder = add(tmp_path, "sizes", {"seed": 1}, cause="a tile too narrow")
    path = a_notebook(folder / "notebook.ipynb", ("finish()",), ("x", raised("KeyError", "'later'")))
    assert "KeyError: 'later'" in text_of(page_of(path))
    assert "a tile too narrow" not in page_of(path)
    book = nbformat.read(path, 4)
    book.cells[1] = nbformat.v4.new_code_cell("never()")
    nbformat.write(book, path)
    assert "Failed 1 of 2 cells ran" in text_of(page_of(path))
    assert "a tile too narrow" not in page_of(path)


def test_code_is_folded_and_glue_has_none(tmp_path):
    path = a_notebook(tmp_path / "n.ipynb", ("draw()", picture()), ("import glue",))
    book = nbformat.read(path, 4)
    book.cells[1].metadata["tags"] = ["hide-input"]
    nbformat.write(book, path)
    page = page_of(path)
    assert re.findall(r'<details class="code".*?>', page) == ['<details class="code">'], (
        "one cell has code, and it is shut"
    )
    assert "glue" not in page
    assert 'alt="A red area, and nothing else in it"' in page


def formulas(book):
    seen = []

    class Renderer(pages._Renderer):
        def inline_math(self, body):
            seen.append((body, super().inline_math(body)))
            return ""

        def block_math(self, body):
            seen.append((body, super().block_math(body)))
            return ""

    for cell in book.content["cells"]:
        if cell["cell_type"] == "markdown":
            pages.MarkdownWithMath(renderer=Renderer(escape=False)).render("".join(cell["source"]))
    return seen


def test_every_formula_of_every_notebook_is_mathml():
    seen = [formula for book in notebooks().values() for formula in formulas(book)]
    assert len(seen) > 50
    for latex, mathml in seen:
        assert mathml.startswith("<math"), latex
        assert "error" not in mathml, latex
    wrong = pages._markdown("$\\nosuchcommand{x}$")
    assert "<math" not in wrong, "what cannot be converted is not passed off as mathematics"
    assert "nosuchcommand" in wrong
    assert "<script" not in pages._markdown("$\\text{<script>}<script>$")


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("book", notebooks().values(), ids=lambda book: book.name)
def test_every_notebook_is_a_page_that_asks_for_nothing(book):
    page = committed(book.name)
    assert not re.search(r"(src|href)=\"(?!data:|#|index\.html|\.\./\.\./index\.html)", page.replace("&quot;", ""))
    assert not re.search(r"cdnjs|jsdelivr|unpkg|MathJax|require\.min|@import|url\(", page)
    assert page.count("<script") == 1
    assert page.count("<img") == page.count('alt="') > 0
    assert len(page) < 1.5 * book.path.stat().st_size + 60_000


# The gallery


def test_a_card_says_what_a_run_found(tmp_path, known):
    folder = add(tmp_path, known, {"heads": 3, "seed": 0, "device": "cpu", "gone": 5}, cause="a tile too narrow")
    book = a_notebook(folder / "notebook.ipynb", ("draw()", picture()))
    (folder / "result.json").write_text(json.dumps(sealed(json.loads((folder / "result.json").read_text()), book)))
    page = index_of(tmp_path)
    seen = text_of(page)
    for words in ("Which size?", "a tile too narrow", "1 confirmed", "1 refuted", "a CPU, 12 s", "UTC"):
        assert words in seen, words
    assert "heads = 3 not 12 gone = 5" in seen, "what is no parameter any more has no default"
    assert "seed =" not in seen, "it is the default"
    assert f'href="sizes/{folder.name}/report.html"' in page
    (shown,) = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="A red area, and nothing else in it">', page)
    assert Image.open(io.BytesIO(base64.b64decode(shown))).size == (720, 405)
    assert "<code>odd</code>" not in page, "the answer is that of the defaults"


@pytest.mark.long
def test_what_labkit_run_wrote_is_in_the_gallery_that_it_names(tmp_path, known, capsys):
    path = tmp_path / "books" / "sizes.ipynb"
    book = nbformat.read(path, 4)
    start = "import labkit, os\nlab = labkit.start('sizes', heads=heads, seed=seed, device=device)"
    for source in (start, "if heads == 3: os._exit(9)", "lab.finish(verdict=None)"):
        book.cells.append(nbformat.v4.new_code_cell(source))
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "p", "language": "python"}
    nbformat.write(book, path)
    out = tmp_path / "runs"
    codes = [main(["run", known, "-p", f"heads={heads}", "--out", str(out)]) for heads in (2, 3)]
    assert codes == [0, 1]
    assert f"Runs: {os.path.relpath(out / 'index.html')}" in capsys.readouterr().out
    good, bad = sorted(map(card, (out / known).iterdir()), key=lambda one: one.state, reverse=True)
    assert (good.state, good.parameters) == ("ok", {"heads": 2, "seed": 0, "device": "cpu"})
    assert (bad.state, bad.parameters["heads"]) == ("failed", 3)
    assert bad.reason == "the kernel ended with exit status 9"
    page = (out / "index.html").read_text(encoding="utf-8")
    assert (page.count('data-status="ok"'), page.count('data-status="failed"')) == (1, 1)
    report = text_of((out / bad.link).read_text(encoding="utf-8"))
    assert f"Failed {bad.reason}" in report[: report.index("UTC")]
    assert "Verdict" not in report
    assert "Verdict" in text_of((out / good.link).read_text(encoding="utf-8"))


DAMAGED = {
    "a list": "[]",
    "not JSON": "{",
    "no text": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "by hand": json.dumps({"schema": 1, "status": "ok"}),
    "another schema": json.dumps(a_result("sizes", {"seed": 1}) | {"schema": 2}),
    "true for a number": json.dumps(a_result("sizes", {"seed": 1}) | {"schema": True}),
    "failed": json.dumps(a_result("sizes", {"seed": 1}) | {"status": "failed"}),
    "another notebook": json.dumps(a_result("other", {"seed": 1})),
    "infinite": json.dumps(a_result("sizes", {"seed": 1})).replace("12.3", "1e999"),
    "no number": json.dumps(a_result("sizes", {"seed": 1})).replace("12.3", "NaN"),
    "an unknown verdict": json.dumps(a_result("sizes", {"seed": 1}, verdicts=("proven",))),
    "a nested parameter": json.dumps(a_result("sizes", {"seed": [1]})),
    "no sources": json.dumps(a_result("sizes", {"seed": 1}) | {"provenance": {}}),
    "right, in a folder of its own": json.dumps(a_result("sizes", {"seed": 1})),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_result_that_no_run_wrote_is_listed_as_such(tmp_path, known, text):
    folder = tmp_path / known / "handmade"
    folder.mkdir(parents=True)
    (folder / "result.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "report.html").write_text("")
    assert card(folder).state == "no result"
    seen = text_of(index_of(tmp_path))
    assert "No result result.json" in seen
    assert "Verdict" not in seen
    assert "1 confirmed" not in seen


def test_a_run_whose_folder_is_its_own_is_ok_and_without_its_report_is_not(tmp_path, known):
    folder = add(tmp_path, known, {"seed": 1})
    assert card(folder).state == "ok"
    good = (folder / "result.json").read_text()
    (folder / "result.json").write_text(good.replace("12.3", "12.4"))
    assert "has another digest" in card(folder).reason
    (folder / "result.json").write_text(good)
    (folder / "report.html").unlink()
    assert card(folder).state == "no result"


def test_the_checked_verdicts_are_those_of_claims():
    schema = json.loads((ROOT / "labkit" / "session" / "result.schema.json").read_text())
    assert schema["properties"]["claims"]["additionalProperties"]["properties"]["verdict"]["enum"] == [*pages.VERDICTS]


def test_records_are_results_as_a_run_writes_them():
    for path in (ROOT / "data" / "results").glob("*.c*a.json"):
        assert as_result(json.loads(path.read_text()))


def test_failed_runs_have_their_reason(tmp_path, known):
    cells = [("x", raised("RuntimeError", "the tile is \x1b[31mtoo wide\nsecond line"))]
    a_notebook(tmp_path / known / "a" / "notebook.ipynb", *cells, parameters={"heads": 5, "seed": 0})
    (tmp_path / known / "b").mkdir()
    log = "[IPKernelApp] WARNING | no encryption\nTraceback\nDeadKernelError: Kernel died\n\nthe kernel was killed\n"
    (tmp_path / known / "b" / "log.txt").write_text(log)
    (tmp_path / known / "c").mkdir()
    (tmp_path / known / "c" / "log.txt").write_text("")
    page = index_of(tmp_path)
    seen = text_of(page)
    assert "Failed RuntimeError: the tile is \\x1b[31mtoo wide" in seen
    assert "second line" not in seen
    assert "heads = 5" in seen
    assert "Failed the kernel was killed" in seen
    assert "Failed it did not come to lab.finish" in seen
    assert page.count('data-status="failed"') == 3


def test_runs_from_lab_and_papermill_are_shown(tmp_path, known):
    add(tmp_path, known, {"seed": 1}, folder="interactive")
    page = index_of(tmp_path)
    assert "from Lab or papermill" in text_of(page)
    assert 'data-status="ok"' in page
    assert 'href="sizes/interactive/result.json"' in page, "there is no report"


def test_of_runs_at_one_setting_the_last_is_shown_with_those_before_it(tmp_path, known):
    for k, cause in enumerate(("first cause", "second cause")):
        device = ("cpu", f"CPU {k}")  # makes another run of it
        folder = add(tmp_path, known, {"seed": 1}, cause=cause, device=device)
        os.utime(folder / "result.json", (1e9 + k, 1e9 + k))
    page = index_of(tmp_path)
    assert page.count("<article") == 1
    seen = text_of(page)
    assert seen.index("second cause") < seen.index("1 earlier") < seen.index("first cause")


def test_a_folder_without_runs_is_a_page_too(tmp_path):
    (tmp_path / "stray").write_text("")
    assert "No run yet" in text_of(index_of(tmp_path))


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "index.html").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        gallery(tmp_path)
    assert not list(tmp_path.glob(".index*")), "no half page is left"


def test_nothing_in_a_run_becomes_markup_or_steers_a_terminal(tmp_path, known, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "environment-of-this-test")
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx012345"
    result = a_result(known, {"heads": 3, "text": HOSTILE}, cause=HOSTILE, device=("cpu", HOSTILE))
    result["claims"] = {HOSTILE: {**CLAIM, "kind": HOSTILE, "verdict": "refuted", "because": f"{HOSTILE} {token}"}}
    result["verdict"]["explains"] = result["verdict"]["refuted"] = [HOSTILE]
    for text in ("\ud800", HOSTILE):
        result["parameters"]["text"] = text
        folder = tmp_path / known / run_id(known, result["parameters"], SOURCES, ("cpu", HOSTILE))
        folder.mkdir(parents=True)
        labkit = {"question": HOSTILE, "answer": HOSTILE}
        book = a_notebook(folder / "notebook.ipynb", ("draw()", picture(HOSTILE)), labkit=labkit)
        (folder / "result.json").write_text(json.dumps(sealed(result, book)))
        (folder / "report.html").write_text("")
        page = page_of(book)
        assert card(folder).state == ("ok" if text == HOSTILE else "no result")
        (folder / "report.html").write_text(page)
    failed = a_notebook(tmp_path / known / HOSTILE.replace("/", "") / "notebook.ipynb", ("x", raised(HOSTILE, token)))
    gallery_page = index_of(tmp_path)
    for text, pictures in ((page, 1), (gallery_page, 2), (page_of(failed), 0)):
        assert text.count("<script") == 1, "its own alone"
        assert text.count("<img") == pictures
        assert "\x1b" not in text
        assert "environment-of-this-test" not in text
        assert token not in text.split("<main>")[0]
    assert "&lt;secret&gt;" in page


def test_the_book_links_every_notebook(tmp_path, known):
    book.main(tmp_path / "book")
    page = (tmp_path / "book" / "index.html").read_text(encoding="utf-8")
    assert re.findall('<h2><a href="(.*?)">', page) == ["sizes.html"]
    assert "Failed 0 of 1 cells ran" in text_of(page), "a notebook that was not executed has no verdict"
    assert 'href="index.html"' in (tmp_path / "book" / "sizes.html").read_text(encoding="utf-8")


# Sweeps


def sweep(out, name, count):
    grid = [
        {"heads": heads, "seed": seed, "tile": tile} for seed in range(count) for heads in range(10) for tile in (8, 16)
    ]
    for k, parameters in enumerate(grid[:count]):
        cause = "a tile too narrow" if parameters["heads"] > 4 else "undecidable"
        if k % 50 == 7:
            cells = [("x", raised("OutOfMemoryError", "no memory"))]
            a_notebook(out / name / f"{k:012x}" / "notebook.ipynb", *cells, parameters=parameters)
        else:
            add(out, name, parameters, cause=cause)


def test_many_runs_of_one_notebook_are_a_grid(tmp_path, known):
    sweep(tmp_path, known, 400)
    page = index_of(tmp_path)
    seen = text_of(page)
    assert "a sweep of 400 settings" in seen
    assert "<article" not in page
    assert page.count('<table class="grid">') == 2, "one for each tile"
    assert ("tile = 8" in seen, "heads ↓" in seen or "seed ↓" in seen) == (True, True)
    assert page.count("<td>") == 400
    assert page.count('<a data-mark="') == 400
    assert page.count('<a data-mark="×"') == 8
    assert "8 OutOfMemoryError: no memory" in seen
    assert "196 a tile too narrow" in seen or "200 a tile too narrow" in seen
    assert "392 confirmed" in seen


@pytest.mark.long
def test_a_thousand_runs_are_a_small_page_in_seconds(tmp_path, known):
    sweep(tmp_path, known, 1000)
    begun = time.process_time()
    page = index_of(tmp_path)
    assert time.process_time() - begun < 10
    assert len(page) < 500_000


def test_values_that_are_too_many_for_an_axis_share_places(tmp_path, known):
    for seed in range(150):
        add(tmp_path, known, {"seed": seed, "heads": 1 + seed % 2, "scale": seed / 7, "text": "ab"[seed % 2]})
    page = index_of(tmp_path)
    assert page.count('<th scope="col">') <= galleries.ALONG * 2
    assert "0 to 3" in text_of(page)
    assert page.count("(2 runs)") + page.count("(4 runs)") > 10


# In a browser


@pytest.fixture
def look(chromium):
    """Opens a page offline in a window of a width; whatever it asked for but itself, or went wrong, fails the test."""
    opened = []

    def look(path, width=1300, scheme="light"):
        tab = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        wrong = []
        tab.on("request", lambda r: None if r.url.startswith((path.as_uri(), "data:")) else wrong.append(r.url))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        tab.goto(path.as_uri())
        opened.append((tab, wrong))
        return tab

    yield look
    for tab, wrong in opened:
        assert wrong == []
        tab.close()


def overflow(tab):
    return tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.mark.parametrize("name", notebooks())
def test_no_report_is_wider_than_its_window_and_nothing_is_cut_off(look, tmp_path, name):
    path = tmp_path / f"{name}.html"
    path.write_text(committed(name), encoding="utf-8")
    cut = """() => [...document.querySelectorAll("main *")].filter(e => {
        if (e.scrollWidth <= e.clientWidth + 1 || !e.clientWidth || e.closest("math")) return false;
        return getComputedStyle(e).overflowX === "hidden";
    }).map(e => e.outerHTML.slice(0, 80))"""
    for width in (400, 1300):
        tab = look(path, width)
        assert overflow(tab) <= 0
        assert tab.evaluate(cut) == []
        shown = tab.locator("main img")
        assert all(image.evaluate("i => i.naturalWidth > 0 && i.alt.length > 20") for image in shown.all())
        tab.click("#code")
        assert overflow(tab) <= 0, "with all code open"


def test_verdict_answer_and_ledger_are_on_the_first_screen(look, tmp_path):
    result = a_result("sizes", {"seed": 1}, verdicts=("confirmed", "refuted", "undecidable", "untestable"))
    about = {"question": "Which size is wrong, and since when?", "answer": "A word. " * 30}
    run = pages.Card("sizes", tmp_path / "n.ipynb", "", "ok", "", result, {"seed": 1})
    path = tmp_path / "r.html"
    path.write_text(as_page(a_notebook(tmp_path / "n.ipynb", "# A title of some length", labkit=about), run))
    for width in (400, 1300):
        tab = look(path, width)
        for place in (".ends", ".answer", ".ledger"):
            box = tab.locator(place).first.bounding_box()
            assert box["y"] + box["height"] < 900, place
        widths = tab.eval_on_selector_all(".bar i", "all => all.map(i => Math.round(i.getBoundingClientRect().width))")
        assert len(widths) == 4
        assert max(widths) - min(widths) <= 1, "a claim each"


def test_code_unfolds_and_the_theme_turns_and_is_kept(look, tmp_path):
    path = tmp_path / "r.html"
    path.write_text(page_of(a_notebook(tmp_path / "n.ipynb", "## A part", ("x = 1",), ("y = $2",), "$\\sqrt{x}$")))
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = look(path, scheme="dark").evaluate(ground)
    tab = look(path)
    assert tab.locator("math msqrt").bounding_box()["height"] > 10
    assert not tab.get_by_text("x = 1").is_visible()
    tab.click("#code")
    assert tab.get_by_text("x = 1").is_visible()
    assert tab.get_attribute("#code", "aria-pressed") == "true"
    light = tab.evaluate(ground)
    assert light != dark
    tab.click("#theme")
    assert tab.evaluate(ground) == dark
    tab.reload()
    assert tab.evaluate(ground) == dark
    tab.click("#theme")
    assert tab.evaluate(ground) == light
    tab.click(".contents a")
    assert tab.url.endswith("#section-0")


def test_what_a_notebook_printed_runs_nothing_and_fetches_nothing(chromium, tmp_path):
    html = "<img src=http://localhost:9/x.png onerror=\"document.title='run'\"><script>document.title='run'</script>"
    shown = nbformat.v4.new_output("display_data", {"text/html": html + "<b>kept</b>"})
    path = tmp_path / "r.html"
    path.write_text(page_of(a_notebook(tmp_path / "n.ipynb", "# Title", html, ("x", shown))))
    tab, asked = chromium.new_page(), []
    tab.on("requestfinished", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_timeout(200)
    assert (tab.title(), asked) == ("Title", [path.as_uri()])
    assert tab.get_by_text("kept").is_visible()
    tab.close()


def test_the_gallery_is_searched_and_filtered(look, tmp_path, known):
    sweep(tmp_path, known, 100)
    add(tmp_path, "other", {"heads": 5}, cause="a missing transpose", device=("cuda", "a GPU"))
    add(tmp_path, "other", {"heads": 6}, cause=None)
    a_notebook(tmp_path / "third" / "a" / "notebook.ipynb", ("x", raised("KeyError", HOSTILE)))
    path = gallery(tmp_path)
    for width in (400, 1300):
        assert overflow(look(path, width)) <= 0
    tab = look(path)

    def shown():
        return tab.inner_text("#shown"), tab.locator(".card:visible").count(), tab.locator(".sweep:visible").count()

    assert shown() == ("103 runs", 3, 1)
    tab.fill("#search", "transpose HEADS=5")
    assert shown() == ("1 of 103 runs", 1, 0)
    tab.fill("#search", "no such thing")
    assert shown() == ("0 of 103 runs", 0, 0)
    tab.fill("#search", "")
    for name, value, cards, sweeps in [
        ("notebook", "other", 2, 0),
        ("verdict", "a cause", 1, 1),
        ("verdict", "nothing weighed", 1, 0),
        ("device", "cuda", 1, 0),
        ("status", "failed", 1, 1),
    ]:
        tab.select_option(f"select[name={name}]", value)
        assert shown()[1:] == (cards, sweeps), (name, value)
        tab.select_option(f"select[name={name}]", "")
    assert tab.title() == "Runs", "nothing of a run has run"
    cell = tab.locator('.grid a[data-mark="●"]').first
    assert "a tile too narrow" in cell.get_attribute("title")
    assert (tmp_path / cell.get_attribute("href")).is_file()
