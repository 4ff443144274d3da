"""The map's part: attention over all keys that are not exact; letters as in _exact/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention._blocked import Moments
from linattn.attention.partial import Partial, as_partial
from linattn.feature_maps import FeatureMap

# Tokens turned round at once where later keys are folded in from the end.
_SEGMENT = 4096


class Far(NamedTuple):
    """A map, its tensors for this call, and the backend that folds.

    Attributes:
        feature_map: the kernel.
        own: the map's tensors for the call.
        backend: a backend's `attend`.
    """

    feature_map: FeatureMap
    own: Mapping[str, Tensor]
    backend: Callable[..., tuple[Tensor, Tensor, Tensor, Moments]]

    def all_keys(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, before: Moments) -> Partial:
        """Queries (B, H, G, Lq, D) over the state and all keys (B, H, Lk, D) where `mask` (B, H or 1, Lk) is True."""
        rows = self.backend(self.feature_map, self.own, query, key, value, mask, before, is_causal=False)
        return self._partial(query, rows)

    def absorb(self, key: Tensor, value: Tensor, mask: Tensor | None, before: Moments) -> Moments:
        """The moments after these keys too."""
        nobody = key[:, :, None, :0]
        return self.backend(self.feature_map, self.own, nobody, key, value, mask, before, is_causal=False)[3]

    def read(self, query: Tensor, moments: Moments, value_dim: int) -> Partial:
        """Queries (B, H, G, L, D) over the state's keys."""
        nothing = query[:, :, 0, :0]
        value = nothing.new_empty(*nothing.shape[:3], value_dim)
        return self.all_keys(query, nothing, value, None, moments)

    def earlier_spans(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, before: Moments, span: int
    ) -> tuple[Partial, Moments]:
        """Rows over the state and the keys of earlier spans of tokens, as many rows as keys; and the state after."""
        found = self.backend(self.feature_map, self.own, query, key, value, mask, before, is_causal=True, span=span)
        return self._partial(query, found), found[3]

    def earlier_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, nothing: Moments, window: int
    ) -> Partial:
        """Rows over the keys two blocks or more before their own."""
        first, last = min(window, query.shape[3]), max(query.shape[3] - window, 0)
        head = unseen(query[..., :first, :], value.shape[-1], nothing.z.dtype)
        if last == 0:
            return head
        # A block later, the keys of earlier spans are those of two blocks or more before.
        seen = None if mask is None else mask[..., :last]
        rows = query[..., first:, :]
        part, _ = self.earlier_spans(rows, key[:, :, :last], value[:, :, :last], seen, nothing, window)
        return joined([head, part])

    def later_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, nothing: Moments, window: int
    ) -> Partial:
        """Rows over the keys two blocks or more after their own: `earlier_spans` from the end, segment by segment."""
        length = query.shape[3]
        padded = -(-length // window) * window
        size, parts, state = max(_SEGMENT // window, 1) * window, [], nothing
        for start in range(0, padded - window, size):
            stop = min(start + size, padded - window)
            rows = query[..., padded - window - stop : padded - window - start, :].flip(3)
            keys = slice(padded - stop, min(padded - start, length))
            short = padded - start - keys.stop if keys.stop == length else 0
            k, v = (_turned(x[:, :, keys], short) for x in (key, value))
            seen = None if mask is None else mask[..., keys]
            if short:
                seen = k.new_ones(k.shape[0], 1, keys.stop - keys.start, dtype=torch.bool) if seen is None else seen
            seen = None if seen is None else torch.nn.functional.pad(seen.flip(-1), (short, 0))
            part, state = self.earlier_spans(rows, k, v, seen, state, window)
            parts.append(Partial(part.out.flip(3), part.log_normalizer.flip(3)))
        tail = unseen(query[..., max(padded - window, 0) :, :], value.shape[-1], nothing.z.dtype)
        return joined([*reversed(parts), tail])

    def _partial(self, query: Tensor, rows: tuple[Tensor, Tensor, Tensor, Moments]) -> Partial:
        """The rows on the kernel's true scale."""
        return as_partial(self.feature_map, self.own, query, *rows[:3])


def _turned(x: Tensor, short: int) -> Tensor:
    """Tokens (B, H, n, ·) from last to first, after `short` tokens of zeros."""
    return torch.nn.functional.pad(x.flip(2), (0, 0, short, 0))


def unseen(query: Tensor, value_dim: int, dtype: torch.dtype) -> Partial:
    """The partial result of queries (B, H, G, n, D) that see no key."""
    rows = query.shape[:-1]
    return Partial(query.new_zeros(*rows, value_dim), query.new_full(rows, -torch.inf, dtype=dtype))


def joined(parts: list[Partial]) -> Partial:
    """Partial results of consecutive rows as one."""
    return Partial(torch.cat([p.out for p in parts], 3), torch.cat([p.log_normalizer for p in parts], 3))
