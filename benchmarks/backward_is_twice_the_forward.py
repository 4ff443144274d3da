"""Claim: forward and backward together take at most 3.6 times the forward pass; 3 is what the FLOPs alone would say.

8 heads, D = 64, 256 features, float32, 16,384 and 65,536 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

import linattn
from measuring import favor, forward_and_backward, ratios, record, seconds, spread, tokens, verified


def main() -> None:
    """Verify, time, record."""
    feature_map = favor()
    for is_causal in (False, True):
        error = verified(feature_map, is_causal=is_causal)

        def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = is_causal) -> Tensor:
            return linattn.linear_attention(q, k, v, feature_map, is_causal=is_causal)

        for length in (16_384, 65_536):
            inputs = tokens(length, gradients=True)

            def forward(inputs: list[Tensor] = inputs, attend=attend) -> object:
                with torch.no_grad():
                    return attend(*inputs)

            both = forward_and_backward(attend, inputs, inputs[0].detach())
            found = seconds({"forward": forward, "both": both}, repeats=7)
            record(
                f"forward and backward over forward, {'causal' if is_causal else 'bidirectional'}, {length:,} tokens",
                figure=ratios(found["both"], found["forward"]),
                unit="×",
                bound="<= 3.6",
                length=length,
                error=error,
                seconds={name: spread(samples) for name, samples in found.items()},
            )


if __name__ == "__main__":
    main()
