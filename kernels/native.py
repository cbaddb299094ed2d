"""CUDA C++ built on first use, by nvcc for a GPU, by the host's compiler over a host runtime; kept in a cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from labkit.session.device import Device, cpu_name
from whywrong.errors import UsageError
from whywrong.files import writable, writing

CACHE = "LABKIT_CACHE"
"""Environment variable: where what was built is kept; by default labkit/ in the user's cache directory."""


SANITIZE = "LABKIT_SANITIZE"
"""Environment variable: if set, what is built for a CPU ends the process at an access outside of its memory, and says
where, once AddressSanitizer's library is loaded first, LD_PRELOAD=$(c++ -print-file-name=libasan.so); what is built
for a GPU has its line numbers for compute-sanitizer."""


def cache() -> Path:
    """The folder of what is kept: data, and built libraries in the folder `built`."""
    given = os.environ.get(CACHE)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "labkit"


def own_folder() -> Path:
    """The folder of built libraries, which the user alone may enter: whoever writes to it runs code in this process.

    Raises UsageError where it is a link, another's, or open to others, and where all may exchange a folder above it.
    """
    folder = cache() / "built"
    with writing(cache(), CACHE):
        for path in (cache(), folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            got = f"{stat.filemode(about.st_mode)} of user {about.st_uid}"
            raise UsageError(f"{CACHE}: expected {folder} as drwx------ of user {os.geteuid()}, got {got}")
        for above in folder.resolve().parents:
            if above.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:  # /tmp has the sticky bit
                raise UsageError(f"{CACHE}: expected a folder that not all may exchange, got one below {above}")
    return writable(folder, CACHE)


def build(source: Path, host: Path, device: Device) -> Path:
    """The shared library of `source` (a .cu file with its neighbours), built if it is not in the cache.

    On a CPU the headers in `host` stand in for CUDA's. Raises UsageError where there is no compiler, with the
    compiler's first error where it refuses, and where the cache cannot be written or is open to others
    (:func:`own_folder`). A library's name ends with the hash of its content: one that was cut off is built again.
    Who asks for what another process or thread is building waits for it.
    """
    if device.is_cuda:
        import torch

        compiler = _find("nvcc", "NVCC", "the CUDA toolkit, or set NVCC")
        number = "{}{}".format(*torch.cuda.get_device_capability())
        target = f"-gencode=arch=compute_{number},code=sm_{number}"  # and no PTX that another GPU could compile
        flags = ["-std=c++17", "-O1", target, "-shared", "-Xcompiler", "-fPIC"]  # -O1 is the host's code alone
        flags += ["-lineinfo"] * bool(os.environ.get(SANITIZE))
        folders, libraries, made_for = [source.parent], ["-lcublas"], device.name
    else:
        compiler = _find("c++", "CXX", "a C++ compiler (Debian: g++), or set CXX")
        flags = ["-x", "c++", "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{host}"]
        flags += ["-U_FORTIFY_SOURCE"]  # some compilers set it, and then longjmp keeps to one stack
        flags += ["-g", "-O1", "-fsanitize=address"] * bool(os.environ.get(SANITIZE))
        folders, libraries, made_for = [source.parent, host], [], cpu_name()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise UsageError(f"{source.name}: {compiler} cannot be run ({error.strerror}); expected a compiler") from None
    digest = hashlib.sha256("\0".join((made_for, compiler, version, *flags)).encode())
    for path in sorted(at for folder in folders for at in folder.iterdir() if at.suffix in {".cu", ".cuh", ".h"}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:16]}"
    folder = own_folder()
    with writing(folder, CACHE), FileLock(folder / f"{source.stem}.lock"):
        for built in folder.glob(f"{name}-*.so"):
            if built == _named(built, folder, name):
                return built
            built.unlink(missing_ok=True)  # not as it was built
        return _compile([compiler, *flags, str(source), *libraries], folder, name, source)


def _named(library: Path, folder: Path, name: str) -> Path:
    """Where a library belongs in the cache, by its content."""
    return folder / f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def load(path: Path, signatures: dict[str, tuple[type | None, Sequence[type]]]) -> ctypes.CDLL:
    """The library with the types of its functions: name -> (result, arguments)."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


def _find(name: str, variable: str, wanted: str) -> str:
    given = os.environ.get(variable) or name
    found = shutil.which(given) or (shutil.which("/usr/local/cuda/bin/nvcc") if given == "nvcc" else None)
    if not found:
        raise UsageError(f"{variable}: {given} is not on the PATH; expected {wanted}")
    return found


def _compile(command: list[str], folder: Path, name: str, source: Path) -> Path:
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / f"{name}.so"
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return made.replace(_named(made, folder, name))
    except OSError as error:
        raise UsageError(f"{source.name}: it could not be built: {error.strerror}: {error.filename}") from None
    lines = (done.stderr or done.stdout).splitlines() or ["no message"]
    first = next((line for line in lines if re.search("error|failed|No space", line)), lines[0])
    raise UsageError(f"{source.name}: {Path(command[0]).name} could not build it: {first}")
