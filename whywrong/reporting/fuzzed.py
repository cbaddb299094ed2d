"""A fuzzing as a command and as a test: `whywrong fuzz`, and `@whywrong.fuzzed`. Neither imports torch beforehand."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from whywrong.console import show
from whywrong.errors import UsageError, did_you_mean


class FuzzedError(AssertionError):
    """What a fuzzed test raises: a failure, or that the kernel was hardly searched. `report` is the FuzzReport."""

    def __init__(self, report: Any) -> None:
        super().__init__(repr(report))
        self.report = report

    @property
    def script(self) -> str:
        """A test of the smallest failure; why there is none where it cannot be written."""
        try:
            return self.report.script()
        except UsageError as error:
            return f"none: {error}"


def fuzzed(reference: Any, inputs: Any, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a kernel a test: ``@whywrong.fuzzed(attention, (q, k, v), seconds=20)`` above ``def test_it(q, k, v): ...``.

    The test has no arguments; it calls :func:`whywrong.fuzz` with the function below as the kernel, with `reference`,
    `inputs` (or a function that gives them) and all else as that takes it, and raises FuzzedError if it fails or was
    hardly searched. With arguments it calls the kernel.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def test(*arguments: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if arguments or named:
                return kernel(*arguments, **named)
            from whywrong.fuzzing.fuzz import fuzz

            example = inputs() if inspect.isfunction(inputs) else inputs
            if not (report := fuzz(test, reference, example, **how)).passed:
                raise FuzzedError(report)
            return None

        update_wrapper(test, kernel)
        test.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # pytest's fixtures are not for it
        return test

    return decorate


def command(options: argparse.Namespace) -> int:
    """The command `whywrong fuzz`. Returns 0 where the kernel passes, 1 where it fails, 3 if it was hardly searched."""
    import torch

    from whywrong.comparing.precision import from_words
    from whywrong.files import write_text, writing
    from whywrong.fuzzing.fuzz import fuzz

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's kernels are imported
    kernel, reference = (_loaded(what, getattr(options, what)) for what in ("kernel", "reference"))
    how: dict[str, Any] = {name: getattr(options, name) for name in ("examples", "seed", "most")}
    how |= {"precision": from_words(options.precision)} if options.precision is not None else {}
    how |= {"seconds": float(options.seconds)} if options.seconds else {}
    how |= {name: getattr(options, name).split(",") for name in ("layouts", "out") if getattr(options, name)}
    pairs = {name: dict(_pair(f"--{name}", text) for text in getattr(options, name)) for name in ("sizes", "forms")}
    sizes = {name: tuple(map(_size, said.split(","))) for name, said in pairs["sizes"].items()}
    how |= {"sizes": sizes, "forms": pairs["forms"], "progress": partial(show, file=sys.stderr)}
    report = fuzz(kernel, reference, _example(options.example), **how)
    show(json.dumps(report.as_json(), indent=1, allow_nan=False) if options.json else report)
    if options.script and report.failure:
        with writing(options.script, "--script"):
            write_text(options.script, report.script())
        show(f"test: {options.script}", sys.stderr)
    return 1 if report.failure else 0 if report.passed else 3


def _loaded(what: str, text: str) -> Any:
    """The object that FILE.py::NAME names. Raises UsageError where there is none."""
    path, _, name = text.partition("::")
    file = Path(path).resolve()
    if not name.isidentifier() or file.suffix != ".py" or not file.stem.isidentifier():
        raise UsageError(f"{what}: expected FILE.py::NAME, got {text!r}")
    if not file.is_file():
        raise UsageError(f"{what}: expected a file, and there is no {path}")
    module = sys.modules.get(file.stem)
    if module is None or Path(getattr(module, "__file__", None) or "").resolve() != file:
        sys.path.insert(0, str(file.parent))  # so that what it imports from beside it is found, and a script finds it
        spec = spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[file.stem] = module_from_spec(spec)
        spec.loader.exec_module(module)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UsageError(f"{what}: {path} has no {name!r}; {did_you_mean(name, public)}expected a function in it")
    return getattr(module, name)


def _example(text: str) -> Any:
    """Inputs of a file by name, or what a function gives."""
    if "::" in text:
        found = _loaded("--example", text)
        return found() if callable(found) else found
    from whywrong.recording.dumps import open_dump

    steps = open_dump(Path(text))
    return {name: steps.read(name) for name in steps.names}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, said = text.partition("=")
    if not (name and sign and said):
        raise UsageError(f"{option}: expected ARGUMENT=..., got {text!r}")
    return name, said


def _size(text: str) -> Any:
    """A length, a name, or name*multiple."""
    name, sign, times = text.strip().partition("*")
    if sign and not times.isdecimal():
        raise UsageError(f"--sizes: expected NAME*MULTIPLE, got {text!r}")
    return (name, int(times)) if sign else int(name) if name.isdecimal() else name
