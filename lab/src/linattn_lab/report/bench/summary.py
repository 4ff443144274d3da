"""What a benchmark says, in words and as a table: where linear attention begins to pay, and how times grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

from linattn.methods.measures import exact_state_numbers
from linattn.records.texts import Table
from linattn_lab.bench.records import BENCH, BenchHeader, LengthRow
from linattn_lab.costs import spread
from linattn_lab.crossover import Crossover, find_crossover
from linattn_lab.report._text import Point, counted, method_words, number

_MISSING = "—"


@dataclass(frozen=True)
class BenchSummary:
    """A benchmark, summed up.

    Attributes:
        header: its circumstances.
        rows: one per length, ascending.
        crossover: from which length on linear attention is faster.
        linear_slope: its time grows as L to this power; None with fewer than two lengths.
        exact_slope: the same for exact attention.
    """

    header: BenchHeader
    rows: tuple[LengthRow, ...]
    crossover: Crossover
    linear_slope: float | None
    exact_slope: float | None

    @property
    def words(self) -> str:
        """The method with its width, where it has a map."""
        return method_words(self.header.map, self.header.num_features)


def summarise_bench(path: Path) -> BenchSummary:
    """Read bench.jsonl, and sum it up.

    Raises:
        ValueError: if the file is no whole benchmark.
    """
    header, rows = BENCH.read(path)
    if [row.length for row in rows] != header.lengths or rows[0].exact_seconds is None:
        raise ValueError(f"{path} is no whole benchmark: rows of some lengths are missing; measure again")
    seconds = [second for row in rows for second in (*row.linear_seconds, *(row.exact_seconds or ()))]
    if not all(math.isfinite(second) and second > 0 for second in seconds):
        raise ValueError(f"{path} is damaged: a call took no time, or no finite one; measure again")
    both = [(row.length, median(row.linear_seconds), median(row.exact_seconds)) for row in rows if row.exact_seconds]
    return BenchSummary(
        header=header,
        rows=tuple(rows),
        crossover=find_crossover(both),
        linear_slope=slope([(row.length, median(row.linear_seconds)) for row in rows]),
        exact_slope=slope([(length, exact) for length, _, exact in both]),
    )


def slope(points: Sequence[tuple[int, float]]) -> float | None:
    """The power of L as which seconds grow: slope of the least-squares line through logarithms."""
    if len(points) < 2:
        return None
    return linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope


def conclude(summary: BenchSummary) -> tuple[Point, ...]:
    """The crossover, growth, what is kept of a text or left out, correctness, and the error of the approximation."""
    points = [Point("Crossover", _crossover_words(summary.crossover))]
    if summary.linear_slope is not None:
        exact = _MISSING if summary.exact_slope is None else f"L^{summary.exact_slope:.2f}"
        text = f"Time grows as L^{summary.linear_slope:.2f} (linear) and {exact} (exact), by least squares."
        points.append(Point("Growth", text))
    points.append(Point("Kept", _kept_words(summary.header)))
    left_out = [row for row in summary.rows if row.exact_predicted is not None]
    if left_out:
        text = (
            f"Exact attention was not run from L = {left_out[0].length:,} on: one call would take about "
            f"{left_out[0].exact_predicted:,.0f} s there, and the limit is {summary.header.exact_limit:,.0f} s."
        )
        points.append(Point("Left out", text))
    if all(row.linear_memory is None for row in summary.rows):
        points.append(Point("Memory", f"It was {summary.header.memory}."))
    return (*points, _correctness(summary), _approximation(summary))


def length_table(summary: BenchSummary, *, spreads: bool = True) -> Table:
    """One row per length: time, memory and error of linear attention beside its baselines."""
    columns = (
        "length",
        "linear ms",
        "exact ms",
        "speed / exact",
        "linear MB",
        "exact MB",
        "linear tokens/s",
        "linear error",
        "uniform error",
    )
    return Table(columns, tuple(_cells(summary.header, row, spreads=spreads) for row in summary.rows))


def _cells(header: BenchHeader, row: LengthRow, *, spreads: bool) -> tuple[str, ...]:
    """One length's texts."""
    linear = median(row.linear_seconds)
    faster = _MISSING if row.exact_seconds is None else _short(median(row.exact_seconds) / linear)
    return (
        f"{row.length:,}",
        _milliseconds(row.linear_seconds, spreads=spreads),
        _milliseconds(row.exact_seconds, spreads=spreads),
        faster,
        _megabytes(row.linear_memory),
        _megabytes(row.exact_memory),
        f"{header.batch * row.length / linear:,.0f}",
        number(row.approximation_error),
        number(row.uniform_error),
    )


def _crossover_words(found: Crossover) -> str:
    """Where linear attention begins to pay."""
    if found.between is not None:
        return "Linear attention is slower at {:,} tokens and faster from {:,} on.".format(*found.between)
    if found.always:
        return f"Linear attention is faster at every length measured (with exact attention up to {found.last:,})."
    return f"Linear attention is not faster up to {counted(found.last, 'token')}."


def _kept_words(header: BenchHeader) -> str:
    """The numbers of a state beside those of a cache."""
    length = header.lengths[-1]
    cached = exact_state_numbers(length, head_dim=header.head_dim, value_dim=header.head_dim)
    tokens = header.state_numbers / exact_state_numbers(1, head_dim=header.head_dim, value_dim=header.head_dim)
    return (
        f"Of a text of any length a head keeps {header.state_numbers:,} numbers, as many as the keys and values of "
        f"{tokens:,.0f} tokens; exact attention keeps all of them, at L = {length:,} {cached:,}."
    )


def _correctness(summary: BenchSummary) -> Point:
    """How far results were from their definition before they were timed."""
    errors = [row.error for row in summary.rows]
    errors += [row.gradient_error for row in summary.rows if row.gradient_error is not None]
    what = "Output and gradients" if summary.header.backward else "The output"
    found = f"{what} of {summary.header.map} came within {max(errors):.1e} of the definition in float64"
    if summary.header.error_bound is None:
        text = (
            f"{found}; there is no bound for weights of both signs, whose normaliser may come near zero, nor for keys "
            "in few bits, which float64 rounds otherwise."
        )
    else:
        text = f"{found} (relative error; the bound is {summary.header.error_bound:.1e})."
    return Point("Verified", text)


def _approximation(summary: BenchSummary) -> Point:
    """The error of linear attention, between its two baselines."""
    error = max(row.approximation_error for row in summary.rows)
    uniform = max(row.uniform_error for row in summary.rows)
    tokens = min(summary.header.num_verified, summary.header.lengths[-1])
    text = (
        f"On these random inputs {summary.words} is up to {number(error)} away from exact attention (relative error "
        f"over {counted(tokens, 'token')}), uniform attention {number(uniform)}"
        f"{'' if error < uniform else ': it is no better'}. linattn audit measures the error on your model."
    )
    return Point("Error", text)


def _milliseconds(samples: list[float] | None, *, spreads: bool) -> str:
    """Median, and least and most where asked for."""
    if samples is None:
        return _MISSING
    found = {name: _short(1e3 * value) for name, value in spread(samples).items()}
    return f"{found['median']} ({found['min']}–{found['max']})" if spreads else found["median"]


def _megabytes(size: int | None) -> str:
    """Millions of bytes."""
    return _MISSING if size is None else _short(size / 1e6)


def _short(value: float) -> str:
    """Three digits or so."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"
