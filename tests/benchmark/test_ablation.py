"""Parts of the search that are taken out to see what they earn."""

import re

import pytest
import torch

import whywrong
from tools.ablation import PARTS, without

SAID = {
    "regions": "x is 2 times as large, but only from 3 on of dimension 0",
    "part of a sum": "mm leaves out 8 to 9 of dimension 1 of 10 of x",
    "several numbers": "mul has 2 where the reference has 3; add has 1 where the reference has 2",
    "part of a dimension": "w is zero, but only in 0 to 3 of dimension 0 of 8 of w",
    "one way": "b is zero, as if it were left out, but only for add of b",
    "twice, or later": "what makes y of x is done twice",
}


@pytest.mark.parametrize("part", SAID)
def test_a_sentence_shows_the_part_that_spoke(part):
    spoke = {name for name, pattern in PARTS.items() if re.search(pattern, SAID[part])}
    assert part in spoke
    assert spoke <= {part, "twins"}  # two numbers are said as two changes are


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("part", PARTS)
def test_each_part_can_be_taken_out_and_is_there_again(part):
    x, w = (torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    recorded = whywrong.golden(lambda x, w: x * 2.5 + w * 0.75, x=x, w=w)
    observed = {"x": x.float(), "w": w.float(), "output": (x * 2.0 + w * 0.25).float()}
    with without(part):
        found = whywrong.explain(observed, recorded)
    assert (found.verdict == "cause") == (part != "several numbers"), found
    assert whywrong.explain(observed, recorded).verdict == "cause"
