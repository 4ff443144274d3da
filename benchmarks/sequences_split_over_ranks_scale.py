"""Claim: two ranks with 65,536 tokens each take at most 1/0.95 of the time of one process with 65,536 tokens.

2 heads, D = 64, 256 features, float32, forward and backward, one thread per rank; the slower rank counts. Speed is by
the clock, other work on the machine included; work is the processor's time, waiting left out. Two processes at once
that exchange nothing are slower than one, too: what the machine itself loses has a row of its own, and the bar holds
for what linattn adds as well. Causally each rank but the last absorbs its keys once more, before the fold that reads
them, and that is in the figures.
"""

from __future__ import annotations

import statistics

from measuring import ratios, record, require
from ranks import error, on_ranks, timed

LENGTH, REPEATS = 65_536, 5


def verified() -> float:
    """The largest error of both directions on parts of several blocks; refuses a wrong result."""
    wrong = max(max(on_ranks(2, error, 1_500, "states", is_causal)) for is_causal in (False, True))
    require("parts on two ranks", wrong, 1e-4)
    return wrong


def main() -> None:
    """Verify, time, record."""
    wrong = verified()
    for is_causal in (False, True):
        first, second = on_ranks(2, timed, LENGTH, is_causal, REPEATS)
        direction = "causal" if is_causal else "bidirectional"
        for place, words in enumerate(("speed", "work")):
            slower = {
                name: [max(mine[place], other[place]) for mine, other in zip(first[name], second[name], strict=True)]
                for name in first
            }
            contenders = {
                "one process with as many tokens as each": [times[place] for times in first["one"]],
                "two processes that exchange nothing": slower["each by itself"],
            }
            for beside, times in contenders.items():
                record(
                    f"{direction} attention on two ranks, {words} over that of {beside}",
                    figure=ratios(times, slower["one sequence"]),
                    unit="×",
                    bound=">= 0.95",
                    error=wrong,
                    seconds={name: statistics.median(values) for name, values in slower.items()},
                )


if __name__ == "__main__":
    main()
