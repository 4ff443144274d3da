"""An epsilon added to max-normalised features is larger than most of them, and turns attention into averaging.

Features of Gaussian keys spread over many powers of ten below their maximum: most lie under 1e-6 of it at D = 64. What
is added to all features alike is uniform attention. It can even look accurate, for at this scale averaging the values
is closer to softmax attention than FAVOR+ is.

Letters: D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn.softmax import softmax_attention
from linattn_lab.experiments.beyond._max_normalised import max_normalised_attention, max_normalised_keys
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, mean_figure, overall_relative_error, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, value_at

CLAIM = "The epsilon added to stabilised features only prevents a division by zero: it is negligible."
SOURCE = "the paper's code (1e-6) and implementations that follow it (1e-4)"
AXES = Axes("epsilon", "share, or relative distance of outputs", log_x=True)

_BELOW = "share of key features below epsilon"
_MOVED = "distance from FAVOR+ without epsilon"
_TO_UNIFORM = "distance from averaging the values"
_ERROR = "error against softmax attention"
_NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    epsilons: tuple[float, ...] = (1e-12, 1e-8, 1e-6, 1e-4)
    num_tokens: int = 512
    num_features: int = 256
    head_dim: int = 64
    sigma: float = 1.0


QUICK = Config(draws=6, seconds=1)
FULL = Config(draws=60, seconds=9)


def rows(config: Config) -> Iterator[Measurement]:
    """At each epsilon, what it covers and what it does to the output."""
    for epsilon in config.epsilons:
        for series in (_BELOW, _MOVED, _TO_UNIFORM, _ERROR, UNIFORM):
            yield Measurement(series, epsilon, partial(_figure, config, series, epsilon))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Negligible at both values in use, 1e-6 and 1e-4."""
    small, large = in_series(rows, _MOVED)[-2:]
    margins = [STANDARD_ERRORS * (row.standard_error or 0) for row in (small, large)]
    below, uniform = in_series(rows, _BELOW)[-2:], value_at(rows, _TO_UNIFORM, large.x)
    errors = (value_at(rows, _ERROR, large.x), value_at(rows, UNIFORM, large.x))
    return decide(
        holds=all(row.value + margin < _NEGLIGIBLE for row, margin in zip((small, large), margins, strict=True)),
        fails=any(row.value - margin > _NEGLIGIBLE for row, margin in zip((small, large), margins, strict=True)),
        figure=f"{below[0].value:.0%} of key features lie below {small.x:.0e} and {below[1].value:.1%} below "
        f"{large.x:.0e}, which moves the output by {small.value:.0%} and {large.value:.0%} of FAVOR+'s, the latter to "
        f"within {uniform.value:.0%} of averaging the values; its error against softmax attention, "
        f"{errors[0].value:.2f}, is then averaging's, {errors[1].value:.2f}",
        tolerance=f"negligible means moving the output by less than {_NEGLIGIBLE:.0%} of its size; "
        f"{STANDARD_ERRORS:.0f} standard errors decide",
    )


def _figure(config: Config, series: str, epsilon: float) -> Figure:
    """A mean over draws of tokens and features, and its standard error."""
    return mean_figure([_measured(config, epsilon, draw)[series] for draw in range(config.draws)])


@lru_cache(maxsize=FULL.draws)
def _measured(config: Config, epsilon: float, draw: int) -> dict[str, float]:
    """All figures of one draw."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, config.sigma, "epsilon", config.seed, draw)
    favor = FavorPlus(config.head_dim, config.num_features, seed=seed("epsilon", config.seed, draw))
    exact, uniform = softmax_attention(*tokens), tokens.value.mean(-2, keepdim=True)
    moved = max_normalised_attention(favor, tokens, epsilon)
    below = max_normalised_keys(favor, tokens.key) < epsilon
    return {
        _BELOW: torch.mean(below, dtype=torch.float64).item(),
        _MOVED: overall_relative_error(moved, linear_attention(*tokens, favor)),
        _TO_UNIFORM: overall_relative_error(moved, uniform.expand_as(moved)),
        _ERROR: overall_relative_error(moved, exact),
        UNIFORM: overall_relative_error(uniform, exact),
    }
