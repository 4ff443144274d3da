"""A lower variance of kernel entries does not always give a lower error of attention's output.

The tilt of optimal positive random features lowers the variance of every entry. Where entries are estimated well the
error of the output follows. Where they are not, the variance is that of rare large features which a draw seldom has:
the error of a typical draw is governed by the rest, and by how far values can average at all, and FAVOR+ can be the
better one with a variance hundreds of times as large. Both are then worse than averaging the values.

Letters: D head width, r features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus, Oprf
from linattn.softmax import softmax_attention
from linattn_lab.audit.moments import pair_moments
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, mean_square, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, value_at

CLAIM = "Features with a lower variance of the kernel estimate give a lower error of the attention output."
SOURCE = "Likhosherstov et al. 2022 (arXiv 2205.15317), whose features minimise the former for the sake of the latter"
AXES = Axes(
    "deviation of the entries of q and k",
    "mean square error of the output; relative variance of an entry",
    log_y=True,
)

_FAVOR, _OPRF = "FAVOR+", "OPRF"
_WIDTHS = (64, 256)
_SIGMAS = (0.5, 1.0, 1.25)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment: `features` over r draws of each."""

    features: int
    num_tokens: int
    head_dim: int = 16
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(features=12_800, num_tokens=512, seconds=2)
FULL = Config(features=25_600, num_tokens=4096, seconds=40)


def rows(config: Config) -> Iterator[Measurement]:
    """Both features' error and variance, at two widths and three scales."""
    for sigma in _SIGMAS:
        yield Measurement(UNIFORM, sigma, partial(_averaging, config, sigma))
        for width in _WIDTHS:
            for kind in (_FAVOR, _OPRF):
                yield Measurement(_error_of(kind, width), sigma, partial(_error, config, kind, width, sigma))
                yield Measurement(_variance_of(kind, width), sigma, partial(_variance, config, kind, width, sigma))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Wherever OPRF's variance is the lower one, so is its error."""
    scores = []
    for width in _WIDTHS:
        favor, oprf = (in_series(rows, _error_of(kind, width)) for kind in (_FAVOR, _OPRF))
        variances = [in_series(rows, _variance_of(kind, width)) for kind in (_FAVOR, _OPRF)]
        for mine, theirs, *entry in zip(oprf, favor, *variances, strict=True):
            # Positive where the one of lower variance has the larger error, in standard errors of the difference.
            noise = math.hypot(mine.standard_error or 0, theirs.standard_error or 0)
            sign = math.copysign(1, entry[0].value - entry[1].value)
            scores.append((sign * (mine.value - theirs.value) / noise, mine, theirs))
    score, mine, theirs = max(scores, key=lambda one: one[0])
    width = next(width for width in _WIDTHS if mine.series == _error_of(_OPRF, width))
    entries = [value_at(rows, _variance_of(kind, width), mine.x).value for kind in (_OPRF, _FAVOR)]
    first = [value_at(rows, _error_of(kind, _WIDTHS[-1]), _SIGMAS[0]).value for kind in (_OPRF, _FAVOR)]
    return decide(
        holds=all(one[0] < -STANDARD_ERRORS for one in scores),
        fails=score > STANDARD_ERRORS,
        figure=f"with entries of deviation {mine.x} and r = {width} OPRF's variance is {entries[0]:.3g} against "
        f"FAVOR+'s {entries[1]:.3g}, its error {mine.value:.2g} against {theirs.value:.2g} (averaging: "
        f"{value_at(rows, UNIFORM, mine.x).value:.2g}); with {_SIGMAS[0]} and r = {_WIDTHS[-1]} its error is lower "
        f"too, {first[0]:.2g} against {first[1]:.2g}",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors of the difference over draws, here {score:.0f}; the claim "
        "must be borne out everywhere, and is refuted by one setting",
    )


def _error_of(kind: str, width: int) -> str:
    """Name of a curve."""
    return f"{kind}, r = {width}"


def _variance_of(kind: str, width: int) -> str:
    """Name of a curve."""
    return f"variance of an entry, {kind}, r = {width}"


def _feature_map(config: Config, kind: str, width: int, sigma: float) -> FavorPlus | Oprf:
    """One draw a head, so that all draws take one call; OPRF is fitted to the tokens."""
    dim, purpose = config.head_dim, seed("output", config.seed, kind, width, sigma)
    draws = config.features // width
    if kind == _FAVOR:
        return FavorPlus(dim, width, seed=purpose, num_heads=draws)
    tokens = _tokens(config, sigma)
    return Oprf(dim, width, seed=purpose, num_heads=draws).fit(tokens.query, tokens.key)


def _error(config: Config, kind: str, width: int, sigma: float) -> Figure:
    """Mean square error of the output over draws, and its standard error."""
    tokens = _tokens(config, sigma)
    query, key, value = (x.expand(1, config.features // width, -1, -1) for x in tokens)
    out = linear_attention(query, key, value, _feature_map(config, kind, width, sigma))
    errors = (out - softmax_attention(*tokens)).square().mean((0, 2, 3))
    return Figure(errors.mean().item(), errors.std().item() / math.sqrt(len(errors)))


def _variance(config: Config, kind: str, width: int, sigma: float) -> Figure:
    """Relative variance of an entry at the mean |x + y|², in closed form."""
    tokens, phi = _tokens(config, sigma), _feature_map(config, kind, width, sigma)
    squares = pair_moments(tokens.query, tokens.key, scale=phi.scale)
    return Figure(phi.relative_variance(squares.sum_square, squares.difference_square).item())


def _averaging(config: Config, sigma: float) -> Figure:
    """Mean square error of the mean of all values."""
    tokens = _tokens(config, sigma)
    return Figure(mean_square(tokens.value.mean(-2, keepdim=True) - softmax_attention(*tokens)))


@lru_cache(maxsize=1)
def _tokens(config: Config, sigma: float) -> Tokens:
    """The tokens, the same for both kinds of features."""
    return gaussian_tokens(config.num_tokens, config.head_dim, sigma, "output", config.seed)
