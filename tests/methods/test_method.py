"""Written forms of methods: read, printed, refused."""

from __future__ import annotations

import re

import pytest

from linattn import MergedKV
from linattn.methods.method import parse_method, together


@pytest.mark.parametrize(
    "label",
    [
        "FavorPlus",
        "Expansion(num_centres=16, order=2)",
        "Expansion(num_centres=16, order=2) + window 16",
        "Centred(Balanced(FavorPlus)) + window 8",
        "Expansion + window 4",
        "Taylor(scale=100.0) + window 1",
        "merged 128",
        "window 24 + merged 8",
    ],
)
def test_round_trip(label):
    assert parse_method(label).label == label


def test_any_case_spacing_and_order():
    method = parse_method(" expansion( num_centres=4 )+ WINDOW  16 ")
    assert method.label == "Expansion(num_centres=4) + window 16"
    assert (method.window, method.merged) == (16, None)
    method = parse_method(" MERGED 8 IN 4 bits +Window  16 ")
    assert (method.map, method.window, method.merged) == (None, None, MergedKV(16, 8, 4, 0))
    assert parse_method("Relu").window is None
    assert parse_method("Taylor(scale=1e+2)").map.options == (("scale", 100.0),)
    assert parse_method("Centred(Taylor(scale=1e+2)) + window 2").window == 2


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("Performer + window 16", "no feature map 'Performer'"),
        (
            "Expansion + windows 16",
            "'windows 16' is no window, did you mean 'window'?; write, for example, Expansion + window 32",
        ),
        ("Expansion + window", "'window' is no window (the word and a positive whole number); write"),
        ("Expansion + window 0", "'window 0' is no window (the word and a positive whole number)"),
        ("Expansion + window -2", "'window -2' is no window (the word and a positive whole number)"),
        ("Expansion + window 16 + window 32", "has 3 parts; write a map and a window, as Expansion + window 32"),
        ("window 16 + merged 8 + window 32", "has two parts 'window'; write one"),
        ("Expansion + window 24", "the window must be a power of two below 2³¹, as 16 or 32, got 24"),
        ("Expansion +", "'' is no window"),
        ("window 16", "'window 16' merges no keys; write, for example, window 16 + merged 128"),
        ("window", "'window' is no part of merged keys (a word and a positive whole number)"),
        ("window 16 + Expansion", "'Expansion' is no part of merged keys; write sinks S, window W, merged C"),
        ("1 + 1", "'1' is not a feature map's written form"),
        # The unknown word is named, whatever stands beside it.
        ("windw 8", "there is no feature map 'windw', did you mean 'window'?"),
        ("windw 8 + merged 8", "there is no feature map 'windw', did you mean 'window'?"),
        ("merge 8 + window 8", "there is no feature map 'merge', did you mean 'merged'?"),
        ("window8 + merged 8", "there is no feature map 'window8', did you mean 'window'?"),
        ("window 8 + mergd 8", "'mergd 8' is no part of merged keys, did you mean 'merged'?"),
        ("Expansio + window 8", "there is no feature map 'Expansio', did you mean 'Expansion'?"),
        ("Centerd(Taylor)", "there is no feature map 'Centerd', did you mean 'Centred'?"),
        ("Centred(Tayler)", "there is no feature map 'Tayler', did you mean 'Taylor'?"),
        ("Expansion(num_centers=4)", "no option of Expansion here, did you mean 'num_centres'?"),
        ("linformer 8", "there is no feature map 'linformer'; write one of"),
        ("window 8 merged 8", "is no part of merged keys (a word and a positive whole number)"),
        ("window 8 + merged eight", "is no part of merged keys (a word and a positive whole number)"),
        ("Expansion + window 8 + merged 8", "leave the map out, as in 'window 32 + merged 128'"),
        ("Expansion + merged", "leave the map out, as in 'window 32 + merged 128'"),
    ],
)
def test_refusals(written, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_method(written)


def test_a_form_without_a_map_is_merged_keys():
    method = parse_method("MERGED 192 +window 320")
    assert method.map is None
    assert method.merged == MergedKV(320, 192, None, 0)
    assert not method.takes_features
    with pytest.raises(ValueError, match=r"window 320 \+ merged 192 has no map, got num_features=8"):
        method.build_kernel(4, num_features=8, scale=0.5, seed=0)
    with pytest.raises(ValueError, match="has no map; give a method with one, as FavorPlus"):
        method.build_map(4, num_features=None, scale=0.5, seed=0)


@pytest.mark.parametrize("written", ["Relu + window 16", "Taylor(order=1) + window 4", "Trigonometric + window 2"])
def test_maps_that_share_no_normaliser_with_exact_attention(written):
    method = parse_method(written)
    with pytest.raises(ValueError, match="cannot share a normaliser with exact attention"):
        method.build_kernel(4, num_features=8 if method.map.takes_features else None, scale=0.5, seed=0)


def test_layers_alike_are_written_once():
    assert together(["merged 8", "merged 8"]) == "merged 8"
    assert together(["merged 8", "merged 4"]) == "merged 8; merged 4"
