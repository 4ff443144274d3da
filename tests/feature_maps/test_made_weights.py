"""Weights that hooks make of others before each call, as pruning and norms of weights do, are made before each call.

Letters: D head width, R features.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import linattn
from grid import in_turns, in_two_calls, qkv
from linattn.feature_maps import Centred, FeatureMap, Hedgehog, LearnedExponential
from linattn.feature_maps.learned import Exponents, LearnedMap

D, R, L = 8, 12, 23
QUERY, KEY, VALUE = qkv(1, 2, 2, L, L)
TOKENS, CUT = (QUERY, KEY, VALUE), 9
SIDES = (("of_query",), ("of_key",), ("of_query", "of_key"))
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")

MAPS: dict[str, Callable[[], LearnedMap]] = {
    "LearnedExponential": lambda: LearnedExponential(D, R),
    "LearnedExponential-per-head": lambda: LearnedExponential(D, R, num_heads=2),
    "Hedgehog": lambda: Hedgehog(D),
    "Hedgehog-per-head": lambda: Hedgehog(D, num_heads=2),
}


def masked(name: str) -> Callable[[Exponents], Tensor]:
    """What pruning makes of a parameter and its mask."""
    return lambda of: getattr(of, f"{name}_orig") * getattr(of, f"{name}_mask")


def normed(of: Exponents) -> Tensor:
    """g·v/|v|, rows by the first dimension."""
    v = of.weight_v
    return of.weight_g * v / torch.linalg.vector_norm(v.flatten(1), dim=1).view(-1, *[1] * (v.ndim - 1))


def old_weight_norm(of: Exponents) -> None:
    """By a hook, and not at a weight of its own length."""
    nn.utils.weight_norm(of, "weight")
    with torch.no_grad():
        of.weight_g.mul_(1.5)


# How a weight is made, its name, and what it is then.
WAYS: dict[str, tuple[Callable[[Exponents], object], str, Callable[[Exponents], Tensor]]] = {
    "pruned": (lambda of: prune.l1_unstructured(of, "weight", amount=0.5), "weight", masked("weight")),
    "pruned bias": (lambda of: prune.random_unstructured(of, "bias", amount=0.4), "bias", masked("bias")),
    "pruned twice": (
        lambda of: [prune.l1_unstructured(of, "weight", amount=0.3) for _ in range(2)],
        "weight",
        masked("weight"),
    ),
    "pruned rows": (lambda of: prune.ln_structured(of, "weight", 0.3, n=2, dim=-2), "weight", masked("weight")),
    "norm by a hook": (old_weight_norm, "weight", normed),
    "norm by a parametrization": (
        lambda of: parametrizations.weight_norm(of, "weight"),
        "weight",
        lambda of: of.weight,
    ),
}


def moved(name: str) -> LearnedMap:
    """A map as training might leave it."""
    feature_map, generator = MAPS[name]().double(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in feature_map.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return feature_map


def calls(feature_map: LearnedMap) -> dict[str, Callable[[FeatureMap], Tensor]]:
    """Ways through attention."""
    found: dict[str, Callable[[FeatureMap], Tensor]] = {
        "causal": lambda each: linattn.linear_attention(QUERY, KEY, VALUE, each, is_causal=True),
        "bidirectional": lambda each: linattn.linear_attention(QUERY, KEY, VALUE, each),
        "reference": lambda each: linattn.linear_attention(QUERY, KEY, VALUE, each, backend="reference"),
        "stream": lambda each: in_two_calls(TOKENS, CUT, each),
        "rows": lambda each: linattn.attention_rows(QUERY, KEY, each, torch.arange(L)) @ VALUE,
    }
    if feature_map.softmax_kernel:
        found["window"] = lambda each: linattn.linear_attention(QUERY, KEY, VALUE, each, is_causal=True, window=4)
        found["centred"] = lambda each: linattn.linear_attention(QUERY, KEY, VALUE, Centred(each).fit(QUERY, KEY))
    return found


def plain(feature_map: LearnedMap, name: str, made: dict[str, tuple[str, Tensor]]) -> LearnedMap:
    """A map without hooks of the weights that they make now."""
    twin = MAPS[name]().double()
    with torch.no_grad():
        for side in ("of_query", "of_key"):
            ours, theirs = getattr(twin, side), getattr(feature_map, side)
            for key, weight in ours._parameters.items():
                is_made = side in made and made[side][0] == key
                if weight is not None:
                    weight.copy_(made[side][1] if is_made else getattr(theirs, key))
    return twin


def step(feature_map: LearnedMap) -> None:
    """Write to the weights in place, as optimizers do, and leave gradients empty."""
    linattn.linear_attention(QUERY, KEY, VALUE, feature_map).square().sum().backward()
    torch.optim.SGD(feature_map.parameters(), lr=0.5).step()
    feature_map.zero_grad()


@pytest.mark.parametrize(("name", "way", "sides"), in_turns(list(MAPS), list(WAYS), SIDES))
def test_attention_sees_the_weights_of_now(name: str, way: str, sides: tuple[str, ...]) -> None:
    """Outputs and gradients are those of a map of the weights that the hooks make, before a step and after."""
    (hook, key, weight_of), feature_map = WAYS[way], moved(name)
    for side in sides:
        hook(getattr(feature_map, side))
    before = [x.detach().clone() for x in feature_map.parameters()]
    for number in range(2):
        ways = calls(feature_map)
        chosen = ways if number else {"causal": ways["causal"]}
        for call in chosen.values():
            made = {side: (key, weight_of(getattr(feature_map, side))) for side in sides}
            twin = plain(feature_map, name, made)
            out, wanted_out = call(feature_map), call(twin)
            # The same sums of products; a norm may be rounded differently: a few units of u, times D·R.
            torch.testing.assert_close(out, wanted_out, rtol=1e-12, atol=1e-12)
            wanted = dict(zip(
                [x for x, _ in twin.named_parameters()],
                torch.autograd.grad(wanted_out.square().sum(), list(twin.parameters())),
                strict=True,
            ))  # fmt: skip
            found = torch.autograd.grad(out.square().sum(), list(feature_map.parameters()), retain_graph=True)
            # Back through what makes the weights, and as they are for all others.
            expected = pulled(feature_map, made, wanted)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-11 * max(1, y.abs().max().item()))
        if not number:
            step(feature_map)
            moves = [(x - y).abs().max() for x, y in zip(feature_map.parameters(), before, strict=True)]
            assert max(moves) > 1e-4


def pulled(
    feature_map: LearnedMap, made: dict[str, tuple[str, Tensor]], wanted: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of a map's own parameters, by those of the weights that it uses."""
    total = torch.zeros((), dtype=torch.float64)
    for name, grad in wanted.items():
        side, key = name.split(".")
        weight = made[side][1] if side in made and made[side][0] == key else getattr(getattr(feature_map, side), key)
        total = total + (weight * grad).sum()
    return torch.autograd.grad(total, list(feature_map.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_attention_sees_the_weights_of_now(way: str) -> None:
    """What it writes into buffers, exponents of base 2 among them; and pulls back by products of frozen weights."""
    (hook, key, weight_of), feature_map = WAYS[way], moved("LearnedExponential")
    for side in ("of_query", "of_key"):
        hook(getattr(feature_map, side))
    step(feature_map)
    made = {side: (key, weight_of(getattr(feature_map, side))) for side in ("of_query", "of_key")}
    twin = plain(feature_map, "LearnedExponential", made)
    results = []
    for each in (feature_map, twin):
        each.requires_grad_(False)
        query = QUERY.clone().requires_grad_()
        out = linattn.linear_attention(query, KEY, VALUE, each, is_causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), query)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_training_with_pruned_weights_leaves_them_pruned() -> None:
    feature_map = moved("LearnedExponential")
    prune.global_unstructured(
        [(feature_map.of_query, "weight"), (feature_map.of_key, "weight")], prune.L1Unstructured, amount=0.5
    )
    absent = feature_map.of_query.weight_mask == 0
    losses = []
    for _ in range(4):
        loss = linattn.linear_attention(QUERY, KEY, VALUE, feature_map, is_causal=True).square().sum()
        feature_map.zero_grad()
        loss.backward()
        assert not feature_map.of_query.weight_orig.grad[absent].any()
        torch.optim.SGD(feature_map.parameters(), lr=0.05).step()
        losses.append(loss.item())
    assert sorted(losses, reverse=True) == losses
    feature_map.query(QUERY)
    assert not feature_map.of_query.weight[absent].any()


def test_a_compiled_call_makes_the_weights_too() -> None:
    torch.compiler.reset()
    feature_map = moved("LearnedExponential")
    prune.l1_unstructured(feature_map.of_query, "weight", amount=0.5)

    def attend(query: Tensor) -> Tensor:
        return linattn.linear_attention(query, KEY, VALUE, feature_map, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = []
        for function in (attend, compiled):
            out = function(QUERY)
            results.append((out, *torch.autograd.grad(out.square().sum(), list(feature_map.parameters()))))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        step(feature_map)


@pytest.mark.parametrize("side", ["of_query", "of_key"])
def test_a_state_does_not_outlive_another_pruning(side: str) -> None:
    feature_map = LearnedExponential(D, R)
    prune.random_unstructured(getattr(feature_map, side), "weight", amount=0.3)
    state = linattn.linear_attention_with_state(QUERY, KEY, VALUE, feature_map).state
    state.read(feature_map, QUERY)
    prune.random_unstructured(getattr(feature_map, side), "weight", amount=0.5)
    with pytest.raises(ValueError, match="do not mix"):
        state.read(feature_map, QUERY)
