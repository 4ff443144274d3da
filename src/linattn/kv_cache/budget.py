"""How many merged keys fit into a number of bytes, everything that a stream keeps counted.

Letters: D head width, Dv value width, G query heads of a key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass

from linattn.kv_cache.codes import Layout, coded_bytes
from linattn.kv_cache.config import Bits, MergedKV
from linattn.kv_cache.query_sample import sample_size

NEAR = (0.15, 0.25, 0.5)
"""Shares of merged keys' room that the window takes with a block, of which one is measured each."""

BITS_BY_DEFAULT = 4
"""Of merged keys and values, where nothing is said."""

# What a window is best at on real text, its block included, and at most: more bytes are better spent on merged keys.
_WINDOW, _SHARE = 256, 0.5
# The window's share beside merged keys in few bits, which hold several times as many.
_FEW_BITS_SHARE = NEAR[0]
# Keys of a budget for each sink, of which there are four at most.
_KEYS_PER_SINK = 16
# Keys of a budget at most: no model has a text as long.
_MOST = 2**20


@dataclass(frozen=True)
class Sizes:
    """The widths of a layer's keys and values, and what a number takes.

    Attributes:
        head_dim: D.
        value_dim: Dv.
        number_bytes: bytes of a number in keys and values.
        num_groups: G, query heads of a key/value head.
    """

    head_dim: int
    value_dim: int
    number_bytes: int = 4
    num_groups: int = 1

    @property
    def statistic_bytes(self) -> int:
        """Bytes of a number that sums many: never fewer than four."""
        return max(self.number_bytes, 4)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value, the unit in which budgets are said.

        Example:
            >>> Sizes(256, 256).key_bytes
            2048
        """
        return (self.head_dim + self.value_dim) * self.number_bytes


def check_budget(budget: int) -> None:
    """Refuse budgets of no key, and beyond any text."""
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= _MOST:
        raise ValueError(f"budget must be from 1 to {_MOST} keys, got {budget}")


def within_budget(
    budget: int, sizes: Sizes, bits: Bits | None = BITS_BY_DEFAULT, near: float | None = None
) -> MergedKV:
    """The sinks, the window and the most merged keys in the bytes of a number of exact keys and their values.

    Args:
        budget: in exact keys of one key/value head.
        sizes: of the layer.
        bits: of merged keys and values, or of both; None for 32 a number.
        near: share of the bytes that the window takes with a block; None for 15 %, and beside merged keys in 32 bits
            for that of 256 keys, half of the bytes at most.

    Raises:
        ValueError: if the budget is out of range, or leaves no room beside the sampled queries.

    Example:
        >>> within_budget(512, Sizes(64, 64)).label, within_budget(512, Sizes(64, 64), bits=None).label
        ('sinks 4 + window 37 + merged 2605 in 4 bits', 'sinks 4 + window 200 + merged 250')
    """
    check_budget(budget)
    if near is None:
        near = min(_WINDOW / budget, _SHARE) if bits is None else _FEW_BITS_SHARE
    return within_bytes(budget * sizes.key_bytes, sizes, near, bits)


def within_bytes(num_bytes: int, sizes: Sizes, near: float, bits: Bits | None) -> MergedKV:
    """The most merged keys in so many bytes; a window and its block take the share `near` of all."""
    whole = _near_bytes(sizes)
    num_sinks = min(num_bytes // sizes.key_bytes // _KEYS_PER_SINK, MergedKV.num_sinks)
    room = num_bytes - _shared_bytes(sizes, bits) - num_sinks * whole
    widths = range(max(int(room * near / whole), 0), 0, -1)
    window = next((width for width in widths if _near(width) * whole <= room * near), 1)
    num_merged = (room - _near(window) * whole) // _merged_bytes(sizes, bits)
    if num_merged < 1:
        raise ValueError(
            f"{max(room, 0):,} bytes are left beside the sampled queries, too few for a window and merged keys; "
            "give more bytes"
        )
    return MergedKV(window, num_merged, bits, num_sinks)


def kept_bytes(config: MergedKV, sizes: Sizes, num_tokens: int) -> int:
    """The most that a stream keeps per key/value head within so many tokens.

    Keys, values and biases of the sinks, the window, a block and the merged keys, and what is kept once per head.
    """
    blocks = config.blocks
    # Of a block so far: when it is most depends on whether merged keys are wider than those near.
    return max(_kept(config, sizes, blocks.window + number + 1, num_tokens) for number in range(blocks.size))


def _kept(config: MergedKV, sizes: Sizes, most_near: int, num_tokens: int) -> int:
    """Bytes where so many keys are near at most, and all others but the sinks are merged."""
    near = min(most_near, num_tokens)
    sinks = min(config.num_sinks, num_tokens - near)
    merged = min(config.num_merged, num_tokens - near - sinks)
    bits = None if merged <= config.num_unquantized else config.bits
    return (near + sinks) * _near_bytes(sizes) + merged * _merged_bytes(sizes, bits) + _shared_bytes(sizes, bits)


def _near(window: int | None) -> int:
    """Keys of a window and a block."""
    blocks = MergedKV(window, 1).blocks
    return blocks.window + blocks.size


def _near_bytes(sizes: Sizes) -> int:
    """A key and its value in the model's numbers, and a bias."""
    return sizes.key_bytes + sizes.statistic_bytes


def _merged_bytes(sizes: Sizes, bits: Bits | None) -> int:
    """A merged key and its value, and the bias."""
    if bits is None:
        return (sizes.head_dim + sizes.value_dim + 1) * sizes.statistic_bytes
    of_key, of_value = bits if isinstance(bits, tuple) else (bits, bits)
    return coded_bytes(sizes.head_dim, of_key) + coded_bytes(sizes.value_dim, of_value) + sizes.statistic_bytes


def _shared_bytes(sizes: Sizes, bits: Bits | None) -> int:
    """A head's sampled queries, which are there, and in few bits the frames of keys and of values."""
    sample = sample_size(sizes.num_groups) * (sizes.head_dim * sizes.statistic_bytes + 1)
    frames = sum(frame_bytes(width, sizes.statistic_bytes) for width in (sizes.head_dim, sizes.value_dim))
    return sample + (0 if bits is None else frames)


def frame_bytes(width: int, number_bytes: int) -> int:
    """Bytes of what rows of a width are quantized relative to.

    Example:
        >>> frame_bytes(256, 4)  # means and deviations, an order in 16 bits, and bits of 8 blocks
        2568
    """
    layout = Layout.of(width)
    return 2 * width * number_bytes + 2 * layout.size + layout.number
