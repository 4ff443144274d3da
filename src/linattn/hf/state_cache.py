"""Generation in constant memory: a transformers cache whose layers hold states instead of keys and values.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width, R features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from linattn.hf._attention_modules import attention_modules
from linattn.hf._cache_layers import ForkedCache, StatefulLayer
from linattn.hf._calls import InterfaceCall
from linattn.hf.layer_attention import LayerAttention, LayerState, attention_of


class StateLayer(StatefulLayer[LayerState]):
    """One layer of a `StateCache`: the state of all tokens so far.

    transformers' attention modules give a cache their new keys and values and attend to what `update` returns: the new
    ones alone, which the attention function then gives to `advance`, with the queries. A module that does not would
    attend to the new tokens only: `expect`, called before the module runs, and `settle`, after, make that an error.

    Attributes:
        module_name: qualified name of the attention module it serves.
        state: a `LayerState`; None before the first token.
        num_tokens: how many tokens it has seen, padding included.
    """

    def __init__(self, module_name: str) -> None:
        super().__init__()
        self.module_name = module_name
        self.record_past = False
        self._calls: tuple[_LayerCall, ...] = ()  # the last ones, two at most, where they are recorded
        self._is_expected = False
        self._is_pending = False

    def expect(self) -> None:
        """The module is about to run, and its attention function will be told of this layer."""
        self._is_expected = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention module: the new keys and values, as they came, or an error if it may not call."""
        if self._is_pending:
            raise RuntimeError(
                f"the cache's layer of {self.module_name} was left in the middle of a call, by an error; reset the "
                "cache or go on from a fork taken before"
            )
        if not self._is_expected:
            raise RuntimeError(
                f"the cache holds the state of {self.module_name} as linearize_ left it, and another model, or the "
                "same after restore_, called it; give that model a cache of its own"
            )
        self._is_pending = True
        if self.keys is None:
            # Some models look whether any are held (Mllama).
            self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        return key_states, value_states

    def advance(self, attention: LayerAttention, call: InterfaceCall, key_mask: Tensor | None) -> Tensor:
        """Called by the attention function: the output (B, H, L, Dv) for queries of the keys given to `update`."""
        tensors, before = (call.query, call.key, call.value), self.state
        out, state = attention.advance(*tensors, before, scale=call.scale, key_mask=key_mask)
        self.advance_to(state, call.key.shape[-2])
        if self.record_past:
            self._record(_LayerCall(attention, before, tensors, call.scale, key_mask))
        self._is_pending = False
        return out

    def activate_past_recording(self) -> None:
        """Hold the tokens of the last calls, and the state before them, so that `crop` can take tokens back.

        Those of the last call, and as many as the exact window is wide.
        """
        self.record_past = self.is_croppable = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget more tokens than are recorded."""
        count, recorded = abs(tokens_to_remove), sum(call.num_tokens for call in self._calls)
        if self.state is not None and count > recorded:
            raise ValueError(
                f"a state cannot forget its last {count} tokens: {recorded} are recorded, those of the last call and "
                "as many as its exact window is wide, if activate_past_recording() was called on the cache before they "
                "came; call it, or keep a fork of the cache from before"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -tokens_to_remove of them: the state before recorded calls takes the others in again.

        Raises:
            ValueError: if so many are not recorded (`activate_past_recording`).
        """
        count = abs(tokens_to_remove)
        if count == 0 or self.state is None:
            return
        self.check_crop(count)
        self.num_tokens -= count
        calls = list(self._calls)
        while count > calls[-1].num_tokens:
            count -= calls.pop().num_tokens
        self._calls = (*calls[:-1], calls[-1].without(count))
        self.state = self._calls[-1].state()

    def _record(self, call: _LayerCall) -> None:
        """Hold a call beside the one before it, or as a part of that where a window holds both."""
        window = max((rule.window or 0 for rule in call.attention.rules), default=0)
        last = self._calls[-1] if self._calls else None
        if last is not None and last.num_tokens + call.num_tokens <= window:
            self._calls = (*self._calls[:-1], last.then(call))
        else:
            self._calls = (*self._calls[-1:], call) if call.num_tokens < window else (call,)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch; no call can be taken back afterwards."""
        super().batch_select_indices(indices)
        self._calls = ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch; no call can be taken back afterwards."""
        super().batch_repeat_interleave(repeats)
        self._calls = ()

    def settle(self) -> None:
        """The module has run: an error if its keys never came back."""
        self._is_expected = False
        if self._is_pending:
            raise RuntimeError(
                f"{self.module_name} gave its keys to a cache of states and attended without it, by another attention "
                "function than linearize_'s; call restore_ on the model, or set its attention implementation back"
            )

    def reset(self) -> None:
        """Forget every token, and a call that an error ended."""
        super().reset()
        self._is_expected = self._is_pending = False
        self._calls = ()


class _LayerCall(NamedTuple):
    """The tokens of a layer's call, and the state before them."""

    attention: LayerAttention
    before: LayerState | None
    tensors: tuple[Tensor, Tensor, Tensor]  # query (B, H, L, D), key (B, Hkv, L, D), value (B, Hkv, L, Dv)
    scale: float
    key_mask: Tensor | None  # (B, L)

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.tensors[1].shape[-2]

    def then(self, other: _LayerCall) -> _LayerCall:
        """The call of these tokens and of the next ones."""
        query, key, value = (torch.cat(pair, -2) for pair in zip(self.tensors, other.tensors, strict=True))
        mask = None
        if self.key_mask is not None or other.key_mask is not None:
            mask = torch.cat((self.shown(), other.shown()), 1)
        return self._replace(tensors=(query, key, value), key_mask=mask)

    def shown(self) -> Tensor:
        """Which keys are attended to, (B, L)."""
        key = self.tensors[1]
        return key.new_ones(len(key), self.num_tokens, dtype=torch.bool) if self.key_mask is None else self.key_mask

    def without(self, count: int) -> _LayerCall:
        """The call without its last tokens."""
        length = self.num_tokens - count
        query, key, value = (x[:, :, :length] for x in self.tensors)
        mask = None if self.key_mask is None else self.key_mask[:, :length]
        return self._replace(tensors=(query, key, value), key_mask=mask)

    def state(self) -> LayerState | None:
        """The state after the call."""
        if self.num_tokens == 0:
            return self.before
        return self.attention.advance(*self.tensors, self.before, scale=self.scale, key_mask=self.key_mask).state


class StateCache(ForkedCache):
    """The cache of a linearized model: constant in the number of tokens where a feature map took the softmax's place.

        S = Σ φ(k)vᵀ,   z = Σ φ(k):   Hkv·R·(Dv + 1) numbers per row and layer, instead of Hkv·L·(D + Dv)

    Layers that kept their softmax have their keys and values in it, as in an ordinary cache, and so have the exact
    heads of layers that attend by a plan. `generate` of a linearized model makes one by itself. To continue a text,
    give the same cache again; to try several continuations, or take one back, continue from `fork`, and keep the cache.
    A call that ends by an error leaves it between two tokens, and the next call refuses it: go on from a fork.

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
        >>> _ = linearize_(model, feature_map="EluPlusOne", layers=[0])
        >>> cache = StateCache(model)
        >>> _ = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> tuple(cache.layers[0].state.parts["all heads"].S.shape), tuple(cache.layers[1].keys.shape)
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
        modules = list(attention_modules(model))
        linear = [found for found in modules if attention_of(found.module) is not None]
        names = {found.cache_place: found.name for found in linear if found.cache_place is not None}
        if not names:
            raise ValueError(
                f"no causal layer of {type(model).__name__} attends by a feature map; call linearize_ on it first, or "
                "use an ordinary cache"
            )
        layers: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        for number, name in names.items():
            layers[number] = StateLayer(name)
        super().__init__(layers=layers)
        # Others hold another text, or pictures (Mllama).
        self._own_places = {found.cache_place for found in modules}
        self._live: Tensor | None = None  # (B, n), the last call's mask

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Refuse a mask that shows or hides other tokens of the state than those it was built from.

        Args:
            attention_mask: (B, n) of 1 and 0, or None, as a call gives it; columns beyond the tokens so far are those
                of the call.
        """
        num_tokens = self.get_seq_length()
        if num_tokens and not _alike(attention_mask, self._live, num_tokens):
            raise ValueError(
                f"the attention mask changes which of the {num_tokens} tokens in the cache are attended to, and a "
                "state cannot take a token out, or put one in, afterwards; give the mask of the earlier calls, "
                "with columns for the new tokens, or give the whole text to a new cache"
            )
        self._live = attention_mask

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -tokens_to_remove of them, in all layers or, by an error, in none."""
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch."""
        super().batch_select_indices(indices)
        self._live = None if self._live is None else self._live[indices.to(self._live.device)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the given rows of the batch, in that order."""
        super().reorder_cache(beam_idx)
        self._live = None if self._live is None else self._live[beam_idx.to(self._live.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        super().batch_repeat_interleave(repeats)
        self._live = None if self._live is None else self._live.repeat_interleave(repeats, 0)

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self._live = None

    def check_level(self) -> None:
        """Refuse a cache whose layers have seen different tokens: an error ended a call between two of them."""
        own = [layer for place, layer in enumerate(self.layers) if place in self._own_places]
        counted = [layer for layer in own if isinstance(layer, StateLayer | DynamicLayer)]
        counts = [layer.get_seq_length() for layer in counted]
        if any(count != counts[0] for count in counts):
            raise RuntimeError(
                f"the layers of the cache have seen different numbers of tokens ({', '.join(map(str, counts))}): a "
                "call was left between two layers, by an error; go on from a fork taken before that call, or call "
                "reset() on the cache and give the model the whole text again"
            )


class EncoderDecoderStates(EncoderDecoderCache):
    """A cache of an encoder-decoder whose own text is in states, the last call of which can be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -tokens_to_remove of them, as `StateLayer.crop` does."""
        self.self_attention_cache.crop(tokens_to_remove)


def _alike(mask: Tensor | None, other: Tensor | None, num_tokens: int) -> bool:
    """True if two masks (B, n) show the same of the first tokens; None hides none, columns that are missing all."""
    if mask is None and other is None:
        return True
    shown = [
        None if x is None else pad(x[:, :num_tokens].bool(), (0, max(num_tokens - x.shape[1], 0)))
        for x in (mask, other)
    ]
    if shown[0] is None or shown[1] is None:
        return all(bool(x.all()) for x in shown if x is not None)
    return torch.equal(shown[0], shown[1])
