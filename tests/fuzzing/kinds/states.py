"""States as values: empty, absorb, step, merge, select, flush and read in any order.

Letters: B batch, Hkv key/value heads, N queries, M keys of the whole case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import linattn
from fuzzing.dice import Dice
from fuzzing.kinds.attention import BACKENDS, draw_exactly, draw_given
from fuzzing.kinds.streams import CUT, WHOLE, handled
from fuzzing.limits import Limit, exact_limits, map_limits
from fuzzing.machine import draw_machine, sums_dtype
from fuzzing.maps import draw_map
from fuzzing.oracle import Rows
from fuzzing.task import Result, Task
from fuzzing.tokens import DTYPES, draw_sizes
from fuzzing.truth import Exactly, Tokens, parts_of
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


def draw(
    dice: Dice,
    *,
    most: int = 16,
    dtypes: dict[torch.dtype, float] = DTYPES,
    fitted: bool = False,
    whole: bool = False,
) -> Task:
    """Verbs on a growing list of states; all of them are read in the end."""
    sizes, dtype = draw_sizes(dice), dice.weighted(dtypes)
    verbs = draw_verbs(dice, sizes.batch, most, [name for name in (WHOLE if whole else WHOLE | CUT) if name])
    exactly = (
        draw_exactly(dice, share=0.7, is_causal=True) if any(verb.name == "stream" for verb in verbs) else Exactly()
    )
    drawn = draw_map(dice, sizes, dtype, softmax=bool(exactly), fitted=fitted or dice.chance(0.97))
    num_keys = verbs[-1].keys.stop
    given = draw_given(dice, sizes, num_keys + 2, num_keys, dtype)
    live = given.live.clone()
    for verb in verbs:
        if not verb.masked:
            live[:, verb.keys] = True
    seen = live[:, None, :, None]
    tokens = [torch.where(seen, x.nan_to_num(1, 1, 1), x) for x in (given.key, given.value)]
    window, num_heavy = exactly
    options = {"backend": dice.weighted(BACKENDS), "enable_gqa": True}
    has_tokens = sizes.batch > 0
    limits: list[Limit] = map_limits(drawn, is_causal=True, has_tokens=has_tokens)
    if drawn.from_call:
        # States may be empty, and merged, without a look at a token.
        limits = [limit._replace(certain=False) for limit in limits]
    if exactly and any(verb.name == "stream" for verb in verbs):
        limits += exact_limits(drawn, 1, 1, *exactly, is_causal=True)
    limits = limits if any(verb.name in ("absorb", "step", "stream") for verb in verbs) or limits else []

    def call(query: Tensor, key: Tensor, value: Tensor) -> list[Result]:
        empty = linattn.State.empty(
            drawn.map, batch_size=sizes.batch, num_heads=sizes.kv_heads, value_dim=sizes.value_dim, dtype=dtype
        )
        states: list[linattn.State] = []
        results = []
        for verb in verbs:
            first, *second = (empty if number < 0 else states[number] for number in verb.states)
            piece = query[:, :, verb.keys], key[:, :, verb.keys], value[:, :, verb.keys]
            mask = live[:, verb.keys] if verb.masked else None
            if verb.name == "absorb":
                first = first.absorb(drawn.map, *piece[1:], key_mask=mask)
            elif verb.name == "step":
                out, first = linattn.linear_attention_with_state(*piece, drawn.map, first, key_mask=mask, **options)
                results.append(Result("step", out))
            elif verb.name == "stream":
                exact = {"window": window, "num_heavy": num_heavy}
                stream = linattn.linear_attention_with_state(*piece, drawn.map, key_mask=mask, **options, **exact)
                first = stream.state.flush(drawn.map)
            elif verb.name == "merge":
                first = first.merge(*second)
            elif verb.name == "select":
                first = first.select(torch.tensor(verb.rows, dtype=torch.int64))
            else:
                first = handled(first, verb.name)
            states.append(first)
        last = query[:, :, num_keys:]
        return results + [Result("a state read", *state.read(drawn.map, last)) for state in states]

    def truth(query: Tensor, key: Tensor, value: Tensor, noise: Noise | None) -> list[Rows]:
        held = contents(verbs, live)
        weigher = Weigher(drawn.map, sums_dtype(dtype))

        def rows(queries: Tensor, content: Content, first: int) -> Rows:
            picked = [x.transpose(1, 2)[content.source, content.place].transpose(1, 2) for x in (key, value)]
            places = torch.arange(queries.shape[2]) + first
            all_keys = Tokens(queries, *picked, content.live, places)
            return parts_of(weigher, all_keys, Exactly(), is_causal=True).rows(all_keys, noise=noise)

        found = []
        for verb, content in zip(verbs, held, strict=True):
            if verb.name == "step":
                count = verb.keys.stop - verb.keys.start
                found.append(rows(query[:, :, verb.keys], content, content.place.shape[1] - count))
        last = query[:, :, num_keys:]
        return found + [rows(last, content, content.place.shape[1]) for content in held]

    text = f"State of {drawn}: {', '.join(str(verb) for verb in verbs)} ({options['backend']}, {exactly})"
    given_tensors = (given.query, *tokens)
    return Task(text, [drawn], given_tensors, live, call, truth, limits, draw_machine(dice), bool(exactly))
