"""`labkit bench bert/training_step`: a whole training step, a provider a process.

Forward, backward and AdamW of a model of 6 layers and 512 columns in bfloat16 under autocast, all compiled. Hugging
Face's model is called as its users call it: it computes logits of all positions, and, once compiled, gives attention a
mask that hides nothing. The plain one is ours with PyTorch's own embedding, and nothing else is different.

A step has some hundred launches, so the host decides how long it takes as called, and what ran before in the same
process changes that. Each measurement is therefore a process of its own, which gives three times: as called, what the
GPU is busy for in it (the sum over kernels and copies, by torch.profiler), and in a CUDA graph of the whole step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import whywrong
from kernels.bert import golden, training
from kernels.bert.masking import Masking, generator, mask, places
from labkit.bench import Case, Provider, cuda_times
from labkit.session.catalogue import ROOT
from labkit.session.device import Device
from whywrong.comparing.comparison import Comparison, compare

Tensor = torch.Tensor
RUN = training.Run(
    hidden=512, layers=6, heads=8, batch=128, length=128, precision="bfloat16", compiled=True, device="cuda"
)
SIZES = ((128, 128), (256, 512))
PROVIDERS = {"kernels.bert": ("bert", True), "plain": ("bert", False), "hugging face": (training.HUGGING_FACE, True)}
"""A preset each, and whether its embedding is the fused one."""
CHECKED = 4
"""Rows of the batch whose logits are checked: the golden keeps every operation in float64."""
AUTOCAST = whywrong.Precision(storage="bfloat16", products="bfloat16", eager=True)
STEPS = 10
"""Steps before anything is timed, and steps that are profiled."""


def cases(device: Device) -> Iterator[Case]:
    """A case a size."""
    device.needs_cuda("labkit bench bert/training_step", "the interpreter's times are none")
    for batch, length in SIZES:
        weights = sum(p.numel() for p in training.model_of(RUN, RUN.vocabulary).parameters())
        yield Case(
            kernel="bert_training",
            mode="step",
            x_name="batch x length",
            x_value=f"{batch} x {length}",
            providers=[_provider(name, replace(RUN, batch=batch, length=length)) for name in PROVIDERS],
            bytes=weights * 4 * 7,
            operations=0,
        )


def _sampled(run: training.Run) -> tuple[Tensor, Tensor, Masking]:
    """ids [B, S] with masked places, and their labels."""
    how = Masking(run.vocabulary, 4, range(5))
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(5, run.vocabulary, (run.batch, run.length)))
    return *mask(ids, how, generator(0)), how


def _model(name: str, run: training.Run) -> Any:
    preset, fused = PROVIDERS[name]
    model: Any = training.model_of(replace(run, preset=preset), run.vocabulary)
    if not fused:
        model.embeddings.fused = False
    return model


def _provider(name: str, run: training.Run) -> Provider:
    def check() -> Comparison:
        """Without dropout, the logits of a few rows from the first weights, against Hugging Face's model in float64.

        The loss would not do: at its first weights any model has about the logarithm of the vocabulary.
        """
        given, labels, _ = _sampled(run)
        few, wanted = given[:CHECKED].cuda(), labels[:CHECKED].cuda()
        model = _model(name, run).eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            found = training.logits_of(model, few).float()
        theirs = training.model_of(replace(run, preset=training.HUGGING_FACE), run.vocabulary)
        exact = whywrong.bounded(golden.record(theirs, few, wanted), precision=AUTOCAST).step("output.logits")
        return compare(found, exact.value, bound=exact.bound.absolute)

    def alone() -> dict[str, float]:
        torch.cuda.empty_cache()  # what checks took
        command = [sys.executable, "-m", __name__, name, str(run.batch), str(run.length)]
        child = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if child.returncode:
            raise RuntimeError(f"its process ended with {child.returncode}")
        return dict(json.loads(child.stdout.splitlines()[-1]))

    return Provider(name, lambda: None, lambda: None, check, alone=alone)


def times(name: str, run: training.Run) -> dict[str, float]:
    """Microseconds of a step in this process, which runs nothing else: as called, busy, and in a CUDA graph."""
    given, labels, how = _sampled(run)
    batch = [part.cuda() for part in (given, *places(labels, training.guesses(given.numel(), how)))]
    model = _model(name, run).train()
    optimizer = training.optimizer_of(model, run)
    called = torch.compile(training.loss_of(model), dynamic=False)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = called(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(STEPS):
        step()
    found = {"time": cuda_times(step)[0], "time_busy": _busy(step)}
    for group in optimizer.param_groups:
        group["capturable"] = True
    try:
        return found | {"time_in_graph": cuda_times(_captured(step))[0]}
    except RuntimeError as error:
        print(f"  cannot be captured in a graph: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return found


def _busy(step: Callable[[], None]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages())) / STEPS


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


if __name__ == "__main__":
    print(json.dumps(times(sys.argv[1], replace(RUN, batch=int(sys.argv[2]), length=int(sys.argv[3])))))
