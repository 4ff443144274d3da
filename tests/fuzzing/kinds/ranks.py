"""Calls of several ranks, in one process: fields that differ are named with the ranks that have them."""

from __future__ import annotations

import torch

from fuzzing.case import Case
from fuzzing.oracle import MismatchError
from linattn.feature_maps import FavorPlus
from linattn.parallel.ranks import Fields, _differences, fields_of_call

# What a rank may have apart, and the field that says so.
_CHANGES = {
    "seed": "feature_map",
    "scale": "feature_map",
    "features": "feature_map",
    "dtype": "query dtype",
    "heads": "query heads",
    "width": "value width",
    "batch": "batch size",
    "window": "window",
    "direction": "is_causal",
    "gradients": "gradients",
    "call": "call",
}


def _fields(sizes: tuple[int, int, int], change: str | None) -> Fields:
    """Those of a rank's call, changed or not."""
    batch, heads, width = sizes
    dtype = torch.float64 if change == "dtype" else torch.float32
    heads, batch = heads + 2 * (change == "heads"), batch + (change == "batch")
    query = torch.zeros(batch, heads, 3, width, dtype=dtype, requires_grad=change == "gradients")
    value = torch.zeros(batch, heads, 3, width + (change == "width"), dtype=dtype)
    seed, scale, features = int(change == "seed"), 2.0 if change == "scale" else 1.0, 8 + 2 * (change == "features")
    feature_map = FavorPlus(width, features, seed=seed, scale=scale)
    window = 4 if change == "window" else None
    name = "linear_partial" if change == "call" else "linear_attention"
    return fields_of_call(name, (query, query, value), feature_map, window, is_causal=change == "direction")


def run(case: Case) -> None:
    """Change the calls of some ranks, and read who is named."""
    dice = case.dice
    sizes, count = (dice.integer(1, 3), dice.integer(1, 3), dice.integer(1, 5)), dice.integer(2, 5)
    change = dice.pick(None, *_CHANGES)
    others = dice.shuffled(range(count))[: dice.integer(1, count - 1)] if change else []
    case.note(f"{count} ranks, {change} differs on {sorted(others)}, sizes {sizes}")
    calls = [_fields(sizes, change if rank in others else None) for rank in range(count)]
    if change is None:
        if any(call != calls[0] for call in calls):
            raise MismatchError(f"one call has other fields: {calls}")
        return
    words = _differences(calls)
    ranks = [", ".join(map(str, sorted(group))) for group in (others, set(range(count)) - set(others))]
    named = [f"ranks {x} have" if ", " in x else f"rank {x} has" for x in ranks]
    if not all(x in words for x in (f"{_CHANGES[change]} (", *named)):
        raise MismatchError(f"{_CHANGES[change]} of {named} is not named in: {words}")
