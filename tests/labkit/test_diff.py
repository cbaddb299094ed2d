"""`labkit diff` on files: what it finds, what it prints, how it exits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from labkit import Comparison, Trace
from labkit.cli.main import main
from labkit.judgement import INHERITED, UNKNOWN_ORIGIN
from labkit.trace.diff import report

D = 64
OPS = {
    "qk": ("matmul q k^T", ("q", "k")),
    "scaled": ("scale 1/sqrt(d)", ("qk",)),
    "probs": ("softmax axis=-1", ("scaled",)),
    "out": ("matmul", ("probs", "v")),
    "gelu": ("gelu", ("out",)),
}


def chain(dtype, spoil=None):
    """A head of attention and a GELU, each step from the step before; `spoil(name, value)` changes steps."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(48, D, generator=generator).to(dtype) for _ in range(3))
    trace = Trace({"q": q, "k": k, "v": v}, about={"compute": "fp32 accumulate", "storage_dtype": "float32"})
    steps = {"q": q, "k": k, "v": v}
    ways = {
        "qk": lambda s: s["q"] @ s["k"].T,
        "scaled": lambda s: s["qk"] / D**0.5,
        "probs": lambda s: torch.softmax(s["scaled"], -1),
        "out": lambda s: s["probs"] @ s["v"],
        "gelu": lambda s: torch.nn.functional.gelu(s["out"]),
    }
    for name, way in ways.items():
        value = way(steps)
        steps[name] = spoil(name, value) if spoil else value
        op, inputs = OPS[name]
        trace.add(name, steps[name], inputs, about={"op": op, "inputs_complete": True})
    return trace


def only(step, change):
    return lambda name, value: change(value) if name == step else value


@pytest.fixture
def files(tmp_path):
    def make(spoil=None, name="observed"):
        return chain(torch.float32, spoil).save(tmp_path / f"{name}.safetensors")

    chain(torch.float64).save(tmp_path / "golden.safetensors")
    return tmp_path / "golden.safetensors", make


def test_a_right_trace_exits_zero(files, judged):
    golden, make = files
    code, said = judged(golden, make())
    assert (code, said["alarm"], said["first_divergent_step"]) == (0, False, None)
    assert list(said["steps"]) == ["q", "k", "v", *OPS]


def test_the_first_wrong_step_is_named_and_what_follows_inherits(files, judged):
    golden, make = files
    code, said = judged(golden, make(only("scaled", lambda x: 1.04 * x)))
    assert (code, said["alarm"], said["first_divergent_step"]) == (1, True, "scaled")
    assert not said["steps"]["scaled"]["own"]["ok"]
    assert said["steps"]["probs"]["own"]["ok"]
    assert said["steps"]["probs"]["inherited"] > 1e-3
    assert said["steps"]["qk"]["ok"]


def test_json_has_every_field_of_a_comparison_and_no_bare_nan(files, judged):
    golden, make = files
    _, said = judged(golden, make(only("qk", lambda x: x.fill_(torch.nan))))
    for step in said["steps"].values():
        assert set(Comparison.__dataclass_fields__) <= set(step)
        assert {"own", "inherited", "ok", "reasons"} <= set(step)
    assert said["steps"]["qk"]["observed_nan"] == 48 * 48
    assert "NaN" in said["steps"]["qk"]["reasons"][0]


def test_an_operation_outside_the_closed_list_is_not_separated(files, judged):
    golden, make = files
    code, said = judged(golden, make(only("gelu", lambda x: 1.5 * x)))
    assert (code, said["first_divergent_step"]) == (1, "gelu")
    assert said["steps"]["gelu"]["own"] == said["steps"]["gelu"]["inherited"] == "not separated"


@pytest.mark.parametrize("step", ["qk", "probs", "out"])
def test_bfloat16_where_float32_was_promised_is_found(files, judged, step):
    golden, make = files
    _, said = judged(golden, make(only(step, lambda x: x.bfloat16().float())))
    assert said["first_divergent_step"] == step


def test_one_percent_of_a_product_is_found_by_structure_where_its_bound_is_wide(tmp_path, judged):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 4096, generator=generator).bfloat16() for _ in range(2))
    about = {"compute": "fp32 accumulate", "storage_dtype": "bfloat16"}
    said = {}
    for name, factor in {"golden": 1.0, "right": 1.0, "wrong": 1.01}.items():
        wide = torch.float64 if name == "golden" else torch.float32
        trace = Trace({"a": a, "b": b}, about=about)
        product = factor * (a.to(wide) @ b.to(wide).T)
        product = product if name == "golden" else product.bfloat16()
        trace.add("c", product, ("a", "b"), about={"op": "matmul a b^T", "K": 4096})
        trace.save(tmp_path / f"{name}.safetensors")
        if name != "golden":
            said[name] = judged(tmp_path / "golden.safetensors", tmp_path / f"{name}.safetensors")
    assert said["right"][0] == 0
    code, wrong = said["wrong"]
    assert (code, wrong["first_divergent_step"]) == (1, "c")
    assert any("systematic" in reason for reason in wrong["steps"]["c"]["reasons"])


def without(name, more):
    trace = chain(torch.float32)
    return Trace({s.name: s.value for s in trace if s.name != name} | more, about=trace.about)


def test_a_missing_last_step_diverges_and_an_extra_one_is_listed(files, tmp_path, judged):
    golden, _ = files
    last = [s.name for s in chain(torch.float32)][-1]
    fewer = without(last, {"more": torch.zeros(2)})
    code, said = judged(golden, fewer.save(tmp_path / "o.safetensors"))
    assert (code, said["first_divergent_step"], said["unexpected"]) == (1, last, ["more"])


def test_a_step_that_a_fused_kernel_does_not_keep_is_no_divergence(files, tmp_path, judged):
    golden, _ = files
    code, said = judged(golden, without("scaled", {}).save(tmp_path / "o.safetensors"))
    assert (code, said["first_divergent_step"], said["steps"]["scaled"]["ok"]) == (0, None, None)
    assert "not recorded" in said["steps"]["scaled"]["reasons"][0]


def test_another_shape_is_a_divergence(files, judged):
    golden, make = files
    code, said = judged(golden, make(only("gelu", lambda x: x[:-1])))
    assert (code, said["first_divergent_step"]) == (1, "gelu")


def test_runs_are_held_against_each_other(files, judged):
    golden, make = files
    again = make(only("out", lambda x: x * (1 + 2**-23)), "again")
    code, said = judged(golden, make(), again)
    assert code == 0
    assert said["run_to_run"]["out"]["distinct"] == 2
    assert said["run_to_run"]["out"]["finding"] == "order noise, within the bound"
    raced = make(only("out", lambda x: x.index_fill(0, torch.tensor([5]), 0.0)), "raced")
    code, said = judged(golden, make(), raced)
    assert (code, said["first_divergent_step"]) == (1, "out")
    assert (
        said["run_to_run"]["out"]["finding"]
        == "beyond the bound in raced.safetensors only: a race or an uninitialised read"
    )


def test_nan_at_the_same_place_in_both_is_no_divergence(tmp_path, judged):
    values = torch.tensor([1.0, torch.nan, 3.0])
    Trace({"x": values.double()}).save(tmp_path / "g.safetensors")
    Trace({"x": values}).save(tmp_path / "o.safetensors")
    code, said = judged(tmp_path / "g.safetensors", tmp_path / "o.safetensors")
    assert code == 0
    assert (said["steps"]["x"]["observed_nan"], said["steps"]["x"]["golden_nan"]) == (1, 1)


@pytest.mark.parametrize("suffix", ["npy", "pt"])
def test_folders_of_dumps_and_single_tensors(tmp_path, judged, suffix, rng):
    def put(path, x):
        path.parent.mkdir(exist_ok=True)
        np.save(path, x) if suffix == "npy" else torch.save(torch.from_numpy(x), path)

    for i in (2, 10):
        x = rng.standard_normal((8, 8))
        put(tmp_path / "g" / f"step{i}.{suffix}", x)
        put(tmp_path / "right" / f"step{i}.{suffix}", x.astype(np.float32))
        put(tmp_path / "wrong" / f"step{i}.{suffix}", 1.2 * x.astype(np.float32))
    assert judged(tmp_path / "g", tmp_path / "right")[0] == 0
    code, said = judged(tmp_path / "g", tmp_path / "wrong")
    assert (code, said["first_divergent_step"], list(said["steps"])) == (1, "step2", ["step2", "step10"])
    single = [tmp_path / "g" / f"step2.{suffix}", tmp_path / "wrong" / f"step2.{suffix}"]
    assert judged(*single)[0] == 1
    assert judged(single[0], tmp_path / "right" / f"step2.{suffix}")[0] == 0


def test_text_and_pictures_for_people(files, tmp_path, capsys):
    golden, make = files
    assert main(["diff", str(golden), str(make(only("qk", lambda x: x.T))), "--plot", str(tmp_path / "p")]) == 1
    shown = capsys.readouterr().out
    assert "first divergence: qk" in shown
    assert "inherited" in shown
    assert {"steps.png", "qk.png"} <= {path.name for path in (tmp_path / "p").iterdir()}


def test_where_only_the_observed_says_an_order_that_one_counts(tmp_path, judged):
    values = {"scores": torch.ones(4), "probs": torch.ones(4), "out": torch.ones(4)}  # by name: out, probs, scores
    save_file({name: value.double() for name, value in values.items()}, tmp_path / "g.safetensors")
    wrong = Trace(values | {"probs": torch.zeros(4), "out": torch.zeros(4)}).save(tmp_path / "o.safetensors")
    _, said = judged(tmp_path / "g.safetensors", wrong)
    assert (said["first_divergent_step"], list(said["steps"])) == ("probs", ["scores", "probs", "out"])


@pytest.mark.parametrize(
    ("compute", "code"),
    [("tf32 matmul, fp32 accumulate", 0), ("float32, no tf32", 1), ("IEEE fp32 (tf32 disabled)", 1), ("fp32", 1)],
)
def test_tf32_is_allowed_where_it_is_promised_and_not_where_it_is_denied(tmp_path, judged, compute, code):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    for name, result in (("g", a.double() @ b.double()), ("o", cut[0] @ cut[1])):
        trace = Trace({"a": a, "b": b}, about={"compute": compute, "storage_dtype": "float32"})
        trace.add("c", result, ("a", "b"), about={"op": "matmul"})
        trace.save(tmp_path / f"{name}.safetensors")
    assert judged(tmp_path / "g.safetensors", tmp_path / "o.safetensors")[0] == code


def cut(x, bits):
    """float32 whose last `bits` bits are gone, as tensor cores drop them."""
    return (x.float().contiguous().view(torch.int32) & ~((1 << bits) - 1)).view(torch.float32)


def rounded(x):
    return x.bfloat16().float()


@pytest.mark.parametrize("told", [True, False], ids=["replayed", "names only"])
def test_products_of_truncated_factors_may_drift_where_nothing_excludes_tf32(said, rng, told):
    a, b = (torch.from_numpy(rng.standard_normal((96, 64))) for _ in range(2))
    steps = {"scores": {"op": "a @ b^T", "inputs": ["a", "b"], "K": 64, "dtype": "float32"}} if told else None
    golden = {"a": a.float().double(), "b": b.float().double()}
    golden["scores"] = golden["a"] @ golden["b"].T
    observed = {"a": a.float(), "b": b.float(), "scores": cut(a, 13) @ cut(b, 13).T}
    assert not said(golden, observed, steps)["alarm"]
    assert said(golden, observed | {"scores": 0.99 * observed["scores"]}, steps)["first_divergent_step"] == "scores"


def test_tensor_cores_of_bfloat16_round_what_is_stored_in_float32(said, rng):
    x, w = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((40, 96), (96, 24)))
    steps = {"h": {"op": "matmul", "inputs": ["x", "w"], "inputs_complete": True}}
    golden = {"x": x.double(), "w": w.double(), "h": x.double() @ w.double()}
    observed = {"x": x, "w": w, "h": rounded(x) @ rounded(w)}
    about = {"compute": "bf16 tensor cores, fp32 accumulate", "storage_dtype": "bfloat16"}
    assert not said(golden, observed, steps, **about)["alarm"]
    assert said(golden, observed | {"h": 0.98 * observed["h"]}, steps, **about)["first_divergent_step"] == "h"
    assert said(golden, observed, steps, compute="fp32, no tensor cores")["first_divergent_step"] == "h"


@pytest.mark.parametrize("op", ["softmax_bwd", "dS = P o (dP - D)"])
def test_a_word_for_arithmetic_of_its_inputs_is_read_off_the_golden(said, rng, op):
    p = torch.softmax(torch.from_numpy(rng.standard_normal((32, 40))), -1)
    dp = 30.0 + torch.from_numpy(rng.standard_normal((32, 40)))  # the common part cancels, and its rounding stays
    golden = {"p": p, "dp": dp, "delta": (p * dp).sum(-1, keepdim=True)}
    golden["ds"] = p * (dp - golden["delta"])
    steps = {"ds": {"op": op, "inputs": ["p", "dp", "delta"], "inputs_complete": True}}
    seen = {name: golden[name].bfloat16() for name in ("p", "dp", "delta")}
    p, dp, delta = (seen[name].float() for name in ("p", "dp", "delta"))
    about = {"compute": "bf16 in/out, fp32 acc", "storage_dtype": "bf16"}
    right = said(golden, seen | {"ds": (p * (dp - delta)).bfloat16()}, steps, **about)
    assert not right["alarm"]
    assert right["steps"]["ds"]["own"]["ok"]
    assert right["steps"]["ds"]["inherited"] > 1e-2
    wrong = (p * (dp - 0.99 * delta)).bfloat16()
    assert said(golden, seen | {"ds": wrong}, steps, **about)["first_divergent_step"] == "ds"


def test_each_8_bit_format_is_taken_from_the_text_that_names_it(said, rng):
    x, w = (torch.from_numpy(rng.standard_normal((24, 32))) for _ in range(2))
    note = "x_f8 is float8 e5m2 and w_f8 float8 e4m3, held in float32"
    steps = {f"{one}_f8": {"op": "fp8 cast", "inputs": [one]} for one in ("x", "w")}
    golden = {"x": x, "w": w, "x_f8": x, "w_f8": w}
    coarse, fine = x.to(torch.float8_e5m2).float(), w.to(torch.float8_e4m3fn).float()
    right = {"x": x.float(), "w": w.float(), "x_f8": coarse, "w_f8": fine}
    assert not said(golden, right, steps, dtype_note=note)["alarm"]
    swapped = right | {"w_f8": w.to(torch.float8_e5m2).float()}
    assert said(golden, swapped, steps, dtype_note=note)["first_divergent_step"] == "w_f8"


def test_zero_points_kept_as_real_numbers_may_fall_to_the_other_side_of_a_tie(said, rng):
    zero = torch.from_numpy(rng.integers(0, 16, 1500)).double()
    moved = zero.clone()
    moved[::300] += 1.0
    assert not said({"zero": zero}, {"zero": moved.float()})["alarm"]
    moved[::5] += 1.0
    assert said({"zero": zero}, {"zero": moved.float()})["first_divergent_step"] == "zero"


def test_parameters_cut_instead_of_rounded_are_found_by_their_drift(said, rng):
    p, update = (torch.from_numpy(rng.standard_normal(20_000)).bfloat16().double() for _ in range(2))
    steps = {"new": {"op": "p - 0.1*update", "inputs": ["p", "update"]}}
    golden = {"p": p, "update": update, "new": p - 0.1 * update}
    about = {"compute": "fp32 math", "storage_dtype": "bfloat16"}
    seen = {"p": p.bfloat16(), "update": update.bfloat16()}
    exact = (p - 0.1 * update).float()
    assert not said(golden, seen | {"new": exact.bfloat16()}, steps, **about)["alarm"]
    assert said(golden, seen | {"new": cut(exact, 16).bfloat16()}, steps, **about)["first_divergent_step"] == "new"


def test_a_row_sum_of_a_product_is_replayed_with_and_without_its_dimension(said, rng):
    dout, o = (torch.from_numpy(rng.standard_normal((71, 8))) for _ in range(2))
    steps = {"delta": {"op": "rowsum(dout*o)", "inputs": ["dout", "o"]}}
    seen = {"dout": dout.float(), "o": (o * 1.0005).float()}  # what came before is a little off
    delta = (seen["dout"] * seen["o"]).sum(-1)
    for shape in ((71,), (71, 1)):
        golden = {"dout": dout, "o": o, "delta": (dout * o).sum(-1).view(shape)}
        found = said(golden, seen | {"delta": delta.view(shape)}, steps)
        assert found["steps"]["delta"]["own"]["ok"]
        assert said(golden, seen | {"delta": 1.01 * delta.view(shape)}, steps)["steps"]["delta"]["own"]["ok"] is False


def test_a_cosine_of_large_angles_is_as_right_as_the_angles(said):
    at, frequency = torch.arange(40_000, 40_050).double(), 10_000.0 ** (-torch.arange(16).double() / 16)
    steps = {"cos": {"op": "outer product at x frequency, then cos", "inputs": ["at", "frequency"]}}
    golden = {"at": at, "frequency": frequency.float().double(), "cos": torch.cos(at[:, None] * frequency.float())}
    seen = {"at": at.float(), "frequency": frequency.float()}
    right = torch.cos(seen["at"][:, None] * seen["frequency"])
    assert not said(golden, seen | {"cos": right}, steps)["alarm"]
    late = torch.cos((seen["at"][:, None] + 1.0) * seen["frequency"])
    assert said(golden, seen | {"cos": late}, steps)["first_divergent_step"] == "cos"


def test_a_text_that_is_not_what_the_golden_did_is_not_replayed(said, rng):
    """Rows that are masked throughout have a maximum that the text does not tell of."""
    masked = torch.from_numpy(rng.standard_normal((20, 30)))
    masked[:3] = -torch.inf
    steps = {"rowmax": {"op": "max axis=-1", "inputs": ["masked"]}}
    golden = {"masked": masked, "rowmax": masked.amax(-1).clamp(min=0.0)}
    found = said(golden, {name: value.float() for name, value in golden.items()}, steps)
    assert (found["alarm"], found["steps"]["rowmax"]["own"]) == (False, "not separated")


def test_an_exponential_of_masked_scores_is_replayed(said, rng):
    scores = torch.from_numpy(rng.standard_normal((30, 30)))
    scores = scores.masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf)
    steps = {
        "scores": {"op": "mask", "inputs": ["raw"]},
        "p": {"op": "exp(scores - top)", "inputs": ["scores", "top"], "dtype": "bfloat16"},
    }
    golden = {"scores": scores, "top": scores.amax(-1, keepdim=True)}
    golden["p"] = torch.exp(scores - golden["top"])
    seen = {"scores": scores.bfloat16(), "top": golden["top"].float()}
    fused = seen | {"p": golden["p"].bfloat16()}  # from scores that had not been rounded yet
    about = {"compute": "bf16 operands, fp32 accumulate", "storage_dtype": "bfloat16"}
    found = said(golden, fused, steps, **about)
    assert not found["alarm"]
    assert found["steps"]["p"]["own"]["ok"]
    assert said(golden, seen | {"p": (0.9 * golden["p"]).bfloat16()}, steps, **about)["first_divergent_step"] == "p"


def test_weights_between_two_steps_do_not_make_the_second_one_look_exact(tmp_path, judged):
    """Without recorded inputs a step's allowance follows from the steps before it, and weights are exact."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 64, generator=generator).bfloat16()
    weights = [torch.randn(64, 64, generator=generator).bfloat16() / 8 for _ in range(6)]
    said = {"order": json.dumps([*(f"h{i}" for i in range(3)), "w1", "w2", "w3", "w4", "w5", "norm"])}
    dumps = {}
    for wide in (torch.float64, torch.float32):
        h, steps = x, {}
        for i in range(3):
            h = h.to(wide) @ weights[i].to(wide)
            h = steps[f"h{i}"] = h if wide == torch.float64 else h.bfloat16()
        steps |= {f"w{i}": w.to(h.dtype) for i, w in enumerate(weights[1:], 1)}
        normal = h.to(wide) / h.to(wide).square().mean(-1, keepdim=True).sqrt()
        steps["norm"] = normal if wide == torch.float64 else normal.bfloat16()
        dumps[wide] = steps
    about = said | {"compute": "bf16 storage, fp32 accumulate", "storage_dtype": "bfloat16"}
    save_file(dumps[torch.float64], tmp_path / "g.safetensors", said)
    save_file(dumps[torch.float32], tmp_path / "o.safetensors", about)
    assert judged(tmp_path / "g.safetensors", tmp_path / "o.safetensors")[0] == 0


def bad(tmp_path, kind):
    path = tmp_path / "bad.npy"
    good = tmp_path / "good.npy"
    np.save(good, np.ones(3))
    if kind == "missing":
        return good, tmp_path / "none.npy"
    if kind == "object":
        np.save(path, np.array([object()]), allow_pickle=True)
    elif kind == "pickle":
        path = tmp_path / "bad.pt"
        torch.save({"f": chain}, path)
    elif kind == "cut":
        path = tmp_path / "bad.safetensors"
        path.write_bytes(b"\x00" * 20)
    elif kind == "complex":
        np.save(path, np.ones(3, complex))
    elif kind == "text":
        path = tmp_path / "bad.csv"
        path.write_text("1,2\n")
    elif kind == "empty":
        path = tmp_path / "empty"
        path.mkdir()
    elif kind == "no step in common":
        good, path = (
            Trace({"a": np.ones(2), "b": np.ones(2)}).save(tmp_path / "a.safetensors"),
            tmp_path / "b.safetensors",
        )
        Trace({"c": np.ones(2), "d": np.ones(2)}).save(path)
    return good, path


@pytest.mark.parametrize(
    "kind", ["missing", "object", "pickle", "cut", "complex", "text", "empty", "no step in common"]
)
def test_what_cannot_be_compared_is_one_line_and_exit_two(tmp_path, capsys, kind):
    good, path = bad(tmp_path, kind)
    assert main(["diff", str(good), str(path)]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert path.name in caught.err
    assert caught.err.count("\n") == 1


def test_without_an_order_no_step_comes_before_its_inputs(tmp_path, judged):
    golden = {
        name: torch.ones(4, dtype=torch.float64) for name in ("down", "gate", "x")
    }  # by name; computed x, gate, down
    steps = {"down": {"op": "w down", "inputs": ["gate"]}, "gate": {"op": "g", "inputs": ["x"]}, "x": {"inputs": ["x"]}}
    observed = golden | {"down": torch.zeros(4), "gate": torch.zeros(4)}
    for name, tensors in (("g", golden), ("o", observed)):
        save_file(tensors, tmp_path / f"{name}.safetensors", {"steps": json.dumps(steps)})
    _, said = judged(tmp_path / "g.safetensors", tmp_path / "o.safetensors")
    assert (said["first_divergent_step"], list(said["steps"])) == ("gate", ["x", "gate", "down"])


@pytest.mark.parametrize(
    "compute",
    [
        "bf16 inputs, fp32 accumulate",
        "bf16×bf16→fp32 MMA",
        "operands in bfloat16, accumulators float32",
        "bf16 x bf16 -> f32",
    ],
)
@pytest.mark.parametrize("op", ["alpha*(norm(x) w)+b, alpha=0.5", "layer: tanh(x w)"])
def test_a_product_may_be_written_side_by_side(said, rng, compute, op):
    x, w, b = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((64, 96), (96, 24), (24,)))
    steps = {"h": {"op": op, "inputs": ["x", "w", "b"], "K": 96, "inputs_complete": True}}

    def h(cut):
        normal = x.double() * (x.double() ** 2).mean(-1, keepdim=True).rsqrt()
        product = cut(normal if "norm" in op else x.double()) @ cut(w.double()) / 10.0
        return 0.5 * product + b if "norm" in op else torch.tanh(product)

    golden = {"x": x.double(), "w": w.double(), "b": b.double(), "h": h(lambda v: v)}
    observed = {"x": x, "w": w, "b": b, "h": h(lambda v: v.bfloat16().double()).float()}
    assert not said(golden, observed, steps, compute=compute)["alarm"]
    wrong = observed["h"].clone()
    wrong[:, -1] = wrong[:, 0]
    assert said(golden, observed | {"h": wrong}, steps, compute=compute)["first_divergent_step"] == "h"


def test_probabilities_are_rounded_before_their_product(said, rng):
    scores, v = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((48, 71), (71, 32)))
    v = v.bfloat16().double()
    steps = {"out": {"op": "softmax(scores) v", "inputs": ["scores", "v"], "dtype": "bf16", "inputs_complete": True}}
    p = torch.softmax(scores, -1)
    about = {"compute": "bf16 inputs, fp32 accumulate", "storage_dtype": "bf16"}
    golden = {"scores": scores, "v": v, "out": p @ v}
    seen = {"scores": scores.float(), "v": v.bfloat16()}
    assert not said(golden, seen | {"out": (rounded(p) @ v.float()).bfloat16()}, steps, **about)["alarm"]
    late = (rounded(p) @ v.roll(1, 0).float()).bfloat16()
    assert said(golden, seen | {"out": late}, steps, **about)["first_divergent_step"] == "out"


def test_stochastic_rounding_may_fall_either_way_where_it_is_promised(said, rng):
    v = torch.from_numpy(rng.standard_normal(4096)).float()
    dither = torch.from_numpy(rng.integers(0, 1 << 16, 4096)).int()
    seen = cut((v.view(torch.int32) + dither).view(torch.float32), 16).bfloat16()
    about = {"storage_dtype": "bfloat16", "compute": "fp32"}
    steps, golden = {"kept": {"op": "copy", "inputs": ["v"]}}, {"v": v.double(), "kept": v.double()}
    assert said(golden, {"v": v, "kept": seen}, steps, **about)["alarm"]
    about["dtype_note"] = "kept is stored with stochastic rounding"
    assert not said(golden, {"v": v, "kept": seen}, steps, **about)["alarm"]
    assert said(golden, {"v": v, "kept": (0.98 * v).bfloat16()}, steps, **about)["alarm"]


def test_codes_of_groups_may_fall_to_the_other_side_of_a_tie(said, rng):
    scale = torch.full((4, 1, 64), 0.25, dtype=torch.float64)
    w = torch.from_numpy(rng.integers(-14, 14, (128, 64))) * 0.125  # every second one is a tie
    zero = torch.full((4, 1, 64), 7.0, dtype=torch.float64)
    up = (torch.floor(w / 0.25 + 0.5) + 7.0).clamp(0, 15)
    even = ((w / 0.25).round() + 7.0).clamp(0, 15)
    steps = {"w_q": {"op": "quantise round(w/scale)+zero clamp 0..15", "inputs": ["w", "scale", "zero"]}}
    golden = {"w": w, "scale": scale, "zero": zero, "w_q": even}
    seen = {"w": w.float(), "scale": scale.float(), "zero": zero.to(torch.int8)}
    assert not said(golden, seen | {"w_q": up.to(torch.int8)}, steps)["alarm"]
    other, shifted = zero.clone(), up.clone()  # a zero point that was a tie too takes its group along
    other[2, 0, 7] += 1.0
    shifted[64:96, 7] = (shifted[64:96, 7] + 1.0).clamp(0, 15)
    moved = seen | {"zero": other.to(torch.int8)}
    ties = {"zero": {"op": "zero point", "inputs": []}} | steps
    assert not said(golden, moved | {"w_q": shifted.to(torch.int8)}, ties)["alarm"]
    off = up.clone()
    off[5, 5] += 1.0 if off[5, 5] < 15 else -1.0
    off[6, 6] += 2.0 if off[6, 6] < 14 else -2.0
    assert said(golden, seen | {"w_q": off.to(torch.int8)}, steps)["first_divergent_step"] == "w_q"


def test_weights_that_went_through_integers_are_off_by_half_a_level(said, rng):
    w = torch.from_numpy(rng.standard_normal((32, 128)))
    step = (w.max() - w.min()) / 15.0
    steps = {"w_deq": {"op": "weights through int4 storage", "inputs": ["w"], "inputs_complete": True}}
    seen = ((w - w.min()) / step).round() * step + w.min()
    golden = {"w": w, "w_deq": w}
    assert not said(golden, {"w": w.float(), "w_deq": seen.float()}, steps)["alarm"]
    assert said(golden, {"w": w.float(), "w_deq": (seen + 0.6 * step).float()}, steps)["alarm"]
    steps["w_deq"]["op"] = "copy of weights"
    assert said(golden, {"w": w.float(), "w_deq": seen.float()}, steps)["alarm"]


def test_a_difference_of_steps_before_is_off_as_they_are(said, rng):
    base, small = (torch.from_numpy(rng.standard_normal((16, 64))) for _ in range(2))
    golden = {"a": 9.0 + base, "b": 9.0 + base + 0.05 * small, "delta_ab": 0.05 * small}
    a, b = golden["a"].bfloat16(), golden["b"].bfloat16()
    assert not said(golden, {"a": a, "b": b, "delta_ab": (b - a)}, storage_dtype="bfloat16")["alarm"]
    assert said(golden, {"a": a, "b": b, "delta_ab": (b - a) + 0.5}, storage_dtype="bfloat16")["alarm"]


def test_where_nothing_is_promised_a_norm_may_round_on_the_way_but_not_each_term_of_its_sum(said, rng):
    x = torch.from_numpy(rng.standard_normal((1024, 128))).bfloat16()
    wide = x.double()

    def norm(axis):
        return wide / (wide**2).mean(axis, keepdim=True).sqrt()

    golden = {"x": wide, "norm1": norm(-1)}
    stepwise = (x.float() * (x.float() ** 2).mean(-1, keepdim=True).rsqrt().bfloat16().float()).bfloat16()
    assert not said(golden, {"x": x, "norm1": stepwise})["alarm"]
    assert said(golden, {"x": x, "norm1": norm(0).bfloat16()})["first_divergent_step"] == "norm1"


GELU = torch.nn.functional.gelu


@pytest.mark.parametrize("told", [True, False], ids=["named", "untold"])
def test_a_name_or_none_is_enough_to_tell_one_gelu_from_the_other_below_what_tf32_leaves(said, rng, told):
    x, w = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((40, 96), (96, 24)))
    x, w = x.float().double(), w.float().double() / 10.0
    golden = {"x": x, "w": w, "h": x @ w}
    golden["act"] = GELU(golden["h"])
    h = (cut(x, 13) @ cut(w, 13)).float()
    observed = {"x": x.float(), "w": w.float(), "h": h, "act": GELU(h)}
    steps = {
        "h": {"op": "matmul", "inputs": ["x", "w"], "inputs_complete": True},
        "act": {"op": "gelu (erf)", "inputs": ["h"], "inputs_complete": True},
    }
    given = steps if told else None
    assert not said(golden, observed, given)["alarm"]
    wrong = said(golden, observed | {"act": GELU(h, approximate="tanh")}, given)
    assert (wrong["first_divergent_step"] == "act") == told  # untold, its input may have been a better one
    if told:
        assert wrong["steps"]["act"]["own"] == "not separated"  # as of any operation outside the closed list
    exact = GELU(golden["h"].float(), approximate="tanh")
    close = {"x": x.float(), "w": w.float(), "h": golden["h"].float(), "act": exact}
    assert said(golden, close, given)["first_divergent_step"] == "act"


def test_a_norm_with_another_epsilon_is_found_by_its_name(said, rng):
    x, w = torch.from_numpy(rng.standard_normal((24, 64))) * 0.01, torch.from_numpy(rng.standard_normal(64))
    steps = {"y": {"op": "rmsnorm eps=1e-6", "inputs": ["x", "w"], "inputs_complete": True}}

    def norm(x, w, epsilon):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * w

    golden = {"x": x.float().double(), "w": w.float().double()}
    golden["y"] = norm(golden["x"], golden["w"], 1e-6)
    seen = {"x": x.float(), "w": w.float()}
    assert not said(golden, seen | {"y": norm(seen["x"], seen["w"], 1e-6)}, steps)["alarm"]
    assert said(golden, seen | {"y": norm(seen["x"], seen["w"], 2e-6)}, steps)["first_divergent_step"] == "y"


def winograd(x, w):
    """Lavin and Gray's F(4, 3) of both dimensions, all of it in x's type; x [N, C, 4 a + 2, 4 b + 2]."""
    b = [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0],
         [0, 4, 0, -5, 0, 1]]  # fmt: skip
    g = [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6], [1 / 24, 1 / 12, 1 / 6],
         [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]  # fmt: skip
    a = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    b, g, a = (torch.tensor(m, dtype=x.dtype) for m in (b, g, a))
    tiles = b @ x.unfold(2, 6, 4).unfold(3, 6, 4) @ b.T
    y = a @ torch.einsum("ocij,nctuij->notuij", g @ w @ g.T, tiles) @ a.T
    return y.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)


def test_a_convolution_may_be_taken_by_winograds_way_and_its_gradients_are_replayed(said, rng):
    x, w, dy = (
        torch.from_numpy(rng.standard_normal(s)).float() for s in ((3, 8, 18, 18), (6, 8, 3, 3), (3, 6, 16, 16))
    )
    way = {"op": "conv2d stride=1 pad=0", "inputs": ["x", "w"], "inputs_complete": True, "dtype": "float32"}
    steps = {
        "y": way, "dx": way | {"op": "conv2d input gradient", "inputs": ["dy", "w"]},
        "dw": way | {"op": "conv2d weight gradient", "inputs": ["x", "dy"]},
    }  # fmt: skip

    def run(x, w, dy, forward=torch.nn.functional.conv2d):
        return {
            "x": x, "w": w, "dy": dy, "y": forward(x, w), "dx": torch.nn.grad.conv2d_input(x.shape, w, dy),
            "dw": torch.nn.grad.conv2d_weight(x, w.shape, dy),
        }  # fmt: skip

    golden, about = run(x.double(), w.double(), dy.double()), {"compute": "fp32, no tf32"}
    assert not said(golden, run(x, w, dy, winograd), steps, **about)["alarm"]
    bad = run(x, w, dy)
    assert said(golden, bad | {"y": 1.0001 * bad["y"]}, steps, **about)["first_divergent_step"] == "y"
    without = bad | {"dw": bad["dw"] - torch.nn.grad.conv2d_weight(x[2:, :, 14:], (6, 8, 3, 3), dy[2:, :, 14:])}
    assert said(golden, without, steps, **about)["first_divergent_step"] == "dw"


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_equals_may_be_chosen_in_any_order_and_nothing_else(said, tmp_path, rng, told):
    scores = torch.from_numpy(rng.standard_normal((12, 8))).float()
    scores[:, 5] = scores[:, 2] = 3.0
    chosen = torch.tensor([2, 5]).repeat(12, 1)
    w = torch.from_numpy(rng.standard_normal((8, 16))).float()
    steps = {
        "chosen": {"op": "topk k=2 indices", "inputs": ["scores"], "inputs_complete": True},
        "rows": {"op": "rows of w", "inputs": ["w", "chosen"], "inputs_complete": True},
    }

    def run(chosen, dtype):
        return {"scores": scores.to(dtype), "w": w.to(dtype), "chosen": chosen, "rows": w.to(dtype)[chosen]}

    golden = run(chosen, torch.float64)
    assert not said(golden, run(chosen.flip(-1), torch.float32), steps)["alarm"]
    shown = str(report(tmp_path / "golden.safetensors", [tmp_path / "observed.safetensors"]))
    assert "another choice among equals" in shown
    wrong = chosen.clone()
    wrong[3, 1] = 4
    found = said(golden, run(wrong, torch.float32), steps if told else None)
    assert found["first_divergent_step"] == "chosen"
    twice = chosen.clone()
    twice[3] = 2
    assert said(golden, run(twice, torch.float32), steps)["first_divergent_step"] == "chosen"


def test_indices_after_wrong_scores_are_said_to_come_after_them(said, rng):
    scores = torch.from_numpy(rng.standard_normal((12, 8)))
    steps = {"chosen": {"op": "largest of each row", "inputs": ["scores"], "inputs_complete": True}}
    spoilt = scores.clone()
    spoilt[3] *= -1.0
    golden = {"scores": scores, "chosen": scores.argmax(-1)}
    found = said(golden, {"scores": spoilt.float(), "chosen": spoilt.argmax(-1)}, steps)
    assert found["first_divergent_step"] == "scores"
    chosen = found["steps"]["chosen"]
    assert (chosen["ok"], chosen["own"], chosen["reasons"]) == (False, "not separated", [UNKNOWN_ORIGIN])


@pytest.mark.parametrize("told", [True, False], ids=["told", "found in the numbers"])
def test_own_and_inherited_are_said_where_the_text_says_the_operation(said, rng, told):
    x, w = torch.from_numpy(rng.standard_normal((16, 16))), torch.from_numpy(rng.standard_normal((16, 16)))
    steps = {"y": {"op": "x @ w", "inputs": ["x", "w"], "K": 16}} if told else None
    bad = x.clone()
    bad[3] *= 1.5
    found = said({"x": x, "w": w, "y": x @ w}, {"x": bad.float(), "w": w.float(), "y": (bad @ w).float()}, steps)
    assert found["first_divergent_step"] == "x"
    y = found["steps"]["y"]
    assert y["reasons"] == [INHERITED if told else UNKNOWN_ORIGIN]
    assert (y["own"] == "not separated") is (y["inherited"] == "not separated") is not told


def test_what_a_relu_of_nearly_zero_masks_may_be_masked_or_not(said, rng):
    h, dy = torch.from_numpy(rng.standard_normal((64, 64))), torch.from_numpy(rng.standard_normal((64, 64)))
    h[3, 7] = 1e-9  # a rounding on the way here makes it negative
    golden = {"h": h, "act": h.relu(), "dh": dy * (h > 0)}
    near = h.float()
    near[3, 7] = -1e-8
    observed = {"h": near, "act": near.relu(), "dh": dy.float() * (near > 0)}
    assert not said(golden, observed)["alarm"]
    observed["dh"][5, 9] += 1.0
    assert said(golden, observed)["first_divergent_step"] == "dh"


def test_float8_times_a_scale_is_off_by_a_rounding_of_its_own_grid(said, rng):
    x = torch.from_numpy(rng.standard_normal((48, 64)))
    scale = x.abs().max() / 448.0
    steps = {"deq": {"op": "cast fp8 e4m3, dequantise", "inputs": ["x"], "dtype": "fp8_e4m3", "inputs_complete": True}}
    kept = (x / scale).float().to(torch.float8_e4m3fn).float() * float(scale)
    golden = {"x": x, "deq": x}
    assert not said(golden, {"x": x.float(), "deq": kept}, steps)["alarm"]
    assert said(golden, {"x": x.float(), "deq": 1.1 * kept}, steps)["first_divergent_step"] == "deq"


def test_where_all_of_an_unlabelled_trace_has_few_digits_that_is_how_it_is_stored(said, rng):
    x, w = torch.from_numpy(rng.standard_normal((40, 64))), torch.from_numpy(rng.standard_normal((64, 32)))
    golden = {"1_x": x, "2_w": w, "3_y": x @ w, "4_z": torch.tanh(x @ w)}
    y = rounded(rounded(x) @ rounded(w))
    observed = {"1_x": rounded(x), "2_w": rounded(w), "3_y": y, "4_z": rounded(torch.tanh(y))}
    assert not said(golden, observed)["alarm"]
    alone = {"1_x": x.float(), "2_w": w.float(), "3_y": (x @ w).float(), "4_z": rounded(torch.tanh(x @ w))}
    assert said(golden, alone)["first_divergent_step"] == "4_z"


def test_a_backward_softmax_is_replayed_from_the_delta_that_it_was_given(said, rng):
    p, dp = (
        torch.softmax(torch.from_numpy(rng.standard_normal((32, 32))), -1),
        torch.from_numpy(rng.standard_normal((32, 32))),
    )
    steps = {"ds": {"op": "softmax_backward axis=-1", "inputs": ["p", "dp", "delta"], "inputs_complete": True}}
    golden = {"p": p, "dp": dp, "delta": (p * dp).sum(-1, keepdim=True)}
    golden["ds"] = p * (dp - golden["delta"])
    near = {name: golden[name].float() for name in ("p", "dp")} | {"delta": (1.01 * golden["delta"]).float()}
    about = {"compute": "tf32 matmul, fp32 accumulate"}
    seen = near | {"ds": near["p"] * (near["dp"] - near["delta"])}
    assert said(golden, seen, steps, **about)["first_divergent_step"] == "delta"
    assert said(golden, seen, steps, **about)["steps"]["ds"]["reasons"] == [UNKNOWN_ORIGIN]
    seen = near | {"delta": golden["delta"].float(), "ds": near["p"] * near["dp"]}
    assert said(golden, seen, steps, **about)["first_divergent_step"] == "ds"


def cross_entropy(rng, zeta=0.03, ignored=False):
    """Rows of probabilities, their targets, and the gradient of their mean loss with a z-loss."""
    logits, targets = torch.from_numpy(rng.standard_normal((24, 40))), torch.from_numpy(rng.integers(0, 40, 24))
    if ignored:
        targets[::5] = -100
    given, lse = (targets >= 0).double()[:, None], logits.logsumexp(-1, keepdim=True)
    hot = (targets[:, None] == torch.arange(40)).double()
    p = torch.softmax(logits, -1)
    return {"p": p, "targets": targets, "lse": lse, "dz": given * (p * (1.0 + 2.0 * zeta * lse) - hot) / given.sum()}


@pytest.mark.parametrize("ignored", [False, True])
def test_the_gradient_of_a_cross_entropy_is_made_of_one_hot_targets(said, rng, ignored):
    """In bfloat16 p - 1 is off by many of its own digits where p is nearly one."""
    golden = cross_entropy(rng, ignored=ignored)
    steps = {"dz": {"op": "gradient of the loss", "inputs": ["p", "targets", "lse"], "inputs_complete": True}}
    about = {"compute": "bf16 inputs, fp32 accumulate", "storage_dtype": "bfloat16"}
    right = {name: x.bfloat16() if x.is_floating_point() else x for name, x in golden.items()}
    p, lse, targets = right["p"].float(), right["lse"].float(), golden["targets"]
    hot, given = (targets[:, None] == torch.arange(40)).float(), (targets >= 0).float()[:, None]
    right["dz"] = (given * (p * (1.0 + 0.06 * lse) - hot) / given.sum()).bfloat16()
    assert not said(golden, right, steps, **about)["alarm"]
    without = right | {"dz": (given * (p - hot) / given.sum()).bfloat16()}
    assert said(golden, without, steps, **about)["first_divergent_step"] == "dz"


def test_a_factor_that_may_be_a_number_of_the_data_may_be_off_as_the_data_are(said, rng):
    p, u = torch.from_numpy(rng.standard_normal((48, 32))), torch.from_numpy(rng.standard_normal((48, 32)))
    steps = {"new": {"op": "clipped update", "inputs": ["p", "u", "rms"], "inputs_complete": True}}

    def run(dtype, factor=1.0):
        x, y = p.to(dtype), u.bfloat16().to(dtype) if dtype == torch.float32 else u
        rms = y.pow(2).mean().sqrt().reshape(1)
        return {"p": x, "u": y, "rms": rms, "new": x - 0.1 * factor * y / rms}

    golden, about = run(torch.float64), {"compute": "bf16 inputs, fp32 accumulate"}
    assert not said(golden, run(torch.float32), steps, **about)["alarm"]
    assert said(golden, run(torch.float32, 1.1), steps, **about)["first_divergent_step"] == "new"


@pytest.mark.parametrize("text", ["K cache, fp8 e4m3", "nothing"])
def test_float8_is_seen_by_its_grid_where_the_text_names_it_at_all(said, rng, text):
    k = torch.from_numpy(rng.standard_normal((48, 64)))
    kept = k.to(torch.float8_e4m3fn).float()
    assert said({"k": k}, {"k": kept}, dtype_note=text)["alarm"] is (text == "nothing")
    shifted = kept.roll(1, 0)
    assert said({"k": k}, {"k": shifted}, dtype_note=text)["alarm"]


def test_weights_kept_in_four_bits_are_held_to_their_scale_where_the_golden_kept_them(said, rng):
    w = torch.from_numpy(rng.standard_normal((16, 128)))
    groups = w.reshape(16, 4, 32)
    scale = (groups.amax(-1) - groups.amin(-1)) / 15.0
    low = groups.amin(-1, keepdim=True)
    kept = (((groups - low) / scale[..., None]).round().clamp(0, 15) * scale[..., None] + low).reshape(16, 128)
    steps = {"deq": {"op": "dequant(int4(w), group=32)", "inputs": ["w", "scale"]}}
    golden = {"w": w, "scale": scale, "deq": w}
    seen = {"w": w.float(), "scale": scale.float(), "deq": kept.float()}
    assert not said(golden, seen, steps)["alarm"]
    wrong = kept.clone()
    wrong[:, 32:64] = wrong[:, 64:96]
    assert said(golden, seen | {"deq": wrong.float()}, steps)["first_divergent_step"] == "deq"


def test_an_order_that_nobody_tells_is_read_off_the_golden(said, tmp_path, rng):
    """In the order of their names `down` and `act` come before what they are made of."""

    def run(dtype, x, of_act=1.0, of_h=1.0):
        gate, up = (torch.from_numpy(np.random.default_rng(i).standard_normal((32, 64))).to(dtype) for i in (1, 2))
        down = torch.from_numpy(np.random.default_rng(3).standard_normal((64, 16))).to(dtype)
        g, u = x.to(dtype) @ gate, x.to(dtype) @ up
        act = of_act * torch.nn.functional.silu(g)
        h = of_h * act * u
        out = h @ down
        return {"x": x.to(dtype), "w1": gate, "w2": up, "w3": down, "gated": g, "upper": u, "act": act, "h": h,
                "down": out, "a_sum": x.to(dtype)[:, :16] + out, "x16": x.to(dtype)[:, :16].clone()}  # fmt: skip

    def files(**traces):
        for name, tensors in traces.items():
            save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / f"{name}.safetensors")
        return report(tmp_path / "golden.safetensors", [tmp_path / "observed.safetensors"])

    x = torch.from_numpy(rng.standard_normal((24, 32)))
    golden = run(torch.float64, x)
    shown = files(golden=golden, observed=run(torch.float32, x))
    assert shown.first is None
    place = {name: i for i, name in enumerate(shown.order)}
    assert place["gated"] < place["act"] < place["h"] < place["down"] < place["a_sum"]
    for at, factors in {"act": (1.01, 1.0), "h": (1.0, 1.01)}.items():
        assert files(golden=golden, observed=run(torch.float32, x, *factors)).first == at
