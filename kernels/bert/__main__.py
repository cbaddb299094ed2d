"""The command line: `python -m kernels.bert corpus | train | rows`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.bert import corpus, training
from labkit.bench import native
from labkit.errors import UsageError
from labkit.session.device import choose

OWN = ("preset", "seed", "compiled", "device")
"""Fields of a run that have an option of another form."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 0 where it did all, 1 where trainings are left, 2 for wrong input."""
    given = _parser().parse_args(arguments)
    try:
        return given.command(given)
    except UsageError as error:
        print(f"kernels.bert: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.bert", description=__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("corpus", help="make the frozen corpus from the packages in a folder, into the cache")
    made.add_argument("folder", type=Path, metavar="FOLDER")
    made.set_defaults(command=_corpus)
    train = commands.add_parser("train", help="train, resuming what is unfinished, and append a row a run")
    train.add_argument(
        "--presets", default="bert", help="names, parted by commas: bert, report+eps, bert-norm, hugging_face"
    )
    train.add_argument("--seeds", default="0", help="numbers, parted by commas")
    train.add_argument("--rows", type=Path, default=Path("runs/bert/ablation.jsonl"), help="the file of JSON lines")
    train.add_argument("--states", type=Path, default=Path("runs/bert/states"), help="where unfinished runs are kept")
    train.add_argument("--seconds", type=float, default=float("inf"), help="stop in time, to go on in a later call")
    train.add_argument("--jobs", type=int, default=1, help="trainings at a time; they share the GPU")
    train.add_argument("--device", default="auto", help="auto, cpu or cuda")
    train.add_argument("--compiled", action="store_true", help="through torch.compile")
    for field in fields(training.Run):
        if field.name not in OWN:
            train.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    train.set_defaults(command=_train)
    return parser


def _corpus(given: argparse.Namespace) -> int:
    made = corpus.build(given.folder)
    if made.facts["sha256"] != corpus.DIGESTS["english"]:
        raise UsageError(f"corpus: has SHA-256 {made.facts['sha256']}; wanted {corpus.DIGESTS['english']}")
    path = native.cache() / "bert" / corpus.ENGLISH
    corpus.keep(made, path)
    print(f"{path}: {made.facts}")
    return 0


def _train(given: argparse.Namespace) -> int:
    end = time.monotonic() + given.seconds
    device = choose(given.device).kind
    options: dict[str, Any] = {f.name: getattr(given, f.name) for f in fields(training.Run) if f.name not in OWN}
    try:
        seeds = [int(seed) for seed in given.seeds.split(",")]
    except ValueError:
        raise UsageError(f"seeds: {given.seeds!r} is not right; wanted numbers, parted by commas") from None
    base = replace(training.Run(**options), compiled=given.compiled, device=device)
    runs = training.unfinished(training.grid(base, given.presets.split(","), seeds), given.rows)
    one = partial(_one, states=given.states, path=given.rows, end=end, jobs=given.jobs)
    if given.jobs == 1:
        done = [one(run) for run in runs]
    else:
        with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            done = [job.result() for job in as_completed([pool.submit(one, run) for run in runs])]
    print(f"{sum(done)} of {len(runs)} trainings finished in this call; rows in {given.rows}")
    return 0 if all(done) else 1


def _one(run: training.Run, states: Path, path: Path, end: float, jobs: int) -> bool:
    """Whether the run has a row now. Each of several jobs is held to its share of the cores."""
    progress = jobs == 1
    left = end - time.monotonic()
    if left <= 0.0:
        return False
    if not progress:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    row = training.train(run, states, left, progress)
    if row is None:
        return False
    training.append(path, row)
    print(
        f"{run.preset} seed {run.seed}: validation loss {row['validation_loss']:.4f}, top-1 {row['top1']:.4f}",
        flush=True,
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
