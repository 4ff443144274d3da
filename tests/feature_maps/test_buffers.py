"""What a map writes into a buffer is what it returns, and what it pulls back is the derivative."""

from __future__ import annotations

import math

import pytest
import torch

from grid import CAUSAL_MAPS, build, tokens
from linattn.feature_maps import base


@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_written_in_pieces_or_whole(map_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_PIECE", 1)
    monkeypatch.setattr(base, "_FEWEST", 4)
    feature_map, x = build(map_name), tokens(2, 2, 11, 8)
    for returned, write in ((feature_map.query, feature_map.write_query), (feature_map.key, feature_map.write_key)):
        expected = returned(x).detach()
        with torch.no_grad():
            torch.testing.assert_close(write(x, torch.full_like(expected, torch.nan)), expected)


@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_pulled_back_as_autograd_does(map_name: str) -> None:
    feature_map, x = build(map_name), tokens(2, 2, 11, 8).requires_grad_()
    for side, pull in ((feature_map.query, feature_map.query_vjp), (feature_map.key, feature_map.key_vjp)):
        out = side(x)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        (expected,) = torch.autograd.grad(out, x, grad)
        torch.testing.assert_close(pull(x.detach(), grad.clone()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("map_name", [name for name in CAUSAL_MAPS if build(name).exponential])
def test_exponents_of_base_2_are_the_exponents_and_what_is_added(map_name: str, dtype: torch.dtype) -> None:
    """Sums of at most D + 3 = 11 numbers below 64, each rounded once: 11·64·u."""
    feature_map, x = build(map_name), tokens(2, 2, 11, 8).to(dtype)
    rows, columns = tokens(2, 2, 11, 1, seed=1).to(dtype), tokens(2, 2, 1, feature_map.num_features, seed=2).to(dtype)
    rows[0, :, 3] = -torch.inf
    sides = (
        (feature_map.query, feature_map.write_query_powers),
        (feature_map.key, feature_map.write_key_powers),
    )
    for returned, write in sides:
        exponents = returned(x.double()).detach() / math.log(2)
        out = torch.full(exponents.shape, torch.nan, dtype=dtype)
        for row in (None, rows):
            with torch.no_grad():
                found = write(x, out, row, columns)
            wanted = exponents + columns + (0 if row is None else row)
            torch.testing.assert_close(
                found.double(), wanted.double(), rtol=0, atol=11 * 64 * torch.finfo(dtype).eps / 2
            )


@pytest.mark.parametrize("map_name", [name for name in CAUSAL_MAPS if build(name).powers(torch.float64) is not None])
def test_exponents_taken_apart_are_the_exponents(map_name: str) -> None:
    """Powers of two and a term of each row; in one product where there is one for all heads."""
    feature_map, x = build(map_name), tokens(2, 2, 11, 8)
    powers, exponents = feature_map.powers(torch.float64), feature_map.query(x)
    p = x @ powers.doubled
    p = torch.cat((p, -p), -1) if powers.is_paired else p
    p = p if powers.constants is None else p + powers.constants
    term = powers.constant - powers.scale / 2 * x.square().sum(-1, keepdim=True)
    torch.testing.assert_close(p * math.log(2) + term, exponents, rtol=1e-12, atol=1e-12)
    if not powers.is_composed:
        torch.testing.assert_close(powers.exponents(x), exponents, rtol=1e-12, atol=1e-12)
