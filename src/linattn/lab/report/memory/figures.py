"""Charts of an audit of a constant memory: KL against bytes, and along a passage."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from linattn.lab.constant_memory.records import EXACT, UNIFORM
from linattn.lab.report._drawing import COLOURS, GREY, SYMBOLS
from linattn.lab.report.memory.summary import MemoryLine, MemorySummary


def kl_by_bytes(summary: MemorySummary) -> go.Figure:
    """KL divergence against the bytes kept, one curve per contender; the dotted line is averaging the values."""
    figure = go.Figure()
    for place, name in enumerate(_names(summary)):
        lines = [line for line in summary.lines if line.contender == name and line.passages]
        lines.sort(key=lambda line: line.num_bytes)
        figure.add_trace(_curve(place, name, [line.num_bytes for line in lines], lines, "%{x:,} bytes"))
    uniform = summary.line(UNIFORM)
    ends = [line.num_bytes for line in summary.lines if line.budget and line.passages]
    if uniform is not None and uniform.passages and ends:
        figure.add_trace(_baseline([min(ends), max(ends)], uniform.kl))
    return _laid_out(figure, "bytes kept in all global layers")


def kl_by_position(summary: MemorySummary, budget: int) -> go.Figure:
    """KL divergence along a passage at one budget, one curve per contender."""
    figure, ends = go.Figure(), summary.header.ends
    for place, name in enumerate(_names(summary)):
        line = summary.line(name, budget)
        if line is None or not line.passages:
            continue
        measured = [(end, kl) for end, kl in zip(ends, line.kl_by_position, strict=True) if math.isfinite(kl)]
        figure.add_trace(_trace(place, name, [end for end, _ in measured], [kl for _, kl in measured], "up to %{x:,}"))
    return _laid_out(figure, "position in the passage, tokens")


def _names(summary: MemorySummary) -> list[str]:
    """Contenders in order, baselines left out."""
    found = (line.contender for line in summary.lines if line.contender not in (EXACT, UNIFORM))
    return list(dict.fromkeys(found))


def _curve(place: int, name: str, x: list[int], lines: list[MemoryLine], where: str) -> go.Scatter:
    """One contender's KL; budgets at which nothing is lost lie below any logarithmic axis."""
    return _trace(place, name, x, [line.kl for line in lines], where)


def _trace(place: int, name: str, x: list[int], y: list[float], where: str) -> go.Scatter:
    """One contender."""
    colour = COLOURS[place % len(COLOURS)]
    return go.Scatter(
        name=name,
        x=x,
        y=[value if value > 0 else None for value in y],
        mode="lines+markers",
        line={"color": colour, "width": 2, "dash": "solid" if place < len(COLOURS) else "dot"},
        marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8, "color": colour},
        hovertemplate=f"{name}<br>{where}: %{{y:.4f}}<extra></extra>",
    )


def _baseline(x: list[int], kl: float) -> go.Scatter:
    """Averaging the values."""
    name = "averaging the values"
    style = {"color": GREY, "width": 2, "dash": "dot"}
    return go.Scatter(name=name, x=x, y=[kl, kl], mode="lines", line=style, hovertemplate=f"{name}<extra></extra>")


def _laid_out(figure: go.Figure, title: str) -> go.Figure:
    """Logarithmic axes."""
    figure.update_layout(
        height=540,
        margin={"l": 60, "r": 12, "t": 12, "b": 52},
        xaxis={"title": {"text": title}, "type": "log", "exponentformat": "none"},
        yaxis={"title": {"text": "KL from the exact model, nats"}, "type": "log", "exponentformat": "none"},
        legend={"orientation": "h", "y": -0.18, "yanchor": "top"},
        meta={"narrow_height": 760},
    )
    return figure
