"""WordPiece: a vocabulary trained on the frozen corpus, and text as blocks of ids.

The trainer of the tokenizers library breaks ties in the order of a hash table that is seeded anew in each run: two
trainings on the same text give other ids, and a few other tokens. The vocabulary of the frozen corpus was therefore
trained once, and lies beside this file, a token a line. Text is taken uncased, as bert-base-uncased takes it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kernels import native
from kernels.bert.corpus import DIGESTS, Corpus
from kernels.bert.masking import Masking
from whywrong.errors import UsageError
from whywrong.files import complete_file

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, START, END, MASK = range(len(SPECIAL))
SIZE = 16384
FROZEN = Path(__file__).with_name("vocabulary.txt")


def train(text: str, size: int = SIZE) -> list[str]:
    """The `size` tokens that WordPiece makes of a text, the special ones first, then in the trainer's order."""
    library = _library()
    tokenizer = _tokenizer(library, {})
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), continuing_subword_prefix="##", show_progress=False
    )
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    found = tokenizer.get_vocab()
    return sorted(found, key=found.__getitem__)


@cache
def tokenizer(name: str = "english") -> Any:
    """The tokenizer of a corpus: the frozen vocabulary for `english` and `sample`, else the one kept for that folder.

    Raises UsageError where the tokenizers library is missing, or the vocabulary.
    """
    path = FROZEN if name in DIGESTS else _kept(name)
    if not path.exists():
        raise UsageError(
            f"corpus: {name!r} has no vocabulary yet; expected kernels.bert.tokens.vocabulary called first"
        )
    words = path.read_text(encoding="utf-8").splitlines()
    return _tokenizer(_library(), {word: i for i, word in enumerate(words)})


def vocabulary(corpus: Corpus, size: int = SIZE) -> Any:
    """The tokenizer of a corpus, trained on it and kept in the cache where it is not a frozen one."""
    path = FROZEN if corpus.name in DIGESTS else _kept(corpus.name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text("\n".join(train(corpus.training, size)) + "\n", encoding="utf-8")
        part.replace(path)
    return tokenizer(corpus.name)


def digest(tokens: Any) -> str:
    """SHA-256 of a tokenizer's words in the order of their ids, a line each."""
    words = sorted(tokens.get_vocab().items(), key=lambda one: one[1])
    return hashlib.sha256("".join(f"{word}\n" for word, _ in words).encode()).hexdigest()


def masking(tokens: Any, rate: float = 0.15) -> Masking:
    """How to mask what this tokenizer made: no special token is guessed."""
    return Masking(tokens.get_vocab_size(), MASK, tuple(range(len(SPECIAL))), rate)


def encode(text: str, tokens: Any) -> np.ndarray:
    """The ids of a text, uint16 [N]: a separator ends each piece, which an empty line ends in the text."""
    pieces = [piece.replace("\n", " ") for piece in text.split("\n\n") if piece]
    found: list[int] = []
    for start in range(0, len(pieces), 512):
        for one in tokens.encode_batch(pieces[start : start + 512], add_special_tokens=False):
            found += one.ids
            found.append(END)
    if tokens.get_vocab_size() > 2**16:
        raise UsageError(f"size: {tokens.get_vocab_size()} tokens are too many; expected {2**16} at most")
    return np.array(found, dtype=np.uint16)


def blocks(ids: np.ndarray, length: int) -> np.ndarray:
    """Inputs [B, length], uint16: [CLS], length - 2 ids in the order of the text, [SEP]. The rest is left out."""
    if length < 3:
        raise UsageError(f"length: expected 3 at least, got {length}")
    count = len(ids) // (length - 2)
    body = ids[: count * (length - 2)].reshape(count, length - 2)
    ends = np.ones((count, 1), dtype=np.uint16)
    return np.concatenate((ends * START, body, ends * END), axis=1).astype(np.uint16)


def encoded(corpus: Corpus, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the training and of the held-out text, kept in the cache."""
    tokens = vocabulary(corpus, size)
    key = hashlib.sha256(f"{corpus.facts['sha256']}\0{digest(tokens)}".encode()).hexdigest()[:16]
    path = native.cache() / "bert" / f"ids-{key}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(path) as part, part.open("xb") as file:
            np.savez(file, training=encode(corpus.training, tokens), validation=encode(corpus.validation, tokens))
    with np.load(path) as kept:
        return kept["training"], kept["validation"]


def _kept(name: str) -> Path:
    return native.cache() / "bert" / f"vocabulary-{hashlib.sha256(name.encode()).hexdigest()[:16]}.txt"


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers  # noqa: F401
    except ImportError:
        raise UsageError("tokenizers is missing; expected it for WordPiece: pip install -e '.[bert]'") from None
    return tokenizers


def _tokenizer(library: Any, words: dict[str, int]) -> Any:
    made = library.Tokenizer(library.models.WordPiece(words, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    made.decoder = library.decoders.WordPiece()
    made.add_special_tokens(list(SPECIAL)) if words else None
    return made
