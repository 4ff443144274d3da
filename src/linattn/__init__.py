"""Bounded KV caches and linear attention for PyTorch, with the error of both measured on your model."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# Whether this process is the `linattn` command, by its script or by `python -m linattn`; asked once, since Python names
# the module's file as its first word only after this import.
_WORDS = sys.argv or [""]
_IS_COMMAND = (sys.orig_argv[-len(_WORDS)] if _WORDS[0] == "-m" else Path(_WORDS[0]).stem) == "linattn"

# The command imports torch when a subcommand runs: help and wrong words are not to wait for it. Elsewhere all is
# imported at once: `import linattn` is what lets torch.load read states.
if TYPE_CHECKING or not _IS_COMMAND:
    from linattn import feature_maps as feature_maps
    from linattn import nn as nn
    from linattn import positions as positions
    from linattn.attention import State as State
    from linattn.attention import attention_rows as attention_rows
    from linattn.attention import linear_attention as linear_attention
    from linattn.attention import linear_attention_packed as linear_attention_packed
    from linattn.attention import linear_attention_packed_with_state as linear_attention_packed_with_state
    from linattn.attention import linear_attention_with_state as linear_attention_with_state
    from linattn.attention import linear_partial as linear_partial
    from linattn.attention import linear_partial_with_state as linear_partial_with_state
    from linattn.feature_maps import FEATURE_MAPS as FEATURE_MAPS
    from linattn.kv_cache import MergedKV as MergedKV
    from linattn.kv_cache import MergedState as MergedState
    from linattn.kv_cache import merged_attention as merged_attention
    from linattn.kv_cache import merged_attention_with_state as merged_attention_with_state
    from linattn.kv_cache import merged_partial as merged_partial
    from linattn.kv_cache import merged_partial_with_state as merged_partial_with_state
    from linattn.softmax import Attended as Attended
    from linattn.softmax import AttendedPartial as AttendedPartial
    from linattn.softmax import Partial as Partial
    from linattn.softmax import combine as combine
    from linattn.softmax import softmax_attention as softmax_attention
    from linattn.softmax import softmax_partial as softmax_partial

if TYPE_CHECKING:
    from linattn import parallel as parallel

__version__ = "0.1.0"

_ROOMS = ("attention", "feature_maps", "kv_cache", "softmax")


def __getattr__(name: str) -> object:
    """A package inside this one, or in the command a name of theirs, imported when it is asked for."""
    # `linattn.parallel` loads torch's distributed tensors, half of torch again.
    if not name.startswith("_"):
        if find_spec(f"linattn.{name}") is not None:
            return import_module(f"linattn.{name}")
        for room in _ROOMS if _IS_COMMAND else ():
            names = vars(import_module(f"linattn.{room}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module 'linattn' has no attribute {name!r}")
