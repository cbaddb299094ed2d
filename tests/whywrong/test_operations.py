"""Operations that references use: each is recorded, a correct port is not flagged, and a wrong element is found."""

import re
import runpy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import linalg
from torch.nn import functional as F  # noqa: N812

import whywrong
from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError
from whywrong.recording import golden as golden_module
from whywrong.recording import operations
from whywrong.recording.operations import ALLOWED, aten

Tensor = torch.Tensor
Draw = Callable[[torch.Generator], Tensor]


def normal(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator)


def positive(*shape: int) -> Draw:
    """From 0.25 to 0.75."""
    return lambda generator: torch.rand(shape, generator=generator) / 2 + 0.25


def whole(high: int, *shape: int) -> Draw:
    return lambda generator: torch.randint(high, shape, generator=generator)


def mask(*shape: int) -> Draw:
    return lambda generator: torch.rand(shape, generator=generator) > 0.5


def square(*shape: int) -> Draw:
    """Matrices of condition 10 or so."""
    return lambda generator: torch.randn(shape, generator=generator) + 3.0 * shape[-1] ** 0.5 * torch.eye(shape[-1])


def definite(n: int) -> Draw:
    def draw(generator: torch.Generator) -> Tensor:
        a = torch.randn(n, 2 * n, generator=generator)
        return a @ a.T / n + torch.eye(n)

    return draw


def low_rank(a: Tensor) -> Tensor:
    u, s, v = linalg.svd(a, full_matrices=False)
    return (u[:, :2] * s[:2]) @ v[:2]


def reduced(how: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, i: x.new_ones(5, 4).scatter_reduce(0, i, x, how)


def bag(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, i: F.embedding_bag(i, w, mode=mode)


def sampled(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, grid: F.grid_sample(x, grid.tanh(), mode=mode, align_corners=False)


def resized(**how: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, **how)


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as Llama's first code has it."""
    turns = torch.polar(torch.ones_like(angles.float()), angles.float())
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def rotary_of_parts(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(x[..., ::2], x[..., 1::2]) * torch.exp(1j * angles)
    return torch.stack([turned.real, turned.imag], -1).flatten(-2)


def power(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, norm="ortho")
    return spectrum.real.square() + spectrum.imag.square()


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, 32) * torch.fft.rfft(kernel, 32), 32)[..., :16]


def windowed(x: Tensor) -> Tensor:
    return torch.stft(x, 16, 8, window=torch.hann_window(16, dtype=x.dtype), return_complex=True)


def state_space(a: Tensor, c: Tensor) -> Tensor:
    modes = torch.exp(torch.complex(-a, a)[..., None] * torch.arange(6.0)).mT
    return (torch.complex(c, c) * modes).sum(-1).real


def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    nibbles = (packed.unsqueeze(-1) >> torch.tensor([0, 4])) & 15
    return nibbles.flatten(-2).to(scale.dtype) * scale


def trained(make: Callable[[Any], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(w: Tensor, x: Tensor) -> Tensor:
        p = torch.nn.Parameter(w.detach().clone())
        optimizer = make([p])
        for _ in range(2):
            optimizer.zero_grad()
            (p * x).square().sum().backward()
            optimizer.step()
        return p.detach() + 0.0

    return run


def clipped(w: Tensor, x: Tensor) -> Tensor:
    p = torch.nn.Parameter(w.detach().clone())
    (p * x).square().sum().backward()
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    return p.grad + 0.0


WITH_BACKWARD: dict[str, tuple[Any, ...]] = {
    "cholesky": (linalg.cholesky, definite(9)),
    "cholesky_solve": (lambda a, b: torch.cholesky_solve(b, linalg.cholesky(a)), definite(9), normal(9, 3)),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(linalg.cholesky(a)), definite(9)),
    "solve": (linalg.solve, square(9, 9), normal(9, 3)),
    "solve, batches": (linalg.solve, square(2, 5, 5), normal(2, 5, 3)),
    "solve, a vector": (linalg.solve, square(9, 9), normal(9)),
    "triangular": (lambda a, b: linalg.solve_triangular(a.tril(), b, upper=False), square(9, 9), normal(9, 3)),
    "inv": (linalg.inv, square(9, 9)),
    "det": (linalg.det, square(5, 5)),
    "slogdet": (lambda a: linalg.slogdet(a)[1], square(9, 9)),
    "lu_factor": (lambda a: linalg.lu_factor(a)[0], square(7, 7)),
    "lu": (lambda a: linalg.lu(a)[2], square(7, 7)),
    "svdvals": (linalg.svdvals, normal(8, 5)),
    "svd": (lambda a: linalg.svd(a, full_matrices=False).S, normal(8, 5)),
    "qr, R": (lambda a: linalg.qr(a)[1], normal(8, 5)),
    "qr, Q": (lambda a: linalg.qr(a)[0], normal(8, 5)),
    "eigvalsh": (linalg.eigvalsh, definite(7)),
    "eigh": (lambda a: linalg.eigh(a)[0], definite(7)),
    "pinv": (linalg.pinv, normal(8, 4)),
    "matrix_exp": (lambda a: linalg.matrix_exp(a / 3), normal(6, 6)),
    "cdist": (torch.cdist, normal(6, 4), normal(5, 4)),
    "cdist, p 1": (lambda a, b: torch.cdist(a, b, p=1.0), normal(6, 4), normal(5, 4)),
    "pdist": (torch.pdist, normal(6, 4)),
    "ctc_loss": (
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t + 1, [12, 12], [3, 4]), normal(12, 2, 6), whole(5, 2, 4)
    ),
    "multi_margin": (F.multi_margin_loss, normal(8, 6), whole(6, 8)),
    "bilinear layer": (F.bilinear, normal(3, 4), normal(3, 5), normal(2, 4, 5)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), normal(4, 5), positive(4, 1)),
    "embedding_bag, sum": (bag("sum"), normal(10, 4), whole(10, 5, 3)),
    "embedding_bag, mean": (bag("mean"), normal(10, 4), whole(10, 5, 3)),
    "embedding_bag, max": (bag("max"), normal(10, 4), whole(10, 5, 3)),
    "embedding_bag, weighted": (
        lambda w, i, v: F.embedding_bag(i, w, per_sample_weights=v, mode="sum"),
        normal(10, 4), whole(10, 5, 3), normal(5, 3),
    ),
    "scatter_reduce, sum": (reduced("sum"), normal(9, 4), whole(5, 9, 4)),
    "scatter_reduce, mean": (reduced("mean"), normal(9, 4), whole(5, 9, 4)),
    "masked_scatter": (lambda x, m, y: x.masked_scatter(m, y), normal(6, 4), mask(6, 4), normal(6, 4)),
    "masked_select": (lambda x, m: x.masked_select(m), normal(6, 4), mask(6, 4)),
    "take": (torch.take, normal(6, 4), whole(24, 7)),
    "put": (lambda x, y: x.put(torch.arange(0, 24, 3), y), normal(6, 4), normal(8)),
    "repeat_interleave": (lambda x, n: torch.repeat_interleave(x, n, 0), normal(6, 4), whole(3, 6)),
    "triu_indices": (lambda x: x[tuple(torch.triu_indices(5, 5))], normal(5, 5)),
    "median": (torch.median, normal(31)),
    "median, dim": (lambda x: torch.median(x, 1)[0], normal(4, 31)),
    "nanmedian": (torch.nanmedian, normal(31)),
    "kthvalue": (lambda x: torch.kthvalue(x, 3, 1)[0], normal(4, 31)),
    "cummin": (lambda x: torch.cummin(x, 1)[0], normal(4, 9)),
    "int4": (unpacked, whole(255, 6, 4), normal(6, 8)),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), normal(4, 9)),
    "i0": (torch.special.i0, normal(9)),
    "i1e": (torch.special.i1e, normal(9)),
    "polygamma": (lambda x: torch.polygamma(1, x), positive(9)),
    "ndtri": (torch.special.ndtri, positive(9)),
    "erfcx": (torch.special.erfcx, positive(9)),
    "acosh": (lambda x: torch.acosh(x + 1), positive(9)),
    "asinh": (torch.asinh, normal(9)),
    "atanh": (torch.atanh, positive(9)),
    "cov": (torch.cov, normal(4, 9)),
    "grid_sample": (sampled("bilinear"), normal(1, 2, 5, 6), normal(1, 3, 4, 2)),
    "grid_sample, bicubic": (sampled("bicubic"), normal(1, 2, 5, 6), normal(1, 3, 4, 2)),
    "grid_sample, volumes": (sampled("bilinear"), normal(1, 2, 4, 5, 6), normal(1, 2, 3, 4, 3)),
    "bicubic": (resized(scale_factor=1.7, mode="bicubic"), normal(1, 2, 5, 6)),
    "bicubic, antialias": (resized(size=(3, 4), mode="bicubic", antialias=True), normal(1, 2, 7, 8)),
    "bilinear, antialias": (resized(size=(3, 4), mode="bilinear", antialias=True), normal(1, 2, 7, 8)),
    "circular padding": (lambda x: F.pad(x, (1, 2, 1, 1), mode="circular"), normal(1, 2, 5, 6)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), normal(1, 2, 4, 4, 4)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), normal(1, 2, 7, 6)),
    "rotary": (rotary, normal(3, 5, 8), normal(5, 4)),
    "rotary of parts": (rotary_of_parts, normal(3, 5, 8), normal(5, 4)),
    "rfft": (torch.fft.rfft, normal(3, 16)),
    "fft, absolute": (lambda x: torch.fft.fft(x).abs(), normal(3, 12)),
    "fft2": (lambda x: torch.fft.fft2(x).real, normal(3, 6, 8)),
    "power spectrum": (power, normal(3, 16)),
    "convolution by fft": (convolved, normal(3, 16), normal(3, 16)),
    "stft": (windowed, normal(64)),
    "complex matmul": (lambda a, b: torch.complex(a, b) @ torch.complex(b, a).mH, normal(4, 5), normal(4, 5)),
    "state space": (state_space, positive(4), normal(6, 4)),
    "norm, largest": (lambda x: linalg.vector_norm(x, torch.inf, 1), normal(3, 7)),
    "norm, smallest": (lambda x: linalg.vector_norm(x, -torch.inf), normal(3, 7)),
    "norm, 3": (lambda x: linalg.vector_norm(x, 3, keepdim=True), normal(3, 7)),
}  # fmt: skip
"""What a reference does, and its inputs; the backward of a module that does it is recorded too."""

FORWARD: dict[str, tuple[Any, ...]] = {
    "svd, low rank": (low_rank, normal(8, 5)),
    "matrix norm": (lambda a: linalg.matrix_norm(a, 2), normal(2, 6, 4)),
    "lstsq": (lambda a, b: linalg.lstsq(a, b).solution, normal(9, 4), normal(9, 2)),
    "_int_mm": (lambda a, b: torch._int_mm(a.to(torch.int8), b.to(torch.int8)), whole(99, 32, 16), whole(99, 16, 8)),
    "scatter_reduce, amax": (reduced("amax"), normal(9, 4), whole(5, 9, 4)),
    "scatter_reduce, prod": (reduced("prod"), normal(9, 4), whole(5, 9, 4)),
    "histc": (lambda x: torch.histc(x, 8, -2.0, 2.0), normal(50)),
    "histc of all": (lambda x: torch.histc(x, 8), normal(50)),
    "histc of experts": (lambda i: torch.histc(i.float(), 8, 0, 7), whole(8, 50)),
    "bincount": (lambda i: torch.bincount(i, minlength=8), whole(8, 50)),
    "bincount, weights": (lambda i, w: torch.bincount(i, w, minlength=8), whole(8, 50), normal(50)),
    "searchsorted": (lambda a, x: torch.searchsorted(a.sort()[0], x), normal(9), normal(6)),
    "norm, counted": (lambda x: linalg.vector_norm(x.relu(), 0, 1), normal(3, 7)),
    "mode": (lambda i: torch.mode(i, 1)[0], whole(4, 3, 9)),
    "unique": (torch.unique, whole(30, 20)),
    "unique, inverse": (lambda i: torch.unique(i, return_inverse=True)[1], whole(30, 20)),
    "unique, rows": (lambda i: torch.unique(i, dim=0), whole(2, 9, 2)),
    "unique_consecutive": (torch.unique_consecutive, whole(3, 20)),
    "shifts": (lambda i: (i << 3) + (i >> 1), whole(100, 20)),
    "gcd": (lambda a, b: torch.gcd(a + 1, b + 1), whole(30, 20), whole(30, 20)),
    "phase": (lambda x: torch.fft.fftshift(torch.fft.fft(x)).angle().cos(), normal(3, 9)),
    "SGD": (trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)), normal(6), normal(6)),
    "SGD, foreach": (trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True)), normal(6), normal(6)),
    "Adam": (trained(lambda p: torch.optim.Adam(p, 0.01)), normal(6), normal(6)),
    "AdamW": (trained(lambda p: torch.optim.AdamW(p, 0.01, foreach=False)), normal(6), normal(6)),
    "AdamW, foreach": (trained(lambda p: torch.optim.AdamW(p, 0.01, foreach=True)), normal(6), normal(6)),
    "Adagrad": (trained(lambda p: torch.optim.Adagrad(p, 0.1)), normal(6), normal(6)),
    "RMSprop": (trained(lambda p: torch.optim.RMSprop(p, 0.1)), normal(6), normal(6)),
    "clip_grad_norm_": (clipped, normal(6), normal(6)),
}

IN_BFLOAT16 = (
    "weight_norm", "bilinear layer", "scatter_reduce, sum", "masked_scatter", "take", "median", "kthvalue", "int4",
    "logcumsumexp", "i0", "polygamma", "asinh", "cov", "grid_sample", "rotary", "histc", "SGD", "AdamW",
    "AdamW, foreach", "circular padding", "adaptive_max_pool2d", "max_pool3d", "searchsorted",
)  # fmt: skip
"""Of these torch has bfloat16 on a CPU, and does not sum in it."""

ALL = WITH_BACKWARD | FORWARD


class Reference(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(*inputs)


def recorded(name: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The golden of a case and what torch itself gives in a narrower type."""
    run, *draws = ALL[name]
    generator = torch.Generator().manual_seed(seed)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in (draw(generator) for draw in draws)]
    reference = Reference(run) if name in WITH_BACKWARD else run
    return whywrong.golden(reference, *inputs), whywrong.capture(reference, *inputs)


def accused(name: str, seeds: range, dtype: torch.dtype = torch.float32) -> list[str]:
    found = []
    for seed in seeds:
        golden, seen = recorded(name, seed, dtype)
        result = whywrong.localise(seen, golden)
        found += [f"{seed}: {step} {finding.words}" for step, finding in result.findings.items() if finding.diverges]
    return found


def broken(x: Tensor, by: float) -> Tensor:
    """Its largest element off by a part of it; of whole numbers one off by 1."""
    x = x.clone(memory_format=torch.contiguous_format)
    at = x.view(-1)
    at[int(at.double().abs().argmax())] *= 1.0 + by if x.is_floating_point() else 1
    if not x.is_floating_point():
        at[0] += 1
    return x


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", ALL)
def test_right_code_is_not_accused_and_a_wrong_element_is_found(name):
    golden, seen = recorded(name, 0)
    steps = {step: seen[step] for step in seen.names if "/" not in step}
    assert whywrong.localise(seen, golden).first is None, "each operation by itself"
    if name in WITH_BACKWARD:
        assert whywrong.localise(steps, golden).first is None, "results alone"
    forward = {step: value for step, value in steps.items() if not step.startswith("grad:")}
    assert whywrong.localise(forward | {"output": broken(steps["output"], 0.01)}, golden).first == "output"


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_nor_is_it_in_bfloat16(name):
    assert not accused(name, range(1), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_right_code_is_not_accused_over_many_seeds(name):
    assert not accused(name, range(100, 130))


def test_complex_steps_are_their_two_parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Reference(torch.fft.rfft), Reference(torch.fft.irfft))
    x = torch.randn(3, 16)
    golden, seen = whywrong.golden(model, x), whywrong.capture(model, x)
    torch.testing.assert_close(golden["0"], torch.view_as_real(torch.fft.rfft(x.double())))
    assert whywrong.localise(seen, golden).first is None
    steps = {name: seen[name] for name in seen.names if "/" not in name}
    assert whywrong.localise(steps | {"0": broken(steps["0"], 0.01)}, golden).first == "0"


def test_complex_results_are_judged_as_they_are_given(tmp_path):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    golden, right = whywrong.golden(torch.fft.rfft, x), torch.fft.rfft(x)
    whywrong.assert_close(right, golden)
    np.savez(tmp_path / "steps.npz", output=right.conj().resolve_conj())
    torch.save({"output": right.conj()}, tmp_path / "steps.pt")
    for observed in ({"output": right.conj()}, *(whywrong.load(tmp_path / f"steps.{x}") for x in ("npz", "pt"))):
        assert whywrong.localise(observed, golden).first == "output"


def test_a_complex_constant_and_a_complex_number_are_saved(tmp_path):
    turns = torch.polar(torch.ones(16), torch.linspace(0.0, 1.0, 16))
    golden = whywrong.golden(lambda x: torch.view_as_real(x * turns * 1j), torch.ones(16))
    again = whywrong.Golden.load(golden.save(tmp_path / "golden.safetensors"))
    torch.testing.assert_close(again["output"], golden["output"], rtol=0, atol=0)


def test_badly_conditioned_matrices_are_held_to_their_condition():
    torch.manual_seed(0)
    a = linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0] * torch.logspace(0, -5, 8)  # condition 10^5
    a, b = (a @ linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]).float(), torch.randn(8)
    golden, seen = whywrong.golden(linalg.solve, a, b), whywrong.capture(linalg.solve, a, b)
    assert float((seen["output"] - golden["output"]).norm() / golden["output"].norm()) > 1e-5, "which is large"
    assert whywrong.localise(seen, golden).first is None
    assert whywrong.localise({"input.0": a, "input.1": b, "output": seen["output"] * 1.5}, golden).first == "output"


def test_vectors_that_are_not_unique_are_noted():
    golden = whywrong.golden(low_rank, torch.randn(5, 4))
    assert "singular vectors are right with either sign: compare what is made of them" in golden.notes


def test_either_sign_of_a_vector_is_right_and_what_they_make_is_held_to_its_bound():
    a = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))

    def vectors(a):
        values, v = linalg.eigh(a + a.T)
        return {"vectors": v, "again": v * values @ v.T}

    golden, seen = whywrong.golden(vectors, a=a), vectors(a)
    turned = {"a": a, "vectors": -seen["vectors"], "again": seen["again"]}
    assert whywrong.localise(turned, golden).first is None
    made = {"a": a, "again": broken(seen["again"], 1e-4)}
    assert whywrong.localise(made, golden).first == "again"


def test_lengths_that_cpp_puts_into_new_memory_are_constants():
    x, targets = torch.randn(12, 2, 6).log_softmax(-1), torch.ones(2, 4, dtype=torch.long)
    found = whywrong.golden(lambda x: F.ctc_loss(x, targets, [12, 12], [3, 4]), x)
    torch.testing.assert_close(found["output"], F.ctc_loss(x.double(), targets, [12, 12], [3, 4]))


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (trained(lambda p: torch.optim.AdamW(p, fused=True)), "_fused_adamw_.*write an optimizer with fused=False"),
        (lambda w, x: torch.unique(x), "_unique2.* of real numbers .* write it of whole numbers"),
        (
            lambda w, x: torch.histogram(x, 4),
            r"histogram\.bin_ct at test_operations\.py:\d+ cannot be recorded; write histc",
        ),
        (
            lambda w, x: linalg.eig(x.outer(w)),
            r"linalg_eig\.default at test_operations\.py:\d+ cannot be recorded; write linalg\.eigh",
        ),
    ],
)
def test_what_is_refused_says_what_to_write_instead(run, line):
    with pytest.raises(UsageError, match=line):
        whywrong.golden(run, torch.ones(4), torch.ones(4))


def test_complex_inputs_are_refused():
    with pytest.raises(
        UsageError,
        match=r"x: expected real .*, got complex ones; give the two parts, and torch\.complex of them inside",
    ):
        whywrong.golden(lambda x: x.abs(), x=torch.ones(3, dtype=torch.complex64))


def test_nothing_that_is_allowed_writes_or_takes_more_than_numbers():
    kinds = {"Tensor", "int", "float", "complex", "bool", "number", "str", "Device", "Dict", "Any"}
    for name in ALLOWED - {"getitem"}:
        assert hasattr(aten, name), f"{name} is no operation of torch {torch.__version__}"
        for overload in getattr(aten, name).overloads():
            schema = getattr(getattr(aten, name), overload)._schema
            if not schema.is_mutable and any(str(result.type) == "Tensor" for result in schema.returns):
                for argument in schema.arguments:
                    words = set(re.findall(r"[A-Z]?[a-z]+", str(argument.type))) - {"Optional", "List"}
                    assert words <= kinds, f"{name}.{overload} takes {argument.type}"


def test_a_file_cannot_ask_for_days_of_algebra(tmp_path):
    path = whywrong.golden(linalg.inv, torch.eye(3)).save(tmp_path / "golden.safetensors")
    before, golden_module.MOST_FLOPS = golden_module.MOST_FLOPS, 25 * 27 - 1
    try:
        with pytest.raises(UsageError, match="operations in its products"):
            whywrong.Golden.load(path)
    finally:
        golden_module.MOST_FLOPS = before


def test_the_page_of_operations_is_up_to_date():
    script = runpy.run_path(str(ROOT / "tools" / "operations.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run tools/operations.py"
    listed = set().union(*(getattr(operations, table) for table in script["TITLES"]))
    assert listed == ALLOWED
