"""A claim's chart."""

from __future__ import annotations

from collections.abc import Sequence

from linattn_lab.experiments.experiment import EXACT, UNIFORM, FigureRow
from linattn_lab.experiments.records import Decision
from linattn_lab.report.charts import NUM_COLOURS, Axis, Chart, Curve, Dash, baseline, drawable, ticks
from linattn_lab.report.claims.summary import Claim

# Bars are drawn twice as long as a standard error.
_BAR = 2
# More abscissae than these are told by round numbers.
_MOST_TICKS = 12


def claim_chart(claim: Claim) -> Chart:
    """All figures of a claim: one curve per series, what is expected dashed in its colour, baselines in grey."""
    decision, curves = claim.decision, list[Curve]()
    series: dict[str, list[FigureRow]] = {}
    for row in claim.rows:
        series.setdefault(row.series, []).append(row)
    place = 0
    for name, rows in series.items():
        if _is(name, EXACT) or _is(name, UNIFORM):
            curves.append(_baseline(name, rows, decision))
            continue
        curves.append(_measured(name, rows, decision, place % NUM_COLOURS))
        if any(row.expected is not None for row in rows):
            curves.append(_expected(name, rows, decision, place % NUM_COLOURS))
        place += 1
    if UNIFORM in series and not any(_is(name, EXACT) for name in series) and not decision.log_y:
        ends = [row.x for row in claim.rows]
        curves.append(baseline(EXACT, [min(ends), max(ends)], [0, 0], "solid"))
    return Chart(tuple(curves), _abscissae(claim), Axis(decision.y, decision.log_y), height=340)


def alternative(claim: Claim) -> str:
    """The chart in a sentence: its text alternative."""
    decision = claim.decision
    curves = list(dict.fromkeys(row.series for row in claim.rows))
    return f"Chart of {decision.y} against {decision.x}: {', '.join(curves)}. {decision.figure}"


def _measured(name: str, rows: Sequence[FigureRow], decision: Decision, colour: int) -> Curve:
    """One series with bars of two standard errors."""
    ends = {
        sign: tuple(
            drawable(row.value + sign * _BAR * row.standard_error, is_logarithmic=decision.log_y)
            if row.standard_error
            else None
            for row in rows
        )
        for sign in (-1, 1)
    }
    has_bars = any(end is not None for end in (*ends[-1], *ends[1]))
    return Curve(
        name,
        tuple(row.x for row in rows),
        _ordinates([row.value for row in rows], decision),
        tuple(f"{name}, {_where(row, decision)}: {row.value:,.4g}" for row in rows),
        colour,
        None if decision.names or len(rows) == 1 else "solid",
        low=ends[-1] if has_bars else (),
        high=ends[1] if has_bars else (),
    )


def _expected(name: str, rows: Sequence[FigureRow], decision: Decision, colour: int) -> Curve:
    """What theory, or the claim, says of a series."""
    known = [(row, row.expected) for row in rows if row.expected is not None]
    is_alone = bool(decision.names) or len(known) == 1
    return Curve(
        f"{name}: expected",
        tuple(row.x for row, _ in known),
        _ordinates([expected for _, expected in known], decision),
        tuple(f"{name}, {_where(row, decision)}: {expected:,.4g} expected" for row, expected in known),
        colour,
        None if is_alone else "dash",
        "stroke" if is_alone else "none",
        is_listed=False,
    )


def _baseline(name: str, rows: Sequence[FigureRow], decision: Decision) -> Curve:
    """Exact attention, or averaging the values."""
    dash: Dash | None = None if decision.names else "dot" if _is(name, UNIFORM) else "solid"
    return Curve(
        name,
        tuple(row.x for row in rows),
        _ordinates([row.value for row in rows], decision),
        tuple(f"{name}: {row.value:,.4g}" for row in rows),
        None,
        dash,
        "stroke",
    )


def _is(name: str, baseline: str) -> bool:
    """Whether a series is this baseline, or a case of it after a comma."""
    return name == baseline or name.startswith(f"{baseline},")


def _ordinates(values: Sequence[float], decision: Decision) -> tuple[float | None, ...]:
    """A chart has no place for what is not finite."""
    return tuple(drawable(value, is_logarithmic=decision.log_y) for value in values)


def _abscissae(claim: Claim) -> Axis:
    """Ticks: names of cases, or the abscissae themselves where they are few and the axis logarithmic."""
    decision, names = claim.decision, claim.decision.names
    if names:
        return Axis(decision.x, is_logarithmic=False, ticks=tuple(enumerate(names)), ends=(-0.5, len(names) - 0.5))
    found = sorted({row.x for row in claim.rows})
    named = ticks(found) if decision.log_x and len(found) <= _MOST_TICKS else ()
    return Axis(decision.x, decision.log_x, named)


def _where(row: FigureRow, decision: Decision) -> str:
    """An abscissa in words."""
    if decision.names and 0 <= row.x < len(decision.names):
        return decision.names[int(row.x)]
    return f"{row.x:,.6g}"
