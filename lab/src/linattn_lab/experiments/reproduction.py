"""Taking the figures of claims, one experiment after the other, going on from what was taken before."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from linattn_lab.circumstances import processor, versions
from linattn_lab.experiments import EXPERIMENTS
from linattn_lab.experiments.experiment import Experiment, FigureRow, Measurement, Sizes
from linattn_lab.experiments.records import ClaimsHeader, Decision, Record, Setting
from linattn_lab.pace import SILENT


@dataclass(frozen=True)
class Crash:
    """An experiment that ended in an error; its other figures are kept, and the next run tries again."""

    claim: str  # its name
    trace: str  # where it happened, as Python prints it


class Reproduction:
    """A choice of claims at one setting.

    Attributes:
        names: the experiments, in the order of `EXPERIMENTS`.
        setting: "quick" or "full".
        crashes: experiments that ended in an error so far.
    """

    def __init__(self, names: Sequence[str], setting: Setting) -> None:
        """Choose."""
        unknown = [name for name in names if name not in EXPERIMENTS]
        if unknown:
            raise ValueError(f"no claim is called {', '.join(unknown)}; `linattn reproduce --list` names them all")
        self.names = tuple(name for name in EXPERIMENTS if not names or name in names)
        self.setting: Setting = setting
        self.crashes: list[Crash] = []

    @property
    def header(self) -> ClaimsHeader:
        """The circumstances: equal for two runs whose figures belong together, whichever claims they chose."""
        return ClaimsHeader(
            setting=self.setting,
            versions=versions("torch", "linattn"),
            processor=processor(),
            threads=torch.get_num_threads(),
            configs={name: repr(self._config(experiment)) for name, experiment in EXPERIMENTS.items()},
        )

    def seconds(self, name: str) -> float:
        """How long an experiment takes on two cores, as its configuration says."""
        return self._config(EXPERIMENTS[name]).seconds

    def missing(self, kept: Sequence[Record]) -> dict[str, int]:
        """How many figures are still to be taken, by experiment."""
        taken = {(row.claim, row.series, row.x) for row in kept if isinstance(row, FigureRow)}
        return {
            name: sum((name, one.series, one.x) not in taken for one in self._measurements(name)) for name in self.names
        }

    def records(self, kept: Sequence[Record], announce: Callable[[str], None] = SILENT.begin) -> Iterator[Record]:
        """Figures that are missing, as they are taken, and after the last of a claim its verdict."""
        decided = {record.claim for record in kept if isinstance(record, Decision)}
        for name in self.names:
            if name not in decided:
                announce(name)
                yield from self._claim(name, [row for row in kept if isinstance(row, FigureRow) and row.claim == name])

    def _claim(self, name: str, kept: list[FigureRow]) -> Iterator[Record]:
        """One claim's missing figures and its verdict."""
        experiment = EXPERIMENTS[name]
        taken = {(row.series, row.x) for row in kept}
        rows = list(kept)
        try:
            for measurement in self._measurements(name):
                if (measurement.series, measurement.x) not in taken:
                    rows.append(_take(name, measurement))
                    yield rows[-1]
            yield _decide(name, experiment, rows)
        except Exception:
            # One broken experiment must not cost the others their figures; the command reports it and exits with 1.
            self.crashes.append(Crash(name, traceback.format_exc()))

    def _measurements(self, name: str) -> Iterator[Measurement]:
        """All of one experiment."""
        experiment = EXPERIMENTS[name]
        return experiment.rows(self._config(experiment))

    def _config(self, experiment: Experiment) -> Sizes:
        """The experiment's configuration at this setting."""
        return experiment.QUICK if self.setting == "quick" else experiment.FULL


def _take(name: str, measurement: Measurement) -> FigureRow:
    """One figure with the time it took."""
    start = time.perf_counter()
    figure = measurement.take()
    seconds = time.perf_counter() - start
    return FigureRow(
        name, measurement.series, measurement.x, figure.value, figure.standard_error, figure.expected, round(seconds, 4)
    )


def _decide(name: str, experiment: Experiment, rows: Sequence[FigureRow]) -> Decision:
    """The verdict with what a report needs of the claim."""
    verdict, axes = experiment.verdict(rows), experiment.AXES
    return Decision(
        claim=name,
        sentence=experiment.CLAIM,
        source=experiment.SOURCE,
        status=verdict.status,
        figure=verdict.figure,
        tolerance=verdict.tolerance,
        x=axes.x,
        y=axes.y,
        log_x=axes.log_x,
        log_y=axes.log_y,
        names=list(axes.names),
        seconds=round(sum(row.seconds for row in rows), 3),
    )
