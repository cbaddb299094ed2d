"""Find and explain a fault in a model that is too large to be in memory with its golden: one block after the other.

    python -m tools.large_model [--blocks 32] [--width 4096] [--tokens 2048] [--at 17] [--fault gelu] [--device cuda]

The model is a Llama of random weights in bfloat16, and its port is the same with a fault in one block. Each block of
the port is captured, on what the port's block before it gave, and checked with the golden of its own reference on the
same input: the weights of one block at a time are in float64. Prints a line a block up to the first wrong one, what
explains that, seconds, and the largest memory.
"""

from __future__ import annotations

import copy
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

import whywrong
from tools.explain_blocks import FAULTS, memory, options
from whywrong.checking.findings import Localisation
from whywrong.process_state import temporarily

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
from transformers import LlamaConfig, LlamaForCausalLM

Tensor = torch.Tensor


def model(blocks: int, width: int) -> Any:
    """A Llama of the 7B's proportions, bfloat16, on torch's default device."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32000, "hidden_size": width, "intermediate_size": 43 * width // 16 // 16 * 16}
    heads = max(1, width // 128)
    config = LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=blocks,
        attn_implementation="eager",
        dtype=torch.bfloat16,
    )
    with temporarily(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16):
        return LlamaForCausalLM(config).eval()


def walk(right: Any, at: int, fault: str, tokens: Tensor) -> Iterator[tuple[str, Localisation, Any, Any]]:
    """Of each block, and of what follows them, its name, what localise finds, its capture and its golden.

    right: a Llama. Its port has `fault` in block `at`; tokens: whole numbers [batch, tokens].
    """
    x = right.model.embed_tokens(tokens)
    n = x.shape[1]
    place = torch.arange(n, device=x.device)[None]
    mask = torch.full((n, n), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)[None, None]
    with_each = {"attention_mask": mask, "position_embeddings": right.model.rotary_emb(x, place)}
    for number, block in enumerate(right.model.layers):
        port = block
        if number == at:
            port = copy.deepcopy(block)
            FAULTS[fault](port)
        seen = whywrong.capture(port, x, **with_each)
        golden = whywrong.golden(block, x, **with_each)
        yield f"block {number}", whywrong.localise(seen, golden), seen, golden
        x = seen["output"]
    head = torch.nn.Sequential(right.model.norm, right.lm_head)
    seen, golden = whywrong.capture(head, x), whywrong.golden(head, x)
    yield "norm and head", whywrong.localise(seen, golden), seen, golden


def main() -> None:
    given = Namespace(**options(__doc__, "cuda", blocks=32, width=4096, tokens=2048, at=17))
    begun = last = time.perf_counter()
    with torch.no_grad():
        with torch.device(given.device):
            right = model(given.blocks, given.width)
            tokens = torch.randint(0, 32000, (1, given.tokens))
        print(f"{sum(x.numel() for x in right.parameters()) / 1e9:.2f} billion parameters", flush=True)
        for name, report, seen, golden in walk(right, given.at, given.fault, tokens):
            now = time.perf_counter()
            wrong = f"first wrong step {report.first}" if report.first else "ok"
            print(f"{name}: {wrong}, {len(report.findings)} steps, {now - last:.1f} s", flush=True)
            if report.first:
                print(whywrong.explain(seen, golden, report=report, seconds=given.seconds))
                print(f"explained in {time.perf_counter() - now:.1f} s", flush=True)
                break
            last = now
    print(f"{time.perf_counter() - begun:.0f} s, {memory(given.device)}")


if __name__ == "__main__":
    main()
