"""Tasks for lm-eval in local files: three small ones that the project made, in the forms of piqa, hellaswag and
nq_open.

A task is a YAML file of the harness's own form, its `data_files` beside it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import yaml

from kernels.lm.config import Evaluation, Finding, shown
from whywrong.errors import UsageError

FOLDER = Path(__file__).parent
INSTALLED = "lm-eval installed: pip install -e '.[evaluation]'"


def known(folder: Path) -> dict[str, Path]:
    """The tasks of a folder: their names, and the file that each is in. UsageError for a file that is no YAML."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            task = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, OSError, RecursionError):
            raise UsageError(f"{path}: is not YAML; expected a task of the harness's form") from None
        if isinstance(task, dict) and isinstance(task.get("task"), str):
            found[task["task"]] = path
    return found


def check(given: Evaluation) -> Iterator[Finding]:
    """Whether the harness is there and every task can be loaded from local files."""
    folder = Path(given.folder) if given.folder else FOLDER
    if not given.tasks:
        yield Finding("evaluation.tasks", "[]", "a task at the least, or the word none for `evaluation`")
    if not folder.is_dir():
        yield Finding("evaluation.folder", shown(given.folder), "a folder with a YAML file a task")
        return
    try:
        there = known(folder)
    except UsageError as error:
        yield Finding("evaluation.folder", shown(given.folder), f"one whose files *.yaml are YAML ({error})")
        return
    for name in given.tasks:
        if name not in there:
            yield Finding(
                "evaluation.tasks", shown(name), f"one of {', '.join(there) or 'none: the folder has no task'}"
            )
        elif not (files := _files(there[name])):
            right = f"dataset_kwargs: {{data_files: {{split: file}}}} in {there[name].name}"
            yield Finding("evaluation.tasks", shown(name), right)
        elif missing := [path for path in files if not path.is_file()]:
            yield Finding("evaluation.tasks", shown(name), f"its data file {missing[0].name} beside {there[name].name}")
    if importlib.util.find_spec("lm_eval") is None:
        yield Finding("evaluation", shown(given.tasks), INSTALLED)


def _files(path: Path) -> list[Path]:
    """The data files of a task; none where it does not name them so."""
    try:
        named = yaml.safe_load(path.read_text(encoding="utf-8"))["dataset_kwargs"]["data_files"]
        return [path.parent / file for file in named.values()]
    except (KeyError, TypeError, AttributeError):
        return []
