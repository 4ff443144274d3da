"""Claim: to a linearized model a token costs the same time and memory after 256, 8,192 and 65,536 tokens.

A Llama with random weights, 4 layers, width 256, 8 heads on 2 key/value heads, 256 features, float32: `generate` goes
on from a cache that holds the text before. Beside it the same weights with softmax and an ordinary cache.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from linattn.hf import StateCache, linearize_
from measuring import NUM_FEATURES, ratios, record, relative_error, require, seconds, spread

LENGTHS = (256, 8_192, 65_536)
NEW_TOKENS, REPEATS, CHUNK = 16, 20, 1_024
VERIFIED_LENGTH, VERIFIED_STEPS = 2_500, 4
SIZES = {
    "vocab_size": 1_000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The linearized model and, with the same weights, the one that keeps its softmax."""
    torch.manual_seed(0)
    # No token ends a text, so that every run generates as many.
    config = LlamaConfig(**SIZES, max_position_embeddings=2 * LENGTHS[-1], eos_token_id=None, pad_token_id=0)
    exact = LlamaForCausalLM(config).eval()
    linear = copy.deepcopy(exact)
    linearize_(linear, method="FavorPlus", num_features=NUM_FEATURES)
    return linear, exact


def text(length: int) -> Tensor:
    """Random token numbers, (1, length)."""
    return torch.randint(1, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))


def read(model: LlamaForCausalLM, cache: Cache, tokens: Tensor) -> Cache:
    """The cache after these tokens, read in chunks."""
    for chunk in tokens.split(CHUNK, 1):
        model(input_ids=chunk, past_key_values=cache, logits_to_keep=1)
    return cache


def verified(model: LlamaForCausalLM, cache: Cache) -> float:
    """Relative error of the logits of single steps against one pass over the whole text; refuses a wrong result."""
    tokens = text(VERIFIED_LENGTH + VERIFIED_STEPS)
    read(model, cache, tokens[:, :VERIFIED_LENGTH])
    last = tokens[:, VERIFIED_LENGTH:].split(1, 1)
    steps = [model(input_ids=token, past_key_values=cache).logits for token in last]
    whole = model(input_ids=tokens, use_cache=False, logits_to_keep=VERIFIED_STEPS).logits
    error = relative_error(torch.cat(steps, 1), whole)
    require(type(cache).__name__, error, 1e-4)
    return error


def keys_and_values(model: LlamaForCausalLM, length: int) -> DynamicCache:
    """An ordinary cache of this length: what a step costs depends on how many keys there are, not on which."""
    cache = read(model, DynamicCache(config=model.config), text(LENGTHS[0]))
    for layer in cache.layers:
        more = length // LENGTHS[0]
        layer.keys, layer.values = (x.repeat(1, 1, more, 1) for x in (layer.keys, layer.values))
    return cache


def generation(model: LlamaForCausalLM, cache: Cache, length: int) -> Callable[[], object]:
    """A run of `generate` that leaves the cache as it was; neither kind changes its tensors in place."""
    prompt = text(length + 1)

    def run() -> None:
        fork = copy.copy(cache)
        fork.layers = [copy.copy(layer) for layer in cache.layers]
        model.generate(prompt, past_key_values=fork, max_new_tokens=NEW_TOKENS, do_sample=False)

    return run


def costs(linear: LlamaForCausalLM, exact: LlamaForCausalLM) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds for each token after each length, by states and by softmax, and the bytes of their caches."""
    few = {length: read(linear, StateCache(linear), text(length)) for length in LENGTHS}
    many = {length: keys_and_values(exact, length) for length in LENGTHS}
    runs = {f"states {length}": generation(linear, cache, length) for length, cache in few.items()}
    runs |= {f"softmax {length}": generation(exact, cache, length) for length, cache in many.items()}
    took = {name: [x / NEW_TOKENS for x in samples] for name, samples in seconds(runs, repeats=REPEATS).items()}
    size = {f"states {length}": cache.num_bytes for length, cache in few.items()}
    size |= {
        f"softmax {length}": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        for length, cache in many.items()
    }
    return took, size


@torch.no_grad()
def main() -> None:
    """Verify, time, record."""
    linear, exact = models()
    error = max(verified(linear, StateCache(linear)), verified(exact, DynamicCache(config=exact.config)))
    took, size = costs(linear, exact)
    medians = [statistics.median(took[f"states {length}"]) for length in LENGTHS]
    per_token = {name: spread(samples) for name, samples in took.items()}
    first, last = LENGTHS[0], LENGTHS[-1]
    lengths = f"{', '.join(f'{length:,}' for length in LENGTHS[:-1])} and {last:,} tokens"
    record(
        f"a token generated by a linearized Llama of width 256 after {lengths}, the dearest over the cheapest",
        figure=max(medians) / min(medians),
        unit="×",
        bound="<= 1.1",
        error=error,
        seconds=per_token,
    )
    record(
        f"bytes of the linearized Llama's cache after {last:,} tokens over those after {first:,}",
        figure=size[f"states {last}"] / size[f"states {first}"],
        unit="×",
        bound="<= 1",
        bytes=size,
    )
    record(
        f"times faster than the same Llama with softmax, a token after {last:,} tokens",
        figure=ratios(took[f"softmax {last}"], took[f"states {last}"]),
        unit="×",
        bound=">= 10",
        error=error,
        seconds=per_token,
    )
    record(
        f"times smaller than the same Llama's cache with softmax, after {last:,} tokens",
        figure=size[f"softmax {last}"] / size[f"states {last}"],
        unit="×",
        bound=">= 100",
        bytes=size,
    )


if __name__ == "__main__":
    main()
