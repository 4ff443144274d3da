"""What the norms of queries and keys predict of FAVOR+'s error, in units of averaging's, and how well.

    MSE(FAVOR+)/MSE(averaging) ≈ (e^s - 1)/r · e^{τ²}/(e^{τ²} - 1),   s = mean |x + y|², τ = deviation of the logits

The numerator of the output is taken to err as one kernel entry of mean norm does. It errs less where entries are close
to their mean and their errors common to all keys, for these cancel between numerator and denominator; and more where s
varies from pair to pair, for e^s at the mean s is below the mean of e^s, and attention weighs the pairs of large s.
Large predictions saturate: an average of values is never farther off than a value.
Figures are medians over sets of tokens: beyond s = 2 or so a mean is that of the few rarest draws. Widths and scales
were chosen, after first runs that could not tell, for sampling to decide: on the verge of 3, and where s is small.

Letters: D head width, r features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn.softmax import softmax_attention
from linattn_lab.audit.moments import pair_moments, predicted_ratio
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.inputs import Tokens, generator, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide

CLAIM = (
    "MSE(FAVOR+)/MSE(averaging) is (e^s - 1)/r · e^{τ²}/(e^{τ²} - 1) within a factor of two, for Gaussian queries and "
    "keys, while that is below 3."
)
SOURCE = "the square of linattn_lab.audit.moments.predicted_ratio; the delta method on numerator and denominator"
AXES = Axes("deviation of the entries of q and k", "mean square error / averaging's", log_y=True)

_SIZES = ((16, 64), (16, 256), (16, 1024), (16, 4096), (32, 256), (64, 1024))
_SIGMAS = (0.3, 0.5, 0.8)
_BELOW = 3.0
_FACTOR = 2.0


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment: on each of the sets of tokens every r gets `features` over r draws, one at least."""

    features: int
    sets: int
    num_tokens: int
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(features=2**9, sets=120, num_tokens=64, seconds=6)
FULL = Config(features=2**9, sets=240, num_tokens=128, seconds=15)


def rows(config: Config) -> Iterator[Measurement]:
    """Every width and number of features at every scale."""
    for sigma in _SIGMAS:
        yield Measurement(UNIFORM, sigma, partial(Figure, 1.0))
        for head_dim, width in _SIZES:
            yield Measurement(f"D = {head_dim}, r = {width}", sigma, partial(_ratio, config, sigma, head_dim, width))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Every figure whose prediction is below 3 within a factor of two of it, or one that is not."""
    judged = [row for row in rows if row.expected is not None and row.expected < _BELOW]
    within = [row for row in judged if all(edge < 0 for edge in _outside(row, STANDARD_ERRORS))]
    beyond = [row for row in judged if any(edge > 0 for edge in _outside(row, -STANDARD_ERRORS))]
    least, most = min(judged, key=_off), max(judged, key=_off)
    return decide(
        holds=len(within) == len(judged),
        fails=bool(beyond),
        figure=f"of {len(judged)} predictions below {_BELOW:.0f}, {len(beyond)} are off by more than {_FACTOR:.0f}: "
        f"measured over predicted runs from {_off(least):.2f} ({least.series}, deviation {least.x}) to "
        f"{_off(most):.2f} ({most.series}, deviation {most.x}); errors, the square roots, are within "
        f"{max(_off(most), 1 / _off(least)) ** 0.5:.2f}",
        tolerance=f"a factor of {_FACTOR:.0f} either way, as claimed; {STANDARD_ERRORS:.0f} standard errors over sets "
        "of tokens and draws decide",
    )


def _off(row: FigureRow) -> float:
    """Measured over predicted."""
    return row.value / (row.expected or 1.0)


def _outside(row: FigureRow, standard_errors: float) -> tuple[float, float]:
    """How far the figure, widened by so many standard errors, lies outside the factor above and below."""
    margin, expected = standard_errors * (row.standard_error or 0), row.expected or 1.0
    return row.value + margin - _FACTOR * expected, expected / _FACTOR - (row.value - margin)


def _ratio(config: Config, sigma: float, head_dim: int, width: int) -> Figure:
    """Median over sets of tokens of the ratio of mean square errors; expected is the mean prediction."""
    tokens, exact = _tokens(config, sigma, head_dim)
    draws = max(config.features // width, 1)
    # A head is a draw on a set of tokens: all of them in one call.
    favor = FavorPlus(
        head_dim,
        width,
        draw="iid",
        seed=seed("predictor", config.seed, sigma, head_dim, width),
        num_heads=config.sets * draws,
    )
    query, key, value = (x.repeat_interleave(draws, dim=1) for x in tokens)
    out = linear_attention(query, key, value, favor).unflatten(1, (config.sets, draws))
    averaging = (tokens.value.mean(-2, keepdim=True) - exact).square().mean((0, 2, 3))
    ratios = (out - exact.unsqueeze(2)).square().mean((0, 2, 3, 4)) / averaging
    squares = pair_moments(tokens.query, tokens.key, scale=favor.scale)
    deviations = (tokens.query @ tokens.key.mT * favor.scale).var(-1).mean((0, 2)).sqrt()
    variances = favor.relative_variance(squares.sum_square, squares.difference_square)
    predicted = predicted_ratio(variances, deviations).square().mean().item()
    return Figure(*_median_and_error(ratios), expected=predicted)


def _median_and_error(values: Tensor) -> tuple[float, float]:
    """Median, and half the distance of the values √n/2 ranks to either side: one standard deviation of the rank."""
    ordered, middle, spread = values.sort().values, len(values) // 2, math.ceil(math.sqrt(len(values)) / 2)
    return ordered[middle].item(), (ordered[middle + spread] - ordered[middle - spread]).item() / 2


@lru_cache(maxsize=1)
def _tokens(config: Config, sigma: float, head_dim: int) -> tuple[Tokens, Tensor]:
    """Sets of tokens, one a head, and their exact outputs."""
    source = generator("predictor", config.seed, sigma, head_dim)
    shape = (3, 1, config.sets, config.num_tokens, head_dim)
    query, key, value = torch.randn(shape, generator=source, dtype=torch.float64)
    tokens = Tokens(sigma * query, sigma * key, value)
    return tokens, softmax_attention(*tokens)
