"""The audit of a bounded KV cache: every method at every budget, on passages and on retrieval tasks.

Each text is read in chunks through the method's cache, as a long prompt is, and the predictions after its last tokens
are compared with those of the full cache on the same text. Nothing is fitted beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from linattn.feature_maps.digests import weights_digest
from linattn.hf import LoadedModel
from linattn.kv_cache.layer_plans import PLAIN, MemoryPlan
from linattn_lab.circumstances import processor, versions
from linattn_lab.kv_audit.facts import MOST_FACTS
from linattn_lab.kv_audit.methods import DEFAULT_KINDS, KINDS, Bounded, Method, methods, written_form
from linattn_lab.kv_audit.names import ENOUGH, FACTS, FULL, PLANNED
from linattn_lab.kv_audit.passage_figures import MOST_MEASURED, NUM_WRITTEN, Passage, longest_passage
from linattn_lab.kv_audit.passages import TokenText
from linattn_lab.kv_audit.reading import read, write
from linattn_lab.kv_audit.records import Key, MemoryHeader, MemoryRow, PassageRow, TaskRow, key_of
from linattn_lab.kv_audit.tasks import TASKS, Tasks
from linattn_lab.pace import SILENT, Watch
from linattn_lab.rounds import Unit, in_rounds
from linattn_lab.texts import Text

_FEWEST, _LENGTH = 64, 4096
# Tokens of the text from which the time of an audit is estimated.
_TRIED = 1024


class MemoryAudit:
    """A causal language model and texts, ready to be measured."""

    header: MemoryHeader  # the circumstances, complete before anything is measured
    methods: list[Method]  # what is measured, the full cache first
    bounded: Bounded  # the layers that are bounded

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Mapping[str, Text],
        budgets: Sequence[int],
        *,
        lengths: Sequence[int] | None = None,
        num_passages: int = 1,
        kinds: Sequence[str] | None = None,
        tasks: Sequence[str] = (FACTS,),
        num_samples: int = 1,
        num_facts: int = 6,
        chunk: int = 512,
        calibration: Text | None = None,
    ) -> None:
        """Find the layers, the passages and the tasks; nothing is measured yet.

        Cost: a few short forward passes.
        """
        check(tasks, kinds or (), num_passages=num_passages, num_samples=num_samples, num_facts=num_facts, chunk=chunk)
        if not (model := loaded.model).can_generate():
            raise ValueError(f"{loaded.name} is a {type(model).__name__}; --budget is for causal language models")
        lengths = _lengths(loaded, lengths)
        self._loaded, self.bounded = loaded, Bounded.of(loaded.model)
        self._texts = {kind: TokenText.of(loaded, text) for kind, text in texts.items()}
        self._places = [
            (kind, number, length, start)
            for length in lengths
            for kind, text in self._texts.items()
            for number, start in enumerate(text.starts(length, num_passages))
        ]
        self.methods, left_out = methods(budgets, tuple(kinds or DEFAULT_KINDS), self.bounded.sizes)
        self._tasks = Tasks(loaded, next(iter(self._texts.values())), num_facts, chunk)
        self._asked, without_room = self._with_room(tasks, lengths)
        self.header = MemoryHeader(
            **_circumstances(loaded, self.bounded, texts),
            lengths=list(lengths),
            num_passages=num_passages,
            num_measured=MOST_MEASURED,
            chunk=chunk,
            num_written=NUM_WRITTEN,
            tasks=list(tasks),
            num_samples=num_samples,
            num_facts=num_facts,
            budgets=list(budgets),
            kinds=list(kinds or DEFAULT_KINDS),
            left_out=left_out | without_room,
            calibration=None if calibration is None else calibration.source,
        )

    def take(self, plan: MemoryPlan, file: Path) -> None:
        """Measure a plan of a file too, after all other methods; not one of plain windows, which no cache takes."""
        if PLAIN in plan.choices:
            return
        self.methods.append(Method(PLANNED, plan.label, plan.budget, plan=file))

    def wanted(self) -> list[Key]:
        """What is measured of what, in order."""
        places = [
            ((kind, number, length), method) for kind, number, length, _ in self._places for method in self.methods
        ]
        keys: list[Key] = [(PassageRow, *place, method.name, method.budget) for place, method in places]
        return keys + [(TaskRow, *place, method.name, method.budget) for place, method in self._questions()]

    def work(self, key: Key) -> float:
        """Seconds that a figure takes on this machine, estimated from a short text."""
        kind, name, _, num_tokens, method, _ = key
        per_token, per_step, predictions = self._seconds
        if kind is TaskRow:
            return (num_tokens + self.header.chunk) * per_token + (0 if name == FACTS else 64) * per_step
        # The full cache is read twice, once as a control.
        reading = (2 if method == FULL else 1) * (num_tokens * per_token + predictions)
        return reading + NUM_WRITTEN * per_step + self.header.chunk * per_token

    def rows(self, earlier: Sequence[MemoryRow] = (), watch: Watch = SILENT) -> Iterator[MemoryRow]:
        """Measure passage by passage, then task by task, the full cache first.

        Cost: for each passage a pass of the full cache, and for each method a pass and 40 steps; for each task and
        method a pass and the steps of its answer. A task that the full cache does not answer is not measured further.

        Args:
            earlier: rows of an earlier run, which are not measured again.
            watch: told what begins, and of each row.
        """
        scores = {key_of(row): row.score for row in earlier if isinstance(row, TaskRow)}
        yield from in_rounds(self._units(set(map(key_of, earlier)), scores, watch), watch)

    @cached_property
    def _seconds(self) -> tuple[float, float, float]:
        """Seconds of a token of a prompt and of a step in the last method's cache, and of the predictions measured."""
        kind, _, length, start = self._places[0]
        tokens, model = self._texts[kind].passage(start, min(length, _TRIED)), self._loaded.model
        (first, second), memory = tokens.chunk(2, 1), self.methods[-1].cache(model)
        read(model, first, memory, last=1, chunk=self.header.chunk)
        begin = perf_counter()
        reading = read(model, second, memory, last=MOST_MEASURED, chunk=self.header.chunk)
        predictions = perf_counter() - begin - reading.seconds
        if reading.logs.isnan().any():
            raise ValueError(f"{self._loaded.name} predicts NaN; give another model, or another --dtype")
        per_step = write(model, reading.logs[-1], memory, 5).seconds / 4
        return reading.seconds / second.shape[1], per_step, predictions

    def _units(self, done: set[Key], scores: dict[Key, float], watch: Watch) -> Iterator[Unit[MemoryRow]]:
        """Every row that is not done; passages one at a time, since times are taken."""
        for kind, number, length, start in self._places:
            passage = Passage(self._loaded, self._texts[kind].passage(start, length), self.header.chunk)
            for method in self.methods:
                key: Key = (PassageRow, kind, number, length, method.name, method.budget)
                if key not in done:
                    words = f"{method.label}{_at(method.budget)}, {kind} {number + 1}, {length:,} tokens"
                    measure = partial(self._passage_row, passage, (kind, number), method)
                    yield Unit(words, "", self.work(key), measure, is_alone=True)
        for place, method in self._questions():
            key = (TaskRow, *place, method.name, method.budget)
            if key in done:
                continue
            is_full = method.name == FULL
            if not is_full and not self._is_answered(place, scores):
                watch.advance(self.work(key))
                continue
            words = f"{method.label}{_at(method.budget)}, {place[0]} {place[1] + 1}, {place[2]:,} tokens"
            answer, take = partial(self._task_row, place, method), partial(_noted, scores)
            yield Unit(words, "", self.work(key), answer, take, is_alone=is_full)

    def _questions(self) -> Iterator[tuple[tuple[str, int, int], Method]]:
        """Every text of a task and method: all that the full cache answers, then the others."""
        full, *others = self.methods
        for task, length in self._asked:
            places = [(task, sample, length) for sample in range(self.header.num_samples)]
            yield from ((place, full) for place in places)
            yield from ((place, method) for place in places for method in others)

    def _is_answered(self, place: tuple[str, int, int], scores: Mapping[Key, float]) -> bool:
        """Whether the full cache answers a task, in the mean over its samples."""
        task, _, length = place
        found = [score for key, score in scores.items() if (key[1], key[3], key[4]) == (task, length, FULL)]
        return sum(found) / len(found) >= ENOUGH

    def _passage_row(self, passage: Passage, place: tuple[str, int], method: Method) -> list[PassageRow]:
        """One method's figures on a passage."""
        figures = passage.figures(method, self.bounded.layers)
        return [PassageRow(*place, passage.num_tokens, method.name, method.label, method.budget, **figures)]

    def _task_row(self, place: tuple[str, int, int], method: Method) -> list[TaskRow]:
        """One method's answers to a task."""
        task, sample, length = place
        model = self._loaded.model
        with method.attending(model, self.bounded.names):
            depths, hits = self._tasks.answer(task, length, sample, method.cache(model))
        return [TaskRow(task, sample, length, method.name, method.label, method.budget, depths, hits)]

    def _with_room(self, tasks: Iterable[str], lengths: Sequence[int]) -> tuple[list[tuple[str, int]], dict[str, str]]:
        """Tasks and lengths, task by task, and why some are left out."""
        asked: list[tuple[str, int]] = []
        left_out: dict[str, str] = {}
        for task in tasks:
            for length in lengths:
                try:
                    self._tasks.check(task, length)
                except ValueError as error:
                    left_out[f"{task} at {length}"] = str(error)
                else:
                    asked.append((task, length))
        return asked, left_out


def _circumstances(loaded: LoadedModel, bounded: Bounded, texts: Mapping[str, Text]) -> dict[str, Any]:
    """What figures depend on beside what is asked for."""
    return {
        "versions": versions("linattn", "linattn-compiled", "torch", "transformers"),
        "processor": processor(),
        "num_threads": torch.get_num_threads(),
        "model": loaded.name,
        "architecture": type(loaded.model).__name__,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "layers": list(bounded.numbers),
        "num_exact": bounded.num_exact,
        "num_heads": bounded.num_heads,
        "num_key_heads": bounded.num_key_heads,
        "head_dim": bounded.sizes.head_dim,
        "value_dim": bounded.sizes.value_dim,
        "number_bytes": bounded.sizes.number_bytes,
        "weights_sha256": weights_digest(loaded.model),
        "texts": {kind: text.source for kind, text in texts.items()},
        "texts_sha256": {kind: text.sha256 for kind, text in texts.items()},
    }


def check(tasks: Sequence[str], kinds: Sequence[str], **numbers: int) -> None:
    """Refuse numbers and names that mean nothing, whatever the model is."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if numbers.get("num_facts", 0) > MOST_FACTS:
        raise ValueError(f"num_facts must be at most {MOST_FACTS}, got {numbers['num_facts']}")
    for kind in (kind for kind in kinds if kind not in KINDS):
        written_form(kind)
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"tasks must be among {', '.join(TASKS)}; got {', '.join(unknown)}")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks must be different, got {', '.join(tasks)}; name each once")


def _lengths(loaded: LoadedModel, lengths: Sequence[int] | None) -> Sequence[int]:
    """Lengths that are asked for, or 4,096 tokens where the model takes as many; ValueError for others."""
    most = longest_passage(loaded.model)
    if lengths is None:
        return (min(_LENGTH, most),)
    for num_tokens in lengths:
        if num_tokens < _FEWEST:
            raise ValueError(f"num_tokens must be at least {_FEWEST}, got {num_tokens}")
        if num_tokens > most:
            raise ValueError(f"num_tokens must be at most {most:,}, for what is written after them; got {num_tokens:,}")
    return lengths


def _noted(scores: dict[Key, float], rows: Iterable[TaskRow]) -> Iterator[MemoryRow]:
    """Rows, their scores taken down."""
    for row in rows:
        scores[key_of(row)] = row.score
        yield row


def _at(budget: int) -> str:
    """A budget in words."""
    return f" at {budget:,} keys" if budget else ""
