"""Operations counted while they run: a formula for the cost is not taken on trust."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode


def operations(call: Callable[[], object]) -> int:
    """Operations of the matrix products in a call, a multiply-add being two; elementwise work is not counted."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
