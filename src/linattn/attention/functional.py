"""The op: check, choose a backend, call.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width, R features.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from linattn.attention import _blocked, _reference
from linattn.attention._check import (
    check_exact_part,
    check_key_mask,
    check_map,
    check_tensors,
    in_one_dtype,
    per_head,
)
from linattn.attention._exact import ExactKeys, Far, Stream, attend_bidirectional, attend_causal
from linattn.attention._own import own_tensors
from linattn.attention.partial import Partial, as_partial
from linattn.attention.state import State, check_built_with, check_exact_keys
from linattn.feature_maps import FeatureMap

Backend = Literal["auto", "blocked", "reference"]
_BACKENDS = {"auto": _blocked.attend, "blocked": _blocked.attend, "reference": _reference.attend}


class Attended(NamedTuple):
    """What `linear_attention_with_state` returns.

    Attributes:
        out: (B, H, Lq, Dv), in the query's dtype.
        state: the state after the last key.
    """

    out: Tensor
    state: State


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    window: int | None = None,
    num_heavy: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Attention with the kernel of a feature map, in linear time.

        out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) = φ(q_i)ᵀS / φ(q_i)ᵀz

    Time O((Lq + Lk)·R·(D + Dv)) per head; memory beyond inputs and output O(R·Dv) per head and one block of features,
    forward and backward: features are recomputed, never stored for the whole sequence. Exponents, sums and the
    division run in at least float32, outside autocast. No epsilon enters; a row that sees no key is 0, and so is one
    whose features are all 0 (a rectifier without a floor). An exact part adds O(L·(3·window + num_heavy)·(D + Dv))
    time; with a window on both sides the map's part is two folds.

    Args:
        query: (B, H, Lq, D), float16, bfloat16, float32 or float64, any strides. All three share one dtype; under
            autocast they may differ, and are taken in the widest.
        key: (B, H, Lk, D), or (B, Hkv, Lk, D) with `enable_gqa`.
        value: (B, H, Lk, Dv), or (B, Hkv, Lk, Dv) with `enable_gqa`.
        feature_map: the kernel; the temperature is the map's `scale`, there is none here.
        key_mask: (B, Lk) bool, True = attend. A masked key contributes nothing, whatever it holds, NaN and inf
            included, forward and backward. A query whose every key is masked gets 0.
        is_causal: query i sees keys j ≤ i + Lk - Lq: aligned bottom-right, as decoding needs. SDPA's flag aligns
            top-left, which differs when Lq ≠ Lk.
        enable_gqa: groups of H / Hkv consecutive query heads share a key/value head; one state per key/value head.
        window: exact softmax attention, without the map, between blocks of so many tokens, a power of two: a query sees
            its own block and both neighbours, causally its own up to itself and the one before. None for no window.
        num_heavy: exact softmax attention on so many keys, those of the largest estimated column mass; causally, with
            a window, those of the largest score so far (`attention/_exact/causal.py` has the rule).
        backend: "blocked" (plain torch, linear), "reference" (quadratic, for checking) or "auto", which takes
            "blocked". A named backend runs or raises.

    Returns:
        (B, H, Lq, Dv) in the query's dtype.

    Raises:
        TypeError: `feature_map` is no FeatureMap instance; tensors are of another dtype or differ in theirs;
            `key_mask` is not bool.
        ValueError: shapes, devices, the map's width or heads do not fit; tensors are on the meta device; unknown
            `backend`; a map that takes statistics from the call is used causally; an exact part beside a map that is
            not one for the softmax kernel with a positive normaliser; a window where queries and keys differ in number.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0, 1.0], [1.0, 3.0], [8.0, 4.0]))
        >>> linear_attention(q, k, v, relu).flatten().tolist()
        [5.0, 5.0]
        >>> linear_attention(q, k, v, relu, is_causal=True).flatten().tolist()
        [8.0, 5.0]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 4-6; Choromanski et al. 2021 (arXiv 2009.14794),
        section 2.
    """
    call = _checked(query, key, value, feature_map, key_mask, enable_gqa, window, num_heavy, backend, is_causal)
    if call.is_plain:
        return call.attend(None)[0].flatten(1, 2)
    return call.attend_partly_exactly(None).partial.ungrouped().out


def linear_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    window: int | None = None,
    num_heavy: int = 0,
    backend: Backend = "auto",
) -> Partial:
    """`linear_attention` with its log-normaliser, to be combined with attention over other keys.

        log_normalizer_i = log Σ_j φ(q_i)·φ(k_j)

    Cost, arguments and errors are those of `linear_attention`.

    Returns:
        Partial(out, log_normalizer): (B, H, Lq, Dv) in the query's dtype and (B, H, Lq) in at least float32.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0, 3.0], [8.0, 4.0]))
        >>> round(linear_partial(q, k, v, relu).log_normalizer.exp().item(), 4)
        4.0
    """
    call = _checked(query, key, value, feature_map, key_mask, enable_gqa, window, num_heavy, backend, is_causal)
    if not call.is_plain:
        return call.attend_partly_exactly(None).partial.ungrouped()
    rows = call.attend(None)[:3]
    return as_partial(feature_map, call.own, call.grouped, *rows).ungrouped()


def linear_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    state: State | None = None,
    *,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    num_heavy: int = 0,
    backend: Backend = "auto",
) -> Attended:
    """Causal attention over the state's keys and these, and the state after them.

        S_t = S_{t-1} + φ(k_t)v_tᵀ,   z_t = z_{t-1} + φ(k_t),   out_t = φ(q_t)ᵀS_t / φ(q_t)ᵀz_t

    Prefill, chunks and single tokens are the same call, cut anywhere. Cost as `linear_attention`, whatever the state
    has seen. Later tokens never reach earlier outputs.

    Args:
        query: (B, H, Lq, D); with Lq < Lk the queries are the last ones, with Lq > Lk the first Lq - Lk of them see the
            state alone.
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        feature_map: the kernel; maps that take statistics from the call must be fitted first.
        state: what was seen before, from an earlier call or `State`; None is the empty one. It is not changed.
        key_mask: (B, Lk) bool, True = attend; masked keys do not enter the state.
        enable_gqa: groups of H / Hkv consecutive query heads share a key/value head.
        window: as in `linear_attention`, for the stream's own blocks, wherever it is cut: the state keeps the keys of
            the last one or two.
        num_heavy: as in `linear_attention`: the state keeps so many keys more.
        backend: as in `linear_attention`.

    Returns:
        Attended(out, state): (B, H, Lq, Dv) in the query's dtype, and a new State.

    Raises:
        TypeError: as `linear_attention`; `state` is not a State.
        ValueError: as `linear_attention`; the state was built with another map or draw, for other shapes, or with
            another exact part.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0], [8.0]))
        >>> first = linear_attention_with_state(q, k, v, relu)
        >>> linear_attention_with_state(q, 3 * k, v / 2, relu, first.state).out.item()
        5.0

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """
    call = _checked(query, key, value, feature_map, key_mask, enable_gqa, window, num_heavy, backend, True)
    key, value, fingerprint = call.key, call.value, feature_map.fingerprint()
    if state is not None:
        if not isinstance(state, State):
            raise TypeError(f"state must be a linattn.State or None, got {type(state).__name__}")
        check_built_with(state, fingerprint)
        state.check_fits(key, value)
        check_exact_keys(state.exact, window, num_heavy)
    if call.is_plain:
        out, _, _, moments = call.attend(state)
        return Attended(out.flatten(1, 2), State(*moments, fingerprint))
    found = call.attend_partly_exactly(state)
    return Attended(found.partial.ungrouped().out, State(*found.moments, fingerprint, found.exact))


class _Call(NamedTuple):
    """One call of attention, checked, its queries grouped by key/value head."""

    feature_map: FeatureMap
    own: dict[str, Tensor]
    grouped: Tensor  # (B, Hkv, G, Lq, D)
    key: Tensor
    value: Tensor
    mask: Tensor | None  # (B, 1, Lk)
    window: int
    num_heavy: int
    backend: Backend
    is_causal: bool

    @property
    def is_plain(self) -> bool:
        """Whether the map takes all keys."""
        return not (self.window or self.num_heavy)

    def before(self, state: State | None) -> _blocked.Moments:
        """The sums before the call."""
        if state is not None:
            return state.moments
        kept = _blocked.accumulation_dtype(self.key.dtype)
        batch, heads = self.key.shape[:2]
        return _blocked.no_moments(self.feature_map, batch, heads, self.value.shape[-1], kept, self.key.device)

    def attend(self, state: State | None) -> tuple[Tensor, Tensor, Tensor, _blocked.Moments]:
        """Output, denominator and its exponent by query group, and the sums after, by the map alone."""
        tensors = (self.grouped, self.key, self.value, self.mask, self.before(state))
        return _BACKENDS[self.backend](self.feature_map, self.own, *tensors, is_causal=self.is_causal)

    def attend_partly_exactly(self, state: State | None) -> Stream:
        """The same with exact keys."""
        far = Far(self.feature_map, self.own, _BACKENDS[self.backend])
        tokens, before = (self.grouped, self.key, self.value, self.mask), self.before(state)
        exact = None if state is None else state.exact
        if exact is None:
            exact = ExactKeys.empty(self.key, self.value, window=self.window, num_heavy=self.num_heavy)
        if self.is_causal:
            return attend_causal(far, *tokens, before, exact)
        found = attend_bidirectional(far, *tokens, before, window=self.window, num_heavy=self.num_heavy)
        return Stream(found, before, exact)


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    key_mask: Tensor | None,
    enable_gqa: bool,
    window: int | None,
    num_heavy: int,
    backend: Backend,
    is_causal: bool,
) -> _Call:
    """The call, wrong input refused."""
    check_map(feature_map)
    query, key, value = in_one_dtype(query, key, value)
    check_tensors(query, key, value, feature_map, enable_gqa=enable_gqa)
    check_key_mask(key_mask, key)
    check_exact_part(query, key, feature_map, window, num_heavy, is_causal=is_causal)
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
    own = own_tensors(feature_map, query, key, key_mask, is_causal=is_causal)
    grouped = query.unflatten(1, (key.shape[1], -1))
    mask = per_head(key_mask)
    return _Call(feature_map, own, grouped, key, value, mask, window or 0, num_heavy, backend, is_causal)
