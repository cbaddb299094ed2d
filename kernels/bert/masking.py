"""Which tokens a masked language model has to guess: Devlin et al. 2019, section 3.1, task 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.bert.model import IGNORED
from whywrong.errors import UsageError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Masking:
    """Of the tokens that are not special, `rate` are guessed; `masked` of these become [MASK], `random` any token."""

    vocabulary: int
    mask: int
    special: Sequence[int] = ()
    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        for name in ("rate", "masked", "random"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"{name}: expected a number from 0 to 1, got {getattr(self, name)}")
        if self.masked + self.random > 1.0:
            raise UsageError(f"random: expected {1.0 - self.masked} at most, beside masked, got {self.random}")
        if not 0 <= self.mask < self.vocabulary:
            raise UsageError(f"mask: expected an id below {self.vocabulary}, got {self.mask}")


def generator(*key: int) -> torch.Generator:
    """A CPU generator for numbers such as seed and step: the same key, the same numbers on every machine."""
    mixed = 0
    for part in key:  # splitmix64, so that neighbouring keys give unlike streams
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return torch.Generator().manual_seed(mixed % 2**63)


def mask(ids: Tensor, how: Masking, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """The ids as the model gets them and the labels, both of ids' shape; a label is -100 where nothing is guessed.

    `ids` is int64 on the CPU, where `draws` is. Raises UsageError for ids outside the vocabulary.
    """
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < how.vocabulary:
        raise UsageError(f"ids: expected 0 to {how.vocabulary - 1}, got {int(ids.min())} to {int(ids.max())}")
    chosen, kind = torch.rand(2, *ids.shape, generator=draws)
    words = torch.randint(how.vocabulary, ids.shape, generator=draws)
    guessed = (chosen < how.rate) & ~torch.isin(ids, torch.tensor(list(how.special), dtype=torch.int64))
    given = torch.where(guessed & (kind < how.masked), how.mask, ids)
    given = torch.where(guessed & (kind >= how.masked) & (kind < how.masked + how.random), words, given)
    return given, torch.where(guessed, ids, IGNORED)


def places(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where labels [B, S] are not -100, as places in them flattened [count], and those labels; the rest is -100 at 0.

    Raises UsageError where there are more than `count`.
    """
    flat = labels.flatten()
    found = torch.nonzero(flat != IGNORED)[:, 0]
    if len(found) > count:
        raise UsageError(f"count: expected {len(found)} at least, got {count}")
    at, wanted = torch.zeros(count, dtype=torch.int64), torch.full((count,), IGNORED)
    at[: len(found)], wanted[: len(found)] = found, flat[found]
    return at, wanted
