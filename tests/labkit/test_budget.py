"""labkit stays thin: its lines of code, without blanks, comments, docstrings and imports."""

import ast
import io
import tokenize
from pathlib import Path

import labkit

MOST = 7114
"""What there is. It may only go down; the aim is 5,400."""

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source):
    """How many lines hold code that does something."""
    passed_over = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            passed_over |= set(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(lines - passed_over)


def test_the_counter_counts_code_alone():
    source = (
        '"""A text\nof two lines."""\n\nimport os\n\n# a comment\nX = (\n    1,\n)\n\n\n'
        'def f():\n    """Text."""\n    return X\n'
    )
    assert code_lines(source) == 5


def test_labkit_stays_thin():
    count = sum(code_lines(path.read_text()) for path in Path(labkit.__file__).parent.rglob("*.py"))
    assert count <= MOST
