"""Tables: what a cell shows, and what a notebook folds."""

from whywrong import Table
from whywrong.tables import LONG_TABLE, number


def test_what_was_measured_stands_without_brackets():
    assert number({"as it was": True, "with the tile": [1.0, 2.5]}) == "as it was: True; with the tile: 1 to 2.5"
    assert number([0.12345, None]) == "0.123 to "


def test_a_long_table_is_folded_and_keeps_all_of_its_rows():
    rows = [(i, "<b>") for i in range(LONG_TABLE + 1)]
    folded, open_ = Table(("n", "text"), rows)._repr_html_(), Table(("n", "text"), rows[1:])._repr_html_()
    assert folded.startswith("<details><summary>25 rows</summary>")
    assert not open_.startswith("<details>")
    assert folded.count("<tr>") == LONG_TABLE + 2
    assert "<b>" not in folded


def test_nothing_in_a_table_steers_a_terminal():
    shown = str(Table(("a\x1b[2J", "b"), [("\x1b]0;x\x07", "\u202e")], "\x9b2J", wrap=40))
    assert shown.splitlines()[0] == "\\x9b2J"
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_in_a_terminal_columns_of_text_are_as_narrow_as_its_lines(monkeypatch):
    table = Table(("step", "finding"), [("scores", "own error in most of the elements, the first of them at (0, 3)")])
    assert max(map(len, str(table).splitlines())) > 60
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[2:]).split()) == "scores " + table.rows[0][1]
