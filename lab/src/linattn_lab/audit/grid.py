"""What an audit is to measure: methods, widths and draws."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from linattn.feature_maps import FEATURE_MAPS
from linattn.methods.method import MapSpec, Method
from linattn.softmax.checking import check_seed
from linattn_lab.built_methods import BuiltMethod, build

# What decides for a model: merged keys, expansions with a window and without, and the textbook's maps.
SHORT_METHODS = (
    "window 32 + merged 96",
    "merged 128",
    "Expansion(num_centres=16) + window 32",
    "Expansion(num_centres=16)",
    "Expansion(num_centres=1)",
    "FavorPlus",
    "EluPlusOne",
)
# Those, and what the texts have: arXiv 2009.14794 (FavorPlus, Hyperbolic, RandomRelu), 2006.16236 (EluPlusOne),
# 2302.00787 (Sderf, Balanced), 2110.15343 (exact attention beside a kernel).
FULL_METHODS = (
    "FavorPlus",
    "Hyperbolic(lengths='fixed')",
    "Oprf",
    "RandomRelu",
    "EluPlusOne",
    "Exponential",
    "Centred(Hyperbolic(lengths='fixed'))",
    "Centred(Balanced(FavorPlus))",
    "Centred(Balanced(Sderf))",
    "Centred(Taylor(order=2))",
    "Expansion(num_centres=1)",
    "Expansion(num_centres=4)",
    "Expansion(num_centres=16)",
    "Expansion(num_centres=64)",
    "Expansion(num_centres=16, order=0)",
    "Expansion(num_centres=16, order=2)",
    "Centred(Balanced(FavorPlus)) + window 16",
    "Expansion(num_centres=16) + window 32",
    "Expansion(num_centres=64) + window 32",
    "merged 64",
    "merged 128",
    "window 32 + merged 32",
    "window 32 + merged 96",
    "window 32 + merged 128",
)

# Seeds of two draws differ by more than any model has layers.
_SEEDS_PER_DRAW = 10_000


@dataclass(frozen=True)
class Configuration:
    """One method at one width with one draw."""

    method: Method  # a map, with a window or without, or merged keys
    num_features: int | None  # the map's width, or None where the head width or the map's own options fix it
    draw: int  # number of the draw, from 0
    first_seed: int  # seed of layer 0's draw; layer l's is l more

    def build(self, head_dim: int, *, scale: float, layer: int) -> BuiltMethod:
        """The map of one layer; see `Method.build`."""
        seed = self.first_seed + layer
        return build(self.method, head_dim, num_features=self.num_features, scale=scale, seed=seed)


def in_words(configuration: Configuration, sample: BuiltMethod, draws: int) -> str:
    """A configuration in words, for the progress shown; `sample` tells its width."""
    width = f", {sample.num_features:,} features" if sample.num_features else ""
    words = f"{configuration.method.label}{width}"
    return f"{words}, draw {configuration.draw + 1} of {draws}" if is_random(configuration.method.map) else words


@dataclass(frozen=True)
class AuditGrid:
    """Which methods an audit measures, at which widths, with how many draws."""

    methods: tuple[Method, ...]  # the methods; no two alike
    features: tuple[int, ...] = (64, 256)  # widths for the maps whose width is free
    draws: int = 3  # draws for random maps; the others are measured once
    seed: int = 0  # everything random follows from it
    are_ranked: bool = True  # whether the limit of every rank is measured too, on texts that are short enough

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        labels = [method.label for method in self.methods]
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if not labels or repeated:
            raise ValueError(
                f"methods must be one or more, each once; got {', '.join(repeated) + ' twice' if repeated else 'none'}"
            )
        if not self.features or min(self.features) < 1 or len(set(self.features)) != len(self.features):
            raise ValueError(f"features must be different positive integers, got {list(self.features)}")
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, got {self.draws}")
        check_seed(self.seed)

    def configurations(self) -> Iterator[Configuration]:
        """Everything to measure, in order: by method, then width, then draw."""
        for method in self.methods:
            for num_features in self.features if method.takes_features else (None,):
                for draw in range(self.draws if is_random(method.map) else 1):
                    yield Configuration(method, num_features, draw, self.seed + draw * _SEEDS_PER_DRAW)


def is_random(spec: MapSpec | None) -> bool:
    """Whether a map is drawn from a seed."""
    return spec is not None and "seed" in inspect.signature(FEATURE_MAPS[spec.name]).parameters
