"""Claim: from 8,192 to 262,144 tokens time grows with exponent at most 1.03, the least-squares slope of the logarithms.

8 heads, D = 64, 256 features, float32, forward.
"""

from __future__ import annotations

import statistics

import linattn
from linattn_lab.report.bench.summary import slope
from measuring import favor, record, seconds, tokens, verified

LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)


def main() -> None:
    """Verify, time, record."""
    feature_map = favor()
    for is_causal in (False, True):
        error = verified(feature_map, is_causal=is_causal)
        inputs = {length: tokens(length) for length in LENGTHS}
        found = seconds(
            {
                str(length): lambda x=x, c=is_causal: linattn.linear_attention(*x, feature_map, is_causal=c)
                for length, x in inputs.items()
            },
            repeats=3,
        )
        medians = [statistics.median(samples) for samples in found.values()]
        record(
            f"exponent of time in the length, {'causal' if is_causal else 'bidirectional'} forward, 8,192 to 262,144",
            figure=slope(list(zip(LENGTHS, medians, strict=True))),
            unit="",
            bound="<= 1.03",
            lengths=LENGTHS,
            error=error,
            seconds=medians,
        )


if __name__ == "__main__":
    main()
