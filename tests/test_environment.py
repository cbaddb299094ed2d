"""pyproject.toml, constraints.txt and environment.yml say the same. (environment.yml itself is not solved here.)"""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from labkit.session.catalogue import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
ASKED = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
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
    ours = {"labkit", "pip", "setuptools", "wheel"}
    unpinned = {name: v for name, v in installed.items() if name not in ours and PINS.get(name) != v}
    assert not unpinned


def test_conda_users_get_the_same_set_through_pip():
    (through_pip,) = [entry["pip"] for entry in CONDA if isinstance(entry, dict)]
    extras = set(re.search(r"\[(.*)\]", through_pip[1])[1].split(","))
    assert through_pip[0] == "-c constraints.txt"
    assert extras == set(PROJECT["optional-dependencies"]) - {"gpu"}


def test_conda_gives_a_supported_python_and_the_pinned_jupyterlab():
    conda = dict(entry.split("=") for entry in CONDA if isinstance(entry, str) and "=" in entry)
    assert f"{conda['python']}.0" in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert PINS["jupyterlab"].startswith(f"{Version(conda['jupyterlab'])}.")
