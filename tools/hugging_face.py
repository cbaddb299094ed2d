"""How the check does on models of `transformers` that nobody tuned it to: small configs, random weights.

A right case is a model in one dtype, captured as it runs and held against a golden recorded from the same module: it
must not be flagged. A broken case is the same model with one module's forward replaced by a faulty one: that module
must be identified. As a command it writes one CSV row a case::

    python -m tools.hugging_face OUT.csv [--dtype bfloat16,...] [--attention eager,sdpa] [--only llama,bert]
                                                [--backward] [--faults]
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

import whywrong
from whywrong.errors import UsageError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers

Tensor = torch.Tensor
Module = torch.nn.Module

VOCABULARY, BATCH, LENGTH, WIDTH, HEADS = 64, 2, 11, 32, 4
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Architecture:
    """A model's class, the fields of its small config, what it is given, and the ways of attention that it has."""

    model: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    attention: tuple[str, ...] = ("eager", "sdpa")


def _ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))


def _padded() -> dict[str, Tensor]:
    """Two sentences, the second three words shorter."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": _ids(), "attention_mask": mask}


def _text() -> dict[str, Tensor]:
    return {"input_ids": _ids()}


def _pairs() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(7)}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _image() -> dict[str, Tensor]:
    return {"pixel_values": _drawn(BATCH, 3, 16, 16)}


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "use_cache": False,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_ENCODER = {key: value for key, value in _DECODER.items() if key != "use_cache"}
_VISION = {**_ENCODER, "image_size": 16, "patch_size": 4}
_T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "use_cache": False,
}
_WHISPER = _BART | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "state_size": 8,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": HEADS,
            "n_positions": 32,
            "use_cache": False,
        },
        _text,
    ),
    "llama": Architecture("LlamaForCausalLM", _GROUPED, _padded),
    "mistral": Architecture("MistralForCausalLM", _GROUPED | {"sliding_window": 4, "head_dim": 8}, _text),
    "qwen2": Architecture("Qwen2ForCausalLM", _GROUPED, _padded),
    "qwen3": Architecture("Qwen3ForCausalLM", _GROUPED | {"head_dim": 8}, _text),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _GROUPED | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, _text
    ),
    "phi": Architecture("PhiForCausalLM", _DECODER, _text),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", _DECODER, _padded),
    "opt": Architecture(
        "OPTForCausalLM",
        {key: value for key, value in _DECODER.items() if key != "intermediate_size"}
        | {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
        _padded,
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "use_cache": False},
        _padded,
        ("eager",),
    ),
    "mixtral": Architecture("MixtralForCausalLM", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, _text),
    "mixtral_one_by_one": Architecture(
        "MixtralForCausalLM",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        _text,
    ),
    "bert": Architecture("BertModel", _ENCODER, _padded),
    "roberta": Architecture("RobertaModel", _ENCODER | {"pad_token_id": 1}, _padded),
    "albert": Architecture("AlbertModel", _ENCODER | {"embedding_size": 16}, _padded),
    "distilbert": Architecture(
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 48, "n_layers": 2, "n_heads": HEADS}
        | {"max_position_embeddings": 32},
        _padded,
    ),
    "deberta_v2": Architecture(
        "DebertaV2Model",
        _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        _padded,
        ("eager",),
    ),
    "t5": Architecture("T5ForConditionalGeneration", _T5 | _SPECIAL | {"use_cache": False}, _pairs),
    "bart": Architecture("BartModel", _BART | _SPECIAL | {"max_position_embeddings": 32}, _pairs),
    "whisper": Architecture(
        "WhisperModel",
        _WHISPER | _SPECIAL,
        lambda: {"input_features": _drawn(BATCH, 8, 16), "decoder_input_ids": _ids(7)},
    ),
    "vit": Architecture("ViTModel", _VISION, _image),
    "clip": Architecture(
        "CLIPModel",
        {"text_config": _ENCODER | {"eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 16},
        lambda: _padded() | _image(),
    ),
    "mamba": Architecture("MambaForCausalLM", _MAMBA, _text, ("none",)),
    "mamba2": Architecture(
        "Mamba2ForCausalLM", _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, _text, ("none",)
    ),
    "rwkv": Architecture(
        "RwkvForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "attention_hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "use_cache": False,
        },
        _text,
        ("none",),
    ),
}


def make(name: str, dtype: str, attention: str, **config: Any) -> Module:
    """The model in a dtype, with weights large enough that each part counts and no bias or norm is trivial.

    `config` are fields in place of those of the small config.
    """
    about = ARCHITECTURES[name]
    kind = getattr(transformers, about.model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        filled = kind.config_class(**(about.config | config))
        model = kind._from_config(filled, **({} if attention == "none" else {"attn_implementation": attention}))
        for part in model.modules():
            for key, value in part.named_parameters(recurse=False):
                _draw(part, key, value.data)
    return model.eval().to(getattr(torch, dtype))


def _draw(part: Module, name: str, weight: Tensor) -> None:
    """Matrices keep the size of what goes through them; biases are not 0, the weights of norms not 1."""
    if isinstance(part, torch.nn.Embedding):
        weight.normal_()
    elif name == "weight" and weight.ndim >= 2:
        inputs = weight.shape[0] if type(part).__name__ == "Conv1D" else weight[0].numel()
        weight.normal_(0.0, inputs**-0.5)
    elif name == "bias" or (name == "weight" and weight.ndim == 1):
        weight.add_(torch.randn_like(weight) * 0.2)
    elif weight.ndim == 3:  # experts in one tensor
        weight.normal_(0.0, weight.shape[-1] ** -0.5)


@dataclass
class Case:
    """What came of a correct model. Seconds are of the processor, which other programs do not make longer."""

    architecture: str
    dtype: str
    attention: str
    backward: bool
    accused: bool
    first: str
    words: str
    divergent: int
    steps: int
    seconds_golden: float
    seconds_capture: float
    seconds_localise: float


@dataclass
class Fault:
    """What came of a broken model. `size` is the change of the module's output, RMS, as a share of it.

    `noise` is how far the correct model's output there is from the golden's, likewise.
    """

    architecture: str
    dtype: str
    attention: str
    fault: str
    module: str
    size: float
    noise: float
    found: bool
    right: bool
    first: str
    times_the_bound: float
    words: str
    seconds_localise: float


def inputs_of(name: str, dtype: str) -> dict[str, Tensor]:
    """What the model is given, real numbers in its dtype."""
    values = ARCHITECTURES[name].inputs()
    return {key: x.to(getattr(torch, dtype)) if x.is_floating_point() else x for key, x in values.items()}


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    return run(), time.process_time() - begun


def recorded(model: Module, inputs: dict[str, Tensor], backward: bool = False) -> tuple[Any, Any, float, float]:
    """The golden and the observed of a model, and the seconds that each took."""
    with nullcontext() if backward else torch.no_grad():
        golden, first = _timed(lambda: whywrong.golden(model, **inputs))
        observed, second = _timed(lambda: whywrong.capture(model, **inputs))
    return golden, observed, first, second


def measure(name: str, dtype: str, attention: str, backward: bool, **config: Any) -> Case:
    """One right case: recorded, captured and localised. What raises an error is a case that is flagged of it."""
    seconds = [0.0, 0.0, 0.0]
    try:
        golden, observed, *seconds[:2] = recorded(
            make(name, dtype, attention, **config), inputs_of(name, dtype), backward
        )
        report, seconds[2] = _timed(lambda: whywrong.localise(observed, golden))
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Case(name, dtype, attention, backward, True, "an error", words, 0, 0, *seconds)
    first = report.first
    words = report.findings[first].words if first else ""
    count = len(report.divergent), len(report.findings)
    return Case(name, dtype, attention, backward, first is not None, first or "", words, *count, *seconds)


def ways_of(name: str) -> tuple[str, ...]:
    """The ways of attention of an architecture; ``none`` where it has no choice."""
    return ARCHITECTURES[name].attention


# Faults. Each takes a model and gives the modules that it can break, with what stands in for their forward.

Break = Callable[[Module], None]


def _wrap(part: Module, forward: Callable[..., Any]) -> None:
    """`forward(original, *args, **kwargs)` in place of a module's own forward; its parameters stay as they are."""
    original = part.forward

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return forward(original, *args, **kwargs)

    part.forward = faulty


def _linear(part: Module) -> bool:
    return isinstance(part, torch.nn.Linear) or type(part).__name__ == "Conv1D"


def _is_attention(name: str, part: Module) -> bool:
    """Whether a module is the attention itself, and not what is around it."""
    inner = any(_linear(one) for one in part.children())
    return inner and ("attention" in type(part).__name__.lower() or "attn" in name.rsplit(".", 1)[-1])


def transposed(name: str, part: Module) -> Break | None:
    """A square weight the other way round."""
    weight: Any = part.weight if _linear(part) else None
    if weight is None or weight.shape[0] != weight.shape[1]:
        return None

    def broken(one: Module) -> None:
        linear: Any = one
        weight = linear.weight if isinstance(one, torch.nn.Linear) else linear.weight.T
        _wrap(one, lambda original, x: torch.nn.functional.linear(x, weight.T, linear.bias))

    return broken


def no_bias(name: str, part: Module) -> Break | None:
    """A linear layer or a convolution without its bias."""
    if getattr(part, "bias", None) is None or not (_linear(part) or isinstance(part, torch.nn.Conv1d)):
        return None

    def broken(one: Module) -> None:
        layer: Any = one

        def forward(original: Any, x: Tensor) -> Tensor:
            if isinstance(one, torch.nn.Conv1d):
                return one._conv_forward(x, one.weight, None)
            weight = layer.weight if isinstance(one, torch.nn.Linear) else layer.weight.T
            return torch.nn.functional.linear(x, weight)

        _wrap(one, forward)

    return broken


def epsilon(name: str, part: Module) -> Break | None:
    """A norm with 1e-3 in place of its eps."""
    place = next((key for key in ("eps", "variance_epsilon") if isinstance(getattr(part, key, None), float)), None)
    return (lambda one: setattr(one, place, 1e-3)) if place is not None else None


_GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "exact": lambda x: torch.nn.functional.gelu(x),
    "tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def gelu(name: str, part: Module) -> Break | None:
    """The exact GELU in place of an approximation, or the tanh approximation in place of the exact one."""
    kind = type(part).__name__
    if "GELU" not in kind.upper():
        return None
    other = _GELU["tanh" if kind in ("GELUActivation", "GELU") else "exact"]
    return lambda one: _wrap(one, lambda original, x: other(x))


def mask_off_by_one(name: str, part: Module) -> Break | None:
    """Attention sees one key more than the mask allows."""
    if not _is_attention(name, part):
        return None

    def shifted(mask: Any) -> Any:
        if not isinstance(mask, Tensor) or mask.ndim < 3:
            return mask
        return torch.cat([mask[..., :1], mask[..., :-1]], -1)

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        changed = {key: shifted(x) if "mask" in key and "head" not in key else x for key, x in kwargs.items()}
        given = [args[0], *(shifted(x) if _looks_like_mask(x) else x for x in args[1:])] if args else []
        return original(*given, **changed)

    return lambda one: _wrap(one, forward)


def _looks_like_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 4 and (not x.is_floating_point() or bool((x <= 0).all()))


def scale(name: str, part: Module) -> Break | None:
    """Scores scaled by 10% too much."""
    for key in ("scaling", "scale", "inv_norm_factor"):
        if isinstance(value := getattr(part, key, None), float) and any(_linear(one) for one in part.children()):
            return lambda one, key=key, value=value: setattr(one, key, 1.1 * value)  # type: ignore[misc]
    return None


_QUERY = ("q_proj", "query", "query_proj", "q_lin", "q", "query_key_value", "c_attn")


def head_of_zeros(name: str, part: Module) -> Break | None:
    """The second head's rows of a projection are zero."""
    if name.rsplit(".", 1)[-1] not in _QUERY or not _linear(part):
        return None

    def forward(original: Any, x: Tensor) -> Tensor:
        y = original(x).clone()
        y[..., WIDTH // HEADS : 2 * WIDTH // HEADS] = 0.0
        return y

    return lambda one: _wrap(one, forward)


def positions_off_by_one(name: str, part: Module) -> Break | None:
    """Rotary or learned positions that start at 1."""
    last = name.rsplit(".", 1)[-1]
    if "rotary" in last and "Rotary" in type(part).__name__:
        return lambda one: _wrap(one, _later)
    if last in ("wpe", "position_embeddings", "position_embedding") and isinstance(part, torch.nn.Embedding):
        return lambda one: _wrap(one, lambda original, ids: original((ids + 1) % one.num_embeddings))
    return None


def _later(original: Any, x: Tensor, position_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    return original(x, position_ids + 1 if position_ids is not None else None, *args, **kwargs)


def no_residual(name: str, part: Module) -> Break | None:
    """The last residual of a layer is left out: what its feed-forward part gives is all."""
    if type(part).__name__ in ("BertOutput", "RobertaOutput"):
        return lambda one: _wrap(one, lambda original, x, before: original(x, torch.zeros_like(before)))
    inner = next((key for key in ("mlp", "feed_forward", "block_sparse_moe", "mixer") if hasattr(part, key)), None)
    if inner is None or not any(key.isdigit() for key in name.rsplit(".", 1)[-1:]):
        return None

    def broken(one: Module) -> None:
        results: list[Tensor] = []
        below = getattr(one, inner)

        def keeps(original: Any, *args: Any, **kwargs: Any) -> Any:
            results.append(original(*args, **kwargs))
            return results[-1]

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            output, last = original(*args, **kwargs), results.pop()
            last = last[0] if isinstance(last, tuple) else last
            return (last, *output[1:]) if isinstance(output, tuple) else last

        _wrap(below, keeps)
        _wrap(one, forward)

    return broken


FAULTS: dict[str, Callable[[str, Module], Break | None]] = {
    "weight transposed": transposed,
    "bias left out": no_bias,
    "eps 1e-3": epsilon,
    "the other GELU": gelu,
    "mask off by one": mask_off_by_one,
    "scale 10% off": scale,
    "a head of zeros": head_of_zeros,
    "positions off by one": positions_off_by_one,
    "residual left out": no_residual,
}


def places(model: Module, fault: str) -> list[str]:
    """The modules that a fault can break."""
    return [name for name, part in model.named_modules() if FAULTS[fault](name, part) is not None]


def broken(model: Module, fault: str, place: str) -> Module:
    """A copy of a model with one module broken."""
    copied = copy.deepcopy(model)
    part = copied.get_submodule(place)
    way = FAULTS[fault](place, part)
    assert way is not None
    way(part)
    return copied


def belongs(step: str | None, module: str) -> bool:
    """Whether a step is a module's output, or lies inside it."""
    return step is not None and (step.split("#")[0] == module or step.startswith((f"{module}.", f"{module}/")))


def changed(observed: Any, right: Any, module: str) -> str | None:
    """The output of a broken module that has changed most; else the first step that has; None if none has."""
    names = [name for name in right.names if name in observed and right[name].is_floating_point()]
    moved = {name: far for name in names if (far := distance(observed[name], right[name])) > 0.0}
    last = [name for name in moved if name.split("#")[0] in (module, f"{module}.0", f"{module}.1")]
    return max(last, key=lambda name: moved[name]) if last else next(iter(moved), None)


def distance(a: Tensor, b: Tensor) -> float:
    """RMS of the difference, as a share of b."""
    if a.shape != b.shape:
        return 1.0
    a, b = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def times_the_bound(finding: Any) -> float:
    """How far a finding is beyond what rounding may do."""
    values = [getattr(part, "bound_used", 0.0) for part in (finding.own or finding.total,) if part is not None]
    values += [finding.structure.worst.share] if finding.structure is not None and not finding.structure.ok else []
    return max(values, default=0.0)


def measure_faults(
    name: str, dtype: str, attention: str, kinds: tuple[str, ...] = tuple(FAULTS), most: int = 1
) -> Iterator[Fault]:
    """Each fault at up to `most` of the modules that it can break, forward only. What changes nothing is left out."""
    model, inputs = make(name, dtype, attention), inputs_of(name, dtype)
    try:
        golden, right, _, _ = recorded(model, inputs)
    except UsageError:  # among the right cases, this is an false positives
        return
    for kind in kinds:
        names = places(model, kind)
        done = 0
        for place in names[len(names) // 2 :] + names[: len(names) // 2]:  # one in the middle first
            with torch.no_grad():
                observed = whywrong.capture(broken(model, kind, place), **inputs)
            if (output := changed(observed, right, place)) is None:
                continue
            size = distance(observed[output], right[output])
            noise = distance(right[output], golden[output]) if output in golden else 0.0
            report, seconds = _timed(partial(whywrong.localise, observed, golden))
            first = report.first
            words = report.findings[first].words if first else ""
            share = times_the_bound(report.findings[first]) if first else 0.0
            where = belongs(first, place)
            outcome = size, noise, first is not None, where, first or "", share, words, seconds
            yield Fault(name, dtype, attention, kind, place, *outcome)
            done += 1
            if done == most:
                break


def write(path: Path, rows: list[Any], kind: type) -> None:
    """One row a case."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [item.name for item in fields(kind)])
        table.writeheader()
        for row in rows:
            values = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in asdict(row).items()}
            table.writerow(values)


def cases(dtypes: tuple[str, ...], only: tuple[str, ...], attention: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Architecture, dtype and attention of each case."""
    for name in only or tuple(ARCHITECTURES):
        for way in ways_of(name):
            if way == "none" or way in attention:
                yield from ((name, dtype, way) for dtype in dtypes)


def main() -> None:
    """Measure and write, a line a case as it is done."""
    parser = argparse.ArgumentParser(description="How whywrong checks models of transformers.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default=",".join(DTYPES))
    parser.add_argument("--attention", default="eager,sdpa")
    parser.add_argument("--only", default="")
    parser.add_argument("--backward", action="store_true", help="right cases with gradients, in place of without")
    parser.add_argument("--faults", action="store_true", help="broken cases, in place of right ones")
    given = parser.parse_args()
    split = {key: tuple(x for x in getattr(given, key).split(",") if x) for key in ("dtype", "attention", "only")}
    rows: list[Any] = []
    for case in cases(split["dtype"], split["only"], split["attention"]):
        made = measure_faults(*case) if given.faults else iter([measure(*case, given.backward)])
        for row in made:
            rows.append(row)
            values = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in asdict(row).values()]
            print("  ".join(values), flush=True)
            write(given.out, rows, Fault if given.faults else Case)
    if given.faults:
        print(f"{sum(r.found for r in rows)} of {len(rows)} found, {sum(r.right for r in rows)} at the correct module")
    else:
        print(f"{sum(r.accused for r in rows)} of {len(rows)} flagged")


if __name__ == "__main__":
    main()
