"""An audit's map of heads, as a plotly figure without colours of its background: the page adds those of its theme."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from linattn.lab.report.audit.summary import AuditSummary, Line

# Blue is better than averaging, orange worse; light where a map changes nothing.
_DIVERGING = ((0.0, "#08519c"), (0.25, "#6baed6"), (0.5, "#f5f5f5"), (0.75, "#fdae6b"), (1.0, "#a63603"))

_MOST_LABELLED_HEADS = 16


def head_map(summary: AuditSummary, chosen: Line) -> go.Figure:
    """Layer × head, coloured by error over averaging's: 1 is averaging, 0 exact; the scale ends at 2."""
    cells = head_cells(summary)[f"{chosen.map} · {chosen.features:,}"]
    columns = max(map(len, cells))
    heat = go.Heatmap(
        z=cells,
        x=[str(head) for head in range(columns)],
        y=[str(summary.header.number(layer)) for layer in range(len(cells))],
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


def head_cells(summary: AuditSummary) -> dict[str, list[list[float | None]]]:
    """What the heat map shows for every map and width, by "map · features"."""
    return {
        f"{label} · {features:,}": [
            [round(ratio, 4) if math.isfinite(ratio) else None for ratio in layer] for layer in layers
        ]
        for (label, features), layers in summary.head_ratios.items()
    }
