"""Hyper-connections: golden against autograd and Hugging Face's model, kernels against the golden, what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import whywrong
from kernels.mhc import baselines, counterfactual, faulty, golden, launch, mhc, verification
from kernels.mhc.problem import Constants, Inputs, sample
from kernels.mhc.race import variants
from kernels.mhc.reductions import sums
from whywrong import compare, localise, poisoned, repeat
from whywrong.comparing.bounds import sum_of_products
from whywrong.errors import UsageError

SHAPES = [(40, 4, 128), (15, 2, 131), (5, 8, 37), (3, 1, 16), (33, 4, 300), (1, 4, 1), (65, 2, 64)]
C = Constants()


def leaves(inputs):
    return [v.detach().clone().requires_grad_() for v in (inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y)]


def by_autograd(inputs):
    """The gradients of the golden's forward, from dout at its end and dx_in where the layer's input is."""
    x, phi, b, alpha, y = given = leaves(inputs)
    s = golden.forward(x, phi, b, alpha, y, C)
    torch.autograd.backward([s["out"], s["x_in"]], [inputs.dout, inputs.dx_in])
    return dict(zip(("dx", "dphi", "db", "dalpha", "dy"), (v.grad for v in given), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_hand_written_backward_is_autograds(rng, shape):
    inputs = sample(*shape, rng).double()
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, C)
    mine = golden.backward(inputs, s, C)
    for name, gradient in by_autograd(inputs).items():  # float64 both: ten million roundings
        torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-11)


def test_the_forward_passes_gradcheck(rng):
    inputs = sample(2, 2, 3, rng).double()

    def run(*given):
        s = golden.forward(*given, C)
        return s["out"], s["x_in"]

    assert torch.autograd.gradcheck(run, leaves(inputs))


def test_sinkhorn_gives_a_doubly_stochastic_matrix(rng):
    p = golden.sinkhorn(torch.from_numpy(rng.standard_normal((50, 4, 4))), C)
    assert (p > 0).all()
    for axis in (
        -1,
        -2,
    ):  # a division by sum + hc_eps leaves hc_eps: columns' at the end, rows' once they have converged
        torch.testing.assert_close(p.sum(axis), torch.ones(50, 4, dtype=p.dtype), rtol=0, atol=2.0 * C.hc_eps)


def test_it_is_hugging_faces_operator(rng):
    """Its fn is our phi transposed; it hands out P, and its decoder multiplies by P's transpose."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=16, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    theirs = modeling.DeepseekV4HyperConnection(config)
    inputs = sample(6, 4, 16, rng)
    with torch.no_grad():
        theirs.fn.copy_(inputs.phi.T)
        theirs.base.copy_(inputs.b)
        theirs.scale.copy_(inputs.alpha)
        post, p, x_in = theirs(inputs.x[None])
    i = inputs.double()
    s = golden.forward(i.x, i.phi, i.b, i.alpha, i.y, C)
    n, d = inputs.x.shape[1:]
    near = 2.0**-24 * (
        n * d + 2 * config.hc_sinkhorn_iters * (n + 2)
    )  # float32: a term, a normalisation, a rounding each
    for found, exact in ((post, s["post"]), (p, s["p"]), (x_in, s["x_in"])):
        torch.testing.assert_close(found[0].double(), exact, rtol=near, atol=near)


def held(inputs):
    return verification.check_operator(inputs, C)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_step_forward_and_backward_is_within_its_bound(device, rng, shape):
    found = held(sample(*shape, rng).to(device))
    assert found.first is None, str(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((15, 2, 131), torch.bfloat16),
        ((33, 8, 300), torch.bfloat16),
        ((1000, 4, 513), torch.bfloat16),
        ((7, 1, 40), torch.float16),
        ((1000, 4, 513), torch.float16),
        ((1000, 4, 513), torch.float32),
    ],
    ids=str,
)
def test_every_step_is_within_its_bound_in_every_type(rng, shape, dtype):
    """float32 at other shapes is above; a localisation is what takes time here, so each shape meets a type once."""
    found = held(sample(*shape, rng, dtype).to("cuda"))
    assert found.first is None, str(found)


@pytest.mark.long
def test_a_scale_of_one_percent_in_the_projection_is_not_within_it(device, rng):
    inputs = sample(9, 4, 64, rng).to(device)
    observed = verification.observed(inputs, C)
    observed["mix"].mul_(1.01)
    assert (
        localise(observed, verification.reference(inputs, C), precision=verification.DECLARED[torch.float32]).first
        == "mix"
    )


@pytest.mark.long
def test_repeats_are_bit_identical_and_outputs_fully_written(device, rng):
    inputs = sample(19, 4, 67, rng).to(device)
    with poisoned():
        found = repeat(lambda: verification.observed(inputs, C), times=3)
        observed = verification.observed(inputs, C)
    assert found.identical, str(found)
    assert not any(step.value.isnan().any() for step in observed)


def drawn_there(tokens, n, d, dtype):
    """As `sample`, made on the GPU: the host takes seconds for as many normal numbers."""
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, kind=torch.float32):
        return torch.randn(shape, generator=rng, device="cuda", dtype=kind)

    m = n * n + 2 * n
    return Inputs(
        normal(tokens, n, d, kind=dtype),
        normal(n * d, m) * (n * d) ** -0.5,
        0.5 * normal(m),
        torch.tensor([0.9, 1.1, 0.7], device="cuda"),
        normal(tokens, d, kind=dtype),
        normal(tokens, n, d, kind=dtype),
        normal(tokens, d, kind=dtype),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16384, 4, 4096), torch.bfloat16),
        ((16384, 4, 4096), torch.float16),
        ((16384, 4, 4096), torch.float32),
        ((1024, 8, 4096), torch.bfloat16),
        ((300, 2, 517), torch.bfloat16),
    ],
    ids=str,
)
def test_every_step_is_bit_identical_over_20_repeats_and_the_projection_within_its_bound(shape, dtype):
    """The size at which the projection had its race, in every type. Its sums are the longest of all steps."""
    inputs = drawn_there(*shape, dtype)
    assert repeat(lambda: verification.observed(inputs, C), times=20).identical
    found = variants.operator_repeats(dtype, shape[0], shape[1] * shape[2] // 4, 0, 2, "cuda")
    assert found.differ == 0
    assert found.error <= found.bound


def whole_golden(x, phi, b, alpha, dout):
    """The golden's result around y = 2 x_in, and its gradients by autograd."""
    given = [v.detach().clone().requires_grad_() for v in (x, phi, b, alpha)]
    out = golden.forward(*given, lambda v: 2 * v, C)["out"]
    gradients = torch.autograd.grad(out, given, dout)
    return {"out": out} | dict(zip(("dx", "dphi", "db", "dalpha"), gradients, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("lead", [None, (3, 7)])
def test_the_operator_around_a_layer_has_autograds_gradients(device, rng, lead):
    inputs = sample(21, 4, 24, rng)
    x, phi, b, alpha, _ = given = leaves(inputs.to(device))
    shaped = x.view(lead + x.shape[1:]) if lead else x
    out = mhc.hyper_connection(shaped, lambda v: 2 * v, phi, b, alpha, C)
    out.backward(inputs.dout.to(device).view(out.shape))
    ours = {"out": out.view(x.shape), "dx": x.grad, "dphi": phi.grad, "db": b.grad, "dalpha": alpha.grad}
    recorded = whywrong.golden(whole_golden, *given[:4], inputs.dout.to(device))
    found = localise(ours, recorded, precision=verification.DECLARED[torch.float32])
    assert found.first is None, str(found)


def test_every_tensor_that_a_user_holds_gets_its_true_gradient(device, rng):
    """x, what the layer is given, what it gives back, and the result: by hand, and by autograd of the golden."""
    inputs = sample(11, 4, 24, rng)

    def gradients(run, given):
        held = {}

        def layer(x_in):
            held["x_in"], held["y"] = x_in, torch.tanh(x_in)
            return held["y"]

        out = held["out"] = run(layer, *given)
        held |= dict(zip(("x", "phi", "b", "alpha"), given, strict=True))
        weights = inputs.dout.to(out)
        return dict(zip(held, torch.autograd.grad(out.square().mul(weights).sum(), list(held.values())), strict=True))

    ours = gradients(lambda layer, x, *rest: mhc.hyper_connection(x, layer, *rest, C), leaves(inputs.to(device))[:4])
    exact = gradients(
        lambda layer, x, *rest: golden.forward(x, *rest, layer, C)["out"], leaves(inputs.to(device).double())[:4]
    )
    for name, gradient in exact.items():  # float32 with three TF32 products, some hundred roundings
        assert float((ours[name].double() - gradient).norm() / gradient.norm()) < 1e-5, name


def test_a_second_derivative_is_refused_and_not_made_up(device, rng):
    x, phi, b, alpha, _ = leaves(sample(5, 2, 8, rng).to(device))
    out = mhc.hyper_connection(x, torch.tanh, phi, b, alpha, C)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_edge_that_carries_the_results_gradient_holds_no_value(device, rng):
    x, phi, b, alpha, _ = leaves(sample(5, 2, 8, rng).to(device))
    carrier = mhc.pre(x, phi, b, alpha, C.norm_eps, C.hc_eps, C.iterations)[3]
    assert carrier.untyped_storage().nbytes() == carrier.element_size()


@pytest.mark.long
def test_a_module_wraps_any_layer_and_learns(device):
    torch.manual_seed(0)
    block = mhc.HyperConnection(torch.nn.Linear(16, 16), d=16, n=2).to(device)
    x, target = torch.randn(2, 5, 2, 16, device=device).unbind(0)
    steps = torch.optim.Adam(block.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = (block(x) - target).square().mean()
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
        steps.step()
    assert losses[-1] < 0.9 * losses[0]


def test_no_tokens_give_nothing_and_zero_gradients(device):
    x, phi, b, alpha, _ = leaves(sample(0, 4, 8, np.random.default_rng(0)).to(device))
    out = mhc.hyper_connection(x, lambda v: v, phi, b, alpha)
    out.sum().backward()
    assert (out.shape, x.grad.shape) == ((0, 4, 8), (0, 4, 8))
    assert not phi.grad.any()
    assert not b.grad.any()
    assert not alpha.grad.any()


@pytest.mark.long
def test_x_need_not_be_contiguous(device, rng):
    inputs = sample(12, 4, 10, rng).to(device)
    x, phi, b, alpha, _ = leaves(inputs)
    spread = inputs.x.mT.contiguous().mT.requires_grad_()
    assert not spread.is_contiguous()
    outs = [mhc.hyper_connection(v, lambda v: v, phi, b, alpha) for v in (x, spread)]
    assert torch.equal(*outs)
    for out in outs:
        out.backward(inputs.dout)
    assert torch.equal(x.grad, spread.grad)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda v: v[:, :3], "x: expected [.., n, D] with n one of (1, 2, 4, 8), D from 1, got shape (6, 3, 10)"),
        ("x", lambda v: v.double(), "x: expected bfloat16, float16 or float32, got torch.float64"),
        ("phi", lambda v: v.T, "phi: expected torch.float32 (40, 24), got torch.float32 (24, 40)"),
        ("b", lambda v: v[:5], "b: expected torch.float32 (24,), got torch.float32 (5,)"),
        ("alpha", lambda v: v.double(), "alpha: expected torch.float32 (3,), got torch.float64 (3,)"),
    ],
)
def test_wrong_shapes_and_types_are_one_clear_error(device, rng, name, change, message):
    inputs = sample(6, 4, 10, rng).to(device)
    given = {n: getattr(inputs, n) for n in ("x", "phi", "b", "alpha")}
    given[name] = change(given[name])
    with pytest.raises(UsageError) as error:
        mhc.hyper_connection(given["x"], lambda v: v, given["phi"], given["b"], given["alpha"])
    assert str(error.value).startswith(message)


def test_a_layer_that_changes_the_shape_is_refused(device, rng):
    inputs = sample(6, 4, 10, rng).to(device)
    with pytest.raises(UsageError, match=r"layer: gives \(6, 5\); expected \(6, 10\)"):
        mhc.hyper_connection(inputs.x, lambda v: v[:, :5], inputs.phi, inputs.b, inputs.alpha)


def test_narrow_types_are_refused_where_kernels_are_interpreted(device, rng):
    if device == "cuda":
        pytest.skip("there is a GPU here")
    inputs = sample(6, 4, 10, rng, torch.bfloat16)
    with pytest.raises(UsageError, match=r"x: torch\.bfloat16 needs a GPU"):
        mhc.hyper_connection(inputs.x, lambda v: v, inputs.phi, inputs.b, inputs.alpha)


@pytest.mark.parametrize(("name", "value"), [("iterations", 0), ("norm_eps", -1.0), ("hc_eps", float("nan"))])
def test_constants_are_checked(name, value):
    with pytest.raises(UsageError, match=f"{name}: expected .*got {value}"):
        Constants(**{name: value})


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_any_number_of_iterations(device, rng, iterations):
    c = Constants(iterations=iterations, hc_eps=1e-3)
    inputs = sample(9, 4, 20, rng).to(device)
    found = verification.check_operator(inputs, c)
    assert found.first is None, str(found)


def test_packing_keeps_sixteen_bits(device):
    if device != "cuda":
        pytest.skip("bfloat16 is for the GPU")
    w = torch.randn(100, 24, device=device)
    packed = launch.pack(w).double()
    assert ((packed[:, :24] + packed[:, 32:56] - w.double()).abs() <= 2.0**-16 * w.double().abs()).all()


def test_transformer_engines_result_is_handed_on_without_a_copy_of_its_gradient(monkeypatch):
    """By a stand-in for its module: the gradient of a slice would be a tensor of zeros, filled and copied into."""
    module = SimpleNamespace(
        mhc_generate_mix_and_aggregate=lambda x, phi, alpha, beta, use_split_k: (x.sum(-1), alpha, beta),
        mhc_fused_expand_combine=lambda y, bias, post, x, p, n: x + y[..., None],
    )
    monkeypatch.setattr(baselines, "_transformer_engine", lambda deterministic: module)
    x = torch.ones(3, 5, 4, requires_grad=True)
    out = baselines.transformer_engine(False)(x, torch.ones(2), torch.ones(2), torch.ones(3))
    assert out.shape == x.shape
    assert out.grad_fn.name() == "SqueezeBackward1"
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert (gradient == 5.0).all()  # one from x itself, four from the sum over streams


RIVALS = faulty.rivals(4, 40, 16)


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", ["right", *RIVALS])
def test_each_wrong_access_is_what_the_kernel_then_computes(device, name):
    access = RIVALS.get(name, faulty.CORRECT_ACCESS)
    p = faulty.Problem.sample(9, 4, 40, 3, C, device)
    found, injected = faulty.backward(p, access), counterfactual.backward(p, access)
    held = {step.name: compare(found[step.name], step.value, bound=step.bound).ok for step in injected}
    assert all(held.values()), held


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", [name for name in RIVALS if not name.startswith("hc_eps") and "64" not in name])
def test_each_wrong_access_changes_dalpha_pre_alone(device, name):
    p = faulty.Problem.sample(9, 4, 40, 3, C, device)
    found = localise(faulty.backward(p, RIVALS[name]), counterfactual.backward(p))
    assert found.first in ("dpre", "g_pre", "raw_pre", "mix_pre")
    right = next(step for step in counterfactual.backward(p) if step.name == "dalpha")
    wrong = faulty.backward(p, RIVALS[name])["dalpha"].clone()
    assert not compare(wrong, right.value, bound=right.bound).ok
    wrong[0] = right.value[0]
    assert compare(wrong, right.value, bound=right.bound).ok


def test_the_faulty_kernels_own_error_is_the_inner_product(device):
    p = faulty.Problem.sample(9, 4, 40, 3, C, device)
    found = localise(faulty.backward(p, faulty.Access(tile=16)), counterfactual.recorded(p))
    assert (found.first, found.own, found.inherited) == ("dpre", ["dpre"], ["g_pre", "dalpha"])


@pytest.mark.long
def test_what_was_compiled_for_other_addresses_is_not_launched(device, rng):
    inputs = sample(6, 4, 24, rng).to(device)
    names = ("x", "phi", "b", "alpha")
    for shift in (0, 1, 2, 4):  # the order of a sum may follow from how its terms are read, so bits may differ
        moved = {}
        for name in names:
            one = getattr(inputs, name)
            moved[name] = torch.empty(one.numel() + 4, device=device)[shift:][: one.numel()].view_as(one).copy_(one)
        assert verification.check_operator(replace(inputs, **moved), C).first is None


@pytest.mark.parametrize("way", sums.WAYS)
@pytest.mark.parametrize("count", [1, 127, 2048, 5001, 100_000])
def test_every_way_of_summing_is_within_its_bound(device, rng, way, count):
    a, b = (torch.from_numpy(rng.standard_normal(count, dtype=np.float32)).to(device) for _ in range(2))
    products = a.double() * b.double()
    bound = sum_of_products(products.abs().sum()[None], count)
    assert compare(sums.total(way, a, b), products.sum()[None], bound=bound).ok


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("way", [way for way in sums.WAYS if way != "atomic_add"])
def test_a_fixed_order_gives_the_same_bits_and_leaves_the_counter_at_zero(device, rng, way):
    a, b = (torch.from_numpy(rng.standard_normal(50_000, dtype=np.float32)).to(device) for _ in range(2))
    assert sums.distinct(way, a, b, 5) == (1, 0.0)


@pytest.mark.gpu
def test_atomics_differ_from_run_to_run_and_a_fixed_order_does_not():
    a, b = torch.randn(2, 1 << 20, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert sums.distinct("atomic_add", a, b, 200)[0] > 1
    assert sums.distinct("two-stage", a, b, 200)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serial", torch.ones(2), torch.ones(2)), "way: .*got 'serial'"),
        (("Kahan", torch.ones(2), torch.ones(3)), r"a, b: torch.float32 \(2,\), torch.float32 \(3,\)"),
        (("Kahan", torch.ones(0), torch.ones(0)), "a: holds nothing"),
    ],
)
def test_sums_refuse_what_they_cannot_take(arguments, message):
    with pytest.raises(UsageError, match=message):
        sums.total(*arguments)


def test_inputs_move_and_widen_together(rng):
    inputs = sample(2, 2, 3, rng)
    assert all(getattr(inputs.double(), name).dtype == torch.float64 for name in Inputs.__dataclass_fields__)
