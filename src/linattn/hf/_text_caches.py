"""Caches of states of a text: checks of which tokens are shown, and that all layers have seen equally many.

Letters: B batch, n tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from linattn.hf._cache_layers import ForkedCache, StatefulLayer
from linattn.hf._recorded_calls import RecordingLayer


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
