"""Claim: faster than linear-attention-transformer 0.19.1, whose features are exponentials of each coordinate.

It normalises each side by a softmax of its own instead of each row's weights, and its causal form sees no key of the
row's own bucket of 64: both are other functions than ours, so that only time is compared. `Exponential` is our map of
the same width, R = D = 64. 8 heads, float32, forward.
"""

from __future__ import annotations

from linear_attention_transformer.linear_attention_transformer import causal_linear_attn, linear_attn

import linattn
from linattn.feature_maps import Exponential
from measuring import HEAD_DIM, ratios, record, seconds, spread, tokens, verified


def main() -> None:
    """Verify, time, record."""
    feature_map = Exponential(HEAD_DIM)
    for is_causal, length, peer in ((False, 65_536, linear_attn), (True, 16_384, causal_linear_attn)):
        error, inputs = verified(feature_map, is_causal=is_causal), tokens(length)
        found = seconds(
            {
                "linattn": lambda x=inputs, c=is_causal: linattn.linear_attention(*x, feature_map, is_causal=c),
                "linear_attention_transformer": lambda x=inputs, peer=peer: peer(*x),
            },
            repeats=5,
            rehearse=True,
        )
        record(
            f"times faster than linear-attention-transformer, {'causal' if is_causal else 'bidirectional'} forward, "
            f"{length:,} tokens",
            figure=ratios(found["linear_attention_transformer"], found["linattn"]),
            unit="×",
            bound=">= 1",
            length=length,
            error=error,
            seconds={name: spread(samples) for name, samples in found.items()},
        )


if __name__ == "__main__":
    main()
