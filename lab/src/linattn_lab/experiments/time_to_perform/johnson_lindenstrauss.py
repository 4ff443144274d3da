"""Not Johnson-Lindenstrauss: that lemma's relative error is the same at any length, this one's grows as e^s.

m Gaussian projections give |z|² with relative error √(2/m), whatever z; hence all distances of a finite set at once.
A mean of m exponentials exp(w·z - |z|²/2) has relative error √((e^s - 1)/m), s = |z|²: the Monte Carlo estimate of a
moment generating function. The two cross at s = log 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator, pair_at_angle
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.pairs import Pair, Projection, closed_error, estimates

CLAIM = "Approximating attention by random features is the Johnson-Lindenstrauss method."
SOURCE = 'time to perform, section I ("Johnson-Linderhaus")'
AXES = Axes("s = |q + k|²", "relative standard deviation over draws", log_x=True, log_y=True)

LENGTHS = "|q + k|² by projections"
KERNEL = "exp(q·k) by random features"
FURTHER = "exp(q·k) by random features, closed form"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; at the `further` s fourth moments are out of reach of any number of draws."""

    draws: int
    squares: tuple[float, ...] = (0.125, 0.25, 0.5, 1, 2)
    further: tuple[float, ...] = (4, 8, 16)
    num_projections: int = 64
    head_dim: int = 2


QUICK = Config(draws=20_000, seconds=1)
FULL = Config(draws=100_000, seconds=5)


def rows(config: Config) -> Iterator[Measurement]:
    """Both errors where both can be measured, the kernel's formula beyond."""
    for square in config.squares:
        yield Measurement(LENGTHS, square, partial(_of_length, config, square))
        yield Measurement(KERNEL, square, partial(_of_kernel, config, square))
    for square in config.further:
        yield Measurement(FURTHER, square, partial(_formula, config, square))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether the kernel's error is that of lengths, everywhere."""
    lengths, kernels = in_series(rows, LENGTHS), in_series(rows, KERNEL)
    distances = [
        abs(one.value - other.value) / math.hypot(one.standard_error or 0.0, other.standard_error or 0.0)
        for one, other in zip(lengths, kernels, strict=True)
    ]
    farther = in_series(rows, FURTHER)[-1]
    return decide(
        holds=max(distances) <= STANDARD_ERRORS,
        fails=max(distances) > STANDARD_ERRORS,
        figure=f"from s = {kernels[0].x:g} to {kernels[-1].x:g} the relative error of a length goes from "
        f"{lengths[0].value:.3f} to {lengths[-1].value:.3f}, that of the kernel from {kernels[0].value:.3f} to "
        f"{kernels[-1].value:.3f}, and to {farther.value:.3g} at s = {farther.x:g}",
        tolerance=f"both errors equal at every s within {STANDARD_ERRORS:.0f} standard errors over draws; they differ "
        f"by up to {max(distances):.0f}",
    )


def _of_length(config: Config, square: float) -> Figure:
    """|W·z|²/m for z = q + k."""
    source = generator("lengths", config.seed, square)
    q, k = pair_at_angle(*_pair(square), config.head_dim)
    # By its definition, W drawn anew each time.
    projections = torch.randn(
        config.draws, config.num_projections, config.head_dim, generator=source, dtype=torch.float64
    )
    found = (projections @ (q + k).squeeze()).square().mean(-1)
    return _relative_deviation(found / square, math.sqrt(2 / config.num_projections))


def _of_kernel(config: Config, square: float) -> Figure:
    """φ(q)·φ(k)."""
    pair, rows = _pair(square), Projection(config.num_projections, config.head_dim, "iid")
    sample = estimates("positive", (pair,), rows, config.draws, config.seed)[:, 0]
    return _relative_deviation(sample / pair.kernel, _formula(config, square).value)


def _formula(config: Config, square: float) -> Figure:
    """√((e^s - 1)/m), by the library's closed form."""
    pair, rows = _pair(square), Projection(config.num_projections, config.head_dim, "iid")
    return Figure(math.sqrt(closed_error("positive", pair, rows)) / pair.kernel)


def _relative_deviation(ratios: Tensor, expected: float) -> Figure:
    """Root mean square of ratio - 1, whose mean is 0."""
    squares = (ratios - 1).square()
    value = squares.mean().sqrt().item()
    return Figure(value, squares.std().item() / math.sqrt(squares.numel()) / (2 * value), expected)


def _pair(square: float) -> Pair:
    """q = k with |q + k|² = s."""
    return Pair(math.sqrt(square) / 2, math.sqrt(square) / 2, 0)
