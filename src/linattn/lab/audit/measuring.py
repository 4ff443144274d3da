"""The audit: record a model's attention on a text, and measure every method on every head and on the whole model.

Causal models: maps that need statistics of queries and keys (means, norms) take them from the first half of the text,
as the exact model computes it, and every figure, the baselines' included, is measured on the second half alone. No
measured token is therefore known to any map in advance. Bidirectional models: the statistics are those of the very
call, which linear attention can take on its way.

Letters: B batch, H query heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.hf import AttentionCall, LoadedModel, intercept
from linattn.lab.audit.grid import AuditGrid, Configuration, in_words
from linattn.lab.audit.kept import Kept
from linattn.lab.audit.layer_rows import head_rows, plan_rows, rank_rows, ranks
from linattn.lab.audit.leaving_out import unpayable
from linattn.lab.audit.paying import time_lengths, time_model, worth_timing
from linattn.lab.audit.planned import Planner
from linattn.lab.audit.recording import record
from linattn.lab.audit.records import (
    EXACT,
    PLANNED,
    UNIFORM,
    AuditRow,
    Header,
    LengthsRow,
    ModelRow,
    TimeRow,
    WeightsRow,
)
from linattn.lab.audit.text import Text
from linattn.lab.audit.truth import LayerTruth
from linattn.lab.audit.weights import explored_heads, weights_row
from linattn.lab.audit.work import Work
from linattn.lab.circumstances import versions
from linattn.lab.pace import Silent, Watch
from linattn.planning.measures import cosine
from linattn.planning.methods import Method, fit

_NUM_ROWS = 128
_FEWEST_TOKENS = 8
_MOST_RANKED = 1024
_SILENT = Silent()


class Audit:
    """A model's attention on a text, recorded and ready to be measured.

    Attributes:
        header: the circumstances, complete before anything is measured.
        grid: what `rows` will measure.
    """

    header: Header
    grid: AuditGrid

    def __init__(
        self,
        loaded: LoadedModel,
        text: Text,
        grid: AuditGrid,
        *,
        num_tokens: int = 512,
        planned: Planner | None = None,
        leave_out: bool = False,
        watch: Watch = _SILENT,
    ) -> None:
        """Record the model's attention and compute what is exact about it.

        Cost: two forward passes, and exact attention in float64 once per layer; memory for all layers' q, k, v and
        outputs.

        Args:
            loaded: model and tokenizer.
            text: the text; a shorter one than asked for is used whole, and the header says how many tokens it gave.
            grid: what to measure; every map is built once here, so that a bad option fails at once.
            num_tokens: tokens to read, special tokens included.
            planned: makes plans on another text, to be measured on this one; None for none.
            leave_out: whether methods whose state cannot pay on this model's heads are left out; the header says why.
            watch: told what begins.

        Raises:
            ValueError: if the text gives fewer than 8 tokens, a map refuses its arguments, or the model cannot be
                intercepted.
        """
        self._model, self._planned = loaded.model, planned
        self._inputs = loaded.encode(text.content, num_tokens)
        length = self._inputs["input_ids"].shape[1]
        if length < _FEWEST_TOKENS:
            raise ValueError(
                f"num_tokens must be at least {_FEWEST_TOKENS} and the text as long; of {text.source} {length} are read"
            )
        watch.begin(f"Recording the attention of {loaded.name} to {length} tokens")
        recorded = record(self._model, self._inputs)
        self._output, calls = recorded.output, recorded.calls
        self._first_call = calls[0]
        self._places = {call.module_name: place for place, call in enumerate(calls)}
        first = length // 2 if calls[0].is_causal else 0
        shapes = [(call.query.shape[-1], call.value.shape[-1]) for call in calls]
        left_out = unpayable(grid, shapes, scale=calls[0].scale, num_tokens=length) if leave_out else {}
        methods = tuple(method for method in grid.methods if method.label not in left_out)
        self.grid = replace(grid, methods=methods)
        self._samples = self._built(calls[0])
        self._layers = []
        for number, call in enumerate(calls):
            watch.pass_by(f"Exact answers, layer {number + 1} of {len(calls)}")
            self._layers.append(LayerTruth(call, first=first, num_rows=_NUM_ROWS))
        self.header = Header(
            versions=versions("linattn", "torch", "transformers"),
            model=loaded.name,
            architecture=type(loaded.model).__name__,
            is_causal=calls[0].is_causal,
            num_layers=len(calls),
            num_heads=calls[0].query.shape[1],
            head_dim=calls[0].query.shape[-1],
            value_dim=calls[0].value.shape[-1],
            text=text.source,
            text_sha256=text.sha256,
            num_tokens=length,
            first_measured=first,
            num_rows=len(self._layers[0].query_index),
            maps=[method.label for method in methods],
            features=list(grid.features),
            draws=grid.draws,
            seed=grid.seed,
            target=None if planned is None else planned.target,
            calibration=None if planned is None else planned.source,
            left_out=left_out,
            layers=[call.layer for call in calls] if recorded.windowed else [],
            windowed=list(recorded.windowed),
            longest=getattr(loaded.model.config, "max_position_embeddings", None),
            num_key_heads=calls[0].key.shape[1],
            even_if_slower=planned is not None and planned.even_if_slower,
        )

    def kept(self, rows: Sequence[AuditRow]) -> Kept:
        """What of an earlier run's rows need not be measured again.

        Args:
            rows: written under the same header.

        Returns:
            Those of all that was measured to its end.
        """
        heads = [layer.call.query.shape[1] for layer in self._layers]
        return Kept(rows, heads=heads, ranks=ranks(self._layers[0]))

    def work(self, kept: Kept) -> tuple[float, float]:
        """All work, and what of it an earlier run has done, in operations, roughly.

        Args:
            kept: what need not be measured again.

        Returns:
            Both.
        """
        parts = list(self._parts(kept))
        return sum(work for work, _ in parts), sum(work for work, done in parts if done)

    def rows(self, kept: Kept | None = None, watch: Watch = _SILENT) -> Iterator[AuditRow]:
        """Measure: the baselines and the ranks first, then for every configuration its heads and the whole model.

        Ranks are left out of texts with more than 1024 measured tokens, whose decompositions would take the most time.
        Last, the methods that no other beats in error and time are timed at growing lengths.

        Cost: what `LayerTruth.rank_errors` costs; per configuration, for each layer what `LayerTruth.measure` costs,
        and one forward pass; per method and width what `time_model` costs, and for some `time_lengths`.

        Args:
            kept: what need not be measured again; nothing of it is yielded.
            watch: told what begins and what is done.

        Returns:
            An iterator that measures as it goes; a configuration's `ModelRow` is its last row.
        """
        kept = self.kept([]) if kept is None else kept
        found = list(kept.rows)
        for row in self._errors(kept, watch):
            found.append(row)
            yield row
        yield from self._time_lengths(worth_timing(found), kept, watch)
        if self._planned is not None and not kept.has_lengths(PLANNED, None):
            watch.begin("A method for each head: from which length on it is faster")
            yield time_lengths(PLANNED, None, self._by_plans(self._planned), self._first_call)

    def _errors(self, kept: Kept, watch: Watch) -> Iterator[AuditRow]:
        """All but times at growing lengths."""
        watch.begin("Exact attention and averaging the values")
        for label, answer in ((EXACT, AttentionCall.softmax), (UNIFORM, AttentionCall.uniform)):
            if not kept.has_model(label, None, 0):
                yield self._end_to_end(label, None, 0, answer)
                watch.advance(self._work.baseline)
        for number, layer in enumerate(self._layers):
            if not kept.has_weights(EXACT, None, number):
                yield self._weights(EXACT, None, number, layer.sampled())
        if self._are_ranked:
            yield from self._measure_ranks(kept, watch)
        for configuration in self.grid.configurations():
            if not kept.has_model(
                configuration.method.label, self._sample(configuration).num_features, configuration.draw
            ):
                yield from self._measure(configuration, kept, watch)
        if self._planned is not None and not kept.has_model(PLANNED, None, 0):
            yield from self._measure_plans(self._planned, kept, watch)

    @property
    def _are_ranked(self) -> bool:
        """Whether the text is short enough for its attention matrices to be decomposed."""
        return self.header.num_tokens - self.header.first_measured <= _MOST_RANKED

    def _measure_ranks(self, kept: Kept, watch: Watch) -> Iterator[AuditRow]:
        """The limits of every rank, layer by layer."""
        watch.begin("The limit of every rank")
        for number, layer in enumerate(self._layers):
            if not kept.has_ranks(number):
                watch.pass_by(f"The limit of every rank, layer {number + 1} of {len(self._layers)}")
                yield from rank_rows(number, layer)
                watch.advance(self._work.ranks)

    def _measure(self, configuration: Configuration, kept: Kept, watch: Watch) -> Iterator[AuditRow]:
        """One method at one width with one draw: each layer's heads, then the whole model."""
        label, draw = configuration.method.label, configuration.draw
        words = in_words(configuration, self._sample(configuration), self.header.draws)
        watch.begin(words)
        maps = []
        for number, layer in enumerate(self._layers):
            feature_map = self._build(configuration, number)
            maps.append(feature_map)
            width = feature_map.num_features
            are_there = kept.has_heads(label, width, draw, number)
            if are_there and (draw or kept.has_weights(label, width, number)):
                continue
            watch.pass_by(f"{words}, layer {number + 1} of {len(self._layers)}")
            measured = layer.measure(configuration.method, feature_map)
            if not draw and not kept.has_weights(label, width, number):
                yield self._weights(label, width, number, measured.sampled)
            if not are_there:
                yield from head_rows(configuration, number, feature_map, layer, measured)
                watch.advance(self._work.heads(configuration.method, feature_map))
        watch.pass_by(f"{words}, the whole model")
        answer, features = self._linear(configuration.method, maps), maps[0].num_features
        if draw == 0 and not kept.has_time(label, features):
            yield self._time(label, features, answer)
        yield self._end_to_end(label, features, draw, answer)
        watch.advance(self._work.model(configuration.method, maps[0], is_timed=draw == 0))

    def _weights(self, label: str, features: int | None, number: int, weights: Tensor) -> WeightsRow:
        """A layer's rows for the explorer."""
        heads = explored_heads([layer.call.query.shape[1] for layer in self._layers])[number]
        return weights_row(label, features, number, heads, self._layers[number].sampled_queries, weights)

    def _measure_plans(self, planner: Planner, kept: Kept, watch: Watch) -> Iterator[AuditRow]:
        """One row per head, then the whole model."""
        watch.begin(f"A method for each head, for an error of {planner.target}")
        for number, layer in enumerate(self._layers):
            if kept.has_plan(number):
                continue
            watch.pass_by(f"A method for each head, layer {number + 1} of {len(self._layers)}")
            yield from plan_rows(number, planner.plan(number), layer)
            watch.advance(self._work.plan)

        answer = self._by_plans(planner)
        if not kept.has_time(PLANNED, None):
            yield self._time(PLANNED, None, answer)
        yield self._end_to_end(PLANNED, None, 0, answer)
        watch.advance(self._work.baseline)

    def _by_plans(self, planner: Planner) -> Callable[[AttentionCall], Tensor]:
        """Every layer by its plan."""

        def answer(call: AttentionCall) -> Tensor:
            """One layer's plan."""
            return planner.plan(self._places[call.module_name]).attend(call.query, call.key, call.value)

        return answer

    def _parts(self, kept: Kept) -> Iterator[tuple[float, bool]]:
        """Every part's work, and whether it is done."""
        layers, work = range(len(self._layers)), self._work
        yield from ((work.baseline, kept.has_model(label, None, 0)) for label in (EXACT, UNIFORM))
        if self._are_ranked:
            yield from ((work.ranks, kept.has_ranks(layer)) for layer in layers)
        for one in self.grid.configurations():
            label, sample = one.method.label, self._sample(one)
            whole = kept.has_model(label, sample.num_features, one.draw)
            for layer in layers:
                done = whole or kept.has_heads(label, sample.num_features, one.draw, layer)
                yield work.heads(one.method, sample), done
            yield work.model(one.method, sample, is_timed=one.draw == 0), whole
        if self._planned is not None:
            yield from ((work.plan, kept.has_plan(layer)) for layer in layers)
            yield work.baseline, kept.has_model(PLANNED, None, 0)

    def _built(self, call: AttentionCall) -> dict[tuple[str, int | None], FeatureMap]:
        """A map of each method and width, for its sizes; a bad option fails here."""
        head_dim, scale = call.query.shape[-1], call.scale
        return {
            (one.method.label, one.num_features): one.build(head_dim, scale=scale, layer=0)
            for one in self.grid.configurations()
            if one.draw == 0
        }

    def _sample(self, configuration: Configuration) -> FeatureMap:
        """The map that tells a configuration's sizes."""
        return self._samples[configuration.method.label, configuration.num_features]

    @property
    def _work(self) -> Work:
        """What the parts cost, roughly."""
        header = self.header
        return Work(
            num_layers=header.num_layers,
            num_tokens=header.num_tokens,
            num_measured=header.num_tokens - header.first_measured,
            num_rows=header.num_rows,
            head_dim=header.head_dim,
            value_dim=header.value_dim,
            is_causal=header.is_causal,
        )

    def _build(self, configuration: Configuration, number: int) -> FeatureMap:
        """The map of one layer, fitted on the tokens it may know."""
        layer = self._layers[number]
        feature_map = configuration.build(layer.call.query.shape[-1], scale=layer.call.scale, layer=number)
        span = layer.fitting_span
        fit(feature_map, layer.call.query[:, :, span], layer.call.key[:, :, span])
        return feature_map

    def _end_to_end(
        self, label: str, features: int | None, draw: int, answer: Callable[[AttentionCall], Tensor]
    ) -> ModelRow:
        """The whole model under another attention, against its own output."""
        output = self._under(answer)
        first = self.header.first_measured
        ours, exact = output[0, first:].double(), self._output[0, first:].double()
        embedding = cosine(ours.mean(0), exact.mean(0))
        return ModelRow(label, features, draw, float(embedding), float(cosine(ours, exact).mean()))

    def _under(self, answer: Callable[[AttentionCall], Tensor]) -> Tensor:
        """The whole model's output under another attention."""

        def answer_audited(call: AttentionCall) -> Tensor:
            """Layers with a window keep their softmax even where the text fits in."""
            return answer(call) if call.module_name in self._places else call.softmax()

        with torch.no_grad(), intercept(self._model, answer_audited):
            output: Tensor = self._model(**self._inputs)[0]
        return output

    def _time(self, label: str, features: int | None, answer: Callable[[AttentionCall], Tensor]) -> TimeRow:
        """The whole model's time under another attention, and its own."""

        def exact() -> None:
            """The model as it is."""
            with torch.no_grad():
                self._model(**self._inputs)

        ours, theirs = time_model(lambda: self._under(answer), exact)
        return TimeRow(label, features, ours, theirs, torch.get_num_threads())

    def _time_lengths(self, wanted: Sequence[tuple[str, int]], kept: Kept, watch: Watch) -> Iterator[LengthsRow]:
        """From which length on methods are faster than softmax, on the first layer's heads."""
        configurations = {
            (one.method.label, self._sample(one).num_features): one
            for one in self.grid.configurations()
            if one.draw == 0
        }
        for label, features in wanted:
            if not kept.has_lengths(label, features):
                one = configurations[label, features]
                watch.begin(f"{in_words(one, self._sample(one), 1)}: from which length on it is faster")
                answer = self._linear(one.method, [self._build(one, 0)])
                yield time_lengths(label, features, answer, self._first_call)

    def _linear(self, method: Method, maps: list[FeatureMap]) -> Callable[[AttentionCall], Tensor]:
        """A method with one map per layer."""

        def answer(call: AttentionCall) -> Tensor:
            """One layer's answer; bidirectional maps take their statistics from the queries and keys that arrive."""
            feature_map = maps[self._places[call.module_name]]
            if not bool(call.query.isfinite().all() & call.key.isfinite().all()):
                # An earlier layer's signed map divided by 0: there is nothing left to fit or to attend to.
                return call.query.new_full((*call.query.shape[:-1], call.value.shape[-1]), torch.nan)
            if not call.is_causal:
                fit(feature_map, call.query, call.key)
            return method.attend(feature_map, call.query, call.key, call.value, is_causal=call.is_causal)

        return answer
