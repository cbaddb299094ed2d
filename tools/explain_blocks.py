"""How long whywrong.explain takes for a Llama with random weights, of whose blocks the outputs alone were observed.

    python -m tools.explain_blocks [--layers 2] [--width 256] [--batch 2] [--length 64] [--fault gelu] [--device cuda]

The port is the same model in float32 with one fault in its middle block. Prints what was found, the seconds of
recording, of localise and of explain, and the largest memory of the process, and of the GPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import time
from typing import Any

import torch

import whywrong

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
from transformers import LlamaConfig, LlamaForCausalLM


def _gelu(block: Any) -> None:
    block.mlp.act_fn = torch.nn.GELU()


def _eps(block: Any) -> None:
    block.post_attention_layernorm.variance_epsilon = 1e-3


def _unscaled(block: Any) -> None:
    block.self_attn.scaling = 1.0


def _transposed(block: Any) -> None:
    block.self_attn.o_proj.weight.data = block.self_attn.o_proj.weight.data.T.clone()


def _mask(block: Any) -> None:
    attend = block.self_attn.forward

    def one_more(*args: Any, attention_mask: Any, **named: Any) -> Any:
        """Each token sees the next one, too."""
        shifted = torch.cat([attention_mask[..., 1:, :], attention_mask[..., -1:, :]], -2)
        return attend(*args, attention_mask=shifted, **named)

    block.self_attn.forward = one_more


FAULTS = {"gelu": _gelu, "eps": _eps, "unscaled": _unscaled, "transposed": _transposed, "mask": _mask}
KINDS = {
    "gelu": {"function"},
    "eps": {"eps"},
    "unscaled": {"scale", "factor"},
    "transposed": {"transpose"},
    "mask": {"mask", "shift"},
}
"""The kinds that pass for each."""


def model(layers: int, width: int) -> Any:
    """A Llama for 256 tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": width, "intermediate_size": 8 * width // 3 // 16 * 16}
    heads = {"num_attention_heads": max(2, width // 64), "num_key_value_heads": max(1, width // 128)}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=layers, attn_implementation="eager")
    return LlamaForCausalLM(config).eval()


def measure(
    layers: int, width: int, batch: int, length: int, fault: str, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    """The Explanation under `found`, and seconds under `golden`, `localise` and `explain`."""
    with torch.device(device):
        right = model(layers, width)
    port = copy.deepcopy(right)
    FAULTS[fault](port.model.layers[layers // 2])
    given = {"input_ids": torch.randint(0, 256, (batch, length), device=device), "use_cache": False}
    begun = time.perf_counter()
    with torch.no_grad():
        golden = whywrong.golden(right, **given)
        seen = whywrong.capture(port, **given)
    blocks = [f"model.layers.{k}" for k in range(layers)]
    kept = [name for name in seen.names if name in (*golden.inputs, *blocks)]
    weights = dict(right.named_parameters())
    observed = whywrong.Trace({name: weights.get(name, seen[name]) for name in kept}, seen.about)
    del seen, port  # other steps that were observed stay in memory no longer
    times = {"golden": time.perf_counter() - begun}
    begun = time.perf_counter()
    report = whywrong.localise(observed, golden)
    times["localise"] = time.perf_counter() - begun
    begun = time.perf_counter()
    found = whywrong.explain(observed, golden, report=report, **options)
    times["explain"] = time.perf_counter() - begun
    return {"found": found, "block": blocks[layers // 2]} | times


def options(description: str | None, device: str, **sizes: int) -> dict[str, Any]:
    """What a command line says, with the usual device and sizes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--fault", choices=FAULTS, default="gelu")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", default=device)
    return vars(parser.parse_args())


def memory(device: str) -> str:
    """The largest memory of the process, and of the GPU, in words."""
    host = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB on the host"
    return host if device == "cpu" else f"{host}, {torch.cuda.max_memory_allocated() / 2**30:.2f} on the GPU"


def main() -> None:
    given = options(__doc__, "cpu", layers=2, width=256, batch=2, length=64)
    row = measure(**given)
    print(row.pop("found"))
    print(", ".join(f"{key} {value:.1f} s" for key, value in row.items() if key != "block"))
    print(memory(given["device"]))


if __name__ == "__main__":
    main()
