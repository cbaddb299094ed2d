"""A new investigation from a template: a notebook, a kernels' folder, claims and tests, all of which run."""

from __future__ import annotations

import keyword
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError
from whywrong.files import write_text

TEMPLATE = Path(__file__).parent / "template"
"""Files at their places in the checkout. NAME is replaced by the name, and the suffix .txt is removed."""

KERNEL = Path(__file__).parent / "kernel.ipynb"
EXECUTE = "jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False"


def new(name: str) -> list[Path]:
    """Write the files of investigation `name`, execute its notebook in place, and return their paths.

    One that was interrupted is taken up, and what is there of it stays. Raises UsageError for a name that is no Python
    name in small letters, and for a name in use.
    """
    sources = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file()]
    places = {str(path.relative_to(TEMPLATE)).removesuffix(".txt").replace("NAME", name): path for path in sources}
    unfinished = ROOT / "kernels" / name / ".unfinished"
    _check(name, () if unfinished.exists() else (*places, "kernels/NAME", "kernels/NAME.py"))
    write_text(unfinished, "labkit new was interrupted; the same command takes it up\n")
    for place, source in places.items():
        if not (ROOT / place).exists():
            write_text(ROOT / place, source.read_text(encoding="utf-8").replace("NAME", name))
    _run("tools.answers", name)
    _run(*EXECUTE.split(), f"notebooks/{name}.ipynb")
    unfinished.unlink()
    return [ROOT / place for place in places]


def new_kernel(name: str) -> Path:
    """Write and execute lab/NAME.ipynb, which git ignores: a reference, a kernel and three calls; returns its path.

    Raises UsageError for a name as :func:`new` does.
    """
    _check(name, ["lab/NAME.ipynb"])
    path = ROOT / "lab" / f"{name}.ipynb"
    write_text(path, KERNEL.read_text(encoding="utf-8").replace("NAME", name))
    _run(*EXECUTE.split(), str(path))
    return path


def _check(name: str, places: Iterable[str]) -> None:
    """Raise UsageError for a name that is no Python name in small letters, or with which a file is there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"NAME: expected a Python name in small letters, such as softmax_rows, got {name!r}")
    for place in (place.replace("NAME", name) for place in places):
        if (ROOT / place).exists():
            raise UsageError(f"NAME: expected a name that is not in use, got {name}, which has {place}")


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with exit status {done.returncode}"]
        raise RuntimeError(f"{Path(command[-1]).name}: {lines[-1]}")
