"""Written forms of methods: read, printed, refused."""

from __future__ import annotations

import re

import pytest
import torch

from linattn.attention import Exact, linear_attention
from linattn.planning.methods import parse_method, parse_without_map


@pytest.mark.parametrize(
    "label",
    [
        "FavorPlus",
        "Expansion(num_centres=16, order=2)",
        "Expansion(num_centres=16, order=2) + window 16 + heavy 32",
        "Centred(Balanced(FavorPlus)) + window 8",
        "Expansion + heavy 5",
        "Taylor(scale=100.0) + window 1",
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
        ("Expansion + windows 16", "'windows 16' is no exact part; write window W or heavy G"),
        ("Expansion + window", "'window' is no exact part"),
        ("Expansion + heavy 0", "'heavy 0' is no exact part"),
        ("Expansion + heavy -2", "'heavy -2' is no exact part"),
        ("Expansion + window 16 + window 32", "has two parts 'window'"),
        ("Expansion + window 24", "the window must be a power of two, as 16 or 32, got 24"),
        ("Expansion +", "'' is no exact part"),
        ("window 16", "not a feature map's written form"),
        ("1 + 1", "'1' is no exact part"),
        ("window 24 + merged 8", "has no map, and one is needed here: linattn.hf.linearize_ takes such a form"),
        ("Expansion + window 8 + merged 8", "leave the map out, as in 'window 8 + merged 8'"),
        ("Expansion + heavy 8 + merged 8", "leave num_heavy out and raise num_merged"),
        ("Expansion + merged", "'merged' is no exact part"),
    ],
)
def test_refusals(written, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_method(written)


def test_a_form_without_a_map_is_merged_keys():
    assert parse_without_map("MERGED 192 +window 320") == Exact(window=320, num_merged=192)
    for written in ("merged 5", "window 24 + merged 8"):
        assert parse_without_map(written).label == written
    for written in (
        "Expansion",
        "Expansion + window 8",
        "window 8",
        "heavy 8",
        "window 8 + merged",
        "merged 8 + merged 8",
    ):
        assert parse_without_map(written) is None


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
