"""Write what data/claims and the records say into the notebooks and README.md. Run by `make refresh`, for all
notebooks or for those that are named.

Question, answer and the parameters' help stand in data/claims/<notebook>.yaml; the answer's numbers come from the
record. From there come the notebook's metadata, the paragraphs of its first cell that begin with "**Question.**" and
"**Answer.**", the comments of its parameters, and README's table of questions and answers.
"""

import json
import re
import sys
import textwrap

from labkit.session.catalogue import ROOT, notebooks
from labkit.session.claims import answer, described

BEGIN, END = "<!-- answers: written by tools/answers.py -->", "<!-- end of answers -->"


FOLDED = "<details><summary><b>Answer</b> (a click shows it; the questions below come first)</summary>"


def paragraph(text, word, words):
    """The text with its paragraph that begins with **word.** made anew."""
    wrapped = textwrap.fill(f"**{word}.** {words}", 118, break_long_words=False, break_on_hyphens=False)
    return re.sub(rf"(?ms)^\*\*{word}\.\*\* .*?(?=\n\n|\Z)", lambda _: wrapped, text, count=1)


def folded(text):
    """The text with its answer behind a click, which Lab, a run's page and the book show alike."""
    return (
        text
        if FOLDED in text
        else re.sub(r"(?ms)^(\*\*Answer\.\*\* .*?)(?=\n\n|\Z)", rf"{FOLDED}\n\n\1\n\n</details>", text, count=1)
    )


def commented(source, helps):
    """The parameters' cell with each comment's range as it is and its help from `helps`."""
    lines = []
    for line in source.splitlines():
        name = line.partition(":")[0]
        code, ranged = re.match(r"(.*?)\s+#\s*(\[[^]]*\]|\{[^}]*\})?", line).groups()
        lines.append(" ".join(filter(None, (f"{code}  #", ranged, helps[name]))))
    return "\n".join(lines)


def refreshed(book):
    """The row of README's table for a notebook, whose file is made anew."""
    about, said = described(book.name), answer(book.name)
    question = " ".join(about["question"].split())
    book.about.update(question=question, answer=said)
    first = book.content["cells"][0]
    text = folded(paragraph(paragraph("".join(first["source"]), "Question", question), "Answer", said))
    first["source"] = text.splitlines(keepends=True)
    for cell in book.content["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            made = commented("".join(cell["source"]), about["parameters"])
            cell["source"] = made.splitlines(keepends=True)
    text = json.dumps(book.content, indent=1, ensure_ascii=False) + "\n"
    if text != book.path.read_text(encoding="utf-8"):
        book.path.write_text(text, encoding="utf-8")
    return f"| [{book.name}](notebooks/{book.name}.ipynb) | {question} | {said} |"


if __name__ == "__main__":
    readme, books = ROOT / "README.md", dict(sorted(notebooks().items(), key=lambda one: one[0] != "start_here"))
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {name: row for row in table.splitlines() for name in books if row.startswith(f"| [{name}]")}
    rows |= {name: refreshed(books[name]) for name in sys.argv[1:] or books}
    lines = ["| notebook | question | answer |", "|---|---|---|", *(rows[name] for name in books if name in rows)]
    readme.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"]), encoding="utf-8")
