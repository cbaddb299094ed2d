"""Training a masked language model, resumable at any step, and one row of results a run.

What is random in a step follows from the run's seed and the step's number alone: the order of the blocks, what is
masked, the dropout. So runs of one seed see the same text and the same masks whatever their model, and one that is
resumed on a CPU gives the bits of one that was not interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.bert import golden, inputs, tokens
from kernels.bert.corpus import Corpus, corpus
from kernels.bert.masking import Masking, generator, mask, places
from kernels.bert.model import BERT, IGNORED, Config, MaskedLM, Switches, cross_entropy, preset
from kernels.bert.sentences import REPORT, Sentence, held_out, predict, sentence_ids
from labkit.session.record import hash_of, made_by
from whywrong.errors import UsageError

Tensor = torch.Tensor
HUGGING_FACE = "hugging_face"
INITIAL, ORDER, MASKS, DROPOUT, VALIDATION = range(5)
"""Streams of random numbers."""


@dataclass(frozen=True)
class Run:
    """All that a training's result depends on. `preset` is a name for :func:`kernels.bert.model.preset`, or
    `hugging_face` for Hugging Face's own model, which starts from the weights that `bert` starts from."""

    preset: str = "bert"
    seed: int = 0
    corpus: str = "sample"
    vocabulary: int = tokens.SIZE
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 128
    """Tokens of a block, 16 at least: the report's sentence has 15."""
    batch: int = 64
    steps: int = 1000
    rate: float = 5e-4
    """Peak learning rate: linear warm-up over `warmup` of the steps, linear decay to 0."""
    warmup: float = 0.06
    decay: float = 0.01
    """AdamW's weight decay, on matrices alone."""
    clip: float = 1.0
    """The gradient's norm is cut to this; 0 leaves it as it is."""
    precision: str = "float32"
    """`float32`, or `bfloat16` for autocast."""
    compiled: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.switches  # noqa: B018 - raises for an unknown preset
        for name, least in (("batch", 1), ("steps", 1), ("length", 16), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: expected {least} at least, got {getattr(self, name)}")
        if self.precision not in ("float32", "bfloat16"):
            raise UsageError(f"precision: expected float32 or bfloat16, got {self.precision!r}")
        if not 0.0 <= self.warmup <= 1.0:
            raise UsageError(f"warmup: expected a share of the steps, 0 to 1, got {self.warmup}")

    @property
    def switches(self) -> Switches:
        """The model's switches."""
        return BERT if self.preset == HUGGING_FACE else preset(self.preset)

    def config(self, vocabulary: int) -> Config:
        """The model's sizes."""
        return Config(vocabulary, self.hidden, self.layers, self.heads, positions=self.length, padding=tokens.PAD)


@cache
def code() -> str:
    """A hash of this file and all of kernels/ that it imports. What checks rows is not among them, so that its words
    may change."""
    return made_by("import kernels.bert.training")


def sources() -> dict[str, str]:
    """Hashes of the code that a row was made by: of :func:`code`, and of labkit."""
    return {"training": code(), "labkit": hash_of("labkit"), "whywrong": hash_of("whywrong")}


def key(run: Run) -> str:
    """Twelve hex digits for the run and the hash of its code: what a finished row is found again by."""
    return hashlib.sha256(json.dumps([asdict(run), code()], sort_keys=True).encode()).hexdigest()[:12]


def learning_rate(run: Run, step: int) -> float:
    """Of step 0 and on: warm-up from 0, then decay that would reach 0 at `steps`."""
    warm = max(1, round(run.warmup * run.steps))
    return run.rate * min((step + 1) / warm, (run.steps - step) / max(1, run.steps - warm))


class Data:
    """The blocks of a corpus and their batches."""

    def __init__(self, run: Run, source: Corpus | None = None) -> None:
        self.run, self.corpus = run, source or corpus(run.corpus)
        self._order: tuple[int, Tensor] | None = None
        training, validation = tokens.encoded(self.corpus, run.vocabulary)
        self.tokens = tokens.vocabulary(self.corpus)
        self.training, self.validation = tokens.blocks(training, run.length), tokens.blocks(validation, run.length)
        if len(self.training) < run.batch or not len(self.validation):
            blocks = f"{len(self.training)} blocks to train on and {len(self.validation)} to validate"
            raise UsageError(f"batch: expected at most the corpus's {blocks}, 1 at least, got {run.batch}")
        self.masking = tokens.masking(self.tokens)

    @property
    def epoch(self) -> int:
        """Steps that see each block once."""
        return len(self.training) // self.run.batch

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, S], the places that are guessed [N] and their labels [N], all int64 on the CPU."""
        epoch, at = divmod(step, self.epoch)
        rows = self.order(epoch)[at * self.run.batch : (at + 1) * self.run.batch].numpy()
        ids = torch.from_numpy(self.training[rows].astype(np.int64))
        given, labels = mask(ids, self.masking, generator(self.run.seed, MASKS, step))
        return given, *places(labels, guesses(ids.numel(), self.masking))

    def order(self, epoch: int) -> Tensor:
        """The blocks of an epoch in the order in which they are seen; that of the last one asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            draws = generator(self.run.seed, ORDER, epoch)
            self._order = epoch, torch.randperm(len(self.training), generator=draws)
        return self._order[1]

    def held_out(self) -> tuple[Tensor, Tensor]:
        """All held-out blocks [B, S] and their labels: the same masks for every run."""
        ids = torch.from_numpy(self.validation.astype(np.int64))
        return mask(ids, self.masking, generator(0, VALIDATION))


def guesses(count: int, how: Masking) -> int:
    """Room for the guesses among so many tokens: mean and seven standard deviations, a multiple of 16, at most all."""
    most = count * how.rate + 7.0 * math.sqrt(count * how.rate * (1.0 - how.rate)) + 1.0
    return min(-(-int(most) // 16) * 16, count)


def model_of(run: Run, vocabulary: int) -> torch.nn.Module:
    """The run's model with its initial weights, on its device."""
    torch.manual_seed(generator(run.seed, INITIAL).initial_seed())
    config = run.config(vocabulary)
    ours = MaskedLM(config, run.switches, fused=True)
    if run.preset != HUGGING_FACE:
        return ours.to(run.device)
    theirs = golden.hugging_face(config)
    weights = golden.to_hugging_face(golden.parameters(ours), config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(weights[name])
    return theirs.to(run.device)


def loss_of(model: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss of ids [B, S], places [N] and labels [N]. Hugging Face's is its own, over logits of all positions."""
    if isinstance(model, MaskedLM):
        return model.loss_at

    def theirs(ids: Tensor, at: Tensor, labels: Tensor) -> Tensor:
        all_labels = torch.full_like(ids, IGNORED).flatten()
        here = labels != IGNORED
        all_labels = all_labels.scatter(0, torch.where(here, at, 0), torch.where(here, labels, IGNORED))
        return model(input_ids=ids, labels=all_labels.view_as(ids)).loss

    return theirs


def optimizer_of(model: torch.nn.Module, run: Run) -> torch.optim.AdamW:
    """AdamW with the weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": run.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=run.rate, fused=run.device == "cuda")


def train(
    run: Run, folder: Path, seconds: float = math.inf, progress: bool = False, source: Corpus | None = None
) -> dict[str, Any] | None:
    """The run's row, or None where it is not finished after so many seconds: its state is kept in `folder` then.

    A run whose state is in `folder` goes on from there. The row holds the configuration, hashes, the loss on the
    held-out text with its perplexity and top-1 accuracy, the means of the training loss, and what the model predicts
    for the report's sentence and twenty held-out ones.
    """
    began = time.monotonic()
    data = Data(run, source)
    model = model_of(run, data.tokens.get_vocab_size()).train()
    optimizer = optimizer_of(model, run)
    losses = torch.zeros(run.steps, device=run.device)
    path = folder / f"{key(run)}.pt"
    first, spent = _resume(path, model, optimizer, losses)
    loss = loss_of(model)
    if run.compiled:
        torch.compiler.reset()  # what earlier runs of this process compiled counts towards a limit
        loss = torch.compile(loss, dynamic=False)
    cast = partial(torch.autocast, run.device, torch.bfloat16, enabled=run.precision == "bfloat16")
    for step in _bar(range(first, run.steps), run, progress):
        ids, at, labels = (part.to(run.device, non_blocking=True) for part in data.batch(step))
        torch.manual_seed(generator(run.seed, DROPOUT, step).initial_seed())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, step)
        with cast():
            value = loss(ids, at, labels)
        value.backward()
        if run.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = value.detach()
        if time.monotonic() - began > seconds and step + 1 < run.steps:
            _keep(path, model, optimizer, losses, step + 1, spent + time.monotonic() - began)
            return None
    row = _row(run, data, model, losses, spent + time.monotonic() - began)
    path.unlink(missing_ok=True)
    return row


def _bar(steps: range, run: Run, progress: bool) -> Any:
    if not progress:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise UsageError("tqdm is missing; expected it for the progress bar: pip install -e '.[bert]'") from None
    return tqdm(steps, desc=f"{run.preset} seed {run.seed}", initial=steps.start, total=run.steps, leave=False)


def _keep(path: Path, model: torch.nn.Module, optimizer: Any, losses: Tensor, step: int, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "step": step,
        "seconds": seconds,
    }
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def _resume(path: Path, model: torch.nn.Module, optimizer: Any, losses: Tensor) -> tuple[int, float]:
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location=losses.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses.copy_(state["losses"])
    return state["step"], state["seconds"]


def _row(run: Run, data: Data, model: Any, losses: Tensor, seconds: float) -> dict[str, Any]:
    curve = losses.double().cpu()
    sentences = [REPORT, *held_out(data.corpus, data.tokens, run.length)]
    given = sentence_ids(REPORT, data.tokens, run.length).to(run.device)
    return {
        "key": key(run),
        **asdict(run),
        "sources": sources(),
        "text": data.corpus.facts,
        "vocabulary_sha256": tokens.digest(data.tokens),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": run.steps * run.batch * run.length,
        "epoch_steps": data.epoch,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if run.device == "cuda" else None,
        **evaluate(model, *data.held_out()),
        "input": inputs.measure(model, given).as_json(),
        "loss_all_steps": float(curve.mean()),
        "loss_by_epoch": [float(part.mean()) for part in curve.split(data.epoch)],
        "loss_last": float(curve[-max(1, run.steps // 100) :].mean()),
        "curve": [round(float(part.mean()), 4) for part in curve.split(max(1, run.steps // 50))],
        "predictions": [predicted(model, sentence, data.tokens, run.length) for sentence in sentences],
    }


def predicted(model: Any, sentence: Sentence, words: Any, length: int) -> dict[str, Any]:
    """A sentence's five likeliest words with logit and probability, and the right word's rank."""
    found = predict(partial(logits_of, model), sentence, words, length, device=next(model.parameters()).device)
    return {"text": sentence.text, **found}


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits [B, S, V] of ours or of Hugging Face's model."""
    return model(ids) if isinstance(model, MaskedLM) else model(input_ids=ids).logits


@torch.no_grad()
def evaluate(model: Any, ids: Tensor, labels: Tensor, batch: int = 64) -> dict[str, float]:
    """Over all labels that are not -100: mean loss (nats), its perplexity, top-1 accuracy, their count. float32."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    loss, right, count = 0.0, 0, 0
    for start in range(0, len(ids), batch):
        wanted = labels[start : start + batch].to(device)
        here = wanted != IGNORED
        logits = logits_of(model, ids[start : start + batch].to(device))[here].float()
        loss += float(cross_entropy(logits, wanted[here]).double()) * int(here.sum())
        right += int((logits.argmax(-1) == wanted[here]).sum())
        count += int(here.sum())
    model.train(training)
    mean = loss / max(1, count)
    return {"validation_loss": mean, "perplexity": math.exp(mean), "top1": right / max(1, count), "guesses": count}


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a file of JSON lines, in one write under a lock; one whose key is there already stays out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if all(json.loads(line)["key"] != row["key"] for line in file):
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def unfinished(runs: list[Run], *paths: Path) -> list[Run]:
    """Those of `runs` that have no row in any of the files yet."""
    done = {row["key"] for path in paths for row in rows(path)}
    return [run for run in runs if key(run) not in done]


def grid(base: Run, presets: list[str], seeds: list[int]) -> list[Run]:
    """A run a preset and seed; all presets of a seed before the next seed."""
    return [replace(base, preset=name, seed=seed) for seed in seeds for name in presets]
