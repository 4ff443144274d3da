"""Ranks of the attention matrices that a feature map implies.

Letters: L tokens, D head width, R features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linattn.attention import attention_rows
from linattn.feature_maps import FavorPlus, features
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, seed
from linattn_lab.experiments.judging import decide

WEIGHTS, ATTENTION = "φ(Q)φ(K)ᵀ", "with rows that sum to 1"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of both experiments on ranks."""

    num_features: tuple[int, ...] = (2, 4, 8, 16, 32)
    num_tokens: int = 64
    head_dim: int = 16
    sigma: float = 0.5


def ranks(config: Config, *, is_causal: bool) -> Iterator[Measurement]:
    """The ranks of all weights, and of the matrix that averages the values."""
    for width in config.num_features:
        for series, rank in ((WEIGHTS, rank_of_weights), (ATTENTION, rank_of_attention)):
            yield Measurement(series, width, partial(rank, config, width, is_causal=is_causal))


def bounded(rows: Sequence[FigureRow], more: str = "") -> Verdict:
    """No rank above d_φ, or one; more words on the figure."""
    worst = max(rows, key=lambda row: (row.value / row.x, row.x))
    return decide(
        holds=worst.value <= worst.x,
        fails=worst.value > worst.x,
        figure=f"with {worst.x:.0f} features the rank is {worst.value:.0f} ({worst.series}){more}",
        tolerance="singular values above what rounding leaves, 2⁻⁵² of the largest for each row, are counted",
    )


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
