"""The grid the laws run over: every feature map × every backend × (bidirectional | causal).

A map listed in FEATURE_MAPS is in the grid by being listed. Letters: B batch, H query heads, Hkv key/value heads,
L tokens, D head width, Dv value width.
"""

from __future__ import annotations

import inspect
import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

import linattn
from linattn.feature_maps import (
    FEATURE_MAPS,
    Balanced,
    Centred,
    Expansion,
    FavorPlus,
    FeatureMap,
    FittedMap,
    Hedgehog,
    Hyperbolic,
    LearnedExponential,
    Oprf,
    Sderf,
    Taylor,
    Trigonometric,
)

# The laws' tensors are small: one thread each, so that parallel workers do not fight over cores, from the first map on.
torch.set_num_threads(1)
BACKENDS = ("reference", "blocked")
X, Y, Z = TypeVar("X"), TypeVar("Y"), TypeVar("Z")
HEAD_DIM = 8
NUM_FEATURES = 12


class Learned(FeatureMap):
    """A user's own map with parameters: exp(W x + b), one W for queries and another for keys of every head."""

    exponential = True

    def __init__(self, head_dim: int, num_features: int, num_heads: int) -> None:
        super().__init__(head_dim, num_features)
        generator = torch.Generator().manual_seed(3)
        self.num_heads = num_heads
        self.query_weight = nn.Parameter(0.4 * torch.randn(head_dim, num_features, generator=generator).double())
        self.key_weight = nn.Parameter(
            0.4 * torch.randn(num_heads, head_dim, num_features, generator=generator).double()
        )
        self.bias = nn.Parameter(0.1 * torch.randn(num_features, generator=generator).double())

    def query(self, x: Tensor) -> Tensor:
        return x @ self.query_weight.to(x.dtype) + self.bias.to(x.dtype)

    def key(self, x: Tensor) -> Tensor:
        return x @ self.key_weight.to(x.dtype)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.exp(self.query(q)) @ torch.exp(self.key(k)).mT


def default(name: str, head_dim: int) -> FeatureMap:
    """A listed map with default options and a few features."""
    kind = FEATURE_MAPS[name]
    free = "num_features" in inspect.signature(kind).parameters
    built = kind(head_dim, NUM_FEATURES) if free else kind(head_dim)
    if isinstance(built, FittedMap):
        built.fit(*sample(head_dim))
    return built


def sample(head_dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of two heads to fit maps on."""
    generator = torch.Generator().manual_seed(11)
    query, key = (torch.randn(1, 2, 40, head_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    return query + 0.3, key - 0.2


def moved(feature_map: FeatureMap) -> FeatureMap:
    """A learned map as training might leave it: every parameter elsewhere, and frozen."""
    generator = torch.Generator().manual_seed(4)
    for parameter in feature_map.requires_grad_(False).parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return feature_map


VARIANTS: dict[str, Callable[[int], FeatureMap]] = {
    "FavorPlus-iid-fixed": lambda d: FavorPlus(d, NUM_FEATURES, draw="iid", lengths="fixed"),
    "FavorPlus-per-head": lambda d: FavorPlus(d, NUM_FEATURES, num_heads=2),
    "Hyperbolic-fixed": lambda d: Hyperbolic(d, NUM_FEATURES, lengths="fixed"),
    "Taylor-1": lambda d: Taylor(d, order=1),
    "Centred-FavorPlus": lambda d: Centred(FavorPlus(d, NUM_FEATURES)).fit(*sample(d)),
    "Centred-Taylor": lambda d: Centred(Taylor(d)).fit(*sample(d)),
    "Centred-Trigonometric": lambda d: Centred(Trigonometric(d, NUM_FEATURES)).fit(*sample(d)),
    "Centred-call-FavorPlus": lambda d: Centred(FavorPlus(d, NUM_FEATURES)),
    "Centred-call-Taylor": lambda d: Centred(Taylor(d)),
    "Expansion-0": lambda d: Expansion(d, 4, order=0).fit(*sample(d)),
    "Expansion-2": lambda d: Expansion(d, 3, order=2).fit(*sample(d)),
    "Expansion-one-centre": lambda d: Expansion(d, 1).fit(*sample(d)),
    "Expansion-call": lambda d: Expansion(d, 5),
    "Balanced-FavorPlus": lambda d: Balanced(FavorPlus(d, NUM_FEATURES)).fit(*sample(d)),
    "Balanced-Oprf": lambda d: Balanced(Oprf(d, NUM_FEATURES)).fit(*sample(d)),
    "Centred-Balanced-FavorPlus": lambda d: Centred(Balanced(FavorPlus(d, NUM_FEATURES))).fit(*sample(d)),
    "Centred-Balanced-Sderf": lambda d: Centred(Balanced(Sderf(d, NUM_FEATURES))).fit(*sample(d)),
    "Sderf-iid-per-head": lambda d: Sderf(d, NUM_FEATURES, draw="iid", num_heads=2).fit(*sample(d)),
    "LearnedExponential-per-head": lambda d: moved(LearnedExponential(d, NUM_FEATURES, num_heads=2)),
    "Hedgehog-per-head": lambda d: moved(Hedgehog(d, num_heads=2)),
    "Centred-LearnedExponential": lambda d: Centred(LearnedExponential(d, NUM_FEATURES)).fit(*sample(d)),
    "Learned": lambda d: Learned(d, NUM_FEATURES, 2),
}


@dataclass(frozen=True)
class Case:
    """One cell of the grid; maps are built for two key/value heads."""

    map_name: str
    backend: str
    is_causal: bool

    def build(self, head_dim: int = HEAD_DIM) -> FeatureMap:
        """A fresh map."""
        return build(self.map_name, head_dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap, **options: object) -> Tensor:
        """linear_attention as this case runs it; grouped heads are always allowed."""
        return linattn.linear_attention(
            query, key, value, feature_map, is_causal=self.is_causal, enable_gqa=True, backend=self.backend, **options
        )

    def __str__(self) -> str:
        return f"{self.map_name}-{self.backend}-{'causal' if self.is_causal else 'bidirectional'}"


def sums(state: linattn.State) -> Tensor:
    """[S, z] of a state, (B, H, R, Dv + 1), relative to its m."""
    return torch.cat((state.S, state.z.unsqueeze(-1)), -1)


def total(state: linattn.State, m: Tensor | float = 0.0) -> Tensor:
    """The same relative to another exponent m (B, H, M)."""
    state = state.without(None)
    rise = torch.exp(state.m - m)
    return sums(state) * rise.repeat_interleave(state.z.shape[-1] // rise.shape[-1], -1).unsqueeze(-1)


class Copier:
    """Copies of a map: pickled but for its tensors, a fifth of what copy.deepcopy takes."""

    def __init__(self, feature_map: FeatureMap) -> None:
        self.tensors: list[Tensor] = []
        pickled = io.BytesIO()
        pickler = pickle.Pickler(pickled)
        pickler.persistent_id = self._place
        pickler.dump(feature_map)
        self.pickled = pickled.getvalue()

    def _place(self, part: object) -> int | None:
        """Where a tensor is kept; None for all else, which is pickled."""
        if not isinstance(part, Tensor):
            return None
        self.tensors.append(part)
        return len(self.tensors) - 1

    def copy(self) -> FeatureMap:
        """A map with tensors of its own."""
        copies = [
            nn.Parameter(x.detach().clone(), x.requires_grad) if isinstance(x, nn.Parameter) else x.clone()
            for x in self.tensors
        ]
        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))
        unpickler.persistent_load = copies.__getitem__
        return unpickler.load()


def build(name: str, head_dim: int = HEAD_DIM) -> FeatureMap:
    """A map of the grid by name: a copy of the one that was built first, since a fit takes ten times as long."""
    return _first(name, head_dim).copy()


def build_anew(name: str, head_dim: int = HEAD_DIM) -> FeatureMap:
    """The same, drawn and fitted now."""
    return VARIANTS[name](head_dim) if name in VARIANTS else default(name, head_dim)


@cache
def _first(name: str, head_dim: int) -> Copier:
    return Copier(build_anew(name, head_dim))


def takes_statistics_from_the_call(name: str) -> bool:
    """Whether the map may not be used causally."""
    return "-call" in name


MAPS = (*FEATURE_MAPS, *VARIANTS)
# For laws of graphs, which take seconds to record: every kind of map, wrapped ones and those with weights too. Other
# variants differ in numbers alone.
RECORDED_MAPS = (*FEATURE_MAPS, "Centred-Balanced-FavorPlus", "Centred-call-Taylor", "Learned")
# One of each kind of fold: token by token, these show what chunks of one token and of more show of all.
FOLDED = ("FavorPlus", "Taylor", "Expansion-2", "Centred-LearnedExponential")
CAUSAL_MAPS = tuple(name for name in MAPS if not takes_statistics_from_the_call(name))
NONNEGATIVE_MAPS = tuple(name for name in MAPS if build(name).nonnegative)
# Maps whose parts over disjoint keys combine into the whole: a query's features do not depend on the keys.
ADDITIVE_MAPS = tuple(name for name in NONNEGATIVE_MAPS if not isinstance(build(name), Expansion))
SOFTMAX_MAPS = tuple(name for name in MAPS if build(name).softmax_kernel)
CASES = tuple(
    Case(name, backend, is_causal)
    for name in MAPS
    for backend in BACKENDS
    for is_causal in (False, True)
    if not (is_causal and takes_statistics_from_the_call(name))
)
# Each map by each backend, in one of its directions each: a map's neighbours, of the same kind of fold, take turns. For
# laws of what comes before a fold, or after it.
PAIRED_CASES = tuple(
    Case(name, backend, (number + place) % 2 == 1 and not takes_statistics_from_the_call(name))
    for number, name in enumerate(MAPS)
    for place, backend in enumerate(BACKENDS)
)
NONNEGATIVE_CASES = tuple(case for case in CASES if case.map_name in NONNEGATIVE_MAPS)


def cases_in_turns(
    maps: Sequence[str],
    values: Sequence[X],
    backends: Sequence[str] = BACKENDS,
    directions: Sequence[bool] = (False, True),
) -> list[tuple[Case, X]]:
    """Each map with each value of another axis, in turn by each backend and in each direction that it has."""
    ways = list(itertools.product(backends, directions))
    return [
        (Case(name, backend, is_causal and not takes_statistics_from_the_call(name)), value)
        for name, value, (backend, is_causal) in in_turns(maps, values, ways)
    ]


def in_turns(first: Sequence[X], second: Sequence[Y], third: Sequence[Z]) -> list[tuple[X, Y, Z]]:
    """All pairs of two axes, each with a value of a third in turn, so that any two values of different axes meet.

    For axes that are independent: their product would repeat each meeting, as often as the third has values.
    """
    assert len(third) <= min(len(first), len(second))
    return [(x, y, third[(i + j) % len(third)]) for i, x in enumerate(first) for j, y in enumerate(second)]


def in_two_calls(given: Sequence[Tensor], cut: int, feature_map: FeatureMap, **options: object) -> Tensor:
    """The outputs of a stream of queries, keys and values cut once."""
    first, second = ([x[:, :, part] for x in given] for part in (slice(cut), slice(cut, None)))
    out, state = linattn.linear_attention_with_state(*first, feature_map, **options)
    return torch.cat((out, linattn.linear_attention_with_state(*second, feature_map, state, **options).out), 2)


def tokens(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gaussian tokens, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def qkv(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    num_queries: int = 37,
    num_keys: int = 37,
    head_dim: int = HEAD_DIM,
    value_dim: int = 5,
    *,
    seed: int = 0,
    scale: float = 0.7,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of grouped heads."""
    return (
        tokens(batch, heads, num_queries, head_dim, seed=seed, scale=scale, dtype=dtype),
        tokens(batch, kv_heads, num_keys, head_dim, seed=seed + 1, scale=scale, dtype=dtype),
        tokens(batch, kv_heads, num_keys, value_dim, seed=seed + 2, dtype=dtype),
    )


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).norm() / truth.norm().clamp(min=1e-300))
