"""Refuse states of unfit shapes, dtypes or devices, all that is compared; letters as in kv_cache/__init__.py."""

import reprlib
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.kv_cache.codes import Codes, Layout, coded_bytes
from linattn.kv_cache.config import MergedKV, TierSize
from linattn.kv_cache.frames import Frame, Frames
from linattn.kv_cache.keys import MergedKeys
from linattn.kv_cache.levels import MOST_BITS
from linattn.kv_cache.query_sample import QuerySample, sample_size
from linattn.softmax.checking import TOKEN_DTYPES, check_kind, check_tensor, check_tokens, checked_length, refuse
from linattn.softmax.row_groups import RowGroups, check_groups, check_next_tokens
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import has_values

_REMEDY = "pass a state as merged_attention_with_state gave it, or rebuild it from the tokens"


class Sizes(NamedTuple):
    """Sizes that a stream's tokens have in common."""

    batch: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype  # of biases
    device: torch.device


def checked_sizes(keys: MergedKeys | RowGroups[MergedKeys]) -> Sizes:
    """The sizes of what a stream keeps, refused where these are not tensors that others could be compared with."""
    groups = keys.keys if isinstance(keys, RowGroups) else (keys,)
    if not isinstance(groups, tuple) or not groups:
        refuse("keys", groups, "a tuple of MergedKeys", _REMEDY)
    parts = [_checked_recent(group) for group in groups]
    (_, heads, _, head_dim), value_dim = parts[0].key.shape, parts[0].value.shape[-1]
    batch = sum(len(part.key) for part in parts)
    return Sizes(batch, heads, head_dim, value_dim, parts[0].bias.dtype, parts[0].key.device)


def check_continues(sizes: Sizes, held: MergedKV, key: Tensor, value: Tensor, config: MergedKV) -> None:
    """Refuse tokens (B, H, L, ·) that do not continue a stream."""
    batch, heads, _, value_dim, dtype, device = sizes
    remedy = "convert the tokens, or begin a new state"
    check_next_tokens((batch, heads, value_dim), dtype, device, key, value, remedy)
    if held != config:
        raise ValueError(f"the state was built with {held}, got {config}; give the same one")


def check_tensors(keys: MergedKeys | RowGroups[MergedKeys], head_dim: int, num_groups: int | None) -> None:
    """Refuse a state of which a tensor has not the shape, dtype and device that its config and its tokens ask for."""
    if not isinstance(keys, RowGroups):
        _check_group(keys, head_dim, num_groups)
        return
    sizes = checked_sizes(keys)
    check_groups(keys, sizes.batch, _REMEDY)
    if any(group.config != keys.keys[0].config for group in keys.keys):
        raise ValueError(f"the state's keys must be of one config, got {[x.config for x in keys.keys]}; {_REMEDY}")
    for rows, group in zip(keys.rows, keys.keys, strict=True):
        got, wanted = checked_sizes(group), sizes._replace(batch=len(rows))
        if got != wanted:
            raise ValueError(f"the state's rows {rows} must be in the sizes of all others, got {got}; {_REMEDY}")
        _check_group(group, head_dim, num_groups)


def _check_group(keys: MergedKeys, head_dim: int, num_groups: int | None) -> None:
    """Refuse keys of which any tensor has not the shape, dtype and device that its config and its tokens ask for."""
    recent, config, sample = _checked_recent(keys), keys.config, keys.sample
    check_kind(MergedKV, "config", config, _REMEDY)
    check_kind(QuerySample, "sample", sample, _REMEDY)
    (batch, heads), dtype, device = recent.key.shape[:2], recent.bias.dtype, recent.key.device
    sizes, room = (batch, heads, head_dim, recent.value.shape[-1]), config.blocks.window + config.blocks.size
    check_tokens("recent", recent, room, sizes, dtype, device, _REMEDY)
    most = None if num_groups is None else sample_size(num_groups)
    sampled = checked_length("sample.there", sample.there, most, _REMEDY)
    check_tensor("sample.query", sample.query, (batch, heads, sampled, head_dim), dtype, device, _REMEDY)
    check_tensor("sample.there", sample.there, (batch, heads, sampled), torch.bool, device, _REMEDY)
    check_tokens("sinks", keys.sinks, config.num_sinks, sizes, dtype, device, _REMEDY)
    for name, x in zip(Tokens._fields[:2], keys.sinks, strict=False):
        check_tensor(f"sinks.{name}", x, tuple(x.shape), recent.key.dtype, device, _REMEDY)
    if not isinstance(keys.coded, tuple) or len(keys.coded) != len(config.tiers):
        refuse("coded", keys.coded, f"a tuple of {len(config.tiers)} tiers", _REMEDY)
    for place, (tier, size) in enumerate(zip(keys.coded, config.tiers, strict=True)):
        _check_tier(f"coded[{place}]", tier, size, recent, head_dim)
    _check_tier("merged", keys.merged, config.merged_tier, recent, head_dim)


def _check_tier(name: str, tier: object, size: TierSize, recent: Tokens, head_dim: int) -> None:
    """Refuse tokens of a tier of which any tensor has not the shape, dtype and device that all have."""
    (batch, heads), value_dim = recent.key.shape[:2], recent.value.shape[-1]
    dtype, device, widths = recent.bias.dtype, recent.key.device, (head_dim, value_dim)
    if size.bits is None or not isinstance(tier, CodedTokens):
        sizes = (batch, heads, *widths)
        check_tokens(name, tier, size.num_unquantized(dtype.itemsize), sizes, dtype, device, _REMEDY, is_wide=True)
        return
    number = checked_length(f"{name}.bias", tier.bias, size.number, _REMEDY)
    check_kind(Frames, f"{name}.frames", tier.frames, _REMEDY)
    for side, width, few in zip(Frames._fields, widths, size.both_bits, strict=True):
        codes, frame, layout = getattr(tier, side), getattr(tier.frames, side), Layout.of(width)
        of_codes = (number, coded_bytes(width, few) - 2), (number,)
        of_frame = (1, width), (1, width), (layout.size,), (layout.number,)
        for record, part, kind, shapes, dtypes in (
            (Codes, side, codes, of_codes, (torch.uint8, torch.float16)),
            (Frame, f"frames.{side}", frame, of_frame, (dtype, dtype, torch.int16, torch.uint8)),
        ):
            check_kind(record, f"{name}.{part}", kind, _REMEDY)
            for field, x, shape, wanted in zip(record._fields, kind, shapes, dtypes, strict=True):
                check_tensor(f"{name}.{part}.{field}", x, (batch, heads, *shape), wanted, device, _REMEDY)
        _check_frame(f"{name}.frames.{side}", frame, layout.spent(few))
    check_tensor(f"{name}.bias", tier.bias, (batch, heads, number), dtype, device, _REMEDY)


def _check_frame(name: str, frame: Frame, total: int) -> None:
    """Refuse orders that are none, which would be read out of bounds, and bits that are not those of the codes."""
    if frame.order.is_meta or not has_values(frame.order):
        return
    for order, bits in zip(*(x.flatten(0, 1).tolist() for x in (frame.order, frame.bits)), strict=True):
        if sorted(order) != list(range(len(order))) or max(bits, default=0) > MOST_BITS or sum(bits) != total:
            raise ValueError(
                f"the state's {name} must have for every head each number below {len(order)} once as order, and at "
                f"most {MOST_BITS} bits a block, {total} in all, got {reprlib.repr(order)} and {bits}; {_REMEDY}"
            )


def _checked_recent(keys: MergedKeys) -> Tokens:
    """The latest tokens, refused where they are not tensors that others could be compared with."""
    check_kind(MergedKeys, "keys", keys, _REMEDY)
    recent = keys.recent
    check_kind(Tokens, "recent", recent, _REMEDY)
    for name, x, rank in zip(Tokens._fields, recent, (4, 4, 3), strict=True):
        if not isinstance(x, Tensor) or x.ndim != rank:
            refuse(f"recent.{name}", x, f"a tensor of {rank} dimensions", _REMEDY)
    if recent.bias.dtype not in TOKEN_DTYPES:
        refuse("recent.bias", recent.bias, "float32 or float64", _REMEDY)
    return recent
