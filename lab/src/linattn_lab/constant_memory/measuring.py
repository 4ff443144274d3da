"""The audit of a constant memory: every contender, at every budget, on passages and on recall.

Contenders take the place of softmax in the layers that attend to all tokens; the model reads each text whole
(teacher-forced), and every query sees what its stream would hold by then. Nothing is fitted beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.hf import LoadedModel
from linattn.kv_cache.layer_plans import MemoryPlan
from linattn.records.texts import Text
from linattn_lab.circumstances import versions
from linattn_lab.constant_memory.answering import Answer, log_probabilities, probed
from linattn_lab.constant_memory.distance import distance
from linattn_lab.constant_memory.measures import Bins, head_errors
from linattn_lab.constant_memory.passages import TokenText
from linattn_lab.constant_memory.planning import contender_of, plan_memory
from linattn_lab.constant_memory.plans import Choice
from linattn_lab.constant_memory.read_passage import ReadPassage, measured_tokens
from linattn_lab.constant_memory.recall import Task, tasks
from linattn_lab.constant_memory.records import (
    BASELINE,
    EXACT,
    PLANNED,
    UNIFORM,
    MemoryHeader,
    MemoryRow,
    PassageRow,
    RecallRow,
    key_of,
)
from linattn_lab.contenders import KINDS, at_budget
from linattn_lab.pace import Silent, Watch
from linattn_lab.rounds import Unit, in_rounds

_SILENT = Silent()


class Entry(NamedTuple):
    """What takes the place of softmax.

    Attributes:
        name: of the contender, or of a baseline.
        label: its written form.
        budget: in exact keys; 0 for baselines.
        num_bytes: of all global layers, after a passage.
        answer: to an attention call.
    """

    name: str
    label: str
    budget: int
    num_bytes: int
    answer: Answer


def passage_row(passage: ReadPassage, number: int, entry: Entry, outputs: Sequence[Tensor]) -> PassageRow:
    """One contender's figures; `outputs` are its answers to the exact model's calls."""
    exact = passage.exact
    found = distance(exact, exact if entry.name == EXACT else passage.read(entry.answer), passage.following)
    bins, last = Bins.of(passage.num_tokens), slice(-passage.num_measured, None)
    return PassageRow(
        passage=number,
        contender=entry.name,
        label=entry.label,
        budget=entry.budget,
        num_bytes=entry.num_bytes,
        kl=float(found.kl[last].mean()),
        perplexity=float(found.loss[last].mean().exp()),
        same=float(found.same[last].mean()),
        kl_by_position=bins.means(passage.positions, found.kl),
        perplexity_by_position=[float(torch.tensor(x).exp()) for x in bins.means(passage.positions, found.loss)],
        errors=head_errors(passage.calls, outputs, passage.num_tokens - passage.num_measured),
    )


class MemoryAudit:
    """A causal language model and a text, ready to be measured.

    Attributes:
        header: the circumstances, complete before anything is measured.
    """

    header: MemoryHeader

    def __init__(
        self,
        loaded: LoadedModel,
        text: Text,
        budgets: Sequence[int],
        *,
        num_tokens: int = 4096,
        num_passages: int = 1,
        kinds: Sequence[str] | None = None,
        calibration: Text | None = None,
    ) -> None:
        """Find the global layers, the passages and the recall tasks; nothing is measured yet.

        Cost: one short forward pass.

        Args:
            loaded: a causal language model with its head.
            text: where passages come from.
            budgets: in exact keys and values, per key/value head of a global layer.
            num_tokens: of a passage; recall tasks have half as many.
            num_passages: evenly spaced in the text.
            kinds: of contenders, among `KINDS`; None for all.
            calibration: the text that plans will be made on, for the header; None for no plans.

        Raises:
            ValueError: if the model is no language model, the text too short, or a budget or kind senseless.
        """
        num_measured = measured_tokens(loaded, num_tokens)
        if num_passages < 1:
            raise ValueError(f"num_passages must be at least 1, got {num_passages}")
        self._loaded, self._probe = loaded, probed(loaded.model)
        self._layers, num_heads, num_key_heads, self._sizes = self._probe
        self._text = TokenText.of(loaded, text)
        starts = self._text.starts(num_tokens, num_passages)
        self._passages = [self._text.passage(start, num_tokens) for start in starts]
        self.entries, left_out = self._stocked(budgets, tuple(kinds or KINDS), num_tokens)
        self._tasks, without_room = tasks(loaded, self._text, num_tokens // 2)
        self.header = MemoryHeader(
            versions=versions("linattn", "torch", "transformers"),
            model=loaded.name,
            architecture=type(loaded.model).__name__,
            layers=list(self._layers.numbers),
            num_windowed=len(self._layers.windowed),
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            head_dim=self._sizes.head_dim,
            value_dim=self._sizes.value_dim,
            number_bytes=self._sizes.number_bytes,
            text=text.source,
            text_sha256=text.sha256,
            num_tokens=num_tokens,
            num_measured=num_measured,
            passages=starts,
            ends=list(Bins.of(num_tokens).ends),
            recall_tokens=num_tokens // 2,
            tasks=[task.name for task in self._tasks],
            budgets=list(budgets),
            kinds=list(kinds or KINDS),
            left_out=left_out | without_room,
            calibration=None if calibration is None else calibration.source,
        )

    def plan(self, text: Text, budget: int, watch: Watch = _SILENT) -> MemoryPlan:
        """A plan of the audit's model and length, as `plan_memory` makes it."""
        return plan_memory(
            self._loaded, text, budget, num_tokens=self.header.num_tokens, begin=watch.begin, probe=self._probe
        )

    def is_of(self, plan: MemoryPlan, text: Text) -> bool:
        """Whether a plan was made for this model and length, on this text."""
        header = self.header
        wanted = header.model, header.num_tokens, header.layers, text.sha256
        return wanted == (plan.model, plan.num_tokens, plan.layers, plan.calibration_sha256)

    def take(self, plan: MemoryPlan) -> None:
        """Measure a plan too, after all contenders; ValueError where a layer's bytes are too few for its contender."""
        chosen = [contender_of(one, self._sizes) for one in map(Choice, plan.choices, plan.budgets)]
        kept = sum(one.num_bytes(self._sizes, self.header.num_tokens) for one in chosen)
        answer = self._layers.by(dict(enumerate(chosen)))
        entry = Entry(PLANNED, plan.label, plan.budget, kept * self.header.num_key_heads, answer)
        self.entries.append(entry)

    def wanted(self) -> list[tuple[str, str, int]]:
        """What is measured of what, in order."""
        where = [f"passage {number}" for number in range(len(self._passages))]
        where[1:1] = self.header.tasks
        return [(place, entry.name, entry.budget) for place in where for entry in self.entries]

    def rows(self, kept: Sequence[MemoryRow] = (), watch: Watch = _SILENT) -> Iterator[MemoryRow]:
        """Measure: the first passage, the recall tasks, and the other passages, the baselines first.

        Cost: two forward passes per passage and one per task, and for each contender one of each.

        Args:
            kept: rows of an earlier run, which are not measured again.
            watch: told what begins, and of each row.

        Returns:
            An iterator that measures as it goes.
        """
        done = set(map(key_of, kept))
        yield from in_rounds(self._units(done), watch)

    def _units(self, done: set[tuple[str, str, int]]) -> Iterator[Unit[MemoryRow]]:
        """Every row that is not done."""
        for number, tokens in enumerate(self._passages):
            yield from self._passage(number, tokens, done)
            if number == 0:
                for task in self._tasks:
                    yield from self._task(task, done)

    def _passage(self, number: int, tokens: Tensor, done: set[tuple[str, str, int]]) -> Iterator[Unit[MemoryRow]]:
        """One passage's rows; every process that measures one of them reads it by the exact model."""
        name = f"passage {number + 1} of {len(self._passages)}"
        read = cache(lambda: ReadPassage(self._loaded, self._layers, tokens, self.header.num_measured))
        for entry in self.entries:
            if (f"passage {number}", entry.name, entry.budget) not in done:
                words = f"{entry.label}{_at(entry.budget)}, {name}"
                yield Unit(words, "", 1, partial(_passage_row, read, number, entry))

    def _task(self, task: Task, done: set[tuple[str, str, int]]) -> Iterator[Unit[MemoryRow]]:
        """One task's rows."""
        for entry in self.entries:
            if (task.name, entry.name, entry.budget) not in done:
                words = f"{entry.label}{_at(entry.budget)}, {task.name}"
                yield Unit(words, "", 1, partial(self._task_row, task, entry))

    def _task_row(self, task: Task, entry: Entry) -> list[MemoryRow]:
        """One contender's answers."""
        found = log_probabilities(self._loaded.model, task.tokens, task.positions, entry.answer)[0]
        depths = [one.depth for one in task.questions]
        return [RecallRow(task.name, entry.name, entry.label, entry.budget, depths, task.hits(found))]

    def _stocked(
        self, budgets: Sequence[int], kinds: tuple[str, ...], num_tokens: int
    ) -> tuple[list[Entry], dict[str, str]]:
        """Baselines and every contender at every budget, and why some are left out."""
        heads, places = self._probe.num_key_heads, len(self._layers.names)
        whole = heads * places * self._sizes.key_bytes
        entries = [
            Entry(EXACT, "exact attention", BASELINE, whole * num_tokens, lambda call: call.softmax()),
            Entry(UNIFORM, "averaging the values", BASELINE, whole // 2, self._layers.uniform()),
        ]
        left_out: dict[str, str] = {}
        for budget in budgets:
            shelf = at_budget(budget, self._sizes, kinds)
            left_out |= {f"{kind} at {budget}": reason for kind, reason in shelf.left_out.items()}
            for kind, one in shelf.contenders.items():
                kept = one.num_bytes(self._sizes, num_tokens) * heads * places
                entries.append(Entry(kind, one.label, budget, kept, self._layers.by(one)))
        return entries, left_out


def _passage_row(read: Callable[[], ReadPassage], number: int, entry: Entry) -> list[MemoryRow]:
    """One contender's figures on a passage."""
    passage = read()
    with torch.no_grad():
        outputs = [entry.answer(call) for call in passage.calls]
    return [passage_row(passage, number, entry, outputs)]


def _at(budget: int) -> str:
    """A budget in words."""
    return f" at {budget:,} keys" if budget else ""
