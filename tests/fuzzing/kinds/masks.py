"""A row in a batch is the row alone: padded to the longest one, or with masked tokens between its own.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n live ones of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import linattn
from fuzzing.case import Case
from fuzzing.dice import Dice
from fuzzing.kinds.attention import draw_window
from fuzzing.machine import draw_machine, machine_of
from fuzzing.maps import draw_map
from fuzzing.oracle import MismatchError
from fuzzing.tokens import draw_sizes, fill_masked


def _draw_mask(dice: Dice, counts: list[int], length: int, *, is_at_ends: bool) -> Tensor:
    """Which tokens are live, so many of each row: the first ones, the last ones, or any."""
    places, way = torch.arange(length), dice.pick("right", "left", *(() if is_at_ends else ("any",)))
    rows = []
    for count in counts:
        live = {"right": places < count, "left": places >= length - count}.get(way)
        if live is None:
            live = torch.zeros(length, dtype=torch.bool)
            live[dice.shuffled(range(length))[:count]] = True
        rows.append(live)
    return torch.stack(rows)


def run(case: Case) -> None:
    """Hold each row of a batch against a call with its live tokens alone."""
    dice = case.dice
    sizes, is_merged, is_causal = draw_sizes(dice), dice.chance(0.3), dice.chance(0.5)
    counts = [dice.length(30) for _ in range(max(sizes.batch, 2))]
    length = max(counts) + dice.integer(0, 20)
    how: linattn.MergedKV | linattn.feature_maps.FeatureMap
    call: Callable[..., Tensor]
    options: dict[str, object] = {"enable_gqa": True}
    if is_merged:
        how, is_causal = linattn.MergedKV(dice.pick(1, 2, 4), dice.pick(1, 3, 8), bits=dice.pick(None, 4)), True
        call, backends, goes_by_places = linattn.merged_attention, ("auto", "torch"), True
    else:
        window = draw_window(dice, share=0.4)
        drawn = draw_map(dice, sizes, torch.float64, softmax=window is not None, fitted=is_causal or dice.chance(0.6))
        how, call, backends, goes_by_places = (
            drawn.map,
            linattn.linear_attention,
            ("auto", "blocked"),
            window is not None,
        )
        options["window"] = window
        if drawn.unfinished or (is_causal and drawn.from_call):
            return
    # Windows and merges go by places after the first live one, which padding at the ends leaves as they are.
    mask = _draw_mask(dice, counts, length, is_at_ends=goes_by_places)
    heads = (sizes.heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.value_dim)
    query, key, value = (dice.normal(len(counts), n, length, width) for n, width in heads)
    key, value = fill_masked(dice, key, mask), fill_masked(dice, value, mask)
    options |= {"is_causal": is_causal, "backend": dice.pick(*backends)}
    case.note(f"rows of {counts} live tokens of {length}, {how}, {options}, {sizes}")
    with torch.no_grad(), machine_of(draw_machine(dice)):
        out = call(query, key, value, how, key_mask=mask, **options)
        for row, live in enumerate(mask):
            tokens = (x[row : row + 1, :, live] for x in (query, key, value))
            _same(out[row : row + 1, :, live], call(*tokens, how, **options), row)


def _same(found: Tensor, alone: Tensor, row: int) -> None:
    """Sums in another order: tokens are of size 1, and float64 keeps ten digits of what any map makes of them."""
    if not torch.allclose(found, alone, rtol=1e-7, atol=1e-7):
        raise MismatchError(f"row {row} in the batch is off by {float((found - alone).abs().max()):.1e}")
