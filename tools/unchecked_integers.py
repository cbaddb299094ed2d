"""Which operations do not check their integers, and read or write memory outside of a tensor?

    pip install expecttest  # which torch's samples of its operations need
    python -m tools.unchecked_integers [--only NAME ...] [--out FILE.csv]

Every operation that a program may hold is run on torch's samples with one argument changed: integers, in tensors, in
lists and by themselves, that are negative, too large, fewer or more, of another type, or another argument's; tensors of
other shapes, which integers may not fit any longer; numbers that a kernel may take for a place. Each runs in a child
process, in which memory is as usual, begins behind a page that nothing may touch, or ends before one (`guard_pages.c`,
which needs a C compiler and Linux). Printed are the operations whose process a signal ended: `UNCHECKED` of
`whywrong/recording/operations.py` has them. With --checked it is none.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whywrong.explaining.part import Checked
from whywrong.recording.operations import ALLOWED, UNCHECKED, aten, full_name, functional, name_of, resolve
from whywrong.recording.program import Node, Program, call, filled
from whywrong.recording.recorder import _PLACES
from whywrong.torch_private import TorchDispatchMode, tree_leaves, tree_map_only

SOURCE = Path(__file__).with_name("guard_pages.c")
PLACES = ("as usual", "behind a guard page", "before a guard page")
CALLS_OF_ONE, ELEMENTS = 10, 2**17
"""Calls of an overload that are tried, each of other types; and the largest tensor that one takes."""
SECONDS = 5
"""Of a processor's time that a call may take; then SIGPROF ends it."""
ADDRESS_SPACE = 4 * 2**30
"""Bytes that a process may have."""
EXEMPT = {
    "convolution_backward": "an output_padding of 2^31 or more",
    "div": "the smallest int64 by -1",
    "lcm": "the smallest int64",
}
"""Found, and not in UNCHECKED: by numbers that no mutation gives."""
NUMBERS = (-1, -2, -1000, 0, 1, 1000, 2**31, 2**40, -(2**40), 2**63 - 1, -(2**63))


class Called(NamedTuple):
    """One call of an operation; `name` is its full name."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Ended(NamedTuple):
    """A call that a signal ended."""

    name: str
    change: str
    place: str
    by: str


# What is called


class _Calls(TorchDispatchMode):
    """Keeps the calls of operations that a program may hold, a few of each overload."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, Called] = {}
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pure = functional(func) if func._schema.is_mutable else func
        if pure is not None and name_of(pure) in ALLOWED:
            self.keep(pure, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kwargs = {key: x for key, x in kwargs.items() if key not in _PLACES}
        name, leaves = full_name(func), tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        dense = all(x.layout == torch.strided and x.numel() <= ELEMENTS and not x.is_meta for x in tensors)
        kinds = (name, *((x.dtype, x.ndim) if isinstance(x, Tensor) else (type(x), str(x)) for x in leaves))
        if dense and kinds not in self.found and self.count[name] < CALLS_OF_ONE:
            self.count[name] += 1
            copied = tree_map_only(Tensor, lambda x: x.detach().clone(), (tuple(args), kwargs))
            self.found[kinds] = Called(name, *copied)


def samples() -> list[Called]:
    """What torch's own samples of its operations call, forwards and backwards, and a few of ours for what they lack."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(0)
    calls = _Calls()
    for op in op_db:
        for dtype in {torch.float64, torch.int64, torch.complex128} & op.supported_dtypes("cpu"):
            for with_gradient in {False, dtype.is_floating_point and op.supports_autograd}:
                try:
                    _run_samples(op, dtype, with_gradient, calls)
                except Exception as error:
                    print(f"{op.name}, {dtype}: {str(error)[:80]}", file=sys.stderr)
    for func, *args in _more():
        calls.keep(func, args, {})
    missing = ALLOWED - {name.split(".")[0] for name in calls.count} - {"getitem"}
    if missing:
        raise SystemExit(f"no call is known of {', '.join(sorted(missing))}: add some to _more")
    return list(calls.found.values())


def _run_samples(op: Any, dtype: torch.dtype, with_gradient: bool, calls: _Calls) -> None:
    for _, sample in zip(range(16), op.sample_inputs("cpu", dtype, requires_grad=with_gradient), strict=False):
        with calls:
            results = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
            some = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
            if some:
                torch.autograd.backward(some, [torch.ones_like(x) for x in some])


def _more() -> Iterator[tuple[Any, ...]]:
    """Calls of operations that torch's samples do not reach."""
    x, i = torch.arange(12.0, dtype=torch.float64).view(3, 4), torch.arange(12).view(3, 4)
    image, volume = torch.rand(1, 2, 5, 6, dtype=torch.float64), torch.rand(1, 2, 4, 6, 8, dtype=torch.float64)
    yield from ((aten.__lshift__.Scalar, i, 2), (aten.__rshift__.Scalar, i, 2), (aten._neg_view.default, x))
    yield from ((aten._is_all_true.default, i > 3), (aten._is_any_true.default, i > 3), (aten.isfinite.default, x))
    yield from ((aten.argsort.default, x), (aten.reshape.default, x, [4, 3]), (aten.resolve_conj.default, x))
    yield aten.unique_dim.default, i, 0, True, True, True
    yield aten._int_mm.default, torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    yield aten._upsample_bicubic2d_aa.default, image, [3, 4], False
    yield aten._upsample_bicubic2d_aa_backward.default, image, [5, 6], [1, 2, 7, 8], False
    yield aten.upsample_nearest3d_backward.default, volume, [4, 6, 8], [1, 2, 2, 3, 4]
    norm = x.square().sum(1, True).sqrt()
    yield aten._weight_norm_interface_backward.default, x, x + 1.0, norm, norm, 0
    bags, offsets = torch.tensor([0, 2, 1, 1, 2]), torch.tensor([0, 2])
    for mode in range(3):
        yield aten._embedding_bag_forward_only.default, x, bags, offsets, False, mode
        _, of, sizes, largest = aten._embedding_bag.default(x, bags, offsets, False, mode)
        yield (
            aten._embedding_bag_dense_backward.default, x[:2], bags, of, sizes, largest, 3, False, mode, None,
        )  # fmt: skip


def recorded(program: Program) -> list[Called]:
    """What a recorded program calls."""
    calls, values = _Calls(), program.run(range(len(program.nodes)), {}, range(len(program.nodes)))
    for node in (node for node in program.nodes if not isinstance(node.func, str)):
        calls.keep(node.func, filled(node.args, values), {k: filled(x, values) for k, x in node.kwargs.items()})
    return list(calls.found.values())


# How it is changed


def changes(called: Called) -> Iterator[tuple[str, Called]]:
    """The call as it is, and with one argument changed, each with words for it."""
    yield "as it is", called
    args = dict(enumerate(called.args)) | called.kwargs
    tensors = {key: x for key, x in args.items() if isinstance(x, Tensor)}
    whole = {key: x for key, x in tensors.items() if _integer(x)}
    size = max((n for x in tensors.values() for n in x.shape), default=1)
    for key, value in args.items():
        for words, other in _others(value, size):
            yield f"argument {key}: {words}", _with(called, {key: other})
        for other_key in tensors.keys() - {key} if key in tensors else ():
            yield f"argument {key}: argument {other_key}", _with(called, {key: tensors[other_key]})
            if key in whole and other_key in whole:
                both = {key: whole[other_key], other_key: value}
                yield f"argument {key}: exchanged with argument {other_key}", _with(called, both)


def _integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _with(called: Called, new: Mapping[Any, Any]) -> Called:
    args = tuple(new.get(k, x) for k, x in enumerate(called.args))
    return Called(called.name, args, {key: new.get(key, x) for key, x in called.kwargs.items()})


def _others(value: Any, size: int) -> Iterator[tuple[str, Any]]:
    """Other values of an argument: of integers, of lists of something, of a tensor's shape and type."""
    if isinstance(value, Tensor):
        if _integer(value):
            yield from _other_integers(value, size)
        elif value.dtype != torch.bool:  # numbers that a kernel makes an integer of
            largest = torch.finfo(value.dtype).max
            for new in (math.nan, math.inf, -math.inf, largest, -largest, min(2.0**19, largest), -30000.0):
                yield f"{new} everywhere", torch.full_like(value, new)
        yield from _other_shapes(value)
    elif isinstance(value, bool):
        yield str(not value), not value
    elif isinstance(value, int):
        for new in dict.fromkeys((*NUMBERS, value + 1, value - 1, 2 * value, size)):
            yield str(new), new
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            for words, other in _others(item, size):
                yield f"[{k}] {words}", [*value[:k], other, *value[k + 1 :]]
        if value:
            yield "one fewer", [*value[:-1]]
            yield "one more", [*value, value[-1]]
            yield "in reverse", [*value[::-1]]


def _other_integers(x: Tensor, size: int) -> Iterator[tuple[str, Tensor]]:
    limits = torch.iinfo(x.dtype)
    for n in dict.fromkeys((*NUMBERS, size)):
        if limits.min <= n <= limits.max:
            yield f"{n} everywhere", torch.full_like(x, n)
            if x.numel():
                last = x.clone(memory_format=torch.contiguous_format)
                last.view(-1)[-1] = n
                yield f"{n} at the end", last
    yield "one more", x + 1
    yield "one less", x - 1
    yield f"{size} more", x + size
    yield "counted", torch.arange(x.numel()).view(x.shape).to(x.dtype)
    yield "counted down", torch.arange(x.numel()).flip(0).view(x.shape).to(x.dtype)
    for dtype in {torch.int32, torch.int64, torch.uint8} - {x.dtype}:
        yield f"as {dtype}", x.to(dtype)


def _other_shapes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    for d, n in enumerate(x.shape):
        for new in {k for k in (0, 1, n - 1, n // 2) if 0 <= k < n}:
            yield f"{new} of {n} in dimension {d}", x.narrow(d, 0, new)
        yield f"twice in dimension {d}", torch.cat([x, x], d)
        yield f"without dimension {d}", x.select(d, 0) if n else x.new_zeros([*x.shape[:d], *x.shape[d + 1 :]])
    yield "flat", x.flatten()
    yield "of one more dimension", x[None]
    if x.ndim > 1:
        yield "transposed", x.transpose(-1, -2)
    yield "of another kind", x.double() if _integer(x) else x.real.long()
    yield "in float32", x.real.float()


# Where it runs


def ended(calls: Sequence[Called], checked: bool = False, places: Sequence[str] = PLACES, jobs: int = 2) -> list[Ended]:
    """The changed calls that a signal ended: of all, or of those that :class:`Checked` lets through."""
    workers = list[subprocess.Popen[str]]()
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "guard_pages.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, str(SOURCE), "-ldl"], check=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LD_PRELOAD": library}
        try:
            for k in range(jobs):
                torch.save([tuple(each) for each in calls[k::jobs]], Path(folder) / str(k))
                command = [sys.executable, "-m", "tools.unchecked_integers", "--calls", str(Path(folder) / str(k))]
                command += ["--checked"] * checked + ["--places", *places]
                workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            lines = [line for worker in workers for line in worker.communicate()[0].splitlines()]
        finally:
            for worker in workers:
                worker.kill()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"workers ended with {[worker.returncode for worker in workers]}")
    return [Ended(*json.loads(line)) for line in lines]


def _work(path: Path, checked: bool, places: Sequence[str]) -> None:
    """Run the calls of a file; print those that a signal ended, a line of JSON each."""
    for called in (Called(*each) for each in torch.load(path, weights_only=False)):
        some = list(changes(called))
        for place, words in ((PLACES.index(words), words) for words in places):
            first = 0
            while first < len(some):
                last, by = _forked(some, first, place, checked)
                if by:
                    print(json.dumps(Ended(called.name, some[last][0], words, by)), flush=True)
                first = last + 1


def _forked(some: Sequence[tuple[str, Called]], first: int, place: int, checked: bool) -> tuple[int, str]:
    """Run changes in a child, from `first` on: the last that was begun, and the signal that ended it, if one did."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(read)
            _run(some, first, place, checked, write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        begun = pipe.read()
    _, status = os.waitpid(child, 0)
    last = struct.unpack("<i", begun[-4:])[0] if begun else first
    return last, signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""


def _run(some: Sequence[tuple[str, Called]], first: int, place: int, checked: bool, write: int) -> None:
    for stream in (1, 2):  # libraries print too
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if place == 0:  # elsewhere the pages have a limit of their own
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    warnings.simplefilter("ignore")
    guard, node, check = ctypes.CDLL(None), Node(0, resolve(some[0][1].name)), Checked() if checked else nullcontext()
    if checked:
        with check:
            call(node, *some[0][1][1:])
        check.trusted = False
    for k in range(first, len(some)):
        os.write(write, struct.pack("<i", k))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            guard.place(place)
            args, kwargs = tree_map_only(Tensor, Tensor.clone, some[k][1][1:])
            with check:
                call(node, args, kwargs)
        except Exception:  # it has checked what it was given
            pass
        finally:
            guard.place(0)
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="operations, by their names without an overload")
    parser.add_argument("--out", type=Path, help="a CSV of every call that a signal ended")
    parser.add_argument("--calls", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checked", action="store_true", help="of what whywrong.explain lets through alone")
    parser.add_argument("--places", nargs="*", choices=PLACES, default=PLACES, help="where memory is, all by default")
    options = parser.parse_args()
    if options.calls:
        _work(options.calls, options.checked, options.places)
        return
    calls = [each for each in samples() if not options.only or each.name.split(".")[0] in options.only]
    found = ended(calls, options.checked, options.places)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Ended._fields, *found])
    print(f"torch {torch.__version__}: {len(calls)} calls of {len({each.name for each in calls})} operations")
    by_name = defaultdict[str, list[Ended]](list)
    for each in found:
        by_name[each.name.split(".")[0]].append(each)
    for name, some in sorted(by_name.items()):
        where = Counter(f"{each.by} {each.place}" for each in some)
        known = "" if name in UNCHECKED else f", by {EXEMPT[name]}" if name in EXEMPT else ", not in UNCHECKED"
        print(f"{name}{known}: " + ", ".join(f"{count} {words}" for words, count in where.items()))
    if not options.checked:
        print(f"in UNCHECKED and not found: {', '.join(sorted(UNCHECKED.keys() - by_name.keys())) or 'none'}")


if __name__ == "__main__":
    main()
