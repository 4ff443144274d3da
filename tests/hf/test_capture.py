"""What `capture` records explains the model's output, or it raises."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from linattn.hf import capture


@pytest.mark.parametrize(("family", "kv_heads"), [("bert", 4), ("llama", 2), ("gpt2", 4)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_records_every_layer(build, padded, family, kv_heads, side):
    model, inputs = build(family), padded(side)
    recorded = capture(model, inputs)
    assert [call.layer for call in recorded.calls] == [0, 1]
    for call in recorded.calls:
        assert call.query.shape == (3, 4, 7, 8)
        assert call.key.shape == call.value.shape == (3, kv_heads, 7, 8)
        assert call.query.is_contiguous()
        assert not call.query.requires_grad
    with torch.no_grad():
        assert torch.equal(recorded.output, model(**inputs)[0])


def test_records_are_copies(build, padded):
    model, inputs = build("bert"), padded("right")
    before = capture(model, inputs).calls[0].query.clone()
    recorded = capture(model, inputs)
    with torch.no_grad():
        model(**{**inputs, "input_ids": inputs["input_ids"].flip(-1)})
    assert torch.equal(recorded.calls[0].query, before)


def test_attention_that_is_more_than_softmax(build, padded):
    def sharpened(module, query, key, value, attention_mask, **options):
        out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return 1.01 * out, weights

    AttentionInterface.register("linattn_test_sharpened", sharpened)
    AttentionMaskInterface.register("linattn_test_sharpened", sdpa_mask)
    model = build("llama")
    model.set_attn_implementation("linattn_test_sharpened")
    with pytest.raises(RuntimeError, match="differs from its own output by"):
        capture(model, padded("right"))


@pytest.mark.parametrize(
    ("family", "head"),
    [("bert", "ForSequenceClassification"), ("bert", "ForQuestionAnswering"), ("llama", "ForSequenceClassification")],
)
def test_outputs_of_whole_texts_are_compared_too(build, padded, family, head):
    model, inputs = build(family, head=head), padded("right")
    recorded = capture(model, inputs)
    with torch.no_grad():
        assert torch.equal(recorded.output, model(**inputs)[0])


def test_outputs_of_a_decoder_are_those_of_its_own_tokens(build, padded):
    model, inputs = build("bart", head="ForConditionalGeneration"), padded("right")
    for length in (3, 7):
        assert (
            capture(model, {**inputs, "decoder_input_ids": inputs["input_ids"][:, :length]}).output.shape[1] == length
        )


def test_training_mode(build, padded):
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        capture(build("bert").train(), padded("right"))


@torch.no_grad()
def test_numbers_that_are_none_are_not_laid_to_attention(build, padded):
    """The model's own output says so before attention is looked at."""
    model = build("bert")
    next(model.parameters())[:] = float("nan")
    with pytest.raises(RuntimeError, match="BertModel gives NaN or infinity"):
        capture(model, padded("right"))
