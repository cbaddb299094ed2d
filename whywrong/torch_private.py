"""What whywrong takes from torch without a declaration that it stays, in one place; each with what would replace it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import (
    DispatchKey,  # to ask for an operation's CompositeExplicitAutograd form; a public decompose() for it
    _current_graph_task_id,  # of the backward that runs; a public way to ask whether autograd calls an operation
    _functorch,  # vmap's warning of slow operations, and whether vmap runs; a public way to silence it, and to ask
)
from torch._decomp import decomposition_table  # operations as others; torch.export's public core ATen table, once whole
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without numbers; torch.device("meta") for all inputs
from torch.nn.utils.stateless import _reparametrize_module  # a module with copies of its buffers; func.functional_call
from torch.utils._python_dispatch import (  # what runs below Python; there is no public mode for all operations
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import (  # nested arguments; torch.utils.pytree, where it is there (torch 2.11 has it not)
    tree_leaves,
    tree_map,
    tree_map_only,
)

__all__ = [
    "DispatchKey",
    "FakeTensorMode",
    "TorchDispatchMode",
    "_disable_current_modes",
    "_get_current_dispatch_mode_stack",
    "_reparametrize_module",
    "decomposition_table",
    "in_backward",
    "in_vmap",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "without_vmap_warning",
]


@contextmanager
def without_vmap_warning() -> Iterator[None]:
    """Without a warning of each operation that `torch.vmap` runs one by one. Of the process, and torch cannot be asked
    how it was: afterwards it warns, as it does by default."""
    _functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether autograd computes a gradient in this thread."""
    return _current_graph_task_id() != -1


def in_vmap() -> bool:
    """Whether :func:`torch.vmap` runs in this thread."""
    return _functorch.maybe_current_level() is not None
