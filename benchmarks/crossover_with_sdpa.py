"""Claim: linear attention overtakes torch's exact attention at some hundred to few thousand tokens, forward, float32.

The crossover is where the two times, interpolated log-log between neighbouring lengths, meet. 8 heads, D = 64.
"""

from __future__ import annotations

import math
import statistics

import torch.nn.functional as F

import linattn
from linattn_lab.crossover import find_crossover
from measuring import favor, record, seconds, tokens, verified

LENGTHS = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# Features, causal, bound.
CASES = ((64, False, 512), (256, False, 1536), (64, True, 1536), (256, True, 3072))


def main() -> None:
    """Verify, time, record."""
    for num_features, is_causal, bound in CASES:
        feature_map, ours, exact = favor(num_features), [], []
        error = verified(feature_map, is_causal=is_causal)
        for length in LENGTHS:
            inputs = tokens(length)
            timed = seconds(
                {
                    "linattn": lambda x=inputs, f=feature_map, c=is_causal: linattn.linear_attention(
                        *x, f, is_causal=c
                    ),
                    "sdpa": lambda x=inputs, c=is_causal: F.scaled_dot_product_attention(*x, is_causal=c),
                },
                repeats=21,
            )
            ours.append(statistics.median(timed["linattn"]))
            exact.append(statistics.median(timed["sdpa"]))
        found = find_crossover(list(zip(LENGTHS, ours, exact, strict=True)))
        record(
            f"crossover with exact attention, {'causal' if is_causal else 'bidirectional'}, {num_features} features",
            figure=float(LENGTHS[0]) if found.always else found.length or math.inf,
            unit="tokens",
            bound=f"<= {bound}",
            num_features=num_features,
            error=error,
            lengths=LENGTHS,
            seconds={"linattn": ours, "sdpa": exact},
        )


if __name__ == "__main__":
    main()
