"""Options of scaled_dot_product_attention: its defaults change nothing, and all else is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import linattn
from grid import qkv
from linattn.feature_maps import FavorPlus

TOKENS = qkv(heads=2)
MAP = FavorPlus(8, 12)
MERGED = linattn.MergedKV(window=4, num_merged=8)
CALLS: dict[str, Callable[..., object]] = {
    "linear_attention": lambda **options: linattn.linear_attention(*TOKENS, MAP, **options),
    "linear_attention_with_state": lambda **options: linattn.linear_attention_with_state(*TOKENS, MAP, **options).out,
    "softmax_attention": lambda **options: linattn.softmax_attention(*TOKENS, **options),
    "merged_attention": lambda **options: linattn.merged_attention(*TOKENS, MERGED, **options),
    "merged_attention_with_state": lambda **options: (
        linattn.merged_attention_with_state(*TOKENS, MERGED, **options).out
    ),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
@pytest.mark.parametrize("shape", [(37, 37), (2, 1, 1, 37), (2, 2, 37, 37)])
def test_a_mask_is_refused_with_the_options_that_take_its_place(call: Callable[..., object], shape: tuple[int, ...]):
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(TypeError, match="attn_mask") as refusal:
        call(attn_mask=mask)
    words = str(refusal.value)
    assert f"got torch.bool of shape {shape}" in words
    for remedy in ("key_mask=", "is_causal=True", "key_bias=", "scaled_dot_product_attention"):
        assert remedy in words


@every_call
def test_dropout_is_refused_with_what_to_do(call: Callable[..., object]):
    with pytest.raises(ValueError, match=r"dropout_p must be 0, got 0\.1;.*torch\.nn\.functional\.dropout"):
        call(dropout_p=0.1)


@every_call
def test_their_defaults_change_nothing(call: Callable[..., torch.Tensor]):
    assert torch.equal(call(attn_mask=None, dropout_p=0.0), call())


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_queries", [37, 5])
def test_any_finite_scale_is_a_factor_on_the_logits(scale: float, is_causal: bool, num_queries: int):
    """torch's own kernel makes NaN of what its causal mask hides, where the scale is not positive."""
    q, k, _ = TOKENS
    v, length = torch.cos(k), k.shape[2]  # as wide as keys, which torch's fused kernel wants
    q = q[:, :, length - num_queries :]
    logits = scale * (q @ k.mT)
    if is_causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(length - num_queries)
        logits = logits.masked_fill(~seen, -torch.inf)
    for call in (linattn.softmax_attention, lambda *tokens, **options: linattn.softmax_partial(*tokens, **options).out):
        out = call(q, k, v, scale=scale, is_causal=is_causal)
        torch.testing.assert_close(out, logits.softmax(-1) @ v)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), "0.5", torch.inf])
def test_what_is_no_scale_is_refused(scale: object):
    for call in (linattn.softmax_attention, linattn.softmax_partial):
        with pytest.raises(ValueError, match=r"scale must be a finite number.*multiply the query by a tensor"):
            call(*TOKENS, scale=scale)
