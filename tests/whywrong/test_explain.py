"""Why a step is wrong: breaks of the recorded reference that give what was observed, and nothing that does not."""

import json
import logging
import re
import time
from functools import partial

import pytest
import torch

import whywrong
from tools import random_residuals
from whywrong.errors import UsageError
from whywrong.explaining import mutations
from whywrong.explaining.part import Part
from whywrong.explaining.search import _sampled, _smooth
from whywrong.recording.steps import as_trace
from whywrong.reporting.command import main

F32 = whywrong.Precision(storage="float32")


def reference(x, w, gain, bias):
    """A small program with named steps, no two sizes equal."""
    mixed = whywrong.step("mixed", x @ w)
    variance = mixed.var(-1, correction=0, keepdim=True)
    normed = whywrong.step("normed", (mixed - mixed.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5) * gain + bias)
    active = whywrong.step("active", torch.nn.functional.gelu(normed))
    return whywrong.step("weights", torch.softmax(active / 7**0.5, -1))


def inputs(seed=0, rows=19, inner=23, columns=14):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (rows, inner), "w": (inner, columns), "gain": (columns,), "bias": (columns,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def port(x, w, gain, bias, fault=""):
    """The same in float32, with a fault."""
    mixed = x[:, :16] @ w[:16] if fault == "tail of the sum" else x @ w
    n = mixed.shape[-1]
    variance = mixed.var(-1, correction=int(fault == "over n - 1"), keepdim=True)
    eps = 1e-3 if fault == "another eps" else 1e-5
    root = torch.sqrt(variance) + eps if fault == "eps outside" else torch.sqrt(variance + eps)
    used = gain.roll(1) if fault == "gain one on" else gain
    normed = (mixed - mixed.mean(-1, keepdim=True)) / root * used + (0 if fault == "no bias" else bias)
    normed[-1] = 0.0 if fault == "last row not written" else normed[-1]
    active = torch.nn.functional.gelu(normed, approximate="tanh" if fault == "by tanh" else "none")
    scores = active / (1.0 if fault == "not scaled" else 7**0.5)
    weights = torch.softmax(scores, 0 if fault == "over columns" else 1)
    weights = weights.reshape(n, -1).T if fault == "as it lies" else weights
    found = {"x": x, "w": w, "gain": gain, "bias": bias, "mixed": mixed, "normed": normed, "active": active}
    return found | {"weights": weights.contiguous()}


FAULTS = {
    "tail of the sum": ("mixed", "truncate"),
    "over n - 1": ("normed", "ddof"),
    "another eps": ("normed", "eps"),
    "eps outside": ("normed", "eps"),
    "gain one on": ("normed", "shift"),
    "no bias": ("normed", "drop_term"),
    "last row not written": ("normed", "zero"),
    "by tanh": ("active", "function"),
    "not scaled": ("weights", "scale"),
    "over columns": ("weights", "axis"),
    "as it lies": ("weights", "layout"),
}


@pytest.fixture(scope="module")
def golden():
    return whywrong.golden(reference, **inputs())


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_named_with_its_step_and_line(golden, fault):
    found = whywrong.explain(port(**inputs(), fault=fault), golden, precision=F32)
    step, kind = FAULTS[fault]
    assert (found.step, found.verdict) == (step, "cause"), found
    assert found.causes[0].kind in {kind, "factor" if kind == "scale" else kind, "truncate" if kind == "zero" else kind}
    assert "test_explain.py:" in found.causes[0].line
    assert 0.0 <= found.causes[0].of_bound <= 1.0


def test_a_right_port_has_no_cause(golden):
    found = whywrong.explain(port(**inputs()), golden, precision=F32)
    assert (found.step, found.verdict, found.causes) == (None, "no divergence", [])


@pytest.mark.long
def test_what_no_break_gives_is_none_of_these(golden):
    observed = port(**inputs())
    observed["normed"] = torch.randn(observed["normed"].shape, generator=torch.Generator().manual_seed(5))
    found = whywrong.explain(observed, golden, precision=F32)
    assert (found.step, found.verdict, found.causes) == ("normed", "none of these", [])
    assert found.tried > 500


@pytest.mark.long
def test_a_cause_reproduces_the_numbers_and_a_fault_beside_it_refutes_it(golden):
    observed = port(**inputs(), fault="by tanh")
    observed["active"][3, 4] += 1.0
    assert whywrong.explain(observed, golden, precision=F32).verdict == "none of these"


def test_two_breaks_that_these_inputs_do_not_tell_apart_are_undecidable_and_others_separate_them():
    def scaled(x, gain):
        return whywrong.step("y", x * gain.sum() + x)

    x, gain = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([1.0, 1.0])
    golden = whywrong.golden(scaled, x=x, gain=gain)
    found = whywrong.explain({"x": x, "gain": gain, "y": 2.0 * x}, golden, precision=F32)
    assert found.verdict == "undecidable"
    assert len(found.causes) > 1
    assert set(found.separate) == {"x", "gain"}
    assert bool((found.separate["gain"] != gain).all())


def test_inputs_that_hide_a_kind_are_told():
    def product(a, b):
        return whywrong.step("c", (a @ b) * 0.5)

    a = torch.full((6, 6), 0.7)
    b = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    golden = whywrong.golden(product, a=a, b=b)
    found = whywrong.explain({"a": a, "b": b, "c": a @ b}, golden, precision=F32)
    assert (found.verdict, found.causes[0].kind) == ("cause", "scale")
    assert "transpose" in found.blind_to  # a constant matrix is its own transpose


def test_runs_that_differ_are_a_race(golden):
    right, wrong = port(**inputs()), port(**inputs(), fault="last row not written")
    found = whywrong.explain([right, wrong], golden, precision=F32)
    assert (found.step, found.verdict, found.causes[0].kind) == ("normed", "cause", "race")


def test_runs_that_are_all_wrong_and_differ_by_order_alone_are_no_race(golden):
    one, other = port(**inputs(), fault="no bias"), port(**inputs(), fault="no bias")
    other["normed"] = torch.nextafter(other["normed"], torch.tensor(10.0))
    found = whywrong.explain([one, other], golden, precision=F32)
    assert (found.verdict, found.causes[0].kind) == ("cause", "drop_term")


def test_two_faults_the_first_is_named_and_the_other_is_looked_at_by_its_name(golden):
    observed = port(**inputs(), fault="no bias")
    observed["weights"] = torch.softmax(observed["active"], -1)
    first = whywrong.explain(observed, golden, precision=F32)
    assert (first.step, first.causes[0].kind, first.others) == ("normed", "drop_term", ["weights"])
    second = whywrong.explain(observed, golden, precision=F32, step="weights")
    assert (second.step, second.causes[0].kind in ("scale", "factor")) == ("weights", True)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_narrow_storage_is_explained_too(storage):
    kind = getattr(torch, storage)
    given = {name: x.to(kind) for name, x in inputs().items()}
    golden = whywrong.golden(reference, **given)
    observed = {
        n: v.to(kind) for n, v in port(**{n: x.float() for n, x in given.items()}, fault="over columns").items()
    }
    found = whywrong.explain(observed, golden, precision=whywrong.Precision(storage=storage))
    assert (found.step, found.verdict, found.causes[0].kind) == ("weights", "cause", "axis")


def test_fewer_digits_are_named_only_where_nothing_else_fits(golden):
    observed = port(**inputs())
    observed["mixed"] = inputs()["x"].bfloat16().float() @ inputs()["w"].bfloat16().float()
    found = whywrong.explain(observed, golden, precision=F32, step=None)
    assert (found.step, found.causes[0].kind) == ("mixed", "precision")
    assert found.causes[0].says.startswith("consistent with")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"golden": {"y": torch.ones(2)}}, "expected what whywrong.golden recorded"),
        ({"step": "mixed"}, "step: expected a wrong one.*got 'mixed'"),
        ({"observed": []}, "observed: expected one run at least, got \\[]"),
        ({"seconds": "10"}, "seconds: expected a number from 0.*got '10'"),
        ({"seconds": -1}, "seconds: expected a number from 0.*got -1"),
        ({"names": ["mixed"]}, "names: expected the golden's names mapped to the observed's.*got \\['mixed']"),
    ],
)
def test_bad_input_is_one_line(golden, arguments, words):
    given = {"observed": port(**inputs(), fault="no bias"), "golden": golden} | arguments
    with pytest.raises(UsageError, match=r".+") as error:
        whywrong.explain(**given)
    assert re.search(words, str(error.value))
    assert "\n" not in str(error.value)


def test_a_missing_step_and_a_wrong_input_are_said_without_a_search(golden):
    observed = port(**inputs())
    found = whywrong.explain({**observed, "normed": observed["normed"][:3]}, golden, precision=F32)
    assert (found.verdict, found.tried) == ("none of these", 0)
    assert "there are no numbers to reproduce" in str(found)
    found = whywrong.explain({**observed, "x": observed["x"] + 1.0}, golden, precision=F32)
    assert "is an input" in str(found)


def test_the_first_nan_is_where_it_is_and_not_where_the_first_wrong_number_is(golden):
    observed = port(**inputs())
    observed["normed"][1, 2], observed["normed"][7, 3] = 100.0, float("nan")
    assert "1 NaN, first at (7, 3)" in whywrong.localise(observed, golden, precision=F32).findings["normed"].words
    observed["normed"][4, 4] = float("inf")
    words = whywrong.localise(observed, golden, precision=F32).findings["normed"].words
    assert "1 NaN, the first beyond any bound at (4, 4)" in words


def test_a_missing_and_an_unexpected_step_of_one_shape_are_perhaps_one(golden):
    observed = port(**inputs())
    observed["q"] = observed.pop("normed")  # as its neighbours, which are there
    found = whywrong.localise(observed, golden, precision=F32)
    (note,) = (one for one in found.notes if one.startswith("q "))
    assert "is it perhaps normed" in note
    assert "names=" in note


def test_a_factor_of_a_few_numbers_is_found_and_one_number_has_no_cause():
    def halves(x):
        return {"y": x.sum(-1)}

    for rows, causes in ((3, ["scale"]), (1, [])):
        x = torch.randn(rows, 7, generator=torch.Generator().manual_seed(4))
        observed = {"x": x, "y": x.sum(-1) * 1.2345}
        found = whywrong.explain(observed, whywrong.golden(halves, x=x), precision=F32)
        assert [cause.kind for cause in found.causes] == causes, found


def test_a_step_that_no_input_enters_is_explained():
    def turned(x):
        angles = whywrong.step("angles", 0.3 * torch.arange(9, dtype=x.dtype))
        return whywrong.step("turned", x * torch.cos(angles))

    x = inputs(columns=9)["w"]
    angles = 0.3 * torch.arange(1, 10, dtype=torch.float32)
    observed = {"x": x, "angles": angles, "turned": x * torch.cos(angles)}
    found = whywrong.explain(observed, whywrong.golden(turned, x), precision=F32)
    assert (found.step, found.verdict) == ("angles", "cause"), found
    assert "torch.arange(9" in found.causes[0].line


def kernels():
    """What kernels get wrong that a library never does: the reference, what was observed, the kind and its words."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((9, 50), (50, 22), (22,)))
    x += 0.7
    mean, long = x.mean(-1, keepdim=True), torch.nn.functional.pad(x, (0, 14))
    memory = torch.cat([x.flatten(), torch.zeros(100)])

    def mean_square(x):
        return (x - x.mean(-1, keepdim=True)).square().mean(-1)

    def variance(x):
        return torch.var_mean(x, -1, correction=0)[0]

    def softmax(x):
        return torch.softmax(x, -1)

    def product(x, w):
        return x @ w

    def total(x):
        return x.sum(0)

    def layer_norm(x):
        return torch.nn.functional.layer_norm(x, (50,))

    def weighed(x, w):
        return torch.exp(x - whywrong.step("lse", torch.logsumexp(x, 1, keepdim=True))) @ w

    def biased(x, w, b):
        return torch.nn.functional.gelu(x @ w + b)

    def written(value):
        return torch.cat([value[:6], torch.full_like(value[6:], torch.nan)])

    late = torch.nn.functional.gelu(x @ w) + b
    read = memory.as_strided((9, 50), (22, 1)), memory.as_strided((9, 50), (52, 1))
    mean = x.mean(-1, keepdim=True)
    squares = torch.nn.functional.pad(x, (0, 14)).sub(mean).square().sum(-1, keepdim=True)
    unmasked = (x - mean) / torch.sqrt(squares / 50 + 1e-5)
    padded, counted = (long - mean).square().sum(-1) / 50, softmax(long)[:, :50]
    yield mean_square, (x,), padded, "mask", "the padding of dimension -1 up to 64, where x is zero"
    yield softmax, (x,), counted, "mask", "the sum of softmax counts the padding"
    yield layer_norm, (x,), unmasked, "mask", "the variance counts the padding up to 64, which is zero less the mean"
    yield total, (x,), x[8:].sum(0), "truncate", "sum leaves out 0 to 7 of dimension 0 of 9 of x"
    yield mean_square, (x,), mean_square(x) * 50 / 64, "scale", "over 64, not 50"
    yield product, (x, w), read[0] @ w, "layout", "x, as used here, is read with a leading dimension of 22, not 50"
    yield product, (x, w), read[1] @ w, "none", ""
    yield biased, (x, w, b), late, "other", "add comes after"
    some = torch.rand(9, 22, generator=generator)
    yield product, (x, w), torch.where(some < 0.2, 0.0, x @ w), "none", ""  # which may be computed
    wide = torch.randn(50, 400, generator=generator)
    lost = (torch.rand(9, 400, generator=generator) < 0.2).float()
    yield product, (x, wide), torch.where(lost > 0, torch.nan, x @ wide), "zero", "output is NaN in"
    running = x.unflatten(1, (5, 10)).amax(2).cummax(1).values.repeat_interleave(10, 1)
    unscaled = torch.exp(x - torch.logsumexp(x, 1, keepdim=True) + running[:, -1:] - running) @ w
    yield weighed, (x, w), unscaled, "factor", "in tiles of 10, is not scaled down when a larger number comes"
    running = torch.cat([part.amax(1, keepdim=True).expand(part.shape) for part in x.split(16, 1)], 1).cummax(1).values
    unscaled = torch.exp(x - torch.logsumexp(x, 1, keepdim=True) + running[:, -1:] - running) @ w
    yield weighed, (x, w), unscaled, "factor", "a softmax, in tiles of 16, is not scaled down"
    yield (
        biased,
        (x, w, b),
        written(biased(x, w, b)),
        "zero",
        "output is NaN in 66 of 198 elements, like memory that was never written",
    )


@pytest.mark.long
def test_padding_that_a_loop_counts_each_time_is_one_cause():
    def twice(x, padding=0):
        for _ in range(2):
            mean = x.mean(-1, keepdim=True)
            square = ((x - mean).square().sum(-1, keepdim=True) + padding * mean.square()) / 50
            x = (x - mean) * torch.rsqrt(square + 1e-5) + 0.3
        return x

    x = inputs(columns=9, inner=50)["x"] + 0.7
    found = whywrong.explain({"x": x, "output": twice(x, 14)}, whywrong.golden(twice, x=x))
    assert (found.verdict, found.causes[0].kind) == ("cause", "mask"), found
    assert "up to 64" in found.causes[0].says
    assert "run 1" not in found.causes[0].says


@pytest.mark.long
@pytest.mark.parametrize(("scaled", "named"), [((0, 0), "a softmax"), ((0, 1), "what a"), ((1, 0), "the sum of")])
def test_an_online_softmax_that_forgets_to_scale_is_named(scaled, named):
    x, v = inputs()["x"] * 2.0, inputs(1)["w"]
    largest, total, mixed = torch.full((19, 1), -1e30), 0.0, 0.0
    for part, values in zip(x.split(8, 1), v.split(8), strict=True):
        larger = torch.maximum(largest, part.amax(1, keepdim=True))
        weights, less = torch.exp(part - larger), torch.exp(largest - larger)
        total = total * (less if scaled[1] else 1.0) + weights.sum(1, keepdim=True)
        mixed = mixed * (less if scaled[0] else 1.0) + weights @ values
        largest = larger
    recorded = whywrong.golden(lambda x, v: torch.softmax(x, -1) @ v, x=x, v=v)
    found = whywrong.explain({"x": x, "v": v, "output": mixed / total}, recorded)
    assert (found.verdict, found.causes[0].kind) == ("cause", "factor"), found
    assert found.causes[0].says.startswith(named)
    assert "tiles of 8" in found.causes[0].says
    logarithm = whywrong.golden(lambda x: torch.logsumexp(x, -1), x=x)
    if scaled == (0, 0):
        wrong = {"x": x, "output": (largest + total.log())[:, 0]}
        assert whywrong.explain(wrong, logarithm).causes[0].kind == "factor"


def further():
    """What is read from another place, or put together otherwise: the reference, what was observed, kind and words."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((9, 50), (50, 22), (9, 50)))
    order, m = torch.randperm(9, generator=generator), torch.randn(2, 9, 9, generator=generator)
    inverse = order.argsort()
    buffers = torch.arange(50) - 8 * (torch.arange(50) // 8 % 2)

    def rms(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def of_variance(x):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)

    def back(x):
        return (2.0 * x)[inverse]

    def blend(x, b):
        return x.clamp(-0.5, 0.5) + b.clamp(-0.25, 0.25)

    def scaled(x, b):
        return x * b / b.mean(-1, keepdim=True)

    yield lambda x: x @ x.mT, (m,), (m @ m.mT).tril(), "zero", "zero above the diagonal"
    yield lambda x, w: x @ w, (x, w), x @ w[buffers], "stale", "made of every other tile of 8"
    yield (
        rms,
        (x,),
        rms(x - x.mean(-1, keepdim=True)),
        "function",
        "x, as used here, is less its mean along dimension 1",
    )
    for normed in (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), of_variance):
        yield normed, (x,), torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5), "function", "no mean is taken from"
    yield lambda x: x.cumsum(1), (x,), torch.cat([part.cumsum(1) for part in x.split(16, 1)], 1), "stale", "tile of 16"
    yield back, (x,), 2.0 * x, "permute", "index is left out"
    yield lambda x: x[order], (x,), x, "permute", "passes as it is"
    yield blend, (x, b), x.clamp(-0.5, 0.25) + b.clamp(-0.25, 0.5), "swap", "0.5 and 0.25 of clamp are exchanged"
    yield scaled, (x, b), x * x / b.mean(-1, keepdim=True), "swap", "mul takes x in place of b"
    yield lambda x: x.exp() * x.amax(1, True), (x,), x.exp() * x.amin(1, True), "function", "amin in place of amax"
    yield lambda x: 1 / (x * x + 0.1), (x,), 1 / (x.abs() + 0.1), "function", "sqrt is taken of the result of mul"
    place, lost = torch.arange(50) % 7, torch.zeros(7, 22)
    for tile in (slice(0, 32), slice(32, 50)):  # NumPy's a[i] += b keeps the last of equal places
        lost += torch.zeros(7, 22).index_copy(0, place[tile], w[tile])
    empty = torch.zeros(7, 22, dtype=torch.float64)
    yield lambda w: empty.index_add(0, place, w), (w,), lost, "race", "in each 32 the last survives"
    yield lambda w: empty.index_put((place,), w, True), (w,), lost, "race", "in each 32 the last survives"
    columns = partial(torch.ops.aten.index_put.default, empty.T, [None, place], accumulate=True)  # of x[:, place]
    yield lambda w: columns(values=w.T), (w,), lost.T, "race", "in each 32 the last survives"
    rows = partial(torch.ops.aten.embedding_dense_backward, indices=place, num_weights=7, scale_grad_by_freq=False)
    unpadded = lost * (torch.arange(7) != 3)[:, None]
    yield lambda w: rows(w, padding_idx=3), (w,), unpadded, "race", "in each 32 the last survives"


def test_a_sum_that_lacks_an_end_that_no_list_has_is_named():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 203, generator=generator), torch.randn(203, 6, generator=generator)
    recorded = whywrong.golden(lambda x, w: x @ w, x=x, w=w)
    for part, words in ((slice(0, 139), "leaves out 139 to 202"), (slice(77, 203), "leaves out 0 to 76")):
        found = whywrong.explain({"x": x, "w": w, "output": x[:, part] @ w[part]}, recorded)
        assert (found.verdict, found.causes[0].kind) == ("cause", "truncate"), found
        assert words in found.causes[0].says


@pytest.mark.long
def test_errors_that_are_wrong_together_alone_have_no_place_to_search():
    """Each within its tolerance; a row's are one number."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 500, generator=generator), torch.randn(500, 60, generator=generator)
    recorded = whywrong.golden(lambda x, w: x @ w, x=x, w=w)
    rows = 4e-6 * torch.randn(300, 1, generator=generator, dtype=torch.float64)
    found = whywrong.explain({"x": x, "w": w, "output": (x.double() @ w.double() + rows).float()}, recorded)
    assert (found.step, found.verdict) == ("output", "none of these"), found


@pytest.mark.long
def test_errors_in_few_places_are_not_those_of_fewer_digits():
    """Of the size that fewer digits have all over, but these would be everywhere."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 200, generator=generator), torch.randn(200, 40, generator=generator)
    recorded = whywrong.golden(lambda x, w: x @ w, x=x, w=w)
    some = torch.rand(64, 40, generator=generator) < 0.05
    wrong = x @ w + some * 0.1 * torch.randn(64, 40, generator=generator)
    assert whywrong.explain({"x": x, "w": w, "output": wrong}, recorded).verdict == "none of these"
    narrow = (x.bfloat16() @ w.bfloat16()).float()
    assert whywrong.explain({"x": x, "w": w, "output": narrow}, recorded).causes[0].kind == "precision"


@pytest.mark.long
def test_an_error_that_is_like_a_value_of_the_step_is_not_that_of_fewer_digits():
    """An update that is 5% too large, which is as large beside the parameter as what bfloat16 would lose."""

    def adamw(p, m, v):
        return p * (1.0 - 3e-6) - 3e-4 * (m / (1.0 - 0.9**7)) / ((v / (1.0 - 0.999**7)).sqrt() + 1e-8)

    generator = torch.Generator().manual_seed(0)
    p, m, v = (torch.randn(40, 30, generator=generator) for _ in range(3))
    wrong = p * (1.0 - 3e-6) - 3e-4 * (m / (1.0 - 0.9**6)) / ((v**2 / (1.0 - 0.999**6)).sqrt() + 1e-8)
    found = whywrong.explain(
        {"p": p, "m": m, "v": v**2, "output": wrong}, whywrong.golden(adamw, p=p, m=m, v=v**2), precision=F32
    )
    assert found.step == "output"
    assert "precision" not in [cause.kind for cause in found.causes], found


def test_equivalent_mutations_are_listed_with_the_cause_and_a_backward_has_no_line():
    x = torch.arange(24.0).view(6, 4)
    recorded = whywrong.golden(lambda x: x.square().sum(0), loss=lambda out: out.square().sum(), x=x)
    found = whywrong.explain({"x": x, "output": x.square().sum(0), "grad:x": torch.zeros(6, 4)}, recorded)
    (cause,) = found.causes
    assert (found.step, cause.kind, cause.line) == ("grad:x", "zero", "in its backward")
    assert f"{cause.says}; equivalent mutations: " in repr(found)
    assert "drop_term: x, as used here, is zero, as if it were left out" in repr(found)
    assert f" (.also has all {len(cause.also)})" in repr(found)


def test_an_equivalent_mutation_in_another_line_is_reported():
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))

    def two(x):
        y = whywrong.step("y", 2.0 * x)
        z = y + 1.0
        return z.T.contiguous().T

    recorded = whywrong.golden(two, x=x)
    found = whywrong.explain({"x": x, "y": 2.0 * x, "output": (2.0 * x + 1.0).flip(1)}, recorded)
    (cause,) = found.causes
    (other,) = cause.elsewhere
    assert {cause.line.rpartition(": ")[2], other.rpartition(": ")[2]} == {"z = y + 1.0", "return z.T.contiguous().T"}
    assert f"also at {other}" in repr(found)


def test_whole_numbers_are_drawn_too_as_far_as_the_reference_takes_them():
    """Lengths of 32, 13 and 21 are the same in whole tiles of 4 and of 8 but for one; a single length is so in more."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))

    def cut(x, length):
        return torch.where(torch.arange(40) < length[:, None], x, 0.0).cumsum(1)

    for length in ([32, 13, 21], [23, 23, 23]):
        length = torch.tensor(length)
        wrong = cut(x, (length + 7) // 8 * 8)
        found = whywrong.explain({"x": x, "length": length, "output": wrong}, whywrong.golden(cut, x=x, length=length))
        assert found.verdict == "undecidable", found
        assert any("whole tile of 8" in cause.says for cause in found.causes)
        assert not torch.equal(found.separate["length"], length)
        where = found.separate
        apart = [cut(where["x"], where["length"]), cut(where["x"], (where["length"] + 7) // 8 * 8)]
        assert not torch.equal(*apart)
    pointer = torch.tensor([0, 3, 3, 7, 12])
    assert torch.equal(_sampled(pointer, 0, whole=False), pointer)
    assert bool((_sampled(pointer, 0, whole=True).diff() >= 0).all())
    assert torch.equal(_sampled(torch.tensor([True, False]), 0, whole=True), torch.tensor([True, False]))


def test_where_other_whole_numbers_give_no_numbers_they_stay():
    """At step 1 this divides by zero, whatever is broken: all breaks would be one, as these two are on rows a, a, c."""
    x = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))[:, [0, 0, 1]]

    def corrected(t, x):
        return x / (1.0 - 0.9 ** (t - 1.0))

    t = torch.tensor([2])
    assert _sampled(t, 0, whole=True) == 1  # as the first input is sampled
    found = whywrong.explain({"t": t, "x": x, "output": corrected(t, x).flip(1)}, whywrong.golden(corrected, t=t, x=x))
    assert (found.verdict, {"flip", "shift"} <= {cause.kind for cause in found.causes}) == ("undecidable", True), found
    assert torch.equal(found.separate["t"], t)


def test_a_number_with_a_meaning_of_its_own_stays():
    """Of labels with -100 for none, hardly any drawn between -100 and 6 would be one."""
    x = torch.randn(12, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([3, -100, 5, 1, -100, 2, 4, -100, 6, 0, -100, 1])  # each two have one that is right

    def counted(x, label):
        return torch.where(label >= 0, x, 0.0).exp()

    found = whywrong.explain({"x": x, "label": label, "output": x.exp()}, whywrong.golden(counted, x=x, label=label))
    assert (found.verdict, found.causes[0].kind) == ("cause", "mask"), found


def test_a_product_that_is_too_large_is_not_one_of_fewer_digits():
    """By 0.3%, which is as much as products of bfloat16 factors err, and no noise: it is a term too many."""
    p, x, w = (torch.randn(24, 24, generator=torch.Generator().manual_seed(k)) for k in range(3))
    recorded = whywrong.golden(lambda p, x, w: 50.0 * p + x @ w, p=p, x=x, w=w)
    noisy = 50.0 * p + (x.bfloat16().double() @ w.bfloat16().double()).float()
    larger = 50.0 * p + 1.003 * (x @ w)
    said = [whywrong.explain({"p": p, "x": x, "w": w, "output": o}, recorded, precision=F32) for o in (noisy, larger)]
    assert said[0].causes[0].says == "consistent with: fewer digits than declared (products=bfloat16)"
    assert "the result of mm" in said[1].causes[0].says, said[1]
    assert "is added, 0.003" in said[1].causes[0].says, said[1]


def test_where_nothing_is_a_number_nothing_is_named():
    """A kernel without a mask reads poison: every break that divides zero by zero would give the same."""
    a, b = torch.randn(7, 5), torch.randn(5, 6)
    recorded = whywrong.golden(lambda a, b: torch.sqrt((a @ b).square() + 1.0), a=a, b=b)
    found = whywrong.explain({"a": a, "b": b, "output": torch.full((7, 6), torch.nan)}, recorded)
    assert (found.verdict, found.causes, found.tried) == ("none of these", [], 0)
    assert "output is NaN or infinite wherever the reference is finite" in repr(found)


@pytest.mark.long
def test_an_error_like_a_result_on_the_way_is_not_that_of_fewer_digits():
    """An update with another power of its divisor: the parameter is off by about as much as bfloat16 would lose."""

    def updated(p, m, v):
        return p - 2e-2 * torch.tanh(m / (v.sqrt() + 0.3))

    generator = torch.Generator().manual_seed(0)
    p, m, v = (torch.randn(24, 10, generator=generator) for _ in range(3))
    v = v.square()
    wrong = p - 2e-2 * torch.tanh(m / (v.sqrt() + 0.3) ** 0.9)
    found = whywrong.explain(
        {"p": p, "m": m, "v": v, "output": wrong}, whywrong.golden(updated, p=p, m=m, v=v), precision=F32
    )
    assert (found.step, found.verdict) == ("output", "none of these"), found


def test_what_the_dump_has_not_is_called_by_its_name_in_the_reference():
    x, gain = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0])

    def scaled(x, gain):
        inner = whywrong.step("inner", torch.exp(x))
        return inner * gain + torch.tensor([0.5, 0.25, 2.0, 3.0, 1.0])

    recorded = whywrong.golden(scaled, x=x, gain=gain)

    def says(wrong):
        return [c.says for c in whywrong.explain({"output": wrong}, recorded, precision=F32).causes]

    (found,) = says(scaled(x, gain.flip(0)))
    assert found == "gain is reversed in dimension 0"
    (found,) = says(torch.exp(-x) * gain + scaled(0 * x, 0 * gain))
    assert found == "x is of the other sign"
    (found,) = says(scaled(x, gain) - scaled(0 * x, 0 * gain) + torch.tensor([1.0, 3.0, 2.0, 0.25, 0.5]))
    assert found == "a constant of shape [5] is reversed in dimension 0"


def test_what_is_no_step_is_called_by_the_variable_of_its_line_and_by_its_numbers():
    x, kind = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3

    def scaled(x, kind):
        weight = torch.tensor([1.0, 0.25, 0.5])[kind]
        shifted = x - x.amax(1, keepdim=True)
        total = shifted.exp().sum(1, keepdim=True)
        return shifted * weight / total

    recorded = whywrong.golden(scaled, x=x, kind=kind)

    def says(wrong):
        return [c.says for c in whywrong.explain({"x": x, "kind": kind, "output": wrong}, recorded).causes]

    total = (x - x.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    assert says(scaled(x, kind) * total / (total + 1)) == ["total is 1 too large"]
    (found,) = says(scaled(x, kind) * torch.tensor([0.5, 1.0, 2.0])[kind])
    assert found == "the constant [1, 0.25, 0.5] is reversed in dimension 0"


def test_nothing_that_gives_numbers_is_offered_in_place_of_a_truth_value():
    x = torch.arange(12.0)
    recorded = whywrong.golden(lambda x, done: x + (~done).to(x.dtype), x=x, done=x > 5.0)
    found = whywrong.explain({"x": x, "done": x > 5.0, "output": x}, recorded)
    offered = [each for cause in found.causes for each in (cause.says, *cause.also)]
    assert "the result of bitwise_not is false everywhere" in " ".join(offered)
    assert not any(" in place of bitwise_not" in each for each in offered), offered


def test_a_value_that_is_cut_to_another_format_is_named_by_it():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 48, generator=generator), torch.randn(48, 32, generator=generator)
    recorded = whywrong.golden(lambda x, w: x @ w, x=x, w=w)
    bits = x.view(torch.int32)
    for cut, words in (
        (bits & ~0xFFFF, "x, as used here, is cut to bfloat16"),
        ((bits + 0x1000) & ~0x1FFF, "x, as used here, is rounded to tf32"),
    ):
        found = whywrong.explain({"x": x, "w": w, "output": cut.view(torch.float32) @ w}, recorded, precision=F32)
        assert words in found.causes[0].says, found


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_complex_values_on_the_way_do_not_matter_to_noise():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    noise = 1.0 + 1e-3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    recorded = whywrong.golden(lambda x: torch.fft.fft(x).abs(), x=x)
    assert (
        whywrong.explain({"x": x, "output": torch.fft.fft(x).abs() * noise}, recorded, precision=F32).step == "output"
    )


def test_a_narrower_copy_in_place_of_the_number_itself_is_a_matter_of_precision():
    w, gradient = torch.randn(2, 14, 14, generator=torch.Generator().manual_seed(0))

    def update(w, gradient):
        master = whywrong.step("master", w - 0.01 * gradient)
        whywrong.step("weight", master)
        return 0.9 * w + 0.1 * master

    recorded = whywrong.golden(update, w=w, gradient=gradient)
    master = w - 0.01 * gradient
    observed = {"w": w, "gradient": gradient, "master": master, "weight": master.half()}
    rules = whywrong.Precision(steps={"weight": {"storage": "float16"}})
    found = whywrong.explain(observed | {"output": 0.9 * w + 0.1 * master.half().float()}, recorded, precision=rules)
    assert (found.verdict, found.causes[0].kind) == ("cause", "precision"), found


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(("reference", "given", "output", "kind", "words"), further())
def test_what_is_read_from_another_place_or_put_together_otherwise_is_named(reference, given, output, kind, words):
    recorded = whywrong.golden(reference, **dict(zip(reference.__code__.co_varnames, given, strict=False)))
    observed = {name: recorded[name].float() for name in recorded.inputs} | {"output": output}
    found = whywrong.explain(observed, recorded)
    assert (found.verdict, found.causes[0].kind) == ("cause", kind), found
    assert words in " ".join([found.causes[0].says, *found.causes[0].also])


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(("reference", "given", "output", "kind", "words"), kernels())
def test_what_kernels_do_wrong_with_memory_is_named(reference, given, output, kind, words):
    recorded = whywrong.golden(reference, **dict(zip(("x", "w", "b"), given, strict=False)))
    observed = {name: recorded[name].float() for name in recorded.names} | {"output": output}
    found = whywrong.explain(observed, recorded)
    if kind == "none":
        assert found.verdict == "none of these", found
    else:
        assert (found.verdict, found.causes[0].kind) == ("cause", kind), found
        assert words in found.causes[0].says


def test_the_parts_of_complex_numbers_are_broken_too():
    x = inputs()["x"]
    recorded = whywrong.golden(lambda x: torch.fft.irfft(whywrong.step("spectrum", torch.fft.rfft(x)) * 1j, n=23), x)
    spectrum = torch.fft.rfft(x).conj().resolve_conj()
    observed = {"x": x, "spectrum": torch.view_as_real(spectrum), "output": torch.fft.irfft(spectrum * 1j, n=23)}
    found = whywrong.explain(observed, recorded)
    assert (found.step, found.verdict, found.causes[0].kind) == ("spectrum", "cause", "sign"), found


def test_the_command_line_says_it_and_json_has_it(golden, tmp_path, capsys):
    golden.save(tmp_path / "golden.safetensors")
    whywrong.Trace(port(**inputs(), fault="over columns")).save(tmp_path / "observed.safetensors")
    files = [str(tmp_path / "golden.safetensors"), str(tmp_path / "observed.safetensors")]
    assert main(["diff", "--explain", *files]) == 1
    assert "why weights: cause" in capsys.readouterr().out
    assert main(["diff", "--explain", "--json", *files]) == 1
    said = json.loads(capsys.readouterr().out)["explain"]
    assert (said["step"], said["verdict"], said["causes"][0]["kind"]) == ("weights", "cause", "axis")
    assert "torch.softmax" in said["causes"][0]["line"]
    assert main(["diff", "--explain", "--step", "weights", "--seconds", "5", *files]) == 1
    assert "why weights: cause" in capsys.readouterr().out
    for options, words in (
        (["--explain"], "step: expected a wrong one: weights, got 'mixed'"),
        ([], "--step, --seconds: expected --explain"),
    ):
        assert main(["diff", *options, "--step", "mixed", *files]) == 2
        assert words in capsys.readouterr().err


def test_the_time_that_it_may_take_is_kept(golden, monkeypatch):
    monkeypatch.setattr("whywrong.explaining.search.time", time)
    begun = time.monotonic()
    found = whywrong.explain(port(**inputs(), fault="as it lies"), golden, precision=F32, seconds=0.2)
    assert time.monotonic() - begun < 30.0
    assert found.tried < 3000


def test_noise_in_a_sum_of_truth_values_has_no_cause():
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    recorded = whywrong.golden(lambda x: (x > 0).sum(1).to(x.dtype) * 0.731, x)
    wrong = recorded["output"].float() * (1 + 0.01 * torch.rand(30, generator=torch.Generator().manual_seed(1)))
    assert whywrong.explain({"input.0": x, "output": wrong}, recorded).verdict == "none of these"


def test_that_causes_could_not_be_told_apart_on_drawn_inputs_is_said():
    def chosen(x, w):
        v = torch.masked_select(x, x.cumsum(0) > 0).view(4, 6)
        return v * w - v / w

    x, w = torch.randn(24, generator=torch.Generator().manual_seed(0)), torch.full((4, 6), 2.0)
    x[0] = 30.0  # in another place, not every sum is positive
    recorded = whywrong.golden(chosen, x, w)
    v = x.view(4, 6)
    found = whywrong.explain({"input.0": x, "input.1": w, "output": 4 * v - v / 2}, recorded)
    assert "the reference takes no sampled inputs: causes that agree on these inputs are one" in found.notes


def mistakes():
    """What reports of several libraries' users tell: the reference, what was observed, the kind and its words."""
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(6, 40, generator=generator), torch.randn(6, 40, generator=generator)
    length = torch.tensor([38, 37, 21, 33, 9, 28])
    seen = (torch.arange(40) < length[:, None]).float()

    def masked(x, seen):
        return (x * seen).square().sum(1) / (1 + seen).sum(1)

    def rotated(x, length):
        return x * torch.cos(0.1 * (torch.arange(40) - length[:, None]))

    def points(x):
        across = torch.arange(40) + 0.5
        down = torch.arange(6) + 0.5
        return x * across / 40 + (down / 6)[:, None]

    def corners(x):
        return x * torch.arange(40) / 40 + torch.arange(6)[:, None] / 6

    def cut(x, length):
        scores = x.masked_fill(torch.arange(40) >= length[:, None], -torch.inf)
        return torch.logsumexp(scores, 1)

    def weights(x, other):
        return torch.softmax(x, 1) @ other.T

    def parts(x, other):
        key = x.split([8, 16, 16], 1)[1]
        return torch.tanh(key) * other[:, 4:20]

    def looked_up(x, order):
        return torch.exp(x[:, order])

    def gathered(x, to):
        return torch.zeros(40, 6).index_add(0, torch.arange(40) // 2, x.T[to])

    def gated(x, other):
        return x * torch.sigmoid(other)

    def norm(x, other):
        return torch.sqrt(x.square().sum(1) + other.square().sum(1))

    order = torch.randperm(40, generator=generator) // 2
    back = torch.zeros(40, 6).index_add(0, order, x.T[torch.arange(40) // 2])
    tiles = torch.cat([part.amax(1, keepdim=True).expand(part.shape) for part in x.split(8, 1)], 1)
    split = (torch.exp(x - tiles) @ other.T) / torch.exp(x - x.amax(1, keepdim=True)).sum(1, keepdim=True)
    places, rounded = torch.arange(40), (length + 7) // 8 * 8
    yield masked, (x, seen), x.square().sum(1) / (1 + seen).sum(1), "mask", "mul is left out"
    yield rotated, (x, length), x * torch.cos(0.1 * places).expand(6, 40), "shift", "sub is left out"
    yield corners, (x,), points(x), "shift", "as for centres and corners of pixels"
    yield cut, (x, length), cut(x, rounded), "mask", "in each whole tile of 8 of dimension 1"
    yield parts, (x, other), torch.tanh(x[:, 24:]) * other[:, 4:20], "swap", "takes part 2, not 1"
    yield looked_up, (x, order), torch.exp(x[:, order.sort().values]), "permute", "in order along dimension 0"
    yield gathered, (x, order), back, "swap", "are exchanged"
    yield gated, (x, other), torch.cat([gated(x, other)[:, :32], x[:, 32:]], 1), "truncate", "but only from 32 on"
    yield norm, (x, other), x.norm(dim=1) + other.norm(dim=1), "function", "sqrt is taken of each term of add"
    yield (
        weights,
        (x, other),
        split,
        "factor",
        "what a softmax weighs, in tiles of 8, is not scaled down to the largest",
    )


def test_noise_is_not_seen_in_a_few_numbers():
    """As large as what fewer digits would give, and in each of two numbers, or of many."""

    def scaled(x, w):
        return (x * w).sum(1)

    for rows, verdict in ((2, "none of these"), (200, "cause")):
        generator = torch.Generator().manual_seed(6)  # at which two would do
        x, w = torch.randn(rows, 50, generator=generator), torch.randn(50, generator=generator)
        wrong = (x.bfloat16().float() * w.bfloat16().float()).sum(1)
        found = whywrong.explain({"input.0": x, "input.1": w, "output": wrong}, whywrong.golden(scaled, x, w))
        assert found.verdict == verdict, found


def of_one(function, observed, precision=F32, **given):
    """What explains a result that should be `function` of what is given."""
    golden = whywrong.golden(lambda **inputs: {"y": function(**inputs)}, **given)
    return whywrong.explain({**given, "y": observed}, golden, precision=precision)


def normed_twice(x, root):
    for _ in range(2):
        x = x * 1.7 * root(x.square().mean(-1, keepdim=True))
    return x


def changed():
    """By name: a function, what was computed in its place, the sentence that names the change, and what is given."""
    torch.manual_seed(3)
    x, a = torch.randn(11, 29), torch.rand(12, 19)
    n = (1e-2 * torch.randn(23, 5)).norm(dim=-1)

    def count(c):
        return lambda x: (x > c).sum(-1)

    def kept(c):
        return lambda x: torch.where(x > c, x, 0.0)

    def twice(c):
        return lambda x: torch.tanh(x * 2 + c)

    def three(c):
        return lambda x: torch.exp(x) * 2 + torch.sin(x) * c + torch.cos(x) * 5

    return {
        "a threshold, counted": (count(0.5), count(0.4), "gt has about 0.4", {"x": x.repeat(3, 1)}),
        "a threshold": (kept(0.5), kept(0.45), "gt has about 0.45", {"x": x}),
        "a whole number": (twice(1), twice(1.13), "add has about 1.13 where", {"x": x}),
        "the second of three": (three(3), three(0.37), "mul has about 0.37 where the reference has 3", {"x": x}),
        "a step of three": (
            lambda x: torch.exp(x) + torch.exp(x * x / 9) + torch.exp(-x),
            lambda x: torch.exp(x) + torch.exp2(x * x / 9) + torch.exp(-x),
            "exp2 in place of exp (the second of the line)",
            {"x": x},
        ),
        "eps as a bound": (
            lambda n: 1 / (n + 1e-2),
            lambda n: 1 / n.clamp(min=1e-2),
            "has the larger of both, not the sum",
            {"n": n},
        ),
        "eps as a term": (
            lambda n: 1 / n.clamp_min(1e-2),
            lambda n: 1 / (n + 1e-2),
            "has the sum of both, not the larger",
            {"n": n},
        ),
        "a mean that goes along the other side": (
            lambda x: x - x.mean(0),
            lambda x: x - x.mean(1, keepdim=True),
            "mean runs over dimension 1, not 0",
            {"x": x},
        ),
        "eps as a bound, by clamp": (
            lambda n: 1 / n.clamp(min=1e-2),
            lambda n: 1 / (n + 1e-2),
            "has the sum of both, not the larger",
            {"n": n},
        ),
        "eps after a root of which one is divided by": (
            lambda a: torch.nn.functional.layer_norm(a * 0.01, (19,), eps=1e-5),
            lambda a: (a - a.mean(-1, keepdim=True)) / (a.std(-1, correction=0, keepdim=True) + 1e-3),
            "comes after the root",
            {"a": a},
        ),
        "eps after a root, twice": (
            lambda a: normed_twice(a, lambda v: torch.rsqrt(v + 1e-2)),
            lambda a: normed_twice(a, lambda v: 1 / (v.sqrt() + 1e-2)),
            "comes after the root",
            {"a": a},
        ),
        "padding with ones, behind": (
            lambda s: torch.nn.functional.pad(s, (2, 0), value=1.0),
            lambda s: torch.nn.functional.pad(s, (0, 2), value=1.0),
            "is padded by 0 before and 2 behind, not 2 and 0",
            {"s": x},
        ),
        "padding on both sides": (
            lambda s, w: torch.nn.functional.conv1d(torch.nn.functional.pad(s, (4, 0)), w),
            lambda s, w: torch.nn.functional.conv1d(s, w, padding=2),
            "is padded by 2 before and 2 behind, not 4 and 0",
            {"s": x.view(1, 11, 29), "w": a[:11, :15].reshape(3, 11, 5)},
        ),
        "a number close by": (
            lambda x: x.exp() * 0.9999 + x.cos(),
            lambda x: x.exp() * 0.99996 + x.cos(),
            "mul has about 0.99996",
            {"x": x},
        ),
        "a deviation that goes along the other side": (
            lambda s: s / s.std(0),
            lambda s: s / s.std(1, keepdim=True),
            "std runs over dimension 1, not 0",
            {"s": x[:, :11]},
        ),
        "one entry": (
            lambda x: torch.cat([x[0] * x[3], x[1] * x[4]]),
            lambda x: torch.cat([x[0] * x[3], x[1] * 0]),
            "x[4] is zero",
            {"x": x},
        ),
        "rows": (lambda a: a * 3, lambda a: a * torch.tensor([3.0] * 4 + [2.0] * 5 + [3.0] * 3)[:, None], "", {"a": a}),
    }


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("case", changed())
def test_a_number_an_occurrence_or_a_place_is_found_by_itself(case):
    function, other, words, given = changed()[case]
    found = of_one(function, other(**given), **given)
    assert found.verdict == "cause", found
    assert any(words in each for each in (found.causes[0].says, *found.causes[0].also)), found
    assert found.causes[0].says.endswith("only in 4 to 8 of dimension 0") == (case == "rows")


def test_a_region_has_what_is_wrong_alone():
    """Not the rows between, which are right."""
    torch.manual_seed(4)
    x = torch.randn(16, 9)
    some = torch.zeros(16, 1).index_fill(0, torch.tensor([2, 5, 6, 11]), 1)
    (cause,) = of_one(lambda x: x * 3, x * (3 - some), x=x).causes
    assert cause.says == "mul has 2 where the reference has 3, but only in 2, 5 to 6, 11 of dimension 0"


def partly_wrong():
    """References, what they are given, and what a port made of it that does one thing otherwise, in a part only."""
    generator = torch.Generator().manual_seed(12)
    x, w, b, p = (torch.randn(n, generator=generator) for n in ((40, 24), (24, 32), (32,), (40,)))
    length = torch.randint(1, 60, (40,), generator=generator)
    scale, codes = torch.rand(40, generator=generator), torch.randint(1, 5, (24,), generator=generator)
    later = torch.where(length % 16 == 0, length + 16, length)
    rows = torch.arange(40)[:, None]
    decoded = torch.where(torch.arange(24) < 16, codes.float(), 2.0 ** -codes.float())

    def by_length(x, length):
        return x / (length[:, None] + 1.0)

    def weighted(x, w, b, p):
        return p[:, None] * (x @ w + b)

    def decayed(x, p):
        return 0.9 * x + 0.1 * p[:, None]

    def quantised(x, codes):
        return x @ torch.exp2(-codes.to(x.dtype))

    def twice_scaled(x, p, scale):
        left = x * torch.exp2(p)[:, None]
        return left + x.square() * torch.exp2(scale)[:, None]

    def scaled(x, scale):
        y = x.square() * scale[:, None]
        return y.tanh() + y.sigmoid()

    y = x.square() * scale[:, None]
    unscaled = x.square().tanh() + y.sigmoid()
    yield by_length, (x, length), by_length(x, later), "where length is 0 modulo 16"
    yield (
        by_length,
        (x, length),
        by_length(x, torch.where(rows[:, 0] % 8 >= 6, 0, length)),
        "6 and more in each tile of 8",
    )
    yield weighted, (x, w, b, p), p[:, None] * (x @ w) + b, "add comes after mul"
    yield decayed, (x, p), decayed(x, p) - 0.01 * x, "x is subtracted, 0.01 times"
    yield quantised, (x, codes), x @ decoded, "in 0 to 15 of dimension 0 of 24"
    yield twice_scaled, (x, p, scale), x * p[:, None] + x.square() * scale[:, None], "; and exp2 is left out"
    yield scaled, (x, scale), unscaled, "but only for tanh of"


PARTLY = [*partly_wrong()]


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("reference", "given", "output", "words"), PARTLY, ids=[f"{case[0].__name__}: {case[3]}" for case in PARTLY]
)
def test_a_mutation_that_holds_in_part_is_named_with_the_part(reference, given, output, words):
    inputs = dict(zip(reference.__code__.co_varnames, given, strict=False))
    found = whywrong.explain(inputs | {"output": output}, whywrong.golden(reference, **inputs))
    assert found.verdict == "cause", found
    assert words in found.causes[0].says, found


def test_runs_that_differ_are_a_race_also_if_none_is_right():
    torch.manual_seed(13)
    x, w = torch.randn(20, 30), torch.randn(30, 40)
    recorded = whywrong.golden(lambda x, w: x @ w, x=x, w=w)
    runs = [{"x": x, "w": w, "output": (x @ w).index_fill(0, torch.tensor([k, 2 * k + 1]), 0.0)} for k in range(4)]
    found = whywrong.explain(runs, recorded)
    assert (found.verdict, found.causes[0].kind) == ("cause", "race"), found
    assert whywrong.explain([runs[1]] * 3, recorded).causes[0].kind != "race"


def test_a_constant_result_is_said_to_be_constant_and_not_a_function_that_gives_it():
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 50
    found = of_one(lambda x: torch.softmax(x, -1), torch.zeros(6, 40), x=x)
    assert (found.verdict, found.causes[0].kind) == ("cause", "zero"), found
    assert found.causes[0].says.startswith("y is 0 everywhere")


def test_nan_is_memory_that_was_not_written_and_no_value_of_a_later_step():
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))

    def quantised(x):
        top = whywrong.step("top", x.abs().amax(1, keepdim=True))
        return whywrong.step("back", x / top * 127 * top)

    recorded = whywrong.golden(quantised, x=x)
    top = x.abs().amax(1, keepdim=True).index_fill(0, torch.tensor([23]), torch.nan)
    found = whywrong.explain({"x": x, "top": top, "back": x / top * 127 * top}, recorded)
    assert (found.step, found.causes[0].kind) == ("top", "zero"), found
    assert "top is NaN in 1 of 24 elements" in found.causes[0].says


@pytest.mark.long
def test_a_value_of_a_later_step_that_has_the_fault_is_no_evidence():
    """The gate is applied before the norm: then the result of the norm is what comes out."""
    torch.manual_seed(5)
    x, gate = torch.randn(30, 16), torch.rand(30, 16)

    def normalised(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def gated(x, gate):
        return whywrong.step("out", whywrong.step("normed", normalised(x)) * gate)

    wrong = normalised(x * gate)
    found = whywrong.explain(
        {"x": x, "gate": gate, "normed": wrong, "out": wrong}, whywrong.golden(gated, x=x, gate=gate)
    )
    assert (found.step, found.verdict) == ("normed", "none of these"), found
    overwritten = {"x": x, "gate": gate, "normed": normalised(x) * gate, "out": normalised(x) * gate}
    found = whywrong.explain(overwritten, whywrong.golden(gated, x=x, gate=gate))
    assert "out stands in place of normed" in found.causes[0].says, found


def lost_updates():
    """Sums in which updates of one address were lost: the reference, its inputs, and what is left."""
    generator = torch.Generator().manual_seed(6)
    x, w = torch.randn(24, 40, generator=generator), torch.randn(40, 30, generator=generator)
    lost = torch.rand(24, 30, generator=generator) < 0.05
    yield torch.matmul, (x, w), x @ w - lost * (x[:, 16:32] @ w[16:32]), "mm leaves out 16 to 31 of dimension 1 of 40"
    place, source = torch.randint(0, 12, (90,), generator=generator), torch.randint(0, 15, (90,), generator=generator)
    source[:20] = source[20:40]  # of two equal terms of one place, either may be lost
    place[:20] = place[20:40]
    kept = torch.rand(90, 1, generator=generator) > 0.1

    def messages(x, place, source):
        return torch.zeros(12, 40).index_add(0, place, x[source])

    left = torch.zeros(12, 40).index_add(0, place, x[source] * kept)
    yield messages, (x, place, source), left, "index_add leaves out"


@pytest.mark.parametrize(("reference", "given", "output", "words"), lost_updates(), ids=["product", "messages"])
def test_terms_that_are_missing_here_and_there_are_lost_updates(reference, given, output, words):
    recorded = whywrong.golden(reference, *given)
    found = whywrong.explain(dict(zip(recorded.inputs, given, strict=True)) | {"output": output}, recorded)
    assert (found.verdict, found.causes[0].kind) == ("cause", "race"), found
    assert words in found.causes[0].says


def test_elements_that_are_counted_out_one_by_one_are_described_and_no_cause():
    x = torch.randn(60, generator=torch.Generator().manual_seed(7))
    some = torch.zeros(60).index_fill(0, torch.tensor([3, 17, 18, 29, 41, 55, 58]), 1.0)
    found = of_one(lambda x: x * 3.0, x * (3.0 + 3.0 * some), x=x)
    assert (found.verdict, found.causes) == ("none of these", []), found
    assert "wrong elements are 2 times what is right" in str(found)


def descriptions():
    """What was observed in place of x.sin(), and what a reader should be told of it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 20, generator=generator)
    y, noise = x.sin(), torch.randn(12, 20, generator=generator)
    yield x, torch.where(torch.arange(20) >= 8, y + noise, y), "wrong are all elements from 8 on of dimension 1"
    yield x, y + 0.3 * noise, "240 of 240 elements"
    yield x, y + noise[:, :1] * noise[:1], "the error of the matrix has rank 1 of 12"
    yield x, torch.where(noise > 1, -torch.inf, y), "wrong elements are infinite"
    yield x, y * (1 + 0.1 * noise[:, :1]), "the error is a factor for each slice of dimension 0"
    yield x, y + 0.1 * noise[:, :1], "the error is an offset for each slice of dimension 0"


DESCRIBED = [*descriptions()]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("x", "observed", "words"), DESCRIBED, ids=[case[2] for case in DESCRIBED])
def test_where_no_cause_is_known_the_error_is_described(x, observed, words):
    found = of_one(torch.sin, observed, x=x)
    assert found.verdict == "none of these", found
    assert any(words in line for line in found.about), found.about
    assert words in repr(found)
    assert found.as_json()["about"] == found.about


@pytest.mark.long
def test_a_few_whole_numbers_are_no_evidence():
    """Of an index that is any other, some break is right by chance."""
    torch.manual_seed(5)
    named = 0
    for _ in range(12):
        p = torch.rand(4, 19)
        wrong = p.argmax(-1)
        wrong[int(torch.randint(4, ()))] = int(torch.randint(19, ()))
        named += of_one(lambda p: p.argmax(-1), wrong, p=p).verdict == "cause"
    assert named <= 1


def test_a_number_of_the_list_and_the_same_one_looked_for_are_one_cause():
    torch.manual_seed(8)
    x = torch.randn(30, 48).bfloat16().float()
    found = of_one(lambda x: x * 0.3, (x * 48**-0.5).bfloat16(), whywrong.Precision("bfloat16"), x=x)
    assert (found.verdict, found.causes[0].kind) == ("cause", "constant"), found


def test_an_occurrence_is_said_where_entries_do_not_tell():
    torch.manual_seed(9)
    a, b = torch.rand(2, 12, 19)
    for by, words in (
        (0, "b[0] is one place"),
        (1, "a[0] is one place later in dimension 0, around the end; and b[0] is one place"),
    ):
        wrong = (a[0].roll(by).exp() + b[0].roll(1).exp() * a[1]) * b[1]
        found = of_one(lambda a, b: (a[0].exp() + b[0].exp() * a[1]) * b[1], wrong, a=a, b=b)
        assert found.causes[0].says.startswith(words), found


def test_zeros_around_what_was_written_are_unwritten():
    torch.manual_seed(10)
    x, w, y = torch.randn(23, 9), torch.randn(9, 25), torch.zeros(23, 25)
    y[:16, :16] = (x @ w)[:16, :16]  # whole tiles alone
    assert of_one(lambda x, w: x @ w, y, x=x, w=w).causes[0].kind == "zero"


def test_values_that_repeat_are_rounded_alike_and_are_noise_all_the_same():
    torch.manual_seed(11)
    value, error = torch.randn(2, 40).double().repeat_interleave(8, 1)
    assert not _smooth(error, value)
    assert _smooth(torch.sin(3 * value), value)


@pytest.mark.parametrize("rows", [False, True])
def test_zeros_are_unwritten_memory_where_they_are_a_block_and_not_where_they_are_computed(rows):
    torch.manual_seed(6)
    x = torch.randn(24, 10)
    y = (
        x.sin() * torch.where(torch.arange(24) % 5 == 2, 0, 1)[:, None]
        if rows
        else torch.where(x.abs() < 0.3, 0, x.sin())
    )
    found = of_one(torch.sin, y, x=x)
    assert (found.verdict == "cause") == rows, found
    assert not rows or found.causes[0].kind == "zero"


def test_an_error_that_depends_on_the_value_is_no_noise():
    torch.manual_seed(7)
    x = torch.randn(40, 30)
    found = of_one(lambda x: x + 1, x + 1 + 1e-3 * torch.sin(3 * x), x=x)
    assert found.verdict == "none of these", found


@pytest.mark.parametrize("case", ["a block inside", "rows here and there", "NaN everywhere"])
def test_what_is_like_memory_that_nobody_wrote(case):
    torch.manual_seed(12)
    x = torch.randn(6, 5, 8)
    y = x.sin()
    if case == "a block inside":
        y[2:5, 1:3, 4:] = 0.0
    elif case == "rows here and there":
        y[[0, 3, 3], [2, 1, 4]] = 0.0
    else:
        y[:] = torch.nan
    found = of_one(torch.sin, y, x=x)
    says = [cause.says for cause in found.causes]
    assert any("like memory that was never written" in each or "is zero" in each for each in says) == (
        case != "NaN everywhere"
    ), found


def test_a_format_is_named_where_every_element_is_of_it_and_fewer_digits_where_they_may_be():
    torch.manual_seed(13)
    x, w = torch.randn(20, 33), torch.randn(33, 24)
    y = x @ w.bfloat16().float()
    for more, words in (
        (0.0, "w, as used here, is rounded to bfloat16"),
        (1e-3, "fewer digits than declared"),
        (9.0, None),
    ):
        y[3, 4] += more
        found = of_one(lambda x, w: x @ w, y, x=x, w=w)
        assert [words in cause.says for cause in found.causes] == [True] * (words is not None), found


@pytest.mark.long
def test_one_element_that_is_off_is_no_matter_of_digits():
    """In bfloat16, where the noise of narrower products is as small as the rounding of what is stored."""
    *_, (family, program, found) = random_residuals.cases(2, 105, torch.bfloat16)
    assert (family, program, found.verdict) == ("one element", "norm", "none of these"), found


def test_the_complement_of_a_number_is_that_of_an_average():
    """And not where a range begins, which an edit of 1 to 1e10 would make as long."""
    recorded = whywrong.golden(lambda x: (x.exp() - 1.0) * torch.arange(0, 5) + 0.9 * x + 0.1 * x.sin(), torch.randn(5))
    part = Part(recorded, as_trace("observed", {"output": recorded["output"]}), "output")

    def edited(number):
        (node,) = (node for node in part.nodes if number in node.args[1:])
        return {part.nodes[i].op for i in mutations.numbered(part, [node.id], 1, 1e10)[0]}

    assert (edited(1.0), edited(0.9)) == ({"sub"}, {"mul"})


def test_a_comparison_of_equal_numbers_has_no_threshold_to_look_for():
    x, z = torch.full((9, 14), 0.7), torch.rand(9, 14) + 0.1
    found = of_one(lambda x, z: torch.where(x > 0.5, z, z.sin()), -9.0 - z.exp(), x=x, z=z)
    assert (found.verdict, found.nearest) == ("none of these", None), found


def test_what_is_said_of_a_cause_and_of_none(golden):
    def sentences(found):
        return repr(found).splitlines()

    cause = whywrong.explain(port(**inputs(), fault="gain one on"), golden, precision=F32)
    first = next(k for k, line in enumerate(sentences(cause)) if line.startswith("why"))
    (why,) = sentences(cause)[first:]
    assert why == f"why normed: cause ({cause.tried} mutations tried)"
    right = whywrong.explain(port(**inputs()), golden, precision=F32)
    assert sentences(right) == ["no divergence"]
    assert ("<table" in cause._repr_html_(), "<table" in right._repr_html_()) == (True, False)
    with pytest.raises(UsageError, match=r"step: expected a wrong one: there is none.*got 'active'"):
        whywrong.explain(port(**inputs()), golden, precision=F32, step="active")


def test_what_a_mutation_raises_ends_nothing_and_is_noted_and_logged(golden, monkeypatch, caplog):
    """Of one that an operation cannot take, which nearly every search meets, the log alone has a line."""
    observed = port(**inputs(), fault="gain one on")
    with caplog.at_level(logging.DEBUG, logger="whywrong"):
        usual = whywrong.explain(observed, golden, precision=F32)
    assert (usual.notes, any("could not be run: RuntimeError: " in line for line in caplog.messages)) == ([], True)
    caplog.clear()

    def no_flips(*_, **__):
        raise TypeError("no flips\nhere")

    monkeypatch.setattr(torch, "flip", no_flips)
    with caplog.at_level(logging.DEBUG, logger="whywrong"):
        found = whywrong.explain(observed, golden, precision=F32)
    assert [cause.says for cause in found.causes] == [cause.says for cause in usual.causes]
    (note,) = found.notes
    lines = [line for line in caplog.messages if line.endswith("could not be run: TypeError: no flips")]
    assert lines
    assert note.startswith(f"{len(lines)} mutations could not be made or run, the first: {lines[0]} (")
    assert all(record.exc_info for record in caplog.records)


def test_a_generator_of_mutations_goes_on_after_what_raises(golden, monkeypatch):
    """One that cannot be made: what comes before and after it is made, of its own generator too."""
    observed = whywrong.Trace(port(**inputs()))
    context = mutations.Context(Part(golden, observed, "normed"))
    says = [mutation.says for mutation in mutations.mutations(context)]
    assert context.errors == []
    monkeypatch.setattr(mutations, "places", lambda shape: iter([("flip", "upside down", torch.neg), None]))
    more = [mutation.says for mutation in mutations.mutations(context)]
    assert {each.startswith("a mutation could not be made: TypeError: ") for each in context.errors} == {True}
    assert sum(each.endswith("is upside down") for each in more) == len(context.errors) > 1
    without = [each for each in more if not each.endswith("is upside down")]
    assert set(without) < set(says)
    assert without[-1] == says[-1]

    @mutations.for_each(lambda c: range(4))
    def quotients(c, k):
        yield "scale", f"{12 // (k - 1)}", {}

    context.errors.clear()
    assert [says for _, says, _ in quotients(context)] == ["-12", "12", "6"]
    assert context.errors == ["a mutation could not be made: ZeroDivisionError: integer division or modulo by zero"]


def corners_of(image):
    """Bilinear resizing to 9 x 10 with coordinates that are not of the pixels' centres."""
    for d, n in ((2, 9), (3, 10)):
        m = image.shape[d]
        at = torch.arange(n) * (m / n)
        low, share = at.long(), (at - at.floor()).view([-1] + [1] * (3 - d))
        next_one = image.index_select(d, (low + 1).clamp(max=m - 1))
        image = image.index_select(d, low) * (1 - share) + next_one * share
    return image


def textbook():
    """What textbooks and manuals name: the reference, what it takes, what was observed, the kind and its words."""
    generator = torch.Generator().manual_seed(1)
    normal = partial(torch.randn, generator=generator)
    x, q, k = normal(2, 12, 5), normal(2, 6, 8), normal(2, 2, 7, 8)
    weight, bias, image, rows = normal(12), normal(12), normal(2, 3, 5, 7), normal(40, 6)
    place = torch.randint(0, 6, (40,), generator=generator)
    whole = torch.randint(-100, 120, (8, 12), generator=generator, dtype=torch.int8)
    nibbles = torch.randint(0, 16, (8, 12), generator=generator, dtype=torch.int8)
    nodes, norm = normal(6, 5), normal(46)
    # of eight rows the largest number is in the first of two tiles somewhere, without which two breaks are the same
    taken, values, reward, done = 3 * normal(8, 32), normal(32, 3), normal(19), (torch.arange(19) % 5 == 4).float()

    def groups(x, weight, bias):
        return torch.nn.functional.group_norm(x, 3, weight, bias)

    def heads(q, k):
        return torch.einsum("bgnd,bgsd->bgns", q.view(2, 2, 3, 8), k).flatten(1, 2)

    def softmax(x, other):
        return torch.softmax(x, 1) @ other

    def weighed(x, lse):
        return torch.exp(x - lse[:, None])

    def positions(x):
        return x * torch.cos(0.1 * torch.arange(31, 36))

    def resized(image):
        return torch.nn.functional.interpolate(image, size=(9, 10), mode="bilinear", align_corners=False)

    def returns(reward, done):
        total, found = torch.zeros(()), []
        for t in reversed(range(19)):
            total = reward[t] + 0.9 * (1 - done[t]) * total
            found.append(total)
        return torch.stack(found[::-1])

    def summed(rows, place):
        return torch.zeros(6, 6).index_add(0, place, rows)

    def reflected(image):
        return torch.nn.functional.pad(image, (2, 1, 1, 2), mode="reflect").square()

    def product(x, whole):
        return x.flatten(0, 1)[:8].T @ whole.to(x.dtype)

    def graph(x, norm, place):
        loops = torch.arange(6)
        messages = x[torch.cat([place // 2, loops])] * norm[:, None]
        return torch.zeros(6, 5).index_add(0, torch.cat([place, loops]), messages)

    def tiled(x):
        return torch.cos(x)

    def rotary(x, q):
        a, b = q[..., :3], q[..., 3:-2]
        angle = torch.arange(6.0)[:, None] * 5.0 ** (-torch.arange(3.0) / 3)
        c, s = angle.cos(), angle.sin()
        return torch.cat([a * c - b * s, b * c + a * s, q[..., 6:]], -1)

    def gates(rows, nodes):
        (one, two, _), (a, b, c) = rows.chunk(3, 1), rows.square().chunk(3, 1)
        return torch.sigmoid(one + a) * torch.tanh(two - b) + c

    order = torch.arange(12).view(4, 3).T.flatten()  # channel c is in group c % 3
    grouped = groups(x[:, order], weight[order], bias[order])[:, order.argsort()]
    turn = torch.arange(6) % 2
    ours = torch.einsum("bnd,bnsd->bns", q, k[:, turn])
    mean = sum(torch.softmax(part, 1) @ o for part, o in zip(taken.split(8, 1), values.split(8), strict=True)) / 4
    own = torch.cat([torch.exp(part - part.amax(1, keepdim=True)) for part in taken.split(16, 1)], 1)
    aligned = torch.nn.functional.interpolate(image, size=(9, 10), mode="bilinear", align_corners=True)
    first = torch.stack([(place[:n] == place[n]).sum() for n in range(40)])
    last = torch.stack([(place[n + 1 :] == place[n]).any() for n in range(40)])
    repeated = torch.cat([image[..., :2].flip(-1), image, image[..., -1:]], -1)
    repeated = torch.cat([repeated[..., :1, :], repeated, repeated[..., -2:, :].flip(-2)], -2)
    edge = torch.nn.functional.pad(image, (2, 1, 1, 2), mode="replicate")
    stale = torch.cos(x)
    stale[:, 8:] = stale[:, 4:8]
    forward, total = [], torch.zeros(())
    for t in range(19):
        total = reward[t] + 0.9 * (1 - done[t]) * total
        forward.append(total)
    yield (
        groups,
        (x, weight, bias),
        grouped,
        "permute",
        "in native_group_norm, dimension 1 of 12 is taken as 4 x 3 in place of 3 x 4",
    )
    yield heads, (q, k), ours, "permute", "dimension 1 of 6 is taken as 3 x 2 in place of 2 x 3"
    yield softmax, (taken, values), mean, "factor", "in tiles of 8, is averaged over these"
    yield weighed, (taken, taken.logsumexp(1)), own / own.sum(1, keepdim=True), "factor", "to the largest number of all"
    yield positions, (x,), x * torch.cos(0.1 * torch.arange(31 - 12, 36 - 12)), "shift", "arange is 12 less"
    yield resized, (image,), aligned, "shift", "align_corners"
    yield resized, (image,), corners_of(image), "shift", "corners of pixels, not of their centres"
    yield returns, (reward, done), torch.stack(forward), "flip", "from the other end of dimension 0"
    yield summed, (rows, place), summed(rows * (first < 4)[:, None], place), "truncate", "all but the first 4 of each"
    yield summed, (rows, place), summed(rows * last[:, None], place), "truncate", "the last of each place"
    yield reflected, (image,), repeated.square(), "shift", "reflection that repeats the edge"
    yield reflected, (image,), edge.square(), "other", "replication in place of reflection_pad2d"
    yield product, (x, whole), product(x, whole.to(x.dtype) % 256), "sign", "8 bits without a sign"
    yield product, (x, nibbles), product(x, nibbles - 16 * (nibbles > 7)), "sign", "4 bits with a sign"
    for a, b, words in ((40, 45, "the last of each place"), (32, 39, "leaves out 32 to 39 of dimension 0 of 46")):
        cut = norm.masked_fill((torch.arange(46) >= a) & (torch.arange(46) <= b), 0.0)
        yield graph, (nodes, norm, place), graph(nodes, cut, place), "truncate", words
    turned = q[:, :, [0, 2, 4, 1, 3, 5, 6, 7]]
    swapped = rows[:, [2, 3, 0, 1, 4, 5]]
    instance = torch.nn.functional.instance_norm(x) * weight[:, None] + bias[:, None]
    words = "0 to 5 of dimension 2 is taken as 3 x 2 in place of 2 x 3"
    yield rotary, (x, q), rotary(x, turned)[:, :, [0, 3, 1, 4, 2, 5, 6, 7]], "permute", words
    yield groups, (x, weight, bias), instance, "axis", "native_group_norm runs over dimension 3, not 2, 3"
    yield gates, (rows, nodes), gates(swapped, nodes), "swap", "parts 0 and 1 of 3 are taken for each other"
    yield tiled, (x,), stale, "stale", "in the last tile of 4 of dimension 1 what the tile before has"


NAMED = [*mistakes(), *textbook()]


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("reference", "given", "output", "kind", "words"), NAMED, ids=[f"{case[0].__name__}: {case[4]}" for case in NAMED]
)
def test_what_people_get_wrong_and_textbooks_warn_of_is_named(reference, given, output, kind, words):
    recorded = whywrong.golden(reference, *given)
    observed = {name: recorded[name].to(x.dtype) for name, x in zip(recorded.inputs, given, strict=True)}
    found = whywrong.explain(observed | {"output": output}, recorded)
    assert (found.verdict, found.causes[0].kind) == ("cause", kind), found
    assert words in found.causes[0].says


def test_what_no_mutant_can_be_made_of_ends_no_search():
    """A part without elements, numbers without a dimension, an index of one number."""
    x, s = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), torch.tensor(1.5)

    def odd(x, s):
        joined = torch.cat([torch.tensor([]), x], 0)
        return torch.zeros(4).index_add(0, torch.tensor(2), joined.sum()[None]) + joined.square().sum(0) * (
            (s + 0.5) * 2 - 0.5
        )

    recorded = whywrong.golden(odd, x, s)
    found = whywrong.explain({"input.0": x, "input.1": s, "output": odd(x, s) + x.square().sum(0)}, recorded)
    assert found.causes, found


def test_each_pass_of_a_loop_leaves_out_the_last_of_its_own():
    generator = torch.Generator().manual_seed(4)
    rows, where = torch.randn(2, 30, 5, generator=generator), torch.randint(0, 4, (2, 30), generator=generator)

    def summed(rows, where):
        total = torch.zeros(4, 5)
        for k in range(2):
            total = total.index_add(0, where[k], rows[k])
        return total

    last = torch.stack([(where[:, n + 1 :] == where[:, n : n + 1]).any(1) for n in range(30)], 1)
    recorded = whywrong.golden(summed, rows, where)
    output = summed(rows * last[..., None], where)
    found = whywrong.explain({"input.0": rows, "input.1": where, "output": output}, recorded)
    assert (found.verdict, "leaves out the last of each place" in found.causes[0].says) == ("cause", True), found


def test_whole_numbers_below_zero_are_wrapped_too():
    x = torch.arange(-40, 0)[:, None] * torch.tensor([1.0, 30.0, 1000.0])
    recorded = whywrong.golden(lambda x: x * 1.0, x)
    found = whywrong.explain({"input.0": x, "output": x.to(torch.int16).float()}, recorded)
    assert (found.verdict, "kept in 16 bits with a sign" in found.causes[0].says) == ("cause", True), found


@pytest.mark.long
def test_many_parts_and_slices_leave_time_for_other_breaks():
    x, w = torch.randn(150, 8, generator=torch.Generator().manual_seed(5)), torch.randn(8, 8)

    def chain(x, w):
        state = torch.zeros(8)
        for k in range(75):
            state = torch.tanh(x[2 * k : 2 * k + 2].sum(0) + w.T @ state)
        for row in x:
            state = state + 0.1 * row
        return state

    recorded = whywrong.golden(chain, x, w)
    found = whywrong.explain({"input.0": x, "input.1": w, "output": chain(x, w.T)}, recorded, seconds=8.0)
    assert (found.verdict, found.causes[0].kind) == ("cause", "transpose"), found


def test_every_mutation_of_these_can_be_made():
    """Where one cannot, the search goes on without those after it of the same item."""
    for reference, given, *_ in NAMED:
        recorded = whywrong.golden(reference, *given)
        observed = {name: recorded[name] for name in (*recorded.inputs, "output")}
        part = Part(recorded, as_trace("observed", observed), "output")
        context = mutations.Context(part)
        assert len(list(mutations.mutations(context))) > 50
        assert context.errors == []


@pytest.mark.long
def test_of_one_number_the_simplest_break_that_fits_is_no_cause():
    """Nothing is added to x: by a product that lost its only term, as by many a function of a negative number."""

    def block(x, gate, up, down):
        return x + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    given = [torch.tensor([[v]]) for v in (0.7, -0.4, 1.3, 0.9)]
    recorded = whywrong.golden(block, *given)
    observed = dict(zip(recorded.inputs, given, strict=True)) | {"output": given[0]}
    assert whywrong.explain(observed, recorded).verdict == "undecidable"


@pytest.mark.long
def test_a_change_of_one_line_from_some_time_of_its_loop_on_is_told_from_the_end_state():
    weights = torch.cumsum(0.1 * torch.randn(13, 16, 8, generator=torch.Generator().manual_seed(0)), 0)

    def averaged(weights, later=0.001):
        shadow = weights[0]
        for i in range(1, 13):
            shadow = shadow - (later if i >= 9 else 0.001) * (shadow - weights[i])
        return shadow

    recorded = whywrong.golden(averaged, weights=weights)
    observed = {"weights": weights, "output": averaged(weights, -0.001)}
    found = whywrong.explain(observed, recorded, precision=whywrong.Precision("float32"), seconds=60.0)
    assert (found.verdict, found.causes[0].kind) == ("cause", "sign"), found
    assert "but only from time 9 of 12 on" in found.causes[0].says


def test_a_parameter_that_holds_another_ones_numbers_is_named():
    torch.manual_seed(0)
    module, port = (torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.Linear(6, 6)) for _ in "ab")
    for a, b in ((0, 2), (2, 0)):
        port[a].load_state_dict(module[b].state_dict())
    x = torch.randn(5, 6)
    found = whywrong.explain(whywrong.capture(port, x), whywrong.golden(module, x))
    assert (found.step, found.causes[0].kind, found.causes[0].says) == (
        "0.weight",
        "swap",
        "0.weight holds what 2.weight is",
    )


def test_of_many_that_agree_what_they_have_in_common_is_said():
    """Any other number for the ignored class leaves all rows in: which one it was is not known, and is not said."""

    def loss(logits, target):
        keep = target != -100
        rows = whywrong.step("all", -logits.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0])
        return whywrong.step("rows", torch.where(keep, rows, 0.0))

    torch.manual_seed(0)
    logits, target = torch.randn(64, 50), torch.randint(0, 50, (64,))
    target[::9] = -100
    wrong = -logits.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    given = {"logits": logits, "target": target}
    (cause,) = whywrong.explain(given | {"all": wrong, "rows": wrong}, whywrong.golden(loss, **given)).causes
    assert (cause.kind, cause.says.split(":")[0]) == ("mask", "where is left out")
    assert "mask: target, as used here, is one more" in cause.also
