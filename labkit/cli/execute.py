"""One notebook through papermill, and a page of what came out, whole or not: a process of its own, since papermill
changes its working directory.

    python -m labkit.cli.execute NOTEBOOK FOLDER PARAMETERS_AS_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import papermill

from labkit.cli.pages import as_page

CELL_TIMEOUT = 3600
"""Seconds that one cell may take."""


def main(notebook: Path, folder: Path, parameters: dict[str, Any]) -> None:
    """Write FOLDER/notebook.ipynb as it is executed, and FOLDER/report.html. Raises what a cell raised."""
    executed, report = folder / "notebook.ipynb", folder / "report.html"
    options = {"kernel_name": "python3", "progress_bar": False, "execution_timeout": CELL_TIMEOUT}
    try:
        papermill.execute_notebook(notebook, executed, parameters, cwd=notebook.parent, **options)
    finally:
        if executed.exists():
            page = report.with_name(".report.html")
            page.write_text(as_page(executed), encoding="utf-8")
            page.replace(report)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
