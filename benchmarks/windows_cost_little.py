"""Claim: an exact window beside a map costs at most 1.5 times the time without one, and a token little more beside a
wide window than beside a narrow one.

Texts: windows of 32 and 128 beside FavorPlus with 256 features and LearnedExponential with 64, bidirectional and
causal, forward and with the backward pass, which reaches learned features too. By multiplications per token and head
the window adds, bidirectional, 3·w·(D + Dv) to the map's 4·D·R, which it has read twice, and causally 2·w·(D + Dv).
Tokens: 8 query heads on 8 and on 2 key heads, 256 features, through `linear_attention_with_state`: two streams that go
on token by token for a whole block of the wide window, so that each keeps one to two blocks of its own. A text of ten
tokens costs the same beside any window. 8 heads, D = 64, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import linattn
from linattn.feature_maps import FeatureMap, LearnedExponential
from measuring import (
    HEAD_DIM,
    HEADS,
    favor,
    ratios,
    record,
    relative_error,
    require,
    seconds,
    spread,
    tokens,
    verified_window,
)

NARROW, WIDE = 64, 1_024
TEXT, SHORTEST, LONGEST = 10, 16, 4_096
VERIFIED_STEPS, TEXTS, REPEATS = 4, 40, 15
WINDOWS, LENGTHS = (32, 128), (16_384, 65_536)
# More than two blocks of either window, no whole number of them; the reference holds every exponent.
VERIFIED_LENGTH, VERIFIED_HEADS = 300, 2


def shared(inputs: list[Tensor], num_heads: int) -> list[Tensor]:
    """Queries of all heads on keys and values of so many."""
    return [inputs[0], *(x[:, :num_heads] for x in inputs[1:])]


def stepped(window: int, num_heads: int, feature_map: FeatureMap) -> tuple[Callable[[], object], float]:
    """A stream's next token, and the error of a few after two blocks but one; refuses a wrong result."""
    begin, options = 2 * window - 1, {"window": window, "enable_gqa": True}
    inputs = shared(tokens(begin + VERIFIED_STEPS), num_heads)
    whole = linattn.linear_attention(
        *(x.double() for x in inputs), feature_map, is_causal=True, backend="reference", **options
    )
    attend = partial(linattn.linear_attention_with_state, feature_map=feature_map, **options)
    state = attend(*(x[:, :, :begin] for x in inputs)).state
    outs = []
    for place in range(begin, begin + VERIFIED_STEPS):
        out, state = attend(*(x[:, :, place : place + 1] for x in inputs), state=state)
        outs.append(out)
    error = relative_error(torch.cat(outs, 2), whole[:, :, begin:])
    require(f"steps beside a window of {window}", error, 1e-4)
    token, states = [x[:, :, begin : begin + 1].contiguous() for x in inputs], [state]

    def step() -> None:
        states[0] = attend(*token, state=states[0]).state

    return step, error


def short(window: int, feature_map: FeatureMap) -> tuple[Callable[[], object], float]:
    """A short text, and its error against all weights; refuses a wrong result."""
    inputs, options = tokens(TEXT), {"is_causal": True, "window": window}
    attend = partial(linattn.linear_attention, *inputs, feature_map, **options)
    whole = linattn.linear_attention(*(x.double() for x in inputs), feature_map, backend="reference", **options)
    error = relative_error(attend(), whole)
    require(f"a text beside a window of {window}", error, 1e-4)
    return attend, error


def beside(feature_map: FeatureMap, length: int, *, is_causal: bool, gradients: bool) -> None:
    """The ratios of what windows cost to none; each result verified first."""
    contenders, errors = {}, {}
    for window in (None, *WINDOWS):
        short = [x[:, :VERIFIED_HEADS] for x in tokens(VERIFIED_LENGTH, gradients=gradients)]
        errors[window] = verified_window(window, feature_map, short, is_causal=is_causal)
        if gradients:
            errors[window] = max(errors[window], gradient_error(window, feature_map, short, is_causal=is_causal))
        inputs = tokens(length, gradients=gradients)
        contenders[str(window)] = partial(attended, window, feature_map, inputs, is_causal=is_causal)
    times = seconds(contenders, repeats=5)
    what = f"{'causal' if is_causal else 'bidirectional'}, {'forward and backward' if gradients else 'forward'}"
    for window in WINDOWS:
        record(
            f"time beside a window of {window} over that without, {type(feature_map).__name__} with "
            f"{feature_map.num_features} features, {what}, {length:,} tokens",
            figure=ratios(times[str(window)], times["None"]),
            unit="×",
            bound="<= 1.5",
            seconds={name: spread(samples) for name, samples in times.items()},
            error=errors[window],
        )


def attended(window: int | None, feature_map: FeatureMap, inputs: list[Tensor], *, is_causal: bool) -> list[Tensor]:
    """The rows; of inputs that require gradients those of all, the map's own among them."""
    out = linattn.linear_attention(*inputs, feature_map, is_causal=is_causal, window=window)
    if not inputs[0].requires_grad:
        return [out]
    weights = [x for x in feature_map.parameters() if x.requires_grad]
    return list(torch.autograd.grad(out, [*inputs, *weights], inputs[0].detach()))


def gradient_error(window: int | None, feature_map: FeatureMap, inputs: list[Tensor], *, is_causal: bool) -> float:
    """Largest relative error of the gradients of queries, keys and values; refuses a wrong one."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    options = {"is_causal": is_causal, "window": window, "backend": "reference"}
    truth = linattn.linear_attention(*exact, feature_map, **options)
    wanted = torch.autograd.grad(truth, exact, exact[0].detach())
    found = attended(window, feature_map, inputs, is_causal=is_causal)[:3]
    error = max(relative_error(x, y) for x, y in zip(found, wanted, strict=True))
    require(f"gradients of {feature_map!r} + window {window}", error, 1e-4)
    return error


def repeated(run: Callable[[], object], number: int) -> None:
    """So many calls in a row."""
    for _ in range(number):
        run()


def compare(
    claim: str,
    bound: str,
    narrow: tuple[Callable[[], object], float],
    wide: tuple[Callable[[], object], float],
    *,
    number: int,
) -> None:
    """The ratio of what so many calls cost beside the wide window to what they do beside the narrow one."""
    contenders = {"narrow": partial(repeated, narrow[0], number), "wide": partial(repeated, wide[0], number)}
    times = seconds(contenders, repeats=REPEATS)
    record(
        claim,
        figure=ratios(times["wide"], times["narrow"]),
        unit="×",
        bound=bound,
        seconds={name: spread([x / number for x in samples]) for name, samples in times.items()},
        error=max(narrow[1], wide[1]),
    )


def main() -> None:
    """Verify, time, record."""
    feature_map = favor()
    for each in (feature_map, LearnedExponential(HEAD_DIM, 64)):
        for length in LENGTHS:
            for gradients, is_causal in ((False, False), (False, True), (True, False), (True, True)):
                with torch.set_grad_enabled(gradients):
                    beside(each, length, is_causal=is_causal, gradients=gradients)
    with torch.no_grad():
        for num_heads in (HEADS, HEADS // 4):
            narrow, wide = (stepped(window, num_heads, feature_map) for window in (NARROW, WIDE))
            claim = (
                f"a token beside a window of {WIDE:,} over one beside {NARROW}, {HEADS} heads on {num_heads} of keys"
            )
            compare(claim, "<= 1.3", narrow, wide, number=WIDE)
        narrow, wide = (short(window, feature_map) for window in (SHORTEST, LONGEST))
        compare(f"{TEXT} tokens beside a window of {LONGEST:,} over {SHORTEST}", "<= 1.1", narrow, wide, number=TEXTS)


if __name__ == "__main__":
    main()
