"""A map of width r costs O(N·r·(d + d_v)): to build both sides' features and to fold and read the state.

O(N·d²) is the special case r = d, that of elementwise maps, which need no projection: 4·N·d² operations where a random
map of the same width needs 8. Maps that come close to softmax attention are wider: r = 256 is usual at d = 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn.feature_maps import EluPlusOne, FavorPlus, FeatureMap, features
from linattn_lab.experiments.counting import operations
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, seed
from linattn_lab.experiments.judging import decide, in_series, slope

CLAIM = "The overall complexity of attention falls from O(N²·d) to O(N·d²)."
SOURCE = 'overview, section "Complexity analysis"'
AXES = Axes("features r", "operations of the matrix products / (N·d²)", log_x=True, log_y=True)

_ELEMENTWISE = "elementwise map"
_HALF = 0.5


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...]
    num_features: tuple[int, ...] = (64, 128, 256, 512, 1024)
    head_dim: int = 64


QUICK = Config(num_tokens=(256, 1024), seconds=0.3)
FULL = Config(num_tokens=(1024, 4096, 16384), seconds=3)


def rows(config: Config) -> Iterator[Measurement]:
    """Counted operations of random features of every width and at every length, and of a map of width d."""
    dim = config.head_dim
    for num_tokens in config.num_tokens:
        # (KᵀV and the read-out, 2·N·r·d_v each)/(N·d²), and as much for the two projections.
        yield Measurement(
            f"{_ELEMENTWISE}, N = {num_tokens}", dim, partial(_operations, config, num_tokens, EluPlusOne(dim), 4.0)
        )
        for width in config.num_features:
            favor = FavorPlus(dim, width, seed=seed("cost", config.seed, width))
            take = partial(_operations, config, num_tokens, favor, 8.0)
            yield Measurement(f"random features, N = {num_tokens}", width, take)


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The exponent of r in operations / (N·d²): 0 as claimed, 1 as counted."""
    lengths = sorted({row.series for row in rows if not row.series.startswith(_ELEMENTWISE)})
    exponents = [slope(in_series(rows, series))[0] for series in lengths]
    first, last = (in_series(rows, lengths[0])[i] for i in (0, -1))
    elementwise = next(row for row in rows if row.series.startswith(_ELEMENTWISE))
    return decide(
        holds=max(exponents) < _HALF,
        fails=max(exponents) >= _HALF,
        figure=f"operations / (N·d²) are {elementwise.value:.0f} for an elementwise map, {first.value:.0f} for random "
        f"features with r = d = {first.x:.0f} and {last.value:.0f} with r = {last.x:.0f}: they grow as "
        f"r^{max(exponents):.2f}, so O(N·d²) holds for r = d and O(N·r·(d + d_v)) for all",
        tolerance=f"counts, hence exact: the exponent is 0 or 1, told apart at {_HALF}",
    )


def _operations(config: Config, num_tokens: int, feature_map: FeatureMap, claimed: float) -> Figure:
    """Operations of φ(Q)(φ(K)ᵀ[V, 1]) over N·d²; the column of ones is left out, as the overview leaves it."""
    query, key, value = gaussian_tokens(num_tokens, config.head_dim, 1.0, "cost", config.seed)
    count = operations(lambda: features(feature_map, query, "query") @ (features(feature_map, key, "key").mT @ value))
    return Figure(count / (num_tokens * config.head_dim**2), expected=claimed)
