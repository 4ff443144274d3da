"""Maps are fitted to what their own layer attends over, padding left out."""

from __future__ import annotations

import pytest
import torch

from linattn.convert.transfer import build_maps, fit_maps, record
from linattn.feature_maps import Centred
from linattn.hf import capture, linearize_, restore_
from linattn.hf.layer_attention import rescale_query
from linattn.methods.method import parse_method


def layers_of(model, layers=None):
    """Reports of the layers to convert."""
    found = linearize_(model, method="Exponential", layers=layers).replaced
    restore_(model)
    return found


def maps_for(model, batch, written, layers, num_features=None):
    methods = [parse_method(written)] * len(layers)
    return build_maps(methods, layers, record(model, batch), num_features=num_features, seed=3)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_what_is_recorded_is_what_capture_records(build, padded, family):
    model = build(family)
    found = record(model, padded[0])
    for call in capture(model, padded[0]).calls:
        own = found[call.module_name]
        assert (own.scale, own.is_causal) == (call.scale, call.is_causal)
        for name in ("query", "key", "value", "key_mask"):
            assert torch.equal(getattr(own, name), getattr(call, name))


@pytest.mark.parametrize("written", ["Expansion(num_centres=3)", "Centred(LearnedExponential(num_features=4))"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_fit_is_to_the_layers_own_live_tokens(build, padded, family, written):
    model = build(family)
    layers = layers_of(model, [1])
    (found,) = maps_for(model, padded[0], written, layers)
    (by_hand,) = maps_for(model, padded[0], written, layers)
    fit_maps([found], layers, model, padded[:5])
    queries, keys = [], []
    for batch in padded[:5]:
        call = record(model, batch)[layers[0].module_name]
        for text, mask in enumerate(batch["attention_mask"].bool()):
            queries.append(rescale_query(by_hand, call.query, call.scale)[text, :, mask])
            keys.append(call.key[text, :, mask])
    by_hand.fit(torch.cat(queries, 1)[None], torch.cat(keys, 1)[None])
    ours, theirs = found.state_dict(), by_hand.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
    if isinstance(found, Centred):
        mean = torch.cat(keys, 1).mean(1, keepdim=True)
        torch.testing.assert_close(found.key_mean, mean)


def test_layers_differ_in_draw_and_width_is_the_layers(build, padded):
    model = build("bert")
    layers = layers_of(model)
    first, second = maps_for(model, padded[0], "FavorPlus", layers, num_features=8)
    assert (first.head_dim, first.num_features) == (8, 8)
    assert not any(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(("family", "heads"), [("bert", 4), ("llama", 2)])
def test_learned_maps_have_weights_for_each_key_head_and_train(build, padded, family, heads):
    model = build(family)
    for feature_map in maps_for(model, padded[0], "LearnedExponential", layers_of(model), num_features=6):
        weights = [weight for weight in feature_map.parameters() if weight.ndim == 3]
        assert weights
        assert all(len(weight) == heads for weight in weights)
        assert all(weight.requires_grad for weight in feature_map.parameters())
