"""A masked key contributes nothing, whatever it holds, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import linattn
from grid import CAUSAL_MAPS, PAIRED_CASES, Case, build, qkv, sums, tokens, total

FILLINGS = {"large": 1e4, "inf": float("inf"), "nan": float("nan")}
REAL, PADDED = 11, 25
PLACES = {
    "left": slice(PADDED - REAL, PADDED),
    "right": slice(0, REAL),
    "interior": slice(7, 7 + REAL),
}


def padded(place: str, filling: float, real: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Real tokens between padding, and the mask."""
    full, where = [], PLACES[place]
    for index, x in enumerate(real):
        # Padded queries are ordinary rows nobody reads; padded keys and values hold the filling.
        room = x.new_full((*x.shape[:2], PADDED, x.shape[3]), 0.5 if index == 0 else filling)
        room[:, :, where] = x
        full.append(room)
    mask = torch.zeros(real[0].shape[0], PADDED, dtype=torch.bool)
    mask[:, where] = True
    return full, mask


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_padding_is_inert(case: Case, blocks_of) -> None:
    """At each place, and with each filling, a row alone, and every pair of both in one batch."""
    blocks_of(8)
    tolerance = 1e-11 if case.build().nonnegative else 1e-7
    paddings = [(place, filling) for place in PLACES for filling in FILLINGS]
    real = qkv(batch=len(paddings), num_queries=REAL, num_keys=REAL)
    full = [
        padded(place, FILLINGS[filling], [x[i : i + 1] for x in real]) for i, (place, filling) in enumerate(paddings)
    ]
    batch = ([torch.cat(x) for x in zip(*(row for row, _ in full), strict=True)], torch.cat([mask for _, mask in full]))
    alone = with_gradients(case, list(real))
    # The first place with the first filling, the second with the second, and so on.
    alone_too = range(0, len(full), len(FILLINGS) + 1)
    for rows, (given, mask) in [*(([i], full[i]) for i in alone_too), (range(len(full)), batch)]:
        out, *gradients = with_gradients(case, given, key_mask=mask)
        for place, row in enumerate(rows):
            where = PLACES[paddings[row][0]]
            among = [x[place, :, where] for x in (out, *gradients)]
            torch.testing.assert_close(
                among,
                [x[row] for x in alone],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, row=row: f"{paddings[row]}: {m}",
            )
        for grad in gradients[1:]:
            assert (grad.masked_select(~mask[:, None, :, None].expand_as(grad)) == 0).all()


def with_gradients(case: Case, given: list[torch.Tensor], **options: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs, and the gradients of the sum of their squares over rows that are read."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = case.attend(*leaves, case.build(), **options)
    mask = options.get("key_mask")
    read = out if mask is None else out * mask[:, None, :, None]
    return (out, *torch.autograd.grad(read.square().sum(), leaves))


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_a_row_that_sees_nothing_is_zero_with_zero_gradient(case: Case, blocks_of) -> None:
    blocks_of(8)
    leaves = [x.requires_grad_() for x in qkv(num_queries=20, num_keys=20)]
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    out = case.attend(*leaves, case.build(), key_mask=mask)
    assert (out[0] == 0).all()
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert (grad[0] == 0).all()
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dead_rows_are_defined_in_every_dtype(dtype: torch.dtype) -> None:
    """A floor of 1e-10 is 0 in float16 and would make these rows NaN."""
    feature_map = linattn.feature_maps.Relu(8, floor=0.0)
    query, key, value = (x.to(dtype) for x in qkv(num_queries=6, num_keys=6))
    query = -query.abs()
    for is_causal in (False, True):
        q, k, v = (x.clone().requires_grad_() for x in (query, key, value))
        out = linattn.linear_attention(q, k, v, feature_map, is_causal=is_causal, enable_gqa=True)
        assert (out == 0).all()
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert grad.isfinite().all()


@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne", "Trigonometric"])
def test_masked_keys_do_not_enter_the_state(map_name: str) -> None:
    feature_map = build(map_name)
    real = qkv(num_queries=REAL, num_keys=REAL)
    full, mask = padded("left", float("nan"), real)
    alone = linattn.linear_attention_with_state(*real, feature_map, enable_gqa=True).state
    among = linattn.linear_attention_with_state(*full, feature_map, key_mask=mask, enable_gqa=True).state
    later = tokens(2, 4, 3, 8, seed=5)
    torch.testing.assert_close(
        among.read(feature_map, later).out, alone.read(feature_map, later).out, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax_attention_keeps_the_same_mask_contract(is_causal: bool) -> None:
    for place in PLACES:
        real = qkv(num_queries=REAL, num_keys=REAL)
        full, mask = padded(place, float("nan"), real)
        options = {"is_causal": is_causal, "enable_gqa": True}
        alone = linattn.softmax_attention(*real, **options)
        for found in (
            linattn.softmax_attention(*full, key_mask=mask, **options),
            linattn.softmax_partial(*full, key_mask=mask, **options).out,
        ):
            torch.testing.assert_close(found[:, :, PLACES[place]], alone, rtol=1e-12, atol=1e-12)
    nothing = torch.zeros(2, REAL, dtype=torch.bool)
    assert (linattn.softmax_attention(*real, key_mask=nothing, **options) == 0).all()
    assert (linattn.softmax_partial(*real, key_mask=nothing, **options).out == 0).all()


@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_a_masked_step_adds_nothing(map_name: str) -> None:
    feature_map = build(map_name)
    before = linattn.linear_attention_with_state(*qkv(), feature_map, enable_gqa=True).state
    query, key, value = qkv(num_queries=1, num_keys=1, seed=7)
    nothing = torch.zeros(2, 1, dtype=torch.bool)
    step = linattn.linear_attention_with_state(
        query, key * torch.inf, value, feature_map, before, key_mask=nothing, enable_gqa=True
    )
    torch.testing.assert_close(step.out, before.read(feature_map, query).out, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(total(step.state, before.m), sums(before), rtol=1e-12, atol=1e-12)
