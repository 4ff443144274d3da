"""The map's part: attention over all keys that are not exact; letters as in exact/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends import Backend
from linattn.attention.bound_map import BoundMap
from linattn.attention.partial import Partial, as_partial
from linattn.attention.sums import Sums

# Tokens turned round at once where later keys are folded in from the end.
_SEGMENT = 4096


class MapPart(NamedTuple):
    """A map bound to the call's tensors, and the backend that folds and reads."""

    bound: BoundMap
    backend: Backend

    @property
    def scale(self) -> float:
        """The map's factor on q·k, which the exact part shares."""
        return self.bound.feature_map.scale

    def all_keys(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, before: Sums) -> Partial:
        """Queries (B, H, G, Lq, D) over the sums and all keys (B, H, Lk, D) of biases (B, H or 1, Lk)."""
        rows, _ = self.backend.attend(self.bound, query, key, value, bias, before, is_causal=False)
        return as_partial(self.bound, query, rows)

    def absorb(self, key: Tensor, value: Tensor, bias: Tensor | None, before: Sums) -> Sums:
        """The sums after these keys too."""
        return self.backend.absorb(self.bound, key, value, bias, before)

    def read(self, query: Tensor, sums: Sums) -> Partial:
        """Queries (B, H, G, L, D) over the sums' keys."""
        return as_partial(self.bound, query, self.backend.read(self.bound, query, sums))

    def earlier_spans(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, before: Sums, span: int
    ) -> tuple[Partial, Sums]:
        """Rows over the sums and the keys of earlier spans of tokens, as many rows as keys; and the sums after."""
        rows, after = self.backend.attend(self.bound, query, key, value, bias, before, is_causal=True, span=span)
        return as_partial(self.bound, query, rows), after

    def earlier_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, nothing: Sums, window: int
    ) -> Partial:
        """Rows over the keys two blocks or more before their own."""
        first, last = min(window, query.shape[3]), max(query.shape[3] - window, 0)
        head = unseen(query[..., :first, :], value.shape[-1], nothing.z.dtype)
        if last == 0:
            return head
        # A block later, the keys of earlier spans are those of two blocks or more before.
        early = None if bias is None else bias[..., :last]
        rows = query[..., first:, :]
        part, _ = self.earlier_spans(rows, key[:, :, :last], value[:, :, :last], early, nothing, window)
        return joined([head, part])

    def later_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, nothing: Sums, window: int
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
            later = None if bias is None else bias[..., keys]
            if short and later is None:
                later = nothing.z.new_zeros(k.shape[0], 1, keys.stop - keys.start)
            if later is not None:
                later = torch.nn.functional.pad(later.flip(-1), (short, 0), value=-torch.inf)
            part, state = self.earlier_spans(rows, k, v, later, state, window)
            parts.append(Partial(part.out.flip(3), part.log_normalizer.flip(3)))
        tail = unseen(query[..., max(padded - window, 0) :, :], value.shape[-1], nothing.z.dtype)
        return joined([*reversed(parts), tail])


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
