"""What φ([x; p]) makes of a position depends on φ; for an elementwise one, nothing that content can use.

An elementwise map's features of [x; p] are those of x beside those of p, so its kernel is φ(q)·φ(k) + φ(p_i)·φ(p_j):
the same amount for a pair of positions whatever stands there. The softmax kernel of [q; p_i] and [k; p_j] is
exp(q·k/√D)·exp(p_i·p_j/√D): positions multiply what content gives. The codes are `linattn.positions.LearnedCodes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from linattn.feature_maps import ElementwisePolynomial, EluPlusOne, Exponential, FavorPlus, FeatureMap
from linattn.positions import LearnedCodes
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "Positions are integrated into linear attention by extending the kernel's argument: φ([x_i; p_i])."
SOURCE = 'overview, section "Integrating position encodings"'
AXES = Axes(
    "map",
    "part of what positions do that depends on content",
    log_y=True,
    names=("exp(x/√d)", "(x/√d + 1)²", "elu(x) + 1", "softmax kernel"),
)

_ADDED = "in the kernel"
_MULTIPLIED = "in the kernel's logarithm"
_SOFTMAX = AXES.names.index("softmax kernel")
_FELT = 0.01


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_contents: int
    num_positions: int = 16
    head_dim: int = 64


QUICK = Config(num_contents=32, seconds=0.2)
FULL = Config(num_contents=512, seconds=0.2)


def rows(config: Config) -> Iterator[Measurement]:
    """For every map, how far what a pair of positions changes varies with the content."""
    for x in range(len(AXES.names)):
        yield Measurement(_ADDED, x, partial(_interaction, config, x, logarithm=False))
        yield Measurement(_MULTIPLIED, x, partial(_interaction, config, x, logarithm=True))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The three elementwise maps let positions act on content, or add a term of their own."""
    added, multiplied = in_series(rows, _ADDED), in_series(rows, _MULTIPLIED)
    elementwise, softmax = added[:_SOFTMAX], added[_SOFTMAX]
    # Kernels of 2d terms are summed, and their differences are smaller than they by about √(2d).
    rounding = 2.0**-52 * (2 * FULL.head_dim) ** 1.5
    return decide(
        holds=min(row.value for row in elementwise) > _FELT,
        fails=min(row.value for row in elementwise) < rounding,
        figure=f"what positions add to the kernel varies with content by at most "
        f"{max(row.value for row in elementwise):.0e} of its size with elementwise maps, by {softmax.value:.2f} with "
        f"the softmax kernel, where they multiply it: its logarithm's part is {multiplied[_SOFTMAX].value:.0e}",
        tolerance=f"integrated means more than {_FELT:.0%} for all three; refuted by one within {rounding:.0e}, "
        f"(2d)^(3/2) roundings of float64",
    )


def _interaction(config: Config, x: int, *, logarithm: bool) -> Figure:
    """Root mean square of what depends on content and on positions together over that of what depends on positions."""
    kernel = _kernels(config, x).log() if logarithm else _kernels(config, x)
    content, positions = kernel.mean((1, 2), keepdim=True), kernel.mean(0, keepdim=True)
    together = kernel - content - positions + kernel.mean()
    return Figure((together.square().mean() / (positions - kernel.mean()).square().mean()).sqrt().item())


@lru_cache(maxsize=1)
def _kernels(config: Config, x: int) -> Tensor:
    """Kernel of every content's query and key at every pair of positions, (contents, positions, positions)."""
    source = generator("positions", config.seed)
    shape = (2, config.num_contents, 1, config.head_dim)
    query, key = torch.randn(shape, generator=source, dtype=torch.float64)
    position = torch.randn(config.num_positions, config.head_dim, generator=source, dtype=torch.float64)
    codes = LearnedCodes(config.head_dim, config.head_dim, max_length=config.num_positions)
    codes.codes = nn.Parameter(position, requires_grad=False)
    at, everywhere = torch.arange(config.num_positions), (1, config.num_contents, config.num_positions, -1)
    placed = codes(query.unsqueeze(0).expand(everywhere), key.unsqueeze(0).expand(everywhere), at)
    return codes.bind(_map(x, 2 * config.head_dim)).kernel(*(x.squeeze(0) for x in placed))


def _map(x: int, width: int) -> FeatureMap:
    """The map of an abscissa for content and position together; random features stand for the kernel they estimate."""
    if x == _SOFTMAX:
        return FavorPlus(width, 1)
    return (Exponential(width), ElementwisePolynomial(width, degree=2), EluPlusOne(width))[x]
