"""`generate` of a linearized model: the same tokens with states as without any cache, however they are asked for."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from linattn.hf import StateCache, linearize_, restore_
from model_inputs import LANGUAGE_HEADS, OPTIONS

HEADS = {**LANGUAGE_HEADS, "bart": "ForConditionalGeneration"}
TEXT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(TEXT)
MASK[1, :4] = 0
# No text ends early, so that every comparison is of as many tokens.
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}


@pytest.fixture
def linear(build):
    """A function giving a family's linearized language model in float64; hybrids keep their middle layer."""

    def of(family, layers=None):
        depth = {"gpt2": {"n_layer": 3}, "bart": {}}.get(family, {"num_hidden_layers": 3})
        model = build(family, head=HEADS[family], **depth, **OPTIONS.get(family, {})).double()
        model.generation_config.pad_token_id = 0
        linearize_(model, method="FavorPlus(num_features=32)", layers=layers)
        return model

    return of


def tokens(model, text=TEXT, mask=MASK, **options):
    torch.manual_seed(11)
    return model.generate(torch.where(mask.bool(), text, 0), attention_mask=mask, **{**LENGTH, **options})


WAYS = (
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 2},
)


@pytest.mark.parametrize("layers", [None, (0, 2)], ids=["all", "hybrid"])
@pytest.mark.parametrize("family", HEADS)
def test_states_give_the_tokens_of_no_cache(linear, family, layers):
    model = linear(family, layers)
    for way in WAYS:
        options = {**way, "max_new_tokens": 5, "min_new_tokens": 5}
        made = tokens(model, return_dict_in_generate=True, **options)
        cache = made.past_key_values
        cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        assert isinstance(cache, StateCache)
        assert torch.equal(made.sequences, tokens(model, use_cache=False, **options)), options
        assert len(made.sequences.unique()) > 3


@pytest.mark.parametrize("layers", [None, (0, 2)], ids=["all", "hybrid"])
@pytest.mark.parametrize("family", LANGUAGE_HEADS)
def test_prefill_in_chunks_and_continuing(linear, family, layers):
    model = linear(family, layers)
    wanted = tokens(model, use_cache=False, do_sample=False)
    assert torch.equal(tokens(model, prefill_chunk_size=4, do_sample=False), wanted)
    cache = StateCache(model)
    some = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "past_key_values": cache}
    start = tokens(model, **some)
    assert torch.equal(start, wanted[:, :14])
    mask = torch.cat((MASK, torch.ones(2, 5, dtype=torch.long)), 1)
    assert torch.equal(tokens(model, start, mask, **{**some, "max_new_tokens": 3, "min_new_tokens": 3}), wanted)


@pytest.mark.parametrize("family", LANGUAGE_HEADS)
def test_left_padding_changes_nothing(linear, family):
    model = linear(family)
    ours = tokens(model, do_sample=False)[1, 4:]
    assert torch.equal(ours, tokens(model, TEXT[1:, 4:], MASK[1:, 4:], do_sample=False)[0])


def test_speech(build):
    model = build("whisper", head="ForConditionalGeneration").double()
    linearize_(model, method="FavorPlus(num_features=32)")
    sound = torch.randn(2, 4, 16, dtype=torch.float64)
    options, caches = {**LENGTH, "do_sample": False}, []

    def note(module, args, given):
        caches.append(given["past_key_values"])

    with model.model.register_forward_pre_hook(note, with_kwargs=True):
        made = model.generate(sound, **options)
    assert isinstance(caches[0].self_attention_cache, StateCache)
    assert torch.equal(made, model.generate(sound, **options, use_cache=False))


def test_caches_asked_for_by_the_user_stay(linear):
    model = linear("llama")
    wanted = tokens(model, do_sample=False)
    given = DynamicCache()
    assert torch.equal(tokens(model, do_sample=False, past_key_values=given), wanted)
    assert given.get_seq_length() == 16
    named = tokens(model, do_sample=False, cache_implementation="dynamic", return_dict_in_generate=True)
    assert torch.equal(named.sequences, wanted)
    assert type(named.past_key_values) is DynamicCache
    assert tokens(model, use_cache=False, return_dict_in_generate=True).past_key_values is None
    with pytest.raises(ValueError, match="StaticCache gives its empty slots to attention as keys"):
        tokens(model, cache_implementation="static")


def test_assisted_generation_takes_a_cache_that_can_be_cropped(linear, build):
    model = linear("llama")
    one, sure = TEXT[:1], MASK[:1]
    wanted = tokens(model, one, sure, do_sample=False)
    helper = build("llama", head="ForCausalLM").double()
    assert torch.equal(tokens(model, one, sure, do_sample=False, assistant_model=helper), wanted)


def test_a_restored_model_generates_as_before(build):
    model = build("llama", head="ForCausalLM")
    wanted = tokens(model, do_sample=False)
    linearize_(model, method="EluPlusOne")
    assert not torch.equal(tokens(model, do_sample=False), wanted)
    restore_(model)
    made = tokens(model, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(made.sequences, wanted)
    assert type(made.past_key_values) is DynamicCache
