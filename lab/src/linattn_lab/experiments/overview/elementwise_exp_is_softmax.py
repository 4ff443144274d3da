"""exp(q/√d)·exp(k/√d) is Σ_l exp((q_l + k_l)/√d), not exp(Σ_l q_l k_l/√d): a product of exponentials adds exponents.

It depends on q and k through sums, never through products of coordinates: in one dimension q cancels and every query
attends to the largest key, whatever its sign. On Gaussian tokens the weights lie as far from softmax attention's as
uniform ones do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import Exponential
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import EXACT, UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, mean_figure, overall_relative_error
from linattn_lab.experiments.judging import decide, value_at
from linattn_lab.experiments.overview._weights import divergence, kernel_log_weights, softmax_log_weights

CLAIM = "The exponential kernel φ(x) = exp(x/√d) is strictly equivalent to standard attention."
SOURCE = 'overview, sections "Choice of kernel" and "Proof of strict equivalence"'
AXES = Axes(
    "what is compared",
    "weight, relative error, nats",
    names=("weight of key 1 (d = 1)", "error of the output", "KL from softmax's weights"),
)

_MAP = "elementwise exponential"
_WEIGHT, _ERROR, _DIVERGENCE = range(3)
_ROUNDING = 2.0**-52


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    num_tokens: int = 512
    head_dim: int = 64


QUICK = Config(draws=4, seconds=0.3)
FULL = Config(draws=100, seconds=6)


def rows(config: Config) -> Iterator[Measurement]:
    """One query between two keys in one dimension; then Gaussian tokens."""
    for series in (EXACT, _MAP, UNIFORM):
        yield Measurement(series, _WEIGHT, partial(_weight, series))
    for series in (_MAP, UNIFORM):
        yield Measurement(series, _ERROR, partial(_sampled, config, series, _ERROR))
        yield Measurement(series, _DIVERGENCE, partial(_sampled, config, series, _DIVERGENCE))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Equivalence is equality: all three comparisons within rounding, or refuted by any."""
    weight, error, kl = (value_at(rows, _MAP, x) for x in (_WEIGHT, _ERROR, _DIVERGENCE))
    exact, uniform = value_at(rows, EXACT, _WEIGHT), value_at(rows, UNIFORM, _DIVERGENCE)
    rounding = _ROUNDING * FULL.num_tokens
    same = abs(weight.value - exact.value) < rounding and error.value < rounding and abs(kl.value) < rounding
    return decide(
        holds=same,
        fails=not same,
        figure=f"in one dimension with q = -1 and keys 1 and -1 the first weight is {exact.value:.3f}, the elementwise "
        f"map's {weight.value:.3f}; in {FULL.head_dim} dimensions its output is wrong by {error.value:.2f} of its "
        f"size, its weights by {kl.value:.3f} nats where uniform ones are by {uniform.value:.3f}",
        tolerance=f"an identity: within {rounding:.0e}, the rounding of a sum over {FULL.num_tokens} keys",
    )


def _weight(series: str) -> Figure:
    """Weight of key 1 for the query -1 and the keys 1 and -1."""
    query, key = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    exact = softmax_log_weights(query, key).exp()[0, 0].item()
    if series == _MAP:
        return Figure(kernel_log_weights(Exponential(1), query, key).exp()[0, 0].item(), expected=exact)
    return Figure(exact if series == EXACT else 0.5)


def _sampled(config: Config, series: str, which: int) -> Figure:
    """A mean over draws of the tokens, and its standard error."""
    sample = [_both(config, series, draw)[which - 1] for draw in range(config.draws)]
    return mean_figure(sample, expected=0.0 if series == _MAP else None)


@lru_cache(maxsize=2 * FULL.draws)
def _both(config: Config, series: str, draw: int) -> tuple[float, float]:
    """Relative error of the output, and divergence of the weights, on one draw of the tokens."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, 1.0, "elementwise", config.seed, draw)
    exact, log_weights = softmax_attention(*tokens), softmax_log_weights(tokens.query, tokens.key)
    out: Tensor
    if series == UNIFORM:
        out = tokens.value.mean(-2, keepdim=True)
        found = torch.full_like(log_weights, -math.log(config.num_tokens))
    else:
        kernel = Exponential(config.head_dim)
        out = linear_attention(*tokens, kernel)
        found = kernel_log_weights(kernel, tokens.query, tokens.key)
    return overall_relative_error(out, exact), divergence(log_weights, found)
