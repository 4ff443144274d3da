"""One-hot values make the output the attention matrix that is never formed; its error falls as 1/√r.

    out = D⁻¹φ(Q)φ(K)ᵀ·I = D⁻¹φ(Q)φ(K)ᵀ

An identity, to rounding. How near that matrix is to the one of softmax is another matter: its error falls as 1/√r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus, features
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, mean_figure, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, slope

CLAIM = (
    "The attention matrix that random features imply is recovered by applying the attention to one-hot values, and "
    "approximates that of softmax attention."
)
SOURCE = "Performer paper (arXiv 2009.14794), appendix C.4"
AXES = Axes("features r", "root mean square over entries, over that of the softmax matrix", log_x=True, log_y=True)

_IMPLIED = "one-hot values against φ(Q)φ(K)ᵀ, normalised"
_SOFTMAX = "one-hot values against softmax attention"
_BAND = 0.1


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; entries of deviation 0.3 and width 16 have |x + y|² near 0.7."""

    draws: int
    num_features: tuple[int, ...]
    num_tokens: int = 64
    head_dim: int = 16
    sigma: float = 0.3


QUICK = Config(draws=100, num_features=(32, 64, 128, 256), seconds=0.5)
FULL = Config(draws=200, num_features=(32, 64, 128, 256, 512, 1024), seconds=2)


def rows(config: Config) -> Iterator[Measurement]:
    """What one-hot values give, against the implied and the exact matrix; and averaging the values."""
    for width in config.num_features:
        yield Measurement(_IMPLIED, width, partial(_implied, config, width))
        yield Measurement(_SOFTMAX, width, partial(_softmax, config, width))
        yield Measurement(UNIFORM, width, partial(_uniform, config))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The identity to rounding, and the slope of the distance from softmax in log-log."""
    rounding = max(row.value for row in in_series(rows, _IMPLIED))
    curve = in_series(rows, _SOFTMAX)
    steepness, error = slope(curve)
    margin = _BAND + STANDARD_ERRORS * error
    bound = 2.0**-52 * curve[-1].x
    uniform = in_series(rows, UNIFORM)[-1].value
    return decide(
        holds=rounding <= bound and abs(steepness + 0.5) < margin,
        fails=rounding > 2 * bound or steepness > margin - 0.25,
        figure=f"one-hot values give φ(Q)φ(K)ᵀ, normalised, to {rounding:.0e}; its distance from the softmax matrix "
        f"falls as r^{steepness:.2f}, to {curve[-1].value:.3f} at r = {curve[-1].x:.0f}, where equal weights are "
        f"{uniform:.3f} away",
        tolerance=f"a rounding of float64 for each of r terms, {bound:.0e}; the slope -1/2 is asymptotic: within "
        f"{_BAND} for terms of order 1/r, and {STANDARD_ERRORS:.0f} standard errors ({error:.3f}); refuted by "
        "half of it",
    )


@lru_cache(maxsize=2)
def _matrices(config: Config, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention matrices (draws, L, L) by one-hot values, by the features themselves, and by softmax."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, config.sigma, "recovery", config.seed)
    query, key = (x.expand(1, config.draws, -1, -1) for x in tokens[:2])
    one_hot = torch.eye(config.num_tokens, dtype=torch.float64).expand(1, config.draws, -1, -1)
    own = seed("recovery", config.seed, width)
    favor = FavorPlus(config.head_dim, width, seed=own, num_heads=config.draws)
    recovered = linear_attention(query, key, one_hot, favor)[0]
    weights = (features(favor, query, "query") @ features(favor, key, "key").mT)[0]
    exact = softmax_attention(tokens.query, tokens.key, one_hot[:, :1])[0]
    return recovered, weights / weights.sum(-1, keepdim=True), exact


def _relative(difference: Tensor, exact: Tensor) -> Tensor:
    """Root mean square of each draw's entries over that of the exact matrix."""
    return difference.square().mean((-2, -1)).sqrt() / exact.square().mean().sqrt()


def _implied(config: Config, width: int) -> Figure:
    """The draw that lies farthest from its own features."""
    recovered, implied, exact = _matrices(config, width)
    return Figure(_relative(recovered - implied, exact).max().item(), None, 0.0)


def _softmax(config: Config, width: int) -> Figure:
    """Mean distance from softmax attention over draws."""
    recovered, _, exact = _matrices(config, width)
    return mean_figure(_relative(recovered - exact, exact))


def _uniform(config: Config) -> Figure:
    """Distance of equal weights from softmax attention."""
    *_, exact = _matrices(config, config.num_features[0])
    return Figure(_relative(1 / config.num_tokens - exact, exact).item())
