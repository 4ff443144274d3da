"""A text that a cache holds, or a part of it, is not taken in twice: it is refused, or goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES
from linattn import MergedKV
from linattn.hf import BoundedCache, LinearLMConfig, LinearLMForCausalLM, StateCache, linearize_, new_cache

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 8, "do_sample": False}
AGAIN = r"would take a text in again beside a cache of \d+ tokens: generate gives it the whole text again"


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    """For all of these."""
    with torch.no_grad():
        yield


def model_of(kind: str) -> LlamaForCausalLM:
    """Two layers whose attention matters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1)).eval()
    if kind == "states":
        linearize_(model, method="FavorPlus(num_features=16)")
    return model


def maker(model: PreTrainedModel, kind: str) -> Callable[[], Any]:
    """What makes an empty cache."""
    config = MergedKV(4, 8, bits=None)
    return lambda: new_cache(model) if kind == "states" else BoundedCache(model, config=config)


@pytest.mark.parametrize("way", ["use_cache", "prompt_lookup_num_tokens", "assistant_model"])
@pytest.mark.parametrize("kind", ["states", "bounded", "beside windows"])
def test_a_text_that_is_given_again_is_not_taken_in_twice(language_model, kind: str, way: str) -> None:
    """By generate, to a cache that holds a part of it; what was held goes on as the whole text."""
    model: Any = language_model("gemma3") if kind == "beside windows" else model_of(kind)
    empty = maker(model, kind)
    options = {way: {"use_cache": False, "prompt_lookup_num_tokens": 3, "assistant_model": deepcopy(model)}[way]}
    ids, cache = IDS[:1, :6].repeat(1, 3) % 64, empty()
    ids = torch.cat((model.generate(ids, **GREEDY, past_key_values=cache), ids), 1)
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=AGAIN):
        model.generate(ids, **GREEDY, **options, past_key_values=cache.fork())
    last, whole = model(ids[:, held:], past_key_values=cache).logits, model(ids, past_key_values=empty()).logits
    torch.testing.assert_close(last, whole[:, held:], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("more", [0, 4])
@pytest.mark.parametrize("kind", ["states", "bounded", "beside windows"])
def test_a_cache_that_holds_a_whole_text_refuses_it(language_model, kind: str, more: int) -> None:
    """As by a prompt that is read once, for several continuations."""
    model: Any = language_model("gemma3") if kind == "beside windows" else model_of(kind)
    ids, cache = IDS % 64, maker(model, kind)()
    model(ids, past_key_values=cache)
    for mask in (None, torch.ones(2, 24 - more, dtype=torch.long)):
        with pytest.raises(ValueError, match=AGAIN):
            model.generate(ids[:, : 24 - more], attention_mask=mask, **GREEDY, past_key_values=cache.fork())
    longer = torch.cat((ids, ids[:, :1]), 1)
    made = model.generate(longer, **GREEDY, past_key_values=cache.fork())
    assert torch.equal(made, model.generate(longer, **GREEDY, past_key_values=maker(model, kind)()))


def test_a_stream_of_a_linear_lm_refuses_a_text_that_it_holds() -> None:
    torch.manual_seed(0)
    model = LinearLMForCausalLM(LinearLMConfig(vocab_size=97, num_hidden_layers=2)).eval()
    cache = new_cache(model)
    model(input_ids=IDS, past_key_values=cache)
    for length in (24, 20):
        with pytest.raises(ValueError, match="the cache holds all of the text already; add a token"):
            model.generate(IDS[:, :length], **GREEDY, past_key_values=cache.fork())


@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_padding_that_fills_whole_chunks_is_no_text(kind: str) -> None:
    """Positions begin with the first token that is shown, in whichever chunk."""
    model = model_of(kind)
    ids, mask = IDS[:, :16], torch.ones(2, 16, dtype=torch.long)
    mask[:, :5] = 0
    made = model.generate(ids, attention_mask=mask, **GREEDY, past_key_values=maker(model, kind)())
    for size in (2, 4, 5):
        options = {"attention_mask": mask, "prefill_chunk_size": size, "past_key_values": maker(model, kind)()}
        assert torch.equal(model.generate(ids, **GREEDY, **options), made), size


@pytest.mark.parametrize("way", ["use_cache", "prompt_lookup_num_tokens"])
@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_models_that_tell_attention_no_positions(kind: str, way: str) -> None:
    """Are asked themselves."""
    model = ARCHITECTURES["GPT BigCode"].build().eval()
    if kind == "states":
        linearize_(model, method="FavorPlus(num_features=16)")
    ids, cache = IDS[:1] % 64, maker(model, kind)()
    longer = torch.cat((model.generate(ids, **GREEDY, past_key_values=cache), ids), 1)
    options = {"use_cache": False} if way == "use_cache" else {way: 3}
    with pytest.raises(ValueError, match=AGAIN):
        model.generate(longer, **GREEDY, **options, past_key_values=cache.fork())
    if way == "use_cache":
        with pytest.raises(ValueError, match=AGAIN):
            model.generate(ids, **GREEDY, **options, past_key_values=maker(model, kind)())


@pytest.mark.parametrize("kind", ["states", "bounded"])
@pytest.mark.parametrize("name", ["Qwen 3 Next", "Granite hybrid", "Nemotron H"])
def test_recurrent_layers_forget_no_tokens(name: str, kind: str) -> None:
    """In which case no layer forgets any."""
    model = ARCHITECTURES[name].build().eval()
    if kind == "states":
        linearize_(model, method="FavorPlus(num_features=16)")
    ids, cache = IDS[:1] % 64, StateCache(model) if kind == "states" else maker(model, kind)()
    cache.activate_past_recording()
    model(ids[:, :10], past_key_values=cache)
    with pytest.raises(ValueError, match="recurrent layers cannot forget tokens; keep a fork"):
        cache.crop(-3)
    wanted = model(ids[:, :11], past_key_values=maker(model, kind)()).logits[:, -1]
    torch.testing.assert_close(model(ids[:, 10:11], past_key_values=cache).logits[:, -1], wanted, rtol=1e-4, atol=1e-4)
