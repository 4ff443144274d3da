"""Refuse states whose tensors do not belong together: compiled code would trust what a file or a hand put there.

Letters: B batch, H key/value heads, n tokens, D head width, Dv value width, R features, M exponents, S sampled queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from linattn.attention.exact import ExactKeys, MergedKeys
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.merged.few_bits import GROUP, CodedTokens, Codes, Frame, Frames
from linattn.attention.exact.merged.query_sample import QuerySample, sample_size
from linattn.attention.exact.rule import Exact
from linattn.attention.sums import Sums, accumulation_dtype
from linattn.feature_maps import FeatureMap

_REMEDY = (
    "pass a state as linear_attention_with_state, State.empty or torch.load gave it, or rebuild it from the tokens"
)
_KEPT = (torch.float32, torch.float64)
_TOKENS = {x: tuple(t for t in (torch.float16, torch.bfloat16, *_KEPT) if accumulation_dtype(t) == x) for x in _KEPT}


class _Sizes(NamedTuple):
    """What all of a state's tensors share."""

    heads: tuple[int, int]  # B, H
    widths: tuple[int, int]  # D, Dv
    dtype: torch.dtype  # of the sums
    device: torch.device


def check_sums(sums: Sums, num_features: int | None = None, num_exponents: int | None = None) -> None:
    """Refuse sums that are not (B, H, R, Dv), (B, H, R) and (B, H, M) in one dtype on one device; None takes any."""
    S, z, m = sums
    if not isinstance(S, Tensor) or S.ndim != 4 or S.dtype not in _KEPT:
        _refuse("S", S, "float32 or float64 of shape (B, H, R, Dv)")
    shape, dtype, device = S.shape, S.dtype, S.device
    if num_features is not None and shape[2] != num_features:
        _refuse("S", S, f"of R = {num_features} features, as the map has")
    _check("z", z, shape[:3], (dtype,), device)
    if num_exponents is None:
        num_exponents = m.shape[-1] if isinstance(m, Tensor) and m.ndim == 3 else 1
        if shape[2] and (num_exponents == 0 or shape[2] % num_exponents):
            _refuse("m", m, f"of M exponents, a divisor of R = {shape[2]}")
    _check("m", m, (*shape[:2], num_exponents), (dtype,), device)


def check_whole(
    sums: Sums, exact: object, feature_map: FeatureMap | None, head_dim: int, num_groups: int | None = None
) -> None:
    """Refuse a state of which any tensor has not the shape, dtype and device that its map, its rule and S ask for.

    Shapes alone are looked at: O(1). `num_groups` is the query heads of a key/value head, None for any.
    """
    if feature_map is None:
        check_sums(sums, 0, 1)
    else:
        check_sums(sums, feature_map.num_features, feature_map.num_exponents)
    kind = MergedKeys if feature_map is None else ExactKeys
    if exact is None and feature_map is not None:
        return
    if not isinstance(exact, kind) or not isinstance(exact.rule, Exact):
        got = type(exact.rule if isinstance(exact, kind) else exact).__name__
        raise TypeError(
            f"the state's exact part must be {kind.__name__} with an Exact as its rule, got {got}; {_REMEDY}"
        )
    S = sums.S
    sizes = _Sizes((S.shape[0], S.shape[1]), (head_dim, S.shape[3]), S.dtype, S.device)
    if isinstance(exact, ExactKeys):
        _check_exact_keys(exact, sizes)
    else:
        _check_merged_keys(exact, sizes, num_groups)


def _check_exact_keys(exact: ExactKeys, sizes: _Sizes) -> None:
    """The latest keys and the heavy ones."""
    rule = exact.rule
    _check_tokens("exact.heavy", exact.heavy, sizes, rule.num_heavy, rule.num_heavy, _TOKENS[sizes.dtype])
    number = _check_tokens("exact.recent", exact.recent, sizes, 0, 2 * (rule.window or 0), _TOKENS[sizes.dtype])
    for name, x, count in (
        ("heavy_score", exact.heavy_score, rule.num_heavy),
        ("recent_mass", exact.recent_mass, number),
    ):
        _check(f"exact.{name}", x, (*sizes.heads, count), (sizes.dtype,), sizes.device)


def _check_merged_keys(exact: MergedKeys, sizes: _Sizes, num_groups: int | None) -> None:
    """The latest keys, the merged ones and the sample of queries."""
    rule, merged, (batch, heads) = exact.rule, exact.merged, sizes.heads
    blocks = rule.blocks
    _check_tokens("exact.recent", exact.recent, sizes, 0, blocks.window + blocks.size, _TOKENS[sizes.dtype])
    if isinstance(merged, CodedTokens):
        _check_codes(merged, rule, sizes)
    else:
        _check_tokens("exact.merged", merged, sizes, 0, rule.num_whole, (sizes.dtype,))
    if not isinstance(exact.sample, QuerySample):
        _refuse("exact.sample", exact.sample, "a QuerySample")
    query, there = exact.sample
    number = query.shape[2] if isinstance(query, Tensor) and query.ndim == 4 else 0
    _check("exact.sample.query", query, (batch, heads, number, sizes.widths[0]), (sizes.dtype,), sizes.device)
    _check("exact.sample.there", there, (batch, heads, number), (torch.bool,), sizes.device)
    if num_groups is not None and number > sample_size(num_groups):
        _refuse(
            "exact.sample.query", query,
            f"at most {sample_size(num_groups)} queries where {num_groups} query heads share a key/value head",
        )  # fmt: skip


def _check_codes(merged: CodedTokens, rule: Exact, sizes: _Sizes) -> None:
    """Merged keys in few bits."""
    bits, shape = rule.bits, (*sizes.heads,)
    if bits is None:
        _refuse("exact.merged", merged, f"Tokens, as {rule} keeps them")
    count = _count("exact.merged", merged.bias, 0, rule.num_merged)
    _check("exact.merged.bias", merged.bias, (*shape, count), (sizes.dtype,), sizes.device)
    if not isinstance(merged.frames, Frames):
        _refuse("exact.merged.frames", merged.frames, "Frames")
    for name, codes, frame, width in zip(
        ("key", "value"), (merged.key, merged.value), merged.frames, sizes.widths, strict=True
    ):
        if not isinstance(codes, Codes) or not isinstance(frame, Frame):
            _refuse(f"exact.merged.{name}", codes, "Codes relative to a Frame")
        place, (code, zero, step) = f"exact.merged.{name}", codes
        _check(f"{place}.code", code, (*shape, count, math.ceil(width * bits / 8)), (torch.uint8,), sizes.device)
        for part, x in (("zero", zero), ("step", step)):
            _check(f"{place}.{part}", x, (*shape, count, -(-width // GROUP)), (torch.float16,), sizes.device)
        for part, x in zip(Frame._fields, frame, strict=True):
            _check(f"exact.merged.frames.{name}.{part}", x, (*shape, 1, width), (sizes.dtype,), sizes.device)


def _check_tokens(
    name: str, tokens: object, sizes: _Sizes, least: int, most: int, dtypes: tuple[torch.dtype, ...]
) -> int:
    """Keys (B, H, n, D), values (B, H, n, Dv) and biases (B, H, n), and their number n."""
    if not isinstance(tokens, Tokens):
        _refuse(name, tokens, "Tokens")
    count, (batch, heads), device = _count(name, tokens.bias, least, most), sizes.heads, sizes.device
    _check(f"{name}.key", tokens.key, (batch, heads, count, sizes.widths[0]), dtypes, device)
    _check(f"{name}.value", tokens.value, (batch, heads, count, sizes.widths[1]), dtypes, device)
    _check(f"{name}.bias", tokens.bias, (batch, heads, count), (sizes.dtype,), device)
    return count


def _count(name: str, bias: object, least: int, most: int) -> int:
    """How many tokens there are biases for, a number that the rule does not keep refused."""
    count = bias.shape[2] if isinstance(bias, Tensor) and bias.ndim == 3 else -1
    if not least <= count <= most:
        _refuse(f"{name}.bias", bias, f"of shape (B, H, n), n = {most}" if least else f"of shape (B, H, n ≤ {most})")
    return count


def _check(name: str, x: object, shape: Sequence[int], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Refuse what is no tensor of this shape, of one of these dtypes and on this device."""
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype not in dtypes or x.device != device:
        _refuse(name, x, f"{' or '.join(map(str, dtypes))} of shape {tuple(shape)} on {device}")


def _refuse(name: str, x: object, wanted: str) -> NoReturn:
    """Say what was got, what was wanted and what to do."""
    if isinstance(x, Tensor):
        raise ValueError(
            f"the state's {name} must be {wanted}, got {x.dtype} of shape {tuple(x.shape)} on {x.device}; {_REMEDY}"
        )
    raise TypeError(f"the state's {name} must be {wanted}, got {type(x).__name__}; {_REMEDY}")
