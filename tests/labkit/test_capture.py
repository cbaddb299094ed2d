"""Steps of torch modules by hooks, two models matched by a name map, and the observer's effect."""

import pytest
import torch
from torch import nn

from labkit import capture, localise
from labkit.errors import UsageError


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


class Twice(nn.Module):
    """Calls one layer twice and returns a dict with a tuple in it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return {"pair": (y, self.layer(y)), "note": "text"}


def test_outputs_and_gradients_are_named_as_the_module_tree_names_them():
    trace = capture(block(), torch.randn(3, 8))
    assert trace.names == [
        "0", "1", "2", "output", "grad:input.0", "grad:0.weight", "grad:0.bias", "grad:2.weight", "grad:2.bias",
    ]  # fmt: skip
    assert trace.about["observer"] == "none"


def test_a_gradient_is_autograds(rng):
    model, x = block(), torch.randn(3, 8)
    trace = capture(model, x, loss=lambda y: y.pow(2).sum())
    y = model(x)
    y.pow(2).sum().backward()
    assert torch.equal(trace["grad:0.weight"], model[0].weight.grad)
    assert torch.equal(trace["output"], y.detach())


def test_a_second_call_and_the_parts_of_an_output_have_names():
    names = capture(Twice(), torch.randn(2, 8)).names
    assert {"layer", "layer#2", "output.pair.0", "output.pair.1"} <= set(names)


def test_the_module_is_left_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[2].weight.grad = kept = torch.ones(2, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace = capture(model, torch.randn(5, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[2].weight.grad is kept
    assert not any(part._forward_hooks for part in model.modules())
    assert trace.about["observer"] == "none", "dropout is drawn from the same state"


class Shy(nn.Module):
    """Gives another result when it is looked at: what an in-place change after a hook's copy, or a race, does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(x) * (2.0 if self.inner._forward_hooks else 1.0)


def test_an_observer_that_changes_the_result_is_reported():
    assert capture(Shy(), torch.ones(3)).about["observer"].startswith("differs when nothing is captured: output")


class Renamed(nn.Module):
    def __init__(self, source, factor=1.0):
        super().__init__()
        self.up, self.act, self.down = source[0], source[1], source[2]
        self.extra = nn.Identity()
        self.factor = factor

    def forward(self, x):
        return self.down(self.factor * self.act(self.extra(self.up(x))))


MAP = {"0": "up", "1": "act", "2": "down"} | {
    f"grad:{a}.{kind}": f"grad:{b}.{kind}" for a, b in {"0": "up", "2": "down"}.items() for kind in ("weight", "bias")
}


def test_two_models_are_matched_by_a_map_and_the_unmapped_is_listed():
    x = torch.randn(3, 8)
    golden = capture(block().double(), x.double())
    same = localise(capture(Renamed(block()).double(), x.double()), golden, names=MAP)
    assert (same.first, same.unexpected) == (None, ["extra"])
    wrong = localise(capture(Renamed(block(), 1.1).double(), x.double()), golden, names=MAP)
    assert wrong.first == "2"
    unmapped = localise(capture(Renamed(block()).double(), x.double()), golden, names={"0": "up"})
    assert unmapped.first == "1"
    assert "missing in the observed" in str(unmapped)


def test_a_map_to_a_step_that_is_not_there_is_refused():
    golden = capture(block(), torch.randn(3, 8))
    with pytest.raises(UsageError, match="the observed has no step 'upp'"):
        localise(golden, golden, names={"0": "upp"})
    with pytest.raises(UsageError, match="the golden has no step 'zero'"):
        localise(golden, golden, names={"zero": "0"})


def test_no_module_and_no_tensor_are_refused():
    with pytest.raises(UsageError, match="module: function is not right"):
        capture(lambda x: x, torch.ones(1))

    class Silent(nn.Module):
        def forward(self, x):
            return "nothing"

    with pytest.raises(UsageError, match="holds no tensor"):
        capture(Silent(), torch.ones(1))
