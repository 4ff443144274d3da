"""Merged attention: softmax over a window of exact keys and merged keys for all others.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width, C merged keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from linattn.kv_cache.bidirectional import attend_all_merging
from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.keys import MergedKeys
from linattn.kv_cache.state import MergedState
from linattn.kv_cache.state_checks import check_continues
from linattn.kv_cache.stream import Kept, attend_causal_merging, attend_live_tokens
from linattn.softmax.attention import Reading, Scoring, attend_to_all
from linattn.softmax.checking import KeyWeights, Qkv, check_soft_cap, checked, refuse_sdpa_options
from linattn.softmax.partial import Attended, AttendedPartial, Partial
from linattn.softmax.precision import outside_autocast
from linattn.softmax.row_groups import Streamed
from linattn.softmax.tracing import outside_inference

BACKENDS = ("auto", "torch", "compiled")
Options = tuple[bool, float | None, str]
"""Whether heads are grouped, the soft cap, and the backend."""


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MergedKV,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    soft_cap: float | None = None,
    backend: str = "auto",
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Softmax attention to a window of exact keys, and to merged keys in place of all others, in linear time.

        out_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = exp(cap(q_i·k_j/√D) + β_j)   over exact and merged keys j

    where cap(x) is x, or c·tanh(x / c) with a soft cap c.

    Time O((Lq + Lk)·(w + C)·(D + Dv)) per head, causally with the merges that `MergedKV` counts; memory beyond inputs
    and output that of the state and of one block of logits. Exponents, sums and the division run in at least float32,
    outside autocast. A query that sees no key gets 0.

    Args:
        query: (B, H, Lq, D), float16, bfloat16, float32 or float64, any strides. All three share one dtype; under
            autocast they may differ, and are taken in the widest. The temperature is D**-0.5: scale queries for others.
        key: (B, H, Lk, D), or (B, Hkv, Lk, D) with `enable_gqa`.
        value: (B, H, Lk, Dv), or (B, Hkv, Lk, Dv) with `enable_gqa`.
        config: the window, the number of merged keys, and their bits.
        key_mask: (B, Lk) bool, True = attend. A masked key contributes nothing, whatever it holds, and takes part in no
            choice, forward and backward. Rows of masked tokens mean nothing, and depend on where calls are cut. Of as
            many queries as keys, a call that is not causal samples those that are not masked.
        key_bias: (B, Hkv or 1, Lk), floating, differentiable: the logarithm of a factor on a key's weight; -inf masks.
        is_causal: query i sees keys j ≤ i + Lk - Lq: aligned bottom-right. SDPA's flag aligns top-left.
        enable_gqa: groups of H / Hkv consecutive query heads share a key/value head; one cache per key/value head.
        soft_cap: c > 0, which bounds logits softly before biases and masks are added, as Gemma 2 does; None for none.
        backend: "torch", "compiled" (on a CPU, without gradients and caps, in at most float32; from the wheel
            linattn-compiled) or "auto", which takes "compiled" where it can run the call and is faster, else "torch". A
            named backend runs or raises.
        attn_mask, dropout_p: SDPA's; another value than its default is refused, with what to give in its place.

    Returns:
        (B, H, Lq, Dv) in the query's dtype.

    Raises:
        TypeError: `config` is no MergedKV; tensors are of another dtype or differ in theirs; `key_mask` is not bool.
        ValueError: shapes or devices do not fit; a causal call without a window; a window where queries and keys differ
            in number, causally where there are more queries; tiers alone without causality; `soft_cap` is no finite
            number > 0; unknown `backend`, or one that cannot run the call, with every reason.

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), torch.tensor([8.0, 4, 2, 2]).view(1, 1, 4, 1)
        >>> out = merged_attention(q, k, v, MergedKV(window=None, num_merged=1))
        >>> out.flatten().tolist()  # all keys are alike: one stands for four
        [4.0, 4.0, 4.0, 4.0]
    """
    refuse_sdpa_options(attn_mask, dropout_p)
    weights, options = (key_mask, key_bias), (enable_gqa, soft_cap, backend)
    tokens = _checked((query, key, value), config, weights, options, is_causal=is_causal)
    return _rows(tokens, config, with_log=False, backend=backend).out.flatten(1, 2)


def merged_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MergedKV,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    soft_cap: float | None = None,
    backend: str = "auto",
) -> Partial:
    """`merged_attention` with its log-normaliser, to be combined with attention over other keys.

        log_normalizer_i = log Σ_j exp(cap(q_i·k_j/√D) + β_j)

    Cost, arguments and errors are those of `merged_attention`.

    Returns:
        Partial(out, log_normalizer): (B, H, Lq, Dv) in the query's dtype and (B, H, Lq) in at least float32.

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), torch.ones(1, 1, 4, 1)
        >>> part = merged_partial(q, k, v, MergedKV(window=None, num_merged=1))
        >>> round(part.log_normalizer.exp()[0, 0, 0].item(), 4)
        4.0
    """
    weights, options = (key_mask, key_bias), (enable_gqa, soft_cap, backend)
    tokens = _checked((query, key, value), config, weights, options, is_causal=is_causal)
    return _rows(tokens, config, with_log=True, backend=backend).partial().ungrouped()


def merged_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MergedKV,
    state: MergedState | None = None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    soft_cap: float | None = None,
    backend: str = "auto",
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Attended[MergedState]:
    """Causal merged attention over the state's tokens and these, and the state after them.

    Prefill, chunks and single tokens are the same call, cut anywhere. Cost as `merged_attention`, whatever the state
    has seen. Later tokens, if finite, never reach earlier outputs.

    Args:
        query, key, value: as in `merged_attention`; with Lq < Lk the queries are the last ones.
        config, soft_cap: the same for all calls of a stream. The state holds the config, and refuses another one; it
            needs no cap and holds none, so that another cap is not noticed.
        state: the tokens before, from an earlier call; None for none. It is not changed.
        key_mask, key_bias, enable_gqa, backend: as in `merged_attention`; masked keys do not enter the state.
        attn_mask, dropout_p: SDPA's; another value than its default is refused, with what to give in its place.

    Returns:
        Attended(out, state): (B, H, Lq, Dv) in the query's dtype, and a new `MergedState`.

    Raises:
        TypeError, ValueError: as `merged_attention`; `state` is no MergedState, or of other shapes or another config.

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), torch.tensor([8.0, 4, 2, 2]).view(1, 1, 4, 1)
        >>> config, tokens = MergedKV(window=1, num_merged=1, bits=None), list(zip(*(x.split(1, 2) for x in (q, k, v))))
        >>> state = None
        >>> for token in tokens:
        ...     out, state = merged_attention_with_state(*token, config, state)
        >>> out.item()
        4.0
    """
    refuse_sdpa_options(attn_mask, dropout_p)
    tokens, keys = _begun((query, key, value), config, state, (key_mask, key_bias), (enable_gqa, soft_cap, backend))
    rows, after = _continued(tokens, keys, config, with_log=False, backend=backend)
    return Attended(rows.out.flatten(1, 2), _state(after, tokens))


def merged_partial_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MergedKV,
    state: MergedState | None = None,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    soft_cap: float | None = None,
    backend: str = "auto",
) -> AttendedPartial[MergedState]:
    """`merged_attention_with_state` with log-normalisers: for attention sinks, or to be combined.

    Cost, arguments and errors are those of `merged_attention_with_state`.

    Returns:
        AttendedPartial(partial, state): the result of `merged_partial` for the queries, and a new `MergedState`.

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), torch.ones(1, 1, 4, 1)
        >>> partial, state = merged_partial_with_state(q, k, v, MergedKV(window=1, num_merged=1, bits=None))
        >>> [round(x, 4) for x in partial.log_normalizer.exp().flatten().tolist()]  # keys that each query sees
        [1.0, 2.0, 3.0, 4.0]
    """
    tokens, keys = _begun((query, key, value), config, state, (key_mask, key_bias), (enable_gqa, soft_cap, backend))
    rows, after = _continued(tokens, keys, config, with_log=True, backend=backend)
    return AttendedPartial(rows.partial().ungrouped(), _state(after, tokens))


class _GroupedTokens(NamedTuple):
    """Checked tokens, queries grouped by key/value head."""

    query: Tensor  # (B, Hkv, G, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    bias: Tensor | None  # (B, Hkv or 1, Lk), -inf for masked keys
    is_causal: bool
    soft_cap: float | None

    @property
    def scoring(self) -> Scoring:
        """The temperature and the cap."""
        return Scoring(self.query.shape[-1] ** -0.5, self.soft_cap)


def _rows(tokens: _GroupedTokens, config: MergedKV, *, with_log: bool, backend: str) -> Reading:
    """Rows of whole texts."""
    if tokens.is_causal:
        return _continued(tokens, None, config, with_log=with_log, backend=backend, is_stream=False)[0]
    with outside_autocast(tokens.query.device):
        return attend_all_merging(*tokens[:4], config, tokens.scoring, with_log=with_log, backend=backend)


def _continued(
    tokens: _GroupedTokens, keys: Kept | None, config: MergedKV, *, with_log: bool, backend: str, is_stream: bool = True
) -> tuple[Reading, Kept]:
    """Causal rows whose blocks are counted from each row's first live token, and what is kept after all keys."""

    def attend(call: _GroupedTokens, sums: Sequence[Tensor], before: MergedKeys) -> Streamed[MergedKeys]:
        """Rows that begin at the same token."""
        rows, after = attend_causal_merging(*call[:4], before, call.scoring, with_log=with_log, backend=backend)
        return Streamed(*rows, sums, after)

    def read(call: _GroupedTokens, held: MergedKeys) -> Reading:
        """Rows over what is kept alone."""
        part = attend_to_all(call.query, held.tokens(), *call.scoring)
        return Reading(part.out.to(call.query.dtype), part.log_normalizer if with_log else None)

    nothing = partial(MergedKeys.empty, config, tokens.key, tokens.value)
    with outside_autocast(tokens.query.device):
        out, log, _, after = attend_live_tokens(tokens, keys, nothing, attend, read, is_stream=is_stream)
    return Reading(out, log), after


def _state(keys: Kept, tokens: _GroupedTokens) -> MergedState:
    """The state of what is kept after some tokens."""
    return MergedState(keys).known_to_fit((tokens.query.shape[-1], tokens.query.shape[2]))


def _begun(
    tokens: Qkv, config: MergedKV, state: MergedState | None, weights: KeyWeights, options: Options
) -> tuple[_GroupedTokens, Kept | None]:
    """The tokens of a call and what is kept of those before, wrong input refused."""
    grouped = _checked(tokens, config, weights, options, is_causal=True)
    if state is None:
        return grouped, None
    if not isinstance(state, MergedState):
        raise TypeError(f"state must be a linattn.MergedState or None, got {type(state).__name__}")
    sizes = state.checked_sizes(grouped.key.shape[-1], grouped.query.shape[2])
    check_continues(sizes, state.config, grouped.key, grouped.value, config)
    is_free = all(x is outside_inference(x) for x in [group.recent.key for group in state.groups])
    return grouped, state.keys if is_free else state.keys.each(outside_inference)


def _checked(
    tokens: Qkv, config: MergedKV, weights: KeyWeights, options: Options, *, is_causal: bool
) -> _GroupedTokens:
    """The tokens of a call, wrong input refused."""
    enable_gqa, soft_cap, backend = options
    query, key, value, bias = checked(tokens, *weights, enable_gqa=enable_gqa)
    if not isinstance(config, MergedKV):
        raise TypeError(
            f"config must be a linattn.MergedKV, got {config!r}; write MergedKV(window=64, num_merged=512), or read a "
            "written form with MergedKV.parse"
        )
    config.check_call(query.shape[2], key.shape[2], is_causal=is_causal)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return _GroupedTokens(query.unflatten(1, (key.shape[1], -1)), key, value, bias, is_causal, check_soft_cap(soft_cap))
