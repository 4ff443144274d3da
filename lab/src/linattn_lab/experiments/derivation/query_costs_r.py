"""A query costs O(r·D + r·Dv), not O(r).

The features φ(q) take the product of r samples with a vector of width D, the numerator φ(q)ᵀS one of r features with a
matrix r × Dv: 2·r·(D + Dv + 1) operations with the denominator φ(q)ᵀz, which alone is O(r).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from linattn.attention import State
from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.counting import operations
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import decide, in_series, slope

CLAIM = "Each new query needs O(r) time for its attention output."
SOURCE = 'derivation (Chinese version), section "Bringing It Back to the Attention Formula"'
AXES = Axes("width of queries and values, D = Dv", "operations of one query at fixed r", log_x=True, log_y=True)

QUERY = "features, numerator and denominator"
DENOMINATOR = "denominator alone, φ(q) given"

# A cost without D would have slope 0, one proportional to D + Dv slope 1; a lower-order term takes some of it.
_BAND = 0.1


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    widths: tuple[int, ...] = (16, 32, 64, 128, 256)
    num_features: int = 64


QUICK = Config(seconds=0.1)
FULL = Config(widths=(16, 32, 64, 128, 256, 512), num_features=256, seconds=0.1)


def rows(config: Config) -> Iterator[Measurement]:
    """Operations at every width."""
    for width in config.widths:
        yield Measurement(QUERY, width, partial(_query, config, width))
        yield Measurement(DENOMINATOR, width, partial(_denominator, config))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Slope of the operations over the width."""
    counts = in_series(rows, QUERY)
    found, _ = slope(counts)
    return decide(
        holds=abs(found) < _BAND,
        fails=found > 1 - _BAND,
        figure=f"from width {counts[0].x:.0f} to {counts[-1].x:.0f} one query goes from {counts[0].value:,.0f} to "
        f"{counts[-1].value:,.0f} operations at the same r, as width^{found:.2f}: O(r·D + r·Dv)",
        tolerance=f"counted, not timed: within {_BAND} of width^0 or of width^1, as the denominator's r operations "
        "do not grow",
    )


def _query(config: Config, width: int) -> Figure:
    """A query, through the library; expected is what O(r) allows, the cost at the least width."""
    return Figure(_read(config, width), expected=_read(config, min(config.widths)))


def _read(config: Config, width: int) -> int:
    """Operations of one query against a state."""
    favor = FavorPlus(width, config.num_features)
    keys = torch.ones(1, 1, 2, width)
    state = State.empty(favor, batch_size=1, num_heads=1, value_dim=width).absorb(favor, keys, keys)
    return operations(lambda: state.read(favor, keys[:, :, :1]))


def _denominator(config: Config) -> Figure:
    """φ(q)ᵀz."""
    phi, z = torch.ones(1, config.num_features), torch.ones(config.num_features, 1)
    count = operations(lambda: phi @ z)
    return Figure(count, expected=count)
