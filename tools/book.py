"""The whole workbook as a static site: the committed notebooks under their recorded results. Run by `make book`.

python -m tools.book FOLDER
"""

import sys
from pathlib import Path

from labkit.cli.gallery import index
from labkit.cli.pages import Card, as_page
from labkit.session.catalogue import notebooks
from labkit.session.record import recorded


def main(folder: Path) -> None:
    """Write FOLDER/<notebook>.html for each notebook, and FOLDER/index.html."""
    folder.mkdir(parents=True, exist_ok=True)
    cards = []
    for name, book in notebooks().items():
        record = recorded(name, "cpu") or recorded(name)  # a notebook that is committed was executed on a CPU
        result = record.result if record else {}
        run = Card(name, book.path, f"{name}.html", "ok" if result else "no result", result=result)
        run.reason = "" if result else "no run of it is recorded under data/results"
        run.parameters = result.get("parameters", {})
        (folder / run.link).write_text(as_page(book.path, run, "index.html"), encoding="utf-8")
        cards.append(run)
    print(f"written: {index(cards, folder, 'The workbook')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
