"""Dumps of other tools as they are: a table of readers, by files that a tool's folder alone has.

Sources: sglang/srt/debug_utils (dumper.py, dump_loader.py), msprobe/core/dump (dump.json), Megatron-LM
(megatron/training/checkpointing.py), torch/distributed/checkpoint (metadata.py, filesystem.py), ONNX Runtime
(core/framework/debug_node_inputs_outputs_utils.cc), torch/utils/_debug_mode. Nothing of a file is run, and what is not
read is named in :attr:`whywrong.Trace.texts`.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whywrong.comparing.comparison import as_tensor
from whywrong.errors import UsageError, first_line, needs
from whywrong.recording.shards import Part, Shards
from whywrong.recording.steps import Read, Trace
from whywrong.recording.tensor_files import Inert, flattened, load_checkpoint, load_file, named_once, natural, only

Dims = Mapping[str, str]
SGLANG = re.compile(
    r"(?P<step>step=\d+)___rank=(?P<rank>\d+)___dump_index=\d+___name=(?P<name>.+?)(?P<tags>(___.+)?)\.pt"
)
CLASSES = {
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}
"""What the metadata of a distributed checkpoint are made of; whatever else they name is inert."""


def as_read(path: Path, steps: Mapping[str, Read], others: Iterable[str] = (), ordered: bool = True) -> Trace:
    """A trace of a dump, whose texts name what was not read. Raises UsageError for no step."""
    left = list(dict.fromkeys(others))
    words = ", ".join(left[:8]) + f" and {len(left) - 8} more" * (len(left) > 8)
    if not steps:
        raise UsageError(f"{path}: expected tensors, got {words or 'none'}")
    return Trace.lazy(steps, {"not read": words} if words else {}, str(path), ordered)


def joined(path: Path, parts: Mapping[str, list[Part]], dims: Dims) -> dict[str, Read]:
    """Steps that are put together as they are read. Raises UsageError for two parts of one rank."""
    for name, held in parts.items():
        ranks = [part.rank for part in held]
        if len({*ranks}) < len(ranks):
            raise UsageError(f"{path}: {name}: expected one part a rank, got two of rank {max(ranks, key=ranks.count)}")
    return {name: Shards(name, sorted(held, key=itemgetter(0)), dims) for name, held in parts.items()}


def _sglang(path: Path, names: Collection[str], dims: Dims) -> Trace:
    """A file a dump, whose name has rank, order and tags; it holds ``value``, and ``meta`` with dims and ranks."""
    files = [match for name in sorted(names, key=natural) if (match := SGLANG.fullmatch(name))]
    several = len({match["step"] for match in files}) > 1
    parts, others, seen = defaultdict[str, list[Part]](list), [], Counter[tuple[int, str]]()
    for match in files:
        file, rank = path / match[0], int(match["rank"])
        tags = [tag for tag in match["tags"].split("___")[1:] if not re.match(r"\w+_rank=|.*=disabled$", tag)]
        step = ".".join([*[match["step"]] * several, *tags, match["name"]])
        seen[rank, step] += 1
        step += f"#{seen[rank, step]}" * (seen[rank, step] > 1)
        held = _held(file)
        if isinstance(held.get("value"), Tensor):
            parts[step].append(Part(rank, partial(_value, file), *_axes(held.get("meta"), file)))
        else:
            others.append(step)
    return as_read(path, joined(path, parts, dims), others)


def _held(path: Path) -> dict[str, Any]:
    loaded = load_checkpoint(path)
    return loaded if isinstance(loaded, dict) else {"value": loaded}


def _value(path: Path) -> Tensor:
    return only(path, _held(path)["value"])


def _axes(meta: Any, path: Path) -> tuple[dict[str, tuple[int, int]], str]:
    """The rank and the size of each parallel axis, and the dims, as SGLang's dumper wrote them."""
    meta = meta if isinstance(meta, dict) else {}
    infos = [info for info in meta.values() if isinstance(info, dict)]
    numbers = {str(key): n for info in infos for key, n in info.items() if type(n) is int}
    names = [key.removesuffix("_size") for key in numbers if key.endswith("_size")]
    axes = {axis: (numbers[f"{axis}_rank"], numbers[f"{axis}_size"]) for axis in names if f"{axis}_rank" in numbers}
    if wrong := [f"{i} of {axis}" for axis, (i, n) in axes.items() if not 0 <= i < n]:
        raise UsageError(f"{path}: expected ranks below the size of their axis, got rank {wrong[0]}")
    return axes, meta["dims"] if isinstance(meta.get("dims"), str) else ""


def _msprobe(path: Path, names: Collection[str], dims: Dims) -> Trace:
    """Calls in order, each with arguments and outputs; those with ``data_name`` are files in dump_tensor_data."""
    file, folder = path / "dump.json", path / "dump_tensor_data"
    about = load_file(file, lambda: json.loads(file.read_text(encoding="utf-8")))
    left, steps, others = [about.get("data") if isinstance(about, dict) else None], dict[str, Read](), []
    while left:
        item = left.pop()
        about = item if isinstance(item, dict) else {}
        left += reversed(item if isinstance(item, list) else [*about.values()])
        if isinstance(name := about.get("data_name"), str):
            if Path(name).name != name or not (folder / name).is_file():
                raise UsageError(f"{file}: names {name!r}, which is missing in {folder}")
            steps[Path(name).stem] = partial(only, folder / name)
        elif str(about.get("type")).endswith("Tensor"):
            others.append("statistics without a tensor (which msProbe's task 'tensor' writes)")
    return as_read(path, steps, others)


class _Metadata(pickle._Unpickler):  # the one in C takes as much memory as a number in the file says
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return super().find_class(module, name) if dtype or name in CLASSES.get(module, ()) else Inert


def _distributed(path: Path, names: Collection[str], dims: Dims) -> Trace:
    """A checkpoint of torch.distributed.checkpoint, of torchtitan and of Megatron: whole tensors by torch's reader.

    That reader unpickles ``.metadata`` with whatever is in it; here only the classes that they consist of are made.
    """
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

    source = path / ".metadata"

    def unpickled() -> Any:
        with source.open("rb") as file:
            about = _Metadata(file).load()
        tensors = {key: x for key, x in about.state_dict_metadata.items() if hasattr(x, "chunks")}
        files = sorted({entry.relative_path for entry in about.storage_data.values()})
        if missing := [file for file in files if file not in names]:
            raise ValueError(f"it names {missing[0]!r}, which is missing")
        packed = any(getattr(entry, "transform_descriptors", None) for entry in about.storage_data.values())
        room = sum((path / file).stat().st_size for file in files)
        for key, x in tensors.items():
            held = sum(prod(chunk.sizes) for chunk in x.chunks)
            if held != prod(x.size) or (not packed and held * x.properties.dtype.itemsize > room):
                raise ValueError(f"{key}: expected {prod(x.size)} elements in its files, got {held} in {room} bytes")
        return about, tensors

    about, tensors = load_file(source, unpickled)

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return about

    def read(name: str) -> Tensor:
        state = {name: torch.zeros(tensors[name].size, dtype=tensors[name].properties.dtype)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is ")  # this is one process
                load(state, storage_reader=Reader(path), no_dist=True)
        except CheckpointException as error:  # which is no Exception
            raise ValueError(first_line(next(iter(error.failures.values()))[0])) from None
        return state[name]

    others = [key for key in about.state_dict_metadata if key not in tensors]
    steps = {name: partial(load_file, source, partial(read, name), f"{name} ") for name in tensors}
    return as_read(path, steps, others, False)


def _megatron(path: Path, names: Collection[str], dims: Dims) -> Trace:
    """The file of one rank of a checkpoint of Megatron-LM that is no distributed one: the model and the optimizer."""
    file = path / "model_optim_rng.pt"
    content = {str(key): value for key, value in _held(file).items()}
    others = [key for key in content if not key.startswith(("model", "optimizer"))]
    steps = named_once(flattened({key: x for key, x in content.items() if key not in others}, file, others), file)
    return as_read(path, {name: partial(steps.get, name) for name in steps}, others, False)


def _onnx(path: Path, names: Collection[str], dims: Dims) -> Trace:
    """A TensorProto a file, named after it."""
    with needs(f"{path}, of ONNX Runtime,"):
        import onnx  # noqa: F401
    files = [path / name for name in sorted(names) if name.endswith(".tensorproto")]
    steps = {file.stem: partial(load_file, file, partial(_tensor_proto, file)) for file in files}
    return as_read(path, steps, (), False)


def _tensor_proto(path: Path) -> Tensor:
    from onnx import TensorProto, numpy_helper

    proto = TensorProto.FromString(path.read_bytes())
    if proto.data_location == TensorProto.EXTERNAL:
        raise ValueError("its numbers are in another file")
    return as_tensor(proto.name, numpy_helper.to_array(proto))


READERS: dict[str, tuple[str, Callable[[Path, Collection[str], Dims], Trace]]] = {
    "torch.distributed.checkpoint": (r"\.metadata", _distributed),
    "msProbe": (r"dump\.json", _msprobe),
    "Megatron-LM": (r"model_optim_rng\.pt", _megatron),
    "SGLang": (SGLANG.pattern, _sglang),
    "ONNX Runtime": (r".*\.tensorproto", _onnx),
}
"""By the name of a tool: the names of files that its dumps alone have, and how a folder of them is opened."""


def open_foreign(path: Path, names: Collection[str], dims: Dims) -> Trace | None:
    """A folder that another tool wrote, with files of these names; None where none of READERS fits."""
    for pattern, read in READERS.values():
        if any(map(re.compile(pattern).fullmatch, names)):
            return read(path, names, dims)
    return None


def refuse_log(path: Path) -> None:
    """Raise UsageError for a log of torch's DebugMode, which has no tensors: what it can tell, and what cannot."""
    with path.open("rb") as file:
        text = file.read(1 << 16).decode("utf-8", "replace")
    if re.search(r"aten::\w+.*->", text):
        has = "a hash of each call" if "'hash'" in text else "calls and shapes"
        tells = "the first line that differs from another run's is the call from which they differ, not by how much"
        instead = "expected tensors, as whywrong.capture(model, x).save(FILE) writes them"
        raise UsageError(f"{path}: a log of DebugMode with {has} and no tensors: {tells}; {instead}")
