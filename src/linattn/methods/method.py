"""Methods by their written form: a feature map, with an exact window or without, or merged keys in its place.

"Expansion(num_centres=16) + window 16" attends through the expansion, except to near keys, which get their softmax
weights. "window 128 + merged 256" has no map: a window of exact keys, and 256 merged keys for all others.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from linattn.attention.window import check_width, shares_normalizer
from linattn.feature_maps import FeatureMap
from linattn.kv_cache import MergedKV
from linattn.kv_cache.config import begins_merged
from linattn.methods.map_specs import MapSpec, parse_map
from linattn.softmax.checking import did_you_mean

# A plus outside brackets: "scale=1e+2" holds one inside.
_PLUS = re.compile(r"\+(?![^(]*\))")
# Parts that merged keys may be written with.
_OF_MERGED = ("sinks", "window")
_WINDOW = re.compile(r"window\s+([1-9][0-9]*)", re.IGNORECASE)
# Files and written forms of earlier versions may have them.
HEAVY_KEYS_REMOVED = "heavy keys were removed: use 'window W + merged C' without a map, or the window alone"
"""Cure for a folder or a written form of an earlier version."""


@dataclass(frozen=True)
class Method:
    """A way to attend, still to be built for a head width."""

    map: MapSpec | None  # the feature map; None where merged keys take its place
    window: int | None = None  # width of the exact window beside the map; None for none
    merged: MergedKV | None = None  # the merged keys; None beside a map

    @property
    def label(self) -> str:
        """The written form, with exact names."""
        if self.merged is not None:
            return self.merged.label
        assert self.map is not None
        return self.map.label if self.window is None else f"{self.map.label} + window {self.window}"

    @property
    def takes_features(self) -> bool:
        """Whether the number of features is free; else the head width or an option fixes it, or there are none."""
        return self.map is not None and self.map.takes_features

    @property
    def is_random(self) -> bool:
        """Whether the map is drawn from a seed."""
        return self.map is not None and self.map.is_random

    def build_map(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap:
        """The map, not yet fitted, from `MapSpec.build`; refused where a window cannot share its normaliser."""
        if self.map is None:
            raise ValueError(f"{self.label} has no map; give a method with one, as FavorPlus")
        feature_map = self.map.build(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
        if self.window is not None and not shares_normalizer(feature_map):
            raise ValueError(
                f"{self.label}: {self.map.name} cannot share a normaliser with exact attention; take a map for the "
                "softmax kernel with positive weights, as Expansion or FavorPlus, or leave the window out"
            )
        return feature_map

    def build_kernel(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap | MergedKV:
        """The map of `build_map`, or the merged keys, which have no features."""
        if self.merged is None:
            return self.build_map(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
        if num_features is not None:
            raise ValueError(f"{self.label} has no map, got num_features={num_features}; leave it out")
        return self.merged


def parse_method(text: str) -> Method:
    """Read a method's written form: that of a map, with "+ window W" or without, or that of merged keys."""
    parts = [part.strip() for part in _PLUS.split(text)]
    if any(_word(part) == "heavy" for part in parts):
        raise ValueError(f"{text!r}: {HEAVY_KEYS_REMOVED}")
    if begins_merged(text) or _word(parts[0]) in _OF_MERGED:
        return Method(None, merged=_parse_merged(text, parts))
    feature_map = parse_map(parts[0])
    if len(parts) == 1:
        return Method(feature_map)
    if len(parts) > 2:
        raise ValueError(f"{text!r} has {len(parts)} parts; write a map and a window, as {parts[0]} + window 32")
    match = _WINDOW.fullmatch(parts[1])
    if match is None:
        word = _word(parts[1])
        why = " (the word and a positive whole number)" if word == "window" else did_you_mean(word, ["window"])
        raise ValueError(f"{text!r}: {parts[1]!r} is no window{why}; write, for example, {parts[0]} + window 32")
    try:
        check_width(int(match[1]))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Method(feature_map, int(match[1]))


def _parse_merged(text: str, parts: Sequence[str]) -> MergedKV:
    """Merged keys, refused beside a map."""
    if _word(parts[0]) not in (*_OF_MERGED, "merged") and not _word(parts[0]).isdecimal():
        # A word that is no map's is named first.
        parse_map(parts[0])
        raise ValueError(
            f"{text!r}: merged keys take every key that is not near and leave none to a map; leave the map out, as in "
            "'window 32 + merged 128', or the merged keys"
        )
    try:
        return MergedKV.parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _word(part: str) -> str:
    """The word that a part begins with."""
    return part.partition(" ")[0].lower()


def together(labels: Sequence[str]) -> str:
    """Written forms of layers, in order; one where all are alike."""
    return "; ".join(labels if len(set(labels)) > 1 else labels[:1])
