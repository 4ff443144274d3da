"""An audit's frontier: error against what a method keeps and computes, one curve for each family of methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import plotly.graph_objects as go

from linattn.feature_maps import FEATURE_MAPS, LearnedMap, RandomFeatureMap
from linattn.lab.report._drawing import COLOURS, GREY, SYMBOLS
from linattn.lab.report.audit.summary import AuditSummary, Line
from linattn.planning.costs import exact_flops_per_token, exact_state_numbers
from linattn.planning.methods import parse_method

RANDOM = "random features"
MERGED = "merged keys"
_DEFAULT_ORDER = 1


def family(label: str) -> str:
    """The family of a method, given its written form: what its map is built on, and whether it has an exact part."""
    method = parse_method(label)
    if method.map is None:
        return MERGED
    name = method.map.name
    if name == "Expansion":
        kind = f"Expansion, order {dict(method.map.options).get('order', _DEFAULT_ORDER)}"
    elif name == "Nystrom":
        kind = "Nyström landmarks"
    elif issubclass(FEATURE_MAPS[name], RandomFeatureMap):
        kind = RANDOM
    elif issubclass(FEATURE_MAPS[name], LearnedMap):
        kind = "learned maps, untrained"
    else:
        kind = "elementwise and polynomial maps"
    return f"{kind}, with exact part" if method.exact else kind


def state_frontier(summary: AuditSummary) -> go.Figure:
    """Error against the numbers kept per head, with the limit of the rank."""
    header = summary.header
    figure = _curves(summary, lambda line: line.state_numbers, "numbers")
    if summary.limits:
        figure.add_trace(
            go.Scatter(
                name="matrix cut to a rank (SVD)",
                x=[limit.state_numbers for limit in summary.limits],
                y=[limit.error for limit in summary.limits],
                mode="lines",
                line={"color": GREY, "width": 2, "dash": "dash"},
                customdata=[limit.rank for limit in summary.limits],
                hovertemplate="rank %{customdata}, %{x:,} numbers: %{y:.3f}<extra>limit</extra>",
            )
        )
    exact = exact_state_numbers(header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim)
    return _laid_out(figure, summary, exact, "numbers kept per head")


def flops_frontier(summary: AuditSummary) -> go.Figure:
    """Error against the operations per head and token."""
    header = summary.header
    figure = _curves(summary, lambda line: line.flops_per_token, "FLOPs")
    exact = exact_flops_per_token(
        header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim, is_causal=header.is_causal
    )
    return _laid_out(figure, summary, exact, "FLOPs per head and token")


def least(lines: Iterable[Line], size: Callable[[Line], int]) -> list[Line]:
    """Those no other of the lines beats: ascending in size, descending in error."""
    found: list[Line] = []
    for line in sorted(lines, key=lambda one: (size(one), one.error.mean)):
        if math.isfinite(line.error.mean) and (not found or line.error.mean < found[-1].error.mean):
            found.append(line)
    return found


def _curves(summary: AuditSummary, size: Callable[[Line], int], unit: str) -> go.Figure:
    """One curve through the best of each family."""
    families: dict[str, list[Line]] = {}
    for line in summary.lines:
        families.setdefault(family(line.map), []).append(line)
    figure = go.Figure()
    for place, (name, lines) in enumerate(families.items()):
        best, colour = least(lines, size), COLOURS[place % len(COLOURS)]
        exact = name.endswith("exact part")
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[size(line) for line in best],
                y=[line.error.mean for line in best],
                mode="lines+markers",
                line={"color": colour, "width": 2, "dash": "dot" if exact else "solid"},
                marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 9, "color": colour},
                customdata=[f"{line.map} · {line.features:,}" for line in best],
                hovertemplate="%{customdata}<br>%{x:,} " + unit + ": %{y:.3f}<extra></extra>",
            )
        )
    return figure


def _laid_out(figure: go.Figure, summary: AuditSummary, exact: int, title: str) -> go.Figure:
    """Both baselines and logarithmic axes."""
    sizes = [x for trace in figure.data for x in trace.x]
    errors = [y for trace in figure.data for y in trace.y]
    uniform = summary.baselines[1].error
    figure.add_trace(_line("averaging the values", [min(sizes), max(*sizes, exact)], [uniform, uniform], "dot"))
    figure.add_trace(
        _line(
            f"exact attention over {summary.header.num_tokens:,} tokens",
            [exact, exact],
            [min(errors), uniform],
            "dashdot",
        )
    )
    figure.update_layout(
        height=540,
        margin={"l": 60, "r": 12, "t": 12, "b": 52},
        xaxis={"title": {"text": title}, "type": "log", "exponentformat": "none"},
        yaxis={"title": {"text": "relative output error"}, "type": "log", "exponentformat": "none"},
        legend={"orientation": "h", "y": -0.18, "yanchor": "top"},
        meta={"narrow_height": 760},
    )
    return figure


def _line(name: str, x: Sequence[float], y: Sequence[float], dash: str) -> go.Scatter:
    """A baseline; a trace, since it is to stand in the legend."""
    return go.Scatter(
        name=name,
        x=list(x),
        y=list(y),
        mode="lines",
        line={"color": GREY, "width": 2, "dash": dash},
        hovertemplate=f"{name}<extra></extra>",
    )
