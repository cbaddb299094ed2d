"""Where kernels run: a GPU, or on the CPU Triton's interpreter, a CUDA runtime of the host's, and a host BLAS."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import UsageError

CHOICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Device:
    """Where kernels run in this process."""

    kind: str
    """``cpu`` or ``cuda``, which is also torch's name of it."""
    name: str
    """The processor's or the GPU's own name."""

    @property
    def is_cuda(self) -> bool:
        """True where kernels are compiled for a GPU."""
        return self.kind == "cuda"

    @property
    def banner(self) -> str:
        """One line that says what runs where."""
        if self.is_cuda:
            return f"cuda ({self.name}): Triton and CUDA C++ compiled, GEMM by cuBLAS"
        runs = "Triton interpreted, CUDA C++ over a host runtime (correctness only)"
        return f"cpu ({self.name}): {runs}, GEMM by the host's BLAS"

    def needs_cuda(self, what: str, instead: str) -> None:
        """Raise UsageError on a CPU: `what` cannot run there; `instead` says what to ask for."""
        if not self.is_cuda:
            raise UsageError(f"{what} needs a GPU, and kernels run on the CPU here; {instead}")


def has_cuda() -> bool:
    """Whether torch sees a GPU here."""
    import torch

    return torch.cuda.is_available()


def decide(request: str = "auto") -> Device:
    """Where kernels would run; changes nothing. `auto` takes a GPU where there is one.

    Raises UsageError for an unknown request, and for a GPU that is not there.
    """
    if request not in CHOICES:
        raise UsageError(f"device: {request!r} is not right; wanted one of {', '.join(CHOICES)}")
    if request != "cpu" and has_cuda():
        import torch

        return Device("cuda", torch.cuda.get_device_name())
    if request == "cuda":
        raise UsageError("device: 'cuda' was asked for, and torch sees no GPU here; wanted cpu or auto")
    return Device("cpu", cpu_name())


def choose(request: str = "auto") -> Device:
    """Decide where kernels run in this process, and prepare Triton for it.

    Must be called before any kernel is imported: Triton reads TRITON_INTERPRET when a kernel is decorated. Raises
    UsageError as :func:`decide` does, and where the kernels of this process were decorated for the other device.
    """
    device = decide(request)
    wanted = "0" if device.is_cuda else "1"
    decorated = "triton" in sys.modules and any(name.startswith("kernels.") for name in sys.modules)
    if decorated and os.environ.get("TRITON_INTERPRET", "0") != wanted:
        raise UsageError(
            f"device: kernels of this process are already set for the other device than {device.kind!r}; "
            "restart the process (in Jupyter: the kernel)"
        )
    os.environ["TRITON_INTERPRET"] = wanted
    return device


def cpu_name() -> str:
    """The processor's name, as the kernel of the operating system gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


def facts(device: Device) -> dict[str, Any]:
    """What result.json records of the device: kind, name, and on a GPU its driver."""
    if not device.is_cuda:
        return {"kind": device.kind, "name": device.name, "driver": None}
    return {"kind": device.kind, "name": device.name, "driver": _driver()}


def _driver() -> str | None:
    version = Path("/proc/driver/nvidia/version")
    if not version.exists():
        return None
    words = version.read_text(encoding="utf-8").split()
    return next((word for word in words if word.count(".") == 2 and word[0].isdigit()), None)
