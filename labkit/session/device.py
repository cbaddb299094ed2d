"""Where kernels run: on a GPU, or on the CPU by Triton's interpreter, a host CUDA runtime and a host BLAS."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Device:
    """Where kernels run in this process.

    `kind` is ``cpu`` or ``cuda``, as torch calls it; `name` is the product name of the processor or GPU.
    """

    kind: str
    name: str

    @property
    def is_cuda(self) -> bool:
        """True where kernels are compiled for a GPU."""
        return self.kind == "cuda"

    @property
    def banner(self) -> str:
        """One line for a notebook's first output: what runs where."""
        on_cpu = "Triton interpreted, CUDA C++ over a host runtime (correctness only), GEMM by the host's BLAS"
        how = "Triton and CUDA C++ compiled, GEMM by cuBLAS" if self.is_cuda else on_cpu
        return f"{self.kind} ({self.name}): {how}"

    def needs_cuda(self, what: str, instead: str) -> None:
        """Raise UsageError on a CPU: `what` cannot run there; `instead` says what to ask for."""
        if not self.is_cuda:
            raise UsageError(f"{what} needs a GPU, and kernels run on the CPU here; {instead}")


def decide(request: str = "auto") -> Device:
    """Where kernels would run; changes nothing. `auto` takes a GPU where there is one.

    Raises UsageError for an unknown request, and for a GPU that is not there.
    """
    if request not in DEVICES:
        raise UsageError(f"device: expected one of {', '.join(DEVICES)}, got {request!r}")
    if request != "cpu":
        import torch

        if torch.cuda.is_available():
            return Device("cuda", torch.cuda.get_device_name())
        if request == "cuda":
            raise UsageError("device: 'cuda' was asked for, and torch sees no GPU here; expected cpu or auto")
    return Device("cpu", cpu_name())


def choose(request: str = "auto") -> Device:
    """Decide where kernels run in this process, and prepare Triton for it; `kernels` is that of this checkout.

    Must be called before any kernel is imported: Triton reads TRITON_INTERPRET when a kernel is decorated. Raises
    UsageError as :func:`decide` does, and where the kernels of this process were decorated for the other device.
    """
    device = decide(request)
    interpret = "0" if device.is_cuda else "1"
    modules = list(sys.modules.items())
    decorated = any(name.startswith("kernels.") and hasattr(module, "triton") for name, module in modules)
    if decorated and os.environ.get("TRITON_INTERPRET", "0") != interpret:
        restart = "restart the process (in Jupyter: the kernel)"
        raise UsageError(f"device: expected that of this process's kernels, got {device.kind!r}; {restart}")
    os.environ["TRITON_INTERPRET"] = interpret
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return device


def cpu_name() -> str:
    """The processor's name, as the kernel of the operating system gives it."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].strip() if match else "unknown CPU"


def driver() -> str | None:
    """The version of NVIDIA's driver, where there is one."""
    path = Path("/proc/driver/nvidia/version")
    match = path.exists() and re.search(r"\b\d+\.\d+\.\d+\b", path.read_text(encoding="utf-8"))
    return match[0] if match else None
