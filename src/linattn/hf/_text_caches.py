"""Caches some of whose layers hold states: forks, crops and checks of all layers; letters as in hf/__init__.py."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)

from linattn.hf._attention_modules import attention_modules
from linattn.hf._cache_layers import RECORDED, RecordingLayer, StatefulLayer
from linattn.hf._calls import refuse_again, surely_all

CacheKind = TypeVar("CacheKind", bound=Cache)
# What the number and the sizes of a cache's layers follow from.
_SIZES = "num_hidden_layers", "decoder_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"


class ForkedCache(Cache):
    """A cache that can be forked, and refuses a mask that changes its tokens."""

    _live: Tensor | None = None  # (B, n), the last call's mask
    _ran: frozenset[int] = frozenset()  # recurrent layers that the last call reached
    is_from_file = False  # whether it is, and no model that looks at its calls has had it

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
        held = [len(x.keys) for x in self.layers if isinstance(x, DynamicLayer) and x.keys is not None]
        counts = [x.num_rows for x in self.layers if isinstance(x, StatefulLayer)]
        return torch.arange(max(counts or held or [0]))

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
        """Forget every token, and a call that was left."""
        super().reset()
        self._live, self._ran = None, frozenset()


class TextCache(ForkedCache):
    """A cache some of whose layers hold states of a text, the others its keys and values."""

    def __init__(self, model: PreTrainedModel, replaced: Mapping[int, RecordingLayer[Any]]) -> None:
        self._sizes = _sizes(model.config)
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        # Assistants that leave a model early run its first layers alone.
        super().__init__(layers=[replaced.get(place, layer) for place, layer in enumerate(layers)])
        # Layers that hold the model's own text; others hold another one, or pictures (Mllama).
        self._own_places = {part.cache_place for part in attention_modules(model)}
        # Where Phi 3 begins to rotate by other frequencies, and `generate` drops a cache that is true.
        self._original: int | None = getattr(model.config, "original_max_position_embeddings", None)
        self._limit = self._original if is_switched(model) else None
        self._recurrent = {n for n, x in enumerate(layers) if isinstance(x, LinearAttentionCacheLayerMixin)}
        self._started = 0  # tokens before the last call

    def __bool__(self) -> bool:
        """False for Phi 3, whose `generate` would put another cache in its place; True else."""
        return self._original is None

    def check_positions(self, name: str, length: int, places: Tensor | None, mask: object) -> None:
        """Refuse positions (…, B, L), None for the next ones, that are taken, and keys of another rotation."""
        count = self.get_seq_length()
        if places is not None and places.shape[-1]:
            self.check_rows(len(places) if places.ndim == 2 and len(places) > 1 else None)
            live = mask if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > count else self._live
            # Those of pictures count fewer than tokens.
            least = 1 if places.ndim > 2 else count if live is None else live[:, :count].sum(-1)
            if surely_all(places[..., 0] < least):
                refuse_again(name, count, live)
        if (limit := self._limit) and count <= limit <= (count + length - 1 if places is None else int(places.amax())):
            raise ValueError(
                f"the cache holds {count} keys rotated for texts of up to {limit:,} tokens, and longer ones are "
                f"rotated by other frequencies (longrope): generate up to {limit:,} tokens, or give the whole text so "
                "far to a new cache"
            )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Called by a recurrent layer before it changes anything, which is noted."""
        self._ran |= {layer_idx}
        return super().get_conv_state(layer_idx, state_idx)

    def check_call(self, config: Any, num_rows: int | None) -> None:
        """Refuse another model, by sizes of its configuration, other rows, if known, and layers of different tokens."""
        pairs = zip(_SIZES, self._sizes, self._sizes if config is None else _sizes(config), strict=True)
        if differing := [f"{name} {size}, this one's is {other}" for name, size, other in pairs if size != other]:
            raise ValueError(f"the cache was made for a model of {'; '.join(differing)}; make one for this model")
        self.check_rows(num_rows)
        layers = [layer for place, layer in enumerate(self.layers) if place in self._own_places]
        counts = [layer.get_seq_length() for layer in layers if isinstance(layer, StatefulLayer | DynamicLayer)]
        is_left = bool(self._ran) and (self._ran != self._recurrent or self._started in counts)
        if is_left or any(count != counts[0] for count in counts):
            raise RuntimeError(
                f"the layers of the cache have seen different numbers of tokens ({', '.join(map(str, counts))}): a "
                "call was left between two layers, by an error; go on from a fork taken before that call, or call "
                "reset() on the cache and give the model the whole text again"
            )
        if self._recurrent:
            self._started, self._ran = counts[0], frozenset()
        for layer in self.layers:
            # What is recorded since the last crop is bounded there too.
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past and layer.keys is not None:
                first = -(layer.sliding_window - 1 + RECORDED)
                layer.keys, layer.values = (x[:, :, first:] for x in (layer.keys, layer.values) if x is not None)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -tokens_to_remove of them, in all layers or, by an error, in none."""
        for layer in self.layers:
            if isinstance(layer, RecordingLayer):
                layer.check_crop(tokens_to_remove)
            if tokens_to_remove and isinstance(layer, LinearAttentionCacheLayerMixin) and not layer.is_croppable:
                raise ValueError("recurrent layers cannot forget tokens; keep a fork of the cache from before")
        count = abs(tokens_to_remove)
        for layer in self.layers:
            # What a window, or a convolution, holds since the last crop: transformers holds one width after that.
            states, kernels = (getattr(layer, name, {}) for name in ("conv_states", "conv_kernel_size"))
            held = [(x.shape[-1], kernels[n]) for n, x in states.items() if x is not None]
            if isinstance(layer, DynamicSlidingWindowLayer):
                held.append((DynamicLayer.get_seq_length(layer), layer.sliding_window))
            for number, width in held:
                if number - count < min(self.get_seq_length() - count, width - 1):
                    raise ValueError(
                        f"a window of {width} tokens cannot forget {count} of the {number} that it holds since the "
                        "last crop; crop once between two calls, or keep a fork from before"
                    )
        self._started -= count
        super().crop(tokens_to_remove)


def _sizes(config: Any) -> tuple[Any, ...]:
    """The sizes of a text's decoder; a configuration of two stacks has its own names for them."""
    text = config if hasattr(config, "decoder_layers") else config.get_text_config(decoder=True)
    # Of layers that differ transformers refuses to say a size by its attribute.
    return tuple(vars(text)[name] if name in vars(text) else getattr(text, name, None) for name in _SIZES)


def is_switched(model: PreTrainedModel) -> bool:
    """Whether a model rotates its keys by frequencies that follow from how long a text is."""
    rotation = str(getattr(model.config.get_text_config(decoder=True), "rope_parameters", None))
    return any(repr(kind) in rotation for kind in ("longrope", "dynamic"))


def forked(cache: CacheKind) -> CacheKind:
    """A cache that goes on from here by itself; recurrent layers alone are copied, the others share tensors."""
    fork = object.__new__(type(cache))
    vars(fork).update(vars(cache), layers=[copy(layer) for layer in cache.layers])
    for layer in fork.layers:
        # These change their tensors in place.
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            vars(layer).update(pytree.tree_map_only(Tensor, Tensor.clone, vars(layer)))
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
