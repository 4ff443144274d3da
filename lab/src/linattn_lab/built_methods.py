"""Methods built for heads of one width: the attention that audits and benchmarks measure.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, R features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.attention.window import check_window
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.kv_cache import merged_attention
from linattn.methods.method import Method


@dataclass(frozen=True)
class BuiltMethod:
    """A method that attends in heads of one width."""

    method: Method  # what was built
    feature_map: FeatureMap | None  # its map; None for merged keys
    head_dim: int  # D
    scale: float  # the temperature, the factor of q·k

    @property
    def num_features(self) -> int:
        """R; 0 for merged keys."""
        return 0 if self.feature_map is None else self.feature_map.num_features

    @property
    def softmax_kernel(self) -> bool:
        """Whether it stands for the softmax kernel, on its scale."""
        return self.feature_map is None or self.feature_map.softmax_kernel

    @property
    def nonnegative(self) -> bool:
        """Whether its weights are a convex combination."""
        return self.feature_map is None or self.feature_map.nonnegative

    def to(self, device: torch.device | str) -> BuiltMethod:
        """The method itself, its map moved to a device."""
        if self.feature_map is not None:
            self.feature_map.to(device)
        return self

    def fit(self, query: Tensor, key: Tensor) -> None:
        """Fit the map to queries (B, H, L, D) and keys (B, Hkv, L, D), in place, if it takes statistics."""
        if isinstance(self.feature_map, FittedMap):
            self.feature_map.fit(query, key)

    def check_call(self, num_tokens: int, *, is_causal: bool) -> None:
        """Refuse self-attention that the method cannot have, as causal merged keys without a window."""
        if self.method.merged is not None:
            self.method.merged.check_call(num_tokens, num_tokens, is_causal=is_causal)
        elif self.method.window is not None:
            assert self.feature_map is not None
            check_window(self.method.window, self.feature_map, num_tokens, num_tokens, is_causal=is_causal)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool,
        backend: str = "auto",
    ) -> Tensor:
        """`linattn.linear_attention` or `linattn.merged_attention`, which has no other backend than "auto" here.

        Keys and values may have fewer heads than queries.
        """
        if self.method.merged is not None:
            # The op has its own temperature.
            op_scale = self.head_dim**-0.5
            query = query if self.scale == op_scale else query * (self.scale / op_scale)
            return merged_attention(
                query, key, value, self.method.merged, key_mask=key_mask, is_causal=is_causal, enable_gqa=True
            )
        assert self.feature_map is not None
        return linear_attention(
            query,
            key,
            value,
            self.feature_map,
            key_mask=key_mask,
            is_causal=is_causal,
            enable_gqa=True,
            window=self.method.window,
            backend=backend,
        )


def build(
    method: Method, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
) -> BuiltMethod:
    """A method for heads of a width and a temperature; errors as those of `Method.build_kernel`."""
    kernel = method.build_kernel(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
    return BuiltMethod(method, kernel if isinstance(kernel, FeatureMap) else None, head_dim, scale)
