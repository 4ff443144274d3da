"""One layer's figures as rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.lab.audit.grid import Configuration
from linattn.lab.audit.records import HeadRow, PlanRow, RankRow
from linattn.lab.audit.truth import HeadErrors, LayerTruth
from linattn.planning import Plan
from linattn.planning.costs import flops_per_token, state_numbers

RANKS = tuple(2**power for power in range(9))


def head_rows(
    configuration: Configuration, layer: int, feature_map: FeatureMap, truth: LayerTruth, measured: HeadErrors
) -> Iterator[HeadRow]:
    """One row per head of a layer."""
    seed = configuration.first_seed + layer if configuration.method.is_random else None
    method, value_dim = configuration.method, truth.call.value.shape[-1]
    numbers = state_numbers(method, feature_map, value_dim=value_dim, is_causal=truth.call.is_causal)
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


def rank_rows(layer: int, truth: LayerTruth) -> Iterator[RankRow]:
    """The limit of every rank on every head of a layer."""
    value_dim = truth.call.value.shape[-1]
    chosen = ranks(truth)
    for rank, errors in zip(chosen, truth.rank_errors(chosen), strict=True):
        for head, error in enumerate(errors.tolist()):
            yield RankRow(layer, head, rank, rank * (value_dim + 1), error)


def plan_rows(layer: int, plan: Plan, truth: LayerTruth) -> Iterator[PlanRow]:
    """What a plan chose for each head of a layer, measured on the text of the audit."""
    call = truth.call
    errors = truth.error(plan.attend(call.query, call.key, call.value)).tolist()
    for head, (chosen, error) in enumerate(zip(plan.heads, errors, strict=True)):
        yield PlanRow(
            layer=layer,
            head=head,
            method=chosen.method,
            expected_error=chosen.expected_error,
            next_order_error=chosen.next_order_error,
            error=error,
            uniform_error=float(truth.uniform_error[head]),
            state_numbers=chosen.state_numbers,
            flops_per_token=chosen.flops_per_token,
        )


def ranks(truth: LayerTruth) -> list[int]:
    """The ranks that are measured: those the measured rows may have."""
    return [rank for rank in RANKS if rank <= truth.call.query.shape[2] - truth.first]


def _existing(value: Tensor) -> float | None:
    """A number, or None for nan: what does not exist."""
    return None if bool(value.isnan()) else float(value)
