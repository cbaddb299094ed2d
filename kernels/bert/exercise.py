"""What a reader's line makes of the LayerNorm in layer_norm.py, whose variance is still to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kernels.bert import layer_norm
from kernels.written import load, with_line
from whywrong import step

Tensor = torch.Tensor
MARK = "# to be written"


def reference(x: Tensor) -> Tensor:
    """LayerNorm without gain and shift, its steps named."""
    mean = step("mean", x.mean(-1, keepdim=True))
    variance = step("variance", ((x - mean) ** 2).mean(-1, keepdim=True))
    return step("y", (x - mean) / (variance + layer_norm.EPS).sqrt())


def with_variance(folder: Path, line: str) -> Callable[[Tensor], dict[str, Tensor]]:
    """`launched` of layer_norm.py, in whose kernel `line` computes the variance.

    Raises UsageError for a line that is not Python.
    """
    source = with_line(Path(layer_norm.__file__).read_text(encoding="utf-8"), MARK, line)
    return load(folder, "my_layer_norm", source, "launched")  # type: ignore[no-any-return]
