"""Methods by their written form: a feature map, and the keys attended to exactly beside it.

"Expansion(num_centres=16) + window 16 + heavy 32" is the expansion, exact on near keys and on the 32 heaviest.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width, R features.
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
    """A feature map still to be built, and the exact part beside it.

    Attributes:
        map: the map.
        exact: the keys attended to exactly; None where the map takes all.
    """

    map: MapSpec
    exact: Exact | None = None

    @property
    def label(self) -> str:
        """The written form, with exact names."""
        return self.map.label if self.exact is None else f"{self.map.label} + {self.exact.label}"

    def build(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap:
        """The map itself; see `MapSpec.build`.

        Cost: the map's constructor.

        Args:
            head_dim: D.
            num_features: R; must be None for a map whose width is fixed.
            scale: factor of q·k in the exponent.
            seed: seed of the draw.
            num_heads: Hkv, for a draw or weights of its own in each key/value head; None for one shared by all.

        Returns:
            A feature map, not yet fitted.

        Raises:
            ValueError: as `MapSpec.build`; also if the map's weights cannot share a normaliser with exact attention.

        Example:
            >>> parse_method("Taylor(order=2)").build(4, num_features=None, scale=0.5, seed=0).num_features
            15

        Source: the constructors in `linattn.feature_maps`.
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
        """`linattn.linear_attention` with this method's exact part, grouped queries allowed.

        Cost: that of the op.

        Args:
            feature_map: what `build` gave; fitted, where it needs to be.
            query: (B, H, L, D).
            key: (B, Hkv, L, D).
            value: (B, Hkv, L, Dv).
            key_mask: (B, L) bool, True = attend, or None.
            is_causal: whether later keys are hidden.

        Returns:
            (B, H, L, Dv).

        Raises:
            TypeError, ValueError: as the op.

        Example:
            >>> import torch
            >>> method = parse_method("Exponential")
            >>> zero, v = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
            >>> feature_map = method.build(4, num_features=None, scale=1.0, seed=0)
            >>> method.attend(feature_map, zero, zero, v, is_causal=False).flatten().tolist()
            [2.0, 2.0]

        Source: `linattn.linear_attention`.
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
    """A method's written form, read: a map's, then "+ window W" and "+ heavy G", each at most once.

    Words may be written in any case. Nothing is evaluated.

    Cost: linear in the text.

    Args:
        text: such as "favorplus" or "Expansion(num_centres=16, order=2) + window 16 + heavy 32".

    Returns:
        The method; its `label` is the canonical written form.

    Raises:
        ValueError: if the map's part is no map (`parse_map` says why), another part is neither a window nor heavy keys,
            one is written twice, or the window is no power of two.

    Example:
        >>> parse_method("expansion(num_centres=4)+HEAVY 8+window 16").label
        'Expansion(num_centres=4) + window 16 + heavy 8'

    Source: none, a notation.
    """
    written, *parts = _PLUS.split(text, maxsplit=1)
    try:
        exact = parse_exact(parts[0]) if parts else None
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Method(parse_map(written), exact)


def fit(feature_map: FeatureMap, query: Tensor, key: Tensor) -> None:
    """Give a map the statistics it needs, where it needs any.

    Cost: O(B H L D), and for maps with centres or landmarks some twenty times their number more.

    Args:
        feature_map: any map; changed in place where it is a `FittedMap`.
        query: (B, H, L, D), the queries it may learn from.
        key: (B, Hkv, L, D).

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Centred, Taylor
        >>> centred = Centred(Taylor(1))
        >>> fit(centred, torch.zeros(1, 1, 2, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1))
        >>> centred.key_mean.tolist()
        [[[2.0]]]

    Source: none, a choice by type.
    """
    if isinstance(feature_map, FittedMap):
        feature_map.fit(query, key)
