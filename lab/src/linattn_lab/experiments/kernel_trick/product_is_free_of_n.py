"""KᵀV is of a size that does not depend on n; computing it takes 2·n·d·d operations.

The source says so itself further down: O(n·d_φ·d_v). What is free of n is what a query needs afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from linattn_lab.experiments.counting import operations
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series, slope

CLAIM = "Computing KᵀV takes only O(d²), independent of n."
SOURCE = 'kernel trick, section "The Linear Attention Trick: Change the Order"'
AXES = Axes("tokens n", "operations, or numbers", log_x=True, log_y=True)

OPERATIONS, NUMBERS = "operations of KᵀV", "numbers in KᵀV"

# One product has no lower-order term: its slope is exactly 0 or exactly 1, and this is rounding of logarithms.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    head_dim: int = 64


QUICK = Config(seconds=0.1)
FULL = Config(num_tokens=(64, 256, 1024, 4096, 16384, 65536), seconds=1)


def rows(config: Config) -> Iterator[Measurement]:
    """Both counts at every length."""
    for count in config.num_tokens:
        yield Measurement(OPERATIONS, count, partial(_operations, config, count))
        yield Measurement(NUMBERS, count, partial(_numbers, config, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Slope of the operations over the length."""
    counts, sizes = in_series(rows, OPERATIONS), in_series(rows, NUMBERS)
    found, _ = slope(counts)
    return decide(
        holds=abs(found) <= _ROUNDING,
        fails=abs(found - 1) <= _ROUNDING,
        figure=f"from {counts[0].x:,.0f} to {counts[-1].x:,.0f} tokens KᵀV goes from {counts[0].value:,.0f} to "
        f"{counts[-1].value:,.0f} operations, as n^{found:.2f}; its {sizes[0].value:,.0f} numbers stay "
        f"{sizes[-1].value:,.0f}",
        tolerance="counted, not timed: n^0 or n^1 to the rounding of logarithms",
    )


def _operations(config: Config, num_tokens: int) -> Figure:
    """Operations of the product; expected is what O(d²) allows, the cost of one key and value."""
    key, value = _key_and_value(config, num_tokens)
    return Figure(operations(lambda: key.mT @ value), expected=2 * config.head_dim**2)


def _numbers(config: Config, num_tokens: int) -> Figure:
    """Numbers in the product."""
    key, value = _key_and_value(config, num_tokens)
    return Figure((key.mT @ value).numel(), expected=config.head_dim**2)


def _key_and_value(config: Config, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(n, d) each."""
    tokens = gaussian_tokens(num_tokens, config.head_dim, 1.0, "free of n")
    return tokens.key.squeeze(), tokens.value.squeeze()
