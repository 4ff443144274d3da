"""Elementwise maps give each key a weight that hardly depends on the query, so they come close to averaging.

Their kernels are sums over coordinates of products of positive factors: a constant that dwarfs what depends on both
query and key. Where attention is sharp its output is lost, on Gaussian tokens and on clustered ones alike. Whatever
keeps the core of attention must lose clearly less than averaging the values does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn.attention import linear_attention
from linattn.feature_maps import ElementwisePolynomial, EluPlusOne, Exponential, FeatureMap
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, generator, mean_figure, overall_relative_error
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, value_at

CLAIM = "Linear attention reduces the complexity to O(N) while keeping the core properties of the attention mechanism."
SOURCE = 'overview, sections "Overview" and "Choice of kernel", with the three maps listed there'
AXES = Axes(
    "tokens",
    "relative error of the output",
    names=("Gaussian, deviation 1", "Gaussian, deviation 2", "8 clusters"),
)

_SIGMAS = (1.0, 2.0)
_CLUSTERED = len(_SIGMAS)
_NUM_CLUSTERS = 8
_CENTRE, _SPREAD = 1.5, 0.5
_MAPS = ("exp(x/√d)", "(x/√d + 1)²", "elu(x) + 1")
_KEPT = 0.5


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    num_tokens: int = 1024
    head_dim: int = 64


QUICK = Config(draws=4, seconds=0.3)
FULL = Config(draws=60, seconds=4)


def rows(config: Config) -> Iterator[Measurement]:
    """Every map and the mean of the values, on every kind of tokens."""
    for x in range(len(AXES.names)):
        for series in (*_MAPS, UNIFORM):
            yield Measurement(series, x, partial(_error, config, series, x))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Every map on every kind of tokens loses less than half of what averaging loses, or some does not."""
    ratios = {(series, x): _over_averaging(rows, series, x) for series in _MAPS for x in range(len(AXES.names))}
    lost = [key for key, (ratio, error) in ratios.items() if ratio - STANDARD_ERRORS * error > _KEPT]
    kept = [key for key, (ratio, error) in ratios.items() if ratio + STANDARD_ERRORS * error < _KEPT]
    shown = "; ".join(
        f"{name}: {', '.join(f'{ratios[series, x][0]:.2f}' for series in _MAPS)}" for x, name in enumerate(AXES.names)
    )
    return decide(
        holds=len(kept) == len(ratios),
        fails=bool(lost),
        figure=f"errors over averaging's with {', with '.join(_MAPS)}: {shown}",
        tolerance=f"kept means an error below {_KEPT} of averaging's, by {STANDARD_ERRORS:.0f} standard errors, for "
        f"every map on every kind of tokens; refuted where one lies above by as many",
    )


def _over_averaging(rows: Sequence[FigureRow], series: str, x: int) -> tuple[float, float]:
    """A map's error over averaging's, and a bound of its standard error: those of both add at most."""
    found, uniform = value_at(rows, series, x), value_at(rows, UNIFORM, x)
    ratio = found.value / uniform.value
    relative = (found.standard_error or 0) / max(found.value, 2.0**-52) + (uniform.standard_error or 0) / uniform.value
    return ratio, ratio * relative


def _error(config: Config, series: str, x: int) -> Figure:
    """Mean over draws of the tokens of the relative error, and its standard error."""
    return mean_figure([_errors(config, x, draw)[series] for draw in range(config.draws)])


@lru_cache(maxsize=FULL.draws)
def _errors(config: Config, x: int, draw: int) -> dict[str, float]:
    """Relative error of every map, and of averaging, on one draw of the tokens."""
    tokens = _tokens(config, x, draw)
    exact = softmax_attention(*tokens)
    dim = config.head_dim
    maps: tuple[FeatureMap, ...] = (Exponential(dim), ElementwisePolynomial(dim, degree=2), EluPlusOne(dim))
    outputs = {name: linear_attention(*tokens, phi) for name, phi in zip(_MAPS, maps, strict=True)}
    return {
        name: overall_relative_error(out, exact)
        for name, out in (outputs | {UNIFORM: tokens.value.mean(-2, keepdim=True)}).items()
    }


def _tokens(config: Config, x: int, draw: int) -> Tokens:
    """Gaussian tokens, or tokens around the centres of clusters, with values of their cluster."""
    if x < _CLUSTERED:
        return gaussian_tokens(config.num_tokens, config.head_dim, _SIGMAS[x], "kept", config.seed, draw)
    source = generator("kept", "clusters", config.num_tokens, config.head_dim, config.seed, draw)
    centres, means = torch.randn(2, _NUM_CLUSTERS, config.head_dim, generator=source, dtype=torch.float64)
    noise = torch.randn(3, config.num_tokens, config.head_dim, generator=source, dtype=torch.float64)
    query_in, key_in = torch.randint(_NUM_CLUSTERS, (2, config.num_tokens), generator=source)
    query, key = (_CENTRE * centres[i] + _SPREAD * noise[n] for n, i in enumerate((query_in, key_in)))
    return Tokens(query[None, None], key[None, None], (means[key_in] + _SPREAD * noise[2])[None, None])
