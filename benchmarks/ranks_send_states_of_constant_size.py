"""Claim: a layer on several ranks sends the same bytes at 8,192 and at 65,536 tokens per rank; others send tokens.

4 heads, D = 64, 64 features, float32, causal, forward and backward; the bytes that leave the rank which sends most,
counted at torch's own collectives. "states": `parallel.linear_attention`; "window": the same with a window of 64
tokens; "keys": all keys and values to every rank that sees them, as ring attention and the softmax layers of a hybrid
have it.
"""

from __future__ import annotations

from measuring import record, require
from ranks import counted, error, on_ranks

SHORT, LONG, SIZES = 8_192, 65_536, (2, 4)
WORDS = {"states": "of states", "window": "of states and a window", "keys": "of all keys"}


def verified() -> float:
    """The largest error of each kind that computes, on parts of several blocks; refuses a wrong result."""
    wrong = max(max(on_ranks(2, error, 500, kind, True)) for kind in ("states", "window"))
    require("parts on two ranks", wrong, 1e-4)
    return wrong


def main() -> None:
    """Verify, count, record."""
    wrong = verified()
    for size in SIZES:
        ranks = on_ranks(size, counted, list(WORDS), [SHORT, LONG])
        for kind, words in WORDS.items():
            # The rank that sends most.
            found = {length: max(counts[kind, length] for counts in ranks) for length in (SHORT, LONG)}
            record(
                f"bytes sent by a rank, exchange {words}, {size} ranks, 65,536 tokens per rank over 8,192",
                figure=found[LONG][1] / found[SHORT][1],
                unit="×",
                bound="<= 1" if kind in ("states", "window") else ">= 1",
                error=wrong,
                collectives=found[LONG][0],
                bytes={str(length): sent for length, (_, sent) in found.items()},
            )


if __name__ == "__main__":
    main()
