"""Nonnegative maps average: weights sum to 1 and outputs stay within the hull of the values."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import HEAD_DIM, MAPS, NONNEGATIVE_CASES, NONNEGATIVE_MAPS, Case, cases_in_turns, qkv, tokens


def has_weight(case: Case, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Rows with any weight at all, (B, H, L, 1): a query of a sparse map (Dpfp) may overlap no key, and gets 0."""
    rows = linattn.attention_rows(
        query, key, case.build(), torch.arange(query.shape[2]), key_mask=mask, is_causal=case.is_causal, enable_gqa=True
    )
    return rows.sum(-1, keepdim=True) > 0


@pytest.mark.parametrize(
    ("case", "dtype"),
    cases_in_turns(NONNEGATIVE_MAPS, [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_constant_values_come_back(case: Case, dtype: torch.dtype) -> None:
    query, key, value = qkv(num_queries=70, num_keys=70, dtype=dtype)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, 6:40] = False
    found = case.attend(query, key, torch.ones_like(value), case.build(), key_mask=mask)
    found = torch.where(has_weight(case, query, key, mask), found, 1)
    # Numerator and denominator are the same sums in another order: R + L additions of nonnegative numbers.
    bound = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * 200
    bound = max(bound, torch.finfo(dtype).eps / 2)
    if "Taylor" in case.map_name or "Tensor" in case.map_name:
        # Weights are positive, features are not: their products cancel by up to the square of the features' norm.
        bound *= 20
    assert (found - 1).abs().max() <= bound


def cancellation(case: Case, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Of each row (B, H, L, 1), the mean of |φ(q)||φ(k)| / φ(q)·φ(k) by its weights: what rounding is multiplied by.

    Centring makes products q·k small where |q||k| is large, which no other tensor map of the grid does.
    """
    rows = linattn.attention_rows(query, key, case.build(), torch.arange(query.shape[2]), is_causal=case.is_causal)
    q, k = (x - x.mean(2, keepdim=True) for x in (query, key))

    def kernel(t: torch.Tensor) -> torch.Tensor:
        return 1 + t + t.square() / 2

    lengths = (kernel(x.square().sum(-1) / HEAD_DIM**0.5).sqrt() for x in (q, k))
    product = kernel(q @ k.mT / HEAD_DIM**0.5)
    of_query, of_key = lengths
    return (rows * of_query.unsqueeze(-1) * of_key.unsqueeze(-2) / product).sum(-1, keepdim=True)


SCALES = (1e-3, 0.1, 1.0, 5.0, 30.0, 300.0)
# The reference is quadratic and slow: two scales show it.
SCALED_CASES = cases_in_turns(MAPS, SCALES, ["blocked"]) + cases_in_turns(MAPS, (1.0, 300.0), ["reference"])


@pytest.mark.parametrize(("case", "scale"), SCALED_CASES, ids=str)
def test_outputs_stay_within_the_hull_at_any_scale(case: Case, scale: float) -> None:
    unit = torch.nn.functional.normalize(tokens(2, 2, 150, HEAD_DIM), dim=-1)
    query, key = scale * unit, scale * unit.flip(2).roll(3, 2)
    value = tokens(2, 2, 150, 5, seed=4)
    found = case.attend(*(x.float() for x in (query, key, value)), case.build())
    assert found.isfinite().all()
    if case not in NONNEGATIVE_CASES:
        return
    value = value.float()
    low, high = value.amin(2, keepdim=True), value.amax(2, keepdim=True)
    if case.is_causal:
        low, high = value.cummin(2).values, value.cummax(2).values
    # Exponential and elementwise weights are sums of nonnegative terms; tensor maps cancel, relative to |φ(q)||φ(k)|.
    band = 2e-5 if "Taylor" not in case.map_name and "Tensor" not in case.map_name else 2e-3
    if case.map_name == "Expansion-2":
        # 1 + t + t²/2 is made of sums that are not centred: they cancel relative to the square of the logits.
        band *= max(1.0, (scale**2 / HEAD_DIM**0.5) ** 2)
    if case.map_name == "Centred-call-Taylor":
        band = band + torch.finfo(torch.float32).eps * cancellation(case, query, key)
    found = torch.where(has_weight(case, query.float(), key.float()), found, (low + high) / 2)
    assert (found >= low - band).all()
    assert (found <= high + band).all()


@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne"])
def test_bfloat16_steps_do_not_drift(map_name: str) -> None:
    """A running sum kept in bfloat16 would stand still at 256, one in float16 at 2048."""
    feature_map, steps = Case(map_name, "blocked", True).build(), 5000
    x = tokens(1, 1, 1, HEAD_DIM, dtype=torch.bfloat16)
    one, state = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), None
    with torch.no_grad():
        for _ in range(steps):
            out, state = linattn.linear_attention_with_state(x, x, one, feature_map, state)
    assert abs(out.item() - 1) <= 1e-2
    phi = torch.exp(feature_map.key(x.float())) if feature_map.exponential else feature_map.key(x.float())
    total = state.z * torch.exp(state.m)
    # So many float32 additions of one number: relative error at most steps · eps/2, 3e-4.
    torch.testing.assert_close(total, steps * phi[:, :, 0], rtol=6e-8 * steps, atol=0)
