"""A chart as plain data: curves, axes and what is told of each point; templates/chart.js draws it on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Dash = Literal["solid", "dash", "dot", "dashdot"]
# Colours, and the shapes of marks, by number: page.css and chart.js have as many.
NUM_COLOURS = 9

_NEAREST_TICKS = 1.3


@dataclass(frozen=True)
class Curve:
    """Points of one name."""

    name: str  # in the legend
    x: tuple[float, ...]  # abscissae
    y: tuple[float | None, ...]  # ordinates; None where there is nothing to draw: the line is broken there
    tips: tuple[str, ...]  # what is told of each point
    colour: int | None  # number of its colour and of its marks' shape; None for grey, of baselines
    dash: Dash | None = "solid"  # of the line; None for marks alone
    # whether points are marked; with "stroke" by a short level line, of what is expected and not measured
    marks: Literal["none", "shape", "stroke"] = "shape"
    low: tuple[float | None, ...] = ()  # ends of bars below the points; none where they have none
    high: tuple[float | None, ...] = ()  # ends of bars above
    is_listed: bool = True  # whether it stands in the legend
    labels: tuple[str, ...] = ()  # of the points, written beside those that have room; none where they have none


@dataclass(frozen=True)
class Axis:
    """One direction of a chart."""

    title: str  # its words
    is_logarithmic: bool  # whether equal ratios are equally far apart
    ticks: tuple[tuple[float, str], ...] = ()  # places and texts; none for round numbers
    ends: tuple[float, float] | None = None  # its first and last place; None to hold all points


@dataclass(frozen=True)
class Chart:
    """Curves over two axes."""

    curves: tuple[Curve, ...]  # those drawn later cover those drawn before
    x: Axis  # the level axis
    y: Axis  # the upright axis
    height: int = 400  # of the drawing in pixels, its legend apart


def baseline(name: str, x: Sequence[float], y: Sequence[float | None], dash: Dash) -> Curve:
    """A grey line that is no measurement of a method.

    Example:
        >>> baseline("averaging", [1, 2], [0.5, 0.5], "dot").tips
        ('averaging', 'averaging')
    """
    return Curve(name, tuple(x), tuple(y), (name,) * len(x), None, dash, "none")


def drawable(value: float | None, *, is_logarithmic: bool) -> float | None:
    """A number that has a place on an axis; None for one that is not finite, on a logarithmic axis not positive.

    Example:
        >>> [drawable(value, is_logarithmic=True) for value in (1.0, 0.0, float("nan"), None)]
        [1.0, None, None, None]
    """
    if value is None or not math.isfinite(value) or (is_logarithmic and value <= 0):
        return None
    return value


def ticks(values: Sequence[float]) -> tuple[tuple[float, str], ...]:
    """Ascending numbers as ticks of a logarithmic axis, without a text where one is too near the last that has one.

    Example:
        >>> ticks([512, 600, 1024])
        ((512, '512'), (600, ''), (1024, '1,024'))
    """
    found: list[tuple[float, str]] = []
    last = 0.0
    for value in values:
        near = last > 0 and value / last < _NEAREST_TICKS
        found.append((value, "" if near else f"{value:,.6g}"))
        last = last if near else value
    return tuple(found)
