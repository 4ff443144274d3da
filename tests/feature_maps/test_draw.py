"""The draw: uniform directions, orthogonal blocks, independent lengths, one seed for every machine.

Letters: D head width, m rows, N draws.
"""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus

D = 6
NUM_DRAWS = 4000


def drawn(num_rows: int, draw: str, lengths: str, seed: int = 11) -> Tensor:
    """(N, m, D): many draws at once."""
    return FavorPlus(D, num_rows, draw=draw, lengths=lengths, num_heads=NUM_DRAWS, seed=seed).projection


@pytest.mark.parametrize("num_rows", [4, D, 2 * D + 3])
@pytest.mark.parametrize("lengths", ["chi", "fixed"])
@pytest.mark.parametrize("draw", ["orthogonal", "iid"])
def test_every_entry_has_mean_0_and_variance_1(draw: str, lengths: str, num_rows: int) -> None:
    """Within 4 standard errors, entry by entry: a QR without its signs fails at the diagonal."""
    rows = drawn(num_rows, draw, lengths)
    assert (rows.mean(0).abs() <= 4 * rows.std(0) / math.sqrt(NUM_DRAWS)).all()
    squares = rows.square()
    assert ((squares.mean(0) - 1).abs() <= 4 * squares.std(0) / math.sqrt(NUM_DRAWS)).all()


@pytest.mark.parametrize("num_rows", [4, D, 2 * D + 3])
def test_blocks_are_orthogonal_and_independent(num_rows: int) -> None:
    rows = drawn(num_rows, "orthogonal", "chi")
    directions = rows / rows.norm(dim=-1, keepdim=True)
    products = directions @ directions.mT
    block = torch.arange(num_rows) // D
    same = block.unsqueeze(0) == block.unsqueeze(1)
    within = (products - torch.eye(num_rows, dtype=torch.float64))[:, same]
    assert within.abs().max() <= 1e-10
    if num_rows <= D:
        return
    across = products[:, ~same]
    # Two independent directions: mean product 0, mean square 1/D.
    for values, mean in ((across, 0.0), (across.square(), 1 / D)):
        assert ((values.mean(0) - mean).abs() <= 4 * values.std(0) / math.sqrt(NUM_DRAWS)).all()


@pytest.mark.parametrize("draw", ["orthogonal", "iid"])
def test_lengths(draw: str) -> None:
    """Squared lengths are chi-square with D degrees of freedom (Kolmogorov-Smirnov at 1e-3), or D exactly."""
    squares = drawn(D, draw, "chi").square().sum(-1)
    assert scipy.stats.kstest(squares.flatten().numpy(), scipy.stats.chi2(D).cdf).pvalue > 1e-3
    first, second = squares[:, 0], squares[:, 1]
    assert abs(scipy.stats.pearsonr(first.numpy(), second.numpy()).statistic) <= 4 / math.sqrt(NUM_DRAWS)
    fixed = drawn(D, draw, "fixed").square().sum(-1)
    torch.testing.assert_close(fixed, torch.full_like(fixed, D), rtol=1e-14, atol=0)


def test_heads_have_draws_of_their_own() -> None:
    rows = FavorPlus(D, 2 * D, num_heads=3).projection
    assert rows.shape == (3, 2 * D, D)
    assert not torch.isclose(rows[0], rows[1]).any()


def test_seed_decides_everything() -> None:
    first, again, other = (FavorPlus(D, 20, seed=seed).projection for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()


def test_neither_global_generator_nor_defaults_matter() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    expected = FavorPlus(D, 20, seed=5)
    expected.query(torch.zeros(1, D))
    assert torch.equal(torch.get_rng_state(), state)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            found = FavorPlus(D, 20, seed=5)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found.projection, expected.projection)


def test_redraw_is_a_fresh_draw_in_place() -> None:
    feature_map, x = FavorPlus(D, 20, seed=5), torch.ones(2, D)
    buffer, before, name = feature_map.projection, feature_map.query(x), repr(feature_map)
    assert feature_map.redraw(6) is feature_map
    fresh = FavorPlus(D, 20, seed=6)
    assert feature_map.projection is buffer
    assert torch.equal(buffer, fresh.projection)
    assert torch.equal(feature_map.query(x), fresh.query(x))
    assert not torch.isclose(feature_map.query(x), before).any()
    assert repr(feature_map) == repr(fresh) != name
    assert feature_map.seed.item() == 6
