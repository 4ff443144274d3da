"""What an audit measures: methods by widths and draws."""

from __future__ import annotations

import pytest

from linattn.methods.method import parse_method
from linattn_lab.audit.grid import FULL_METHODS, SHORT_METHODS, AuditGrid, is_random


@pytest.mark.parametrize("label", FULL_METHODS)
def test_methods_are_their_own_labels(label):
    assert parse_method(label).label == label


def test_the_full_grid_has_the_short_one():
    assert set(SHORT_METHODS) < set(FULL_METHODS)


def test_fixed_maps_are_measured_once():
    methods = tuple(map(parse_method, (*FULL_METHODS, "Centred(Hyperbolic(num_features=128))")))
    wanted = AuditGrid(methods, features=(64, 256), draws=3, seed=5)
    found = [(c.method.label, c.num_features, c.draw) for c in wanted.configurations()]
    free = [method for method in methods if method.takes_features]
    fixed = [method for method in methods if not method.takes_features]
    drawn = sum(3 if is_random(method.map) else 1 for method in fixed)
    assert all(is_random(method.map) for method in free)
    assert len(found) == len(set(found)) == len(free) * 2 * 3 + drawn
    assert ("FavorPlus", 256, 2) in found
    assert ("Expansion(num_centres=16, order=2)", None, 0) in found
    assert ("Expansion(num_centres=16, order=2)", None, 1) not in found
    assert ("Centred(Hyperbolic(num_features=128))", None, 2) in found
    seeds = {c.first_seed + layer for c in wanted.configurations() for layer in range(100)}
    assert len(seeds) == 3 * 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ()}, "got none"),
        ({"methods": (parse_method("Relu"), parse_method("relu"))}, "got Relu twice"),
        ({"features": ()}, "different positive integers"),
        ({"features": (64, 64)}, "different positive integers"),
        ({"features": (0,)}, "different positive integers"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        AuditGrid(**{"methods": (parse_method("Relu"),), **options})
