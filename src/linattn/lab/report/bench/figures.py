"""A benchmark's two charts, as plotly figures without colours of their background: the page adds those of its theme."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from linattn.lab.report._drawing import COLOURS, GREY, SYMBOLS, tick_texts
from linattn.lab.report.bench.summary import BenchSummary
from linattn.lab.timing import spread

_CONTENDERS = ("linear attention", "exact attention")


def time_curves(summary: BenchSummary) -> go.Figure:
    """Milliseconds against L, medians with bars from minimum to maximum; a dotted line where linear begins to pay."""
    figure = go.Figure()
    samples = [[(row.length, row.linear_seconds) for row in summary.rows]]
    samples.append([(row.length, row.exact_seconds) for row in summary.rows if row.exact_seconds is not None])
    for number, found in enumerate(samples):
        spreads = [{name: 1e3 * value for name, value in spread(seconds).items()} for _, seconds in found]
        trace = _curve(number, [length for length, _ in found], [each["median"] for each in spreads], "ms")
        trace.error_y = {
            "symmetric": False,
            "array": [each["max"] - each["median"] for each in spreads],
            "arrayminus": [each["median"] - each["min"] for each in spreads],
            "thickness": 1.5,
            "width": 4,
        }
        figure.add_trace(trace)
    if summary.crossover.length is not None:
        figure.add_trace(_crossover_line(summary.crossover.length, [y for trace in figure.data for y in trace.y]))
    return _laid_out(figure, summary, "milliseconds per call")


def memory_curves(summary: BenchSummary) -> go.Figure:
    """Extra peak memory in megabytes against L."""
    figure = go.Figure()
    sizes = [[(row.length, row.linear_memory) for row in summary.rows if row.linear_memory is not None]]
    sizes.append([(row.length, row.exact_memory) for row in summary.rows if row.exact_memory is not None])
    for number, found in enumerate(sizes):
        figure.add_trace(_curve(number, [length for length, _ in found], [size / 1e6 for _, size in found], "MB"))
    return _laid_out(figure, summary, "extra peak memory, MB")


def _curve(contender: int, lengths: Sequence[int], values: Sequence[float], unit: str) -> go.Scatter:
    """One contender."""
    colour = COLOURS[contender]
    return go.Scatter(
        name=_CONTENDERS[contender],
        x=list(lengths),
        y=list(values),
        mode="lines+markers",
        line={"color": colour, "width": 2},
        marker={"symbol": SYMBOLS[contender], "size": 9, "color": colour},
        hovertemplate=f"%{{x:,}} tokens: %{{y:,.4~g}} {unit}<extra>{_CONTENDERS[contender]}</extra>",
    )


def _crossover_line(length: float, heights: Sequence[float]) -> go.Scatter:
    """A dotted vertical; a trace, since it is to stand in the legend."""
    label = f"crossover at {length:,.0f}"
    return go.Scatter(
        name=label,
        x=[length, length],
        y=[min(heights), max(heights)],
        mode="lines",
        line={"color": GREY, "width": 2, "dash": "dot"},
        hovertemplate=f"{label}<extra></extra>",
    )


def _laid_out(figure: go.Figure, summary: BenchSummary, title: str) -> go.Figure:
    """Both axes logarithmic, a tick at every length measured."""
    lengths = summary.header.lengths
    figure.update_layout(
        height=440,
        margin={"l": 60, "r": 12, "t": 12, "b": 52},
        xaxis={"title": {"text": "tokens L"}, "type": "log", "tickvals": lengths, "ticktext": tick_texts(lengths)},
        yaxis={"title": {"text": title}, "type": "log", "exponentformat": "none"},
        legend={"orientation": "h", "y": -0.18, "yanchor": "top"},
    )
    return figure
