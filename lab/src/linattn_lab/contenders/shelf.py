"""All contenders at a budget of bytes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from linattn.kv_cache.budget import NEAR, Sizes
from linattn.kv_cache.layer_plans import PLAIN
from linattn_lab.constant_memory.candidates import CANDIDATES, MERGED, MERGED_IN_FEW_BITS, Maker, filled
from linattn_lab.contenders.attention_matching import AttentionMatching
from linattn_lab.contenders.contender import Contender
from linattn_lab.contenders.expected_attention import ExpectedAttention
from linattn_lab.contenders.far_part_off import FarPartOff
from linattn_lab.contenders.h2o import H2O
from linattn_lab.contenders.keydiff import KeyDiff
from linattn_lab.contenders.kivi import Kivi
from linattn_lab.contenders.merged import Merged
from linattn_lab.contenders.moment_kv import MomentKV
from linattn_lab.contenders.tova import Tova
from linattn_lab.contenders.uniform_sample import UniformSample
from linattn_lab.contenders.windows import SINKS


def _far_off(num_bytes: int, sizes: Sizes, near: float) -> FarPartOff:
    """The window of merged keys in so many bytes, without them."""
    blocks = Merged.within(num_bytes, sizes, near).config.blocks
    return FarPartOff(blocks.window + blocks.size + SINKS)


KINDS: dict[str, Maker] = {
    PLAIN: CANDIDATES[PLAIN],
    **MERGED,
    "far part off": partial(_far_off, near=NEAR[-1]),
    "uniform sample": UniformSample.within,
    "H2O": H2O.within,
    "TOVA": Tova.within,
    "KeyDiff": KeyDiff.within,
    "Expected Attention": ExpectedAttention.within,
    "MomentKV": MomentKV.within,
    "attention matching": AttentionMatching.within,
    **{f"KIVI, {bits} bit": partial(Kivi.within, bits=bits) for bits in (8, 4, 2)},
    **MERGED_IN_FEW_BITS,
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
            found[kind] = filled(KINDS[kind], num_keys, sizes)
        except ValueError as error:
            left_out[kind] = str(error)
    return Shelf(found, left_out)
