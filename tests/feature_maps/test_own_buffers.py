"""A user's own map is its buffers too: a state of one is not read by another, and gradients are of the map of the call.

Letters: D head width, R features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import linattn
from linattn.feature_maps import FavorPlus, FeatureMap

D, R = 6, 8


class Own(FeatureMap):
    """φ(x) = log(1 + exp of what a part makes of x), the part under a name."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(D, R)
        self.part = part

    def query(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.part(x))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q) @ self.query(k).mT


class Drawn(FeatureMap):
    """The same of W x, W a buffer of the map itself."""

    def __init__(self, seed: int) -> None:
        super().__init__(D, R)
        self.register_buffer("weight", drawn(seed))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)

    def query(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self(x))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q) @ self.query(k).mT


class Hashed(Drawn):
    """The same, times one or two by whether a number is even that no float64 tells from the next."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.register_buffer("number", torch.tensor(2**60 + seed))

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) * (1 + self.number % 2)


class Mixed(FeatureMap):
    """The sum of the exponents of several maps, in a list."""

    exponential = True

    def __init__(self, seed: int) -> None:
        super().__init__(D, R)
        self.maps = nn.ModuleList([FavorPlus(D, R, seed=0), FavorPlus(D, R, seed=0)])
        self.maps[1].projection.copy_(FavorPlus(D, R, seed=seed).projection)  # beside the seed of another draw

    def query(self, x: Tensor) -> Tensor:
        return self.maps[0].query(x) + self.maps[1].query(x)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q).exp() @ self.query(k).exp().mT


def drawn(seed: int) -> Tensor:
    return torch.randn(D, R, generator=torch.Generator().manual_seed(seed))


def pruned(seed: int) -> FeatureMap:
    """Of weights all alike, and a mask of its own."""
    part = nn.Linear(D, R, bias=False).requires_grad_(False)
    nn.init.ones_(part.weight)
    return Own(prune.custom_from_mask(part, "weight", drawn(seed).mT > 0))


MAPS: dict[str, Callable[[int], FeatureMap]] = {
    "of its own": Drawn,
    "of a map in it": lambda seed: Own(Drawn(seed)),
    "of a mask": pruned,
    "of large integers": Hashed,
    "of maps in a list": Mixed,
}


def tokens(length: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, length, D, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("name", MAPS)
def test_a_state_is_of_the_buffers_it_was_built_with(name: str) -> None:
    feature_map, other = MAPS[name](1), MAPS[name](2)
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    with pytest.raises(ValueError, match="the state was built with"):
        linattn.linear_attention_with_state(*tokens(), other, state)
    wanted = linattn.linear_attention_with_state(*tokens(), feature_map, state).out
    other.load_state_dict(feature_map.state_dict())
    for twin in (copy.deepcopy(feature_map), other):
        assert torch.equal(linattn.linear_attention_with_state(*tokens(), twin, state).out, wanted)


class Turned(FeatureMap):
    """φ(x) = |x W|², W complex."""

    def __init__(self, weight: Tensor | nn.Parameter) -> None:
        super().__init__(D, R)
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Buffer(weight)

    def query(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.cfloat() @ self.weight).square().sum(-1)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q) @ self.query(k).mT


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_a_state_is_of_both_parts_of_complex_numbers(kind: Callable[[Tensor], Tensor]) -> None:
    first, second = (Turned(kind(torch.complex(drawn(1), drawn(seed)))) for seed in (2, 3))
    state = linattn.linear_attention_with_state(*tokens(), first).state
    linattn.linear_attention_with_state(*tokens(), first, state)
    with pytest.raises(ValueError, match="the state was built with"):
        linattn.linear_attention_with_state(*tokens(), second, state)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_a_buffer_written_before_the_backward_pass_is_noticed(name: str, is_causal: bool) -> None:
    feature_map = MAPS[name](1).requires_grad_(False)
    query, key, value = tokens()
    out = linattn.linear_attention(query.requires_grad_(), key, value, feature_map, is_causal=is_causal)
    feature_map.load_state_dict(MAPS[name](2).state_dict())
    with pytest.raises(RuntimeError, match=r"redraw or fit after backward\(\), not before"):
        out.sum().backward()


def test_a_part_that_draws_in_training_is_refused() -> None:
    """The backward pass would draw other numbers than the forward pass."""
    feature_map, x = Own(nn.Sequential(nn.Linear(D, R), nn.Dropout(0.5))), torch.randn(1, 2, 5, D)
    with pytest.raises(ValueError, match=r"Own holds Dropout\(p=0.5.*drop out entries of queries and keys before"):
        linattn.linear_attention(x, x, x, feature_map, is_causal=True)
    exact = linattn.linear_attention(x, x, x, feature_map.eval())
    feature_map.train().part[1].p = 0.0
    assert torch.equal(linattn.linear_attention(x, x, x, feature_map), exact)
