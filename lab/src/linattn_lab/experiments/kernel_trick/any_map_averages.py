"""A map whose products may be negative has denominators that are, and what it returns is no average of the values.

The tutorial's code divides by φ(q)·Σφ(k) for any φ. With φ(x) = x the sign of that is a coin's; trigonometric features,
unbiased for exp(q·k/√d), go wrong wherever their spread exceeds the mean. Positive features cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus, FeatureMap, Identity, Trigonometric, features
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, mean_figure, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series

CLAIM = "Linear attention averages the values for any feature map φ from (n, d) to (n, d_φ)."
SOURCE = 'kernel trick, section "The Final Linear Attention Formula"'
AXES = Axes("features d_φ", "share of queries whose denominator is negative", log_x=True)

IDENTITY, POSITIVE = "φ(x) = x", "positive random features"
TRIGONOMETRIC = "trigonometric features, entries of deviation {:g}"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    trials: int
    num_features: tuple[int, ...] = (16, 64, 256)
    sigmas: tuple[float, ...] = (1, 1.5)
    num_tokens: int = 1024
    head_dim: int = 16


QUICK = Config(trials=40, seconds=1.5)
FULL = Config(trials=400, seconds=15)


def rows(config: Config) -> Iterator[Measurement]:
    """The share by each map; entries are N(0, 1) where nothing else is said."""
    yield Measurement(IDENTITY, config.head_dim, partial(_share, config, IDENTITY, config.head_dim, 1))
    for width in config.num_features:
        for sigma in config.sigmas:
            series = TRIGONOMETRIC.format(sigma)
            yield Measurement(series, width, partial(_share, config, series, width, sigma))
        yield Measurement(POSITIVE, width, partial(_share, config, POSITIVE, width, 1))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Any share of negative denominators, beyond its sampling error, refutes "any map"."""
    worst = max(rows, key=lambda row: row.value - STANDARD_ERRORS * (row.standard_error or 0.0))
    margin = STANDARD_ERRORS * (worst.standard_error or 0.0)
    few, *_, many = in_series(rows, TRIGONOMETRIC.format(QUICK.sigmas[0]))
    positive = max(row.value for row in rows if row.series == POSITIVE)
    return decide(
        holds=all(row.value == 0 for row in rows),
        fails=worst.value > margin and worst.value > 0,
        figure=f"{worst.value:.1%} of the denominators are negative ({worst.series}, {worst.x:.0f} features); with "
        f"N(0, 1) entries and {few.x:.0f} to {many.x:.0f} trigonometric features {few.value:.0%} to {many.value:.1%} "
        f"are, with positive ones {positive:.0%}",
        tolerance=f"an average has none; {STANDARD_ERRORS:.0f} standard errors over independent tokens and draws "
        f"({margin / STANDARD_ERRORS:.1%} each)",
    )


def _share(config: Config, series: str, width: int, sigma: float) -> Figure:
    """Share of negative denominators; queries of one trial share keys and a draw, so errors are taken over trials."""
    shares = torch.stack([_negative(config, series, width, sigma, trial) for trial in range(config.trials)])
    return mean_figure(shares, expected=0.0)


def _negative(config: Config, series: str, width: int, sigma: float, trial: int) -> Tensor:
    """Share of the queries of one trial with φ(q)·Σφ(k) < 0."""
    query, key = _queries_and_keys(config, sigma, trial)
    feature_map = _map(config, series, width, seed("negative", config.seed, series, width, trial))
    normaliser = features(feature_map, key, "key").sum(-2)
    return ((features(feature_map, query, "query") @ normaliser) < 0).double().mean()


def _map(config: Config, series: str, width: int, seed: int) -> FeatureMap:
    """The map of a curve."""
    if series == IDENTITY:
        return Identity(config.head_dim)
    random_map = FavorPlus if series == POSITIVE else Trigonometric
    return random_map(config.head_dim, width, draw="iid", seed=seed)


@lru_cache(maxsize=128)
def _queries_and_keys(config: Config, sigma: float, trial: int) -> tuple[Tensor, Tensor]:
    """(L, D) each."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, sigma, "negative", config.seed, sigma, trial)
    return tokens.query.squeeze(), tokens.key.squeeze()
