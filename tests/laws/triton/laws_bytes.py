"""How many bytes the kernels move for each token and head, counted at their own loads and stores, one address once a
kernel: what has to come from memory, a GPU's second-level cache taking the rest. Weights, which stay there, count not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

import linattn
from linattn.feature_maps import FavorPlus, FeatureMap
from linattn_triton import launching, tiles
from linattn_triton.kernels.blocks import Side

WIDTH, FEATURES, BLOCK, SHORT = 64, 256, 64, 2
TOKENS, SUMS = SHORT * WIDTH, SHORT * FEATURES * WIDTH / BLOCK
# What each kernel of this division of labour cannot do without: tokens in and out, and a state for each block.
FLOOR = {
    "key_offsets": TOKENS + 4,
    "key_states": 2 * TOKENS + SUMS,
    "row_outputs": 4 * TOKENS + SUMS + 8,
    "state_gradients": 2 * TOKENS + SUMS + 8,
    "query_gradients": 5 * TOKENS + SUMS,
    "key_gradients": 6 * TOKENS + SUMS,
}
FORWARD = ("key_offsets", "key_states", "row_outputs")


class Meter:
    """Counts the bytes of each kernel's launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        self._seen: list[tuple[np.ndarray, int]] = []
        builder, run = interpreter.InterpreterBuilder, launching.launch
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(this: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._note(pointers, mask)
            return load(this, pointers, mask, *rest)

        def counted_store(this: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._note(pointers, mask)
            return store(this, pointers, value, mask, *rest)

        def counted_launch(kernel: Any, programs: int, arguments: Any, tuning: tiles.Tuning) -> None:
            self._seen.clear()
            run(kernel, programs, arguments, tuning)
            if programs:
                self.bytes[kernel.__name__] += self._moved(arguments)

        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_masked_store", counted_store)
        monkeypatch.setattr(launching, "launch", counted_launch)

    def _note(self, pointers: Any, mask: Any) -> None:
        """The addresses of the lanes that are not masked."""
        self._seen.append(np.unique(pointers.data[mask.data.astype(bool)]))

    def _moved(self, arguments: Any) -> int:
        """Bytes, those of tokens and kept states as bfloat16 has them, which an interpreter holds in float32."""
        addresses, found = np.unique(np.concatenate(self._seen)), 0
        for tensor in tensors(arguments):
            first = tensor.data_ptr()
            inside = (addresses >= first) & (addresses < first + tensor.untyped_storage().nbytes())
            is_short = tensor.ndim >= 3 and tensor.shape[-1] == WIDTH
            found += int(inside.sum()) * (SHORT if is_short else tensor.element_size())
        return found


def tensors(arguments: Any) -> list[torch.Tensor]:
    """All tensors of a launch but the weights, each once."""
    found: dict[int, torch.Tensor] = {}
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found[argument.data_ptr()] = argument
        elif isinstance(argument, tuple) and not isinstance(argument, Side):
            found |= {x.data_ptr(): x for x in tensors(argument)}
    return list(found.values())


def measured(feature_map: FeatureMap, length: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes of each kernel, forward and backward, of one head."""
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "sizes", lambda *_, **__: (64, BLOCK))
        meter = Meter(patch)
        leaves = [torch.randn(1, 1, length, WIDTH, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        linattn.linear_attention(*leaves, feature_map, is_causal=True, backend="triton").sum().backward()
    return meter.bytes


# These laws run on a GPU as well, where the kernels' loads and stores are not functions that can be counted.
@pytest.mark.skipif(not tiles.IS_INTERPRETED, reason="loads are counted in the interpreter")
def test_kernels_move_at_most_a_third_more_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two lengths the difference, so that what a call moves once does not count."""
    feature_map, again = FavorPlus(WIDTH, FEATURES), ("key_offsets", "key_states")
    short, long = (measured(feature_map, blocks * BLOCK, monkeypatch) for blocks in (2, 4))
    # What is found once more for the backward pass: the keys' offsets and the states.
    moved = {name: (long[name] - short[name]) / (2 * BLOCK) / (1 + (name in again)) for name in long}
    assert set(moved) - {"row_gradients"} == set(FLOOR)
    for name, floor in FLOOR.items():
        assert floor * 0.99 <= moved[name] <= 1.3 * floor, (name, moved[name], floor)
    forward, needed = (sum(found[name] for name in FORWARD) for found in (moved, FLOOR))
    assert forward <= 1.3 * needed
    backward = sum(moved.values()) - forward + sum(moved[name] for name in again)
    assert backward <= 1.3 * (sum(FLOOR.values()) - needed + FLOOR[again[-1]])
