"""The figures of an audit of a bounded KV cache: a line per length, budget and method, over all passages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from linattn_lab.kv_audit.intervals import Ratio, paired_ratio
from linattn_lab.kv_audit.names import BOUNDED, ENOUGH, FACTS, FULL, NO_BUDGET, UNIFORM, WINDOW
from linattn_lab.kv_audit.records import MEMORY, MemoryHeader, MemoryRow, PassageRow, TaskRow, key_of
from linattn_lab.report.memory.continuation import Continuation, continuations

_BASELINES = (FULL, UNIFORM)
_WITH_BITS = re.compile(rf"{re.escape(WINDOW)} in [\d.]+ bits")


@dataclass(frozen=True)
class Spread:
    """A figure over passages.

    Attributes:
        median: of them.
        low: the least.
        high: the largest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class MemoryLine:
    """A method at a length and a budget.

    Attributes:
        num_tokens: of a passage.
        method: its name.
        label: its written form.
        budget: in exact keys; 0 for none.
        passages: how many are measured.
        num_bytes: of all bounded layers after a passage.
        unmerged: share of a passage's tokens that fit before any are merged or evicted.
        peak_bytes: the largest over passages.
        prefill_seconds: of a passage.
        tokens_per_second: of writing after it.
        kl: KL divergence from the full cache, mean over passages.
        kl_median: mean over passages of a passage's median.
        kl_high: the same of its 99 % quantile.
        kl_largest: the largest on any passage.
        kl_by_text: mean over the passages of each kind of text.
        kl_ratio: of the mean KL to the bounded cache's at the same length and budget, paired by passage; null where
            there is nothing to compare with.
        perplexity: geometric mean over passages.
        same: share of predictions with the full cache's likeliest token.
        parted: tokens of the greedy text before it leaves the full cache's, mean over passages.
        agreement: share of its tokens that are the full cache's.
        facts: accuracy of needle retrieval, by depth in per cent.
        tasks: score by name of RULER's task.
    """

    num_tokens: int
    method: str
    label: str
    budget: int
    passages: int
    num_bytes: int
    unmerged: float
    peak_bytes: int
    prefill_seconds: Spread
    tokens_per_second: Spread
    kl: float
    kl_median: float
    kl_high: float
    kl_largest: float
    kl_by_text: dict[str, float]
    kl_ratio: Ratio | None
    perplexity: float
    same: float
    parted: float
    agreement: float
    facts: dict[str, float]
    tasks: dict[str, float]


@dataclass(frozen=True)
class MemorySummary:
    """An audit of a bounded KV cache.

    Attributes:
        header: the circumstances.
        lines: by length, then by budget, methods without one first, in the order of measurement.
        unanswered: by "task at length", the full cache's own score where it is too low for the task to be scored.
        continuations: the greedy text after the first passage of each text, at the longest length and its smallest
            budget; none in files of earlier versions.
    """

    header: MemoryHeader
    lines: tuple[MemoryLine, ...]
    unanswered: dict[str, float]
    continuations: tuple[Continuation, ...] = ()

    @property
    def num_passages(self) -> tuple[int, int]:
        """Passages that every method has read, and those that are asked for."""
        asked = self.header.num_passages * len(self.header.texts)
        return min((line.passages for line in self.lines), default=0), asked

    @property
    def is_finished(self) -> bool:
        """Whether all passages are read at every length, and of every task that is neither left out nor failed some."""
        bounded = [line for line in self.lines if line.method not in _BASELINES]
        if self.num_passages[0] < self.num_passages[1] or {x.num_tokens for x in bounded} < set(self.header.lengths):
            return False
        read = {(task, x.num_tokens) for x in bounded for task in (*x.tasks, *([FACTS] if x.facts else []))}
        return all(
            (task, length) in read or _place(task, length) in self.unanswered
            for task in self.header.tasks
            for length in self.header.lengths
            if f"{task} at {length}" not in self.header.left_out
        )

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Lengths and budgets of which there is a line, ascending; lengths of written forms where nothing else is."""
        bounded = [line for line in self.lines if line.method not in _BASELINES]
        within = [line for line in bounded if line.budget != NO_BUDGET]
        return sorted({(line.num_tokens, line.budget) for line in within or bounded})

    @property
    def hardest(self) -> tuple[int, int]:
        """The longest text and the smallest budget of it; zeros where nothing is bounded yet."""
        return min(self.settings, key=lambda setting: (-setting[0], setting[1]), default=(0, 0))

    def at(self, num_tokens: int, budget: int) -> list[MemoryLine]:
        """The methods at a length and budget, the least KL first, windows in few bits with the best bits."""
        lines = [line for line in self.lines if (line.num_tokens, line.budget) == (num_tokens, budget)]
        lines = [line for line in lines if line.method not in _BASELINES]
        return best_bits(sorted(lines, key=lambda line: line.kl))

    def without_budget(self, num_tokens: int) -> list[MemoryLine]:
        """The full cache, uniform attention and, beside methods with a budget, written forms at a length."""
        lines = [line for line in self.lines if (line.num_tokens, line.budget) == (num_tokens, NO_BUDGET)]
        is_alone = (num_tokens, NO_BUDGET) in self.settings
        return [line for line in lines if line.method in _BASELINES or not is_alone]


def summarise_memory(path: Path) -> MemorySummary:
    """Read memory.jsonl, finished or not, and sum it up: of an audit under way, what all methods have read.

    Raises:
        ValueError: if the file is damaged, or holds no figures yet.
    """
    header, every = MEMORY.so_far(path)
    unanswered = _unanswered(every)
    failed = [row for row in every if isinstance(row, TaskRow) and _place(row.task, row.num_tokens) in unanswered]
    rows = _of_all_methods([row for row in every if row.method == FULL or row not in failed])
    passages = [row for row in rows if isinstance(row, PassageRow)]
    if not passages:
        raise ValueError(f"{path} holds no figures yet; run the same command again")
    places = dict.fromkeys((row.num_tokens, row.budget, row.method) for row in passages)
    lines = [_line(place, rows) for place in places]
    lines.sort(key=lambda line: (line.num_tokens, line.budget))
    summary = MemorySummary(header, tuple(lines), unanswered)
    return replace(summary, continuations=continuations(rows, *summary.hardest))


def _of_all_methods(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Rows on the passages and texts that every method with a row of that length or task has read."""
    places = [(key_of(row), (row.num_tokens, row.task if isinstance(row, TaskRow) else None)) for row in rows]
    read: dict[tuple[int, str | None], dict[tuple[str, int], set[tuple[str, int]]]] = {}
    for (_, text, number, _, method, budget), kind in places:
        read.setdefault(kind, {}).setdefault((method, budget), set()).add((text, number))
    common = {kind: set.intersection(*methods.values()) for kind, methods in read.items()}
    return [row for row, (key, kind) in zip(rows, places, strict=True) if key[1:3] in common[kind]]


def best_bits(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Lines, the least KL first; of windows in different bits those that no earlier one equals in needles and tasks."""
    kept: list[MemoryLine] = []
    for line in lines:
        earlier = [{**other.facts, **other.tasks} for other in kept if is_few_bits(other) and is_few_bits(line)]
        scores = {**line.facts, **line.tasks}
        if not any(all(x.get(name, 0) >= share for name, share in scores.items()) for x in earlier):
            kept.append(line)
    return kept


def is_few_bits(line: MemoryLine) -> bool:
    """True for a window in few bits."""
    return _WITH_BITS.fullmatch(line.method) is not None


def _line(place: tuple[int, int, str], rows: Sequence[MemoryRow]) -> MemoryLine:
    """One method's rows at one length and budget."""
    num_tokens, budget, method = place
    several = [row for row in rows if (row.num_tokens, row.budget, row.method) == place]
    texts = [row for row in several if isinstance(row, PassageRow)]
    facts: dict[str, list[float]] = {}
    tasks: dict[str, list[float]] = {}
    for row in several:
        if isinstance(row, TaskRow) and row.task == FACTS:
            for depth, hit in zip(row.depths, row.hits, strict=True):
                facts.setdefault(f"{depth:.0%}", []).append(hit)
        elif isinstance(row, TaskRow):
            tasks.setdefault(row.task, []).append(row.score)
    return MemoryLine(
        num_tokens=num_tokens,
        method=method,
        label=texts[0].label,
        budget=budget,
        passages=len(texts),
        num_bytes=texts[0].num_bytes,
        unmerged=texts[0].unmerged,
        peak_bytes=max(row.peak_bytes for row in texts),
        prefill_seconds=Spread.of([row.prefill_seconds for row in texts]),
        tokens_per_second=Spread.of([row.tokens_per_second for row in texts]),
        kl=fmean([row.kl for row in texts]),
        kl_median=fmean([row.kl_median for row in texts]),
        kl_high=fmean([row.kl_high for row in texts]),
        kl_largest=max(row.kl_largest for row in texts),
        kl_by_text={kind: fmean([row.kl for row in texts if row.text == kind]) for kind in {r.text: 0 for r in texts}},
        kl_ratio=_ratio(texts, rows),
        perplexity=math.exp(fmean([math.log(row.perplexity) for row in texts])),
        same=fmean([row.same for row in texts]),
        parted=fmean([row.parted for row in texts]),
        agreement=fmean([row.agreement for row in texts]),
        facts={depth: fmean(hits) for depth, hits in facts.items()},
        tasks={name: fmean(scores) for name, scores in tasks.items()},
    )


def _ratio(texts: Sequence[PassageRow], rows: Sequence[MemoryRow]) -> Ratio | None:
    """KL over the bounded cache's on the same passages; null where there is none."""
    others = {
        (row.text, row.passage): row.kl
        for row in rows
        if isinstance(row, PassageRow)
        and (row.method, row.num_tokens, row.budget) == (BOUNDED, texts[0].num_tokens, texts[0].budget)
    }
    if not others:
        return None
    return paired_ratio([row.kl for row in texts], [others[row.text, row.passage] for row in texts])


def _place(task: str, num_tokens: int) -> str:
    """A task and its length in words."""
    return f"{task} at {num_tokens:,}"


def _unanswered(rows: Sequence[MemoryRow]) -> dict[str, float]:
    """Tasks that the full cache does not answer, and its score."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(row, TaskRow) and row.method == FULL:
            found.setdefault(_place(row.task, row.num_tokens), []).append(row.score)
    return {place: fmean(scores) for place, scores in found.items() if fmean(scores) < ENOUGH}
