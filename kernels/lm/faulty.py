"""What is under investigation: how Meta Lingua's evaluation finds its validation files, and what its settings become.

Rewritten from its public sources (facebookresearch/lingua: lingua/data.py, apps/main/eval.py, lingua/args.py), step by
step: the settings are merged with a dataclass's defaults by OmegaConf; the folders are those of the settings and,
always, the training's own; the files of a folder are shared among the ranks by a modulo, with the assertion that there
is one after it; the harness's results are written only once the validation has ended. Neither the harness nor the
validation is computed: only the search for files, and the writing that follows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from labkit.errors import UsageError

SHOWN = """
generator: {max_tokens: 8192, dtype: bf16, temperature: 1.0, top_p: 0.95}
harness: {tasks: [hellaswag, piqa, {task: nq_open, num_fewshot: 5}]}
validation: {max_steps: 100}
"""
"""The `eval` section of the report's debug.yaml."""
GUARDS = ("none", "raises", "gives an empty list", "leaves the modulo out")
"""Ways to check for zero in the function that finds the files."""
WRITTEN = "results.json is written"


@dataclass
class ValidationSettings:
    """`use_val_from_train_src` is read nowhere."""

    max_steps: int | None = None
    use_val_from_train_src: bool = True
    root_dir: str = ""
    sources: list[str] = field(default_factory=list)


@dataclass
class EvaluationSettings:
    """The section's fields that matter here; `validation` has a default of its own."""

    generator: Any = None
    harness: Any = None
    validation: ValidationSettings | None = field(default_factory=ValidationSettings)


def settings(text: str) -> EvaluationSettings:
    """The section merged over the defaults, by OmegaConf (an extra; UsageError without it)."""
    try:
        from omegaconf import OmegaConf
    except ImportError:
        raise UsageError("omegaconf is missing; wanted it for Lingua's settings: pip install -e '.[lm]'") from None
    merged = OmegaConf.merge(OmegaConf.structured(EvaluationSettings()), OmegaConf.create(yaml.safe_load(text)))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def found(folder: Path, ranks: int, pattern: str = "*.val.jsonl", guard: str = "none") -> list[str]:
    """The files of a folder for so many ranks, by the rule, with one of :data:`GUARDS` put in."""
    names = [str(path) for path in folder.glob(pattern)]
    if not names and guard == "raises":
        raise FileNotFoundError(f"no {pattern} in {folder.name}")
    if not names and guard == "gives an empty list":
        return []
    if len(names) > ranks:
        names = names[:ranks]
    elif not (guard == "leaves the modulo out" and not names):
        assert ranks % len(names) == 0, "the ranks are no multiple of the files"
    assert len(names) > 0, f"no files in {folder.name}"
    return names


def dealt(folder: Path, rank: int, ranks: int, pattern: str = "*.val.jsonl", guard: str = "none") -> str:
    """The file of one rank: as many ranks read each file as go into them."""
    names = found(folder, ranks, pattern, guard)
    each = ranks // len(names)
    return [name for name in names for _ in range(each)][rank]


def searched(given: ValidationSettings, training_root: Path, training_sources: list[str]) -> list[Path]:
    """The folders that the validation looks through."""
    own = [Path(given.root_dir) / source for source in given.sources]
    return own + [training_root / source for source in training_sources]


def evaluate(given: EvaluationSettings, root: Path, sources: list[str], out: Path, guard: str = "none") -> str:
    """An evaluation on one GPU, of which only the search for validation files is made: how it ends."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        if given.validation:
            for folder in searched(given.validation, root, sources):
                dealt(folder, 0, 1, guard=guard)
        (out / "results.json").write_text("{}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return WRITTEN


@contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """A folder that the operating system refuses to list, whoever asks: permissions do not stop an administrator."""
    listing = os.scandir

    def refused(path: Any = ".") -> Any:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    with mock.patch("os.scandir", refused):
        yield
