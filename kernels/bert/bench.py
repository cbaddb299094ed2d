"""`labkit bench bert`: the fused embedding beside Hugging Face's and a plain one.

Embedding: batch x length tokens, hidden 768, vocabulary 30522; dropout 0.1 in every provider. Hugging Face's looks up a
position and a type for each token; the plain one, compiled, adds one table of positions and one row of types to all
sequences, which is all that this input needs, and so does ours. Ids are sampled by Zipf's law, which the words of a
text follow; and once uniformly, where hardly a row of the token table is in a cache again. The lower bound counts what
must move: forward the rows of the token table that occur and the result, and backward the gradient of the result,
those rows again, and the gradient of the whole token table; ids, positions and types besides. What an element's
dropout did is read off the result (0 where it was dropped), so that a provider's own mask is what it is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from kernels.bert import baselines, embedding, golden
from kernels.bert.model import BERT, Config
from labkit.bench.timing import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.bounds import confidence
from whywrong.comparing.comparison import Comparison, compare
from whywrong.comparing.precision import UNIT_ROUNDOFF

Tensor = torch.Tensor
ZIPF, UNIFORM = "Zipf", "uniform"
SIZES = ((32, 512, ZIPF), (256, 512, ZIPF), (256, 512, UNIFORM))
CONFIG = Config(layers=1)
DROPOUT = 0.1
TABLES = ("tokens", "positions", "types", "gain", "shift")


def cases(device: Device) -> Iterator[Case]:
    """A case a size, type and mode."""
    device.needs_cuda("labkit bench bert", "the interpreter's times are none")
    for batch, length, law in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            given = _sampled(batch, length, dtype, law)
            for mode in ("forward", "full"):
                providers = [*_providers(given, mode)]
                yield Case(
                    kernel="bert_embedding",
                    mode=mode,
                    x_name="batch x length, ids, type",
                    x_value=f"{batch} x {length}, {law}, {str(dtype).removeprefix('torch.')}",
                    providers=providers,
                    bytes=_bytes(given, mode),
                    operations=0,
                    memory=True,
                )
            del given, providers
            torch.cuda.empty_cache()


def _sampled(batch: int, length: int, dtype: torch.dtype, law: str) -> dict[str, Tensor]:
    """ids [B, S]; the five tables and the gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = {
        "tokens": (CONFIG.vocabulary, CONFIG.hidden), "positions": (CONFIG.positions, CONFIG.hidden),
        "types": (CONFIG.types, CONFIG.hidden), "gain": (CONFIG.hidden,), "shift": (CONFIG.hidden,),
        "dout": (batch, length, CONFIG.hidden),
    }  # fmt: skip
    found = {name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()}
    found = {name: tensor.to("cuda", dtype) for name, tensor in found.items()}
    share = 1.0 / np.arange(1, CONFIG.vocabulary) if law == ZIPF else np.ones(CONFIG.vocabulary - 1)
    ids = 1 + rng.permutation(CONFIG.vocabulary - 1)[rng.choice(len(share), (batch, length), p=share / share.sum())]
    return found | {"ids": torch.from_numpy(ids).cuda()}


def _bytes(given: dict[str, Tensor], mode: str) -> int:
    ids, dout = given["ids"], given["dout"]
    row = CONFIG.hidden * dout.element_size()
    occur = len(ids.unique())
    tables = (ids.shape[1] + CONFIG.types + 2) * row
    forward = dout.nbytes + occur * row + ids.nbytes + tables
    backward = dout.nbytes + (occur + CONFIG.vocabulary) * row + ids.nbytes + 2 * tables
    return forward if mode == "forward" else forward + backward


Run = Callable[[], Tensor]


def _ours(given: dict[str, Tensor], leaves: list[Tensor]) -> Run:
    return lambda: embedding.embed(given["ids"], None, *leaves, eps=BERT.eps, dropout=DROPOUT, padding=CONFIG.padding)


def _theirs(compiled: bool) -> Callable[[dict[str, Tensor], list[Tensor]], Run]:
    def make(given: dict[str, Tensor], leaves: list[Tensor]) -> Run:
        module = golden.hugging_face(CONFIG).bert.embeddings.to("cuda").train()
        tokens, positions, types, gain, shift = leaves
        module.word_embeddings.weight, module.position_embeddings.weight = tokens, positions
        module.token_type_embeddings.weight, module.LayerNorm.weight, module.LayerNorm.bias = types, gain, shift
        called = torch.compile(module, dynamic=False) if compiled else module
        return lambda: called(given["ids"])

    return make


def _sum(ids: Tensor, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
    return functional.embedding(ids, tokens, CONFIG.padding) + positions[: ids.shape[1]] + types[0]


def _plain(mode: str | None = None) -> Callable[[dict[str, Tensor], list[Tensor]], Run]:
    def make(given: dict[str, Tensor], leaves: list[Tensor]) -> Run:
        def layer(ids: Tensor, tokens: Tensor, positions: Tensor, types: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
            x = _sum(ids, tokens, positions, types)
            return functional.dropout(functional.layer_norm(x, gain.shape, gain, shift, BERT.eps), DROPOUT)

        called = torch.compile(layer, dynamic=False, mode=mode)
        return lambda: called(given["ids"], *leaves)

    return make


def _with(library: Callable[[], baselines.LayerNorm]) -> Callable[[dict[str, Tensor], list[Tensor]], Run]:
    """PyTorch's embedding and dropout, compiled, around a library's layer norm."""

    def make(given: dict[str, Tensor], leaves: list[Tensor]) -> Run:
        norm, ids, (*tables, gain, shift) = library(), given["ids"], leaves
        before, after = torch.compile(_sum, dynamic=False), torch.compile(functional.dropout, dynamic=False)
        return lambda: after(norm(before(ids, *tables).flatten(0, 1), gain, shift, BERT.eps), DROPOUT).unflatten(
            0, ids.shape
        )

    return make


PROVIDERS = {
    "kernels.bert": _ours,
    "hugging face eager": _theirs(False),
    "hugging face compiled": _theirs(True),
    "plain compiled": _plain(),
    "plain, max-autotune": _plain("max-autotune-no-cudagraphs"),
    "plain, Liger's layer norm": _with(baselines.liger),
    "plain, cuDNN's layer norm": _with(baselines.cudnn),
}


def _providers(given: dict[str, Tensor], mode: str) -> Iterator[Provider]:
    for name, make in PROVIDERS.items():
        try:
            yield _provider(name, make, given, mode)
        except ModuleNotFoundError as missing:
            print(f"  left out: {name}: {missing}")


def _provider(name: str, make: Callable[..., Run], given: dict[str, Tensor], mode: str) -> Provider:
    leaves = [torch.nn.Parameter(given[table].clone()) for table in TABLES]
    called = make(given, leaves)
    facts: dict[str, float] = {}

    def run() -> None:
        out = called()
        if mode == "full":
            torch.autograd.grad(out, leaves, given["dout"])

    def check() -> Comparison:
        torch.manual_seed(0)
        out = called()
        names = ["out", *TABLES] if mode == "full" else ["out"]
        found = [out.detach(), *torch.autograd.grad(out, leaves, given["dout"])][: len(names)]
        rate = embedding.rounded(DROPOUT) if make is _ours else DROPOUT
        right, allowed = exact(given, out.detach(), len(names), rate)
        kept = float((out.detach() != 0).double().mean())
        facts["kept"] = kept
        if mode == "full":
            facts["repeats_identical"] = float(_identical(called, leaves, given["dout"]))
        errors = [_rms(a.double() - b) / _rms(b) for a, b in zip(found, right, strict=True)]
        facts.update({f"rms_error_{one}": error for one, error in zip(names, errors, strict=True)})
        count = given["dout"].numel()
        scatter = confidence(1, 1) * (DROPOUT * (1 - DROPOUT) / count) ** 0.5 + 2.0**-17
        measured, wanted = np.array([*errors, kept]), np.array([0.0] * len(errors) + [1.0 - DROPOUT])
        return compare(measured, wanted, bound=torch.tensor([*allowed, scatter]))

    return Provider(name, run, lambda: None, check, lambda: facts)


def exact(given: dict[str, Tensor], out: Tensor, count: int, rate: float) -> tuple[list[Tensor], list[float]]:
    """In float64, with the mask of `out`: the result and the gradients of the tables, and what RMS error each may have.

    What is stored is rounded once, a sum over tokens in float32 of what is not rounded at all: the result and a
    gradient may be off by two roundings of their type, and by as many float32 roundings, of random signs, as the
    longest sum has terms.
    """
    tables = [given[table].double().requires_grad_() for table in TABLES]
    tokens, positions, types, gain, shift = tables
    x = torch.nn.functional.embedding(given["ids"], tokens, padding_idx=CONFIG.padding)
    x = x + positions[: given["ids"].shape[1]] + types[0]
    y = torch.nn.functional.layer_norm(x, (CONFIG.hidden,), gain, shift, BERT.eps)
    y = y * (out != 0) / (1.0 - rate)
    grads = torch.autograd.grad(y, tables, given["dout"].double()) if count > 1 else ()
    u = UNIT_ROUNDOFF[str(given["dout"].dtype).removeprefix("torch.")]
    longest = (CONFIG.hidden, *[given["ids"].numel()] * 5)
    return [y.detach(), *grads][:count], [2 * u + UNIT_ROUNDOFF["float32"] * n**0.5 for n in longest[:count]]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _identical(called: Run, leaves: list[Tensor], dout: Tensor, times: int = 20) -> bool:
    def once() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        out = called()
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    first = once()
    return all(all(torch.equal(a, b) for a, b in zip(first, once(), strict=True)) for _ in range(times - 1))
