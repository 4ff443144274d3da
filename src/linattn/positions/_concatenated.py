"""Codes concatenated to queries and keys.

Letters: B batch, H heads, L tokens (Lq, Lk), D head width, P code width.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.feature_maps._arguments import check_count
from linattn.positions._base import Position, concatenated


class ConcatenatedCodes(Position):
    """[x; p]: a code of the position beside each query and key.

    Abstract: the concrete classes say which code. A kernel exp(scale·q·k) is multiplied by exp(scale·p_i·p_j), exactly;
    positive random features pay with variance: `extra_square` is what the codes add to s = scale·|q + k|². With an
    elementwise map φ(p_i)·φ(p_j) is merely added to every weight, whatever the content.
    """

    def __init__(self, head_dim: int, code_dim: int) -> None:
        check_count("head_dim", head_dim)
        super().__init__(head_dim, head_dim + check_count("code_dim", code_dim))
        self.code_dim = code_dim

    @abstractmethod
    def code(self, at: Tensor) -> Tensor:
        """Codes of positions: (…,) -> (…, P)."""

    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """[x; p]."""
        return concatenated(x, self.code(at))

    def extra_square(self, query_positions: Tensor, key_positions: Tensor, feature_map: FeatureMap) -> Tensor:
        """scale·|p_i + p_j|²: what the codes add to s, on which the variance of positive random features depends.

        Their relative variance with independent rows is (exp(s) - 1)/R, so it is multiplied by about exp of this.

        Args:
            query_positions: (Lq,).
            key_positions: (Lk,).
            feature_map: the map, which has the scale.

        Returns:
            (Lq, Lk), float64.
        """
        at_query, at_key = (self.code(at.double()).double() for at in (query_positions, key_positions))
        return feature_map.scale * (at_query.unsqueeze(1) + at_key).square().sum(-1)
