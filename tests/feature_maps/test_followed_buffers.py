"""Maps follow their buffers, whoever writes to them: averages of models, ranks, loaders and torch.func.

Letters: D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

import linattn
from grid import HEAD_DIM, NUM_FEATURES, build, qkv, sample, tokens
from linattn.feature_maps import (
    FEATURE_MAPS,
    Balanced,
    Centred,
    Expansion,
    FavorPlus,
    FeatureMap,
    FittedMap,
    Oprf,
    RandomFeatureMap,
    Sderf,
    Taylor,
)

Write = Callable[[FeatureMap, FeatureMap], None]
Seen = tuple[str, list[Tensor]]


def wrapped(name: str, wrap: Callable[[FeatureMap], FittedMap]) -> FeatureMap:
    """A map inside others, fitted."""
    return wrap(build(name)).fit(*sample(HEAD_DIM))


BUFFERED = [name for name in FEATURE_MAPS if list(build(name).buffers())]
MOVABLE = [name for name in BUFFERED if build(name).softmax_kernel and name != "Expansion"]
PAIRS: dict[str, Callable[[], FeatureMap]] = {
    **{name: lambda name=name: build(name) for name in BUFFERED},
    **{f"Centred-{name}": lambda name=name: wrapped(name, Centred) for name in MOVABLE},
    **{f"Balanced-{name}": lambda name=name: wrapped(name, Balanced) for name in MOVABLE},
    "Centred-Balanced-Oprf": lambda: wrapped("Oprf", lambda inner: Centred(Balanced(inner))),
    "Centred-Balanced-Sderf": lambda: build("Centred-Balanced-Sderf"),
    "Centred-LearnedExponential": lambda: build("Centred-LearnedExponential"),
    "FavorPlus-per-head": lambda: build("FavorPlus-per-head"),
    "Hyperbolic-fixed": lambda: build("Hyperbolic-fixed"),
    "Expansion-2": lambda: build("Expansion-2"),
}
# What else there is of a map than its numbers is the same for all of a kind: index tables of products.
CHANGING = [name for name in PAIRS if name not in ("Taylor", "TensorPolynomial")]


def changed(name: str, seed: int) -> FeatureMap:
    """The same kind of map with other numbers in its buffers: drawn and fitted anew."""
    feature_map = PAIRS[name]()
    for part in feature_map.modules():
        if isinstance(part, RandomFeatureMap):
            part.redraw(seed)
    query, key = sample(HEAD_DIM)
    return feature_map.fit(seed * query - 1, key + 0.1 * seed) if isinstance(feature_map, FittedMap) else feature_map


@cache
def source(name: str, seed: int = 2) -> tuple[FeatureMap, Seen]:
    """Another map, which no law writes to, and what is seen of it."""
    other = changed(name, seed)
    return other, seen(other)


def used(name: str) -> FeatureMap:
    """A map that was used, so that all it keeps is there."""
    feature_map = PAIRS[name]()
    seen(feature_map)
    return feature_map


def seen(feature_map: FeatureMap) -> Seen:
    """The fingerprint, and what features, attention, its gradient and a stream make of a map."""
    query, key, value = (x.requires_grad_() for x in qkv(1, 2, 2, 9, 9, value_dim=3))
    options = {"window": 2} if feature_map.softmax_kernel and feature_map.positive_normalizer else {}
    out = linattn.linear_attention(query, key, value, feature_map, is_causal=True, **options)
    found = [out, *torch.autograd.grad(out.square().sum(), (query, key))]
    with torch.no_grad():
        found += [feature_map.query(query), feature_map.key(key), feature_map.kernel(query, key)]
        found += [linattn.linear_attention(*(x.float() for x in (query, key, value)), feature_map)]
        attended = linattn.linear_attention_with_state(query, key, value, feature_map)
        found += [attended.out, attended.state.S, attended.state.z, attended.state.m]
    return feature_map.fingerprint(), [x.detach() for x in found]


def same(first: Seen, second: Seen) -> bool:
    """Whether all that was seen is equal to the bit."""
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


def copied(target: FeatureMap, source: FeatureMap) -> None:
    """As DDP sends buffers of the first rank: written over, in no order of one's own."""
    buffers = dict(source.named_buffers())
    with torch.no_grad():
        for name, buffer in reversed(list(target.named_buffers())):
            buffer.copy_(buffers[name])


def detached(target: FeatureMap, source: FeatureMap) -> None:
    """As averages of models keep buffers alike."""
    for ours, theirs in zip(target.buffers(), source.buffers(), strict=True):
        ours.detach().copy_(theirs.detach())


def many_at_once(target: FeatureMap, source: FeatureMap) -> None:
    """As the averages of all parameters and buffers of a kind are."""
    with torch.no_grad():
        torch._foreach_copy_(list(target.buffers()), list(source.buffers()))


def replaced(target: FeatureMap, source: FeatureMap) -> None:
    """As transformers loads a model."""
    for name, buffer in source.named_buffers():
        path, _, last = name.rpartition(".")
        target.get_submodule(path)._buffers[last] = buffer.clone()


def assigned(target: FeatureMap, source: FeatureMap) -> None:
    """As an attribute, under inference mode."""
    with torch.inference_mode():
        for name, buffer in source.named_buffers():
            path, _, last = name.rpartition(".")
            setattr(target.get_submodule(path), last, buffer.clone())


WRITES: tuple[Write, ...] = (copied, detached, many_at_once, replaced, assigned)


@pytest.mark.parametrize("name", CHANGING)
def test_a_map_is_what_its_buffers_say(name: str) -> None:
    target = used(name)
    assert len({target.fingerprint(), source(name, 2)[1][0], source(name, 3)[1][0]}) == 3
    assert not torch.equal(source(name, 2)[1][1][0], source(name, 3)[1][1][0])
    # A wrapped map's own buffers and those inside are written alike.
    for number, write in enumerate(WRITES if "-" not in name else WRITES[3 * (len(name) % 2) :][:2]):
        state = linattn.linear_attention_with_state(Q, K, V, target).state
        other, wanted = source(name, 2 + number % 2)
        write(target, other)
        with pytest.raises(ValueError, match="do not mix"):
            state.read(target, Q)
        assert target.fingerprint() == wanted[0], write.__name__
        assert same(seen(target), wanted), write.__name__


LOOKS: dict[str, Callable[[FeatureMap], Tensor]] = {
    "query": lambda each: each.query(Q),
    "key": lambda each: each.key(K),
    "kernel": lambda each: each.kernel(Q, K),
    "rows": lambda each: linattn.attention_rows(Q, K, each, torch.arange(3)),
    "attention": lambda each: linattn.linear_attention(Q, K, V, each, is_causal=True),
    "float32": lambda each: linattn.linear_attention(Q.float(), K.float(), V.float(), each),
    "state": lambda each: EMPTY(each).absorb(each, K, V).S,
    "one token": lambda each: one_token(each, "auto"),
    "one token in plain torch": lambda each: one_token(each, "blocked"),
    "gradient of a query": lambda each: each.query_vjp(Q, each.query(Q).detach()),
}
Q, K, V = qkv(1, 2, 2, 9, 9, value_dim=3)
EMPTY = partial(linattn.State.empty, batch_size=1, num_heads=2, value_dim=3, dtype=torch.float64)


def one_token(feature_map: FeatureMap, backend: str) -> Tensor:
    """The sums after one token, which has a short way."""
    token = (x[:, :, :1].float() for x in (Q, K, V))
    state = linattn.linear_attention_with_state(*token, feature_map, backend=backend).state
    return torch.cat((state.S.flatten(), state.m.flatten()))


@pytest.mark.parametrize("name", CHANGING)
def test_whatever_looks_first_sees_the_buffers(name: str) -> None:
    target = used(name)
    for number, (way, look) in enumerate(LOOKS.items()):
        other = source(name, 2 + number % 2)[0]
        copied(target, other)
        assert torch.equal(look(target), look(other)), way


@pytest.mark.parametrize("name", CHANGING)
def test_a_look_within_torch_func_leaves_nothing_of_it(name: str) -> None:
    """Be it the first one at other buffers."""
    target, (other, wanted) = used(name), source(name)
    copied(target, other)

    def loss(key: Tensor) -> Tensor:
        total = linattn.linear_attention(Q, key, V[:, :, :1], target, backend="reference").square().sum()
        one_token(target, "blocked")
        return total

    torch.func.hessian(loss)(K[:, :, :1])
    assert torch.func.grad(loss)(K[:, :, :1]).isfinite().all()
    assert same(seen(target), wanted)


class Called(nn.Module):
    """What torch.func.functional_call calls."""

    def __init__(self, feature_map: FeatureMap) -> None:
        super().__init__()
        self.feature_map = feature_map

    def forward(self) -> tuple[str, list[Tensor]]:
        return seen(self.feature_map)


@pytest.mark.parametrize("name", CHANGING)
def test_a_functional_call_has_the_map_of_its_buffers_and_leaves_the_map_its_own(name: str) -> None:
    target, (other, wanted) = PAIRS[name](), source(name)
    own, state = seen(target), linattn.linear_attention_with_state(Q, K, V, target).state
    given = dict(Called(other).named_buffers())
    assert same(torch.func.functional_call(Called(target), given, ()), wanted)
    assert same(seen(target), own)
    state.read(target, Q)


UNFITTED: dict[str, Callable[[], FeatureMap]] = {
    "Oprf": lambda: Oprf(HEAD_DIM, NUM_FEATURES),
    "Sderf": lambda: Sderf(HEAD_DIM, NUM_FEATURES),
    "Expansion": lambda: Expansion(HEAD_DIM),
    "Expansion-2": lambda: Expansion(HEAD_DIM, 3, order=2),
    "Centred-FavorPlus": lambda: Centred(FavorPlus(HEAD_DIM, NUM_FEATURES)),
    "Balanced-Taylor": lambda: Balanced(Taylor(HEAD_DIM)),
    "Centred-Balanced-Oprf": lambda: Centred(Balanced(Oprf(HEAD_DIM, NUM_FEATURES))),
    "Centred-Balanced-Sderf": lambda: Centred(Balanced(Sderf(HEAD_DIM, NUM_FEATURES))),
}


@pytest.mark.parametrize("name", UNFITTED)
def test_a_map_is_fitted_once_its_buffers_are(name: str) -> None:
    """Loaded by others into one that was never fitted."""
    target, (other, wanted) = UNFITTED[name](), source(name)
    assert target.fingerprint() != wanted[0]
    replaced(target, other)
    assert same(seen(target), wanted)


@pytest.mark.parametrize("name", ["FavorPlus", "RandomRelu", "Expansion", "Centred-Balanced-Sderf"])
def test_a_mean_of_models_has_the_buffers_of_the_model(name: str) -> None:
    # It wants a parameter.
    weight = nn.Linear(1, 1)
    mean = torch.optim.swa_utils.AveragedModel(nn.ModuleList([used(name), weight]))
    for seed in (2, 3):
        other, wanted = source(name, seed)
        mean.update_parameters(nn.ModuleList([other, weight]))
        assert same(seen(mean.module[0]), wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_derived_again_while_nothing_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = PAIRS[name](), []

    def count(part: nn.Module, way: str) -> None:
        method = getattr(part, way)
        monkeypatch.setitem(vars(part), way, lambda *given: (calls.append(way), method(*given))[1])

    for part in target.modules():
        for way in ("_prepare", "_derive_from_buffers"):
            if hasattr(type(part), way):
                count(part, way)
    seen(target)
    calls.clear()
    seen(target)
    assert calls == []
    for buffer in target.buffers():
        buffer.copy_(buffer.clone())
    seen(target)
    assert len(calls) > 0 or name not in CHANGING


DECOMPOSED: dict[str, tuple[Callable[[], FeatureMap], str]] = {
    "Oprf": (lambda: build("Oprf"), "mean_square"),
    "Sderf": (lambda: build("Sderf"), "second_moment"),
    "Balanced": (lambda: build("Balanced-FavorPlus"), "transform"),
    "Balanced of another": (lambda: build("Balanced-Oprf"), "inner.mean_square"),
    "inside": (lambda: build("Centred-Balanced-Sderf"), "inner.transform"),
    "further inside": (lambda: build("Centred-Balanced-Sderf"), "inner.inner.second_moment"),
}


def query_features(feature_map: FeatureMap, name: str) -> Callable[[Tensor], Tensor]:
    """Features as a function of a buffer."""
    outer, x = Called(feature_map), tokens(1, 2, 5, HEAD_DIM)
    outer.forward = lambda: feature_map.query(x)
    return lambda buffer: torch.func.functional_call(outer, {f"feature_map.{name}": buffer}, ())


@pytest.mark.parametrize("name", DECOMPOSED)
def test_a_buffer_whose_roots_are_kept_is_neither_mapped_nor_differentiated(name: str) -> None:
    make, buffer_name = DECOMPOSED[name]
    feature_map = make()
    before = seen(feature_map)
    function, buffer = query_features(feature_map, buffer_name), feature_map.get_buffer(buffer_name)
    refused = pytest.raises(NotImplementedError, match=rf"keeps what it computes of {buffer_name.split('.')[-1]},")
    for use in (
        lambda: torch.vmap(function)(torch.stack((buffer, 2 * buffer))),
        lambda: torch.func.grad(lambda x: function(x).sum())(buffer),
        lambda: torch.func.jvp(function, (buffer,), (buffer,)),
        lambda: function(buffer.clone().requires_grad_()),
    ):
        with refused:
            use()
    # What was refused leaves nothing behind.
    assert same(seen(feature_map), before)


OPEN = {
    "FavorPlus": "projection",
    "Hyperbolic": "projection",
    "Trigonometric": "projection",
    "RandomRelu": "projection",
    "Oprf": "projection",
    "Sderf": "projection",
    "Centred-FavorPlus": "query_mean",
    "Centred-Taylor": "key_mean",
    "Balanced-FavorPlus": "inner.projection",
    "Expansion": "centres",
    "Expansion-2": "key_mean",
}


@pytest.mark.parametrize("name", OPEN)
def test_any_other_buffer_may_be_mapped_and_differentiated(name: str) -> None:
    """A mapped call is a loop over maps of those buffers; gradients are those of finite differences."""
    feature_map = build(name)
    before = seen(feature_map)
    function, buffer = query_features(feature_map, OPEN[name]), feature_map.get_buffer(OPEN[name]).double()
    others = torch.stack((buffer, 1.5 * buffer + 0.1))
    found = torch.vmap(function)(others)
    for x, y in zip(others, found, strict=True):
        twin = build(name)
        twin.get_buffer(OPEN[name]).copy_(x)
        # Products of D terms may be summed in another order.
        torch.testing.assert_close(y, twin.query(tokens(1, 2, 5, HEAD_DIM)), rtol=1e-12, atol=1e-12)
    direction = tokens(*buffer.shape, seed=3)
    _, found = torch.func.jvp(function, (buffer,), (direction,))
    # Third derivatives below 1e4 and values below 1e2 leave step² · 1e4 and 1e2 · u/step.
    step = 1e-5
    wanted = (function(buffer + step * direction) - function(buffer - step * direction)) / (2 * step)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert same(seen(feature_map), before)


class Streaming(nn.Module):
    """A map's stream over tokens of its own, as a module whose buffers `functional_call` swaps."""

    def __init__(self, feature_map: FeatureMap) -> None:
        super().__init__()
        self.feature_map = feature_map

    def forward(self) -> linattn.Attended:
        """The outputs and the state."""
        return linattn.linear_attention_with_state(Q, K, V, self.feature_map)


@pytest.mark.parametrize("name", ["FavorPlus", "Centred(FavorPlus)", "Oprf", "Sderf"])
def test_a_state_made_with_followed_buffers_is_of_these(name: str) -> None:
    """Where they make the kept statistics others too, that is refused."""
    query, key = sample(HEAD_DIM)
    make: Callable[[int], FeatureMap] = {
        "FavorPlus": lambda seed: FavorPlus(HEAD_DIM, 12, seed=seed),
        "Centred(FavorPlus)": lambda seed: Centred(FavorPlus(HEAD_DIM, 12)).fit(query + seed, key),
        "Oprf": lambda seed: Oprf(HEAD_DIM, 12, seed=seed, mean_square=1.0 + seed),
        "Sderf": lambda seed: Sderf(HEAD_DIM, 12, seed=seed).fit((1 + seed) * query, key),
    }[name]
    target, other = make(0), make(3)
    given = dict(Streaming(other).named_buffers())
    followed = "feature_map.query_mean" if name.startswith("Centred") else "feature_map.projection"
    given[followed] = given[followed].clone().requires_grad_()
    if name in ("Oprf", "Sderf"):
        with pytest.raises(NotImplementedError, match=f"{name} keeps what it computes of"):
            torch.func.functional_call(Streaming(target), given, ())
        return
    found = torch.func.functional_call(Streaming(target), given, ())
    assert torch.equal(found.out, Streaming(other)().out)
    with pytest.raises(ValueError, match="do not mix"):
        found.state.read(target, Q)


@pytest.mark.parametrize("name", ["FavorPlus", "Oprf"])
def test_repr_says_the_settings_of_now(name: str) -> None:
    kind = FavorPlus if name == "FavorPlus" else partial(Oprf, mean_square=2.0)
    target, other = kind(HEAD_DIM, 12), kind(HEAD_DIM, 12, seed=5)
    copied(target, other)
    assert repr(target) == repr(other)
