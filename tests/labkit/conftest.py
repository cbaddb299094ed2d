"""What the tests of `labkit diff` share."""

import json

import pytest
from safetensors.torch import save_file

from labkit.cli.main import main


@pytest.fixture
def judged(capsys):
    """The exit code of `labkit diff --json` on two files or folders, and what it says."""

    def judge(*arguments):
        code = main(["diff", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return judge


@pytest.fixture
def said(tmp_path, judged):
    """The verdict on two traces that are given as tensors and metadata; both have the metadata."""

    def judge(golden, observed, steps=None, **about):
        for name, tensors in (("golden", golden), ("observed", observed)):
            metadata = {"order": json.dumps(list(golden)), "steps": json.dumps(steps or {})} | about
            given = {key: value.clone().contiguous() for key, value in tensors.items()}
            save_file(given, tmp_path / f"{name}.safetensors", metadata)
        return judged(tmp_path / "golden.safetensors", tmp_path / "observed.safetensors")[1]

    return judge
