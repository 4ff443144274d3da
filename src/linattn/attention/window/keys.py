"""A window's keys, apart from a state's sums, and who cannot have a window; letters as in window/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.softmax.row_groups import RowGroups
from linattn.softmax.tokens import Restored, Tokens, register
from linattn.softmax.tracing import has_values, is_followed, outside_inference

# Keys are numbered in 32 bits.
_MOST = 2**31


class KeyBuffer(NamedTuple):
    """Memory with places after a stream's tokens; each is written once, by the first stream that continues there."""

    key: Tensor  # (B, H, n, D)
    value: Tensor  # (B, H, n, Dv)
    stop: int  # how many of the n places this stream has taken
    free: dict[int, bool]  # the first place that no stream has taken

    def then(self, tokens: Tokens) -> KeyBuffer | None:
        """The buffer with more tokens, or None where they have no place in it or it may not be written."""
        stop, memory = self.stop + tokens.key.shape[2], (self.key, self.value)
        if (
            stop > self.key.shape[2]
            or any(type(x) is not Tensor or x.dtype != y.dtype for x, y in zip(tokens, memory, strict=False))
            or is_followed(*tokens[:2])
            or not has_values(tokens.key)
            # Such tensors are written in that mode alone.
            or (self.key.is_inference() and not torch.is_inference_mode_enabled())
            # Of several streams that go on from here one gets the places.
            or not self.free.pop(self.stop, False)
        ):
            return None
        for places, x in zip(memory, tokens, strict=False):
            # As data: what a backward pass has saved of earlier places stays as it is.
            places.data[:, :, self.stop : stop] = x
        self.free[stop] = True
        return self._replace(stop=stop)

    def latest(self, bias: Tensor) -> Tokens:
        """The latest tokens, as many as there are biases."""
        places = slice(self.stop - bias.shape[2], self.stop)
        return Tokens(self.key[:, :, places], self.value[:, :, places], bias)


@dataclass(frozen=True, eq=False)
class WindowKeys(Restored):
    """The latest keys of a stream, beside the sums of all others."""

    recent: Tokens  # those of the block before the current one and of the current one, at most 2w
    width: int  # w
    buffer: KeyBuffer | None = field(default=None, repr=False)  # what keys and values lie in, no part of the value

    @classmethod
    def empty(cls, width: int, key: Tensor, value: Tensor) -> WindowKeys:
        """No keys, for tokens like these (B, H, L, ·)."""
        none = key.new_zeros(*key.shape[:2], 0, dtype=torch.promote_types(key.dtype, torch.float32))
        return cls(Tokens(key[:, :, :0], value[:, :, :0], none), width)

    def __getstate__(self) -> dict[str, Any]:
        """The fields that files and copies hold, without memory around the keys."""
        recent = self.recent if self.buffer is None else Tokens(*(x.clone() for x in self.recent))
        return {"recent": recent, "width": self.width}

    def tokens(self) -> Tokens:
        """All of them, for gradients too."""
        return Tokens(*(outside_inference(x) for x in self.recent))

    def then(self, tokens: Tokens) -> WindowKeys:
        """The keys and later ones, in the same buffer where it has places."""
        number, more = (x.bias.shape[2] for x in (self.recent, tokens))
        buffer = self.buffer and self.buffer.then(tokens)
        if not buffer and more <= min(number, self.width):
            places = number + min(number, self.width)
            key, value = (x.new_empty(*x.shape[:2], places, x.shape[3]) for x in self.recent[:2])
            buffer = KeyBuffer(key, value, 0, {0: True}).then(self.recent)
            buffer = buffer and buffer.then(tokens)
        if not buffer:
            return WindowKeys(self.recent.then(tokens), self.width)
        return WindowKeys(buffer.latest(torch.cat([self.recent.bias, tokens.bias], 2)), self.width, buffer)

    def without(self, leaving: int) -> WindowKeys:
        """All but the first ones, in memory that holds no others of the call."""
        recent = self.recent.cut(leaving, self.recent.bias.shape[2])
        return replace(self, recent=recent if self.buffer else Tokens(*(x.clone() for x in recent)))

    def decay(self, log_factor: Tensor) -> WindowKeys:
        """All weights times exp(log_factor), (B or 1, H or 1); by -inf the keys are masked."""
        shift = log_factor.unsqueeze(-1).to(self.recent.bias.dtype)
        return replace(self, recent=self.recent._replace(bias=self.recent.bias + shift))

    def each(self, change: Callable[[Tensor], Tensor]) -> WindowKeys:
        """Apply a change to every tensor."""
        return _from_leaves(map(change, self.recent), self.width)


Kept = WindowKeys | RowGroups[WindowKeys]


def decayed(keys: Kept, log_factor: Tensor) -> Kept:
    """Keys whose weights are multiplied by exp(log_factor), (B or 1, H or 1)."""
    if isinstance(keys, WindowKeys):
        return keys.decay(log_factor)
    is_one, groups = log_factor.shape[0] == 1, zip(keys.keys, keys.rows, strict=True)
    return RowGroups(keys.rows, tuple(x.decay(log_factor if is_one else log_factor[list(rows)]) for x, rows in groups))


def _from_leaves(tensors: Iterable[Any], width: int) -> WindowKeys:
    """A window's keys from what torch's tree utilities took out of some."""
    return WindowKeys(Tokens(*tensors), width)


register(
    WindowKeys,
    lambda keys: (list(keys.recent), keys.width),
    _from_leaves,
    to_dumpable_context=str,
    from_dumpable_context=int,
)


def check_window(window: object, feature_map: FeatureMap, num_queries: int, num_keys: int, *, is_causal: bool) -> None:
    """Refuse what is no window's width, and one that this map or this call cannot have."""
    check_width(window)
    if not shares_normalizer(feature_map):
        raise ValueError(
            f"a window needs a map whose weights share the softmax kernel's scale and sum to a positive number, got "
            f"{type(feature_map).__name__}; use Expansion, FavorPlus, Hyperbolic, Oprf, Sderf, LearnedExponential or "
            "Taylor(order=2)"
        )
    if num_keys < num_queries if is_causal else num_keys != num_queries:
        wanted = "no more queries than keys" if is_causal else "as many queries as keys"
        raise ValueError(
            f"a window needs {wanted}, got {num_queries} and {num_keys}; leave it out where positions do not correspond"
        )


def check_width(window: object) -> None:
    """Refuse what is no power of two."""
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window must be an integer or None, got {window!r}; write window=32")
    if not 0 < window < _MOST or window.bit_count() != 1:
        raise ValueError(f"the window must be a power of two below 2³¹, as 16 or 32, got {window}; None is no window")


def shares_normalizer(feature_map: FeatureMap) -> bool:
    """Whether a map's weights share the softmax kernel's scale and sum to a positive number."""
    return feature_map.softmax_kernel and feature_map.positive_normalizer
