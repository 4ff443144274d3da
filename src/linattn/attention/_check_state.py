"""Refuse states whose tensors do not belong together: compiled code would trust what a file or a hand put there.

Shapes, dtypes and devices alone are compared, all of a kind at once, since every token of a stream passes here: what
differs is looked for where something does.

Letters: B batch, H key/value heads, n tokens, D head width, Dv value width, R features, M exponents, S sampled queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from linattn.attention.exact import Exact, ExactKeys, MergedKeys
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.merged.few_bits import GROUP, CodedTokens, Codes, Frame, Frames
from linattn.attention.exact.merged.query_sample import QuerySample, sample_size
from linattn.attention.sums import Sums, accumulation_dtype
from linattn.feature_maps import FeatureMap

if TYPE_CHECKING:
    from linattn.attention.state import State

_REMEDY = "pass a state as linear_attention_with_state or State.empty gave it, or rebuild it from the tokens"
# By the dtype of sums, those of tokens beside them.
_TOKENS = {torch.float32: (torch.float32, torch.float16, torch.bfloat16), torch.float64: (torch.float64,)}
_PARTS = tuple(f"exact.recent.{name}" for name in Tokens._fields)
_EXACT = (*(f"exact.heavy.{name}" for name in Tokens._fields), "exact.heavy_score", *_PARTS, "exact.recent_mass")
_SAMPLE = tuple(f"exact.sample.{name}" for name in QuerySample._fields)
_MERGED = (*_PARTS, *_SAMPLE, *(f"exact.merged.{name}" for name in Tokens._fields))
_CODED = (
    *(*_PARTS, *_SAMPLE),
    *(f"exact.merged.{side}.{name}" for side in ("key", "value") for name in Codes._fields),
    *(f"exact.merged.frames.{side}.{name}" for side in Frames._fields for name in Frame._fields),
    "exact.merged.bias",
)


def check_sums(sums: Sums) -> None:
    """Refuse sums that are not (B, H, R, Dv), (B, H, R) and (B, H, M) in one dtype on one device, of any R and M."""
    S, _, m = sums
    num_features = S.shape[2] if isinstance(S, Tensor) and S.ndim == 4 else 0
    num_exponents = m.shape[-1] if isinstance(m, Tensor) and m.ndim == 3 else 1
    if num_features and (num_exponents == 0 or num_features % num_exponents):
        _refuse("m", m, f"of M exponents, a divisor of R = {num_features}")
    check_sums_of(num_features, num_exponents, sums)


def check_sums_of(num_features: int, num_exponents: int, sums: Sums) -> None:
    """Refuse sums of other numbers of features and exponents too."""
    S, z, m = sums
    if not isinstance(S, Tensor) or S.ndim != 4 or S.dtype not in _TOKENS:
        _refuse("S", S, "float32 or float64 of shape (B, H, R, Dv)")
    (batch, heads, held, value_dim), dtype, device = S.shape, S.dtype, S.device
    # Without a loop: beside a map's sums a token has little else to wait for.
    if (
        held == num_features
        and isinstance(z, Tensor)
        and isinstance(m, Tensor)
        and z.shape == (batch, heads, held)
        and m.shape == (batch, heads, num_exponents)
        and z.dtype is m.dtype is dtype
        and z.device == m.device == device
    ):
        return
    shapes = [(batch, heads, num_features, value_dim), (batch, heads, num_features), (batch, heads, num_exponents)]
    _compare(Sums._fields, sums, shapes, [dtype] * 3, device)


def check_whole(
    sums: Sums, exact: object, feature_map: FeatureMap | None, head_dim: int, num_groups: int | None = None
) -> None:
    """Refuse a state of which any tensor has not the shape, dtype and device that its map, its rule and S ask for.

    `num_groups` is the query heads of a key/value head, None for any.
    """
    if feature_map is None:
        check_sums_of(0, 1, sums)
    else:
        check_sums_of(feature_map.num_features, feature_map.num_exponents, sums)
        if exact is None:
            return
    _check_exact(sums.S, exact, MergedKeys if feature_map is None else ExactKeys, head_dim, num_groups)


def check_of_any_map(sums: Sums, exact: object) -> None:
    """Refuse a state whose tensors do not belong together, whatever its map."""
    check_sums(sums)
    if exact is not None:
        _check_exact(sums.S, exact, MergedKeys if isinstance(exact, MergedKeys) else ExactKeys, width_of(exact), None)


def check_apart(S: Tensor, apart: object) -> None:
    """Refuse a factor apart that is not (B, H)."""
    if apart is not None and (
        not isinstance(apart, Tensor)
        or apart.shape != S.shape[:2]
        or apart.dtype != torch.float64
        or apart.device != S.device
    ):
        _refuse("apart", apart, f"torch.float64 of shape {tuple(S.shape[:2])} on {S.device}, or None")


def check_continues(
    state: State,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | None,
    exact: Exact | None,
    num_groups: int | None = None,  # query heads of a key/value head
) -> None:
    """Refuse tokens that do not continue a state, and a state whose tensors do not belong together."""
    S = state.S
    if not isinstance(S, Tensor) or S.ndim != 4:
        check_sums(Sums(S, state.z, state.m))
    wanted, got = (*S.shape[:2], S.shape[3]), (*key.shape[:2], value.shape[-1])
    if wanted != got:
        raise ValueError(
            f"the state holds (batch, key/value heads, value width) = {wanted}, got keys and values of {got}"
        )
    if S.dtype != accumulation_dtype(key.dtype):
        raise ValueError(
            f"the state is kept in {S.dtype}, tokens of {key.dtype} need "
            f"{accumulation_dtype(key.dtype)}; build it with State.empty(…, dtype={key.dtype})"
        )
    if S.device != key.device:
        raise ValueError(f"the state is on {S.device}, the keys on {key.device}; move it with state.to(…)")
    held = None if state.exact is None else getattr(state.exact, "rule", state.exact)
    if held != exact:
        raise ValueError(f"the state was built with exact={held}, got exact={exact}; give the same one")
    state.check_tensors(feature_map, key.shape[-1], num_groups)


def width_of(exact: object) -> int:
    """How wide the keys are that a state keeps; 0 where it keeps none."""
    recent = getattr(exact, "recent", None)
    key = recent[0] if isinstance(recent, tuple) and recent else None
    return key.shape[-1] if isinstance(key, Tensor) and key.ndim == 4 else 0


def _check_exact(
    S: Tensor, exact: object, kind: type[ExactKeys] | type[MergedKeys], head_dim: int, num_groups: int | None
) -> None:
    """The keys beside the sums."""
    if not isinstance(exact, kind) or not isinstance(exact.rule, Exact):
        got = type(exact.rule if isinstance(exact, kind) else exact).__name__
        raise TypeError(
            f"the state's exact part must be {kind.__name__} with an Exact as its rule, got {got}; {_REMEDY}"
        )
    if isinstance(exact, ExactKeys):
        _check_exact_keys(exact, S, head_dim)
    else:
        _check_merged_keys(exact, S, head_dim, num_groups)


def _check_exact_keys(exact: ExactKeys, S: Tensor, head_dim: int) -> None:
    """The heavy keys and the latest ones."""
    heavy, recent, number = exact.heavy, exact.recent, exact.rule.num_heavy
    _require(Tokens, "exact.heavy", heavy)
    _require(Tokens, "exact.recent", recent)
    count = _count("exact.recent.bias", recent.bias, 2 * (exact.rule.window or 0))
    shapes, dtypes = [], []
    for tokens, n in ((heavy, number), (recent, count)):
        shapes += _token_shapes(S, n, head_dim)
        shapes.append(shapes[-1])
        dtypes += [*_token_dtypes(S, tokens), S.dtype]
    _compare(_EXACT, (*heavy, exact.heavy_score, *recent, exact.recent_mass), shapes, dtypes, S.device)


def _check_merged_keys(exact: MergedKeys, S: Tensor, head_dim: int, num_groups: int | None) -> None:
    """The latest keys, the sample of queries, and the merged keys."""
    rule, merged, sample, recent = exact.rule, exact.merged, exact.sample, exact.recent
    _require(Tokens, "exact.recent", recent)
    _require(QuerySample, "exact.sample", sample)
    blocks, (batch, heads, _, value_dim), dtype = rule.blocks, S.shape, S.dtype
    count = _count("exact.recent.bias", recent.bias, blocks.window + blocks.size)
    sampled = _count("exact.sample.there", sample.there, None if num_groups is None else sample_size(num_groups))
    shapes = [*_token_shapes(S, count, head_dim), (batch, heads, sampled, head_dim), (batch, heads, sampled)]
    dtypes = [*_token_dtypes(S, recent), dtype, torch.bool]
    if rule.bits is None or not isinstance(merged, CodedTokens):
        _require(Tokens, "exact.merged", merged)
        shapes += _token_shapes(S, _count("exact.merged.bias", merged.bias, rule.num_whole), head_dim)
        _compare(_MERGED, (*recent, *sample, *merged), shapes, [*dtypes, dtype, dtype, dtype], S.device)
        return
    number = _count("exact.merged.bias", merged.bias, rule.num_merged)
    for name in ("key", "value"):
        _require(Codes, f"exact.merged.{name}", getattr(merged, name))
        _require(Frame, f"exact.merged.frames.{name}", getattr(merged.frames, name))
    for width in (head_dim, value_dim):
        pieces = (batch, heads, number, -(-width // GROUP))
        shapes += [(batch, heads, number, -(-width * rule.bits // 8)), pieces, pieces]
    shapes += [*[(batch, heads, 1, head_dim)] * 2, *[(batch, heads, 1, value_dim)] * 2, (batch, heads, number)]
    dtypes += [*[torch.uint8, torch.float16, torch.float16] * 2, *[dtype] * 5]
    _compare(_CODED, (*recent, *sample, *merged.leaves()), shapes, dtypes, S.device)


def _token_shapes(S: Tensor, number: int, head_dim: int) -> list[tuple[int, ...]]:
    """Keys (B, H, n, D), values (B, H, n, Dv) and biases (B, H, n)."""
    batch, heads, _, value_dim = S.shape
    return [(batch, heads, number, head_dim), (batch, heads, number, value_dim), (batch, heads, number)]


def _token_dtypes(S: Tensor, tokens: Tokens) -> list[torch.dtype]:
    """Those of keys and values, which are kept as they came, and of biases."""
    kept = tokens.key.dtype if isinstance(tokens.key, Tensor) and tokens.key.dtype in _TOKENS[S.dtype] else S.dtype
    return [kept, kept, S.dtype]


def _count(name: str, x: object, most: int | None) -> int:
    """How many tokens there are numbers (B, H, n) of, more than the rule keeps refused."""
    count: int = x.shape[2] if isinstance(x, Tensor) and x.ndim == 3 else -1
    if count < 0 or (most is not None and count > most):
        _refuse(name, x, f"of shape (B, H, n{'' if most is None else f' ≤ {most}'})")
    return count


def _require(kind: type, name: str, x: object) -> None:
    """Refuse another kind of record."""
    if not isinstance(x, kind):
        _refuse(name, x, f"a {kind.__name__}")


def _compare(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuse the first tensor that has not its shape and dtype, or is on another device."""
    for x, shape, dtype, name in zip(tensors, shapes, dtypes, names, strict=True):
        if not isinstance(x, Tensor) or x.shape != shape or x.dtype != dtype or x.device != device:
            _refuse(name, x, f"{dtype} of shape {shape} on {device}")


def _refuse(name: str, x: object, wanted: str) -> NoReturn:
    """Say what was got, what was wanted and what to do."""
    if isinstance(x, Tensor):
        raise ValueError(
            f"the state's {name} must be {wanted}, got {x.dtype} of shape {tuple(x.shape)} on {x.device}; {_REMEDY}"
        )
    raise TypeError(f"the state's {name} must be {wanted}, got {type(x).__name__}; {_REMEDY}")
