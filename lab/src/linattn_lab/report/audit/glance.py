"""An audit at a glance: the few methods that decide, in one picture and one table."""

from __future__ import annotations

from dataclasses import replace

from linattn.records.texts import Table
from linattn_lab.report.audit.frontier import family, least
from linattn_lab.report.audit.paying import chosen_line
from linattn_lab.report.audit.summary import AuditSummary, Line
from linattn_lab.report.audit.tables import overview
from linattn_lab.report.charts import NUM_COLOURS, Axis, Chart, Curve, baseline, drawable

_TEXTBOOK = "FavorPlus"
_MOST = 8


def decisive(summary: AuditSummary) -> tuple[Line, ...]:
    """At most eight methods, the least error first: all, or those no other beats in error and cost, and the textbook's.

    The cost is the whole model's time; of a decoder what a head keeps, which stays between its calls.
    """
    lines = list(summary.lines)
    if len(lines) > _MOST:
        textbook = max((x for x in lines if x.map == _TEXTBOOK), key=lambda line: line.features, default=None)
        named = [line for line in (chosen_line(summary), textbook) if line is not None]
        timed = [line for line in lines if _cost(summary, line) is not None]
        best = least(timed, lambda line: _cost(summary, line) or 0.0)
        lines = [line for line in lines if line in named or line in best[len(named) - _MOST :]]
    return tuple(sorted(lines, key=lambda line: line.error.mean))


def glance_table(summary: AuditSummary) -> Table:
    """The methods that decide, beside both baselines."""
    return overview(replace(summary, lines=decisive(summary)))


def glance_chart(summary: AuditSummary) -> Chart:
    """Error against cost: a labelled mark of each method that decides, lines for softmax and averaging."""
    families: dict[str, list[Line]] = {}
    for line in decisive(summary):
        families.setdefault(family(line.map), []).append(line)
    curves = [_marks(summary, place, name, lines) for place, (name, lines) in enumerate(families.items())]
    softmax = float(summary.exact_numbers) if summary.header.is_causal else 1.0
    costs = [*(x for curve in curves for x in curve.x), softmax]
    errors = [y for curve in curves for y in curve.y if y is not None]
    uniform = summary.baselines[1].error
    title = "numbers kept per head" if summary.header.is_causal else "time of the whole model, softmax = 1"
    return Chart(
        (
            *curves,
            baseline("uniform attention", [min(costs), max(costs)], [uniform] * 2, "dot"),
            baseline("softmax", [softmax] * 2, [min([*errors, uniform]), max([*errors, uniform])], "dashdot"),
        ),
        Axis(title, is_logarithmic=True),
        Axis("relative output error, softmax = 0", is_logarithmic=True),
        height=320,
    )


def _marks(summary: AuditSummary, place: int, name: str, lines: list[Line]) -> Curve:
    """The methods of one family that were timed, or of a decoder all."""
    costs = [(line, cost) for line in lines if (cost := _cost(summary, line)) is not None]
    return Curve(
        name,
        tuple(cost for _, cost in costs),
        tuple(drawable(line.error.mean, is_logarithmic=True) for line, _ in costs),
        tuple(f"{line.words}: error {line.error.mean:.2f} at {cost:,.4g}" for line, cost in costs),
        place % NUM_COLOURS,
        dash=None,
        labels=tuple(line.words for line, _ in costs),
    )


def _cost(summary: AuditSummary, line: Line) -> float | None:
    """What a method costs on this model."""
    return float(line.state_numbers) if summary.header.is_causal else line.time_ratio
