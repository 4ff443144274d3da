"""What an audit's rows say of time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from linattn_lab.audit.records import AuditRow, LengthsRow, TimeRow
from linattn_lab.crossover import Crossover, find_crossover


@dataclass(frozen=True)
class Times:
    """Times by a method's written form and width."""

    ratios: dict[tuple[str, int | None], float]  # the whole model's time over its time with softmax, medians
    # from which length on one layer's attention is faster than softmax
    crossovers: dict[tuple[str, int | None], Crossover]


def times_of(rows: Iterable[AuditRow]) -> Times:
    """Collect the times among an audit's rows.

    Example:
        >>> times_of([TimeRow("Relu", 2, (3.0, 1.0, 2.0), (4.0, 4.0, 4.0), 1)]).ratios
        {('Relu', 2): 0.5}
    """
    found = Times({}, {})
    for row in rows:
        if not isinstance(row, TimeRow | LengthsRow):
            continue
        taken = [*row.seconds, *row.exact_seconds]
        if not row.seconds or not all(math.isfinite(time) and time > 0 for time in taken):
            raise ValueError(f"{row.map} took no time, or no finite one")
        if isinstance(row, TimeRow):
            found.ratios[row.map, row.features] = statistics.median(row.seconds) / statistics.median(row.exact_seconds)
        else:
            points = list(zip(row.lengths, row.seconds, row.exact_seconds, strict=True))
            found.crossovers[row.map, row.features] = find_crossover(points)
    return found
