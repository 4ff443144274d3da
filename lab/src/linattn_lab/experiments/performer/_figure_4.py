"""Figure 4 of the Performer paper: the error of attention's output, sampled once for every claim about it.

The paper took L = 4096, d = 16, 15 trials and "appropriately normalized" inputs. It does not say how they were
normalised, and that decides: entries of deviation σ give s = |x + y|² = 2σ²√d on average. So σ is an axis here.

Letters: L tokens, D head width, R features, N draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import (
    EluPlusOne,
    Exponential,
    FavorPlus,
    FeatureMap,
    Hyperbolic,
    RandomFeatureMap,
    Taylor,
    Trigonometric,
)
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import UNIFORM, Figure, FigureRow
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, mean_figure, mean_square, seed

NUM_TOKENS = 4096
HEAD_DIM = 16
SIGMAS = (0.5, 0.75, 1.0)

TRIGONOMETRIC, TRIGONOMETRIC_IID = "sin and cos, orthogonal", "sin and cos, iid"
POSITIVE, POSITIVE_IID = "FAVOR+, orthogonal", "FAVOR+, iid"

# Maps of R random features, by name: from R, a seed and N, a map with one draw a head.
RANDOM: dict[str, Callable[..., RandomFeatureMap]] = {
    TRIGONOMETRIC: partial(Trigonometric, HEAD_DIM),
    TRIGONOMETRIC_IID: partial(Trigonometric, HEAD_DIM, draw="iid"),
    POSITIVE: partial(FavorPlus, HEAD_DIM),
    POSITIVE_IID: partial(FavorPlus, HEAD_DIM, draw="iid"),
    "FAVOR+, fixed lengths (SMREG)": partial(FavorPlus, HEAD_DIM, lengths="fixed"),
    "hyperbolic, fixed lengths": partial(Hyperbolic, HEAD_DIM, lengths="fixed"),
}
# Maps without a draw, whose width is their own.
FIXED: dict[str, FeatureMap] = {
    "Taylor of order 2": Taylor(HEAD_DIM, order=2),
    "exp of each coordinate": Exponential(HEAD_DIM),
    "elu + 1": EluPlusOne(HEAD_DIM),
}


def mean_error(name: str, width: int, sigma: float, trials: int) -> Figure:
    """Mean over trials of the mean square error, with its standard error."""
    return mean_figure(_over_trials(name, width, sigma, trials))


def median_error(name: str, width: int, sigma: float, trials: int) -> Figure:
    """Median over trials of the mean square error; its standard error is that of a bell curve's, in logarithms."""
    errors = _over_trials(name, width, sigma, trials)
    # torch's median of an even number is the lower of two; this is their mean.
    value = errors.quantile(0.5).item()
    return Figure(value, value * math.sqrt(math.pi / 2 / trials) * errors.log().std().item())


def at(name: str, sigma: float) -> str:
    """Name of a map's curve at one scale."""
    return f"{name}, σ = {sigma}"


def median_at(name: str, sigma: float) -> str:
    """Name of the curve of medians."""
    return f"{at(name, sigma)}, median"


def lead(first: FigureRow, second: FigureRow) -> float:
    """By how many standard errors the logarithm of the first value lies below that of the second."""
    noise = math.hypot(*((row.standard_error or 0.0) / row.value for row in (first, second)))
    return math.log(second.value / first.value) / noise


def draw_errors(name: str, width: int, sigma: float, trial: int, draws: int) -> Tensor:
    """Mean square error of the output under each of N draws of a random map, (N,)."""
    tokens, exact = sampled(sigma, trial)
    feature_map = RANDOM[name](width, seed=seed("figure 4", name, width, sigma, trial), num_heads=draws)
    query, key, value = (x.expand(1, draws, -1, -1) for x in tokens)
    out = linear_attention(query, key, value, feature_map)
    return (out - exact).square().mean((0, 2, 3))


@lru_cache(maxsize=64)
def sampled(sigma: float, trial: int) -> tuple[Tokens, Tensor]:
    """The tokens of one trial and the exact output, 2 MB together."""
    tokens = gaussian_tokens(NUM_TOKENS, HEAD_DIM, sigma, "figure 4", trial)
    return tokens, softmax_attention(*tokens)


def _over_trials(name: str, width: int, sigma: float, trials: int) -> Tensor:
    """The error of every trial, (trials,) float64."""
    return torch.tensor([_error(name, width, sigma, trial) for trial in range(trials)], dtype=torch.float64)


@lru_cache(maxsize=4096)
def _error(name: str, width: int, sigma: float, trial: int) -> float:
    """Mean square error of one trial, with tokens and a draw of its own."""
    if name in RANDOM:
        return draw_errors(name, width, sigma, trial, 1).item()
    tokens, exact = sampled(sigma, trial)
    if name == UNIFORM:
        return mean_square(tokens.value.mean(2, keepdim=True) - exact)
    return mean_square(linear_attention(*tokens, FIXED[name]) - exact)
