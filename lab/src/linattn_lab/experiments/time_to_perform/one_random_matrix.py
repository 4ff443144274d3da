"""A is the product of two random matrices, features of the queries and features of the keys, and it is L × L.

φφᵀ with one φ on both sides is symmetric and positive semidefinite in every draw, hence in expectation, and exp(QKᵀ) is
neither: no symmetric matrix is nearer to A than half of A - Aᵀ. With Q' and K', of L × r numbers each, A = E[Q'K'ᵀ].
The printed shapes, φ of d × r numbers and A of d × d, fit neither; φᵀφ would be r × r.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus, features
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.variance import variance

CLAIM = "A = exp(QKᵀ) is a stochastic low-rank decomposition A = E[φᵀφ]."
SOURCE = "time to perform, section II"
AXES = Axes("draws averaged", "|mean - A| / |A|, Frobenius norms", log_x=True, log_y=True)

QUERIES, KEYS, BOTH = "φ of the queries on both sides", "φ of the keys on both sides", "Q' and K'"
FLOOR = "the nearest symmetric matrix"
_SIDES = {QUERIES: ("query", "query"), KEYS: ("key", "key"), BOTH: ("query", "key")}


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: tuple[int, ...]
    batches: int
    num_tokens: int = 64
    head_dim: int = 16
    num_features: int = 16
    sigma: float = 0.18


QUICK = Config(draws=(1, 10, 100, 1000), batches=8, seconds=1)
FULL = Config(draws=(1, 10, 100, 1000, 10000), batches=8, seconds=18)


def rows(config: Config) -> Iterator[Measurement]:
    """Error of the mean of ever more draws, for each choice of both sides."""
    for count in config.draws:
        yield Measurement(FLOOR, count, partial(_asymmetry, config))
        for series in _SIDES:
            yield Measurement(series, count, partial(_error, config, series, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """With the most draws: one φ stays above the floor of symmetric matrices, two matrices fall below it."""
    floor = max(row.value for row in rows if row.series == FLOOR)
    one = min((in_series(rows, series)[-1] for series in (QUERIES, KEYS)), key=lambda row: row.value)
    two = in_series(rows, BOTH)[-1]
    margin = STANDARD_ERRORS * math.hypot(one.standard_error or 0.0, two.standard_error or 0.0)
    return decide(
        holds=one.value <= two.value + margin,
        fails=one.value - margin > max(floor, two.value),
        figure=f"after {one.x:,.0f} draws the mean of φφᵀ is off by {one.value:.3f} of |A|, no symmetric matrix comes "
        f"nearer than {floor:.3f}, and the mean of Q'K'ᵀ is off by {two.value:.4f}",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over batches ({margin / STANDARD_ERRORS:.4f}); the floor is "
        "|A - Aᵀ| / (2|A|), exactly",
    )


def _asymmetry(config: Config) -> Figure:
    """|A - Aᵀ| / (2|A|)."""
    _, truth = _tokens_and_truth(config)
    return Figure(((truth - truth.mT).norm() / (2 * truth.norm())).item())


def _error(config: Config, series: str, draws: int) -> Figure:
    """Root mean square over batches of |mean - A| / |A|; expected is bias and variance in closed form."""
    tokens, truth = _tokens_and_truth(config)
    left, right = (getattr(tokens, side) for side in _SIDES[series])
    size = truth.norm()
    squares = []
    for batch in range(config.batches):
        favor = _map(config, seed("one matrix", config.seed, series, draws, batch), num_heads=draws)
        phi, psi = (features(favor, x.expand(draws, -1, -1), "query") for x in (left, right))
        # One draw a head: the sum over draws is one product over all their features.
        mean = phi.transpose(0, 1).flatten(1) @ psi.transpose(0, 1).flatten(1).mT / draws
        squares.append(((mean - truth).norm() / size).square())
    found = torch.stack(squares)
    value = found.mean().sqrt().item()
    favor = _map(config, 0)
    bias, spread = favor.kernel(left, right) - truth, variance(favor, left, right)
    expected = math.sqrt((bias.square().sum() + spread.sum() / draws).item()) / size.item()
    return Figure(value, found.std().item() / math.sqrt(config.batches) / (2 * value), expected)


def _map(config: Config, seed: int, num_heads: int | None = None) -> FavorPlus:
    """The random map, without a temperature other than the source's."""
    return FavorPlus(config.head_dim, config.num_features, draw="iid", scale=1.0, seed=seed, num_heads=num_heads)


@lru_cache(maxsize=1)
def _tokens_and_truth(config: Config) -> tuple[Tokens, Tensor]:
    """Queries and keys, (L, D), and A, (L, L)."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, config.sigma, "one matrix", config.seed)
    flat = Tokens(*(x.flatten(0, 2) for x in tokens))
    return flat, (flat.query @ flat.key.mT).exp()
