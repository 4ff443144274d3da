"""One layer's figures as rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from linattn_lab.audit.grid import Configuration, is_random
from linattn_lab.audit.records import HeadRow, RankRow
from linattn_lab.audit.truth import HeadErrors, LayerTruth
from linattn_lab.built_methods import BuiltMethod
from linattn_lab.costs import flops_per_token, state_numbers

RANKS = tuple(2**power for power in range(9))


def head_rows(
    configuration: Configuration, layer: int, built: BuiltMethod, truth: LayerTruth, measured: HeadErrors
) -> Iterator[HeadRow]:
    """One row per head of a layer."""
    seed = configuration.first_seed + layer if is_random(configuration.method.map) else None
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


def rank_rows(layer: int, truth: LayerTruth) -> list[RankRow]:
    """The limit of every rank on every head, on one thread: several on a busy machine take many times as long."""
    chosen, num_numbers, threads = ranks(truth), truth.call.value.shape[-1] + 1, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        errors = truth.rank_errors(chosen).tolist()
    finally:
        torch.set_num_threads(threads)
    return [
        RankRow(layer, head, rank, rank * num_numbers, error)
        for rank, by_head in zip(chosen, errors, strict=True)
        for head, error in enumerate(by_head)
    ]


def ranks(truth: LayerTruth) -> list[int]:
    """The ranks that are measured: those the measured rows may have."""
    return [rank for rank in RANKS if rank <= truth.call.query.shape[2] - truth.first]


def _existing(value: Tensor) -> float | None:
    """A number, or None for nan: what does not exist."""
    return None if bool(value.isnan()) else float(value)
