"""The divergence between softmax's weights and those of φ(x) = (x/√d + 1)^k follows neither k² nor Tr(QKᵀ)².

Four ways to see it: at k = 0 the weights are uniform and the divergence is not 0; permuting the keys changes the trace
and not the divergence; forcing the trace to 0 leaves the divergence; scaling queries and keys by c multiplies the
divergence by about c² at first, where the map's own linear term leads, not by c⁴. For small signals it is, by expanding
the logarithms to first order, ½·Var_j[q_i·k_j/√d - (k/d^(3/2))·1·k_j].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linattn.feature_maps import ElementwisePolynomial
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series
from linattn_lab.experiments.overview._weights import divergence, kernel_log_weights, softmax_log_weights

CLAIM = "The KL divergence of the polynomial kernel from standard attention is proportional to k²·Tr(QKᵀ)²/d²."
SOURCE = 'overview, section "Quantifying the error"'
AXES = Axes("degree k, or what the series says", "ratio of divergences")

_DEGREE = "degree k over degree 2"
_PERMUTED = "keys ordered as the queries over keys as they are"
_TRACELESS = "trace forced to 0 over trace as it is"
_DOUBLED = "twice the scale x over the scale x"
_PARTS = (_DEGREE, _PERMUTED, _TRACELESS, _DOUBLED)
_BAND = 0.5


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: int
    degrees: tuple[int, ...] = (0, 1, 4, 8)
    scales: tuple[float, ...] = (0.025, 0.05, 0.1)
    head_dim: int = 16


QUICK = Config(num_tokens=512, seconds=0.3)
FULL = Config(num_tokens=2048, seconds=9)


def rows(config: Config) -> Iterator[Measurement]:
    """Each way's ratio of two divergences beside the ratio claimed."""
    for degree in config.degrees:
        yield Measurement(_DEGREE, degree, partial(_over_degree, config, degree))
    yield Measurement(_PERMUTED, 0, partial(_changed, config, _sorted_like))
    yield Measurement(_TRACELESS, 0, partial(_changed, config, _without_trace))
    for scale in config.scales:
        yield Measurement(_DOUBLED, scale, partial(_doubled, config, scale))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """A proportionality: every ratio as claimed, or one that is not."""
    wrong = [series for series in _PARTS if any(_off(row) > _BAND for row in in_series(rows, series))]
    degree, doubled = in_series(rows, _DEGREE), in_series(rows, _DOUBLED)
    permuted, traceless = in_series(rows, _PERMUTED)[0], in_series(rows, _TRACELESS)[0]
    return decide(
        holds=not wrong,
        fails=bool(wrong),
        figure=f"refuted in {len(wrong)} of {len(_PARTS)} ways: k = 0 leaves {degree[0].value:.2f} of the divergence "
        f"at k = 2 (claimed 0); reordered keys {permuted.value:.2f} (claimed {permuted.expected:.1f}); no trace "
        f"{traceless.value:.2f} (claimed 0); the scale doubled from {doubled[0].x} multiplies it by "
        f"{doubled[0].value:.2f} (claimed 16)",
        tolerance=f"each ratio is exact for these tokens; refuted where it is off by more than {_BAND} of the claimed "
        "ratio, or of what it starts from where 0 is claimed, so that terms of higher order have their room",
    )


def _off(row: FigureRow) -> float:
    """How far a ratio is from the one claimed, relative to that or to 1."""
    if row.expected is None:
        raise ValueError(f"{row.series} claims nothing")
    return abs(row.value - row.expected) / max(row.expected, 1.0)


def _tokens(config: Config) -> tuple[Tensor, Tensor]:
    """Queries and keys, (N, d)."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, 1.0, "divergence", config.seed)
    return tokens.query[0, 0], tokens.key[0, 0]


def _divergence(degree: int, query: Tensor, key: Tensor) -> float:
    """KL(softmax‖polynomial map), k = 0 being uniform weights."""
    exact = softmax_log_weights(query, key)
    if not degree:
        return divergence(exact, torch.full_like(exact, 1 / len(key)).log())
    return divergence(exact, kernel_log_weights(ElementwisePolynomial(query.shape[-1], degree=degree), query, key))


def _over_degree(config: Config, degree: int) -> Figure:
    """Divergence at this degree over that at 2."""
    query, key = _tokens(config)
    return Figure(_divergence(degree, query, key) / _divergence(2, query, key), expected=degree**2 / 4)


def _changed(config: Config, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Figure:
    """Divergence after a change of queries and keys over that before; claimed is the ratio of the squared traces."""
    before = _tokens(config)
    after = change(*before)
    claimed = (after[0] * after[1]).sum().square() / (before[0] * before[1]).sum().square()
    return Figure(_divergence(2, *after) / _divergence(2, *before), expected=claimed.item())


def _sorted_like(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The keys permuted into the order of the queries' first coordinates."""
    ranks = query[:, 0].argsort().argsort()
    return query, key[key[:, 0].argsort()][ranks]


def _without_trace(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The queries less the multiple of the keys that gives Tr(QKᵀ) = 0."""
    return query - key * ((query * key).sum() / key.square().sum()), key


def _doubled(config: Config, scale: float) -> Figure:
    """Divergence at twice the scale over that at the scale."""
    query, key = _tokens(config)
    ratio = _divergence(2, 2 * scale * query, 2 * scale * key) / _divergence(2, scale * query, scale * key)
    return Figure(ratio, expected=16.0)
