"""Write the answers that follow from the records into README.md and the notebooks. Run by `make refresh`.

An investigation whose kernels have `evidence.recorded_answer` has its answer from there: in its row of the README, in the
notebook's metadata and in the paragraph of its first cell that begins with "**Answer.**".
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
    answer = evidence.recorded_answer()
    book.about["answer"] = answer
    first = book.content["cells"][0]
    text = re.sub(
        r"\*\*Answer\.\*\* .*?\n\n", lambda _: f"**Answer.** {answer}\n\n", "".join(first["source"]), flags=re.S
    )
    first["source"] = text.splitlines(keepends=True)
    book.path.write_text(json.dumps(book.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    row = re.compile(rf"^(\| \[{book.name}\][^|]*\|[^|]*\|).*$", re.M)
    readme.write_text(
        row.sub(lambda found, answer=answer: f"{found[1]} {answer} |", readme.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
