"""Reordering (φ(Q)φ(K)ᵀ)V into φ(Q)(φ(K)ᵀV) is associativity: exact for every φ, exponential or not.

What differs from softmax attention is the kernel φ(q)·φ(k), the same in either order; and with φ = exp(x/√d) it differs
as much as with the others. Equality would need φ(q)·φ(k) = c(q)·exp(q·k/√d), which no φ of finite width has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn.attention import linear_attention
from linattn.feature_maps import ElementwisePolynomial, EluPlusOne, Exponential, FeatureMap, Relu
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, overall_relative_error
from linattn_lab.experiments.judging import decide, in_series

CLAIM = (
    "If and only if the kernel is exponential does the changed order leave the result of standard attention unchanged; "
    "for other kernels the change of order introduces an error."
)
SOURCE = 'overview, section "Equivalence", conclusion'
AXES = Axes(
    "map",
    "relative difference of outputs",
    log_y=True,
    names=("exp(x/√d)", "elu(x) + 1", "(x/√d + 1)²", "max(x, 0) + 0.001"),
)

_REORDERED = "from the same weights in the other order"
_SOFTMAX = "from softmax attention"
_EXPONENTIAL = 0


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: int
    head_dim: int = 64


QUICK = Config(num_tokens=256, seconds=0.3)
FULL = Config(num_tokens=512, seconds=0.6)


def rows(config: Config) -> Iterator[Measurement]:
    """Each map in both orders, and against softmax attention."""
    for x in range(len(AXES.names)):
        for series in (_REORDERED, _SOFTMAX, UNIFORM):
            yield Measurement(series, x, partial(_difference, config, series, x))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Both directions: the exponential is softmax attention, and the others change with the order."""
    order, softmax = in_series(rows, _REORDERED), in_series(rows, _SOFTMAX)
    # A weighted mean of values cancels by √L at most on average; each of its L weights sums d products.
    rounding = 2.0**-52 * math.sqrt(FULL.num_tokens) * (FULL.num_tokens + FULL.head_dim)
    changed = [row for row in order if row.x != _EXPONENTIAL and row.value > rounding]
    is_softmax = softmax[_EXPONENTIAL].value <= rounding
    holds = is_softmax and len(changed) == len(order) - 1
    return decide(
        holds=holds,
        fails=not holds,
        figure=f"the order changes no map's output by more than {max(row.value for row in order):.1e} of its size; "
        f"against softmax attention the exponential is off by {softmax[_EXPONENTIAL].value:.2f}, the others by "
        f"{min(row.value for row in softmax[1:]):.2f} to {max(row.value for row in softmax[1:]):.2f}",
        tolerance=f"changed means by more than {rounding:.0e}: √L·(L + d) roundings of float64, L = {FULL.num_tokens} "
        f"and d = {FULL.head_dim}",
    )


def _map(config: Config, x: int) -> FeatureMap:
    """The map of an abscissa."""
    dim = config.head_dim
    return (Exponential(dim), EluPlusOne(dim), ElementwisePolynomial(dim, degree=2), Relu(dim))[x]


def _difference(config: Config, series: str, x: int) -> Figure:
    """Relative difference of the outputs that a series is about, each divided by its own row sums."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, 1.0, "reordering", config.seed)
    if series == UNIFORM:
        return Figure(overall_relative_error(tokens.value.mean(-2, keepdim=True), softmax_attention(*tokens)))
    linear = linear_attention(*tokens, _map(config, x), backend="blocked")
    if series == _SOFTMAX:
        return Figure(overall_relative_error(linear, softmax_attention(*tokens)))
    return Figure(overall_relative_error(linear, linear_attention(*tokens, _map(config, x), backend="reference")))
