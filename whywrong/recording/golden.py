"""The golden reference as a recorded program: what a reference computes in float64, any part of which can be run
again."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whywrong.comparing.comparison import compare
from whywrong.comparing.precision import UNIT_ROUNDOFF, name_of
from whywrong.console import without_collector
from whywrong.errors import UsageError, did_you_mean, first_line
from whywrong.process_state import float64_by_default, process_wide
from whywrong.recording.dumps import open_dump
from whywrong.recording.operations import ALGORITHMS, TRANSFORMS, full_name, resolve
from whywrong.recording.program import CONSTANT, INPUT, ITEM, Node, Program, Ref, call
from whywrong.recording.recorder import NARROW_DTYPES, Recorder, unique
from whywrong.recording.steps import Trace, write_safetensors
from whywrong.recording.watching import (
    GRADIENT,
    OUTPUT,
    Named,
    check_subject,
    leaves_of,
    run_watched,
    snapshot,
    tensors_held,
    tensors_of,
)
from whywrong.torch_private import tree_leaves, tree_map_only

VERSION = "golden 1"
"""What a file says that :meth:`Golden.save` wrote."""

MOST_NODES, MOST_ELEMENTS, MOST_FLOPS = 1 << 18, 1 << 33, 10**13
"""What a program from a file may take: operations, elements of all results together (64 GiB), multiplications and
additions of its products (ten minutes on two CPU cores)."""

FEW_ELEMENTS, FEW_FLOPS, PER_ELEMENT = 1 << 26, 10**10, 1 << 14
"""What any program may take, and how many times more an element that it is given: a small file asks for little."""


@dataclass(eq=False, repr=False)
class Golden:
    """A reference that was recorded. `steps` maps names to numbers of operations of `program`, in their order.

    ``golden[name]`` is a step's value, a tensor of the reference's shape, float64 where it is of real numbers. Inputs
    are among the steps, and `known` are values that are not run again, by the numbers of their operations. `operations`
    maps the names of single operations likewise; they serve as steps where an observed trace has them too. `notes` say
    what is frozen as it was when it was recorded, and `parameters` which inputs are a module's own. `results` are the
    names of the reference's result, and `narrowest` is the narrowest floating-point dtype that was given to it.
    """

    program: Program
    steps: dict[str, int]
    operations: dict[str, int]
    notes: list[str] = field(default_factory=list)
    known: dict[int, Tensor] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    narrowest: str = ""

    def __post_init__(self) -> None:
        self.steps = dict(sorted(self.steps.items(), key=lambda item: item[1]))
        self.operations = dict(sorted(self.operations.items(), key=lambda item: item[1]))

    @property
    def names(self) -> list[str]:
        """The steps' names, in the order in which they were computed."""
        return list(self.steps)

    @property
    def inputs(self) -> list[str]:
        """The names of the steps that were given to the reference."""
        return [name for name, i in self.steps.items() if self.program.nodes[i].func == INPUT]

    def value(self, number: int) -> Tensor:
        """What an operation gave in the golden run; it is kept, and so are all steps when one is asked for."""
        if number not in self.known:
            targets = set(self.steps.values()) if number in self.steps.values() else {number}
            self.known = self.program.run(self.program.cone(targets, ()), {}, targets) | self.known
        return self.known[number]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.steps and name not in self.operations:
            raise KeyError(f"{name!r} is no step; {did_you_mean(name, self.steps)}it has {', '.join(self.steps)}")
        return self.value(self.steps[name] if name in self.steps else self.operations[name])

    def widened(self, name: str, observed: Tensor) -> Tensor:
        """An observed step in the golden's dtype, on its device; the golden's own tensor where all numbers are its."""
        own = self[name]
        observed = observed.to(own)
        equal = torch.equal(observed, own) and torch.equal(observed.signbit(), own.signbit())  # -0.0 is not 0.0
        return own if equal else observed

    def __contains__(self, name: object) -> bool:
        return name in self.steps

    def __iter__(self) -> Iterator[str]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def to(self, device: str | torch.device) -> Golden:
        """The same golden with its values on a device."""
        values, known = tree_map_only(Tensor, lambda v: v.to(device), (self.program.values, self.known))
        return replace(self, program=replace(self.program, values=values), known=known)

    def with_steps(self, names: Iterable[str]) -> Golden:
        """The same golden, with these single operations among its steps."""
        return replace(self, steps=self.steps | {name: self.operations[name] for name in names})

    def stacked(self, names: list[str], step: str) -> Golden:
        """The same golden with one more `step`: those of `names`, of one shape and dtype, along a new first dimension.

        What comes after one of them is computed from a copy of it, which has its name: so each can be computed from the
        others as they were observed.
        """
        program, at, number = Program(), dict[int, int](), dict[int, int]()
        some = [self.steps[name] for name in names]
        first = self.program.nodes[some[0]]
        for node in self.program.nodes:
            at[node.id] = number[node.id] = program.copy(node, number, self.program.values)
            if node.id in some:
                again = replace(node, func=torch.ops.aten.alias.default, args=(Ref(node.id),), kwargs={})
                number[node.id] = program.copy(again, number, {})
        program.inside, program.backward = ({at[i] for i in s} for s in (self.program.inside, self.program.backward))
        stack = program.add(
            torch.ops.aten.stack.default, ([Ref(at[i]) for i in some],), shape=(len(some), *first.shape)
        )
        program.nodes[stack].dtype, program.nodes[stack].site = first.dtype, first.site
        steps, operations = ({n: m[i] for n, i in s.items()} for s, m in ((self.steps, number), (self.operations, at)))
        return replace(self, program=program, steps=steps | {step: stack}, operations=operations, known={})

    def trace(self) -> Trace:
        """The steps as a trace, float64; of two names for one tensor the first."""
        return Trace({name: self[name] for i, name in sorted({i: n for n, i in reversed(self.steps.items())}.items())})

    def __repr__(self) -> str:
        made = len(self.steps) - len(self.inputs)
        lines = [f"golden: {len(self.program.nodes)} operations, {len(self.inputs)} inputs, {made} steps"]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def save(self, path: Path | str) -> Path:
        """Write one safetensors file: inputs and constants as tensors, the program as JSON in its metadata.

        Raises UsageError for what depends on values in a way that cannot be checked before it runs.
        """
        try:
            _run_without_data(self.program)
        except Exception as error:
            why = "its program cannot be checked without its data and is not saved"
            raise UsageError(f"golden: {why} ({error})") from None
        every, inside = self.program.nodes, sorted(self.program.inside)
        nodes = [(full_name(n.func), n.args, {"named": n.kwargs}, n.shape, n.dtype, n.site) for n in every]
        text = {"nodes": nodes, "inside": inside, "steps": self.steps, "operations": self.operations}
        text |= {"notes": self.notes, "parameters": self.parameters}
        text |= {"results": self.results, "narrowest": self.narrowest}
        about = {"program": json.dumps(text, default=_encoded), "whywrong": VERSION, "torch": torch.__version__}
        tensors = {str(i): v.detach().cpu() for i, v in self.program.values.items() if isinstance(v, Tensor)}
        return write_safetensors(path, tensors, about)

    @classmethod
    def load(cls, path: Path | str) -> Golden:
        """Read what :meth:`save` wrote. Nothing of a file becomes code: operations come from an allow-list.

        Raises UsageError for a file that is none, for an operation or an argument that no program may hold, and for a
        program that would be larger than MOST_NODES, MOST_ELEMENTS or MOST_FLOPS allow; shapes are
        checked first.
        """
        dump = open_dump(Path(path))
        if (version := dump.about.get("whywrong", dump.about.get("labkit"))) != VERSION:
            again = "record it again with whywrong.golden(...).save"
            raise UsageError(f"{path}: is {version!r}, no {VERSION!r} that this version can read; {again}")
        try:
            text = json.loads(dump.about["program"])
            if len(text["nodes"]) > MOST_NODES:
                raise ValueError(f"more than {MOST_NODES} operations")
            nodes = [_node(i, item) for i, item in enumerate(text["nodes"])]
            stored = [node.id for node in nodes if node.func in (INPUT, CONSTANT)]
            program = Program(nodes, {i: dump.read(str(i)).clone() for i in stored}, set(text.get("inside", ())))
            golden = cls(program, _numbers(text["steps"], nodes), _numbers(text["operations"], nodes), text["notes"])
            golden.parameters = [str(name) for name in text.get("parameters", ())]
            golden.results = [name for name in map(str, text.get("results", ())) if name in golden.steps]
            golden.narrowest = str(text.get("narrowest", ""))
            if not (isinstance(golden.notes, list) and all(isinstance(note, str) for note in golden.notes)):
                raise ValueError("its notes are no texts")
            _run_without_data(program)
            for name in golden.steps:
                if not isinstance(golden[name], Tensor) or golden[name].is_complex():
                    raise ValueError(f"step {name!r} is no tensor of real numbers")
        except Exception as error:
            raise UsageError(
                f"{path}: expected a recorded golden, got one that is damaged ({first_line(error)})"
            ) from None
        return golden


def _run_without_data(program: Program) -> None:
    """Every operation on tensors without memory: shapes are as declared, and not too many elements.

    That takes a second, since torch imports its compiler for them. A bound by declared shapes and numbers in its place
    was too small for a score of operations (`eye`, paddings, sizes from values), and what no step needs must not run.
    """
    from torch.utils.flop_counter import flop_registry  # which imports Triton; its mode would import torch's compiler

    total, work = 0, 0
    elements = sum(value.numel() for value in program.values.values() if isinstance(value, Tensor))
    most = min(MOST_ELEMENTS, FEW_ELEMENTS + PER_ELEMENT * elements)
    most_work = min(MOST_FLOPS, FEW_FLOPS + PER_ELEMENT**2 * elements)

    def counted(node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal work
        out = call(node, args, kwargs, torch.device("meta"))
        count = flop_registry.get(getattr(node.func, "overloadpacket", None))
        work += count(*args, **kwargs, out_val=out) if count is not None else 0
        return out

    def check(i: int, value: Any) -> Any:
        nonlocal total, work
        node = program.nodes[i]
        if node.op in (ALGORITHMS - TRANSFORMS) | {"_int_mm"}:  # 25 n^3 for the singular vectors of a matrix
            shapes = [program.nodes[k].shape for k in node.parents]
            work += 25 * max((math.prod(shape) * max(shape, default=1) for shape in shapes), default=0)
        if isinstance(value, Tensor):
            if tuple(value.shape) != node.shape:
                raise ValueError(f"operation {i}, {node.op}, gives {tuple(value.shape)} where {node.shape} is declared")
            total += value.numel()
        if total > most:
            raise ValueError(f"more than {most} elements in all, for {elements} that it is given")
        return value

    empty = {i: torch.empty_like(v, device="meta") for i, v in program.values.items() if isinstance(v, Tensor)}
    with without_collector():
        program.run(range(len(program.nodes)), empty, (), rule=counted, seen=check)
    if work > most_work:
        raise ValueError(
            f"more than {most_work:.0e} operations in its products, for {elements} elements that it is given"
        )


_DTYPES = {str(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def _encoded(value: Any) -> dict[str, Any]:
    """What JSON has not, as an object of one key: its kind."""
    if isinstance(value, Ref):
        return {"ref": value.id}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise UsageError(f"golden: {type(value).__name__} as an argument cannot be saved")


def _decoded(value: Any, before: int) -> Any:
    if isinstance(value, list):
        return [_decoded(item, before) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == "ref" and isinstance(what, int) and 0 <= what < before:
        return Ref(what)
    if kind == "dtype":
        return _DTYPES[what]
    if kind == "complex":
        return complex(*what)
    if kind == "named":
        return {str(key): _decoded(item, before) for key, item in what.items()}
    raise ValueError(f"{str(value)[:60]} is no argument")


def _node(i: int, item: Any) -> Node:
    word, args, kwargs, shape, dtype, site = (*item, "", "")[:6]
    func = word if word in (INPUT, CONSTANT, ITEM) else resolve(word)
    return Node(i, func, tuple(_decoded(args, i)), _decoded(kwargs, i), tuple(map(int, shape)), str(dtype), str(site))


def _numbers(names: dict[str, int], nodes: list[Node]) -> dict[str, int]:
    if not all(isinstance(i, int) and 0 <= i < len(nodes) for i in names.values()):
        raise ValueError("a step names an operation that is not there")
    return {str(name): i for name, i in names.items()}


def golden(
    reference: torch.nn.Module | Callable[..., Any],
    /,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    **named: Any,
) -> Golden:
    """Run `reference`, a torch module or a function of tensors, once, and keep what it did as a program in float64.

    Inputs are tensors or arrays, on one device, also inside dicts, tuples, lists and dataclasses; floating-point ones
    become float64, their values as they are. Only a module of bfloat16 or float16 runs in its own types, so that its
    casts are part of the program. Steps, in order, are the inputs (``input.0``, or their keyword, and what is inside
    as ``batch.ids`` or ``pair.0``), a module's parameters, each submodule's output by its name in the tree, each
    :func:`whywrong.step`, and the result: ``output``, its parts with ``.0`` or ``.key`` behind it likewise; a
    function's dict has names of its own. A second call of the same gets ``#2``. Of a module, with a `loss` of the
    result, or where the result is one number, autograd's backward is recorded too: ``grad:`` and the name of each
    input and parameter; without a loss it starts from the same fixed random numbers as :func:`whywrong.capture` takes.
    The module itself stays as it was.

    What is sampled at random is kept as it was sampled. Raises UsageError for what cannot be recorded, by its name.
    """
    check_subject("golden", reference, loss)
    recorded, why = None, ""
    if isinstance(reference, torch.nn.Module) and any(x.dtype in NARROW_DTYPES for x in reference.parameters()):
        try:
            recorded = _run(reference, inputs, named, loss, as_written=True)
        except Exception as error:  # a type that an operation has not, or a shape that depends on rounded values
            why = f"recorded as if all were float64, without casts to narrower types: {first_line(error)}"
    recorded = recorded or _run(reference, inputs, named, loss)
    own = list(reference.parameters()) if isinstance(reference, torch.nn.Module) else []
    dtypes = {name_of(x.dtype) for x in tree_leaves((inputs, named, own)) if hasattr(x, "dtype")} & {*UNIT_ROUNDOFF}
    recorded.narrowest = max(dtypes, key=UNIT_ROUNDOFF.__getitem__, default="")
    if OUTPUT in recorded.inputs and f"{OUTPUT}#2" in recorded.steps:
        raise UsageError(f"golden: expected another name for the input {OUTPUT}, got that of the result")
    recorded.notes += [why] * bool(why)
    given = {*recorded.inputs}
    made = [name for name in recorded.names if name not in given]
    if not made:
        raise UsageError("golden: expected a reference whose result has a tensor, got none")
    varying = recorded.program.varying()
    for name in (name for name in made if not name.startswith(GRADIENT)):
        if recorded.steps[name] not in varying:
            recorded.notes.append(f"{name} depends on no input: it is a constant, or made outside of torch")
    return recorded


def load(path: Path | str, dims: Mapping[str, str] | None = None) -> Golden | Trace:
    """Open what :meth:`Golden.save`, :meth:`Trace.save` or any other program wrote: a recorded golden, or steps alone.

    Steps are read when they are looked at. `dims` says of steps in shards how they are put together, for example
    ``{"h": "b s/sp h/tp"}`` (docs/dumps.md). Raises UsageError for what is neither.
    """
    dump = open_dump(Path(path), dims)
    return Golden.load(path) if "program" in dump.about else dump


def with_backward(run: Callable[[bool], tuple[Any, Any]], subject: Any, loss: Any) -> Any:
    """`run(differentiate)` gives a recording, and a result; returns the recording. A backward is for modules, losses
    and single numbers."""
    if isinstance(subject, torch.nn.Module) or loss is not None:
        return run(True)[0]
    recording, result = run(False)
    parts = [value for _, value in tensors_of(OUTPUT, result)]
    return run(True)[0] if len(parts) == 1 and parts[0].numel() == 1 and parts[0].is_floating_point() else recording


def _run(reference: Any, inputs: Any, named: dict[str, Any], loss: Any, as_written: bool = False) -> Golden:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with process_wide(), torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), ExitStack() as stack:
        for mode in () if as_written else (_AsInFloat32(), float64_by_default()):
            stack.enter_context(mode)
        subject = copy.deepcopy(reference) if isinstance(reference, torch.nn.Module) else reference
        subject = subject if as_written or subject is reference else subject.double()
        return with_backward(
            lambda differentiate: _recorded(subject, inputs, named, loss, differentiate, as_written), subject, loss
        )


def _recorded(
    subject: Any, inputs: Any, named: Named, loss: Any, differentiate: bool, as_written: bool
) -> tuple[Golden, Any]:
    steps: dict[str, int] = {}
    values: dict[str, Tensor] = {}
    last = Counter[str]()

    def on_step(name: str, tensor: Tensor) -> None:
        name = unique(name, steps, last)
        number, program = recorder.number(tensor), recorder.program
        if program.nodes[number].func == INPUT and not name.startswith(GRADIENT):  # given back as it is
            number = program.add(torch.ops.aten.clone.default, (Ref(number),), value=tensor.detach())
        steps[name], values[name] = number, snapshot(tensor)

    recorder = Recorder(as_written)
    leaves = leaves_of(subject, inputs, named, differentiate, None if as_written else torch.float64)
    for name, leaf in leaves.items():
        steps[name] = recorder.input(leaf)
    result = run_watched(subject, inputs, named, leaves, loss, recorder, on_step)
    module = subject if isinstance(subject, torch.nn.Module) else torch.nn.Module()
    own = list(tensors_held(module))
    recorded = Golden(recorder.program, steps, recorder.operations, list(recorder.notes), parameters=own)
    whole = OUTPUT if subject is module or not isinstance(result, dict) else ""
    recorded.results = [name for name, _ in tensors_of(whole, result) if name in steps]
    for name, value in values.items():
        if not name.startswith(GRADIENT):  # which may be nothing but noise
            check_rerun(name, recorded[name], value)
    return recorded, result


def check_rerun(name: str, again: Tensor, value: Tensor) -> None:
    """Raise UsageError unless a re-run, in float64, gives a step's value, to half of the digits of its dtype.

    Other strides or another order may round otherwise; what was not recorded, or is another operation, shows at once.
    """
    floating = value.is_floating_point()
    comparison = compare(again, value.double() if floating else value, bound=math.inf if floating else None)
    if not comparison.ok or (floating and comparison.rms_ratio > torch.finfo(value.dtype).eps ** 0.5):
        raise UsageError(f"step {name!r} cannot be re-run: what torch's operations give is not what it is")


class _AsInFloat32(TorchFunctionMode):
    """What torch takes from the dtype is as for float32 and narrower ones: the eps of an RMS norm that has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.rms_norm and len(args) < 4 and kwargs.get("eps") is None:
            kwargs = {**kwargs, "eps": torch.finfo(torch.float32).eps}
        return func(*args, **kwargs)
