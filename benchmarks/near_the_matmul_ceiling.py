"""Claim: the forward pass runs at half and more of the rate of torch's own large matrix product, timed in the same run.

Bidirectional FLOPs per token and head are 8·D·R; causal ones 8·D·R + 2·128·(R + D), whatever block is used. 8 heads,
D = 64, float32.
"""

from __future__ import annotations

import linattn
from measuring import HEAD_DIM, HEADS, favor, record, seconds, sgemm, share_of_ceiling, spread, tokens, verified

# Length, features, causal, bound.
CASES = (
    (16_384, 256, False, 0.50),
    (65_536, 256, False, 0.50),
    (16_384, 256, True, 0.45),
    (65_536, 256, True, 0.45),
    (65_536, 64, False, 0.30),
)


def main() -> None:
    """Verify, time, record."""
    ceiling = sgemm()
    for length, num_features, is_causal, bound in CASES:
        feature_map, inputs = favor(num_features), tokens(length)
        error = verified(feature_map, is_causal=is_causal)

        def run(inputs=inputs, feature_map=feature_map, is_causal=is_causal) -> object:
            return linattn.linear_attention(*inputs, feature_map, is_causal=is_causal)

        found = seconds({"linattn": run, "sgemm": ceiling}, repeats=9)
        flops = 8 * HEAD_DIM * num_features + is_causal * 2 * 128 * (num_features + HEAD_DIM)
        record(
            f"share of the sgemm rate, {'causal' if is_causal else 'bidirectional'} forward, {num_features} features, "
            f"{length:,} tokens",
            figure=share_of_ceiling(flops * length * HEADS, found["linattn"], found["sgemm"]),
            unit="of sgemm",
            bound=f">= {bound}",
            length=length,
            num_features=num_features,
            error=error,
            seconds={name: spread(samples) for name, samples in found.items()},
        )


if __name__ == "__main__":
    main()
