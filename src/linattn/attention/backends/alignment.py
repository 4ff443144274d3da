"""Causal attention by folds that take as many queries as keys: the other tokens are absorbed or read apart."""

from __future__ import annotations

from typing import Protocol

import torch

from linattn.attention.backends.backend import Backend, Call, Rows
from linattn.attention.sums import Sums


class Folding(Backend, Protocol):
    """A backend with a causal fold."""

    def fold(self, call: Call, before: Sums, span: int) -> tuple[Rows, Sums]:
        """Causal rows of as many queries as keys, and the sums after them."""
        ...


def attend_aligned(backend: Folding, call: Call, before: Sums, span: int) -> tuple[Rows, Sums]:
    """Causal rows where queries and keys differ in number, and the sums after them.

    Aligned bottom-right: keys before the first query are absorbed, queries before the first key read what came before.
    """
    extra = call.key.shape[2] - call.query.shape[3]
    if extra > 0:
        before = backend.absorb(call.with_keys(slice(extra)), before)
        return backend.fold(call.with_keys(slice(extra, None)), before, span)
    late, after = backend.fold(call._replace(query=call.query[..., -extra:, :]), before, span)
    early = backend.read(call._replace(query=call.query[..., :-extra, :]), before)
    return Rows(*(torch.cat(parts, 3) for parts in zip(early, late, strict=True))), after
