"""What an audit of a constant memory found: one line per contender and budget, means over passages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linattn_lab.constant_memory.records import (
    EXACT,
    MEMORY,
    PLANNED,
    UNIFORM,
    MemoryHeader,
    MemoryRow,
    PassageRow,
    RecallRow,
)

SINKS = "sinks + window"
"""The contender that is the plain one, with all bytes in exact keys."""


@dataclass(frozen=True)
class MemoryLine:
    """A contender at a budget.

    Attributes:
        contender: its name.
        label: its written form.
        budget: in exact keys; 0 for baselines.
        num_bytes: of all global layers after a passage.
        kl: KL divergence from the exact model, mean over passages; nan where no passage is measured.
        perplexity: geometric mean over passages.
        same: share of tokens with the exact model's likeliest next one.
        error: relative error of a head's output, mean over heads and passages.
        kl_by_position: for each stretch.
        recall: score by task; tasks that are not measured are missing.
        passages: how many are measured.
    """

    contender: str
    label: str
    budget: int
    num_bytes: int
    kl: float
    perplexity: float
    same: float
    error: float
    kl_by_position: tuple[float, ...]
    recall: dict[str, float]
    passages: int


@dataclass(frozen=True)
class MemorySummary:
    """An audit of a constant memory.

    Attributes:
        header: the circumstances.
        lines: baselines first, then by budget, in the order of measurement.
        num_rows: how many rows there are.
    """

    header: MemoryHeader
    lines: tuple[MemoryLine, ...]
    num_rows: int

    @property
    def budgets(self) -> list[int]:
        """Those of which there is a line, ascending."""
        return sorted({line.budget for line in self.lines if line.budget})

    def at(self, budget: int) -> list[MemoryLine]:
        """The contenders at a budget of which a passage is measured, the least KL first."""
        found = [line for line in self.lines if line.budget == budget and line.passages]
        return sorted(found, key=lambda line: line.kl)

    def line(self, contender: str, budget: int = 0) -> MemoryLine | None:
        """A contender's line at a budget, or a baseline's; None if it is not measured."""
        found = (line for line in self.lines if (line.contender, line.budget) == (contender, budget))
        return next(found, None)

    @property
    def unfinished(self) -> bool:
        """Whether the same command would go on."""
        places = len(self.header.passages) + len(self.header.tasks)
        left_out = sum(" at " in name for name in self.header.left_out)
        entries = 2 + len(self.header.kinds) * len(self.header.budgets) - left_out
        planned = sum(line.contender == PLANNED for line in self.lines)
        return self.num_rows < places * (entries + planned)


def summarise_memory(path: Path) -> MemorySummary:
    """Read memory.jsonl, finished or not, and sum it up.

    Args:
        path: the file.

    Returns:
        A `MemorySummary`.

    Raises:
        ValueError: if the file is damaged, or holds no figures yet.
    """
    header, rows = MEMORY.so_far(path)
    if not any(isinstance(row, PassageRow) for row in rows):
        raise ValueError(f"{path} holds no figures yet; run the same command again")
    places = list(dict.fromkeys((row.contender, row.budget) for row in rows))
    lines = [_line(header, [row for row in rows if (row.contender, row.budget) == place]) for place in places]
    lines.sort(key=lambda line: (line.budget, line.contender not in (EXACT, UNIFORM)))
    return MemorySummary(header, tuple(lines), len(rows))


def _line(header: MemoryHeader, rows: Sequence[MemoryRow]) -> MemoryLine:
    """One contender's rows at one budget."""
    texts = [row for row in rows if isinstance(row, PassageRow)]
    tasks = {row.task: row.score for row in rows if isinstance(row, RecallRow)}
    first = rows[0]
    heads = [error for row in texts for layer in row.errors for error in layer]
    stretches = range(len(header.ends))
    return MemoryLine(
        contender=first.contender,
        label=first.label,
        budget=first.budget,
        num_bytes=texts[0].num_bytes if texts else 0,
        kl=_mean([row.kl for row in texts]),
        perplexity=math.exp(_mean([math.log(row.perplexity) for row in texts])),
        same=_mean([row.same for row in texts]),
        error=_mean(heads),
        kl_by_position=tuple(_mean([row.kl_by_position[place] for row in texts]) for place in stretches),
        recall=tasks,
        passages=len(texts),
    )


def _mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of none."""
    return sum(values) / len(values) if values else math.nan
