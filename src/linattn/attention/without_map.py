"""The op without a feature map: near keys as they are, all others merged.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn.attention._check import checked
from linattn.attention.backends import check_backend
from linattn.attention.bound_map import outside_autocast
from linattn.attention.exact import (
    Exact,
    MergedKeys,
    Merging,
    Reading,
    attend_all_merging,
    attend_causal_merging,
    check_exact,
)
from linattn.attention.state import NO_MAP, State
from linattn.attention.sums import accumulation_dtype

# What reads merged keys.
_BACKENDS = ("auto", "blocked", "compiled")


class MergedCall(NamedTuple):
    """One call with merged keys: checked, queries grouped by key/value head."""

    query: Tensor  # (B, Hkv, G, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    bias: Tensor | None  # (B, Hkv or 1, Lk), -inf for masked keys
    exact: Exact
    is_causal: bool
    backend: str  # "auto", "blocked" or "compiled"

    def read(self, *, with_log: bool) -> Reading:
        """Rows (B, Hkv, G, Lq, ·) over these keys, and their log-normalisers if wanted."""
        if self.is_causal:
            return self.advance(None, with_log=with_log).rows
        with outside_autocast(self.key.device):
            return attend_all_merging(*self[:5], self.query.shape[-1] ** -0.5, with_log=with_log, backend=self.backend)

    def advance(self, state: State | None, *, with_log: bool = False) -> Merging:
        """The causal rows over the state's keys and these, and the keys after all."""
        kept = MergedKeys.empty(self.exact, self.key, self.value) if state is None else state.exact
        assert isinstance(kept, MergedKeys)
        with outside_autocast(self.key.device):
            return attend_causal_merging(
                *self[:4], kept, self.query.shape[-1] ** -0.5, with_log=with_log, backend=self.backend
            )

    def state_of(self, kept: MergedKeys, apart: Tensor | None) -> State:
        """The state of a stream that has no sums; a factor may stand apart."""
        dtype = accumulation_dtype(self.key.dtype)
        S = self.key.new_zeros(*self.key.shape[:2], 0, self.value.shape[-1], dtype=dtype)
        return State(S, S.new_zeros(S.shape[:3]), S.new_zeros(*S.shape[:2], 1), NO_MAP, kept, apart)


def checked_merging(
    tokens: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],  # mask and bias of the keys
    enable_gqa: bool,
    exact: Exact | None,
    backend: str,
    *,
    is_causal: bool,
) -> MergedCall:
    """The call, wrong input refused."""
    query, key, value, bias = checked(tokens, None, *weights, enable_gqa=enable_gqa)
    if exact is None:
        raise TypeError(
            "feature_map is None and so is exact: a map, as Expansion, or merged keys must take the keys; give "
            "exact=Exact(window=128, num_merged=256) for merged ones"
        )
    check_exact(exact, None, query, key, is_causal=is_causal)
    check_backend(backend)
    if backend not in _BACKENDS:
        raise ValueError(
            f"merged keys are read by plain torch or by compiled code, got backend={backend!r}; give one of "
            f"{', '.join(map(repr, _BACKENDS))}"
        )
    return MergedCall(query.unflatten(1, (key.shape[1], -1)), key, value, bias, exact, is_causal, backend)
