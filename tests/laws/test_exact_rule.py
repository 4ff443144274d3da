"""A rule of eviction is a class that says which keys come first. Here are two, under the laws of all."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import build, qkv
from laws import test_exact_part
from linattn.attention.exact import rule as rules
from linattn.planning.methods import parse_method


class Sinks(linattn.Exact):
    """The first keys that are not masked stay exact, whatever attends to them."""

    word = "sinks"

    def rank(self, score: Tensor, count: int | None = None) -> Tensor:
        """From older to newer, masked keys and free places last."""
        return (score == -torch.inf).byte().argsort(dim=-1, stable=True)[..., :count]


class Loudest(linattn.Exact):
    """The keys stay whose values add the most: mass times the value's norm."""

    word = "loudest"

    def score(self, mass: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What a key adds."""
        return mass * value.norm(dim=-1).to(mass.dtype)


LAWS = {
    name.removeprefix("test_"): law
    for name, law in inspect.getmembers(test_exact_part, inspect.isfunction)
    if name.startswith("test_") and "rule" in inspect.signature(law).parameters
}


def cells() -> list[object]:
    """Every law, with each set of its arguments but the rule."""
    found = []
    for name, law in LAWS.items():
        rows: list[dict[str, object]] = [{}]
        for mark in law.pytestmark:
            names, values = mark.args
            names = names if isinstance(names, tuple) else (names,)
            if names != ("rule",):
                sets = [dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in values]
                rows = [row | one for row in rows for one in sets]
        found += [pytest.param(law, row, id=f"{name}-{'-'.join(map(str, row.values()))}") for row in rows]
    return found


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the laws' own: how the first tokens are found key by key."""
    monkeypatch.setitem(test_exact_part.ORDERS, Sinks, lambda keys, score: sorted(keys))


@pytest.mark.parametrize(("law", "options"), cells())
def test_sinks_obey_the_laws(law: Callable[..., None], options: dict[str, object], blocks_of) -> None:
    fixtures = {"blocks_of": blocks_of} if "blocks_of" in inspect.signature(law).parameters else {}
    law(rule=Sinks, **options, **fixtures)


def test_there_are_laws_to_run() -> None:
    assert len(LAWS) >= 8
    assert len(cells()) >= 400


def test_sinks_keep_the_first_tokens_and_nothing_else() -> None:
    """The values of the first tokens, masked ones left out, are in the state after any number of tokens."""
    query, key, value = qkv(num_queries=60, num_keys=60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, 1:5] = False
    state = linattn.linear_attention_with_state(
        query, key, value, build("FavorPlus"), key_mask=mask, enable_gqa=True, exact=Sinks(4, 3)
    ).state
    for row, first in enumerate(([0, 1, 2], [0, 5, 6])):
        assert torch.equal(state.exact.heavy.value[row], value[row][:, first])


def test_a_score_may_read_keys_and_values() -> None:
    query, key, value = qkv(num_queries=40, num_keys=40)
    value[:, :, 2] *= 1e6
    state = linattn.linear_attention_with_state(
        query, key, value, build("FavorPlus"), enable_gqa=True, exact=Loudest(4, 1)
    ).state
    assert torch.equal(state.exact.heavy.value[:, :, 0], value[:, :, 2])
    everywhere = linattn.linear_attention(
        query, key, value, build("Expansion-0"), enable_gqa=True, exact=Loudest(num_heavy=40)
    )
    exact = linattn.softmax_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(everywhere, exact, rtol=1e-9, atol=1e-3)


def test_a_rule_is_written_saved_and_compared() -> None:
    method = parse_method("Expansion + sinks 3 + window 4")
    assert method.exact == Sinks(4, 3) != linattn.Exact(4, 3)
    assert method.label == "Expansion + window 4 + sinks 3"
    with pytest.raises(ValueError, match="has two rules, heavy and sinks; write one"):
        parse_method("Expansion + heavy 2 + sinks 3")
    tokens, feature_map = qkv(), build("FavorPlus")
    state = linattn.linear_attention_with_state(*tokens, feature_map, enable_gqa=True, exact=Sinks(4, 3)).state
    with pytest.raises(ValueError, match=r"built with exact=Sinks\(window=4, num_heavy=3, .*\), got exact="):
        linattn.linear_attention_with_state(*tokens, feature_map, state, enable_gqa=True, exact=linattn.Exact(4, 3))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.exact.rule == Sinks(4, 3)
    leaves, spec = pytree.tree_flatten(state)
    spec = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert pytree.tree_unflatten(leaves, spec).exact.rule == Sinks(4, 3)


def test_a_rule_needs_a_word_of_its_own() -> None:
    with pytest.raises(TypeError, match="Nameless needs a word of its own"):
        type("Nameless", (linattn.Exact,), {})
    assert rules.RULES["heavy"] is linattn.Exact
