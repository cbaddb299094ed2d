"""A correct kernel may break ties otherwise, and take the other side of a kink; a wrong one is flagged beside them."""

import pytest
import torch

import whywrong
from whywrong.fuzzing.fuzz import check

X, G = torch.tensor([-1.0, 0.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
BOUNDS = torch.tensor([-1.0, 0.5, 1.0, 3.0])
A, B, C = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
ROWS, ABOVE = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 1.0, 0.0, -1.0]]), torch.tensor([1.0, 2.0])
KEYS, LOAD = torch.tensor([2.0, 1.0, 2.0, 1.0, 3.0]), torch.arange(5.0) + 10.0
IMAGE, POOLED = torch.ones(1, 1, 4, 4), torch.arange(1.0, 5.0).view(1, 1, 2, 2)
SCORES, MASK = torch.arange(16.0).view(4, 4) / 7.0, torch.zeros(4, 4, dtype=torch.bool)
MASK[2], MASK[1, 0] = True, True


def gradient_of(function):
    def reference(*given):
        x, above = [one.detach().requires_grad_() for one in given[:-1]], given[-1]
        found = torch.autograd.grad(function(*x), x, above)
        return found if len(found) > 1 else found[0]

    return reference


def to_first(x, above):
    out = torch.zeros_like(x)
    out[torch.arange(len(x)), x.argmax(1)] = above
    return out


def to_last_of_four(x, above):
    out = torch.zeros_like(x)
    out[..., 1::2, 1::2] = above
    return out


def last_of_equal(keys):
    return len(keys) - 1 - torch.argsort(keys.flip(0), stable=True)


def pooled(x):
    return torch.nn.functional.max_pool2d(x, 2)


def first_of_equal(keys):
    return torch.argsort(keys, stable=True)


def masked(scores, mask):
    return torch.softmax(scores.masked_fill(mask, -torch.inf), -1)


ABS, RELU, MAXIMUM = gradient_of(torch.abs), gradient_of(torch.relu), gradient_of(torch.maximum)
CLAMP, AMAX, POOL = (gradient_of(f) for f in (lambda x: x.clamp(-1, 1), lambda x: x.amax(1), pooled))
CORRECT = {
    "abs, one side": (lambda x, g: torch.where(x >= 0, 1.0, -1.0) * g, ABS, (X, G)),
    "relu, one side": (lambda x, g: (x >= 0) * g, RELU, (X, G)),
    "maximum, to one": (lambda a, b, g: ((a >= b) * g, (b > a) * g), MAXIMUM, (A, B, C)),
    "clamp, outside": (lambda x, g: ((x > -1) & (x < 1)) * g, CLAMP, (BOUNDS, G)),
    "amax, to the first": (to_first, AMAX, (ROWS, ABOVE)),
    "pool, to the last": (to_last_of_four, POOL, (IMAGE, POOLED)),
    "argmax, the last": (lambda x: 3 - x.flip(1).argmax(1), lambda x: x.argmax(1), (ROWS,)),
    "argsort, the last first": (last_of_equal, first_of_equal, (KEYS,)),
    "what is sorted by keys": (lambda k, y: y[last_of_equal(k)], lambda k, y: y[first_of_equal(k)], (KEYS, LOAD)),
    "a masked row, zeros": (lambda s, m: masked(s, m).nan_to_num(0.0), masked, (SCORES, MASK)),
    "a masked row, NaN": (masked, masked, (SCORES, MASK)),
}
WRONG = {
    "abs, beside": (lambda x, g: torch.where(x >= 0, 1.0, -1.01) * g, ABS, (X, G)),
    "abs, at the kink": (lambda x, g: torch.where(x == 0, 9.0, x.sign()) * g, ABS, (X, G)),
    "relu, beside": (lambda x, g: (x >= -1) * g, RELU, (X, G)),
    "maximum, beside": (lambda a, b, g: ((a > b) * g, (b < a) * g), MAXIMUM, (A, B, C)),
    "clamp, beside": (lambda x, g: ((x > -1) & (x < 0.4)) * g, CLAMP, (BOUNDS, G)),
    "amax, beside": (lambda x, g: to_first(x, g) * 1.01, AMAX, (ROWS, ABOVE)),
    "pool, too much": (lambda x, g: 9.0 * to_last_of_four(x, g), POOL, (IMAGE, POOLED)),
    "argmax, another": (lambda x: x.argmin(1), lambda x: x.argmax(1), (ROWS,)),
    "argsort, descending": (lambda k: torch.argsort(-k), first_of_equal, (KEYS,)),
    "sorted, descending": (lambda k, y: y[torch.argsort(-k)], lambda k, y: y[first_of_equal(k)], (KEYS, LOAD)),
    "a masked row, another off": (lambda s, m: masked(s, m).nan_to_num(0.0) * 1.001, masked, (SCORES, MASK)),
    "NaN in another row": (
        lambda s, m: masked(s, m) + torch.tensor([0, torch.nan, 0, 0])[:, None],
        masked,
        (SCORES, MASK),
    ),
}


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_kernel_may_choose_otherwise(name):
    kernel, reference, inputs = CORRECT[name]
    assert check(kernel, reference, inputs, precision=whywrong.Precision()) is None


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_flagged_beside_ties(name):
    kernel, reference, inputs = WRONG[name]
    assert check(kernel, reference, inputs, precision=whywrong.Precision()) is not None


def routed(x, w, table):
    chances, chosen = torch.topk(torch.softmax(x @ w, -1), 2, -1)
    return (chances[..., None] * table[chosen]).sum(1)


def routed_by_scores(x, w, table):
    """The same, but chosen by the scores: where all chances are equal, other experts."""
    scores = x @ w
    chosen = scores.topk(2, -1).indices
    return (torch.softmax(scores, -1).gather(1, chosen)[..., None] * table[chosen]).sum(1)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("rows", [64, 256])
def test_a_router_whose_experts_tie_in_all_rows_is_not_flagged(rows):
    torch.manual_seed(0)
    given = {"x": torch.ones(rows, 100), "w": torch.randn(100, 8) * 1e-39, "table": torch.randn(8, 500)}
    golden = whywrong.golden(routed, **given)
    for kernel, first in ((routed_by_scores, None), (lambda **g: 20.0 * routed_by_scores(**g), "output")):
        observed = given | {"output": kernel(**given)}
        assert whywrong.localise(observed, golden, precision=whywrong.Precision("float32")).first == first


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, -2.0]))

    def forward(self, x):
        return (self.weight.abs() * x).sum()


def test_a_gradient_that_is_a_step_is_told_from_a_file_too(tmp_path):
    """In which nobody has marked what autograd called: by its name."""
    module = Scaled()
    golden = whywrong.golden(module, torch.ones(3))
    golden.save(tmp_path / "golden.safetensors")
    observed = {name: golden[name] for name in golden.names}
    for at_zero, first in ((1.0, None), (-1.0, None), (9.0, "grad:weight")):
        given = observed | {"grad:weight": torch.tensor([at_zero, 1.0, -1.0])}
        for one in (golden, whywrong.load(tmp_path / "golden.safetensors")):
            assert whywrong.localise(given, one, precision=whywrong.Precision("float32")).first == first
