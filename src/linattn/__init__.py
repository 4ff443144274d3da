"""Kernel attention in linear time that always says how wrong it is."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linattn import attention as attention
    from linattn import feature_maps as feature_maps
    from linattn import kv_cache as kv_cache
    from linattn import nn as nn
    from linattn import parallel as parallel
    from linattn import positions as positions
    from linattn import softmax as softmax
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

__version__ = "0.1.0"

# Imported, and torch with them, when first asked for: the command's help, and wrong options, do not wait for it.
_NAMES = {
    "attention": (
        "Attended",
        "AttendedPartial",
        "State",
        "attention_rows",
        "linear_attention",
        "linear_attention_packed",
        "linear_attention_packed_with_state",
        "linear_attention_with_state",
        "linear_partial",
        "linear_partial_with_state",
    ),
    "feature_maps": ("FEATURE_MAPS",),
    "kv_cache": (
        "MergedAttended",
        "MergedKV",
        "MergedPartial",
        "MergedState",
        "merged_attention",
        "merged_attention_with_state",
        "merged_partial",
        "merged_partial_with_state",
    ),
    "softmax": (
        "Partial",
        "combine",
        "softmax_attention",
        "softmax_partial",
    ),
}
_PACKAGES = ("attention", "feature_maps", "kv_cache", "nn", "parallel", "positions", "softmax")
__all__ = [*_PACKAGES, *(name for names in _NAMES.values() for name in names)]


def __getattr__(name: str) -> object:
    """A public name of a package inside this one, or such a package."""
    package = name if name in _PACKAGES else next((home for home, names in _NAMES.items() if name in names), None)
    if package is None:
        raise AttributeError(f"module 'linattn' has no attribute {name!r}")
    module = import_module(f"linattn.{package}")
    value = module if package == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, those not yet imported among them."""
    return sorted({*globals(), *__all__})
