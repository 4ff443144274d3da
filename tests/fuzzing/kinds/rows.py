"""attention_rows: chosen rows of the attention matrix."""

from __future__ import annotations

import torch
from torch import Tensor

import linattn
from fuzzing.dice import Dice
from fuzzing.kinds.attention import draw_given
from fuzzing.limits import Limit, map_limits
from fuzzing.machine import draw_machine, sums_dtype
from fuzzing.maps import draw_map
from fuzzing.oracle import Rows
from fuzzing.task import Result, Task
from fuzzing.tokens import DTYPES, draw_sizes
from fuzzing.truth import Tokens, parts_of
from fuzzing.weights import Noise, Weigher, in_call


def draw(dice: Dice, *, most: int = 40, dtypes: dict[torch.dtype, float] = DTYPES, fitted: bool = False) -> Task:
    """Rows in any order, some twice, some counted from the end."""
    sizes, dtype, is_causal = draw_sizes(dice), dice.weighted(dtypes), dice.chance(0.5)
    drawn = draw_map(dice, sizes, dtype, fitted=fitted)
    num_keys = dice.length(most)
    num_queries = num_keys if dice.chance(0.6) else dice.length(most)
    given = draw_given(dice, sizes, num_queries, num_keys, dtype)
    count = dice.integer(0, 8) if num_queries else 0
    chosen = [dice.integer(-num_queries, num_queries - 1) for _ in range(count)]
    limits = map_limits(drawn, is_causal=is_causal, has_tokens=min(sizes.batch, count, num_keys) > 0)
    if dice.chance(0.01):
        chosen.append(dice.pick(num_queries, -num_queries - 1))
        limits.append(Limit(ValueError, "query_index must lie in"))
    index = torch.tensor(chosen, dtype=dice.pick(torch.int64, torch.int32))

    def call(query: Tensor, key: Tensor, _value: Tensor) -> list[Result]:
        found = linattn.attention_rows(
            query, key, drawn.map, index, key_mask=given.mask, is_causal=is_causal, enable_gqa=True
        )
        return [Result("rows", found, is_rows=True)]

    def truth(query: Tensor, key: Tensor, value: Tensor, noise: Noise | None) -> list[Rows]:
        rows = index.long() % max(num_queries, 1)
        places = (torch.arange(num_queries) + (num_keys - num_queries if is_causal else 0))[rows]
        used = drawn.map if is_causal else in_call(drawn.map, query, key, given.mask, dtype)
        tokens = Tokens(query[:, :, rows], key, value, given.live, places)
        parts = parts_of(Weigher(used, sums_dtype(dtype)), tokens, None, is_causal=is_causal)
        return [parts.rows(tokens, noise=noise)]

    text = f"attention_rows({drawn}, query_index={chosen}, is_causal={is_causal}, enable_gqa=True)"
    return Task(text, [drawn], given[:3], given.live, call, truth, limits, draw_machine(dice))
