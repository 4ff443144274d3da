"""Launches of one call's kernels: sizes, and tensors as kernels take them.

Letters as in linattn_triton, N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from linattn.attention.backends.blocked.records import Saved
from linattn.feature_maps import FeatureMap
from linattn_triton.kernels.blocks import Cut, Keys, Rows, Shape
from linattn_triton.kernels.key_offsets import key_offsets
from linattn_triton.sides import Packed, kind_of, packed_sides
from linattn_triton.tiles import Tuning, capability, shape_of, tuned


class Work(NamedTuple):
    """Map, sizes and sides that one call's kernels share."""

    feature_map: FeatureMap
    shape: Shape
    query_side: Packed
    key_side: Packed
    cut: Cut
    device: torch.device

    @property
    def is_given(self) -> bool:
        """Whether exponents or features are made before the kernels."""
        return self.shape.kind != "powers"

    def given(self, x: Tensor, side: str) -> Tensor:
        """Vectors, exponents or features of queries or keys (…, L, D), whichever the kernels take."""
        if not self.is_given:
            return self.as_operand(x)
        with torch.no_grad():
            x = x.to(torch.float32)
            features = self.feature_map.query(x) if side == "query" else self.feature_map.key(x)
        return features

    def queries(self, query: Tensor) -> Rows:
        """Queries (B, H, G, L, D) as the kernels take them."""
        if not self.is_given:
            return rows(self.as_operand(query.flatten(1, 2)))
        features = self.given(query.flatten(2, 3), "query")
        return rows(features.unflatten(2, query.shape[2:4]).flatten(1, 2))

    def as_operand(self, x: Tensor) -> Tensor:
        """Tokens as the kernels read them; an interpreter cannot calculate with bfloat16."""
        return x.float() if self.shape.emulated else x

    def run(
        self, kernel: Any, programs: int, arguments: Sequence[Any], flags: Sequence[bool], *, by_tile: bool = False
    ) -> None:
        """Launch so many programs of a kernel, for each tile of features where it is `by_tile`."""
        shape, tuning = tuned(kernel.__name__, self.shape, capability(self.device))
        programs *= shape.total // shape.tile if by_tile else 1
        launch(kernel, programs, (*arguments, shape, *flags), tuning)


def launch(kernel: Any, programs: int, arguments: Sequence[Any], tuning: Tuning) -> None:
    """Run so many programs of a kernel; the first of its arguments are rows of tokens."""
    if programs:
        with torch.cuda.device_of(arguments[0].data):
            kernel[(programs,)](*arguments, num_warps=tuning.num_warps, num_stages=tuning.num_stages)


def plan(
    feature_map: FeatureMap, like: Tensor, sizes: tuple[int, int, int, int, int], *, span: int, saved: Saved | None
) -> Work:
    """The work of a call on tokens `like` these, with (B, H, G, L, Dv); spans of 0 tokens are blocks.

    The backward pass, which is given what was saved, is cut by sizes of its own.
    """
    _, heads, members, length, dv = sizes
    kind = kind_of(feature_map, is_followed=saved is not None and bool(saved.tensors))
    num_features, is_backward = feature_map.num_features, saved is not None
    shape = shape_of(kind, like.shape[-1], dv, num_features, like.dtype, is_backward=is_backward)
    span = span or shape.block
    per_group = triton.cdiv(span, shape.block)
    num_groups = triton.cdiv(length, span)
    rest = length - (num_groups - 1) * span
    num_blocks = (num_groups - 1) * per_group + triton.cdiv(rest, shape.block) if length else 0
    query_side, key_side = packed_sides(feature_map, shape, like.new_empty(0, dtype=torch.float32))
    cut = Cut(length, span, per_group, num_blocks, num_groups, heads, members)
    return Work(feature_map, shape, query_side, key_side, cut, like.device)


def rows(x: Tensor) -> Rows:
    """Tokens (B, heads, L, ·) with their strides; copied where a token's numbers lie apart."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return Rows(x, x.stride(0), x.stride(1), x.stride(2))


def bias_rows(bias: Tensor) -> Rows:
    """Biases (B, H or 1, L) likewise."""
    return Rows(bias, bias.stride(0), 0 if bias.shape[1] == 1 else bias.stride(1), bias.stride(2))


class FoldedKeys(NamedTuple):
    """Keys as the kernels take them."""

    key: Rows
    value: Rows
    keys: Keys
    peaks: Tensor  # (B, H, N), the largest offset of each block


def fold_keys(work: Work, key: Tensor, value: Tensor, bias: Tensor | None) -> FoldedKeys:
    """Keys (B, H, L, D), values and biases, with each key's offset."""
    if work.is_given:
        key = without_masked(key, bias)
    weight = key_weight(work, key)
    bias = weight if bias is None else bias.float() if weight is None else bias + weight
    keys, values = rows(work.given(key, "key")), rows(work.as_operand(value))
    batch, heads, length, _ = key.shape
    offset = torch.empty(batch, heads, length, dtype=torch.float32, device=key.device)
    shift = offset if bias is None else torch.empty_like(offset)
    peaks = offset.new_empty(batch, heads, work.cut.num_blocks)
    programs, offsets = batch * heads * work.cut.num_blocks, Keys(offset, shift)
    biases = Rows(offset, 0, 0, 0) if bias is None else bias_rows(bias)
    side = work.key_side.side()
    work.run(key_offsets, programs, (keys, biases, side, offsets, peaks, work.cut), (bias is not None,))
    return FoldedKeys(keys, values, offsets, peaks)


def without_masked(key: Tensor, bias: Tensor | None) -> Tensor:
    """Keys, 0 where they are masked."""
    return key if bias is None else key.masked_fill((bias == -torch.inf).unsqueeze(-1), 0)


def key_weight(work: Work, key: Tensor) -> Tensor | None:
    """The map's logarithmic weights of keys, (B, H, L)."""
    if work.shape.kind != "features":
        return None
    with torch.no_grad():
        return work.feature_map.key_log_weight(key.float())
