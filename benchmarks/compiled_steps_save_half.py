"""Claim: compiled code takes a decoding step in less than 0.6 of plain torch's time.

8 heads, D = 64, 256 features, float32, one token at a time through `linear_attention_with_state`, with one query head
for each key/value head and with four: checks, memory for the new state and Python included.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import linattn
from decoding_is_flat import single, verified_steps
from linattn.attention import State
from measuring import HEAD_DIM, HEADS, favor, ratios, record, seconds, spread, textbook, tokens

LENGTH, STEPS, REPEATS = 300, 200, 15


def main() -> None:
    """Verify, time, record."""
    feature_map, inputs = favor(), tokens(LENGTH)
    whole = textbook(*(x.double() for x in inputs), feature_map, is_causal=True)
    error = verified_steps(single(tuple(inputs)), feature_map, whole, "compiled")
    for groups in (1, 4):
        query = torch.randn(1, groups * HEADS, LENGTH, HEAD_DIM, generator=torch.Generator().manual_seed(1))
        steps = single((query, *inputs[1:]))[:STEPS]

        def stream(steps: list[tuple[Tensor, ...]] = steps, *, backend: str) -> State | None:
            state = None
            with torch.no_grad():
                for step in steps:
                    _, state = linattn.linear_attention_with_state(
                        *step, feature_map, state, enable_gqa=True, backend=backend
                    )
            return state

        contenders = {name: partial(stream, backend=name) for name in ("compiled", "blocked")}
        found = seconds(contenders, repeats=REPEATS)
        heads = f"{groups} query head{'s' * (groups > 1)}"
        record(
            f"a compiled decoding step over one of plain torch, {heads} for each key head",
            figure=ratios(found["compiled"], found["blocked"]),
            unit="×",
            bound="<= 0.6",
            seconds={name: spread([x / STEPS for x in samples]) for name, samples in found.items()},
            error=error,
        )


if __name__ == "__main__":
    main()
