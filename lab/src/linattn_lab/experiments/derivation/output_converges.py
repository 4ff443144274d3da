"""The attention output is a ratio of two unbiased estimates: biased at any width, right in the limit.

The bias falls as 1/r, the spread of one draw as 1/√r: once r exceeds the relative variance e^s - 1 of a kernel entry,
not before.
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
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, slope

CLAIM = "As r → ∞ the linear attention output converges to the softmax attention output."
SOURCE = 'derivation, section "Bringing It Back to the Attention Formula"; the rates are those of a ratio of means'
AXES = Axes("features r", "root mean square over tokens and channels", log_x=True, log_y=True)

_BATCHES = 20
_BIAS = "bias, entries of deviation {}"
_SPREAD = "spread of one draw, entries of deviation {}"
_BAND = 0.1


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    num_features: tuple[int, ...]
    sigmas: tuple[float, ...] = (0.3, 0.6)
    num_tokens: int = 64
    head_dim: int = 16


QUICK = Config(draws=12_000, num_features=(16, 32, 64, 128), seconds=6)
FULL = Config(draws=100_000, num_features=(16, 32, 64, 128, 256), seconds=80)


def rows(config: Config) -> Iterator[Measurement]:
    """Bias and spread at every scale of the inputs and every width."""
    for sigma in config.sigmas:
        for width in config.num_features:
            yield Measurement(_BIAS.format(sigma), width, partial(_bias, config, sigma, width))
            yield Measurement(_SPREAD.format(sigma), width, partial(_spread, config, sigma, width))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The slopes in log-log at the smallest scale of the inputs: -1 for the bias, -1/2 for the spread."""
    bias, bias_error = slope(in_series(rows, _BIAS.format(QUICK.sigmas[0])))
    spread, spread_error = slope(in_series(rows, _SPREAD.format(QUICK.sigmas[0])))
    slow, _ = slope(in_series(rows, _SPREAD.format(QUICK.sigmas[-1])))
    margins = (_BAND + STANDARD_ERRORS * bias_error, _BAND + STANDARD_ERRORS * spread_error)
    return decide(
        holds=abs(bias + 1) < margins[0] and abs(spread + 0.5) < margins[1],
        fails=bias > margins[0] - 0.5 or spread > margins[1] - 0.25,
        figure=f"with entries of deviation {QUICK.sigmas[0]} the bias falls as r^{bias:.2f}, the spread of one draw as "
        f"r^{spread:.2f}; with {QUICK.sigmas[-1]} the spread still falls as r^{slow:.2f}: tails delay the limit",
        tolerance=f"-1 and -1/2 are asymptotic: within {_BAND} for terms of order 1/r at the least r, and "
        f"{STANDARD_ERRORS:.0f} standard errors ({bias_error:.3f}, {spread_error:.3f}); refuted by half of them",
    )


def _bias(config: Config, sigma: float, width: int) -> Figure:
    """Root mean square bias: products of two batches' means estimate its square without the noise of a square."""
    means, _ = _moments(config, sigma, width)
    products = (means.sum(0).square() - means.square().sum(0)).mean() / (_BATCHES * (_BATCHES - 1))
    # Leave one batch out: a jackknife of the same estimate.
    rest = means.sum(0) - means
    squares = means.square().sum(0) - means.square()
    left_out = (rest.square() - squares).mean(1) / ((_BATCHES - 1) * (_BATCHES - 2))
    error = ((left_out - left_out.mean()).square().sum() * (_BATCHES - 1) / _BATCHES).sqrt().item()
    value = math.sqrt(max(products.item(), error))
    return Figure(value, error / (2 * value))


def _spread(config: Config, sigma: float, width: int) -> Figure:
    """Root mean square deviation of one draw from the mean of its batch."""
    _, squares = _moments(config, sigma, width)
    value = squares.mean().sqrt().item()
    return Figure(value, (squares.std() / math.sqrt(_BATCHES)).item() / (2 * value))


@lru_cache(maxsize=2)
def _moments(config: Config, sigma: float, width: int) -> tuple[Tensor, Tensor]:
    """Over batches of draws: mean error per output entry, (batches, entries), and mean variance, (batches,)."""
    query, key, value = gaussian_tokens(config.num_tokens, config.head_dim, sigma, "output", config.seed)
    exact = softmax_attention(query, key, value)
    each = config.draws // _BATCHES
    means, variances = [], []
    for batch in range(_BATCHES):
        # One draw a head: all draws of a batch in one call.
        favor = FavorPlus(
            config.head_dim, width, draw="iid", seed=seed("output", config.seed, sigma, width, batch), num_heads=each
        )
        q, k, v = (x.expand(1, each, -1, -1) for x in (query, key, value))
        error = (linear_attention(q, k, v, favor) - exact).flatten(2).squeeze(0)
        means.append(error.mean(0))
        variances.append(error.var(0).mean())
    return torch.stack(means), torch.stack(variances)
