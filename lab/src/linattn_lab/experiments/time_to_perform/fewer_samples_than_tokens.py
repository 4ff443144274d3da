"""With fewer samples than tokens it is faster; it is accurate only where q and k are small.

Faster by operations: r < L/2. As for right, averaging the values costs nothing, and is off by about (e^{τ²} - 1)/e^{τ²}
where τ is the deviation of a row's logits; in the same unit r samples are off by (e^s - 1)/r, the relative variance of
a kernel entry. To do better takes

    r > (e^s - 1)·e^{τ²}/(e^{τ²} - 1).

N(0, σ²) entries of width D, at the usual scale 1/√D, have s ≈ 2σ²√D and τ ≈ σ²: at D = 64 and σ = 1 that is r > 10⁷.
It is above L/2 at σ = 0.1 too, where attention hardly differs from averaging, and below it only between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, mean_figure, mean_square, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, value_at

CLAIM = "The number of samples needed is small enough to be faster than computing the exact attention matrix."
SOURCE = "time to perform, section II.1, as a condition of the method"
AXES = Axes("deviation σ of the entries of q and k", "mean square error of the output", log_y=True)

_CURVE = "{} samples"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; the last number of features is L/2, where the multiplications are equal."""

    trials: int
    sigmas: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1)
    num_features: tuple[int, ...] = (64, 256, 512)
    num_tokens: int = 1024
    head_dim: int = 64


QUICK = Config(trials=5, seconds=1)
FULL = Config(trials=60, seconds=20)


def rows(config: Config) -> Iterator[Measurement]:
    """The error at every scale, by each number of samples and by averaging."""
    for sigma in config.sigmas:
        for width in config.num_features:
            yield Measurement(_CURVE.format(width), sigma, partial(_error, config, sigma, width))
        yield Measurement(UNIFORM, sigma, partial(_error, config, sigma, None))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """As many samples as can pay, on tokens with N(0, 1) entries: do they do better than averaging the values?"""
    most, sigma = _CURVE.format(QUICK.num_features[-1]), QUICK.sigmas[-1]
    found, averaged = value_at(rows, most, sigma), value_at(rows, UNIFORM, sigma)
    margin = STANDARD_ERRORS * math.hypot(found.standard_error or 0.0, averaged.standard_error or 0.0)
    better = [f"{row.x:g}" for row in in_series(rows, most) if row.value < value_at(rows, UNIFORM, row.x).value]
    needed = math.expm1(2 * sigma**2 * math.sqrt(QUICK.head_dim)) / -math.expm1(-(sigma**4))
    return decide(
        holds=found.value + margin < averaged.value,
        fails=found.value - margin > averaged.value,
        figure=f"with N(0, 1) entries of q and k {most} for {QUICK.num_tokens} tokens have an error of "
        f"{found.value:.2g}, averaging the values {averaged.value:.2g}; to do better takes about {needed:.0e} samples. "
        f"So few do better at σ = {', '.join(better) or 'none'} of {', '.join(f'{x:g}' for x in QUICK.sigmas)}",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over independent tokens and draws "
        f"({margin / STANDARD_ERRORS:.1g})",
    )


def _error(config: Config, sigma: float, width: int | None) -> Figure:
    """Mean square error of FAVOR+, orthogonal rows, or of the mean of all values."""
    errors = []
    for trial in range(config.trials):
        tokens, truth = _tokens_and_truth(config, sigma, trial)
        out = tokens.value.mean(-2, keepdim=True)
        if width is not None:
            favor = FavorPlus(config.head_dim, width, seed=seed("samples", config.seed, sigma, width, trial))
            out = linear_attention(*tokens, favor)
        errors.append(mean_square(out - truth))
    return mean_figure(errors)


@lru_cache(maxsize=64)
def _tokens_and_truth(config: Config, sigma: float, trial: int) -> tuple[Tokens, Tensor]:
    """Tokens of one trial, and exact attention over them."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, sigma, "samples", config.seed, sigma, trial)
    return tokens, softmax_attention(*tokens)
