"""What holds to the bit: no later key in earlier rows, nothing of masked keys, the same from run to run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import linattn
from grid import build, qkv, relative_error


def results(
    map_name: str, given: list[Tensor], mask: Tensor | None = None, rows: slice = slice(None)
) -> tuple[Tensor, ...]:
    """Causal outputs of these rows, and the gradients of tokens."""
    leaves = [x.detach().requires_grad_() for x in given]
    feature_map = build(map_name).to(given[0].device)
    out = linattn.linear_attention(
        *leaves, feature_map, key_mask=mask, is_causal=True, enable_gqa=True, backend="triton"
    )[:, :, rows]
    return (out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves))


def tokens(device: str, *, scale: float = 0.7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values of two heads."""
    return [x.to(device, dtype) for x in qkv(1, 2, 2, 36, 36, scale=scale)]


@pytest.mark.parametrize(
    ("map_name", "dtype"), [("FavorPlus", torch.bfloat16), ("Centred-FavorPlus", torch.float32)], ids=str
)
def test_no_later_token_reaches_an_earlier_row(map_name: str, dtype: torch.dtype, device: str) -> None:
    """Outputs equal to the bit, and no gradient at all, in the middle of a block."""
    given, rows = tokens(device, dtype=dtype), slice(21)
    expected = results(map_name, given, rows=rows)
    for factor in (2.0, 30.0):
        changed = [torch.cat((x[:, :, :21], -factor * x[:, :, 21:]), 2) for x in given]
        found = results(map_name, changed, rows=rows)
        assert torch.equal(found[0], expected[0]), f"times {factor}"
        for x, y in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(x[:, :, :21], y[:, :, :21]), f"times {factor}"
            assert not x[:, :, 21:].any(), f"times {factor}"


@pytest.mark.parametrize(
    ("map_name", "garbage"),
    [("FavorPlus", math.nan), ("Centred-FavorPlus", math.inf), ("Relu", math.nan)],
)
def test_masked_keys_leave_no_trace(map_name: str, garbage: float, device: str) -> None:
    given, mask = tokens(device), torch.ones(1, 36, dtype=torch.bool, device=device)
    mask[0, :3], mask[0, 20:27] = False, False
    expected = results(map_name, given, mask)
    for x in given[1:]:
        x[:, :, ~mask[0]] = garbage
    found = results(map_name, given, mask)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert not found[0][:, :, :3].any()
    assert not found[2][:, :, ~mask[0]].any()


def test_runs_are_equal_to_the_bit(device: str, poisoned_memory) -> None:
    """Whatever fresh memory holds."""
    given = tokens(device)
    first, second = (results("FavorPlus", given) for _ in range(2))
    assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("place", [0, 20, 35])
def test_one_key_of_another_size_costs_no_digits(place: int, device: str) -> None:
    """Eight times as long: its features are 2^-400 of the others', and until another key comes it is all there is."""
    given = tokens(device, scale=2.0)
    given[1][:, :, place] *= 8
    expected = [x.double() for x in given]
    leaves = [x.requires_grad_() for x in expected]
    feature_map = build("FavorPlus").to(device)
    out = linattn.linear_attention(*leaves, feature_map, is_causal=True, enable_gqa=True, backend="reference")
    truth = (out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves))
    # Powers of 2^6 have their last place at 2^-17.
    for index, (x, y) in enumerate(zip(results("FavorPlus", given), truth, strict=True)):
        assert relative_error(x, y) < 40 * 2.0**-17, f"item {index}"


def test_a_bias_common_to_all_keys_changes_nothing(device: str) -> None:
    given, feature_map = tokens(device), build("FavorPlus").to(device)
    outs = [
        linattn.linear_attention(
            *given, feature_map, key_bias=torch.full((1, 1, 36), bias, device=device), is_causal=True,
            enable_gqa=True, backend="triton",
        )
        for bias in (0.0, 1e6, -1e6)
    ]  # fmt: skip
    # The bias in powers of two is 2^20, whose last place is 2^-3: its fraction is common to all keys too.
    assert all(relative_error(x, outs[0]) < 1e-5 for x in outs[1:])
