"""Bases of caches whose layers hold one immutable state each, and take tokens back; letters as in hf/__init__.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from copy import copy, deepcopy
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils.import_utils import is_tracing

from linattn.attention import State
from linattn.hf._attention_modules import attention_modules
from linattn.hf._calls import AskedMask, InterfaceCall, by_token, refuse_again, surely_all
from linattn.kv_cache import MergedState
from linattn.nn import Stream
from linattn.softmax.row_groups import RowGroups

S = TypeVar("S", State, Stream, MergedState)
CacheKind = TypeVar("CacheKind", bound=Cache)
# What the number and the sizes of a cache's layers follow from.
_SIZES = "num_hidden_layers", "decoder_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"
# The most tokens of a call that are recorded, where the exact window is not wider: guesses are fewer.
_RECORDED = 256


class StatefulLayer(CacheLayerMixin, Generic[S]):
    """One layer of a cache of states; the subclass says who gives it its state."""

    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: S | None = None  # of all tokens so far, immutable
        self.num_tokens = 0  # padding included

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        if self.state is None:
            return 0
        # Tensors may be those of groups of rows.
        first = pytree.tree_leaves(self.state, is_leaf=lambda part: isinstance(part, RowGroups))[0]
        return sum(map(len, first.rows)) if isinstance(first, RowGroups) else len(first)

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
        """Keep the given rows of the batch: numbers, counted from the end where they are negative, or a mask."""
        if self.state is not None:
            device = pytree.tree_leaves(self.state)[0].device
            self.state = self.state.select(torch.arange(self.num_rows, device=device)[indices.to(device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a sum does not say what it was before."""
        raise ValueError(
            f"a state cannot forget its last tokens, {tokens_to_remove} here; keep a fork of the cache from before"
        )


class RecordedCall(NamedTuple):
    """The tokens of a layer's call, and the state before them."""

    advance: Callable[..., Any]  # gives the output and the state after these tokens
    before: Any
    tensors: tuple[Tensor, Tensor, Tensor]  # query (B, H, L, D), key (B, Hkv, L, D), value (B, Hkv, L, Dv)
    scoring: dict[str, float]  # the scale, and a soft cap where there is one
    key_mask: Tensor | None  # (B, L)

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.tensors[1].shape[-2]

    def then(self, other: RecordedCall) -> RecordedCall:
        """The call of these tokens and of the next ones."""
        query, key, value = (torch.cat(pair, -2) for pair in zip(self.tensors, other.tensors, strict=True))
        hides_none = self.key_mask is None and other.key_mask is None
        mask = None if hides_none else torch.cat((self.shown(), other.shown()), 1)
        return self._replace(tensors=(query, key, value), key_mask=mask)

    def shown(self) -> Tensor:
        """Which keys are attended to, (B, L)."""
        key = self.tensors[1]
        return key.new_ones(len(key), self.num_tokens, dtype=torch.bool) if self.key_mask is None else self.key_mask

    def part(self, before: Any, start: int, stop: int) -> RecordedCall:
        """The call of some of the tokens, after a state."""
        query, key, value = (x[:, :, start:stop] for x in self.tensors)
        mask = None if self.key_mask is None else self.key_mask[:, start:stop]
        return self._replace(before=before, tensors=(query, key, value), key_mask=mask)

    def made(self, **sinks: Tensor | None) -> Any:
        """The output (B, H, L, Dv), and the state after the call."""
        return self.advance(*self.tensors, self.before, **self.scoring, key_mask=self.key_mask, **sinks)


Kernel = tuple[Callable[..., Any], int, Collection[str]]
"""Function that gives the output and the state after some tokens, the width of its exact window, and what it takes."""


class RecordingLayer(StatefulLayer[S]):
    """One layer of a cache of states, whose last calls `crop` can take back where they are recorded."""

    def __init__(self, module_name: str) -> None:
        super().__init__()
        self.module_name = module_name
        self.record_past = False  # whether calls are recorded
        self._calls: tuple[RecordedCall, ...] = ()  # the last ones, two at most, where they are recorded
        self._is_cropped = False  # since the last call
        self._last = -1  # position of the last token, of rows the least, where calls say positions
        self.handed: Tensor | None = None  # the new keys, between `update` and `attend`

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention module: the new keys and values."""
        self.handed = key_states
        if self.keys is None:
            # Some models look whether any are held (Mllama).
            self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        return key_states, value_states

    @abstractmethod
    def _kernel(self, call: InterfaceCall) -> Kernel:
        """Return what attends here; an error for a call of another module, or of other keys."""

    def attend(self, call: InterfaceCall) -> Tensor:
        """Called by linattn's attention function: (B, L, H, Dv) for queries of the keys given to `update`."""
        name, count = self.module_name, call.key.shape[-2]
        advance, window, takes = self._kernel(call)
        positions: Any = call.options.get("position_ids")  # read of several tokens alone: it waits for a device
        is_numbered = count > 1 and positions is not None and not is_tracing(positions)
        if self.num_tokens and is_numbered and surely_all(positions[..., 0] <= self._last):
            mask = call.mask.options.get("attention_mask") if isinstance(call.mask, AskedMask) else call.mask
            refuse_again(name, self.num_tokens, mask)
        key_mask, is_causal = call.read_mask(name, self.num_tokens + count, takes=takes)
        # A single query sees all keys, causal or not.
        if not is_causal and call.query.shape[-2] > 1:
            raise ValueError(
                f"{name} lets queries see later keys, which a cache of states does not hold; pass use_cache=False"
            )
        made = RecordedCall(advance, self.state, (call.query, call.key, call.value), call.scoring, key_mask)
        if self.record_past and (first := count - max(window, _RECORDED)) > 0:
            # Of a long call the last tokens alone are held, in memory of their own.
            early, state = made.part(self.state, 0, first).made(sinks=call.sinks)
            made = pytree.tree_map_only(Tensor, Tensor.clone, made.part(None, first, count))._replace(before=state)
        out, after = made.made(sinks=call.sinks)
        self.handed = None
        self.advance_to(after, count)
        self._last = int(positions[..., -1].min()) if is_numbered else self._last + (count == 1)
        # An assistant takes back all steps since the last crop at once.
        room, self._is_cropped = window if self._is_cropped else max(window, _RECORDED), False
        if not self.record_past:
            # Calls that were recorded before one that was not cannot be taken back.
            self._calls = ()
        elif self._calls and self._calls[-1].num_tokens + made.num_tokens <= room > made.num_tokens:
            # A part of the call before it, where there is room for both.
            self._calls = (*self._calls[:-1], self._calls[-1].then(made))
        else:
            self._calls = (*self._calls[-1:], made) if made.num_tokens < room else (made,)
        return by_token(out if made.num_tokens == count else torch.cat((early, out), 2))

    def activate_past_recording(self) -> None:
        """Hold the last tokens since a crop, and as many as the exact window is wide, which `crop` can take back."""
        self.record_past = self.is_croppable = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget more tokens than are recorded, or no whole number of them."""
        if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int) or tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be a negative integer, or 0, got {tokens_to_remove!r}")
        count, recorded = abs(tokens_to_remove), sum(call.num_tokens for call in self._calls)
        if self.state is not None and count > recorded:
            raise ValueError(
                f"a state cannot forget its last {count} tokens: {recorded} are recorded, those since the last crop, "
                f"of which {_RECORDED} at most, and as many as its exact window is wide, if activate_past_recording() "
                "was called on the cache before they came; call it, or keep a fork of the cache from before"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens: the state before recorded calls takes the others in again."""
        count, self._is_cropped = abs(tokens_to_remove), True
        if count == 0 or self.state is None:
            return
        self.check_crop(tokens_to_remove)
        self.num_tokens, self._last = self.num_tokens - count, self._last - count
        *calls, last = self._calls
        while count > last.num_tokens:
            count, last = count - last.num_tokens, calls.pop()
        last = last.part(last.before, 0, last.num_tokens - count)
        self._calls = (*calls, last)
        self.state = last.made().state if last.num_tokens else last.before

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch; no call can be taken back afterwards."""
        super().batch_select_indices(indices)
        self._calls = ()

    def reset(self) -> None:
        """Forget every token, and keys on their way."""
        super().reset()
        self._calls, self.handed, self._last = (), None, -1


class ForkedCache(Cache):
    """A cache that can be forked, and refuses a mask that changes its tokens."""

    _live: Tensor | None = None  # (B, n), the last call's mask

    @property
    def num_bytes(self) -> int:
        """Bytes that its layers hold: states, and the keys and values of layers that kept their softmax."""
        return cache_bytes(self)

    @property
    def max_cache_len(self) -> int:
        """No limit; PEFT's prefix tuning asks caches that are no DynamicCache."""
        return -1

    def fork(self) -> Self:
        """A cache that goes on from here by itself; recurrent layers alone are copied, the others share tensors."""
        return forked(self)

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Refuse a mask (B, n) that shows or hides other tokens of the state than those it was built from."""
        num_tokens = self.get_seq_length()
        # None hides no token, and columns that are missing hide theirs.
        masks = [x[:, :num_tokens].bool() for x in (attention_mask, self._live) if x is not None]
        shown = [pad(x, (0, num_tokens - x.shape[1])) for x in masks]
        if num_tokens and not (torch.equal(*shown) if len(shown) == 2 else all(bool(x.all()) for x in shown)):
            raise ValueError(
                f"the attention mask changes which of the {num_tokens} tokens in the cache are attended to, and a "
                "state cannot take a token out, or put one in, afterwards; give the mask of the earlier calls, "
                "with columns for the new tokens, or give the whole text to a new cache"
            )
        # Of its own: the caller's may change.
        self._live = None if attention_mask is None else attention_mask.clone()

    def check_rows(self, num_rows: int | None) -> None:
        """Refuse a call of more or fewer rows than those of the text; None where a call's are not known."""
        if num_rows is not None and len(rows := self._rows) not in (0, num_rows):
            raise ValueError(
                f"the cache holds {len(rows)} rows, the call has {num_rows}; choose among those of the cache by its "
                "batch_select_indices or batch_repeat_interleave, or give a new one"
            )

    @property
    def _rows(self) -> Any:
        """The numbers of the batch's rows; none before the first token."""
        return torch.arange(max([x.num_rows for x in self.layers if isinstance(x, StatefulLayer)] or [0]))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch: numbers, counted from the end where they are negative, or a mask."""
        if len(rows := self._rows):
            # All that a layer holds: layers that recur have no method but this, or one of their keys alone.
            self.reorder_cache(rows[indices.to(rows.device)])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the given rows of the batch, in that order."""
        super().reorder_cache(beam_idx)
        self._live = None if self._live is None else self._live[beam_idx.to(self._live.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self.reorder_cache(self._rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self._live = None


class TextCache(ForkedCache):
    """A cache some of whose layers hold states of a text, the others its keys and values."""

    def __init__(self, model: PreTrainedModel, replaced: Mapping[int, RecordingLayer[Any]]) -> None:
        self._sizes = _sizes(model.config)
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        # Assistants that leave a model early run its first layers alone.
        super().__init__(layers=[replaced.get(place, layer) for place, layer in enumerate(layers)])
        # Layers that hold the model's own text; others hold another one, or pictures (Mllama).
        self._own_places = {part.cache_place for part in attention_modules(model)}

    def check_call(self, config: Any, num_rows: int | None) -> None:
        """Refuse another model, by sizes of its configuration, other rows, if known, and layers of different tokens."""
        pairs = zip(_SIZES, self._sizes, self._sizes if config is None else _sizes(config), strict=True)
        if differing := [f"{name} {size}, this one's is {other}" for name, size, other in pairs if size != other]:
            raise ValueError(f"the cache was made for a model of {'; '.join(differing)}; make one for this model")
        self.check_rows(num_rows)
        layers = [layer for place, layer in enumerate(self.layers) if place in self._own_places]
        counts = [layer.get_seq_length() for layer in layers if isinstance(layer, StatefulLayer | DynamicLayer)]
        if any(count != counts[0] for count in counts):
            raise RuntimeError(
                f"the layers of the cache have seen different numbers of tokens ({', '.join(map(str, counts))}): a "
                "call was left between two layers, by an error; go on from a fork taken before that call, or call "
                "reset() on the cache and give the model the whole text again"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -tokens_to_remove of them, in all layers or, by an error, in none."""
        for layer in self.layers:
            if isinstance(layer, RecordingLayer):
                layer.check_crop(tokens_to_remove)
            if tokens_to_remove and isinstance(layer, LinearAttentionCacheLayerMixin) and not layer.is_croppable:
                raise ValueError("recurrent layers cannot forget tokens; keep a fork of the cache from before")
        count = abs(tokens_to_remove)
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                # Tokens behind which a window would not be full: transformers holds one window after a crop.
                held, left = DynamicLayer.get_seq_length(layer), layer.get_seq_length() - count
                if held - count < min(left, layer.sliding_window - 1):
                    raise ValueError(
                        f"a sliding window of {layer.sliding_window} tokens cannot forget {count} of the {held} that "
                        "it holds since the last crop; crop once between two calls, or keep a fork from before"
                    )
        super().crop(tokens_to_remove)


def _sizes(config: Any) -> tuple[Any, ...]:
    """The sizes of a text's decoder; a configuration of two stacks has its own names for them."""
    text = config if hasattr(config, "decoder_layers") else config.get_text_config(decoder=True)
    # Of layers that differ transformers refuses to say a size by its attribute.
    return tuple(vars(text)[name] if name in vars(text) else getattr(text, name, None) for name in _SIZES)


def forked(cache: CacheKind) -> CacheKind:
    """A cache that goes on from here by itself; recurrent layers alone are copied, the others share tensors."""
    fork = copy(cache)
    # These change their tensors in place.
    fork.layers = [(deepcopy if isinstance(x, LinearAttentionCacheLayerMixin) else copy)(x) for x in cache.layers]
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
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    leaves = pytree.tree_leaves([vars(layer) for layer in cache.layers])
    return sum({id(x): x.nbytes for x in leaves if isinstance(x, Tensor)}.values())
