"""The report's run: what it says of itself, its configuration in our words, and a text to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kernels.corpus import corpus
from kernels.lm import jsonl

REPORT = yaml.safe_load((Path(__file__).parent / "reported.yaml").read_text(encoding="utf-8"))
FACTS, PRINTED, STEPS = REPORT["facts"], REPORT["printed"], REPORT["steps"]
PEAK = FACTS["peak_flops_per_second"]


def sample(folder: Path, size: int = 600_000) -> Path:
    """Training and validation files of Python's own documentation, at most so many bytes of it."""
    if not folder.is_dir():
        texts = corpus().text[:size].decode("utf-8", errors="replace").split("\n\n")
        jsonl.write(folder, [text for text in texts if len(text) > 20])
    return folder


def as_the_report(folder: Path, text: Path) -> dict[str, Any]:
    """The report's configuration in our words. The harness is left out: its tasks here are others than the report's."""
    return {
        "folder": str(folder),
        "data": {"folder": str(text), "batch": FACTS["batch"], "length": FACTS["length"]},
        "validation": {"folder": str(text), "every": 100, "batches": 100},
        "steps": FACTS["steps"],
        "stop": 100,
        "evaluation": "none",
        "optimizer": {"rate": FACTS["rate"], "warmup": FACTS["warmup"]},
        "model": FACTS["model"],
        "device": "cpu",
        "seed": 777,
    }
