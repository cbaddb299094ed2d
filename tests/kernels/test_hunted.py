"""Every kernel of the workbook that can be called, hunted: the right ones do not fall, the faulty ones do."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import labkit
from kernels.attention import calls, elementwise, fused, problem, scores
from kernels.attention import faulty as attention_faults
from kernels.attention import golden as attention_golden
from kernels.bert import embedding
from kernels.bert.model import cross_entropy
from kernels.compare import faulty as planted
from kernels.compare import systems
from kernels.lm import model as lm
from kernels.mhc import counterfactual, launch
from kernels.mhc import faulty as mhc_faults
from kernels.mhc import golden as mhc_golden
from kernels.mhc.problem import Constants, draw
from kernels.mhc.reductions import sums

FEW = {"most": 1 << 9}  # the interpreter takes some ms a program
PLANTED = {"refuses": (ValueError, IndexError)}  # at fixed places, which small inputs have not
CLASSES = {"cross_entropy": {"w": (116, "d")}}
DENSE = {"layouts": ["contiguous", "offset"]}  # inside the operator, which makes its operands contiguous
PLAIN, EAGER = labkit.Precision(), labkit.Precision(storage="float32", eager=True)
SPLIT = labkit.Precision(products="tf32x3")
C = Constants()
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 37, 64, 65])
SEEDS = st.integers(0, 99)


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def on(device, inputs):
    if isinstance(inputs, st.SearchStrategy):
        return inputs.map(partial(on, device))
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def embed(ids, types, tokens, positions, kinds, gain, shift):
    x = tokens[ids] + positions[: ids.shape[1]] + kinds[types]
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gain, shift, 1e-12)


EMBED = {
    "ids": torch.tensor([[0, 6, 3], [1, 2, 5]]), "types": torch.tensor([[0, 1, 1], [0, 0, 1]]),
    "tokens": randn(7, 9), "positions": randn(11, 9), "kinds": randn(2, 9), "gain": randn(9), "shift": randn(9),
}  # fmt: skip
FIXED = {
    "ids": ("rows", 5), "types": ("rows", 5), "tokens": (7, "hidden"), "positions": (11, "hidden"),
    "kinds": (2, "hidden"), "gain": ("hidden",), "shift": ("hidden",),
}  # fmt: skip


def hyper_connection(x, phi, b, alpha):
    r, mix = mhc_golden.projection(x, phi, C)
    pre, post, p = mhc_golden.coefficients(mix, b, alpha, x.shape[-2], C)
    return {"r": r, "mix": mix, "pre": pre, "post": post, "p": p, "x_in": mhc_golden.aggregate(x, pre)}


def connection(tokens, d, seed):
    drawn = draw(tokens, 4, d, np.random.default_rng(seed))
    return {name: getattr(drawn, name) for name in ("x", "phi", "b", "alpha")}


def gradients(tokens, d, seed):
    p = mhc_faults.Problem.draw(tokens, 4, d, seed, C, "cpu")
    return {name: getattr(p, name) for name in p.__dataclass_fields__ if name != "eps"}


def pre_backward(**given):
    return counterfactual.steps(mhc_faults.Problem(**given, eps=float(np.float32(C.hc_eps))))


def faulty_pre_backward(name, **given):
    p = mhc_faults.Problem(**given, eps=float(np.float32(C.hc_eps)))
    access = mhc_faults.rivals(*p.x.shape[1:]).get(name, mhc_faults.RIGHT)
    return {step.name: step.value for step in mhc_faults.backward(p, access) if step.name not in given}


def matmul(q, k):
    return q @ k.mT


def by_blas(call, q, k):
    inputs = problem.Inputs(*(x.cpu().contiguous().numpy() for x in (q, k, k)))
    return torch.from_numpy(np.array(attention_faults.scores(call, inputs, q.device.type))).to(q.device)


def planted_in(fault, **x):
    def at(name, value, steps):
        return fault.change(value, steps) if fault is not None and name == fault.step else value

    return systems.SYSTEMS[fault.system](at, **x)


ROWS = {"x": randn(3, 5, 7)}
QK = {"q": randn(2, 5, 7), "k": randn(2, 6, 7)}
SYSTEMS = {name: systems.inputs(name, systems.SIZES[0], torch.Generator().manual_seed(0)) for name in systems.SYSTEMS}
STREAMS = {"x": randn(5, 4, 7), "y": randn(5, 7), "post": randn(5, 4), "p": randn(5, 4, 4)}
OF_STREAMS = {"x": ("T", 4, "D"), "y": ("T", "D"), "post": ("T", 4), "p": ("T", 4, 4)}
PROBLEMS = st.builds(gradients, SIZES, st.sampled_from([1, 2, 9, 17, 33, 65, 97, 129]), SEEDS)

RIGHT = {
    "scale": (elementwise.scale, lambda x, factor: x * factor, ROWS | {"factor": 0.125}, PLAIN, {}),
    "softmax": (elementwise.softmax, lambda x: torch.softmax(x, -1), ROWS, PLAIN, {}),
    "scores": (scores.scores, matmul, QK, SPLIT, FEW),
    "fused attention": (
        fused.attention, lambda q, k, v: attention_golden.steps(q, k, v)["pv"], QK | {"v": randn(2, 6, 7)}, SPLIT, FEW
    ),
    "product by BLAS": (partial(by_blas, calls.Call()), matmul, QK, PLAIN, {}),
    "product by BLAS in blocks": (partial(by_blas, calls.blocked(32)), matmul, QK, PLAIN, {}),
    "embedding": (embedding.embed, embed, EMBED, PLAIN, FEW | {"sizes": FIXED}),
    "masked cross entropy": (
        cross_entropy, cross_entropy, {"logits": randn(6, 11), "labels": torch.tensor([0, 3, 9, 1, 2, 4])}, EAGER,
        {"sizes": {"logits": ("n", 11)}},
    ),
    "hyper-connection": (
        lambda x, phi, b, alpha: launch.forward(x, phi, b, alpha, C), hyper_connection,
        st.builds(connection, SIZES, SIZES, SEEDS), PLAIN, {},
    ),
    "expand": (
        lambda x, y, post, p: launch.expand(x, y, post, p), mhc_golden.expand, STREAMS, PLAIN,
        FEW | DENSE | {"sizes": OF_STREAMS},
    ),
    "pre backward": (partial(faulty_pre_backward, ""), pre_backward, PROBLEMS, PLAIN, {}),
    "rms norm": (
        partial(lm.rms_norm, eps=1e-5), partial(lm.rms_norm, eps=1e-5), {"x": randn(3, 7), "gain": randn(7)}, EAGER, {}
    ),
} | {
    f"sum by {way}": (
        partial(sums.total, way), lambda a, b: (a * b).sum().reshape(1), {"a": randn(7), "b": randn(7)}, PLAIN, {}
    )
    for way in sums.WAYS
} | {
    f"{name} in torch": (run, run, SYSTEMS[name], EAGER, {"sizes": CLASSES.get(name)})
    for name, run in systems.SYSTEMS.items()
}  # fmt: skip

FAULTY = {
    f"product by BLAS: {name}": (partial(by_blas, call), matmul, QK, PLAIN, {"values": ["counting", "normal"]})
    for name, call in calls.diagnosis(32).items()
} | {
    f"pre backward: {name}": (partial(faulty_pre_backward, name), pre_backward, PROBLEMS, PLAIN, {})
    for name in mhc_faults.rivals(4, 64)
} | {
    f"{fault.system}: {fault.name}": (
        partial(planted_in, fault), systems.SYSTEMS[fault.system], SYSTEMS[fault.system], EAGER,
        PLANTED | {"sizes": CLASSES.get(fault.system)},
    )
    for fault in planted.FAULTS
}  # fmt: skip


def hunt(case, device, examples):
    kernel, reference, inputs, precision, how = case
    return labkit.hunt(kernel, reference, on(device, inputs), precision, examples=examples, **({"most": 1 << 12} | how))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_does_not_fall(name, device):
    found = hunt(RIGHT[name], device, 4)
    assert found.examples >= 2
    assert not found.found, found


ACCUSED = {
    "cross_entropy in torch": "labkit's error: of 33 terms all but one are equal, so they are not rounded by chance"
}


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_does_not_fall_in_50_examples(name, device, request):
    if name in ACCUSED:
        request.applymarker(pytest.mark.xfail(strict=True, reason=ACCUSED[name]))
    found = hunt(RIGHT[name], device, 50)
    assert not found.found, found


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_kernel_falls(name, device):
    assert hunt(FAULTY[name], device, 50).found
