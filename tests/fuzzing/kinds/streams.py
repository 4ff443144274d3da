"""linear_attention_with_state over a stream cut anywhere, its masks coming and going; the state's readings after it.

Letters: B batch, Hkv key/value heads, M keys of the whole stream, L tokens of a chunk (Lq, Lk).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from fuzzing.dice import Dice
from fuzzing.kinds.attention import BACKENDS, Given, draw_biased, draw_given, draw_window
from fuzzing.limits import Limit, map_limits, window_limits
from fuzzing.machine import draw_machine, sums_dtype
from fuzzing.maps import DrawnMap, draw_map
from fuzzing.oracle import Rows
from fuzzing.task import Result, Task
from fuzzing.tokens import DTYPES, draw_sizes
from fuzzing.truth import Tokens, parts_of
from fuzzing.weights import Noise, Weigher


class Chunk(NamedTuple):
    """One call of a stream.

    Attributes:
        queries: of all the stream's queries.
        keys: of all its keys.
        masked: whether its mask is given.
        handling: what happens to the state after it.
    """

    queries: slice
    keys: slice
    masked: bool
    handling: str

    @property
    def places(self) -> Tensor:
        """The place of the last key that each query sees, -1 for none."""
        count = self.queries.stop - self.queries.start
        last = torch.arange(count) + self.keys.stop - count
        return last.clamp(min=self.keys.start - 1)

    def __str__(self) -> str:
        sizes = f"{self.queries.stop - self.queries.start}/{self.keys.stop - self.keys.start}"
        return f"{sizes}{' masked' if self.masked else ''}{' ' + self.handling if self.handling else ''}"


def draw_chunks(dice: Dice, window: int | None, most: int, number: int, handlings: dict[str, float]) -> list[Chunk]:
    """Chunks of 0, 1 and more tokens; sometimes fewer queries than keys, without a window also more."""
    found, queries, keys = [], 0, 0
    style = dice.pick("steps", "any", "any", "any", "prefill")
    for turn in range(min(dice.integer(1, 14 if style == "steps" else 6), number)):
        length = 1 if style == "steps" and not dice.chance(0.1) else dice.length(most // 2)
        length = dice.integer(4, most) if style == "prefill" and turn == 0 else length
        # Whole streams stay small enough for a dense truth.
        length = min(length, max(48 - keys, 1))
        length = min(length, 3) if style == "prefill" and turn else length
        count = length if dice.chance(0.8) else dice.integer(0, length)
        if window is None and dice.chance(0.1):
            count = length + dice.integer(1, 3)
        handling = dice.weighted(handlings)
        rows, columns = slice(queries, queries + count), slice(keys, keys + length)
        found.append(Chunk(rows, columns, dice.chance(0.5), handling))
        queries, keys = rows.stop, columns.stop
    return found


# Ways to the same state; those that cut the graph apart.
WHOLE = {"": 10.0, "moved": 1.0, "flattened": 1.0, "selected": 1.0}
CUT = {"detached": 1.0, "copied": 1.0}


def handled(state: linattn.State, handling: str) -> linattn.State:
    """The same state by another way."""
    if handling == "detached":
        return state.detach()
    if handling == "moved":
        return state.to("cpu")
    if handling == "copied":
        return copy.deepcopy(state.detach())
    if handling == "flattened":
        leaves, spec = pytree.tree_flatten(state)
        return pytree.tree_unflatten(leaves, spec)
    return state.select(torch.arange(state.S.shape[0])) if handling == "selected" else state


class Stream(NamedTuple):
    """A stream, and what reads its state after it.

    Attributes:
        drawn: the map.
        window: beside it.
        chunks: its calls.
        live: (B, M), False for masked keys.
        bias: (B, Hkv or 1, M), or None.
        last: how many queries read the state, after those of the chunks.
        backend: of all calls.
        dtype: of the tokens.
    """

    drawn: DrawnMap
    window: int | None
    chunks: list[Chunk]
    live: Tensor
    bias: Tensor | None
    last: int
    backend: str
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """How many queries the chunks have."""
        return self.chunks[-1].queries.stop

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> list[Result]:
        """Outputs, and the state read as it is and flushed."""
        options = {"window": self.window, "backend": self.backend, "enable_gqa": True}
        state, outs, own = None, [], self.drawn.map
        for chunk in self.chunks:
            piece = query[:, :, chunk.queries], key[:, :, chunk.keys], value[:, :, chunk.keys]
            mask = self.live[:, chunk.keys] if chunk.masked else None
            bias = None if self.bias is None else self.bias[:, :, chunk.keys]
            out, state = linattn.linear_attention_with_state(
                *piece, own, state, key_mask=mask, key_bias=bias, **options
            )
            outs.append(out)
            state = handled(state, chunk.handling)
        assert state is not None
        later, roundings = query[:, :, self.count :], 4 if self.window else 1
        return [
            Result("outs of the stream", torch.cat(outs, 2), roundings=roundings),
            Result("the state read", *state.read(own, later), roundings=roundings),
            Result("the flushed state read", *state.flush(own).read(own, later)),
        ]

    def truth(self, query: Tensor, key: Tensor, value: Tensor, noise: Noise | None) -> list[Rows]:
        """The same, each query over all keys before it."""
        weigher, count = Weigher(self.drawn.map, sums_dtype(self.dtype)), self.count
        places = torch.cat([chunk.places for chunk in self.chunks])
        bias = None if self.bias is None else self.bias.double()
        stream = Tokens(query[:, :, :count], key, value, self.live, places, bias)
        end = torch.full((self.last,), key.shape[2] - 1)
        after = Tokens(query[:, :, count:], key, value, self.live, end, bias)
        return [
            parts_of(weigher, stream, self.window, is_causal=True).rows(stream, noise=noise),
            parts_of(weigher, after, self.window, is_causal=True).rows(after, noise=noise),
            parts_of(weigher, after, None, is_causal=True).rows(after, noise=noise),
        ]

    @property
    def limits(self) -> list[Limit]:
        """What it is refused for."""
        has_tokens = self.live.numel() > 0 and not self.window
        found = map_limits(self.drawn, is_causal=True, has_tokens=has_tokens)
        for chunk in self.chunks:
            lengths = [part.stop - part.start for part in (chunk.queries, chunk.keys)]
            found += window_limits(self.drawn, *lengths, self.window, is_causal=True)
        return found

    def __str__(self) -> str:
        chunks = ", ".join(str(chunk) for chunk in self.chunks)
        return (
            f"linear_attention_with_state({self.drawn}, {self.window}, backend={self.backend!r}"
            f"{'' if self.bias is None else f', key_bias {tuple(self.bias.shape)}'}); queries/keys "
            f"{chunks}; read by {self.last}"
        )


def draw(
    dice: Dice,
    *,
    most: int = 40,
    dtypes: dict[torch.dtype, float] = DTYPES,
    fitted: bool = False,
    share: float = 0.5,
    whole: bool = False,
    chunks_most: int = 14,
) -> Task:
    """Any stream; `whole` is one graph from end to end."""
    sizes, dtype = draw_sizes(dice), dice.weighted(dtypes)
    window = draw_window(dice, share=share)
    fitted = fitted or dice.chance(0.97)
    drawn = draw_map(dice, sizes, dtype, softmax=window is not None and dice.chance(0.97), fitted=fitted)
    chunks = draw_chunks(dice, window, most, chunks_most, WHOLE if whole else WHOLE | CUT)
    last = dice.integer(0, 3)
    given = draw_given(dice, sizes, chunks[-1].queries.stop + last, chunks[-1].keys.stop, dtype)
    unmasked = [chunk.keys for chunk in chunks if not chunk.masked]
    # A graph cannot look where a row begins: a window's blocks are of positions there.
    given = seen_through(given, [*unmasked, slice(1)] if whole and window is not None else unmasked)
    backend = dice.weighted(BACKENDS)
    given = draw_biased(dice, given, closes=window is None)
    stream = Stream(drawn, window, chunks, given.live, given.bias, last, backend, dtype)
    return Task(
        str(stream),
        [drawn],
        given[:3],
        given.live,
        stream.call,
        stream.truth,
        stream.limits,
        draw_machine(dice),
        window is not None,
    )


def seen_through(given: Given, unmasked: Sequence[slice]) -> Given:
    """The same tokens where some parts come without a mask: all keys of those are live, and none is NaN or inf."""
    live = given.live.clone()
    for part in unmasked:
        live[:, part] = True
    seen = live[:, None, :, None]
    key, value = (torch.where(seen, x.nan_to_num(1, 1, 1), x) for x in (given.key, given.value))
    return Given(given.query, key, value, live)
