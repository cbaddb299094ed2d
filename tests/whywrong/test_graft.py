"""Parameters that are not the golden's, and ports that run with a step's golden value in its place."""

import copy

import pytest
import torch
from torch import nn

import whywrong
from whywrong import UsageError, capture, explain, golden, graft, localise, step


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.out(torch.softmax(self.q(h) @ self.k(h).mT / 4.0, -1) @ self.v(h))
        return x + self.down(self.act(self.up(x)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.fixture(scope="module")
def recorded(model):
    return golden(model, torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))


def turned(port, layer=0):
    port[layer].q.weight.data = port[layer].q.weight.data.T.contiguous()
    return port


def approximate(port, layer=1):
    port[layer].act = nn.GELU(approximate="tanh")
    return port


def captured(port, recorded):
    return capture(port, recorded["input.0"].float())


@pytest.mark.long
def test_a_parameter_is_related_to_the_goldens_and_what_follows_is_checked_with_it(model, recorded):
    found = localise(captured(turned(copy.deepcopy(model)), recorded), recorded)
    assert found.findings["0.q.weight"].words == "not the golden's parameter: transposed"
    assert (found.first, found.own, found.unchecked) == ("0.q.weight", ["0.q.weight"], [])
    assert found.findings["0.q"].words == found.findings["output"].words == "inherited only"
    assert found.findings["0.v"].words == "ok"


@pytest.mark.long
def test_a_second_fault_behind_a_parameter_is_found(model, recorded):
    steps = captured(approximate(turned(copy.deepcopy(model))), recorded)
    assert [name for name in localise(steps, recorded).own if "backward" not in name] == ["0.q.weight", "1.act"]
    said = str(explain(steps, recorded))
    assert (
        "0.q.weight is not the golden's parameter: transposed; what comes after is checked with it as observed" in said
    )
    assert "1.act" in said


def test_a_parameter_of_another_shape_is_related_too(model):
    x = torch.randn(3, 4)
    linear = nn.Linear(4, 6)
    steps = capture(linear, x)
    observed = {name: steps[name] for name in ("input.0", "bias", "output")}
    observed["weight"] = steps["weight"].T.contiguous()
    found = localise(observed, golden(linear, x))
    assert found.findings["weight"].words == "not the golden's parameter: transposed"
    assert found.findings["output"].words == "ok"


def test_another_input_still_ends_the_check_and_is_related(model, recorded):
    found = localise(capture(model, 2.0 * recorded["input.0"].float()), recorded)
    assert found.findings["input.0"].words == "not the golden's input: times 2"
    assert "nothing else was checked" in found.verdict


@pytest.mark.long
def test_parameters_are_kept_in_a_file(model, recorded, tmp_path):
    again = whywrong.load(recorded.save(tmp_path / "golden.safetensors"))
    assert again.parameters == recorded.parameters
    assert "0.q.weight" in again.parameters
    assert "input.0" not in again.parameters
    found = localise(captured(turned(copy.deepcopy(model)), recorded), again)
    assert found.findings["output"].words == "inherited only"


@pytest.mark.long
def test_the_only_fault_heals_all(model, recorded):
    port = approximate(copy.deepcopy(model))
    found = graft(port, recorded, "1.act")
    assert (found.heals, found.others) == ("all", [])
    assert found.tolerance < 1.0
    assert str(found).endswith("of its tolerance; it is the only fault")
    assert graft(port, recorded, "1.down").others == ["1.act"], "what comes after it heals the result, not the step"
    assert graft(port, recorded, "0").heals == "none"
    assert graft(port, recorded, "1.act", recorded["input.0"].float()).heals == "all"


@pytest.mark.long
def test_one_fault_of_two_heals_a_part(model, recorded):
    port = approximate(turned(copy.deepcopy(model)))
    found = graft(port, recorded, "0.q.weight")
    assert (found.heals, found.others) == ("part", ["1.act"])
    assert found.errors[1] < 0.1 * found.errors[0]
    assert str(found).startswith("with 0.q.weight repaired a part of the result heals")
    nothing = graft(port, recorded, "0.v")
    assert (nothing.heals, nothing.others) == ("none", ["0.q.weight", "1.act"])


def test_the_port_stays_as_it_was(model, recorded):
    port = turned(copy.deepcopy(model))
    before = {name: x.clone() for name, x in port.state_dict().items()}
    graft(port, recorded, "0.q.weight")
    graft(port, recorded, "0.q")
    assert all(torch.equal(x, before[name]) for name, x in port.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in port.modules())
    assert isinstance(port[0].q.weight, nn.Parameter)


def reference(x, w):
    s = step("s", x @ w)
    for _ in range(2):
        s = step("p", torch.softmax(s, -1))
    return s @ w.T


def test_a_function_takes_its_steps_from_whywrong_step():
    x, w = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(2))

    def port(x, w):
        s = step("s", x @ w)
        s = step("p", torch.softmax(s, -1))
        s = step("p", torch.softmax(1.01 * s, -1))
        return s @ w.T

    recorded = golden(reference, x, w)
    assert graft(port, recorded, "p#2").heals == "all"
    assert graft(port, recorded, "p#2").others == []
    assert not any("uncaptured" in note for note in graft(port, recorded, "p#2").report.notes)
    assert graft(port, recorded, "p").heals == "none"
    named = golden(reference, x=x, w=w)
    assert graft(port, named, "p#2").heals == "all"


def test_a_function_that_gives_a_dict_and_other_names():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))

    def parts(x, factor=1.0, name="m"):
        m = step(name, x.mean(-1) * factor)
        return {"shifted": x - m[:, None]}

    recorded = golden(parts, x)

    def port(x):
        return parts(x, 1.1, "mean")

    assert graft(port, recorded, "m", names={"m": "mean"}).heals == "all"


class Turned(nn.Module):
    """A spectrum in a submodule: complex numbers, of which steps have the parts."""

    def __init__(self, angle=0.0):
        super().__init__()
        self.spectrum, self.angle = Spectrum(), angle

    def forward(self, x):
        return torch.fft.irfft(self.spectrum(x + self.angle), n=8)


class Spectrum(nn.Module):
    def forward(self, x):
        return step("all", torch.fft.rfft(x))


@pytest.mark.parametrize("name", ["spectrum", "all"])
def test_complex_numbers_are_replaced_by_complex_ones(name):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    recorded, port = golden(Turned(), x), Turned(0.1)
    assert graft(port, recorded, name).heals == "all"
    assert capture(port, x)["output"].shape == (3, 8)


class Pair(nn.Module):
    def forward(self, x):
        return x + 1.0, {"twice": 2.0 * x}


class Parts(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.pair, self.factor = Pair(), factor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1.0
        one, rest = self.pair(x * self.factor)
        two, _ = self.pair(one)
        return two * rest["twice"]


def test_a_part_of_what_a_submodule_gives_and_its_second_call():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))
    port, recorded = Parts(1.01), golden(Parts(), x)
    assert graft(port, recorded, "pair.1.twice").heals == "part"
    assert graft(port, recorded, "pair.0#2").heals == "part"
    assert float(port.calls) == 0.0


def test_what_cannot_be_replaced_is_refused(model, recorded):
    port = turned(copy.deepcopy(model))
    for name, says in (
        ("1.actt", "did you mean 1.act"),
        ("input.0", "input.0: expected a step that the port computes"),
        ("grad:0.q.weight", "expected a step that the port computes in the golden's shape, got none"),
    ):
        with pytest.raises(UsageError, match=says):
            graft(port, recorded, name)
    with pytest.raises(UsageError, match="expected a port whose result is wrong, got a correct one: output"):
        graft(model, recorded, "0.q")
    with pytest.raises(UsageError, match="expected a recorded golden"):
        graft(port, {"output": 1.0}, "output")
    with pytest.raises(UsageError, match=r"graft: expected a torch.nn.Module or a function"):
        graft(3, recorded, "0.q")
    wider = nn.Sequential(Block(8), Block(8))
    with pytest.raises(UsageError, match=r"0.norm: expected .* got one of shape \(2, 5, 8\)"):
        graft(wider, recorded, "0.norm", torch.randn(2, 5, 8))


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_hugging_face_with_one_fault_and_with_two(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_attention_heads=4)).eval()
        faulty, second = "layers.0.self_attn.v_proj", "layers.1.mlp.down_proj"
    else:
        model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)).eval()
        faulty, second = "h.0.attn.c_proj", "h.1.mlp.c_fc"
    ids = torch.randint(50, (1, 6), generator=torch.Generator().manual_seed(0))
    recorded = golden(model, ids, use_cache=False)
    port = copy.deepcopy(model)
    port.get_submodule(faulty).register_forward_hook(lambda part, given, out: 1.05 * out)
    found = graft(port, recorded, faulty, ids, use_cache=False)
    assert (found.heals, found.others) == ("all", []), found
    port.get_submodule(second).register_forward_hook(lambda part, given, out: out.flip(-1))
    found = graft(port, recorded, second, ids, use_cache=False)
    assert (found.heals, found.others[0], second in found.others) == ("part", faulty, False), found
