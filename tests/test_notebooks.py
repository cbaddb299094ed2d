"""What every committed notebook has to be. That its verdicts still hold is nbval's part of `make test`."""

import ast
import json
import subprocess
import sys

import pytest

from labkit.cli.main import main
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.record import recorded, stale

BOOKS = list(notebooks().values())
MOST_BYTES = 500_000
MOST_CELLS, MOST_WORDS, MOST_LINES = 30, 1500, 20
"""Cells and words of text up to "What we learned", and lines of a code cell."""
MOST_AFTER = 8
"""Cells after it: the ledger, what the search says, derivations."""
MISSING = {path for path in stale() if not (ROOT / path).exists()}


@pytest.fixture(params=BOOKS, ids=lambda book: book.name)
def book(request):
    return request.param


def test_it_is_executed_and_small(book):
    cells = [cell for cell in book.content["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells), "a cell was not run: make refresh"
    assert any("image/png" in output.get("data", {}) for output in outputs), "it has no figure: draw one"
    assert not any(output["output_type"] == "error" for output in outputs), "a cell ended in an error"
    assert book.path.stat().st_size <= MOST_BYTES, "its figures are too large: make refresh gives them a palette"


def test_it_is_short_enough_to_be_read(book):
    """Cells and words of text up to the end of "What we learned"."""
    cells = book.content["cells"]
    texts = ["".join(cell["source"]) if cell["cell_type"] == "markdown" else "" for cell in cells]
    end = next(i for i, text in enumerate(texts) if text.startswith("## What we learned")) + 1
    assert end <= MOST_CELLS, f"{end} cells up to What we learned"
    assert len(cells) - end <= MOST_AFTER, f"{len(cells) - end} cells after What we learned"
    words = sum(len(text.split()) for text in texts[:end])
    assert words <= MOST_WORDS, f"{words} words up to What we learned"


def test_no_code_cell_of_it_is_long(book):
    """A longer one does several things: split it, with a sentence each, or make a function of kernels/ of its parts."""
    longest = max(len(source.splitlines()) for source in book.code)
    assert longest <= MOST_LINES, f"a code cell of {longest} lines"


def test_each_of_its_figures_has_an_alternative_text(book):
    for number, cell in enumerate(book.content["cells"]):
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                alt = output["metadata"].get("image/png", {}).get("alt", "")
                assert len(alt.split()) >= 8, f"cell {number}: plots.show(figure, what it shows)"


def test_it_declares_its_parameters_and_what_it_is_about(book):
    assert {"device", "seed"} <= set(book.parameters), "the cell tagged parameters has to declare device and seed"
    assert all(parameter.help for parameter in book.parameters.values()), "each parameter needs its help in data/claims"
    assert set(book.about) >= {"question", "answer", "kernels"}, "its metadata lack one of these: make refresh"


def test_it_starts_before_any_kernel_is_imported_and_ends_with_finish(book):
    code = "\n".join(book.code)
    assert code.index("labkit.start(") < code.index("from kernels"), "call labkit.start before kernels are imported"
    assert "lab.finish(" in book.code[-1], "its last cell has to call lab.finish"


def test_it_holds_no_class_and_no_kernel_body(book):
    for source in book.code:
        nodes = list(ast.walk(ast.parse(source)))
        assert not any(isinstance(node, ast.ClassDef) for node in nodes), "a class belongs into kernels/"
        assert "@triton.jit" not in source, "a kernel belongs into kernels/"


def test_no_line_of_it_is_longer_than_120_characters(book):
    """Rows of a table apart, which cannot be broken."""
    lines = [line for cell in book.content["cells"] for line in "".join(cell["source"]).split("\n")]
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_it_has_verdict_cells_for_nbval_to_check(book):
    tagged = [c for c in book.content["cells"] if "nbval-check-output" in c["metadata"].get("tags", [])]
    assert len(tagged) >= 3, "tag three cells or more that print verdicts: nbval-check-output"
    assert all(cell["outputs"] for cell in tagged), "a tagged cell prints nothing that nbval could check"


def test_its_run_on_a_gpu_is_on_record_or_why_it_is_not(book):
    """Of a notebook that shows what a GPU gave."""
    path = f"data/results/{book.name}.cuda.json"
    if "lab.recorded" in "".join(book.code):
        words = f"it shows what a GPU gave: record one as {path}, or say in data/results/stale.yaml why there is none"
        assert (recorded(book.name) is not None) != (path in MISSING), words


def test_it_names_no_path_of_a_machine(book):
    assert str(ROOT) not in json.dumps(book.content)


@pytest.mark.slow
def test_other_sizes_at_which_blas_rejects_the_call_end_ok_with_every_claim(tmp_path):
    sizes = {"heads": 2, "n": 20, "m": 53, "d_k": 29, "seeds": 3, "defect": "q_leading_dimension"}
    given = [f"-p{name}={value}" for name, value in sizes.items()]
    assert main(["run", "attention_matmul", *given, "--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("attention_matmul/*/result.json")
    result = json.loads(path.read_text())
    assert len(result["claims"]) == 20
    assert result["metrics"]["named_right"]


@pytest.mark.long
def test_plain_papermill_runs_a_notebook_too(tmp_path):
    parameters = ["-p", "seed", "3", "-p", "device", "cpu"]
    (ROOT / "runs" / "sweep_atlas" / "interactive" / "result.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "notebooks/sweep_atlas.ipynb"]
    subprocess.run([*command, tmp_path / "out.ipynb", *parameters], cwd=ROOT, check=True, capture_output=True)
    result = json.loads((ROOT / "runs" / "sweep_atlas" / "interactive" / "result.json").read_text())
    assert result["parameters"]["seed"] == 3
    assert len(result["claims"]) == 4
