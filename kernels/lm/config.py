"""The configuration of a run: typed, read from YAML, every wrong entry named at once.

The sections `validation`, which a training runs, and `evaluation`, which the command `evaluate` runs, have no default:
either settings or the word `none` must be written, so that what is forgotten is told apart from what is not wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from labkit.session.secrets import KNOWN
from whywrong.errors import UsageError

BYTES = 256
BEGIN, END = 256, 257
VOCABULARY = 258
"""The bytes, and a token each for where a document begins and ends."""
NONE = "none"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the key, its value, and what would be right."""

    key: str
    value: Any
    wanted: str

    def __str__(self) -> str:
        return f"{self.key}: expected {self.wanted}, got {self.value}"


@dataclass(frozen=True)
class Model:
    """Sizes of the decoder. `hidden` 0 takes 8/3 of `dim`, rounded up to a multiple of 256, as Lingua does."""

    dim: int = 1024
    layers: int = 8
    heads: int = 8
    hidden: int = 0
    vocabulary: int = VOCABULARY
    rope_theta: float = 10000.0
    eps: float = 1e-5

    @property
    def inner(self) -> int:
        """Columns of the feed-forward layer."""
        return self.hidden or -(-(8 * self.dim // 3) // 256) * 256


@dataclass(frozen=True)
class Data:
    """Where the training text is, and how much of it a step sees: `batch` sequences over all ranks, of `length`
    tokens."""

    folder: str
    pattern: str = "*.chunk.*.jsonl"
    batch: int = 32
    length: int = 2048


@dataclass(frozen=True)
class Optimizer:
    """AdamW. The rate rises linearly from 0 over `warmup` steps, then follows `schedule` to `final` of it at
    `steps`."""

    rate: float = 3e-4
    warmup: int = 2000
    schedule: str = "cosine"
    final: float = 0.1
    decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 10.0


@dataclass(frozen=True)
class Checkpoints:
    """A checkpoint every so many steps (0: only the last), of which the newest `keep` stay."""

    every: int = 100
    keep: int = 2


@dataclass(frozen=True)
class Validation:
    """Files of held-out text, scored every so many steps (0: at the end) on at most `batches` batches (0: all)."""

    folder: str
    pattern: str = "*.val.jsonl"
    every: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Tasks of EleutherAI's harness, read from local files in `folder` (empty: the tasks that come with this
    package)."""

    tasks: list[str]
    folder: str = ""
    limit: int = 0


@dataclass(frozen=True)
class Dumps:
    """Per-step dumps for `whywrong diff`: every so many steps (0: none), with the gradients of the parameters named."""

    every: int = 0
    tensors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Config:
    """A run. Its schedule has `steps`; `stop` ends it earlier (0: does not), so that a short look keeps the
    schedule."""

    folder: str
    data: Data
    validation: Validation | None
    evaluation: Evaluation | None
    steps: int
    stop: int = 0
    seed: int = 0
    precision: str = "bfloat16"
    compile: bool = True
    device: str = "auto"
    parallel: str = "ddp"
    tensorboard: bool = False
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    dumps: Dumps = field(default_factory=Dumps)

    @property
    def last(self) -> int:
        """The number of steps that are made."""
        return min(self.steps, self.stop or self.steps)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.data.batch * self.data.length


def learning_rate(config: Config, step: int) -> float:
    """Of step 0, 1, ...: rate x step / warmup, so that the first step updates nothing; then the schedule."""
    given = config.optimizer
    if step < given.warmup:
        return given.rate * (step / given.warmup)
    if given.schedule == "constant":
        return given.rate
    share = (step - given.warmup) / max(1, config.steps - given.warmup)
    return given.rate * (given.final + (1.0 - given.final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share))))


def count(sizes: Model) -> int:
    """Parameters of a model of these sizes, by arithmetic: embedding, layers, last norm, output."""
    d, f, v = sizes.dim, sizes.inner, sizes.vocabulary
    return 2 * v * d + sizes.layers * (4 * d * d + 3 * d * f + 2 * d) + d


def parameters(sizes: Model) -> dict[str, int]:
    """The elements of each of a model's parameters, by its name."""
    d, f, v = sizes.dim, sizes.inner, sizes.vocabulary
    parts = {"attention_norm": d, "ffn_norm": d} | dict.fromkeys(("q", "k", "v", "out"), d * d)
    parts |= dict.fromkeys(("gate", "up", "down"), d * f)
    blocks = {f"blocks.{i}.{part}": n for i in range(sizes.layers) for part, n in parts.items()}
    return {"embedding.table": v * d, **blocks, "head.norm": d, "head.output": v * d}


def checkpoint_size(config: Config) -> int:
    """Bytes of a checkpoint: parameters and AdamW's two moments, float64 where that is the precision, else float32."""
    return 3 * (8 if config.precision == "float64" else 4) * count(config.model)


def flops_per_token(sizes: Model, length: int, recomputed: bool) -> float:
    """Floating-point operations of a token in forward and backward, causal attention counted half.

    6 for each parameter but the embedding's, and for attention 4 x layers x length x dim forward, twice that backward;
    with `recomputed` two and a half times, since flash attention makes its scores again: that is Lingua's formula.
    """
    attention = (3.5 if recomputed else 3.0) * 4 * sizes.layers * length * sizes.dim / 2
    return 6 * (count(sizes) - sizes.vocabulary * sizes.dim) + attention


SETTING_CHOICES = {
    "precision": ("bfloat16", "float32", "float64"),
    "device": ("auto", "cpu", "cuda"),
    "parallel": ("ddp", "fsdp"),
    "optimizer.schedule": ("cosine", "constant"),
}
LEAST: dict[str, float] = {
    "steps": 1,
    "stop": 0,
    "seed": 0,
    "data.batch": 1,
    "data.length": 2,
    "model.dim": 2,
    "model.layers": 1,
    "model.heads": 1,
    "model.hidden": 0,
    "model.vocabulary": VOCABULARY,
    "optimizer.warmup": 1,
    "optimizer.final": 0,
    "optimizer.decay": 0,
    "optimizer.clip": 0,
    "checkpoints.every": 0,
    "checkpoints.keep": 1,
    "validation.every": 0,
    "validation.batches": 0,
    "evaluation.limit": 0,
    "dumps.every": 0,
    "optimizer.beta1": 0,
    "optimizer.beta2": 0,
}
SMALLEST_EPS = 2.0**-126
ABOVE_ZERO = ("optimizer.rate", "optimizer.eps", "model.eps", "model.rope_theta")
BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")
MOST = {"optimizer.final": 1.0, "model.layers": 10_000}


def parse(raw: Any) -> tuple[Config | None, list[Finding]]:
    """A configuration from nested dicts and all that is wrong with it; None where an entry cannot be read at all."""
    if not isinstance(raw, dict):
        return None, [Finding("configuration", shown(raw), "keys with values, such as `steps: 100`")]
    findings: list[Finding] = []
    found = _section(Config, raw, "", findings)
    if found is not None:
        findings += _relations(found)
    return found, findings


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration; `overrides` are `data.batch=8`. Raises UsageError with a line for each thing that is
    wrong."""
    config, findings = parse(read(path, overrides))
    if config is None or findings:
        raise UsageError(lines(path, findings))
    return config


def lines(path: Path, findings: Iterable[Finding]) -> str:
    """The findings, one a line, each after the file's name."""
    return "\n".join(f"{path}: {finding}" for finding in findings)


def read(path: Path, overrides: Sequence[str] = ()) -> Any:
    """The YAML of a file as Python has it, with overrides put in. Raises UsageError for what is no such file."""
    try:
        raw = yaml.load(text(path), _Once)
    except _TwiceError as error:  # its line alone: the key may be a secret
        raise UsageError(f"{path}, line {error}: has a key that stands there twice; expected each key once") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where}: is not YAML; expected keys and values") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: holds a date or a number that is none, or is too deep; expected YAML") from None
    if raw is None and overrides:  # an empty file
        raw = {}
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign or not key or not isinstance(raw, dict):
            raise UsageError("an override: expected key=value, such as data.batch=8")
        *above, name = key.split(".")
        place = raw
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        try:
            place[name] = yaml.load(value, _Once)
        except (yaml.YAMLError, ValueError, RecursionError):
            name = ".".join(map(named, key.split(".")))
            raise UsageError(f"{name}: expected key=value with the value in YAML") from None
    return raw


class _TwiceError(ValueError):
    """A key that stands twice in a mapping; YAML would take the last one in silence."""


class _Once(yaml.SafeLoader):
    """Loads as safe_load does, each key once."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """The mapping that comes next."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counts = Counter(key.value for key in keys)
        if twice := [key for key in keys if counts[key.value] > 1]:
            raise _TwiceError(twice[-1].start_mark.line + 1)
        return node


def as_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts that :func:`parse` reads again."""
    found = dataclasses.asdict(config)
    return {key: NONE if value is None else value for key, value in found.items()}


def text(path: Path) -> str:
    """The text of a file. UsageError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({type(error).__name__}); expected a YAML file") from None


def shown(value: Any) -> str:
    """A value as a finding shows it, cut short; what has a token's form is not shown."""
    text = "nothing" if value is None else _SHORT.repr(value)
    if KNOWN.search(text):
        return "a token"
    return text if len(text) <= 60 else f"{text[:57]}..."


def named(key: Any) -> str:
    """A key that nobody knows as a finding shows it: as it is where it looks like a name, and is no secret then."""
    return key if isinstance(key, str) and re.fullmatch(r"[A-Za-z_]{1,24}\d?", key) else "(an unknown name)"


def _section(kind: type, raw: dict[Any, Any], prefix: str, findings: list[Finding]) -> Any:
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"{prefix}{near[0]}" if near else ", ".join(prefix + name for name in known)
            findings.append(
                Finding(f"{prefix}{named(key)}", "this key", f"another: none has that name; there is {hint}")
            )
    before = len(findings)
    given = {}
    for name, one in known.items():
        key = prefix + name
        if name in raw:
            given[name] = _value(hints[name], raw[name], key, findings)
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            findings.append(Finding(key, "not given", _wanted(hints[name], key)))
    return None if len(findings) > before else kind(**given)


def _value(hint: Any, value: Any, key: str, findings: list[Finding]) -> Any:
    inner = _inner(hint)
    if dataclasses.is_dataclass(inner):
        if inner is not hint and value == NONE:
            return None
        if isinstance(value, dict):
            return _section(typing.cast(type, inner), value, f"{key}.", findings)
    elif hint is float:
        number = _number(value)
        if number is not None and _in_range(number, key):
            return number
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and value < 2**63 and _in_range(value, key):
            return value
    elif hint in (str, bool):
        written = str(value).isprintable() and value != ""
        if isinstance(value, hint) and written and value in SETTING_CHOICES.get(key, (value,)):
            return value
        if value == "" and key == "evaluation.folder":
            return value
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    findings.append(Finding(key, shown(value), _wanted(hint, key)))
    return None


def _inner(hint: Any) -> Any:
    """The dataclass of `Validation | None`; anything else as it is."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _number(value: Any) -> float | None:
    """YAML 1.1 takes 3e-4 for a text, so a text that is a number counts as one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _in_range(number: float, key: str) -> bool:
    if key in ABOVE_ZERO and number <= 0.0:
        return False
    return LEAST.get(key, -math.inf) <= number <= MOST.get(key, math.inf) and not (key in BELOW_ONE and number >= 1.0)


def _wanted(hint: Any, key: str) -> str:
    inner = _inner(hint)
    if dataclasses.is_dataclass(inner):
        names = ", ".join(f.name for f in dataclasses.fields(typing.cast(type, inner)))
        return f"settings ({names})" + ("" if inner is hint else f", or the word {NONE}")
    if key in SETTING_CHOICES:
        return f"one of {', '.join(SETTING_CHOICES[key])}"
    word = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(hint, "a list of texts")
    if key in LEAST:
        word += f", {LEAST[key]:g} or more" if key not in MOST else f" from {LEAST[key]:g} to {MOST[key]:g}"
    return word + (", above 0" if key in ABOVE_ZERO else "") + (", below 1" if key in BELOW_ONE else "")


def _relations(config: Config) -> list[Finding]:
    """What is wrong between entries that are each right."""
    model, found = config.model, []
    if model.dim % (2 * model.heads):
        right = f"a multiple of 2 x model.heads = {2 * model.heads}, since rotary positions turn pairs"
        found.append(Finding("model.dim", model.dim, right))
    if config.precision != "float64" and 0.0 < config.optimizer.eps < SMALLEST_EPS:
        right = f"{SMALLEST_EPS} or more, the smallest normal number of float32, in which AdamW divides by it"
        found.append(Finding("optimizer.eps", config.optimizer.eps, right))
    if config.stop > config.steps:
        found.append(Finding("stop", config.stop, f"at most steps = {config.steps}, or 0"))
    if config.optimizer.warmup >= config.steps:
        right = (
            f"less than steps = {config.steps}; or set steps above {config.optimizer.warmup} and stop: {config.last}"
        )
        found.append(Finding("optimizer.warmup", config.optimizer.warmup, right))
    if config.checkpoints.every > config.steps:
        right = f"at most steps = {config.steps}, or 0 for the last one alone"
        found.append(Finding("checkpoints.every", config.checkpoints.every, right))
    if config.validation and config.validation.every > config.steps:
        right = f"at most steps = {config.steps}, or 0 for the end alone"
        found.append(Finding("validation.every", config.validation.every, right))
    if config.dumps.every > config.steps:
        found.append(Finding("dumps.every", config.dumps.every, f"at most steps = {config.steps}, or 0 for none"))
    if config.dumps.tensors and not config.dumps.every:
        found.append(Finding("dumps.every", 0, "1 or more: dumps.tensors names what is to be dumped"))
    names = parameters(model) if config.dumps.tensors else {}
    found += [
        Finding("dumps.tensors", shown(name), f"some of {', '.join(names)}")
        for name in config.dumps.tensors
        if name not in names
    ]
    return found
