"""A benchmark's two charts."""

from __future__ import annotations

from collections.abc import Sequence

from linattn_lab.costs import spread
from linattn_lab.report.bench.summary import BenchSummary
from linattn_lab.report.charts import Axis, Chart, Curve, baseline, drawable, ticks

_CONTENDERS = ("linear attention", "exact attention")


def time_curves(summary: BenchSummary) -> Chart:
    """Milliseconds against L, medians with bars from minimum to maximum; a dotted line where linear begins to pay."""
    samples = [[(row.length, row.linear_seconds) for row in summary.rows]]
    samples.append([(row.length, row.exact_seconds) for row in summary.rows if row.exact_seconds is not None])
    curves = []
    for number, found in enumerate(samples):
        spreads = [{name: 1e3 * value for name, value in spread(seconds).items()} for _, seconds in found]
        ends = tuple(tuple(each[name] for each in spreads) for name in ("min", "max"))
        lengths = [length for length, _ in found]
        curves.append(_curve(number, lengths, [each["median"] for each in spreads], "ms", *ends))
    length, between = summary.crossover.length, summary.crossover.between
    if length is not None and between is not None:
        heights = [y for curve in curves for y in curve.y if y is not None]
        curves.append(
            baseline(
                "crossover, between {:,} and {:,}".format(*between), [length] * 2, [min(heights), max(heights)], "dot"
            )
        )
    return _chart(curves, summary, "milliseconds per call")


def memory_curves(summary: BenchSummary) -> Chart:
    """Extra peak memory in megabytes against L."""
    sizes = [[(row.length, row.linear_memory) for row in summary.rows if row.linear_memory is not None]]
    sizes.append([(row.length, row.exact_memory) for row in summary.rows if row.exact_memory is not None])
    curves = [
        _curve(number, [length for length, _ in found], [size / 1e6 for _, size in found], "MB")
        for number, found in enumerate(sizes)
    ]
    return _chart(curves, summary, "extra peak memory, MB")


def _curve(
    contender: int,
    lengths: Sequence[int],
    values: Sequence[float],
    unit: str,
    low: tuple[float, ...] = (),
    high: tuple[float, ...] = (),
) -> Curve:
    """One contender."""
    name = _CONTENDERS[contender]
    tips = tuple(
        f"{name}, {length:,} tokens: {value:,.4g} {unit}" for length, value in zip(lengths, values, strict=True)
    )
    heights = tuple(drawable(value, is_logarithmic=True) for value in values)
    return Curve(name, tuple(lengths), heights, tips, contender, low=low, high=high)


def _chart(curves: Sequence[Curve], summary: BenchSummary, title: str) -> Chart:
    """Both axes logarithmic, a tick at every length measured."""
    lengths = Axis("tokens L", is_logarithmic=True, ticks=ticks(summary.header.lengths))
    return Chart(tuple(curves), lengths, Axis(title, is_logarithmic=True))
