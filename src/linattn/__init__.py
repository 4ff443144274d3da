"""Kernel attention in linear time that always says how wrong it is."""

from importlib import import_module
from typing import TYPE_CHECKING

from linattn import feature_maps as feature_maps
from linattn import nn as nn
from linattn import positions as positions
from linattn.attention import Attended as Attended
from linattn.attention import AttendedPartial as AttendedPartial
from linattn.attention import State as State
from linattn.attention import attention_rows as attention_rows
from linattn.attention import linear_attention as linear_attention
from linattn.attention import linear_attention_packed as linear_attention_packed
from linattn.attention import linear_attention_packed_with_state as linear_attention_packed_with_state
from linattn.attention import linear_attention_with_state as linear_attention_with_state
from linattn.attention import linear_partial as linear_partial
from linattn.attention import linear_partial_with_state as linear_partial_with_state
from linattn.feature_maps import FEATURE_MAPS as FEATURE_MAPS
from linattn.kv_cache import MergedAttended as MergedAttended
from linattn.kv_cache import MergedKV as MergedKV
from linattn.kv_cache import MergedPartial as MergedPartial
from linattn.kv_cache import MergedState as MergedState
from linattn.kv_cache import merged_attention as merged_attention
from linattn.kv_cache import merged_attention_with_state as merged_attention_with_state
from linattn.kv_cache import merged_partial as merged_partial
from linattn.kv_cache import merged_partial_with_state as merged_partial_with_state
from linattn.softmax import Partial as Partial
from linattn.softmax import combine as combine
from linattn.softmax import softmax_attention as softmax_attention
from linattn.softmax import softmax_partial as softmax_partial

if TYPE_CHECKING:
    from linattn import parallel as parallel

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`linattn.parallel`, imported when it is asked for: it loads torch's distributed tensors, half of torch again."""
    if name == "parallel":
        return import_module("linattn.parallel")
    raise AttributeError(f"module 'linattn' has no attribute {name!r}")
