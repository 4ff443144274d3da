"""Methods by their written form: a feature map, and the keys attended to exactly beside it.

"Expansion(num_centres=16) + window 16 + heavy 32" attends through the expansion, except to near keys and to the 32
heaviest, which get their softmax weights. "window 128 + merged 256" has no map: merged keys take its place.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from linattn.attention import Exact, linear_attention
from linattn.attention.exact import begins_exact, parse_exact
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.planning.map_specs import MapSpec, parse_map
from linattn.planning.no_map import NoMap

# A plus outside brackets: "scale=1e+2" holds one inside.
_PLUS = re.compile(r"\+(?![^(]*\))")


@dataclass(frozen=True)
class Method:
    """A feature map still to be built, and the keys attended to exactly or merged.

    Attributes:
        map: the map; None where merged keys take its place.
        exact: the exact part; None where the map takes all keys.
    """

    map: MapSpec | None
    exact: Exact | None = None

    @property
    def label(self) -> str:
        """The written form, with exact names."""
        return " + ".join(part.label for part in (self.map, self.exact) if part is not None)

    @property
    def takes_features(self) -> bool:
        """Whether the number of features is free; else the head width or an option fixes it, or there are none."""
        return self.map is not None and self.map.takes_features

    @property
    def is_random(self) -> bool:
        """Whether the map is drawn from a seed."""
        return self.map is not None and self.map.is_random

    def build(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap:
        """The map, not yet fitted, from `MapSpec.build`; a `NoMap` where merged keys take its place.

        Raises ValueError if the map's weights cannot share a normaliser with exact attention, or as `MapSpec.build`.

        Example:
            >>> parse_method("Taylor(order=2)").build(4, num_features=None, scale=0.5, seed=0).num_features
            15
        """
        if self.map is None:
            if num_features is not None:
                raise ValueError(f"{self.label} has no map, got num_features={num_features}; leave it out")
            return NoMap(head_dim, scale)
        feature_map = self.map.build(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
        if self.exact is not None and not self.exact.takes(feature_map):
            raise ValueError(
                f"{self.label}: {self.map.name} cannot share a normaliser with exact attention; take a map for the "
                "softmax kernel with positive weights, as Expansion or FavorPlus, or leave window and heavy out"
            )
        return feature_map

    def check_call(self, feature_map: FeatureMap, num_tokens: int, *, is_causal: bool) -> None:
        """Refuse self-attention that the exact part cannot have: causal heavy or merged keys without a window.

        Example:
            >>> parse_method("merged 8").check_call(NoMap(4), 16, is_causal=False)
        """
        if self.exact is not None:
            taken = None if isinstance(feature_map, NoMap) else feature_map
            self.exact.check_call(taken, num_tokens, num_tokens, is_causal=is_causal)

    def attend(
        self,
        feature_map: FeatureMap,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool,
        backend: str = "auto",
    ) -> Tensor:
        """`linattn.linear_attention` with this method's exact part and a map of `build`, fitted if it takes statistics.

        Keys and values may have fewer heads than queries. Without a map the temperature is that of the `NoMap`, and
        there is no other backend than "auto".

        Example:
            >>> import torch
            >>> method = parse_method("Exponential")
            >>> zero, v = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
            >>> feature_map = method.build(4, num_features=None, scale=1.0, seed=0)
            >>> method.attend(feature_map, zero, zero, v, is_causal=False).flatten().tolist()
            [2.0, 2.0]
        """
        if isinstance(feature_map, NoMap):
            # The op has its own temperature there.
            own = feature_map.head_dim**-0.5
            query = query if feature_map.scale == own else query * (feature_map.scale / own)
        return linear_attention(
            query,
            key,
            value,
            None if isinstance(feature_map, NoMap) else feature_map,
            key_mask=key_mask,
            is_causal=is_causal,
            enable_gqa=True,
            exact=self.exact,
            backend=backend,
        )


def parse_method(text: str) -> Method:
    """Read a method's written form: that of a map, or merged keys in its place, and the parts of an exact rule.

    In any case; the exact part's parts in any order.

    Raises ValueError if the map's part is no map (`parse_map` says why), another part is no window and of no rule, a
    part is written twice, the window is no power of two beside a map, or keys are merged beside a map, which leaves
    none to it.

    Example:
        >>> parse_method("expansion(num_centres=4)+HEAVY 8+window 16").label
        'Expansion(num_centres=4) + window 16 + heavy 8'
        >>> parse_method("merged 128 + Window 32").label
        'window 32 + merged 128'
    """
    written, *parts = _PLUS.split(text, maxsplit=1)
    feature_map = None if begins_exact(written) else parse_map(written)
    has_map = feature_map is not None
    try:
        exact = None if has_map and not parts else parse_exact(parts[0] if has_map else text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    merging = exact is not None and exact.num_merged > 0
    if exact is not None and merging and has_map:
        raise ValueError(
            f"{text!r}: merged keys take every key that is not near and leave none to a map; leave the map out, as in "
            f"{exact.label!r}, or write heavy in place of merged"
        )
    if not has_map and not merging:
        raise ValueError(
            f"{text!r} leaves the keys that are not exact to nobody; write merged keys, as in "
            "'window 32 + merged 128', or a map, as in 'Expansion + window 32'"
        )
    return Method(feature_map, exact)


def together(labels: Sequence[str]) -> str:
    """Written forms of layers, in order; one where all are alike.

    Example:
        >>> together(["merged 8", "merged 8"]), together(["merged 8", "merged 4"])
        ('merged 8', 'merged 8; merged 4')
    """
    return "; ".join(labels if len(set(labels)) > 1 else labels[:1])


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
