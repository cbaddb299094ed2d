"""The kernels as operations of torch: opcheck in every layout, whole graphs, and gradients by torch.func."""

import numpy as np
import pytest
import torch

from kernels.attention import fused, scores
from kernels.bert import embedding
from kernels.mhc import mhc
from kernels.mhc.problem import Constants, sample
from kernels.mhc.reductions import sums

C = Constants(iterations=2)
CONSTANTS = (C.norm_eps, C.hc_eps, C.iterations)
DROP = 1 << 15


def leaf(generator, *shape):
    return torch.randn(shape, generator=generator, device=generator.device).requires_grad_()


def plain(*given):
    """Without their gradients, which no operation here makes twice."""
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given)


def embedding_inputs(generator):
    tables = [leaf(generator, *shape) for shape in ((7, 5), (4, 5), (2, 5), (5,), (5,))]
    device = generator.device
    ids, types = (
        torch.tensor([[0, 6, 3], [1, 3, 5]], device=device),
        torch.tensor([[0, 1, 1], [0, 0, 1]], device=device),
    )
    return ids, types, tables, torch.tensor(3, device=device)


def operations(device):
    """Each operation by name, and what it is called with."""
    g = torch.Generator(device).manual_seed(0)
    q, k, v = leaf(g, 2, 5, 7), leaf(g, 2, 6, 7), leaf(g, 2, 6, 7)
    a, b = leaf(g, 3, 11), leaf(g, 3, 11)
    ids, types, tables, seed = embedding_inputs(g)
    _, mean, inverse = plain(*embedding.embedded(ids, types, *tables, seed, 1e-6, DROP, 2))
    inputs = sample(5, 2, 8, np.random.default_rng(0)).to(device)
    x, phi, bias, alpha, y = (
        one.clone().requires_grad_() for one in (inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y)
    )
    _, weights, p, carrier, mix, r, pre = plain(*mhc.pre(x, phi, bias, alpha, *CONSTANTS))
    above = (inputs.dx_in, torch.ones_like(weights), torch.ones_like(p), inputs.dout)
    return {
        "attention": (fused.attended, (q, k, v)),
        "attention, out": (fused.attended_into, plain(q, k, v, torch.zeros_like(q))),
        "scores": (scores.scored, (q, k)),
        "scores, out": (scores.scored_into, plain(q, k, q @ k.mT)),
        "sum of products": (sums.summed, ("two-stage", a, b)),
        "embedding": (embedding.embedded, (ids, types, *tables, seed, 1e-6, DROP, 2)),
        "embedding, no types, no dropout": (embedding.embedded, (ids, None, *tables, None, 1e-6, 0, -1)),
        "embedding backward": (
            embedding.embedding_backward,
            plain(leaf(g, 2, 3, 5), ids, types, *tables[:4], mean, inverse, seed, DROP, 2),
        ),
        "hyper-connection, before": (mhc.pre, (x, phi, bias, alpha, *CONSTANTS)),
        "hyper-connection, before, backward": (
            mhc.pre_backward, plain(x, phi, bias, alpha, mix, r, pre, p, *above, *CONSTANTS),
        ),
        "hyper-connection, before, backward, one gradient": (
            mhc.pre_backward, plain(x, phi, bias, alpha, mix, r, pre, p, None, None, None, inputs.dout, *CONSTANTS),
        ),
        "hyper-connection, after": (
            mhc.post, (carrier.requires_grad_(), x.detach(), y, weights.requires_grad_(), p.requires_grad_()),
        ),
        "hyper-connection, after, backward": (mhc.post_backward, plain(x, y, weights, inputs.dout)),
    }  # fmt: skip


NAMES = (
    "attention", "attention, out", "scores", "scores, out", "sum of products", "embedding",
    "embedding, no types, no dropout", "embedding backward", "hyper-connection, before",
    "hyper-connection, before, backward", "hyper-connection, before, backward, one gradient", "hyper-connection, after",
    "hyper-connection, after, backward",
)  # fmt: skip
"""Written out, since kernels cannot run where tests are collected."""


def permuted(x):
    """The same values in each dense layout in which two neighbouring axes are exchanged in memory."""
    exchanged = [x.detach().transpose(i, i + 1).contiguous().transpose(i, i + 1) for i in range(x.ndim - 1)]
    return [one.requires_grad_(x.requires_grad) for one in exchanged if not one.is_contiguous()]


def layouts(given, in_place):
    """The arguments with one tensor at a time in each of its other layouts; what is written into keeps its own."""
    for i, x in enumerate(given):
        if isinstance(x, torch.Tensor) and not in_place and all(x.stride()):
            yield from ((*given[:i], other, *given[i + 1 :]) for other in permuted(x))


def test_every_operation_of_the_library_is_in_the_table(device):
    known = {name for name in dir(torch.ops.workbook) if not name.startswith("_")} - {"name"}
    assert {
        getattr(operation, "_qualname", None) or operation.name() for operation, _ in operations(device).values()
    } == {f"workbook::{x}" for x in known}
    assert tuple(operations(device)) == NAMES


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_keeps_torchs_rules(device, name):
    operation, given = operations(device)[name]
    torch.library.opcheck(operation, given)


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(", out")])
def test_what_an_operation_gives_lies_as_its_fake_form_says_in_every_layout(device, name):
    operation, given = operations(device)[name]
    others = list(layouts(given, name.endswith(", out")))
    for other in others:
        torch.library.opcheck(operation, other, test_utils="test_faketensor")
    assert others


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(", out")])
def test_an_operation_keeps_torchs_rules_in_every_layout(device, name):
    operation, given = operations(device)[name]
    for other in layouts(given, name.endswith(", out")):
        torch.library.opcheck(operation, other)


def models(device):
    """A model around each kernel that is differentiable, and its leaves."""
    g = torch.Generator(device).manual_seed(0)
    q, k, v = leaf(g, 2, 5, 7), leaf(g, 2, 6, 7), leaf(g, 2, 6, 7)
    ids, types, tables, _ = embedding_inputs(g)
    inputs = sample(5, 2, 8, np.random.default_rng(0)).to(device)
    linear = torch.nn.Linear(8, 8).to(device)
    return {
        "attention": (fused.attention, (q, k, v)),
        "scores": (scores.scores, (q, k)),
        "sum of products": (lambda a, b: sums.total("two-stage", a, b), (q, q.detach().clone().requires_grad_())),
        "embedding": (lambda *tables: embedding.embed(ids, types, *tables, dropout=0.5), tables),
        "hyper-connection": (
            lambda *given: mhc.hyper_connection(given[0], linear, *given[1:], C),
            [one.clone().requires_grad_() for one in (inputs.x, inputs.phi, inputs.b, inputs.alpha)],
        ),
    }  # fmt: skip


def gradients(model, leaves):
    torch.manual_seed(0)
    return torch.autograd.grad(model(*leaves).square().sum(), leaves)


MODELS = ("attention", "scores", "sum of products", "embedding", "hyper-connection")


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_compiled_without_a_break_and_gives_the_same(device, name, autocast):
    run, leaves = models(device)[name]

    def model(*given):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return run(*given).float().tanh()

    torch._dynamo.reset()
    found = torch._dynamo.explain(model)(*leaves)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled, leaves), gradients(model, leaves)))


def test_a_result_that_is_handed_in_is_written_in_a_compiled_graph_too(device):
    run, (q, k, v) = models(device)["attention"]
    out = torch.zeros(q.shape, device=device)
    compiled = torch.compile(lambda: fused.attention(*plain(q, k, v), out) + 1.0, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), run(q, k, v) + 1.0)
    assert torch.equal(out, run(q, k, v))


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", MODELS)
def test_its_gradient_by_torch_func_is_the_same(device, name):
    run, leaves = models(device)[name]

    def loss(*given):
        torch.manual_seed(0)
        return run(*given).tanh().square().sum()

    found = torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*plain(*leaves))
    assert all(map(torch.equal, found, torch.autograd.grad(loss(*leaves), leaves)))


@pytest.mark.parametrize("name", ["attention", "scores"])
def test_gradients_of_forward_kernels_are_the_formulas(device, name):
    run, leaves = models(device)[name]
    formula = {
        "attention": lambda q, k, v: torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v,
        "scores": lambda q, k: q @ k.mT,
    }[name]
    exact = gradients(formula, [x.detach().double().requires_grad_() for x in leaves])
    for found, right in zip(gradients(run, leaves), exact, strict=True):  # some dozen float32 roundings
        assert float((found - right).norm() / right.norm()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_compiled_by_inductor_and_runs_in_a_cuda_graph(name):
    run, leaves = models("cuda")[name]

    def model(*given):
        return run(*given).sin()

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    if name != "embedding":  # whose seed is sampled by the compiled code's own generator
        for _ in range(3):
            for found, right in zip(gradients(compiled, leaves), gradients(model, leaves), strict=True):
                assert float((found - right).norm() / right.norm()) < 1e-5
    apart = torch.cuda.Stream()
    with torch.cuda.stream(apart):
        leaves = [x.detach().clone().requires_grad_() for x in leaves]
        gradients(model, leaves)
    torch.cuda.current_stream().wait_stream(apart)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=apart):
        out = model(*leaves)
        held = torch.autograd.grad(out.square().sum(), leaves)
    graph.replay()
    one = out.clone()
    graph.replay()
    assert torch.equal(one, out) == (name != "embedding")  # which draws another mask at each replay
    if name != "embedding":
        assert all(map(torch.equal, held, gradients(model, leaves)))
