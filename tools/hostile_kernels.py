"""Kernels that end, hang or deceive the process that runs them, and what fuzzing says of each; the reference is 2 x.

`HOSTILE` fail on the example. `HACKS` are what generated kernels did to pass a benchmark; those of `CALLERS` call the
reference, which is noted; `BLIND` are those that fuzzing does not see, with the reason.
"""

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import inspect
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import numpy as np
import torch

_KEPT = {}


def reference(x):
    return x * 2.0


def _after(deed):
    """A kernel that is correct but for a deed before."""

    def kernel(x):
        deed()
        return reference(x)

    return kernel


def _raising(error):
    def kernel(x):
        raise error

    return kernel


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class ForeverError(Exception):
    def __str__(self):
        return "a\nb\n" * 100000


class BaseError(BaseException):
    pass


def _time_up():
    from whywrong.fuzzing import fuzz

    raise fuzz._EnoughError


def _timed_out():
    from whywrong import child

    raise child.TimedOutError("had not ended")


def _spin():
    while True:
        pass


def _recurse():
    return _recurse()


def _eat():
    held = []
    while True:
        held.append(torch.ones(1 << 22))


def _eat_lists():
    held = [0]
    while True:
        held = held * 2


def _deep():
    held = []
    for _ in range(10**6):
        held = [held]
    return repr(held)


def _locked():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _joined():
    thread = threading.Thread(target=_spin, daemon=True)
    thread.start()
    thread.join()


def _fork_bomb():
    for _ in range(3):
        os.fork()


def _killed(number):
    return lambda: os.kill(os.getpid(), number)


def _kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def _write_anywhere():
    ctypes.memset(0x10, 0, 8)


def _free_twice():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    place = libc.malloc(4096 * 64)
    libc.free(place + 16)


def _bad_call():
    ctypes.CFUNCTYPE(None)(0x20)()


def _masked():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _spin()


def _far(x):
    """Writes far outside of its input."""
    ctypes.memset(x.data_ptr() + (1 << 40), 0, 8)
    return reference(x)


def _stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def _limit_cpu():
    resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
    _spin()


DIES, HANGS, RAISES = r"died: .*\(signal \d+\)", "hangs: it had not ended after", "raised "
HOSTILE = {
    "a null pointer is read": (_after(lambda: ctypes.string_at(0)), DIES),
    "a null pointer is written": (_after(_write_anywhere), DIES),
    "a null pointer is called": (_after(_bad_call), DIES),
    "free of what is not allocated": (_after(_free_twice), DIES),
    "far outside of its input": (_far, DIES),
    "abort": (_after(os.abort), DIES),
    "faulthandler's segfault": (_after(lambda: faulthandler._sigsegv()), DIES),
    "faulthandler's stack overflow": (_after(lambda: faulthandler._stack_overflow()), DIES),
    "os._exit(0)": (_after(lambda: os._exit(0)), "ended the process, with exit code 0"),
    "os._exit(7)": (_after(lambda: os._exit(7)), "ended the process, with exit code 7"),
    "exec of another program": (_after(lambda: os.execv("/bin/true", ["true"])), "ended the process, with exit code 0"),
    **{f"kills itself, {s.name}": (_after(_killed(s)), DIES) for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS)},
    **{f"kills itself, {s.name}": (_after(_killed(s)), DIES) for s in (signal.SIGILL, signal.SIGFPE, signal.SIGHUP)},
    "kills its group": (_after(lambda: os.killpg(0, signal.SIGKILL)), "ended the process above its own|died"),
    "kills its parent": (_after(_kill_parent), "ended the process above its own"),
    "no CPU time left": (_after(_limit_cpu), DIES),
    "an endless loop": (_after(_spin), HANGS),
    "an endless loop, deaf to signals": (_after(_masked), HANGS),
    "sleeps": (_after(lambda: time.sleep(600)), HANGS),
    "waits for itself": (_after(_locked), HANGS),
    "waits for an endless thread": (_after(_joined), HANGS),
    "waits for input that never comes": (_after(lambda: os.read(os.pipe()[0], 1)), HANGS),
    "stops itself": (_after(_stopped), HANGS),
    "takes all memory, tensors": (_after(_eat), "raised (Runtime|Memory|OS)Error|died"),
    "takes all memory, lists": (_after(_eat_lists), "raised MemoryError|died"),
    "takes all memory at once": (_after(lambda: torch.empty(1 << 44)), "raised RuntimeError"),
    "recurses": (_after(_recurse), "raised RecursionError"),
    "nests deeply": (_after(_deep), "raised RecursionError|died"),
    "closes standard error": (_after(lambda: os.close(2)), "closed or replaced standard error"),
    "closes standard output": (_after(lambda: os.close(1)), "closed or replaced standard output"),
    "closes all descriptors": (_after(lambda: os.closerange(0, 256)), "died|ended|closed"),
    "replaces standard error": (
        _after(lambda: os.dup2(os.open("/dev/null", 1), 2)),
        "closed or replaced standard error",
    ),
    "forks": (_after(os.fork), "forked a process, which returned from the call too"),
    "forks three times": (_after(_fork_bomb), "forked a process, which returned from the call too"),
    "raises an exception without a text": (_raising(UnspeakableError()), "raised UnspeakableError"),
    "raises one with a long text": (_raising(ForeverError()), "raised ForeverError: a$"),
    "raises what is no Exception": (_raising(BaseError("base")), "raised BaseError: base"),
    "raises SystemExit": (_after(sys.exit), "raised SystemExit"),
    "raises KeyboardInterrupt": (_raising(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    "raises GeneratorExit": (_raising(GeneratorExit()), "raised GeneratorExit"),
    "raises StopIteration": (_raising(StopIteration()), "raised StopIteration"),
    "raises MemoryError": (_raising(MemoryError()), "raised MemoryError"),
    "raises fuzzing's own end": (_after(_time_up), "raised _EnoughError"),
    "raises a child's own time-out": (_after(_timed_out), "raised TimedOutError"),
    "raises TimeoutError": (_raising(TimeoutError("late")), "raised TimeoutError: late"),
    "raises UnicodeError": (_raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")), "raised UnicodeDecodeError"),
    "raises a torch error": (lambda x: x @ torch.ones(3, 1000), "raised RuntimeError"),
    "gives None": (lambda x: None, "gave NoneType"),
    "gives a function": (lambda x: lambda: x, "gave function"),
    "gives itself": (lambda x: types.SimpleNamespace(x=x), "gave namespace|gave SimpleNamespace"),
    "gives nothing": (lambda x: (), r"gave tuple \(\)"),
    "gives text": (lambda x: "twice", "gave str"),
    "gives another shape": (lambda x: torch.ones(1, 1, 1), "shape"),
    "gives a sparse tensor": (lambda x: reference(x).to_sparse(), "gave|raised|sparse"),
    "gives complex numbers": (lambda x: torch.complex(reference(x), reference(x)), "output"),
    "gives a meta tensor": (lambda x: torch.empty(x.shape, device="meta"), "gave|raised|meta"),
    "gives float128": (lambda x: reference(x).numpy().astype(np.longdouble), "got float128"),
    "frees its input": (lambda x: (x.untyped_storage().resize_(0), torch.ones(4, 3))[1], "died|raised|changed"),
    "resizes its input": (lambda x: reference(x.resize_(1 << 20))[: x.numel()], "died|raised|changed|own error|shape"),
}
"""Each with what is said of it."""


def _nothing():
    return None


def _found_in_stack(x):
    """Calls the reference that it finds in a caller's frame."""
    frame = inspect.currentframe()
    while frame is not None:
        for value in frame.f_locals.values():
            report = getattr(value, "report", value)
            if callable(getattr(report, "reference", None)):
                return report.reference(x)
        frame = frame.f_back
    return torch.zeros_like(x)


def _found_by_gc(x):
    """Gives the golden's numbers, which it finds by the garbage collector."""
    for found in gc.get_objects():
        if type(found).__name__ == "Golden":
            with contextlib.suppress(Exception):
                return found["output"].to(x.dtype).clone()
    return torch.zeros_like(x)


def _function_by_gc(x):
    """Calls the reference that it finds by the garbage collector."""
    for found in gc.get_objects():
        if isinstance(found, types.FunctionType) and found.__module__ == __name__ and found.__name__ == "reference":
            return found(x)
    return torch.zeros_like(x)


def _cached(x):
    return _KEPT.setdefault(("result", tuple(x.shape)), reference(x))


def _pointer(x):
    return _KEPT.setdefault(("place", x.data_ptr(), tuple(x.shape)), reference(x))


def _one_buffer(x):
    return _KEPT.setdefault(("buffer", tuple(x.shape)), torch.empty(x.shape)).copy_(reference(x))


def _first_shape(x):
    return reference(x) if _KEPT.setdefault("shape", tuple(x.shape)) == tuple(x.shape) else torch.zeros_like(x)


def _first_values(x):
    return _KEPT.setdefault("values", torch.full(x.shape, 2.0)) if bool((x == 1).all()) else torch.zeros(x.shape)


def _restored(x):
    kept = x.clone()
    x.zero_()
    x.copy_(kept)
    return torch.zeros_like(x)


def _in_place(x):
    return x.mul_(2.0)


def _lazy(x):
    out = torch.empty(x.shape)
    threading.Timer(0.2, lambda: out.copy_(reference(x))).start()
    return out


def _narrow(x):
    return reference(x.half()).float()


def _seeded(x):
    torch.manual_seed(0)
    return torch.zeros_like(x)


def _default_dtype(x):
    torch.set_default_dtype(torch.float16)
    return reference(torch.tensor(x.tolist())).float()


def _clocks(x):
    time.monotonic = time.perf_counter = time.time = float
    return torch.zeros_like(x)


def _patched(x):
    torch.allclose = torch.equal = torch.isclose = lambda *a, **k: True
    builtins.abs = lambda x: 0.0
    return torch.zeros_like(x)


def _patched_check(x):
    from whywrong.checking import localise

    localise.localise = lambda *a, **k: None
    return torch.zeros_like(x)


HACKS = {
    "zeros": lambda x: torch.zeros_like(x),
    "nothing written": lambda x: torch.empty(x.shape),
    "its input": lambda x: x,
    "the first call's result": _cached,
    "the result at a pointer": _pointer,
    "one buffer for all calls": _one_buffer,
    "the first shape alone": _first_shape,
    "the first values alone": _first_values,
    "its input changed and restored, zeros": _restored,
    "its input as its result": _in_place,
    "written by a thread not waited for": _lazy,
    "in float16": _narrow,
    "zeros, and the generator seeded": _seeded,
    "in float16, by another default dtype": _default_dtype,
    "zeros, and the clocks patched": _clocks,
    "zeros, and comparisons patched": _patched,
    "zeros, and the check patched": _patched_check,
    "zeros where the golden is not found by gc": _found_by_gc,
    "zeros, and warnings off": lambda x: (warnings.simplefilter("ignore"), torch.zeros_like(x))[1],
    "zeros, and at exit a kill": lambda x: (atexit.register(os._exit, 0), torch.zeros_like(x))[1],
}
CALLERS = {
    "the reference, imported": lambda x: reference(x),
    "the reference, from a caller's frame": _found_in_stack,
    "the reference, by gc": _function_by_gc,
    "the reference, by its module": lambda x: sys.modules[__name__].reference(x),
}
BLIND = {
    "a copy of the reference": (types.FunctionType(reference.__code__, globals()), "its numbers are right"),
    "random numbers seeded, result right": (lambda x: (random.seed(0), reference(x))[1], "only numbers are checked"),
    "a subprocess left": (
        lambda x: (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]), reference(x))[1],
        "a compiler may be one; it is killed at the end",
    ),
}
