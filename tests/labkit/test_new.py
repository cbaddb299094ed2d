"""`labkit new` makes an investigation that passes the tests as it is made."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from labkit.cli.main import main
from labkit.session.catalogue import ROOT


@pytest.mark.long
def test_what_it_makes_passes_the_tests_as_it_is(tmp_path):
    for part in ("labkit", "whywrong", "kernels", "notebooks", "data", "tests", "tools", "README.md", "pyproject.toml"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, tmp_path / part)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    (tmp_path / "kernels/demo").mkdir()  # as `labkit new` leaves it that was killed half-way
    (tmp_path / "kernels/demo/.unfinished").write_text("")
    shutil.copy(ROOT / "labkit/cli/template/kernels/NAME/__init__.py.txt", tmp_path / "kernels/demo/__init__.py")
    run("labkit", "new", "demo")
    assert not (tmp_path / "kernels/demo/.unfinished").exists()
    again = subprocess.run([sys.executable, "-m", "labkit", "new", "demo"], cwd=tmp_path, env=environment)
    assert again.returncode == 2, "it is in use now"
    made = ["kernels/demo", "notebooks/demo.ipynb", "tests/kernels/test_demo.py"]
    run("ruff", "check", *made)
    run("ruff", "format", "--check", *made)
    run("labkit", "new", "--kernel", "mine")
    cells = json.loads((tmp_path / "lab/mine.ipynb").read_text())["cells"]
    shown = json.dumps([cell.get("outputs") for cell in cells])
    assert "first divergence: output" in shown
    assert "sum leaves out 32 of dimension 1 of 33 of weights  In[1]:9: " in shown
    assert "your example fails" in shown
    of_all = ["tests/test_notebooks.py", "tests/test_answers.py"]
    run("pytest", "-q", "tests/kernels/test_demo.py", *of_all, "-k", "demo")


@pytest.mark.parametrize("name", ["Softmax", "two words", "class", "2d", "attention", "training_run"])
def test_a_name_that_cannot_be_is_refused_before_anything_is_written(name, capsys):
    assert main(["new", name]) == 2
    assert "NAME: " in capsys.readouterr().err
