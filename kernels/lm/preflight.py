"""Everything that would fail later, looked for before the first step: in seconds, without making the model.

Each finding names the key, its value and what would be right. A good configuration gives none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels.lm import config as configs
from kernels.lm.config import Config, Finding, shown
from whywrong.errors import UsageError

GIB = 2.0**30


def check(raw: Any, processes: int = 1) -> tuple[Config | None, list[Finding]]:
    """The configuration, None where it cannot be read, and all that is wrong with it for a run on so many processes."""
    config, findings = configs.parse(raw)
    if config is None:
        return None, findings
    for looked in (_device, _data, _validation, _evaluation, _board, _compiler, _folder, _disk, _memory):
        findings += looked(config, processes)
    return config, findings


def refuse(path: Path, overrides: list[str], processes: int = 1) -> Config:
    """The configuration of a file if all is well with it. UsageError with a line for each finding otherwise."""
    from labkit.session.secrets import refuse_secrets

    # first, since the message about a faulty file may contain a word of it
    refuse_secrets(str(path), "\n".join([configs.text(path), *overrides]))
    raw = configs.read(path, overrides)
    config, findings = check(raw, processes)
    if config is None or findings:
        raise UsageError(configs.lines(path, findings))
    return config


def launched() -> dict[str, int]:
    """What torchrun says of this process; of the only one where it says nothing. UsageError where it cannot be so."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    others = {"RANK": "0" if world_size == "1" else "", "LOCAL_WORLD_SIZE": world_size, "LOCAL_RANK": "0"}
    settings = {"WORLD_SIZE": world_size} | {name: os.environ.get(name, other) for name, other in others.items()}
    found = {name: int(value) if value.isascii() and value.isdigit() else -1 for name, value in settings.items()}
    for name, value in settings.items():
        whole = found["WORLD_SIZE" if name in ("RANK", "LOCAL_WORLD_SIZE") else "LOCAL_WORLD_SIZE"]
        least, most = (0, whole - 1) if name.endswith("RANK") else (1, whole)
        if found[name] < least or (name != "WORLD_SIZE" and found[name] > most):
            right = f"a whole number from {least}" + (f" to {most}" if name != "WORLD_SIZE" else "")
            raise UsageError(f"{name}: expected what torchrun sets, {right}, got {value!r}")
    return found


def _here(processes: int) -> int:
    """Of so many processes, those on this machine."""
    return min(processes, launched()["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else processes


def _device(config: Config, processes: int) -> Iterator[Finding]:
    if config.device == "cuda" and not _gpus(config):
        yield Finding("device", "'cuda'", "cpu or auto: torch sees no GPU here")
    if 0 < _gpus(config) < _here(processes):
        yield Finding("processes", _here(processes), f"at most {_gpus(config)}, a GPU each")
    if config.data.batch % processes:
        yield Finding("data.batch", config.data.batch, f"a multiple of the {processes} processes that share it")


def _data(config: Config, _: int) -> Iterator[Finding]:
    from kernels.lm import jsonl

    given = config.data
    paths, findings = _glanced("data.folder", given.folder, given.pattern)
    yield from findings
    if findings:
        return
    size = sum(path.stat().st_size for path in paths)
    if size > 64 * jsonl.GLANCE:
        return  # enough for any batch; each line is checked before the first step
    tokens = sum(len(jsonl.encode(text)) for path in paths for text in jsonl.documents(path))
    sequences = (tokens - 1) // given.length
    if not sequences:
        yield Finding("data.length", given.length, f"at most {tokens - 1}: {given.folder} holds {tokens} tokens")
    elif sequences < given.batch:
        right = f"at most {sequences}, the sequences of {given.length} tokens that {given.folder} holds"
        yield Finding("data.batch", given.batch, right)


def _validation(config: Config, _: int) -> Iterator[Finding]:
    if not config.validation:
        return
    paths, findings = _glanced("validation.folder", config.validation.folder, config.validation.pattern)
    yield from findings
    trained = {path.resolve() for path in _glanced("data.folder", config.data.folder, config.data.pattern)[0]}
    if both := [path.name for path in paths if path.resolve() in trained]:
        right = f"files to validate on alone; {both[0]} is training data"
        yield Finding("validation.pattern", shown(config.validation.pattern), right)


def _glanced(key: str, folder: str, pattern: str) -> tuple[list[Path], list[Finding]]:
    from kernels.lm import jsonl

    if not pattern or pattern in (".", "..") or "/" in pattern:
        return [], [Finding(key.replace("folder", "pattern"), shown(pattern), "a pattern of files' names, as *.jsonl")]
    try:
        paths = jsonl.files(key, folder, pattern)
        for path in paths:
            jsonl.glance(path)
    except UsageError as error:
        message = str(error).removeprefix(f"{key}: ")
        what, _, wanted = message.partition("; expected ")
        return [], [Finding(key, shown(folder), f"{wanted} ({what})")]
    except OSError as error:  # a name that is too long, say
        return [], [Finding(key, shown(folder), f"a path that can be used ({error.strerror})")]
    return paths, []


def _evaluation(config: Config, _: int) -> Iterator[Finding]:
    if config.evaluation:
        from kernels.lm import tasks

        yield from tasks.check(config.evaluation)


def _board(config: Config, _: int) -> Iterator[Finding]:
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield Finding("tensorboard", True, "false, or TensorBoard installed: pip install tensorboard")


def _compiler(config: Config, _: int) -> Iterator[Finding]:
    """torch.compile makes C++ on a CPU, and Triton a C program for every kernel; g++ comes with a C compiler."""
    if config.compile and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "clang++"))):
        yield Finding("compile", True, "false, or a compiler installed, such as g++")


def _folder(config: Config, _: int) -> Iterator[Finding]:
    """Whether the run can write there, and whether what is there is of this run."""
    folder = Path(config.folder)
    try:
        folder.exists()
    except OSError as error:
        yield Finding("folder", shown(config.folder), f"a path that can be used ({error.strerror})")
        return
    there = _nearest(folder)
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Finding("folder", shown(config.folder), f"a folder that can be written; {there} cannot")
        return
    for name in ("cache", "checkpoints", "dumps", "tensorboard"):
        if (folder / name).exists() and not (folder / name).is_dir():
            yield Finding("folder", shown(config.folder), f"another: its {name} is no folder")
            return
    for key, given in (("data", config.data), ("validation", config.validation)):
        if given and Path(given.folder).resolve() == folder.resolve():
            right = f"a folder of its own: what is written there would be read as {key}"
            yield Finding("folder", shown(config.folder), right)
    yield from _lines(folder)
    kept = folder / "config.json"
    if not kept.exists():
        return
    now = configs.as_dict(config)
    try:
        earlier = json.loads(kept.read_text(encoding="utf-8"))
        earlier |= {f"data.{key}": earlier["data"][key] for key in ("batch", "length")}
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        yield Finding("folder", shown(config.folder), f"another folder: its {kept.name} is not of such a run")
        return
    now |= {f"data.{key}": now["data"][key] for key in ("batch", "length")}
    for key in ("model", "seed", "precision", "optimizer", "steps", "data.batch", "data.length"):
        if earlier.get(key) != now[key]:
            yield Finding("folder", shown(config.folder), f"another folder: the run in it has another `{key}`")


def _lines(folder: Path) -> Iterator[Finding]:
    """Whether a run that goes on from a checkpoint finds it whole, and the lines of all steps before it."""
    if not (folder / "checkpoints").is_dir():  # what follows imports torch, which takes seconds
        return
    from kernels.lm import checkpoints, metrics

    there = checkpoints.complete(folder / "checkpoints")
    made = max(there, default=0)
    if made and (why := checkpoints.flaw(there[made])):
        yield Finding("folder", shown(str(folder)), f"one whose last checkpoint is whole ({there[made].name}/{why})")
    try:
        written, _ = (len(metrics.before(folder / name, sys.maxsize)) for name in (metrics.FILE, metrics.VALIDATION))
    except (UsageError, OSError) as error:
        yield Finding("folder", shown(str(folder)), f"lines of steps, each whole ({error})")
        return
    if written < made:
        right = f"one whose {metrics.FILE} has a line for each of the {made} steps of its checkpoint; it has {written}"
        yield Finding("folder", shown(str(folder)), right)


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    while not os.path.exists(folder):  # which is false, too, for a name that is too long
        folder = folder.parent
    return folder


def _disk(config: Config, processes: int) -> Iterator[Finding]:
    made = os.path.join(config.folder, "checkpoints")
    there = len(list(Path(made).glob("step_*"))) if os.path.isdir(made) else 0
    need = configs.checkpoint_size(config) * max(1, config.checkpoints.keep + 1 - there)
    need += _tokens(config) + _dumped(config) * _here(processes)
    free = shutil.disk_usage(_nearest(Path(config.folder))).free
    if need > free:
        more = "one more is written before one goes; tokens and dumps are counted"
        right = f"fewer, or {need / GIB:.2g} GiB free: {free / GIB:.2g} are, and {more}"
        yield Finding("checkpoints.keep", config.checkpoints.keep, right)


def _tokens(config: Config) -> int:
    """Bytes of the tokens that are kept beside a run, two for a byte of text at the most; 0 once they are there."""
    if os.path.isdir(os.path.join(config.folder, "cache")):
        return 0
    given = [one for one in (config.data, config.validation) if one]
    return sum(2 * path.stat().st_size for one in given for path in _glanced("", one.folder, one.pattern)[0])


def _dumped(config: Config) -> int:
    """Bytes that a process dumps: gradients, and a file of one number, which takes 4 KiB, for most of what it gives."""
    steps = config.last // config.dumps.every if config.dumps.every else 0
    sizes, wide = configs.parameters(config.model) if steps else {}, 8 if config.precision == "float64" else 4
    return steps * (4096 * (2 * len(sizes) + 4) + sum(wide * sizes.get(name, 0) for name in config.dumps.tensors))


def memory(config: Config, processes: int = 1) -> int:
    """Bytes that a process takes at the least: parameters, gradients, AdamW's moments, and what backward keeps.

    Of each token a layer keeps its input twice and normalised twice, query and key rotated, the value, attention's
    result, gate, up and their product; the logits are kept in float32 and once more for their gradient. In bfloat16
    backward keeps a copy of the weights too.
    """
    sizes, wide = config.model, 8 if config.precision == "float64" else 4
    element = {"bfloat16": 2, "float32": 4, "float64": 8}[config.precision]
    layer = element * (8 * sizes.dim + 3 * sizes.inner)
    copied = element if config.precision == "bfloat16" else 0
    tokens, share = config.tokens // processes, processes if config.parallel == "fsdp" else 1
    return (4 * wide + copied) * configs.count(sizes) // share + tokens * (
        layer * sizes.layers + 2 * wide * sizes.vocabulary
    )


def _memory(config: Config, processes: int) -> Iterator[Finding]:
    need = memory(config, processes)
    if _gpus(config):
        import torch

        have, what = torch.cuda.get_device_properties(0).total_memory, "the GPU has"
    else:
        need, have, what = (
            need * _here(processes),
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "this machine has",
        )
    if need > have:
        right = f"fewer sequences or a smaller model: {need / GIB:.1f} GiB are needed, {what} {have / GIB:.1f}"
        yield Finding("data.batch", config.data.batch, right)


def _gpus(config: Config) -> int:
    """The GPUs that a run would use. torch takes seconds to import, so it is asked only where one may be used."""
    if config.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()
