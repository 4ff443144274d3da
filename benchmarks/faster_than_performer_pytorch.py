"""Claim: several times faster than performer-pytorch 1.1.4 on a CPU, tens of times where it is causal.

Both are first compared with the exact positive-random-feature average in float64: ours to rounding; the peer's epsilon
and stabiliser change its result, so its error is reported and not bounded. 8 heads, D = 64, 256 features, float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from performer_pytorch import FastAttention
from torch import Tensor

import linattn
from measuring import (
    HEAD_DIM,
    NUM_FEATURES,
    favor,
    forward_and_backward,
    ratios,
    record,
    relative_error,
    seconds,
    spread,
    textbook,
    tokens,
    verified,
)

# Length, causal, backward, repeats, how many times faster.
CASES = (
    (65_536, False, False, 5, 8),
    (8_192, True, False, 3, 50),
    (16_384, False, True, 5, 5),
    (4_096, True, True, 3, 30),
)


def run(attend: Callable[..., Tensor], length: int, backward: bool) -> Callable[[], object]:
    """One contender's run."""
    inputs = tokens(length, gradients=backward)
    return forward_and_backward(attend, inputs, inputs[0].detach()) if backward else lambda: attend(*inputs)


def main() -> None:
    """Verify, time, record."""
    feature_map = favor()
    for length, is_causal, backward, repeats, times in CASES:
        peer = FastAttention(dim_heads=HEAD_DIM, nb_features=NUM_FEATURES, causal=is_causal).eval()
        peer.projection_matrix.copy_(feature_map.projection)

        def ours(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = is_causal) -> Tensor:
            return linattn.linear_attention(q, k, v, feature_map, is_causal=is_causal)

        error, short = verified(feature_map, is_causal=is_causal), tokens(512)
        truth = textbook(*(x.double() for x in short), feature_map, is_causal=is_causal)
        found = seconds(
            {"linattn": run(ours, length, backward), "performer_pytorch": run(peer, length, backward)},
            repeats=repeats,
            rehearse=True,
        )
        with torch.no_grad():
            peer_error = relative_error(peer(*short), truth)
        record(
            f"times faster than performer-pytorch, {'causal' if is_causal else 'bidirectional'} "
            f"{'forward and backward' if backward else 'forward'}, {length:,} tokens",
            figure=ratios(found["performer_pytorch"], found["linattn"]),
            unit="×",
            bound=f">= {times}",
            length=length,
            error=error,
            peer_error=peer_error,
            seconds={name: spread(samples) for name, samples in found.items()},
        )


if __name__ == "__main__":
    main()
