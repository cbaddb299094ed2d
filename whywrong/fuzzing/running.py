"""Where a kernel runs: in poisoned memory between guard zones, on a CPU in a process of its own."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong import child
from whywrong.checking.guarded import Allocations, Memory, faults
from whywrong.checking.repetition import poisoned
from whywrong.comparing.bits import digest, same_bits
from whywrong.comparing.comparison import as_tensor
from whywrong.errors import UsageError, first_line
from whywrong.fuzzing.inputs import Inputs, Names, tensors
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.steps import OUTPUT
from whywrong.recording.watching import tensors_of
from whywrong.torch_private import tree_map_only

MEMORY: int | None = None
"""Bytes that a kernel in a child may have beyond what this process has; None: a quarter of what is free."""

NO_LIMIT = 1 << 62


LOST = "; no call of CUDA works in its process any more"


def isolated(isolate: bool | None, inputs: Inputs, kernel: Callable[..., Any]) -> str:
    """How a kernel runs in a child: "fork", as it does where it can, or "fresh" in one that imports it; "" if not.

    Raises UsageError where it can not.
    """
    kinds = {x.device.type for x in tensors(inputs).values()}
    if child.available() and kinds <= {"cpu"}:
        return "fork" * (isolate is not False)
    if isolate and (sys.platform != "linux" or not kinds <= {"cpu", "cuda"}):
        raise UsageError(f"isolate: expected False, or None, for {sorted(kinds)} on {sys.platform}, got True")
    if isolate:
        child.imported("isolate: kernel", kernel)
    return "fresh" * bool(isolate)


@dataclass
class Call:
    """A call of the kernel: `results` by the golden's names, and in `words` what it did that it must not, or "refused".

    `same` are the results with the bits of the call before, which was on other inputs for the first of them. `touched`
    says what it read or wrote outside of its inputs, if nothing else is wrong.
    """

    results: dict[str, Tensor] = field(default_factory=dict)
    words: str = ""
    same: list[str] = field(default_factory=list)
    touched: str = ""


@dataclass
class Kernel:
    """A kernel that is run on many inputs, each time on other values first, then twice.

    `fixed` has the arguments that are the same in all cases; `arrays` are given as NumPy arrays. If `isolated`, it runs
    in a child, which :meth:`close` ends; its end, or calls that do not end, are words of its call. In one that is
    forked, inputs lie behind guard pages, and in one more call before such.
    """

    function: Callable[..., Any]
    out: Names
    refuses: Names
    arrays: Names
    isolated: str
    fixed: Inputs = field(default_factory=dict)
    reference: Any = None

    @cached_property
    def _child(self) -> child.Child:
        fresh = self.isolated == "fresh"
        run = replace(self)._run  # of a copy without this child, which can be pickled
        return child.Child(run, NO_LIMIT if fresh else MEMORY, fresh)  # CUDA reserves more than there is

    def close(self) -> None:
        """End the child, if there is one; the next case begins another."""
        self._child.close()

    def __call__(self, inputs: Inputs, golden: Golden, seconds: float) -> list[Call]:
        """The two calls on these inputs. Raises child.TimedOutError if they have not ended in time."""
        calls: list[Call] = self._asked("calls", inputs, golden, seconds)
        if self.isolated == "fork" and not calls[-1].words:
            calls[0].touched = self.answer("touched", inputs, golden, seconds) or ""  # nothing if it takes no such
        if self.isolated and "CUDA error" in calls[-1].words:
            self._child.renew()
        return calls

    def answer(self, what: str, inputs: Inputs, golden: Golden, seconds: float) -> Any:
        """What :meth:`_run` says of one more call; None where it does not return, as of one that takes aligned inputs
        alone. It may touch what lies outside of its inputs, read there ("reads"), or call the "reference".
        """
        with suppress(child.DiedError, child.RaisedError):
            return self._asked(what, inputs, golden, seconds)

    def _asked(self, what: str, inputs: Inputs, golden: Golden, seconds: float) -> Any:
        given = {name: x for name, x in inputs.items() if name not in self.fixed}
        about = (what, given, tuple(inputs), (golden.names, golden.inputs))
        if not self.isolated:
            return self._run(*about, True, (KeyboardInterrupt,))
        ask = self._calls_of if what == "calls" else child.Child.__call__
        try:
            return ask(self._child, *about, seconds=seconds)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # arguments that only a fork carries over
            if self.isolated == "fresh":
                raise UsageError(f"isolate: expected inputs that can be pickled, got {first_line(error)}") from None
            with child.Child(partial(self._run, *about), MEMORY) as once:
                return ask(once, seconds=seconds)

    def _calls_of(self, process: child.Child, *arguments: Any, seconds: float) -> list[Call]:
        """Where it has died, once more in a fresh process, then without other values first, which a kernel may not
        allow; that the death may be of an earlier call's making is said."""
        before = process.calls
        try:
            return process(*arguments, True, seconds=seconds)
        except child.RaisedError as error:
            return [Call(words=f"raised {error}")]
        except child.TimedOutError:
            pass
        except child.DiedError as error:
            with suppress(child.DiedError):
                if not before:
                    raise
                process(*arguments, True, seconds=seconds)
                return [Call(words=f"{error}, after {before} other cases in one process; not when it is run alone")]
        try:
            return process(*arguments, False, seconds=seconds)
        except child.TimedOutError:
            raise
        except child.DiedError as error:
            return [Call(words=str(error))]

    def _run(self, what: str, given: Inputs, order: Names, of: Any, others: bool = True, interrupts: Names = ()) -> Any:
        """What the kernel does: in calls, to what lies behind its inputs, by what it reads there, to its reference."""
        inputs = {name: given[name] if name in given else self.fixed[name] for name in order}
        pages = {"calls": "before", "touched": "behind"}.get(what, "") if self.isolated == "fork" else ""
        memory = Memory(tensors(inputs), self.out, pages)
        run = partial(self._call, memory, inputs, of, interrupts)

        def fault(address: int) -> None:
            if words := memory.touched(address):
                child.answer_from_within([Call(words=words)] if what == "calls" else words)

        def bits(start: Mapping[int, Tensor]) -> Any:
            call = run(start, (Exception,))
            return call.words, {name: digest(x) for name, x in call.results.items()}

        if what == "reference":  # wherever it is called, it ends the call; in this process alone, which ends soon
            of = getattr(self.reference, "forward", self.reference)
            if isinstance(of := getattr(of, "__func__", of), FunctionType):
                of.__code__ = _noted.__code__.replace(co_freevars=of.__code__.co_freevars)
                run(memory.start, (Exception,))
            return False
        with faults(fault) if pages else nullcontext():
            if what == "touched":
                run(memory.start, (Exception,))
                return ""
            return self._calls(memory, run, others) if what == "calls" else memory.reads(bits)

    def _calls(self, memory: Memory, run: Callable[..., Call], others: bool) -> list[Call]:
        """The first of two calls, and the second if it differs; there what lies outside of the inputs differs too."""
        last, found = run(memory.others(), (Exception,)) if others else Call(), []
        if LOST in last.words:  # and no other call runs
            return [Call(words=last.words.replace(LOST, f", on other values of these inputs{LOST}"))]
        for start, refused in ((memory.start, self.refuses), (memory.again, ())):
            kept = {name: x.clone() for name, x in last.results.items() if not memory.has(x)}
            call = run(start, refused)
            if not call.words and not all(same_bits(last.results[name], x) for name, x in kept.items()):
                call.words = "a later call changed the result of an earlier one"
            call.same = [name for name, x in kept.items() if name in call.results and same_bits(call.results[name], x)]
            found.append(Call({name: x.clone() for name, x in call.results.items()}, call.words, call.same))
            if call.words:
                break
            last = call
        return found[:1] if not found[-1].words and len(found[-1].same) == len(found[-1].results) else found

    def _call(self, memory: Memory, inputs: Inputs, of: Any, interrupts: Names, start: Any, refused: Names) -> Call:
        """One call on such memory; `of` are the golden's names, and its inputs'."""
        given = memory.views(memory.copies(start))
        me = os.getpid()
        seen = {name: x.numpy() if name in self.arrays else x for name, x in given.items()}
        try:
            with poisoned(), Allocations() as allocated:
                value = called(self.function, inputs | seen)
                if any(x.is_cuda for x in given.values()):
                    torch.cuda.current_stream().synchronize()  # which raises what a kernel did there, and there alone
        except interrupts:
            raise
        except BaseException as why:
            lost = "CUDA error" in first_line(why) and _lost()
            if isinstance(why, refused) and not lost:
                return Call(words="refused")
            return Call(words=f"raised {child.in_words(why)}" + LOST * lost)
        finally:
            child.end_copy(me)
        was = memory.views(start)
        if self.out:
            copies = {name: given[name].clone() for name in self.out}
            several = list(copies.values())
            value = copies if self.out[0] in of[0] else several if len(several) > 1 else several[0]
            for name in self.out:
                given[name].copy_(was[name])
        if changed := [name for name, x in given.items() if not same_bits(x, was[name])]:
            return Call(words=f"changed its input {changed[0]!r}")
        if not (found := results(of[0], of[1], value)):
            gave = f"gave {type(value).__name__} {value!r:.60}"
            return Call(words=f"{gave}; expected a tensor, several, or a dict of them")
        outside = "wrote outside of what it was given and of what it allocated"
        return Call(found, outside * (not (memory.whole(start) and allocated.whole)))


def _lost() -> bool:
    """Whether an error has left CUDA unusable: then every call raises it again."""
    with suppress(Exception):
        torch.cuda.synchronize()
        return False
    return True


def _noted(*_: Any, **__: Any) -> None:
    from whywrong import child

    child.answer_from_within(True)


def results(names: Sequence[str], read: Sequence[str], value: Any) -> dict[str, Tensor]:
    """What a kernel gave, by the golden's names: a dict's own, else as of a reference's result.

    What has the name of an input is what the reference gives under that name.
    """
    found = tree_map_only((np.ndarray, np.generic), lambda x: as_tensor("result", np.array(x)), value)  # a copy
    found = dict(tensors_of("" if isinstance(value, dict) else OUTPUT, found))
    if OUTPUT in found and OUTPUT not in names:
        return {next(name for name in names[::-1] if not name.startswith(GRADIENT)): found[OUTPUT]}
    later = {name: f"{name}#2" for name in read if f"{name}#2" in names}
    return {later.get(name, name): x for name, x in found.items()}


def called(function: Callable[..., Any], inputs: Mapping[Any, Any]) -> Any:
    """Call a function by names and positions."""
    named = {name: x for name, x in inputs.items() if isinstance(name, str)}
    return function(*(x for name, x in inputs.items() if name not in named), **named)
