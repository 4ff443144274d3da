"""Claim: queries and keys as large as those of pretrained heads, and gates that forget fast, cost little more.

Exponents of features then spread over more than float32 holds: products of features that are subnormal would take up to
two hundred times as long on some processors, and blocks whose largest exponent jumps are cut into rectangles. Tokens of
4 and 8 standard deviations, logits of 128 and 512, against tokens of 1; gates that take 0.1 and 1 nat a token, against
none. FavorPlus with 256 features, 8 heads, D = 64, float32, 8,192 tokens, forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import linattn
from linattn.positions import Gates, gated_attention_with_state
from measuring import HEADS, favor, ratios, record, relative_error, require, seconds, spread, tokens

LENGTH, VERIFIED_LENGTH, REPEATS = 8_192, 600, 7
SIZES, RATES = (4.0, 8.0), (0.1, 1.0)


def sized(size: float, length: int) -> list[Tensor]:
    """Queries and keys of so many standard deviations, and values."""
    query, key, value = tokens(length)
    return [query * size, key * size, value]


def gates(rate: float, length: int) -> Gates:
    """Gates that take so many nats a token."""
    return Gates(torch.full((1, HEADS, length), -rate))


def verified(size: float, rate: float) -> float:
    """Relative error of a causal call against the reference in float64; refuses a wrong result."""
    inputs, of_tokens = sized(size, VERIFIED_LENGTH), gates(rate, VERIFIED_LENGTH)
    exact, of_exact = [x.double() for x in inputs], Gates(of_tokens.log_forget.double())
    truth = gated_attention_with_state(*exact, favor(), of_exact, backend="reference").out
    error = relative_error(gated_attention_with_state(*inputs, favor(), of_tokens).out, truth)
    require(f"tokens of {size}, gates of {rate}", error, 1e-4)
    return error


def attended(size: float, is_causal: bool) -> Callable[[], object]:
    """A run of a call."""
    return partial(linattn.linear_attention, *sized(size, LENGTH), favor(), is_causal=is_causal)


def gated(rate: float) -> Callable[[], object]:
    """A run of a call with gates."""
    return partial(gated_attention_with_state, *tokens(LENGTH), favor(), gates(rate, LENGTH))


def main() -> None:
    """Verify, time, record."""
    errors = {size: verified(size, 0.0) for size in SIZES} | {-rate: verified(1.0, rate) for rate in RATES}
    runs = {
        **{f"tokens of {x:g} standard deviations, bidirectional": (x, attended(x, False)) for x in (1.0, *SIZES)},
        **{f"tokens of {x:g} standard deviations, causal": (x, attended(x, True)) for x in (1.0, *SIZES)},
        **{f"gates that take {x:g} nats a token": (-x, gated(x)) for x in (0.0, *RATES)},
    }
    found = seconds({name: run for name, (_, run) in runs.items()}, repeats=REPEATS)
    least: list[float] = []
    for name, (key, _) in runs.items():
        if key not in errors:
            # Those of each kind that the others are compared with come first.
            least = found[name]
            continue
        record(
            f"{name}, over {'none' if key < 0 else 'tokens of 1'}",
            figure=ratios(found[name], least),
            unit="×",
            bound="<= 2" if "bidirectional" in name else "<= 6",
            length=LENGTH,
            error=errors[key],
            seconds=spread(found[name]),
        )


if __name__ == "__main__":
    main()
