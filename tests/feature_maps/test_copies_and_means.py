"""Maps are copied, and means are taken of them: what a copy holds is its own, and a mean of draws is no draw."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from grid import tokens
from linattn.feature_maps import FavorPlus, Hyperbolic, Oprf

X = tokens(1, 1, 5, 16)


@pytest.mark.parametrize("kind", [FavorPlus, Hyperbolic, Oprf])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_copy_follows_its_own_buffers_however_often_they_are_written(kind: type[FavorPlus], number: int) -> None:
    """As a mean of models copies a map and writes to the copy at each step; both count what is written to them."""
    options = {"mean_square": 1.0} if kind is Oprf else {}
    feature_map, other = (kind(16, 32, seed=seed, **options) for seed in (0, 9))
    for seed in range(number):
        feature_map.redraw(seed)
    feature_map.query(X)
    for times in range(1, 8):
        copy = deepcopy(feature_map)
        for _ in range(times):
            for ours, theirs in zip(copy.buffers(), other.buffers(), strict=True):
                ours.copy_(theirs)
        assert torch.equal(copy.query(X), other.query(X)), times
        assert copy.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("options", [{}, {"draw": "iid"}, {"draw": "iid", "lengths": "fixed"}], ids=str)
@pytest.mark.parametrize("saves", [False, True])
def test_a_mean_of_draws_is_refused(options: dict[str, str], saves: bool) -> None:
    """It estimates another kernel: as a mean of models takes of buffers too, across a redraw."""
    drawn = Hyperbolic(16, 128, **options)
    model = nn.ModuleList([drawn, nn.Linear(1, 1)])
    mean = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(3):
        mean.update_parameters(model)
    assert torch.equal(mean.module[0].query(X), drawn.query(X))
    drawn.redraw(2**40 + 7)
    mean.update_parameters(model)
    mean.update_parameters(model)
    saved, words = (
        mean.module[0].state_dict(),
        r"the projection of Hyperbolic is no \w+ draw: a mean of .*; copy projection",
    )
    for _ in range(2):  # Not once alone.
        with pytest.raises(ValueError, match=words):
            Hyperbolic(16, 128, **options).load_state_dict(saved) if saves else mean.module[0].query(X)
