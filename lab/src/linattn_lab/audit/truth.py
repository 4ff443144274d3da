"""One layer's exact attention and its uniform average: what every map is measured against.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n chosen queries, D head width, Dv value width,
R features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.attention import attention_rows
from linattn.feature_maps import FeatureMap, RandomFeatureMap, Sderf, Wrapper
from linattn.hf import AttentionCall
from linattn.methods import measures
from linattn.softmax import softmax_attention
from linattn_lab.audit.moments import logit_std, pair_moments, predicted_ratio
from linattn_lab.audit.row_measures import kl_divergence, total_variation
from linattn_lab.audit.weights import few_queries
from linattn_lab.built_methods import BuiltMethod
from linattn_lab.variance import relative_variance

# One-hot values attended to at once where rows are read off the op.
_COLUMNS = 128


@dataclass(frozen=True, eq=False)
class HeadErrors:
    """One method on one layer; every field (H,) float64, as the fields of `linattn_lab.audit.records.HeadRow`."""

    error: Tensor
    total_variation: Tensor
    kl: Tensor
    query_norm: Tensor
    key_norm: Tensor
    sum_square: Tensor
    predicted_ratio: Tensor
    sampled: Tensor  # the attention rows of a few queries, (H, n, L)


class LayerTruth:
    """A layer's recorded call with what is exact about it.

    Attributes:
        call: the recorded call, one unpadded text.
        first: queries from this one on are measured.
        query_index: (n,) queries whose attention rows are compared.
        sampled_queries: those of them whose rows are kept.
        uniform_error: (H,) relative error of averaging uniformly.
        uniform_total_variation: (H,) of uniform rows.
        uniform_kl: (H,) of uniform rows.
        logit_std: (H,) standard deviation of the logits over visible keys.
    """

    def __init__(self, call: AttentionCall, *, first: int, num_rows: int) -> None:
        """Compute the exact answers once, in float64."""
        self.call, self.first = call, first
        length = call.query.shape[2]
        self.query_index = torch.linspace(first, length - 1, min(num_rows, length - first)).round().long()
        self._few = few_queries(len(self.query_index))
        self.sampled_queries: list[int] = self.query_index[self._few].tolist()
        self._visible = measures.visible_keys(
            self.query_index, num_queries=length, num_keys=length, is_causal=call.is_causal
        )
        query, key, value = call.query.double(), call.key.double(), call.value.double()
        exact = softmax_attention(query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=True)
        self._exact = exact[:, :, first:]
        uniform = measures.uniform_average(
            value, num_heads=query.shape[1], num_queries=length, is_causal=call.is_causal
        )
        self.uniform_error = measures.relative_error(uniform[:, :, first:], self._exact)
        log_exact = self._log_exact()
        uniform_rows = self._visible / self._visible.sum(-1, keepdim=True)
        self.uniform_total_variation = total_variation(log_exact, uniform_rows)
        self.uniform_kl = kl_divergence(log_exact, uniform_rows)
        self.logit_std = logit_std(log_exact, self._visible)

    @property
    def fitting_span(self) -> slice:
        """The tokens a map may learn from: the whole text, or, if causal, what precedes the measured queries."""
        return slice(0, self.first if self.call.is_causal else None)

    def measure(self, built: BuiltMethod) -> HeadErrors:
        """Every measure of one method on this layer.

        Cost: one linear attention, O(H L R (D + Dv)), and n rows of the implied matrix, O(H (L + n) R D + H n L R);
        beside a window all rows, O(H L R (D + L)).
        """
        call = self.call
        out = built.attend(call.query, call.key, call.value, is_causal=call.is_causal)
        weights = self._rows(built)
        log_exact = self._log_exact()
        query, key = _as_seen(built.feature_map, call.query, call.key)
        moments = pair_moments(query, key, scale=call.scale, first_query=self.first, is_causal=call.is_causal)
        return HeadErrors(
            error=self.error(out),
            total_variation=total_variation(log_exact, weights),
            kl=kl_divergence(log_exact, weights),
            query_norm=moments.query_norm,
            key_norm=moments.key_norm,
            sum_square=moments.sum_square,
            predicted_ratio=self._predict(built.feature_map, moments.sum_square, moments.difference_square),
            sampled=weights[0, :, self._few],
        )

    def sampled(self) -> Tensor:
        """Exact attention rows of a few queries, (H, n, L)."""
        return self._log_exact()[0, :, self._few].exp()

    def error(self, out: Tensor) -> Tensor:
        """Relative errors (H,) of an output (1, H, L, Dv) of this layer's call, over the measured queries."""
        return measures.relative_error(out[:, :, self.first :], self._exact)

    def rank_errors(self, ranks: Sequence[int]) -> Tensor:
        """Errors of the output when the exact attention matrix A is replaced by its best approximation of each rank.

            ‖A_r V − A V‖_F / ‖A V‖_F,   A = U Σ Wᵀ,   A_r = U_r Σ_r W_rᵀ

        Best for the entries of A; the least error of A V at rank r may be smaller still. Float64.

        Cost: one singular value decomposition of the measured rows per head, O(H L³).

        Args:
            ranks: r ≥ 1; a rank beyond the matrix's leaves rounding.

        Source: Eckart and Young 1936.
        """
        call, length = self.call, self.call.query.shape[2]
        queries = torch.arange(self.first, length, device=call.query.device)
        visible = measures.visible_keys(queries, num_queries=length, num_keys=length, is_causal=call.is_causal)
        errors = []
        for head in range(call.query.shape[1]):
            shared = head // (call.query.shape[1] // call.key.shape[1])
            key, value = call.key[:, shared : shared + 1], call.value[:, shared : shared + 1].double()
            query = call.query[:, head : head + 1, self.first :]
            rows = measures.softmax_log_rows(query, key, visible, scale=call.scale).exp()
            U, sizes, Wh = torch.linalg.svd(rows, full_matrices=False)
            along = sizes.unsqueeze(-1) * (Wh @ value)
            exact = self._exact[:, head : head + 1]
            errors.append([measures.relative_error(U[..., :r] @ along[..., :r, :], exact) for r in ranks])
        return torch.stack([torch.cat(found) for found in errors], 1)

    def _rows(self, built: BuiltMethod) -> Tensor:
        """The chosen rows of the implied matrix, in float64, where a small positive weight does not vanish."""
        call, length = self.call, self.call.query.shape[2]
        query, key = call.query.double(), call.key.double()
        feature_map = built.feature_map
        if feature_map is not None and built.method.window is None:
            return attention_rows(query, key, feature_map, self.query_index, is_causal=call.is_causal, enable_gqa=True)
        # Row i of the matrix is query i's output for one-hot values.
        columns = torch.eye(length, dtype=torch.float64, device=key.device).split(_COLUMNS, dim=1)
        parts = [
            built.attend(query, key, part.expand(*key.shape[:2], -1, -1), is_causal=call.is_causal) for part in columns
        ]
        return torch.cat([part[:, :, self.query_index] for part in parts], -1)

    def _log_exact(self) -> Tensor:
        """Logarithms of the exact rows; recomputed each time, since for large models they would not fit together."""
        query = self.call.query[:, :, self.query_index]
        return measures.softmax_log_rows(query, self.call.key, self._visible, scale=self.call.scale)

    def _predict(self, feature_map: FeatureMap | None, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Error over uniform error from the norms alone; nan where no closed form is known."""
        while isinstance(feature_map, Wrapper):
            feature_map = feature_map.inner
        # An Sderf's variance takes more than lengths.
        if not isinstance(feature_map, RandomFeatureMap) or isinstance(feature_map, Sderf):
            return torch.full_like(sum_square, torch.nan)
        if not feature_map.softmax_kernel:
            return torch.full_like(sum_square, torch.nan)
        return predicted_ratio(relative_variance(feature_map, sum_square, difference_square), self.logit_std)


def _as_seen(feature_map: FeatureMap | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as they enter the innermost map: moved by every wrapper in turn."""
    # The queries of a group share their key head's statistics.
    grouped = query.double().reshape(key.shape[0], key.shape[1], -1, key.shape[3])
    seen_key = key.double()
    while isinstance(feature_map, Wrapper):
        grouped, seen_key = feature_map.inner_query(grouped), feature_map.inner_key(seen_key)
        feature_map = feature_map.inner
    return grouped.reshape(query.shape), seen_key
