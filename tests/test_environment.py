"""pyproject.toml, constraints.txt and environment.yml say the same. (environment.yml itself is not solved here.)"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from labkit.session.catalogue import ROOT

PROJECTS = [tomllib.loads((ROOT / of / "pyproject.toml").read_text())["project"] for of in ("", "labkit")]
PINS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
EXTRAS = [project["optional-dependencies"] for project in PROJECTS]
ASKED = [one for project in PROJECTS for one in project["dependencies"] if one != "whywrong"]
ASKED += [one for extras in EXTRAS for extra in extras.values() for one in extra]
PYTHON = Requirement(f"python{PROJECTS[0]['requires-python']}").specifier
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


@pytest.mark.parametrize("text", ASKED)
def test_each_pin_is_within_the_range_that_is_asked_for(text):
    asked = Requirement(text)
    assert PINS[asked.name.lower().replace("_", "-")] in asked.specifier


def test_torch_and_triton_ranges_are_the_ones_that_work():
    ranges = {Requirement(text).name: Requirement(text).specifier for text in ASKED}
    assert all(version in ranges["torch"] for version in ("2.11.0", "2.12.0", "2.13.0"))
    assert all(version in ranges["triton"] for version in ("3.6.0", "3.7.1", "3.9.0"))
    assert PINS["torch"] == "2.13.0"


def test_what_is_installed_is_what_is_pinned():
    from importlib.metadata import distributions

    if not (ROOT / ".venv").exists():
        pytest.skip("not an environment that `make setup` made")
    installed = {d.metadata["Name"].lower().replace("_", "-"): d.version.split("+")[0] for d in distributions()}
    ours = {"whywrong", "whywrong-workbook", "pip", "setuptools", "wheel"}
    unpinned = {name: v for name, v in installed.items() if name not in ours and PINS.get(name) != v}
    assert not unpinned


def test_conda_users_get_the_same_set_through_pip():
    (through_pip,) = [entry["pip"] for entry in CONDA if isinstance(entry, dict)]
    assert through_pip[0] == "-c constraints.txt"
    for line, folder, extras in zip(through_pip[1:], (".", "./labkit"), EXTRAS, strict=True):
        where, named = re.fullmatch(r"-e (\S+)\[(.*)\]", line).groups()
        assert (where, set(named.split(","))) == (folder, set(extras) - {"gpu"})


def test_conda_gives_a_supported_python_and_the_pinned_jupyterlab():
    conda = dict(entry.split("=") for entry in CONDA if isinstance(entry, str) and "=" in entry)
    assert f"{conda['python']}.0" in PYTHON
    assert PINS["jupyterlab"].startswith(f"{Version(conda['jupyterlab'])}.")


PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PURE = ("rouge-score", "sqlitedict", "word2number")


@pytest.mark.parametrize("version", PYTHONS)
def test_no_pinned_package_refuses_a_python_that_we_say_we_have(version):
    assert f"{version}.0" in PYTHON
    assert PROJECTS[1]["requires-python"] == PROJECTS[0]["requires-python"]
    installed = [d for d in importlib.metadata.distributions() if d.metadata["Name"].lower().replace("_", "-") in PINS]
    asked = {d.metadata["Name"]: d.metadata.get("Requires-Python") or ">=3" for d in installed}
    assert len(asked) > 100
    assert not [name for name, python in asked.items() if f"{version}.9" not in Requirement(f"p{python}").specifier]


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_pins_resolve_to_wheels_for_each_python(version, tmp_path):
    """All but PURE have one. Asks the registry of packages, and installs nothing."""
    if not (uv := shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))):
        pytest.skip("uv is not installed")
    (tmp_path / "asked").write_text("\n".join(ASKED))
    wheels = ["--only-binary", ":all:", *(word for name in PURE for word in ("--no-binary", name))]
    where = ["--python-version", version, "--python-platform", "x86_64-manylinux_2_28", "-c", "constraints.txt"]
    command = [uv, "pip", "compile", "-q", *where, *wheels, str(tmp_path / "asked"), "-o", str(tmp_path / "found")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(?m)^([\w.-]+)==(\S+)", (tmp_path / "found").read_text())
    assert {name.lower().replace("_", "-"): pin for name, pin in found}.items() <= PINS.items()


def test_make_takes_every_python_that_the_project_takes():
    text = (ROOT / "Makefile").read_text()
    least, most = re.search(r"not \((3, \d+)\) <= sys.version_info\[:2\] <= \((3, \d+)\)", text).groups()
    assert (least.replace(", ", "."), most.replace(", ", ".")) == (PYTHONS[0], PYTHONS[-1])


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> LOG
case "$*" in
*"-m venv"*) mkdir -p VENV/bin; cp "$0" VENV/bin/python ;;
*"pip config get global.find-links") echo /some/wheels ;;
*"pip config get"*) exit 1 ;;
*"pip install"*uv) [ -n "$HAS_UV" ] && cp "$0" VENV/bin/uv ;;
esac
"""
"""Python and uv as far as `make setup` calls them."""


@pytest.mark.parametrize(
    ("installed", "registry", "by"),
    [(True, True, "uv pip install"), (False, True, "uv pip install"), (False, False, "python -m pip install")],
    ids=["uv is there", "pip installs uv", "no uv"],
)
def test_make_installs_with_uv_where_it_can_be_had_and_with_pip_else(tmp_path, installed, registry, by):
    for name in ("sh", "make", "git", "c++", "touch", "mkdir", "cp", "basename"):
        (tmp_path / name).symlink_to(shutil.which(name))
    made, log = tmp_path / "made", tmp_path / "log"
    for name in ("python", "uv")[: 1 + installed]:
        (tmp_path / name).write_text(STAND_IN.replace("VENV", str(made)).replace("LOG", str(log)))
        (tmp_path / name).chmod(0o755)
    command = ["make", "setup", f"VENV={made}", f"INTERPRETER={tmp_path}/python"]
    around = {"PATH": str(tmp_path), "HAS_UV": "yes" * registry}
    subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=True)
    calls = log.read_text().splitlines()
    assert calls[-1].startswith(f"{by} ")
    assert calls[-1].endswith("-c constraints.txt -e .[fuzz,page,lab,dev] -e ./labkit[lab,sweep,docs]")
    assert any(call.endswith("-c constraints.txt uv") for call in calls) is not installed
    assert (made / ".done").exists()


@pytest.mark.long
def test_doctor_names_what_has_no_wheel_for_this_python(monkeypatch, capsys):
    from labkit.cli import doctor

    assert doctor.without_wheel([]) == []
    monkeypatch.setattr(doctor, "absent", lambda: ["numba", "triton"])
    ends = {"numba": 1, "triton": 0}
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, ends.get(command[-1], 0))
    )
    doctor.report()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no wheel")]
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert told == [f"no wheel for Python {version} where pip looks: numba; expected Python 3.11 to 3.14"]


def test_what_is_asked_for_and_is_not_there_is_told_from_what_is(monkeypatch):
    from labkit.cli import doctor

    asked = {
        "whywrong": ["numpy>=2.0", "not-there>=1"],
        "whywrong-workbook": ["nor-that>=1", "other>=1; extra == 'gpu'"],
    }
    monkeypatch.setattr(doctor.importlib.metadata, "requires", asked.get)
    assert doctor.absent() == ["not-there", "nor-that"]
