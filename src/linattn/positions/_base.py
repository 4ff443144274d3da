"""Encodings that act before the map: (q, k, positions) -> (q', k'); letters as in positions/__init__.py."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from linattn.feature_maps import FeatureMap
from linattn.softmax.checking import check_dense


class Position(nn.Module, ABC):
    """A position encoding of queries and keys, applied before the map.

    Abstract. `bind` is called once, with the map, and gives the map to call attention with; then every call of
    attention takes q and k from `encoding(query, key, positions)`. A stream goes on by going on with the positions.

    Attributes:
        head_dim: D, the width of the queries and keys it takes.
        encoded_dim: the width of those it gives, which the map must have as its `head_dim`.
    """

    head_dim: int
    encoded_dim: int

    def __init__(self, head_dim: int, encoded_dim: int) -> None:
        super().__init__()
        self.head_dim, self.encoded_dim = head_dim, encoded_dim

    def bind(self, feature_map: FeatureMap) -> FeatureMap:
        """The map to attend with in the given one's place: the same, unless the encoding changes features.

        Raises:
            ValueError: the map is of another width, or the encoding does not admit it.
        """
        if feature_map.head_dim != self.encoded_dim:
            raise ValueError(
                f"{type(self).__name__} gives queries and keys of width {self.encoded_dim}, got a map built for "
                f"head_dim={feature_map.head_dim}; build it with head_dim={self.encoded_dim}"
            )
        return feature_map

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded queries (B, H, Lq, ·) and keys (B, Hkv, Lk, ·), in their dtypes.

        Args:
            query: (B, H, Lq, D); the last Lq of the positions are theirs, as bottom-right alignment has it.
            key: (B, Hkv, Lk, D), Lk ≥ Lq.
            positions: (Lk,) or (B, Lk), integer or floating: from any start, as `token_positions` counts them.

        Raises:
            TypeError: `positions` is no tensor of numbers.
            ValueError: shapes do not fit, or a position is beyond what the encoding has.
        """
        at = checked_positions(query, key, positions, self.head_dim)
        self.check_positions(at)
        return self.encode_query(query, at[..., at.shape[-1] - query.shape[2] :]), self.encode_key(key, at)

    @abstractmethod
    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """Queries (B, H, L, D) at positions (B or 1, 1, L), float64."""

    def encode_key(self, x: Tensor, at: Tensor) -> Tensor:
        """Keys (B, Hkv, L, D); as queries unless overridden."""
        return self.encode_query(x, at)

    def check_positions(self, at: Tensor) -> None:
        """Refuse positions that the encoding does not have."""
        return


def token_positions(key_mask: Tensor, start: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Positions that count attended tokens alone, and where the stream goes on.

        p_t = start + #{s < t: token s is attended to}

    Padding on either side or inside moves no token. O(B·L).

    Args:
        key_mask: (B, L) bool, True = attend; a masked token has the position of the next attended one.
        start: the first position, one for all or (B,): the second result of the call before.

    Returns:
        (B, L) int64, and (B,) int64.

    Raises:
        TypeError: `key_mask` is not a bool tensor.

    Example:
        >>> import torch
        >>> positions, end = token_positions(torch.tensor([[False, True, False, True]]), start=5)
        >>> positions.tolist(), end.tolist()
        ([[5, 5, 6, 6]], [7])
    """
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool or key_mask.ndim != 2:
        raise TypeError(f"key_mask must be a bool tensor (B, L), True = attend, got {key_mask!r}")
    seen = key_mask.long().cumsum(1)
    first = torch.as_tensor(start, device=key_mask.device).expand(key_mask.shape[0])
    return first.unsqueeze(1) + seen - key_mask.long(), first + key_mask.sum(1)


def checked_positions(query: Tensor, key: Tensor, positions: Tensor, head_dim: int | None) -> Tensor:
    """Positions of the keys as (B or 1, 1, Lk), float64; what does not fit is refused."""
    check_dense(query=query, key=key, positions=positions)
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4 or (head_dim is not None and x.shape[-1] != head_dim):
            width = "D" if head_dim is None else f"D={head_dim}"
            raise ValueError(f"{name} must be (B, H, L, {width}), got {tuple(x.shape)}")
    if query.shape[2] > key.shape[2]:
        raise ValueError(
            f"positions are those of the keys, and of as many queries at their end, got {query.shape[2]} queries and "
            f"{key.shape[2]} keys; encode queries and keys of different tokens in two calls"
        )
    if not isinstance(positions, Tensor) or positions.dtype == torch.bool or positions.dtype.is_complex:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of integers or floating numbers, got {got}")
    batch, _, length, _ = key.shape
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        raise ValueError(f"positions must be ({length},) or ({batch}, {length}), got {tuple(positions.shape)}")
    rows = positions if positions.ndim == 2 else positions.unsqueeze(0)
    return rows.to(key.device, torch.float64).unsqueeze(1)
