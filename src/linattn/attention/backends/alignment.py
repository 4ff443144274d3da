"""Attention by folds that take as many queries as keys: the other tokens are absorbed or read apart."""

from __future__ import annotations

from collections.abc import Callable

import torch

from linattn.attention.backends.backend import Backend, Call, Rows
from linattn.attention.sums import Sums


def attend_aligned(
    backend: Backend, call: Call, before: Sums, fold: Callable[[Call, Sums], tuple[Rows, Sums]]
) -> tuple[Rows, Sums]:
    """Absorb, then read; or, causally, the fold of the last tokens that are both queries and keys.

    Aligned bottom-right: keys before the first query are absorbed, queries before the first key read what came before.
    """
    if not call.is_causal:
        after = backend.absorb(call, before)
        return backend.read(call, after), after
    extra = call.key.shape[2] - call.query.shape[3]
    if extra > 0:
        before, call = backend.absorb(call.with_keys(slice(extra)), before), call.with_keys(slice(extra, None))
    if extra >= 0:
        return fold(call, before)
    late, after = fold(call._replace(query=call.query[..., -extra:, :]), before)
    early = backend.read(call._replace(query=call.query[..., :-extra, :]), before)
    return Rows(*(torch.cat(parts, 3) for parts in zip(early, late, strict=True))), after
