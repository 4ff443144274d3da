"""A matrix of products of d_φ features has rank at most d_φ, and dividing its rows by their sums keeps it.

φ(Q)φ(K)ᵀ has a factor with d_φ columns, and D⁻¹ on its left has full rank. Softmax attention has full rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from linattn_lab.experiments.experiment import EXACT, Axes, FigureRow, Measurement, Verdict
from linattn_lab.experiments.judging import decide
from linattn_lab.experiments.kernel_trick._ranks import (
    ATTENTION,
    WEIGHTS,
    Config,
    rank_of_attention,
    rank_of_softmax_attention,
    rank_of_weights,
)

CLAIM = "The implicit attention matrix has rank at most d_φ."
SOURCE = 'kernel trick, section "The Trade-off", of attention without a causal mask'
AXES = Axes("features d_φ", "rank", log_x=True, log_y=True)

QUICK = Config(seconds=0.1)
FULL = Config(num_features=(2, 4, 8, 16, 32, 64, 128), num_tokens=256, seconds=0.5)


def rows(config: Config) -> Iterator[Measurement]:
    """The ranks of all weights, of the matrix that averages the values, and of softmax attention."""
    for width in config.num_features:
        yield Measurement(WEIGHTS, width, partial(rank_of_weights, config, width, is_causal=False))
        yield Measurement(ATTENTION, width, partial(rank_of_attention, config, width, is_causal=False))
        yield Measurement(EXACT, width, partial(rank_of_softmax_attention, config))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """No rank above d_φ, or one."""
    ranks = [row for row in rows if row.series != EXACT]
    worst = max(ranks, key=lambda row: (row.value - row.x, row.x))
    full = next(row for row in rows if row.series == EXACT)
    return decide(
        holds=worst.value <= worst.x,
        fails=worst.value > worst.x,
        figure=f"with {worst.x:.0f} features the rank is {worst.value:.0f} ({worst.series}); softmax attention over "
        f"the same tokens has rank {full.value:.0f}",
        tolerance="singular values above what rounding leaves, 2⁻⁵² of the largest for each row, are counted",
    )
