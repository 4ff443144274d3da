"""Low-precision inputs, exact sums: exponents, sums and divisions run in at least float32, outside autocast."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import CASES, Case, build, qkv, relative_error, tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne"])
def test_sums_over_65k_tokens_do_not_stagnate(map_name: str, is_causal: bool, dtype: torch.dtype) -> None:
    """The last output averages 65,536 values of mean 1 and deviation 1; a bfloat16 sum would stop at 256 of them."""
    length = 65_536
    x = tokens(1, 1, length, 8, scale=0.3, dtype=dtype)
    value = (tokens(1, 1, length, 1, seed=2) + 1).to(dtype)
    case = Case(map_name, "blocked", is_causal)
    found = case.attend(x, x, value, build(map_name))[:, :, -1:]
    truth = case.attend(x.double(), x.double(), value.double(), build(map_name))[:, :, -1:]
    assert relative_error(found, truth) <= torch.finfo(dtype).eps
    assert found.dtype == dtype


@pytest.mark.parametrize("case", CASES, ids=str)
def test_autocast_changes_nothing(case: Case) -> None:
    query, key, value = qkv(dtype=torch.float32)
    plain = case.attend(query, key, value, case.build())
    with torch.autocast("cpu", torch.bfloat16):
        cast = case.attend(query, key, value, case.build())
    assert torch.equal(plain, cast)


def test_states_are_kept_in_float32() -> None:
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, k, v = qkv(dtype=dtype)
        out, state = linattn.linear_attention_with_state(q, k, v, build("FavorPlus"), enable_gqa=True)
        assert (out.dtype, state.S.dtype, state.z.dtype, state.m.dtype) == (dtype, kept, kept, kept)
