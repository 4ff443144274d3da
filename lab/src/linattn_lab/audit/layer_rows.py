"""One layer's figures as rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from linattn_lab.audit.grid import Configuration
from linattn_lab.audit.records import HeadRow, RankRow
from linattn_lab.audit.truth import HeadErrors, LayerTruth
from linattn_lab.built_methods import BuiltMethod
from linattn_lab.costs import flops_per_token, state_numbers

RANKS = tuple(2**power for power in range(9))


def head_rows(
    configuration: Configuration, layer: int, built: BuiltMethod, truth: LayerTruth, measured: HeadErrors
) -> Iterator[HeadRow]:
    """One row per head of a layer."""
    seed = configuration.first_seed + layer if configuration.method.is_random else None
    value_dim = truth.call.value.shape[-1]
    numbers = state_numbers(built, value_dim=value_dim, is_causal=truth.call.is_causal)
    flops = flops_per_token(built, value_dim=value_dim, is_causal=truth.call.is_causal)
    for head in range(len(measured.error)):
        yield HeadRow(
            layer=layer,
            head=head,
            map=configuration.method.label,
            features=built.num_features,
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


def ranks(truth: LayerTruth) -> list[int]:
    """The ranks that are measured: those the measured rows may have."""
    return [rank for rank in RANKS if rank <= truth.call.query.shape[2] - truth.first]


def _existing(value: Tensor) -> float | None:
    """A number, or None for nan: what does not exist."""
    return None if bool(value.isnan()) else float(value)
