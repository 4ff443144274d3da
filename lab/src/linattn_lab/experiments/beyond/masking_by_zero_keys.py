"""A key of zeros is not a masked key: φ(0) = exp(0)/√r is no zero, so padding goes on taking its share of attention.

A zeroed key gets about the weight of an average one. With p padded tokens for each real one the output keeps 1/(1 + p)
of what it should be; the rest is the padding's values, or nothing where those are zeroed too. Masked keys must have
features of zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, mean_and_error, overall_relative_error, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series

CLAIM = "Setting a key to zero masks it."
SOURCE = "done by a public implementation of FAVOR+ for its masks"
AXES = Axes("padded tokens for each real one", "relative difference from attention without the padding")

_KEYS = "keys zeroed"
_BOTH = "keys and values zeroed"
_MASK = "key_mask"


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    draws: int
    paddings: tuple[int, ...] = (1, 3, 7)
    num_tokens: int = 128
    num_features: int = 256
    head_dim: int = 64
    sigma: float = 0.3
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(draws=6, seconds=0.4)
FULL = Config(draws=100, seconds=6)


def rows(config: Config) -> Iterator[Measurement]:
    """Three ways to mask the padding, for several amounts of it."""
    for padding in config.paddings:
        for series in (_KEYS, _BOTH, _MASK):
            yield Measurement(series, padding, partial(_difference, config, series, padding))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """A masked key changes nothing but rounding."""
    keys, both, mask = (in_series(rows, series) for series in (_KEYS, _BOTH, _MASK))
    rounding = 2.0**-52 * FULL.num_tokens * FULL.num_features
    least = min(keys, key=lambda row: row.value)
    at = 1
    return decide(
        holds=max(row.value for row in (*keys, *both)) < rounding,
        fails=least.value - STANDARD_ERRORS * (least.standard_error or 0) > rounding,
        figure=f"with {keys[at].x:.0f} padded tokens for each real one zeroed keys leave an error of "
        f"{keys[at].value:.0%}, {both[at].value:.0%} with their values zeroed too (1 - 1/(1 + p) = "
        f"{keys[at].x / (1 + keys[at].x):.0%}); the library's key_mask of {mask[at].value:.0e}",
        tolerance=f"masked means within {rounding:.0e}, as many roundings of float64 as tokens times features",
    )


def _difference(config: Config, series: str, padding: int) -> Figure:
    """A mean over draws of tokens and features, and its standard error."""
    return Figure(*mean_and_error([_differences(config, padding, draw)[series] for draw in range(config.draws)]))


@lru_cache(maxsize=FULL.draws)
def _differences(config: Config, padding: int, draw: int) -> dict[str, float]:
    """All three ways on one draw, for the real queries."""
    padded = config.num_tokens * (1 + padding)
    tokens = gaussian_tokens(padded, config.head_dim, config.sigma, "masking", config.seed, draw)
    favor = FavorPlus(config.head_dim, config.num_features, seed=seed("masking", config.seed, draw))
    real = Tokens(*(x[:, :, : config.num_tokens] for x in tokens))
    seen = torch.arange(padded) < config.num_tokens
    key, value = (torch.where(seen.unsqueeze(-1), x, 0) for x in (tokens.key, tokens.value))
    ways = {
        _KEYS: linear_attention(real.query, key, tokens.value, favor),
        _BOTH: linear_attention(real.query, key, value, favor),
        _MASK: linear_attention(real.query, tokens.key, tokens.value, favor, key_mask=seen.unsqueeze(0)),
    }
    exact = linear_attention(*real, favor)
    return {series: overall_relative_error(out, exact) for series, out in ways.items()}
