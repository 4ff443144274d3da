"""Claim: one token beside a window of 1,024 costs at most 1.3 times as much as one beside a window of 64.

8 query heads on 8 and on 2 key heads, D = 64, 256 features, float32, through `linear_attention_with_state`, where a
stream keeps the most keys, two blocks of the window but one: each step reads them and copies them into the new state. A
text of ten tokens costs the same beside any window.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import linattn
from linattn.feature_maps import FeatureMap
from measuring import HEADS, favor, ratios, record, relative_error, require, seconds, spread, tokens

NARROW, WIDE = 64, 1_024
TEXT, SHORTEST, LONGEST = 10, 16, 4_096
VERIFIED_STEPS, STEPS, REPEATS = 4, 20, 30


def shared(inputs: list[Tensor], num_heads: int) -> list[Tensor]:
    """Queries of all heads on keys and values of so many."""
    return [inputs[0], *(x[:, :num_heads] for x in inputs[1:])]


def stepped(window: int, num_heads: int, feature_map: FeatureMap) -> tuple[partial[object], float]:
    """One token after two blocks but one, and the error of a few against all weights; refuses a wrong result."""
    begin, options = 2 * window - 1, {"window": window, "enable_gqa": True}
    inputs = shared(tokens(begin + VERIFIED_STEPS), num_heads)
    whole = linattn.linear_attention(
        *(x.double() for x in inputs), feature_map, is_causal=True, backend="reference", **options
    )
    attend = partial(linattn.linear_attention_with_state, feature_map=feature_map, **options)
    kept = state = attend(*(x[:, :, :begin] for x in inputs)).state
    outs = []
    for place in range(begin, begin + VERIFIED_STEPS):
        out, state = attend(*(x[:, :, place : place + 1] for x in inputs), state=state)
        outs.append(out)
    error = relative_error(torch.cat(outs, 2), whole[:, :, begin:])
    require(f"steps beside a window of {window}", error, 1e-4)
    return partial(attend, *(x[:, :, begin : begin + 1].contiguous() for x in inputs), state=kept), error


def short(window: int, feature_map: FeatureMap) -> tuple[partial[object], float]:
    """A short text, and its error against all weights; refuses a wrong result."""
    inputs, options = tokens(TEXT), {"is_causal": True, "window": window}
    attend = partial(linattn.linear_attention, *inputs, feature_map, **options)
    whole = linattn.linear_attention(*(x.double() for x in inputs), feature_map, backend="reference", **options)
    error = relative_error(attend(), whole)
    require(f"a text beside a window of {window}", error, 1e-4)
    return attend, error


def repeated(run: partial[object]) -> None:
    """A few calls, so that one of them is no outlier."""
    for _ in range(STEPS):
        run()


def compare(claim: str, bound: str, narrow: tuple[partial[object], float], wide: tuple[partial[object], float]) -> None:
    """The ratio of what the wide window costs to what the narrow one does."""
    contenders = {"narrow": partial(repeated, narrow[0]), "wide": partial(repeated, wide[0])}
    times = seconds(contenders, repeats=REPEATS)
    record(
        claim,
        figure=ratios(times["wide"], times["narrow"]),
        unit="×",
        bound=bound,
        seconds={name: spread([x / STEPS for x in samples]) for name, samples in times.items()},
        error=max(narrow[1], wide[1]),
    )


def main() -> None:
    """Verify, time, record."""
    feature_map = favor()
    with torch.no_grad():
        for num_heads in (HEADS, HEADS // 4):
            narrow, wide = (stepped(window, num_heads, feature_map) for window in (NARROW, WIDE))
            claim = (
                f"a token beside a window of {WIDE:,} over one beside {NARROW}, {HEADS} heads on {num_heads} of keys"
            )
            compare(claim, "<= 1.3", narrow, wide)
        narrow, wide = (short(window, feature_map) for window in (SHORTEST, LONGEST))
        compare(f"{TEXT} tokens beside a window of {LONGEST:,} over {SHORTEST}", "<= 1.1", narrow, wide)


if __name__ == "__main__":
    main()
