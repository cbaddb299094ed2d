"""Steps of torch modules by hooks, two models matched by a name map, and the observer's effect."""

import pytest
import torch
from torch import nn

from whywrong import Trace, capture, golden, localise, step
from whywrong.errors import UsageError
from whywrong.reporting.diff import Report


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
    assert trace.names[:12] == [
        "input.0", "0.weight", "0.bias", "2.weight", "2.bias", "0/addmm", "0", "1/gelu", "1", "2/addmm", "2", "output",
    ]  # fmt: skip
    gradients = [name for name in trace.names if name.startswith("grad:")]
    assert gradients == ["grad:input.0", "grad:0.weight", "grad:0.bias", "grad:2.weight", "grad:2.bias"]
    assert trace.about["observer"] == "none"
    assert trace.texts == {}, "which no report repeats"


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
    assert trace.about["observer"] == "none", "dropout is sampled from the same state"


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
    f"{of}{a}.{kind}": f"{of}{b}.{kind}"
    for a, b in {"0": "up", "2": "down"}.items()
    for kind in ("weight", "bias")
    for of in ("", "grad:")
}


def test_two_models_are_matched_by_a_map_and_the_unmapped_is_listed():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    recorded = golden(block(), x)
    same = localise(capture(Renamed(block()), x), recorded, names=MAP)
    assert (same.first, same.unexpected) == (None, ["extra"])
    wrong = localise(capture(Renamed(block(), 1.1), x), recorded, names=MAP)
    assert (wrong.first, wrong.own[:1]) == ("2", ["2"])


def test_a_function_is_captured_by_its_steps_and_results():
    def run(x, w):
        return {"y": torch.relu(step("scores", x @ w))}

    trace = capture(run, x=torch.ones(2, 3), w=torch.ones(3, 2))
    assert trace.names == ["x", "w", "/mm", "scores", "/relu", "y"]
    assert trace["y"].dtype == torch.float32


def test_a_buffer_that_changes_its_shape_and_an_input_that_is_written_to_are_put_back():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x.detach()])
            return x * 2.0

    model, x = Growing(), torch.ones(3)
    assert capture(model, x).about["observer"] == "none"
    assert model.seen.tolist() == [0.0]

    @torch.no_grad()
    def writes(x):
        return x.mul_(2.0)

    assert capture(writes, x)["output"].tolist() == [2.0] * 3
    assert x.tolist() == [1.0] * 3


def test_what_cannot_run_and_what_gives_no_tensor_are_refused():
    with pytest.raises(UsageError, match=r"capture: .*got a Tensor"):
        capture(torch.ones(1), torch.ones(1))

    class Silent(nn.Module):
        def forward(self, x):
            return "nothing"

    with pytest.raises(UsageError, match="expected a result with a tensor, got none"):
        capture(Silent(), torch.ones(1))


class Growing(nn.Module):
    """Has a buffer that gets longer with each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.seen.resize_(self.seen.numel() + 1).zero_()
        return x * self.seen.numel()


def test_a_buffer_that_changes_its_shape_is_put_back():
    model = Growing()
    assert capture(model, torch.ones(2)).about["observer"] == "none"
    assert torch.equal(model.seen, torch.zeros(1))


def test_a_result_of_another_shape_when_looked_at_is_reported():
    class Longer(Shy):
        def forward(self, x):
            return self.inner(torch.cat([x, x]) if self.inner._forward_hooks else x)

    assert capture(Longer(), torch.ones(3)).about["observer"].startswith("differs when nothing is captured: output")


def test_a_function_without_a_result_is_captured_by_its_steps_whatever_their_names():
    def computes(x):
        step("scores/raw", x.exp())

    assert "scores/raw" in capture(computes, torch.ones(3)).names


@pytest.mark.parametrize("result", [None, 3.0])
def test_what_gives_no_tensor_is_refused_though_it_computes(result):
    def computes(x):
        x.exp().sum()
        return result

    with pytest.raises(UsageError, match="capture: expected a result with a tensor, got none"):
        capture(computes, torch.ones(3))


def test_what_another_tool_calls_its_observer_is_shown_as_it_is():
    model, x = block(), torch.ones(3, 8)
    trace = capture(model, x)
    other = Trace({name: trace[name] for name in trace.names}, {"observer": "hooks 1.2"})
    assert not any("uncaptured" in note for note in localise(other, golden(model, x)).notes)
    assert other.texts == {"observer": "hooks 1.2"}


def test_a_report_says_that_what_was_captured_is_not_what_runs():
    report = localise(capture(Shy(), torch.ones(3)), golden(Shy(), torch.ones(3)))
    (note,) = [note for note in report.notes if "uncaptured" in note]
    assert note.startswith(
        "what was captured is not what runs uncaptured: differs when nothing is captured: output, grad:input.0; "
    )
    printed = str(Report({"shy": report}, {}, {"observer": capture(Shy(), torch.ones(3)).about["observer"], "by": "e"}))
    assert printed.count("differs when nothing is captured") == 1
    assert "by, as the files have it: e" in printed
    quiet = localise(capture(block(), torch.ones(3, 8)), golden(block(), torch.ones(3, 8)))
    assert not any("uncaptured" in note for note in quiet.notes)


class Stepped(nn.Module):
    """Names a step in a loop."""

    def __init__(self, slope=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.slope = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), slope

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = step(f"named.{k}", nn.functional.leaky_relu(layer(x), self.slope))
        return x


@pytest.fixture
def graphs():
    """The graphs that torch.compile hands to the backend `graphs.backend`."""
    torch._dynamo.reset()

    class Graphs(list):
        def backend(self, graph, _inputs):
            self.append(graph)
            return graph

    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.long
def test_a_model_with_steps_is_compiled_whole(graphs):
    model, x = Stepped(), torch.randn(4, 8)
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1
    trace = capture(compiled, x)
    assert trace.names == capture(model, x).names
    assert trace.about["observer"] == "none"
    assert torch.equal(compiled(x), model(x))
    assert len(graphs) <= 2, "once more where gradients are wanted"


class Forwarding(nn.Module):
    """Has all attributes of the module inside, as adapters of others do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x).tanh()


def test_a_wrapper_of_a_compiled_model_has_its_result(graphs):
    x = torch.randn(4, 8)
    compiled = Forwarding(torch.compile(Stepped(), backend=graphs.backend))
    assert capture(compiled, x).names == capture(Forwarding(Stepped()), x).names
    assert "output" in golden(compiled, x).names


def test_a_compiled_model_has_the_names_of_the_model(graphs):
    model, x = Stepped(), torch.randn(4, 8)
    compiled = torch.compile(model, backend=graphs.backend)
    compiled(x)
    assert capture(compiled, x).names == capture(model, x).names
    before = len(graphs)
    assert golden(torch.compile(Stepped(), backend=graphs.backend), x).names == golden(model, x).names
    assert len(graphs) == before, "a golden is of the program as it is written"
    inner = nn.Sequential(torch.compile(model, backend=graphs.backend), nn.Tanh())
    assert capture(inner, x).names == capture(nn.Sequential(model, nn.Tanh()), x).names
    report = localise(capture(torch.compile(Stepped(0.1), backend=graphs.backend), x), golden(compiled, x))
    assert report.first == "named.0", report


def test_gradients_of_a_norm_that_is_used_twice_are_summed_as_those_of_one_that_is_used_once():
    """In bfloat16, each time; autograd adds both up. As in ALBERT, whose layers are one."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

        def forward(self, x):
            return self.norm(self.linear(self.norm(x)))

    torch.manual_seed(0)
    model, x = Twice().bfloat16(), torch.randn(4, 300, 16).bfloat16()
    report = localise(capture(model, x), golden(model, x))
    assert report.first is None, report


IN_TORCHS_OWN_WAY = {
    "pools that overlap": lambda x: nn.functional.max_pool2d(x.view(4, 5, 50, 20), 3, 2),
    "pools of a volume": lambda x: nn.functional.max_pool3d(x.view(4, 5, 10, 10, 10), 3, 2),
    "averages that overlap": lambda x: nn.functional.avg_pool2d(x.view(4, 5, 50, 20), 3, 2),
    "unequal parts of a volume": lambda x: nn.functional.adaptive_avg_pool3d(x.view(4, 5, 10, 10, 10), 7),
    "averages of unequal parts": lambda x: nn.functional.adaptive_avg_pool2d(x.view(4, 5, 50, 20), 7),
    "sums by index": lambda x: torch.zeros(50, dtype=x.dtype).index_add(0, torch.arange(20000) % 50, x),
    "a product of all": lambda x: (1.0 + 0.1 * x).view(-1, 100).prod(-1),
    "bags": lambda x: nn.functional.embedding_bag(torch.arange(200).view(4, 50), x.view(200, 100)),
    "a gate": lambda x: nn.functional.glu(x.view(-1, 100)),
    "a sigmoid": torch.sigmoid,
    "rows of a norm": lambda x: torch.renorm(x.view(-1, 100), 2, 0, 1.0),
    "a slope that is learned": lambda x: nn.functional.prelu(x.view(200, 100), x[:100].abs()),
}


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_TORCHS_OWN_WAY)
def test_what_torchs_narrow_kernels_store_as_they_go_is_no_error(name, dtype):
    """Sums in the narrow type, results of a kernel that are rounded before others take them."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return IN_TORCHS_OWN_WAY[name](x * self.weight)

    x = (2.0 * torch.randn(20000, generator=torch.Generator().manual_seed(1))).to(dtype)
    model = Scaled().to(dtype)
    recorded, seen = golden(model, x), capture(model, x)
    report = localise(seen, recorded)
    assert report.first is None, report
    wrong = seen["output"].clone()
    wrong.view(-1)[wrong.view(-1).double().abs().argmax()] *= 1.5
    steps = {step: seen[step] for step in seen.names if "backward" not in step and "grad" not in step}
    assert localise(steps | {"output": wrong}, recorded).first == "output"


class Recurrent(nn.Module):
    """h <- tanh(W x + U h + b) along time; below autocast autograd adds up the gradients of U in 16 bits."""

    def __init__(self, dtype=None):
        super().__init__()
        self.take, self.keep, self.dtype = nn.Linear(6, 6), nn.Linear(6, 6), dtype

    def forward(self, x):
        h = torch.zeros(x.shape[0], 6)
        for half in torch.arange(x.shape[1]).chunk(2):
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                for t in half:
                    h = torch.tanh(self.take(x[:, int(t)]) + self.keep(h))
        return h


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_that_autocast_adds_up_in_sixteen_bits_are_held_to_them(dtype):
    torch.manual_seed(0)
    plain, cast, x = Recurrent(), Recurrent(dtype), torch.randn(4, 40, 6)
    cast.load_state_dict(plain.state_dict())
    trace = capture(cast, x)
    assert str(dtype).removeprefix("torch.") in str(trace.about["precision"]["steps"]["grad:keep.weight"])
    assert localise(trace, golden(plain, x)).first is None
    plain.keep.weight.data[2, 3] += 0.5
    assert localise(trace, golden(plain, x)).first is not None
