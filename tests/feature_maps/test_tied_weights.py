"""Weights in several places of a map: what each place contributes to their gradient is added up, whoever computes it.

Letters: D head width, R features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import linattn
from grid import in_two_calls, qkv
from linattn.feature_maps import Centred, FeatureMap, Hedgehog, LearnedExponential
from linattn.positions import Gates, gated_attention_with_state

D, R, L = 8, 12, 23
QUERY, KEY, VALUE = qkv(1, 2, 2, L, L)
TOKENS, CUT = (QUERY, KEY, VALUE), 9


class Twice(FeatureMap):
    """A user's own map: one layer for queries and for keys."""

    def __init__(self) -> None:
        super().__init__(D, R)
        self.of_query = nn.Linear(D, R)
        self.of_key = nn.Linear(D, R)

    def query(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.of_query(x))

    def key(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.of_key(x) / 2)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q) @ self.key(k).mT


MAPS: dict[str, Callable[[], FeatureMap]] = {
    "LearnedExponential": lambda: LearnedExponential(D, R),
    "LearnedExponential-per-head": lambda: LearnedExponential(D, R, num_heads=2),
    "Hedgehog": lambda: Hedgehog(D),
    "Hedgehog-per-head": lambda: Hedgehog(D, num_heads=2),
    "Centred": lambda: Centred(LearnedExponential(D, R)).fit(QUERY, KEY),
    "a user's own": Twice,
}


def inner(feature_map: FeatureMap) -> FeatureMap:
    """The map with the weights."""
    return feature_map.inner if isinstance(feature_map, Centred) else feature_map


def all_of_it(feature_map: FeatureMap) -> None:
    """One module under two names."""
    feature_map.of_key = feature_map.of_query


def every_weight(feature_map: FeatureMap) -> None:
    """Two modules with the same weights."""
    for name in list(feature_map.of_query._parameters):
        setattr(feature_map.of_key, name, getattr(feature_map.of_query, name))


def one_weight(feature_map: FeatureMap) -> None:
    """Two modules that share W alone."""
    feature_map.of_key.weight = feature_map.of_query.weight


TIES = (all_of_it, every_weight, one_weight)


def pair(name: str, tie: Callable[[FeatureMap], None]) -> tuple[FeatureMap, FeatureMap]:
    """A map with tied weights, and one of the same values without."""
    generator = torch.Generator().manual_seed(2)
    tied = MAPS[name]().double()
    with torch.no_grad():
        for weight in tied.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    tie(inner(tied))
    free = copy.deepcopy(tied)
    inner(free).of_key = copy.deepcopy(inner(tied).of_key)
    names = {name for name, _ in free.named_parameters()}
    assert len(names) > len(list(tied.parameters()))
    return tied, free


def summed(tied: FeatureMap, free: FeatureMap, loss: Callable[[FeatureMap], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Gradients of a map's weights, beside the sum of those of all their places in a map where nothing is tied."""
    places: dict[Tensor, list[str]] = {}
    for name, weight in tied.named_parameters(remove_duplicate=False):
        places.setdefault(weight, []).append(name)
    found = torch.autograd.grad(loss(tied), list(places))
    apart = dict(free.named_parameters())
    wanted = dict(zip(apart, torch.autograd.grad(loss(free), list(apart.values())), strict=True))
    return [(x, sum(wanted[name] for name in names)) for x, names in zip(found, places.values(), strict=True)]


def attend(**options: object) -> Callable[[FeatureMap], Tensor]:
    """One call."""
    return lambda each: linattn.linear_attention(QUERY, KEY, VALUE, each, **options)


def absorbed(feature_map: FeatureMap) -> Tensor:
    """Through a state of its own."""
    empty = linattn.State.empty(feature_map, batch_size=1, num_heads=2, value_dim=5, dtype=torch.float64)
    return empty.absorb(feature_map, KEY, VALUE).read(feature_map, QUERY).out


WAYS: dict[str, Callable[[FeatureMap], Tensor]] = {
    "bidirectional": attend(),
    "causal": attend(is_causal=True),
    "blocked": attend(is_causal=True, backend="blocked"),
    "reference": attend(is_causal=True, backend="reference"),
    "stream": lambda each: in_two_calls(TOKENS, CUT, each),
    "state": absorbed,
    "rows": lambda each: linattn.attention_rows(QUERY, KEY, each, torch.arange(L)) @ VALUE,
    "packed": lambda each: linattn.linear_attention_packed(QUERY, KEY, VALUE, each, torch.tensor([0, 9, L])),
    "normaliser": lambda each: linattn.linear_partial(QUERY, KEY, VALUE, each).log_normalizer,
    "gated": lambda each: (
        gated_attention_with_state(QUERY, KEY, VALUE, each, Gates(torch.full((1, 2, L), -0.1, dtype=torch.float64))).out
    ),
}
WINDOWED: dict[str, Callable[[FeatureMap], Tensor]] = {
    "window": attend(window=4),
    "causal window": attend(window=4, is_causal=True),
    "stream with a window": lambda each: in_two_calls(TOKENS, CUT, each, window=4),
}


@pytest.mark.parametrize("tie", TIES, ids=lambda tie: tie.__name__)
@pytest.mark.parametrize("name", MAPS)
def test_a_tied_weight_has_the_gradients_of_all_its_places(name: str, tie: Callable[[FeatureMap], None]) -> None:
    """Sums of the same L² products in another order: rounding relative to the largest, 2·L²·u ≤ 1e-12."""
    tied, free = pair(name, tie)
    ways = WAYS | (WINDOWED if tied.softmax_kernel else {})
    for way in ways if name in ("LearnedExponential", "Hedgehog", "a user's own") else ("bidirectional", "stream"):
        call = ways[way]
        torch.testing.assert_close(call(tied), call(free), rtol=1e-12, atol=1e-12)
        for grad, wanted in summed(tied, free, lambda each, call=call: call(each).square().sum()):
            assert wanted.abs().max() > 1e-6 or (way != "normaliser" and wanted.abs().max() < 1e-12)
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12 * max(1, wanted.abs().max().item()))


@pytest.mark.parametrize("tie", [every_weight, one_weight], ids=lambda tie: tie.__name__)
@pytest.mark.parametrize("name", MAPS)
def test_torch_func_finds_a_tied_weight_in_all_its_places(name: str, tie: Callable[[FeatureMap], None]) -> None:
    """Of two modules; torch's own call leaves a module that has two names with the call's tensors."""
    tied, _ = pair(name, tie)

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feature_map = tied

        def forward(self) -> Tensor:
            return attend(is_causal=True)(self.feature_map).square().sum()

    called = Called()
    weights = dict(called.named_parameters())
    found = torch.func.grad(lambda given: torch.func.functional_call(called, given, ()))(
        {name: weight.detach() for name, weight in weights.items()}
    )
    wanted = torch.autograd.grad(called(), list(weights.values()))
    for grad, expected in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12 * max(1, expected.abs().max().item()))


@pytest.mark.parametrize("name", ["LearnedExponential", "Hedgehog"])
def test_a_step_of_a_tied_weight_ends_its_states(name: str) -> None:
    tied, _ = pair(name, all_of_it)
    state = linattn.linear_attention_with_state(QUERY, KEY, VALUE, tied).state
    attend()(tied).square().sum().backward()
    torch.optim.SGD(tied.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="do not mix"):
        state.read(tied, QUERY)
