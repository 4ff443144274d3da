"""Ranks of the attention matrices that a feature map implies.

Letters: L tokens, D head width, R features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.attention import attention_rows
from linattn.feature_maps import FavorPlus, features
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import Figure, Sizes
from linattn_lab.experiments.inputs import gaussian_tokens, seed

WEIGHTS, ATTENTION = "φ(Q)φ(K)ᵀ", "with rows that sum to 1"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of both experiments on ranks."""

    num_features: tuple[int, ...] = (2, 4, 8, 16, 32)
    num_tokens: int = 64
    head_dim: int = 16
    sigma: float = 0.5


def rank_of_weights(config: Config, num_features: int, *, is_causal: bool) -> Figure:
    """Rank of φ(Q)φ(K)ᵀ, causally of what lies on and below its diagonal; expected is the claim's bound."""
    query, key, favor = _tokens_and_map(config, num_features)
    weights = features(favor, query, "query") @ features(favor, key, "key").mT
    return Figure(_rank(weights.tril() if is_causal else weights), expected=num_features)


def rank_of_attention(config: Config, num_features: int, *, is_causal: bool) -> Figure:
    """Rank of the matrix that averages the values, rows summing to 1; expected is the claim's bound."""
    query, key, favor = _tokens_and_map(config, num_features)
    everyone = torch.arange(config.num_tokens)
    rows = attention_rows(query, key, favor, everyone, is_causal=is_causal)
    return Figure(_rank(rows), expected=num_features)


def rank_of_softmax_attention(config: Config) -> Figure:
    """Rank of softmax attention, which gives its matrix when the values are the unit vectors."""
    query, key, _ = _tokens_and_map(config, 1)
    unit_vectors = torch.eye(config.num_tokens, dtype=query.dtype).expand(1, 1, -1, -1)
    return Figure(_rank(softmax_attention(query, key, unit_vectors)))


def _tokens_and_map(config: Config, num_features: int) -> tuple[Tensor, Tensor, FavorPlus]:
    """Queries, keys, and a random map; the rank does not depend on which, the entries being in general position."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, config.sigma, "rank", config.seed)
    favor = FavorPlus(config.head_dim, num_features, seed=seed("rank", config.seed, num_features))
    return tokens.query, tokens.key, favor


def _rank(matrix: Tensor) -> int:
    """Singular values above L·2⁻⁵² of the largest: what rounding cannot have made."""
    return int(torch.linalg.matrix_rank(matrix.squeeze()))
