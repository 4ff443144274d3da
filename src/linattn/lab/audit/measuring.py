"""The audit: record a model's attention on a text, and measure every method on every head and on the whole model.

Causal models: maps that need statistics of queries and keys (means, norms) take them from the first half of the text,
as the exact model computes it, and every figure, the baselines' included, is measured on the second half alone. No
measured token is therefore known to any map in advance. Bidirectional models: the statistics are those of the very
call, which linear attention can take on its way.

Letters: B batch, H query heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.attention import softmax_attention
from linattn.feature_maps import FeatureMap
from linattn.hf import AttentionCall, LoadedModel, capture, intercept
from linattn.lab.audit.measurements import Configuration, Measurements
from linattn.lab.audit.records import EXACT, PLANNED, UNIFORM, Header, HeadRow, ModelRow, PlanRow, RankRow, Row
from linattn.lab.audit.text import Text
from linattn.lab.audit.truth import LayerTruth, Measurement
from linattn.lab.circumstances import versions
from linattn.planning import Plan
from linattn.planning.costs import flops_per_token, state_numbers
from linattn.planning.measures import uniform_average
from linattn.planning.methods import Method, fit

_NUM_ROWS = 128
_FEWEST_TOKENS = 8
_RANKS = tuple(2**power for power in range(9))
_MOST_RANKED = 1024


@dataclass(frozen=True, eq=False)
class Planned:
    """Plans to be measured too.

    Attributes:
        plans: one per layer.
        target: the error each head was to meet.
        calibration: source of the text they were made on.
    """

    plans: tuple[Plan, ...]
    target: float
    calibration: str


class Audit:
    """A model's attention on a text, recorded and ready to be measured.

    Attributes:
        header: the circumstances, complete before anything is measured.
        measurements: what `rows` will measure.
    """

    header: Header
    measurements: Measurements

    def __init__(
        self,
        loaded: LoadedModel,
        text: Text,
        measurements: Measurements,
        *,
        num_tokens: int = 512,
        planned: Planned | None = None,
    ) -> None:
        """Record the model's attention and compute what is exact about it.

        Cost: two forward passes, and exact attention in float64 once per layer; memory for all layers' q, k, v and
        outputs.

        Args:
            loaded: model and tokenizer.
            text: the text; a shorter one than asked for is used whole, and the header says how many tokens it gave.
            measurements: what to measure; every map is built once here, so that a bad option fails at once.
            num_tokens: tokens to read, special tokens included.
            planned: plans made on another text, to be measured on this one; None for none.

        Raises:
            ValueError: if the text gives fewer than 8 tokens, a map refuses its arguments, or the model cannot be
                intercepted.
        """
        self.measurements = measurements
        self._model, self._planned = loaded.model, planned
        self._inputs = loaded.encode(text.content, num_tokens)
        length = self._inputs["input_ids"].shape[1]
        if length < _FEWEST_TOKENS:
            raise ValueError(f"{text.source} gives {length} tokens; an audit needs at least {_FEWEST_TOKENS}")
        self._output, calls = self._record()
        first = length // 2 if calls[0].is_causal else 0
        for configuration in (one for one in measurements.configurations() if one.draw == 0):
            configuration.build(calls[0].query.shape[-1], scale=calls[0].scale, layer=0)
        self._layers = [LayerTruth(call, first=first, num_rows=_NUM_ROWS) for call in calls]
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
            maps=[method.label for method in measurements.methods],
            features=list(measurements.features),
            draws=measurements.draws,
            seed=measurements.seed,
            target=None if planned is None else planned.target,
            calibration=None if planned is None else planned.calibration,
        )

    def rows(self) -> Iterator[Row]:
        """Measure: the baselines and the ranks first, then for every configuration its heads and the whole model.

        Ranks are left out of texts with more than 1024 measured tokens, whose decompositions would take the most time.

        Cost: what `LayerTruth.rank_errors` costs; per configuration, for each layer what `LayerTruth.measure` costs,
        and one forward pass.

        Returns:
            An iterator that measures as it goes; a configuration's `ModelRow` is its last row. A plan's rows end it.

        Example:
            See `tests/lab/audit/test_measuring.py`.

        Source: none, an order.
        """
        yield self._end_to_end(EXACT, None, 0, _exact)
        yield self._end_to_end(UNIFORM, None, 0, _uniform)
        if self.header.num_tokens - self.header.first_measured <= _MOST_RANKED:
            for number, layer in enumerate(self._layers):
                yield from _rank_rows(number, layer)
        for configuration in self.measurements.configurations():
            maps = [self._build(configuration, number) for number in range(len(self._layers))]
            for number, (layer, feature_map) in enumerate(zip(self._layers, maps, strict=True)):
                yield from _head_rows(
                    configuration, number, feature_map, layer, layer.measure(configuration.method, feature_map)
                )
            answer = _linear(configuration.method, maps)
            yield self._end_to_end(configuration.method.label, maps[0].num_features, configuration.draw, answer)
        if self._planned is not None:
            yield from self._measure_plans(self._planned.plans)

    def _measure_plans(self, plans: Sequence[Plan]) -> Iterator[Row]:
        """One row per head, then the whole model."""
        for number, (layer, plan) in enumerate(zip(self._layers, plans, strict=True)):
            call = layer.call
            errors = layer.error(plan.attend(call.query, call.key, call.value)).tolist()
            for head, (chosen, error) in enumerate(zip(plan.heads, errors, strict=True)):
                yield PlanRow(
                    layer=number,
                    head=head,
                    method=chosen.method,
                    expected_error=chosen.expected_error,
                    next_order_error=chosen.next_order_error,
                    error=error,
                    uniform_error=float(layer.uniform_error[head]),
                    state_numbers=chosen.state_numbers,
                    flops_per_token=chosen.flops_per_token,
                )
        yield self._end_to_end(
            PLANNED, None, 0, lambda call: plans[call.layer].attend(call.query, call.key, call.value)
        )

    def _record(self) -> tuple[Tensor, tuple[AttentionCall, ...]]:
        """The model's output and its attention calls, which must be plain self-attention on one unpadded text."""
        recorded = capture(self._model, self._inputs)
        for call in recorded.calls:
            if call.key_mask is not None or call.query.shape[2] != call.key.shape[2]:
                raise ValueError(
                    f"{call.module_name} is not self-attention over one unpadded text; audit another model"
                )
        return recorded.output, recorded.calls

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
        with torch.no_grad(), intercept(self._model, answer):
            output: Tensor = self._model(**self._inputs)[0]
        first = self.header.first_measured
        ours, exact = output[0, first:].double(), self._output[0, first:].double()
        embedding = _cosine(ours.mean(0), exact.mean(0))
        return ModelRow(label, features, draw, float(embedding), float(_cosine(ours, exact).mean()))


def _head_rows(
    configuration: Configuration, layer: int, feature_map: FeatureMap, truth: LayerTruth, measured: Measurement
) -> Iterator[HeadRow]:
    """One row per head of a layer."""
    seed = configuration.first_seed + layer if configuration.method.map.is_random else None
    method, value_dim = configuration.method, truth.call.value.shape[-1]
    numbers = state_numbers(method, feature_map, value_dim=value_dim)
    flops = flops_per_token(method, feature_map, value_dim=value_dim, is_causal=truth.call.is_causal)
    for head in range(len(measured.error)):
        yield HeadRow(
            layer=layer,
            head=head,
            map=configuration.method.label,
            features=feature_map.num_features,
            draw=configuration.draw,
            seed=seed,
            error=float(measured.error[head]),
            uniform_error=float(truth.uniform_error[head]),
            total_variation=float(measured.total_variation[head]),
            uniform_total_variation=float(truth.uniform_total_variation[head]),
            kl=_existing(measured.kl[head]),
            uniform_kl=_existing(truth.uniform_kl[head]),
            query_norm=float(measured.query_norm[head]),
            key_norm=float(measured.key_norm[head]),
            sum_square=float(measured.sum_square[head]),
            logit_std=float(truth.logit_std[head]),
            predicted_ratio=_existing(measured.predicted_ratio[head]),
            state_numbers=numbers,
            flops_per_token=flops,
        )


def _rank_rows(layer: int, truth: LayerTruth) -> Iterator[RankRow]:
    """The limit of every rank on every head of a layer."""
    value_dim = truth.call.value.shape[-1]
    ranks = [rank for rank in _RANKS if rank <= truth.call.query.shape[2] - truth.first]
    for rank, errors in zip(ranks, truth.rank_errors(ranks), strict=True):
        for head, error in enumerate(errors.tolist()):
            yield RankRow(layer, head, rank, rank * (value_dim + 1), error)


def _existing(value: Tensor) -> float | None:
    """A number, or None for nan: what does not exist."""
    return None if bool(value.isnan()) else float(value)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between vectors of the last dimension; no epsilon."""
    sizes: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return (a * b).sum(-1) / sizes


def _exact(call: AttentionCall) -> Tensor:
    """Softmax attention itself."""
    return softmax_attention(
        call.query, call.key, call.value, is_causal=call.is_causal, scale=call.scale, enable_gqa=True
    )


def _uniform(call: AttentionCall) -> Tensor:
    """The plain mean of the visible values."""
    _, num_heads, num_queries, _ = call.query.shape
    return uniform_average(call.value, num_heads=num_heads, num_queries=num_queries, is_causal=call.is_causal)


def _linear(method: Method, maps: list[FeatureMap]) -> Callable[[AttentionCall], Tensor]:
    """A method with one map per layer."""

    def answer(call: AttentionCall) -> Tensor:
        """One layer's answer; bidirectional maps take their statistics from the queries and keys that arrive."""
        feature_map = maps[call.layer]
        if not bool(call.query.isfinite().all() & call.key.isfinite().all()):
            # An earlier layer's signed map divided by 0: there is nothing left to fit or to attend to.
            return call.query.new_full((*call.query.shape[:-1], call.value.shape[-1]), torch.nan)
        if not call.is_causal:
            fit(feature_map, call.query, call.key)
        return method.attend(feature_map, call.query, call.key, call.value, is_causal=call.is_causal)

    return answer
