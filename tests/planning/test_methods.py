"""Written forms of methods: read, printed, refused."""

from __future__ import annotations

import re

import pytest
import torch

from linattn.attention import Exact, linear_attention
from linattn.planning.methods import parse_method
from linattn.planning.no_map import NoMap


@pytest.mark.parametrize(
    "label",
    [
        "FavorPlus",
        "Expansion(num_centres=16, order=2)",
        "Expansion(num_centres=16, order=2) + window 16 + heavy 32",
        "Centred(Balanced(FavorPlus)) + window 8",
        "Expansion + heavy 5",
        "Taylor(scale=100.0) + window 1",
        "merged 128",
        "window 24 + merged 8",
    ],
)
def test_round_trip(label):
    assert parse_method(label).label == label


def test_any_case_spacing_and_order():
    method = parse_method(" expansion( num_centres=4 )+ HEAVY 8 +Window  16 ")
    assert method.label == "Expansion(num_centres=4) + window 16 + heavy 8"
    assert method.exact == Exact(window=16, num_heavy=8)
    assert parse_method("Relu").exact is None
    assert parse_method("Taylor(scale=1e+2)").map.options == (("scale", 100.0),)
    assert parse_method("Centred(Taylor(scale=1e+2)) + heavy 2").exact == Exact(num_heavy=2)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("Performer + window 16", "no feature map 'Performer'"),
        ("Expansion + windows 16", "'windows 16' is no exact part, did you mean 'window'?; write window W or heavy G"),
        ("Expansion + window", "'window' is no exact part"),
        ("Expansion + heavy 0", "'heavy 0' is no exact part"),
        ("Expansion + heavy -2", "'heavy -2' is no exact part"),
        ("Expansion + window 16 + window 32", "has two parts 'window'"),
        ("Expansion + window 24", "the window must be a power of two, as 16 or 32, got 24"),
        ("Expansion +", "'' is no exact part"),
        (
            "window 16",
            "leaves the keys that are not exact to nobody; write merged keys, as in 'window 32 + merged 128'",
        ),
        ("window 16 + Expansion", "'Expansion' is no exact part"),
        ("1 + 1", "'1 ' is not a feature map's written form"),
        # The unknown word is named, whatever stands beside it.
        ("windw 8", "there is no feature map 'windw', did you mean 'window'?"),
        ("windw 8 + merged 8", "there is no feature map 'windw', did you mean 'window'?"),
        ("merge 8 + window 8", "there is no feature map 'merge', did you mean 'merged'?"),
        ("window8 + merged 8", "there is no feature map 'window8', did you mean 'window'?"),
        ("window 8 + mergd 8", "'mergd 8' is no exact part, did you mean 'merged'?"),
        ("Expansion + heavi 8", "'heavi 8' is no exact part, did you mean 'heavy'?"),
        ("Expansio + window 8", "there is no feature map 'Expansio', did you mean 'Expansion'?"),
        ("Centerd(Taylor)", "there is no feature map 'Centerd', did you mean 'Centred'?"),
        ("Centred(Tayler)", "there is no feature map 'Tayler', did you mean 'Taylor'?"),
        ("Expansion(num_centers=4)", "no option of Expansion here, did you mean 'num_centres'?"),
        ("linformer 8", "there is no feature map 'linformer'; write one of"),
        ("window 8 merged 8", "(parts are a word and a positive whole number, joined by +)"),
        ("window 8 + merged eight", "(parts are a word and a positive whole number, joined by +)"),
        ("Expansion + window 8 + merged 8", "leave the map out, as in 'window 8 + merged 8'"),
        ("Expansion + heavy 8 + merged 8", "leave num_heavy out and raise num_merged"),
        ("Expansion + merged", "'merged' is no exact part"),
    ],
)
def test_refusals(written, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_method(written)


def test_a_form_without_a_map_is_merged_keys():
    method = parse_method("MERGED 192 +window 320")
    assert method.map is None
    assert method.exact == Exact(window=320, num_merged=192)
    assert not method.takes_features
    assert not method.is_random
    with pytest.raises(ValueError, match=r"window 320 \+ merged 192 has no map, got num_features=8"):
        method.build(4, num_features=8, scale=0.5, seed=0)


def test_merged_keys_attend_at_the_scale_they_are_built_for():
    method = parse_method("merged 3")
    q, k, v = torch.randn(1, 4, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3)
    for scale in (0.5, 1.3):
        built = method.build(4, num_features=None, scale=scale, seed=0)
        assert isinstance(built, NoMap)
        found = method.attend(built, q, k, v, is_causal=False)
        wanted = linear_attention(2 * scale * q, k, v, None, enable_gqa=True, exact=method.exact)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            built.kernel(q, k.repeat_interleave(2, 1)).log(), scale * q @ k.repeat_interleave(2, 1).mT
        )


@pytest.mark.parametrize("written", ["Relu + window 16", "Taylor(order=1) + heavy 2", "Trigonometric + window 2"])
def test_maps_that_share_no_normaliser_with_exact_attention(written):
    method = parse_method(written)
    with pytest.raises(ValueError, match="cannot share a normaliser with exact attention"):
        method.build(4, num_features=8 if method.map.takes_features else None, scale=0.5, seed=0)


def test_without_an_exact_part_a_method_is_the_op():
    method = parse_method("FavorPlus")
    feature_map = method.build(4, num_features=8, scale=0.5, seed=1)
    q, k, v = torch.randn(1, 4, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3)
    for is_causal in (False, True):
        expected = linear_attention(q, k, v, feature_map, is_causal=is_causal, enable_gqa=True)
        assert torch.equal(method.attend(feature_map, q, k, v, is_causal=is_causal), expected)
