"""CUDA C++ under compute-sanitizer: each finding in a line, with the kernel, the argument and the element.

    python -m tools.sanitize memcheck|racecheck|initcheck COMMAND ...

The command calls `announce(x=x, out=out)` with its tensors, so that an address is an element of one of them: each
tensor has an allocation of its own here. The texts that are read are those of the Compute Sanitizer User Manual, of
version 2022.1 and later. 1 if anything was found, 2 if the tool or the command fails.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whywrong.errors import UsageError

PREFIX = "========= "
AT = re.compile(r"at (?:0x[0-9a-f]+ in )?(?P<at>.+)")
ADDRESS = re.compile(r"(?:Address|Access (?:to|at)) 0x(?P<address>[0-9a-f]+)")
BLOCK = re.compile(r"nearest allocation at 0x(?P<base>[0-9a-f]+) of size (?P<bytes>[\d,]+) bytes")


class Argument(NamedTuple):
    """A tensor's first address, and its bytes in all and of an element."""

    start: int
    size: int
    element: int


def announce(**tensors: Any) -> None:
    """Print where tensors lie, for :func:`findings`."""
    for name, x in tensors.items():
        print(f"argument {name} {x.data_ptr()} {x.nbytes} {x.element_size()}", flush=True)


def sanitized(tool: str, command: Sequence[str]) -> list[str]:
    """What a tool of compute-sanitizer finds in a command. Raises UsageError where it cannot be run."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        raise UsageError("compute-sanitizer is not on the PATH; expected the CUDA toolkit")
    words = [sanitizer, "--tool", tool, "--target-processes", "all", *command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else many tensors share an allocation
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if "SUMMARY:" not in done.stdout:
        raise UsageError(f"{tool}: it ended with {done.returncode} and without a summary: {done.stderr[-400:]}")
    return findings(done.stdout)


def findings(text: str) -> list[str]:
    """A line for each different finding in compute-sanitizer's output, in its order."""
    arguments = {
        name: Argument(int(start), int(size), int(element))
        for name, start, size, element in re.findall(r"(?m)^argument (\S+) (\d+) (\d+) (\d+)$", text)
    }
    lines = [line.removeprefix(PREFIX) for line in text.splitlines() if line.startswith(PREFIX)]
    heads = [k for k, line in enumerate(lines) if re.match(r"Invalid |Uninitialized |(Error|Warning): Race", line)]
    ends = [*heads[1:], len(lines)]
    rest = [" ".join(x for x in lines[k + 1 : end] if x[:1] == " ") for k, end in zip(heads, ends, strict=False)]
    return list(dict.fromkeys(_words(lines[k], more, arguments) for k, more in zip(heads, rest, strict=True)))


def _words(head: str, rest: str, arguments: Mapping[str, Argument]) -> str:
    if "Race" in head:
        return re.sub(r"\s+", " ", f"{head} {rest}".split("Saved host")[0]).strip()
    where = re.match(r"\s*" + AT.pattern + r"\s+by thread", rest)
    words = f"{head}, {where['at'].strip()}" if where else head
    if not (address := ADDRESS.search(rest)):
        return words
    at, block = int(address["address"], 16), BLOCK.search(rest)
    base = int(block["base"], 16) if block else at
    for name, one in arguments.items():
        if one.start == base or one.start <= at < one.start + one.size:
            return (
                f"{words}: element {(at - one.start) // one.element} of {name!r}, which has {one.size // one.element}"
            )
    return words + (f": byte {at - base} of {block['bytes']} allocated" if block else "")


if __name__ == "__main__":
    try:
        lines = sanitized(sys.argv[1], sys.argv[2:])
    except UsageError as error:
        sys.exit(f"sanitize: {error}")
    print("\n".join(lines) or "nothing found")
    sys.exit(bool(lines))
