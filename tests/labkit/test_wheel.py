"""labkit without the workbook: what it imports, and what its wheel holds and does where nothing else is installed."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from labkit.errors import WORKBOOK, UsageError, extra
from labkit.session.catalogue import ROOT

EXAMPLES = ROOT / "data" / "examples"
IMPORT = """
import sys, time, torch
start = time.perf_counter()
import labkit
labkit.golden, labkit.localise, labkit.compare, labkit.assert_close, labkit.Precision, labkit.capture
print(time.perf_counter() - start, *sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_an_import_brings_nothing_of_the_notebooks():
    shown = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not set(shown.split()) & (set(WORKBOOK) - {"jinja2", "triton", "yaml"}), "these torch and numba may import"
    assert not [name for name in shown.split() if name.startswith(("jupyter", "nb"))]


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_spin_shortly_unless_the_user_says_otherwise(theirs, kept):
    """Torch's OpenMP reads this as it is loaded; beside other processes localise takes 6 s by it, and not 25."""
    code = "import labkit, os, sys; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    given = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=given | theirs, capture_output=True, text=True)
    assert run.stdout == f"{kept}\n", run.stderr


def test_what_is_not_installed_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "papermill", None)
    needs = r"^labkit run needs papermill: pip install 'labkit\[workbook\]'$"
    with pytest.raises(UsageError, match=needs), extra("labkit run"):
        import papermill  # noqa: F401
    with pytest.raises(ModuleNotFoundError), extra("labkit run"):
        import no_such_module  # noqa: F401


def closure(names):
    """The distributions that these need here, without extras, themselves included."""
    found, left = {}, list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            needs = map(Requirement, found[name].requires or ())
            left += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in ("labkit", "kernels", "README.md", "LICENSE", "pyproject.toml"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, source / part)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(build, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of programs of an environment with the wheel, what it asks for, and nothing else."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    asked = [Requirement(text) for text in importlib.metadata.Distribution.at(next(site.glob("labkit-*"))).requires]
    for distribution in closure(one.name for one in asked if one.marker is None).values():
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(distribution.locate_file(part)))
    return environment / "bin"


@pytest.mark.long
def test_the_wheel_holds_labkit_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"labkit"}
    assert "labkit/cli/template/notebooks/NAME.ipynb" in names


@pytest.mark.long
def test_labkit_works_without_a_checkout(installed, tmp_path):
    for path in EXAMPLES.glob("*.safetensors"):
        shutil.copy(path, tmp_path)
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*command):
        done = subprocess.run(
            [installed / command[0], *command[1:]], cwd=tmp_path, env=clean, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    absent = f"import importlib.util as u; print([n for n in {WORKBOOK} if u.find_spec(n)])"
    assert run("python", "-c", absent)[1] in ("['jinja2']\n", "['jinja2', 'triton']\n")  # which torch itself needs
    dumps = "attention_golden.safetensors", "attention_wrong.safetensors"
    code, out, err = run("labkit", "diff", *dumps)
    assert (code, out.splitlines()[-1], err) == (1, "first divergence: merged", "")
    needs = "labkit: labkit diff needs matplotlib: pip install 'labkit[workbook]'\n"
    assert run("labkit", "diff", *dumps, "--plot", "pictures") == (2, "", needs)
    code, out, err = run("labkit", "doctor")
    assert (code, err) == (0, "")
    assert "papermill" in out
    for command in (["list"], ["run"], ["bench", "mhc"], ["new", "softmax"], ["record", "."]):
        wanted = f"labkit: labkit {command[0]} needs a checkout of the workbook; diff and doctor do not\n"
        assert run("labkit", *command) == (2, "", wanted)
    code, _, err = run("python", "-c", "import labkit; labkit.start('softmax')")
    assert (code, err.splitlines()[-1][:54]) == (1, "labkit.errors.UsageError: no notebook is called 'softm")


@pytest.mark.long
def test_an_import_takes_less_than_a_third_of_a_second_beyond_torch(installed, tmp_path):
    command = [installed / "python", "-c", IMPORT]
    runs = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.3
