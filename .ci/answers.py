"""Write the answers that follow from the records into README.md and the notebooks. Run by `make refresh`.

Kernels whose `evidence` has `recorded_answers()`, a dict of notebooks and sentences, have their notebooks' answers from
there: in README's row, in the notebook's metadata and in its first cell's paragraph that begins with "**Answer.**".
"""

import importlib
import json
import re
import textwrap

from labkit.session.catalogue import ROOT, notebooks

readme = ROOT / "README.md"
books = notebooks()
answers: dict[str, str] = {}
for path in sorted((ROOT / "kernels").rglob("evidence.py")):
    evidence = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    answers |= getattr(evidence, "recorded_answers", dict)()
for name, answer in answers.items():
    book = books[name]
    book.about["answer"] = answer
    first = book.content["cells"][0]
    before, _, rest = "".join(first["source"]).partition("**Answer.** ")
    _, gap, after = rest.partition("\n\n")
    wrapped = textwrap.fill(f"**Answer.** {answer}", 118, break_long_words=False, break_on_hyphens=False)
    first["source"] = f"{before}{wrapped}{gap}{after}".splitlines(keepends=True)
    book.path.write_text(json.dumps(book.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    row = re.search(rf"^(\| \[{name}\][^|]*\|[^|]*\|).*$", text, re.M)
    if row:
        readme.write_text(text.replace(row[0], f"{row[1]} {answer} |"), encoding="utf-8")
