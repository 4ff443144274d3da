"""Every family computes what the op computes, sees no padding, and is restored to the bit."""

from __future__ import annotations

import pytest
import torch

import linattn
from linattn.hf import intercept, linearize_, restore_
from model_inputs import DECODERS, ENCODERS, LENGTHS, OPTIONS, alone, batch, real

FAMILIES = (*ENCODERS, "vit", *DECODERS, "whisper", "bart")
MAPS = ("FavorPlus(num_features=32)", "Taylor(order=2)", "EluPlusOne")
# Float64 sums of some hundred terms of order 1 in another order: 2**-53 a rounding, and two layers that magnify it.
CLOSE = 1e-12


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.fixture
def double(build):
    """A family's base model in float64."""
    return lambda family, **options: build(family, **{**OPTIONS.get(family, {}), **options}).double()


def differ(ours, wanted) -> float:
    """Largest difference relative to the largest value."""
    return float((ours - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_op_in_every_layer(double, family, feature_map):
    model, inputs = double(family), batch(family)
    own = run(model, inputs)
    # ModernBERT's second layer has a window, wider than these texts, the others' cross attention: replaced if named.
    layers = {"modernbert": range(2), "bart": range(6), "whisper": range(6)}.get(family)
    report = linearize_(model, method=feature_map, layers=layers)
    ours = run(model, inputs)
    maps = {
        row.module_name: model.get_submodule(f"{row.module_name}.linear_attention.feature_map")
        for row in report.replaced
    }
    restore_(model)
    assert torch.equal(run(model, inputs), own)

    def op(call):
        query = call.query * (call.scale * 8**0.5)  # what the model's temperature has beyond the maps', 8**-0.5
        options = {"key_mask": call.key_mask, "is_causal": call.is_causal, "enable_gqa": True}
        return linattn.linear_attention(query, call.key, call.value, maps[call.module_name], **options)

    with intercept(model, op):
        wanted = run(model, inputs)
    assert len(maps) == (6 if family in ("whisper", "bart") else 2)
    assert differ(ours[real(inputs)], wanted[real(inputs)]) <= CLOSE
    assert differ(ours[real(inputs)], own[real(inputs)]) > 1e-3  # another kernel than softmax


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(double, family, feature_map):
    model, inputs = double(family), batch(family)
    linearize_(model, method=feature_map)
    whole, mask = run(model, inputs), real(inputs)
    for row in range(len(LENGTHS)):
        single = run(model, alone(inputs, row))[0]
        ours = whole[row] if isinstance(mask, slice) else whole[row][mask[row]]
        assert differ(ours, single) <= CLOSE


@pytest.mark.parametrize("config", ["merged 3", "window 1 + merged 2"])
@pytest.mark.parametrize("family", ENCODERS)
def test_padding_changes_no_choice_of_merged_keys(double, family, config):
    model, inputs = double(family), batch(family)
    linearize_(model, method=config)
    whole, mask = run(model, inputs), real(inputs)
    for row in range(len(LENGTHS)):
        assert differ(whole[row][mask[row]], run(model, alone(inputs, row))[0]) <= CLOSE


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("family", [*DECODERS, "bart", "whisper"])
def test_a_growing_cache_of_keys(double, family, feature_map):
    """Transformers' own cache hands over all keys with the last queries: aligned bottom-right, or wrong."""
    model = double(family)
    linearize_(model, method=feature_map)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(3))
    name, given = "input_ids", {}
    if family == "whisper":
        name, given = "decoder_input_ids", {"input_features": torch.randn(2, 4, 16, dtype=torch.float64)}
    elif family == "bart":
        name, given = "decoder_input_ids", {"input_ids": ids.flip(-1)}
    whole, cache, parts = run(model, {**given, name: ids}), None, []
    for part in ids.split([3, 1, 2, 1], 1):
        with torch.no_grad():
            found = model(**given, **{name: part}, past_key_values=cache, use_cache=True)
        parts.append(found[0])
        cache = found.past_key_values
    assert differ(torch.cat(parts, 1), whole) <= CLOSE
