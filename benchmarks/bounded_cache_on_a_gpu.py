"""Claim: on a GPU a bounded KV cache keeps its bytes; what a token and a prompt cost beside the full cache is measured.

    python benchmarks/bounded_cache_on_a_gpu.py [LAYERS]          needs a CUDA GPU

A decoder of Llama 3.2 1B's sizes, with 4 of its 16 layers, in bfloat16, its weights random: times and bytes do not
depend on them, and of quality nothing is said here. Verified first: a cache whose budget holds all tokens gives the
logits of the full cache, to bfloat16's rounding. Budget: the bytes of 512 bfloat16 keys and values a head and layer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from linattn.hf import BoundedCache
from measuring import ratios, record, relative_error, require

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 2**17,
}
LAYERS, BUDGET, STEPS, REPEATS = 4, 512, 8, 3
# Texts at once, and their tokens.
SHAPES = ((1, 4096), (16, 4096))


def model_of(num_layers: int) -> LlamaForCausalLM:
    """Random weights on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers)).to(torch.bfloat16)
    return model.eval()


def seconds(run: Callable[[], object]) -> float:
    """Of one run, the GPU's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def read(model: LlamaForCausalLM, ids: Tensor, cache: Any) -> Tensor:
    """The logits of a prompt's last token."""
    return model(ids, past_key_values=cache, logits_to_keep=1).logits


def step(model: LlamaForCausalLM, token: Tensor, cache: Any) -> None:
    """Some tokens, one after the other."""
    for _ in range(STEPS):
        model(token, past_key_values=cache)


def verify(model: LlamaForCausalLM) -> float:
    """The relative difference of logits where all tokens fit; refuses a wrong result."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 300), device="cuda")
    error = relative_error(read(model, ids, BoundedCache(model, budget=512)), read(model, ids, DynamicCache()))
    require("a cache that holds all tokens", error, 0.05)
    return error


def compare(model: LlamaForCausalLM, batch: int, length: int, **rest: Any) -> None:
    """Rows of one prompt, and of tokens after it."""
    ids = torch.randint(0, SIZES["vocab_size"], (batch, length), device="cuda")
    caches: dict[str, Any] = {"full": DynamicCache(), "bounded": BoundedCache(model, budget=BUDGET)}
    prefill: dict[str, float] = {}
    kept: dict[str, int] = {}
    for name, cache in caches.items():
        before = torch.cuda.memory_allocated()
        prefill[name] = seconds(lambda cache=cache: read(model, ids, cache))
        kept[name] = torch.cuda.memory_allocated() - before
    token, timed = ids[:, :1], {name: [] for name in caches}
    for _ in range(REPEATS):
        for name, cache in caches.items():
            timed[name].append(seconds(lambda cache=cache: step(model, token, cache)) / STEPS)
    shape = {"texts": batch, "length": length, "budget": BUDGET, **rest}
    for name, found in timed.items():
        shape[f"{name}: tokens/s"] = round(batch / sorted(found)[len(found) // 2], 1)
        shape[f"{name}: prefill seconds"] = round(prefill[name], 3)
        shape[f"{name}: bytes"] = kept[name]
    figure = ratios(timed["bounded"], timed["full"])
    record(f"a token, bounded over full, {batch} texts", figure=figure, unit="×", bound="<= 1", **shape)
    figure = prefill["bounded"] / prefill["full"]
    record(f"a prompt, bounded over full, {batch} texts", figure=figure, unit="×", bound="<= 1.15", **shape)
    figure = kept["bounded"] / kept["full"]
    record(f"bytes, bounded over full, {batch} texts", figure=figure, unit="×", bound="<= 0.2", **shape)


@torch.no_grad()
def main() -> None:
    """Verify, time, record."""
    if not torch.cuda.is_available():
        sys.exit("bounded_cache_on_a_gpu measures a CUDA GPU, and torch sees none; run it on a machine that has one")
    model = model_of(int(sys.argv[1]) if len(sys.argv) > 1 else LAYERS)
    rest: dict[str, Any] = {"error": verify(model), "gpu": torch.cuda.get_device_name()}
    # Once unmeasured: what is compiled or tuned at first.
    read(model, torch.zeros(1, 600, dtype=torch.long, device="cuda"), BoundedCache(model, budget=BUDGET))
    for batch, length in SHAPES:
        compare(model, batch, length, **rest)


if __name__ == "__main__":
    main()
