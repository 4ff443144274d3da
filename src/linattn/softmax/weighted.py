"""Softmax over weighted keys, through torch's fused kernels; letters as in softmax/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.attention import causal_mask, soft_capped, softmax_rows
from linattn.softmax.partial import Partial, joined
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import has_tangents, is_transformed

# Weights held at once.
_CHUNK = 2**22


class Scoring(NamedTuple):
    """How a query and a key make a logit: x = scale·q·k, or c·tanh(x / c) where there is a soft cap c."""

    scale: float
    soft_cap: float | None = None

    def biased(self, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Biases plus the logits of products of matrices (N, ·, ·), of which one holds the queries."""
        if self.soft_cap is None:
            return torch.baddbmm(bias, left, right, alpha=self.scale)
        return bias + soft_capped(self.scale * (left @ right), self.soft_cap)


class Reading(NamedTuple):
    """Outputs of rows, and their log-normalisers where they were asked for."""

    out: Tensor  # (B, H, G, L, Dv)
    log_normalizer: Tensor | None  # (B, H, G, L)

    @classmethod
    def joined(cls, parts: list[Reading]) -> Reading:
        """Readings of consecutive rows as one."""
        logs = [part.log_normalizer for part in parts if part.log_normalizer is not None]
        return cls(torch.cat([part.out for part in parts], 3), torch.cat(logs, 3) if logs else None)

    def partial(self) -> Partial:
        """Convert to a partial result; the log-normalisers must be there."""
        assert self.log_normalizer is not None
        return Partial(self.out, self.log_normalizer)


def read(query: Tensor, tokens: Tokens, scoring: Scoring, *, is_causal: bool, with_log: bool) -> Reading:
    """Rows (B, H, G, n, ·) over weighted keys, causally with the last of both level; 0 where no key is seen."""
    dtype, (groups, number) = tokens.bias.dtype, query.shape[2:4]
    rows = query.flatten(2, 3).to(dtype)
    bias = tokens.bias.unsqueeze(2)
    if is_causal and number > 1:
        bias = torch.where(causal_mask(number, bias.shape[-1], bias.device), bias, -torch.inf)
        bias = bias.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    key, value = tokens.key.to(dtype), tokens.value.to(dtype)
    # torch's kernels have no cap, tell no log-normaliser, and under torch.func take a bias for a constant.
    if with_log or scoring.soft_cap is not None or is_transformed() or has_tangents():
        part = softmax_rows(rows, key, value, bias, *scoring)
        out, log = part.out, part.log_normalizer.unflatten(2, (groups, number)) if with_log else None
    else:
        mask = bias.expand(*rows.shape[:3], -1)
        out, log = torch.nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=scoring.scale), None
    return Reading(out.to(query.dtype).unflatten(2, (groups, number)), log)


def attend_to_all(query: Tensor, tokens: Tokens, scale: float, soft_cap: float | None = None) -> Partial:
    """Exact rows (B, H, G, L, ·) over the same few tokens."""
    size = max(_CHUNK // max(query.shape[:3].numel() * tokens.key.shape[2], 1), 1)
    key, value, bias = tokens.key.unsqueeze(2), tokens.value.unsqueeze(2), tokens.bias[:, :, None, None]
    return joined([softmax_rows(rows, key, value, bias, scale, soft_cap) for rows in query.split(size, 3)])
