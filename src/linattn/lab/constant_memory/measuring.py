"""The audit of a constant memory: every contender, at every budget, on passages and on recall.

Contenders take the place of softmax in the layers that attend to all tokens; the model reads each text whole
(teacher-forced), and every query sees what its stream would hold by then. Nothing is fitted beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.hf import AttentionCall, LoadedModel
from linattn.lab.audit.text import Text
from linattn.lab.circumstances import versions
from linattn.lab.constant_memory.answering import (
    Answer,
    Beginning,
    GlobalLayers,
    log_probabilities,
    recording,
    sizes_of,
)
from linattn.lab.constant_memory.measures import Bins, distance, head_errors
from linattn.lab.constant_memory.passages import TokenText
from linattn.lab.constant_memory.planning import CANDIDATES, PLAIN, Choice, MemoryPlan, TrialRecord, choose
from linattn.lab.constant_memory.recall import Task, tasks
from linattn.lab.constant_memory.records import (
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
from linattn.lab.contenders import KINDS, Contender, at_budget
from linattn.lab.pace import Silent, Watch
from linattn.lab.rounds import Unit, in_rounds

_SILENT = Silent()
# Positions before the last tokens at which figures are taken as well.
_MOST_BEFORE = 128
_FEWEST_TOKENS = 64
_PROBE = 8


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


class Passage:
    """One passage under the exact model: what others are measured against."""

    def __init__(self, loaded: LoadedModel, layers: GlobalLayers, tokens: Tensor, num_measured: int) -> None:
        """Read the passage twice: as the model does, and through the interception, which must not change it."""
        self._model, self._tokens, length = loaded.model, tokens, tokens.shape[1]
        last = torch.arange(length - 1 - num_measured, length - 1)
        stride = max(-(-len(range(int(last[0]))) // _MOST_BEFORE), 1)
        self.positions = torch.cat((torch.arange(stride - 1, int(last[0]), stride), last))
        self.num_measured, self.bins = num_measured, Bins.of(length)
        self._following = tokens[0, self.positions + 1]
        self._beginning = Beginning(loaded.model, layers.names[0])
        with self._beginning.recorded():
            self._exact = log_probabilities(loaded.model, tokens, self.positions)[0]
        self.calls: list[AttentionCall] = []
        rebuilt = self.read(recording(layers, self.calls), _PROBE)
        _check(self._exact[-_PROBE:], rebuilt)

    def read(self, answer: Answer, last: int | None = None) -> Tensor:
        """Log-probabilities (n, V) at the measured positions, or at the last of them."""
        positions = self.positions if last is None else self.positions[-last:]
        with self._beginning.replayed():
            return log_probabilities(self._model, self._tokens, positions, answer)[0]

    def kl(self, answer: Answer) -> float:
        """The mean KL divergence of the last tokens' distributions from the exact ones."""
        last = self.num_measured
        found = distance(self._exact[-last:], self.read(answer, last), self._following[-last:])
        # Of equal distributions it is 0, and rounding may leave it below.
        return max(0.0, float(found.kl.mean()))

    def row(self, number: int, entry: Entry, outputs: Sequence[Tensor]) -> PassageRow:
        """One contender's figures; `outputs` are its answers to the exact model's calls."""
        found = distance(self._exact, self._exact if entry.name == EXACT else self.read(entry.answer), self._following)
        last = slice(-self.num_measured, None)
        return PassageRow(
            passage=number,
            contender=entry.name,
            label=entry.label,
            budget=entry.budget,
            num_bytes=entry.num_bytes,
            kl=float(found.kl[last].mean()),
            perplexity=float(found.loss[last].mean().exp()),
            same=float(found.same[last].mean()),
            kl_by_position=self.bins.means(self.positions, found.kl),
            perplexity_by_position=[float(torch.tensor(x).exp()) for x in self.bins.means(self.positions, found.loss)],
            errors=head_errors(self.calls, outputs, self._tokens.shape[1] - self.num_measured),
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
        if num_tokens < _FEWEST_TOKENS:
            raise ValueError(f"num_tokens must be at least {_FEWEST_TOKENS}, got {num_tokens}")
        if num_passages < 1:
            raise ValueError(f"num_passages must be at least 1, got {num_passages}")
        if not loaded.model.can_generate():
            raise ValueError(
                f"{loaded.name} is a {type(loaded.model).__name__}; --budget is for causal language models"
            )
        self._loaded, self._layers = loaded, GlobalLayers.of(loaded.model)
        self._text = TokenText.of(loaded, text)
        starts = self._text.starts(num_tokens, num_passages)
        self._passages = [self._text.passage(start, num_tokens) for start in starts]
        probe: list[AttentionCall] = []
        one = torch.zeros(1, dtype=torch.long)
        log_probabilities(loaded.model, self._passages[0][:, :_PROBE], one, recording(self._layers, probe))
        self._sizes = sizes_of(probe)
        self.entries, left_out = self._stocked(budgets, tuple(kinds or KINDS), probe, num_tokens)
        self._tasks, without_room = tasks(loaded, self._text, num_tokens // 2)
        self.header = MemoryHeader(
            versions=versions("linattn", "torch", "transformers"),
            model=loaded.name,
            architecture=type(loaded.model).__name__,
            layers=list(self._layers.numbers),
            num_windowed=len(self._layers.windowed),
            num_heads=probe[0].query.shape[1],
            num_key_heads=probe[0].key.shape[1],
            head_dim=self._sizes.head_dim,
            value_dim=self._sizes.value_dim,
            number_bytes=self._sizes.number_bytes,
            text=text.source,
            text_sha256=text.sha256,
            num_tokens=num_tokens,
            num_measured=min(512, num_tokens // 2),
            passages=starts,
            ends=list(Bins.of(num_tokens).ends),
            recall_tokens=num_tokens // 2,
            tasks=[task.name for task in self._tasks],
            budgets=list(budgets),
            kinds=list(kinds or KINDS),
            left_out=left_out | without_room,
            calibration=None if calibration is None else calibration.source,
        )

    def plan(self, text: Text, budget: int, watch: Watch = _SILENT, *, is_common: bool = False) -> MemoryPlan:
        """A contender and a share of the bytes for each global layer, chosen by KL on the first passage of a text.

        Cost: three forward passes, one per candidate, and two per global layer.

        Args:
            text: one that is not measured.
            budget: in exact keys, per layer.
            watch: told what is tried.
            is_common: whether all layers are to have the same.

        Returns:
            A `MemoryPlan`, whose KL is the plain window's or lower.

        Raises:
            ValueError: if the text is too short, or the budget for a plain window.
        """
        header = self.header
        self._contender(Choice(PLAIN, budget))
        content = TokenText.of(self._loaded, text)
        tokens = content.passage(content.starts(header.num_tokens, 1)[0], header.num_tokens)
        passage = Passage(self._loaded, self._layers, tokens, header.num_measured)

        def measure(choices: tuple[Choice | None, ...]) -> float:
            """The KL of a choice for each layer."""
            try:
                found = {place: self._contender(one) for place, one in enumerate(choices) if one is not None}
            except ValueError:
                return math.inf
            words = dict.fromkeys(contender.label for contender in found.values())
            watch.begin(f"Planning at {budget:,} keys: {', '.join(words)}")
            return passage.kl(self._layers.by(found))

        trials = choose(CANDIDATES, len(self._layers.names), budget, measure, is_common=is_common)
        return MemoryPlan(
            model=header.model,
            budget=budget,
            num_tokens=header.num_tokens,
            calibration=text.source,
            calibration_sha256=text.sha256,
            layers=header.layers,
            choices=[one.name for one in trials[0].choices],
            budgets=[one.num_keys for one in trials[0].choices],
            labels=[self._contender(one).label for one in trials[0].choices],
            kl=trials[0].kl,
            window_kl=next(trial.kl for trial in trials if {one.name for one in trial.choices} == {PLAIN}),
            trials=[
                TrialRecord([one.name for one in trial.choices], [one.num_keys for one in trial.choices], trial.kl)
                for trial in trials
            ],
        )

    def is_of(self, plan: MemoryPlan, text: Text) -> bool:
        """Whether a plan was made for this model and length, on this text."""
        header = self.header
        wanted = header.model, header.num_tokens, header.layers, text.sha256
        return wanted == (plan.model, plan.num_tokens, plan.layers, plan.calibration_sha256)

    def take(self, plan: MemoryPlan) -> None:
        """Measure a plan too, after all contenders; ValueError where a layer's bytes are too few for its contender."""
        chosen = [self._contender(one) for one in map(Choice, plan.choices, plan.budgets)]
        kept = sum(one.num_bytes(self._sizes, self.header.num_tokens) for one in chosen)
        answer = self._layers.by(dict(enumerate(chosen)))
        entry = Entry(PLANNED, plan.label, plan.budget, kept * self.header.num_key_heads, answer)
        self.entries.append(entry)

    def _contender(self, choice: Choice) -> Contender:
        """What a layer keeps; ValueError where its bytes are too few."""
        shelf = at_budget(choice.num_keys, self._sizes, (choice.name,))
        if shelf.left_out:
            raise ValueError(f"{choice.name}: {shelf.left_out[choice.name]}")
        return shelf.contenders[choice.name]

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
        read = cache(lambda: Passage(self._loaded, self._layers, tokens, self.header.num_measured))
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
        self, budgets: Sequence[int], kinds: tuple[str, ...], probe: Sequence[AttentionCall], num_tokens: int
    ) -> tuple[list[Entry], dict[str, str]]:
        """Baselines and every contender at every budget, and why some are left out."""
        heads, places = probe[0].key.shape[1], len(self._layers.names)
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


def _passage_row(read: Callable[[], Passage], number: int, entry: Entry) -> list[MemoryRow]:
    """One contender's figures on a passage."""
    passage = read()
    with torch.no_grad():
        outputs = [entry.answer(call) for call in passage.calls]
    return [passage.row(number, entry, outputs)]


def _at(budget: int) -> str:
    """A budget in words."""
    return f" at {budget:,} keys" if budget else ""


def _check(exact: Tensor, rebuilt: Tensor) -> None:
    """Refuse a model whose global layers do more than softmax(scale · q·k) v."""
    apart = float((exact.exp() * (exact - rebuilt)).sum(-1).mean())
    if not abs(apart) < 1e-4:
        raise RuntimeError(
            f"exact attention on the intercepted queries, keys and values gives other predictions than the model "
            f"(KL {apart:.1e}): no figure measured on it would be right"
        )
