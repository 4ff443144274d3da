"""Operations counted while they run: a formula for the cost is not taken on trust."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

# Products written over what they are added to, which torch itself leaves out.
_IN_PLACE = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)


def operations(call: Callable[[], object]) -> int:
    """Operations of the matrix products in a call, a multiply-add being two; elementwise work is not counted."""
    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_IN_PLACE, _of_product)) as counter:
        call()
    return int(counter.get_total_flops())


def _of_product(_: object, first: tuple[int, ...], second: tuple[int, ...], **__: object) -> int:
    """Of a product of matrices of these shapes."""
    return 2 * math.prod(first) * second[-1]
