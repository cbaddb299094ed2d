"""Code lines of packages against their budgets: no blanks, comments, docstrings or imports. Run by `make lint`.

python -m tools.code_lines labkit=1450 whywrong=5000
"""

import ast
import sys
from pathlib import Path


def code_lines(source: str) -> int:
    """How many lines of a module's source hold code."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (is_text and isinstance(node.value.value, str)) or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in skipped for i, line in lines)


if __name__ == "__main__":
    over = False
    for package, budget in (argument.split("=") for argument in sys.argv[1:]):
        count = sum(code_lines(path.read_text(encoding="utf-8")) for path in Path(package).rglob("*.py"))
        over |= count > int(budget)
        print(f"{package}: {count} code lines of {budget}")
    sys.exit(over)
