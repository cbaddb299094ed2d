"""How much a reference computes: its operations, and the elements of their results, with numbers or without any."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from whywrong.errors import collected
from whywrong.recording.program import Program
from whywrong.torch_private import FakeTensorMode, TorchDispatchMode, tree_leaves, tree_map_only

ELEMENTS_OF_WORK = 4096
"""As many elements of a result take about as long as an operation by itself."""


class Work(TorchDispatchMode):
    """Counts the operations of what runs in it, and their work, in operations.

    Ends it, and says `why`, where the work is more than `most` or a tensor has more than `elements`.
    """

    LARGE = "it makes a tensor, or results together, of more than {} elements, four times `most`"

    def __init__(self, most: float = math.inf, elements: float = math.inf) -> None:
        super().__init__()
        self._most, self._elements, self.count, self.work, self.why = most, elements, 0, 0.0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found: list[Tensor] = list(filter(torch.is_tensor, tree_leaves(made)))
        longest = max((x.untyped_storage().nbytes() // x.element_size() for x in found), default=0)
        self.count += 1
        self.work += 1.0 + longest / ELEMENTS_OF_WORK
        if longest > self._elements:
            self.why = self.LARGE.format(self._elements)
        elif self.work > self._most:
            self.why = "it would take too long: a case may take an eighth of the time left"
        if self.why and found and not func.is_view:  # autograd asks for a tensor's device, and saves views of tensors,
            raise RuntimeError(self.why)  # where an error aborts the process
        return made

    def without_numbers(self, run: Callable[[Any], Any], inputs: Any) -> Work:
        """Count those of `run(inputs)`, as far as it gets without any numbers."""
        with (
            collected([], "the reference on tensors without numbers"),  # which ends where numbers decide what is run
            _silent_here(logging.getLogger(FakeTensorMode.__module__)),  # of what has no fake
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
            self,
        ):
            run(tree_map_only(Tensor, fake.from_tensor, inputs))
        return self


def work_of(program: Program) -> float:
    """The work of a recorded program."""
    return sum(1.0 + math.prod(node.shape) / ELEMENTS_OF_WORK for node in program.nodes)


@contextmanager
def _silent_here(logger: logging.Logger) -> Iterator[None]:
    """Records of this thread do not go to a logger; those of others do."""
    here = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)
