"""Attention matching: fewer keys, with weights and values fitted to what queries saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn.softmax.attention import softmax_weights
from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import read
from linattn_lab.contenders.contender import Contender

_BLOCK = 64
# Steps of accelerated projected gradient descent for the weights, the least factor of one, and the ridge of the values,
# relative to the mean square.
_STEPS, _LEAST, _RIDGE = 100, 1e-3, 1e-3


@dataclass(frozen=True)
class AttentionMatching(Contender):
    """Compacted keys and an exact window; compacted again after every block, by the queries of that block.

    Of the compacted keys and those that leave the window, the keys of the largest root mean square weight are kept.
    Their weights w ≥ 0 are fitted to the mass that the queries saw, their values to the output:

        Σ_j w_j exp(q·k_j) ≈ mass(q),   Σ_j w_j exp(q·k_j) v_j / Σ ≈ out(q)

    The paper compacts a finished text once, by queries made for that; here a stream is compacted by its own. Half of
    the room is for the window.
    """

    num_keys: int
    block: int = _BLOCK

    kind = "attention matching"
    source = "arXiv 2602.16284"

    fewest: ClassVar[int] = _BLOCK // 2

    @property
    def num_held(self) -> int:
        """N."""
        return self.num_keys

    @property
    def label(self) -> str:
        """Its name with its size."""
        return f"{self.kind} {self.num_keys}"

    @property
    def num_recent(self) -> int:
        """Keys of the window beside the block's own."""
        return max(self.num_keys // 2 - self.block, 0)

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        count = num_bytes // (sizes.key_bytes + sizes.statistic_bytes)
        return cls(count, min(_BLOCK, max(count // 4, 1)))

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys, values and their weights."""
        return min(self.num_keys, num_tokens) * (sizes.key_bytes + sizes.statistic_bytes)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Block by block: answer, then compact."""
        rows = query.unflatten(1, (key.shape[1], -1))
        dtype = torch.promote_types(key.dtype, torch.float32)
        tokens = Tokens(key.to(dtype), value.to(dtype), key.new_zeros(key.shape[:3], dtype=dtype))
        compact, left, parts = tokens.cut(0, 0), 0, []
        for start in range(0, key.shape[2], self.block):
            stop = min(start + self.block, key.shape[2])
            block = rows[:, :, :, start:stop]
            seen = compact.then(tokens.cut(left, stop))
            parts.append(read(block, seen, scale, is_causal=True, with_log=False).out)
            if seen.bias.shape[2] > self.num_keys - self.block:
                leaving = max(stop - self.num_recent, left)
                room = self.num_keys - self.block - (stop - leaving)
                compact = compacted(block, compact.then(tokens.cut(left, leaving)), room, scale)
                left = leaving
        return torch.cat(parts, 3).flatten(1, 2)


def compacted(query: Tensor, tokens: Tokens, room: int, scale: float) -> Tokens:
    """At most `room` weighted keys that give queries (B, H, G, n, D) the mass and the output of these."""
    if tokens.bias.shape[2] <= room:
        return tokens
    rows = query.flatten(2, 3).to(tokens.key.dtype)
    weights, _ = softmax_weights(rows, tokens.key, tokens.bias.unsqueeze(2), scale)
    best = weights.square().mean(2).topk(room, dim=-1).indices.sort(dim=-1).values
    kept = tokens.pick(best)
    # Weights relative to the mass all keys have, the kept ones' own factors taken out again by their biases.
    share = weights.gather(-1, best.unsqueeze(2).expand(-1, -1, rows.shape[2], -1))
    factor = _nonnegative(share)
    fitted = share * factor.unsqueeze(2)
    fitted = fitted / fitted.sum(-1, keepdim=True)
    target = weights @ tokens.value - fitted @ kept.value
    gram = fitted @ fitted.mT
    ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    value = kept.value + fitted.mT @ torch.linalg.solve(gram + ridge * eye, target)
    return Tokens(kept.key, value, kept.bias + factor.log())


def _nonnegative(share: Tensor) -> Tensor:
    """Positive factors w (B, H, C) of least squares for share (B, H, n, C) @ w ≈ 1."""
    gram = share.mT @ share
    wanted = share.sum(2)
    # No entry is negative: the largest row sum bounds the largest eigenvalue.
    step = 1 / gram.sum(-1).amax(-1, keepdim=True)
    factor = ahead = torch.ones_like(wanted)
    for number in range(_STEPS):
        slope = (gram @ ahead.unsqueeze(-1)).squeeze(-1) - wanted
        before, factor = factor, (ahead - step * slope).clamp(min=_LEAST)
        ahead = factor + number / (number + 3) * (factor - before)
    return factor
