"""A TorchDispatchMode that keeps what a PyTorch program does, as a functional program in float64."""

from __future__ import annotations

import itertools
import linecache
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whywrong.comparing.comparison import real
from whywrong.comparing.precision import name_of as dtype_name
from whywrong.errors import UsageError
from whywrong.process_state import attribute
from whywrong.recording.operations import (
    ALGORITHMS,
    ALLOWED,
    ARITHMETIC,
    FROZEN,
    FUNCTIONS,
    IGNORED,
    IN_STORAGE,
    NOT_UNIQUE,
    PRODUCTS,
    SUMS,
    aten,
    decomposition,
    functional,
    instead,
    name_of,
)
from whywrong.recording.program import CONSTANT, INPUT, ITEM, WIDENED_DTYPES, Program, Ref, narrower, widened
from whywrong.torch_private import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    tree_leaves,
    tree_map,
    tree_map_only,
)

OnStep = Callable[[str, Tensor], Tensor | None]
"""Called with a step, and may return a tensor to go on with in its place."""

_LISTENER: ContextVar[tuple[OnStep, dict[int, Tensor]] | None] = ContextVar("listener", default=None)
"""Who observes a :func:`step` in this thread: the innermost recording, and the tensors that have a name there."""

_OBSERVERS: list[OnStep] = []
"""The recordings in progress, in all threads. While there are none, a :func:`step` in a compiled model is nothing: the
compiler cannot read a context variable, and would end its graph there."""

BACKWARD = "backward"
"""The path of operations that compute gradients."""

NARROW_DTYPES = (torch.bfloat16, torch.float16)


def step(name: str, tensor: Tensor) -> Tensor:
    """Name an intermediate tensor, so that it is a step. Outside a recording nothing happens. Returns the tensor.

    A tensor that has a name is another step under another one: a copy of it, as the weights that a model takes may be a
    narrower copy of those that an optimiser keeps. What takes the copy takes what is returned.

    Raises UsageError for what is no tensor, and a name that is no text.
    """
    if not isinstance(tensor, Tensor) or not isinstance(name, str):
        raise UsageError(f"step {name!r:.40}: expected a name, then a tensor, got a {type(tensor).__name__}")
    if _OBSERVERS and (listener := _LISTENER.get() or _of_modes()) is not None:
        on_step, named = listener
        tensor = tensor.clone() if id(tensor) in named else tensor
        named[id(tensor)] = tensor  # kept, lest another has its id
        tensor = instead_of(tensor, on_step(name, real(tensor)))
    return tensor


def instead_of(tensor: Tensor, other: Tensor | None) -> Tensor:
    """What an :data:`OnStep` gave in place of a tensor: of complex numbers it has the parts."""
    return tensor if other is None else torch.view_as_complex(other) if tensor.is_complex() else other


@contextmanager
def listening(on_step: OnStep, watcher: Watcher | None = None) -> Iterator[None]:
    """Have `on_step(name, tensor)` called for each :func:`step` in this thread, and below `watcher` in any.

    Autograd computes the gradients of a GPU in a thread of its own, to which torch passes on its modes alone.
    """
    listener = on_step, dict[int, Tensor]()
    token = _LISTENER.set(listener)
    _OBSERVERS.append(on_step)
    if watcher is not None:
        watcher.listener = listener
    try:
        yield
    finally:
        _OBSERVERS.remove(on_step)
        _LISTENER.reset(token)
        if watcher is not None:
            watcher.listener = None  # which refers to the recording, and would keep it alive


def _of_modes() -> Any:
    """Who observes by the innermost watcher among torch's modes."""
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode.listener for mode in modes if isinstance(mode, Watcher)), None)


def unique(name: str, taken: Any, last: Counter[str]) -> str:
    """`name`, or with #2, #3 and so on behind it where it is taken; `last` has the number that a name had last."""
    numbered = ((k, f"{name}#{k}" if k > 1 else name) for k in itertools.count(last[name] + 1))
    last[name], found = next((k, candidate) for k, candidate in numbered if candidate not in taken)
    return found


class Watcher(TorchDispatchMode):
    """Calls `on_step(name, tensor)` for each floating-point operation that computes something, below a module.

    It appends to `narrow` what was computed in a narrower way than its dtype says, and the fields of a Precision that
    say so: results of kernels that add up in the narrow type of what they give, and gradients that were computed in a
    narrow type, as below autocast, and then cast to a wider one.

    `path` is that module's, and ``backward`` while gradients are computed. Operations are named as they were called,
    whatever they are made of: ``layers.0.attention/_softmax``.
    """

    def __init__(self, on_step: OnStep, narrow: list[tuple[Tensor, dict[str, str]]]) -> None:
        super().__init__()
        self.path = ""
        self.listener: Any = None
        self.on_step, self.narrow = on_step, narrow

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch, which would import its compiler to leave the next function out of it: two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.report(func, args, out)
        return out

    def report(self, func: Any, args: Any, out: Any) -> None:
        """Report what an operation computed, if it is one that computes, or a cast that rounds."""
        name = name_of(func).removesuffix("_")
        if name == "_to_copy" and narrower(dtype_name(out.dtype), dtype_name(args[0].dtype)):
            self.computed(f"{self.path}/to", out)
        if (
            name == "_to_copy"
            and self.path == BACKWARD
            and args[0].dtype in NARROW_DTYPES
            and out.dtype not in NARROW_DTYPES
        ):
            self.narrow.append((out, {"storage": dtype_name(args[0].dtype)}))
        if name in IGNORED or (name in ALLOWED and name not in COMPUTING):
            return
        if name == "add" and self.path == BACKWARD:  # autograd adds gradients up in an order of its own
            of = {a.data_ptr() for a in args if isinstance(a, Tensor)}
            self.narrow += [(out, fields) for x, fields in self.narrow if x.data_ptr() in of][:1]
            return
        parts = out if isinstance(out, (tuple, list)) else (out,)
        if name in IN_STORAGE or (name == "convolution" and args[6]):  # transposed
            summed = (x for x in parts if isinstance(x, Tensor) and x.is_cpu and x.dtype in NARROW_DTYPES)
            self.narrow += [(x, {"accumulate": dtype_name(x.dtype)}) for x in summed]
        parts = parts[1:] if name == "_linalg_svd" else parts  # its values; vectors may have another sign
        for value in [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()][:1]:
            self.computed(f"{self.path}/{name}", value)  # the result; others are kept for the backward

    def computed(self, name: str, tensor: Tensor) -> None:
        """Called for each operation that computes something."""
        self.on_step(name, tensor)


COMPUTING = frozenset({"relu", "masked_fill", "where"}) | ARITHMETIC | PRODUCTS | SUMS | FUNCTIONS | ALGORITHMS
"""Of the operations that a program holds, those whose results have a name; whatever is composite has one too."""


class Recorder(Watcher):
    """Records into `program`, which is in float64. Everything runs so too, whatever dtype the program asks for; or
    `as_written`, so that casts are seen."""

    def __init__(self, as_written: bool = False) -> None:
        super().__init__(lambda name, tensor: None, [])
        self.operations: dict[str, int] = {}
        """Numbers of what operations computed, by their names."""
        self._last = Counter[str]()
        self._as_written = as_written
        self.program = Program()
        self.notes: dict[str, None] = {}
        self._at: dict[int, dict[tuple[Any, ...], int]] = defaultdict(dict)  # by storage: numbers of what is there now
        self._flat: dict[int, int] = {}  # storages that were written to: the number of their contents, in one row
        self._alive: list[Tensor] = []  # memory that is freed would be taken for what comes after it
        self._wide: dict[tuple[Any, ...], Tensor] = {}  # narrower tensors from outside, by their memory: in float64
        self._blank: set[int] = set()  # new memory, into which C++ may put numbers that no operation shows
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        name = name_of(func)
        if not self._inside:
            self.program.site = "" if self.path == BACKWARD else _site()
        if name in IGNORED:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                self.bind(out, self.number(args[0]))
            return out
        if torch.Tag.nondeterministic_seeded in func.tags and name not in ("native_dropout", "dropout"):
            return self._sampled(func, name, args, kwargs)
        if name.startswith(("empty", "new_empty")):
            out = func(*args, **kwargs)
            self._blank.add(number := self.program.add(CONSTANT, value=torch.zeros_like(out)))
            self.bind(out.zero_(), number)
            return out
        if name in FROZEN:
            note = "a tensor became a Python number: a branch or a size that it decides is the same for all inputs"
            self.notes[f"{self._line}: {note}"] = None
            return func(*args, **kwargs)
        if func._schema.is_mutable and not name.startswith("_foreach_"):
            return self._in_place(func, name, args, kwargs)
        if name not in ALLOWED or (name == "convolution" and args[2] is not None):
            return self._composite(func, name, args, kwargs)
        if "unique" in name and args[0].is_floating_point():  # rounding would change how many there are
            raise self._refused(f"{func} of real numbers", "cannot be recorded; write it of whole numbers")
        out = func(*args, **kwargs)
        self._keep(func, args, kwargs, out)
        if not self._inside:
            self.report(func, args, out)
        return out

    def input(self, tensor: Tensor) -> int:
        """Take a float64 or integer tensor as an input of the program."""
        number = self.program.add(INPUT, value=tensor.detach().clone())
        self.bind(tensor, number)
        return number

    def computed(self, name: str, tensor: Tensor) -> None:
        """Number what an operation computed. A callback that refers to the recorder would keep it alive."""
        self.operations[unique(name, self.operations, self._last)] = self.number(tensor)

    def number(self, tensor: Tensor) -> int:
        """The number of what a tensor holds now; a constant where nothing that was recorded made it."""
        storage, place = _key(tensor)
        if (known := self._at[storage].get(place)) is not None:
            if known in self._blank and bool(tensor.any()):
                self.program.values[known] = widened(tensor.detach().clone())
            return known
        if storage in self._flat:  # written to through another view since
            view = (Ref(self._flat[storage]), *place[:3])
            number = self.program.add(aten.as_strided.default, view, value=tensor.detach().clone())
        else:
            number = self.program.add(CONSTANT, value=real(tensor.detach()).clone())
            if tensor.is_complex():
                number = self.program.add(aten.view_as_complex.default, (Ref(number),), value=tensor.detach())
            if tensor.ndim and self.path != BACKWARD:
                self.notes.setdefault(f"a tensor of shape {tuple(tensor.shape)} came from outside and is a constant")
        self.bind(tensor, number)
        return number

    def bind(self, tensor: Tensor, number: int) -> None:
        """Take a tensor, as it is now, for what the operation of that number gave."""
        storage, place = _key(tensor)
        self._at[storage][place] = number
        self._alive.append(tensor)

    def _refused(self, what: Any, why: str) -> UsageError:
        return UsageError(f"golden: {what} at {self._line} {why}")

    @property
    def _line(self) -> str:
        """Where in the reference, without the line's text."""
        return ":".join(self.program.site.split(":")[:2]) or "the backward"

    def _widened(self, value: Any) -> Any:
        """float64 in place of a narrower floating-point dtype or tensor."""
        if isinstance(value, torch.dtype):
            return value if self._as_written else WIDENED_DTYPES.get(value, value)
        if not isinstance(value, Tensor):
            return value
        if value.is_quantized or value.layout != torch.strided:
            kind = f"a {value.dtype} tensor of layout {value.layout}"
            raise UsageError(f"golden: expected dense numbers, got {kind}")
        if self._as_written or value.dtype not in WIDENED_DTYPES:
            return value
        key = _key(value)
        if key not in self._wide:
            self._wide[key] = value.detach().to(WIDENED_DTYPES[value.dtype])
            self._alive.append(value)
        return self._wide[key]

    def _keep(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        named = {key: value for key, value in kwargs.items() if key not in _PLACES}
        named, args = tree_map_only(Tensor, lambda x: Ref(self.number(x)), (named, args))
        number = self.program.add(func, args, named, out)
        if name_of(func) in NOT_UNIQUE:
            self.notes[f"{NOT_UNIQUE[name_of(func)]} are right with either sign: compare what is made of them"] = None
        if isinstance(out, Tensor):
            self.bind(out, number)
        for i, part in enumerate(out if isinstance(out, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self.bind(part, self.program.add(ITEM, (Ref(number), i), value=part))

    def _parts(self, run: Callable[[], Any]) -> Any:
        """What `run` gives; its operations are recorded, and reported as the one that they are parts of."""
        with attribute(self, "_inside", True), self:
            return run()

    def _composite(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        first, way = len(self.program.nodes), decomposition(func) or func.decompose
        out = self._parts(lambda: way(*args, **kwargs))
        if out is NotImplemented and not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            self.bind(out := func(*args, **kwargs), self.program.add(CONSTANT, value=out))  # a window, say
        if out is NotImplemented:
            raise self._refused(func, f"cannot be recorded; write {instead(name)}")
        if not self._inside:
            results = {self.number(x) for x in tree_leaves(out) if isinstance(x, Tensor)}
            self.program.inside |= set(range(first, len(self.program.nodes))) - results
            self.report(func, args, out)
        return out

    def _sampled(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise self._refused(func, "samples more than one tensor, and cannot be recorded")
        self.notes[f"{name} is random: what was sampled is kept as a constant"] = None
        number = self.program.add(CONSTANT, value=out.detach().clone())
        if func._schema.is_mutable:
            self._written(out, number)
        self.bind(out, number)
        return out

    def _in_place(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """x.op_(...) becomes a new value, put into the memory that x is a view of."""
        written = [i for i, argument in enumerate(func._schema.arguments) if argument.is_write]
        place = func._schema.arguments[written[0]].name
        target = args[written[0]] if written[0] < len(args) else kwargs.get(place)
        pure = functional(func)
        if any(target is x for x in self._wide.values()):
            raise self._refused(func, "writes to a tensor from outside the program")
        if len(written) > 1 or not isinstance(target, Tensor) or not (pure or name in ("copy_", "zero_", "fill_")):
            raise self._refused(func, f"writes in place and cannot be recorded; write {instead(name)}")
        named = {key: value for key, value in kwargs.items() if key != place or name.endswith("_")}

        def value() -> Tensor:
            if name == "copy_":
                return args[1].to(target.dtype).expand(target.shape).clone()
            if name in ("zero_", "fill_"):
                return torch.full_like(target, 0) if name == "zero_" else torch.zeros_like(target) + args[1]
            return pure(*args, **named)

        number = self.number(self._parts(value))
        out = func(*args, **kwargs)
        self._written(target, number)
        if not self._inside:
            self.report(func, args, out)
        return out

    def _written(self, target: Tensor, number: int) -> None:
        """`target` was written to and holds what `number` computed; every view of its memory sees that."""
        storage, place = _key(target)
        count = target.untyped_storage().nbytes() // target.element_size()
        if (before := self._flat.get(storage)) is None and target.numel() < count:
            before = self._contents(target, count)
        self._flat[storage] = self._row(number, place, count, before)
        self._at[storage].clear()
        self.bind(target, number)

    def _contents(self, target: Tensor, count: int) -> int:
        """The contents of a tensor's whole storage, in one row: from a tensor that covers it, else a constant."""
        for place, number in self._at[_key(target)[0]].items():
            if math.prod(place[0]) == count:
                return self._row(number, place, count)
        row = target.new_empty(0).set_(target.untyped_storage(), 0, (count,), (1,))
        return self.program.add(CONSTANT, value=row.clone())

    def _row(self, number: int, place: tuple[Any, ...], count: int, row: int | None = None) -> int:
        """A row of `count` elements with a result in its place, and elsewhere what `row` has, or zeros."""
        if row is None:
            row = self.program.add(aten.zeros.default, ([count],), {"dtype": place[3]}, shape=[count])
        return self.program.add(aten.as_strided_scatter.default, (Ref(row), Ref(number), *place[:3]), shape=[count])


_PLACES = ("device", "layout", "pin_memory", "memory_format", "generator", "non_blocking")
"""Arguments that say where, not what."""


_BETWEEN = (__name__, "whywrong.recording.golden")
"""Modules of this package that stand between a reference and what records it."""


def _site() -> str:
    """The line of the reference that called an operation, outside of torch; nothing where no line of it did.

    A gradient on a GPU is made in a thread of torch's own, where no line of the reference stands.
    """
    frame: Any = sys._getframe(1).f_back  # none, where torch calls from a thread of its own
    while frame and ((module := frame.f_globals.get("__name__", "")).startswith("torch.") or module in _BETWEEN):
        frame = frame.f_back
    if not frame or module.startswith("whywrong."):
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{_file(frame.f_code.co_filename)}:{frame.f_lineno}: {text}"


def _file(name: str) -> str:
    """A file's name without its folder; of a cell of a notebook, as In[1]."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(name) if shell is not None else None
    return cell[1] if cell else Path(name).name


def _key(tensor: Tensor) -> tuple[int, tuple[Any, ...]]:
    """A tensor's storage; and its shape, stride and offset there, its dtype, and whether it is a lazy conjugate."""
    how = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return tensor.untyped_storage()._cdata, (*how, tensor.dtype, tensor.is_conj(), tensor.is_neg())
