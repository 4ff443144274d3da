"""What a map writes into a buffer is what it returns, and what it pulls back is the derivative."""

from __future__ import annotations

import math

import pytest
import torch

from grid import CAUSAL_MAPS, build, tokens
from linattn.feature_maps import _base


@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_written_in_pieces_or_whole(map_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_base, "_PIECE", 1)
    monkeypatch.setattr(_base, "_FEWEST", 4)
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
