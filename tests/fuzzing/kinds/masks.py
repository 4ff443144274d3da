"""A row in a batch is the row alone: padded to the longest one, or with masked tokens between its own.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n live ones of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

import linattn
from fuzzing.case import Case
from fuzzing.dice import Dice
from fuzzing.kinds.attention import draw_exactly
from fuzzing.machine import draw_machine, machine_of
from fuzzing.maps import draw_map
from fuzzing.oracle import MismatchError
from fuzzing.tokens import draw_sizes, fill_masked


def _draw_mask(dice: Dice, counts: list[int], length: int, *, is_right: bool) -> Tensor:
    """Which tokens are live, so many of each row: the first ones, the last ones, or any."""
    places, way = torch.arange(length), "right" if is_right else dice.pick("right", "left", "any")
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
    exact: linattn.Exact | None
    if is_merged:
        exact, feature_map, is_causal = linattn.Exact(dice.pick(1, 2, 4), num_merged=dice.pick(1, 3, 8)), None, True
    else:
        # Without causality heavy keys are chosen by the queries at masked places too.
        window, num_heavy = draw_exactly(dice, share=0.4, is_causal=is_causal)
        exact = None if window is None else linattn.Exact(window, num_heavy if is_causal else 0)
        drawn = draw_map(dice, sizes, torch.float64, softmax=exact is not None, fitted=is_causal or dice.chance(0.6))
        feature_map = drawn.map
        if drawn.unfinished or (is_causal and drawn.from_call):
            return
    # Windows and merges go by places, which padding on the right alone leaves as they are.
    mask = _draw_mask(dice, counts, length, is_right=exact is not None)
    heads = (sizes.heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.value_dim)
    query, key, value = (dice.normal(len(counts), n, length, width) for n, width in heads)
    key, value = fill_masked(dice, key, mask), fill_masked(dice, value, mask)
    options = {"is_causal": is_causal, "enable_gqa": True, "exact": exact, "backend": dice.pick("auto", "blocked")}
    case.note(f"rows of {counts} live tokens of {length}, {feature_map}, {options}, {sizes}")
    with torch.no_grad(), machine_of(draw_machine(dice)):
        out = linattn.linear_attention(query, key, value, feature_map, key_mask=mask, **options)
        for row, live in enumerate(mask):
            tokens = (x[row : row + 1, :, live] for x in (query, key, value))
            _same(out[row : row + 1, :, live], linattn.linear_attention(*tokens, feature_map, **options), row)


def _same(found: Tensor, alone: Tensor, row: int) -> None:
    """Sums in another order: tokens are of size 1, and float64 keeps ten digits of what any map makes of them."""
    if not torch.allclose(found, alone, rtol=1e-7, atol=1e-7):
        raise MismatchError(f"row {row} in the batch is off by {float((found - alone).abs().max()):.1e}")
