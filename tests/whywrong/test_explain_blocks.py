"""A block of a Llama is explained from its output alone; the long form keeps the times that are declared."""

import time

import pytest
import torch

pytest.importorskip("transformers")


from tools import explain_blocks as blocks
from tools import large_model


@pytest.mark.long
def test_another_activation_in_one_block_is_named():
    row = blocks.measure(layers=2, width=32, batch=1, length=6, fault="gelu")
    assert (row["found"].step, row["found"].verdict) == (row["block"], "cause"), row["found"]
    assert row["found"].causes[0].kind in blocks.KINDS["gelu"]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "seconds"), [(2, 30.0), (8, 120.0)])
def test_large_blocks_are_explained_in_the_time_promised(layers, seconds, monkeypatch):
    monkeypatch.setattr("whywrong.explaining.search.time", time)
    row = blocks.measure(layers, 256, 2, 64, "gelu")
    assert row["found"].causes[0].kind in blocks.KINDS["gelu"], row["found"]
    assert row["localise"] + row["explain"] < seconds


@pytest.mark.long
def test_a_model_is_walked_block_by_block_to_the_wrong_one():
    right, tokens = large_model.model(3, 256), torch.randint(0, 32000, (1, 64))
    with torch.no_grad():
        found = {name: report.first for name, report, _, _ in large_model.walk(right, 1, "gelu", tokens)}
    assert found == {"block 0": None, "block 1": "mlp.act_fn", "block 2": None, "norm and head": None}
