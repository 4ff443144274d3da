"""Claim: with any relative bias, from 8,192 to 65,536 tokens time grows with exponent at most 1.15.

2 heads, D = Dv = 16, 8 features, float32, forward; transforms run in float64. Least-squares slope of the logarithms.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus
from linattn.positions import relative_bias_attention
from linattn_lab.report.bench.summary import slope
from measuring import record, relative_error, require, seconds

LENGTHS = (8_192, 16_384, 32_768, 65_536)
HEADS, HEAD_DIM, NUM_FEATURES, VERIFIED_LENGTH = 2, 16, 8, 1_000


def main() -> None:
    """Verify, time, record."""
    feature_map = FavorPlus(HEAD_DIM, NUM_FEATURES)
    for is_causal in (False, True):
        error = verified(feature_map, is_causal=is_causal)
        inputs = {length: inputs_of(length, is_causal=is_causal) for length in LENGTHS}
        found = seconds(
            {
                str(length): lambda x=x, c=is_causal: relative_bias_attention(*x[:3], feature_map, x[3], is_causal=c)
                for length, x in inputs.items()
            },
            repeats=3,
        )
        medians = [statistics.median(samples) for samples in found.values()]
        direction = "causal" if is_causal else "bidirectional"
        record(
            f"exponent of time in the length, any relative bias, {direction} forward, 8,192 to 65,536",
            figure=slope(list(zip(LENGTHS, medians, strict=True))),
            unit="",
            bound="<= 1.15",
            lengths=LENGTHS,
            error=error,
            seconds=medians,
        )


def inputs_of(length: int, *, is_causal: bool) -> list[Tensor]:
    """Normal queries, keys, values and biases of each head and distance."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(3)]
    return [*qkv, torch.randn(HEADS, length if is_causal else 2 * length - 1, generator=generator)]


def verified(feature_map: FavorPlus, *, is_causal: bool) -> float:
    """Relative error against every weight formed in float64; refuses a wrong result."""
    query, key, value, bias = (x.double() for x in inputs_of(VERIFIED_LENGTH, is_causal=is_causal))
    distance = torch.arange(VERIFIED_LENGTH).unsqueeze(1) - torch.arange(VERIFIED_LENGTH)
    factors = bias[:, distance.clamp(min=0) if is_causal else distance + VERIFIED_LENGTH - 1].exp()
    weights = feature_map.query(query).exp() @ feature_map.key(key).exp().mT * factors
    weights = weights.tril() if is_causal else weights
    truth = weights @ value / weights.sum(-1, keepdim=True)
    error = relative_error(relative_bias_attention(query, key, value, feature_map, bias, is_causal=is_causal), truth)
    require("relative_bias_attention", error, 1e-10)
    return error


if __name__ == "__main__":
    main()
