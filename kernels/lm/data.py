"""Sequences of byte tokens, shuffled and dealt to ranks.

The documents of all files, in the order of the files' names, make one row of tokens, cut into sequences of `length`
tokens and the one that follows. What a step sees follows from the seed and the step's number alone: sequence `place` of
epoch `epoch` is given by a permutation drawn from (seed, epoch), steps take them in turn, and a step's sequences are
dealt to the ranks in order. So a run goes on anywhere, on any number of ranks that divides the batch, and each epoch
has each sequence once.

A file is checked line by line when it is packed, once; the tokens are kept beside the run and mapped into memory.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from kernels.lm.config import BEGIN, END, Data
from kernels.lm.jsonl import files, packed
from kernels.lm.model import IGNORED
from whywrong.errors import UsageError

Tensor = torch.Tensor


class Sequences:
    """The training data of a run."""

    def __init__(self, given: Data, seed: int, cache: Path) -> None:
        self.given, self.seed = given, seed
        self.tokens = packed(files("data.folder", given.folder, given.pattern), cache)
        self.count = (len(self.tokens) - 1) // given.length
        if self.count < given.batch:
            key, value = ("batch", given.batch) if self.count else ("length", given.length)
            raise UsageError(
                f"data.{key}: expected at most {self.count} sequences of {given.length} tokens, as {given.folder} "
                f"holds, shorter ones, or more text, got {value}"
            )
        self.digest = hashlib.sha256(self.tokens.tobytes()).hexdigest()[:16]
        self._order = lru_cache(2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)

    def rows(self, step: int) -> list[int]:
        """Which sequences step 0, 1, ... sees, over all ranks."""
        first = step * self.given.batch
        return [int(self._order(p // self.count)[p % self.count]) for p in range(first, first + self.given.batch)]

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """ids and labels [batch / ranks, length], int64 on the CPU, of one rank."""
        share = self.given.batch // ranks
        at = np.array(self.rows(step)[rank * share : (rank + 1) * share]) * self.given.length
        taken = self.tokens[at[:, None] + np.arange(self.given.length + 1)].astype(np.int64)
        return torch.from_numpy(taken[:, :-1]), torch.from_numpy(taken[:, 1:])

    def state(self, step: int) -> dict[str, int | str]:
        """Where the run is before step `step`: what a checkpoint keeps."""
        epoch, place = divmod(step * self.given.batch, self.count)
        return {"epoch": epoch, "place": place, "sequences": self.count, "digest": self.digest, "seed": self.seed}

    def resume(self, step: int, state: dict[str, int | str]) -> None:
        """Hold a checkpoint's state to this data. UsageError where the text, the seed or the batch is another."""
        now = self.state(step)
        for key, value in state.items():
            if now[key] != value:
                raise UsageError(
                    f"data: the checkpoint was made with {key} {value}, and this run has {now[key]} at step {step}; "
                    "expected the same text, seed, batch and length, or another folder for this run"
                )


def crc(ids: Tensor) -> str:
    """Eight hex digits for a batch: what a run has seen."""
    return f"{zlib.crc32(ids.numpy().tobytes()):08x}"


def held_out(tokens: np.ndarray, length: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """ids and labels of held-out text in order, the last of them padded; END and BEGIN are no labels, only bytes
    are."""
    count = -(-(len(tokens) - 1) // length)
    padded = np.full(count * length + 1, END, np.int64)
    padded[: len(tokens)] = tokens
    ids = torch.from_numpy(padded[:-1].reshape(count, length))
    labels = torch.from_numpy(padded[1:].reshape(count, length).copy())
    labels[labels >= BEGIN] = IGNORED
    for first in range(0, count, batch):
        yield ids[first : first + batch], labels[first : first + batch]
