"""What is beside the code says what is so: workflows, the author, the version, pinned hooks, the site."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

import whywrong
from labkit.session.catalogue import ROOT

PROJECTS = [tomllib.loads((ROOT / of / "pyproject.toml").read_text())["project"] for of in ("", "labkit")]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path):
    """The steps of all jobs of a workflow; `${{ matrix.NAME }}` stands for each value that it takes."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        matrix = dict(job.get("strategy", {}).get("matrix", {}))
        rows = [{key: value} for key, values in matrix.items() if key != "include" for value in values]
        for step in job["steps"]:
            name = re.search(r"matrix\.(\w+) }}", step.get("run", ""))
            values = [row[name[1]] for row in [*rows, *matrix.get("include", [])] if name[1] in row] if name else [""]
            yield from (step | {"run": re.sub(r"\${{.*?}}", value, step.get("run", ""))} for value in values)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path):
    targets = re.search(r"(?m)^\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split()
    scripts = {name for project in PROJECTS for name in project["scripts"]}
    commands = [step["run"].split() for step in steps(path) if step["run"]]
    assert commands
    for program, what, *_ in commands:
        assert what in targets if program == "make" else program.removeprefix(".venv/bin/") in scripts, (program, what)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_takes_actions_by_their_commits(path):
    workflow, actions = yaml.safe_load(path.read_text()), [step["uses"] for step in steps(path) if "uses" in step]
    assert workflow["permissions"] == {"contents": "read"}
    assert not [job for job in workflow["jobs"].values() if "permissions" in job]
    assert actions
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


def test_the_author_is_who_the_licence_names():
    (holder,) = re.findall(r"Copyright \(c\) \d+ (.+)", (ROOT / "LICENSE").read_text())
    assert CITATION["authors"] == [{"name": holder}]
    assert all(project["authors"] == [{"name": holder}] for project in PROJECTS)


def test_version_and_licence_are_one():
    (version,) = {project["version"] for project in PROJECTS}
    assert CITATION["version"] == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert {CITATION["license"], *(project["license"] for project in PROJECTS)} == {"MIT"}


def test_the_hook_of_ruff_is_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (revision,) = [repo["rev"] for repo in hooks if "ruff" in repo["repo"]]
    assert f"\nruff=={revision.removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_issue_templates_ask_for_doctor():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    asked = [[part["attributes"]["label"] for part in yaml.safe_load(path.read_text())["body"]] for path in forms]
    assert asked
    assert all("Output of `labkit doctor`" in labels for labels in asked)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_without_a_network(tmp_path):
    pytest.importorskip("myst_nb")
    alone = [unshare, "-rn"] if (unshare := shutil.which("unshare")) else []
    if alone and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = []
    command = [*alone, sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "docs" / "reference.html").read_text(encoding="utf-8")
    assert not [name for name in whywrong.__all__ if f'id="whywrong.{name}"' not in reference]
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "notebooks").glob("*.html")}
    assert set(pages) == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    described = [text for page in pages.values() for text in re.findall(r'<img alt="([^"]*)"', page)]
    assert described
    assert not [text for text in described if text.endswith(".png")], "a picture has its text, not its file's name"
