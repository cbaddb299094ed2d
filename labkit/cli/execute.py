"""One headless execution of a notebook, in a process of its own: ``python -m labkit.cli.execute JOB.json``.

papermill changes the process's directory and keeps state of its own, so each run gets its own process. What counts as
success is decided by the caller, from result.json: a notebook whose kernel died, or that left early by sys.exit(0),
looks complete to papermill.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

CELL_TIMEOUT = 3600
"""Seconds that one cell may take."""


def execute(job: dict[str, Any]) -> None:
    """Run the notebook ``job["notebook"]`` into ``job["directory"]`` and render its page."""
    import papermill

    directory = Path(job["directory"])
    os.environ["LABKIT_RUN_DIR"] = str(directory)
    papermill.execute_notebook(
        job["notebook"],
        str(directory / "notebook.ipynb"),
        parameters=job["parameters"],
        kernel_name="python3",
        progress_bar=False,
        cwd=str(Path(job["notebook"]).parent),
        execution_timeout=CELL_TIMEOUT,
    )


def render(notebook: Path, page: Path) -> None:
    """Write the executed notebook as one HTML file."""
    import nbconvert

    # Installed by `pip install --target`, nbconvert's templates lie beside it, where Jupyter does not look.
    beside = Path(nbconvert.__file__).parent.parent / "share" / "jupyter"
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(beside), os.environ.get("JUPYTER_PATH")]))
    html, _ = nbconvert.HTMLExporter(template_name="classic").from_filename(str(notebook))
    temporary = page.with_name(f".{page.name}")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(page)


def _leave(number: int, frame: object) -> None:
    """Close the kernel, and let no second signal stop the closing."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Read the job, run it, and render the page of what came out, whole or not."""
    signal.signal(signal.SIGTERM, _leave)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    directory = Path(job["directory"])
    try:
        execute(job)
    except BaseException:
        (directory / "result.json").unlink(missing_ok=True)  # a cell after lab.finish failed: no success
        raise
    finally:
        if (directory / "notebook.ipynb").exists():
            render(directory / "notebook.ipynb", directory / "report.html")


if __name__ == "__main__":
    main()
