"""How deep a call goes before it computes, in frames of the library's own functions, counted as Python runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import linattn
from grid import qkv
from linattn.feature_maps import FavorPlus

LIBRARY = str(Path(linattn.__file__).parent)
MAPS = str(Path(linattn.feature_maps.__file__).parent)
EXPONENTIALS = ("exp", "exp_", "exp2", "exp2_")


def deepest(call: Callable[[], object]) -> dict[str, int]:
    """The most of the library's frames, each counted, in which an exponential is taken, or the map is entered."""
    depth, found = 0, {"exponential": 0, "map": 0}

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        name = frame.f_code.co_filename
        if event == "c_call" and getattr(argument, "__name__", "") in EXPONENTIALS:
            found["exponential"] = max(found["exponential"], depth)
        elif event == "return" and name.startswith(LIBRARY):
            depth -= 1
        elif event == "call" and name.startswith(LIBRARY):
            depth += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            if name.startswith(MAPS) and not caller.startswith(MAPS):
                found["map"] = max(found["map"], depth)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(("is_causal", "most"), [(False, 7), (True, 8)])
def test_few_frames_lead_to_features(is_causal: bool, most: int) -> None:
    """From `linear_attention`, the first, to the map's function, and to the one that takes an exponential."""
    feature_map, tokens = FavorPlus(8, 12), qkv(heads=2, dtype=torch.float32)
    found = deepest(lambda: linattn.linear_attention(*tokens, feature_map, is_causal=is_causal, backend="blocked"))
    assert all(1 < depth <= most for depth in found.values()), found
