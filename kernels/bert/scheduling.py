"""Trainings one after the other, or several at a time that share the device, until all have a row or time is up."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch

from kernels.bert import training


def make(
    wanted: list[training.Run], rows: Path, kept: Path, states: Path, seconds: float, jobs: int
) -> tuple[int, int]:
    """Append to `rows` a row of each run that has one neither there nor in `kept`; how many were finished, of how many.

    `seconds` is for the whole call. What a run that is cut off has reached is kept in `states`.
    """
    end = time.monotonic() + seconds
    runs = training.unfinished(wanted, rows, kept)
    one = partial(_one, states=states, path=rows, end=end, jobs=jobs)
    if jobs == 1 or not runs:
        done = [one(run) for run in runs]
    else:
        training.Data(runs[0])  # so that the text's ids are in the cache before several jobs want them
        with ProcessPoolExecutor(min(jobs, len(runs)), mp_context=multiprocessing.get_context("spawn")) as pool:
            done = [job.result() for job in as_completed([pool.submit(one, run) for run in runs])]
    return sum(done), len(runs)


def _one(run: training.Run, states: Path, path: Path, end: float, jobs: int) -> bool:
    """Whether the run has a row now. Each of several jobs is held to its share of the cores."""
    progress = jobs == 1
    left = end - time.monotonic()
    if left <= 0.0:
        return False
    if not progress:
        share = max(1, (os.cpu_count() or 1) // jobs)
        torch.set_num_threads(share)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(share)
    row = training.train(run, states, left, progress)
    if row is None:
        return False
    training.append(path, row)
    print(
        f"{run.preset} seed {run.seed}: validation loss {row['validation_loss']:.4f}, top-1 {row['top1']:.4f}, "
        f"{row['seconds']:.0f} s",
        flush=True,
    )
    return True
