"""A map is its record and its state_dict: rebuilt from both, through JSON, it is the same to the bit."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import linattn
from grid import MAPS, build, qkv, sample
from linattn.feature_maps import (
    FEATURE_MAPS,
    WRAPPERS,
    Balanced,
    Centred,
    FavorPlus,
    FeatureMap,
    FittedMap,
    Hedgehog,
    LearnedExponential,
    Oprf,
    RandomFeatureMap,
    Sderf,
    Taylor,
)
from linattn.methods.map_records import describe, rebuild

D, R, HEADS = 8, 12, 2
RANDOM = {"num_features": R, "draw": "iid", "scale": 0.5, "seed": 3}
FIXED = {"num_features": R, "lengths": "fixed", "num_heads": HEADS}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Exponential": [{}],
    "EluPlusOne": [{}],
    "Relu": [{"floor": 0.25}],
    "ElementwisePolynomial": [{"degree": 3}],
    "Identity": [{}],
    "Dpfp": [{"nu": 3}],
    "TensorPolynomial": [{"degree": 3, "constant": 0.0}, {"scale": 0.1, "constant": 0.5}],
    "Taylor": [{"order": 1}, {"scale": 0.1}],
    "FavorPlus": [RANDOM, FIXED],
    "Hyperbolic": [RANDOM, FIXED],
    "Trigonometric": [RANDOM, {**FIXED, "lengths": "chi"}],
    "Oprf": [RANDOM, {"num_features": R, "num_heads": HEADS, "mean_square": 2.5}],
    "Sderf": [RANDOM, {"num_features": R, "num_heads": HEADS, "second_moment": torch.eye(D)}],
    "RandomRelu": [{**RANDOM, "floor": 0.5}, FIXED],
    "Expansion": [{"num_centres": 3, "order": 2}, {"scale": 0.5, "centres": torch.ones(HEADS, 16, D)}],
    "LearnedExponential": [{"num_features": R, "scale": 0.5, "seed": 6}, {"num_features": R, "num_heads": HEADS}],
    "Hedgehog": [{"scale": 0.5}, {"num_heads": HEADS}],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in several]


def outcome(call: Callable[[], Tensor | None]) -> Tensor | str | None:
    """What a call gives, or what it refuses with: maps that are not fitted do."""
    try:
        return call()
    except ValueError as error:
        return str(error)


def same(found: Tensor | str | None, wanted: Tensor | str | None) -> bool:
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return type(found) is type(wanted) and found == wanted


def assert_returns(feature_map: FeatureMap) -> FeatureMap:
    """The law; the twin."""
    record = json.loads(json.dumps(describe(feature_map), allow_nan=False))
    twin = rebuild(record)
    twin.load_state_dict(feature_map.state_dict())
    assert type(twin) is type(feature_map)
    assert repr(twin) == repr(feature_map)
    assert twin.fingerprint() == feature_map.fingerprint()
    assert describe(twin) == record
    query, key, value = qkv()
    for side in ("query", "key", "query_log_weight", "key_log_weight"):
        found, wanted = (outcome(partial(getattr(m, side), key)) for m in (twin, feature_map))
        assert same(found, wanted), side
    found, wanted = (
        outcome(partial(linattn.linear_attention, query, key, value, m, enable_gqa=True)) for m in (twin, feature_map)
    )
    assert same(found, wanted)
    return twin


@pytest.mark.parametrize("name", [name for name in MAPS if name != "Learned"])
def test_every_map_of_the_grid(name: str) -> None:
    assert_returns(build(name))


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(part))
def test_every_option_unfitted_fitted_and_again(name: str, options: dict[str, Any]) -> None:
    feature_map = FEATURE_MAPS[name](D, **options)
    assert_returns(feature_map)
    if isinstance(feature_map, FittedMap):
        query, key = sample(D)
        assert_returns(feature_map.fit(query, key))
        assert_returns(FEATURE_MAPS[name](D, **options).fit(query[:, :1], key[:, :1]))
    if isinstance(feature_map, RandomFeatureMap):
        assert_returns(feature_map.redraw(2**62))


def test_every_option_of_every_map_is_tried() -> None:
    assert OPTIONS.keys() == FEATURE_MAPS.keys()
    for name, several in OPTIONS.items():
        tried = {"head_dim"}.union(*several)
        assert tried == set(inspect.signature(FEATURE_MAPS[name]).parameters), name


WRAPPED = {
    "Centred": lambda: Centred(FavorPlus(D, R, seed=5)),
    "means": lambda: Centred(Taylor(D), query_mean=torch.ones(1, D), key_mean=torch.zeros(1, D)),
    "Balanced": lambda: Balanced(Sderf(D, R, seed=5)),
    "options": lambda: Balanced(Oprf(D, R), ridge=1e-3),
    "transform": lambda: Balanced(Taylor(D, order=1), transform=2 * torch.eye(D)),
    "both": lambda: Centred(Balanced(Sderf(D, R, draw="iid", num_heads=HEADS), ridge=0.5)),
    "learned": lambda: Centred(LearnedExponential(D, R, num_heads=HEADS)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_unfitted_fitted_and_redrawn(name: str) -> None:
    feature_map = WRAPPED[name]()
    assert type(feature_map).__name__ in WRAPPERS
    assert_returns(feature_map)
    assert_returns(feature_map.fit(*sample(D)))
    for part in feature_map.modules():
        if isinstance(part, RandomFeatureMap):
            part.redraw(9)
    assert_returns(feature_map)


@pytest.mark.parametrize("kind", [LearnedExponential, Hedgehog])
@pytest.mark.parametrize("num_heads", [None, HEADS])
def test_learned_maps_after_steps_of_training(kind: Any, num_heads: int | None) -> None:
    sizes = (D,) if kind is Hedgehog else (D, R)
    feature_map = kind(*sizes, num_heads=num_heads)
    start = feature_map.fingerprint()
    optimiser = torch.optim.Adam(feature_map.parameters(), lr=0.05)
    query, key, value = qkv(dtype=torch.float32)
    for _ in range(3):
        optimiser.zero_grad()
        linattn.linear_attention(query, key, value, feature_map, enable_gqa=True).square().sum().backward()
        optimiser.step()
    twin = assert_returns(feature_map)
    assert feature_map.fingerprint() != start
    assert all(weight.requires_grad for weight in twin.parameters())


def test_a_record_says_nothing_of_tensors() -> None:
    fitted = Centred(Balanced(Sderf(D, R, seed=5))).fit(*sample(D))
    unfitted = Centred(Balanced(Sderf(D, R, seed=1)))
    assert describe(fitted) == describe(unfitted)


def test_maps_of_others_are_refused_by_name() -> None:
    class Centred(FeatureMap):  # of a name that the library has
        def query(self, x: Tensor) -> Tensor:
            return x

        def kernel(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT

    for own, words in ((build("Learned"), "grid.Learned"), (Centred(2, 2), "Centred")):
        with pytest.raises(ValueError, match=rf"{words} is not one of linattn's own maps.*keep the model as a pickle"):
            describe(own)


RELU = {"head_dim": 4, "floor": 0.001}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "a feature map's record has a name and options, got None"),
        ({"name": "Taylor"}, "has a name and options, got {'name': 'Taylor'}"),
        ({"name": "Taylor", "options": [4]}, "has a name and options"),
        ({"name": "Performer", "options": {}}, "there is no feature map 'Performer'; this linattn has Exponential,"),
        ({"name": ["Taylor"], "options": {}}, "there is no feature map ['Taylor']"),
        ({"name": "Taylor", "options": {}}, "Taylor cannot be built from {}: "),
        ({"name": "Taylor", "options": {"head_dim": 4, "degree": 2}}, "'degree'"),
        ({"name": "Taylor", "options": {"head_dim": 4, "order": 3}}, "order must be 1 or 2, got 3"),
        # For these the constructor has defaults, and a map with them may be another one.
        ({"name": "Relu", "options": {"head_dim": 4}}, "cannot be built from {'head_dim': 4}: floor is missing"),
        ({"name": "Relu", "options": {"head_dim": 4, "floor": None}}, "floor"),
        ({"name": "Taylor", "options": {"head_dim": 4, "order": 1}}, "scale is missing"),
        ({"name": "Taylor", "options": {"head_dim": 4, "order": 1, "scale": None}}, "scale is missing"),
        ({"name": "Centred", "options": {"inner": 3}}, "Centred cannot be built from {'inner': 3}"),
        ({"name": "Centred", "options": {"inner": {"name": "Relu", "options": RELU}}}, "softmax kernel"),
    ],
)
def test_what_is_no_record_is_refused(record: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        rebuild(record)
