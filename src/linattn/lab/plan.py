"""What an audit is to measure: maps, widths and draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from linattn.feature_maps import FeatureMap
from linattn.lab.map_specs import MapSpec, parse_map

DEFAULT_MAPS = (
    "FavorPlus",
    "Hyperbolic(lengths='fixed')",
    "Oprf",
    "Trigonometric",
    "RandomRelu",
    "EluPlusOne",
    "Exponential",
    "Taylor(order=1)",
    "Nystrom(num_features=128)",
    "Centred(FavorPlus)",
    "Centred(Hyperbolic(lengths='fixed'))",
    "Centred(Balanced(FavorPlus))",
    "Centred(Balanced(Sderf))",
    "Centred(Balanced(Nystrom(num_features=128)))",
    "Centred(Taylor(order=1))",
    "Centred(Taylor(order=2))",
)

# Seeds of two draws differ by more than any model has layers.
_SEEDS_PER_DRAW = 10_000


@dataclass(frozen=True)
class Configuration:
    """One map at one width with one draw.

    Attributes:
        spec: the map.
        num_features: its width, or None where the head width or the map's own options fix it.
        draw: number of the draw, from 0.
        first_seed: seed of layer 0's draw; layer l's is l more.
    """

    spec: MapSpec
    num_features: int | None
    draw: int
    first_seed: int

    def build(self, head_dim: int, *, scale: float, layer: int) -> FeatureMap:
        """The map of one layer; see `MapSpec.build`."""
        seed = self.first_seed + layer
        return self.spec.build(head_dim, num_features=self.num_features, scale=scale, seed=seed)


@dataclass(frozen=True)
class Plan:
    """Which maps an audit measures, at which widths, with how many draws.

    Attributes:
        maps: the maps; no two alike.
        features: widths for the maps whose width is free.
        draws: draws for random maps; the others are measured once.
        seed: everything random follows from it.
    """

    maps: tuple[MapSpec, ...]
    features: tuple[int, ...] = (64, 256)
    draws: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        labels = [spec.label for spec in self.maps]
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if not labels or repeated:
            raise ValueError(
                f"name at least one map, each once; got {', '.join(repeated) + ' twice' if repeated else 'none'}"
            )
        if not self.features or min(self.features) < 1 or len(set(self.features)) != len(self.features):
            raise ValueError(f"features must be different positive integers, got {list(self.features)}")
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, got {self.draws}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def configurations(self) -> Iterator[Configuration]:
        """Everything to measure, in order: by map, then width, then draw.

        Cost: none.

        Returns:
            An iterator over `Configuration`.

        Example:
            >>> plan = Plan((parse_map("EluPlusOne"), parse_map("FavorPlus")), features=(64, 256), draws=2)
            >>> [(c.spec.name, c.num_features, c.draw) for c in plan.configurations()][:3]
            [('EluPlusOne', None, 0), ('FavorPlus', 64, 0), ('FavorPlus', 64, 1)]

        Source: none, a definition.
        """
        for spec in self.maps:
            for num_features in self.features if spec.takes_features else (None,):
                for draw in range(self.draws if spec.is_random else 1):
                    yield Configuration(spec, num_features, draw, self.seed + draw * _SEEDS_PER_DRAW)


def default_maps() -> tuple[MapSpec, ...]:
    """The maps an audit measures unless told otherwise: the textbook's, and what was found to do better.

    Cost: none.

    Returns:
        Their specifications.

    Example:
        >>> default_maps()[0].label
        'FavorPlus'

    Source: arXiv 2009.14794 (FavorPlus, Hyperbolic, RandomRelu, Trigonometric), 2006.16236 (EluPlusOne), 2302.00787
    (Sderf, Balanced).
    """
    return tuple(parse_map(text) for text in DEFAULT_MAPS)
