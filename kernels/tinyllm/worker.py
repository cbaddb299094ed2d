"""Runs sets of switches one after another in a process of its own, which may die.

`python worker.py PROGRAM.npz` imports nothing but NumPy, so that starting again costs little. It reads lines [path of
rows of switches, path of outcomes]. Each outcome is written before the next run begins, and a byte after the last.
"""

import ctypes
import json
import sys

import numpy as np

ZEROS, RECYCLED = 1, 1  # the host runtime's memory is zero at first, and comes back as it was left


def main() -> int:
    """Exit 0 when there is nothing more to read, 2 without a model, 3 when the device cannot be used any more."""
    request = np.load(sys.argv[1])
    library = ctypes.CDLL(str(request["library"]))
    library.faulty_new.restype = ctypes.c_void_p
    library.faulty_outcome_size.restype = ctypes.c_size_t
    library.faulty_error.restype = ctypes.c_char_p
    if bool(request["on_host"]):
        tokens, vocabulary, width, _ = (int(size) for size in request["sizes"])
        guard = -(-4 * tokens * max(vocabulary, width) // 256) * 256  # a buffer may be too small by all of itself
        library.cuda_host_set(ZEROS, ctypes.c_size_t(guard), ctypes.c_size_t(1 << 30), RECYCLED, 0)
    if (size := library.faulty_outcome_size()) != (mirrored := int(request["outcome_size"])):
        print(f"faulty::Outcome: expected {mirrored} bytes as OUTCOME of faulty.py has, got {size}", file=sys.stderr)
        return 2
    arrays = [request[name] for name in ("ids", "weights", "golden", "allowed")]
    pointers = [ctypes.c_void_p(value.ctypes.data) for value in arrays]
    model = library.faulty_new(*(int(v) for v in request["sizes"]), *pointers)
    if not model:
        print(library.faulty_error().decode(), file=sys.stderr)
        return 2
    outcome = (ctypes.c_char * size)()
    for line in sys.stdin:
        switches, out = json.loads(line)
        with open(out, "ab") as file:
            for row in np.load(switches):
                lost = library.faulty_run(ctypes.c_void_p(model), ctypes.c_void_p(row.ctypes.data), outcome)
                file.write(outcome.raw)
                file.flush()
                if lost:
                    return 3
            file.write(b"\0")
    return 0


if __name__ == "__main__":
    sys.exit(main())
