"""Kernels compiled for an H200 without one, and their text (TTGIR) run step by step: is what is still read written?"""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from labkit.session.catalogue import ROOT

_ARITHMETIC = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.xori": operator.xor,
}
STEPS = 12
"""Steps of a loop that are run: more than any tile has buffers, so that every buffer comes round again."""


@dataclass(frozen=True)
class Order:
    """What to compile: `kernel` is module:name, `signature` Triton's types of the arguments that are no constants."""

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int


@dataclass(frozen=True)
class Overwrite:
    """In step `step` tile `buffer`'s slot `slot` is written while the product of step `read_by` may still read it."""

    step: int
    buffer: str
    slot: int
    read_by: int


@dataclass
class Emitted:
    """What a kernel's loops do: `buffers` of each tile, products left `pending` at their waits, and the overwrites.

    `reads` and `writes`: in which step an asynchronous product reads, and a copy writes, which slot of which tile.
    `asynchronous`: products run beside the threads that start them (wgmma), so that they have to be waited for.
    """

    asynchronous: bool = False
    buffers: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    overwrites: list[Overwrite] = field(default_factory=list)
    reads: list[tuple[int, str, int]] = field(default_factory=list)
    writes: list[tuple[int, str, int]] = field(default_factory=list)


def compiled(orders: Mapping[str, Order], *folders: Path) -> dict[str, str]:
    """The TTGIR of each order for compute capability 9.0, by this Python's Triton; no GPU is needed.

    `folders` hold modules of kernels that are not in the checkout.

    It is without the lines of the source, and can be compiled further. In a process of its own, since where Triton
    interprets kernels it cannot compile them. Raises RuntimeError with the compiler's last words if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.json"
        path.write_text(json.dumps({name: asdict(order) for name, order in orders.items()}))
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, folders), *sys.path]),
        }
        command = [sys.executable, "-m", "kernels.mhc.race.emitted", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling for compute capability 9.0 failed: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def read(ttgir: str) -> Emitted:
    """Run the innermost loops of a kernel's TTGIR: which buffer each copy writes, and which the pending products read.

    Whole numbers that do not depend on data are computed, all else is left open. Raises ValueError where the slot that
    a product reads or a copy writes would be open, so that nothing is passed over.
    """
    effects = Emitted("ttng.warp_group_dot " in ttgir)
    lines = ttgir.splitlines()
    known = {m[1]: int(m[2]) for m in re.finditer(r"(%\S+) = arith\.constant (-?\d+) : i32", ttgir)}
    for m in re.finditer(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", ttgir):
        effects.buffers[m[1]] = int(m[2])
    for start, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        closing = line[: len(line) - len(line.lstrip())] + "}"
        end = next(i for i in range(start, len(lines)) if lines[i].startswith(closing))
        body = lines[start + 1 : end]
        if not any("scf.for" in inner for inner in body):
            before: dict[str, tuple[str, int]] = {}
            for earlier in lines[:start]:
                name, operation, rest = _parsed(earlier)
                if operation.startswith("ttg.memdesc_"):
                    _point(name, operation, _operands(rest), known, before)
                elif operation == "ttg.local_alloc":
                    before[name] = (name, 0)
            _run(line, body, known, before, effects)
    return effects


def excerpt(ttgir: str) -> str:
    """Buffers, copies, products and waits of the text, from the loop's head on; without types."""
    shown, inside = [], False
    for line in ttgir.splitlines():
        inside = inside or "scf.for" in line
        buffers = "ttg.local_alloc : ()" in line
        if buffers or (
            inside and re.search(r"memdesc_index|async_copy|warp_group_dot|ttg.async_wait|local_load", line)
        ):
            shown.append(line.rstrip() if buffers else re.sub(r"( iter_args.*| mask.*| : [!t].*)", "", line.rstrip()))
        if inside and line.strip().startswith("scf.yield"):
            break
    return "\n".join(line.split(", #")[0][4:] for line in shown)


def _point(
    name: str, operation: str, operands: list[str], values: Mapping[str, Any], slots: dict[str, tuple[str, int]]
) -> None:
    """Note which slot of which tile `name` stands for; a transposed view is that which it views."""
    if operation == "ttg.memdesc_index":
        slot = values.get(operands[1])
        if slot is None:
            raise ValueError(f"{name}: its slot is not known; expected a whole number")
        slots[name] = (operands[0], slot)
    else:
        slots[name] = slots.get(operands[0], (operands[0], 0))


def _operands(rest: str) -> list[str]:
    return re.findall(r"%[\w.$-]+(?:#\d+)?", rest.split(" : ")[0])


def _run(
    head: str, body: Sequence[str], known: Mapping[str, int], before: Mapping[str, tuple[str, int]], effects: Emitted
) -> None:
    counter, first = re.search(r"scf\.for (%\S+) = (%\S+) to", head).groups()
    carried = re.search(r"iter_args\((.*?)\) ->", head)
    pairs = [pair.split(" = ") for pair in carried[1].split(", ")] if carried else []
    values: dict[str, Any] = dict(known) | {name: known.get(start) for name, start in pairs}
    pending: list[tuple[int, list[tuple[str, int]]]] = []
    for step in range(STEPS):
        values[counter] = known.get(first, 0) + step
        slots = dict(before)
        handed: list[str] = []
        for line in body:
            name, operation, rest = _parsed(line)
            operands = _operands(rest)
            if operation.startswith("arith."):
                values[name] = _evaluate(operation, rest, [values.get(o) for o in operands])
            elif operation.startswith("ttg.memdesc_"):
                _point(name, operation, operands, values, slots)
            elif operation == "ttng.warp_group_dot":
                if "isAsync = true" in rest:
                    shared = [slots[o] for o in operands[:2] if o in slots]
                    if len(shared) != rest.split(" -> ")[0].count("memdesc<"):
                        raise ValueError(f"{name}: what it reads in shared memory is not known: {operands[:2]}")
                    pending.append((step, shared))
                    effects.reads += [(step, *slot) for slot in shared]
            elif operation == "ttng.warp_group_dot_wait":
                left = int(re.search(r"pendings = (\d+)", rest)[1])
                pending = pending[len(pending) - left :] if left else []
                effects.pending = max(effects.pending, left)
            elif operation == "scf.yield":
                handed = operands
            written = _written(name, operation, operands)
            if written is not None:
                if operation == "ttg.local_alloc":
                    slots[name] = (name, 0)
                if written not in slots:
                    raise ValueError(f"{written}: a copy goes into it, and its slot is not known")
                at = slots[written]
                effects.writes.append((step, *at))
                effects.overwrites += [Overwrite(step, *at, by) for by, reads in pending if at in reads]
        handed_on = [values.get(o) for o in handed]
        values |= {name: value for (name, _), value in zip(pairs, handed_on, strict=True)}


def _parsed(line: str) -> tuple[str, str, str]:
    """Result, operation and the rest of a line; empty where there is none."""
    m = re.match(r'\s*(?:(%[\w.$-]+)(?::\d+)? = )?"?([a-z_]+\.[\w.]+)"?(.*)', line)
    return (m[1] or "", m[2], m[3]) if m else ("", "", "")


def _evaluate(operation: str, rest: str, of: list[Any]) -> int | None:
    """A sum, product, comparison or choice of whole numbers; None where one is open."""
    if any(value is None for value in of) or not of:
        return None
    if operation == "arith.cmpi":
        kind = rest.split(",")[0].strip()
        by = {"slt": of[0] < of[1], "sge": of[0] >= of[1], "eq": of[0] == of[1], "ne": of[0] != of[1]}
        return int(by[kind]) if kind in by else None
    if operation == "arith.select":
        return of[1] if of[0] else of[2]
    return _ARITHMETIC[operation](*of) if operation in _ARITHMETIC else None


def _written(name: str, operation: str, operands: list[str]) -> str | None:
    """The piece of shared memory that an operation writes."""
    if operation in ("ttg.async_copy_global_to_local", "ttg.local_store", "ttng.async_tma_copy_global_to_local"):
        return operands[1]
    return name if operation == "ttg.local_alloc" and operands else None


def _compile(order: dict[str, Any]) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as to_gpu

    module, name = order["kernel"].split(":")
    kernel = getattr(import_module(module), name)
    names = kernel.arg_names
    types = {n: order["signature"].get(n, "constexpr") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    constants = {(names.index(n),): value for n, value in order["constants"].items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = to_gpu(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": order["warps"], "num_stages": order["stages"]}
    )
    places = r" loc\((?:[^()]|\([^()]*\))*\)|^#loc.*\n"  # lines of the source, which nothing here needs
    return re.sub(places, "", made.asm["ttgir"], flags=re.MULTILINE)


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    import_module("triton.compiler")  # once, and not in every worker
    workers = max(1, len(os.sched_getaffinity(0)) // 2)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        print(json.dumps(dict(zip(wanted, pool.map(_compile, wanted.values()), strict=True))))
