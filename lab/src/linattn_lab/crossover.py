"""From which length on linear attention is faster than softmax, on a layer's own tensors.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.methods.costs import seconds
from linattn_lab.costs import spread

LINEAR, EXACT = "linear", "exact"
Tokens = tuple[Tensor, Tensor, Tensor]
"""Query (B, H, L, D), key (B, Hkv, L, D) and value (B, Hkv, L, Dv) of self-attention."""

# A call that takes longer is timed once.
_LONG_SECONDS = 0.5
_REPEATS = 3
# No call of exact attention that would take longer is begun, nor one over more tokens.
_MOST_SECONDS = 2.0
_MOST_TOKENS = 65_536


@dataclass(frozen=True)
class Crossover:
    """From which length on linear attention is faster, at every length measured from there on.

    Attributes:
        length: interpolated between two measured lengths; None where there are no such two.
        between: the two; None where linear attention is faster at all lengths or not at the last one.
        always: whether it is faster at every length.
        last: the last length at which both were measured.
    """

    length: float | None
    between: tuple[int, int] | None
    always: bool
    last: int


class Times(NamedTuple):
    """Medians at growing lengths."""

    lengths: tuple[int, ...]  # L, ascending
    seconds: tuple[float, ...]  # of a call of linear attention
    exact_seconds: tuple[float, ...]  # of a call of exact attention


def time_lengths(linear: Callable[..., object], exact: Callable[..., object], tokens: Tokens) -> Times:
    """Two kinds of attention at a length, twice that, and so on, until the first is faster.

    The tokens are repeated to the length: how long a call takes does not depend on what they hold. Ends where exact
    attention would take more than 2 s, or at 65,536 tokens.

    Cost: four calls of each kind at each length, two where calls take long; the last take about as long as all before.

    Example:
        >>> x = torch.zeros(1, 1, 32768, 1)
        >>> time_lengths(lambda *_: x.cumsum(2).tolist(), lambda *_: None, (x, x, x)).lengths
        (32768, 65536)
    """
    length = tokens[0].shape[2]
    points: list[tuple[int, float, float]] = []
    repeats = _REPEATS
    while not points or length <= _MOST_TOKENS:
        ours, theirs = _medians(linear, exact, _repeated(tokens, length), repeats)
        points.append((length, ours, theirs))
        # Twice the tokens are four times the pairs.
        if ours < theirs or 4 * theirs > _MOST_SECONDS:
            break
        length *= 2
        repeats = 1 if max(ours, theirs) > _LONG_SECONDS / 2 else _REPEATS
    lengths, first, second = zip(*points, strict=True)
    return Times(lengths, first, second)


def find_crossover(points: Sequence[tuple[int, float, float]]) -> Crossover:
    """From which length on the first contender is faster than the second, at every later point.

    Between the last point at which it is not and the next, log(first / second) is taken as linear in log L.

    Example:
        >>> find_crossover([(64, 2.0, 1.0), (256, 8.0, 16.0)])  # L/32 and L²/4096 cross at 128
        Crossover(length=128.0, between=(64, 256), always=False, last=256)

    Source: linear interpolation.
    """
    last = points[-1][0]
    slower = [index for index, (_, first, second) in enumerate(points) if not first < second]
    if not slower or slower[-1] == len(points) - 1:
        return Crossover(None, None, always=not slower, last=last)
    (left, *before), (right, *after) = points[slower[-1]], points[slower[-1] + 1]
    excess, gain = math.log(before[0] / before[1]), math.log(after[1] / after[0])
    length = left * (right / left) ** (excess / (excess + gain))
    return Crossover(length, (left, right), always=False, last=last)


def from_where(found: Crossover, longest: int | None) -> str:
    """From which length on attention is faster, and whether the model takes so many tokens: sentences.

    Example:
        >>> from_where(Crossover(1096.0, (1024, 2048), False, 2048), 512)
        'Attention alone is slower at 1,024 tokens, faster from 2,048 on, and the model takes at most 512.'
    """
    takes = "" if longest is None else f" The model takes at most {longest:,} tokens."
    if found.always:
        return f"Attention alone is faster at this length already.{takes}"
    if found.length is None or found.between is None:
        return f"Attention alone is not faster up to {found.last:,} tokens.{takes}"
    text = "Attention alone is slower at {:,} tokens, faster from {:,} on".format(*found.between)
    if longest is not None and found.length > longest:
        return f"{text}, and the model takes at most {longest:,}."
    return f"{text}.{takes}"


def _medians(
    linear: Callable[..., object], exact: Callable[..., object], tokens: Tokens, repeats: int
) -> tuple[float, float]:
    """Seconds of both, in turn; on an accelerator a call waits for its own result."""

    def waited(call: Callable[..., object]) -> None:
        """A call that has ended."""
        call(*tokens)
        if tokens[0].is_cuda:
            torch.cuda.synchronize(tokens[0].device)

    with torch.no_grad():
        samples = seconds({LINEAR: partial(waited, linear), EXACT: partial(waited, exact)}, repeats=repeats)
    return spread(samples[LINEAR])["median"], spread(samples[EXACT])["median"]


def _repeated(tokens: Tokens, length: int) -> Tokens:
    """Tokens from the first on again and again, to the length."""
    query, key, value = (x.repeat(1, 1, math.ceil(length / x.shape[2]), 1)[:, :, :length] for x in tokens)
    return query, key, value
