"""The training loop. The same command runs on one process or, under torchrun, on any number of them.

What torchrun starts is joined by torch's own DistributedDataParallel or FSDP2 (`parallel`). On a CPU a run that goes on
from a checkpoint gives the losses of one that was never interrupted, bit for bit; nothing in a step depends on the
clock or on what ran before, and the state is all in the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import nn

from kernels.lm import metrics, validation
from kernels.lm.checkpoints import Checkpoints
from kernels.lm.config import Config, as_dict, flops_per_token, learning_rate
from kernels.lm.data import Sequences, crc
from kernels.lm.model import DTYPES, Decoder, build
from kernels.lm.preflight import launched
from labkit.session.device import decide
from labkit.session.record import write_json
from whywrong.errors import UsageError
from whywrong.files import writing

Tensor = torch.Tensor


_STORES: list[tuple[dist.Store, int, int]] = []
"""torchrun's store, this process's rank and the number of processes, once for each time that it joined them."""


def ranks() -> int:
    """How many processes torchrun started; 1 without it. UsageError as :func:`preflight.launched`."""
    return launched()["WORLD_SIZE"]


@contextmanager
def joined(config: Config) -> Iterator[torch.device]:
    """The device of this process, in torchrun's group of processes where there is one."""
    kind = decide(config.device).kind
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    group = "RANK" in os.environ and not dist.is_initialized()
    if group:
        store, rank, count = next(dist.rendezvous("env://")) if not _STORES else _STORES[-1]
        _STORES.append((store, rank, count))
        # an earlier training's addresses are still in the store, and would be called again
        own = dist.PrefixStore(f"training {len(_STORES)}", store)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=own, rank=rank, world_size=count)
    try:
        yield device
    finally:
        if group:
            dist.destroy_process_group()


@contextmanager
def attention(device: torch.device) -> Iterator[None]:
    """On a GPU cuDNN's attention before the others, where it takes the sizes."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def optimizer_of(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone, fused. The rate is set at each step."""
    given = config.optimizer
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, given.decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=given.rate, betas=(given.beta1, given.beta2), eps=given.eps, fused=True)


def distributed(model: Decoder, config: Config, device: torch.device) -> nn.Module:
    """The model as torch's own distribution has it; as it is where there is one process."""
    if not dist.is_initialized():
        return model
    if config.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=next(model.parameters()).dtype)
        for part in (model.embedding, *model.blocks, model.head):
            fully_shard(part, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


class Dumps:
    """What a step gave, one .npy a tensor, in a folder for each rank that `whywrong diff` reads: `000010.loss`.

    `loss` and a gradient's `norm.<name>` and `grad.<name>` are those of all ranks together. `weight.<name>`, the norm
    of a parameter before the update, is that of this rank's copy, so ranks that have drifted apart are told. What
    differs between ranks by right has the rank in its name, and is compared between two runs: `rank0of2.batch` (a
    hash), `rank0of2.loss` (before the mean is taken) and, with FSDP, `rank0of2.weight.<name>` (of this rank's shard).
    """

    def __init__(self, config: Config, rank: int, ranks: int, step: int) -> None:
        self.own = f"rank{rank}of{ranks}"
        self.given, self.folder = config.dumps, Path(config.folder) / "dumps" / f"rank{rank}"
        self.order: list[str] = []
        about = self.folder / "metadata.json"
        if self.given.every and about.exists():
            try:
                self.order = [x for x in json.loads(about.read_text())["order"] if int(x.split(".")[0]) <= step]
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
                raise UsageError(
                    f"{about}: is no index of dumps; expected it as it was written, or its folder removed"
                ) from None

    def write(self, step: int, own: dict[str, Tensor], loss: Tensor, norm: Tensor, model: nn.Module) -> None:
        """After the backward of a step, in the order of the program; `own` is what belongs to this rank alone."""
        if not self.given.every or step % self.given.every:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {}
        for name, p in model.named_parameters():
            local = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
            place = f"{self.own}." if hasattr(p, "to_local") else ""
            found[f"{place}weight.{name}"] = torch.linalg.vector_norm(local)
        grads = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found |= {f"{self.own}.{name}": value for name, value in own.items()} | {"loss": loss, "grad_norm": norm}
        found |= {f"norm.{name}": torch.linalg.vector_norm(g) for name, g in grads.items()}
        found |= {f"grad.{name}": grads[name] for name in self.given.tensors}
        for name, value in found.items():
            np.save(self.folder / f"{step:06d}.{name}.npy", _whole(value.detach()).cpu().numpy())
            self.order.append(f"{step:06d}.{name}")
        write_json(self.folder / "metadata.json", {"order": self.order})


def _whole(x: Any) -> Tensor:
    """A sharded tensor put together."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class Clock:
    """Points in time of a step: events on a GPU, where the host runs ahead, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """One more point in time."""
        self.marks.append(point(self.device))

    def wait(self) -> None:
        """Until the last point has been reached; what was given to the device after it may still run."""
        if self.device.type == "cuda":
            self.marks[-1].synchronize()

    def seconds(self) -> list[float]:
        """Between the points, once they have been reached."""
        return [between(a, b) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def point(device: torch.device) -> Any:
    """When the device has done what it was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a: Any, b: Any) -> float:
    """Seconds from one point to another; both have been reached."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def train(config: Config, progress: bool = False) -> Path:
    """Make the run's steps, from its last checkpoint on where there is one; the path of its metrics.jsonl.

    Raises UsageError for data, devices and checkpoints that do not fit; the preflight says so beforehand.
    """
    with joined(config) as device, attention(device), _alone(Path(config.folder)):
        return _train(config, device, progress)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the run's folder: two trainings would remove each other's checkpoints. UsageError where it is held."""
    if not is_first():
        yield
        return
    with writing(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = FileLock(folder / ".lock").acquire(blocking=False)
        except Timeout:
            raise UsageError(f"folder: in {folder} another training runs; expected another, or its end first") from None
    with held:
        yield


def _train(config: Config, device: torch.device, progress: bool) -> Path:
    folder = Path(config.folder)
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if config.data.batch % count:
        raise UsageError(f"data.batch: expected a multiple of the {count} processes, got {config.data.batch}")
    if rank == 0:
        sequences = Sequences(config.data, config.seed, folder / "cache")
        validation.tokens(config)
    if count > 1:
        dist.barrier()
    if rank:
        sequences = Sequences(config.data, config.seed, folder / "cache")
    torch.manual_seed(config.seed)
    model = build(config, device)
    if config.compile:
        model.compile_layers()
    wrapped = distributed(model, config, device)
    optimizer = optimizer_of(model, config)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoints.keep)
    checkpoints.begin()
    extra: dict[str, Any] = {"data": sequences.state(0)}
    first = checkpoints.load(model, optimizer, extra)
    sequences.resume(first, extra["data"])
    if rank == 0:
        write_json(folder / "config.json", as_dict(config))
    log = metrics.Log(folder / metrics.FILE, first) if rank == 0 else None
    board = metrics.Board(folder / "tensorboard" if config.tensorboard and rank == 0 else None)
    dumps = Dumps(config, rank, count, first)
    bar = _bar(config, first) if progress and rank == 0 else None
    lines = _Lines(config, log, board, bar, device)
    for step in range(first, config.last):
        began = time.perf_counter()
        ids, labels = sequences.batch(step, rank, count)
        seen = crc(ids)
        if device.type == "cuda":
            ids, labels = (x.pin_memory().to(device, non_blocking=True) for x in (ids, labels))
        data_seconds = time.perf_counter() - began
        clock = Clock(device)
        clock.mark()
        loss = wrapped(ids, labels)
        loss.backward()
        clock.mark()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or math.inf)
        shown = loss.detach().clone()
        if count > 1:
            dist.all_reduce(shown)
            shown /= count
        dumps.write(step + 1, {"batch": torch.tensor(int(seen, 16)), "loss": loss.detach()}, shown, norm, model)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        numbers = torch.stack([shown.double(), _whole(norm).double()]).to("cpu", non_blocking=True)
        clock.mark()  # once this is reached, the numbers have arrived
        about = {**sequences.state(step), "batch_crc": seen, "ranks": count}
        lines.add(_Step(step, numbers, clock, data_seconds, about))
        done = step + 1
        if done == config.last or (config.checkpoints.every and done % config.checkpoints.every == 0):
            lines.flush()  # first, so that no checkpoint is without the lines of its steps
            checkpoints.save(done, model, optimizer, {"data": sequences.state(done)})
            lines.pause = checkpoints.pause
        if config.validation and config.validation.every and done % config.validation.every == 0:
            lines.flush()
            began = point(device)
            _validate(config, model, done, rank)
            lines.validated = began, point(device)
    checkpoints.finish()
    if config.validation and not (config.validation.every and config.last % config.validation.every == 0):
        _validate(config, model, max(first, config.last), rank)
    for one in (log, board, bar):
        if one is not None:
            one.close()
    return folder / metrics.FILE


@dataclass
class _Step:
    """What a step gave: `numbers` are its loss and gradient norm, on the host once `clock` has waited."""

    step: int
    numbers: Tensor
    clock: Clock
    data_seconds: float
    about: dict[str, Any]


class _Lines:
    """Writes the line of a step when the next one has been given to the device, so that the host runs ahead."""

    def __init__(self, config: Config, log: metrics.Log | None, board: metrics.Board, bar: Any, device: Any) -> None:
        self.config, self.log, self.board, self.bar, self.device = config, log, board, bar, device
        self.mark, self.pause = point(device), 0.0
        self.validated: tuple[Any, Any] | None = None
        """When a validation began and ended, which is no part of a step."""
        self._late: _Step | None = None

    def add(self, step: _Step) -> None:
        """One more step; the line of the one before is written."""
        self.flush()
        self._late = step

    def flush(self) -> None:
        """Wait for the end of the last step and write its line."""
        if self._late is None:
            return
        late, config, self._late = self._late, self.config, None
        late.clock.wait()
        loss, norm = late.numbers.tolist()
        seconds = between(self.mark, late.clock.marks[-1]) - (between(*self.validated) if self.validated else 0.0)
        rate = config.tokens / seconds
        both, update = late.clock.seconds()
        line = {
            "step": late.step + 1,
            "loss": _finite(loss),
            "grad_norm": _finite(norm),
            "lr": learning_rate(config, late.step),
            "tokens": config.tokens,
            "tokens_per_second": rate,
            "flops_per_second": rate * flops_per_token(config.model, config.data.length, recomputed=False),
            "flops_formula": metrics.FORMULA,
            "flops_per_second_lingua": rate * flops_per_token(config.model, config.data.length, recomputed=True),
            **metrics.memory(self.device),
            "power_watts": metrics.power(self.device),
            "seconds": {
                "data": late.data_seconds,
                "forward_backward": both,
                "update": update,
                "checkpoint": self.pause,
                "all": seconds,
            },
            "epoch": late.about["epoch"],
            "place": late.about["place"],
            "batch_crc": late.about["batch_crc"],
            "ranks": late.about["ranks"],
        }
        self.mark, self.pause, self.validated = late.clock.marks[-1], 0.0, None
        if self.log is not None:
            self.log.write(line)
        self.board.write(line)
        if self.bar is not None:
            self.bar.update(1)
            self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} bytes/s")


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _validate(config: Config, model: Decoder, step: int, rank: int) -> None:
    if config.validation is None:
        return
    found = validation.score(model, config)
    if rank == 0:
        path = Path(config.folder) / metrics.VALIDATION
        earlier = metrics.before(path, step)
        part = path.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in [*earlier, json.dumps({"step": step, **found})]))
        part.replace(path)


def _bar(config: Config, first: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        print("tqdm is not installed, so there is no progress bar: pip install -e '.[lm]'", file=sys.stderr)
        return None
    return tqdm(initial=first, total=config.last, desc="steps", leave=False)


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def trained(config: Config, device: torch.device) -> tuple[Decoder, int]:
    """The model of the run's last checkpoint, and its step. UsageError where there is none."""
    model = build(config, device)
    optimizer = optimizer_of(model, config)
    step = Checkpoints(Path(config.folder) / "checkpoints", config.checkpoints.keep).load(
        model, optimizer, {"data": {}}
    )
    if not step:
        raise UsageError(f"folder: {config.folder} holds no checkpoint; expected a run that was trained")
    return model, step
