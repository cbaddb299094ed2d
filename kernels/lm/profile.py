"""Where the time of a training step goes, by kind of kernel: torch.profiler over a few steps of a configuration.

`python -m kernels.lm profile kernels/lm/report.yaml` makes the table; with `--model plain` or `stronger` it is that of
the models that `bench` compares with. On a GPU its kernels are counted, on a CPU PyTorch's operators, each without
what it calls.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernels.lm import bench, training
from kernels.lm.config import Config
from kernels.lm.data import Sequences
from whywrong.tables import Table

KINDS = {
    "compiled": r"^triton_",
    "attention": r"attention|flash|fmha|sdpa|cudnn",
    "products": r"gemm|matmul|nvjet|cutlass|cublas|::mm|::addmm|::bmm",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies": r"memcpy|memset|copy|::to$|cat",
}
"""Kinds of kernels by words in their names, the first that fits."""
WARM = 3
"""Steps before the profile begins: compilation, and memory that is allocated."""


def profile(config: Config, steps: int, name: str) -> Table:
    """Milliseconds a step and calls a step of each kind of kernel, the most first, with the longest kernel of each.

    `name` is a key of :data:`bench.MODELS`. Raises UsageError for data that do not fit.
    """
    from torch.profiler import ProfilerActivity

    with training.joined(config) as device, tempfile.TemporaryDirectory() as folder:
        sequences = Sequences(config.data, config.seed, Path(folder))
        model, around = bench.MODELS[name](config, device.type)
        optimizer = training.optimizer_of(model, config)
        batches = [[part.to(device) for part in sequences.batch(i)] for i in range(WARM + steps)]

        def step(batch: Any) -> None:
            with around():
                model(*batch, each=True).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for batch in batches[:WARM]:
            step(batch)
        kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[kind]) as made:
            for batch in batches[WARM:]:
                step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
        what = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    times = [(event.key, getattr(event, own) / 1e3 / steps, event.count / steps) for event in made.key_averages()]
    return table([one for one in times if one[1] > 0.0], f"{name}, {what}: a step, mean of {steps}")


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.I)), "others")


def table(times: list[tuple[str, float, float]], title: str) -> Table:
    """Kernels' names, milliseconds and calls, put together by kind."""
    kinds: dict[str, list[tuple[str, float, float]]] = {}
    for one in times:
        kinds.setdefault(kind_of(one[0]), []).append(one)
    rows = [
        (kind, sum(ms for _, ms, _ in found), sum(n for *_, n in found), max(found, key=lambda one: one[1])[0][:60])
        for kind, found in kinds.items()
    ]
    rows.sort(key=lambda row: -row[1])
    whole = ("all", sum(ms for _, ms, _ in times), sum(n for *_, n in times), "")
    return Table(("kind", "ms", "calls", "the longest"), [*rows, whole], title=title)
