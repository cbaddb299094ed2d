"""The answers in README and notebooks are those of the records."""

import importlib
import re
import textwrap

import pytest

from labkit.session.catalogue import ROOT, notebook

ANSWERS = {}
for path in sorted((ROOT / "kernels").rglob("evidence.py")):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    ANSWERS |= getattr(module, "recorded_answers", dict)()


def test_these_investigations_have_answers_from_records():
    assert {"attention_matmul", "bert_embeddings", "d2h_sizing", "dalpha_atomics", "training_run"} <= set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_that_of_the_records(name):
    book = notebook(name)
    assert book.about["answer"] == ANSWERS[name]
    assert ANSWERS[name] in " ".join("".join(book.content["cells"][0]["source"]).split())
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    assert row.endswith(f"| {ANSWERS[name]} |")


BLOCK = re.compile(r"(?m)(?:^    .*\n|^\n)+")
FOUND = re.compile(r"\bok\b|own error|inherited only|<- first|divergence: \w+")


def test_the_first_lines_of_python_in_the_readme_find_what_it_says(capsys):
    """The findings, that is: the last digits of errors are the processor's."""
    text = (ROOT / "README.md").read_text()
    code, printed = BLOCK.findall(text[text.index("    import torch, labkit") :])[:2]
    exec(textwrap.dedent(code), {})
    found = FOUND.findall(capsys.readouterr().out)
    assert found == FOUND.findall(printed)
    assert found.count("own error") == found.count("inherited only") == 1
