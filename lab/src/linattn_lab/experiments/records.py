"""What `linattn reproduce` writes, as JSON lines: one header row, then figures as they are taken, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linattn_lab.experiments.experiment import FigureRow, Status
from linattn_lab.records.jsonl import Form

Setting = Literal["quick", "full"]


@dataclass(frozen=True)
class ClaimsHeader:
    """The circumstances of a run.

    Attributes:
        setting: "quick" or "full".
        versions: version of python, torch and linattn by name.
        processor: the processor's name.
        threads: torch's threads.
        configs: each experiment's configuration, written out, by the experiment's name.
    """

    setting: Setting
    versions: dict[str, str]
    processor: str
    threads: int
    configs: dict[str, str]


@dataclass(frozen=True)
class Decision:
    """The verdict on one claim, with all a report needs of the claim.

    Attributes:
        claim: name of the experiment.
        sentence: the claim.
        source: where it is made.
        status: "holds", "fails" or "undecided".
        figure: the figure that decides, in a sentence.
        tolerance: how far it may lie from the claim, and where that comes from.
        x: what the figures' abscissa is.
        y: what their values are.
        log_x: whether the abscissa is logarithmic.
        log_y: whether the values are.
        names: names of the abscissae 0, 1, 2, …; empty where they are numbers.
        seconds: how long all figures took.
    """

    claim: str
    sentence: str
    source: str
    status: Status
    figure: str
    tolerance: str
    x: str
    y: str
    log_x: bool
    log_y: bool
    names: list[str]
    seconds: float


Record = FigureRow | Decision

_KINDS: dict[str, type[Record]] = {"figure": FigureRow, "verdict": Decision}
CLAIMS: Form[ClaimsHeader, Record] = Form("a run of linattn reproduce", ClaimsHeader, _KINDS)
