"""What a cache records for `crop` has a bound, however long a call is, and the cache goes on as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import Cache

from linattn import MergedKV
from linattn.hf import BoundedCache, StateCache, linearize_

LONG = torch.randint(3, 64, (2, 620), generator=torch.Generator().manual_seed(1))
# Tokens of a call, bytes of which are recorded: queries of four heads, keys and values of two, of width 8.
RECORDED, BYTES = 256, (4 + 2 + 2) * 8 * 4 * len(LONG)
KINDS = ["merged", "a map", "a map and a window"]


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    """For all of these."""
    with torch.no_grad():
        yield


@pytest.fixture(params=KINDS)
def prepared(request: Any, language_model: Any) -> tuple[Any, Callable[[], Cache]]:
    """A model, and a function that makes a cache of it."""
    model = language_model("llama", max_position_embeddings=4096)
    if request.param == "merged":
        return model, lambda: BoundedCache(model, config=MergedKV(4, 12, 4))
    linearize_(model, "FavorPlus(num_features=16)" + (" + window 4" if "window" in request.param else ""))
    return model, lambda: StateCache(model)


def recording(cache: Cache) -> Any:
    """The cache, whose calls are recorded."""
    cache.activate_past_recording()
    return cache


def held(cache: Cache) -> int:
    """Bytes of the memory that a cache's tensors keep from being freed."""
    tensors = [x for x in pytree.tree_leaves([vars(layer) for layer in cache.layers]) if isinstance(x, torch.Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_recorded_calls_have_a_bound(prepared):
    """Of the last tokens of a call, and of the states before and after, however long the text."""
    model, new = prepared
    for length in (400, 620):
        plain, cache = new(), recording(new())
        for each in (plain, cache):
            model(LONG[:, :length], past_key_values=each)
        assert held(cache) <= 2 * held(plain) + 2 * RECORDED * BYTES
        for token in LONG[:, :8].split(1, 1):
            model(token, past_key_values=cache)
        assert held(cache) <= 3 * held(plain) + 2 * (RECORDED + 8 + 4) * BYTES


@pytest.mark.parametrize(("count", "padded"), [(1, False), (RECORDED, True)])
def test_the_end_of_a_long_call_is_taken_back(prepared, count, padded):
    """The state of the tokens before, in rows that begin late too."""
    model, new = prepared
    mask = torch.ones_like(LONG)
    mask[0, : 450 if padded else 0] = 0
    cache, wanted = recording(new()), new()
    whole, length = model(LONG[:, :600], past_key_values=cache, attention_mask=mask[:, :600]).logits, 600 - count
    cache.crop(-count)
    parts = [model(LONG[:, :length], past_key_values=wanted, attention_mask=mask[:, :length]).logits]
    assert cache.get_seq_length() == length
    made = model(LONG[:, length:], past_key_values=cache, attention_mask=mask).logits
    parts.append(model(LONG[:, length:], past_key_values=wanted, attention_mask=mask).logits)
    live, scale = mask.bool(), whole.abs().max().item()
    compared = {"rtol": 1e-4, "atol": 1e-3 * scale}
    torch.testing.assert_close(made[live[:, length:]], parts[1][live[:, length:]], **compared)
    torch.testing.assert_close(whole[:, :length][live[:, :length]], parts[0][live[:, :length]], **compared)


def test_more_than_is_recorded_is_refused_unchanged(prepared):
    model, new = prepared
    cache = recording(new())
    model(LONG[:, :600], past_key_values=cache)
    before = [(layer.state, layer.num_tokens) for layer in cache.layers]
    with pytest.raises(ValueError, match=r"forget its last 257 tokens: 256 are recorded.*keep a fork"):
        cache.crop(-RECORDED - 1)
    after = [(layer.state, layer.num_tokens) for layer in cache.layers]
    assert all(x is y for one, other in zip(before, after, strict=True) for x, y in zip(one, other, strict=True))
    cache.crop(-RECORDED)
    assert cache.get_seq_length() == 600 - RECORDED


def test_a_wider_window_is_taken_back(language_model):
    model = language_model("llama")
    cache = recording(BoundedCache(model, config=MergedKV(300, 12, None)))
    model(LONG[:, :600], past_key_values=cache)
    with pytest.raises(ValueError, match="300 are recorded"):
        cache.crop(-301)
    cache.crop(-300)
    assert cache.get_seq_length() == 300


def test_a_call_longer_than_the_window_after_one_that_was_taken_back(language_model):
    """Its recorded end goes on from its own state, not from that of the call before."""
    model = language_model("llama", max_position_embeddings=4096)
    cache, wanted = (BoundedCache(model, config=MergedKV(300, 400, None)) for _ in range(2))
    recording(cache)
    for tokens, count in ((LONG[:, :310], 0), (LONG[:, 310:315], 5), (LONG[:, 310:615], 3)):
        model(tokens, past_key_values=cache)
        cache.crop(-count)
    model(LONG[:, :612], past_key_values=wanted)
    made, exact = (model(LONG[:, 612:], past_key_values=each).logits for each in (cache, wanted))
    torch.testing.assert_close(made, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def test_what_records_share_is_counted_once(prepared):
    """A single token goes on from the state that the record before it ended with."""
    model, new = prepared
    cache = recording(new())
    for tokens in (LONG[:, :300], *LONG[:, 300:303].split(1, 1)):
        model(tokens, past_key_values=cache)
    assert cache.num_bytes <= held(cache)


def test_guesses_after_a_long_prompt_leave_the_greedy_text(prepared):
    model, new = prepared
    prompt, options = LONG[:1, :7].repeat(1, 60), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt, past_key_values=new(), **options)
    made = model.generate(prompt, past_key_values=new(), **options, prompt_lookup_num_tokens=3)
    assert torch.equal(made, wanted)
