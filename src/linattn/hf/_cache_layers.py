"""Base of the layers of both caches: each holds one immutable state, whose size transformers is not to know.

Letters: B batch.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from linattn.softmax.row_groups import RowGroups


class Selectable(Protocol):
    """A state, the first dimension of whose tensors is the batch: a `linattn.State`, or a `Stream`."""

    def select(self, indices: Tensor) -> Self:
        """The given rows of the batch, in that order."""
        ...


S = TypeVar("S", bound=Selectable)


class StatefulLayer(CacheLayerMixin, Generic[S]):
    """One layer of a cache of states; the subclass says who gives it its state.

    Attributes:
        state: of all tokens so far, immutable; None before the first.
        num_tokens: how many tokens it has seen, padding included.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: S | None = None
        self.num_tokens = 0

    def advance_to(self, state: S, num_tokens: int) -> None:
        """The state after so many more tokens."""
        self.state, self.num_tokens, self.is_initialized = state, self.num_tokens + num_tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first call makes the state."""

    def get_seq_length(self) -> int:
        """How many tokens have been seen."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The new keys alone, after all the others."""
        return query_length, self.num_tokens

    def reset(self) -> None:
        """Forget every token."""
        self.state, self.num_tokens, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the given rows of the batch, in that order."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch: numbers, or a mask."""
        if self.state is not None:
            rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            self.state = self.state.select(rows.to(_first(self.state).device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.state is not None:
            rows = torch.arange(_num_rows(self.state), device=_first(self.state).device)
            self.state = self.state.select(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a sum does not say what it was before."""
        raise ValueError(
            f"a state cannot forget its last tokens, {tokens_to_remove} of which are to go; keep a fork of the cache "
            "from before they came"
        )

    def offload(self) -> None:
        """Nothing: a state is smaller than what offloading is for."""

    def prefetch(self) -> None:
        """Nothing."""


class ForkedCache(Cache):
    """A cache none of whose layers changes its tensors in place."""

    @property
    def num_bytes(self) -> int:
        """Bytes that its layers hold: states, and the keys and values of layers that kept their softmax."""
        return cache_bytes(self)

    @property
    def max_cache_len(self) -> int:
        """No limit; PEFT's prefix tuning asks caches that are no DynamicCache."""
        return -1

    def fork(self) -> Self:
        """A cache that goes on from here by itself; nothing is copied, since no layer changes its tensors in place."""
        fork = copy(self)
        fork.layers = [copy(layer) for layer in self.layers]
        return fork


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors in the layers of a cache of transformers, or of linattn.

    Example:
        >>> from transformers import DynamicCache
        >>> cache = DynamicCache()
        >>> _ = cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
        >>> cache_bytes(cache)  # float32
        192
    """
    held = pytree.tree_leaves([vars(layer) for layer in cache.layers])
    return sum(x.nbytes for x in held if isinstance(x, Tensor))


def _first(state: Any) -> Tensor:
    """One of a state's tensors."""
    leaf: Tensor = pytree.tree_leaves(state)[0]
    return leaf


def _num_rows(state: Any) -> int:
    """B of a state, whose tensors may be those of groups of rows."""
    first = pytree.tree_leaves(state, is_leaf=lambda part: isinstance(part, RowGroups))[0]
    return sum(map(len, first.rows)) if isinstance(first, RowGroups) else len(first)
