"""The divergence between softmax's weights and the polynomial map's, to leading order in the scale of the inputs.

Two rows of weights with nearly constant log-ratio ρ_j lie ½ Var_j ρ_j apart. Of log Σ_l (q_l k_l/d + (q_l + k_l)/√d +
1)^k the largest term that depends on the key is (k/d)·Σ_l k_l/√d, so that

    KL_i ≈ ½ Var_j[ q_i·k_j/√d - (k/d^(3/2))·1·k_j ]

With entries of deviation c the first part has variance c⁴, the second c²·k²/d². The next term of the map,
(k²/d²)·q·k, takes 2k²/d^(3/2) of the first part's variance: nothing in the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn.feature_maps import ElementwisePolynomial
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series
from linattn_lab.experiments.overview._weights import divergence, kernel_log_weights, softmax_log_weights

CLAIM = (
    "For small queries and keys the KL divergence of the polynomial kernel from standard attention is "
    "½·Var_j[q_i·k_j/√d - (k/d^(3/2))·1·k_j]: what the overview's law of k²·Tr(QKᵀ)²/d² should read."
)
SOURCE = 'overview, section "Quantifying the error", corrected; expansion of the logarithms to first order'
AXES = Axes("deviation c of the entries of q and k", "divergence measured over divergence predicted", log_x=True)

_SCALES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
_DEGREES = (2, 4)
_HEAD_DIM = 16
_SMALL = 0.1
_FACTOR = 2.0


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    num_tokens: int
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(num_tokens=512, seconds=0.2)
FULL = Config(num_tokens=2048, seconds=4)


def rows(config: Config) -> Iterator[Measurement]:
    """The ratio at every scale, for two degrees."""
    for degree in _DEGREES:
        for scale in _SCALES:
            yield Measurement(_degree(degree), scale, partial(_ratio, config, degree, scale))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Below the largest small scale, the ratio is 1 up to the next term; it ends at 1."""
    small = [(row, degree) for degree in _DEGREES for row in in_series(rows, _degree(degree)) if row.x <= _SMALL]
    worst, of_degree = max(small, key=lambda pair: abs(pair[0].value - 1) / _next_term(pair[1], pair[0].x))
    share = abs(worst.value - 1) / _next_term(of_degree, worst.x)
    last = [in_series(rows, _degree(degree))[0] for degree in _DEGREES]
    holds = share <= _FACTOR
    return decide(
        holds=holds,
        fails=not holds,
        figure=f"measured over predicted is {', '.join(f'{row.value:.4f}' for row in last)} at c = {last[0].x} for "
        f"k = {', '.join(str(degree) for degree in _DEGREES)}; farthest from 1, in units of the next term, at "
        f"c = {worst.x} and k = {of_degree}: {worst.value:.4f}",
        tolerance=f"the next term, 2k²/d^(3/2)·c²/(c² + k²/d²), {_next_term(of_degree, worst.x):.4f} there and "
        f"{_next_term(_DEGREES[0], last[0].x):.4f} at the least c, and as much again for those after it, for "
        f"c ≤ {_SMALL}",
    )


def _degree(degree: int) -> str:
    """Name of a curve."""
    return f"degree k = {degree}"


def _next_term(degree: int, scale: float) -> float:
    """What the law neglects first, relative to what it keeps."""
    return 2 * degree * degree / math.pow(_HEAD_DIM, 1.5) * scale**2 / (scale**2 + (degree / _HEAD_DIM) ** 2)


def _ratio(config: Config, degree: int, scale: float) -> Figure:
    """Divergence measured over that of the law."""
    tokens = gaussian_tokens(config.num_tokens, _HEAD_DIM, scale, "divergence", config.seed)
    query, key = tokens.query[0, 0], tokens.key[0, 0]
    found = kernel_log_weights(ElementwisePolynomial(_HEAD_DIM, degree=degree), query, key)
    measured = divergence(softmax_log_weights(query, key), found)
    log_ratio = query @ key.mT * _HEAD_DIM**-0.5 - degree * _HEAD_DIM**-1.5 * key.sum(-1)
    return Figure(measured / (log_ratio.var(-1, correction=0).mean().item() / 2), expected=1.0)
