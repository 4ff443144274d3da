"""The cache of a `LinearLM` for transformers' generation: each block's stream.

Letters: B batch, L tokens.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from linattn.nn import Stream


class StreamLayer(CacheLayerMixin):
    """One block's place in a `StreamCache`.

    Attributes:
        stream: what the block keeps; None before the first token.
        num_tokens: how many tokens it has seen, padding included.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.stream: Stream | None = None
        self.num_tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Refused: only a LinearLM's blocks know how to go on."""
        raise RuntimeError("a StreamCache serves a LinearLMForCausalLM; give another model a cache of its own")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first call makes the stream."""

    def get_seq_length(self) -> int:
        """How many tokens have been seen."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A block takes its new tokens alone, after all the others."""
        return query_length, self.num_tokens

    def reset(self) -> None:
        """Forget every token."""
        self.stream, self.num_tokens, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the given rows of the batch, in that order."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch: numbers, or a mask."""
        if self.stream is not None:
            rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            self.stream = self.stream.select(rows.to(self.stream.num_tokens.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.stream is not None:
            rows = torch.arange(len(self.stream.num_tokens), device=self.stream.num_tokens.device)
            self.stream = self.stream.select(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: a sum does not say what it was before."""
        raise ValueError(
            f"a stream cannot forget its last tokens, {tokens_to_remove} of which are to go; go on from a fork of the "
            "cache taken before they came"
        )

    def offload(self) -> None:
        """Nothing: a state is smaller than what offloading is for."""

    def prefetch(self) -> None:
        """Nothing."""


class StreamCache(Cache):
    """The cache of a `LinearLMForCausalLM`: each block's stream, of constant size where it is linear.

    `generate` makes one by itself; make one to hold on to it. Give it again to go on with a text, and a `fork` of it to
    try several continuations. A call that ends by an error leaves it as it was.

    Args:
        num_layers: how many blocks the model has.

    Example:
        >>> import torch
        >>> from linattn.hf import LinearLMConfig, LinearLMForCausalLM
        >>> model = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=2)).eval()
        >>> cache = StreamCache(2)
        >>> _ = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> held, fork = cache.num_bytes, cache.fork()
        >>> _ = model(input_ids=torch.tensor([[4]]), past_key_values=fork)
        >>> cache.get_seq_length(), fork.get_seq_length(), fork.num_bytes == held
        (3, 4, True)
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[StreamLayer() for _ in range(num_layers)])

    @property
    def _places(self) -> list[StreamLayer]:
        """The layers, all of one kind."""
        return cast("list[StreamLayer]", self.layers)

    @property
    def streams(self) -> list[Stream] | None:
        """Each block's stream; None before the first token."""
        held = [layer.stream for layer in self._places if layer.stream is not None]
        return held or None

    def advance(self, streams: tuple[Stream, ...], num_tokens: int) -> None:
        """The streams after so many more tokens."""
        for layer, stream in zip(self._places, streams, strict=True):
            layer.stream, layer.num_tokens, layer.is_initialized = stream, layer.num_tokens + num_tokens, True

    @property
    def num_bytes(self) -> int:
        """What its streams hold, in bytes."""
        return sum(x.nbytes for x in pytree.tree_leaves(self.streams) if x is not None)

    def fork(self) -> StreamCache:
        """A cache that goes on from here by itself; nothing is copied, since streams are immutable."""
        fork = copy(self)
        fork.layers = [copy(layer) for layer in self.layers]
        return fork
