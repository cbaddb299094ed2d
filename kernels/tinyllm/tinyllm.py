"""The CUDA C++ TinyLLM from Python: parameters and steps as NumPy arrays, training, and text."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from kernels.native import build, load
from labkit.session.device import Device
from whywrong.errors import UsageError
from whywrong.recording.steps import Trace

FOLDER = Path(__file__).parent
HOST = FOLDER.parent / "cuda_host"
ENGINES = {"cublas": 0, "kernel": 1, "host": 2}
Array = np.ndarray

_p, _i, _f, _z = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_size_t
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "tinyllm_error": (ctypes.c_char_p, ()),
    "tinyllm_new": (_p, (_i,) * 9),
    "tinyllm_delete": (None, (_p,)),
    "tinyllm_layout": (ctypes.c_char_p, (_p,)),
    "tinyllm_count": (_z, (_p,)),
    "tinyllm_write": (_i, (_p, _p)),
    "tinyllm_read": (_i, (_p, ctypes.c_char_p, _p, _z)),
    "tinyllm_forward": (_i, (_p, _p, _i, _i)),
    "tinyllm_score": (_i, (_p, _p, _p)),
    "tinyllm_backward": (_i, (_p,)),
    "tinyllm_step": (_i, (_p, *(_f,) * 5)),
    "tinyllm_synchronize": (_i, ()),
    "tinyllm_tensor_scenario": (ctypes.c_char_p, (ctypes.c_char_p,)),
    "tinyllm_copy": (_i, (_z, _i)),
    "tinyllm_round_trip": (_i, (_z, _p, _p)),
}
ON_HOST: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "cuda_host_set": (None, (_i, _z, _z, _i, _i)),
    "cuda_host_live": (_z, ()),
    "cuda_host_overruns": (_z, ()),
}


@dataclass(frozen=True)
class Config:
    """Sizes. `width` is a multiple of `heads`; `context` and `sequences` are the most that a batch may have."""

    vocabulary: int = 256
    context: int = 128
    width: int = 256
    layers: int = 3
    heads: int = 4
    sequences: int = 32

    def check(self) -> None:
        """Raise UsageError for a size that cannot be."""
        for name, value in vars(self).items():
            if not (0 if name == "layers" else 1) <= value <= 1 << 20:
                raise UsageError(f"{name}: expected 1 to 1048576, got {value}")
        if self.width % self.heads:
            raise UsageError(f"heads: {self.heads} does not divide width {self.width}; expected a divisor")


@cache
def library(device: Device) -> ctypes.CDLL:
    """The library for a device, built on first use."""
    return load(build(FOLDER / "api.cu", HOST, device), SIGNATURES | ({} if device.is_cuda else ON_HOST))


def initial(config: Config, rng: np.random.Generator, scale: float | None = None) -> dict[str, Array]:
    """Parameters by name, float32: matrices normal with `scale`, gains 1, the rest 0.

    By default `scale` is 1 / sqrt(inputs), and 0.02 for embedding, positions and head, so that a fresh model gives
    every byte about the same chance.
    """
    made = {}
    for name, shape in layout(config).items():
        if len(shape) == 2:
            usual = 0.02 if name in ("table", "positions", "head.w") else shape[0] ** -0.5
            value = rng.standard_normal(shape) * (usual if scale is None else scale)
        else:
            value = np.full(shape, 1.0 if name.endswith("gain") else 0.0)
        made[name] = value.astype(np.float32)
    return made


def layout(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, in the order in which they lie in memory: matrices, which decay, first."""
    d, h, v = config.width, 4 * config.width, config.vocabulary
    layers = [f"L{i}." for i in range(config.layers)]
    shapes: dict[str, tuple[int, ...]] = {}
    for at in layers:
        shapes |= {at + "qkv.w": (d, 3 * d), at + "o.w": (d, d), at + "up.w": (d, h), at + "down.w": (h, d)}
    shapes |= {"head.w": (d, v), "table": (v, d), "positions": (config.context, d)}
    for at in layers:
        shapes |= {at + "ln1.gain": (d,), at + "ln1.shift": (d,), at + "qkv.b": (3 * d,), at + "o.b": (d,)}
        shapes |= {at + "ln2.gain": (d,), at + "ln2.shift": (d,), at + "up.b": (h,), at + "down.b": (d,)}
    return shapes | {"lnf.gain": (d,), "lnf.shift": (d,), "head.b": (v,)}


class TinyLLM:
    """A model on `device`. Products go to cuBLAS (`engine` "cublas"), to our kernel ("kernel") or to the host ("host").

    On a CPU "cublas" is the host runtime's sgemm. `tf32` lets cuBLAS round factors to TF32. `overlap`: with cuBLAS,
    parameters' gradients are computed in a second stream, beside those of the activations; the numbers are the same. By
    default with TF32 alone: float32's products leave nothing of the GPU to work beside them.

    A step of a shape that was there before is a CUDA graph's replay; the numbers are the same.
    """

    def __init__(
        self, config: Config, device: Device, engine: str = "cublas", tf32: bool = False, overlap: bool | None = None
    ) -> None:
        config.check()
        if engine not in ENGINES:
            raise UsageError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
        self.config, self._lib = config, library(device)
        sizes = (config.vocabulary, config.context, config.width, config.layers, config.heads, config.sequences)
        self._model = self._lib.tinyllm_new(
            *sizes, ENGINES[engine], int(tf32), int(overlap or (overlap is None and tf32))
        )
        if not self._model:
            raise RuntimeError(self._lib.tinyllm_error().decode())
        self._free = weakref.finalize(self, self._lib.tinyllm_delete, self._model)
        self._batch = (0, 0)
        lines = (line.split() for line in self._lib.tinyllm_layout(self._model).decode().splitlines())
        self._places = {name: (int(offset), int(rows) * int(columns)) for name, rows, columns, offset in lines}

    def close(self) -> None:
        """Free the model's memory now."""
        self._free()

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._lib, name)(*arguments):
            raise RuntimeError(self._lib.tinyllm_error().decode())

    def _read(self, name: str, count: int) -> Array:
        out = np.empty(count, np.float32)
        self._call("tinyllm_read", self._model, name.encode(), out.ctypes.data, count)
        return out

    def write(self, parameters: dict[str, Array]) -> None:
        """Set every parameter."""
        flat = np.empty(self._lib.tinyllm_count(self._model), np.float32)
        for name, (offset, size) in self._places.items():
            flat[offset : offset + size] = np.asarray(parameters[name], np.float32).reshape(-1)
        self._call("tinyllm_write", self._model, flat.ctypes.data)

    def parameters(self) -> dict[str, Array]:
        """Every parameter, by name."""
        return self._named("parameters")

    def gradients(self) -> dict[str, Array]:
        """Every gradient of the last backward, by the parameter's name."""
        return self._named("gradients")

    def _named(self, which: str) -> dict[str, Array]:
        flat = self._read(which, self._lib.tinyllm_count(self._model))
        shapes = layout(self.config)
        return {name: flat[o : o + n].reshape(shapes[name]) for name, (o, n) in self._places.items()}

    def forward(self, tokens: Array) -> None:
        """Run `tokens` [sequences, context], integers."""
        given = self._tokens(tokens)
        self._batch = (given.shape[0], given.shape[1])
        self._call("tinyllm_forward", self._model, given.ctypes.data, *given.shape)

    def score(self, targets: Array, read: bool = True) -> float:
        """The mean cross-entropy of the last forward's logits; NaN where it is not read."""
        given, loss = self._tokens(targets), ctypes.c_float(float("nan"))
        if given.shape != self._batch:
            raise UsageError(f"targets: expected the tokens' {self._batch}, got shape {given.shape}")
        self._call("tinyllm_score", self._model, given.ctypes.data, ctypes.byref(loss) if read else None)
        return loss.value

    def backward(self) -> None:
        """Gradients of the last score."""
        self._call("tinyllm_backward", self._model)

    def step(
        self, rate: float, decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), epsilon: float = 1e-8
    ) -> None:
        """One step of AdamW."""
        self._call("tinyllm_step", self._model, rate, *betas, epsilon, decay)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._call("tinyllm_synchronize")

    def logits(self) -> Array:
        """[sequences, context, vocabulary] of the last forward."""
        s, t = self._batch
        return self._read("logits", s * t * self.config.vocabulary).reshape(s, t, -1)

    def trace(self, tokens: Array, targets: Array) -> Trace:
        """Every step of forward and score, and every gradient ("d " and the parameter's name)."""
        self.forward(tokens)
        self.score(targets)
        self.backward()
        s, t = self._batch
        shapes = steps(replace(self.config, sequences=s, context=t))
        trace = Trace()
        for name, shape in shapes.items():
            trace.add(name, self._read(name, int(np.prod(shape))).reshape(shape))
        for name, value in self.gradients().items():
            trace.add(f"d {name}", value)
        return trace

    def generate(
        self, prompt: bytes, count: int, rng: np.random.Generator | None = None, temperature: float = 1.0
    ) -> bytes:
        """`count` bytes after `prompt`: the likeliest each time, or sampled with `rng`."""
        text = list(prompt) or [10]
        for _ in range(count):
            self.forward(np.array([text[-self.config.context :]]))
            row = self.logits()[0, -1].astype(np.float64)
            if rng is None:
                text.append(int(row.argmax()))
            else:
                p = np.exp((row - row.max()) / temperature)
                text.append(int(rng.choice(len(p), p=p / p.sum())))
        return bytes(text[len(prompt) :])

    def _tokens(self, given: Array) -> Array:
        tokens = np.ascontiguousarray(given, dtype=np.int32)
        if tokens.ndim != 2:
            raise UsageError(f"tokens: expected [sequences, context], got shape {tokens.shape}")
        return tokens


def steps(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the forward's steps, in order, for a batch of `config.sequences` times `config.context`."""
    s, t, d, h = config.sequences, config.context, config.width, config.heads
    rows = (s, t, d)
    made: dict[str, tuple[int, ...]] = {"x0": rows}
    for i in range(config.layers):
        made |= {
            f"L{i}.ln1": rows, f"L{i}.heads": (3, s, h, t, d // h), f"L{i}.p": (s, h, t, t),
            f"L{i}.mixed": (s, h, t, d // h),
            f"L{i}.attention": rows, f"L{i}.x1": rows, f"L{i}.ln2": rows, f"L{i}.up": (s, t, 4 * d),
            f"L{i}.gelu": (s, t, 4 * d), f"L{i}.out": rows,
        }  # fmt: skip
    return made | {"lnf": rows, "logits": (s, t, config.vocabulary), "losses": (s, t), "loss": (1,)}


def batches(text: Array, config: Config, rng: np.random.Generator) -> Callable[[], tuple[Array, Array]]:
    """A function that draws tokens and targets [sequences, context] from random places of `text`."""
    if len(text) < config.context + 2:
        raise UsageError(f"text: {len(text)} bytes are too few; expected {config.context + 2} at least")

    def sample() -> tuple[Array, Array]:
        at = rng.integers(0, len(text) - config.context, (config.sequences, 1)) + np.arange(config.context + 1)
        rows = text[at].astype(np.int32)
        return rows[:, :-1], rows[:, 1:]

    return sample


def validation_loss(model: TinyLLM, text: Array, most: int = 16) -> float:
    """Mean nats a byte over the first `most` batches of `text`, in order."""
    c = model.config
    size = c.sequences * c.context
    losses = []
    for start in range(0, min(most * size, len(text) - size - 1), size) or [0]:
        piece = text[start : start + size + 1].astype(np.int32)
        rows = (len(piece) - 1) // c.context
        if rows == 0:
            break
        model.forward(piece[: rows * c.context].reshape(rows, -1))
        losses.append(model.score(piece[1 : rows * c.context + 1].reshape(rows, -1)))
    return float(np.mean(losses))


def train(
    model: TinyLLM,
    text: Array,
    validation: Array,
    count: int,
    rate: float,
    rng: np.random.Generator,
    every: int = 50,
    looked_at: int = 16,
) -> list[tuple[int, float, float]]:
    """`count` steps of AdamW: (step, training loss, validation loss). The rate warms up, then follows a cosine."""
    sample, curve, warm = batches(text, model.config, rng), [], max(1, count // 10)
    for step in range(count + 1):
        looked = step % every == 0 or step == count
        tokens, targets = sample()
        held = validation_loss(model, validation, looked_at) if looked else float("nan")
        model.forward(tokens)
        loss = model.score(targets, read=looked)
        if looked:
            curve.append((step, loss, held))
        if step < count:
            model.backward()
            along = max(0.0, (step - warm) / max(1, count - warm))
            now = min(1.0, (step + 1) / warm) * (0.55 + 0.45 * np.cos(np.pi * along))
            model.step(rate * float(now))
    return curve
