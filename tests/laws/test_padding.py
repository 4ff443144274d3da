"""A row is that of its live tokens alone: however far it is padded and where, and whatever stands there."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import (
    MAPS,
    PAIRED_CASES,
    Case,
    build,
    relative_error,
    takes_statistics_from_the_call,
)
from linattn.feature_maps import expansion
from padded_rows import FILLINGS, PLACES, REAL, padded, weights


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_a_row_beside_longer_ones_is_that_of_its_tokens(case: Case) -> None:
    tolerance = 1e-9 if case.build().nonnegative else 1e-7
    for place in PLACES:
        real, full, mask = padded(place, torch.nan)
        alone, among = case.attend(*real, case.build()), case.attend(*full, case.build(), key_mask=mask)
        assert relative_error(among[:1, :, PLACES[place]], alone) < tolerance
        assert (among[2] == 0).all()


@pytest.mark.parametrize("how", ["mask", "heads"])
@pytest.mark.parametrize("most", [20, 80, 4096])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("map_name", [name for name in MAPS if takes_statistics_from_the_call(name)])
def test_statistics_are_of_a_row_s_own_tokens(
    map_name: str, place: str, most: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only some of many tokens are looked at, and where many are alike."""
    monkeypatch.setattr(expansion, "_MOST_POINTS", most)
    for filling in FILLINGS.values():
        real, full, mask = padded(place, filling)
        for alike in (False, True):
            if alike:
                real = [x[:, :, torch.arange(REAL) % 2] for x in real]
                for x, own in zip(full, real, strict=True):
                    x[:1, :, PLACES[place]] = own
            alone = linattn.linear_attention(*real, build(map_name), enable_gqa=True)
            among = linattn.linear_attention(*full, build(map_name), enable_gqa=True, **weights(how, mask))
            torch.testing.assert_close(among[:1, :, PLACES[place]], alone, rtol=1e-7, atol=1e-7)
