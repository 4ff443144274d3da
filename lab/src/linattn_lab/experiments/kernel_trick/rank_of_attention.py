"""A matrix of products of d_φ features has rank at most d_φ, and dividing its rows by their sums keeps it.

φ(Q)φ(K)ᵀ has a factor with d_φ columns, and D⁻¹ on its left has full rank. Softmax attention has full rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from linattn_lab.experiments.experiment import EXACT, Axes, FigureRow, Measurement, Verdict
from linattn_lab.experiments.kernel_trick._ranks import Config, bounded, rank_of_softmax_attention, ranks

CLAIM = "The implicit attention matrix has rank at most d_φ."
SOURCE = 'kernel trick, section "The Trade-off", of attention without a causal mask'
AXES = Axes("features d_φ", "rank", log_x=True, log_y=True)

QUICK = Config(seconds=0.1)
FULL = Config(num_features=(2, 4, 8, 16, 32, 64, 128), num_tokens=256, seconds=0.5)


def rows(config: Config) -> Iterator[Measurement]:
    """The ranks of all weights, of the matrix that averages the values, and of softmax attention."""
    yield from ranks(config, is_causal=False)
    for width in config.num_features:
        yield Measurement(EXACT, width, partial(rank_of_softmax_attention, config))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """No rank above d_φ, or one."""
    full = next(row for row in rows if row.series == EXACT)
    more = f"; softmax attention over the same tokens has rank {full.value:.0f}"
    return bounded([row for row in rows if row.series != EXACT], more)
