"""Baselines, marks and labels of a picture: adjustText finds places for labels until none lies on anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from adjustText import adjust_text
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox


@dataclass(frozen=True)
class Palette:
    """Colours, each of which has a contrast of at least 4.5 with the page where it colours words."""

    words: str
    faint: str
    plain: str
    expansion: str
    exact: str
    merged: str


LIGHT = Palette("#1f2328", "#8b949e", "#9a4a00", "#0b57c2", "#1a7037", "#a11b78")
DARK = Palette("#e6e8eb", "#7d8590", "#f2a65a", "#7db4ff", "#6fd08c", "#f08cc8")

# Labels begin so far from their marks, and are pushed by these forces, until a way leaves none on anything else.
_BESIDE = ((-20, 12), (9, -9), (9, 0))
_FORCES: tuple[dict[str, Any], ...] = (
    {"force_static": 0.8, "force_text": 0.8, "force_explode": 0, "expand": (1.1, 1.3)},
    {"force_static": 0.5, "force_text": 0.5, "force_explode": 0},
    {"force_static": 0.3, "force_text": 0.3},
)
# Labels of which no line to a mark is to lie on another: more are in each other's way wherever they stand.
_FEW = 8
# Steps of such a way, and places on a line that labels keep away from.
_STEPS, _PLACES = 400, 60
# What a line is, by its gid: labels are never on a baseline, and on a curve where there is no other room.
BASELINE, CURVE = "baseline", "curve"


@dataclass(frozen=True)
class Point:
    """A mark and its label; no words for none."""

    x: float
    y: float
    words: str
    colour: str
    mark: str = "o"
    is_filled: bool = True


def level_baseline(axes: Axes, words: str, y: float) -> None:
    """A line across the drawing, its words above it at the left."""
    axes.axhline(y, **_of_baseline())
    place = {"xycoords": axes.get_yaxis_transform(), "xytext": (4, 4), "textcoords": "offset points"}
    axes.annotate(words, (0, y), color=LIGHT.words, **place)


def upright_baseline(axes: Axes, words: str, x: float) -> None:
    """A line from the bottom to the top, its words to the right of it."""
    axes.axvline(x, **_of_baseline())
    place = {"xycoords": axes.get_xaxis_transform(), "xytext": (5, 0), "textcoords": "offset points"}
    axes.annotate(words, (x, 0.7), color=LIGHT.words, **place)


def mark(axes: Axes, points: Sequence[Point]) -> None:
    """Marks and their labels, the last that is drawn: labels keep away from all that is there.

    Raises:
        ValueError: if there is no room for the labels.
    """
    occupied = [*axes.texts]
    for point in points:
        inside = point.colour if point.is_filled else "none"
        style = {"color": point.colour, "markerfacecolor": inside, "markersize": 7}
        occupied += axes.plot(point.x, point.y, point.mark, **style)
    boxes = [one.get_window_extent() for one in occupied]
    named = [point for point in points if point.words]
    room = None
    for way in product(_BESIDE, _FORCES):
        added = _placed(axes, named, boxes, *way)
        if not overlaps(axes):
            if len(named) > _FEW or not crossed(axes):
                return
            room = room or way
        for artist in added:
            artist.remove()
    if room is not None:
        # None is without a line on words.
        _placed(axes, named, boxes, *room)
        return
    raise ValueError("there is no room for the labels of a picture; make it higher, or try other forces")


def overlaps(axes: Axes) -> list[str]:
    """Words that lie on other words, on a mark or on a baseline."""
    texts = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
    marks = [line.get_window_extent() for line in axes.lines if line.get_marker() not in ("None", None)]
    points = axes.transData.transform(_along(axes, BASELINE))
    return [
        words
        for place, (words, box) in enumerate(texts)
        if any(box.overlaps(other) for _, other in texts[:place])
        or any(box.overlaps(one) for one in marks)
        or any(box.contains(x, y) for x, y in points)
    ]


def crossed(axes: Axes) -> list[str]:
    """Words on which the line from other words to their mark lies."""
    ends = (axes.transData.transform(line.get_path().vertices[[0, -1]]) for line in axes.patches)
    lines = [np.linspace(start, stop, num=_PLACES) for start, stop in ends]
    # Each begins in its own words.
    return [
        text.get_text()
        for text in axes.texts
        if (box := text.get_window_extent())
        and any(box.contains(x, y) for line in lines if not box.contains(*line[0]) for x, y in line)
    ]


def _of_baseline() -> dict[str, Any]:
    """The style of a line that is no method."""
    return {"color": LIGHT.faint, "linestyle": (0, (5, 4)), "linewidth": 1, "gid": BASELINE}


def _along(axes: Axes, kind: str) -> list[tuple[float, float]]:
    """Places on the lines of a kind, nearer to each other than a word is high."""
    places: list[tuple[float, float]] = []
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata()) if line.get_gid() == kind else ()
        for start, stop in pairwise(corners):
            steps = np.linspace(start, stop, num=_PLACES)
            places += map(tuple, axes.transData.inverted().transform(steps))
    return places


def _placed(
    axes: Axes, points: Sequence[Point], boxes: Sequence[Bbox], beside: tuple[float, float], forces: dict[str, Any]
) -> list[Artist]:
    """Labels, pushed from a place beside their marks to where there may be room, and lines to marks that are far."""
    to_places = axes.transData.inverted()
    targets = np.array([(point.x, point.y) for point in points])
    starts = to_places.transform(axes.transData.transform(targets) + beside)
    texts = [
        axes.text(x, y, point.words, color=point.colour, va="center")
        for point, (x, y) in zip(points, starts, strict=True)
    ]
    x, y = zip(*_along(axes, BASELINE), *_along(axes, CURVE), strict=True)
    _, lines = adjust_text(
        texts,
        x,
        y,
        objects=[box.transformed(to_places) for box in boxes],
        target_x=targets[:, 0],
        target_y=targets[:, 1],
        avoid_self=False,
        ax=axes,
        iter_lim=_STEPS,
        arrowprops={"arrowstyle": "-", "color": LIGHT.faint, "linewidth": 0.8},
        **forces,
    )
    return [*texts, *lines]
