"""States as values: empty, absorb, step, merge, select, flush and read in any order.

Letters: B batch, Hkv key/value heads, N queries, M keys of the whole case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import linattn
from fuzzing.dice import Dice
from fuzzing.kinds.attention import BACKENDS, draw_given, draw_window
from fuzzing.kinds.streams import CUT, WHOLE, handled, seen_through
from fuzzing.limits import Limit, map_limits, window_limits
from fuzzing.machine import draw_machine, sums_dtype
from fuzzing.maps import DrawnMap, draw_map
from fuzzing.oracle import Rows
from fuzzing.task import Result, Task
from fuzzing.tokens import DTYPES, Sizes, draw_sizes
from fuzzing.truth import Tokens, parts_of
from fuzzing.weights import Noise, Weigher


class Verb(NamedTuple):
    """One verb on states by number; its result is the next number.

    Attributes:
        name: "absorb", "step", "stream", "merge", "select", "detached", "moved", "copied" or "flattened".
        states: the numbers of the states it takes; -1 is the empty one.
        keys: of all the case's keys, and queries, as many.
        rows: which of the batch, for select.
        masked: whether a mask is given.
    """

    name: str
    states: tuple[int, ...]
    keys: slice = slice(0, 0)
    rows: tuple[int, ...] = ()
    masked: bool = False

    def __str__(self) -> str:
        keys = f" keys {self.keys.start}:{self.keys.stop}{' masked' if self.masked else ''}" * (
            self.name in ("absorb", "step", "stream")
        )
        return f"{self.name} {self.states}{keys}{f' {self.rows}' if self.name == 'select' else ''}"


def draw_verbs(dice: Dice, batch: int, most: int, handlings: list[str]) -> list[Verb]:
    """A few verbs; every key enters once."""
    found, place = [], 0
    for number in range(dice.integer(1, 8)):
        name = dice.weighted(
            {"absorb": 4.0, "step": 2.0, "stream": 0.7, "merge": 3.0, "select": 1.0} | dict.fromkeys(handlings, 0.3)
        )
        states = [dice.integer(-1, number - 1) for _ in range(2 if name == "merge" else 1)]
        length = dice.length(most) if name in ("absorb", "step", "stream") else 0
        rows = tuple(dice.integer(0, batch - 1) for _ in range(batch)) if batch else ()
        masked = dice.chance(0.5)
        found.append(Verb(name, tuple(states), slice(place, place + length), rows, masked))
        place += length
    return found


class Content(NamedTuple):
    """The keys that a state holds: one column of numbers for each row of the batch, and which are live."""

    source: Tensor  # (B, m): which row of the batch a key came from
    place: Tensor  # (B, m)
    live: Tensor  # (B, m)

    def then(self, other: Content) -> Content:
        """These and the others."""
        return Content(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))


def contents(verbs: list[Verb], live: Tensor) -> list[Content]:
    """What each verb's state holds."""
    batch = live.shape[0]
    nothing = torch.zeros(batch, 0, dtype=torch.int64)
    found: list[Content] = []

    def held(number: int) -> Content:
        return Content(nothing, nothing, nothing.bool()) if number < 0 else found[number]

    for verb in verbs:
        content = held(verb.states[0])
        if verb.name == "merge":
            content = content.then(held(verb.states[1]))
        elif verb.name == "select":
            content = Content(*(x[list(verb.rows)] for x in content))
        elif verb.name in ("absorb", "step", "stream"):
            places = torch.arange(verb.keys.start, verb.keys.stop).expand(batch, -1)
            own = Content(torch.arange(batch).unsqueeze(-1).expand_as(places), places, live[:, verb.keys])
            # A stream begins anew.
            content = own if verb.name == "stream" else content.then(own)
        found.append(content)
    return found


class Program(NamedTuple):
    """Verbs on a growing list of states, which are all read in the end.

    Attributes:
        drawn: the map.
        window: of its streams.
        verbs: what happens.
        live: (B, M), False for masked keys.
        sizes: of the tensors.
        backend: of the steps.
        dtype: of the tokens.
    """

    drawn: DrawnMap
    window: int | None
    verbs: list[Verb]
    live: Tensor
    sizes: Sizes
    backend: str
    dtype: torch.dtype

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> list[Result]:
        """Outputs of the steps, then every state read."""
        states: list[linattn.State] = []
        results, own = [], self.drawn.map
        for verb in self.verbs:
            first, *second = (self._empty() if number < 0 else states[number] for number in verb.states)
            piece = query[:, :, verb.keys], key[:, :, verb.keys], value[:, :, verb.keys]
            options = {"key_mask": self.live[:, verb.keys] if verb.masked else None}
            if verb.name == "absorb":
                first = first.absorb(own, *piece[1:], **options)
            elif verb.name == "merge":
                first = first.merge(*second)
            elif verb.name == "select":
                first = first.select(torch.tensor(verb.rows, dtype=torch.int64))
            elif verb.name == "step":
                out, first = self._step(piece, first, **options)
                results.append(Result("step", out))
            elif verb.name == "stream":
                first = self._step(piece, None, window=self.window, **options).state.flush(own)
            else:
                first = handled(first, verb.name)
            states.append(first)
        later = query[:, :, self.live.shape[1] :]
        return results + [Result("a state read", *state.read(own, later)) for state in states]

    def _empty(self) -> linattn.State:
        """The state of no keys."""
        batch, heads, width = self.sizes.batch, self.sizes.kv_heads, self.sizes.value_dim
        sizes = {"batch_size": batch, "num_heads": heads, "value_dim": width}
        return linattn.State.empty(self.drawn.map, dtype=self.dtype, **sizes)

    def _step(self, piece: tuple[Tensor, ...], state: linattn.State | None, **options: object) -> linattn.Attended:
        """One causal call."""
        options |= {"enable_gqa": True, "backend": self.backend}
        return linattn.linear_attention_with_state(*piece, self.drawn.map, state, **options)

    def truth(self, query: Tensor, key: Tensor, value: Tensor, noise: Noise | None) -> list[Rows]:
        """The same from what each state holds."""
        weigher = Weigher(self.drawn.map, sums_dtype(self.dtype))

        def rows(queries: Tensor, content: Content, first: int) -> Rows:
            picked = [x.transpose(1, 2)[content.source, content.place].transpose(1, 2) for x in (key, value)]
            held = Tokens(queries, *picked, content.live, torch.arange(queries.shape[2]) + first)
            return parts_of(weigher, held, None, is_causal=True).rows(held, noise=noise)

        held, found = contents(self.verbs, self.live), []
        for verb, content in zip(self.verbs, held, strict=True):
            if verb.name == "step":
                own = query[:, :, verb.keys]
                found.append(rows(own, content, content.place.shape[1] - own.shape[2]))
        later = query[:, :, self.live.shape[1] :]
        return found + [rows(later, content, content.place.shape[1]) for content in held]

    @property
    def limits(self) -> list[Limit]:
        """What it is refused for; states may be empty, merged and read without a look at a token."""
        found = map_limits(self.drawn, is_causal=True, has_tokens=False)
        if any(verb.name == "stream" for verb in self.verbs):
            found += window_limits(self.drawn, 1, 1, self.window, is_causal=True)
        return found

    def __str__(self) -> str:
        return f"State of {self.drawn}: {', '.join(map(str, self.verbs))} ({self.backend}, {self.window})"


def draw(
    dice: Dice,
    *,
    most: int = 16,
    dtypes: dict[torch.dtype, float] = DTYPES,
    fitted: bool = False,
    whole: bool = False,
) -> Task:
    """Any program; `whole` is one graph from end to end."""
    sizes, dtype = draw_sizes(dice), dice.weighted(dtypes)
    verbs = draw_verbs(dice, sizes.batch, most, [name for name in (WHOLE if whole else WHOLE | CUT) if name])
    has_stream = any(verb.name == "stream" for verb in verbs)
    window = draw_window(dice, share=0.7) if has_stream else None
    drawn = draw_map(dice, sizes, dtype, softmax=window is not None, fitted=fitted or dice.chance(0.97))
    num_keys = verbs[-1].keys.stop
    given = draw_given(dice, sizes, num_keys + 2, num_keys, dtype)
    given = seen_through(given, [verb.keys for verb in verbs if not verb.masked])
    own = Program(drawn, window, verbs, given.live, sizes, dice.weighted(BACKENDS), dtype)
    return Task(
        str(own),
        [drawn],
        given[:3],
        given.live,
        own.call,
        own.truth,
        own.limits,
        draw_machine(dice),
        window is not None,
    )
