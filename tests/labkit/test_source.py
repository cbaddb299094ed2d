import pytest

import whywrong
from labkit.session.catalogue import ROOT
from labkit.source import show_source
from whywrong.errors import UsageError

FILE = "whywrong/errors.py"


def test_a_function_is_shown_with_its_line_numbers_and_the_line_in_question():
    source = show_source(whywrong.compare, mark="_allowed(o, bound)")
    text = (ROOT / "whywrong/comparing/comparison.py").read_text().splitlines()
    (marked,) = source.marked
    assert text[source.first - 1].startswith("def compare(")
    assert "_allowed(o, bound)" in text[marked - 1]
    assert f"> {marked:4} {text[marked - 1]}" in str(source)
    assert str(source).startswith(f"whywrong/comparing/comparison.py, line {source.first}")


def test_part_of_a_file_is_shown():
    source = show_source("kernels/tinyllm/tensor.cuh", start="class BasicTensor", lines=3)
    assert len(source.lines) == 3
    assert "class BasicTensor" in source.lines[0]
    html = source._repr_html_()
    assert f"kernels/tinyllm/tensor.cuh, line {source.first}" in html
    assert "<span" in html


def test_a_triton_kernel_is_shown_by_its_function():
    from kernels.mhc.race.race_kernels import variant_kernel

    assert "def variant_kernel" in str(show_source(variant_kernel))


@pytest.mark.parametrize(
    ("what", "words", "message"),
    [
        ("nothing.py", {}, "what: expected a function or a file of the checkout, got 'nothing.py'"),
        (FILE, {"mark": "no such words"}, "mark: expected part of a line of errors.py, got 'no such words'"),
        (FILE, {"start": "no such words"}, "start: expected part of a line of errors.py, got 'no such words'"),
    ],
)
def test_what_is_not_there_is_named(what, words, message):
    with pytest.raises(UsageError, match=message):
        show_source(what, **words)
