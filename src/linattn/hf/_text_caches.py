"""Caches of states of a text: which tokens are shown, how many each layer has seen, and the last ones taken back.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n tokens, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from linattn.hf._cache_layers import ForkedCache, Selectable, StatefulLayer

S = TypeVar("S", bound=Selectable)


class RecordedCall(NamedTuple):
    """The tokens of a layer's call, and the state before them."""

    advance: Callable[..., Any]  # gives the output and the state after these tokens
    before: Any
    tensors: tuple[Tensor, Tensor, Tensor]  # query (B, H, L, D), key (B, Hkv, L, D), value (B, Hkv, L, Dv)
    scale: float
    key_mask: Tensor | None  # (B, L)

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.tensors[1].shape[-2]

    def then(self, other: RecordedCall) -> RecordedCall:
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

    def without(self, count: int) -> RecordedCall:
        """The call without its last tokens."""
        length = self.num_tokens - count
        query, key, value = (x[:, :, :length] for x in self.tensors)
        mask = None if self.key_mask is None else self.key_mask[:, :length]
        return self._replace(tensors=(query, key, value), key_mask=mask)

    def state(self) -> Any:
        """The state after the call."""
        if self.num_tokens == 0:
            return self.before
        return self.advance(*self.tensors, self.before, scale=self.scale, key_mask=self.key_mask).state


class RecordingLayer(StatefulLayer[S]):
    """One layer of a cache of states, whose last calls `crop` can take back where they are recorded.

    Attributes:
        record_past: whether calls are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record_past = False
        self._calls: tuple[RecordedCall, ...] = ()  # the last ones, two at most, where they are recorded

    def record(self, call: RecordedCall, window: int) -> None:
        """Hold a call beside the one before it, or as a part of that where a window of so many tokens holds both."""
        last = self._calls[-1] if self._calls else None
        if last is not None and last.num_tokens + call.num_tokens <= window:
            self._calls = (*self._calls[:-1], last.then(call))
        else:
            self._calls = (*self._calls[-1:], call) if call.num_tokens < window else (call,)

    def activate_past_recording(self) -> None:
        """Hold the last call's tokens, and as many as the exact window is wide, so that `crop` can take them back."""
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

        Raises ValueError if so many are not recorded (`activate_past_recording`).
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

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch; no call can be taken back afterwards."""
        super().batch_select_indices(indices)
        self._calls = ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch; no call can be taken back afterwards."""
        super().batch_repeat_interleave(repeats)
        self._calls = ()

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self._calls = ()


class TextCache(ForkedCache):
    """A cache some of whose layers hold states of a text, the others its keys and values.

    Args:
        layers: one per layer of the model.
        places: numbers of those that hold the model's own text; others hold another one, or pictures (Mllama).
    """

    def __init__(self, layers: Sequence[Any], places: Iterable[int | None]) -> None:
        super().__init__(layers=list(layers))
        self._own_places = set(places)
        self._live: Tensor | None = None  # (B, n), the last call's mask

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Refuse a mask (B, n) that shows or hides other tokens of the state than those it was built from."""
        num_tokens = self.get_seq_length()
        if num_tokens and not _alike(attention_mask, self._live, num_tokens):
            raise ValueError(
                f"the attention mask changes which of the {num_tokens} tokens in the cache are attended to, and a "
                "state cannot take a token out, or put one in, afterwards; give the mask of the earlier calls, "
                "with columns for the new tokens, or give the whole text to a new cache"
            )
        self._live = attention_mask

    def check_level(self) -> None:
        """Refuse a cache whose layers have seen different tokens: an error ended a call between two of them."""
        layers = [layer for place, layer in enumerate(self.layers) if place in self._own_places]
        counted = [layer for layer in layers if isinstance(layer, StatefulLayer | DynamicLayer)]
        counts = [layer.get_seq_length() for layer in counted]
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
