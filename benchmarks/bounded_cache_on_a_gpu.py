"""Claim: on a GPU a bounded KV cache keeps its bytes; what a token and a prompt cost beside the full cache is measured.

    python benchmarks/bounded_cache_on_a_gpu.py [LAYERS]          needs a CUDA GPU

A decoder of Llama 3.2 1B's sizes, with 4 of its 16 layers, in bfloat16, its weights random: times and bytes do not
depend on them, and of quality nothing is said here. Verified first: a cache whose budget holds all tokens gives the
logits of the full cache, to bfloat16's rounding. Budget: the bytes of 512 bfloat16 keys and values a head and layer.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from linattn.hf import BoundedCache
from measuring import ratios, record, relative_error, require, seconds

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


def read(model: LlamaForCausalLM, ids: Tensor, cache: Any) -> Tensor:
    """The logits of a prompt's last token, when they are there."""
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    torch.cuda.synchronize()
    return logits


def step(model: LlamaForCausalLM, token: Tensor, cache: Any) -> None:
    """Some tokens, one after the other."""
    for _ in range(STEPS):
        model(token, past_key_values=cache)
    torch.cuda.synchronize()


def verify(model: LlamaForCausalLM) -> float:
    """The relative difference of logits where all tokens fit; refuses a wrong result."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 300), device="cuda")
    error = relative_error(read(model, ids, BoundedCache(model, budget=512)), read(model, ids, DynamicCache()))
    require("a cache that holds all tokens", error, 0.05)
    return error


def compare(model: LlamaForCausalLM, batch: int, length: int, **rest: Any) -> None:
    """Rows of one prompt, and of tokens after it."""
    ids = torch.randint(0, SIZES["vocab_size"], (batch, length), device="cuda")
    makers = {"full": DynamicCache, "bounded": lambda: BoundedCache(model, budget=BUDGET)}
    caches: dict[str, Any] = {}
    kept: dict[str, int] = {}
    for name, make in makers.items():
        before = torch.cuda.memory_allocated()
        caches[name] = make()
        read(model, ids, caches[name])
        kept[name] = torch.cuda.memory_allocated() - before
    prompts = {name: lambda make=make: read(model, ids, make()) for name, make in makers.items()}
    tokens = {name: lambda cache=cache: step(model, ids[:, :1], cache) for name, cache in caches.items()}
    prefill, timed = (seconds(runs, repeats=repeats) for runs, repeats in ((prompts, 1), (tokens, REPEATS)))
    shape = {"texts": batch, "length": length, "budget": BUDGET, **rest}
    for name, found in timed.items():
        shape[f"{name}: tokens/s"] = round(batch * STEPS / median(found), 1)
        shape[f"{name}: prefill seconds"] = round(prefill[name][0], 3)
        shape[f"{name}: bytes"] = kept[name]
    figure = ratios(timed["bounded"], timed["full"])
    record(f"a token, bounded over full, {batch} texts", figure=figure, unit="×", bound="<= 1", **shape)
    figure = ratios(prefill["bounded"], prefill["full"])
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
    for batch, length in SHAPES:
        compare(model, batch, length, **rest)


if __name__ == "__main__":
    main()
