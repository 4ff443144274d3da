"""Layers of caches that hold states, streams or bounded keys in constant memory, and the caches of the first two.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width, R features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel

from linattn.attention import State
from linattn.hf._attention_modules import attention_modules
from linattn.hf._cache_layers import ForkedCache, Kernel, RecordingLayer, StatefulLayer, TextCache
from linattn.hf._calls import InterfaceCall
from linattn.hf.layer_attention import ATTRIBUTE, attention_of, rescale_query
from linattn.kv_cache import MergedAttended, MergedState, merged_attention_with_state, merged_partial_with_state
from linattn.kv_cache.config import MergedKV
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

    layers: Any  # of one kind, `StreamLayer`

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[StreamLayer() for _ in range(num_layers)])

    @property
    def streams(self) -> list[Stream] | None:
        """Each block's stream; None before the first token."""
        return [layer.state for layer in self.layers if layer.state is not None] or None

    def advance(self, streams: tuple[Stream, ...], num_tokens: int) -> None:
        """The streams after so many more tokens."""
        for layer, stream in zip(self.layers, streams, strict=True):
            layer.advance_to(stream, num_tokens)


class StateLayer(RecordingLayer[State]):
    """One layer of a `StateCache`: the state of all tokens so far.

    transformers' attention modules give a cache their new keys and values and attend to what `update` returns: the new
    ones alone, which the attention function then gives to `attend`, with the queries. A module that does not would
    attend to the new tokens only: `expect`, called before the module runs, and `settle`, after, make that an error.

    Attributes:
        module_name: qualified name of the attention module it serves.
        state: a `linattn.State`; None before the first token.
        num_tokens: how many tokens it has seen, padding included.
    """

    _is_expected = False

    def expect(self) -> None:
        """The module is about to run, and its attention function will be told of this layer."""
        self._is_expected = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention module: the new keys and values, as they came, or an error if it may not call."""
        if self.handed is not None:
            raise RuntimeError(
                f"the cache's layer of {self.module_name} was left in the middle of a call, by an error; reset the "
                "cache or go on from a fork taken before"
            )
        if not self._is_expected:
            raise RuntimeError(
                f"the cache holds the state of {self.module_name} as linearize_ left it, and another model, or the "
                "same after restore_, called it; give that model a cache of its own"
            )
        return super().update(key_states, value_states)

    def _kernel(self, call: InterfaceCall) -> Kernel:
        """Return the attention that `linearize_` put into the module."""
        attention = attention_of(call.module)
        assert attention is not None
        return attention.advance, attention.window or 0, attention.takes_sinks

    def settle(self) -> None:
        """The module has run: an error if its keys never came back."""
        self._is_expected = False
        if self.handed is not None:
            raise RuntimeError(
                f"{self.module_name} gave its keys to a cache of states and attended without it, by another attention "
                "function than linearize_'s; call restore_ on the model, or set its attention implementation back"
            )

    def reset(self) -> None:
        """Forget every token, and a call that an error ended."""
        super().reset()
        self._is_expected = False


class HandedKeys(Tensor):
    """New keys on their way from a bounded layer to linattn's attention function, which alone can read them."""

    layer: BoundedLayer  # that they come from, whose state is to take them in
    key: Tensor  # the keys themselves, (B, Hkv, L, D)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Shapes and the like as of any tensor; an error for all else, as earlier keys are missing here."""
        if function in _SHOWN:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise RuntimeError(
            "the keys that a BoundedCache returned were read before linattn's attention function had them: the model "
            "attends by another implementation, or it changes its keys after its cache has them; call "
            "model.set_attn_implementation('linattn') and go on from a fork of the cache, or leave the cache out"
        )


# What a model may look at on the way.
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad")
_SHOWN = frozenset({Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)})


class BoundedLayer(RecordingLayer[MergedState]):
    """One layer of a `BoundedCache`: the latest keys and values, and merged ones of all before.

    Attributes:
        module_name: qualified name of the attention module it serves.
        config: the window and the merged keys.
        state: a `linattn.kv_cache.MergedState`; None before the first token.
        num_tokens: how many tokens it has seen, padding included.
    """

    def __init__(self, module_name: str, config: MergedKV) -> None:
        super().__init__(module_name)
        self.config = config

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention module: the new keys, with this layer, and values."""
        handed = super().update(key_states, value_states)[0].as_subclass(HandedKeys)
        handed.key, handed.layer = key_states, self
        return handed, value_states

    def _advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: MergedState | None,
        *,
        scale: float,
        key_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> MergedAttended:
        """The output (B, H, L, Dv) over a state's keys and these, at a temperature, and the state after them."""
        tokens = rescale_query(None, query, scale), key, value, self.config, state
        if sinks is None:
            return merged_attention_with_state(*tokens, key_mask=key_mask, enable_gqa=True)
        rows, after = merged_partial_with_state(*tokens, key_mask=key_mask, enable_gqa=True)
        return MergedAttended(rows.with_sink(sinks), after)

    def _kernel(self, call: InterfaceCall) -> Kernel:
        """Merged attention; refuse keys that were handed to another call, and modules that are no causal ones."""
        if self.handed is not call.key:
            raise RuntimeError(
                f"{self.module_name} attends twice to the keys that its cache returned once, which would take them in "
                "twice; leave the bounded cache out"
            )
        if not getattr(call.module, "is_causal", False):
            raise ValueError(
                f"{type(call.module).__name__} is not causal and was given the cache of {self.module_name}; give an "
                "encoder-decoder it for its self-attention: EncoderDecoderCache(BoundedCache(model), DynamicCache())"
            )
        if hasattr(call.module, ATTRIBUTE):
            raise RuntimeError(
                f"{self.module_name} attends by a feature map since linearize_, and the cache bounds its softmax; "
                "call restore_ on the model, or leave the cache out"
            )
        return self._advance, self.config.window or 0, True


class StateCache(TextCache):
    """The cache of a linearized model: constant in the number of tokens where a feature map took the softmax's place.

        S = Σ φ(k)vᵀ,   z = Σ φ(k):   Hkv·R·(Dv + 1) numbers per row and layer, instead of Hkv·L·(D + Dv)

    Layers that kept their softmax have their keys and values in it. `generate` of a linearized model makes one by
    itself. To continue a text, give the same cache again; to try several continuations, continue from `fork`. A call
    that ends by an error leaves it between two tokens, and the next call refuses it: go on from a fork.

    An encoder-decoder takes it for its self-attention: `EncoderDecoderCache(StateCache(model), DynamicCache())`. A pass
    that records gradients keeps the graph alive through the states. Whisper's `generate` with return_dict_in_generate
    takes the keys of its cache apart, of which there are none here: pass it an ordinary cache.

    Args:
        model: a linearized model; the cache serves it and copies of it.

    Raises:
        ValueError: if no causal layer of the model attends by a feature map.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from linattn.hf import linearize_
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=2, n_head=2)).eval()
        >>> _ = linearize_(model, method="EluPlusOne", layers=[0])
        >>> cache = StateCache(model)
        >>> _ = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> tuple(cache.layers[0].state.S.shape), tuple(cache.layers[1].keys.shape)
        ((1, 2, 2, 2), (1, 2, 3, 2))
        >>> cache.num_bytes == 4 * (8 + 4 + 2) + 4 * (12 + 12)  # float32: S, z and m; keys and values
        True
        >>> fork = cache.fork()
        >>> _ = model(input_ids=torch.tensor([[4]]), past_key_values=fork)
        >>> cache.get_seq_length(), fork.get_seq_length()
        (3, 4)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; transformers' documentation, "Caching".
    """

    def __init__(self, model: PreTrainedModel) -> None:
        linear = [part for part in attention_modules(model) if attention_of(part.module) is not None]
        names = {part.cache_place: part.name for part in linear if part.cache_place is not None}
        if not names:
            raise ValueError(
                f"no causal layer of {type(model).__name__} attends by a feature map; linearize_ it, or drop the cache"
            )
        super().__init__(model, {place: StateLayer(name) for place, name in names.items()})


class EncoderDecoderStates(EncoderDecoderCache):
    """A cache of an encoder-decoder whose own text is in states, the last call of which can be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -tokens_to_remove of them, as `StateLayer.crop` does."""
        self.self_attention_cache.crop(tokens_to_remove)
