"""The audit: record a model's attention on a text, and measure every method on every head and on the whole model.

Causal models: maps that need statistics of queries and keys (means, norms) take them from the first half of the text,
as the exact model computes it, and every figure, the baselines' included, is measured on the second half alone. No
measured token is therefore known to any map in advance. Bidirectional models: the statistics are those of the very
call, which linear attention can take on its way.

Letters: B batch, H query heads, L tokens, D head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from linattn.feature_maps.digests import weights_digest
from linattn.hf import AttentionCall, LoadedModel
from linattn.hf.loading import most_tokens
from linattn_lab.audit.grid import AuditGrid, Configuration, in_words
from linattn_lab.audit.kept import Kept
from linattn_lab.audit.layer_rows import head_rows, rank_rows, ranks
from linattn_lab.audit.leaving_out import unusable
from linattn_lab.audit.paying import time_lengths, worth_timing
from linattn_lab.audit.recording import record
from linattn_lab.audit.records import EXACT, UNIFORM, AuditRow, Header, HeadRow, LengthsRow, WeightsRow
from linattn_lab.audit.truth import LayerTruth
from linattn_lab.audit.weights import explored_heads, weights_row
from linattn_lab.audit.whole_model import WholeModel
from linattn_lab.audit.work import exact_work, heads_work, lengths_work, pass_work, ranks_work, timed_work
from linattn_lab.built_methods import BuiltMethod
from linattn_lab.circumstances import versions
from linattn_lab.pace import SILENT, Watch
from linattn_lab.rounds import Unit, in_rounds
from linattn_lab.texts import Text

_NUM_ROWS = 128
_FEWEST_TOKENS = 8
_MOST_RANKED = 1024
_LONG_ENOUGH = 0.2
_Unit = Unit[AuditRow]
# A configuration's map of a layer, built and fitted when it is first asked for.
_LayerMaps = Callable[[int], BuiltMethod]


class Audit:
    """A model's attention on a text, recorded and ready to be measured."""

    header: Header  # the circumstances, complete before anything is measured
    grid: AuditGrid  # what `rows` will measure
    seconds_per_unit: float  # of `work`, as this machine took for the exact answers

    def __init__(
        self,
        loaded: LoadedModel,
        text: Text,
        grid: AuditGrid,
        *,
        num_tokens: int = 512,
        leave_out: bool = False,
        watch: Watch = SILENT,
    ) -> None:
        """Record the model's attention and compute what is exact about it.

        Cost: two forward passes, and exact attention in float64 once per layer; memory for all layers' q, k, v and
        outputs.
        """
        inputs = loaded.encode(text.content, num_tokens)
        length = inputs["input_ids"].shape[1]
        if length < _FEWEST_TOKENS:
            raise ValueError(
                f"num_tokens must be at least {_FEWEST_TOKENS} and the text as long; of {text.source} {length} are read"
            )
        watch.begin(f"Recording the attention of {loaded.name} to {length} tokens")
        recorded = record(loaded.model, inputs)
        calls = recorded.calls
        self._first_call = calls[0]
        self._places = {call.module_name: place for place, call in enumerate(calls)}
        first = length // 2 if calls[0].is_causal else 0
        self._whole = WholeModel(loaded.model, inputs, recorded.output, first=first, names=frozenset(self._places))
        left_out = unusable(grid, calls) if leave_out else {}
        methods = tuple(method for method in grid.methods if method.label not in left_out)
        self.grid = replace(grid, methods=methods)
        self._samples = self._built(calls[0])
        truth = partial(LayerTruth, first=first, num_rows=_NUM_ROWS)
        self._layers = []
        for number, call in enumerate(calls):
            watch.pass_by(f"Exact answers, layer {number + 1} of {len(calls)}")
            self._layers.append(truth(call))
        self.seconds_per_unit = _mean_seconds(partial(truth, calls[0])) / exact_work(length)
        self.header = Header(
            versions=versions("linattn", "linattn-compiled", "torch", "transformers"),
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
            left_out=left_out,
            layers=[call.layer for call in calls] if recorded.windowed else [],
            windowed=list(recorded.windowed),
            longest=most_tokens(loaded.model),
            num_key_heads=calls[0].key.shape[1],
            weights_sha256=weights_digest(loaded.model),
        )

    def kept(self, rows: Sequence[AuditRow]) -> Kept:
        """What of an earlier run's rows need not be measured again."""
        heads = [layer.call.query.shape[1] for layer in self._layers]
        return Kept(rows, heads=heads, ranks=ranks(self._layers[0]))

    def work(self, kept: Kept) -> tuple[float, float]:
        """All work, and what of it an earlier run has done, roughly, in the units of `linattn_lab.audit.work`."""
        units = list(self._units(kept))
        done = sum(unit.work for unit in units if unit.is_done)
        if any(isinstance(row, LengthsRow) for row in kept.rows):
            done += lengths_work(self.header.num_tokens)
        return sum(unit.work for unit in units) + lengths_work(self.header.num_tokens), done

    def rows(self, kept: Kept | None = None, watch: Watch = SILENT) -> Iterator[AuditRow]:
        """Measure: the baselines and the ranks first, then for every configuration its heads and the whole model.

        Ranks are left out where the grid has none, and of texts with more than 1024 measured tokens, whose
        decompositions would take the most time.
        Last, the methods that no other beats in error and time are timed at growing lengths. Inside
        `linattn.processes.launched` the layers and whole models are dealt out to the processes, all of which get all
        rows, those of one process to the bit; times are taken by the first one while the others wait.

        Cost: what `LayerTruth.rank_errors` costs; per configuration, for each layer what `LayerTruth.measure` costs,
        and one forward pass; per method and width what `time_model` costs, and for some `time_lengths`.

        Args:
            kept: what need not be measured again; nothing of it is yielded.
            watch: told what begins and what is done.
        """
        kept = self.kept([]) if kept is None else kept
        found = list(kept.rows)
        for row in in_rounds(self._units(kept), watch):
            found.append(row)
            yield row
        yield from in_rounds(self._length_units(worth_timing(found), kept), watch)

    def _units(self, kept: Kept) -> Iterator[_Unit]:
        """All but times at growing lengths."""
        stage, num_tokens = "Exact attention and uniform attention", self.header.num_tokens
        passed = pass_work(num_tokens) * len(self._layers)
        for label, answer in ((EXACT, AttentionCall.softmax), (UNIFORM, AttentionCall.uniform)):
            measure = partial(self._whole.end_to_end, label, None, 0, answer)
            yield Unit(stage, "", passed, measure, _alone, is_done=kept.has("model", label))
        for number in range(len(self._layers)):
            kept_already = kept.has("weights", EXACT, layer=number)
            yield Unit(stage, "", 0.0, partial(self._exact_weights, number), _alone, is_done=kept_already)
        if self._are_ranked:
            stage = "The limit of every rank"
            for number, layer in enumerate(self._layers):
                words = f"{stage}, {self._place(number)}"
                measure_ranks = partial(rank_rows, number, layer)
                yield Unit(stage, words, ranks_work(num_tokens), measure_ranks, is_done=kept.has("rank", layer=number))
        for configuration in self.grid.configurations():
            yield from self._units_of(configuration, kept)

    @property
    def _are_ranked(self) -> bool:
        """Whether limits are asked for, and the text is short enough for its attention matrices to be decomposed."""
        measured = self.header.num_tokens - self.header.first_measured
        return self.grid.are_ranked and measured <= _MOST_RANKED

    def _place(self, number: int) -> str:
        """A layer in words."""
        return f"layer {number + 1} of {len(self._layers)}"

    def _units_of(self, configuration: Configuration, kept: Kept) -> Iterator[_Unit]:
        """One method at one width with one draw: each layer's heads, the model's time, then the whole model."""
        method, draw, sample = configuration.method, configuration.draw, self._sample(configuration)
        label, features, num_tokens = method.label, sample.num_features, self.header.num_tokens
        stage, maps = in_words(configuration, sample, self.header.draws), cache(partial(self._build, configuration))
        is_whole = kept.has("model", label, features, draw=draw)
        for number in range(len(self._layers)):
            yield Unit(
                stage,
                f"{stage}, {self._place(number)}",
                heads_work(method, num_tokens),
                partial(self._head_rows, configuration, maps, number, kept),
                is_done=is_whole or self._has_layer(configuration, number, kept),
            )
        words, answer = f"{stage}, the whole model", self._linear(maps)
        if draw == 0:
            is_timed = is_whole or kept.has("time", label, features)
            measure: Callable[[], AuditRow] = partial(self._whole.time, label, features, answer)
            timed = timed_work(num_tokens) * len(self._layers)
            yield Unit(stage, words, timed, measure, _alone, is_alone=True, is_done=is_timed)
        measure = partial(self._whole.end_to_end, label, features, draw, answer)
        yield Unit(stage, words, pass_work(num_tokens) * len(self._layers), measure, _alone, is_done=is_whole)

    def _has_layer(self, configuration: Configuration, number: int, kept: Kept) -> bool:
        """Whether a layer's figures are all there; rows for the explorer are of the first draw."""
        label, draw, features = configuration.method.label, configuration.draw, self._sample(configuration).num_features
        are_there = kept.has("head", label, features, draw=draw, layer=number)
        return are_there and (draw > 0 or kept.has("weights", label, features, layer=number))

    def _head_rows(
        self, configuration: Configuration, maps: _LayerMaps, number: int, kept: Kept
    ) -> list[HeadRow | WeightsRow]:
        """What is not kept of a layer: its rows for the explorer, and one row per head."""
        label, draw = configuration.method.label, configuration.draw
        layer, built = self._layers[number], maps(number)
        width, measured = built.num_features, layer.measure(built)
        found: list[HeadRow | WeightsRow] = []
        if draw == 0 and not kept.has("weights", label, width, layer=number):
            found.append(self._weights(label, width, number, measured.sampled))
        if not kept.has("head", label, width, draw=draw, layer=number):
            found += head_rows(configuration, number, built, layer, measured)
        return found

    def _exact_weights(self, number: int) -> WeightsRow:
        """A layer's rows under softmax, for the explorer."""
        return self._weights(EXACT, None, number, self._layers[number].sampled())

    def _weights(self, label: str, features: int | None, number: int, weights: Tensor) -> WeightsRow:
        """A layer's rows for the explorer."""
        heads = explored_heads([layer.call.query.shape[1] for layer in self._layers])[number]
        return weights_row(label, features, number, heads, self._layers[number].sampled_queries, weights)

    def _built(self, call: AttentionCall) -> dict[tuple[str, int | None], BuiltMethod]:
        """A map of each method and width, for its sizes; a bad option, or a call without meaning, fails here."""
        _, _, num_tokens, head_dim = call.query.shape
        samples = {
            (one.method.label, one.num_features): one.build(head_dim, scale=call.scale, layer=0)
            for one in self.grid.configurations()
            if one.draw == 0
        }
        for built in samples.values():
            built.check_call(num_tokens, is_causal=call.is_causal)
        return samples

    def _sample(self, configuration: Configuration) -> BuiltMethod:
        """The map that tells a configuration's sizes."""
        return self._samples[configuration.method.label, configuration.num_features]

    def _build(self, configuration: Configuration, number: int) -> BuiltMethod:
        """The map of one layer, fitted on the tokens it may know."""
        layer = self._layers[number]
        built = configuration.build(layer.call.query.shape[-1], scale=layer.call.scale, layer=number)
        span = layer.fitting_span
        built.fit(layer.call.query[:, :, span], layer.call.key[:, :, span])
        return built

    def _length_units(self, wanted: Sequence[tuple[str, int]], kept: Kept) -> Iterator[_Unit]:
        """From which length on methods are faster than softmax, on the first layer's heads."""
        configurations = {
            (one.method.label, self._sample(one).num_features): one
            for one in self.grid.configurations()
            if one.draw == 0
        }
        for label, features in wanted:
            one = configurations[label, features]
            stage = f"{in_words(one, self._sample(one), 1)}: from which length on it is faster"
            answer = self._linear(cache(partial(self._build, one)))
            measure = partial(time_lengths, label, features, answer, self._first_call)
            is_timed = kept.has("lengths", label, features)
            work = lengths_work(self.header.num_tokens) / len(wanted)
            yield Unit(stage, "", work, measure, _alone, is_alone=True, is_done=is_timed)

    def _linear(self, maps: _LayerMaps) -> Callable[[AttentionCall], Tensor]:
        """A method with one map per layer."""

        def answer(call: AttentionCall) -> Tensor:
            """One layer's answer; bidirectional maps take their statistics from the queries and keys that arrive."""
            built = maps(self._places[call.module_name])
            if not bool(call.query.isfinite().all() & call.key.isfinite().all()):
                # An earlier layer's signed map divided by 0: there is nothing left to fit or to attend to.
                return call.query.new_full((*call.query.shape[:-1], call.value.shape[-1]), torch.nan)
            if not call.is_causal:
                built.fit(call.query, call.key)
            return built.attend(call.query, call.key, call.value, is_causal=call.is_causal)

        return answer


def _mean_seconds(measure: Callable[[], object]) -> float:
    """Mean seconds of a call, warm and for a while: a short one says little of a machine that others use too."""
    num_calls, begun = 0, time.monotonic()
    while (seconds := time.monotonic() - begun) < _LONG_ENOUGH:
        measure()
        num_calls += 1
    return seconds / num_calls


def _alone(row: AuditRow) -> Iterator[AuditRow]:
    """A single row, as rows."""
    yield row
