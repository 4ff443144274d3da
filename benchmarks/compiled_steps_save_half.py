"""Claim: compiled code takes a decoding step in less than 0.6 of plain torch's time.

8 heads, D = 64, 256 features, float32, one token at a time through `linear_attention_with_state`, with one query head
for each key/value head and with four: checks, memory for the new state and Python included. In some processes the C
library hands a state's memory back to the system at every step; both take 0.1 ms longer there, and the ratio is 0.7.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import linattn
from decoding_is_flat import single
from linattn.feature_maps import FeatureMap
from measuring import HEAD_DIM, HEADS, favor, ratios, record, relative_error, require, seconds, spread, textbook, tokens

LENGTH, REPEATS = 300, 15


def stream(steps: list[tuple[Tensor, ...]], feature_map: FeatureMap, backend: str) -> Tensor:
    """The rows of a stream."""
    state, outs = None, []
    with torch.no_grad():
        for step in steps:
            out, state = linattn.linear_attention_with_state(
                *step, feature_map, state, enable_gqa=True, backend=backend
            )
            outs.append(out)
    return torch.cat(outs, 2)


def measure(groups: int) -> None:
    """The ratio for so many query heads for each key/value head."""
    feature_map, (_, key, value) = favor(), tokens(LENGTH)
    query = torch.randn(1, groups * HEADS, LENGTH, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    pairs = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    whole, steps = textbook(query.double(), *pairs, feature_map, is_causal=True), single((query, key, value))
    error = relative_error(stream(steps, feature_map, "compiled"), whole)
    require("compiled steps", error, 1e-4)
    contenders = {name: partial(stream, steps, feature_map, name) for name in ("compiled", "blocked")}
    found = seconds(contenders, repeats=REPEATS)
    heads = f"{groups} query head{'s' * (groups > 1)}"
    record(
        f"a compiled decoding step over one of plain torch, {heads} for each key head",
        figure=ratios(found["compiled"], found["blocked"]),
        unit="×",
        bound="<= 0.6",
        seconds={name: spread([x / LENGTH for x in samples]) for name, samples in found.items()},
        error=error,
    )


def main() -> None:
    """Both."""
    for groups in (1, 4):
        measure(groups)


if __name__ == "__main__":
    main()
