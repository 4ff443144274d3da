"""Fixed decay: the papers' rates, and their closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import linattn
from grid import build, qkv
from linattn.positions import FixedDecay, Gate, gated_attention_with_state

LENGTH = 23


@pytest.mark.parametrize("make", [FixedDecay.alibi, FixedDecay.retnet], ids=["alibi", "retnet"])
def test_fixed_decay_is_the_closed_form(make: Callable[[int], FixedDecay]) -> None:
    """exp(-λ(i - j)) on every weight, by the papers' slopes and decays."""
    heads = 4
    decay = make(heads)
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH).double()
    if make == FixedDecay.alibi:
        slopes = torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0], dtype=torch.float64)
        factor = torch.exp(-slopes[:, None, None] * distance)
    else:
        gamma = 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))
        factor = gamma[:, None, None] ** distance
    q, k, v = qkv(heads=heads, kv_heads=heads, num_queries=LENGTH, num_keys=LENGTH)
    for name in ("Exponential", "EluPlusOne", "TensorPolynomial"):
        feature_map = build(name)
        found = gated_attention_with_state(q, k, v, feature_map, decay(torch.zeros(2, LENGTH, 3))).out
        phi_q, phi_k = (linattn.feature_maps.features(feature_map, x, s) for x, s in ((q, "query"), (k, "key")))
        weights = (phi_q @ phi_k.mT * factor).tril()
        torch.testing.assert_close(found, weights @ v / weights.sum(-1, keepdim=True), rtol=1e-10, atol=1e-10)


def test_alibi_of_other_numbers_of_heads() -> None:
    """As the paper's code has it for 6: the four of 4, then the first and third of 8."""
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert FixedDecay.alibi(6).rates.tolist() == expected


REFUSED = [[], [-1.0], [float("nan")], [0.1, float("inf")], "12", [1.0, "2"], [1j], 0.5, None, [10**400]]


@pytest.mark.parametrize("rates", REFUSED, ids=lambda rates: repr(rates)[:20])
def test_refused_rates(rates: Any) -> None:
    with pytest.raises(ValueError, match="rates must be finite numbers >= 0"):
        FixedDecay(rates)


def test_no_heads_are_refused() -> None:
    for make in (FixedDecay.alibi, FixedDecay.retnet):
        with pytest.raises(ValueError, match="num_heads must be an integer"):
            make(0)


def test_it_is_a_gate_of_its_heads() -> None:
    decay = FixedDecay([0.5, 0.25])
    assert isinstance(decay, Gate)
    assert decay.num_heads == 2
    assert decay(torch.zeros(3, 4, 1)).log_forget.shape == (1, 2, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rates_stay_as_they_are_where_a_model_is_cast(dtype: torch.dtype) -> None:
    """In float16 the slowest would be 0."""
    decay = FixedDecay.retnet(28)
    rates = decay.rates.clone()
    cast = torch.nn.Sequential(decay).to(dtype)
    assert torch.equal(cast[0].rates, rates)


def test_a_decay_without_values_is_named() -> None:
    assert "meta" in repr(FixedDecay.alibi(2).to("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rates_of_a_cast_checkpoint_are_refused(dtype: torch.dtype) -> None:
    """They would add up to another decay."""
    gate = FixedDecay.retnet(8)
    with pytest.raises(ValueError, match=f"rates was saved as {dtype}, wanted torch.float64"):
        gate.load_state_dict({name: x.to(dtype) for name, x in gate.state_dict().items()})
    gate.load_state_dict(FixedDecay.alibi(8).state_dict())
    assert torch.equal(gate.rates, FixedDecay.alibi(8).rates)


def test_rates_may_be_a_tensor() -> None:
    assert torch.equal(FixedDecay(torch.tensor([0.5, 0.25])).rates, FixedDecay([0.5, 0.25]).rates)


def test_fixed_rates_are_constants_wherever_a_layer_is_built() -> None:
    with torch.device("meta"):
        gate = FixedDecay([0.25, 0.0625])
    gate = gate.to_empty(device="cpu")
    assert gate(torch.zeros(1, 3, 4)).log_forget[0, :, 0].tolist() == [-0.25, -0.0625]
