"""The kernel equals the expectation over one Gaussian vector, to rounding.

E exp(ω·u) = exp(|u|²/2) at u = q + k, divided by exp(|q|²/2)·exp(|k|²/2). The expectation is taken here without
sampling, by Gauss-Hermite quadrature: a product rule over the coordinates of ω, whose error falls faster than
exponentially with its nodes, so that what remains is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator
from linattn_lab.experiments.judging import decide

CLAIM = "exp(q·k) = E[φ_ω(q)·φ_ω(k)] with φ_ω(x) = exp(ω·x - |x|²/2): an exact equation, not an approximation."
SOURCE = 'derivation, section "Gaussian Moment Generating Function"'
AXES = Axes("nodes per coordinate of ω", "largest relative error over pairs", log_y=True)

# |q + k| of the longest pair: the quadrature needs more nodes for longer ones, the equation holds for all.
_LONGEST = 2.0


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_nodes: tuple[int, ...] = (4, 8, 12, 16, 20, 24)
    dimensions: tuple[int, ...] = (1, 2, 3)
    num_pairs: int = 50


QUICK = Config(seconds=0.1)
FULL = Config(num_pairs=500, seconds=1)


def rows(config: Config) -> Iterator[Measurement]:
    """The error in every dimension, with ever more nodes."""
    for dimension in config.dimensions:
        for count in config.num_nodes:
            yield Measurement(f"d = {dimension}", count, partial(_error, config, dimension, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The error with the most nodes is that of rounding, or it is not."""
    most = max(row.x for row in rows)
    worst = max(row.value for row in rows if row.x == most)
    allowed = _rounding(int(most))
    return decide(
        holds=worst <= allowed,
        fails=worst > allowed,
        figure=f"with {most:.0f} nodes per coordinate both sides differ by {worst:.1e} of their value at most",
        tolerance=f"an exponent of up to {_LONGEST:.0f} times the farthest node, rounded a few times over, is off by "
        f"{allowed:.1e}; the quadrature itself by less than n!·{_LONGEST:.0f}^2n/(2n)! = {_truncation(int(most)):.0e}",
    )


def _rounding(num_nodes: int) -> float:
    """Relative error of exp(ω·q - |q|²/2)·exp(ω·k - |k|²/2) where ω and the sums in the exponents are rounded."""
    farthest, _ = _rule(num_nodes)
    roundings = 4  # of a node, of a product, of a sum of three, and of what is subtracted
    return roundings * 2.0**-52 * farthest.max().item() * _LONGEST


def _truncation(num_nodes: int) -> float:
    """The first term a rule with n nodes leaves out of the moments of exp(w·u), |u| the longest."""
    logarithm = math.lgamma(num_nodes + 1) - math.lgamma(2 * num_nodes + 1) + 2 * num_nodes * math.log(_LONGEST)
    return math.exp(logarithm)


def _error(config: Config, dimension: int, num_nodes: int) -> Figure:
    """Largest |quadrature/exp(q·k) - 1| over pairs with |q + k| up to the longest."""
    source = generator("expectation", config.seed, dimension)
    q, k = torch.randn(2, config.num_pairs, dimension, generator=source, dtype=torch.float64)
    # The longest pair of all has the length the tolerance is made for.
    q, k = (x * _LONGEST / (q + k).norm(dim=-1).max() for x in (q, k))
    nodes, weights = _rule(num_nodes)
    omega = torch.cartesian_prod(*[nodes] * dimension).view(-1, dimension)
    weight = torch.cartesian_prod(*[weights] * dimension).view(-1, dimension).prod(-1)
    expectation = (_feature(q, omega) * _feature(k, omega) * weight).sum(-1)
    return Figure((expectation / (q * k).sum(-1).exp() - 1).abs().max().item())


def _feature(x: Tensor, omega: Tensor) -> Tensor:
    """φ_ω(x), one column for each ω."""
    return torch.exp(x @ omega.mT - x.square().sum(-1, keepdim=True) / 2)


def _rule(num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights that integrate polynomials of degree 2n - 1 against the standard Gaussian density exactly."""
    nodes, weights = map(torch.from_numpy, hermegauss(num_nodes))
    return nodes, weights / math.sqrt(2 * math.pi)
