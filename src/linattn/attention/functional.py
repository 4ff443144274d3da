"""The op: check, choose a backend, call; letters as in attention/__init__.py."""

from __future__ import annotations

from torch import Tensor

from linattn.attention.backends import Call, Rows, check_backend, choose
from linattn.attention.backends.backend import as_partial
from linattn.attention.bound_map import bind
from linattn.attention.checking import check_continues, checked_for, live_keys
from linattn.attention.state import State
from linattn.attention.sums import Sums, no_sums, relative_to
from linattn.attention.window import WindowKeys, attend_with_window, check_window
from linattn.feature_maps import FeatureMap
from linattn.softmax.checking import KeyWeights, Qkv, refuse_sdpa_options
from linattn.softmax.partial import Attended, AttendedPartial, Partial
from linattn.softmax.precision import accumulation_dtype, outside_autocast
from linattn.softmax.row_groups import RowGroups

Options = tuple[bool, int | None, str]
"""Whether heads are grouped, the window, and the backend."""


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    window: int | None = None,
    backend: str = "auto",
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention with the kernel of a feature map, in linear time.

        out_i = Σ_j w_ij v_j / Σ_j w_ij = φ(q_i)ᵀS / φ(q_i)ᵀz,   w_ij = φ(q_i)·φ(k_j)·exp(b_j)

    Time O((Lq + Lk)·R·(D + Dv)) per head; memory beyond inputs and output O(R·Dv) per head and one block of features,
    forward and backward: features are recomputed, never stored for the whole sequence. Exponents, sums and the
    division run in at least float32, outside autocast. No epsilon enters; a row that sees no key is 0, and so is one
    whose features are all 0 (a rectifier without a floor).

    Args:
        query: (B, H, Lq, D), float16, bfloat16, float32 or float64, any strides. All three share one dtype; under
            autocast they may differ, and are taken in the widest.
        key: (B, H, Lk, D), or (B, Hkv, Lk, D) with `enable_gqa`.
        value: (B, H, Lk, Dv), or (B, Hkv, Lk, Dv) with `enable_gqa`.
        feature_map: the kernel; the temperature is the map's `scale`, there is none here.
        key_mask: (B, Lk) bool, True = attend. A masked key contributes nothing, whatever it holds, NaN and inf
            included, forward and backward. A query whose every key is masked gets 0.
        key_bias: (B, Hkv or 1, Lk), floating: b, the logarithm of a factor on each key's weight, near keys included;
            -inf is a masked key, whatever it holds; below -8e37 a weight is 0 in float32. A constant added to all of a
            head's changes no output. Differentiable.
        is_causal: query i sees keys j ≤ i + Lk - Lq: aligned bottom-right, as decoding needs. SDPA's flag aligns
            top-left, which differs when Lq ≠ Lk.
        enable_gqa: groups of H / Hkv consecutive query heads share a key/value head; one state per key/value head.
        window: w, a power of two: near keys are attended to by softmax and all others by the map. Tokens are cut into
            blocks of w; a query sees its own block and both neighbours exactly, causally its own up to itself and the
            one before. O(L·3·w·(D + Dv)) time more, and without causality the map's part twice. None for no window.
        backend: "blocked" (plain torch, linear, on any device), "compiled" (on a CPU and without gradients causal
            calls of one token, without a window, of maps such as `FavorPlus`; from linattn-compiled), "triton"
            (experimental fused kernels on a CUDA GPU, not for float64 nor `Expansion`; from linattn-triton),
            "reference" (quadratic, for checking) or "auto", which takes "compiled" where it can run the call and is
            faster, else "blocked". A named backend runs or raises.
        attn_mask, dropout_p: SDPA's; another value than its default is refused, with what to give in its place.

    Returns:
        (B, H, Lq, Dv) in the query's dtype.

    Raises:
        TypeError: `feature_map` is no FeatureMap instance; tensors are of another dtype or differ in theirs;
            `key_mask` is not bool.
        ValueError: shapes, devices, the map's width or heads do not fit; tensors are on the meta device; unknown
            `backend`, or one that cannot run the call, with every reason; a map that takes statistics from the call is
            used causally; a window beside a map that is not one for the softmax kernel with a positive normaliser;
            a window where queries and keys differ in number, causally where there are more queries.

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
    refuse_sdpa_options(attn_mask, dropout_p)
    weights, options = (key_mask, key_bias), (enable_gqa, window, backend)
    call = _checked((query, key, value), feature_map, weights, options, is_causal=is_causal)
    return _attend(call, options, None)[0].out.flatten(1, 2).to(call.value.dtype)


def linear_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    window: int | None = None,
    backend: str = "auto",
) -> Partial:
    """`linear_attention` with its log-normaliser, to be combined with attention over other keys.

        log_normalizer_i = log Σ_j φ(q_i)·φ(k_j)·exp(b_j)

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
    weights, options = (key_mask, key_bias), (enable_gqa, window, backend)
    call = _checked((query, key, value), feature_map, weights, options, is_causal=is_causal)
    rows, *_ = _attend(call := call.weighed(), options, None)
    return (rows if isinstance(rows, Partial) else as_partial(call, rows)).ungrouped(call.value.dtype)


def linear_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    state: State | None = None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    backend: str = "auto",
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Attended[State]:
    """Causal attention over the state's keys and these, and the state after them.

        S_t = S_{t-1} + φ(k_t)v_tᵀ,   z_t = z_{t-1} + φ(k_t),   out_t = φ(q_t)ᵀS_t / φ(q_t)ᵀz_t

    Prefill, chunks and single tokens are the same call, cut anywhere. Cost as `linear_attention`, whatever the state
    has seen. Later finite tokens never reach earlier outputs.

    Args:
        query, key, value: as in `linear_attention`; with Lq < Lk the queries are the last ones, with Lq > Lk the first
            Lq - Lk of them see the state alone.
        feature_map: the kernel; maps that take statistics from the call must be fitted first.
        state: what was seen before, from an earlier call or `State`; None is the empty one. It is not changed.
        key_mask, key_bias, enable_gqa, backend: as in `linear_attention`; masked keys do not enter the state.
        window: as in `linear_attention`, the same for all calls of a stream, wherever it is cut: the state keeps the
            keys of the window's last two blocks, in memory with space for one block more.
        attn_mask, dropout_p: SDPA's; another value than its default is refused, with what to give in its place.

    Returns:
        Attended(out, state): (B, H, Lq, Dv) in the query's dtype, and a new State.

    Raises:
        TypeError, ValueError: as `linear_attention`; `state` is not a State, or was built with another map or draw, for
            other shapes, or with another window.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0], [8.0]))
        >>> first = linear_attention_with_state(q, k, v, relu)
        >>> linear_attention_with_state(q, 3 * k, v / 2, relu, first.state).out.item()
        5.0

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """
    refuse_sdpa_options(attn_mask, dropout_p)
    weights, options = (key_mask, key_bias), (enable_gqa, window, backend)
    call, rows, after = _advance((query, key, value), feature_map, state, weights, options)
    return Attended(rows.out.flatten(1, 2).to(call.value.dtype), after)


def linear_partial_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    state: State | None = None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    backend: str = "auto",
) -> AttendedPartial[State]:
    """`linear_attention_with_state` with log-normalisers: over the state's keys and, causally, these.

        log_normalizer_t = log φ(q_t)ᵀz_t

    Where a call's tokens outweigh the state by more than e^4096 (float32), rows that see the state alone get that of a
    state e^4096 below those tokens. Cost, arguments and errors are those of `linear_attention_with_state`.

    Returns:
        AttendedPartial(partial, state): `linear_partial`'s result of the queries, and a new State.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0], [8.0]))
        >>> first = linear_partial_with_state(q, k, v, relu)
        >>> partial, _ = linear_partial_with_state(q, 3 * k, v / 2, relu, first.state)
        >>> partial.out.item(), round(partial.log_normalizer.exp().item(), 4)
        (5.0, 4.0)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """
    weights, options = (key_mask, key_bias), (enable_gqa, window, backend)
    call, rows, after = _advance((query, key, value), feature_map, state, weights, options)
    part = rows if isinstance(rows, Partial) else as_partial(call, rows)
    return AttendedPartial(part.times(after.apart).ungrouped(call.value.dtype), after)


def _advance(
    tokens: Qkv, feature_map: FeatureMap, state: State | None, weights: KeyWeights, options: Options
) -> tuple[Call, Rows | Partial, State]:
    """The call by a map, its rows (B, Hkv, G, Lq, ·) over the state's keys and these, and the state after them."""
    call, apart = _checked(tokens, feature_map, weights, options, is_causal=True), None
    if state is not None:
        if not isinstance(state, State):
            raise TypeError(f"state must be a linattn.State or None, got {type(state).__name__}")
        state.check_built_with(feature_map)
        check_continues(state, call.key, call.value, feature_map, options[1])
        state, bias, apart = relative_to(state, call.bias, call.key.shape[2])
        call = call._replace(bias=bias)
    rows, sums, window_keys = _attend(call := call.weighed(), options, state, is_stream=True)
    built_with = feature_map.fingerprint() if state is None else state.built_with
    after = State(*sums, built_with, window_keys, apart).known_to_fit(call.key.shape[-1])
    return call, rows, after


def _checked(tokens: Qkv, feature_map: FeatureMap, weights: KeyWeights, options: Options, *, is_causal: bool) -> Call:
    """The call, wrong input refused."""
    enable_gqa, window, backend = options
    query, key, value, bias = checked_for(feature_map, tokens, *weights, enable_gqa=enable_gqa)
    if window is not None:
        check_window(window, feature_map, query.shape[2], key.shape[2], is_causal=is_causal)
    check_backend(backend)
    bound, query, key = bind(feature_map, query, key, live_keys(bias), is_causal=is_causal)
    return Call(bound, query.unflatten(1, (key.shape[1], -1)), key, value, bias, is_causal)


def _attend(
    call: Call, options: Options, state: State | None, *, is_stream: bool = False
) -> tuple[Rows | Partial, Sums, WindowKeys | RowGroups[WindowKeys] | None]:
    """Rows (B, Hkv, G, Lq, ·) over the state's keys and these, the sums after them, and a window's keys."""
    key, value, (_, window, backend) = call.key, call.value, options
    with outside_autocast(key.device):
        sizes, dtype = (key.shape[0], key.shape[1], value.shape[-1]), accumulation_dtype(key.dtype)
        before = no_sums(call.bound.feature_map, *sizes, dtype, key.device) if state is None else state.sums
        chosen = choose(backend, call, before, window)
        if window is None:
            return *chosen.attend(call, before), None
        keys = None if state is None else state.window
        return attend_with_window(call.weighed(is_part=True), chosen, window, before, keys, is_stream=is_stream)
