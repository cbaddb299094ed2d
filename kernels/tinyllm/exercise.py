"""The suspected line written by a reader: what a download and an upload by the vector's length make of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from kernels.tinyllm.faulty import Array, round_trip
from kernels.tinyllm.tinyllm import FOLDER
from kernels.written import with_line
from labkit.session.device import Device

MARK = "h_data.resize(s.resize_by_size"


def round_trip_with(folder: Path, line: str, values: Array, known: Array, device: Device) -> tuple[Array, Array]:
    """As :func:`round_trip`, with `line` in place of the resize in d2h, and an upload by the vector's length.

    Into a vector that is too short nothing is copied. The sources are copied to `folder` and compiled, which takes
    seconds. Raises UsageError with the compiler's first error for a line that does not compile.
    """
    guarded = line.strip() + " if (h_data.size() * sizeof(float) < size) return;"  # else the copy ends the process
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensor = folder / "faulty_tensor.cuh"
    tensor.write_text(with_line((FOLDER / tensor.name).read_text(encoding="utf-8"), MARK, guarded), encoding="utf-8")
    return round_trip(("h2d_by_host_size", "unchecked"), values, known, device, folder / "faulty.cu")
