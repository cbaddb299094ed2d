"""Execute one notebook through papermill, and write its page, even if it failed. Call it in a process of its own, since
papermill changes the working directory.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient.exceptions import DeadKernelError

from labkit.cli.pages import as_page, card
from labkit.cli.run import ended
from labkit.session.secrets import hidden, hidden_json
from whywrong.files import write_text

CELL_TIMEOUT = 3600
"""Seconds that one cell may take."""

END_WITH_PARENT = (1, int(signal.SIGKILL))
"""Arguments of Linux' prctl: PR_SET_PDEATHSIG, and the signal to this process when its parent has ended."""

GUARD = "p=%d; (while [ -e /proc/$p/exe ]; do sleep 1; done; kill -9 -$p) >/dev/null 2>&1 &"
"""A shell command that waits until the kernel has ended and then kills its process group, with what its cells started.
It is no child of the kernel, which would wait two seconds for it at its end.
"""


class WithoutSecrets(papermill.iorw.LocalHandler):
    """Writes a notebook without secrets, and whole or not at all, whenever papermill saves it."""

    def write(self, text: str, path: str) -> None:
        """See :class:`papermill.iorw.LocalHandler`."""
        # `reads` joins the lines of each text: a secret may go over several
        write_text(Path(path), nbformat.writes(nbformat.from_dict(hidden_json(nbformat.v4.reads(text)))))


def main(notebook: Path, folder: Path, parameters: dict[str, Any], progress: Callable[[int], None]) -> str:
    """Write FOLDER/notebook.ipynb as it is executed, and FOLDER/report.html. Returns why it failed, or an empty string.

    `progress` is called with the number of completed cells.
    """
    executed, kernel, failed = folder / "notebook.ipynb", AsyncKernelManager(kernel_name="python3"), ""
    setup = f"__import__('ctypes').CDLL(None).prctl{END_WITH_PARENT};"  # the kernel's first line
    guard = f"os.posix_spawnp('sh', ['sh', '-c', {GUARD!r} % os.getpid()], {{}})"
    setup += f"(lambda os: os.waitpid({guard}, 0))(__import__('os'));"
    options = {"progress_bar": False, "execution_timeout": CELL_TIMEOUT, "km": kernel}
    options["extra_arguments"] = [f"--IPKernelApp.exec_lines={setup}"]
    options["on_cell_executed"] = lambda cell, cell_index, **_: progress(cell_index + 1)
    try:
        paths = (str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, executed))  # papermill formats
        papermill.iorw.papermill_io.register(str(folder), WithoutSecrets())
        papermill.execute_notebook(*paths, parameters, cwd=notebook.parent, **options)
    except Exception as error:
        failed = _reason(error, kernel)
    if kernel.has_kernel:
        run_sync(kernel.shutdown_kernel)(now=bool(failed))
    try:
        run = card(folder, notebook.stem, os.environ.get("LABKIT_RESULT", "result.json"))
        write_text(folder / "report.html", as_page(executed, run, failed=failed))
    except Exception as error:
        failed = failed or _reason(error, kernel)
    return failed


def _reason(error: Exception, kernel: AsyncKernelManager) -> str:
    """An error in one line; its traceback goes to stderr, and so to the log."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, papermill.exceptions.PapermillExecutionError):
        reason = f"cell {error.exec_count}: {error.ename}: {error.evalue}"
    elif isinstance(error, DeadKernelError):
        reason = f"the kernel {ended(kernel.provisioner.process.returncode)}"  # type: ignore[union-attr]
    traceback.print_exception(error)
    return " ".join(hidden(reason).split())[:200]
