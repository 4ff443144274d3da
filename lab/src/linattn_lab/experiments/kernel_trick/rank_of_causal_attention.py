"""Under a causal mask the matrix has full rank, with however few features.

A triangular matrix has the determinant of its diagonal, and the diagonal entries φ(q_i)·φ(k_i) of positive features are
positive. So a causal model is not limited to d_φ directions over a text; what is limited is the state that each token
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from linattn_lab.experiments.experiment import Axes, FigureRow, Measurement, Verdict
from linattn_lab.experiments.kernel_trick._ranks import Config, bounded, ranks

CLAIM = "The implicit attention matrix has rank at most d_φ, under a causal mask too."
SOURCE = 'kernel trick, section "The Trade-off", which excepts no mask'
AXES = Axes("features d_φ", "rank", log_x=True, log_y=True)

QUICK = Config(seconds=0.1)
FULL = Config(num_features=(2, 4, 8, 16, 32, 64, 128), num_tokens=256, seconds=2)


def rows(config: Config) -> Iterator[Measurement]:
    """The ranks of all weights and of the matrix that averages the values."""
    return ranks(config, is_causal=True)


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """No rank above d_φ, or one."""
    return bounded(rows)
