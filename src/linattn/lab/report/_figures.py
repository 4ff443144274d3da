"""An audit's two charts, as plotly figures without colours of their background: the page adds those of its theme."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from linattn.lab.report._drawing import COLOURS, GREY, SYMBOLS, tick_texts
from linattn.lab.report._tables import number
from linattn.lab.report.summary import Line, Summary

# Blue is better than averaging, orange worse; light where a map changes nothing.
_DIVERGING = ((0.0, "#08519c"), (0.25, "#6baed6"), (0.5, "#f5f5f5"), (0.75, "#fdae6b"), (1.0, "#a63603"))

_MOST_LABELLED_HEADS = 16

# The line of a map by what is wrapped around it.
_DASHES = {"": "dash", "Centred(": "solid", "Balanced(": "longdash", "Centred(Balanced(": "dashdot"}


def head_map(summary: Summary, chosen: Line) -> go.Figure:
    """Layer × head, coloured by error over averaging's: 1 is averaging, 0 exact; the scale ends at 2."""
    cells = head_cells(summary)[f"{chosen.map} · {chosen.features:,}"]
    columns = max(map(len, cells))
    heat = go.Heatmap(
        z=cells,
        x=[str(head) for head in range(columns)],
        y=[str(layer) for layer in range(len(cells))],
        zmin=0,
        zmax=2,
        colorscale=[list(stop) for stop in _DIVERGING],
        xgap=2,
        ygap=2,
        texttemplate="%{z:.2f}" if columns <= _MOST_LABELLED_HEADS else None,
        hovertemplate="layer %{y}, head %{x}<br>error / averaging %{z:.3f}<extra></extra>",
        colorbar={"title": {"text": "error /<br>averaging"}, "thickness": 12, "tickvals": [0, 0.5, 1, 1.5, 2]},
    )
    figure = go.Figure(heat)
    figure.update_layout(
        height=130 + 44 * len(cells),
        margin={"l": 44, "r": 8, "t": 8, "b": 44},
        xaxis={"title": {"text": "head"}, "fixedrange": True, "type": "category"},
        yaxis={"title": {"text": "layer"}, "fixedrange": True, "type": "category", "autorange": "reversed"},
    )
    return figure


def head_cells(summary: Summary) -> dict[str, list[list[float | None]]]:
    """What the heat map shows for every map and width, by "map · features"."""
    return {
        f"{label} · {features:,}": [
            [round(ratio, 4) if math.isfinite(ratio) else None for ratio in layer] for layer in layers
        ]
        for (label, features), layers in summary.head_ratios.items()
    }


def error_curves(summary: Summary) -> go.Figure:
    """Mean error against the number of features, one line per map; the dotted line is averaging, the axis exact."""
    uniform = summary.baselines[1].error
    figure = go.Figure()
    bases = list(dict.fromkeys(_base(line.map) for line in summary.lines))
    for label in dict.fromkeys(line.map for line in summary.lines):
        lines = [line for line in summary.lines if line.map == label]
        figure.add_trace(_curve(label, lines, bases.index(_base(label))))
    figure.add_hline(
        y=uniform,
        line={"dash": "dot", "width": 2, "color": GREY},
        annotation={"text": f"averaging the values: {uniform:.2f}", "font": {"color": GREY}},
        annotation_position="top right",
    )
    widths = sorted({line.features for line in summary.lines})
    figure.update_layout(
        height=520,
        margin={"l": 52, "r": 12, "t": 12, "b": 52},
        xaxis={"title": {"text": "features"}, "type": "log", "tickvals": widths, "ticktext": tick_texts(widths)},
        yaxis={"title": {"text": "relative output error"}, "range": [0, 2 * uniform]},
        legend={"orientation": "h", "y": -0.18, "yanchor": "top"},
        meta={"narrow_height": 760},
    )
    return figure


def beyond(summary: Summary) -> tuple[str, ...]:
    """Maps whose error lies above the curves' axis, with the error."""
    top = 2 * summary.baselines[1].error
    return tuple(
        f"{line.map} at {line.features:,} features ({number(line.error.mean)})"
        for line in summary.lines
        if not line.error.mean <= top
    )


def _base(label: str) -> str:
    """The map inside all wrappers, or the map itself: all get one colour."""
    wrappers = _wrappers(label)
    return label.removeprefix(wrappers).removesuffix(")" * wrappers.count("("))


def _wrappers(label: str) -> str:
    """What stands before the innermost map, "Centred(Balanced(" for example."""
    return max((start for start in _DASHES if label.startswith(start)), key=len)


def _curve(label: str, lines: list[Line], base: int) -> go.Scatter:
    """One map's errors; wrapped maps filled, the others open, and a dash for each way to wrap."""
    wrappers = _wrappers(label)
    colour = COLOURS[base % len(COLOURS)]
    symbol = SYMBOLS[base % len(SYMBOLS)]
    spreads: list[Any] = [line.error.spread or 0.0 for line in lines]
    return go.Scatter(
        name=label,
        x=[line.features for line in lines],
        y=[line.error.mean if math.isfinite(line.error.mean) else None for line in lines],
        error_y={"array": spreads, "thickness": 1.5, "width": 4} if any(spreads) else None,
        mode="lines+markers" if len(lines) > 1 else "markers",
        line={"color": colour, "dash": _DASHES[wrappers], "width": 2},
        marker={"symbol": symbol if wrappers else f"{symbol}-open", "size": 10, "line": {"width": 2}, "color": colour},
        hovertemplate="%{x} features: %{y:.3f}<extra>" + label + "</extra>",
    )
