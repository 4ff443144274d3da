"""When a method pays: the whole model's time under it beside softmax's, and one attention's time at growing lengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from linattn.hf import AttentionCall
from linattn.methods.measures import seconds
from linattn_lab.audit.records import AuditRow, HeadRow, LengthsRow, TimeRow

LINEAR, EXACT = "linear", "exact"
# A call that takes longer is timed once.
_LONG_SECONDS = 0.5
_REPEATS = 3
# No call of softmax that would take longer is begun, nor one over more tokens.
_MOST_SECONDS = 2.0
_MOST_TOKENS = 65_536
# Less gain over averaging than this is not worth an answer to when it pays.
_SMALL_GAIN = 0.05


def time_model(
    linear: Callable[[], object], exact: Callable[[], object]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of forward passes of the whole model under a method and under softmax, in turn."""
    (first,) = seconds({EXACT: exact}, repeats=1)[EXACT]
    found = seconds({LINEAR: linear, EXACT: exact}, repeats=1 if first > _LONG_SECONDS else _REPEATS)
    return tuple(found[LINEAR]), tuple(found[EXACT])


def time_lengths(
    label: str, features: int | None, answer: Callable[[AttentionCall], Tensor], call: AttentionCall
) -> LengthsRow:
    """One layer's attention at its own length, twice that, and so on, until the method is faster than softmax.

    The tokens are repeated to the length: how long a call takes does not depend on what they hold. Ends where softmax
    would take more than 2 s, or at 65,536 tokens.

    Cost: four calls of each kind at each length, two where calls take long; the last take about as long as all before.
    """
    points: list[tuple[int, float, float]] = []
    length, repeats = call.query.shape[2], _REPEATS
    while not points or length <= _MOST_TOKENS:
        ours, theirs = _medians(answer, _repeated(call, length), repeats)
        points.append((length, ours, theirs))
        # Twice the tokens are four times the pairs.
        if ours < theirs or 4 * theirs > _MOST_SECONDS:
            break
        length *= 2
        repeats = 1 if max(ours, theirs) > _LONG_SECONDS / 2 else _REPEATS
    return LengthsRow(label, features, *zip(*points, strict=True))


def _medians(answer: Callable[[AttentionCall], Tensor], call: AttentionCall, repeats: int) -> tuple[float, float]:
    """Seconds of a method and of softmax, in turn; on an accelerator a call waits for its own result."""

    def waited(attend: Callable[[AttentionCall], Tensor]) -> None:
        """A call that has ended."""
        attend(call)
        if call.query.is_cuda:
            torch.cuda.synchronize(call.query.device)

    with torch.no_grad():
        kinds = {LINEAR: partial(waited, answer), EXACT: partial(waited, AttentionCall.softmax)}
        samples = seconds(kinds, repeats=repeats)
    return statistics.median(samples[LINEAR]), statistics.median(samples[EXACT])


def _repeated(call: AttentionCall, length: int) -> AttentionCall:
    """A call on its tokens from the first on again and again, to the length, none of them padding."""
    tokens = (call.query, call.key, call.value)
    query, key, value = (x.repeat(1, 1, math.ceil(length / x.shape[2]), 1)[:, :, :length] for x in tokens)
    return replace(call, query=query, key=key, value=value, key_mask=None)


def worth_timing(rows: Sequence[AuditRow]) -> list[tuple[str, int]]:
    """Methods and widths that are better than averaging, and that no other beats both in error and in time.

    Example:
        >>> def head(name, error):
        ...     return HeadRow(0, 0, name, 4, 0, None, error, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, 6, 20)
        >>> rows = [head("Relu", 0.5), head("Taylor", 0.2), head("Oprf", 0.4), head("Sderf", 0.9)]
        >>> times = {"Relu": 1.0, "Taylor": 2.0, "Oprf": 3.0, "Sderf": 0.5}
        >>> rows += [TimeRow(name, 4, (time,), (1.0,), 1) for name, time in times.items()]
        >>> worth_timing(rows)  # Oprf is slower than Taylor and worse; Sderf is worse than averaging
        [('Relu', 4), ('Taylor', 4)]
    """
    errors: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
    for row in rows:
        if isinstance(row, HeadRow):
            errors.setdefault((row.map, row.features), []).append((row.error, row.uniform_error))
    found, least = [], math.inf
    times = [row for row in rows if isinstance(row, TimeRow) and (row.map, row.features) in errors]
    for row in sorted(times, key=lambda row: statistics.median(row.seconds)):
        error, uniform = (sum(each) for each in zip(*errors[row.map, row.features], strict=True))
        # An error that is not finite is below nothing.
        if row.features is not None and error < min((1 - _SMALL_GAIN) * uniform, least):
            least = error
            found.append((row.map, row.features))
    return found
