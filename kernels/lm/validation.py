"""Bits per byte of held-out text: the bytes' total loss over their number, each window read without what is before
it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.lm.config import Config
from kernels.lm.data import held_out
from kernels.lm.jsonl import files, packed
from kernels.lm.model import IGNORED, Decoder


def tokens(config: Config) -> np.ndarray | None:
    """All tokens of the validation files, every line of which is read: in a training before its first step.

    None where there is no validation. Raises UsageError for a folder without such files, or a file that is none.
    """
    given = config.validation
    if given is None:
        return None
    return packed(files("validation.folder", given.folder, given.pattern), Path(config.folder) / "cache")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # it would be compiled once more, for a few batches
def score(model: Decoder, config: Config) -> dict[str, Any]:
    """`bits_per_byte`, `nats_per_byte` and `bytes` over all validation files, or over `batches` batches of them.

    Every rank computes the same. Raises the errors of :func:`tokens`.
    """
    given, held = config.validation, tokens(config)
    if given is None or held is None:
        return {}
    device = next(model.parameters()).device
    total, count = 0.0, 0
    model.eval()
    for i, (ids, labels) in enumerate(held_out(held, config.data.length, config.data.batch)):
        if given.batches and i == given.batches:
            break
        missing = config.data.batch - len(ids)  # one shape: a compiled model is compiled once
        ids = torch.nn.functional.pad(ids, (0, 0, 0, missing))
        labels = torch.nn.functional.pad(labels, (0, 0, 0, missing), value=IGNORED)
        losses = model(ids.to(device), labels.to(device), each=True)
        total += float(losses.double().sum())
        count += int((labels != IGNORED).sum())
    model.train()
    nats = total / max(1, count)
    return {"bits_per_byte": nats / math.log(2.0), "nats_per_byte": nats, "bytes": count}
