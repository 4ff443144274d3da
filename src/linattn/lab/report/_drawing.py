"""What the charts of all reports share: colours, symbols, ticks of logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence

# After Okabe and Ito, yellow darkened so that it reads on white, black replaced by wine; told apart by symbols as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9B2F5F", "#A39100")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon")
# Of baselines and of lines that are no measurement: readable on white and on black.
GREY = "#8C8C8C"

_NEAREST_TICKS = 1.3


def tick_texts(values: Sequence[float]) -> list[str]:
    """Ascending numbers as labels of a logarithmic axis, those too near the one before left out."""
    texts: list[str] = []
    last = 0.0
    for value in values:
        near = last > 0 and value / last < _NEAREST_TICKS
        texts.append("" if near else f"{value:,.6g}")
        last = last if near else value
    return texts
