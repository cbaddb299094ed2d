"""The experiment that can decide: a compiled kernel whose text gets one buffer more for the tile that is overwritten.

The buffer is put into the text (TTGIR) twice: once the copies go round all buffers, once they leave it unused. The two
texts need the same shared memory, and differ in the number after which buffers are used again.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kernels.mhc.race.emitted import read
from kernels.mhc.race.variants import AS_IT_WAS, VARIANTS, Variant, as_json, from_json, repeat_in_turn

KERNELS = {AS_IT_WAS: VARIANTS[AS_IT_WAS], "64 tokens, 3 stages": Variant(stages=3)}
"""The kernels that get the buffer. As it was, an H200's multiprocessor has room for two programs, and with the buffer
for one; with 3 stages it has room for two either way."""
RUNS = 10
"""Runs of each text for every run of a variant."""


class Pair(NamedTuple):
    """Something of the text whose copies leave the spare buffer unused, and of the text whose copies use it."""

    unused: Any
    used: Any


def add_spare_buffer(ttgir: str, *, used: bool) -> str:
    """The text with one buffer more for the tile that a copy overwrites; `used`: copies and products go round all.

    Raises ValueError where no copy overwrites what is read, or the tile's buffers are not counted from 0 up to their
    number and round again (`arith.cmpi sge` and `arith.select`), so that there is nothing to change.
    """
    overwrites = read(ttgir).overwrites
    if not overwrites:
        raise ValueError("ttgir: no copy goes into a buffer that a product reads, so that none is to be spared")
    tile = overwrites[0].buffer
    buffers = int(re.search(rf"{re.escape(tile)} = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", ttgir)[1])
    of_tile = re.compile(rf"{re.escape(tile)}(?![\w.])")
    lines = [
        line.replace(f"memdesc<{buffers}x", f"memdesc<{buffers + 1}x", 1) if of_tile.search(line) else line
        for line in ttgir.splitlines()
    ]
    text = "\n".join(lines) + "\n"
    if not used:
        return text
    constants = {int(value): name for name, value in re.findall(r"(%\S+) = arith\.constant (-?\d+) : i32", text)}
    indices = set(re.findall(rf"memdesc_index {re.escape(tile)}\[(%\w+)\]", text))
    changed = 0
    for index in indices:
        if choice := re.search(rf"{index} = arith\.select (%\w+), ", text):
            limit = rf"({choice[1]} = arith\.cmpi sge, %\w+, ){constants[buffers]} "
            text, count = re.subn(limit, rf"\g<1>{constants.get(buffers + 1)} ", text)
            changed += count
    if changed < 2 or buffers + 1 not in constants:
        raise ValueError(
            f"{tile}: {changed} of its slots wrap around at {buffers}; expected that of copies and products"
        )
    return text


def with_spare_buffer(texts: Mapping[str, str]) -> dict[str, Pair]:
    """For each of :data:`KERNELS` its text from `texts` with the spare buffer, unused and used."""
    return {name: Pair(*(add_spare_buffer(texts[name], used=used) for used in (False, True))) for name in KERNELS}


def to_kernel(ttgir: str) -> Any:
    """What Triton compiles the text to for compute capability 9.0; no GPU is needed before it is launched.

    On a GPU it is launched as kernel[x, y, z](*arguments), with the arguments that are no constants.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as to_gpu

    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(ttgir)
        return to_gpu(str(path), target=GPUTarget("cuda", 90, 32))


def machine_code(kernel: Any) -> list[str]:
    """The instructions of a compiled kernel in order, each after the word that holds its waits, by `cuobjdump`."""
    from triton import knobs

    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instruction = r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]+ \*/\s*/\* 0x([0-9a-f]+) \*/"
    return [f"{waits}  {words}" for words, waits in re.findall(instruction, listing)]


def differing(pair: Pair) -> list[tuple[str, str]]:
    """The lines in which two texts of as many lines differ. Raises ValueError where their numbers differ."""
    unused, used = (text.splitlines() if isinstance(text, str) else text for text in pair)
    return [(a.strip(), b.strip()) for a, b in zip(unused, used, strict=True) if a != b]


def repeat_pairs(texts: Mapping[str, Pair], tokens: int, k: int, seed: int, times: int) -> dict[str, Pair]:
    """Run both texts of each kernel `times` times in turn, on a GPU of compute capability 9.0: :class:`Repeats`."""
    return {
        name: Pair(*repeat_in_turn(KERNELS[name], tokens, k, seed, times, "cuda", [*map(to_kernel, pair)]))
        for name, pair in texts.items()
    }


def chance_without_effect(pairs: Mapping[str, Pair]) -> float:
    """The chance that no run with the buffer used is among those that differ, if its use makes no difference.

    `pairs` are :class:`Repeats`. In each pair the runs that differ from the most common result are then sampled at
    random from the runs of both texts (Fisher's exact test, one-sided, for none among those used). That holds
    where the runs of both took turns: what changes with time is then no rival.
    """
    return math.prod(
        math.comb(unused.times, unused.uncommon) / math.comb(unused.times + used.times, unused.uncommon)
        for unused, used in pairs.values()
    )


def pairs_as_json(pairs: Mapping[str, Pair]) -> dict[str, dict[str, Any]]:
    """For result.json, from which :func:`pairs_from_json` makes it again."""
    return {name: as_json(pair._asdict()) for name, pair in pairs.items()}


def pairs_from_json(recorded: Mapping[str, Any]) -> dict[str, Pair]:
    """The runs that a record holds; none where it is from before this experiment."""
    return {name: Pair(**from_json(pair)) for name, pair in recorded.items()}
