"""whywrong by itself: what it imports, what its wheel holds, and what it does where nothing else is installed."""

import ast
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

from whywrong.errors import OPTIONAL, UsageError, needs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "whywrong"
EXAMPLES = ROOT / "data" / "examples"
FIVE = {"torch", "numpy", "scipy", "numba", "safetensors"}
NOTEBOOKS = ("IPython", "ipykernel", "jinja2", "matplotlib", "nbconvert", "nbformat", "papermill", "triton", "yaml")
IMPORT = """
import sys, time, torch
start = time.perf_counter()
import whywrong
whywrong.golden, whywrong.localise, whywrong.compare, whywrong.assert_close, whywrong.Precision, whywrong.capture
print(time.perf_counter() - start, *sorted({name.split(".")[0] for name in sys.modules}))
"""
ROOMS = (
    "torch_private",
    "process_state",
    "errors",
    "tables",
    "files",
    "console",
    "child",
    "comparing",
    "drawing",
    "recording",
    "checking",
    "explaining",
    "fuzzing",
)
"""Modules and packages from the lowest up; each may import those before it. `reporting` stands above all."""


def imports(path):
    """The modules that a file imports, also below functions, and not for its types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)


def test_it_knows_nothing_of_the_workbook():
    outside = re.compile(r"\b(labkit|kernels/|notebooks?/|data/|tests/|papermill|nbval)")
    for path in PACKAGE.rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] in ("labkit", "kernels")], path
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            old_files = path.name == "golden.py" and 'about.get("labkit")' in line  # which still load
            assert not outside.search(line) or old_files, f"{path.name}:{number}: {line.strip()}"


def test_imports_run_one_way():
    """From reporting down to errors: no room imports one above it, and none imports itself in a circle."""
    rank = {name: k for k, name in enumerate((*ROOMS, "reporting", "__main__", "__init__"))}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith("whywrong.") and (other := name.split(".")[1]) != room:
                assert rank[other] < rank[room], f"{path.relative_to(ROOT)} imports {name}"


def test_one_module_imports_what_torch_does_not_declare():
    def private(name):
        return name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))

    using = {path.stem for path in PACKAGE.rglob("*.py") if any(map(private, imports(path)))}
    assert using == {"torch_private"}


def test_no_two_modules_import_each_other():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    uses = {
        name: {
            other for one in imports(path) for other in names.values() if one == other or one.startswith(f"{other}.")
        }
        for path, name in names.items()
        if path.name != "__init__.py"
    }
    uses = {name: {one for one in others if one in uses and one != name} for name, others in uses.items()}
    while leaves := [name for name, others in uses.items() if not others & uses.keys()]:
        for name in leaves:
            del uses[name]
    assert not uses


@pytest.mark.long
def test_an_import_brings_nothing_of_the_notebooks():
    shown = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not set(shown.split()) & (set(NOTEBOOKS) - {"jinja2", "triton", "yaml"}), "these torch and numba may import"
    assert not [name for name in shown.split() if name.startswith(("jupyter", "nb"))]


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["nothing", "their count", "their policy"],
)
def test_threads_that_wait_spin_shortly_unless_the_user_says_otherwise(theirs, kept):
    """Torch's OpenMP reads this as it is loaded; beside other processes localise takes 6 s by it, and not 25."""
    code = "import whywrong, os, sys; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    given = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=given | theirs, capture_output=True, text=True)
    assert run.stdout == f"{kept}\n", run.stderr


def test_what_is_not_installed_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    line = "^whywrong.fuzz needs hypothesis: pip install hypothesis$"
    with pytest.raises(UsageError, match=line), needs("whywrong.fuzz"):
        import hypothesis  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needs("whywrong.fuzz"):
        import no_such_module  # noqa: F401


def closure(names):
    """The distributions that these need here, without extras, themselves included."""
    found, left = {}, list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            wanted = map(Requirement, found[name].requires or ())
            left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in ("whywrong", "labkit", "kernels", "README.md", "LICENSE", "pyproject.toml"):
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
    asked = [Requirement(text) for text in importlib.metadata.Distribution.at(next(site.glob("whywrong-*"))).requires]
    wanted = {one.name for one in asked if one.marker is None}
    assert wanted == FIVE
    for distribution in closure(wanted).values():
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(distribution.locate_file(part)))
    return environment / "bin"


@pytest.mark.slow
def test_the_wheel_holds_whywrong_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"whywrong"}
    assert {"whywrong/reporting/pages/diff.html", "whywrong/py.typed"} <= set(names)


@pytest.mark.slow
def test_it_works_where_nothing_else_is_installed(installed, tmp_path):
    for path in EXAMPLES.glob("*.safetensors"):
        shutil.copy(path, tmp_path)
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*command):
        done = subprocess.run(
            [installed / command[0], *command[1:]], cwd=tmp_path, env=clean, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    absent = f"import importlib.util as u; print([n for n in {(*NOTEBOOKS, *OPTIONAL)} if u.find_spec(n)])"
    assert set(ast.literal_eval(run("python", "-c", absent)[1])) <= {"jinja2", "triton"}, "which torch itself needs"
    dumps = "attention_golden.safetensors", "attention_wrong.safetensors"
    code, out, err = run("whywrong", "diff", *dumps)
    assert (code, out.splitlines()[-1], err) == (1, "first divergence: merged", "")
    code, out, err = run("whywrong", "diff", *dumps, "--explain")
    assert (code, "layout" in out, err) == (1, True, "")
    line = "whywrong: whywrong diff needs matplotlib: pip install matplotlib\n"
    assert run("whywrong", "diff", *dumps, "--plot", "pictures") == (2, "", line)


@pytest.mark.slow
def test_an_import_takes_less_than_a_third_of_a_second_beyond_torch(installed, tmp_path):
    command = [installed / "python", "-c", IMPORT]
    runs = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.3
