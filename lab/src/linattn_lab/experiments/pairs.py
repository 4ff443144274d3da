"""One entry of the kernel, exp(x·y), as the Performer paper's three estimators see it: sampled, and in closed form.

Everything about a pair is in s = |x + y|² and D = |x - y|². Samples of exp(w·(x + y)) are lognormal: the k-th moment
comes from rows whose component along x + y is near k√s. Means need k = 2 for their standard error and are sampled up to
s = 2, where that is 2.8; variances need k = 4 and are sampled up to s = 1, where one row in 30,000 reaches it.

Letters: N draws, P pairs, D head width.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus, Hyperbolic, RandomFeatureMap, Trigonometric, features
from linattn_lab.experiments.experiment import Figure
from linattn_lab.experiments.inputs import pair_at_angle, seed
from linattn_lab.variance import relative_variance

ESTIMATORS: dict[str, type[FavorPlus] | type[Hyperbolic] | type[Trigonometric]] = {
    "trigonometric": Trigonometric,
    "positive": FavorPlus,
    "hyperbolic": Hyperbolic,
}
"""The paper's estimators of exp(x·y) by name."""
LARGEST_SQUARE = 1.0
"""The largest |x + y|² at which a variance over draws, with its standard error, can be sampled."""
Draw = Literal["orthogonal", "iid"]
_BATCH = 2000


class Pair(NamedTuple):
    """A query and a key, the temperature absorbed: two lengths and the angle between, in degrees."""

    norm_x: float
    norm_y: float
    degrees: float

    @property
    def product(self) -> float:
        """x·y."""
        return self.norm_x * self.norm_y * math.cos(math.radians(self.degrees))

    @property
    def kernel(self) -> float:
        """exp(x·y)."""
        return math.exp(self.product)

    @property
    def sum_square(self) -> float:
        """s = |x + y|²."""
        return self.norm_x**2 + self.norm_y**2 + 2 * self.product

    @property
    def difference_square(self) -> float:
        """D = |x - y|²."""
        return self.norm_x**2 + self.norm_y**2 - 2 * self.product

    def has_light_tails(self, name: str) -> bool:
        """Whether an estimator's variance can be sampled here: cosines are bounded, exponentials are not."""
        rounding = 1e-9  # s = 2l²(1 + cos 120°) is l² up to rounding
        return name == "trigonometric" or self.sum_square <= LARGEST_SQUARE + rounding


class Projection(NamedTuple):
    """The rows of a random projection."""

    num_rows: int
    head_dim: int
    draw: Draw
    lengths: Literal["chi", "fixed"] = "chi"


def paper_error(name: str, pair: Pair) -> float:
    """Mean squared error of an estimator made of one independent row, as the paper's lemma 2 has it."""
    s, difference, kernel = pair.sum_square, pair.difference_square, pair.kernel
    if name == "trigonometric":
        return math.exp(s) * kernel**-2 * math.expm1(-difference) ** 2 / 2
    positive = math.exp(s) * kernel**2 * -math.expm1(-s)
    return positive if name == "positive" else -math.expm1(-s) / 2 * positive


def closed_error(name: str, pair: Pair, projection: Projection) -> float:
    """Mean squared error of an estimator, as the library has it."""
    squares = (torch.tensor(x, dtype=torch.float64) for x in (pair.sum_square, pair.difference_square))
    return relative_variance(estimator(name, projection), *squares).item() * pair.kernel**2


def estimator(name: str, projection: Projection, *, drawn_from: int = 0, draws: int | None = None) -> RandomFeatureMap:
    """One of the three, for inputs that have absorbed the temperature; with `draws`, one draw per head."""
    kind = ESTIMATORS[name]
    return kind(
        projection.head_dim,
        projection.num_rows * kind.features_per_row,
        draw=projection.draw,
        lengths=projection.lengths,
        scale=1.0,
        seed=drawn_from,
        num_heads=draws,
    )


@lru_cache(maxsize=8)
def estimates(name: str, pairs: tuple[Pair, ...], projection: Projection, draws: int, at: int) -> Tensor:
    """What `draws` draws estimate the kernel of each pair to be, (N, P); the pairs share their draws."""
    x, y = (
        torch.cat(side) for side in zip(*(pair_at_angle(*pair, projection.head_dim) for pair in pairs), strict=True)
    )
    found = []
    for batch in range(0, draws, _BATCH):
        own = seed("pairs", name, *projection, at, batch)
        feature_map = estimator(name, projection, drawn_from=own, draws=min(_BATCH, draws - batch))
        found.append((features(feature_map, x, "query") * features(feature_map, y, "key")).sum(-1))
    return torch.cat(found)


def variance_figure(sample: Tensor, expected: float | None, unit: float = 1.0) -> Figure:
    """Variance of independent numbers in some unit, with the standard error that their fourth moment gives."""
    variance = sample.var()
    fourth = (sample - sample.mean()).pow(4).mean()
    error = ((fourth - variance.square()) / len(sample)).sqrt()
    return Figure(variance.item() / unit, error.item() / unit, expected)


def variance_ratio(above: Tensor, below: Tensor, expected: float | None) -> Figure:
    """Ratio of the variances of two independent samples."""
    one, other = variance_figure(above, None), variance_figure(below, None)
    ratio = one.value / other.value
    relative = math.hypot(*((figure.standard_error or 0) / figure.value for figure in (one, other)))
    return Figure(ratio, ratio * relative, expected)
