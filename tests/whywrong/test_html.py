"""`whywrong diff --html`: what a page says of dumps of every kind, and that nothing in them becomes code."""

import base64
import json
import re

import numpy as np
import pytest
import torch

from whywrong import Trace, golden, step
from whywrong.reporting import page as html
from whywrong.reporting.command import main

HOSTILE = "</script><script>alert('name')</script><img src=x onerror=alert(1)>"


@pytest.fixture
def page(tmp_path, capsys):
    """Writes a golden and observed runs, and returns the page's text and its data by the steps' names."""

    def write(golden_steps, *runs, code=1):
        paths = [tmp_path / "g.safetensors", *(tmp_path / f"o{k}.safetensors" for k in range(len(runs)))]
        for path, steps in zip(paths, (golden_steps, *runs), strict=True):
            (steps if hasattr(steps, "save") else Trace(steps)).save(path)
        return read(*paths, code=code)

    def read(*paths, code=1):
        assert main(["diff", *map(str, paths), "--html", str(tmp_path / "page.html")]) == code
        assert "page: " in capsys.readouterr().err
        text = (tmp_path / "page.html").read_text()
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
        return text, json.loads(data)

    return write


def numbers(words):
    return torch.from_numpy(np.frombuffer(base64.b64decode(words), np.int16).copy()).view(torch.bfloat16)


def sections(text):
    return re.findall(r"<section.*?</section>", text, re.DOTALL)


def test_the_verdict_comes_first_and_each_step_has_its_state(page):
    a = torch.linspace(1.0, 2.0, 100)
    text, data = page({"a": a, "b": a, "gone": a, "c": a}, {"a": a, "b": a * 1.5, "c": a, "more": a})
    assert text.index("<h1") < text.index("<table>")
    assert "first divergence: b" in text[text.index("<h1") : text.index("</h1>")]
    states = re.findall(r'<tr data-step.*?<span class="(\w+)">([\w ]+)</span>', text)
    assert states == [("ok", "ok"), ("wrong", "wrong"), ("other", "not checked"), ("ok", "ok"), ("other", "extra")]
    assert "own and inherited errors are not separated" in text
    assert data["first"] == 1
    assert sorted(data["steps"]) == ["0", "1", "3"], "a step that was not recorded has no picture"


def test_a_recorded_golden_shows_own_errors_and_what_each_was_held_to(page):
    def reference(x):
        return step("z", step("y", x.exp()) + 1.0)

    x = torch.linspace(0.0, 1.0, 30)
    y = x.exp() + 0.01
    text, data = page(golden(reference, x=x), {"x": x, "y": y, "z": y + 1.0})
    assert re.findall(r'<tr data-step.*?<span class="(\w+)">', text) == ["ok", "wrong", "inherits"]
    assert "held to (re-run)" in sections(text)[2], "z is right for what it was given, and not the golden's"
    assert "not separated" not in text
    share = numbers(data["steps"]["2"]["share"])
    assert share.max() < 1.0
    assert numbers(data["steps"]["1"]["share"]).min() > 1.0


def test_names_and_texts_of_files_are_text(page):
    x = torch.ones(4)
    trace = Trace({HOSTILE: x, "\x1b[31mred": x}, {HOSTILE: f"{HOSTILE}\x1b[2J"})
    text, _ = page(trace, {HOSTILE: x * 2.0, "\x1b[31mred": x})
    assert text.count("<script") == 2, "the data and the page's own"
    assert "<img" not in text
    assert "\x1b" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(" in text
    assert r"\x1b[31mred" in text


def test_the_page_asks_nothing_of_the_network(page):
    text, _ = page({"x": torch.ones(4)}, {"x": torch.zeros(4)})
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", text)
    assert not re.findall(r"https?://|@import|url\(", text)


def test_nan_and_inf_are_shown_as_such(page):
    g = torch.ones(3, 4)
    o = g.clone()
    o[0, 1], o[1, 2], o[2, 3] = torch.nan, torch.inf, -torch.inf
    text, data = page({"x": g}, {"x": o})
    assert {"<td>nan</td>", "<td>inf</td>", "<td>-inf</td>"} <= set(re.findall(r"<td>-?\w+</td>", text))
    assert "NaN: 1 observed, 0 golden" in text
    observed = numbers(data["steps"]["0"]["observed"]).view(3, 4)
    assert torch.isnan(observed[0, 1])
    assert (observed[1, 2], observed[2, 3]) == (torch.inf, -torch.inf)
    assert numbers(data["steps"]["0"]["share"]).isinf().sum() == 3


def test_what_float32_cannot_hold_does_not_look_infinite(page):
    g = torch.tensor([1e300, 1.0], dtype=torch.float64)
    _, data = page({"x": g}, {"x": g * torch.tensor([1.5, 1.0], dtype=torch.float64)})
    assert numbers(data["steps"]["0"]["observed"]).isfinite().all()


def test_a_large_step_is_reduced_and_that_is_said_and_its_worst_element_stays(page):
    g = torch.randn(900, 1100, generator=torch.Generator().manual_seed(0))
    o = g.clone()
    o[777, 888] += 1.0
    text, data = page({"large": g, "small": g[:9, :9]}, {"large": o, "small": g[:9, :9]})
    large, small = data["steps"]["0"], data["steps"]["1"]
    assert (large["size"], small["size"]) == ([4, 4], [1, 1])
    assert "<b>Reduced:</b> each cell stands for 4 × 4 elements" in sections(text)[0]
    assert "Reduced" not in sections(text)[1]
    share = numbers(large["share"]).view(large["grid"])
    place = tuple(i // k for i, k in zip((777, 888), large["size"], strict=True))
    assert share[place] == share.max()
    assert large["place"] == list(place), "the page opens where it is"
    assert int((share > 0.0).sum()) == 1


def test_the_page_stays_small_whatever_the_trace(page):
    g = {f"layer.{k}": torch.randn(300, 300, generator=torch.Generator().manual_seed(k)) for k in range(60)}
    text, data = page(g, {name: x * 1.1 for name, x in g.items()})
    assert len(text.encode()) < 5e6
    assert len(data["steps"]) == 60


def test_cells_that_small_steps_leave_go_to_large_ones(monkeypatch):
    monkeypatch.setattr(html, "MOST_CELLS", 1000)
    assert html._cells({0: 10, 1: 5000, 2: 5000}) == {0: 10, 1: 495, 2: 495}
    assert min(html._cells(dict.fromkeys(range(2000), 9)).values()) == 1


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor(3), torch.ones(7), torch.ones(5000)])
def test_scalars_and_rows_are_shown(page, value):
    _, data = page({"x": value}, {"x": value + 1})
    assert data["steps"]["0"]["shape"] == [1, value.numel()]
    assert numbers(data["steps"]["0"]["share"]).min() > 1.0


def test_whole_numbers_are_exact_or_not(page):
    g = torch.arange(12).view(3, 4)
    o = g.clone()
    o[1, 1] += 1
    text, _ = page({"i": g, "m": g > 3}, {"i": o, "m": g > 3})
    assert "<td>1, 1</td><td>5</td><td>6</td><td>1</td><td>0</td><td>inf</td>" in text
    assert "No element has an error." in sections(text)[1]


def test_shapes_that_differ_and_empty_steps_are_said(page):
    g = {"a": torch.ones(3, 3), "b": torch.ones(0, 2)}
    text, data = page(g, {"a": torch.ones(3, 2), "b": torch.ones(0, 2)})
    assert "The shapes differ, so there is no element to compare." in sections(text)[0]
    assert "It has no element." in sections(text)[1]
    assert data["steps"] == {}


def test_of_several_runs_one_is_shown_and_what_differs_between_them_is_listed(page):
    g = {"x": torch.ones(50), "y": torch.ones(50)}
    text, data = page(g, g, {"x": torch.ones(50), "y": torch.full((50,), 2.0)})
    assert "shown: o1.safetensors, of 2 runs" in text
    assert "beyond the bound in o1.safetensors only: a race or an uninitialised read" in text
    assert numbers(data["steps"]["1"]["observed"]).tolist() == [2.0] * 50
    assert "every run gave the same bits in every step" in page(g, g, g, code=0)[0]


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path, capsys):
    Trace({"x": torch.ones(3)}).save(tmp_path / "g.safetensors")
    file = str(tmp_path / "g.safetensors")
    assert main(["diff", file, file, "--html", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(r"whywrong: --html: .* cannot be written \(Is a directory\).*\n", said.err)
    assert "no divergence" in said.out  # which is not lost


def test_the_cause_that_explain_reports_is_on_the_page(tmp_path, capsys):
    x = torch.linspace(0.5, 1.0, 30)
    files = [tmp_path / name for name in ("g.safetensors", "o.safetensors", "page.html")]
    golden(lambda x: x.exp() + 1.0, x=x).save(files[0])
    Trace({"x": x, "output": 2.0 * (x.exp() + 1.0)}).save(files[1])
    assert main(["diff", *map(str, files[:2]), "--explain", "--html", str(files[2])]) == 1
    cause = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("why output: cause"))
    text = files[2].read_text()
    assert cause in text
    assert text.index("</h1>") < text.index(cause) < text.index("<h2>Steps")
    assert "<td " in text[text.index(cause) : text.index("<h2>Steps")], "a table, not its text"
    assert '<p class="note">o.safetensors against g.safetensors, 20' in text
    assert main(["diff", *map(str, files[:2]), "--html", str(files[2])]) == 1
    assert "why output" not in files[2].read_text()


def test_a_loop_is_as_wrong_as_its_first_wrong_step_and_leads_there(page):
    def reference(x):
        for k in range(4):
            x = step(f"x{k}", x.exp() - 1.0)
        return step("y", x + 1.0)

    x = torch.linspace(0.1, 0.2, 30)
    steps = {"x": x, "x0": x.exp() - 1.0, "x1": x.exp().exp()}
    for k in (2, 3):
        steps[f"x{k}"] = steps[f"x{k - 1}"].exp() - 1.0
    text, _ = page(golden(reference, x=x), steps | {"y": steps["x3"] + 1.0})
    rows = re.findall(r'<tr data-step="([\d ]+)"><td><span class="(\w+)">.*?<a href="#step-(\d)">(.*?)</a>', text)
    names, states = ["x", "x0", "x1", "x2", "x3", "y"], ["ok", "ok", "wrong", "inherits", "inherits", "inherits"]
    assert rows == [(str(k), state, str(k), name) for k, (state, name) in enumerate(zip(states, names, strict=True))]
    assert re.findall(r'href="#step-(\d)">(x\d)<', sections(text)[2]) == [(str(k + 1), f"x{k}") for k in range(4)]
