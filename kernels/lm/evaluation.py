"""Evaluation by EleutherAI's harness (lm-eval, an extra), on tasks in local files: no hub is asked for anything."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from kernels.lm.config import BEGIN, END, Evaluation
from kernels.lm.jsonl import encode
from kernels.lm.model import Decoder
from kernels.lm.tasks import FOLDER, INSTALLED, known
from whywrong.errors import UsageError


def evaluate(model: Decoder, given: Evaluation, length: int) -> dict[str, Any]:
    """The harness's results for each task: metrics by name. UsageError without the harness, in one line."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(f"evaluation: the harness is missing; expected {INSTALLED}")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Harness(LM):
        """Our decoder as the harness calls it."""

        def loglikelihood(self, requests: Any, *_: Any, **__: Any) -> list[tuple[float, bool]]:
            return [continued(model, *request.args, length) for request in requests]

        def loglikelihood_rolling(self, requests: Any, *_: Any, **__: Any) -> list[float]:
            return [continued(model, "", request.args[0], length)[0] for request in requests]

        def generate_until(self, requests: Any, *_: Any, **__: Any) -> list[str]:
            return [generated(model, prompt, told, length) for prompt, told in (one.args for one in requests)]

    folder = Path(given.folder) if given.folder else FOLDER
    there = known(folder)
    tasks = []
    for name in given.tasks:
        task = yaml.safe_load(there[name].read_text(encoding="utf-8"))
        files = {split: str(folder / file) for split, file in task["dataset_kwargs"]["data_files"].items()}
        tasks.append(task | {"dataset_kwargs": {"data_files": files}})
    found = simple_evaluate(
        Harness(),
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        limit=given.limit or None,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return {name: {k: v for k, v in values.items() if k != "alias"} for name, values in found["results"].items()}


@torch.no_grad()
def continued(model: Decoder, prompt: str, text: str, length: int) -> tuple[float, bool]:
    """Log-likelihood in nats of `text` after `prompt`, and whether each of its bytes is the likeliest."""
    before, wanted = encode(prompt)[:-1].tolist(), encode(text)[1:-1].tolist()
    wanted = wanted[-length:]  # what is longer than the model reads is scored in its last part
    ids = torch.tensor([before + wanted])[:, -(length + 1) :].to(next(model.parameters()).device)
    scores = torch.log_softmax(model(ids[:, :-1]), -1)[0, -len(wanted) :]
    right = ids[0, -len(wanted) :]
    return float(scores.gather(1, right[:, None]).sum()), bool((scores.argmax(-1) == right).all())


@torch.no_grad()
def generated(model: Decoder, prompt: str, told: dict[str, Any], length: int) -> str:
    """What the model goes on with, the likeliest byte each time, until a stop text, END, or `max_gen_toks` bytes."""
    ids = encode(prompt)[:-1].tolist()
    out = bytearray()
    stops = [stop for stop in told.get("until", []) if stop]
    device = next(model.parameters()).device
    for _ in range(int(told.get("max_gen_toks", 32))):
        token = int(model(torch.tensor([ids[-length:]], device=device))[0, -1].argmax())
        if token in (BEGIN, END):
            break
        ids.append(token)
        out.append(token)
        text = out.decode(errors="replace")
        for stop in stops:
            if stop in text:
                return text[: text.index(stop)]
    return out.decode(errors="replace")
