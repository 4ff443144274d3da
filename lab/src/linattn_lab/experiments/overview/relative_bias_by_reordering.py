"""A relative bias b_{i-j} on the logits multiplies the weights by exp(b_{i-j}), which no state of finite width holds.

Reordering needs weights of the form φ_i·ψ_j, a matrix of rank at most the width. The Toeplitz matrix exp(b_{i-j}) of a
generic bias has full rank N, so the width would have to grow with the sequence. Special biases do factor: b = -λ(i - j)
has rank 1, a decaying state (`linattn.positions.FixedDecay`). Generic ones need the fast Fourier transform, O(N·log N):
`linattn.positions.relative_bias_attention`, whose applied matrix is measured beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linattn.feature_maps import Relu
from linattn.positions import FixedDecay, relative_bias_attention
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "With the changed order of computation a relative position encoding Q_iᵀK_j → Q_iᵀK_j + b_{i-j} can be used."
SOURCE = 'overview, section "Integrating position encodings"'
AXES = Axes("tokens N", "rank of exp(b_{i-j})", log_x=True, log_y=True)

_GENERIC = "a bias for each distance, N(0, 1)"
_LINEAR = "b = -λ(i - j)"
_APPLIED = "the generic one, as relative_bias_attention applies it"
_DECAY = 2.0**-6
_FEW = 2.0


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...]


QUICK = Config(num_tokens=(32, 64, 128, 256), seconds=0.2)
FULL = Config(num_tokens=(32, 64, 128, 256, 512, 1024), seconds=0.7)


def rows(config: Config) -> Iterator[Measurement]:
    """Ranks of both biases' factors, and of what the transforms apply, at every length."""
    for num_tokens in config.num_tokens:
        for series in (_GENERIC, _LINEAR, _APPLIED):
            yield Measurement(series, num_tokens, partial(_rank, config, series, num_tokens))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The rank of a generic bias's factor stays as the sequence grows, or grows with it."""
    generic, linear, applied = (in_series(rows, series) for series in (_GENERIC, _LINEAR, _APPLIED))
    first, last = generic[0], generic[-1]
    growth = math.log(last.value / first.value) / math.log(last.x / first.x)
    return decide(
        holds=last.value < _FEW * first.value,
        fails=all(row.value == row.x for row in generic),
        figure=f"the factor of a generic bias has rank {last.value:.0f} at N = {last.x:.0f}, that is N^{growth:.2f}; "
        f"that of b = -λ(i - j) has rank {linear[-1].value:.0f}, and is the only one of the two a state can hold; "
        f"relative_bias_attention, by Fourier transforms, applies the generic one at rank {applied[-1].value:.0f}",
        tolerance="ranks are counts: singular values above N roundings of the largest; a state of one width would "
        f"leave the rank where it is while N grows {last.x / first.x:.0f}-fold, full rank everywhere refutes it",
    )


def _rank(config: Config, series: str, num_tokens: int) -> Figure:
    """Numerical rank of the Toeplitz matrix, (N, N), or of what attention with a kernel of 1 applies by it."""
    source = generator("bias", config.seed, num_tokens)
    biases = torch.randn(2 * num_tokens - 1, generator=source, dtype=torch.float64)
    if series == _APPLIED:
        return Figure(float(torch.linalg.matrix_rank(_applied(biases, num_tokens))))
    distance = torch.arange(num_tokens).unsqueeze(-1) - torch.arange(num_tokens)
    bias = -FixedDecay([_DECAY]).rates * distance if series == _LINEAR else biases[distance + num_tokens - 1]
    return Figure(float(torch.linalg.matrix_rank(bias.exp())))


def _applied(biases: Tensor, num_tokens: int) -> Tensor:
    """The matrix by which attention turns values into outputs, (N, N)."""
    same = torch.zeros(1, 1, num_tokens, 1, dtype=torch.float64)
    unit = torch.eye(num_tokens, dtype=torch.float64)[None, None]
    return relative_bias_attention(same, same, unit, Relu(1, floor=1.0), biases.unsqueeze(0))[0, 0]
