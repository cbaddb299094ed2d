"""What is under investigation: how Meta Lingua finds its validation files, and when its training loop evaluates.

Rewritten from its public sources (facebookresearch/lingua: lingua/data.py, apps/main/eval.py, apps/main/train.py,
lingua/args.py), step by step: the settings are merged with a dataclass's defaults by OmegaConf; the folders are those
of the settings and, always, the training's own; the files of a folder are shared among the ranks by a modulo, with the
assertion that there is one after it; the harness's results are written only once the validation has ended; and the
evaluation is called in the training loop. Neither training steps, nor the harness, nor the validation is computed: only
the order of the calls, the search for files, and the writing that follows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from whywrong.errors import UsageError

SHOWN = """
generator: {max_tokens: 8192, dtype: bf16, temperature: 1.0, top_p: 0.95}
harness: {tasks: [hellaswag, piqa, {task: nq_open, num_fewshot: 5}]}
validation: {max_steps: 100}
"""
"""The `eval` section of the report's debug.yaml."""
TRAINING_FILES, VALIDATION_FILES = "*.chunk.*.jsonl", "*.val.jsonl"
RESULTS = "results.json"
Find = Callable[[Path, int, str], list[str]]


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


def merge_settings(section: str) -> EvaluationSettings:
    """A YAML section merged over the defaults, by OmegaConf (an extra; UsageError without it)."""
    try:
        from omegaconf import OmegaConf
    except ImportError:
        raise UsageError("omegaconf is missing; expected it for Lingua's settings: pip install -e '.[lm]'") from None
    merged = OmegaConf.merge(OmegaConf.structured(EvaluationSettings()), OmegaConf.create(yaml.safe_load(section)))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def find_chunks(folder: Path, ranks: int, pattern: str = VALIDATION_FILES) -> list[str]:
    """The files of `folder` that so many ranks share: Lingua's `find_and_sanitize_chunks`."""
    chunks = [str(path) for path in folder.glob(pattern)]
    if len(chunks) > ranks:
        chunks = chunks[:ranks]
    else:
        assert ranks % len(chunks) == 0, "the ranks are no multiple of the files"
    assert len(chunks) > 0, f"no files in {folder.name}"
    return chunks


def find_chunks_or_raise(folder: Path, ranks: int, pattern: str = VALIDATION_FILES) -> list[str]:
    """:func:`find_chunks` behind a check that raises where there is no file."""
    if not any(folder.glob(pattern)):
        raise FileNotFoundError(f"no {pattern} in {folder.name}")
    return find_chunks(folder, ranks, pattern)


def find_chunks_or_none(folder: Path, ranks: int, pattern: str = VALIDATION_FILES) -> list[str]:
    """:func:`find_chunks` behind a check that returns an empty list where there is no file."""
    return find_chunks(folder, ranks, pattern) if any(folder.glob(pattern)) else []


def find_chunks_without_modulo(folder: Path, ranks: int, pattern: str = VALIDATION_FILES) -> list[str]:
    """:func:`find_chunks` with a check that leaves out the modulo where there is no file."""
    chunks = [str(path) for path in folder.glob(pattern)]
    if len(chunks) > ranks:
        chunks = chunks[:ranks]
    elif chunks:
        assert ranks % len(chunks) == 0, "the ranks are no multiple of the files"
    assert len(chunks) > 0, f"no files in {folder.name}"
    return chunks


ZERO_CHECKS: dict[str, Find] = {
    "raises": find_chunks_or_raise,
    "gives an empty list": find_chunks_or_none,
    "leaves the modulo out": find_chunks_without_modulo,
}
"""Ways to check for zero in the function that finds the files."""


def distribute_chunks(folder: Path, rank: int, ranks: int, pattern: str, find: Find = find_chunks) -> str:
    """The file of one rank: as many ranks read each file as go into them."""
    chunks = find(folder, ranks, pattern)
    each = ranks // len(chunks)
    return [chunk for chunk in chunks for _ in range(each)][rank]


def validation_folders(settings: ValidationSettings, training_root: Path, training_sources: list[str]) -> list[Path]:
    """The folders that the validation looks through: those of its settings, and always the training's."""
    own = [Path(settings.root_dir) / source for source in settings.sources]
    return own + [training_root / source for source in training_sources]


def evaluate(settings: EvaluationSettings, root: Path, sources: list[str], out: Path, find: Find = find_chunks) -> None:
    """An evaluation on one GPU: Lingua's `launch_eval`, of which the search for validation files alone is made.

    The training has its `sources` below `root`; results.json is written into `out`. Raises what the search raises.
    """
    if settings.validation:
        for folder in validation_folders(settings.validation, root, sources):
            distribute_chunks(folder, 0, 1, VALIDATION_FILES, find)
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).write_text("{}")


def train(
    steps: int,
    every: int,
    update: Callable[[int], object],
    save: Callable[[int], object],
    evaluate: Callable[[int], object],
    submit: Callable[[int], object],
    async_eval_gpus: int | None = None,
    first: int = 0,
) -> None:
    """Lingua's training loop from step `first` + 1 on: each call gets the number of steps made so far."""
    for step in range(first + 1, steps + 1):
        update(step)
        if step % every == 0:
            save(step)
            if async_eval_gpus is None:
                evaluate(step)  # in this process
            else:
                submit(step)  # as a job of its own
    if steps % every:
        save(steps)


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
