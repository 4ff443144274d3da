"""Bases of caches whose layers hold one immutable state each, and take tokens back; letters as in hf/__init__.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.import_utils import is_tracing

from linattn.attention import State
from linattn.hf._calls import AskedMask, InterfaceCall, by_token, refuse_again, surely_all
from linattn.kv_cache import MergedState
from linattn.nn import Stream
from linattn.nn.streams import shown
from linattn.softmax.row_groups import RowGroups

S = TypeVar("S", State, Stream, MergedState)
# The most tokens of a call that are recorded, where the exact window is not wider: guesses are fewer.
RECORDED = 256


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
        mask = None if hides_none else torch.cat([shown(call.tensors[1], call.key_mask) for call in (self, other)], 1)
        return self._replace(tensors=(query, key, value), key_mask=mask)

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
        if self.record_past and (first := count - max(window, RECORDED)) > 0:
            # Of a long call the last tokens alone are held, in memory of their own.
            early, state = made.part(self.state, 0, first).made(sinks=call.sinks)
            made = pytree.tree_map_only(Tensor, Tensor.clone, made.part(None, first, count))._replace(before=state)
        out, after = made.made(sinks=call.sinks)
        self.handed = None
        self.advance_to(after, count)
        self._last = int(positions[..., -1].min()) if is_numbered else self._last + (count == 1)
        # An assistant takes back all steps since the last crop at once.
        room, self._is_cropped = window if self._is_cropped else max(window, RECORDED), False
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
                f"of which {RECORDED} at most, and as many as its exact window is wide, if activate_past_recording() "
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
