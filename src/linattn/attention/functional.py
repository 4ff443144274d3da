"""The op: check, choose a backend, call.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width, R features.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn.attention._check import check_map, checked, live_keys
from linattn.attention._check_state import check_continues
from linattn.attention.backends import Backend, Call, Rows, check_backend, choose
from linattn.attention.bound_map import bind, outside_autocast
from linattn.attention.exact import Exact, ExactKeys, attend_bidirectional, attend_causal, check_exact
from linattn.attention.far import relative_to
from linattn.attention.partial import Partial, as_partial
from linattn.attention.state import State
from linattn.attention.sums import Sums, accumulation_dtype, no_sums
from linattn.attention.without_map import checked_merging
from linattn.feature_maps import FeatureMap


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
    feature_map: FeatureMap | None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    exact: Exact | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with the kernel of a feature map, in linear time.

        out_i = Σ_j w_ij v_j / Σ_j w_ij = φ(q_i)ᵀS / φ(q_i)ᵀz,   w_ij = φ(q_i)·φ(k_j)·exp(b_j)

    Time O((Lq + Lk)·R·(D + Dv)) per head; memory beyond inputs and output O(R·Dv) per head and one block of features,
    forward and backward: features are recomputed, never stored for the whole sequence. Exponents, sums and the
    division run in at least float32, outside autocast. No epsilon enters; a row that sees no key is 0, and so is one
    whose features are all 0 (a rectifier without a floor). `Exact` says what an exact part adds.

    Args:
        query: (B, H, Lq, D), float16, bfloat16, float32 or float64, any strides. All three share one dtype; under
            autocast they may differ, and are taken in the widest.
        key: (B, H, Lk, D), or (B, Hkv, Lk, D) with `enable_gqa`.
        value: (B, H, Lk, Dv), or (B, Hkv, Lk, Dv) with `enable_gqa`.
        feature_map: the kernel; the temperature is the map's `scale`, there is none here. None where merged keys take
            its place (`Exact(num_merged=…)`), at the temperature D**-0.5.
        key_mask: (B, Lk) bool, True = attend. A masked key contributes nothing, whatever it holds, NaN and inf
            included, forward and backward. A query whose every key is masked gets 0.
        key_bias: (B, Hkv or 1, Lk), floating: b, the logarithm of a factor on each key's weight, exact keys included;
            -inf is a masked key, whatever it holds. A constant added to all of a head's changes no output.
            Differentiable.
        is_causal: query i sees keys j ≤ i + Lk - Lq: aligned bottom-right, as decoding needs. SDPA's flag aligns
            top-left, which differs when Lq ≠ Lk.
        enable_gqa: groups of H / Hkv consecutive query heads share a key/value head; one state per key/value head.
        exact: which keys are attended to by softmax, without the map: near ones, heavy ones or both, as
            `Exact(window=32, num_heavy=32)`; or near ones, and all others merged, without a map, as
            `Exact(window=128, num_merged=256)`. None: the map takes all keys.
        backend: "blocked" (plain torch, linear), "triton" (fused kernels on a CUDA GPU, not for float64 nor an
            `Expansion` of order 2), "compiled" (on a CPU and without gradients causal calls of one token of maps such
            as `FavorPlus`, and merged keys; from the wheel linattn-compiled), "reference" (quadratic, for checking) or
            "auto", which takes "triton" or "compiled" where they can run the call and are faster, else "blocked". A
            named backend runs or raises.

    Returns:
        (B, H, Lq, Dv) in the query's dtype.

    Raises:
        TypeError: `feature_map` is no FeatureMap instance; tensors are of another dtype or differ in theirs;
            `key_mask` is not bool.
        ValueError: shapes, devices, the map's width or heads do not fit; tensors are on the meta device; unknown
            `backend`, or one that cannot run the call, with every reason; a map that takes statistics from the call is
            used causally; an exact part beside a map that is not one for the softmax kernel with a positive normaliser;
            a window where queries and keys differ in number; merged keys beside a map or on the backend "triton" or
            "reference", or no map without them.

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
    tokens, weights = (query, key, value), (key_mask, key_bias)
    if feature_map is None:
        merging = checked_merging(tokens, weights, enable_gqa, exact, backend, is_causal=is_causal)
        return merging.read(with_log=False).out.flatten(1, 2)
    call, chosen = _checked(tokens, feature_map, weights, enable_gqa, exact, backend, is_causal=is_causal)
    return _attend(call, chosen, exact, None)[0].out.flatten(1, 2)


def linear_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    exact: Exact | None = None,
    backend: str = "auto",
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
    tokens, weights = (query, key, value), (key_mask, key_bias)
    if feature_map is None:
        merging = checked_merging(tokens, weights, enable_gqa, exact, backend, is_causal=is_causal)
        return merging.read(with_log=True).partial().ungrouped()
    call, chosen = _checked(tokens, feature_map, weights, enable_gqa, exact, backend, is_causal=is_causal)
    found, *_ = _attend(call, chosen, exact, None)
    return (found if isinstance(found, Partial) else as_partial(call, found)).ungrouped()


def linear_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | None,
    state: State | None = None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    exact: Exact | None = None,
    backend: str = "auto",
) -> Attended:
    """Causal attention over the state's keys and these, and the state after them.

        S_t = S_{t-1} + φ(k_t)v_tᵀ,   z_t = z_{t-1} + φ(k_t),   out_t = φ(q_t)ᵀS_t / φ(q_t)ᵀz_t

    Prefill, chunks and single tokens are the same call, cut anywhere. Cost as `linear_attention`, whatever the state
    has seen. Later tokens never reach earlier outputs.

    Args:
        query, key, value: as in `linear_attention`; with Lq < Lk the queries are the last ones, with Lq > Lk the first
            Lq - Lk of them see the state alone.
        feature_map: the kernel; maps that take statistics from the call must be fitted first.
        state: what was seen before, from an earlier call or `State`; None is the empty one. It is not changed.
        key_mask, key_bias, enable_gqa, backend: as in `linear_attention`; masked keys do not enter the state.
        exact: as in `linear_attention`, the same for all calls of a stream, wherever it is cut: the state keeps the
            keys of the window's last two blocks, and the heavy ones.

    Returns:
        Attended(out, state): (B, H, Lq, Dv) in the query's dtype, and a new State.

    Raises:
        TypeError, ValueError: as `linear_attention`; `state` is not a State, or was built with another map or draw, for
            other shapes, or with another exact part.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0], [8.0]))
        >>> first = linear_attention_with_state(q, k, v, relu)
        >>> linear_attention_with_state(q, 3 * k, v / 2, relu, first.state).out.item()
        5.0

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """
    tokens, weights = (query, key, value), (key_mask, key_bias)
    if feature_map is None:
        merging = checked_merging(tokens, weights, enable_gqa, exact, backend, is_causal=True)
        _check_state(state, None, merging.key, merging.value, exact, merging.query.shape[2])
        state, bias, apart = _relative(state, merging.bias, merging.key)
        rows, merged = merging._replace(bias=bias).advance(state)
        after = merging.state_of(merged, apart)
        return Attended(rows.out.flatten(1, 2), after.known_to_fit((merging.key.shape[-1], merging.query.shape[2])))
    call, chosen = _checked(tokens, feature_map, weights, enable_gqa, exact, backend, is_causal=True)
    _check_state(state, feature_map, call.key, call.value, exact, call.query.shape[2])
    state, bias, apart = _relative(state, call.bias, call.key)
    found, sums, kept = _attend(call._replace(bias=bias), chosen, exact, state)
    built_with = feature_map.fingerprint() if state is None else state.built_with
    after = State(*sums, built_with, kept, apart).known_to_fit((call.key.shape[-1], call.query.shape[2]))
    return Attended(found.out.flatten(1, 2), after)


def _relative(
    state: State | None, bias: Tensor | None, key: Tensor
) -> tuple[State | None, Tensor | None, Tensor | None]:
    """A state and the biases of keys after it, relative to the factor that the state has apart, if any."""
    if state is None or state.apart is None:
        return state, bias, None
    return relative_to(state, bias, key.shape[2])


def _check_state(
    state: State | None,
    feature_map: FeatureMap | None,
    key: Tensor,
    value: Tensor,
    exact: Exact | None,
    num_groups: int,  # query heads of a key/value head
) -> None:
    """Refuse what is no state, and one of another stream."""
    if state is None:
        return
    if not isinstance(state, State):
        raise TypeError(f"state must be a linattn.State or None, got {type(state).__name__}")
    state.check_built_with(feature_map)
    check_continues(state, key, value, feature_map, exact, num_groups)


def _checked(
    tokens: tuple[Tensor, Tensor, Tensor],
    feature_map: FeatureMap,
    weights: tuple[Tensor | None, Tensor | None],  # mask and bias of the keys
    enable_gqa: bool,
    exact: Exact | None,
    backend: str,
    *,
    is_causal: bool,
) -> tuple[Call, Backend]:
    """The call and what runs it, wrong input refused."""
    check_map(feature_map)
    query, key, value, bias = checked(tokens, feature_map, *weights, enable_gqa=enable_gqa)
    if exact is not None:
        check_exact(exact, feature_map, query, key, is_causal=is_causal)
    check_backend(backend)
    bound = bind(feature_map, query, key, live_keys(*weights), is_causal=is_causal)
    call = Call(bound, query.unflatten(1, (key.shape[1], -1)), key, value, bias, is_causal)
    return call, choose(backend, call)


def _attend(
    call: Call, backend: Backend, exact: Exact | None, state: State | None
) -> tuple[Rows | Partial, Sums, ExactKeys | None]:
    """Rows (B, Hkv, G, Lq, ·) over the state's keys and these, the sums after them, and a stream's exact keys."""
    key, value = call.key, call.value
    with outside_autocast(key.device):
        if state is None:
            sizes = key.shape[0], key.shape[1], value.shape[-1]
            before = no_sums(call.bound.feature_map, *sizes, accumulation_dtype(key.dtype), key.device)
        else:
            before = state.sums
        if exact is None:
            return *backend.attend(call, before), None
        if not call.is_causal:
            return attend_bidirectional(call, backend, exact, before), before, None
        kept = None if state is None else state.exact
        # A state that keeps merged keys has no map, and was refused.
        assert kept is None or isinstance(kept, ExactKeys)
        return attend_causal(call, backend, before, kept or ExactKeys.empty(exact, key, value))
