"""Claim: a decoding step costs the same at token 100,000 as at token 1; exact attention at 16,384 takes twice as long.

8 heads, D = 64, 256 features, float32, one token at a time through `linear_attention_with_state`, in plain torch;
compiled_steps_save_half.py has the same in compiled code.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

import linattn
from linattn.attention import State
from linattn.feature_maps import FeatureMap
from measuring import favor, ratios, record, relative_error, require, seconds, spread, textbook, tokens

STEPS, WINDOW, CACHED = 100_000, 2_000, 16_384
REPEATS = 200

Tokens = tuple[Tensor, ...]


def single(inputs: Tokens) -> list[Tokens]:
    """Queries, keys and values one by one."""
    return [tuple(x[:, :, i : i + 1].contiguous() for x in inputs) for i in range(inputs[0].shape[2])]


def verified_steps(steps: list[Tokens], feature_map: FeatureMap, whole: Tensor) -> float:
    """The error of single steps against one pass over all of them; refuses a wrong result."""
    state, outs = None, []
    with torch.no_grad():
        for step in steps:
            out, state = linattn.linear_attention_with_state(*step, feature_map, state, backend="blocked")
            outs.append(out)
    error = relative_error(torch.cat(outs, 2), whole)
    require("steps", error, 1e-4)
    return error


def beside_exact_attention(step: Tokens, feature_map: FeatureMap, state: State | None) -> dict[str, list[float]]:
    """Seconds of a step, and of torch's own over a cache that is full."""
    query, key, value = step
    cache = [torch.randn(*x.shape[:2], CACHED, x.shape[-1]) for x in (key, value)]
    contenders = {
        "linattn": lambda: linattn.linear_attention_with_state(*step, feature_map, state, backend="blocked"),
        "exact": lambda: torch.nn.functional.scaled_dot_product_attention(query, *cache),
    }
    with torch.no_grad():
        return seconds(contenders, repeats=REPEATS)


def main() -> None:
    """Verify, time, record."""
    feature_map, length = favor(), 300
    query, key, value = tokens(length)
    whole = textbook(query.double(), key.double(), value.double(), feature_map, is_causal=True)
    steps = single((query, key, value))
    error = verified_steps(steps, feature_map, whole)
    state, samples = None, []
    with torch.no_grad():
        for index in range(STEPS):
            start = time.perf_counter()
            _, state = linattn.linear_attention_with_state(
                *steps[index % length], feature_map, state, backend="blocked"
            )
            samples.append(time.perf_counter() - start)
    first, last = (statistics.median(samples[part]) for part in (slice(10, 10 + WINDOW), slice(-WINDOW, None)))
    found = beside_exact_attention(steps[0], feature_map, state)
    record(
        f"a decoding step over one of exact attention with {CACHED:,} cached tokens",
        figure=ratios(found["linattn"], found["exact"]),
        unit="×",
        bound="<= 0.5",
        seconds={name: spread(times) for name, times in found.items()},
        error=error,
    )
    record(
        "a decoding step at token 100,000 over one at token 1",
        figure=last / first,
        unit="×",
        bound="<= 1.1",
        error=error,
        seconds={"first": first, "last": last},
    )


if __name__ == "__main__":
    main()
