"""Candidates of a plan: ways to keep a layer's keys within a budget that a converted model can have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from linattn.kv_cache.budget import NEAR, Sizes
from linattn.kv_cache.layer_plans import FEW_BITS, PLAIN
from linattn_lab.contenders.contender import Contender
from linattn_lab.contenders.merged import Merged
from linattn_lab.contenders.windows import SinksAndWindow

Maker = Callable[[int, Sizes], Contender]
"""Makes the largest contender of a kind from a number of bytes and a layer's sizes."""

MERGED: dict[str, Maker] = {f"merged keys, {near:.0%} near": partial(Merged.within, near=near) for near in NEAR}
MERGED_IN_FEW_BITS: dict[str, Maker] = {
    f"merged keys in {bits} bits": partial(Merged.within, near=NEAR[0], bits=bits) for bits in FEW_BITS
}
CANDIDATES: dict[str, Maker] = {PLAIN: SinksAndWindow.within, **MERGED, **MERGED_IN_FEW_BITS}
"""By name, the makers of what a plan chooses from, the plain window first."""


def filled(make: Maker, num_keys: int, sizes: Sizes) -> Contender:
    """The largest contender of a kind in the bytes of so many exact keys, all that it keeps counted.

    Args:
        make: of its kind.
        num_keys: the budget, in exact keys and values of a key/value head.
        sizes: of the layer.

    Returns:
        The contender.

    Raises:
        ValueError: if it holds fewer keys than it wants.

    Example:
        >>> filled(CANDIDATES[PLAIN], 512, Sizes(64, 64)).label
        'sinks 4 + window 508'
    """
    contender = make(num_keys * sizes.key_bytes, sizes)
    if contender.num_held < contender.fewest:
        raise ValueError(
            f"holds {contender.num_held} keys in the bytes of {num_keys}, beside what it keeps of all others; it "
            f"wants {contender.fewest}: give more bytes"
        )
    return contender
