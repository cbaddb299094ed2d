"""README and notebooks say what data/claims and the records say."""

import re
import textwrap

import pytest

from labkit.session.catalogue import ROOT, notebooks
from labkit.session.claims import answer, described
from tools.answers import FOLDED

BOOKS = list(notebooks().values())
MOST_WORDS = 30


@pytest.fixture(params=BOOKS, ids=lambda book: book.name)
def book(request):
    return request.param


def test_question_and_answer_are_those_of_its_claims_file(book):
    question, said = " ".join(described(book.name)["question"].split()), answer(book.name)
    assert (book.about["question"], book.about["answer"]) == (question, said), "make refresh writes both"
    first = " ".join("".join(book.content["cells"][0]["source"]).split())
    assert f"**Question.** {question} {FOLDED} **Answer.** {said} </details>" in first
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| [{book.name}]")]
    assert row.endswith(f"| {question} | {said} |")
    for words in (question, said):
        assert len(words.split()) <= MOST_WORDS, words


def test_the_help_of_its_parameters_is_that_of_its_claims_file(book):
    helps = {name: parameter.help for name, parameter in book.parameters.items()}
    assert helps == described(book.name)["parameters"], "make refresh writes the comments"


BLOCK = re.compile(r"(?m)(?:^    .*\n|^\n)+")
FOUND = re.compile(
    r"\bok\b|own error|inherited only|<- first|divergence: \S+|why \S+: \w+|could not be run"
    r"|\d+ breaks|\w+ runs over \w+ \d, not \d"
)
README_WORDS = 900


@pytest.mark.long
def test_the_lines_of_python_in_the_readme_find_what_it_says(capsys):
    """The findings, that is: the last digits of errors are the processor's."""
    text = (ROOT / "README.md").read_text()
    lines = text[text.index("    import torch, whywrong") : text.index("In files, `golden.save")]
    blocks = [block for block in BLOCK.findall(lines) if block.strip()]
    names = {}
    for code, printed in zip(blocks[::2], blocks[1::2], strict=True):
        exec(textwrap.dedent(code), names)
        found = FOUND.findall(capsys.readouterr().out)
        assert found == FOUND.findall(printed)
        assert found


def test_the_readme_is_short():
    text = BLOCK.sub("\n", (ROOT / "README.md").read_text())
    assert len(text.split()) <= README_WORDS
