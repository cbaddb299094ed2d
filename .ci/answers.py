"""Write the answers that follow from the records into README.md and the notebooks. Run by `make refresh`.

An investigation whose kernels have `evidence.recorded_answer` has its answer from there: in its row of the README, in
the notebook's metadata and in the paragraph of its first cell that begins with "**Answer.**".
"""

import importlib
import json
import re

from labkit.session.catalogue import ROOT, notebooks

readme = ROOT / "README.md"
for book in notebooks().values():
    if not (ROOT / "kernels" / book.kernels / "evidence.py").exists():
        continue
    evidence = importlib.import_module(f"kernels.{book.kernels}.evidence")
    if not hasattr(evidence, "recorded_answer"):
        continue
    book.about["answer"] = answer = evidence.recorded_answer()
    first = book.content["cells"][0]
    before, _, rest = "".join(first["source"]).partition("**Answer.** ")
    paragraph, gap, after = rest.partition("\n\n")
    first["source"] = f"{before}**Answer.** {answer}{gap}{after}".splitlines(keepends=True)
    book.path.write_text(json.dumps(book.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    row = re.search(rf"^(\| \[{book.name}\][^|]*\|[^|]*\|).*$", text, re.M)
    if row:
        readme.write_text(text.replace(row[0], f"{row[1]} {answer} |"), encoding="utf-8")
