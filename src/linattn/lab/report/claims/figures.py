"""A claim's chart, as a plotly figure without colours of its background: the page adds those of its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from linattn.lab.experiments.experiment import EXACT, UNIFORM, FigureRow
from linattn.lab.experiments.records import Decision
from linattn.lab.report._drawing import COLOURS, GREY, SYMBOLS, tick_texts
from linattn.lab.report.claims.summary import Claim

# Bars are drawn twice as long as a standard error.
_BAR = 2
_LEGEND_LINE = 22
_TITLE_WIDTH = 40
_NAME_WIDTH = 16
# More abscissae than these are told by round numbers.
_MOST_TICKS = 12


def claim_chart(claim: Claim) -> go.Figure:
    """All figures of a claim: one curve per series, what is expected dashed in its colour, baselines in grey."""
    decision = claim.decision
    figure = go.Figure()
    curves: dict[str, list[FigureRow]] = {}
    for row in claim.rows:
        curves.setdefault(row.series, []).append(row)
    place = 0
    for name, rows in curves.items():
        if _is(name, EXACT) or _is(name, UNIFORM):
            figure.add_trace(_baseline(name, rows, decision))
            continue
        colour, symbol = COLOURS[place % len(COLOURS)], SYMBOLS[place % len(SYMBOLS)]
        figure.add_trace(_measured(name, rows, decision, colour, symbol))
        if any(row.expected is not None for row in rows):
            figure.add_trace(_expected(name, rows, decision, colour))
        place += 1
    if UNIFORM in curves and not any(_is(name, EXACT) for name in curves) and not decision.log_y:
        figure.add_hline(0, line={"color": GREY, "width": 2}, annotation_text=EXACT)
    return _laid_out(figure, claim)


def alternative(claim: Claim) -> str:
    """The chart in a sentence: its text alternative."""
    decision = claim.decision
    curves = list(dict.fromkeys(row.series for row in claim.rows))
    return f"Chart of {decision.y} against {decision.x}: {', '.join(curves)}. {decision.figure}"


def _measured(name: str, rows: Sequence[FigureRow], decision: Decision, colour: str, symbol: str) -> go.Scatter:
    """One series with bars of two standard errors."""
    bars = [_BAR * row.standard_error if row.standard_error else None for row in rows]
    return go.Scatter(
        name=name,
        x=[row.x for row in rows],
        y=[_finite(row.value) for row in rows],
        mode="markers" if decision.names or len(rows) == 1 else "lines+markers",
        line={"color": colour, "width": 2},
        marker={"symbol": symbol, "size": 8, "color": colour},
        error_y={"array": bars, "thickness": 1.5, "width": 4} if any(bars) else None,
        customdata=[_where(row, decision) for row in rows],
        hovertemplate="%{customdata}: %{y:.4~g}<extra>" + _escaped(name) + "</extra>",
    )


def _expected(name: str, rows: Sequence[FigureRow], decision: Decision, colour: str) -> go.Scatter:
    """What theory, or the claim, says of a series."""
    known = [row for row in rows if row.expected is not None]
    lone = decision.names or len(known) == 1
    return go.Scatter(
        name=f"{name}: expected",
        x=[row.x for row in known],
        y=[_finite(row.expected) for row in known],
        mode="markers" if lone else "lines",
        line={"color": colour, "width": 2, "dash": "dash"},
        marker={"symbol": "line-ew-open", "size": 18, "color": colour, "line": {"width": 2}},
        customdata=[_where(row, decision) for row in known],
        hovertemplate="%{customdata}: %{y:.4~g} expected<extra>" + _escaped(name) + "</extra>",
        showlegend=False,
    )


def _baseline(name: str, rows: Sequence[FigureRow], decision: Decision) -> go.Scatter:
    """Exact attention, or averaging the values."""
    return go.Scatter(
        name=name,
        x=[row.x for row in rows],
        y=[_finite(row.value) for row in rows],
        mode="markers" if decision.names else "lines+markers",
        line={"color": GREY, "width": 2, "dash": "dot" if _is(name, UNIFORM) else "solid"},
        marker={"symbol": "line-ew-open", "size": 14, "color": GREY, "line": {"width": 2}},
        hovertemplate="%{y:.4~g}<extra>" + _escaped(name) + "</extra>",
    )


def _is(name: str, baseline: str) -> bool:
    """Whether a series is this baseline, or a case of it after a comma."""
    return name == baseline or name.startswith(f"{baseline},")


def _laid_out(figure: go.Figure, claim: Claim) -> go.Figure:
    """Axes, and a legend that is given the room it takes: above, where no name of a case can run into it."""
    decision = claim.decision
    shown = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(
        height=360 + _LEGEND_LINE * math.ceil(shown / 2),
        margin={"l": 64, "r": 12, "t": 12, "b": 52},
        xaxis={**_axis(decision.x, decision.log_x), **_abscissae(claim)},
        yaxis=_axis(decision.y, decision.log_y),
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        showlegend=shown > 1,
        meta={"narrow_height": 400 + _LEGEND_LINE * shown},
    )
    return figure


def _axis(title: str, logarithmic: bool) -> dict[str, Any]:
    """Its kind, and a title that does not run out of the chart."""
    kind = "log" if logarithmic else "linear"
    text = _folded(title, _TITLE_WIDTH)
    return {"type": kind, "exponentformat": "power", "title": {"text": text}, "automargin": True}


def _abscissae(claim: Claim) -> dict[str, Any]:
    """Ticks: names of cases, or the abscissae themselves where they are few and the axis logarithmic."""
    names = claim.decision.names
    if names:
        texts = [_folded(name, _NAME_WIDTH) for name in names]
        return {"tickvals": list(range(len(names))), "ticktext": texts, "range": [-0.5, len(names) - 0.5]}
    found = sorted({row.x for row in claim.rows})
    if claim.decision.log_x and len(found) <= _MOST_TICKS:
        return {"tickvals": found, "ticktext": tick_texts(found)}
    return {}


def _where(row: FigureRow, decision: Decision) -> str:
    """An abscissa in words."""
    if decision.names and 0 <= row.x < len(decision.names):
        return _escaped(decision.names[int(row.x)])
    return f"{row.x:,.6g}"


def _finite(value: float | None) -> float | None:
    """A chart has no place for what is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _folded(text: str, width: int) -> str:
    """Broken into lines, which plotly does not do."""
    return "<br>".join(map(_escaped, wrap(text, width)))


def _escaped(text: str) -> str:
    """Plotly reads texts as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
