"""Models that read another text than their own, or hold the part that generates: caches of each, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from architectures import ARCHITECTURES, BOTH_SIDES, PICTURE, TEXT, TOKENS, Architecture
from bounded_texts import ENOUGH, GREEDY, IDS
from linattn.hf import BoundedCache, EncoderDecoderStates, StateCache, linearize_, restore_

METHOD = "FavorPlus(num_features=16)"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 48}


def pair_of(kind: str, model: PreTrainedModel) -> EncoderDecoderStates:
    """Empty caches of both texts, of a model that is linearized first where its own text has states."""
    if kind == "bounded":
        return EncoderDecoderStates(BoundedCache(model, config=ENOUGH), DynamicCache())
    linearize_(model, METHOD)
    return EncoderDecoderStates(StateCache(model), DynamicCache())


def whisper() -> PreTrainedModel:
    """One that writes times, as those of long audio do."""
    model = ARCHITECTURES["Whisper"].build()
    settings = {"no_timestamps_token_id": 60, "is_multilingual": False, "eos_token_id": 59, "decoder_start_token_id": 1}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def dialogue() -> PreTrainedModel:
    """Dia, whose layers are given their cache by place."""
    encoder = {**SIZES, "vocab_size": 97, "num_key_value_heads": 4}
    cross = {"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_head_dim": 8}
    decoder = {**SIZES, **cross, "vocab_size": 30, "num_key_value_heads": 2, "cross_hidden_size": 32, "num_channels": 3}
    tokens = {"delay_pattern": [0, 1, 2], "eos_token_id": 27, "pad_token_id": 28, "bos_token_id": 29}
    sizes = {"encoder_config": encoder, "decoder_config": decoder, **tokens}
    return Architecture("DiaForConditionalGeneration", "both sides", sizes, "Dia").build()


def seeing() -> PreTrainedModel:
    """BLIP-2, which calls `generate` of its language model."""
    text = {"model_type": "opt", **TEXT, **TOKENS, "ffn_dim": 48, "word_embed_proj_dim": 32}
    sizes: dict[str, Any] = {"text_config": {**text, "max_position_embeddings": 256}, "vision_config": PICTURE}
    sizes |= {"qformer_config": {**TEXT, "encoder_hidden_size": 32}, "num_query_tokens": 4, "image_token_index": 90}
    return Architecture("Blip2ForConditionalGeneration", "seeing", sizes, "Blip2").build()


@pytest.mark.parametrize("kind", ["bounded", "states"])
@torch.no_grad()
def test_another_source_of_the_same_length_is_no_source_of_earlier_calls(kind: str) -> None:
    """Its keys are in the cache, and its like would be answered from them."""
    model = ARCHITECTURES["BART"].build()
    pair, ids = pair_of(kind, model), IDS[:, :8]
    whole = model(input_ids=ids, decoder_input_ids=IDS[:, :6]).logits
    model(input_ids=ids, decoder_input_ids=IDS[:, :3], past_key_values=pair)
    other = ids.clone()
    other[1, 5] = 7 if ids[1, 5] != 7 else 8
    for cache in (pair, pair.fork()):
        with pytest.raises(ValueError, match=r"of \(2, 8\) rows.*keys of one of another text.*or new caches"):
            model(input_ids=other, decoder_input_ids=IDS[:, 3:6], past_key_values=cache)
    # Computed again it is the same text's, and rows may change places together.
    fork = pair.fork()
    last = model(input_ids=ids, decoder_input_ids=IDS[:, 3:6], past_key_values=fork).logits
    torch.testing.assert_close(last, whole[:, 3:], rtol=1e-4, atol=1e-4)
    turned = torch.tensor([1, 0])
    fork = pair.fork()
    fork.reorder_cache(turned)
    last = model(input_ids=ids[turned], decoder_input_ids=IDS[turned, 3:6], past_key_values=fork).logits
    torch.testing.assert_close(last, whole[turned, 3:], rtol=1e-4, atol=1e-4)
    twice, order = pair.fork(), torch.tensor([3, 1, 0, 2])
    twice.batch_repeat_interleave(2)
    twice.reorder_cache(order)
    fork = pair.fork()
    fork.batch_select_indices(turned)
    for each, rows in ((twice, order // 2), (fork, turned)):
        last = model(input_ids=ids[rows], decoder_input_ids=IDS[rows, 3:6], past_key_values=each).logits
        torch.testing.assert_close(last, whole[rows, 3:], rtol=1e-4, atol=1e-4)
    pair.reset()
    model(input_ids=other, decoder_input_ids=IDS[:, :3], past_key_values=pair)


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("kind", ["bounded", "states"])
def test_segments_of_long_audio_are_texts_of_their_own(kind: str, num_beams: int) -> None:
    """Whisper gives each to a call of its own, and all of them the cache it was given."""
    model, generator = whisper(), torch.Generator().manual_seed(0)
    pair = pair_of(kind, model)
    options = {"return_timestamps": True, "max_new_tokens": 6, "num_beams": num_beams}
    for length, is_long in ((40, False), (100, True)):
        sound, mask = torch.randn(1, 8, length, generator=generator), torch.ones(1, length, dtype=torch.long)
        call: dict[str, Any] = {"attention_mask": mask, **options}
        wanted = model.generate(sound, **call)
        if is_long:
            pair.reset()
            with pytest.raises(ValueError, match=r"of another text.*Whisper: for each segment of long audio"):
                model.generate(sound, **call, past_key_values=pair)
        else:
            assert torch.equal(model.generate(sound, **call, past_key_values=pair), wanted)


def test_whisper_tries_again_by_states() -> None:
    """It takes the keys out of its cache then, of which states have none."""
    model = whisper()
    linearize_(model, METHOD)
    again = {"temperature": (0.0, 0.2), "logprob_threshold": -0.1, "compression_ratio_threshold": 1.0}
    options = {"return_timestamps": True, "max_new_tokens": 6, **again}
    sound, written = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(0)), []
    for use_cache in (True, False):
        torch.manual_seed(0)  # the second attempt draws
        written.append(model.generate(sound, **options, use_cache=use_cache))
    assert torch.equal(*written)


def test_layers_that_are_given_their_cache_by_place() -> None:
    model = dialogue()
    options = {**GREEDY, "input_ids": IDS[:, :6] % 60 + 3}
    wanted = model.generate(**options)
    bounded = EncoderDecoderStates(BoundedCache(model, config=ENOUGH), DynamicCache())
    assert torch.equal(model.generate(**options, past_key_values=bounded), wanted)
    linearize_(model, METHOD)
    assert torch.equal(model.generate(**options), model.generate(**options, use_cache=False))


def test_a_decoder_alone_that_reads_an_encoders_output() -> None:
    sizes = {**BOTH_SIDES, "max_source_positions": 20, "num_mel_bins": 8}
    model = Architecture("WhisperForCausalLM", "decoder", sizes, "Whisper").build()
    linearize_(model, METHOD)
    source = (torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0)),)
    options: dict[str, Any] = {**GREEDY, "encoder_outputs": source}
    found, wanted = (model.generate(IDS[:1, :3] % 60 + 3, **options, use_cache=way) for way in (True, False))
    assert torch.equal(found, wanted)


def test_a_model_around_the_one_that_generates() -> None:
    """Which is named where the outer one takes no cache, and keeps states where it was linearized through that."""
    model, seen = seeing(), set()
    inner: Any = model.language_model
    picture = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {**GREEDY, "input_ids": torch.tensor([[90] * 4 + [5, 6, 7]]), "pixel_values": picture}
    wanted: Tensor = model.generate(**options)
    with pytest.raises(ValueError, match=r"no cache; make one for the part of it that generates \(language_model"):
        BoundedCache(model)
    assert torch.equal(model.generate(**options, past_key_values=BoundedCache(inner, config=ENOUGH)), wanted)
    linearize_(model, METHOD)
    note = inner.model.decoder.register_forward_pre_hook(
        lambda part, args, call: seen.add(type(call.get("past_key_values"))), with_kwargs=True
    )
    found = model.generate(**options)
    assert seen == {StateCache}
    note.remove()
    assert torch.equal(found, model.generate(**options, use_cache=False))
    restore_(model)
    assert torch.equal(model.generate(**options), wanted)


@pytest.mark.parametrize("kind", ["bounded", "states"])
def test_a_decoder_that_reads_a_projection_of_its_source(kind: str) -> None:
    """The model as a whole is given another tensor than what the cross attention's keys are made of."""
    sides = {side: {**TEXT, **TOKENS, "model_type": "bert"} for side in ("encoder", "decoder")}
    sides["encoder"]["hidden_size"] = 48
    sides["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
    sizes = {**sides, "decoder_start_token_id": 1, "pad_token_id": 0}
    model = Architecture("EncoderDecoderModel", "both sides", sizes, "EncoderDecoder").build()
    wanted, ids = model.generate(input_ids=IDS % 60 + 3, **GREEDY), IDS % 60 + 3
    pair = pair_of(kind, model)
    found = model.generate(input_ids=ids, **GREEDY, past_key_values=pair)
    if kind == "states":
        wanted = model.generate(input_ids=ids, **GREEDY, use_cache=False)
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_a_pair_of_transformers_own_kind_is_held_against_the_sizes_of_its_source() -> None:
    model = ARCHITECTURES["BART"].build()
    pair = EncoderDecoderCache(BoundedCache(model, config=ENOUGH), DynamicCache())
    model(input_ids=IDS[:, :7], decoder_input_ids=IDS[:, :3], past_key_values=pair)
    with pytest.raises(ValueError, match=r"of \(2, 9\) rows.*keys of one of \(2, 7\)"):
        model(input_ids=IDS[:, :9], decoder_input_ids=IDS[:, 3:4], past_key_values=pair)


def test_a_source_in_training_is_the_same_text_s() -> None:
    """Dropout gives it other numbers at each call."""
    model = ARCHITECTURES["BART"].build().train()
    model.config.dropout = 0.5
    pair = EncoderDecoderStates(BoundedCache(model, config=ENOUGH), DynamicCache())
    for place in (0, 3):
        model(input_ids=IDS[:, :8], decoder_input_ids=IDS[:, place : place + 3], past_key_values=pair)
