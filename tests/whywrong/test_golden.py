"""What is recorded of a reference, that any part of it runs again, and that a file of it can do no harm."""

import gc
import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import whywrong
from whywrong import Golden, capture, golden, localise, step
from whywrong.errors import UsageError
from whywrong.recording.watching import tensors_of


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


def test_steps_are_inputs_modules_results_and_gradients_in_float64():
    model, x = layer(), torch.randn(2, 5, 16)
    found = golden(model, x)
    assert found.inputs[0] == "input.0"
    assert {"self_attn.0", "linear1", "norm2", "output", "grad:input.0", "grad:linear1.weight"} <= set(found.names)
    assert all(found[name].dtype == torch.float64 for name in found.names)
    assert next(model.parameters()).dtype == torch.float32, "the module stays as it was"
    exact = layer().double()(x.double())
    torch.testing.assert_close(found["output"], exact, rtol=0, atol=1e-13)  # float64 both, a few hundred roundings


def test_a_step_that_is_not_there_and_a_file_that_could_not_be_read_again(tmp_path):
    found = golden(lambda x: step("outer", x.exp()), torch.ones(3))
    with pytest.raises(KeyError, match="'outr' is no step; did you mean outer"):
        found["outr"]
    for path in (tmp_path / "golden.foo", 3):
        with pytest.raises(UsageError, match=r"expected a name that ends in \.safetensors"):
            found.save(path)


def test_names_are_those_of_capture_and_so_are_the_seeds_of_the_backward():
    model, x = layer(), torch.randn(2, 5, 16)
    found, seen = golden(model, x), capture(model, x)
    assert set(found.names) <= set(seen.names)
    difference = seen["grad:input.0"].double() - found["grad:input.0"]
    assert float(difference.abs().max()) < 1e-5, "other seeds would give other gradients altogether"
    for kind in (torch.bfloat16, torch.float32):  # of x itself, the gradient is the seed
        x = torch.ones(5, 7).to(kind)
        gradients = [make(torch.nn.Identity(), x)["grad:input.0"] for make in (golden, capture)]
        assert torch.equal(gradients[0], gradients[1].double())


def test_a_module_may_write_to_its_input_in_place():
    model, x = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    found, seen = golden(model, x), capture(model, x)
    assert torch.equal(seen["input.0"], x)
    assert torch.equal(found["0"], x.double().relu())
    assert torch.equal(found["grad:input.0"][x < 0.0], torch.zeros(int((x < 0.0).sum()), dtype=torch.float64))


def test_every_step_is_the_same_to_the_bit_when_it_is_re_run():
    found = golden(layer(), torch.randn(2, 5, 16))
    values = {name: found[name].clone() for name in found.names}
    again = found.program.run(found.program.cone(found.steps.values(), ()), {}, set(found.steps.values()))
    assert all(torch.equal(again[i], values[name]) for name, i in found.steps.items())


@torch.no_grad()
def written_in_place(x, w):
    scores = step("scores", x @ w.T).clone()
    scores[:, 1:3] *= 2.0
    scores[0] = 1.0
    total = torch.empty_like(scores)
    torch.add(scores, 1.0, out=total)
    total.masked_fill_(total > 3.0, 0.0)
    view = total.view(-1)
    view += 0.5
    return {"total": total, "best": total.max(-1), "soft": torch.softmax(total.float(), -1, dtype=torch.float32)}


def test_writing_in_place_views_out_and_dtypes_are_recorded():
    x, w = torch.randn(4, 6), torch.randn(5, 6)
    found = golden(written_in_place, x=x, w=w)
    exact = written_in_place(x.double(), w.double())
    assert found.names == ["x", "w", "scores", "total", "best.0", "best.1", "soft"]
    torch.testing.assert_close(found["total"], exact["total"], rtol=0, atol=1e-14)
    assert torch.equal(found["best.1"], exact["best"].indices)
    assert found["soft"].dtype == torch.float64, "a narrower dtype that the program asks for is not taken"


def test_what_a_part_is_written_to_still_follows_from_the_inputs():
    def run(x):
        total = x * 2.0
        total[0] += 1.0
        return {"total": total * 3.0}

    found, other = golden(run, x=torch.ones(3, 4)), torch.full((3, 4), 5.0, dtype=torch.float64)
    y = found.steps["total"]
    again = found.program.run(found.program.cone([y], ()), {found.steps["x"]: other}, [y])[y]
    assert torch.equal(again, run(other)["total"])


def test_what_is_drawn_into_a_part_is_kept():
    def run(x):
        noise = torch.zeros(2, 3)
        noise[0].normal_()
        return {"y": x + noise}

    y = golden(run, x=torch.ones(2, 3))["y"]
    assert torch.equal(y[1], torch.ones(3, dtype=torch.float64))
    assert (y[0] != 1.0).all()


def test_memory_that_is_freed_is_not_taken_for_what_comes_after_it():
    def run(x):
        for _ in range(50):
            x = (x + 1.0) * 0.5  # each result is freed at the next turn
        return x

    found = golden(run, x=torch.ones(1000))
    assert torch.equal(found["output"], torch.ones(1000, dtype=torch.float64))


def test_what_is_drawn_is_kept_and_said():
    found = golden(lambda x: {"y": nn.functional.dropout(x, 0.5, True)}, x=torch.ones(64))
    assert set(found["y"].tolist()) == {0.0, 2.0}
    assert torch.equal(found["y"], found.value(found.steps["y"]))
    assert any("random" in note for note in found.notes)


def test_a_reference_may_differentiate_by_itself():
    def run(x, w):
        w = w.detach().requires_grad_()
        loss = (x @ w).square().sum()
        return {"loss": loss, "dw": torch.autograd.grad(loss, w)[0]}

    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(golden(run, x=x, w=w)["dw"], 2.0 * x.T @ (x @ w))


def test_a_single_number_is_differentiated_and_a_loss_too():
    x = torch.randn(3, 4)
    assert torch.equal(golden(lambda x: (x * x).sum(), x=x)["grad:x"], 2.0 * x.double())
    assert torch.equal(golden(lambda x: x * x, x, loss=lambda y: y.sum())["grad:input.0"], 2.0 * x.double())
    assert "grad:x" not in golden(lambda x: x * x, x=x)


def test_what_cannot_be_recorded_is_named():
    with pytest.raises(UsageError, match=r"histogram\.bin_ct at test_golden\.py:\d+ cannot be recorded; write histc"):
        golden(lambda x: torch.histogram(x, 4)[0], torch.ones(4))
    with pytest.raises(UsageError, match=r"_to_sparse\.default at test_golden\.py:\d+ cannot be recorded"):
        golden(lambda x: x.to_sparse().abs(), torch.ones(4))
    adjacency = torch.eye(4).to_sparse()
    with pytest.raises(UsageError, match=r"golden: expected dense numbers, got a .* tensor of layout torch.sparse_coo"):
        golden(lambda x: adjacency @ x, torch.ones(4, 4))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # as cuDNN's LSTM on a GPU
    with pytest.raises(UsageError, match="samples more than one tensor, and cannot be recorded"):
        golden(lambda q: fused(q, q, q)[0], torch.ones(1, 1, 4, 8))
    with pytest.raises(UsageError, match="expected a reference whose result has a tensor, got none"):
        golden(lambda x: "nothing", torch.ones(4))

    def through_numpy(x):
        return torch.from_numpy(np.sin(x.detach().numpy()))

    assert any("output depends on no input" in note for note in golden(through_numpy, torch.ones(4)).notes)
    number = golden(lambda x: x * x.sum().item(), torch.ones(4))
    assert any("Python number" in note for note in number.notes)


@pytest.mark.long
def test_what_a_recording_held_is_freed_with_it():
    """Tensors in a cycle stay until Python looks for cycles, which is seldom: on a GPU their memory is missed."""

    def held():
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    module, x = layer(), torch.randn(2, 5, 16)
    gc.collect()
    gc.disable()
    try:
        before = held()
        localise(capture(module, x), golden(module, x), precision=whywrong.Precision())
        assert held() == before
    finally:
        gc.enable()


def test_a_step_outside_a_recording_is_the_tensor():
    x = torch.ones(2)
    assert step("x", x) is x


def test_what_is_saved_is_loaded_and_re_run_to_the_bit(tmp_path):
    found = golden(layer(), torch.randn(2, 5, 16))
    back = Golden.load(found.save(tmp_path / "g.safetensors"))
    assert (back.names, back.operations) == (found.names, found.operations)
    assert all(torch.equal(back[name], found[name]) for name in found.names)
    assert [p.name for p in tmp_path.iterdir()] == ["g.safetensors"]


def tampered(path, change):
    """The file with its program changed."""
    with safe_open(path, "pt") as file:
        text = json.loads(file.metadata()["program"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(text)
    save_file(tensors, path, {"program": json.dumps(text), "labkit": "golden 1"})
    return path


def _set(node, value):
    return lambda text: text["nodes"].__setitem__(node, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(2, ["from_file.default", ["/etc/passwd"], {"named": {}}, [3]]), "no operation that a recorded program"),
        (_set(2, ["set_.source_Tensor", [{"ref": 0}, {"ref": 1}], {"named": {}}, [3]]), "no operation that a recorded"),
        (
            _set(2, ["add_.Tensor", [{"ref": 0}, {"ref": 1}], {"named": {}}, [3]]),
            "no operation that a recorded program",
        ),
        (_set(2, ["add.Tensor", [{"ref": 0}, {"ref": 7}], {"named": {}}, [3]]), "no argument"),
        (_set(2, ["full.default", [[1 << 40], 0.0], {"named": {}}, [1 << 40]]), "elements in all"),
        (
            lambda text: text["nodes"].extend(
                [
                    ["full.default", [[5_000, 5_000], 1.0], {"named": {}}, [5_000, 5_000]],
                    ["mm.default", [{"ref": 3}, {"ref": 3}], {"named": {}}, [5_000, 5_000]],
                ]
            ),
            "operations in its products",
        ),
        (_set(2, ["add.Tensor", [{"ref": 0}, {"ref": 1}], {"named": {}}, [4]]), "where (4,) is declared"),
        (_set(2, ["full.default", [[1 << 40], 0.0], {"named": {}}, [3]]), r"gives (1099511627776,) where (3,) is"),
        (_set(2, ["repeat.default", [{"ref": 0}, [1 << 40]], {"named": {}}, [3]]), "where (3,) is declared"),
        (_set(2, ["eye.default", [1 << 18], {"named": {}}, [1 << 18, 1 << 18]]), "elements in all"),
        (_set(2, ["arange.start_step", [0, 1, 1e-11], {"named": {}}, [3]]), "where (3,) is declared"),
        (_set(2, ["constant_pad_nd.default", [{"ref": 0}, [1 << 38, 1 << 38]], {"named": {}}, [3]]), "where (3,) is"),
        (_set(2, ["full.default", [[{"ref": 0}], 1.0], {"named": {}}, [3]]), "got one that is damaged"),
        (_set(2, ["_fft_r2c.default", [{"ref": 0}, [40], 0, True], {"named": {}}, [3]]), "got one that is damaged"),
        (
            lambda text: text["nodes"].append(["repeat_interleave.Tensor", [{"ref": 0}], {"named": {}}, [3]]),
            "got one that is damaged",
        ),
        (
            lambda text: text["nodes"].extend(
                [
                    ["view.default", [{"ref": 0}, [3, 1]], {"named": {}}, [3, 1]],
                    ["expand.default", [{"ref": 3}, [3, 1 << 30]], {"named": {}}, [3, 1 << 30]],
                ]
            ),
            "elements in all",
        ),
        (
            lambda text: text["nodes"].extend(
                [
                    ["view.default", [{"ref": 0}, [3, 1]], {"named": {}}, [3, 1]],
                    ["expand.default", [{"ref": 3}, [3, 1 << 20]], {"named": {}}, [3, 1 << 20]],
                    ["view.default", [{"ref": 0}, [1, 3, 1]], {"named": {}}, [1, 3, 1]],
                    ["expand.default", [{"ref": 5}, [1 << 20, 3, 1]], {"named": {}}, [1 << 20, 3, 1]],
                    ["add.Tensor", [{"ref": 4}, {"ref": 6}], {"named": {}}, [3]],
                ]
            ),
            "where (3,) is declared",
        ),
        (lambda text: text.update(nodes=text["nodes"] * 16), "more than 40 operations"),
        (lambda text: text["steps"].update(output=99), "names an operation that is not there"),
        (lambda text: text.pop("nodes"), "expected a recorded golden, got one that is damaged"),
        (lambda text: text.update(notes=[1]), "its notes are no texts"),
    ],
)
def test_a_file_can_name_only_pure_operations_of_a_right_size(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr("whywrong.recording.golden.MOST_NODES", 40)
    found = golden(lambda a, b: a + b, a=torch.ones(3), b=torch.ones(3))
    path = tampered(found.save(tmp_path / "g.safetensors"), change)
    with pytest.raises(UsageError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Golden.load(path)


@pytest.mark.parametrize("run", [golden, capture])
def test_an_array_of_another_byte_order_is_an_input_and_one_of_more_digits_is_refused(run):
    x = np.arange(3.0).astype(">f4")
    assert run(torch.exp, x)["input.0"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(UsageError, match=r"input\.0: expected a tensor or an array of 64 bits.*got float128"):
        run(torch.exp, x.astype(np.longdouble))
    with pytest.raises(UsageError, match=r"input\.0: expected real or whole numbers, got complex ones"):
        run(torch.exp, x.astype(np.complex64))


def test_an_input_and_a_parameter_of_one_name_are_refused():
    with pytest.raises(UsageError, match="expected another keyword for the input, got the name of a parameter"):
        golden(nn.Linear(3, 3), weight=torch.ones(3))


def test_a_function_and_a_module_of_the_same_steps_have_the_same_program():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    one = golden(model, x)
    two = golden(lambda x, w, b: torch.relu(x @ w.T + b), x, model[0].weight, model[0].bias)
    assert torch.equal(one["output"], two["output"])
    assert (
        whywrong.localise({"output": one["output"]}, two, precision=whywrong.Precision(accumulate="float64")).first
        is None
    )


def test_variances_are_recorded_and_replay():
    x = torch.randn(4, 8)
    found = golden(lambda x: {"var": x.var(-1), "std": x.std(0), "all": x.std()}, x=x)
    torch.testing.assert_close(found["std"], x.double().std(0))


def test_what_depends_on_values_is_recorded_and_not_saved(tmp_path):
    x = torch.linspace(-1.0, 1.0, 65)

    def positive(x):
        return {"y": x[x > 0.0] * 1.1}

    found = golden(positive, x=x)
    assert localise(capture(positive, x=x), found).first is None
    assert localise(capture(lambda x: {"y": positive(x)["y"] * 1.001}, x=x), found).own == ["y"]
    with pytest.raises(UsageError, match="cannot be checked without its data and is not saved"):
        found.save(tmp_path / "g.safetensors")


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    scale: np.ndarray
    name: str = "train"


Pair = namedtuple("Pair", "left right")


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (lambda a, b: {"left": a, "right": b, "n": 3}, ["given.left", "given.right"]),
        (lambda a, b: OrderedDict(left=a, right={"deep": b}), ["given.left", "given.right.deep"]),
        (lambda a, b: (a, [b, None], 2), ["given.0", "given.1.0"]),
        (Pair, ["given.0", "given.1"]),
        (lambda a, b: Batch(a, b.numpy()), ["given.ids", "given.scale"]),
    ],
    ids=["dict", "nested", "tuple", "namedtuple", "dataclass"],
)
def test_tensors_inside_of_an_input_are_inputs_by_their_places(kind, names):
    a, b = (torch.randn(4, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    like = type(kind(a, b))

    def reference(given):
        assert type(given) is like
        parts = [x for _, x in tensors_of("", given)]
        return (parts[0].double() @ parts[1].double()).sum()

    recorded, seen = golden(reference, given=kind(a, b)), capture(reference, given=kind(a, b))
    assert recorded.inputs == names
    assert {name for name in recorded.names if "grad:" in name} == {f"grad:{name}" for name in names}
    assert not recorded.notes
    assert localise(seen, recorded).first is None
    right = {name: recorded[name].float() for name in names}
    found = whywrong.explain(right | {"output": (a @ b.T).sum()}, recorded, precision=whywrong.Precision("float32"))
    assert (found.verdict, found.causes[0].kind) == ("cause", "transpose")


def test_two_inputs_of_one_name_are_one_line():
    x = torch.ones(3)
    with pytest.raises(UsageError, match="expected one input of the name, got two"):
        golden(lambda **given: given["batch"]["ids"] + given["batch.ids"], **{"batch": {"ids": x}, "batch.ids": x})


def test_a_dataclass_as_a_result_has_a_step_for_each_tensor():
    assert golden(lambda x: Batch(x * 2.0, x + 1.0), x=torch.ones(3)).names == ["x", "output.ids", "output.scale"]


def test_a_golden_is_gone_through_by_the_names_of_its_steps():
    golden = whywrong.golden(lambda x: {"y": x + 1.0, "z": x * 2.0}, x=torch.ones(3))
    assert [*golden] == golden.names == ["x", "y", "z"]
    assert len(golden) == 3
    assert {name: golden[name].tolist()[0] for name in golden} == {"x": 1.0, "y": 2.0, "z": 2.0}


def test_a_golden_says_what_it_holds():
    assert str(golden(lambda x: {"y": torch.dropout(x, 0.5, True)}, x=torch.ones(4))).startswith("golden: ")


def test_what_is_written_outside_of_the_program_is_refused():
    total = torch.zeros(3)
    with pytest.raises(UsageError, match="writes to a tensor from outside the program"):
        golden(lambda x: {"y": total.add_(x)}, x=torch.ones(3))


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_running_sums_and_products_are_right_where_they_are(name):
    x = 1.0 + 0.001 * torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0))

    def run(x):
        return {"y": getattr(torch, name)(x, -1)}

    found = golden(run, x=x)
    one_by_one = torch.from_numpy(getattr(np, name)(x.numpy(), -1))  # torch's own go on in float64 on a CPU
    for y in (run(x)["y"], one_by_one):
        assert localise({"x": x, "y": y}, found).first is None
        assert localise({"x": x, "y": y * 1.01}, found).own == ["y"]


def test_an_input_may_not_have_the_name_of_the_result():
    """Else what a kernel gives under that name would be held to the input."""
    with pytest.raises(UsageError, match="expected another name for the input output, got that of the result"):
        golden(lambda output: output.sum(), output=torch.ones(3))


@pytest.mark.gpu
def test_a_reference_that_makes_its_own_gradient_is_recorded_on_a_gpu():
    """There torch makes it in a thread of its own, which no line of the reference has called."""

    def reference(x):
        leaf = x.clone().requires_grad_()
        return {"dx": torch.autograd.grad(leaf.square().sum(), leaf)[0]}

    x = torch.randn(5, 3).cuda()
    assert torch.equal(golden(reference, x=x)["dx"], 2.0 * x.double())


def test_a_product_of_groups_is_recorded_as_products():
    """As the experts of a mixture in transformers are multiplied."""
    generator = torch.Generator().manual_seed(0)
    x, experts = (torch.randn(s, generator=generator).bfloat16() for s in ((16, 32), (3, 32, 24)))
    ends = torch.tensor([4, 9, 16], dtype=torch.int32)

    def mixture(x, experts):
        return torch._grouped_mm(x, experts, offs=ends)

    recorded = golden(mixture, x=x, experts=experts)
    parts = [x[:4] @ experts[0], x[4:9] @ experts[1], x[9:] @ experts[2]]
    observed = {"x": x, "experts": experts, "output": torch.cat(parts)}
    assert localise(observed, recorded).first is None
    assert localise(observed | {"output": torch.cat([*parts[:2], x[9:] @ experts[1]])}, recorded).first == "output"


def test_names_that_come_again_are_numbered_in_order_and_none_is_taken_twice():
    """A name with a number of its own counts too; the time for a name does not grow with how often it came."""

    def often(x):
        for name in ("x", "x#2", "x", "x"):
            x = whywrong.step(name, x * 2.0)
        return x

    names = ["x", "x#2", "x#2#2", "x#3", "x#4"]
    assert list(whywrong.golden(often, x=torch.ones(2)).steps) == [*names, "output"]
    assert [name for name in whywrong.capture(often, x=torch.ones(2)).names if name[0] == "x"] == names


@pytest.mark.parametrize("same", [lambda x: x, lambda x: x.contiguous()], ids=["itself", "contiguous"])
def test_a_result_may_be_an_input_as_it_is(same):
    x = torch.arange(6.0)
    found = golden(same, x)
    assert (found.names, found.inputs) == (["input.0", "output"], ["input.0"])
    whywrong.assert_close(x, found)
    with pytest.raises(AssertionError, match="first divergence: output"):
        whywrong.assert_close(2.0 * x + 1.0, found)
