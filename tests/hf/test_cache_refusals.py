"""Calls that a cache is not made for are refused before a layer takes a token in, with what to do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MusicgenForCausalLM
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from linattn import MergedKV
from linattn.hf import (
    BoundedCache,
    EncoderDecoderStates,
    LinearLMConfig,
    LinearLMForCausalLM,
    StateCache,
    StreamCache,
    linearize_,
    restore_,
)

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
FEW = MergedKV(4, 8, bits=None, num_sinks=0)


def llama(**sizes: int) -> LlamaForCausalLM:
    """One of few layers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval()


def cache_of(kind: str, model: Any) -> Any:
    """A cache of a kind, for a model that is linearized first where it is one of states."""
    if kind == "bounded":
        return BoundedCache(model, config=FEW)
    linearize_(model, method="EluPlusOne")
    return StateCache(model)


def counts(cache: Any) -> set[int]:
    """How many tokens its layers have seen."""
    return {layer.get_seq_length() for layer in cache.layers}


@pytest.mark.parametrize("kind", ["bounded", "states"])
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3, this one's is 2"),
        ({"num_hidden_layers": 1}, "num_hidden_layers 1, this one's is 2"),
        ({"hidden_size": 64}, "hidden_size 64, this one's is 32"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4, this one's is 2"),
        ({"head_dim": 16}, "head_dim 16, this one's is 8"),
    ],
)
@torch.no_grad()
def test_a_cache_of_another_model(kind: str, sizes: dict[str, int], words: str) -> None:
    """Of more layers, of fewer, of other sizes: the cache stays what it is."""
    model, other = llama(), llama(**sizes)
    own, cache = cache_of(kind, model), cache_of(kind, other)
    for each in (cache, cache.fork()):
        with pytest.raises(ValueError, match=f"the cache was made for a model of .*{words}.*make one for this model"):
            model(IDS, past_key_values=each)
        assert counts(each) == {0}
    other(IDS, past_key_values=cache)
    model(IDS, past_key_values=own)


@pytest.mark.parametrize("kind", ["bounded", "states"])
@torch.no_grad()
def test_other_rows(kind: str) -> None:
    """Also by position, as embeddings, of none, or with a mask; the text goes on afterwards."""
    model = llama()
    cache = cache_of(kind, model)
    model(IDS, past_key_values=cache)
    wanted = model(IDS[:, :1], past_key_values=cache.fork()).logits
    for rows in (IDS[:1, :1], IDS[:, :1].repeat(2, 1), IDS[:0, :1]):
        vectors, mask = model.get_input_embeddings()(rows), torch.ones(len(rows), 13, dtype=torch.long)
        for call in (
            lambda rows=rows: model(rows, past_key_values=cache),
            lambda rows=rows, mask=mask: model(rows, mask, None, cache),
            lambda vectors=vectors: model(inputs_embeds=vectors, past_key_values=cache),
        ):
            with pytest.raises(ValueError, match=rf"holds 2 rows, the call has {len(rows)}; .*batch_select_indices"):
                call()
    assert torch.equal(model(IDS[:, :1], past_key_values=cache).logits, wanted)


@pytest.mark.parametrize("kind", ["bounded", "states"])
@torch.no_grad()
def test_codebooks_are_no_rows_of_a_batch(kind: str) -> None:
    """Musicgen reads each of a text's codebooks in a row of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "num_codebooks": 2}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1}
    model = MusicgenForCausalLM(MusicgenDecoderConfig(**sizes, **tokens, layerdrop=0.0)).eval()
    cache, ids = cache_of(kind, model), torch.cat((IDS, IDS.flip(0)))
    whole = model(input_ids=ids, use_cache=False).logits
    model(input_ids=ids[:, :8], past_key_values=cache)
    torch.testing.assert_close(model(input_ids=ids[:, 8:], past_key_values=cache).logits, whole[:, 8:])


@pytest.mark.parametrize("num_tokens", [0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_that_is_cast_to_more_bytes(dtype: torch.dtype, num_tokens: int) -> None:
    """A budget is one of bytes, and is known when a cache is made."""
    model = llama().to(dtype)
    cache = BoundedCache(model, 32)
    if num_tokens:
        model(IDS[:, :num_tokens], past_key_values=cache)
    model.double()
    with pytest.raises(ValueError, match=r"keys in torch\.float64, and the cache was made for .* cast the model first"):
        model(IDS, past_key_values=cache)
    assert counts(cache) == {num_tokens}


@torch.no_grad()
def test_a_cache_of_a_model_that_was_cast_is_within_the_budget() -> None:
    """In the bytes of its dtype of now."""
    model = llama().double()
    cache = BoundedCache(model, 32)
    model(IDS.repeat(1, 10), past_key_values=cache)
    assert cache.num_bytes <= sum(2 * layer.kept_bytes(120) for layer in cache.report)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("way", ["autocast", "cast"])
@torch.no_grad()
def test_numbers_of_fewer_bytes_are_within_the_budget(language_model: Any, family: str, way: str) -> None:
    model, ids = language_model(family), IDS.repeat(1, 5)
    cache = BoundedCache(model, 32)
    if way == "cast":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext():
        model(ids, past_key_values=cache)
    assert cache.num_bytes <= sum(2 * layer.kept_bytes(60) for layer in cache.report)


@pytest.mark.parametrize("kind", ["bounded", "states"])
@pytest.mark.parametrize("family", ["bart", "whisper"])
@torch.no_grad()
def test_an_encoders_output_of_other_sizes(build: Any, kind: str, family: str) -> None:
    """Which a decoder would not look at: it attends to the keys that its cache holds."""
    model = build(family, head="ForConditionalGeneration")
    caches = EncoderDecoderStates(cache_of(kind, model), DynamicCache())

    def sources(rows: int, length: int) -> Any:
        return (torch.randn(rows, length, model.config.d_model),)

    source = sources(2, 8)
    model(encoder_outputs=source, decoder_input_ids=IDS[:, :3], past_key_values=caches)
    fork = caches.fork()
    wanted = model(encoder_outputs=source, decoder_input_ids=IDS[:, 3:4], past_key_values=fork.fork()).logits
    for rows, length in ((2, 5), (1, 8), (2, 11)):
        with pytest.raises(ValueError, match=rf"output of \({rows}, {length}\) rows.*one of \(2, 8\).*new caches"):
            model(encoder_outputs=sources(rows, length), decoder_input_ids=IDS[:, 3:4], past_key_values=fork)
    if family == "bart":
        with pytest.raises(ValueError, match=r"output of \(2, 12\) rows.*one of \(2, 8\)"):
            model(input_ids=IDS, decoder_input_ids=IDS[:, 3:4], past_key_values=fork)
    assert fork.get_seq_length() == 3
    got = model(encoder_outputs=source, decoder_input_ids=IDS[:, 3:4], past_key_values=fork).logits
    assert torch.equal(got, wanted)
    fork.batch_select_indices(torch.tensor([1]))
    model(encoder_outputs=(source[0][1:],), decoder_input_ids=IDS[1:, 3:4], past_key_values=fork)
    fork.reset()
    model(encoder_outputs=sources(1, 5), decoder_input_ids=IDS[:1, :3], past_key_values=fork)


@torch.no_grad()
def test_other_rows_of_a_language_model() -> None:
    model = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=2, hidden_size=32, pattern="ls")).eval()
    cache = StreamCache(2)
    model(IDS, past_key_values=cache)
    for rows in (IDS[:1, :1], IDS[:, :1].repeat(2, 1), IDS[:0, :1]):
        with pytest.raises(ValueError, match=rf"holds 2 rows, the call has {len(rows)}; .*batch_select_indices"):
            model(rows, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1]))
    assert model(IDS[1:, :1], past_key_values=cache).past_key_values.get_seq_length() == 13


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"input_ids": IDS[0]}, r"input_ids must be integers of shape \(B, L\), got \(12,\)"),
        ({"input_ids": IDS.float()}, r"input_ids must be integers .* of torch\.float32"),
        ({"labels": IDS[:, :5]}, r"labels must be \(B, L\) = \(2, 12\).*got \(2, 5\)"),
        ({"labels": IDS[:1]}, r"labels must be \(B, L\) = \(2, 12\).*got \(1, 12\)"),
        ({"labels": IDS, "logits_to_keep": 3}, "beside all logits; got .*logits_to_keep=3"),
        ({"logits_to_keep": -3}, "logits_to_keep must be a number of tokens, or 0 for all, got -3"),
        ({"logits_to_keep": torch.tensor([0, 1])}, "logits_to_keep must be a number of tokens"),
    ],
)
def test_inputs_of_a_language_model(call: dict[str, Any], words: str) -> None:
    """In words of their own, and before a cache takes anything in."""
    model, cache = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=1, hidden_size=32)).eval(), StreamCache(1)
    with pytest.raises(ValueError, match=words):
        model(**{"input_ids": IDS, **call}, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_positions_of_more_rows_than_the_cache_holds() -> None:
    """Said as rows are, before their places are held against the mask."""
    model = llama()
    cache, rows = BoundedCache(model, config=FEW), torch.full((3, 1), 12)
    model(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds 2 rows, the call has 3"):
        model(rows, past_key_values=cache, position_ids=rows)


@torch.no_grad()
def test_states_of_fewer_layers_than_are_linearized_now() -> None:
    """The others' tokens were read through softmax."""
    model = llama()
    linearize_(model, method="EluPlusOne", layers=[1])
    cache = StateCache(model)
    model(IDS, past_key_values=cache)
    restore_(model)
    linearize_(model, method="EluPlusOne")
    with pytest.raises(RuntimeError, match=r"states of layers \[1\], and LlamaModel is linearized in \[0, 1\]"):
        model.model(IDS[:, :3], past_key_values=cache)
    assert cache.get_seq_length() == 12
