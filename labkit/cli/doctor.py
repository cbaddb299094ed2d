"""What is installed here, what runs where, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import labkit
from labkit.requirements import WORKBOOK
from labkit.session.catalogue import ROOT
from labkit.session.device import decide
from labkit.session.record import records, stale, versions

OURS = ("whywrong", "whywrong-workbook")
"""The distributions of this checkout."""


def problems() -> Iterator[str]:
    """What is wrong here, a line each with its remedy; nothing where all is well."""
    for name in ("kernels", "labkit"):  # ours is called whywrong-workbook where it is installed
        if any(Path(str(one.locate_file(""))) != ROOT for one in importlib.metadata.distributions(name=name)):
            yield f"the unrelated PyPI package `{name}` is installed: `pip uninstall {name}`"
    if not (where := Path(labkit.__file__)).is_relative_to(ROOT):
        yield f"labkit is imported from {where.parent}; expected {ROOT / 'labkit'}: `make setup`"
    if decide().is_cuda and importlib.util.find_spec("nvmath") is None:
        yield "there is a GPU but no nvmath-python, which calls cuBLAS: `pip install nvmath-python`"


def absent() -> list[str]:
    """What whywrong and labkit ask for and is not installed."""
    try:
        asked = [one for name in OURS for one in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    names = (match[0] for one in asked if "extra ==" not in one and (match := re.match(r"[\w.-]+", one)))
    return [name for name in names if not any(importlib.metadata.distributions(name=name))]


def without_wheel(names: list[str]) -> list[str]:
    """Those of which pip finds no wheel for this Python and this machine; all of them where it reaches no index."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--only-binary", ":all:"]
    return [name for name in names if subprocess.run([*command, name], capture_output=True, check=False).returncode]


def report() -> bool:
    """Print what there is; True where nothing is wrong."""
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
    if none := without_wheel(absent()):
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"no wheel for Python {version} where pip looks: {', '.join(none)}; expected Python 3.11 to 3.14")
    found = list(problems())
    for problem in found:
        print(f"problem: {problem}")
    words = f"{len(stale())} records are not up to date" if stale() else "all is well"
    print(f"{len(found)} to mend" if found else words)
    return not found
