"""Written forms of feature maps: read, built, refused."""

from __future__ import annotations

import re

import pytest

from linattn.feature_maps import FEATURE_MAPS, Balanced, Centred, Oprf
from linattn.methods.method import parse_map


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_map_by_name_in_any_case(name):
    for written in (name, name.lower(), f" {name.upper()} "):
        spec = parse_map(written)
        assert spec.label == name
        built = spec.build(8, num_features=16 if spec.takes_features else None, scale=0.5, seed=3)
        assert type(built) is FEATURE_MAPS[name]
        assert built.head_dim == 8
        assert not any(weight.requires_grad for weight in built.parameters())
    if spec.takes_features:
        assert built.num_features == 16


def test_options_reach_the_map():
    spec = parse_map("centred(hyperbolic(lengths='fixed', draw='iid'))")
    built = spec.build(8, num_features=16, scale=0.25, seed=7)
    assert isinstance(built, Centred)
    inner = built.inner
    assert (inner.lengths, inner.draw, inner.scale) == ("fixed", "iid", 0.25)
    other = spec.build(8, num_features=16, scale=0.25, seed=8)
    assert not (inner.projection == other.inner.projection).all()
    assert parse_map("Taylor(order=1, scale=2.0)").build(4, num_features=None, scale=0.5, seed=0).scale == 2.0


def test_wrappers_nest_in_the_order_written():
    spec = parse_map("centred(BALANCED(oprf(draw='iid', num_features=24)))")
    assert spec.wrappers == ("Centred", "Balanced")
    assert spec.label == "Centred(Balanced(Oprf(draw='iid', num_features=24)))"
    assert not spec.takes_features
    built = spec.build(8, num_features=None, scale=0.25, seed=7)
    assert isinstance(built, Centred)
    assert isinstance(built.inner, Balanced)
    assert isinstance(built.inner.inner, Oprf)
    assert built.num_features == 24


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("Performer", "no feature map 'Performer'; write one of Exponential, EluPlusOne"),
        ("FavorPlus(", "not a feature map's written form"),
        ("FavorPlus(256)", "write every option of FavorPlus by name"),
        (
            "FavorPlus(rows=2)",
            "'rows' is no option of FavorPlus here; its options are those of FavorPlus(num_features, draw, lengths, ",
        ),
        ("FavorPlus(seed=2)", "'seed' is no option"),
        ("Taylor(**{'order': 1})", "None is no option"),
        ("Taylor(order=__import__('os').getpid())", "must be a plain number"),
        ("Centred", "no feature map 'Centred'"),
        ("Centred()", "takes one feature map and no options"),
        ("Centred(FavorPlus, 2)", "takes one feature map and no options"),
        ("Centred(balanced())", "Balanced takes one feature map and no options"),
        ("Balanced(FavorPlus, ridge=0.5)", "Balanced takes one feature map and no options"),
        ("Sderf(second_moment=[[1.0]])", "'second_moment' is no option"),
        ("FavorPlus(scale=1.0, scale=2.0)", "scale is written twice"),
        ("Taylor(order={[]: 1})", "order must be a plain number"),
        ("Taylor\ud800", "not a feature map's written form"),
        ("1 + 1", "not a feature map's written form"),
        ("", "not a feature map's written form"),
    ],
)
def test_refusals(written, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_map(written)


def test_building_refusals():
    with pytest.raises(ValueError, match="FavorPlus needs a number of features"):
        parse_map("FavorPlus").build(8, num_features=None, scale=1.0, seed=0)
    with pytest.raises(ValueError, match="EluPlusOne has a width of its own"):
        parse_map("EluPlusOne").build(8, num_features=8, scale=1.0, seed=0)
    with pytest.raises(ValueError, match=r"FavorPlus\(num_features=8\) has a width of its own"):
        parse_map("FavorPlus(num_features=8)").build(8, num_features=8, scale=1.0, seed=0)
    for written, words in (
        ("Centred(Centred(FavorPlus))", "centred already"),
        ("Balanced(Centred(FavorPlus))", "centre outside"),
        ("Balanced(Relu)", "Balanced wants a map for the softmax kernel"),
    ):
        spec = parse_map(written)
        with pytest.raises(TypeError, match=words):
            spec.build(8, num_features=8 if spec.takes_features else None, scale=1.0, seed=0)
    with pytest.raises(TypeError, match="softmax kernel"):
        parse_map("Centred(Relu)").build(8, num_features=None, scale=1.0, seed=0)
