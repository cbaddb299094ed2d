"""Write docs/operations.md from the table in whywrong/recording/operations.py. Run by `make refresh`."""

import ast
import inspect
import itertools
import textwrap
from pathlib import Path

from whywrong.recording import operations

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"

TITLES = {
    "MOVES": "Moves", "FACTORIES": "Factories", "SELECTIONS": "Choices", "ARITHMETIC": "Arithmetic",
    "PRODUCTS": "Products", "SUMS": "Sums", "MOMENTS": "Moments", "FUNCTIONS": "Functions",
    "ELIMINATIONS": "Linear algebra by elimination", "REFLECTIONS": "Linear algebra by reflections",
    "TRANSFORMS": "Fourier transforms", "RESAMPLERS": "Resampling", "KERNELS": "Other kernels",
}  # fmt: skip

START = """# Operations that a golden can hold

Written by `tools/operations.py` from `whywrong/recording/operations.py`; do not edit.

`whywrong.golden` records the ATen operations that a reference runs. What stands below is recorded as one operation, and
is all that a file may hold. What is not here is decomposed into it by torch's own table (softmax, norms, losses, most
activations, every optimizer but the fused ones), or refused in a line that says what to write instead. Each heading
says what rounding does to its operations, which is how they are checked.

Complex numbers are computed with inside a reference; its inputs are real, and a complex step is compared by its two
parts. Singular vectors and eigenvectors are right with either sign, so compare what is made of them. A program with
operations whose shapes depend on values (`nonzero`, `_unique2`, `bincount`, `masked_select`) runs, but is not saved.
"""


def page() -> str:
    """The whole text."""
    body = ast.parse(inspect.getsource(operations)).body
    words = {
        first.targets[0].id: second.value.value
        for first, second in itertools.pairwise(body)
        if isinstance(first, ast.Assign) and isinstance(second, ast.Expr) and isinstance(first.targets[0], ast.Name)
    }
    parts = [START]
    for table, title in TITLES.items():
        names = textwrap.fill(", ".join(sorted(getattr(operations, table))), 118, break_long_words=False)
        parts.append(f"## {title}\n\n{textwrap.fill(words[table], 118)}\n\n{names}\n")
    lines = [f"| `{name}...` | {words} |" for name, words in operations.WRITE_INSTEAD.items()]
    parts.append("## Refused\n\n| operation | write instead |\n|---|---|\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
