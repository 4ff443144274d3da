"""Models that rotate keys by frequencies which follow from a text's length, as Phi 3: their caches stay, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from architectures import decoder
from bounded_texts import ENOUGH, GREEDY, IDS
from linattn.hf import BoundedCache, linearize_, new_cache, stream_tokens, streaming

LIMIT = 16
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 8.0]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **FACTORS}


def phi(rotation: dict[str, Any] | None = None) -> PreTrainedModel:
    """A model of short texts and of long ones."""
    return decoder("Phi3ForCausalLM", original_max_position_embeddings=LIMIT, rope_parameters=rotation).build()


def emptied(model: PreTrainedModel, kind: str) -> Callable[[], Any]:
    """What makes an empty cache."""
    if kind == "states":
        linearize_(model, method="FavorPlus(num_features=16)")
        return lambda: new_cache(model)
    return lambda: BoundedCache(model, config=ENOUGH)


@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_a_long_prompt_is_kept(kind: str) -> None:
    """And goes on; with another cache generate gives the same text."""
    model = phi(LONG)
    empty = emptied(model, kind)
    cache, fed = empty(), empty()
    text = model.generate(IDS, **GREEDY, past_key_values=cache)
    assert cache.get_seq_length() == IDS.shape[1] + 9
    model(IDS, past_key_values=fed)
    for place in range(IDS.shape[1], text.shape[1] - 1):
        last = model(text[:, place : place + 1], past_key_values=fed).logits[:, -1]
        assert torch.equal(last.argmax(-1), text[:, place + 1])
    if kind == "bounded":
        wanted = model.generate(IDS, **GREEDY, past_key_values=DynamicCache(config=model.config))
        assert torch.equal(text, wanted)


@pytest.mark.parametrize("kind", ["states", "bounded"])
@pytest.mark.parametrize("held", [1, LIMIT])
def test_other_frequencies_do_not_meet_the_keys_that_are_held(kind: str, held: int) -> None:
    model = phi(LONG)
    cache = emptied(model, kind)()
    model(IDS[:, :held], past_key_values=cache)
    for call in (lambda each: model(IDS[:, held:], past_key_values=each), lambda each: generate(model, each)):
        with pytest.raises(ValueError, match=rf"holds {held} keys rotated for texts of up to 16 tokens.*a new cache"):
            call(cache.fork())
    assert cache.get_seq_length() == held
    if held < LIMIT:
        model(IDS[:, held:LIMIT], past_key_values=cache)
        assert cache.get_seq_length() == LIMIT


def generate(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """A text that goes on."""
    return model.generate(IDS, **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_frequencies_that_stay_go_on(kind: str) -> None:
    """transformers leaves the cache out all the same."""
    model = phi()
    empty = emptied(model, kind)
    cache, whole = empty(), empty()
    text = model.generate(IDS[:, :10], **GREEDY, past_key_values=cache)
    assert cache.get_seq_length() == text.shape[1] - 1 > LIMIT
    logits = model(text, past_key_values=whole).logits
    assert torch.equal(logits[:, 9:-1].argmax(-1), text[:, 10:])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_streamed_prompt_is_read_in_one_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As generate reads it; frequencies follow from how long a call's text is."""
    monkeypatch.setattr(streaming, "_CHUNK", 8)
    rotation = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    scaled = decoder("LlamaForCausalLM", max_position_embeddings=LIMIT, rope_parameters=rotation)
    model = phi(LONG) if kind == "longrope" else scaled.build()
    tokens = torch.cat(list(islice(stream_tokens(model, IDS, temperature=0), 4)), 1)
    wanted = model.generate(IDS, max_new_tokens=4, do_sample=False, past_key_values=DynamicCache())
    assert torch.equal(tokens, wanted[:, IDS.shape[1] :])


@pytest.mark.parametrize("kind", ["states", "bounded"])
def test_tokens_that_are_given_by_place_are_counted(kind: str) -> None:
    """A base model may be called without their name."""
    model = phi(LONG)
    empty = emptied(model, kind)
    cache, base = empty(), model.model
    base(IDS[:1, :9], None, None, cache)
    with pytest.raises(ValueError, match=f"the cache holds 9 keys rotated for texts of up to {LIMIT} tokens"):
        base(IDS[:1, :9], None, None, cache)
    with pytest.raises(ValueError, match="would take a text in again beside a cache of 9 tokens"):
        base(IDS[:1, :1], None, torch.zeros(1, 1, dtype=torch.long), cache)
