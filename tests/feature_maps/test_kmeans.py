"""k-means: its start draws by squared distance, its steps lower the distance, and nothing else is random.

Letters: D head width.
"""

from __future__ import annotations

import itertools

import scipy.stats
import torch
from torch import Tensor

from linattn.feature_maps._fitted import kmeans

D = 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def centres_of(points: Tensor, count: int, *, seed: int, num_rounds: int) -> Tensor:
    return kmeans(points, torch.ones_like(points[..., 0]), count, seed=seed, num_rounds=num_rounds)


def test_seeding_draws_by_squared_distance() -> None:
    """Points 0, 1 and 3: after 0 comes 1 one time in ten, after 1 or 3 as the squares say; never a point again."""
    draws = 2_000
    points = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64).view(1, 3, 1)
    chosen = torch.cat([centres_of(points, 3, seed=seed, num_rounds=0) for seed in range(draws)]).squeeze(-1)
    assert torch.equal(chosen.sort(-1).values, points.squeeze(-1).expand(draws, 3))
    second = {0.0: {1.0: 0.1, 3.0: 0.9}, 1.0: {0.0: 0.2, 3.0: 0.8}, 3.0: {0.0: 9 / 13, 1.0: 4 / 13}}
    expected = {(a, b): draws / 3 * share for a, shares in second.items() for b, share in shares.items()}
    counts = [int(((chosen[:, 0] == a) & (chosen[:, 1] == b)).sum()) for a, b in expected]
    assert scipy.stats.chisquare(counts, list(expected.values())).pvalue > 1e-3


def test_steps_lower_the_squared_distance_to_the_centres() -> None:
    points = normal(3, 200, D, seed=0)

    def total(num_steps: int) -> Tensor:
        centres = centres_of(points, 10, seed=1, num_rounds=num_steps)
        return torch.cdist(points, centres).amin(-1).square().sum(-1)

    found = [total(steps) for steps in (0, 1, 2, 5)]
    assert all((after < before).all() for before, after in itertools.pairwise(found))


def test_centres_depend_on_the_seed_alone() -> None:
    points = normal(2, 50, D, seed=0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = centres_of(points, 8, seed=1, num_rounds=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(centres_of(points, 8, seed=1, num_rounds=2), first)
    assert not torch.equal(centres_of(points, 8, seed=2, num_rounds=2), first)


def test_a_centre_without_points_stays() -> None:
    points = torch.zeros(1, 4, 2, dtype=torch.float64)
    assert torch.equal(centres_of(points, 3, seed=0, num_rounds=3), torch.zeros(1, 3, 2, dtype=torch.float64))
