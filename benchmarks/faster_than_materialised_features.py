"""Claim: every elementwise map, and FAVOR+, is at least twice as fast as the textbook formula it stands for.

The textbook computes features for the whole sequence, then two einsums; it keeps no running maximum, and both are
verified against each other on inputs where that is safe. 65,536 tokens, 8 heads, D = 64, float32.
"""

from __future__ import annotations

import linattn
from linattn.feature_maps import (
    Dpfp,
    ElementwisePolynomial,
    EluPlusOne,
    Exponential,
    Identity,
    Relu,
)
from measuring import HEAD_DIM, favor, ratios, record, relative_error, require, seconds, spread, textbook, tokens

LENGTH = 65_536


def main() -> None:
    """Verify, time, record."""
    inputs, short = tokens(LENGTH), tokens(512)
    maps = [kind(HEAD_DIM) for kind in (Exponential, EluPlusOne, Relu, ElementwisePolynomial, Identity, Dpfp)]
    for feature_map in (*maps, favor()):
        # Against the textbook in float64; Identity's normaliser crosses 0, which multiplies rounding.
        truth = textbook(*(x.double() for x in short), feature_map)
        error = relative_error(linattn.linear_attention(*short, feature_map), truth)
        require(repr(feature_map), error, 1e-4 if feature_map.nonnegative else 1e-2)
        found = seconds(
            {
                "linattn": lambda feature_map=feature_map: linattn.linear_attention(*inputs, feature_map),
                "materialised": lambda feature_map=feature_map: textbook(*inputs, feature_map),
            },
            repeats=5,
            rehearse=True,
        )
        record(
            f"times faster than materialised features, {type(feature_map).__name__}, {LENGTH:,} tokens",
            figure=ratios(found["materialised"], found["linattn"]),
            unit="×",
            bound=">= 2",
            length=LENGTH,
            num_features=feature_map.num_features,
            error=error,
            seconds={name: spread(samples) for name, samples in found.items()},
        )


if __name__ == "__main__":
    main()
