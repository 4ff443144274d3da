"""Moving all keys by one vector leaves softmax attention as it is, and can make random features better.

exp(q·(k + c)) = exp(q·k)·exp(q·c), and the second factor is common to all keys of a query. The variance of positive
features grows as e^s with s = |x + y|²; of all c, -(x̄ + ȳ) makes the mean of s least: it falls by |x̄ + ȳ|².
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn.attention import linear_attention
from linattn.feature_maps import Centred, FavorPlus
from linattn.softmax import softmax_attention
from linattn_lab.audit.moments import pair_moments
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.inputs import (
    Tokens,
    gaussian_tokens,
    generator,
    mean_and_error,
    overall_relative_error,
    seed,
)
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "Softmax attention does not change when all keys move by c, and c = -(q̄ + k̄) lowers mean |x + y|²."
SOURCE = "shift invariance of softmax; linattn.feature_maps.Centred centres both sides, to the same effect"
AXES = Axes("deviation of the entries of q and k about means from N(0, 1)", "|x + y|²; relative errors", log_y=True)

_BEFORE, _AFTER = "mean |x + y|², keys as they are", "mean |x + y|², keys moved"
_CHANGE = "change of the exact output"
_PLAIN, _CENTRED = "error of FAVOR+", "error of FAVOR+, centred"
_SIGMAS = (0.3, 0.6, 1.0)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    draws: int
    num_tokens: int = 512
    num_features: int = 256
    head_dim: int = 32
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(draws=6, seconds=1)
FULL = Config(draws=100, seconds=12)


def rows(config: Config) -> Iterator[Measurement]:
    """Squares, exact outputs and errors before and after, at every scale."""
    for sigma in _SIGMAS:
        for series in (_BEFORE, _AFTER, _CHANGE, _PLAIN, _CENTRED, UNIFORM):
            yield Measurement(series, sigma, partial(_figure, config, series, sigma))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The output stays within rounding, and the squares fall by |x̄ + ȳ|²."""
    before, after, change, plain, centred, uniform = (
        in_series(rows, series) for series in (_BEFORE, _AFTER, _CHANGE, _PLAIN, _CENTRED, UNIFORM)
    )
    rounding = 2.0**-52 * FULL.num_tokens * FULL.head_dim
    still = max(row.value for row in change) < rounding
    lower = all(abs(row.value - (row.expected or 0.0)) < rounding * row.value for row in after)
    lower = lower and all(late.value < early.value for late, early in zip(after, before, strict=True))
    return decide(
        holds=still and lower,
        fails=not (still and lower),
        figure=f"with entries of deviation {after[-1].x} mean |x + y|² falls from {before[-1].value:.1f} to "
        f"{after[-1].value:.1f} and the exact output changes by {max(row.value for row in change):.0e}; with "
        f"{after[0].x} FAVOR+'s error falls from {plain[0].value:.2f} to {centred[0].value:.2f} (averaging: "
        f"{uniform[0].value:.2f})",
        tolerance=f"identities: within {rounding:.0e}, as many roundings of float64 as tokens times coordinates",
    )


def _figure(config: Config, series: str, sigma: float) -> Figure:
    """A mean over draws of means, tokens and features, and its standard error."""
    drawn = [_measured(config, sigma, draw) for draw in range(config.draws)]
    mean, error = mean_and_error([figures[series] for figures in drawn])
    if series != _AFTER:
        return Figure(mean, error)
    return Figure(mean, error, expected=sum(figures["expected"] for figures in drawn) / config.draws)


@lru_cache(maxsize=FULL.draws)
def _measured(config: Config, sigma: float, draw: int) -> dict[str, float]:
    """All figures of one draw."""
    tokens = _shifted_tokens(config, sigma, draw)
    purpose = seed("centring", config.seed, sigma, draw)
    favor = FavorPlus(config.head_dim, config.num_features, seed=purpose)
    move = tokens.query.mean(-2, keepdim=True) + tokens.key.mean(-2, keepdim=True)
    exact = softmax_attention(*tokens)
    before, after = (
        pair_moments(tokens.query, key, scale=favor.scale).sum_square.item() for key in (tokens.key, tokens.key - move)
    )
    return {
        _BEFORE: before,
        _AFTER: after,
        "expected": before - favor.scale * move.square().sum().item(),
        _CHANGE: overall_relative_error(softmax_attention(tokens.query, tokens.key - move, tokens.value), exact),
        _PLAIN: overall_relative_error(linear_attention(*tokens, favor), exact),
        _CENTRED: overall_relative_error(linear_attention(*tokens, Centred(favor)), exact),
        UNIFORM: overall_relative_error(tokens.value.mean(-2, keepdim=True), exact),
    }


def _shifted_tokens(config: Config, sigma: float, draw: int) -> Tokens:
    """Gaussian tokens whose queries have one mean and whose keys another."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, sigma, "centring", config.seed, draw)
    source = generator("means", config.head_dim, sigma, config.seed, draw)
    query_mean, key_mean = torch.randn(2, config.head_dim, generator=source, dtype=torch.float64)
    return Tokens(tokens.query + query_mean, tokens.key + key_mean, tokens.value)
