"""The calls of one way to attend, by a map and a window or with merged keys; grouped heads are allowed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

import linattn
from linattn import Partial
from linattn.feature_maps import FeatureMap
from linattn.softmax.row_groups import RowGroups

State = linattn.State | linattn.MergedState


class Attention(NamedTuple):
    """What may be asked of it.

    Attributes:
        rows: outputs of queries, keys and values.
        partial: with log-normalisers.
        stream: outputs, and the state after them.
        stream_partial: with log-normalisers.
        read: log-normalisers and outputs of queries over a state.
    """

    rows: Callable[..., Tensor]
    partial: Callable[..., Partial]
    stream: Callable[..., linattn.Attended]
    stream_partial: Callable[..., linattn.AttendedPartial]
    read: Callable[[State, Tensor], Partial]


def by_map(feature_map: FeatureMap, window: int | None = None) -> Attention:
    """By a map, with a window or without."""
    calls = (
        linattn.linear_attention,
        linattn.linear_partial,
        linattn.linear_attention_with_state,
        linattn.linear_partial_with_state,
    )
    options = {"feature_map": feature_map, "window": window, "enable_gqa": True}
    return Attention(*(partial(call, **options) for call in calls), lambda state, query: state.read(feature_map, query))


def by_merging(config: linattn.MergedKV) -> Attention:
    """With merged keys."""
    calls = (
        linattn.merged_attention,
        linattn.merged_partial,
        linattn.merged_attention_with_state,
        linattn.merged_partial_with_state,
    )
    options = {"config": config, "enable_gqa": True}
    return Attention(*(partial(call, **options) for call in calls), lambda state, query: state.read(query))


def is_grouped(state: State) -> bool:
    """Whether rows of the batch began at different tokens."""
    return isinstance(state.keys if isinstance(state, linattn.MergedState) else state.window, RowGroups)
