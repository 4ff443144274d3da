"""All contenders at a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from linattn.lab.contenders.attention_matching import AttentionMatching
from linattn.lab.contenders.contender import Contender, Sizes
from linattn.lab.contenders.eviction import SINKS
from linattn.lab.contenders.expected_attention import ExpectedAttention
from linattn.lab.contenders.h2o import H2O
from linattn.lab.contenders.keydiff import KeyDiff
from linattn.lab.contenders.kivi import Kivi
from linattn.lab.contenders.merged import Merged
from linattn.lab.contenders.moment_kv import MomentKV
from linattn.lab.contenders.tova import Tova
from linattn.lab.contenders.uniform_sample import UniformSample
from linattn.lab.contenders.windows import FarPartOff, SinksAndWindow

NEAR = (0.15, 0.25, 0.5)
"""Shares of merged keys' room that the window takes with a block, of which one is measured each."""

FEW_BITS = (8, 4)
"""Of merged keys that are measured in few bits, beside the first share."""


def _far_off(num_bytes: int, sizes: Sizes, near: float) -> FarPartOff:
    """The window of merged keys in so many bytes, without them."""
    exact = Merged.within(num_bytes, sizes, near).exact
    return FarPartOff(exact.cost(is_causal=True).kept - exact.num_merged + SINKS)


KINDS: dict[str, Callable[[int, Sizes], Contender]] = {
    "sinks + window": SinksAndWindow.within,
    **{f"merged keys, {near:.0%} near": partial(Merged.within, near=near) for near in NEAR},
    "far part off": partial(_far_off, near=NEAR[-1]),
    "uniform sample": UniformSample.within,
    "H2O": H2O.within,
    "TOVA": Tova.within,
    "KeyDiff": KeyDiff.within,
    "Expected Attention": ExpectedAttention.within,
    "MomentKV": MomentKV.within,
    "attention matching": AttentionMatching.within,
    **{f"KIVI, {bits} bit": partial(Kivi.within, bits=bits) for bits in (8, 4, 2)},
    **{f"merged keys in {bits} bits": partial(Merged.within, near=NEAR[0], bits=bits) for bits in FEW_BITS},
}
"""By name, what makes the largest contender of a kind from a number of bytes and a layer's sizes.

Two kinds are controls that decide about merged keys: "sinks + window" has the far part's bytes in exact keys, "far part
off" has but the sinks in its place, beside the wider of the windows.
"""


class Shelf(NamedTuple):
    """What `at_budget` returns.

    Attributes:
        contenders: by name, the largest that fit.
        left_out: by name, why the others do not.
    """

    contenders: dict[str, Contender]
    left_out: dict[str, str]


def at_budget(num_keys: int, sizes: Sizes, kinds: tuple[str, ...] = tuple(KINDS)) -> Shelf:
    """The largest contender of each kind in the bytes of so many exact keys, all that it keeps counted.

    Args:
        num_keys: the budget, in exact keys and values of a key/value head.
        sizes: of the layer.
        kinds: names among `KINDS`.

    Returns:
        A `Shelf`.

    Raises:
        ValueError: if the budget is below 1, or a kind is unknown.

    Example:
        >>> shelf = at_budget(512, Sizes(64, 64))
        >>> shelf.contenders["sinks + window"].label, shelf.contenders["merged keys, 50% near"].label
        ('sinks 4 + window 508', 'window 200 + merged 250')
        >>> at_budget(64, Sizes(256, 256)).left_out["MomentKV"]
        'holds -65 keys in the bytes of 64, beside what it keeps of all others; it wants 32: give more bytes'
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if num_keys < 1:
        raise ValueError(f"budget must be 1 key or more, got {num_keys}")
    if unknown:
        raise ValueError(f"kinds must be among {', '.join(KINDS)}; got {', '.join(unknown)}")
    found: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    for kind in kinds:
        try:
            contender = KINDS[kind](num_keys * sizes.key_bytes, sizes)
        except ValueError as error:
            left_out[kind] = str(error)
            continue
        if contender.num_held < contender.fewest:
            left_out[kind] = (
                f"holds {contender.num_held} keys in the bytes of {num_keys}, beside what it keeps of all others; it "
                f"wants {contender.fewest}: give more bytes"
            )
        else:
            found[kind] = contender
    return Shelf(found, left_out)
