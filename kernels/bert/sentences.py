"""Sentences with one word to guess: the report's, and held-out ones that nobody has picked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.bert import tokens
from kernels.bert.corpus import Corpus
from whywrong.errors import UsageError

Tensor = torch.Tensor
HOLE = "[MASK]"
LINE = re.compile(r"[A-Z][A-Za-z' ,;-]*\.")


@dataclass(frozen=True)
class Sentence:
    """A text with one [MASK], and the word that was there."""

    text: str
    right: str


REPORT = Sentence("All human [MASK] are born free and equal in dignity and rights.", "beings")


def held_out(corpus: Corpus, words: Any, length: int = 128, count: int = 20) -> list[Sentence]:
    """The first `count` held-out sentences, by their SHA-256, of 8 to 20 words and `length` tokens at most.

    The word to guess is the one that the hash points at, among those of four letters or more that are one token.
    """
    known = words.get_vocab()
    each = re.split(r"(?<=[.!?]) |\n+", corpus.validation)
    lines = {hashlib.sha256(line.encode()).hexdigest(): line for line in each if LINE.fullmatch(line)}
    found = []
    for digest, line in sorted(lines.items()):
        places = [m for m in re.finditer(r"[A-Za-z]{4,}", line) if m.group().lower() in known]
        size = len(words.encode(line, add_special_tokens=False).ids)
        if not 8 <= len(line.split()) <= 20 or size > length - 2 or not places:
            continue
        place = places[int(digest[:8], 16) % len(places)]
        found.append(Sentence(f"{line[: place.start()]}{HOLE}{line[place.end() :]}", place.group().lower()))
        if len(found) == count:
            break
    return found


def sentence_ids(sentence: Sentence, words: Any, length: int) -> Tensor:
    """ids [1, S]: [CLS], the sentence, [SEP]. Raises UsageError unless it has one [MASK], and S is `length` at most."""
    inside = words.encode(sentence.text, add_special_tokens=False).ids
    if inside.count(tokens.MASK) != 1 or len(inside) > length - 2:
        raise UsageError(f"sentence: expected one [MASK] and {length - 2} tokens at most, got {sentence.text!r}")
    return torch.tensor([[tokens.START, *inside, tokens.END]])


@torch.no_grad()
def predict(
    logits: Callable[[Tensor], Tensor],
    sentence: Sentence,
    words: Any,
    length: int,
    device: torch.device | str = "cpu",
    best: int = 5,
) -> dict[str, Any]:
    """The `best` words with logit and probability, and the right word's logit, probability and rank (1 is the first).

    `logits` takes ids [1, S] to [1, S, V]. Raises UsageError for a sentence without one [MASK], or that is too long.
    """
    ids = sentence_ids(sentence, words, length).to(device)
    row = logits(ids)[0, ids[0].tolist().index(tokens.MASK)].double().cpu()
    share = row.softmax(-1)
    right = words.token_to_id(sentence.right)
    top = row.topk(best).indices.tolist()
    return {
        "top": [[words.id_to_token(i), float(row[i]), float(share[i])] for i in top],
        "right": None if right is None else [sentence.right, float(row[right]), float(share[right])],
        "rank": None if right is None else int((row > row[right]).sum()) + 1,
    }
