"""What is installed, what runs where, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from labkit.requirements import WORKBOOK
from labkit.session.catalogue import ROOT
from labkit.session.device import decide
from labkit.session.record import records, stale, versions

OURS = ("whywrong", "whywrong-workbook")
"""The distributions of this checkout."""


def problems() -> Iterator[str]:
    """The problems of this installation, one line each with its remedy."""
    for name in ("kernels", "labkit"):  # no distribution of this checkout has these names, but PyPI has both
        for distribution in importlib.metadata.distributions(name=name):
            if (folder := Path(str(distribution.locate_file(name))).resolve()) != ROOT / name:
                yield f"the unrelated PyPI package `{name}` is installed, in {folder}: `pip uninstall {name}`"
    if not (ROOT / "labkit" / "pyproject.toml").is_file():
        yield f"labkit: expected to be imported from the checkout, got {ROOT / 'labkit'}: `make setup` in the checkout"
    if decide().is_cuda and importlib.util.find_spec("nvmath") is None:
        yield "there is a GPU but no nvmath-python, which calls cuBLAS: `pip install nvmath-python`"


def absent() -> list[str]:
    """The requirements of whywrong and labkit that are not installed; none where these two are not."""
    try:
        requirements = [text for name in OURS for text in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    names = [re.split(r"[^\w.-]", text)[0] for text in requirements if "extra ==" not in text]
    return [name for name in names if not any(importlib.metadata.distributions(name=name))]


def without_wheel(names: list[str]) -> list[str]:
    """Those of which pip finds no wheel for this Python and this machine; all of them where it reaches no index."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--only-binary", ":all:"]
    return [name for name in names if subprocess.run([*command, name], capture_output=True, check=False).returncode]


def report() -> bool:
    """Print what is installed and what runs where. Returns True if there is no problem."""
    print("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    print(decide("cpu").banner)
    print(decide().banner if decide().is_cuda else "cuda: torch sees no GPU here")
    for tool in ("git", "make", "g++", "nvcc"):
        print(f"{tool}: {shutil.which(tool) or 'not found'}")
    for record in records():
        print(f"record {record.path.relative_to(ROOT)}: {record.where}{'' if record.changed else '; up to date'}")
    for path, why in stale().items():
        print(f"not up to date: {path}: {why}")
    if missing := [name for name in WORKBOOK if importlib.util.find_spec(name) is None]:
        print(f"not installed, for notebooks and pictures: {', '.join(missing)}: `make setup` installs them")
    if names := without_wheel(absent()):
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"no wheel for Python {version} where pip looks: {', '.join(names)}; expected Python 3.11 to 3.14")
    for problem in (all_problems := list(problems())):
        print(f"problem: {problem}")
    summary = f"{len(stale())} records are not up to date" if stale() else "all is well"
    print(f"{len(all_problems)} to mend" if all_problems else summary)
    return not all_problems
