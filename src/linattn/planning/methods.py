"""Methods by their written form: a feature map, and the keys attended to exactly beside it.

"Expansion(num_centres=16) + window 16 + heavy 32" attends through the expansion, except to near keys and to the 32
heaviest, which get their softmax weights. "window 128 + merged 256" has no map: merged keys take its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from linattn.attention import Exact, linear_attention
from linattn.attention.exact import parse_exact
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.planning.map_specs import MapSpec, parse_map

# A plus outside brackets: "scale=1e+2" holds one inside.
_PLUS = re.compile(r"\+(?![^(]*\))")


@dataclass(frozen=True)
class Method:
    """A feature map still to be built, and the keys attended to exactly; None where the map takes all."""

    map: MapSpec
    exact: Exact | None = None

    @property
    def label(self) -> str:
        """The written form, with exact names."""
        return self.map.label if self.exact is None else f"{self.map.label} + {self.exact.label}"

    def build(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap:
        """The map, not yet fitted, from `MapSpec.build`.

        Raises ValueError if the map's weights cannot share a normaliser with exact attention, or as `MapSpec.build`.

        Example:
            >>> parse_method("Taylor(order=2)").build(4, num_features=None, scale=0.5, seed=0).num_features
            15
        """
        feature_map = self.map.build(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
        if self.exact is not None and not self.exact.takes(feature_map):
            raise ValueError(
                f"{self.label}: {self.map.name} cannot share a normaliser with exact attention; take a map for the "
                "softmax kernel with positive weights, as Expansion or FavorPlus, or leave window and heavy out"
            )
        return feature_map

    def attend(
        self,
        feature_map: FeatureMap,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool,
    ) -> Tensor:
        """`linattn.linear_attention` with this method's exact part and a map of `build`, fitted if it takes statistics.

        Keys and values may have fewer heads than queries.

        Example:
            >>> import torch
            >>> method = parse_method("Exponential")
            >>> zero, v = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
            >>> feature_map = method.build(4, num_features=None, scale=1.0, seed=0)
            >>> method.attend(feature_map, zero, zero, v, is_causal=False).flatten().tolist()
            [2.0, 2.0]
        """
        return linear_attention(
            query,
            key,
            value,
            feature_map,
            key_mask=key_mask,
            is_causal=is_causal,
            enable_gqa=True,
            exact=self.exact,
        )


def parse_method(text: str) -> Method:
    """Read a method's written form: that of a map, then the parts of an exact rule, in any case and order.

    Raises ValueError if the map's part is no map (`parse_map` says why), another part is no window and of no rule, a
    part is written twice, the window is no power of two, or keys are merged, which leaves none to a map.

    Example:
        >>> parse_method("expansion(num_centres=4)+HEAVY 8+window 16").label
        'Expansion(num_centres=4) + window 16 + heavy 8'
    """
    if parse_without_map(text) is not None:
        raise ValueError(
            f"{text!r} has no map, and one is needed here: linattn.hf.linearize_ takes such a form, and "
            "linattn.linear_attention takes None for a map"
        )
    written, *parts = _PLUS.split(text, maxsplit=1)
    try:
        exact = parse_exact(parts[0]) if parts else None
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if exact is not None and exact.num_merged:
        raise ValueError(
            f"{text!r}: merged keys take every key that is not near and leave none to a map; leave the map out, as in "
            f"{exact.label!r}, or write heavy in place of merged"
        )
    return Method(parse_map(written), exact)


def parse_without_map(text: str) -> Exact | None:
    """The exact part that a form without a map is, whose merged keys take the map's place; None for all other text.

    Example:
        >>> parse_without_map("merged 192 + Window 64").label
        'window 64 + merged 192'
        >>> parse_without_map("Expansion + window 64") is None
        True
    """
    try:
        exact = parse_exact(text)
    except ValueError:
        return None
    return exact if exact.num_merged else None


def fit(feature_map: FeatureMap, query: Tensor, key: Tensor) -> None:
    """Fit a map to queries (B, H, L, D) and keys (B, Hkv, L, D), in place, if it takes statistics.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Centred, Taylor
        >>> centred = Centred(Taylor(1))
        >>> fit(centred, torch.zeros(1, 1, 2, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1))
        >>> centred.key_mean.tolist()
        [[[2.0]]]
    """
    if isinstance(feature_map, FittedMap):
        feature_map.fit(query, key)
