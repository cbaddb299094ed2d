"""The guard's line written by a reader: what the compiler makes of the kernel with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kernels.mhc.race import emitted, race_kernels
from kernels.mhc.race.variants import Variant

GUARD = "total = total * runtime_one"


def compile_with(folder: Path, line: str, k: int) -> emitted.Emitted:
    """The compiled text of the guarded kernel with `line` in place of its guard, read step by step.

    `runtime_one` is an argument whose value, 1, the compiler does not know. Raises RuntimeError with the compiler's
    last words for a line that does not compile.
    """
    source = Path(race_kernels.__file__).read_text(encoding="utf-8").replace(GUARD, line.strip())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_guard.py").write_text(source, encoding="utf-8")
    order = replace(Variant(guarded=True).order(k), kernel="my_guard:variant_kernel")
    return emitted.read(emitted.compiled({"mine": order}, folder)["mine"])
