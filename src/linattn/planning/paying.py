"""Whether a method pays: its time and its state beside those of exact attention, on a layer's own tensors.

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

from linattn.planning.costs import exact_state_numbers, state_numbers
from linattn.planning.methods import BuiltMethod
from linattn.planning.timing import seconds, spread
from linattn.softmax import softmax_attention

LINEAR, EXACT = "linear", "exact"
Tokens = tuple[Tensor, Tensor, Tensor]
"""Query (B, H, L, D), key (B, Hkv, L, D) and value (B, Hkv, L, Dv) of self-attention."""

# A call that takes longer is timed once; none is over more tokens where its time follows from fewer.
_LONG_SECONDS = 0.5
_LONG_TEXT = 4096
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
    """Medians at growing lengths.

    Attributes:
        lengths: L, ascending.
        seconds: of a call of linear attention.
        exact_seconds: of a call of exact attention.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    exact_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Standing:
    """A method's time and state beside those of exact attention, at one length.

    Attributes:
        num_tokens: L.
        state_numbers: numbers that the method keeps per head.
        exact_numbers: those of the exact cache.
        seconds: of a call of the method, median.
        exact_seconds: of a call of exact attention.
    """

    num_tokens: int
    state_numbers: int
    exact_numbers: int
    seconds: float
    exact_seconds: float

    def words(self) -> str:
        """The figures, without a full stop.

        Example:
            >>> Standing(512, 77952, 32768, 0.4, 0.1).words()
            'at 512 tokens its attention takes 4.0 × the time of softmax and keeps 77,952 numbers per head, the exact \
cache 32,768'
        """
        ratio = self.seconds / self.exact_seconds
        return (
            f"at {self.num_tokens:,} tokens its attention takes {ratio:.1f} × the time of softmax and keeps "
            f"{self.state_numbers:,} numbers per head, the exact cache {self.exact_numbers:,}"
        )


def pays_not(
    built: BuiltMethod,
    tokens: Tokens,
    *,
    num_tokens: int,
    is_causal: bool,
    by_time_alone: bool = False,
) -> Standing | None:
    """A method that is neither faster nor smaller than exact attention at a length, with its figures.

    Nothing is timed of a method that keeps less than the exact cache, so that only short lengths are, unless time alone
    counts: at most as many tokens as have the numbers of the method's state.

    Calls over more than 4,096 tokens are not made: their times follow from those, ours as L and softmax's as L².

    Cost: none, or four calls of each kind over `num_tokens` tokens, at most 4,096.

    Args:
        built: the method, which is fitted to the tokens if it takes statistics.
        tokens: of one layer; repeated to the length.
        num_tokens: L.
        is_causal: whether later keys are hidden.
        by_time_alone: whether a smaller state is of no use, as in an encoder, which keeps nothing between calls.

    Returns:
        The `Standing`; None where the method is faster, or smaller where that is of use.

    Example:
        >>> from linattn.planning.methods import parse_method
        >>> built = parse_method("Taylor(order=1)").build(1, num_features=None, scale=1.0, seed=0)
        >>> x = torch.zeros(1, 1, 4, 1)
        >>> pays_not(built, (x, x, x), num_tokens=64, is_causal=False)  # 4 numbers of 128
    """
    dims = built.head_dim, tokens[2].shape[-1]
    state_size = state_numbers(built, value_dim=dims[1], is_causal=is_causal)
    exact = exact_state_numbers(num_tokens, head_dim=dims[0], value_dim=dims[1])
    if state_size < exact and not by_time_alone:
        return None
    built.fit(tokens[0], tokens[1])

    def linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The method's call."""
        return built.attend(query, key, value, is_causal=is_causal)

    def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Exact attention."""
        return softmax_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    timed = min(num_tokens, _LONG_TEXT)
    ours, theirs = _medians(linear, softmax, _repeated(tokens, timed), _REPEATS)
    ours, theirs = ours * num_tokens / timed, theirs * (num_tokens / timed) ** 2
    return None if ours < theirs else Standing(num_tokens, state_size, exact, ours, theirs)


def time_lengths(linear: Callable[..., object], exact: Callable[..., object], tokens: Tokens) -> Times:
    """Two kinds of attention at a length, twice that, and so on, until the first is faster.

    The tokens are repeated to the length: how long a call takes does not depend on what they hold. Ends where exact
    attention would take more than 2 s, or at 65,536 tokens.

    Cost: four calls of each kind at each length, two where calls take long; the last take about as long as all before.

    Args:
        linear: from query, key and value to an output.
        exact: the same by softmax.
        tokens: of one layer, of the first length.

    Returns:
        Medians at every length.

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

    Args:
        points: (L, seconds of the first, seconds of the second), by ascending L; at least one.

    Returns:
        A `Crossover`.

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

    Args:
        found: of one layer's attention.
        longest: tokens that the model takes at most; None where it does not say.

    Returns:
        The text.

    Example:
        >>> from_where(Crossover(1096.0, (1024, 2048), False, 2048), 512)
        'Attention alone is faster from 1,096 tokens on, and the model takes at most 512.'
    """
    takes = "" if longest is None else f" The model takes at most {longest:,} tokens."
    if found.always:
        return f"Attention alone is faster at this length already.{takes}"
    if found.length is None:
        return f"Attention alone is not faster up to {found.last:,} tokens.{takes}"
    text = f"Attention alone is faster from {found.length:,.0f} tokens on"
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
