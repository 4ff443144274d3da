"""Layers that cap their logits softly (Gemma 2): bounded caches and merged keys of encoders take them, no map does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from architectures import DECODER, VOCABULARY, Architecture, inputs_of
from linattn import MergedKV, feature_maps
from linattn.hf import (
    BoundedCache,
    EncoderDecoderStates,
    LayerAttention,
    capture,
    from_pretrained,
    intercept,
    linearize_,
    save_pretrained,
)
from linattn.hf._bounded_layers import BoundedLayer
from linattn.hf._calls import InterfaceCall
from linattn.hf.linearization import choose_layers
from model_inputs import differ, run

IDS = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(5))
MASK = torch.arange(24) >= torch.tensor([0, 5])[:, None]
# More keys than the text has, and fewer.
ENOUGH, FEW = MergedKV(4, 64, None), MergedKV(4, 6, None)
# Below most logits; float32 sums of some hundred terms in another order.
CAP, CLOSE = 0.5, 1e-5
SIDE = {**DECODER, "sliding_window": 8, "attn_logit_softcapping": CAP, "query_pre_attn_scalar": 8}
FULL = {**SIDE, "layer_types": ["full_attention"] * 2}
ENCODER = Architecture(
    "T5GemmaEncoderModel", "encoder", {"encoder": FULL, "is_encoder_decoder": False}, config="T5Gemma"
)
BOTH_SIDES = Architecture(
    "T5GemmaForConditionalGeneration", "both sides", {"encoder": SIDE, "decoder": FULL, "vocab_size": VOCABULARY}
)


@pytest.fixture
def model(build):
    """A Gemma 2 whose layers both see all keys."""
    options = {name: FULL[name] for name in ("layer_types", "attn_logit_softcapping", "query_pre_attn_scalar")}
    return build("gemma2", head="ForCausalLM", **options)


@pytest.mark.parametrize("pieces", [[24], [7, 1, 1, 9, 6], [1] * 24], ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "left padding"])
def test_enough_exact_keys_are_the_model_itself(model, mask, pieces):
    options = {} if mask is None else {"attention_mask": mask.long()}
    live = slice(None) if mask is None else mask
    wanted, cache, outs, start = run(model, input_ids=IDS, **options)[live], BoundedCache(model, config=ENOUGH), [], 0
    assert [layer.config for layer in cache.report] == [ENOUGH] * 2
    for piece in pieces:
        shown = {} if mask is None else {"attention_mask": mask[:, : start + piece].long()}
        outs.append(run(model, input_ids=IDS[:, start : start + piece], past_key_values=cache, **shown))
        start += piece
    assert differ(torch.cat(outs, 1)[live], wanted) <= CLOSE
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert differ(run(model, input_ids=IDS, **options)[live], wanted) > 0.01


@pytest.mark.parametrize("options", [{"config": FEW}, {"budget": 16, "bits": 4}], ids=["exact", "codes"])
def test_a_bounded_cache_is_one_model_however_cut_or_taken_back(model, options):
    softmax = run(model, input_ids=IDS)
    wanted = run(model, input_ids=IDS, past_key_values=BoundedCache(model, **options))
    assert differ(wanted, softmax) > 1e-3
    cache = BoundedCache(model, **options)
    outs = [run(model, input_ids=part, past_key_values=cache) for part in IDS.split([5, 1, 18], 1)]
    assert differ(torch.cat(outs, 1), wanted) <= 10 * CLOSE
    cache = BoundedCache(model, **options)
    cache.activate_past_recording()
    for piece in IDS.split([6, 18], 1):
        run(model, input_ids=piece, past_key_values=cache)
    cache.crop(-6)
    again = run(model, input_ids=IDS[:, 18:], past_key_values=cache)
    assert differ(again, wanted[:, 18:]) <= 10 * CLOSE


def test_a_cap_beside_sinks():
    """As no model in the table has both: sinks are logits of their own, which nothing caps."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (3 * torch.randn(2, heads, 24, 8, generator=draw) for heads in (4, 2, 2))
    module, layer, outs = nn.Module(), BoundedLayer("layer.0", ENOUGH), []
    module.is_causal, sinks = True, torch.tensor([-1.0, 0.0, 0.5, 1.0])
    for piece in (slice(0, 11), slice(11, 12), slice(12, 24)):
        keys, values = layer.update(key[:, :, piece], value[:, :, piece])
        asked = {"scaling": 0.7, "softcap": CAP, "s_aux": sinks, "is_causal": True}
        outs.append(layer.attend(InterfaceCall(module, query[:, :, piece], keys.key, values, None, asked, None)))
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    logits = CAP * torch.tanh(0.7 * query @ key.mT / CAP)
    logits = logits.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
    logits = torch.cat((logits, sinks.view(1, 4, 1, 1).expand(2, -1, 24, -1)), -1)
    wanted = (torch.softmax(logits, -1)[..., :-1] @ value).transpose(1, 2)
    assert differ(torch.cat(outs, 1), wanted) <= CLOSE


def test_a_decoder_of_two_sides(model):
    """Its own text is bounded; cross attention has the caps of transformers' own function."""
    model = BOTH_SIDES.build()
    inputs = inputs_of(BOTH_SIDES, model)
    wanted = run(model, **inputs)
    cache = EncoderDecoderStates(BoundedCache(model, config=ENOUGH), DynamicCache())
    assert differ(run(model, **inputs, past_key_values=cache), wanted) <= CLOSE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [MergedKV(4, 64, None), "merged 64"], ids=str)
def test_merged_keys_of_an_encoder(tmp_path, method):
    """Caps, padding, and what is saved."""
    model = ENCODER.build()
    inputs = {**inputs_of(ENCODER, model), "attention_mask": MASK.flip(-1).long()}
    live, wanted = MASK.flip(-1), run(model, **inputs)
    assert len(linearize_(model, method).replaced) == 2
    assert differ(run(model, **inputs)[live], wanted[live]) <= CLOSE
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(run(from_pretrained(tmp_path / "saved").eval(), **inputs), run(model, **inputs))


MAPS: dict[str, Any] = {
    "a map": "FavorPlus(num_features=16)",
    "one of two": ["FavorPlus(num_features=16)", "merged 64"],
    "a function": lambda head_dim: MergedKV(4, 64, None),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", [None, [0, 1]])
@pytest.mark.parametrize("method", MAPS)
def test_maps_are_refused_at_once(method, layers):
    model = ENCODER.build()
    inputs = inputs_of(ENCODER, model)
    before, words = run(model, **inputs), "it asks for soft-capped logits, which no feature map can express"
    with pytest.raises(ValueError, match=words):
        linearize_(model, MAPS[method], layers=layers)
    assert torch.equal(run(model, **inputs), before)
    with pytest.raises(ValueError, match=words):
        choose_layers(model)


def test_a_layer_with_a_map_refuses_a_cap():
    attention, token = LayerAttention(feature_maps.FavorPlus(8, 16), "layer.0"), torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"layer\.0 attends by FavorPlus.*which has no soft caps; give merged keys"):
        attention(token, token, token, scale=1.0, soft_cap=CAP)


def test_what_is_captured_has_no_caps(model, exact):
    """Neither intercepted nor recorded calls tell of one, so that none is computed without it."""
    words = "asks for soft-capped logits, which its replacement for softmax cannot express"
    with pytest.raises(ValueError, match=words), intercept(model, exact):
        run(model, input_ids=IDS)
    with pytest.raises(ValueError, match=words):
        capture(model, {"input_ids": IDS})
