"""Documents in jsonl files, and their tokens: bytes between BEGIN and END. Needs no torch.

A line is `{"text": ...}` (or `content`). What is wrong with a file is named with the line's number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kernels.lm.config import BEGIN, END
from whywrong.errors import UsageError

GLANCE = 1 << 20
"""Bytes at the head and at the tail of a file that a glance reads."""


def files(key: str, folder: str, pattern: str) -> list[Path]:
    """The files of a folder, by name. UsageError where the folder is absent or cannot be read, or holds none."""
    root = Path(folder)
    try:
        names = sorted(entry.name for entry in os.scandir(root))
    except OSError as error:
        why = {FileNotFoundError: "is not there", NotADirectoryError: "is no folder"}.get(type(error), "cannot be read")
        raise UsageError(f"{key}: {folder} {why}; expected a folder with {pattern}") from None
    found = [root / name for name in names if Path(name).match(pattern)]
    if not found:
        raise UsageError(f"{key}: {folder} has none among its {len(names)} files; expected at least one {pattern} file")
    return found


def documents(path: Path) -> Iterator[str]:
    """The texts of a file. UsageError, with the line's number, for a line that is empty, cut off or no document."""
    count = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield document(path, number, line)
                count += 1
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({type(error).__name__}); expected a file of JSON lines") from None
    if not count:
        raise UsageError(f"{path}: is empty; expected JSON lines with a text each")


def document(path: Path, number: int, line: bytes) -> str:
    """The text of one line. UsageError that says what is wrong with it."""
    wanted = 'expected {"text": ...}'
    if not line.strip():
        raise UsageError(f"{path}, line {number}: is empty; {wanted}")
    try:
        found = json.loads(line)
    except UnicodeDecodeError:
        raise UsageError(f"{path}, line {number}: is not UTF-8; {wanted}") from None
    except (ValueError, RecursionError):
        cut = "is cut off" if not line.endswith(b"\n") else "is not JSON"
        raise UsageError(f"{path}, line {number}: {cut}; {wanted}") from None
    text = found.get("text", found.get("content")) if isinstance(found, dict) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{path}, line {number}: has no text; {wanted}")
    return text


def glance(path: Path) -> None:
    """Check the lines within the first and the last MiB of a file, which is all of a small one; as
    :func:`documents`."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file; expected a file of JSON lines")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(GLANCE)
            tail = b""
            if size > 2 * GLANCE:
                file.seek(size - GLANCE)
                tail = file.read().partition(b"\n")[2]
            else:
                head += file.read()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({type(error).__name__}); expected a file of JSON lines") from None
    if not head:
        raise UsageError(f"{path}: is empty; expected JSON lines with a text each")
    lines = head.splitlines(keepends=True)
    for number, line in enumerate(lines[:-1] if tail else lines, 1):
        document(path, number, line)
    for back, line in enumerate(reversed(tail.splitlines(keepends=True)), 1):
        try:
            document(path, 0, line)
        except UsageError as error:
            raise UsageError(str(error).replace("line 0", f"line {back} from the end", 1)) from None


def encode(text: str) -> np.ndarray:
    """The tokens of a document, uint16: BEGIN, its bytes in UTF-8, END."""
    body = np.frombuffer(text.encode("utf-8", errors="surrogatepass"), np.uint8)
    return np.concatenate(([BEGIN], body, [END])).astype(np.uint16)


def packed(paths: list[Path], cache: Path) -> np.ndarray:
    """All tokens of the files, uint16, mapped from a file in `cache` that is made where it is not there, or damaged."""
    facts = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    target = cache / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.npy"
    kept = _mapped(target)
    if kept is None:
        cache.mkdir(parents=True, exist_ok=True)
        whole = np.concatenate([np.concatenate([encode(text) for text in documents(path)]) for path in paths])
        part = target.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            np.save(file, whole)
        part.replace(target)
    return np.load(target, mmap_mode="r") if kept is None else kept


def _mapped(path: Path) -> np.ndarray | None:
    """The tokens of a file; None where it is not there or holds none."""
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if isinstance(found, np.memmap) and found.dtype == np.uint16 and found.ndim == 1 else None


def write(folder: Path, texts: list[str], chunks: int = 2, held: int = 20) -> None:
    """Write documents as `sample.chunk.NN.jsonl` files, and every `held`-th as `sample.val.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    training = [text for i, text in enumerate(texts) if i % held != held - 1]
    for i in range(chunks):
        _lines(folder / f"sample.chunk.{i:02d}.jsonl", training[i::chunks])
    _lines(folder / "sample.val.jsonl", texts[held - 1 :: held])


def _lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
