"""The cache of a `LinearLM` for transformers' generation: each block's stream."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from torch import Tensor

from linattn.hf._cache_layers import ForkedCache, StatefulLayer
from linattn.nn import Stream


class StreamLayer(StatefulLayer[Stream]):
    """One block's place in a `StreamCache`; its state is what the block keeps."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Refused: only a LinearLM's blocks know how to go on."""
        raise RuntimeError("a StreamCache serves a LinearLMForCausalLM; give another model a cache of its own")


class StreamCache(ForkedCache):
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
        held = [layer.state for layer in self._places if layer.state is not None]
        return held or None

    def advance(self, streams: tuple[Stream, ...], num_tokens: int) -> None:
        """The streams after so many more tokens."""
        for layer, stream in zip(self._places, streams, strict=True):
            layer.advance_to(stream, num_tokens)
