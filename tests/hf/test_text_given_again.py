"""A text that a cache holds, or a part of it, is not taken in twice: it is refused, or goes on where it was."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from architectures import ARCHITECTURES, DECODER
from bounded_texts import FEW, GREEDY, IDS
from linattn.hf import BoundedCache, LinearLMConfig, LinearLMForCausalLM, linearize_, new_cache

AGAIN = r"would take a text in again beside a cache of \d+ tokens: generate gives it the whole text again"
METHOD = "FavorPlus(num_features=16)"


def made(model: PreTrainedModel, kind: str) -> Callable[[], Any]:
    """What makes an empty cache of a model, which is linearized for one of states."""
    if kind == "states":
        linearize_(model, method=METHOD)
        return lambda: new_cache(model)
    return lambda: BoundedCache(model, config=FEW)


@pytest.mark.parametrize("way", ["use_cache", "prompt_lookup_num_tokens", "assistant_model"])
@pytest.mark.parametrize("kind", ["states", "bounded", "beside windows"])
def test_a_text_that_is_given_again_is_not_taken_in_twice(language_model, kind: str, way: str) -> None:
    """By generate, to a cache that holds a part of it; what was held goes on as the whole text."""
    model = language_model("gemma3" if kind == "beside windows" else "llama")
    empty = made(model, kind)
    options = {way: {"use_cache": False, "prompt_lookup_num_tokens": 3, "assistant_model": deepcopy(model)}[way]}
    ids, cache = IDS[:1, :6].repeat(1, 3), empty()
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
    model = language_model("gemma3" if kind == "beside windows" else "llama")
    empty = made(model, kind)
    cache = empty()
    model(IDS, past_key_values=cache)
    for mask in (None, torch.ones(2, 24 - more, dtype=torch.long)):
        with pytest.raises(ValueError, match=AGAIN):
            model.generate(IDS[:, : 24 - more], attention_mask=mask, **GREEDY, past_key_values=cache.fork())
    longer = torch.cat((IDS, IDS[:, :1]), 1)
    found, wanted = (model.generate(longer, **GREEDY, past_key_values=each) for each in (cache.fork(), empty()))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "GPT BigCode"])
@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_a_new_turn_alone_is_no_text_so_far(name: str, kind: str) -> None:
    """However long beside what is held: generate cuts it to its last tokens, or to none, and nothing has run then."""
    model = ARCHITECTURES[name].build().eval()
    empty = made(model, kind)
    cache, mask = empty(), torch.ones(2, 23, dtype=torch.long)
    mask[1, :3] = 0
    model(IDS[:, :23], attention_mask=mask, past_key_values=cache)
    for length in (5, 12, 13, 20, 23):
        for given in (None, mask[:, :length]):
            with pytest.raises(ValueError, match=AGAIN):
                model.generate(IDS.flip(1)[:, :length], attention_mask=given, **GREEDY, past_key_values=cache)
    mask = torch.cat((mask, mask[:, -1:]), 1)
    calls = ((IDS[:, 23:], cache), (IDS, empty()))
    found, wanted = (model(x, attention_mask=mask, past_key_values=each).logits[:, -1] for x, each in calls)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["states", "bounded"])
@pytest.mark.parametrize("name", ["Qwen 3 Next", "LFM 2", "Granite hybrid", "Nemotron H", "both sides"])
def test_recurrent_layers_that_ran_in_a_call_that_failed_are_noticed(name: str, kind: str) -> None:
    """They change their states in place, and count no tokens."""
    architecture = ARCHITECTURES.get(name, ARCHITECTURES["Qwen 3 Next"])
    if name not in ARCHITECTURES:
        layers = {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        }
        architecture = replace(architecture, options=architecture.options | layers)
    model = architecture.build().eval()
    empty = made(model, kind)
    ids, cache = IDS[:1], empty()
    model(ids[:, :10], past_key_values=cache)
    fork = cache.fork()
    wanted, refused = model(ids[:, :14], past_key_values=empty()).logits[:, 10:], 0
    # One token, as generate's steps have, is taken in by other code.
    parts = [part for part in model.modules() if hasattr(part, "layer_idx") and list(part.parameters())]
    for part, end in itertools.product(parts, (11, 14)):
        left, hook = fork.fork(), part.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 10:end], past_key_values=left)
        hook.remove()
        if left._ran:
            refused += 1
            with pytest.raises(RuntimeError, match="a call was left between two layers, by an error; go on from a"):
                model(ids[:, 10:end], past_key_values=left)
            left.reset()
            found = model(ids[:, :end], past_key_values=left).logits[:, 10:]
        else:  # Before the first layer nothing has changed.
            found = model(ids[:, 10:end], past_key_values=left).logits
        torch.testing.assert_close(found, wanted[:, : end - 10], rtol=1e-4, atol=1e-4)
    assert refused > 1
    torch.testing.assert_close(model(ids[:, 10:14], past_key_values=cache).logits, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_a_last_call_is_taken_back_from_convolutions_too(kind: str) -> None:
    """All of it, as drafts that are not accepted are."""
    model = ARCHITECTURES["LFM 2"].build().eval()
    empty = made(model, kind)
    cache = empty()
    cache.activate_past_recording()
    model(IDS[:, :10], past_key_values=cache)
    for end in (11, 14):
        model(IDS[:, 10:end], past_key_values=cache)
        cache.crop(10 - end)
    wanted = model(IDS[:, :14], past_key_values=empty()).logits[:, 10:]
    torch.testing.assert_close(model(IDS[:, 10:14], past_key_values=cache).logits, wanted, rtol=1e-4, atol=1e-4)
    # What transformers holds of a convolution after a crop leaves too little to look back at.
    cache.crop(-2)
    with pytest.raises(ValueError, match="a window of 3 tokens cannot forget 2 of the 3 that it holds since the last"):
        cache.crop(-2)


@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_models_whose_pictures_count_fewer_positions_than_tokens(kind: str) -> None:
    """Their layers are told none."""
    text = {**DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    model = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=sight, image_token_id=90, video_token_id=91)
    ).eval()
    empty = made(model, kind)
    cache = empty()
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=AGAIN):
        model.generate(IDS, **GREEDY, past_key_values=cache.fork())
    longer = torch.cat((IDS, IDS[:, :1]), 1)
    found, wanted = (model.generate(longer, **GREEDY, past_key_values=each) for each in (cache.fork(), empty()))
    assert torch.equal(found, wanted)
    # As after a picture of 11 tokens at one position.
    model.model.rope_deltas = torch.full((2, 1), -10)
    assert model.generate(longer, **GREEDY, past_key_values=cache).shape == wanted.shape


def interrupt(*_: object) -> None:
    """A key pressed."""
    raise KeyboardInterrupt


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert_decoder", "opt", "gpt_neox"])
def test_a_cache_of_another_process_refuses_it_too(language_model, family: str) -> None:
    """Only a model that looks at its calls takes one from a file: layers are not told positions in all families."""
    model = language_model(family)
    fresh = deepcopy(model)
    cache = BoundedCache(model, config=FEW)
    model(IDS, past_key_values=cache)
    loaded, wanted = pickle.loads(pickle.dumps(cache)), model(IDS[:, :3], past_key_values=cache.fork()).logits
    # A fork is of this process: a call that passes the hooks by takes it.
    calls = model.base_model, model.base_model.forward
    assert torch.equal(*(call(IDS[:, :3], past_key_values=cache.fork())[0] for call in calls))
    fresh.set_attn_implementation("linattn")
    assert not fresh._forward_pre_hooks
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the cache is from a file.*call BoundedCache\(model, …\) once"):
            fresh(IDS[:, :3], past_key_values=loaded)
    assert loaded.get_seq_length() == IDS.shape[1]
    BoundedCache(fresh)
    assert torch.equal(fresh(IDS[:, :3], past_key_values=loaded.fork()).logits, wanted)
    with pytest.raises(ValueError, match=AGAIN):
        fresh.generate(IDS, **GREEDY, use_cache=False, past_key_values=loaded)


def test_a_stream_of_a_linear_lm_refuses_a_text_that_it_holds() -> None:
    torch.manual_seed(0)
    model = LinearLMForCausalLM(LinearLMConfig(vocab_size=64, num_hidden_layers=2)).eval()
    cache = new_cache(model)
    model(input_ids=IDS, past_key_values=cache)
    for length in (24, 20):
        with pytest.raises(ValueError, match="the cache holds all of the text already; add a token"):
            model.generate(IDS[:, :length], **GREEDY, past_key_values=cache.fork())


@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_padding_that_fills_whole_chunks_is_no_text(language_model, kind: str) -> None:
    """Positions begin with the first token that is shown, in whichever chunk."""
    model = language_model("llama")
    empty = made(model, kind)
    ids, mask = IDS[:, :16], torch.ones(2, 16, dtype=torch.long)
    mask[:, :5] = 0
    wanted = model.generate(ids, attention_mask=mask, **GREEDY, past_key_values=empty())
    for size in (2, 4, 5):
        options = {"attention_mask": mask, "prefill_chunk_size": size, "past_key_values": empty()}
        assert torch.equal(model.generate(ids, **GREEDY, **options), wanted), size


@pytest.mark.parametrize("way", ["use_cache", "prompt_lookup_num_tokens"])
@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_models_that_tell_attention_no_positions(kind: str, way: str) -> None:
    """Are asked themselves."""
    model = ARCHITECTURES["GPT BigCode"].build().eval()
    empty = made(model, kind)
    ids, cache = IDS[:1], empty()
    longer = torch.cat((model.generate(ids, **GREEDY, past_key_values=cache), ids), 1)
    options = {"use_cache": False} if way == "use_cache" else {way: 3}
    with pytest.raises(ValueError, match=AGAIN):
        model.generate(longer, **GREEDY, **options, past_key_values=cache.fork())
    if way == "use_cache":
        with pytest.raises(ValueError, match=AGAIN):
            model.generate(ids, **GREEDY, **options, past_key_values=empty())


@pytest.mark.parametrize("kind", ["states", "bounded"])
@pytest.mark.parametrize("name", ["Qwen 3 Next", "Granite hybrid", "Nemotron H"])
def test_recurrent_layers_forget_no_tokens(name: str, kind: str) -> None:
    """In which case no layer forgets any."""
    model = ARCHITECTURES[name].build().eval()
    empty = made(model, kind)
    ids, cache = IDS[:1], empty()
    cache.activate_past_recording()
    model(ids[:, :10], past_key_values=cache)
    with pytest.raises(ValueError, match="recurrent layers cannot forget tokens; keep a fork"):
        cache.crop(-3)
    wanted = model(ids[:, :11], past_key_values=empty()).logits[:, -1]
    torch.testing.assert_close(model(ids[:, 10:11], past_key_values=cache).logits[:, -1], wanted, rtol=1e-4, atol=1e-4)
