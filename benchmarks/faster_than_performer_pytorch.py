"""Claim: at 65,536 tokens the forward pass is several times faster than performer-pytorch 1.1.4.

Both are first compared with the exact positive-random-feature average in float64: ours to rounding; the peer's epsilon
and stabiliser change its result, so its error is reported and not bounded. 8 heads, D = 64, 256 features, float32.
"""

from __future__ import annotations

import torch
from performer_pytorch import FastAttention

import linattn
from measuring import record, relative_error, require, seconds, spread

LENGTH, HEADS, HEAD_DIM, NUM_FEATURES = 65_536, 8, 64, 256


def main() -> None:
    """Verify, time, record."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, LENGTH, HEAD_DIM, generator=generator) for _ in range(3))
    feature_map = linattn.feature_maps.FavorPlus(HEAD_DIM, NUM_FEATURES)
    peer = FastAttention(dim_heads=HEAD_DIM, nb_features=NUM_FEATURES, causal=False).eval()
    peer.projection_matrix.copy_(feature_map.projection)
    with torch.no_grad():
        short = [x[:, :, :512] for x in (query, key, value)]
        truth = linattn.linear_attention(*(x.double() for x in short), feature_map, backend="reference")
        ours = relative_error(linattn.linear_attention(*short, feature_map), truth)
        require("ours", ours, 1e-4)
        found = seconds(
            {
                "linattn": lambda: linattn.linear_attention(query, key, value, feature_map),
                "performer_pytorch": lambda: peer(query, key, value),
            },
            repeats=5,
        )
    record(
        "forward at 65,536 tokens against performer-pytorch",
        shape=[1, HEADS, LENGTH, HEAD_DIM],
        num_features=NUM_FEATURES,
        dtype="float32",
        error=ours,
        peer_error=relative_error(peer(*short), truth),
        seconds={name: spread(samples) for name, samples in found.items()},
        times_faster=spread([b / a for a, b in zip(found["linattn"], found["performer_pytorch"], strict=True)]),
    )


if __name__ == "__main__":
    main()
