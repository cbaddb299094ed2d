"""`labkit bench tinyllm`: a training step beside PyTorch's, in float32 and TF32; and copies between host and device.

Every provider's gradients of its first step are held against float64 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

import whywrong
from kernels.corpus import corpus
from kernels.tinyllm import golden
from kernels.tinyllm.baselines import Trainer
from kernels.tinyllm.tinyllm import Config, TinyLLM, batches, initial, layout, library
from labkit.bench import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.bounds import EXACT
from whywrong.comparing.comparison import Comparison, compare

CONFIG = Config()
COPIED = 1 << 26
"""Floats of the copies: 256 MiB."""


def cases(device: Device) -> Iterator[Case]:
    """A training step in each precision, then a copy each way."""
    device.needs_cuda("labkit bench tinyllm", "the host runtime's times are none")
    for tf32 in (False, True):
        yield _training(device, tf32)
    yield from (_copies(device, to_device) for to_device in (True, False))


def _training(device: Device, tf32: bool) -> Case:
    c, rng = CONFIG, np.random.default_rng(0)
    parameters = initial(c, rng)
    tokens, targets = batches(corpus().split()[0], c, rng)()
    ids, wanted = (torch.tensor(v, dtype=torch.long, device="cuda") for v in (tokens, targets))
    torch.backends.cuda.matmul.allow_tf32 = False
    promised = whywrong.Precision(products="tf32" if tf32 else "ieee")
    exact = whywrong.bounded(golden.reference(parameters, ids, wanted, c), precision=promised)
    steps = [exact.step(f"d {name}") for name in layout(c)]
    whole = torch.cat([step.value.flatten() for step in steps]).cpu()
    allowed = torch.cat([step.bound.absolute.flatten() for step in steps]).cpu()
    del exact, steps

    def provider(name: str, run: Callable[[], None], gradients: Callable[[], dict[str, np.ndarray]]) -> Provider:
        def check() -> Comparison:
            found = gradients()
            return compare(np.concatenate([found[key].reshape(-1) for key in layout(c)]), whole, bound=allowed)

        return Provider(name, run, lambda: None, check)

    model = TinyLLM(c, device, tf32=tf32)
    model.write(parameters)

    def ours() -> None:
        model.forward(tokens)
        model.score(targets, read=False)
        model.backward()
        model.step(3e-4)

    providers = [provider("ours", ours, model.gradients)]
    for name, compiled in (("torch eager", False), ("torch.compile", True)):
        baseline = Trainer(parameters, c, compiled, tf32)
        providers.append(provider(name, lambda baseline=baseline: baseline.step(ids, wanted), baseline.gradients))
    for name, formula in (("torch.compile, CUDA graph", False), ("the same, attention by its formula", True)):
        baseline = Trainer(parameters, c, True, tf32, formula)
        providers.append(provider(name, baseline.captured(ids, wanted), baseline.gradients))
    rows, d = c.sequences * c.context, c.width
    matrices = sum(np.prod(shape) for name, shape in layout(c).items() if name.endswith(".w"))
    attention = 2 * c.layers * rows * c.context * d
    return Case(
        kernel="tinyllm",
        mode="training step, TF32" if tf32 else "training step, float32",
        x_name="tokens x D",
        x_value=f"{rows} x {d}",
        providers=providers,
        bytes=int(28 * model_size(c)),
        graph=False,
        operations=0 if tf32 else int(6 * rows * matrices + 6 * attention),
    )


def model_size(c: Config) -> int:
    """Parameters. AdamW alone reads four floats of each and writes three: 28 bytes."""
    return int(sum(np.prod(shape) for shape in layout(c).values()))


def _copies(device: Device, to_device: bool) -> Case:
    lib = library(device)
    host = torch.empty(COPIED, pin_memory=True).normal_()
    there = host.cuda()
    source, target = (host, there) if to_device else (there, host.clone().pin_memory())

    def called(failed: int) -> None:
        if failed:
            raise RuntimeError(lib.tinyllm_error().decode())

    def round_trip() -> Comparison:
        back = np.full(COPIED, np.nan, np.float32)
        called(lib.tinyllm_round_trip(COPIED, host.data_ptr(), back.ctypes.data))
        return compare(back, host, bound=EXACT)

    def one_way() -> Comparison:
        target.fill_(float("nan"))
        target.copy_(source)
        return compare(target, source, bound=EXACT)

    providers = [
        Provider("ours", lambda: called(lib.tinyllm_copy(COPIED, int(to_device))), lambda: None, round_trip),
        Provider("torch, pinned", lambda: target.copy_(source, non_blocking=True), lambda: None, one_way),
    ]
    return Case(
        kernel="tinyllm",
        mode="h2d" if to_device else "d2h",
        x_name="tokens x D",
        x_value=f"{COPIED >> 18} MiB",
        providers=providers,
        bytes=4 * COPIED,
        operations=0,
        graph=False,
    )
