"""What every contender owes, whatever its rule."""

from __future__ import annotations

import pytest
import torch

from linattn import softmax_attention
from linattn_lab.contenders import KINDS, Sizes, at_budget

L, D, DV, HEADS, GROUPS = 150, 16, 12, 2, 3
SIZES = Sizes(D, DV)
SCALE = 0.3
# Float32 sums of 150 weights of at most 1: a few hundred roundings of 2**-24.
CLOSE = 1e-5
# The bytes of the moments and groups that some keep alone are those of some 60 keys.
SMALL, LARGE = 100, 500


def tensors(dtype=torch.float32):
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(2, HEADS * GROUPS, L, D, generator=draw, dtype=dtype)
    k, v = (torch.randn(2, HEADS, L, width, generator=draw, dtype=dtype) for width in (D, DV))
    return q, k + 0.5, v


def contender(kind, budget):
    return at_budget(budget, SIZES).contenders[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_bytes_than_the_budget(kind):
    assert contender(kind, SMALL).num_bytes(SIZES, 10**6) <= SMALL * SIZES.key_bytes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "far part off"])
def test_the_budget_is_used(kind):
    # At most a group of 32 tokens in 2 bits, or a pair of keys, is left.
    assert contender(kind, SMALL).num_bytes(SIZES, 10**6) >= (SMALL - 8) * SIZES.key_bytes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bit" not in kind])
def test_room_for_all_tokens_is_softmax_attention(kind):
    q, k, v = tensors()
    found = contender(kind, 8 * LARGE).attend(q, k, v, SCALE)
    exact = softmax_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    assert (found - exact).abs().max() < CLOSE


@pytest.mark.parametrize("kind", KINDS)
def test_no_query_sees_a_later_key(kind):
    q, k, v = tensors()
    one = contender(kind, SMALL)
    before = one.attend(q, k, v, SCALE)
    # After a whole group of 32: the scales of KIVI's keys are a whole group's.
    changed = [torch.cat((x[:, :, :96], x[:, :, 96:].flip(2) * 3), 2) for x in (q, k, v)]
    after = one.attend(*changed, SCALE)
    assert torch.equal(before[:, :, :96], after[:, :, :96])
    assert not torch.equal(before[:, :, 96:], after[:, :, 96:])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_and_heads_are_independent(kind):
    q, k, v = tensors(torch.float64)
    one = contender(kind, SMALL)
    whole = one.attend(q, k, v, SCALE)
    alone = one.attend(q[1:, GROUPS:], k[1:, 1:], v[1:, 1:], SCALE)
    # Float64, and 16-bit scales that are the same for the same numbers.
    assert (whole[1:, GROUPS:] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_all_alike_stay(kind):
    q, k, v = tensors()
    same = torch.ones_like(v)
    assert (contender(kind, SMALL).attend(q, k, same, SCALE) - 1).abs().max() < 1e-3  # 16-bit zero points


def test_a_budget_too_small_says_so():
    shelf = at_budget(2, Sizes(256, 256))
    assert set(shelf.left_out) >= {"MomentKV", "merged keys, 50% near", "Expected Attention"}
    assert all("give more bytes" in reason for reason in shelf.left_out.values())
    assert not set(shelf.left_out) & set(shelf.contenders)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="oracle"):
        at_budget(64, SIZES, ("oracle",))
