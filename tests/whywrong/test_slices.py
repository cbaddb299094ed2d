"""Slices of a large step, on which mutations are tried first: those of the whole, found by running operations."""

import gc
import itertools
import weakref

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention

import whywrong
from whywrong.explaining import slices
from whywrong.explaining.mutations import Context, mutations
from whywrong.explaining.on_device import Brought, _inside, on
from whywrong.explaining.part import Part
from whywrong.explaining.search import _Search

MOVED = (RuntimeError, IndexError, OverflowError)


def block(x, w, gain, order=lambda v: v, approximate="none"):
    """Attention of four heads and a feed-forward, of [batch, tokens, 32]."""
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in rms_norm(x, (32,), gain).matmul(w).chunk(3, -1))
    x = x + scaled_dot_product_attention(q, k, order(v), is_causal=True).transpose(1, 2).flatten(2)
    return x + gelu(layer_norm(x, (32,), gain).matmul(w), approximate=approximate).matmul(w.T)


def tanh(x, w, gain):
    return block(x, w, gain, approximate="tanh")


def flipped(x, w, gain):
    """The values of the tokens in the wrong order, which mixes slices."""
    return block(x, w, gain, lambda v: v.flip(2))


def part_of(f, **given):
    recorded = whywrong.golden(f, **given)
    observed = given | {"output": f(**given) + 1.0}
    return Part(recorded, whywrong.Trace(observed), "output")


@pytest.fixture
def attention(rng, monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 0)
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((2, 40, 32), (32, 96), (32,)))
    return part_of(block, x=x, w=w, gain=gain)


def tried(run):
    try:
        return run()
    except MOVED as error:
        return type(error)


@pytest.mark.long
def test_slices_of_every_mutation_are_those_of_the_whole(attention):
    target, wrong = attention.values[attention.target], torch.ones(2, 40, 32, dtype=torch.bool)
    some = slices.sampled(attention, wrong)
    assert (some.dim.dim, some.of(target).shape) == (1, (2, 6, 32))
    sampled = 0
    for mutation in [*mutations(Context(attention))][::17]:
        whole = tried(lambda m=mutation: attention.value(m.edits))
        here = tried(lambda m=mutation: some.value(m.edits))
        if isinstance(whole, torch.Tensor) and whole.shape == target.shape:
            sampled += isinstance(here, torch.Tensor)
            assert not isinstance(here, torch.Tensor) or torch.allclose(
                here, some.of(whole), 1e-9, 1e-12, equal_nan=True
            ), mutation.says
    assert sampled > 300


def test_what_only_shapes_are_needed_of_is_not_kept(attention):
    shapes = Part(attention.golden, attention.golden.trace(), "output", only_shapes=True)
    for i, value in ((i, x) for i, x in attention.values.items() if isinstance(x, torch.Tensor)):
        kept = i in attention.given or i == attention.target or not value.is_floating_point()
        assert (shapes.values[i].is_meta, shapes.values[i].shape) == (not kept, value.shape)
    places = torch.arange(0, 40, 7)
    of_all, of_shapes = (slices.Slices(part, 1, places).alone()[0] for part in (attention, shapes))
    assert torch.equal(of_all["output"], of_shapes["output"])


def test_on_other_inputs_what_an_edit_needs_is_computed_again(attention):
    """All of it would be the values of a large step twice."""
    inputs = {name: 0.5 * attention.golden[name] for name in attention.golden.inputs}
    fresh = attention.fresh(inputs)
    assert fresh.keys() == {*attention.given, attention.target}
    everything = attention.program.run(
        range(len(attention.nodes)), {i: fresh[i] for i in attention.given}, range(len(attention.nodes))
    )
    compared = 0
    for mutation in [*mutations(Context(attention))][::29]:
        whole, needed = (tried(lambda m=mutation, v=v: attention.value(m.edits, v)) for v in (everything, fresh))
        if isinstance(whole, torch.Tensor):
            compared += 1
            assert torch.equal(whole.nan_to_num(), needed.nan_to_num()), mutation.says
    assert compared > 100


def test_as_many_mutations_run_at_once_as_what_follows_whole_has_room_for(rng, monkeypatch):
    x, p = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((64, 48), (48,)))
    part = part_of(lambda x, p: (x @ torch.outer(p.sin(), p)).softmax(1), x=x, p=p)
    some, sine = slices.Slices(part, 0, torch.arange(4)), next(n.id for n in part.nodes if n.op == "sin")
    assert some.together({sine}) == slices.TOGETHER
    monkeypatch.setattr(slices, "MOST_TOGETHER", 3 * 48 * 48 + 1000)  # of 48 x 48 what is not taken apart by rows
    assert some.together({sine}) == 3


def test_a_part_is_let_go_at_once(rng):
    """Of a large step each candidate has one, with the values of all operations: gigabytes on a GPU."""
    part = part_of(lambda x: x.softmax(1).sin(), x=torch.from_numpy(rng.standard_normal((64, 48))))
    some, there = slices.Slices(part, 0, torch.arange(4)), weakref.ref(part)
    assert part.downstream(0) == [node.id for node in part.nodes]
    assert some.alone()[0].names == ["x", "output"]
    gc.disable()
    try:
        del part, some
        assert there() is None
    finally:
        gc.enable()


def test_the_dimension_is_that_along_which_least_is_left(attention, rng):
    x = torch.from_numpy(rng.standard_normal((64, 48)))
    part = part_of(lambda x: x.softmax(1).sin(), x=x)
    assert slices.sampled(part, torch.ones(64, 48, dtype=torch.bool)).dim.dim == 0
    part = part_of(lambda x: (x - x.mean()).softmax(1).cumsum(0), x=x)
    assert slices.sampled(part, torch.ones(64, 48, dtype=torch.bool)) is None, "both are mixed"


def test_six_of_eight_slices_are_wrong_ones(attention):
    wrong = torch.zeros(2, 40, 32, dtype=torch.bool)
    wrong[1, 20:, 3] = True
    some = slices.sampled(attention, wrong)
    numbers = some.of(torch.arange(40)[None, :, None].expand(2, 40, 32))[0, :, 0]
    assert len(numbers) == 8
    assert int((numbers >= 20).sum()) == 6


def test_a_small_step_has_none(rng):
    x = torch.from_numpy(rng.standard_normal((64, 48)))
    part = part_of(lambda x: x.softmax(1).sin(), x=x)
    assert not slices.large(part)
    assert slices.sampled(part, torch.ones(64, 48, dtype=torch.bool)) is None


def test_what_an_edit_takes_is_brought_to_its_device_and_lookups_of_wrong_places_raise():
    """The device without memory stands for a GPU."""
    there, x, two = torch.device("meta"), torch.arange(4.0), torch.tensor([2])
    with on(there):
        assert torch.where(torch.ones(4, device=there) > 0.0, x, 0.5 * x).device == there, "a mask and a value"
        assert torch.ops.aten.arange.default(3, device="cpu").device == there
        assert x.index_select(0, two).device == there
        for call in (lambda: x[two + 2], lambda: x.gather(0, two - 3), lambda: two.repeat_interleave(two - 3)):
            with pytest.raises((IndexError, RuntimeError)):
                call()
    with Brought(torch.device("cpu")):
        shifted = two << torch.tensor([3])
        assert (int(shifted), int(two)) == (16, 2), "its name ends as those that write in place do"
        y = torch.zeros(4)
        y.index_add_(0, torch.tensor([1, 1]), torch.ones(2))
        y.masked_scatter_(torch.tensor([False, False, False, True]), torch.full((1,), 7.0))
        assert y.tolist() == [0.0, 2.0, 0.0, 7.0]


def test_lookups_stay_on_a_gpu_where_all_places_are_known_to_be_inside():
    x, two = torch.zeros(3, 5), torch.tensor([2])
    assert _inside(x, 1, torch.tensor([0, 4]))
    assert not _inside(x, 0, torch.tensor([0, 4]))
    assert not _inside(x, 1, torch.tensor([-1]))
    assert _inside(x, [None, torch.tensor([4])])
    assert not _inside(x, [torch.tensor([4]), None])
    assert _inside(x, two), "an embedding"
    assert not _inside(x, two + 1), "which of its sizes counts is not known"
    assert not _inside(x, [torch.ones(3, dtype=torch.bool)])


@pytest.mark.long
def test_slices_of_several_mutations_at_once_are_those_of_each(attention):
    some = slices.sampled(attention, torch.ones(2, 40, 32, dtype=torch.bool))
    every = sorted(mutations(Context(attention)), key=lambda m: (*m.edits,))
    together = 0
    for _, alike in itertools.groupby(every, lambda m: (*m.edits,)):
        group = [*alike][::9][:16]
        found = tried(lambda g=group: some.values([m.edits for m in g]))
        if isinstance(found, list) and len(group) > 1:
            together += len(found)
            for mutation, value in zip(group, found, strict=True):
                alone = some.value(mutation.edits)
                assert torch.allclose(value, alone, 1e-9, 1e-12, equal_nan=True), mutation.says
    assert together > 800


@pytest.mark.long
@pytest.mark.parametrize("least", [0, slices.LARGE], ids=["slices", "all"])
@pytest.mark.parametrize(("other", "kind"), [(tanh, "function"), (flipped, "flip")])
def test_a_large_step_is_explained_as_a_small_one(least, other, kind, rng, monkeypatch):
    """The same cause from slices as from all, of a fault that moves whole slices and of one that does not."""
    monkeypatch.setattr(slices, "LARGE", least)
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((2, 40, 32), (32, 96), (32,)))
    golden = whywrong.golden(block, x=x, w=w, gain=gain)
    found = whywrong.explain({"x": x, "w": w, "gain": gain, "output": other(x, w, gain)}, golden)
    assert (found.verdict, found.causes[0].kind) == ("cause", kind), found


def test_slices_are_a_program_of_their_own_with_the_bounds_of_the_whole(attention):
    """q is taken of some tokens of a list of three that is made whole, and k and v of all."""
    some = slices.sampled(attention, torch.ones(2, 40, 32, dtype=torch.bool))
    (alone, forms), whole = some.alone(), attention.mutated({})
    assert {name: of for name, (of, _) in forms.items()} == {
        "x": "x",
        "gain": "gain",
        "w": "w",
        "x, form 4": "x",
        "output": "output",
    }
    assert torch.allclose(alone["output"], some.of(whole["output"]), 1e-12, 1e-12)
    for name, (of, along) in forms.items():
        assert name == "output" or torch.equal(alone[name], some.cut(whole[of], along)), "x is taken in two forms"
    precision = whywrong.Precision(storage="float32")
    few, every = (whywrong.bounded(golden, precision=precision).step("output").bound for golden in (alone, whole))
    ratio = few.noise / some.of(torch.as_tensor(every.noise))
    assert 0.8 < float(ratio.median()) < 1.25
    assert alone.program.largest(range(len(alone.program.nodes))) < whole.program.largest(
        range(len(whole.program.nodes))
    )


@pytest.mark.long
@pytest.mark.parametrize(("off", "causes"), [(0.0, 1), (100.0, 0)])
def test_what_explains_the_slices_has_to_explain_the_rest(off, causes, rng, monkeypatch):
    """One element of a token that is in no slice is wrong by itself."""
    monkeypatch.setattr(slices, "LARGE", 0)
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((2, 40, 32), (32, 96), (32,)))
    observed = {"x": x, "w": w, "gain": gain, "output": tanh(x, w, gain)}
    observed["output"][1, 3, 5] += off
    found = whywrong.explain(observed, whywrong.golden(block, x=x, w=w, gain=gain), seconds=6.0)
    assert len(found.causes) == causes, found


def explained(golden, observed, seconds=3.0, **declared):
    """What explain says with slices, the precision as declared."""
    return whywrong.explain(observed, golden, seconds=seconds, precision=whywrong.Precision(**declared))


@pytest.fixture
def sampled(monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 0)
    torch.manual_seed(0)
    return torch.randn(64, 8), torch.randn(8, 16), torch.randn(16)


def test_what_slices_cannot_run_is_tried_at_the_end(sampled, monkeypatch):
    x, w, _ = sampled
    tried, run = [], _Search._values
    monkeypatch.setattr(_Search, "_on_slices", lambda search, group: [None] * len(group))
    monkeypatch.setattr(_Search, "_values", lambda search, *args: tried.append([*run(search, *args)]) or tried[-1])
    explained(whywrong.golden(lambda x, w: (x @ w).sin(), x=x, w=w), {"x": x, "w": w, "output": (x @ w).cos()})
    assert "cos in place of sin" in [mutation.says for some in tried for mutation, _ in some]


def test_errors_in_few_slices_are_not_those_of_fewer_digits(sampled):
    """Most of the slices that are looked at are wrong ones, and of all only six."""
    x, w = torch.randn(64, 64), torch.randn(64, 48)
    y = x @ w
    y[58:] += 1.5e-3 * torch.randn(6, 48)
    found = explained(whywrong.golden(lambda x, w: x @ w, x=x, w=w), {"x": x, "w": w, "output": y}, storage="float32")
    assert not found.causes, found


def test_rules_of_steps_that_slices_do_not_have_are_left_out(sampled):
    x, w, g = sampled

    def two(x, w, g):
        a = whywrong.step("a", x @ w)
        whywrong.step("b", (x + 1).relu() @ w)
        return a * g

    golden = whywrong.golden(two, x=x, w=w, g=g)
    observed = {"x": x, "w": w, "g": g, "a": x @ w, "b": (x + 1).relu() @ w, "output": (x @ w) * (g + 1)}
    (cause,) = explained(golden, observed, storage="float32", steps={"b": {"products": "tf32"}}).causes
    assert cause.says == "g, as used here, is 1 too large"


def test_slices_of_steps_before_have_their_own_types(sampled):
    """Of a step that is stored in bfloat16 a kernel may go on with what it had before."""
    x, w, g = (t.bfloat16().float() for t in sampled)
    golden = whywrong.golden(lambda x, w, g: whywrong.step("h", x @ w).sin() * g, x=x, w=w, g=g)
    given = {name: t.bfloat16() for name, t in {"x": x, "w": w, "g": g, "h": x @ w}.items()}
    (cause,) = explained(golden, given | {"output": ((x @ w).cos() * g).bfloat16()}).causes
    assert cause.says == "cos in place of sin"


def test_where_the_largest_value_counts_all_is_checked(sampled):
    torch.manual_seed(3)  # of eight, one of three in which the slices alone refuse it
    x, w = torch.randn(64, 16), torch.randn(16, 16)
    x[:48], x[48:] = 1e-4 * x[:48], 10.0 * x[48:]
    y = x @ w
    noise = torch.randn(64, 16) * y.abs().max() * 2**-25
    observed = {"x": x, "w": w, "output": 0.25 * y + noise}
    golden = whywrong.golden(lambda x, w: (x @ w) * 0.5, x=x, w=w)
    assert explained(golden, observed, storage="float32", normwise=True).causes


@pytest.mark.long
def test_a_pattern_outside_of_the_slices_that_are_looked_at_is_seen(sampled):
    """Of tanh's approximation and, but for six rows, a third of a tolerance more everywhere."""
    x, w = torch.randn(2048, 8), torch.randn(8, 16)
    other = whywrong.golden(lambda x, w: gelu(x @ w, approximate="tanh"), x=x, w=w)
    bound = whywrong.bounded(other, precision=whywrong.Precision("float32")).step("output").bound.absolute
    bound[torch.linspace(0, 2047, 6).long()] = 0.0
    observed = {"x": x, "w": w, "output": (other["output"] + 0.35 * bound).float()}
    assert not explained(whywrong.golden(lambda x, w: gelu(x @ w), x=x, w=w), observed, storage="float32").causes


def test_what_is_left_out_between_two_values_has_the_kind_of_its_last_operation():
    x = torch.linspace(0.1, 2.0, 12).view(3, 4)
    part = part_of(lambda x: ((x.tanh() + 1.0).exp() * 3.0).sqrt(), x=x)
    found = {m.says: m.kind for m in mutations(Context(part)) if "what is between is left out" in m.says}
    ends = {"add": "drop_term", "exp": "function", "mul": "factor", "output": "function"}
    assert len(found) == 10
    for says, kind in found.items():
        assert kind == ends[says.partition(" stands in place of ")[2].split(":")[0].split()[-1]], says


@pytest.mark.long
def test_a_term_that_is_added_to_a_large_step_is_found(rng, monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 0)
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((2, 40, 32), (32, 96), (32,)))
    observed = {"x": x, "w": w, "gain": gain, "output": block(x, w, gain) + 0.3 * x}
    found = whywrong.explain(observed, whywrong.golden(block, x=x, w=w, gain=gain), seconds=6.0)
    (cause,) = found.causes
    assert cause.says.startswith(("x is added, 0.3 ", "x is added, 0.30000")), found


def test_the_time_of_mutations_grows_with_what_follows_and_less_than_their_number(attention):
    some = slices.sampled(attention, torch.ones(2, 40, 32, dtype=torch.bool))
    first, last = min(attention.downstream(*attention.given)[len(attention.given) :]), attention.target
    assert 0.0 < some.time([last], 1) < some.time([first], 1)
    assert some.time([last], 1) <= some.time([last], 8) < 8.0 * some.time([last], 1)


def test_a_large_step_of_whole_numbers_is_explained(rng, monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 0)
    x = torch.from_numpy(rng.standard_normal((40, 12))).float()
    golden = whywrong.golden(lambda x: x.argmax(-1), x=x)
    assert whywrong.explain({"x": x, "output": x.argmin(-1)}, golden).verdict == "cause"


def unread(x, w, gain):
    """The values of the last 12 of 40 tokens are not read."""
    return block(x, w, gain, lambda v: torch.cat([v[:, :, :28], torch.zeros_like(v[:, :, 28:])], 2))


@pytest.mark.long
def test_one_mutation_of_almost_every_kind_is_tried_in_a_fiftieth_of_the_time(rng, monkeypatch):
    """With all mutations of a place in a row the last kind comes after 75% of it, the first transposition after 39%."""
    monkeypatch.setattr(slices, "LARGE", 0)
    found, order = [], _Search._mutations
    monkeypatch.setattr(_Search, "_mutations", lambda search: found.append((search._slices, [*order(search)])) or [])
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((2, 40, 32), (32, 96), (32,)))
    golden = whywrong.golden(block, x=x, w=w, gain=gain)
    whywrong.explain({"x": x, "w": w, "gain": gain, "output": tanh(x, w, gain)}, golden, seconds=1.0)
    ((some, every),) = found
    first, passed = dict[str, float](), 0.0
    for edits, alike in itertools.groupby(every, lambda m: [*m.edits]):
        while batch := [*itertools.islice(alike, some.together(edits))]:
            for mutation in batch:
                first.setdefault(mutation.kind, passed)
            passed += some.time(edits, len(batch))
    assert len(first) == 20
    late = {kind: round(time / passed, 3) for kind, time in first.items() if time > passed / 50.0}
    assert {"flip", "function", "layout", "mask", "swap", "transpose"}.isdisjoint(late), late
    assert len(late) < 4, late


@pytest.mark.gpu
@pytest.mark.parametrize(("other", "kinds"), [(tanh, {"function"}), (flipped, {"flip"}), (unread, {"truncate"})])
def test_a_large_step_on_a_gpu_is_explained_there(other, kinds, rng, monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 0)
    shapes = ((2, 40, 32), (32, 96), (32,))
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)).float().cuda() for shape in shapes)
    golden = whywrong.golden(block, x=x, w=w, gain=gain)
    observed = {"x": x, "w": w, "gain": gain, "output": other(x, w, gain)}
    found = whywrong.explain(observed, golden, seconds=60.0)
    assert found.verdict == "cause", found
    assert found.causes[0].kind in kinds, found
    part = Part(golden, whywrong.Trace(observed), "output")
    assert part.device.type == "cuda"
    with pytest.raises((IndexError, RuntimeError)), on(part.device):  # and CUDA goes on
        x.index_select(1, torch.tensor([40]))
    assert torch.equal(x.cpu(), x.clone().cpu())


@pytest.mark.long
def test_what_leaves_small_errors_as_they_were_is_not_run_on_all(rng, monkeypatch):
    """Elements wrong by one to three tolerances are so near already: without the rule, every mutation runs on all."""
    monkeypatch.setattr(slices, "LARGE", 0)
    whole, value = [], Part.value
    monkeypatch.setattr(Part, "value", lambda part, *args: whole.append(0) or value(part, *args))
    x, w, gain = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((2, 40, 32), (32, 96), (32,)))
    golden = whywrong.golden(block, x=x, w=w, gain=gain)
    right = block(x, w, gain)
    allowed = whywrong.bounded(golden, precision=whywrong.Precision("float32")).step("output").bound.absolute
    observed = right + (2.0 * allowed * torch.from_numpy(rng.choice([-1.0, 1.0], right.shape))).float()
    found = whywrong.explain({"x": x, "w": w, "gain": gain, "output": observed}, golden, seconds=6.0)
    assert found.tried > 100
    assert len(whole) < found.tried / 3, (len(whole), found.tried)
