"""A training step of the report's model at the report's batch, beside the same step of a plain model.

Both: float32 parameters, products in bfloat16, torch.compile, fused AdamW, gradients clipped by their norm, the same
weights and the same batches. The plain one has a product each for query, key, value, gate and up, an embedding that is
looked up, residuals as autocast leaves them (float32), and PyTorch's own choice of attention; it is compiled as a
whole. Its stronger variant has residuals in bfloat16 and cuDNN's attention. Ours is the model and the optimizer that
`training` uses, compiled layer by layer, with cuDNN's attention.

Held to float64: the loss of each token of a sequence. What bfloat16 explains is measured, on ours without compilation
and with attention written out; random roundings add up in squares, so a program with four times as many is off twice as
far, and more is flagged. Further numbers: milliseconds a step from the host and the GPU together, bytes a second,
shares of 989 TFLOP/s by both formulas, the loss after some steps for several orders of the data (the seeds' spread),
and for ours what loading a batch and saving a checkpoint take.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.lm import config as configs
from kernels.lm import report, training
from kernels.lm.checkpoints import Checkpoints
from kernels.lm.config import Config, count, flops_per_token
from kernels.lm.data import Sequences
from kernels.lm.model import Decoder, build, positions, rotated
from labkit.bench import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.comparison import Comparison, compare
from whywrong.errors import UsageError

Tensor = torch.Tensor
STEPS, ORDERS = 24, 3
"""Steps of a short training, and orders of the data that it is made with."""
ALLOWED = 2.0
"""Times what bfloat16 explains."""


class PlainBlock(nn.Module):
    """A layer as most would write it first."""

    def __init__(self, sizes: configs.Model) -> None:
        super().__init__()
        d, f, self.heads = sizes.dim, sizes.inner, sizes.heads
        self.norm1, self.norm2 = nn.RMSNorm(d, sizes.eps), nn.RMSNorm(d, sizes.eps)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((d, f), (d, f), (f, d)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, D]."""
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)) for part in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    """The same function with the same weights, from common parts; `residual` is the type that layers add up in."""

    def __init__(self, ours: Decoder, length: int, residual: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.residual = residual
        sizes = ours.sizes
        self.table = nn.Embedding(sizes.vocabulary, sizes.dim)
        cos, sin = positions(sizes, length, torch.float32, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)  # computed in the compiled graph they cost 20 ms a step
        self.register_buffer("sin", sin, persistent=False)
        self.blocks = nn.ModuleList(PlainBlock(sizes) for _ in range(sizes.layers))
        self.norm, self.output = nn.RMSNorm(sizes.dim, sizes.eps), nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        with torch.no_grad():
            self.table.weight.copy_(ours.embedding.table)
            self.output.weight.copy_(ours.head.output)
            for mine, theirs in zip(self.blocks, ours.blocks, strict=True):
                for part in ("q", "k", "v", "out", "gate", "up", "down"):
                    getattr(mine, part).weight.copy_(getattr(theirs, part))

    def forward(self, ids: Tensor, labels: Tensor, each: bool = True) -> Tensor:
        """The loss of each token of ids, labels [B, S]."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            x = self.table(ids).to(self.residual)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = self.output(self.norm(x))
        losses = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels)


def cases(device: Device) -> Iterator[Case]:
    """One case: a step."""
    device.needs_cuda("labkit bench lm", "a CPU's training step says nothing of a GPU's")
    folder = Path(tempfile.mkdtemp())
    text = report.sample(folder / "text", 1 << 30)
    raw = report.as_the_report(folder / "run", text) | {"device": "cuda", "evaluation": "none", "steps": 4000}
    config, wrong = configs.parse(raw)
    if config is None or wrong:
        raise UsageError("; ".join(map(str, wrong)))
    data = Sequences(config.data, config.seed, folder / "cache")
    batches = [tuple(part.cuda() for part in data.batch(step)) for step in range(STEPS * ORDERS)]
    exact, explained = golden(config, batches[0])
    providers = [
        _provider(name, make, config, batches, exact, explained, data, folder)
        for name, make in (
            ("plain, torch.compile", _plain),
            ("plain, bfloat16 residuals and cuDNN's attention", _stronger),
            ("kernels.lm", _ours),
        )
    ]
    yield Case(
        kernel="lm_training",
        mode="step",
        x_name="batch x length",
        x_value=f"{config.data.batch} x {config.data.length}",
        providers=providers,
        bytes=count(config.model) * 4 * 7,
        operations=0,
        graph=False,
        memory=True,
    )


def golden(config: Config, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Losses [1, S] of the first sequence in float64, and the RMS error that bfloat16 explains."""
    ids, labels = (part[:1] for part in batch)
    with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]):
        wide = Decoder(config.model, "float64").double()
        wide.initialise(config.seed)
        exact = wide.cuda()(ids, labels, each=True)
        del wide
        eager = build(config, "cuda")(ids, labels, each=True)
    return exact, _rms(eager.double() - exact)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _ours(config: Config, device: str = "cuda") -> tuple[Any, Callable[[], Any]]:
    model = build(config, device)
    if config.compile:
        model.compile_layers()
    return model, lambda: training.attention(torch.device(device))


def _plain(
    config: Config, device: str = "cuda", residual: torch.dtype = torch.float32
) -> tuple[Any, Callable[[], Any]]:
    model = Plain(build(config, "cpu"), config.data.length, residual).to(device)
    if config.compile:
        model.compile(dynamic=False)
    return model, torch.enable_grad


def _stronger(config: Config, device: str = "cuda") -> tuple[Any, Callable[[], Any]]:
    return _plain(config, device, torch.bfloat16)[0], lambda: training.attention(torch.device(device))


MODELS = {"ours": _ours, "plain": _plain, "stronger": _stronger}
"""What makes each model, and the context in which it runs."""


def _provider(
    name: str,
    make: Callable[[Config], tuple[Any, Callable[[], Any]]],
    config: Config,
    batches: list[Any],
    exact: Tensor,
    explained: float,
    data: Sequences,
    folder: Path,
) -> Provider:
    model, around = make(config)
    optimizer = training.optimizer_of(model, config)
    facts: dict[str, float] = {}

    def step(batch: Any = batches[0], rate: float = 3e-4) -> Tensor:
        with around():
            loss = model(*batch, each=True).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def check() -> Comparison:
        fresh = _restart(model, optimizer, start)
        with around():  # with gradients, as in a step: the same compiled code
            found = model(*batches[0], each=True)[:1].detach()
        error = _rms(found.double() - exact)
        for order in range(ORDERS):
            fresh()
            taken = batches[order * STEPS : (order + 1) * STEPS]
            losses = [step(batch, 3e-4 * (i + 1) / STEPS) for i, batch in enumerate(taken)]
            facts[f"loss_order_{order}"] = float(torch.stack(losses[-8:]).mean())
        seconds = statistics.median(_seconds(step) for _ in range(5))
        rate = config.tokens / seconds
        facts.update({"step_ms": 1e3 * seconds, "bytes_per_second": rate})
        for formula, recomputed in (("share_of_peak", False), ("share_of_peak_lingua", True)):
            facts[formula] = rate * flops_per_token(config.model, config.data.length, recomputed) / report.PEAK
        if isinstance(model, Decoder):
            facts.update(_beside(model, optimizer, data, folder))
        return compare(torch.tensor([error]), torch.tensor([0.0]), bound=torch.tensor([ALLOWED * explained]))

    start = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Provider(name, lambda: void(step()), lambda: None, check, lambda: facts)


def void(_: Any) -> None:
    """A provider's run gives nothing."""


def _restart(model: nn.Module, optimizer: Any, start: Mapping[str, Tensor]) -> Callable[[], None]:
    def fresh() -> None:
        model.load_state_dict(start)
        optimizer.state.clear()

    fresh()
    return fresh


def _seconds(step: Callable[[], Any], calls: int = 8) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def _beside(model: Decoder, optimizer: Any, data: Sequences, folder: Path) -> dict[str, float]:
    """What loading a batch takes, and how long a checkpoint holds up training."""
    began = time.perf_counter()
    for step in range(20):
        data.batch(step)
    loading = (time.perf_counter() - began) / 20
    saved = Checkpoints(folder / "checkpoints", 1)
    saved.begin()
    pauses = []
    for step in (1, 2, 3):
        saved.save(step, model, optimizer, {"data": {}})
        pauses.append(saved.pause)
        saved.finish()
    return {"loading_ms": 1e3 * loading, "checkpoint_pause_s": statistics.median(pauses)}
