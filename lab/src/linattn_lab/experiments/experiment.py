"""What one file of this folder is: a claim, its source, how it is measured and how the figures decide it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Status = Literal["holds", "fails", "undecided"]

EXACT = "exact"
UNIFORM = "averaging the values"


@dataclass(frozen=True)
class Axes:
    """How a claim's figures are drawn."""

    x: str  # what the abscissa is, with its unit
    y: str  # what the values are, with their unit
    log_x: bool = False  # whether the abscissa is logarithmic
    log_y: bool = False  # whether the values are
    names: tuple[str, ...] = ()  # names of the abscissae 0, 1, 2, … where they are no numbers but cases


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    value: float  # as measured, or as counted
    standard_error: float | None = None  # of the value, where it was sampled
    # what theory, or the claim itself, says it is; None where there is nothing to compare with
    expected: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One figure still to be taken."""

    series: str  # which curve the figure belongs to; `EXACT` and `UNIFORM` are the two baselines
    x: float  # its abscissa; no two measurements of a claim share both
    # takes it: a function of the configuration alone, whatever was measured before, so that an interrupted run goes on
    # to the same figures
    take: Callable[[], Figure]


@dataclass(frozen=True)
class FigureRow:
    """One figure taken, as the file keeps it.

    Attributes:
        claim: name of the experiment.
        series: which curve it belongs to.
        x: its abscissa.
        value: as measured, or as counted.
        standard_error: of the value; null where it was not sampled.
        expected: what theory, or the claim itself, says it is; null where there is nothing to compare with.
        seconds: how long it took.
    """

    claim: str
    series: str
    x: float
    value: float
    standard_error: float | None
    expected: float | None
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What the figures say of a claim."""

    status: Status  # "holds", "fails", or "undecided" where the sampling error is too large to tell
    figure: str  # one sentence with the figure that decides
    tolerance: str  # one sentence: how far the figure may lie from the claim, and where that comes from


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every `Config` has beside sizes of its own."""

    seconds: float  # of all figures, on two cores
    seed: int = 0  # everything random follows from it


class Experiment(Protocol):
    """A module of this folder: one file, one claim."""

    CLAIM: str
    """One sentence, as its source has it."""
    SOURCE: str
    """Paper and section, or the text and its section."""
    AXES: Axes
    """How its figures are drawn."""
    QUICK: Sizes
    """A frozen `Config`, taken within seconds."""
    FULL: Sizes
    """A frozen `Config` at the size of the source."""

    def rows(self, config: Any) -> Iterator[Measurement]:
        """What is to be measured; taking nothing yet."""

    def verdict(self, rows: Sequence[FigureRow]) -> Verdict:
        """What the figures say: a function of the rows alone."""
