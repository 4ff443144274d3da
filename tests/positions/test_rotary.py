"""Rotary positions: transformers' layout, relative products, lengths kept."""

from __future__ import annotations

import pytest
import torch

from grid import build, tokens
from linattn.positions import Rotary, rotary


def test_the_layout_is_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = tokens(2, 4, 11, 8, seed=1), tokens(2, 2, 11, 8, seed=2)
    rates = 500.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.arange(3, 14).unsqueeze(-1) * torch.cat((rates, rates))
    expected = llama.apply_rotary_pos_emb(q, k, angle.cos()[None], angle.sin()[None])
    for found, wanted in zip(rotary(q, k, torch.arange(3, 14), base=500.0), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_products_depend_on_differences_and_lengths_stay() -> None:
    q, k = tokens(1, 1, 1, 8, seed=1).expand(-1, -1, 9, -1), tokens(1, 1, 1, 8, seed=2).expand(-1, -1, 9, -1)
    turned_q, turned_k = rotary(q, k, torch.arange(9) + 4)
    products = (turned_q @ turned_k.mT)[0, 0]
    for offset in range(-8, 9):
        diagonal = products.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert float((products[0] - products[0, 0]).abs().max()) > 0.1
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1), rtol=1e-14, atol=0)


def test_position_0_turns_nothing() -> None:
    q, k = tokens(1, 2, 3, 8), tokens(1, 2, 3, 8, seed=1)
    for found, wanted in zip(rotary(q, k, torch.zeros(3)), (q, k), strict=True):
        assert torch.equal(found, wanted)


def test_positive_maps_stay_positive() -> None:
    """Rotated first, mapped second: features are the map's own."""
    feature_map = build("FavorPlus")
    q, k = Rotary(8)(tokens(1, 2, 9, 8, seed=1), tokens(1, 2, 9, 8, seed=2), torch.arange(9))
    assert bool((feature_map.query(q).exp() @ feature_map.key(k).exp().mT > 0).all())


def test_rows_have_positions_of_their_own() -> None:
    q, k = tokens(2, 2, 5, 8, seed=1), tokens(2, 2, 5, 8, seed=2)
    at = torch.stack((torch.arange(5), torch.arange(5) + 7))
    both = rotary(q, k, at)
    for i in (0, 1):
        alone = rotary(q[i : i + 1], k[i : i + 1], at[i])
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(both, alone, strict=True))


@pytest.mark.parametrize("widths", [(2, 4), (4, 2), (4, 6)])
def test_queries_and_keys_of_two_widths_are_refused(widths: tuple[int, int]) -> None:
    """Those of one plane would be turned as one number broadcasts."""
    q, k = (tokens(1, 2, 3, width) for width in widths)
    with pytest.raises(ValueError, match=rf"key must be \(B, H, L, D={widths[0]}\), got \(1, 2, 3, {widths[1]}\)"):
        rotary(q, k, torch.arange(3))


def test_positions_are_differentiated_if_rates_were_made_under_inference_mode() -> None:
    with torch.inference_mode():
        made = Rotary(8)
    q, gradients = tokens(1, 2, 3, 8), []
    for encoding in (made, Rotary(8)):
        at = torch.arange(3.0, requires_grad=True)
        gradients.append(torch.autograd.grad(encoding(q, q, at)[0].sum(), at)[0])
    assert torch.equal(*gradients)
